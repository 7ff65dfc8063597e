"""Both buses, made in the same way in tests and in their child processes."""

from collections.abc import Mapping

from confluent_kafka import TopicPartition

from penstock.bus.contract import Bus, Delivery, Member, Outgoing, Settlement
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.offsets import StartPosition
from penstock.bus.streams.bus import StreamsBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline, PriorityClass
from sim.waiting import wait_for

SETTINGS = BusSettings(partitions=2, session_timeout_s=30.0, transaction_timeout_s=30.0)
"""Timeouts are long, as servers take a member that is slow on a loaded machine for one that is gone."""
SHORT_TIMEOUT_SETTINGS = SETTINGS.model_copy(update={"session_timeout_s": 1.0, "transaction_timeout_s": 3.0})
"""For members that others are to find gone, and for writes that the broker does not take: these timeouts end both."""
CAPACITY: Mapping[PriorityClass, int] = {"interactive": 100, "batch": 100}


def make_bus(kind: str, pipeline: Pipeline, address: str, settings: BusSettings = SETTINGS) -> Bus:
    if kind == "kafka":
        return KafkaBus(pipeline, address, settings)
    return StreamsBus(pipeline, address, settings)


def begin_with_first(place: TopicPartition, _: object) -> StartPosition:
    """Begin a partition without a commit with its first message."""
    return StartPosition(max(0, place.offset), place.metadata or "", None)


def take_deliveries(member: Member, count: int, room: Mapping[PriorityClass, int] = CAPACITY) -> list[Delivery]:
    """Poll until there are `count` deliveries."""
    taken: list[Delivery] = []

    def are_there() -> bool:
        left: dict[PriorityClass, int] = {
            priority_class: num - sum(d.priority_class == priority_class for d in taken)
            for priority_class, num in room.items()
        }
        taken.extend(member.poll(0.5, left))
        return len(taken) >= count

    if count:
        wait_for(are_there, f"{count} deliveries", every_s=0)
    return taken


def publish_messages(bus: Bus, messages: list[Outgoing]) -> None:
    publisher = bus.create_publisher()
    publisher.publish(messages)
    publisher.close()


def make_messages(topic: str, count: int) -> list[Outgoing]:
    return [Outgoing(topic, str(number).encode(), key=f"k{number}") for number in range(count)]


def make_settlement(pipeline: Pipeline, delivery: Delivery) -> Settlement:
    return Settlement(delivery, [Outgoing(pipeline.results_topic, delivery.value, delivery.key)])


def list_values(messages: list[Outgoing]) -> list[bytes]:
    return sorted(message.value for message in messages)
