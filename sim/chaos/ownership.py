"""Which requests the bus has given to a worker. A dead worker keeps them until the bus notices its death."""

from collections.abc import Iterable
from typing import Any, cast

import redis
from confluent_kafka.admin import AdminClient

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.messages import extract_request_id
from penstock.names import Pipeline, Stage

MAX_ENTRIES = 10_000
READ_TIMEOUT_S = 0.3


def read_owned_requests(addresses: Addresses, client: "redis.Redis", stage: Stage, name: str) -> set[str]:
    """Return the ids of the interactive requests that only this worker of a stage is given.

    On Redis Streams these are those that it fetched and did not settle; on Kafka all that are in its partitions, also
    those that were settled long ago.
    """
    pipeline = Pipeline(addresses.pipeline)
    topic, group = pipeline.input_topics(stage)["interactive"], pipeline.consumer_group(stage)
    if addresses.kafka:
        return _read_partitions(addresses, topic, _list_partitions(addresses, group, topic, name))
    return _read_pending(client, pipeline.stream_key(topic), group, name)


def read_members(addresses: Addresses, group: str) -> list[str]:
    """Return who has partitions in a Kafka group, by the brokers; who died and came again may be there twice."""
    return [member.client_id for member in _describe_members(addresses, group) if member.assignment.topic_partitions]


def _read_pending(client: "redis.Redis", key: str, group: str, name: str) -> set[str]:
    entries = cast(Any, client.xpending_range(key, group, "-", "+", MAX_ENTRIES))
    own = {entry["message_id"] for entry in entries if entry["consumer"].startswith(f"{name}/".encode())}
    kept = cast(Any, client.xrange(key, count=MAX_ENTRIES))
    return _extract_ids(fields[b"value"] for entry, fields in kept if entry in own)


def _read_partitions(addresses: Addresses, topic: str, numbers: set[int]) -> set[str]:
    follower = connect_bus(addresses, BusSettings()).follow_topic(topic, {})
    values: list[bytes] = []
    try:
        while found := follower.read_messages(READ_TIMEOUT_S):
            values += [one.message.value for one in found if one.message is not None and int(one.partition) in numbers]
    finally:
        follower.close()
    return _extract_ids(values)


def _list_partitions(addresses: Addresses, group: str, topic: str, name: str) -> set[int]:
    members = [member for member in _describe_members(addresses, group) if member.client_id == name]
    places = [place for member in members for place in member.assignment.topic_partitions]
    return {place.partition for place in places if place.topic == topic}


def _describe_members(addresses: Addresses, group: str) -> list[Any]:
    admin = AdminClient({"bootstrap.servers": addresses.kafka, "log_level": 0})
    return list(admin.describe_consumer_groups([group])[group].result().members)


def _extract_ids(values: Iterable[bytes]) -> set[str]:
    return {found for value in values if (found := extract_request_id(value, None)) is not None}
