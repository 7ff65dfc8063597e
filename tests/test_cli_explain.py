"""`penstock explain`: what is known of a request, at each point of its life."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.explain import describe_state, find_texts
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, Vectors
from penstock.names import Pipeline
from penstock.record.log import RequestStatus
from penstock.redis.client import redis_client
from penstock.telemetry.timeline import SPAN_WORDS
from sim.line import InProcessPipeline
from tests.commands import Terminal
from tests.pipeline.test_failures import poison

pytestmark = pytest.mark.proof
PLACED = {
    "partition": 2,
    "worker": "auto-1",
    "why": "least work left",
    "home": "auto-[b]0",
    "cached": 512,
    "costs": {"auto-[b]0": 4.1, "auto-1": 0.09},
}


def make_span(name: str, start_s: float, end_s: float, **attributes: str | int) -> str:
    span: dict[str, Any] = {"name": name, "service": "penstock-auto", "instance": "auto-1", "id": name, "parent": None}
    return json.dumps(span | {"start_s": start_s, "end_s": end_s, "attributes": attributes})


def test_the_page_has_the_same_words_for_spans() -> None:
    script = (Path(__file__).parents[1] / "ingest/penstock/ingest/http/page/timeline.js").read_text("utf-8")
    table = script.partition("const WORDS = {")[2].partition("}")[0]
    words = dict(re.findall(r'"?([\w.]+)"?: "([^"]+)"', table))
    assert {name: word for name, word in words.items() if name not in ("total", "measured")} == SPAN_WORDS


@pytest.mark.parametrize(("size", "said"), [(1, "3, to scores"), (2, "3, to vectors of 2 numbers")])
def test_texts_are_told_by_the_end_alone(size: int, said: str) -> None:
    status = RequestStatus(1, "", "end", "", "", 0, 1, False)
    end = EndEvent(finish_reason="stop", vectors=Vectors.pack_floats(bytes(12 * size), size))
    rows = dict(describe_state(status, end, find_texts(None, end)))
    assert rows["texts"] == said
    assert "output" not in rows["state"] + rows["tokens"]
    assert find_texts(None, EndEvent(finish_reason="stop")) is None


def test_what_is_known_of_a_request(redis_url: str, pipeline: Pipeline, terminal: Terminal) -> None:
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url)
    environment = {"COLUMNS": "200", "PENSTOCK_STREAM_URL": redis_url, "PENSTOCK_PIPELINE": pipeline.name}
    unknown = terminal("explain", "r-1", **environment)
    assert (unknown.returncode, "nothing is known of r-1" in unknown.stderr) == (1, True)
    odd = terminal("explain", "../x", **environment)
    assert (odd.returncode, "'../x' is no id" in odd.stderr) == (1, True)
    with redis_client(redis_url) as client:
        client.rpush(
            pipeline.trace_key("r-1"), make_span("request", 1.0, 1.002, **{"penstock.placement": json.dumps(PLACED)})
        )
    waiting = terminal("explain", "r-1", **environment).stdout
    assert "no worker has seen it" in waiting
    assert "partition 2 of auto-1, which would have computed it soonest; 512 of its tokens should be cached" in waiting
    assert waiting.index("auto-1: 0.09 s") < waiting.index("auto-[b]0: 4.1 s"), "the least first"
    with InProcessPipeline(addresses, RecordSettings()) as line:
        line.send_requests(poison("r-1"))
        line.run_until_results(1)
    with redis_client(redis_url) as client:
        read = {"blocks": 9, "held": 5, "found": 3, "retained": 6}
        spans = [
            make_span("queue.wait", 1.002, 1.003), make_span("kv.read", 1.003, 1.003, **read),
            make_span("decode", 1.003, 2.001, retained_blocks=1200),
        ]  # fmt: skip
        client.rpush(pipeline.trace_key("r-1"), *spans)
    ended = terminal("explain", "r-1", **environment).stdout
    for words in (
        "state   ended; ",
        "end     length",
        " prompt tokens, 0 of them cached",
        "KV      9 blocks of the prompt: 5 in the pool, 3 in tiers; 6 of these retained since the turn before",
        "1,200 blocks retained for the next turn",
        "998.0 ms  decode  auto-1",
        "1.0 ms  wait in queue  auto-1",
    ):
        assert words in ended
    told = json.loads(terminal("explain", "r-1", "--json", **environment).stdout)
    assert (told["placement"], told["record"]["stage"], told["end"]["finish_reason"]) == (PLACED, "end", "length")
    assert [span["name"] for span in told["timeline"]["spans"]] == ["request", "queue.wait", "decode", "kv.read"]
