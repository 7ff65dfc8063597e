"""Tells whether streams have new entries, without asking the server each time."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from penstock.bus.streams.client import connect_client

WATCH_S = 10.0
"""How long one command waits on the server."""


class StreamsBell:
    """Watches streams by one command that waits on the server, on a connection of its own.

    It rings when one of them gets an entry behind those that were delivered when the command was sent. All members that
    watch a stream look for that entry, and one of them takes it. Methods raise errors of Redis' client; after one,
    `reset` is to be called.
    """

    def __init__(self, url: str) -> None:
        self._client = connect_client(url)
        self._connection: Any = None
        self._watched: frozenset[str] = frozenset()
        """The keys of the streams that the command waits for; none where no command waits."""

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits, as far as is known."""
        return bool(self._watched)

    def is_watching(self, streams: Collection[str]) -> bool:
        """Return whether it watches all these streams, and has not rung."""
        if self._watched:
            self.wait(0.0)
        return self._watched.issuperset(streams)

    def watch(self, after: Mapping[str, bytes]) -> None:
        """Ring when one of these streams has an entry behind the named one."""
        if not after or self._watched.issuperset(after):
            return
        if self._watched:
            self.reset()
        if self._connection is None:
            self._connection = self._client.connection_pool.get_connection()
        limit = ("COUNT", 1, "BLOCK", int(1000 * WATCH_S))
        self._connection.send_command("XREAD", *limit, "STREAMS", *after, *after.values(), check_health=False)
        self._watched = frozenset(after)

    def wait(self, timeout_s: float) -> None:
        """Return when it has rung, or the command has waited in vain, or after `timeout_s`."""
        if self._connection.can_read(timeout_s):
            self._watched = frozenset()
            self._connection.read_response()

    def reset(self) -> None:
        """Watch nothing."""
        connection, self._connection, self._watched = self._connection, None, frozenset()
        if connection is not None:
            connection.disconnect()
            with contextlib.suppress(Exception):
                self._client.connection_pool.release(connection)

    def close(self) -> None:
        """Free the connection."""
        self.reset()
        self._client.close()
