"""What both loops are made of, on a real server."""

import gc
import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
import redis

from penstock.bus.connect import connect_bus
from penstock.bus.contract import MAX_MESSAGE_BYTES, Bus, Delivery, Member, Outgoing, Settlement
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.cores import list_usable_cores, run_on_cores
from penstock.errors import AccessRefused, BusError, BusUnavailable, MemberFenced, NameTaken, PenstockError
from penstock.garbage import freeze_loaded_objects
from penstock.local.valkey import ValkeyServer
from penstock.messages import EndEvent, Job, Logprobs, Request, Result, Sampling, TokenEvent, decode_message
from penstock.names import CLASSES, REASON_HEADER, TENANT_HEADER, WORKERS_KEY, Pipeline, PriorityClass
from penstock.ops.access import check_redis_access
from penstock.ops.status import check_health, read_worker_status
from penstock.record import Claim, ClaimEvent, Record, Session
from penstock.redis.client import is_outage, learn_pace, redis_client
from penstock.testing.bus import MemoryBus, MemoryMember
from penstock.worker import heartbeat, loop, worker
from penstock.worker.delivery_queue import MAX_DEFERRED, POSTPONE_S, DeliveryQueue
from penstock.worker.heartbeat import Heartbeat, choose_worker_name, pin_to_cores
from penstock.worker.loop import Reconnector, StopSignal
from penstock.worker.result import build_result, build_result_message
from penstock.worker.settler import Settler
from sim.chaos.proxy import Proxy
from sim.line import InProcessPipeline
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import publish_messages
from tests.pipeline.site import hanging
from tests.record.play import claim_prefill

Fetch = Callable[[int], list[Delivery]]
ROOM: dict[PriorityClass, int] = {"interactive": 10, "batch": 10}


@pytest.fixture
def record(server: "redis.Redis", pipeline: Pipeline) -> Iterator[Record]:
    """A record whose sessions are renewed each second."""
    with closing(Record(server, pipeline, RecordSettings(lease_s=3))) as made:
        yield made


@pytest.fixture
def settler(member: Member, pipeline: Pipeline, exits: ExitStack) -> Settler:
    return exits.enter_context(closing(Settler(member, pipeline)))


@pytest.fixture
def fetch(bus: Bus, member: Member, pipeline: Pipeline) -> Fetch:
    """Returns that many fresh deliveries, held by the member."""

    def fetch_fresh(count: int) -> list[Delivery]:
        topic = pipeline.request_topic("interactive")
        publish_messages(bus, [Outgoing(topic, b"x", str(n)) for n in range(count)])
        held: list[Delivery] = []
        while len(held) < count:
            held += member.poll(1.0, ROOM)
        return held

    return fetch_fresh


def collect_settled(settler: Settler) -> list[tuple[Delivery, bool]]:
    return [(settling.settlement.delivery, is_settled) for settling, is_settled in settler.collect()]


def test_a_settlement_begins_when_what_it_waits_for_is_done(member: Member, fetch: Fetch, pipeline: Pipeline) -> None:
    """Others are settled meanwhile; and it is being settled already, for who asks."""
    woken, written = threading.Event(), Future[float]()
    settler = Settler(member, pipeline, woken.set)
    first, second = fetch(2)
    settler.settle(Settlement(first), after=written)
    settler.settle(Settlement(second))
    assert woken.wait(PATIENCE_S)
    assert collect_settled(settler) == [(second, True)]
    assert settler.is_settling(first)
    assert member.is_holding(first)
    written.set_result(0.0)
    settler.wait_settled(PATIENCE_S)
    assert collect_settled(settler) == [(first, True)]
    settler.close()


def test_of_a_delivery_that_came_again_only_the_last_one_is_settled_and_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, bus, jobs = threading.Event(), threading.Event(), MemoryBus(pipeline), pipeline.job_topic("batch")
    bus.create_topics()
    bus.create_publisher().publish([Outgoing(pipeline.request_topic("batch"), b"x", str(n)) for n in range(2)])
    member = bus.join_group("prefill", "p1")
    assert isinstance(member, MemoryMember)
    settler, real = Settler(member, pipeline), member.settle

    def settle_slowly(settlements: Sequence[Settlement]) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        real(settlements)

    lost, _ = member.poll(0.0, ROOM)
    member.give_back_all()
    again, other = member.poll(0.0, ROOM)
    monkeypatch.setattr(member, "settle", settle_slowly)
    settler.settle(Settlement(other))
    assert begun.wait(PATIENCE_S)
    for delivery in (lost, again, again):
        settler.settle(Settlement(delivery, [Outgoing(jobs, b"job")]))
    go_on.set()
    settler.wait_settled(PATIENCE_S)
    assert collect_settled(settler) == [(other, True), (lost, False), (again, True), (again, False)]
    assert len(bus.read_all(jobs)) == 1
    settler.close()


@pytest.mark.in_memory  # how late real servers answer, and whether a lease lasts, is the machine's
@pytest.mark.parametrize("is_near", [True, False])
def test_steps_wait_for_answers_to_tokens_only_where_redis_is_near(
    line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch, is_near: bool
) -> None:
    record, read, most = line.decode.record, line.decode.record.collect_outcomes, 0
    monkeypatch.setattr(worker, "MAX_UNCONFIRMED_S", 1e9)
    monkeypatch.setattr(record, "collect_outcomes", lambda *, waits=True: read() if waits else [])
    monkeypatch.setattr(record, "wait_for_outcome", lambda _: is_near)
    line.send_requests(Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=9, ignore_eos=True)))
    line.run_prefill(1)
    while not line.read_results():
        line.decode.run_once()
        most = max(most, len({one.at_s for one in line.decode._in_flight}))
    assert (most == 1) == is_near, most


def test_an_output_that_no_topic_takes_is_an_error_and_holds_up_no_other(
    bus: Bus, member: Member, settler: Settler, fetch: Fetch, pipeline: Pipeline
) -> None:
    """The others of its batch are settled, and it is too: else it would end each worker that gets its delivery."""
    fine = Result(id="fine", finish_reason="stop").encode()
    for delivery, value in zip(fetch(3), (fine, b"x" * MAX_MESSAGE_BYTES, fine), strict=True):
        output = Outgoing(pipeline.results_topic, value, delivery.key, {TENANT_HEADER: "acme"})
        settler.settle(Settlement(delivery, [output]))
    settler.wait_settled(PATIENCE_S)
    settler.raise_failure()
    assert [is_settled for _, is_settled in settler.collect()] == [True] * 3
    assert member.count_held() == 0
    results = [decode_message(Result, message.value) for message in bus.read_all(pipeline.results_topic)]
    assert [result.error.code if result.error else "" for result in results] == ["", "internal_error", ""]
    assert (results[1].id, results[1].tenant) == ("1", "acme")
    (letter,) = bus.read_all(pipeline.dead_letter_topic)
    assert letter.headers[REASON_HEADER].startswith("internal_error")


def test_a_settlement_whose_first_attempt_took_long_is_tried_again(
    member: Member, settler: Settler, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which a member that is alone in failing is made anew begins with its first failure."""
    monkeypatch.setattr("penstock.worker.settler.MAX_RETRY_ALONE_S", 0.0)
    (delivery,) = fetch(1)
    real, attempts = member.settle, list[int]()

    def settle(settlements: Sequence[Settlement]) -> None:
        attempts.append(len(attempts))
        if attempts[-1] in (0, 2, 3):
            raise BusUnavailable("outputs are not acknowledged")
        real(settlements)

    monkeypatch.setattr(member, "settle", settle)
    settler.settle(Settlement(delivery))
    wait_for(settler.collect, "the second attempt settles it")
    settler.raise_failure()
    settler.settle(Settlement(delivery))
    wait_for(lambda: bool(raised_by(settler)), "the second failure of one settlement ends the worker")
    assert isinstance(raised_by(settler), BusUnavailable)
    assert attempts == [0, 1, 2, 3]


def raised_by(settler: Settler) -> Exception | None:
    try:
        settler.raise_failure()
    except Exception as error:
        return error
    return None


def test_a_bus_that_does_not_return_from_a_settlement_counts_as_away(
    member: Member, settler: Settler, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the worker is made anew; who lets go of the old one does not wait for the call."""
    (delivery,) = fetch(1)
    begun, go_on = threading.Event(), threading.Event()

    def hang(settlements: Sequence[Settlement]) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    monkeypatch.setattr(member, "settle", hang)
    settler.settle(Settlement(delivery))
    assert begun.wait(PATIENCE_S)
    settler.raise_failure()
    assert settler.trouble == ""
    monkeypatch.setattr("penstock.worker.settler.SLOW_CALL_S", 0.0)
    monkeypatch.setattr("penstock.worker.settler.HUNG_CALL_S", 0.0)
    assert "settling takes" in settler.trouble
    with pytest.raises(BusUnavailable) as raised:
        settler.raise_failure()
    assert is_outage(raised.value)
    settler.close()
    assert not go_on.is_set()
    assert settler._thread.is_alive()
    go_on.set()


def test_a_fenced_member_ends_its_worker(bus: Bus, settler: Settler, fetch: Fetch) -> None:
    (delivery,) = fetch(1)
    with bus.join_group("prefill", "a"):
        settler.settle(Settlement(delivery))
        settler.wait_settled(PATIENCE_S)
    with pytest.raises(BusError):
        settler.raise_failure()


class ScriptedMember:
    """A member for which deliveries wait, and that keeps what it was asked for."""

    def __init__(self, interactive: int = 0, batch: int = 0) -> None:
        self.waiting = {
            "interactive": make_deliveries("interactive", interactive),
            "batch": make_deliveries("batch", batch),
        }
        self.rooms: list[dict[PriorityClass, int]] = []

    def poll(self, timeout_s: float, room: dict[PriorityClass, int]) -> list[Delivery]:
        self.rooms.append(room)
        return [
            self.waiting[priority_class].pop()
            for priority_class in CLASSES
            for _ in range(min(room[priority_class], len(self.waiting[priority_class])))
        ]


def make_deliveries(priority_class: PriorityClass, count: int) -> list[Delivery]:
    return [Delivery("t", f"0:{n}", b"", None, {}, priority_class, 0.0) for n in range(count)]


def make_queue(interactive: int = 0, batch: int = 0) -> DeliveryQueue:
    """A queue for which so many fresh deliveries wait."""
    return DeliveryQueue(cast("Member", ScriptedMember(interactive, batch)))


def make_deferred_queue(count: int, wait_s: float) -> tuple[DeliveryQueue, ScriptedMember]:
    """A queue with so many interactive deliveries that were put back."""
    member = ScriptedMember()
    queue = DeliveryQueue(cast("Member", member))
    for delivery in make_deliveries("interactive", count):
        queue.defer(delivery, wait_s)
    return queue, member


def test_what_was_put_back_comes_again_when_it_is_due() -> None:
    late, soon = make_deliveries("interactive", 2)
    queue = make_queue()
    queue.defer(late, 60.0)
    queue.defer(soon)
    assert queue.poll(10, is_idle=True) == [soon]
    assert queue.poll(10, is_idle=False) == []
    assert len(queue) == 1


def test_batch_leaves_a_place_unless_nothing_runs() -> None:
    queue = make_queue(batch=3)
    assert queue.poll(1, is_idle=False) == []
    for num_places, is_idle in ((1, True), (2, True), (2, False)):
        assert len(queue.poll(num_places, is_idle=is_idle)) == 1


def test_where_only_interactive_work_fits_no_batch_is_taken() -> None:
    queue = make_queue(interactive=3, batch=1)
    for expected in (["interactive"], ["interactive"], ["interactive"], []):
        assert [delivery.priority_class for delivery in queue.poll(0, 1, is_idle=False)] == expected


@pytest.mark.parametrize(
    ("num_deferred", "wait_s", "num_due", "room"),
    [(32, 60.0, 0, 32), (MAX_DEFERRED, 60.0, 0, 0), (40, 0.0, 32, 1)],
    ids=["what waits takes up no room", "of what very many wait no more is asked for", "what is due takes up room"],
)
def test_room_for_what_was_put_back(num_deferred: int, wait_s: float, num_due: int, room: int) -> None:
    queue, member = make_deferred_queue(num_deferred, wait_s)
    assert len(queue.poll(32, 32, is_idle=False)) == num_due
    assert member.rooms == [{"interactive": room, "batch": 31}]
    assert len(queue) == len(queue.list_deferred()) == num_deferred - num_due


def test_without_room_a_delivery_is_looked_at_later(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _ = make_deferred_queue(3, 0.0)
    assert queue.poll(0, 0, is_idle=False) == []
    assert len(queue) == 3
    now_s = time.monotonic()
    monkeypatch.setattr("penstock.worker.delivery_queue.time.monotonic", lambda: now_s + POSTPONE_S)
    for num_left in (2, 1, 0):
        assert len(queue.poll(0, 0, is_idle=False)) == 1, "perhaps its request is over, and it is to be settled"
        assert len(queue) == num_left


def test_the_heartbeat_says_what_a_worker_does_and_ends_with_it(addresses: Addresses, pipeline: Pipeline) -> None:
    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 60.0) as beat:
        wait_for(lambda: read_worker_status(addresses), "the first beat")
        (status,) = read_worker_status(addresses)
        assert (status["stage"], status["name"], status["state"]) == ("prefill", "p-0", "loading")
        assert status["pid"] == os.getpid()
        wait_for(lambda: beat._due_s > time.monotonic(), "its reply")
        beat.report_progress("weights", 0.5)
        assert beat._due_s > time.monotonic(), "no beat of its own"
        beat.set_load_source(lambda: {"running": 3})
        beat.update_status(now=True, state="ready")

        def ready() -> bool:
            return [(s["state"], s.get("running")) for s in read_worker_status(addresses)] == [("ready", 3)]

        wait_for(ready, "the new state")
        with redis.Redis.from_url(addresses.stream_url) as client:
            assert 0 < int(client.pttl(pipeline.worker_key("prefill", "p-0"))) <= 240_000
    assert read_worker_status(addresses) == []


def test_a_worker_that_is_started_before_its_servers_waits_for_them(
    tmp_path: Path, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    server = ValkeyServer(tmp_path)  # it has its port, and does not run yet
    beat = Heartbeat(server.url, pipeline, "prefill", "p-0", 60.0)
    with ThreadPoolExecutor() as pool:
        naming = pool.submit(beat.take_name)
        wait_for(lambda: naming.done() or "waiting until Redis answers" in caplog.text, "it waits")
        with server:
            assert naming.result(PATIENCE_S) == "p-0"


def test_who_looks_takes_off_the_workers_that_are_gone(addresses: Addresses, pipeline: Pipeline) -> None:
    with redis.Redis.from_url(addresses.stream_url) as client:
        client.sadd(WORKERS_KEY, pipeline.worker_key("prefill", "gone"))
        with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 0.05):
            wait_for(lambda: read_worker_status(addresses), "the first beat")
        assert read_worker_status(addresses) == []
        assert not [key for key in client.smembers(WORKERS_KEY) if key.startswith(pipeline.worker_prefix.encode())]


def test_a_worker_without_a_name_gets_one_that_nobody_else_has() -> None:
    assert choose_worker_name("prefill-0") == "prefill-0"
    assert choose_worker_name("") != choose_worker_name("")


def test_a_worker_that_is_ready_and_has_a_trouble_is_degraded(addresses: Addresses, pipeline: Pipeline) -> None:
    connect_bus(addresses, BusSettings()).create_topics()
    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 60.0) as beat:
        beat.set_load_source(lambda: {"reason": "Kafka: away"})
        beat.update_status(now=True, state="ready")
        wait_for(lambda: [s["state"] for s in read_worker_status(addresses)] == ["degraded"], "it says so")
        found = check_health(addresses, BusSettings())
        assert found.state == "degraded"
        assert "prefill worker p-0: Kafka: away" in found.reasons
        assert "no decode worker is ready" in found.reasons


def read_states(client: "redis.Redis", pipeline: Pipeline) -> list[str]:
    """The state in the heartbeat of the worker `p-0`, if it has one."""
    found = client.get(pipeline.worker_key("prefill", "p-0"))
    return [] if found is None else [json.loads(found)["state"]]


def test_a_beat_goes_with_the_renewal_of_the_session(
    addresses: Addresses, pipeline: Pipeline, record: Record, server: "redis.Redis"
) -> None:
    """The heartbeat's own connection fails from the moment on at which there is a session."""
    before = set(threading.enumerate())
    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 0.1) as beat:
        wait_for(lambda: read_states(server, pipeline), "the first beat")
        beat._redis.close()
        beat._redis = redis_client("redis://127.0.0.1:1")
        with Session(record, "p-0", keep=beat.keep_session) as session:
            beat.update_status(state="ready")
            wait_for(lambda: read_states(server, pipeline) == ["ready"], "the new state is written")
            until_ms = session._last.until_ms
            wait_for(lambda: session._last.until_ms > until_ms, "it is renewed")
            new = set(threading.enumerate()) - before
            assert [one for one in new if one.name == "penstock-session"] == [beat._thread]
        beat.update_status(state="degraded")
        server.delete(pipeline.worker_key("prefill", "p-0"))
        beat._redis = redis_client(addresses.stream_url)
        wait_for(lambda: read_states(server, pipeline) == ["degraded"], "it goes on without the session")


def test_a_beat_that_the_server_refuses_ends_no_session(
    addresses: Addresses, pipeline: Pipeline, record: Record, server: "redis.Redis"
) -> None:
    server.set(pipeline.worker_key("prefill", "p-0"), json.dumps({"token": "another", "host": "there", "pid": 7}))
    with (
        Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 60.0) as beat,
        Session(record, "p-0", keep=beat.keep_session) as session,
    ):
        wait_for(lambda: raises_failure(beat), "the name is another's")
        until_ms = session._last.until_ms
        wait_for(lambda: session._last.until_ms > until_ms, "it is renewed all the same")
        assert session.collect_events() == []


def test_where_redis_hangs_the_loop_is_watched_and_the_session_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, has_ended = Pipeline("x"), threading.Event()
    with ValkeyServer(tmp_path) as server:
        record = Record(redis_client(server.url), pipeline, RecordSettings())
        beat = Heartbeat(server.url, pipeline, "prefill", "p-0", 0.1, 4.0)
        monkeypatch.setattr(beat.watch, "_end_process", has_ended.set)
        with (
            beat,
            Session(record, "p-0", is_stalled=beat.watch.is_stalled, keep=beat.keep_session) as session,
        ):
            claim = claim_prefill(record, "r1", session.id, "body")
            assert isinstance(claim, Claim)
            session.add_claim(claim)
            beat.watch.note_turn()
            with hanging(server.pid):
                wait_for(has_ended.is_set, "the process would end", 0)
                assert session.collect_events() == []
            record.end_expired_sessions(0, session.id)  # as any other worker does by now
            beat.watch.note_turn()
            found: list[tuple[Claim, ClaimEvent]] = []

            def has_heard() -> bool:
                beat.watch.note_turn()
                found.extend(session.collect_events())
                return bool(found)

            wait_for(has_heard, "it learns that the session is over")
            assert found == [(claim, ClaimEvent.LOST)]
            assert isinstance(claim_prefill(record, "r1", session.id, "body"), Claim)
            with redis_client(server.url) as client:
                client.delete(pipeline.worker_key("prefill", "p-0"))
                wait_for(lambda: read_states(client, pipeline), "heartbeats go on")
        record.close()


class Failing:
    """A worker that fails in its first turn."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.running: list[object] = []
        self.is_abandoned = False

    def run_once(self, *, accept: bool = True) -> bool:
        raise self.error

    def is_settled(self) -> bool:
        return True

    def stop_accepting(self) -> None:
        raise AssertionError("it was not told to stop")

    def close(self) -> None:
        raise AssertionError("it is let go of instead")

    def abandon(self) -> None:
        self.is_abandoned = True


OUTAGES = [
    redis.ConnectionError("refused"),
    redis.TimeoutError("no answer"),
    redis.BusyLoadingError("loading"),
    redis.ReadOnlyError("a replica"),
    redis.ResponseError("MISCONF the disk is full"),
    redis.AuthenticationError("the password was changed"),
    redis.exceptions.NoPermissionError("the user's rights were changed"),
    redis.ResponseError("ACL failure in script: User default has no permissions to run the 'xadd' command"),
    AccessRefused("the user may not PUBLISH"),
    BusUnavailable("Kafka: away"),
    MemberFenced("away too long"),
]
FAULTS = [redis.ResponseError("ERR a script has a bug"), ZeroDivisionError("a bug")]


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
def test_an_outage_makes_a_new_worker(addresses: Addresses, pipeline: Pipeline, error: Exception) -> None:
    stop, made = StopSignal(), list[Failing]()

    def make() -> Failing:
        made.append(Failing(error))
        return made[-1]

    def ask() -> None:
        if len(made) == 3:
            stop.set()
            raise BusUnavailable("the last time")

    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 0.05) as beat:
        Reconnector(make, ask, beat).run_until_stopped(stop, 0.0)
    assert [worker.is_abandoned for worker in made] == [True] * 3


def test_a_redis_that_has_become_slow_gets_a_worker_again(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers later than a beat may take, until it is known how late that is."""
    limit_s, stop, made = 0.3, StopSignal(), list[Failing]()

    def make() -> Failing:
        made.append(Failing(redis.TimeoutError("no answer")))
        if len(made) == 2:
            stop.set()
            raise BusUnavailable("the last time")
        return made[-1]

    def pause() -> Iterator[float]:
        yield from [0.0] * 20
        stop.set()
        yield 0.0

    monkeypatch.setattr(heartbeat, "redis_client", partial(redis_client, answer_s=limit_s))
    monkeypatch.setattr(loop, "backoff_pauses", pause)
    with Proxy(urlsplit(redis_url).port or 6379) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with redis_client(url, limit_s) as client, Heartbeat(url, pipeline, "prefill", "p-0", 60.0) as beat:
            proxy.delay_replies(2 * limit_s)
            Reconnector(make, partial(learn_pace, client, limit_s), beat).run_until_stopped(stop, 0.0)
            proxy.delay_replies(0.0)
    assert len(made) == 2


def test_all_that_a_role_may_do_is_asked_at_once(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that answers late would otherwise hold up each start by as many answers."""
    sent, send = list[bytes](), redis.Connection.send_packed_command

    def note_sent(connection: redis.Connection, command: Sequence[bytes], check_health: bool = True) -> None:
        sent.append(b"".join(command))
        send(connection, command, check_health)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(redis.Connection, "send_packed_command", note_sent)
    check_redis_access(addresses, "auto")
    begun, rest = sent[-2:]
    assert b"MULTI" in begun
    assert b"PUBLISH" in rest
    assert b"DISCARD" in rest


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_anything_else_ends_it(addresses: Addresses, pipeline: Pipeline, error: Exception) -> None:
    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 0.05) as beat, pytest.raises(type(error)):
        Reconnector(lambda: Failing(error), lambda: None, beat).run_until_stopped(StopSignal(), 0.0)


class Idle(Failing):
    """A worker without work."""

    def __init__(self) -> None:
        super().__init__(AssertionError())

    def run_once(self, *, accept: bool = True) -> bool:
        return False


@pytest.mark.parametrize("make", [lambda: Failing(MemberFenced("replaced")), Idle], ids=["fenced", "idle"])
def test_a_name_that_another_process_took_meanwhile_ends_the_worker(
    addresses: Addresses, pipeline: Pipeline, server: "redis.Redis", make: Callable[[], Failing]
) -> None:
    """It was stopped for so long that its lease ended. The loop looks at the heartbeat in each turn."""
    with Heartbeat(addresses.stream_url, pipeline, "prefill", "p-0", 60.0) as beat:
        wait_for(lambda: read_worker_status(addresses), "the first beat")
        # In a container beside it, which has the same host name and process id.
        newer = {**read_worker_status(addresses)[0], "token": "another", "host": "there", "pid": 77}
        key = pipeline.worker_key("prefill", "p-0")
        server.set(key, json.dumps(newer))
        beat.update_status(now=True)
        with pytest.raises(NameTaken, match=r"p-0 .* on there with pid 77"):
            Reconnector(make, lambda: None, beat).run_until_stopped(StopSignal(), 0.0)
        wait_for(lambda: raises_failure(beat), "its thread finds it too")
    assert json.loads(server.get(key) or b"") == newer, "it says no goodbye for the other"
    assert not server.exists(pipeline.left_key("prefill", "p-0"))


def test_what_was_loaded_is_in_no_later_collection() -> None:
    loaded = ["a library's"]
    freeze_loaded_objects()
    try:
        assert not any(one is loaded for one in gc.get_objects())
    finally:
        gc.unfreeze()


def raises_failure(beat: Heartbeat) -> bool:
    try:
        beat.raise_failure()
    except NameTaken:
        return True
    return False


@pytest.mark.proof
def test_a_name_of_a_living_worker_is_refused_or_the_next_one_taken(addresses: Addresses, pipeline: Pipeline) -> None:
    first, refused, second = (Heartbeat(addresses.stream_url, pipeline, "prefill", "prefill-0", 60.0) for _ in range(3))
    with first, ThreadPoolExecutor(2) as pool:
        assert first.take_name() == "prefill-0"
        taking = [pool.submit(refused.take_name), pool.submit(second.take_name, next_free=True)]

        def have_seen_it() -> bool:
            first.write_beat()
            return all(one.done() for one in taking)

        wait_for(have_seen_it, "they have seen that the first lives")
        with pytest.raises(NameTaken, match=f"on {socket.gethostname()} with pid {os.getpid()}: stop"):
            taking[0].result()
        assert taking[1].result() == "prefill-1"
        with second:
            assert {status["name"] for status in read_worker_status(addresses)} == {"prefill-0", "prefill-1"}
        assert [status["name"] for status in read_worker_status(addresses)] == ["prefill-0"]


@pytest.mark.proof
def test_a_name_is_taken_once_the_lease_of_its_killed_process_ends(addresses: Addresses, pipeline: Pipeline) -> None:
    killed = Heartbeat(addresses.stream_url, pipeline, "prefill", "prefill-0", 0.05)
    killed.take_name()  # its thread was never started: nothing renews it
    restarted = Heartbeat(addresses.stream_url, pipeline, "prefill", "prefill-0", 0.05)
    assert restarted.take_name(next_free=True) == "prefill-0"


def test_a_worker_that_python_is_told_to_keep_no_bytecode_for_keeps_it_in_the_cache(
    addresses: Addresses, tmp_path: Path
) -> None:
    """A small package in torch's place ends the start, as soon as it is compiled."""
    code, cache = tmp_path / "code", tmp_path / "cache"
    for package, text in {"torch": "raise ImportError('up to here')", "transformers": ""}.items():
        (code / package).mkdir(parents=True)
        (code / package / "__init__.py").write_text(text)
    source = code / "torch" / "__init__.py"

    def is_found_compiled(**given: str) -> bool:
        environment = os.environ | {
            "PENSTOCK_PIPELINE": addresses.pipeline, "PENSTOCK_STREAM_URL": addresses.stream_url,
            "PENSTOCK_KV_STORE_REDIS_MB": "0", "PENSTOCK_ENGINE_CACHE_DIR": str(cache), "PYTHONVERBOSE": "1",
            "PYTHONPATH": os.pathsep.join([str(code), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1", **given,
        }  # fmt: skip
        command = [sys.executable, "-m", "penstock.cli.main", "worker", "prefill"]
        is_kept = (cache / "bytecode").exists() or (code / "transformers" / "__pycache__").exists()
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "up to here" in done.stderr
        is_told = "torch and transformers have no bytecode, and PYTHONDONTWRITEBYTECODE is set: " in done.stderr
        assert is_told == (given.get("PYTHONDONTWRITEBYTECODE", "1") == "1" and not is_kept)
        return f" matches {source}" in done.stderr

    assert not is_found_compiled()
    assert is_found_compiled(), "the first start has compiled it"
    shutil.rmtree(cache / "bytecode")
    assert not is_found_compiled(PYTHONDONTWRITEBYTECODE=""), "this one compiles it beside its source"
    py_compile.compile(str(code / "transformers" / "__init__.py"))
    assert is_found_compiled(), "from there"
    assert not (cache / "bytecode").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no core affinity on this system")
@pytest.mark.parametrize("cores", ["x", "0,", "100000"])
def test_cores_that_are_not_there(cores: str) -> None:
    with pytest.raises(PenstockError, match="PENSTOCK_WORKER_CORES"):
        pin_to_cores(cores)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no core affinity on this system")
def test_a_block_widens_the_cores_of_the_threads_that_it_starts_alone() -> None:
    cores = list_usable_cores()

    def start_thread(found: list[list[int]]) -> None:
        thread = threading.Thread(target=lambda: found.append(list_usable_cores()))
        thread.start()
        thread.join()

    found = list[list[int]]()
    with run_on_cores(cores[:1]):
        with suppress(KeyError), run_on_cores(cores):
            start_thread(found)
            raise KeyError
        start_thread(found)
    assert found == [cores, cores[:1]]
    assert list_usable_cores() == cores


# From a log to a result that its topic takes


def test_a_text_that_no_topic_takes_is_cut_and_says_so() -> None:
    """A character of it is six bytes of JSON."""
    log = [TokenEvent(id=f"{n}-0", token=n, text="\x01" * 100_000, logprobs=Logprobs(logprob=0)) for n in range(40)]
    job = Job(id="r1", job="j1", sampling=Sampling(logprobs=0))
    result = build_result(job, "model", [*log, EndEvent(finish_reason="length")])
    assert result is not None
    message = build_result_message(Pipeline("p"), result, {"traceparent": "00-x"})
    assert MAX_MESSAGE_BYTES * 0.9 < message.num_bytes <= MAX_MESSAGE_BYTES
    found = decode_message(Result, message.value)
    assert found.truncated is True
    assert (found.finish_reason, found.token_ids, found.logprobs) == ("length", list(range(40)), None)
    assert result.text.startswith(found.text)
