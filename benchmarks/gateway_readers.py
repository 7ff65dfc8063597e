"""The reader of the gateway's benchmark, a process: it notes when bytes arrive, and parses them later."""

import asyncio
import bisect
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import hiredis
import uvloop

from penstock.names import Pipeline

_EVENT_ID = re.compile(rb"id: ([0-9]+-[0-9a-f]{16})\n")
STREAM_ID = re.compile(rb"\r\nx-request-id: (\S+)\r\n", re.IGNORECASE)
_SETTLE_S = 0.2
ArrivalTimes = dict[tuple[str, str], int]
"""When an event of a stream that has text was read: nanoseconds of the machine's monotonic clock."""


def make_body(prompt: str | list[int], tokens: int, **more: float) -> bytes:
    """Return the body of a request for a stream."""
    asked = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": 1}
    return json.dumps(asked | more).encode()


def make_post(body: bytes) -> bytes:
    """Return what asks for a stream on a connection of its own."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


@dataclass
class StreamsRead:
    """What was read of all streams."""

    streamed: ArrivalTimes = field(default_factory=dict)
    """From the gateway."""
    published: ArrivalTimes = field(default_factory=dict)
    """From Redis."""
    ended: set[str] = field(default_factory=set)
    """Streams whose events came in order, up to their end."""
    problems: list[str] = field(default_factory=list)

    def count_whole(self) -> int:
        """Return how many streams had all events published in Redis, in order, and the end."""
        return len(self.ended - {stream_id for stream_id, _ in self.published.keys() - self.streamed.keys()})

    def list_added_ms(self) -> list[float]:
        """Return, for each event, the time from when it could be read from Redis to when it could from the gateway."""
        return [(when - self.published[key]) / 1e6 for key, when in self.streamed.items() if key in self.published]


class _Bytes(asyncio.Protocol):
    """What arrives on a connection, and when."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.pieces: list[bytes] = []
        loop = asyncio.get_running_loop()
        self.begun, self.over = loop.create_future(), loop.create_future()

    def data_received(self, data: bytes) -> None:
        """Note data and time, nothing else."""
        self.times.append(time.monotonic_ns())
        self.pieces.append(data)
        if not self.begun.done():
            self.begun.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closes after the answer."""
        self.over.set_result(None)


def read_streams(pipe: Connection, port: int, bodies: Sequence[bytes], redis: tuple[str, int], pipeline: str) -> None:
    """Once told to, POST all bodies to `/v1/completions` at once, read them and what is published of them in Redis
    until all have ended, and say what came.
    """
    pipe.send("ready")
    pipe.recv()
    pipe.send(uvloop.run(_read_all(port, bodies, redis, Pipeline(pipeline).live_channel("*"))))
    pipe.recv()


async def _read_all(port: int, bodies: Sequence[bytes], redis: tuple[str, int], channel: str) -> StreamsRead:
    loop, read = asyncio.get_running_loop(), StreamsRead()
    subscription, live = await loop.create_connection(_Bytes, *redis)
    subscription.write(f"PSUBSCRIBE {channel}\r\n".encode())
    await live.begun
    pairs = [await loop.create_connection(_Bytes, "127.0.0.1", port) for _ in bodies]
    for (transport, _), body in zip(pairs, bodies, strict=True):
        transport.write(make_post(body))
    await asyncio.gather(*(stream.over for _, stream in pairs))
    await asyncio.sleep(_SETTLE_S)  # the last events from Redis
    for _, stream in pairs:
        _parse_stream(stream, read)
    _parse_published(live, channel, read)
    return read


def _parse_stream(stream: _Bytes, read: StreamsRead) -> None:
    """Add a stream's events to what was read, or that it is torn."""
    raw, ends = b"".join(stream.pieces), list(itertools.accumulate(map(len, stream.pieces)))
    found = STREAM_ID.search(raw)
    ids = [(match[1].decode(), match.end()) for match in _EVENT_ID.finditer(raw)]
    positions = [int(event_id.split("-")[0]) for event_id, _ in ids]
    if found is None or positions != sorted(set(positions)) or b"data: [DONE]" not in raw:
        read.problems.append(f"{len(ids)} tokens, ends with {raw[-300:]!r}")
        return
    read.ended.add(found[1].decode())
    for event_id, end in ids:
        read.streamed[found[1].decode(), event_id] = stream.times[bisect.bisect_left(ends, end)]


def _parse_published(live: _Bytes, channel: str, read: StreamsRead) -> None:
    reader, (before, after) = hiredis.Reader(), channel.split("*")
    for piece, when in zip(live.pieces, live.times, strict=True):
        reader.feed(piece)
        while (message := reader.gets()) is not False:
            if message[0] == b"pmessage":
                event = json.loads(message[3])
                if "token" in event and event["text"]:
                    stream_id = message[2].decode().removeprefix(before).removesuffix(after)
                    read.published[stream_id, event["id"]] = when
