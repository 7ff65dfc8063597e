"""Partitions at which readers stand still: a transaction that does not end holds up all that was written after it.

Readers of what is committed get no further than the last stable offset, where the oldest open transaction begins. A
worker's is open for milliseconds, so that offset follows the log's end; where it stays, nobody ends the transaction.
"""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka.ask import Partition, list_partitions, read_log_offsets, retry_during_election
from penstock.bus.kafka.client import bus_errors

OFFSETS_TOPIC = "__consumer_offsets"
"""Commits of groups are in transactions too: one that hangs there keeps a group from starting."""
CHECK_INTERVAL_S = 0.5


class StuckPartition(NamedTuple):
    """A partition, and how far its readers are behind its end."""

    topic: str
    partition: int
    stable: int
    """The last stable offset: where readers wait."""
    end: int


def find_stuck_partitions(clients: Mapping[str, Any], topics: Iterable[str], patience_s: float) -> list[StuckPartition]:
    """Those of the topics' partitions, and of the groups' commits, whose last stable offset stays for `patience_s`.

    At once where every reader is at the end. `clients`: the settings of the bus's. Raises `BusUnavailable`.
    """
    admin = AdminClient(dict(clients))
    with bus_errors():
        found = retry_during_election(lambda: _find_behind(admin, list_partitions(admin, [*topics, OFFSETS_TOPIC])))
        until = time.monotonic() + patience_s
        while found and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(CHECK_INTERVAL_S, left_s))
            places = [one[:2] for one in found]
            now = {one[:2]: one for one in retry_during_election(partial(_find_behind, admin, places))}
            found = [now[one[:2]] for one in found if one[:2] in now and now[one[:2]].stable == one.stable]
    return found


def _find_behind(admin: AdminClient, places: list[Partition]) -> list[StuckPartition]:
    """Asked in this order, as the stable offset may only move on meanwhile."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    ends = read_log_offsets(admin, places, latest, IsolationLevel.READ_UNCOMMITTED)
    stables = read_log_offsets(admin, places, latest, IsolationLevel.READ_COMMITTED)
    return [StuckPartition(*place, stables[place], ends[place]) for place in places if stables[place] < ends[place]]
