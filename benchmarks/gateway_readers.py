"""The readers of the gateway's benchmark, each a process: they note when bytes arrive, and parse them later.

`python -m benchmarks.gateway_readers` reads its task, pickled, from standard input, and writes what it read to
standard output. It imports little, because a process that starts while streams run would disturb them.
"""

import asyncio
import bisect
import itertools
import json
import pickle
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


class _Connection(asyncio.Protocol):
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


class ReaderProcess:
    """A reader's process, as its parent sees it."""

    def __init__(self, kind: str, *args: Any) -> None:
        """Start it: `streams` with a port and bodies, or `redis` with host, port and pipeline."""
        command = [sys.executable, "-m", "benchmarks.gateway_readers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        pickle.dump((kind, args), self._input)
        self._input.flush()

    def has_data(self, within_s: float) -> bool:
        """Return whether something can be received within some seconds."""
        return bool(select.select([self._output], [], [], within_s)[0])

    def receive(self) -> Any:
        """Return the next object that it sends."""
        return pickle.loads(self._output.read(int.from_bytes(self._output.read(8), "big")))

    def stop(self) -> None:
        """Ask it to send what it has read, if it has not yet."""
        self._input.close()

    def close(self) -> None:
        """Wait until it ends, which it does when it has sent everything."""
        self._output.close()
        self._process.wait(30)


def main() -> None:
    kind, args = pickle.load(sys.stdin.buffer)
    if kind == "streams":
        send_to_parent(vars(uvloop.run(read_streams(*args))))  # a class of this file has another name here
    else:
        read_redis(*args)


def send_to_parent(what: object) -> None:
    """Send an object to the parent process."""
    data = pickle.dumps(what)
    sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
    sys.stdout.buffer.flush()


async def read_streams(port: int, bodies: Sequence[bytes]) -> StreamsRead:
    """POST all bodies to `/v1/completions` at once, and read until all have ended."""
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(_Connection, "127.0.0.1", port) for _ in bodies]
    begun_s, cpu_s = time.monotonic(), _read_cpu_s()
    for (transport, _), body in zip(pairs, bodies, strict=True):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        )
        transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await asyncio.gather(*(connection.over for _, connection in pairs))
    streams = StreamsRead(wall_s=time.monotonic() - begun_s, cpu_s=_read_cpu_s() - cpu_s)
    spans = [span for _, connection in pairs if (span := _parse_stream(connection, streams)) is not None]
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    streams.num_at_once = max(itertools.accumulate(change for _, change in changes), default=0)
    return streams


def _parse_stream(connection: _Connection, streams: StreamsRead) -> tuple[int, int] | None:
    """Add a connection's events to what was read; return when its first and last bytes came, or None if it is torn."""
    raw, ends = b"".join(connection.pieces), list(itertools.accumulate(map(len, connection.pieces)))
    found = _STREAM_ID.search(raw)
    ids = [(match[1].decode(), match.end()) for match in _EVENT_ID.finditer(raw)]
    positions = [int(event_id.split("-")[0]) for event_id, _ in ids]
    if found is None or positions != sorted(set(positions)) or b"data: [DONE]" not in raw:
        streams.problems.append(f"{len(ids)} tokens, ends with {raw[-300:]!r}")
        return None
    streams.ended.add(found[1].decode())
    for event_id, end in ids:
        streams.arrivals[found[1].decode(), event_id] = connection.times[bisect.bisect_left(ends, end)]
    return connection.times[0], connection.times[-1]


def read_redis(host: str, port: int, pipeline: str) -> None:
    """Read all that is published of a pipeline's streams: send "ready", and `ArrivalTimes` when stopped."""
    times: list[int] = []
    pieces: list[bytes] = []
    channel = Pipeline(pipeline).live_channel("*")
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"PSUBSCRIBE {channel}\r\n".encode())
        pieces.append(connection.recv(_RECEIVE_BYTES))
        times.append(0)
        send_to_parent("ready")
        while sys.stdin not in (found := select.select([connection, sys.stdin], [], [])[0]) or connection in found:
            piece = connection.recv(_RECEIVE_BYTES)
            if not piece:  # the server has ended
                break
            pieces.append(piece)
            times.append(time.monotonic_ns())
    send_to_parent(_parse_published(pieces, times, *channel.split("*")))


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


def _read_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
