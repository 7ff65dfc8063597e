"""Tests of an application against a pipeline in memory, with kills: no Kafka, no Redis, no model.

    pip install 'penstock[worker]' pytest
    pytest test_in_memory.py

The application here sorts tickets. What it does is `sort_ticket` and `sort_all`; the rest are its tests.
"""

import json
from collections.abc import Iterator

import pytest

from penstock.client import Client
from penstock.names import Pipeline
from penstock.testing.bus import MemoryFollower
from penstock.testing.pipeline import TestPipeline


def sort_ticket(client: Client, ticket: str, seen: list[str]) -> str:
    """Return the department for a ticket; `seen` gets each piece of the answer as it comes."""
    seen.extend(event.text for event in client.generate(f"Ticket: {ticket}", max_tokens=100))
    return json.loads("".join(seen))["department"]


def sort_all(client: Client, results: MemoryFollower, tickets: dict[str, str]) -> dict[str, str]:
    """Return the department for each ticket: all are sent, then the results topic is read, as a backend does."""
    for name, ticket in tickets.items():
        client.submit(f"Ticket: {ticket}", id=name, priority_class="batch", max_tokens=100)
    sorted_tickets: dict[str, str] = {}
    while len(sorted_tickets) < len(tickets):
        for message in results.read_messages(timeout_s=10.0):
            result = json.loads(message.message.value)
            sorted_tickets[result["id"]] = json.loads(result["text"])["department"]
    return sorted_tickets


def answer_ticket(prompt: str) -> str:
    """Answer in place of a model."""
    return json.dumps({"department": "billing" if "invoice" in prompt else "support"})


@pytest.fixture
def pipeline() -> Iterator[TestPipeline]:
    """A pipeline with a worker of each stage."""
    with TestPipeline(answer_ticket) as started:
        yield started


def test_a_ticket_is_sorted(pipeline: TestPipeline) -> None:
    with pipeline.client() as client:
        assert sort_ticket(client, "My invoice is wrong", []) == "billing"


def test_a_worker_is_killed_in_the_middle_of_the_answer(pipeline: TestPipeline) -> None:
    pipeline.kill_worker("decode-0", after_tokens=3)
    pipeline.start_worker("decode")
    seen: list[str] = []
    with pipeline.client() as client:
        assert sort_ticket(client, "It smokes", seen) == "support"
    assert "".join(seen) == answer_ticket("It smokes"), "no piece twice, and none is missing"


def test_a_batch_is_answered_though_both_workers_are_killed(pipeline: TestPipeline) -> None:
    tickets = {"t1": "It smokes", "t2": "My invoice is wrong", "t3": "It is late"}
    for name, stage in (("prefill-0", "prefill"), ("decode-0", "decode")):
        pipeline.kill_worker(name, after_tokens=2)
        pipeline.start_worker(stage)
    results = pipeline.bus.follow_topic(Pipeline("test").results_topic, {})
    with pipeline.client() as client:
        assert sort_all(client, results, tickets) == {"t1": "support", "t2": "billing", "t3": "support"}
