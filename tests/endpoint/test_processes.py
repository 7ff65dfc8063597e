"""A stack of processes, as `penstock up --engine-kind openai` starts it: workers, endpoint and gateway are killed."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.cli.up import build_endpoint_environment
from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.errors import AnswerInterrupted
from penstock.local.processes import Child, find_free_port, start_child
from penstock.names import Pipeline
from penstock.record import TokenLog
from penstock.redis.client import redis_client
from sim.endpoint import MODEL, CountingEndpoint, Fault, write_numbers
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for
from tests.gateways import EventSource

CHOICES = ("continue", "restart-if-unseen", "fail")


@pytest.fixture
def slow() -> Iterator[CountingEndpoint]:
    """An endpoint that takes its time for each piece."""
    with CountingEndpoint(pause_s=0.01) as endpoint:
        yield endpoint


def make_stack(
    directory: Path, redis_url: str, pipeline: Pipeline, url: str, gateway: int | None = None, choice: str = "continue"
) -> ForkedStack:
    environment = build_endpoint_environment([url]) | {"PENSTOCK_ENDPOINT_INTERRUPTED": choice}
    return ForkedStack(
        directory, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, endpoint=2, gateway=gateway,
        environment=environment,
    )  # fmt: skip


def kill_holder(stack: ForkedStack, request_id: str) -> None:
    with redis_client(stack.addresses.stream_url) as server:
        status = TokenLog(server, Pipeline(stack.addresses.pipeline), RecordSettings()).read_status(request_id)
    assert status is not None
    (holder,) = (worker for worker in stack.workers if worker.name == status.worker_name)
    assert holder.child is not None
    holder.child.kill()
    stack.restart_dead()
    holder.was_ready = False


@pytest.mark.parametrize("choice", CHOICES)
def test_a_worker_is_killed_in_the_middle_of_an_answer(
    tmp_path: Path, redis_url: str, pipeline: Pipeline, slow: CountingEndpoint, choice: str
) -> None:
    stack = make_stack(tmp_path, redis_url, pipeline, slow.url, choice=choice)
    with stack, Client(stack.addresses) as client:
        stack.wait_until_ready(PATIENCE_S)
        slow.faults.append(Fault("hang", after=3))
        seen = client.submit("count|", max_tokens=100)
        stream = client.stream(seen, timeout_s=PATIENCE_S)
        first = next(stream)
        kill_holder(stack, seen)
        if choice == "continue":
            rest = list(stream)
            assert "".join(event.text for event in [first, *rest]) == write_numbers(100)
        else:
            with pytest.raises(AnswerInterrupted):
                list(stream)
        stack.wait_until_ready(PATIENCE_S)
        wait_for(lambda: slow.num_under_way == 0, "what was asked before is over")
        slow.gate.clear()
        unseen = client.submit("count|", max_tokens=10)
        wait_for(lambda: slow.num_under_way > 0, "it is asked")
        kill_holder(stack, unseen)
        slow.gate.set()
        if choice == "fail":
            with pytest.raises(AnswerInterrupted):
                client.result(unseen, timeout_s=PATIENCE_S)
        else:
            assert client.result(unseen, timeout_s=PATIENCE_S).text == write_numbers(10)


def start_endpoint(port: int) -> Child:
    return start_child([sys.executable, "-m", "sim.endpoint", str(port), "0.01"], name="endpoint")


def test_endpoint_and_gateway_are_killed_and_come_back(tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    port, gateway_port = find_free_port(), find_free_port()
    endpoint = start_endpoint(port)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "count|", "max_tokens": 150, "stream": True}
    with make_stack(tmp_path, redis_url, pipeline, f"http://127.0.0.1:{port}", gateway_port) as stack:
        stack.wait_until_ready(PATIENCE_S)
        source = EventSource(f"{stack.gateway_url}/v1/completions")
        stream = source.connect(asked)
        seen = [next(stream) for _ in range(10)]
        endpoint.kill()
        endpoint = start_endpoint(port)
        seen += [next(stream) for _ in range(80)]
        assert stack.gateway is not None
        assert stack.gateway.child is not None
        stack.gateway.child.kill()
        with suppress(httpx.TransportError):
            for event in stream:
                seen.append(event)
        stack.restart_dead()
        stack.gateway.was_ready = False
        stack.wait_until_ready(PATIENCE_S)
        source.url = stack.gateway_url + source.answer_headers["location"]
        seen += list(source.connect())
        assert "".join(event.text for event in seen) == write_numbers(150)
        assert len({event.id for event in seen}) == len(seen)
        with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none", timeout=None) as sdk:
            chat = sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "count"}], max_tokens=4
            )
            assert [model.id for model in sdk.models.list()] == [MODEL]
        assert chat.choices[0].message.content == write_numbers(4)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 4
    endpoint.stop()
