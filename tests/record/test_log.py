"""The token log: appending, fencing, the end, and that the live channel has the same events."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis

from penstock.messages import EndEvent, TokenEvent, Usage
from penstock.names import START_HASH, Pipeline, event_id, roll_hash
from penstock.record import AppendOutcome, Claim, Record, parse_event
from sim.waiting import PATIENCE_S, wait_for
from tests.record.play import decode, end, prefill, say, tokens_of

pytestmark = pytest.mark.proof
OK, FENCED, CANCELLED = AppendOutcome.OK, AppendOutcome.FENCED, AppendOutcome.CANCELLED


def test_entries_are_named_by_position_and_chained_by_hash(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    claim = prefill(record)
    assert say(record, claim, [5, 6]) == [OK, OK]
    assert record.finish_request(claim, EndEvent(finish_reason="length", usage=Usage(prompt_tokens=3)))
    names = [name for name, _ in client.xrange(pipeline.log_key("r1")) or ()]
    assert names == [b"0-1", b"1-1", b"2-2"]
    first, second = roll_hash(START_HASH, 5), roll_hash(roll_hash(START_HASH, 5), 6)
    assert record.read_log("r1") == [
        TokenEvent(id=event_id(0, first), token=5, text="<5>"),
        TokenEvent(id=event_id(1, second), token=6, text="<6>"),
        EndEvent(finish_reason="length", usage=Usage(prompt_tokens=3, completion_tokens=2)),
    ]
    assert len(record.read_log("r1", 0)) == 2
    assert len(record.read_log("r1", 1)) == 1
    assert record.read_log("other") == []


def test_a_batch_is_one_append_with_an_outcome_for_each(record: Record) -> None:
    claims = [prefill(record, f"r{i}") for i in range(4)]
    decode(record, "r1")
    record.cancel_request("r2")
    outcomes = record.append_tokens([(claim, claim.next_event(9, "x")) for claim in claims])
    assert outcomes == [OK, FENCED, CANCELLED, OK]
    assert [tokens_of(record.read_log(f"r{i}")) for i in range(4)] == [[9], [], [], [9]]
    assert record.append_tokens([]) == []


def next_tokens(claim: Claim, tokens: Sequence[int]) -> list[tuple[Claim, TokenEvent]]:
    """Return the entries of tokens that one step gave."""
    entries, before = list[tuple[Claim, TokenEvent]](), None
    for token in tokens:
        before = claim.next_event(token, f"<{token}>", before=before)
        entries.append((claim, before))
    return entries


def test_several_tokens_of_a_request_are_one_call(record: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    claims = [decode(record, f"r{i}") for i in range(3)]
    record.cancel_request("r1")
    entries = [*next_tokens(claims[0], [5, 6, 7]), *next_tokens(claims[1], [5, 6]), *next_tokens(claims[2], [8])]
    assert record.append_tokens(entries) == [OK, OK, OK, CANCELLED, CANCELLED, OK]
    assert record.append_tokens(next_tokens(claims[0], [9, 1])) == [OK, OK]
    assert [name for name, _ in client.xrange(pipeline.log_key("r0")) or ()] == [b"%d-1" % i for i in range(5)]
    assert [tokens_of(record.read_log(f"r{i}")) for i in range(3)] == [[5, 6, 7, 9, 1], [], [8]]
    assert (claims[1].num_tokens, claims[1].rolling_hash) == (0, START_HASH)
    assert record.finish_request(claims[0], end("stop"))


def test_several_tokens_are_written_all_or_not_at_all(record: Record) -> None:
    claim = decode(record)
    say(record, claim, [5])
    late = next_tokens(claim, [6, 7])
    entries = next_tokens(claim, [6, 8, 9])
    assert record.append_tokens(entries) == [OK] * 3
    claim.num_tokens, claim.rolling_hash = 1, roll_hash(START_HASH, 5)
    assert record.append_tokens(entries) == [OK] * 3  # sent again: they are there
    assert record.append_tokens(late) == [FENCED] * 2  # another token at the second place
    assert tokens_of(record.read_log("r1")) == [5, 6, 8, 9]


@pytest.mark.parametrize("written", [True, False])
def test_a_connection_lost_between_send_and_collect_repeats_no_token(
    record: Record, client: "redis.Redis", written: bool
) -> None:
    claim = decode(record)
    say(record, claim, [1])
    if not written:
        client.client_kill_filter(_type="normal", skipme=True)
    record.send_tokens(next_tokens(claim, [2]))
    record.send_tokens(next_tokens(claim, [3, 4]))
    if written:
        wait_for(lambda: len(record.read_log("r1")) >= 4, "they are written")
        client.client_kill_filter(_type="normal", skipme=True)
    assert record.collect_outcomes() == [OK, OK, OK]
    assert say(record, claim, [5]) == [OK]
    assert tokens_of(record.read_log("r1")) == [1, 2, 3, 4, 5]


def test_the_live_channel_has_the_events_of_the_log(record: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    with cast(Any, client).pubsub(ignore_subscribe_messages=True) as live:
        live.subscribe(pipeline.live_channel("r1"))
        live.get_message(timeout=PATIENCE_S)
        claim = decode(record)
        say(record, claim, [5])
        record.append_tokens(next_tokens(claim, [6, 7]))
        decode(record, "r2")
        say(record, prefill(record, "r3"), [1])
        record.finish_request(claim, end())
        received: list[TokenEvent | EndEvent] = []
        while len(received) < 4:
            message = live.get_message(timeout=PATIENCE_S)
            if message is not None:
                received.append(parse_event(message["data"]))
    assert received == record.read_log("r1")
