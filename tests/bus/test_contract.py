"""The bus contract, on both buses and real servers, mostly in decode, which settles outputs and deliveries together."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.bus.contract import MAX_MESSAGE_BYTES, Bus, Delivery, Member, Outgoing, Settlement
from penstock.bus.dead_letters import build_dead_letter
from penstock.bus.kafka.buffer import MAX_BUFFERED_MESSAGES
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.member import KafkaMember
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.member import StreamsMember
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable, DeliveryLost, MemberFenced, NameShared, RequestTooLarge
from penstock.local.processes import Child
from penstock.names import (
    ATTEMPT_HEADER,
    BURIED_HEADER,
    CLASSES,
    CONNECT_PREFIX,
    ORIGIN_HEADER,
    REASON_HEADER,
    Pipeline,
    WorkerKind,
)
from penstock.ops import lag
from penstock.testing.bus import MemoryBus, MemoryMember
from sim.forked import fork_process
from sim.waiting import wait_for
from tests.bus import worker_process
from tests.bus.buses import (
    CAPACITY,
    SHORT_TIMEOUT_SETTINGS,
    list_values,
    make_bus,
    make_messages,
    make_settlement,
    publish_messages,
    take_deliveries,
)
from tests.draws import mark_some


@pytest.fixture
def spawn(bus: Bus, pipeline: Pipeline, tmp_path: Path, exits: contextlib.ExitStack) -> Callable[[str, str], Child]:
    def start(name: str, mode: str) -> Child:
        assert isinstance(bus, KafkaBus | StreamsBus)
        kind, address = ("kafka", bus.bootstrap) if isinstance(bus, KafkaBus) else ("streams", bus.url)
        log = tmp_path / f"{name}.log"
        child = fork_process(name, log, worker_process.main, kind, address, pipeline.name, name, mode, tmp_path)
        exits.callback(child.kill)
        return child

    return start


@pytest.mark.proof
def test_check_and_create_again(bus: Bus) -> None:
    assert bus.create_topics() == []
    assert "at" in bus.check_connection()


@pytest.mark.proof
def test_publish_poll_settle_with_key_headers_and_time(bus: Bus, pipeline: Pipeline) -> None:
    topic = pipeline.job_topic("interactive")
    sent = [
        Outgoing(topic, "büß".encode(), "key-1", {"penstock-tenant": "ü", "traceparent": "00-x"}),
        Outgoing(topic, b"\x00\xff", None, {}),
    ]
    publish_messages(bus, sent)
    with bus.join_group("decode", "a") as member:
        taken = take_deliveries(member, 2)
        assert {(d.value, d.key, tuple(d.headers.items())) for d in taken} == {
            (m.value, m.key, tuple(m.headers.items())) for m in sent
        }
        assert all(d.topic == topic and d.priority_class == "interactive" for d in taken)
        assert all(abs(d.timestamp_s - time.time()) < 60 for d in taken)
        assert len({d.position for d in taken}) == 2
        assert member.count_held() == 2
        member.settle([make_settlement(pipeline, d) for d in taken])
        assert member.count_held() == 0
        assert member.poll(0.0, CAPACITY) == []
    found = bus.read_all(pipeline.results_topic)
    assert {(m.value, m.key) for m in found} == {(m.value, m.key) for m in sent}


@pytest.mark.parametrize("stage", mark_some(["prefill", "decode", "auto"], pytest.mark.proof))
def test_lost_delivery_is_refused_and_nothing_is_published(bus: Bus, pipeline: Pipeline, stage: WorkerKind) -> None:
    publish_messages(bus, make_messages(pipeline.input_topics(stage)["interactive"], 2))
    with bus.join_group(stage, "a") as member:
        done, fresh = take_deliveries(member, 2)
        member.settle([Settlement(done)])
        with pytest.raises(DeliveryLost) as lost:
            member.settle([make_settlement(pipeline, done), make_settlement(pipeline, fresh)])
        assert lost.value.deliveries == [done]
        assert bus.read_all(pipeline.results_topic) == []
        assert (member.is_holding(fresh), member.count_held()) == (True, 1)
        member.settle([make_settlement(pipeline, fresh)])
    assert list_values(bus.read_all(pipeline.results_topic)) == [fresh.value]


@pytest.mark.proof
def test_size_limits(bus: Bus, pipeline: Pipeline) -> None:
    topic = pipeline.job_topic("batch")
    largest = MAX_MESSAGE_BYTES - 1
    publish_messages(bus, [Outgoing(topic, b"x" * 10_000_000), Outgoing(topic, b"y" * largest, "k")])
    with pytest.raises(RequestTooLarge):
        publish_messages(bus, [Outgoing(topic, b"small"), Outgoing(topic, b"z" * (largest + 1), "k")])
    with bus.join_group("decode", "a") as member:
        taken = take_deliveries(member, 2)
        assert sorted(len(d.value) for d in taken) == [10_000_000, largest]
        with pytest.raises(RequestTooLarge):
            member.settle([Settlement(taken[0], [Outgoing(pipeline.results_topic, b"z" * (largest + 2))])])
        assert member.count_held() == 2
        member.settle([make_settlement(pipeline, d) for d in taken])
    assert sorted(len(m.value) for m in bus.read_all(pipeline.results_topic)) == [10_000_000, largest]


@pytest.mark.proof
def test_of_messages_that_are_sent_together_only_the_refused_one_fails(bus: Bus, pipeline: Pipeline) -> None:
    topic = pipeline.job_topic("batch")
    with contextlib.closing(bus.create_publisher()) as publisher:
        first, large, last = publisher.send_messages(
            [Outgoing(topic, b"first"), Outgoing(topic, b"z" * (MAX_MESSAGE_BYTES + 1)), Outgoing(topic, b"last")]
        )
        assert bus.find_gone([first.result(), last.result()]) == set()
        with pytest.raises(RequestTooLarge):
            large.result()
    assert list_values(bus.read_all(topic)) == [b"first", b"last"]


@pytest.mark.parametrize("stage", mark_some(["prefill", "decode", "auto"], pytest.mark.proof))
def test_out_of_order_then_restart_repeats_no_finished_work(bus: Bus, pipeline: Pipeline, stage: WorkerKind) -> None:
    """What was finished is committed before the partitions are given up, beyond what is not finished too."""
    topic = pipeline.input_topics(stage)["interactive"]
    publish_messages(bus, make_messages(topic, 30))
    with bus.join_group(stage, "a") as member:
        taken = sorted(take_deliveries(member, 30), key=lambda d: int(d.value))
        for d in taken[::-3]:
            member.settle([make_settlement(pipeline, d)])
            assert not member.is_holding(d)
        unfinished = {d.value for d in taken} - {d.value for d in taken[::-3]}
        assert member.count_held() == len(unfinished)
    with bus.join_group(stage, "b") as member:
        again = take_deliveries(member, len(unfinished))
        assert {d.value for d in again} == unfinished
        member.settle([make_settlement(pipeline, d) for d in again])
        assert member.poll(0.3, CAPACITY) == []
    assert len(list_values(bus.read_all(pipeline.results_topic))) == 30


@pytest.mark.proof
def test_interactive_first_and_a_full_class_is_paused(bus: Bus, pipeline: Pipeline) -> None:
    if isinstance(bus, StreamsBus):
        bus = make_bus("streams", pipeline, bus.url, SHORT_TIMEOUT_SETTINGS)
    publish_messages(bus, make_messages(pipeline.job_topic("batch"), 200))
    with bus.join_group("decode", "a") as member:
        held = take_deliveries(member, 2, {"interactive": 5, "batch": 2})
        # Longer than the session timeout without room for batch: the member stays, and interactive passes.
        assert member.poll(1.5, {"interactive": 5, "batch": 0}) == []
        publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 3))
        assert [d.priority_class for d in take_deliveries(member, 3, {"interactive": 5, "batch": 0})] == [
            "interactive"
        ] * 3
        publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 3))
        first = take_deliveries(member, 3, {"interactive": 3, "batch": 0})
        assert [d.priority_class for d in first] == ["interactive"] * 3
        held += take_deliveries(member, 198, {"interactive": 5, "batch": 198})
        assert len({d.value for d in held}) == 200
        member.settle([Settlement(d) for d in held])


@pytest.mark.proof
def test_a_member_that_was_away_asks_what_it_still_holds(streams_bus: Bus, pipeline: Pipeline) -> None:
    bus = streams_bus
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 1))
    with bus.join_group("decode", "a") as away, bus.join_group("decode", "b") as other:
        assert isinstance(away, StreamsMember)
        (delivery,) = take_deliveries(away, 1)
        away.client.delete(away._key)  # as it runs out while a process stands still
        (same,) = take_deliveries(other, 1)
        away._renewed_s = time.monotonic() - 60
        away._note_renewal(time.monotonic(), 1)
        assert not away.is_holding(delivery)
        assert away.count_held() == 0
        assert other.is_holding(same)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["memory", "streams"])
def test_a_delivery_that_was_lost_and_came_again_is_another_one(
    streams_bus: Bus, pipeline: Pipeline, kind: str
) -> None:
    bus = streams_bus if kind == "streams" else MemoryBus(pipeline)
    bus.create_topics()
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 1))
    with bus.join_group("decode", "a") as member:
        (lost,) = take_deliveries(member, 1)
        if isinstance(member, StreamsMember):
            member.client.delete(member._key)  # as it runs out while a process stands still
            with bus.join_group("decode", "b") as other:
                take_deliveries(other, 1)
        else:
            assert isinstance(member, MemoryMember)
            member.give_back_all()
        (again,) = take_deliveries(member, 1)
        assert (lost, [member.is_holding(one) for one in (lost, again)]) == (again, [False, True])
        with pytest.raises(DeliveryLost):
            member.settle([make_settlement(pipeline, lost)])
        assert member.count_held() == 1
        member.settle([make_settlement(pipeline, again)])
    assert len(bus.read_all(pipeline.results_topic)) == 1


@pytest.mark.proof
def test_dead_letter_has_reason_origin_and_outputs(bus: Bus, pipeline: Pipeline) -> None:
    publish_messages(bus, [Outgoing(pipeline.job_topic("batch"), b"bad", "k", {"penstock-tenant": "t"})])
    with bus.join_group("decode", "a") as member:
        (d,) = take_deliveries(member, 1)
        letter = build_dead_letter(pipeline, d, "cannot be read")
        member.settle([Settlement(d, [letter, Outgoing(pipeline.results_topic, b"error")])])
    (dead,) = bus.read_all(pipeline.dead_letter_topic)
    assert (dead.value, dead.key) == (b"bad", "k")
    headers = dict(dead.headers)
    assert abs(int(headers.pop(BURIED_HEADER)) / 1000 - time.time()) < 60
    partition, colon, offset = d.position.partition(":")
    place = {CONNECT_PREFIX + "partition": partition, CONNECT_PREFIX + "offset": offset} if colon else {}
    assert headers == {
        "penstock-tenant": "t",
        REASON_HEADER: "cannot be read",
        ORIGIN_HEADER: d.topic,
        ATTEMPT_HEADER: "1",
        CONNECT_PREFIX + "topic": d.topic,
        CONNECT_PREFIX + "exception.message": "cannot be read",
        **place,
    }
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"error"]


@pytest.mark.proof
def test_who_retires_hands_over_what_it_did_not_take(bus: Bus, pipeline: Pipeline) -> None:
    """At once, while it finishes what it has; of that nothing is done twice."""
    topic = pipeline.job_topic("interactive")
    publish_messages(bus, make_messages(topic, 12))
    with bus.join_group("decode", "a") as leaver:
        (held,) = take_deliveries(leaver, 1, {"interactive": 1})
        leaver.stop_consuming()
        with bus.join_group("decode", "b") as stayer:
            rest: list[Delivery] = []
            while len({delivery.value for delivery in rest} - {held.value}) < 11:  # what is held may come among them
                rest += take_deliveries(stayer, 1)
            stayer.settle([make_settlement(pipeline, delivery) for delivery in rest if delivery.value != held.value])
            leaver.settle([Settlement(replace(held, is_held=False), [Outgoing(pipeline.results_topic, b"more", "m")])])
            if leaver.is_holding(held):
                leaver.settle([make_settlement(pipeline, held)])
            else:
                with pytest.raises(DeliveryLost):
                    leaver.settle([make_settlement(pipeline, held)])
                again = [delivery for delivery in rest if delivery.value == held.value]
                again = again or take_deliveries(stayer, 1)
                stayer.settle([make_settlement(pipeline, delivery) for delivery in again])
    found = list_values(bus.read_all(pipeline.results_topic))
    assert sorted(found) == sorted([b"more", *[str(n).encode() for n in range(12)]])


@pytest.mark.proof
def test_same_name_restart_fences_the_older(bus: Bus, pipeline: Pipeline) -> None:
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 2))
    with bus.join_group("decode", "a") as old:
        taken = take_deliveries(old, 2)
        with bus.join_group("decode", "a") as new:
            with pytest.raises((MemberFenced, DeliveryLost)):
                old.settle([make_settlement(pipeline, d) for d in taken])
            assert bus.read_all(pipeline.results_topic) == []
            old.close()
            again = take_deliveries(new, 2)
            new.settle([make_settlement(pipeline, d) for d in again])
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"0", b"1"]


@pytest.mark.proof
def test_a_process_of_the_same_name_that_redis_does_not_know_is_told(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    """Its names are compared on other Redis servers."""
    publish_messages(kafka_bus, make_messages(pipeline.job_topic("interactive"), 1))
    transactional_id = f"{pipeline.consumer_group('decode')}.a"
    with kafka_bus.join_group("decode", "a") as member:
        (taken,) = take_deliveries(member, 1)
        stranger = kafka_bus.create_transactions(transactional_id)
        told = f"{transactional_id} at Kafka {kafka_bus.bootstrap}: .* PENSTOCK_PIPELINE or PENSTOCK_WORKER_NAME"
        with pytest.raises(NameShared, match=told):
            member.settle([make_settlement(pipeline, taken)])
        stranger.close()
    assert kafka_bus.read_all(pipeline.results_topic) == []


@pytest.fixture
def holder(bus: Bus, pipeline: Pipeline, spawn: Callable[[str, str], Child], tmp_path: Path) -> Child:
    """A worker that holds a job."""
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 1))
    child = spawn("holder", "hold")
    wait_for((tmp_path / "held").exists, f"the worker holds it: {child.read_log_tail()}")
    return child


@pytest.mark.proof
def test_redelivery_after_a_crash(bus: Bus, pipeline: Pipeline, holder: Child) -> None:
    with bus.join_group("decode", "b") as member:
        assert member.poll(0.0, CAPACITY) == []
        holder.kill()
        (d,) = take_deliveries(member, 1)
        member.settle([make_settlement(pipeline, d)])
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"0"]


@pytest.mark.proof
def test_who_slept_too_long_cannot_settle(bus: Bus, pipeline: Pipeline, holder: Child, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGSTOP)
    with bus.join_group("decode", "b") as member:
        (d,) = take_deliveries(member, 1)
        (tmp_path / "go").touch()
        holder.send_signal(signal.SIGCONT)
        wait_for((tmp_path / "outcome").exists, "the sleeper tried to settle")
        assert (tmp_path / "outcome").read_text() == "DeliveryLost"
        try:
            member.settle([make_settlement(pipeline, d)])
        except DeliveryLost:  # the sleeper was given its partition, as a new member, until it ended
            (d,) = take_deliveries(member, 1)
            member.settle([make_settlement(pipeline, d)])
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"0"]


@pytest.mark.proof
def test_what_was_paused_when_it_went_is_read_when_it_comes_back(kafka: str, pipeline: Pipeline) -> None:
    """librdkafka keeps a partition's pause for as long as the process lives."""
    bus = make_bus("kafka", pipeline, kafka)
    bus.create_topics()
    topic, total = pipeline.job_topic("interactive"), 4 * MAX_BUFFERED_MESSAGES
    publish_messages(bus, make_messages(topic, total))
    found: list[bytes] = []
    with bus.join_group("decode", "a") as stayer:
        assert isinstance(stayer, KafkaMember)
        wait_for(
            lambda: len(stayer.list_prefetched()) >= MAX_BUFFERED_MESSAGES,
            "its class is full: it pauses both partitions",
        )
        with bus.join_group("decode", "b") as leaver:
            wait_for(lambda: len(leaver.list_partitions()) == len(stayer.list_partitions()) == 1, "each has one")
            wait_for(lambda: not work_off(stayer, found), "what it kept is worked off, and the other is not full")
        wait_for(lambda: work_off(stayer, found) and len(found) == total, "what came back is read")
    assert sorted(map(int, found)) == list(range(total))


def work_off(member: Member, found: list[bytes]) -> bool:
    """Settle what comes in a moment; whether anything came."""
    taken = member.poll(0.5, CAPACITY)
    member.settle([Settlement(delivery) for delivery in taken])
    found += [delivery.value for delivery in taken]
    return bool(taken)


@pytest.mark.proof
def test_a_member_says_what_waits_in_its_partitions(bus: Bus, pipeline: Pipeline, bus_kind: str) -> None:
    topics = [pipeline.request_topic(priority_class) for priority_class in CLASSES]
    for topic, count in zip(topics, (100, 3), strict=True):
        publish_messages(bus, make_messages(topic, count))
    with bus.join_group("prefill", "a") as member, bus.join_group("decode", "b") as other:
        taken = take_deliveries(member, 2, {"interactive": 1, "batch": 1})
        if bus_kind == "kafka":

            def count_waiting() -> list[int]:
                waiting = member.count_waiting()
                return [sum(count for (topic, _), count in waiting.items() if topic == one) for one in topics]

            wait_for(lambda: len(member.count_waiting()) == 4, "both partitions of both topics are read")
            wait_for(lambda: count_waiting() == [99, 2], "what is buffered and what is not yet", every_s=0.05)
            more = take_deliveries(member, 7, {"interactive": 5, "batch": 2})
            wait_for(lambda: count_waiting() == [94, 0], "what was handed out does not wait")
            member.settle([make_settlement(pipeline, one) for one in (*taken, *more)])
            member.stop_consuming()
            wait_for(lambda: list(other.count_waiting().values()) == [0] * 4, "no job waits")
            publish_messages(bus, make_messages(pipeline.job_topic("batch"), 5))
            wait_for(lambda: sum(other.count_waiting().values()) == 5, "jobs do", every_s=0.05)
            other.stop_consuming()
        assert member.count_waiting() == other.count_waiting() == {}, "members share the topics, or it reads none"


@pytest.mark.proof
def test_a_failed_transaction_leaves_nothing(kafka: str, pipeline: Pipeline) -> None:
    bus = make_bus("kafka", pipeline, kafka, SHORT_TIMEOUT_SETTINGS)
    assert isinstance(bus, KafkaBus)
    bus.pace.note_refused(2)  # it is tried once: limits stay as they are
    bus.create_topics()
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 1))
    with bus.join_group("decode", "a") as member:
        (d,) = take_deliveries(member, 1)
        with pytest.raises(BusUnavailable):
            member.settle([Settlement(d, [Outgoing(pipeline.results_topic, b"seen"), Outgoing("no-such-topic", b"")])])
        assert bus.read_all(pipeline.results_topic) == []
        assert member.count_held() == 1
        member.settle([make_settlement(pipeline, d)])
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"0"]


@pytest.mark.proof
def test_a_member_publishes_what_it_never_held_before_it_knows_its_group(
    kafka_bus: KafkaBus, pipeline: Pipeline
) -> None:
    """As of a request that was taken over as soon as the worker had begun."""
    writer = kafka_bus.create_transactions(pipeline.name)
    writer.run_transaction([Outgoing(pipeline.job_topic("interactive"), b"taken over")], [], None)
    writer.close()
    assert list_values(kafka_bus.read_all(pipeline.job_topic("interactive"))) == [b"taken over"]


@pytest.mark.proof
def test_no_server_at_the_address(pipeline: Pipeline) -> None:
    bus = make_bus("streams", pipeline, "redis://127.0.0.1:1/0")
    with pytest.raises(BusUnavailable):
        bus.check_connection()
    with pytest.raises(BusUnavailable):
        bus.join_group("decode", "a")


@pytest.mark.proof
def test_a_lost_reply_is_recovered(streams_bus: Bus, pipeline: Pipeline) -> None:
    bus = streams_bus
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 3))
    with bus.join_group("decode", "a") as member:
        assert isinstance(member, StreamsMember)
        (held,) = take_deliveries(member, 1, {"interactive": 1})
        # What the server counts as delivered while the reply did not reach us.
        stream = pipeline.stream_key(pipeline.job_topic("interactive"))
        member.client.xreadgroup(pipeline.consumer_group("decode"), member._consumer, {stream: ">"}, count=1)
        member._recovering = True
        rest = take_deliveries(member, 2)
        assert {d.value for d in (held, *rest)} == {b"0", b"1", b"2"}
        member.settle([make_settlement(pipeline, d) for d in (held, *rest)])


@pytest.mark.proof
def test_a_prefill_member_settles_a_result_between_its_hand_offs(bus: Bus, pipeline: Pipeline) -> None:
    publish_messages(bus, make_messages(pipeline.request_topic("interactive"), 4))
    with bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, 4)
        jobs, results = pipeline.job_topic("interactive"), pipeline.results_topic
        for delivery, topic in zip(taken, (jobs, results, jobs), strict=False):
            member.settle([Settlement(delivery, [Outgoing(topic, delivery.value, delivery.key)])])
        assert member.count_held() == 1
        with pytest.raises(DeliveryLost):
            member.settle([make_settlement(pipeline, taken[0]), make_settlement(pipeline, taken[3])])
        assert list_values(bus.read_all(pipeline.results_topic)) == [taken[1].value]
    with bus.join_group("prefill", "b") as member:
        assert [one.value for one in take_deliveries(member, 1)] == [taken[3].value]
        assert member.poll(0.3, CAPACITY) == []


@pytest.mark.proof
def test_a_result_of_prefill_is_there_once_after_a_kill(
    bus: Bus, pipeline: Pipeline, spawn: Callable[[str, str], Child], tmp_path: Path
) -> None:
    """The worker is killed as soon as its result is settled. A hand-off of before may come again."""
    topic = pipeline.request_topic("interactive")
    publish_messages(bus, make_messages(topic, 2))
    victim = spawn("victim", "result")
    wait_for(lambda: not victim.is_alive(), f"it killed itself: {victim.read_log_tail()}")
    result = (tmp_path / "settled").read_bytes()
    publish_messages(bus, [Outgoing(topic, b"last")] * SHORT_TIMEOUT_SETTINGS.partitions * 4)
    with bus.join_group("prefill", "b") as member:
        found: list[bytes] = []
        while found.count(b"last") < SHORT_TIMEOUT_SETTINGS.partitions * 4:
            found += [delivery.value for delivery in take_deliveries(member, 1)]
    assert result not in found
    assert list_values(bus.read_all(pipeline.results_topic)) == [result]


@pytest.mark.proof
def test_prefill_finishes_nothing_whose_outputs_are_not_out(bus: Bus, pipeline: Pipeline) -> None:
    publish_messages(bus, make_messages(pipeline.request_topic("interactive"), 1))
    with bus.join_group("prefill", "a") as member:
        (d,) = take_deliveries(member, 1)
        with pytest.raises(RequestTooLarge):
            member.settle([Settlement(d, [Outgoing(pipeline.job_topic("batch"), b"z" * (MAX_MESSAGE_BYTES + 1))])])
        assert member.is_holding(d)


def test_a_closed_bus_has_freed_its_look_ups_and_opens_them_again(bus: Bus) -> None:
    before = bus.count_unsettled()
    bus.check_connection()
    bus.close()
    bus.close()
    assert bus.count_unsettled() == before
    bus.close()


def test_a_closed_watch_has_closed_its_bus(redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, closed = MemoryBus(pipeline), list[MemoryBus]()
    bus.create_topics()
    monkeypatch.setattr(bus, "close", lambda: closed.append(bus))
    monkeypatch.setattr(lag, "connect_bus", lambda *_: bus)
    watch = lag.LagWatch(Addresses(stream_url=redis_url, pipeline=pipeline.name), BusSettings())
    watch.read_latest()
    watch.close()
    watch.close()
    assert closed == [bus]
