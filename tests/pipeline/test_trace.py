"""One trace a request: the spans of three processes, read back from what they exported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.local.stack import Stack
from sim.forked import ForkedStack

NAMES = {
    "request", "queue.wait", "preprocess", "prefill", "kv.read", "first_token", "kv.write", "hand_off", "decode", "end",
    "settle",
}  # fmt: skip


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All spans of two requests, one with a traced producer and one whose producer keeps no trace."""
    directory = tmp_path_factory.mktemp("traced")
    file = directory / "spans.jsonl"
    with ForkedStack(directory, environment={"PENSTOCK_TRACE_FILE": str(file)}) as stack:
        stack.wait_until_ready(120)
        generate(stack, {"PENSTOCK_TRACE_FILE": str(file)})
        generate(stack, {})
    return [json.loads(line) for line in file.read_text().splitlines()]


def generate(stack: Stack, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "generate", "In the beginning", "--max-tokens", "8"]
    here = os.environ | {"PENSTOCK_STREAM_URL": stack.addresses.stream_url} | environment
    subprocess.run(command, env=here, check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_each_request_is_one_linked_trace(spans: list[dict[str, Any]]) -> None:
    traces = {span["context"]["trace_id"] for span in spans}
    assert len(traces) == 2
    for trace_id in traces:
        mine = [span for span in spans if span["context"]["trace_id"] == trace_id]
        assert {span["name"] for span in mine} == NAMES
        ids = {span["context"]["span_id"] for span in mine}
        roots = [span for span in mine if span["parent_id"] is None]
        assert [span["name"] for span in roots] == ["request"]
        assert all(span["parent_id"] in ids for span in mine if span["parent_id"] is not None)
        assert [span["name"] for span in mine].count("queue.wait") == 2
        assert len({span["attributes"]["penstock.request.id"] for span in mine}) == 1


def test_the_spans_come_from_each_process_in_order(spans: list[dict[str, Any]]) -> None:
    services = {span["resource"]["attributes"]["service.name"] for span in spans}
    assert services == {"penstock-client", "penstock-prefill", "penstock-decode"}
    for trace_id in {span["context"]["trace_id"] for span in spans}:
        mine = [span for span in spans if span["context"]["trace_id"] == trace_id]
        first, second = (
            {s["name"]: s["start_time"] for s in mine if s["resource"]["attributes"]["service.name"] == service}
            for service in ("penstock-prefill", "penstock-decode")
        )
        # A hand-off begins when the first token is in the log, and waits for the blocks: another thread writes them.
        assert first["prefill"] <= first["kv.read"] <= first["hand_off"] <= second["decode"] <= second["kv.read"]
        assert first["kv.read"] <= first["kv.write"] <= second["decode"]
