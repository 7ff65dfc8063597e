"""Partitions of a dead member, read by another worker, on a real Kafka."""

from contextlib import ExitStack, closing
from unittest.mock import patch

import pytest

from penstock.bus.contract import Delivery, OrphanReader
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.member import KafkaMember
from penstock.bus.kafka.orphans import KafkaOrphanReader
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from sim.waiting import wait_for
from tests.bus.buses import begin_with_first, make_messages, make_settlement, publish_messages, take_deliveries


@pytest.fixture
def reader(kafka_bus: KafkaBus, exits: ExitStack) -> OrphanReader:
    made = KafkaOrphanReader(kafka_bus.pipeline, "prefill", kafka_bus.clients, begin_with_first)
    return exits.enter_context(closing(made))


def list_numbers(deliveries: list[Delivery]) -> list[int]:
    return [int(delivery.value) for delivery in deliveries]


def read(reader: OrphanReader, parts: list[str], count: int, most: int = 100) -> list[Delivery]:
    """Read until there are `count` deliveries."""
    found: list[Delivery] = []
    while len(found) < count:
        found += reader.read_orphans(parts, most)
    return found


def test_a_member_says_what_it_reads_of_what_is_interactive(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    publish_messages(kafka_bus, make_messages(pipeline.request_topic("interactive"), 1))
    with kafka_bus.join_group("prefill", "a") as member:
        assert isinstance(member, KafkaMember)
        take_deliveries(member, 1)
        assert member.list_partitions() == [f"{pipeline.request_topic('interactive')}:0"]
        with patch.object(member._pace, "describe_silence", lambda: "cut off"):
            assert member.list_partitions() == []
        member.stop_consuming()
        assert member.list_partitions() == []


def test_each_topic_is_dealt_out_to_all_members(kafka: str, pipeline: Pipeline) -> None:
    """Not one all that is interactive, and the other all batch work."""
    bus = KafkaBus(pipeline, kafka, BusSettings(partitions=4))
    bus.create_topics()
    with bus.join_group("prefill", "a") as one, bus.join_group("prefill", "b") as other:
        topic = pipeline.request_topic("interactive")
        halves = [[f"{topic}:0", f"{topic}:1"], [f"{topic}:2", f"{topic}:3"]]
        wait_for(
            lambda: sorted([sorted(one.list_partitions()), sorted(other.list_partitions())]) == halves, "each has half"
        )


def test_what_is_not_finished_is_read_once_while_it_is_asked_for(
    kafka_bus: KafkaBus, reader: OrphanReader, pipeline: Pipeline
) -> None:
    """Also what is finished beyond the committed offset is left out: the commit's metadata has it."""
    topic = pipeline.request_topic("interactive")
    part = [f"{topic}:0"]
    publish_messages(kafka_bus, make_messages(topic, 10))
    with kafka_bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, 10)
        order = list_numbers(taken)  # what is published at once may change places where a part is sent again
        member.settle([make_settlement(pipeline, taken[number]) for number in (0, 1, 4, 5)])
        wait_for(lambda: kafka_bus.count_unsettled()[topic] == 6, "that is committed")
        first = read(reader, part, 3, most=3)
        assert list_numbers(first) == [order[place] for place in (2, 3, 6)]
        assert list_numbers(read(reader, part, 3)) == order[7:]
        assert not any(delivery.is_held for delivery in first)
        assert (first[0].key, first[0].topic, first[0].priority_class) == (taken[2].key, topic, "interactive")
        assert first[0].timestamp_s == taken[2].timestamp_s
        assert reader.read_orphans(part, 100) == []
        publish_messages(kafka_bus, [*make_messages(topic, 12)[10:]])
        late = list_numbers(read(reader, part, 2))
        assert sorted(late) == [10, 11]
        assert reader.read_orphans([], 100) == []
        assert list_numbers(read(reader, part, 8)) == [*(order[place] for place in (2, 3, 6)), *order[7:], *late]
        member.settle([make_settlement(pipeline, delivery) for delivery in taken[2:4]])  # its owner lost nothing


def test_a_group_that_never_committed_is_read_from_the_beginning(kafka: str, pipeline: Pipeline) -> None:
    bus, topic = KafkaBus(pipeline, kafka, BusSettings(partitions=2)), pipeline.request_topic("interactive")
    bus.create_topics()
    assert set(bus.count_unsettled().values()) == {0}
    publish_messages(bus, make_messages(topic, 12))
    assert bus.count_unsettled()[topic] == 12
    with closing(KafkaOrphanReader(pipeline, "prefill", bus.clients, begin_with_first)) as reader:
        found = read(reader, [f"{topic}:0", f"{topic}:1"], 12)
        assert reader.read_orphans([f"{topic}:1"], 1) == []
        assert reader._starts.keys() == {(topic, 1)}, "what it gave back is forgotten"
    assert sorted(list_numbers(found)) == list(range(12))
    assert {delivery.position.split(":")[0] for delivery in found} == {"0", "1"}


def test_parts_that_are_not_there_or_of_another_topic_are_passed_over(
    kafka_bus: KafkaBus, reader: OrphanReader, pipeline: Pipeline
) -> None:
    topic = pipeline.request_topic("interactive")
    publish_messages(kafka_bus, make_messages(topic, 1))
    parts = [f"{topic}:0", f"{topic}:7", "penstock.elsewhere.requests.interactive:0"]
    assert list_numbers(read(reader, parts, 1)) == [0]
    assert reader.read_orphans(parts, 100) == []
