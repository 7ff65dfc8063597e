"""Messages that are deleted before they are read, and commits that the brokers forget."""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import redis
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.bus.contract import Bus, Delivery, Outgoing, Settlement
from penstock.bus.kafka import member as kafka_member
from penstock.bus.kafka import places
from penstock.bus.kafka.admin_lookups import CommittedOffsets
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.orphans import KafkaOrphanReader
from penstock.bus.lost import read_lost
from penstock.bus.streams import member as streams_member
from penstock.bus.streams.bus import StreamsBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline, Stage
from penstock.redis.client import redis_client
from penstock.testing.bus import MemoryBus
from sim.waiting import wait_for
from tests.bus.buses import list_values, make_settlement, publish_messages, take_deliveries
from tests.draws import mark_some


@pytest.fixture
def noted_bus(kafka: str, redis_url: str, pipeline: Pipeline) -> KafkaBus:
    """Kafka with one partition a topic, and a Redis with its notes."""
    made = KafkaBus(pipeline, kafka, BusSettings(partitions=1, transaction_timeout_s=30.0), redis_url=redis_url)
    made.create_topics()
    return made


def delete_first(bus: Bus, places: list[str]) -> None:
    """Delete the first messages of a topic, as retention or an operator does."""
    if isinstance(bus, KafkaBus):
        ends: dict[tuple[str, int], int] = {}
        for place in places:
            topic, _, position = place.rpartition("@")
            number, _, offset = position.partition(":")
            ends[topic, int(number)] = max(ends.get((topic, int(number)), 0), int(offset) + 1)
        admin, before = AdminClient(bus.clients), [TopicPartition(*one, end) for one, end in ends.items()]
        for done in admin.delete_records(before).values():
            done.result()
    for place in places:
        topic, _, position = place.rpartition("@")
        if isinstance(bus, StreamsBus):
            redis_client(bus.url).xdel(bus.pipeline.stream_key(topic), position)
        elif isinstance(bus, MemoryBus):
            del bus.topics[topic].entries[int(position)]


def test_messages_that_are_deleted_unread_are_told_and_counted(
    bus: Bus, bus_kind: str, pipeline: Pipeline, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished before does not count."""
    monkeypatch.setattr(streams_member, "LOST_CHECK_S", 0.0)
    if isinstance(bus, KafkaBus):
        bus = KafkaBus(pipeline, bus.bootstrap, bus.settings, redis_url=redis_url)
    topic, read = pipeline.request_topic("batch"), partial(read_lost, redis_client(redis_url), pipeline)
    with bus.join_group("prefill", "a") as member:
        publish_messages(bus, [Outgoing(topic, b"done", "k")])
        (done,) = take_deliveries(member, 1)
        member.settle([make_settlement(pipeline, done)])
    with contextlib.closing(bus.create_publisher()) as publisher:
        places = [publisher.publish([Outgoing(topic, str(number).encode(), "k")])[0] for number in range(8)]
    assert bus.find_gone([done.name, *places]) == {done.name}

    delete_first(bus, places[:3])
    with bus.join_group("prefill", "b") as member:
        assert bus.find_gone(places) == set(places[:3])
        taken = take_deliveries(member, 5)
        wait_for(lambda: bus_kind == "memory" or (member.poll(0.0, {}) == [] and read()), "it is told")
        member.settle([Settlement(one) for one in taken])
        assert list_values([Outgoing(topic, one.value) for one in taken]) == [b"3", b"4", b"5", b"6", b"7"]
    with bus.join_group("prefill", "c") as member:
        assert member.poll(0.0, {"batch": 1}) == []
    assert bus_kind == "memory" or read() == {topic: 3}


def test_a_stream_that_was_deleted_loses_what_it_still_had(
    streams_bus: StreamsBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_member, "LOST_CHECK_S", 0.0)
    topic = pipeline.request_topic("interactive")
    key, client = pipeline.stream_key(topic), redis_client(streams_bus.url)
    with streams_bus.join_group("prefill", "a") as member:
        publish_messages(streams_bus, [Outgoing(topic, b"x", "k")] * 5)
        taken = take_deliveries(member, 2, {"interactive": 2})
        member.settle([Settlement(one) for one in taken])
        member.poll(0.0, {"interactive": 0})
        for write in (lambda: None, lambda: publish_messages(streams_bus, [Outgoing(topic, b"new", "k")])):
            client.delete(key)
            write()  # type: ignore[no-untyped-call]
            member.poll(0.0, {"interactive": 0})
        assert read_lost(client, pipeline) == {topic: 3}
        assert take_deliveries(member, 1)[0].value == b"new"
        client.xtrim(key, maxlen=0)
        member.poll(0.0, {"interactive": 0})
        assert read_lost(client, pipeline) == {topic: 4}


def forget_commits(bus: KafkaBus, stage: Stage) -> None:
    """Do what brokers do where a group was empty for their retention of offsets."""
    group, admin = bus.pipeline.consumer_group(stage), AdminClient(bus.clients)

    def is_forgotten() -> bool:
        try:
            admin.delete_consumer_groups([group])[group].result()
        except KafkaException:  # the last member has not left yet
            return False
        return True

    wait_for(is_forgotten, "its offsets are gone")


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("is_noted", mark_some([True, False], pytest.mark.proof))
def test_a_group_goes_on_where_it_was_though_the_brokers_forget_that(
    noted_bus: KafkaBus, redis_url: str, pipeline: Pipeline, stage: Stage, is_noted: bool
) -> None:
    """By its notes in Redis; and by the last results, where a member was killed before it noted what it had committed.

    Here that is all of it. So do who reads a dead member's partitions, which nobody has begun since, and a member that
    gets them from one that had begun them.
    """
    topic = pipeline.input_topics(stage)["interactive"]
    with contextlib.closing(noted_bus.create_publisher()) as publisher:
        delete_first(noted_bus, publisher.publish([Outgoing(pipeline.results_topic, b"old", "k")]))
        for number in range(6):  # one by one: of messages that are sent together, a retry may change the order
            publisher.publish([Outgoing(topic, str(number).encode(), f"r{number}")])
    with noted_bus.join_group(stage, "a") as member:
        taken = take_deliveries(member, 6)
        for one in (taken[0], taken[1], taken[3]):
            member.settle([make_settlement(pipeline, one)])
    if not is_noted:
        redis_client(redis_url).delete(pipeline.finished_key)
    forget_commits(noted_bus, stage)
    other = KafkaBus(pipeline, noted_bus.bootstrap, noted_bus.settings, redis_url=redis_url)
    keeper = places.PlaceKeeper(pipeline, other.clients, redis_url, other.pace)
    with contextlib.closing(KafkaOrphanReader(pipeline, stage, other.clients, keeper.find_start)) as reader:
        orphans = list[Delivery]()
        while len(orphans) < (3 if is_noted else 6):
            orphans += reader.read_orphans([f"{topic}:0"], 9)
        assert [one.value for one in orphans if one.since_result_s > 0] == [b"2", b"4", b"5"]
    group = CommittedOffsets(noted_bus.clients, pipeline.consumer_group(stage))
    with other.join_group(stage, "first") as member, contextlib.closing(group):
        take_deliveries(member, 3 if is_noted else 6)
        wait_for(lambda: group.read_offsets([(topic, 0)])[topic, 0][0] >= 0, "the brokers are told where it begins")
    with other.join_group(stage, "b") as member:
        again = take_deliveries(member, 3 if is_noted else 6)
        assert [one.value for one in again if one.since_result_s > 0] == [b"2", b"4", b"5"]
        member.settle([Settlement(one) for one in again if one.since_result_s == 0])
        assert member.poll(0.3, {"interactive": 5}) == []
        wait_for(lambda: noted_bus.count_unsettled()[topic] == 3, "the brokers know it again")
    assert read_lost(redis_client(redis_url), pipeline) == {}


def test_a_topic_that_was_made_anew_begins_at_its_beginning_and_what_it_had_is_lost(
    noted_bus: KafkaBus, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first member left before it asked for the topic's end."""
    monkeypatch.setattr(kafka_member, "COUNT_INTERVAL_S", 1e9)
    topic = pipeline.request_topic("interactive")
    publish_messages(noted_bus, [Outgoing(topic, b"old", f"r{number}") for number in range(6)])
    with noted_bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, 6)
        member.settle([make_settlement(pipeline, one) for one in taken[:4]])
        wait_for(lambda: _read_note(noted_bus, topic)[1:3] == [b"4", b"2"], "it is noted")
    _make_anew(noted_bus, topic)
    publish_messages(noted_bus, [Outgoing(topic, b"new", f"n{number}") for number in range(2)])
    with noted_bus.join_group("prefill", "b") as member:
        assert [one.value for one in take_deliveries(member, 2)] == [b"new", b"new"]
        wait_for(lambda: read_lost(redis_client(redis_url), pipeline) == {topic: 2}, "it is told")


def test_an_answer_about_the_topic_before_is_not_kept(
    noted_bus: KafkaBus, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the partitions of the new topic did. Each lost message is counted once, though a reply is lost."""
    topic = pipeline.request_topic("batch")
    keeper = places.PlaceKeeper(pipeline, noted_bus.clients, redis_url, noted_bus.pace)
    keeper.note_read((topic, 0), 8)
    real = AdminClient(noted_bus.clients)
    admin = keeper._admin = mock.Mock(wraps=real)

    def answer_late(*words: Any, **options: Any) -> Any:
        found = real.describe_topics(*words, **options)
        found[topic].result()
        admin.describe_topics.side_effect = None
        _make_anew(noted_bus, topic)
        keeper.begin_partitions([(topic, 0)])
        return found

    admin.describe_topics.side_effect = answer_late
    keeper.note_commits({(topic, 0): (7, "")})
    assert _read_note(noted_bus, topic)[1:] == [b"7", b"2", b""]

    run = places.NOTE.run

    def lose_reply(*words: Any) -> None:
        monkeypatch.setattr(places.NOTE, "run", run)
        run(*words)
        raise redis.ConnectionError

    monkeypatch.setattr(places.NOTE, "run", lose_reply)
    monkeypatch.setattr(places, "NOTE_RETRY_S", 0.0)
    for _ in range(2):
        keeper.note_commits({(topic, 0): (1, "")})
    assert _read_note(noted_bus, topic)[1:] == [b"1", b"0", b""]
    assert read_lost(redis_client(redis_url), pipeline) == {topic: 2}


def _read_note(bus: KafkaBus, topic: str) -> list[bytes]:
    note: Any = redis_client(bus.redis_url).hget(bus.pipeline.finished_key, f"{topic}:0")
    return (note or b"").split(b" ")


def _make_anew(bus: KafkaBus, topic: str) -> None:
    admin = AdminClient(bus.clients)
    admin.delete_topics([topic])[topic].result()
    wait_for(lambda: topic not in admin.list_topics(timeout=10).topics, "it is gone")
    wait_for(partial(_create, admin, topic), "it is there again")


def _create(admin: AdminClient, topic: str) -> bool:
    with contextlib.suppress(KafkaException):  # the old one is being deleted, or the new one is there
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    return topic in admin.list_topics(timeout=10).topics


def test_nothing_is_noted_while_redis_is_away_and_all_of_it_later(
    noted_bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "NOTE_RETRY_S", 0.0)
    partition, num_tries = (pipeline.request_topic("batch"), 0), 0
    run = places.NOTE.run
    keeper, other = (
        places.PlaceKeeper(pipeline, noted_bus.clients, noted_bus.redis_url, noted_bus.pace) for _ in range(2)
    )

    def fail_once(*words: object) -> object:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise redis.ConnectionError("away")
        return run(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(places.NOTE, "run", fail_once)
    keeper.tell_lost(partition, 0, 2, 2, "are gone")
    for _ in range(3):
        keeper.note_commits({partition: (7, "")})
    assert num_tries == 2
    place = TopicPartition(*partition, -1001)
    assert other.find_start(place, lambda _: (9, 9))[:4] == (7, "", None, 9)
    assert read_lost(redis_client(noted_bus.redis_url), pipeline) == {partition[0]: 2}
    other.note_commits({partition: (5, "")})
    assert keeper.find_start(place, lambda _: (9, 9)).offset == 7, "a note does not go back"
