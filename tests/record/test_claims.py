"""Who may hold a request: claims, leases, binding, cancelling."""

import threading
import time

import pytest
import redis

from penstock.messages import EndEvent, Request, Timings
from penstock.names import START_HASH, Pipeline, Stage
from penstock.record import (
    Bound,
    Busy,
    Claim,
    Conflict,
    LeaseKeeper,
    Record,
    Renewal,
    Status,
    TakenOver,
    Waiting,
    body_hash,
)
from penstock.settings import RecordSettings
from tests.record.play import decode, end, prefill, say, wait_for


def test_a_first_claim_starts_a_fresh_record(record: Record) -> None:
    claim = prefill(record)
    assert (claim.num_tokens, claim.hash, claim.attempts) == (0, START_HASH, 1)
    assert (claim.ended, claim.cancelled, claim.exhausted) == (False, False, False)
    assert record.status("r1") == Status(
        epoch=claim.epoch,
        owner="p1",
        stage="prefill",
        bound="",
        body="b",
        num_tokens=0,
        attempts=1,
        cancelled=False,
    )
    assert record.status("r2") is None


def test_a_held_request_is_busy_for_the_rest_of_its_lease(record: Record) -> None:
    prefill(record)
    outcome = record.claim_prefill("r1", "p2", "b")
    assert isinstance(outcome, Busy)
    assert 0 < outcome.wait_s <= record.lease_s
    claim = decode(record)
    assert isinstance(record.claim_decode("r1", "d2", "j1"), Busy)
    assert claim.num_tokens == 0


def test_a_lease_runs_out_by_the_servers_clock(hasty: Record) -> None:
    first = prefill(hasty)
    second = wait_for(lambda: hasty.claim_prefill("r1", "p2", "b"))
    assert isinstance(second, Claim)
    assert second.epoch > first.epoch
    assert second.attempts == 2
    third = wait_for(lambda: hasty.claim_prefill("r1", "p3", "b"))
    assert isinstance(third, Claim)
    assert third.exhausted


def test_a_new_token_clears_the_attempts(hasty: Record) -> None:
    for _ in range(4):
        claim = wait_for(lambda: hasty.claim_decode("r1", "d1", "j1"))
        assert isinstance(claim, Claim)
        assert claim.attempts == 1
        say(hasty, claim, [7])


def test_renewing_keeps_a_lease_and_says_what_became_of_the_others(hasty: Record) -> None:
    lost = prefill(hasty, "r1")
    taken = wait_for(lambda: hasty.claim_prefill("r1", "p2", "b"))
    assert isinstance(taken, Claim)
    kept, ended, unwanted = prefill(hasty, "r2"), prefill(hasty, "r3"), prefill(hasty, "r4")
    hasty.finish(ended, end())
    hasty.cancel("r4")
    expected = [Renewal.FENCED, Renewal.OK, Renewal.OVER, Renewal.CANCELLED]
    assert hasty.renew([lost, kept, ended, unwanted]) == expected
    assert hasty.renew([]) == []


def test_renewing_teaches_a_server_that_forgot_the_script(record: Record, client: "redis.Redis") -> None:
    claim = prefill(record)
    client.script_flush()
    assert record.renew([claim]) == [Renewal.OK]
    client.script_flush()
    assert say(record, claim, [1]) == [1]


def test_the_keeper_outlasts_many_leases_and_tells_what_is_lost_or_cancelled(hasty: Record) -> None:
    with LeaseKeeper(hasty, "prefill") as keeper:
        kept, left = prefill(hasty, "kept"), prefill(hasty, "left")
        keeper.add(kept)
        for _ in range(3):  # the lease of "left" runs out three times
            taken = wait_for(lambda: hasty.claim_prefill("left", "p2", "b"))
            assert isinstance(hasty.claim_prefill("kept", "p2", "b"), Busy)
        keeper.add(left)
        assert isinstance(taken, Claim)
        assert wait_for(lambda: keeper.news() or Busy(1)) == [(left, Renewal.FENCED)]
        hasty.cancel("kept")
        assert wait_for(lambda: keeper.news() or Busy(1)) == [(kept, Renewal.CANCELLED)]
        keeper.drop(kept)
        assert keeper.news() == []


# Taking over


def test_what_a_dead_worker_held_is_taken_over_with_its_message(hasty: Record) -> None:
    dead = hasty.claim_decode("r1", "d1", "j1", b"the message")
    assert isinstance(dead, Claim)
    say(hasty, dead, [7, 8])
    assert hasty.take_over("r1", "decode", "d2") is None  # it lives
    assert wait_for(lambda: hasty.overdue("decode", 9) or Busy(1)) == ["r1"]
    assert hasty.overdue("decode", 9) == []  # others are not told at once
    taken = wait_for(lambda: hasty.take_over("r1", "decode", "d2") or Busy(1))
    assert isinstance(taken, TakenOver)
    assert taken.message == b"the message"
    assert (taken.claim.num_tokens, taken.claim.hash, taken.claim.attempts) == (2, dead.hash, 1)
    assert taken.claim.epoch > dead.epoch
    assert say(hasty, dead, [9]) == [0]
    assert say(hasty, taken.claim, [9]) == [1]
    assert isinstance(hasty.claim_decode("r1", "d3", "j1"), Busy)  # the delivery came back
    assert isinstance(hasty.claim_decode("r1", "d3", "j2"), Bound)


@pytest.mark.parametrize("over", ["ended", "handed off", "of the other stage", "without a message"])
def test_there_is_nothing_to_take_over(hasty: Record, over: str) -> None:
    claim = hasty.claim_prefill("r1", "p1", "b", b"" if over == "without a message" else b"message")
    assert isinstance(claim, Claim)
    match over:
        case "ended":
            hasty.finish(claim, end())
        case "handed off":
            hasty.handed(claim)
    stage: Stage = "decode" if over == "of the other stage" else "prefill"
    if over == "without a message":
        assert hasty.overdue(stage, 9) == []
        wait_for(lambda: hasty.claim_prefill("r1", "p2", "b"))
    assert hasty.take_over("r1", stage, "w2") is None
    assert hasty.overdue(stage, 9) == []


def test_what_was_taken_over_and_is_given_back_can_be_taken_over_at_once(hasty: Record) -> None:
    wait_for(lambda: hasty.claim_prefill("r1", "p1", "b", b"message"))
    first = wait_for(lambda: hasty.take_over("r1", "prefill", "p2") or Busy(1))
    assert isinstance(first, TakenOver)
    assert hasty.release(first.claim, delivered=False)
    assert hasty.overdue("prefill", 9) == ["r1"]
    second = hasty.take_over("r1", "prefill", "p3")
    assert second is not None
    assert (second.claim.attempts, second.message) == (first.claim.attempts, b"message")


def test_what_is_given_back_is_taken_over_if_nobody_claims_it(hasty: Record) -> None:
    """Whoever gets the delivery has a lease's time for that, and may die in it."""
    claim = hasty.claim_prefill("r1", "p1", "b", b"message")
    assert isinstance(claim, Claim)
    assert hasty.release(claim)
    assert hasty.overdue("prefill", 9) == []
    assert wait_for(lambda: hasty.overdue("prefill", 9) or Busy(1)) == ["r1"]
    taken = hasty.take_over("r1", "prefill", "p2")
    assert taken is not None
    assert (taken.claim.attempts, taken.message) == (1, b"message")


@pytest.mark.parametrize("delivered", [True, False])
def test_what_is_to_be_tried_later_is_left_alone(hasty: Record, delivered: bool) -> None:
    claim = hasty.claim_prefill("r1", "p1", "b", b"message")
    assert isinstance(claim, Claim)
    assert hasty.release(claim, failed=True, delivered=delivered, wait_s=600)
    assert isinstance(hasty.claim_prefill("r1", "p2", "b", b"message"), Busy)
    assert hasty.take_over("r1", "prefill", "p2") is None
    assert hasty.renew([claim]) == [Renewal.OVER]


def test_what_is_put_down_is_taken_over_when_nobody_names_it_any_more(hasty: Record) -> None:
    waits = Waiting("r1", "b", "", b"message")
    hasty.put_down("prefill", [waits])
    assert hasty.overdue("prefill", 9) == []
    hasty.name("prefill", ["r1"])
    assert isinstance(hasty.claim_prefill("r1", "p2", "another"), Conflict)
    assert wait_for(lambda: hasty.overdue("prefill", 9) or Busy(1)) == ["r1"]
    taken = hasty.take_over("r1", "prefill", "p2")
    assert taken is not None
    assert (taken.claim.attempts, taken.claim.num_tokens, taken.message) == (1, 0, b"message")
    assert isinstance(hasty.claim_prefill("r1", "p1", "b"), Busy)  # its first worker gets to it
    hasty.handed(taken.claim)
    hasty.put_down("prefill", [waits])
    assert hasty.take_over("r1", "prefill", "p3") is None


def test_who_has_the_delivery_claims_what_is_put_down(record: Record) -> None:
    record.put_down("decode", [Waiting("r1", "", "j1", b"message"), Waiting("r2", "", "j2", b"message")])
    assert decode(record).attempts == 1
    assert isinstance(record.claim_decode("r1", "d2", "j2"), Bound)
    record.put_down("decode", [Waiting("r1", "", "j2", b"another"), Waiting("r1", "", "j1", b"message")])
    assert isinstance(record.claim_decode("r1", "d2", "j1"), Busy)


def test_the_keeper_finds_what_is_to_be_taken_over_if_there_is_room(hasty: Record) -> None:
    for name in ("r1", "r2", "r3"):
        hasty.claim_decode(name, "d1", "j1", b"message")
    with LeaseKeeper(hasty, "decode") as keeper:
        wait_for(lambda: hasty.take_over("r3", "decode", "d2") or Busy(1))
        assert keeper.overdue() == []
        keeper.room = 2
        found: list[str] = []

        def look() -> list[str] | Busy:
            found.extend(keeper.overdue())
            return sorted(found) if len(found) == 2 else Busy(1)

        assert wait_for(look) == ["r1", "r2"]


def test_the_keeper_takes_what_is_over_off_the_list(hasty: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    key = pipeline.held_key("decode")
    with LeaseKeeper(hasty, "decode") as keeper:
        over, other = (hasty.claim_decode(name, "d1", "j1", b"message") for name in ("r1", "r2"))
        assert isinstance(over, Claim)
        assert isinstance(other, Claim)
        assert client.zcard(key) == 2
        keeper.add(other)
        keeper.done(over)
        assert wait_for(lambda: client.zrange(key, 0, -1) if client.zcard(key) == 1 else Busy(1)) == [b"r2"]


def test_a_hand_off_gives_the_lease_back(record: Record) -> None:
    claim = prefill(record)
    assert record.handed(claim)
    assert not record.handed(claim)
    assert prefill(record, owner="p2").epoch > claim.epoch
    assert not record.handed(claim)


def test_decode_does_not_wait_for_the_lease_of_a_prefill_that_is_done(record: Record) -> None:
    first = prefill(record)
    held = decode(record)
    assert not record.handed(first)
    assert isinstance(record.claim_prefill("r1", "p2", "b"), Bound)
    assert record.renew([held]) == [Renewal.OK]


def test_a_released_request_is_free_at_once_and_the_attempt_does_not_count(record: Record) -> None:
    claim = decode(record)
    assert record.release(claim)
    again = decode(record, owner="d2")
    assert again.attempts == 1
    assert not record.release(claim)
    assert record.release(again, failed=True)
    assert decode(record, owner="d3").attempts == 2


def test_the_first_job_is_bound_and_stays_bound(record: Record) -> None:
    claim = decode(record, job="j1")
    assert isinstance(record.claim_decode("r1", "d2", "j2"), Bound)
    assert isinstance(record.claim_prefill("r1", "p1", "b"), Bound)
    record.release(claim)
    assert isinstance(record.claim_decode("r1", "d2", "j2"), Bound)
    claim = decode(record, job="j1")
    record.finish(claim, end())
    assert isinstance(record.claim_decode("r1", "d2", "j2"), Bound)
    assert decode(record, job="j1").ended


def test_what_ended_in_prefill_is_handed_off_again_and_settled_by_one_job(record: Record) -> None:
    claim = prefill(record)
    say(record, claim, [5])
    assert record.finish(claim, end())
    assert not record.handed(claim)
    again = prefill(record, owner="p2")
    assert again.ended
    assert again.epoch > claim.epoch
    assert again.num_tokens == 1
    assert decode(record, job="j2").ended
    assert isinstance(record.claim_decode("r1", "d1", "j1"), Bound)
    assert isinstance(record.claim_prefill("r1", "p1", "b"), Bound)


def test_the_same_id_with_another_body_is_a_conflict(record: Record) -> None:
    claim = prefill(record, body="one")
    assert isinstance(record.claim_prefill("r1", "p1", "two"), Conflict)
    decode(record)
    assert isinstance(record.claim_prefill("r1", "p1", "two"), Conflict)
    assert isinstance(record.claim_prefill("r1", "p1", "one"), Bound)
    assert record.renew([claim]) == [Renewal.FENCED]


def test_a_body_is_what_is_asked_and_not_how_soon_or_where() -> None:
    one = Request(id="r1", prompt="hello")
    assert body_hash(one) == body_hash(Request(id="r1", prompt="hello", klass="batch", deadline=9e9, session="s1"))
    assert body_hash(one) != body_hash(Request(id="r1", prompt="hello!"))
    assert body_hash(one) != body_hash(Request(id="r1", prompt="hello", tenant="other"))


def test_a_lost_record_starts_afresh_and_old_claims_stay_fenced(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    old = decode(record)
    say(record, old, [1, 2])
    client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
    assert say(record, old, [3]) == [0]
    new = decode(record, job="j1")
    assert (new.num_tokens, new.attempts) == (0, 1)
    assert new.epoch > old.epoch
    assert record.renew([old]) == [Renewal.FENCED]


def test_cancelling_reaches_whoever_claims_later(record: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    assert record.cancel("r1")
    status = record.status("r1")
    assert status is not None
    assert (status.stage, status.cancelled) == ("new", True)
    assert client.ttl(pipeline.record_key("r1")) > 0
    claim = prefill(record)
    assert claim.cancelled
    assert record.finish(claim, end("cancelled"))
    assert not record.cancel("r1")


def test_an_id_is_remembered_as_long_again_as_its_request_took(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """A copy that was published beside it may be as far back in its topic."""
    now, keep_s = time.time(), record.settings.keep_s
    for name, published, more_s in (
        ("late", now - 900, 900),
        ("unknown", 0.0, 0),
        ("odd", -1.0, 0),
        ("new", now + 9, 0),
    ):
        timings = Timings(published=published, finished=now)
        assert record.finish(prefill(record, name), EndEvent(finish_reason="stop", timings=timings))
        assert keep_s + more_s - 60 < client.ttl(pipeline.record_key(name)) <= keep_s + more_s


def test_expiry_is_long_while_pending_and_short_after_the_end(client: "redis.Redis", pipeline: Pipeline) -> None:
    record = Record(client, pipeline, RecordSettings(keep_s=60, pending_keep_s=600))
    keys = pipeline.record_key("r1"), pipeline.log_key("r1")
    claim = prefill(record)
    say(record, claim, [1])
    assert all(60 < client.ttl(key) <= 600 for key in keys)
    record.finish(claim, end())
    assert all(0 < client.ttl(key) <= 60 for key in keys)
    assert prefill(record).ended
    assert all(0 < client.ttl(key) <= 60 for key in keys)
    record.close()


def test_a_keeper_that_is_closed_does_not_wait_for_a_round_under_way(hasty: Record) -> None:
    begun, go_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def tend() -> None:
        begun.set()
        go_on.wait(30)
        is_over.set()

    keeper = LeaseKeeper(hasty, "decode", tend)
    assert begun.wait(30)
    keeper.close()
    assert not is_over.is_set()
    go_on.set()
