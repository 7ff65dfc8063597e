"""One connection to a Redis server, for large values, which are received into and sent from the caller's memory.

redis-py connects (addresses, TLS, unix sockets). After that this module speaks RESP version 2 on its socket, in
pipelines: commands are sent, and the same number of replies is read in order. A caller that cannot read a reply to its
end closes the connection, so that no reply is taken for that of another command.
"""

import math
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from redis.connection import ConnectionInterface

BUFFER_BYTES = 64 * 2**10
"""Size of the buffer, and most bytes that are received ahead."""
LARGE_READ_AHEAD_BYTES = 512
"""Most bytes that are received ahead where values are large, as these have to be copied to their target."""
LARGE_VALUE_BYTES = 32 * 2**10
CHUNK_BYTES = 256 * 2**10
"""Values are received and hashed in chunks of at most this size, while they are in the processor's caches."""
MAX_VALUE_BYTES = 512 * 2**20
"""No Redis server sends a longer value."""
MAX_ITEMS = 2**20
MIN_BYTES_PER_S = 2**20
"""A server that is slower than this for longer than the timeout counts as failed."""
MAX_SENDMSG_PARTS = 512
"""Buffers in one call of `sendmsg`, which takes at most 1,024."""

Buffer = bytes | memoryview
Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


class UnexpectedReply(Exception):
    """The server sent no valid reply, or not the one expected."""


class ErrorReply(Exception):
    """An error that the server replied."""


class Digest(Protocol):
    """A hash that is updated with each chunk of a value."""

    def update(self, data: memoryview, /) -> None:
        """Add the next chunk."""


def encode_command(*words: bytes | str | int) -> bytes:
    """Return a command as it is sent."""
    out = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(out)


class RespConnection:
    """One connection, used by one thread at a time. Raises `OSError`, `UnexpectedReply` or `redis.RedisError`."""

    def __init__(self, connection: ConnectionInterface, large: bool) -> None:
        """Connect, if `connection` is not connected. `large` says whether most values are large."""
        connection.connect()  # type: ignore[no-untyped-call]
        found = getattr(connection, "_sock", None)  # redis-py has no public name for it
        if not isinstance(found, socket.socket):
            raise UnexpectedReply("there is no socket to read from")
        self._connection = connection
        self._socket = found
        self._scatters = type(found) is socket.socket  # TLS sockets cannot
        self._read_ahead_bytes = LARGE_READ_AHEAD_BYTES if large else BUFFER_BYTES
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._patience_s = self._patience_left_s = found.gettimeout() or math.inf

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def is_quiet(self) -> bool:
        """Return whether an idle connection is usable: the server has not closed it or sent anything more."""
        if self._start != self._end:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the parts one after the other, without copying them together."""
        self._patience_left_s = self._patience_s
        if not self._scatters:
            for part in parts:
                started_s = time.monotonic()
                self._socket.sendall(part)
                self._check_speed(started_s, len(part))
            return
        for start in range(0, len(parts), MAX_SENDMSG_PARTS):
            rest = list(parts[start : start + MAX_SENDMSG_PARTS])
            while rest:
                started_s = time.monotonic()
                sent = self._socket.sendmsg(rest)
                self._check_speed(started_s, sent)
                done = 0
                while done < len(rest) and sent >= len(rest[done]):
                    sent -= len(rest[done])
                    done += 1
                del rest[:done]
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]

    def read_length(self) -> int | None:
        """Return how many bytes of a value follow, or None for no value. Raise `ErrorReply`."""
        line = self._read_line()
        if line[:1] == b"$":
            return self._parse_length(line, MAX_VALUE_BYTES)
        if line[:1] == b"-":
            raise ErrorReply(line[1:].decode(errors="replace"))
        raise UnexpectedReply(f"no value: {line[:60]!r}")

    def read_into(self, into: memoryview) -> None:
        """Read the next `len(into)` bytes of a value."""
        for _ in self.read_chunks(into):
            pass

    def read_chunks(self, into: memoryview, digest: Digest | None = None) -> Iterator[None]:
        """Like `read_into`, but yield after each chunk. `digest` is updated with each chunk."""
        at = min(len(into), self._end - self._start)
        into[:at] = self._view[self._start : self._start + at]
        self._start += at
        if digest is not None and at:
            digest.update(into[:at])
        receive, length = self._socket.recv_into, len(into)
        while at < length:
            started_s = time.monotonic()
            count = receive(into[at : at + CHUNK_BYTES])
            if count == 0:
                raise ConnectionResetError("closed in the middle of a value")
            self._check_speed(started_s, count)
            if digest is not None:
                digest.update(into[at : at + count])
            at += count
            yield

    def skip_bytes(self, count: int) -> None:
        """Skip bytes of a value."""
        while count:
            if self._start == self._end:
                self._fill_buffer(BUFFER_BYTES)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def read_value_end(self) -> None:
        """Read the line end after a value."""
        while self._end - self._start < 2:
            self._fill_buffer(self._read_ahead_bytes)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise UnexpectedReply("a value is longer than was said")
        self._start += 2

    def read_reply(self, depth: int = 4) -> Reply:
        """Return a reply of any kind, lists nested up to `depth`. Errors are returned: more replies may follow."""
        line = self._read_line()
        kind = line[:1]
        if kind == b":":
            return self._parse_number(line)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ErrorReply(line[1:].decode(errors="replace"))
        if kind == b"$":
            length = self._parse_length(line, MAX_VALUE_BYTES)
            return None if length is None else self._read_body(length)
        if kind == b"*" and depth:
            count = self._parse_length(line, MAX_ITEMS)
            return None if count is None else [self.read_reply(depth - 1) for _ in range(count)]
        raise UnexpectedReply(f"no reply: {line[:60]!r}")

    def _read_body(self, length: int) -> bytes:
        body = bytearray(length)
        self.read_into(memoryview(body))
        self.read_value_end()
        return bytes(body)

    def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill_buffer(self._read_ahead_bytes)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _fill_buffer(self, at_most: int) -> None:
        """Receive more bytes into the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = min(at_most, BUFFER_BYTES - self._end)
        if room == 0:
            raise UnexpectedReply("a line without an end")
        started_s = time.monotonic()
        count = self._socket.recv_into(self._view[self._end : self._end + room])
        if count == 0:
            raise ConnectionResetError("closed in the middle of a reply")
        self._check_speed(started_s, count)
        self._end += count

    def _check_speed(self, started_s: float, count: int) -> None:
        """Raise `TimeoutError` if the server is too slow over many calls. The socket's timeout covers only one."""
        self._patience_left_s = min(
            self._patience_s, self._patience_left_s + count / MIN_BYTES_PER_S - (time.monotonic() - started_s)
        )
        if self._patience_left_s < 0:
            raise TimeoutError("it is too slow")

    def _parse_length(self, line: bytes, limit: int) -> int | None:
        length = self._parse_number(line)
        if length == -1:
            return None
        if not 0 <= length <= limit:
            raise UnexpectedReply(f"no length: {line[:60]!r}")
        return length

    @staticmethod
    def _parse_number(line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise UnexpectedReply(f"no number: {line[:60]!r}") from None
