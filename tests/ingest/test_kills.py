"""Gateways and workers killed in the middle of a stream: its reader gets all of it, and nothing twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.record import TokenLog
from penstock.redis.client import redis_client
from tests.ingest.conftest import EventSource, Sent
from tests.ingest.gateways import GatewayProcess

ASKED: dict[str, Any] = {"model": "demo", "prompt": "And the king", "max_tokens": 300, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def expected(line: Stack) -> str:
    """What the pipeline answers when nobody dies."""
    with openai.OpenAI(base_url=f"{line.gateway_url}/v1", api_key="none", timeout=120) as sdk:
        text: str = sdk.completions.create(**ASKED, extra_body={"ignore_eos": True}).choices[0].text
    return text


@pytest.fixture
def doomed(line: Stack, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway beside the stack's own."""
    with GatewayProcess(line.addresses, tmp_path) as gateway:
        yield gateway


def posted(address: str) -> tuple[EventSource, Iterator[Sent]]:
    source = EventSource(address, "/v1/completions")
    return source, source.connect(ASKED | {"ignore_eos": True, "stream": True})


def told_until_killed(events: Iterator[Sent]) -> list[Sent]:
    """What still came."""
    told = []
    try:
        for sent in events:
            told.append(sent)  # noqa: PERF402 - the connection ends in the middle
    except (OSError, ValueError):
        pass
    return told


def test_a_stream_goes_on_at_another_gateway_after_the_first_was_killed(
    line: Stack, doomed: GatewayProcess, expected: str
) -> None:
    source, events = posted(doomed.address)
    told = [next(events) for _ in range(20)]
    doomed.process.kill()
    told += told_until_killed(events)
    assert told[-1].data != "[DONE]"
    source.address, source.path = line.gateway_url.removeprefix("http://"), source.answer_headers["location"]
    told += source.connect()
    assert "".join(sent.text for sent in told) == expected
    assert len({sent.id for sent in told}) == len(told)
    assert told[-1].data == "[DONE]"


def test_a_stream_goes_on_after_its_decode_worker_was_killed(line: Stack, expected: str) -> None:
    source, events = posted(line.gateway_url.removeprefix("http://"))
    told = [next(events) for _ in range(20)]
    with redis_client(line.addresses.stream_url) as server:
        log = TokenLog(server, Pipeline(line.addresses.pipeline), RecordSettings())
        status = log.read_status(json.loads(told[0].data)["id"])
        assert status is not None
        assert status.stage == "decode"
    (holder,) = (worker for worker in line.workers if worker.name == status.worker_name)
    assert holder.child is not None
    holder.child.kill()
    told += events
    assert "".join(sent.text for sent in told) == expected
    assert len({sent.id for sent in told}) == len(told)
    assert source.last_event_id == "done"
    with Client(line.addresses) as client:
        assert client.result(json.loads(told[0].data)["id"]).text == expected
    line.restart_dead()
