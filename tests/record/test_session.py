"""Sessions of workers: what a session keeps, what its end frees, and who reads which partitions."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.record import Claim, ClaimEvent, Record, Session
from penstock.redis.client import redis_client
from penstock.testing.record import MemoryRecord, MemoryRecords
from penstock.worker.failure import deadline_error
from sim.forked import pause_process
from sim.waiting import PATIENCE_S, wait_for
from tests.draws import mark_some
from tests.record.play import alive, claim_decode, claim_prefill, die, end, say

MOMENT_S = 0.01


@pytest.fixture
def session(hasty: Record) -> Iterator[Session]:
    with Session(hasty, "d1") as made:
        yield made


def claim_for(session: Session, record: Record, request_id: str = "r1") -> Claim:
    claim = claim_decode(record, request_id, session.id, "j1", b"message")
    assert isinstance(claim, Claim), claim
    session.add_claim(claim)
    return claim


def list_living(client: "redis.Redis", pipeline: Pipeline) -> set[str]:
    """The sessions of decode workers that are not over."""
    return {str(name, "utf-8") for name in client.zrange(pipeline.sessions_key, 0, -1)}  # type: ignore[arg-type]


def wait_soon(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, what, MOMENT_S)


@pytest.mark.proof
def test_a_session_outlasts_many_leases(session: Session, hasty: Record) -> None:
    kept = claim_for(session, hasty)
    for number in range(3):
        silent = alive(hasty, f"silent{number}")
        assert isinstance(claim_decode(hasty, f"s{number}", silent, "j1", b"message"), Claim)
        wait_soon(lambda number=number: hasty.count_free("decode") > number, "the other's is over")  # type: ignore[misc]
    assert session.collect_events() == []
    status = hasty.read_status("r1")
    assert status is not None
    assert (status.session, status.epoch) == (session.id, kept.epoch)


@pytest.mark.proof
def test_a_cancelled_claim_is_reported_as_long_as_it_is_held(session: Session, hasty: Record) -> None:
    one, other = claim_for(session, hasty, "r1"), claim_for(session, hasty, "r2")
    assert hasty.cancel_request("r1")
    wait_soon(lambda: session.collect_events() == [(one, ClaimEvent.CANCELLED)], "it hears")
    assert session.collect_events() == [(one, ClaimEvent.CANCELLED)]
    session.remove_claim(one)
    assert session.collect_events() == []
    session.remove_claim(other)


@pytest.mark.proof
def test_a_late_worker_learns_that_all_is_lost_and_opens_another_session(session: Session, hasty: Record) -> None:
    claims = {claim_for(session, hasty, name) for name in ("r1", "r2")}
    before = session.id
    hasty.end_expired_sessions(0, before)
    found: set[tuple[Claim, ClaimEvent]] = set()

    def has_heard() -> bool:
        found.update(session.collect_events())
        return len(found) == 2

    wait_soon(has_heard, "both are lost")
    assert found == {(claim, ClaimEvent.LOST) for claim in claims}
    assert session.id != before
    (taken,) = hasty.take_over_free("decode", session.id, 1)
    assert taken.claim.id in ("r1", "r2")


@pytest.mark.proof
def test_a_server_that_fell_back_frees_what_it_believes_to_be_held(
    session: Session, hasty: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """It forgot that the request was given back: by its record a living worker holds it, so nobody takes it over."""
    claim = claim_for(session, hasty)
    keys = [pipeline.record_key("r1"), pipeline.held_key(session.id), pipeline.sessions_key]
    written = {key: client.dump(key) or b"" for key in keys}
    session.remove_claim(claim)
    before = session._last.until_ms
    wait_soon(lambda: session._last.until_ms > before, "it renews")
    assert hasty.finish_request(claim, end())
    for key, value in written.items():
        client.restore(key, 0, value, replace=True)
    wait_soon(lambda: hasty.count_free("decode") == 1, "it is free")


@pytest.mark.proof
def test_who_leaves_frees_what_is_left_at_once(record: Record, client: "redis.Redis", pipeline: Pipeline) -> None:
    with Session(record, "d1") as session:
        claim_for(session, record)
        assert record.count_free("decode") == 0
    assert record.count_free("decode") == 1
    left = [key.decode() for key in client.scan_iter(f"penstock:{pipeline.name}:*")]
    assert sorted(left) == sorted([pipeline.free_key("decode"), pipeline.record_key("r1")])


@pytest.mark.proof
def test_what_a_session_held_is_free_in_the_stage_that_each_request_is_in(record: Record) -> None:
    with Session(record, "a1") as session:
        assert isinstance(claim_prefill(record, "p1", session.id, "b", b"message"), Claim)
        claim_for(session, record, "d1")
        claim_for(session, record, "d2")
        assert record.end_expired_sessions(0, session.id) == {"prefill": 1, "decode": 2}
    heir = alive(record, "heir")
    assert [taken.claim.id for taken in record.take_over_free("prefill", heir, 9)] == ["p1"]
    assert {taken.claim.id for taken in record.take_over_free("decode", heir, 9)} == {"d1", "d2"}


@pytest.mark.parametrize("why", mark_some(["stalled", "stopped"], pytest.mark.proof))
def test_a_session_whose_loop_stands_still_or_that_was_stopped_is_not_renewed(record: Record, why: str) -> None:
    is_stalled = threading.Event()
    session = Session(record, "d1", is_stalled=is_stalled.is_set, keep=lambda _: None)
    session.renew()
    before_s = session._renewed_s
    is_stalled.set() if why == "stalled" else session.stop()
    session.renew()
    assert session._renewed_s == before_s
    session.close()


@pytest.mark.proof
def test_a_fault_of_its_thread_is_the_loops(hasty: Record) -> None:
    def parts() -> list[str]:
        raise ZeroDivisionError("a bug")

    session = Session(hasty, "d1", parts)
    wait_soon(lambda: session._failure is not None, "it fails")
    with pytest.raises(ZeroDivisionError):
        session.collect_events()
    session.stop()


# Pauses and clocks


@pytest.mark.parametrize("still_s", mark_some([1.4, 2.4], pytest.mark.proof))
def test_what_lives_changes_no_hands_though_redis_stood_still(tmp_path: Path, still_s: float) -> None:
    """By its clock all sessions are over when it continues, and the first worker could end those of the others."""
    with ValkeyServer(tmp_path) as server, ExitStack() as stack:
        client, pipeline = redis_client(server.url), Pipeline("x")
        record = Record(client, pipeline, RecordSettings(lease_s=2.0))
        # Renewed by this thread alone, so that a busy machine holds up all of them together.
        sessions = [stack.enter_context(Session(record, f"d{n}", keep=lambda _: None)) for n in range(3)]

        def renew_all() -> bool:
            for session in sessions:
                session.renew()
            return all(time.monotonic() > session._grace_until_s for session in sessions)

        assert server.pid is not None
        took_s = still_s + 2
        while took_s > still_s + 1.9:  # where this process was held up too, their time is over for good
            wait_soon(renew_all, "each may end others")
            before, begun_s = [session.id for session in sessions], time.monotonic()
            claims = [claim_for(session, record, f"r{session.id}") for session in sessions]
            slow = record.renew_session("slow/1")
            record.renew_session("dead/1")
            renew_all()
            pause_process(server.pid)
            threading.Timer(still_s, os.kill, (server.pid, signal.SIGCONT)).start()
            for _ in range(3):  # the first is under way until Redis continues
                renew_all()
            assert slow is not None
            renewed = record.renew_session("slow/1", slow.until_ms)
            took_s = time.monotonic() - begun_s
        assert renewed is not None
        # At once: a session whose thread is held up later than this is over for good, too.
        assert [session.id for session in sessions] == before
        assert [session.collect_events() for session in sessions] == [[]] * 3
        assert say(record, claims[0], [1]) == [1]
        wait_soon(lambda: renew_all() and "dead/1" not in list_living(client, pipeline), "who died is found out")


@pytest.mark.proof
def test_a_clock_that_is_put_forward_ends_nobodys_session(
    hasty: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """A worker ends sessions by the time of its own last renewal. Here the others' times are put back instead."""
    key = pipeline.sessions_key
    alive(hasty, "other")
    renewed = hasty.renew_session("d1/1")
    assert renewed is not None
    client.zadd(key, {"other/1": renewed.now_ms + 50})
    hasty.end_expired_sessions(renewed.now_ms)
    assert client.zscore(key, "other/1") is not None
    with Session(hasty, "d2"):
        wait_soon(lambda: client.zscore(key, "other/1") is None, "its time is over by then")


@pytest.mark.parametrize("step_ms", mark_some([1_000, 20_000, 40_000, 3_600_000], pytest.mark.proof))
def test_a_clock_that_went_back_ends_nobodys_session(
    record: Record, client: "redis.Redis", pipeline: Pipeline, step_ms: int
) -> None:
    """The first worker finds times too far ahead. Here these are put forward instead."""
    key = pipeline.sessions_key
    one, dead = record.renew_session("one/1"), record.renew_session("dead/1")
    assert one is not None
    assert dead is not None
    until_ms = one.until_ms + step_ms
    client.zadd(key, {"one/1": until_ms, "dead/1": until_ms})
    record.end_expired_sessions(one.now_ms)
    renewed = record.renew_session("one/1", until_ms)
    assert renewed is not None
    lease_ms = record.lease_s * 1000
    assert renewed.until_ms == renewed.now_ms + lease_ms
    lasts = client.zscore(key, "dead/1")
    assert lasts is not None
    assert lasts <= renewed.now_ms + 2 * lease_ms  # it ends, though somewhat later


# Readers of partitions


@pytest.mark.proof
def test_what_a_dead_worker_read_is_adopted_by_one(record: Record) -> None:
    session = alive(record, "dead")
    record.renew_session(session, 1, ["topic:0", "topic:1"])
    one, other = alive(record, "one"), alive(record, "other")
    assert record.adopt_partitions(one, ["topic"]) == []
    die(record, "dead")
    assert sorted(record.adopt_partitions(one, ["topic"])) == ["topic:0", "topic:1"]
    assert record.adopt_partitions(other, ["topic"]) == []
    die(record, "one")
    assert sorted(record.adopt_partitions(other, ["topic"])) == ["topic:0", "topic:1"]
    assert record.adopt_partitions(one, ["topic"]) == []  # it does not live
    record.renew_session(alive(record, "heir"), 1, ["topic:0"])
    assert record.adopt_partitions(other, ["topic"]) == ["topic:1"]


@pytest.mark.proof
def test_only_partitions_of_the_callers_topics_are_adopted(record: Record) -> None:
    session = alive(record, "dead")
    record.renew_session(session, 1, ["jobs:0", "requests:0", "requests:1"])
    one, both = alive(record, "one"), alive(record, "both")
    die(record, "dead")
    assert record.adopt_partitions(one, ["jobs"]) == ["jobs:0"]
    assert sorted(record.adopt_partitions(both, ["requests", "jobs"])) == ["requests:0", "requests:1"]
    assert record.adopt_partitions(one, ["requests"]) == []


@pytest.mark.proof
def test_what_is_left_is_adopted_and_what_goes_to_others_is_not(
    record: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    one, other = alive(record, "one"), alive(record, "other")
    record.renew_session(one, 1, ["topic:0", "topic:1", "topic:2"])
    record.renew_session(other, 1, ["topic:0"])
    record.renew_session(one, 1, ["topic:2"], ["topic:0", "topic:1"])  # it does not progress with these
    assert record.adopt_partitions(other, ["topic"]) == ["topic:0", "topic:1"]
    record.disown_partitions(other, ["topic:0"])
    assert client.hgetall(pipeline.readers_key) == {b"topic:1": b"", b"topic:2": one.encode()}


@pytest.mark.proof
def test_what_is_disowned_is_not_named_again_by_a_renewal_under_way(
    hasty: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    def parts() -> list[str]:
        is_asked.set()
        goes_on.wait(PATIENCE_S)
        return ["topic:0"]

    with Session(hasty, "d1", parts) as session:
        assert is_asked.wait(PATIENCE_S)
        leaving = threading.Thread(target=session.disown_partitions)
        leaving.start()
        leaving.join(MOMENT_S)  # it is through by then if it waits for nothing
        goes_on.set()
        leaving.join()
        until_ms = session._last.until_ms
        wait_soon(lambda: session._last.until_ms > until_ms, "it renews")
        assert client.hgetall(pipeline.readers_key) == {}


@pytest.mark.proof
def test_a_reader_that_does_not_progress_says_so_after_a_lease(
    hasty: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    parts = ["topic:0", "topic:1"]
    with Session(hasty, "stuck", lambda: list(parts)), Session(hasty, "other") as other:
        wait_soon(lambda: client.hlen(pipeline.readers_key) == 2, "it reads both")
        parts.pop()
        wait_soon(lambda: hasty.adopt_partitions(other.id, ["topic"]) == ["topic:1"], "another reads it")
        parts.append("topic:1")
        wait_soon(lambda: hasty.adopt_partitions(other.id, ["topic"]) == [], "it reads again")


@pytest.mark.parametrize(
    ("by_s", "said"), mark_some([(900.0, "ahead of"), (-60.0, "behind"), (1.0, "")], pytest.mark.proof)
)
def test_time_goes_by_the_servers_clock(
    by_s: float, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deadline in ten minutes has not passed for a worker whose clock is fifteen minutes ahead."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + by_s)
    record = MemoryRecord(MemoryRecords(), RecordSettings())  # its clock is `time.time_ns`
    with Session(record, "d1") as made:
        assert abs(made.clock_ahead_s - by_s) < 30
        assert abs(made.server_now_s() - true_time()) < 30
        assert deadline_error(true_time() + 600, made.server_now_s()) is None
        assert deadline_error(true_time() - 600, made.server_now_s()) is not None
    warnings = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
    assert len(warnings) == bool(said)
    assert all(said in one for one in warnings)
