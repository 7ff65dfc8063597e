"""Who reads which parts of a topic, and who looks after those that nobody does."""

import redis

from penstock.local.processes import wait_until
from penstock.names import Pipeline
from penstock.record import Record, Waiting
from penstock.record.readers import Readers

LEASE_S = 0.2
PARTS = ["topic:0", "topic:1"]


def readers(client: redis.Redis, pipeline: Pipeline, *owners: str) -> list[Readers]:
    return [Readers(client, pipeline, "decode", owner, LEASE_S) for owner in owners]


def test_what_nobody_names_any_more_is_an_orphan_of_one_worker(client: redis.Redis, pipeline: Pipeline) -> None:
    dead, one, other = readers(client, pipeline, "dead", "one", "other")
    assert one.orphans(10) == []
    dead.name(PARTS)
    wait_until(lambda: sorted(one.orphans(10)) == PARTS, 10, "both are orphans")
    assert other.orphans(10) == []
    assert sorted(one.orphans(10)) == PARTS
    assert len(one.orphans(1)) == 1
    wait_until(lambda: sorted(other.orphans(10)) == PARTS, 10, "who looked after them died too")
    assert one.orphans(10) == []


def test_what_is_named_again_or_was_let_go_is_no_orphan(client: redis.Redis, pipeline: Pipeline) -> None:
    owner, other = readers(client, pipeline, "owner", "other")
    owner.name(PARTS)
    wait_until(lambda: len(other.orphans(10)) == 2, 10, "both are orphans")
    owner.name(PARTS[:1])
    assert other.orphans(10) == PARTS[1:]
    owner.let_go(PARTS)
    assert other.orphans(10) == []
    assert not client.exists(pipeline.readers_key("decode"))


def test_what_is_put_down_for_others_can_be_taken_over_at_once(record: Record) -> None:
    waiting = Waiting("r1", "body", "", b"message")
    assert record.num_overdue("prefill") == 0
    record.put_down("prefill", [waiting])
    assert record.num_overdue("prefill") == 0
    record.put_down("prefill", [waiting, Waiting("r2", "body", "", b"message")], is_here=False)
    assert record.num_overdue("prefill") == 2
    assert sorted(record.overdue("prefill", 10)) == ["r1", "r2"]
    taken = record.take_over("r2", "prefill", "me")
    assert taken is not None
    assert taken.message == b"message"
