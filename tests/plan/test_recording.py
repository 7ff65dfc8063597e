"""A trace of what a pipeline served, without its text."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bus.contract import Outgoing
from penstock.messages import Request, Result, Timings, Usage
from penstock.names import Pipeline
from penstock.plan.recording import record_trace
from penstock.plan.trace import Arrival, read_trace
from penstock.testing.bus import MemoryBus

pytestmark = pytest.mark.proof
SYSTEM = "system words " * 200
TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "first " * 200}]


@pytest.fixture
def bus() -> MemoryBus:
    made = MemoryBus(Pipeline("recorded"))
    made.create_topics()
    return made


def publish_answer(bus: MemoryBus, id: str, published: float, usage: tuple[int, int], **given: Any) -> None:  # noqa: A002
    topic = bus.pipeline.request_topic(given.get("priority_class", "interactive"))
    bus.append([Outgoing(topic, Request(id=id, **given).encode(), id)])
    counts = Usage(prompt_tokens=usage[0], completion_tokens=usage[1])
    end = Result(id=id, priority_class=given.get("priority_class", "interactive"), finish_reason="stop", usage=counts,
                 timings=Timings(published=published), text="secret")  # fmt: skip
    bus.append([Outgoing(bus.pipeline.results_topic, end.encode(), id)])


def test_a_trace_has_times_tokens_and_what_prompts_share(bus: MemoryBus, tmp_path: Path) -> None:
    again = [*TURNS, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more " * 500}]
    other = [TURNS[0], {"role": "user", "content": "other " * 200}]
    publish_answer(bus, "later", 112.5, (1500, 6), messages=again)
    publish_answer(bus, "first", 100.0, (960, 5), messages=TURNS)
    publish_answer(bus, "other", 101.0, (960, 5), messages=other)
    publish_answer(bus, "batch", 102.0, (1100, 7), token_ids=[7] * 1100, priority_class="batch")
    publish_answer(bus, "unanswered", 103.0, (0, 0), prompt="x")
    bus.append([Outgoing(bus.pipeline.request_topic("interactive"), b"{", "bad")])
    rows = record_trace(bus, bus.pipeline)
    assert not any(word in json.dumps(rows) for word in ("secret", "words", "first"))
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second, batch, later = read_trace(file)
    assert first[:3] == (0.0, 960, 5)
    assert batch == Arrival(2.0, 1100, 7, batch.hash_ids, "batch", batch.chat)
    assert later[:3] == (12.5, 1500, 6)
    assert [len(one.hash_ids) for one in (first, second, batch, later)] == [2, 2, 3, 3]
    assert first.hash_ids[0] == second.hash_ids[0] == later.hash_ids[0], "the system prompt has a block"
    assert first.hash_ids[1] != second.hash_ids[1]
    assert first.chat == later.chat != second.chat
    assert len(set(batch.hash_ids)) == 3, "a block is named by all before it"


def test_texts_have_no_answer_tokens(bus: MemoryBus, tmp_path: Path) -> None:
    publish_answer(bus, "texts", 5.0, (1000, 0), texts=["long " * 900, "long " * 100])
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, record_trace(bus, bus.pipeline))))
    (one,) = read_trace(file)
    assert (one.prompt_tokens, one.output_tokens, len(one.hash_ids)) == (1000, 0, 2)


def test_what_is_gone_from_its_topic_shares_nothing(bus: MemoryBus) -> None:
    publish_answer(bus, "r", 5.0, (10, 2), prompt="words")
    bus.topics[bus.pipeline.request_topic("interactive")].entries.clear()
    assert record_trace(bus, bus.pipeline) == [
        {"at_s": 0.0, "prompt_tokens": 10, "output_tokens": 2, "class": "interactive"}
    ]
