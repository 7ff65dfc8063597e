"""Partitions at which readers stand still: a transaction that does not end holds up all that was written after it.

Readers of what is committed get no further than the last stable offset, where the oldest open transaction begins. A
worker's is open for milliseconds, so that offset follows the log's end; where it stays, nobody ends the transaction.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka import ANSWER_S, bus_errors

OFFSETS = "__consumer_offsets"
"""Commits of groups are in transactions too: one that hangs there keeps a group from starting."""
LOOK_S = 0.5


class Stuck(NamedTuple):
    """A partition, and how far its readers are behind its end."""

    topic: str
    partition: int
    stable: int
    """The last stable offset: where readers wait."""
    end: int


def find_stuck(clients: Mapping[str, Any], topics: Iterable[str], patience_s: float) -> list[Stuck]:
    """Those of the topics' partitions, and of the groups' commits, whose last stable offset stays for `patience_s`.

    At once where every reader is at the end. `clients`: the settings of the bus's. Raises `BusUnavailable`.
    """
    admin = AdminClient(dict(clients))
    with bus_errors():
        known = admin.list_topics(timeout=ANSWER_S).topics
        places = [
            (topic, number) for topic in [*topics, OFFSETS] if topic in known for number in known[topic].partitions
        ]
        found = _behind(admin, places)
        until = time.monotonic() + patience_s
        while found and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            now = {one[:2]: one for one in _behind(admin, [one[:2] for one in found])}
            found = [now[one[:2]] for one in found if one[:2] in now and now[one[:2]].stable == one.stable]
    return found


def _behind(admin: AdminClient, places: list[tuple[str, int]]) -> list[Stuck]:
    """Asked in this order, as the stable offset may only move on meanwhile."""
    ends = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED)
    stables = _ends(admin, places, IsolationLevel.READ_COMMITTED)
    return [Stuck(*place, stables[place], ends[place]) for place in places if stables[place] < ends[place]]


def _ends(admin: AdminClient, places: list[tuple[str, int]], level: IsolationLevel) -> dict[tuple[str, int], int]:
    if not places:
        return {}
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked: dict[TopicPartition, Future[Any]] = admin.list_offsets(
        {TopicPartition(*place): latest for place in places}, isolation_level=level, request_timeout=ANSWER_S
    )
    return {(place.topic, place.partition): future.result(ANSWER_S).offset for place, future in asked.items()}
