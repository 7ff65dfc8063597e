"""A member of both groups, on each bus, over one member of each group."""

import math
import threading
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import redis

from penstock.bus.contract import Bus, Delivery, Member, Outgoing, Settlement
from penstock.bus.joined import JoinedMember
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.joined import JoinedStreams
from penstock.bus.streams.member import READ, StreamsMember
from penstock.errors import BusUnavailable, DeliveryLost, RequestTooLarge
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import Pipeline, PriorityClass
from penstock.redis.client import redis_client
from penstock.testing.bus import MemoryBus
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import CAPACITY, list_values, make_settlement, publish_messages, take_deliveries


def publish_one_of_each(bus: Bus, pipeline: Pipeline) -> None:
    """Publish a request and a job of each class; the values are the topics' last words."""
    topics = [*pipeline.input_topics("prefill").values(), *pipeline.input_topics("decode").values()]
    publish_messages(bus, [Outgoing(topic, ".".join(topic.split(".")[-2:]).encode()) for topic in topics])


def take_one_of_each(member: Member) -> list[Delivery]:
    return sorted(take_deliveries(member, 4), key=lambda delivery: delivery.value)


def test_jobs_come_before_requests_and_interactive_before_batch(bus: Bus, pipeline: Pipeline) -> None:
    publish_one_of_each(bus, pipeline)
    with bus.join_group("auto", "a") as member:
        if isinstance(bus, KafkaBus):
            wait_for(lambda: len(member.list_prefetched()) == 4, "all is fetched")
            words = [delivery.value for delivery in member.list_prefetched()]
            assert words == [b"jobs.interactive", b"requests.interactive", b"jobs.batch", b"requests.batch"]
        assert [one.value for one in member.poll(0.0, {"interactive": 1, "batch": 1})] == [
            b"jobs.interactive",
            b"jobs.batch",
        ]
        rest = member.poll(0.0, CAPACITY)
        assert [one.value for one in rest] == [b"requests.interactive", b"requests.batch"]
        assert member.count_held() == 4
        member.settle([make_settlement(pipeline, one) for one in rest])
        assert ([member.is_holding(one) for one in rest], member.count_held()) == ([False, False], 2)
    with bus.join_group("decode", "b") as other:
        assert sorted(one.value for one in take_deliveries(other, 2)) == [b"jobs.batch", b"jobs.interactive"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_waiting_member_wakes_for_either(
    bus: Bus, pipeline: Pipeline, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing wakes it, the call runs into its time limit."""
    monkeypatch.setattr("penstock.bus.streams.member.MAX_BLOCK_S", 4 * PATIENCE_S)
    topic = pipeline.input_topics("decode" if stage == "decode" else "prefill")["interactive"]
    with bus.join_group("auto", "a") as member:
        assert isinstance(member, JoinedMember)
        assert member.poll(0.0, CAPACITY) == []
        has_armed, found = threading.Event(), list[Delivery]()
        bell: Any = member._reader._bell if isinstance(member, JoinedStreams) else member._bell
        wait = bell.wait

        def wait_armed(limit_s: float) -> None:
            if limit_s > 0:
                has_armed.set()
            wait(limit_s)

        monkeypatch.setattr(bell, "wait", wait_armed)
        waiter = threading.Thread(target=lambda: found.extend(member.poll(4 * PATIENCE_S, CAPACITY)))
        waiter.start()
        assert has_armed.wait(PATIENCE_S)
        publish_messages(bus, [Outgoing(topic, b"x")])
        waiter.join(PATIENCE_S)
        assert [one.topic for one in found] == [topic]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each look at the streams."""
    run_once, looks = READ.run_once, list[str]()

    def count(*given: Any) -> list[Any]:
        looks.append("look")
        return run_once(*given)

    monkeypatch.setattr(READ, "run_once", count)
    return looks


def test_the_server_is_not_asked_again_before_the_bell_has_rung(
    streams_bus: StreamsBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count_reads(monkeypatch)
    with streams_bus.join_group("auto", "a") as member, streams_bus.join_group("auto", "b") as other:
        for _ in range(5):
            assert member.poll(0.0, CAPACITY) == []
        assert len(looks) == 1
        publish_messages(streams_bus, [Outgoing(pipeline.request_topic("interactive"), b"x")])
        assert len(take_deliveries(other, 1)) == 1
        before = len(looks)
        wait_for(lambda: member.poll(0.0, CAPACITY) or len(looks) > before, "the other's message rang this one's bell")
        assert member.poll(0.0, CAPACITY) == []
        assert len(looks) == before + 1


def test_who_got_all_that_there_was_asks_again_when_there_is_more(
    streams_bus: StreamsBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that got as many as it had room for asks at once."""
    looks, requests = count_reads(monkeypatch), pipeline.request_topic("interactive")
    with streams_bus.join_group("auto", "a") as member:
        publish_messages(streams_bus, [Outgoing(requests, b"%d" % number) for number in range(3)])
        assert len(member.poll(0.0, {"interactive": 2, "batch": 1})) == 2
        assert len(member.poll(0.0, CAPACITY)) == 1
        assert len(looks) == 2
        for _ in range(5):
            assert member.poll(0.0, CAPACITY) == []
        assert len(looks) == 2
        publish_messages(streams_bus, [Outgoing(pipeline.job_topic("batch"), b"y")])
        wait_for(lambda: len(member.poll(0.0, CAPACITY)) == 1, "the next message rings it")


def test_a_class_without_room_rings_no_bell_where_its_messages_wait(
    streams_bus: StreamsBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would look again and again at what it must not take. Where none waits, the bell does ring for it."""
    looks, batch = count_reads(monkeypatch), Outgoing(pipeline.request_topic("batch"), b"x")
    no_batch: dict[PriorityClass, int] = {"interactive": 2, "batch": 0}
    with streams_bus.join_group("auto", "a") as member:
        assert member.poll(0.0, no_batch) == []
        publish_messages(streams_bus, [batch])
        wait_for(lambda: member.poll(0.0, no_batch) or len(looks) == 2, "the first batch message rings it")
        for _ in range(5):
            assert member.poll(0.0, no_batch) == []
        assert len(looks) == 2
        publish_messages(streams_bus, [Outgoing(pipeline.job_topic("interactive"), b"y")])
        wait_for(lambda: len(member.poll(0.0, no_batch)) == 1, "another class rings it")
        assert [one.value for one in member.poll(0.0, CAPACITY)] == [b"x"]


def test_it_goes_on_where_the_server_has_lost_its_streams(
    streams_bus: StreamsBus, pipeline: Pipeline, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bus.streams.bell.WATCH_S", 0.05)
    with streams_bus.join_group("auto", "a") as member:
        assert member.poll(0.0, CAPACITY) == []
        with redis_client(redis_url) as client:
            client.delete(*map(pipeline.stream_key, pipeline.all_topics()))
        publish_one_of_each(streams_bus, pipeline)
        assert len(take_one_of_each(member)) == 4


def test_what_is_known_to_be_its_own_is_not_lost_when_reading_fails(
    streams_bus: StreamsBus, pipeline: Pipeline
) -> None:
    publish_one_of_each(streams_bus, pipeline)
    joined, both = join_streams(streams_bus)
    run_once = READ.run_once

    def lose_reply(*given: Any) -> list[Any]:
        run_once(*given)
        raise redis.ConnectionError("the reply is lost")

    def refuse(*_: Any) -> list[Any]:
        raise redis.ConnectionError("the connection is lost")

    with joined as member:
        with mock.patch.object(READ, "run_once", lose_reply), pytest.raises(BusUnavailable):
            member.poll(0.0, CAPACITY)
        publish_one_of_each(streams_bus, pipeline)
        with mock.patch.object(READ, "run_once", refuse), pytest.raises(BusUnavailable):
            member.poll(0.0, CAPACITY)
        assert [one.count_held() for one in both] == [2, 2]
        assert len(take_deliveries(member, 8)) == 8


def test_what_one_member_settled_is_left_out_when_the_rest_is_settled_again(bus: Bus, pipeline: Pipeline) -> None:
    publish_one_of_each(bus, pipeline)
    with bus.join_group("auto", "a") as member:
        _, lost, request, other = take_one_of_each(member)
        member.settle([Settlement(lost)])
        with pytest.raises(RequestTooLarge):
            member.settle([make_settlement(pipeline, other), Settlement(lost, [make_large(pipeline)])])
        assert member.is_holding(other)
        first, second = make_settlement(pipeline, request), make_settlement(pipeline, other)
        with pytest.raises(DeliveryLost) as raised:
            member.settle([first, make_settlement(pipeline, lost)])
        assert raised.value.deliveries == [lost]
        member.settle([first, second])
        assert list_values(bus.read_all(pipeline.results_topic)) == [b"requests.batch", b"requests.interactive"]
        with pytest.raises(DeliveryLost):
            member.settle([first])
        assert member.count_held() == 1


def make_large(pipeline: Pipeline) -> Outgoing:
    return Outgoing(pipeline.results_topic, b"x" * 2 * MAX_REQUEST_BYTES)


def test_what_one_member_gave_out_is_not_lost_when_the_other_fails(pipeline: Pipeline) -> None:
    bus = MemoryBus(pipeline)
    bus.create_topics()
    publish_one_of_each(bus, pipeline)
    room: dict[PriorityClass, int] = {"interactive": 1, "batch": 2}
    with bus.join_group("auto", "a") as member:
        assert isinstance(member, JoinedMember)
        with mock.patch.object(member._requests, "poll", side_effect=BusUnavailable("away")):
            for _ in range(2):
                with pytest.raises(BusUnavailable):
                    member.poll(0.0, room)
        assert [one.value for one in member.poll(0.0, room)] == [b"jobs.interactive", b"jobs.batch", b"requests.batch"]


def test_it_reads_and_renews_for_both_groups(bus: Bus, pipeline: Pipeline) -> None:
    publish_one_of_each(bus, pipeline)
    with bus.join_group("auto", "a") as member:
        take_one_of_each(member)
        assert len(member.build_renewal(1.0)) == (3 if isinstance(bus, StreamsBus) else 0)
        readers = member.create_orphan_readers()
        both = [pipeline.request_topic("interactive"), pipeline.job_topic("interactive")]
        if isinstance(bus, KafkaBus):
            wait_for(
                lambda: {part.rpartition(":")[0] for part in member.list_partitions()} == set(both), "both are read"
            )
            assert [reader.topic for reader in readers] == both[::-1]
            for reader in readers:  # as if this member were dead: nothing is committed
                found: list[Delivery] = []
                while not found:
                    found = reader.read_orphans([f"{reader.topic}:{number}" for number in range(2)], 1)
                assert (found[0].topic, found[0].is_held) == (reader.topic, False)
                reader.close()
        else:
            assert (readers, member.list_partitions()) == ([], [])


def test_on_kafka_it_has_two_pollers_and_one_lookup_thread(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    with kafka_bus.join_group("auto", pipeline.name):
        names = [thread.name for thread in threading.enumerate() if thread.name.endswith(pipeline.name)]
        assert Counter(names) == {f"kafka-{pipeline.name}": 2, f"kafka-lookup-{pipeline.name}": 1}
    wait_for(
        lambda: not any(thread.name.endswith(pipeline.name) for thread in threading.enumerate()), "they have ended"
    )


def join_streams(bus: StreamsBus) -> tuple[JoinedMember, list[StreamsMember]]:
    """Join both groups, and return the member and its two, which have nothing to do now but to read."""
    member = bus.join_group("auto", "a")
    assert isinstance(member, JoinedMember)
    both = [one for one in (member._requests, member._jobs) if isinstance(one, StreamsMember)]
    for one in both:
        one._reclaim_at = one._renewed_s = math.inf
    return member, both


def test_streams_of_both_groups_are_read_in_one_round_trip(streams_bus: StreamsBus, pipeline: Pipeline) -> None:
    publish_one_of_each(streams_bus, pipeline)
    joined, (requests, _) = join_streams(streams_bus)
    with joined as member:
        with mock.patch.object(requests, "client", None):
            assert member.poll(0.0, {}) == []
            assert len(member.poll(0.0, CAPACITY)) == 4
        assert requests.count_held() == 2
