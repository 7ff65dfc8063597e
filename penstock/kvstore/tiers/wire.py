"""One connection to a Redis server, for large values: received where they shall lie, sent from where they are.

redis-py connects (addresses, TLS, unix sockets). After that RESP, version 2, is spoken here on its socket, in
pipelines: commands go out, and the same number of replies is read in order. Who cannot read a reply to its end closes
the connection, so that nothing is ever taken for the reply to another command.
"""

import math
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from redis.connection import ConnectionInterface

BUFFER_BYTES = 64 * 2**10
"""Most bytes that are received beyond what is asked for."""
LARGE_READ_AHEAD_BYTES = 512
"""The same where values are large, and what was received ahead of its place has to be copied there."""
LARGE_VALUE_BYTES = 32 * 2**10
PIECE_BYTES = 256 * 2**10
"""Values are received and looked at in pieces of at most this, while they are in the processor's caches."""
MAX_VALUE_BYTES = 512 * 2**20
"""No server sends a longer one."""
MAX_ITEMS = 2**20
MIN_BYTES_PER_S = 2**20
"""Bytes a second: a server that is waited for and is slower for longer than its timeout is as good as away."""
MAX_SENDMSG_PARTS = 512
"""Parts of one call of `sendmsg`, which takes 1,024 at most."""

Buffer = bytes | memoryview
Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


class UnexpectedReply(Exception):
    """What came is no reply, or not the one expected."""


class ErrorReply(Exception):
    """The server's reply was an error."""


class Digest(Protocol):
    """What is shown every piece of a value as it comes."""

    def update(self, data: memoryview, /) -> None:
        """The next piece."""


def encode_command(*words: bytes | str | int) -> bytes:
    """A command as it is sent."""
    out = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(out)


class RespConnection:
    """One connection. Used by one thread at a time; raises `OSError`, `NotRedis` and `redis.RedisError`."""

    def __init__(self, connection: ConnectionInterface, large: bool) -> None:
        """Connects, if `connection` is not; `large`: whether most values will be."""
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
        """Drop the connection."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def is_quiet(self) -> bool:
        """Whether a connection that waits is as it was left: not closed by the server, nothing more received."""
        if self._start != self._end:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the parts, one after the other, without joining large ones."""
        self._patience_left_s = self._patience_s
        if not self._scatters:
            for part in parts:
                begun = time.monotonic()
                self._socket.sendall(part)
                self._check_speed(begun, len(part))
            return
        for start in range(0, len(parts), MAX_SENDMSG_PARTS):
            rest = list(parts[start : start + MAX_SENDMSG_PARTS])
            while rest:
                begun = time.monotonic()
                sent = self._socket.sendmsg(rest)
                self._check_speed(begun, sent)
                done = 0
                while done < len(rest) and sent >= len(rest[done]):
                    sent -= len(rest[done])
                    done += 1
                del rest[:done]
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]

    def read_length(self) -> int | None:
        """How many bytes of a value follow, or None: there is none. Raises `Refused`."""
        line = self._read_line()
        if line[:1] == b"$":
            return self._parse_length(line, MAX_VALUE_BYTES)
        if line[:1] == b"-":
            raise ErrorReply(line[1:].decode(errors="replace"))
        raise UnexpectedReply(f"no value: {line[:60]!r}")

    def read_into(self, into: memoryview) -> None:
        """The next `len(into)` bytes of a value."""
        for _ in self.read_pieces(into):
            pass

    def read_pieces(self, into: memoryview, digest: Digest | None = None) -> Iterator[None]:
        """The same, a piece at a time, with a pause after each; `digest` sees each piece."""
        at = min(len(into), self._end - self._start)
        into[:at] = self._view[self._start : self._start + at]
        self._start += at
        if digest is not None and at:
            digest.update(into[:at])
        receive, length = self._socket.recv_into, len(into)
        while at < length:
            begun = time.monotonic()
            count = receive(into[at : at + PIECE_BYTES])
            if count == 0:
                raise ConnectionResetError("closed in the middle of a value")
            self._check_speed(begun, count)
            if digest is not None:
                digest.update(into[at : at + count])
            at += count
            yield

    def skip_bytes(self, count: int) -> None:
        """Pass over bytes of a value."""
        while count:
            if self._start == self._end:
                self._fill_buffer(BUFFER_BYTES)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def read_value_end(self) -> None:
        """The end that every value has."""
        while self._end - self._start < 2:
            self._fill_buffer(self._read_ahead_bytes)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise UnexpectedReply("a value is longer than was said")
        self._start += 2

    def read_reply(self, depth: int = 4) -> Reply:
        """A reply of any kind, of lists in lists up to `depth`; an error is returned, as more replies may follow it."""
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
        """Receive something behind what is in the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = min(at_most, BUFFER_BYTES - self._end)
        if room == 0:
            raise UnexpectedReply("a line without an end")
        begun = time.monotonic()
        count = self._socket.recv_into(self._view[self._end : self._end + room])
        if count == 0:
            raise ConnectionResetError("closed in the middle of a reply")
        self._check_speed(begun, count)
        self._end += count

    def _check_speed(self, begun: float, count: int) -> None:
        """So many bytes came or went since then. The socket's own timeout begins anew with each of them."""
        self._patience_left_s = min(
            self._patience_s, self._patience_left_s + count / MIN_BYTES_PER_S - (time.monotonic() - begun)
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
