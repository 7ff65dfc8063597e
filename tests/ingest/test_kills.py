"""Gateways and workers killed in the middle of a stream: its reader gets all of it, and nothing twice."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.record import TokenLog
from penstock.redis.client import redis_client
from sim.waiting import wait_for
from tests.gateways import EventSource, GatewayProcess, ServerSentEvent

ASKED: dict[str, Any] = {"model": "demo", "prompt": "And the king", "max_tokens": 600, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def expected(line: Stack) -> str:
    """What the pipeline answers when nobody dies."""
    with openai.OpenAI(base_url=f"{line.gateway_url}/v1", api_key="none", timeout=None) as sdk:
        text: str = sdk.completions.create(**ASKED, extra_body={"ignore_eos": True}).choices[0].text
    return text


@pytest.fixture
def doomed(line: Stack, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway beside the stack's own."""
    with GatewayProcess(line.addresses, tmp_path) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def restarted(line: Stack) -> Iterator[None]:
    """Start killed workers again: one that lived for a short time is started by a later call only."""
    yield

    def all_live() -> bool:
        line.restart_dead()
        return all(worker.child is not None and worker.child.is_alive() for worker in line.workers)

    wait_for(all_live, "the killed workers are started again")


def open_stream(url: str) -> tuple[EventSource, Iterator[ServerSentEvent]]:
    source = EventSource(f"{url}/v1/completions")
    return source, source.connect(ASKED | {"ignore_eos": True, "stream": True})


def check_events(events: list[ServerSentEvent], expected: str) -> None:
    """Every event once, with the whole text."""
    assert "".join(event.text for event in events) == expected
    assert len({event.id for event in events}) == len(events)
    assert events[-1].data == "[DONE]"


def kill_holder(line: Stack, request_id: str, after_events: int = 0) -> None:
    """Kill the decode worker that has a request, when so many events are in the log."""
    with redis_client(line.addresses.stream_url) as server:
        log = TokenLog(server, Pipeline(line.addresses.pipeline), RecordSettings())
        wait_for(lambda: len(log.read_events(request_id)) > after_events, "it is under way", every_s=0.005)
        status = log.read_status(request_id)
    assert status is not None
    assert status.stage == "decode"
    (holder,) = (worker for worker in line.workers if worker.name == status.worker_name)
    assert holder.child is not None
    holder.child.kill()


def test_a_stream_goes_on_at_another_gateway_after_the_first_was_killed(
    line: Stack, doomed: GatewayProcess, expected: str
) -> None:
    source, stream = open_stream(doomed.url)
    seen = [next(stream) for _ in range(20)]
    doomed.process.kill()
    with suppress(httpx.TransportError):
        for event in stream:
            seen.append(event)  # noqa: PERF402 - the connection ends in the middle
    assert seen[-1].data != "[DONE]"
    source.url = line.gateway_url + source.answer_headers["location"]
    check_events([*seen, *source.connect()], expected)


def test_a_stream_goes_on_after_its_decode_worker_was_killed(line: Stack, expected: str) -> None:
    source, stream = open_stream(line.gateway_url)
    seen = [next(stream) for _ in range(20)]
    request_id = seen[0].body["id"]
    kill_holder(line, request_id)
    check_events([*seen, *stream], expected)
    assert source.last_event_id == "done"
    with Client(line.addresses) as client:
        assert client.result(request_id).text == expected


def test_a_background_response_goes_on_after_its_decode_worker_was_killed(line: Stack) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "And the king", "max_output_tokens": 600, "temperature": 0.9}
    asked |= {"seed": 3, "ignore_eos": True}
    responses = f"{line.gateway_url}/v1/responses"
    expected = httpx.post(responses, json=asked, timeout=None).json()["output"][0]["content"]
    name = httpx.post(responses, json=asked | {"background": True}, timeout=None).json()["id"]
    kill_holder(line, name, after_events=20)
    wait_for(lambda: httpx.get(f"{responses}/{name}", timeout=None).json()["status"] == "incomplete", "it has ended")
    assert httpx.get(f"{responses}/{name}", timeout=None).json()["output"][0]["content"] == expected
