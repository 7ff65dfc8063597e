"""The readers of the gateway's benchmark, each a process: they note when bytes arrive, and parse them later."""

import asyncio
import bisect
import itertools
import json
import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import hiredis
import uvloop

from penstock.names import Pipeline

_EVENT_ID = re.compile(rb"id: ([0-9]+-[0-9a-f]{16})\n")
_STREAM_ID = re.compile(rb"\r\nx-request-id: (\S+)\r\n", re.IGNORECASE)
_RECEIVE_BYTES = 2**20
ArrivalTimes = dict[tuple[str, str], int]
"""When an event of a stream that has text was read: nanoseconds of the machine's monotonic clock."""


@dataclass
class StreamsRead:
    """What the streams' reader read."""

    arrivals: ArrivalTimes = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    """Streams whose events came in order, up to their end."""
    num_at_once: int = 0
    """The largest number of streams that were open at once."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of this process while it read."""
    problems: list[str] = field(default_factory=list)


class _Protocol(asyncio.Protocol):
    """One stream, as it arrives."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.pieces: list[bytes] = []
        self.over = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Note data and time, nothing else."""
        self.times.append(time.monotonic_ns())
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closes after the answer."""
        self.over.set_result(None)


def read_streams(pipe: Connection, port: int, bodies: Sequence[bytes]) -> None:
    """Once told to, POST all bodies to `/v1/completions` at once, read until all have ended, and say what came."""
    pipe.send("ready")
    pipe.recv()
    pipe.send(uvloop.run(_read_all(port, bodies)))
    pipe.recv()


async def _read_all(port: int, bodies: Sequence[bytes]) -> StreamsRead:
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(_Protocol, "127.0.0.1", port) for _ in bodies]
    begun_s, cpu_s = time.monotonic(), time.process_time()
    for (transport, _), body in zip(pairs, bodies, strict=True):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        )
        transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await asyncio.gather(*(stream.over for _, stream in pairs))
    streams = StreamsRead(wall_s=time.monotonic() - begun_s, cpu_s=time.process_time() - cpu_s)
    spans = [span for _, stream in pairs if (span := _parse_stream(stream, streams)) is not None]
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    streams.num_at_once = max(itertools.accumulate(change for _, change in changes), default=0)
    return streams


def _parse_stream(stream: _Protocol, streams: StreamsRead) -> tuple[int, int] | None:
    """Add a stream's events to what was read; return when its first and last bytes came, or None if it is torn."""
    raw, ends = b"".join(stream.pieces), list(itertools.accumulate(map(len, stream.pieces)))
    found = _STREAM_ID.search(raw)
    ids = [(match[1].decode(), match.end()) for match in _EVENT_ID.finditer(raw)]
    positions = [int(event_id.split("-")[0]) for event_id, _ in ids]
    if found is None or positions != sorted(set(positions)) or b"data: [DONE]" not in raw:
        streams.problems.append(f"{len(ids)} tokens, ends with {raw[-300:]!r}")
        return None
    streams.ended.add(found[1].decode())
    for event_id, end in ids:
        streams.arrivals[found[1].decode(), event_id] = stream.times[bisect.bisect_left(ends, end)]
    return stream.times[0], stream.times[-1]


def read_published(pipe: Connection, host: str, port: int, pipeline: str) -> None:
    """Read all that is published of a pipeline's streams in Redis until it is told to stop; say `ArrivalTimes` then."""
    times: list[int] = []
    pieces: list[bytes] = []
    channel = Pipeline(pipeline).live_channel("*")
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"PSUBSCRIBE {channel}\r\n".encode())
        pieces.append(connection.recv(_RECEIVE_BYTES))
        times.append(0)
        pipe.send("ready")
        while pipe not in (found := select.select([connection, pipe], [], [])[0]) or connection in found:
            piece = connection.recv(_RECEIVE_BYTES)
            if not piece:  # the server has ended
                break
            pieces.append(piece)
            times.append(time.monotonic_ns())
    pipe.recv()
    pipe.send(_parse_published(pieces, times, *channel.split("*")))
    pipe.recv()


def _parse_published(pieces: Sequence[bytes], times: Sequence[int], before: str, after: str) -> ArrivalTimes:
    reader, seen = hiredis.Reader(), ArrivalTimes()
    for piece, when in zip(pieces, times, strict=True):
        reader.feed(piece)
        while (message := reader.gets()) is not False:
            if message[0] == b"pmessage":
                event = json.loads(message[3])
                if "token" in event and event["text"]:
                    seen[message[2].decode().removeprefix(before).removesuffix(after), event["id"]] = when
    return seen
