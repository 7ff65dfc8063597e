"""Many streams that wait, on one gateway: what each costs, and whether each goes on after the gateway was replaced.

python -m benchmarks.idle_streams [--quick | --smoke] [--json FILE]

A prefill worker takes the prompts, and nobody decodes: every stream waits. Memory is what the gateway's resident set
grew by, from after a few streams, divided by the streams that came since; processor time is the gateway's while nothing
happens. Then the gateway is told to stop, each reader goes on at the next one behind the last event that it has seen,
and a decode worker starts, which answers all. A stream is lost that does not end with all of its tokens, once each.
"""

import asyncio
import re
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field

import uvloop

from benchmarks.common import Arguments, run_benchmark
from benchmarks.gateway_readers import STREAM_ID, make_body, make_post
from benchmarks.processor import Meter, read_processor_s, read_resident_bytes
from benchmarks.systems import DEMO_ENVIRONMENT, get_gateway_pid, open_stack
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack

ENVIRONMENT = DEMO_ENVIRONMENT | {
    "PENSTOCK_GATEWAY_MAX_WAIT_S": "100000", "PENSTOCK_GATEWAY_MAX_CONNECTIONS": "20000",
    "PENSTOCK_ENGINE_POOL_MB": "128", "PENSTOCK_ENGINE_THREADS": "1",
}  # fmt: skip
ANSWER_TOKENS, WARM_STREAMS, AT_ONCE = 4, 50, 64
_EVENT_ID = re.compile(rb"^id: ([0-9]+)-[0-9a-f]{16}$", re.MULTILINE)
_END_OF_HEAD = b"\r\n\r\n"


@dataclass
class Reader:
    """A client's side of one stream."""

    body: bytes
    stream_id: str = ""
    received: bytearray = field(default_factory=bytearray)
    writer: asyncio.StreamWriter | None = None
    reading: asyncio.Task[None] | None = None

    async def open_connection(self, port: int) -> None:
        """Ask for the answer, or go on with it; return when it has begun, and read on in the background."""
        reader, self.writer = await asyncio.open_connection("127.0.0.1", port, limit=2**14)
        asked = make_post(self.body)
        if self.stream_id:
            ids = re.findall(rb"^id: (\S+)$", self.received, re.MULTILINE)
            after = f"Last-Event-ID: {ids[-1].decode()}\r\n" if ids else ""
            head = f"GET /v1/streams/{self.stream_id} HTTP/1.1\r\nHost: localhost\r\n{after}Connection: close\r\n\r\n"
            asked = head.encode()
        self.writer.write(asked)
        answer = await reader.readuntil(_END_OF_HEAD)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {answer!r}")
        found = STREAM_ID.search(answer)
        assert found is not None
        self.stream_id = found[1].decode()
        self.reading = asyncio.create_task(self._read_events(reader))

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(2**14):
                self.received += piece
        assert self.writer is not None
        self.writer.close()

    @property
    def is_whole(self) -> bool:
        """Whether each token came once, in order, and the end behind them."""
        positions = [int(number) for number in _EVENT_ID.findall(self.received)]
        return positions == list(range(ANSWER_TOKENS)) and b"data: [DONE]" in self.received


async def open_all(readers: list[Reader], port: int) -> None:
    """Open connections, some at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def open_one(reader: Reader) -> None:
        async with slots:
            await reader.open_connection(port)

    await asyncio.gather(*map(open_one, readers))


async def wait_for_ends(readers: list[Reader]) -> None:
    """Wait until all connections have ended."""
    await asyncio.gather(*(reader.reading for reader in readers if reader.reading is not None))


async def measure_streams(stack: Stack, num_streams: int, idle_s: float, given: Arguments) -> dict[str, float]:
    """Open streams, let them wait, replace the gateway, and have them answered; return the figures."""
    assert stack.gateway is not None
    port, pid = int(stack.gateway_url.rpartition(":")[2]), get_gateway_pid(stack)
    bodies = (make_body(f"Stream {number} of many", ANSWER_TOKENS, temperature=0) for number in range(num_streams))
    readers, meter = list(map(Reader, bodies)), Meter([pid])
    memory = []
    for part in (readers[:WARM_STREAMS], readers[WARM_STREAMS:]):
        await open_all(part, port)
        await asyncio.to_thread(meter.wait_idle)
        memory.append(read_resident_bytes([pid]))
    shares = []
    for _ in range(3):
        begun_s, used_s = time.monotonic(), read_processor_s([pid])
        await asyncio.sleep(idle_s / 3)
        shares.append((read_processor_s([pid]) - used_s) / (time.monotonic() - begun_s))
    print(f"{num_streams:,} streams wait: {memory[1] / 2**20:.0f} MiB, {statistics.median(shares):.3f} of a core")
    assert stack.gateway.child is not None
    await asyncio.to_thread(stack.gateway.child.stop, 60.0)
    await wait_for_ends(readers)
    await asyncio.to_thread(stack.restart_dead)
    await asyncio.to_thread(stack.wait_until_ready, 120.0)
    await open_all(readers, port)
    print("all go on at the next gateway")
    with open_stack(given.choose_stack(), ENVIRONMENT, pipeline=stack.addresses.pipeline, prefill=0, decode=1,
                    redis=stack.addresses.stream_url):  # fmt: skip
        await wait_for_ends(readers)
    return {
        "kib_per_idle_stream": (memory[1] - memory[0]) / (num_streams - WARM_STREAMS) / 1024,
        "gateway_cores_per_1000_idle_streams": statistics.median(shares) / num_streams * 1000,
        "streams_lost_over_restart": sum(not reader.is_whole for reader in readers),
    }


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    num_streams, idle_s = given.choose_size((10_000, 60.0), (1000, 15.0), (WARM_STREAMS + 10, 0.3))
    with open_stack(given.choose_stack(), ENVIRONMENT, prefill=1, decode=0, gateway=find_free_port()) as stack:
        return uvloop.run(measure_streams(stack, num_streams, idle_s, given))


if __name__ == "__main__":
    run_benchmark(__doc__, run)
