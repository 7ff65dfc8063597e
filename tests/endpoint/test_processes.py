"""A stack of processes, as `penstock up --engine-kind openai` starts it: endpoint, workers and gateway are killed."""

import json
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.cli.up import build_endpoint_environment
from penstock.ingest.tenants import TenantEntry
from penstock.local.processes import Child, find_free_port, start_child
from penstock.names import Pipeline
from sim.endpoint import MODEL, NUM_TOLD, write_arguments, write_numbers
from sim.events import EventSource
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S
from sim.workload import TOOL_MODEL
from tests.gateways import GatewayProcess, ScriptedPipeline, open_stack, write_keys


def start_endpoint(port: int, pause_s: float = 0.01) -> Child:
    return start_child([sys.executable, "-m", "sim.endpoint", str(port), str(pause_s)], name="endpoint")


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


TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "strict": True}} for name in ("f", "g")]
CALLS = [(name, write_arguments(name)) for name in ("f", "g")]
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "think, then call"}], "tools": TOOLS, "max_tokens": 200,
}  # fmt: skip


@pytest.mark.proof
def test_endpoint_and_workers_are_killed_in_the_middle_of_calls(
    tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    """Each reader is told of each call once, by each API; the agent's next turn has the calls in its history."""
    port = find_free_port()
    endpoint = start_endpoint(port, 0.05)
    stack = ForkedStack(
        tmp_path, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, endpoint=2, gateway=find_free_port(),
        environment=build_endpoint_environment([f"http://127.0.0.1:{port}"]),
    )  # fmt: skip
    with stack:
        stack.wait_until_ready(PATIENCE_S)
        url = f"{stack.gateway_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=None, max_retries=0) as sdk:
            for lost in ("endpoint", "worker"):
                told = ""
                with sdk.chat.completions.stream(**CHAT) as stream:
                    for event in stream:
                        told += event.delta if event.type == "content.delta" else ""
                        if event.type == "content.delta" and told == write_numbers(NUM_TOLD):
                            time.sleep(0.05)  # into the calls, which take a second
                            if lost == "endpoint":
                                endpoint.kill()
                                endpoint = start_endpoint(port, 0.05)
                            else:
                                for worker in stack.workers:
                                    assert worker.child is not None
                                    worker.child.kill()
                                stack.restart_dead()  # a restart may have to wait
                                stack.wait_until_ready(PATIENCE_S)
                    message = stream.get_final_completion().choices[0].message
                calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
                assert (calls, message.content) == (CALLS, write_numbers(NUM_TOLD)), lost
                assert message.model_extra == {"reasoning_content": "I must count."}
            results = [{"role": "tool", "tool_call_id": one.id, "content": "5"} for one in message.tool_calls or ()]
            turns = [*CHAT["messages"], message.model_dump(exclude_none=True, exclude={"parsed"}), *results]
            last = sdk.chat.completions.create(**{**CHAT, "messages": turns, "tools": None, "max_tokens": 2})
            assert last.choices[0].message.content == write_numbers(2)
            flat: list[Any] = [{"type": "function", **one["function"]} for one in TOOLS]
            response = sdk.responses.create(model=MODEL, input="think, then call", tools=flat)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in response.output] == kinds
        asked = {**CHAT, "tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]}
        answer = httpx.post(f"{url}/messages", json=asked, timeout=None).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block["input"] for block in answer["content"][2:]] == [json.loads(text) for _, text in CALLS]
    endpoint.stop()


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}
ASKED: dict[str, Any] = {
    "model": TOOL_MODEL.name, "messages": [{"role": "user", "content": "What is the weather of Lisbon and Porto?"}],
    "tools": [{"type": "function", "function": WEATHER}], "temperature": 0, "max_tokens": 80,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def test_a_pipeline_stands_before_another_one(tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    """Each API answers as that of the pipeline behind it: calls, their results, reasoning, schemas, and streams."""
    with open_stack(tmp_path / "behind", TOOL_MODEL, pipeline=f"{pipeline.name}-behind", redis=redis_url) as behind:
        environment = build_endpoint_environment([behind.gateway_url])
        environment["PENSTOCK_ENDPOINT_MODEL"] = TOOL_MODEL.name  # that gateway lists other tests' models, too
        before = ForkedStack(
            tmp_path / "before", pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, endpoint=1,
            gateway=find_free_port(), environment=environment,
        )  # fmt: skip
        with before:
            before.wait_until_ready(PATIENCE_S)
            urls = [f"{stack.gateway_url}/v1" for stack in (behind, before)]
            found = [ask_all(url) for url in urls]
            check_fallback(before, redis_url, tmp_path)
    assert found[1] == found[0]
    assert [len(calls) for calls in found[0]["calls"]] == [2, 2, 2, 2]


def check_fallback(endpoints: ForkedStack, redis_url: str, folder: Path) -> None:
    """Ask a gateway whose own pipeline has no worker that is ready, while endpoints are there and when they left."""
    keys = folder / "keys.json"
    may, may_not = write_keys(keys, "may", "stays", may=TenantEntry(fallback=True))
    body = {"model": TOOL_MODEL.name, "prompt": "What is", "max_tokens": 8, "temperature": 0}
    own = ScriptedPipeline(redis_url, Pipeline(f"{endpoints.addresses.pipeline}-own"), TOOL_MODEL.name)
    with own, GatewayProcess(own.addresses, folder, {"GATEWAY_KEYS": str(keys)}) as gateway:

        def post(key: str, **fields: Any) -> AbstractContextManager[httpx.Response]:
            url, sent = f"{gateway.url}/v1/completions", {"authorization": f"Bearer {key}"}
            return httpx.stream("POST", url, json=body | fields, headers=sent, timeout=None)

        with post(may) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["x-penstock-pipeline"] == endpoints.addresses.pipeline
            assert json.loads(answer.read())["choices"][0]["text"]
        assert own.read_requests() == []
        with post(may_not, stream=True) as answer:
            assert "x-penstock-pipeline" not in answer.headers
        assert len(own.read_requests()) == 1, "it waits for the own workers"
        endpoints.stop_workers()
        while len(own.read_requests()) == 1:  # until the gateway has read that no endpoint worker is there
            with post(may, stream=True) as answer:
                where = answer.headers["x-penstock-pipeline"]
        assert where == own.pipeline.name, "endpoints are away as well: it waits in the own pipeline"


def ask_all(url: str) -> dict[str, Any]:
    """Return what an API answers, without ids."""

    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{url}/{path}", json={"model": TOOL_MODEL.name, "temperature": 0, **body}, timeout=None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with openai.OpenAI(base_url=url, api_key="none", timeout=None, max_retries=0) as sdk:
        with sdk.chat.completions.stream(**ASKED) as stream:
            streamed = stream.until_done().get_final_completion().choices[0]
        whole = sdk.chat.completions.create(**ASKED).choices[0]
        asked = {**ASKED, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        named = sdk.chat.completions.create(**asked).choices[0]
        results = [{"role": "tool", "tool_call_id": one.id, "content": "red"} for one in whole.message.tool_calls or ()]
        turns = [*ASKED["messages"], whole.message.model_dump(exclude_none=True), *results]
        last = sdk.chat.completions.create(**{**ASKED, "messages": turns}).choices[0]
    flat = {"tools": [{"type": "function", **WEATHER}], "input": ASKED["messages"], "max_output_tokens": 80}
    response = post("responses", **flat)
    tools = [{"name": "get_weather", "input_schema": CITY, "description": WEATHER["description"]}]
    message = post("messages", messages=ASKED["messages"], tools=tools, max_tokens=80)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    thinking = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "max_tokens": 60}
    thought = post("chat/completions", **thinking, reasoning_effort="low")["choices"][0]["message"]
    calls = [
        [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or ()]
        for choice in (streamed, whole)
    ]
    calls.append([(one["name"], json.loads(one["arguments"])) for one in response["output"]])
    calls.append([(one["name"], one["input"]) for one in message["content"]])
    return {
        "calls": calls, "reasons": [streamed.finish_reason, whole.finish_reason, named.finish_reason],
        "named": [one.function.name for one in named.message.tool_calls or ()], "last": last.message.content,
        "thought": {name: thought[name] for name in ("content", "reasoning_content")},
        "json": post("chat/completions", **thinking, response_format=form)["choices"][0]["message"]["content"],
        "text": post("completions", prompt="What is", max_tokens=8)["choices"][0]["text"],
        "usage": message["usage"]["output_tokens"],
    }  # fmt: skip
