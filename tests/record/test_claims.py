"""Who may hold a request. `tests/protocol/test_replay.py` compares every script with a model of it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, Request, Timings, TokenEvent, compute_body_hash
from penstock.names import START_HASH, Pipeline, Stage
from penstock.record import AppendOutcome, Bound, Busy, Claim, Conflict, Record, RequestStatus, UnclaimedMessage
from penstock.record.claim import GOOD_PROGRESS
from penstock.record.log import AsyncTokenLog
from penstock.redis.client import async_redis_client
from penstock.redis.scripts import Script
from sim.waiting import wait_for
from tests.record.play import alive, claim_decode, claim_prefill, die, end, prefill, say, tokens_of

pytestmark = pytest.mark.proof


def test_requests_that_are_claimed_together_have_each_their_outcome(record: Record) -> None:
    """In the order of the requests; in decode each with its log."""
    prefill(record)
    asked = [
        UnclaimedMessage("r2", "b", "", b"m"),
        UnclaimedMessage("r1", "b", "", b"m"),
        UnclaimedMessage("r1", "other", "", b"m"),
    ]
    found = record.claim_all("prefill", alive(record, "p2"), asked)
    assert [type(one) for one in found] == [Claim, Busy, Conflict]
    claim = found[0]
    assert isinstance(claim, Claim)
    assert record.read_status("r2") == RequestStatus(
        claim.epoch, "p2/1", stage="prefill", bound="", body="b", num_tokens=0, attempts=1, cancelled=False
    )
    assert record.read_status("r3") is None
    say(record, claim, [7])
    assert record.note_all_handed_off([claim]) == [True]
    jobs = [UnclaimedMessage("r2", "", "j1", b"m"), UnclaimedMessage("r3", "", "j3", b"m")]
    with_log, fresh = record.claim_all("decode", alive(record, "d1"), jobs)
    assert isinstance(with_log, Claim)
    assert isinstance(fresh, Claim)
    assert [len(one.log) for one in (with_log, fresh)] == [1, 0]
    assert record.release_all([(with_log, True), (claim, True)]) == [True, False]
    assert record.claim_all("prefill", "nobody/1", []) == []


def test_decode_gives_a_request_back_and_prefill_passes_it_on(record: Record) -> None:
    """Only workers of the stage that has it may take it over, and no claim with a message goes before them."""
    claim = prefill(record)
    say(record, claim, [7])
    assert record.note_all_handed_off([claim]) == [True]
    held = claim_decode(record, "r1", alive(record, "d1"), "j1", b"job")
    assert isinstance(held, Claim)
    assert held.num_returns == 0
    assert [record.note_all_handed_off([held]) for _ in range(2)] == [[True], [False]]
    assert record.take_over_free("decode", alive(record, "d2"), 1) == []
    assert isinstance(claim_decode(record, "r1", alive(record, "d1"), "j1", b"job"), Busy)
    assert isinstance(claim_prefill(record, "r1", alive(record, "p2"), "b"), Bound)
    (dead,) = record.take_over_free("prefill", alive(record, "p2"), 1)
    die(record, "p2")
    (taken,) = record.take_over_free("prefill", alive(record, "p3"), 1)
    assert (dead.message, taken.message) == (b"job", b"job")
    assert [(one.claim.attempts, one.claim.num_returns) for one in (dead, taken)] == [(1, 1), (2, 1)]
    assert isinstance(claim_decode(record, "r1", alive(record, "d1"), "j1", b"job"), Busy)
    assert record.note_all_handed_off([dead.claim, taken.claim]) == [False, True]
    assert record.take_over_free("prefill", alive(record, "p3"), 1) == []
    (again,) = record.take_over_free("decode", alive(record, "d2"), 1)
    assert (again.message, again.claim.attempts, again.claim.num_returns) == (b"job", 1, 1)
    assert say(record, again.claim, [8]) == [AppendOutcome.OK]
    assert record.finish_request(again.claim, end()) == AppendOutcome.OK
    ended = claim_decode(record, "r1", alive(record, "d1"), "j1", b"job")
    assert isinstance(ended, Claim)
    assert ended.is_ended
    assert tokens_of(ended.log) == [7, 8]


def test_a_log_that_an_older_worker_began_is_told(record: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    """Its claims do not move `reading`, which follows from one claim to the next. A take-over tells it, too."""

    def claim_again(num_tokens: int) -> bool:
        die(record, "p1")
        taken = record.take_over_free("prefill", alive(record, "p2"), 1)
        assert taken[0].claim.num_tokens == num_tokens
        die(record, "p2")
        again = claim_prefill(record, "r1", alive(record, "p1"), "b", b"m")
        assert isinstance(again, Claim)
        assert again.is_read_raw == taken[0].claim.is_read_raw
        return again.is_read_raw

    claim = claim_prefill(record, "r1", alive(record, "p1"), "b", b"m")
    assert isinstance(claim, Claim)
    assert not claim.is_read_raw
    say(record, claim, [7])
    assert not claim_again(1)
    client.hincrby(pipeline.record_key("r1"), "epoch", 1)  # as an older worker's claim leaves it
    assert claim_again(1)
    client.delete(pipeline.log_key("r1"))
    assert not claim_again(0), "it begins anew"


def test_a_server_that_forgot_the_scripts_learns_them_again(record: Record, client: "redis.Redis") -> None:
    claim = prefill(record)
    client.script_flush()
    assert isinstance(claim_prefill(record, "r1", alive(record, "p2"), "b"), Busy)
    client.script_flush()
    assert say(record, claim, [1]) == [1]


def test_no_call_runs_twice_where_another_client_loads_the_script_between_two(
    client: "redis.Redis", pipeline: Pipeline
) -> None:
    """A second claim of the session that holds a request would find it busy for as long as that lives."""
    count = Script(f"return redis.call('INCR', KEYS[1]) -- {pipeline.name}")  # a text that no server knows
    first, second = (f"test:{pipeline.name}:{name}" for name in "ab")
    learn = ["SCRIPT", "LOAD", count.text]  # as another client's command would come in between
    commands = [count.command([first], []), ["GET", first], learn, count.command([second], []), ["GET", second]]
    replies = count.run_once(client, commands)
    assert [replies[place] for place in (0, 1, 3, 4)] == [1, b"1", 1, b"1"]


# Taking over


def claim_with_message(record: Record, stage: Stage, name: str = "r1", message: bytes = b"message") -> Claim:
    """Claim a request for a living worker, with a message that others can continue with."""
    session = alive(record, "w1")
    claim = (
        claim_prefill(record, name, session, "b", message)
        if stage == "prefill"
        else claim_decode(record, name, session, "j1", message)
    )
    assert isinstance(claim, Claim)
    return claim


def test_what_a_dead_worker_held_is_taken_over_with_its_message(record: Record) -> None:
    dead = claim_with_message(record, "decode")
    say(record, dead, [7, 8])
    other = alive(record, "w2")
    assert record.take_over_free("decode", other, 9) == []  # it lives
    die(record, "w1")
    (taken,) = record.take_over_free("decode", other, 9)
    assert record.take_over_free("decode", other, 9) == []
    assert taken.message == b"message"
    assert (taken.claim.num_tokens, taken.claim.rolling_hash, taken.claim.attempts) == (2, dead.rolling_hash, 1)
    assert len(taken.claim.log) == 2
    assert taken.claim.epoch > dead.epoch
    assert say(record, dead, [9]) == [0]
    assert say(record, taken.claim, [9]) == [1]
    third = alive(record, "w3")
    assert isinstance(claim_decode(record, "r1", third, "j1"), Busy)  # the delivery came back
    assert isinstance(claim_decode(record, "r1", third, "j2"), Bound)


def take_over(record: Record, number: int) -> Claim:
    """Let a worker take over what another one held."""
    (taken,) = record.take_over_free("decode", alive(record, f"w{number}"), 9)
    return taken.claim


def make_tokens_and_die(record: Record, claim: Claim, count: int, number: int) -> None:
    """Append tokens in one call, and end the session of their worker."""
    events: list[TokenEvent] = []
    for token in range(count):
        events.append(claim.next_event(token, "x", before=events[-1] if events else None))
    assert set(record.append_tokens([(claim, event) for event in events])) == {AppendOutcome.OK}
    die(record, f"w{number}")


def test_attempts_that_make_no_more_tokens_than_one_before_are_in_vain(hasty: Record) -> None:
    """The first one is good; those after it make as many, and the third of them is one too many."""
    make_tokens_and_die(hasty, claim_with_message(hasty, "decode"), 3, 1)
    for number, made in ((2, 3), (3, 1)):
        claim = take_over(hasty, number)
        make_tokens_and_die(hasty, claim, made, number)
        assert (claim.attempts, claim.attempts_in_vain, claim.is_exhausted) == (number - 1, number - 1, False)
    assert take_over(hasty, 4).is_exhausted


def test_attempts_that_make_more_tokens_than_those_before_or_many_are_good(record: Record) -> None:
    made = [1, 2, 3, 500, GOOD_PROGRESS + 1, 300]
    make_tokens_and_die(record, claim_with_message(record, "decode"), made[0], 1)
    for number, count in enumerate(made[1:], 2):
        claim = take_over(record, number)
        assert claim.attempts == 1
        make_tokens_and_die(record, claim, count, number)
        assert claim.attempts_in_vain == 0
    claim = take_over(record, 8)
    make_tokens_and_die(record, claim, GOOD_PROGRESS, 8)
    assert (claim.attempts_in_vain, take_over(record, 9).attempts) == (1, 2)


def test_a_clock_that_went_back_keeps_nothing_from_anybody(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """All stored times lie an hour ahead: by them a dead worker lives, and waiting requests have to wait."""
    claim_with_message(record, "decode", "r1")
    record.release_claim(claim_with_message(record, "prefill", "r2"), wait_s=1)
    record.release_claim(claim_with_message(record, "prefill", "r3"), wait_s=1)
    for key in (pipeline.sessions_key, pipeline.free_key("prefill")):
        for name in client.zrange(key, 0, -1):
            client.zincrby(key, 3_600_000, str(name, "utf-8"))  # type: ignore[arg-type]
    client.hincrby(pipeline.record_key("r2"), "not_before", 3_600_000)
    outcome = claim_decode(record, "r1", alive(record, "d2"), "j1")
    assert isinstance(outcome, Busy)
    assert outcome.wait_s <= record.lease_s
    assert prefill(record, "r2").attempts == 1
    assert [taken.claim.id for taken in record.take_over_free("prefill", alive(record, "w2"), 9)] == ["r3"]
    record.end_expired_sessions(0)  # it has a lease from now on
    lasts_ms = float(client.zscore(pipeline.sessions_key, "w1/1") or 0)
    record.end_expired_sessions(int(lasts_ms) + 1)
    assert record.count_free("decode") == 1


def test_a_body_is_what_is_asked_and_not_how_soon_or_where() -> None:
    one = Request(id="r1", prompt="hello")
    assert compute_body_hash(one) == compute_body_hash(
        Request(id="r1", prompt="hello", priority_class="batch", deadline=9e9, session="s1")
    )
    assert compute_body_hash(one) != compute_body_hash(Request(id="r1", prompt="hello!"))
    assert compute_body_hash(one) != compute_body_hash(Request(id="r1", prompt="hello", tenant="other"))


def test_an_id_is_remembered_as_long_again_as_its_request_took(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """A copy of the request may be as far back in its topic."""
    now, keep_s = time.time(), record.settings.keep_s
    for name, published, more_s in (("late", now - 900, 900), ("none", 0.0, 0), ("odd", -1.0, 0), ("new", now + 9, 0)):
        timings = Timings(published=published, finished=now)
        assert record.finish_request(prefill(record, name), EndEvent(finish_reason="stop", timings=timings))
        assert keep_s + more_s - 60 < client.ttl(pipeline.record_key(name)) <= keep_s + more_s


def test_expiry_is_long_while_pending_and_short_after_the_end(client: "redis.Redis", pipeline: Pipeline) -> None:
    record = Record(client, pipeline, RecordSettings(keep_s=60, pending_keep_s=600))
    keys = pipeline.record_key("r1"), pipeline.log_key("r1")
    claim = prefill(record)
    say(record, claim, [1])
    assert all(60 < client.ttl(key) <= 600 for key in keys)
    record.finish_request(claim, end())
    assert all(0 < client.ttl(key) <= 60 for key in keys)
    assert prefill(record).is_ended
    assert all(0 < client.ttl(key) <= 60 for key in keys)
    assert record.cancel_request("not yet claimed")
    assert 0 < client.ttl(pipeline.record_key("not yet claimed")) <= 600
    record.close()


# What a server that evicts, or an operator, deletes of a request.


@pytest.mark.parametrize("was_noted", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_log_without_its_record_is_gone_on_with(
    record: Record, client: "redis.Redis", pipeline: Pipeline, stage: Stage, was_noted: bool
) -> None:
    """Also where only the record's last change is missing, as a command that was refused ended a script halfway."""
    claim = claim_with_message(record, stage)
    say(record, claim, [7, 8])
    before: dict[Any, Any] = client.hgetall(pipeline.record_key("r1"))
    rolled = claim.rolling_hash
    say(record, claim, [9])
    if was_noted:
        client.delete(pipeline.record_key("r1"))
    else:
        client.hset(pipeline.record_key("r1"), mapping=before)
        die(record, "w1")
    assert say(record, claim, [10]) == [0]
    again = claim_with_message(record, stage)
    assert (again.num_tokens, len(again.log), again.log[1].id) == (3, 3, f"1-{rolled}")  # type: ignore[union-attr]
    assert say(record, again, [10]) == [1]
    assert record.finish_request(again, end()) is AppendOutcome.OK
    assert [getattr(event, "token", None) for event in record.read_log("r1")] == [7, 8, 9, 10, None]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_an_end_without_its_record_is_settled_as_it_is(
    record: Record, client: "redis.Redis", pipeline: Pipeline, stage: Stage
) -> None:
    claim = claim_with_message(record, stage)
    say(record, claim, [7])
    assert record.finish_request(claim, end()) is AppendOutcome.OK
    left_ms = client.pttl(pipeline.log_key("r1"))
    client.delete(pipeline.record_key("r1"))
    again = claim_with_message(record, stage)
    assert (again.is_ended, again.is_unbound, again.num_tokens, len(again.log)) == (True, stage == "prefill", 1, 2)
    assert 0 < client.pttl(pipeline.record_key("r1")) <= left_ms


@pytest.mark.parametrize("way", ["claim", "take"])
def test_a_record_without_its_log_begins_anew(
    record: Record, client: "redis.Redis", pipeline: Pipeline, way: str
) -> None:
    claim = claim_with_message(record, "decode")
    say(record, claim, [7, 8])
    client.delete(pipeline.log_key("r1"))
    assert say(record, claim, [9]) == [0], "a reader would find a hole"
    claim.num_tokens = 2
    assert record.finish_request(claim, end()) is AppendOutcome.FENCED
    assert not client.exists(pipeline.log_key("r1"))
    die(record, "w1")
    again = claim_with_message(record, "decode") if way == "claim" else take_over(record, 2)
    assert (again.num_tokens, again.rolling_hash, again.log) == (0, START_HASH, [])
    assert say(record, again, [7]) == [1]
    assert record.finish_request(again, end()) is AppendOutcome.OK


def end_and_expire(record: Record, request_id: str, claim: Claim, name: str = "") -> None:
    """End a request, and wait until its record has expired."""
    record._keep_ms = 1
    assert record.finish_request(claim, end(), name) is AppendOutcome.OK
    wait_for(lambda: record.read_status(request_id) is None, "the record has expired", every_s=0.01)


def test_an_id_is_remembered_beyond_its_record(make_record: Callable[[RecordSettings], Record]) -> None:
    """The bound message settles the result, whenever it comes; others of the id are stale, or conflict."""
    record = make_record(RecordSettings(lease_s=30, remember_days=7))
    session = alive(record, "p1")
    claim = claim_prefill(record, "r1", session, "b", name="place-1")
    assert isinstance(claim, Claim)
    end_and_expire(record, "r1", claim, "place-1")
    assert isinstance(claim_prefill(record, "r1", session, "b", name="place-2"), Bound)
    assert isinstance(claim_prefill(record, "r1", session, "other", name="place-2"), Conflict)
    assert isinstance(claim_decode(record, "r1", session, "j1"), Bound)
    assert record.read_status("r1") is None
    again = claim_prefill(record, "r1", session, "b", name="place-1")
    assert isinstance(again, Claim)
    assert not again.is_ended
    assert isinstance(claim_prefill(record, "r1", session, "b", name="place-2"), Bound)

    handed = claim_prefill(record, "r2", session, "b", name="place-3")
    assert isinstance(handed, Claim)
    assert record.note_all_handed_off([handed]) == [True]
    held = claim_decode(record, "r2", session, "j2")
    assert isinstance(held, Claim)
    end_and_expire(record, "r2", held)
    assert isinstance(claim_prefill(record, "r2", session, "b", name="place-4"), Bound)
    assert isinstance(claim_decode(record, "r2", session, "j2"), Claim)


def test_an_id_whose_result_nobody_settles_yet_is_not_remembered(
    make_record: Callable[[RecordSettings], Record],
) -> None:
    """It ended where no message was bound: a job has to settle it. Nor is any id for 0 days."""
    for days, name in ((7, ""), (0, "place-1")):
        record = make_record(RecordSettings(lease_s=30, remember_days=days))
        claim = claim_prefill(record, f"r{days}", alive(record, "p1"), "b", name=name)
        assert isinstance(claim, Claim)
        end_and_expire(record, f"r{days}", claim, name)
        assert isinstance(claim_prefill(record, f"r{days}", alive(record, "p1"), "b", name="place-2"), Claim)


async def test_a_remembered_id_costs_few_bytes_and_only_for_its_days(
    client: "redis.Redis", redis_url: str, pipeline: Pipeline, exits: ExitStack
) -> None:
    settings = RecordSettings(lease_s=30, remember_days=2)
    record = exits.enter_context(closing(Record(client, pipeline, settings)))
    session, names = alive(record, "p1"), [f"order-{number}-{'x' * 40}" for number in range(3000)]
    asked = [UnclaimedMessage(name, "b" * 64, "topic:3:1729", b"m") for name in names]
    claims = [one for one in record.claim_all("prefill", session, asked) if isinstance(one, Claim)]
    record._keep_ms = 1
    assert set(record.finish_all([(claim, end(), "topic:3:1729") for claim in claims])) == {AppendOutcome.OK}
    keys = list(client.scan_iter(f"penstock:{pipeline.name}:ended:*", count=10_000))
    assert 0 < sum(client.memory_usage(key) or 0 for key in keys) <= 100 * len(names)
    assert all(2 * 86_400 < client.ttl(key) <= 3 * 86_400 for key in keys)
    async with async_redis_client(redis_url) as connection:
        log = AsyncTokenLog(connection, pipeline, settings)
        await asyncio.to_thread(wait_for, lambda: record.read_status(names[0]) is None, "the record has expired")
        assert [await log.is_remembered(name) for name in (names[0], "never")] == [True, False]
