"""Many streams that wait: what each costs, and whether each goes on after its gateway was replaced.

python -m benchmarks.idle_streams [--streams N] [--gateways N] [--quick | --smoke] [--json FILE]

A prefill worker takes the prompts, and nobody decodes: every stream waits. Memory is what the gateways' resident sets
grew by, from after a few streams, divided by the streams that came since; processor time is the gateways' while nothing
happens. With several gateways there are two stream servers, and of these it tells the same. What a million streams
cost is worked out from these figures. Then the gateways are told to stop, each reader goes on at the next one behind
the last event that it has seen, and a decode worker starts, which answers all. A stream is lost that does not end with
all of its tokens, once each. Each gateway has readers in a process of their own.
"""

import asyncio
import multiprocessing
import re
import statistics
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.gateway_readers import STREAM_ID, make_body, make_post
from benchmarks.processor import Meter, read_processor_s, read_resident_bytes
from benchmarks.systems import DEMO_ENVIRONMENT, get_gateway_pid, open_stack
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from sim.forked import end_with_parent

ENVIRONMENT = DEMO_ENVIRONMENT | {
    "PENSTOCK_GATEWAY_MAX_WAIT_S": "100000", "PENSTOCK_GATEWAY_MAX_CONNECTIONS": "20000",
    "PENSTOCK_ENGINE_POOL_MB": "128", "PENSTOCK_ENGINE_THREADS": "1", "PENSTOCK_KV_STORE_REDIS_MB": "0",
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


async def follow_orders(orders: Connection, port: int, first: int) -> None:
    """Do what the benchmark says, and answer with how many streams are not whole."""
    readers = list[Reader]()
    while order := await asyncio.to_thread(orders.recv):
        what, count = order
        if what == "open":
            numbers = range(first + len(readers), first + len(readers) + count)
            made = [Reader(make_body(f"Stream {one} of many", ANSWER_TOKENS, temperature=0)) for one in numbers]
            await open_all(made, port)
            readers += made
        elif what == "go on":
            await open_all(readers, port)
        else:
            await wait_for_ends(readers)
        orders.send(sum(not reader.is_whole for reader in readers))


def run_readers(orders: Connection, port: int, first: int) -> None:
    """Run one gateway's readers, in a process."""
    end_with_parent()
    uvloop.run(follow_orders(orders, port, first))


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_streams: int
    num_gateways: int
    idle_s: float


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and how many streams and gateways there are."""

    streams: int = 0
    gateways: int = 0

    def choose_extent(self) -> Size:
        """Return the size of this run."""
        usual = self.choose_size(Size(10_000, 1, 60.0), Size(1000, 1, 15.0), Size(2 * WARM_STREAMS + 20, 2, 0.3))
        return Size(self.streams or usual.num_streams, self.gateways or usual.num_gateways, usual.idle_s)


@dataclass
class Site:
    """Gateways, their stream servers, and the readers of each gateway, which are all measured."""

    stacks: list[Stack]
    servers: list[ValkeyServer]
    orders: list[Connection]

    def order_readers(self, what: str, count: int = 0) -> int:
        """Have all readers do something, and wait until they have; return how many streams are not whole."""
        for one in self.orders:
            one.send((what, count))
        return sum(one.recv() for one in self.orders)

    def list_pids(self) -> tuple[list[int], list[int]]:
        """Return the processes of the gateways, and of the stream servers."""
        return [get_gateway_pid(stack) for stack in self.stacks], [one.pid for one in self.servers if one.pid]


def measure_streams(site: Site, size: Size, given: Options) -> dict[str, float]:
    """Open streams, let them wait, replace the gateways, and have them answered; return the figures."""
    each, sides = size.num_streams // size.num_gateways, site.list_pids()
    memory = list[list[int]]()
    for count in (WARM_STREAMS, each - WARM_STREAMS):
        site.order_readers("open", count)
        Meter(sides[0]).wait_idle()
        memory.append([read_resident_bytes(pids) for pids in sides])
    shares = list[list[float]]()
    for _ in range(3):
        begun_s, used_s = time.monotonic(), [read_processor_s(pids) for pids in sides]
        time.sleep(size.idle_s / 3)
        taken_s = time.monotonic() - begun_s
        shares.append([(read_processor_s(pids) - one) / taken_s for pids, one in zip(sides, used_s, strict=True)])
    num_streams, cores = each * size.num_gateways, [statistics.median(one) for one in zip(*shares, strict=True)]
    kib = [
        (after - before) / (num_streams - WARM_STREAMS * size.num_gateways) / 1024
        for before, after in zip(*memory, strict=True)
    ]
    told = ("gateways", "stream servers")[: 1 + bool(site.servers)]
    for what, each_kib, share in zip(told, kib, cores, strict=False):
        print(f"{num_streams:,} streams wait: {each_kib:.1f} KiB of the {what} each, {share:.3f} of a core together; "
              f"a million: {each_kib * 1e6 / 2**20:.0f} GiB, {share / num_streams * 1e6:.1f} cores")  # fmt: skip
    for stack in site.stacks:
        assert stack.gateway is not None
        assert stack.gateway.child is not None
        stack.gateway.child.stop(60.0)
    site.order_readers("end")
    for stack in site.stacks:
        stack.restart_dead()
        stack.wait_until_ready(120.0)
    site.order_readers("go on")
    print("all go on at the next gateway")
    addresses = site.stacks[0].addresses
    with open_stack(given.choose_stack(), ENVIRONMENT, pipeline=addresses.pipeline, prefill=0, decode=1,
                    redis=addresses.stream_url):  # fmt: skip
        num_lost = site.order_readers("end")
    figures = {
        "kib_per_idle_stream": kib[0],
        "gateway_cores_per_1000_idle_streams": cores[0] / num_streams * 1000,
        "streams_lost_over_restart": float(num_lost),
    }
    if site.servers:
        figures |= {
            "redis_kib_per_idle_stream": kib[1],
            "redis_cores_per_1000_idle_streams": cores[1] / num_streams * 1000,
        }
    return figures


def run(given: Options) -> dict[str, float]:
    """Measure and print; return the figures."""
    size, context = given.choose_extent(), multiprocessing.get_context("fork")
    ports = [find_free_port() for _ in range(size.num_gateways)]
    orders, processes = list[Connection](), []
    for number, port in enumerate(ports):  # before this process has threads
        mine, theirs = context.Pipe()
        orders.append(mine)
        processes.append(
            context.Process(target=run_readers, args=(theirs, port, number * size.num_streams), daemon=True)
        )
        processes[-1].start()
    with ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-", dir=SHM)))
        servers = [
            exits.enter_context(ValkeyServer(directory / name, appendonly=False))
            for name in (("left", "right") if size.num_gateways > 1 else ())
        ]
        redis = ",".join(f"{server.url}#{server.directory.name}" for server in servers)
        stacks = list[Stack]()
        for number, port in enumerate(ports):
            stacks.append(exits.enter_context(open_stack(
                given.choose_stack(), ENVIRONMENT, prefill=int(not number), decode=0, gateway=port, redis=redis,
            )))  # fmt: skip
        figures = measure_streams(Site(stacks, servers, orders), size, given)
    for one, process in zip(orders, processes, strict=True):
        one.send(None)
        process.join()
    return figures


if __name__ == "__main__":
    counts = {"streams": "all streams together", "gateways": "more than one: two stream servers as well"}
    run_benchmark(
        __doc__, run, Options, **{name: {"type": int, "default": 0, "help": told} for name, told in counts.items()}
    )
