"""The readers of the gateway's benchmark, each a process: they note what comes when, and look at it later."""

import asyncio
import bisect
import itertools
import json
import re
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import hiredis
import uvloop

from penstock.names import Pipeline

_EVENT_ID = re.compile(rb"id: ([0-9]+-[0-9a-f]{16})\n")
_STREAM_ID = re.compile(rb"\r\nx-request-id: (\S+)\r\n", re.IGNORECASE)
_MANY = 2**20
Seen = dict[tuple[str, str], int]
"""When an event of a stream was read: nanoseconds of the machine's monotonic clock."""


@dataclass
class Streams:
    """What the streams' reader saw."""

    seen: Seen = field(default_factory=dict)
    num_ok: int = 0
    """Streams that had all tokens in order, and their end."""
    num_at_once: int = 0
    """The most streams that had begun and not ended."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of this process, while it read."""
    troubles: list[str] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One stream, as it comes."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.times: list[int] = []
        self.pieces: list[bytes] = []
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        """Note it, nothing else."""
        self.times.append(time.monotonic_ns())
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closes after the answer."""
        self._ended()


def read_streams(port: int, bodies: Sequence[bytes], tokens: int, told: Connection) -> None:
    """POST all bodies to `/v1/completions` at once, and send `Streams` when all have ended."""
    told.send(uvloop.run(_read_streams(port, bodies, tokens)))


async def _read_streams(port: int, bodies: Sequence[bytes], tokens: int) -> Streams:
    loop, left, over = asyncio.get_running_loop(), itertools.count(len(bodies) - 1, -1), asyncio.Event()

    def ended() -> None:
        if next(left) == 0:
            over.set()

    pairs = [await loop.create_connection(lambda: _Connection(ended), "127.0.0.1", port) for _ in bodies]
    begun, cpu = time.monotonic(), _cpu_s()
    for (transport, _), body in zip(pairs, bodies, strict=True):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        )
        transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await over.wait()
    streams = Streams(wall_s=time.monotonic() - begun, cpu_s=_cpu_s() - cpu)
    spans = []
    for _, one in pairs:
        raw = b"".join(one.pieces)
        ends = list(itertools.accumulate(map(len, one.pieces)))
        found = _STREAM_ID.search(raw)
        ids = [(match[1].decode(), match.end()) for match in _EVENT_ID.finditer(raw)]
        positions = [int(event_id.split("-")[0]) for event_id, _ in ids]
        if found is None or positions != list(range(tokens)) or b"data: [DONE]" not in raw:
            streams.troubles.append(f"{len(ids)} tokens, ends with {raw[-300:]!r}")
            continue
        streams.num_ok += 1
        spans.append((one.times[0], one.times[-1]))
        for event_id, end in ids:
            streams.seen[found[1].decode(), event_id] = one.times[bisect.bisect_left(ends, end)]
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    streams.num_at_once = max(itertools.accumulate(change for _, change in changes), default=0)
    return streams


def read_redis(host: str, port: int, pipeline: str, ready: Event, stop: Event, told: Connection) -> None:
    """Read what is published of all of a pipeline's streams; sends a `Seen` after `stop`."""
    times: list[int] = []
    pieces: list[bytes] = []
    channel = Pipeline(pipeline).live_channel("*")
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"PSUBSCRIBE {channel}\r\n".encode())
        pieces.append(connection.recv(_MANY))
        times.append(0)
        ready.set()
        connection.settimeout(0.2)
        while not stop.is_set():
            try:
                pieces.append(connection.recv(_MANY))
            except TimeoutError:
                continue
            times.append(time.monotonic_ns())
    told.send(_published(pieces, times, *channel.split("*")))


def _published(pieces: Sequence[bytes], times: Sequence[int], before: str, after: str) -> Seen:
    reader, seen = hiredis.Reader(), Seen()
    for piece, when in zip(pieces, times, strict=True):
        reader.feed(piece)
        while (message := reader.gets()) is not False:
            if message[0] == b"pmessage":
                event_id = json.loads(message[3]).get("id")
                if event_id is not None:
                    seen[message[2].decode().removeprefix(before).removesuffix(after), event_id] = when
    return seen


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
