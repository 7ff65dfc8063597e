"""One Redis connection of one's own, with its two halves apart: send now, read the replies later."""

from typing import Any

import redis

from penstock.redis.scripts import Script


class ScriptConnection:
    """A connection that knows one script. Belongs to one thread."""

    def __init__(self, client: "redis.Redis", script: Script) -> None:
        self._pool = client.connection_pool
        self._script = script
        self._connection: Any = None

    def send_commands(self, packed: bytes) -> None:
        """Write commands and leave their replies. Raises `redis.ConnectionError` or `redis.TimeoutError`."""
        connection = self._connection or self._open_connection()
        connection.send_packed_command([packed], check_health=False)

    def read_reply(self) -> Any:
        """The next reply. Raises as `send_commands` does, or `redis.ResponseError` when the reply is an error."""
        if self._connection is None:
            raise redis.ConnectionError("the connection was closed with replies outstanding")
        return self._connection.read_response()

    def can_read(self, timeout_s: float) -> bool:
        """Whether there is something to read within a time: a reply, or the connection's end."""
        return self._connection is None or bool(self._connection.can_read(timeout_s))

    def close(self) -> None:
        """Drop the connection; the next `send_commands` opens it anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _open_connection(self) -> Any:
        connection: Any = self._pool.get_connection()
        try:
            connection.send_command("SCRIPT", "LOAD", self._script.text)
            connection.read_response()
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        self._connection = connection
        return connection


def encode_bulk_strings(*values: bytes) -> bytes:
    """`values` as RESP bulk strings, one after the other."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
