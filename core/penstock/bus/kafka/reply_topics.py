"""What the brokers tell of the topics of requesters, before a reply is written to them."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    AdminClient,
    ConfigResource,
    ResourceType,
)

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.client import bus_errors
from penstock.errors import BusUnavailable

KNOWN_S, MISSING_S = 10.0, 3.0
"""For how long what was told of a topic holds, and that it does not exist. One lookup is for all topics of a batch."""
LOOKUP_TIMEOUT_S = 5.0
MAX_KNOWN_TOPICS = 10_000
ROOM_BYTES = 512
"""More than a batch has beside keys, values and headers of one message."""
LIMIT, MIN_IN_SYNC = "max.message.bytes", "min.insync.replicas"
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass
class _Topic:
    """A topic as the brokers told of it."""

    until_s: float
    refusal: str = ""
    in_sync: dict[int, int] = field(default_factory=dict)
    """How many replicas of each partition are in sync; 0 where it has no leader."""
    min_in_sync: int = 1
    """With fewer of them its brokers acknowledge nothing."""
    max_bytes: int | None = None
    """None where this process may not see it: then a message that is too large is refused when it is written."""


class ReplyTopics:
    """Knows the topics of requesters. For one thread."""

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._clients = clients
        self._admin: AdminClient | None = None
        self._known: dict[str, _Topic] = {}

    def find_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return why topics would not take replies; see `contract.Member.find_reply_refusals`."""
        now_s = time.monotonic()
        asked = {one.topic for one in replies}
        unknown = {one for one in asked if one not in self._known or self._known[one].until_s <= now_s}
        if unknown:
            if len(self._known) > MAX_KNOWN_TOPICS:
                self._known = {name: topic for name, topic in self._known.items() if name in asked - unknown}
            with bus_errors():
                self._known |= self._look_up(unknown)
        return [_find_refusal(self._known[one.topic], one) for one in replies]

    def _look_up(self, names: Iterable[str]) -> dict[str, _Topic]:
        """Return what the brokers tell of topics. Raise `KafkaException`, `TimeoutError` or `BusUnavailable`."""
        admin = self._admin = self._admin or AdminClient(dict(self._clients))
        missing_until_s, until_s = time.monotonic() + MISSING_S, time.monotonic() + KNOWN_S
        valid = sorted(one for one in names if _TOPIC_NAME.fullmatch(one))
        found = {one: _Topic(until_s, "it can be no topic of Kafka") for one in names if one not in valid}
        if not valid:
            return found
        asked = admin.describe_topics(
            TopicCollection(valid), include_authorized_operations=True, request_timeout=LOOKUP_TIMEOUT_S
        )
        for name, future in asked.items():
            try:
                told = future.result(LOOKUP_TIMEOUT_S)
            except KafkaException as raised:
                error: KafkaError = raised.args[0]
                if error.code() < 0:  # the client's own: no broker has answered
                    raise
                found[name] = _Topic(missing_until_s, error.str())  # whatever it is, it is about this topic alone
                continue
            in_sync = {one.id: 0 if one.leader is None else len(one.isr) for one in told.partitions}
            found[name] = topic = _Topic(until_s if in_sync else missing_until_s, in_sync=in_sync)
            if not in_sync:
                topic.refusal = "the brokers know no such topic"
            elif told.authorized_operations is not None and AclOperation.WRITE not in told.authorized_operations:
                topic.refusal = "the worker's user may not write to it"
        self._read_limits(admin, {name: topic for name, topic in found.items() if not topic.refusal})
        return found

    def _read_limits(self, admin: AdminClient, topics: Mapping[str, _Topic]) -> None:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        asked: dict[ConfigResource, Future[Any]] = (
            admin.describe_configs(resources, request_timeout=LOOKUP_TIMEOUT_S) if resources else {}
        )
        for resource, future in asked.items():
            try:
                settings = future.result(LOOKUP_TIMEOUT_S)
            except KafkaException as raised:
                if raised.args[0].retriable():
                    raise BusUnavailable(f"Kafka: {raised.args[0].str()}") from raised
            else:
                topic, limit, least = topics[resource.name], settings.get(LIMIT), settings.get(MIN_IN_SYNC)
                topic.max_bytes = int(limit.value) if limit and limit.value else None
                topic.min_in_sync = int(least.value) if least and least.value else 1


def _find_refusal(topic: _Topic, reply: Outgoing) -> str:
    if topic.refusal:
        return topic.refusal
    if reply.partition is not None and reply.partition not in topic.in_sync:
        return f"it has no partition {reply.partition}"
    asked = topic.in_sync.values() if reply.partition is None else [topic.in_sync[reply.partition]]
    if min(asked) < topic.min_in_sync:
        return "a partition of it has no leader, or too few replicas in sync, now"
    if topic.max_bytes is not None and reply.num_bytes + ROOM_BYTES > topic.max_bytes:
        return f"{reply.num_bytes:,} bytes; its {LIMIT} is {topic.max_bytes:,}"
    return ""
