"""A stack of processes, as `penstock up --engine-kind openai` starts it: endpoint and gateway are killed."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai

from penstock.cli.up import build_endpoint_environment
from penstock.local.processes import Child, find_free_port, start_child
from penstock.names import Pipeline
from sim.endpoint import MODEL, write_numbers
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S
from tests.gateways import EventSource


def start_endpoint(port: int) -> Child:
    return start_child([sys.executable, "-m", "sim.endpoint", str(port), "0.01"], name="endpoint")


def test_endpoint_and_gateway_are_killed_and_come_back(tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    port, gateway_port = find_free_port(), find_free_port()
    endpoint = start_endpoint(port)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "count|", "max_tokens": 150, "stream": True}
    stack = ForkedStack(
        tmp_path, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, endpoint=2, gateway=gateway_port,
        environment=build_endpoint_environment([f"http://127.0.0.1:{port}"]),
    )  # fmt: skip
    with stack:
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
            # Tests before this one have left heartbeats of their pipelines on the server.
            assert MODEL in {model.id for model in sdk.models.list()}
        assert chat.choices[0].message.content == write_numbers(4)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 4
    endpoint.stop()
