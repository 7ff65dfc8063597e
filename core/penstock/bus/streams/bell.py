"""Waits for a message in the streams of several groups."""

import threading
from collections.abc import Mapping
from typing import Any

from penstock.bus.streams.client import bus_errors, connect_client
from penstock.bus.streams.member import MAX_BLOCK_S
from penstock.names import CLASSES, STAGES, Pipeline, PriorityClass

BEGINNING = b"0-0"


class StreamsBell:
    """Implements `joined.Bell`: a command that takes messages does so for one group, one that only looks reads all.

    It wakes its thread when a stream gets an entry behind those that its group has delivered. All members that wait
    look at that entry, and one of them takes it.
    """

    def __init__(self, pipeline: Pipeline, url: str) -> None:
        self._client = connect_client(url)
        self._groups: list[tuple[PriorityClass, str, bytes]] = [
            (klass, pipeline.stream_key(pipeline.input_topics(stage)[klass]), pipeline.consumer_group(stage).encode())
            for stage in STAGES
            for klass in CLASSES
        ]
        self._after: dict[Any, Any] = {}
        self._closing = threading.Event()

    def arm(self, capacity: Mapping[PriorityClass, int]) -> None:
        """Note what the groups have delivered: the bell rings for what is behind that. Raise `BusUnavailable`."""
        watched = [(key, group) for klass, key, group in self._groups if capacity.get(klass, 0) > 0]
        with bus_errors(), self._client.pipeline(transaction=False) as batch:
            for key, _ in watched:
                batch.xinfo_groups(key)
            replies = batch.execute(raise_on_error=False)
        self._after = {key: _find_last(reply, group) for (key, group), reply in zip(watched, replies, strict=True)}

    def wait(self, timeout_s: float) -> None:
        """Wait for an entry, no longer than members may wait before they look for deliveries of the dead."""
        wait_s = min(MAX_BLOCK_S, timeout_s)
        if not self._after:
            self._closing.wait(wait_s)
            return
        with bus_errors():
            self._client.xread(self._after, count=1, block=max(1, int(1000 * wait_s)))

    def close(self) -> None:
        """Free the connection."""
        self._closing.set()
        self._client.close()


def _find_last(reply: Any, group: bytes) -> bytes:
    """Return the last entry that a group has delivered; where the server has lost the group, the stream's beginning.

    Other errors come again when the streams are read.
    """
    groups = [] if isinstance(reply, Exception) else reply
    return next((found["last-delivered-id"] for found in groups if found["name"] == group), BEGINNING)
