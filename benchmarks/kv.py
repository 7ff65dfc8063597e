"""What the tiers of the KV store cost: blocks moved through each, against the plain way to move the same bytes.

python -m benchmarks.kv [--quick | --smoke] [--json FILE]

Blocks have the size of 16 tokens of the 0.6B shape in bf16 (1.75 MiB), 64 MB of them a round. In each round all sides
take turns, forwards and backwards; ratios are formed within it, and the median of the rounds is told.

    shm     written by this process, read by another one, as seen from here, with the word to the other process and its
            answer; against two plain copies in one process, into a buffer and out of it
    redis   read over a unix socket and over TCP; against a plain socket that sends the same GETs to the same server and
            receives the replies side by side in one buffer, looking at nothing; `_drained`: each reply over the one
            before, so that nothing leaves the caches
    disk    read while the page cache has the files (warm), against `preadv` of the same files side by side into one
            buffer; `disk_cold_vs_read`: both after the page cache was told to forget the files
    LMCache its remote backend on the same server over TCP, without an engine, put and get of the same bytes: with its
            asyncio connector (`redis://`), in chunks of 256 tokens, its default, and of 16, of which the faster counts;
            and with the one in C++ (`resp://`, eight connections), the same way. It does not check what it reads. Ours
            does, and keeps the budget. (`python -m benchmarks.peers.setup` installs it.)

Then puts and gets of one block at a time, by its size: p50 and p99 in microseconds.
"""

import contextlib
import itertools
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import redis
from matplotlib.figure import Figure
from rich.progress import track

from benchmarks.common import SHM, Arguments, run_benchmark, save_plot
from benchmarks.comparison import compute_ratio, measure_in_turns, print_table
from benchmarks.kv_sides import (
    BLOCK_BYTES,
    CHECK_CONTENT,
    PIPELINE,
    SHAPE,
    PlainCopies,
    PlainFiles,
    PlainSocket,
    RandomBlocks,
    get_blocks,
    make_block_format,
    measure_put_and_get,
    measure_seconds,
    put_blocks,
    read_shared_blocks,
)
from benchmarks.peers.process import Side, SideFailed, start_lmcache
from benchmarks.systems import PipedProcess
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.local.valkey import ValkeyServer

SIDES_BY_RATIO = {
    "shm_vs_memcpy": ("shm", "memcpy"),
    "redis_unix_vs_socket": ("redis unix", "socket unix"),
    "redis_tcp_vs_socket": ("redis tcp", "socket tcp"),
    "disk_vs_read": ("disk warm", "preadv warm"),
    "redis_unix_vs_socket_drained": ("redis unix", "socket unix drained"),
    "redis_tcp_vs_socket_drained": ("redis tcp", "socket tcp drained"),
    "disk_cold_vs_read": ("disk cold", "preadv cold"),
}
NUM_BLOCKS = 35
"""Blocks of a round: 64 MB."""
CHUNKS_PER_ROUND = {256: 2, 16: 32}
"""By the tokens of an LMCache chunk: how many chunks a round of the comparison moves."""
BUDGET_BYTES = 512 * 2**20
BLOCK_KEEP_S = 600.0
BLOCK_SIZES = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "256k": 2**18, "1m": 2**20, "4m": 2**22}
TIERS = ("shm", "disk", "redis_unix", "redis_tcp")
_WARM_ROUNDS = 2
Seconds = dict[str, list[float]]
Parts = tuple[float, ...]
"""The seconds of a round; then those of its put and of its get, where they are told apart."""


class KVBench:
    """All measurements, with directories for memory, disk and server, which are removed with `exits`."""

    def __init__(self, exits: contextlib.ExitStack, rounds: int, samples: int) -> None:
        def room(parent: str | None = None) -> Path:
            return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kv-", dir=parent)))

        self._rounds, self._samples = rounds, samples
        self._shm, self._disk, self._logs = room(SHM), room(), room()
        self._server = exits.enter_context(ValkeyServer(room(), appendonly=False))
        self._redis = exits.enter_context(redis.Redis.from_url(self._server.url))

    def _run(self, what: str, sides: Mapping[str, Callable[[int], Parts]], rounds: int = 0) -> Seconds:
        """Return the seconds of each side, and those of its puts and gets where it tells them."""
        found = measure_in_turns(sides, rounds or self._rounds, what, num_warm=_WARM_ROUNDS)
        return {
            f"{side}{part}": list(seconds)
            for side, each in found.items()
            for part, seconds in zip(("", " put", " get"), zip(*each, strict=True), strict=False)
        }

    def measure_shared_memory(self) -> Seconds:
        """Measure the way through shared memory to another process, and two copies in this one."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        copies = PlainCopies(blocks)
        tier = HostTier.open_shared(blocks.block_format, PIPELINE, BUDGET_BYTES, str(self._shm))
        reader = PipedProcess(
            multiprocessing.get_context("spawn"), read_shared_blocks, NUM_BLOCKS, BLOCK_BYTES, BUDGET_BYTES,
            str(self._shm), timeout_s=60.0,
        )  # fmt: skip

        def through(number: int) -> Parts:
            writing, inside = blocks.make_blocks(number), list[float]()

            def hand_over() -> None:
                inside.append(measure_seconds(lambda: put_blocks(tier, writing)))
                inside.append(reader.ask(number))

            taken_s = measure_seconds(hand_over)
            reader.ask(CHECK_CONTENT)
            tier.remove_blocks([block.key.hash for block in writing])
            return taken_s, *inside

        with contextlib.closing(tier), contextlib.closing(reader):
            return self._run("shared memory", {"shm": through, "memcpy": lambda _: (copies.measure_copies(),)})

    def measure_redis(self, name: str) -> Seconds:
        """Measure reads from the server over `unix` or `tcp`, and over a plain socket."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        url = self._server.unix_url if name == "unix" else self._server.url
        tier = RedisTier.open(blocks.block_format, [url], BUDGET_BYTES, BLOCK_KEEP_S)
        plain, wanted = PlainSocket(self._server, blocks, unix=name == "unix"), blocks.make_reads(0)
        put_blocks(tier, blocks.make_blocks(0))
        sides: dict[str, Callable[[int], Parts]] = {
            f"redis {name}": lambda _: (measure_seconds(lambda: get_blocks(tier, wanted)),),
            f"socket {name}": lambda _: (plain.measure_gets(0, drain=False),),
            f"socket {name} drained": lambda _: (plain.measure_gets(0, drain=True),),
        }
        with contextlib.closing(tier), contextlib.closing(plain):
            found = self._run(f"Redis, {name}", sides)
            blocks.check_content("Redis")
        self._redis.flushall()
        return found

    def measure_disk(self) -> Seconds:
        """Measure reads from the disk tier, and plain reads of its files, with the page cache and without."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        directory = self._disk / "blocks"
        tier = HostTier.open_disk(blocks.block_format, directory, BUDGET_BYTES, str(self._shm))
        put_blocks(tier, blocks.make_blocks(0))
        wanted, plain = blocks.make_reads(0), PlainFiles(directory, NUM_BLOCKS)
        both: dict[str, Callable[[], float]] = {
            "disk": lambda: measure_seconds(lambda: get_blocks(tier, wanted)),
            "preadv": plain.measure_reads,
        }

        def read(side: Callable[[], float], _: int) -> Parts:
            return (side(),)

        def read_cold(side: Callable[[], float], _: int) -> Parts:
            plain.drop_page_cache()
            return (side(),)

        with contextlib.closing(tier):
            warm = self._run("disk, warm", {f"{name} warm": partial(read, side) for name, side in both.items()})
            sides = {f"{name} cold": partial(read_cold, side) for name, side in both.items()}
            cold = self._run("disk, cold", sides, max(3, self._rounds // 3))
            blocks.check_content("the disk")
        return warm | cold

    def measure_lmcache(self) -> Seconds:
        """Measure put and get of our tier and of LMCache's connectors. Raises `SideFailed`."""
        blocks = RandomBlocks(CHUNKS_PER_ROUND[16], BLOCK_BYTES)
        tier = RedisTier.open(blocks.block_format, [self._server.url], BUDGET_BYTES, BLOCK_KEEP_S)

        def ours(number: int) -> Parts:
            self._redis.flushall()
            put_s, get_s = measure_put_and_get(tier, blocks, number)
            return put_s + get_s, put_s, get_s

        def theirs(side: Side) -> Callable[[int], Parts]:
            def once(number: int) -> Parts:
                self._redis.flushall()
                put_s, get_s = float(side.ask("put", number=number)), float(side.ask("get", number=number))
                return put_s + get_s, put_s, get_s

            return once

        with contextlib.ExitStack() as exits:
            exits.enter_context(contextlib.closing(tier))
            sides: dict[str, Callable[[int], Parts]] = {"ours": ours}
            for scheme, chunk in itertools.product(("redis", "resp"), CHUNKS_PER_ROUND):
                side = start_lmcache(
                    exits, self._logs, f"{scheme}://127.0.0.1:{self._server.port}", threads=2, layers=SHAPE.layers,
                    kv_heads=SHAPE.kv_heads, head_size=SHAPE.head_size, chunk=chunk, chunks=CHUNKS_PER_ROUND[chunk],
                )  # fmt: skip
                sides[f"LMCache {scheme}, chunks of {chunk}"] = theirs(side)
            found = self._run("LMCache", sides, max(5, self._rounds // 2))
        self._redis.flushall()
        return found

    def _open_tiers(self, size: int) -> Iterator[Tier]:
        """Yield each of `TIERS` with blocks of this size, one after the other."""
        kind = make_block_format(size)
        yield HostTier.open_shared(kind, f"{PIPELINE}-{size}", BUDGET_BYTES // 8, str(self._shm))
        yield HostTier.open_disk(kind, self._disk / str(size), BUDGET_BYTES, str(self._shm))
        for url in (self._server.unix_url, self._server.url):
            yield RedisTier.open(kind, [url], BUDGET_BYTES, BLOCK_KEEP_S)

    def measure_latencies(self) -> dict[str, float]:
        """Measure puts and gets of one block at a time, in microseconds."""
        figures = {}
        for label, size in track(BLOCK_SIZES.items(), "one block at a time", transient=True):
            num = min(self._samples, 2**29 // size) + _WARM_ROUNDS
            for name, tier in zip(TIERS, self._open_tiers(size), strict=True):
                one = RandomBlocks(1, size)
                pairs = [measure_put_and_get(tier, one, number) for number in range(num)][_WARM_ROUNDS:]
                for what, seconds in zip(("put", "get"), zip(*pairs, strict=True), strict=True):
                    for percent in (50, 99):
                        figures[f"{name}_{what}_p{percent}_us_{label}"] = float(np.percentile(seconds, percent)) * 1e6
                tier.close()
        return figures


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    with contextlib.ExitStack() as exits:
        bench = KVBench(exits, *given.choose_size((25, 400), (7, 60), (1, 2)))
        read = bench.measure_shared_memory() | bench.measure_redis("unix") | bench.measure_redis("tcp")
        read |= bench.measure_disk()
        moved: Seconds = {}
        try:
            moved = bench.measure_lmcache()
        except SideFailed as failed:
            print(f"without LMCache: {failed}")
        latencies = bench.measure_latencies()
    speeds = [
        {side: [count * BLOCK_BYTES / 1e9 / one for one in seconds] for side, seconds in each.items()}
        for each, count in ((read, NUM_BLOCKS), (moved, CHUNKS_PER_ROUND[16]))
    ]
    figures = {name: compute_ratio(speeds[0], *sides) for name, sides in SIDES_BY_RATIO.items()}
    for name, scheme in (("redis_vs_lmcache", "LMCache redis"), ("redis_vs_lmcache_resp", "LMCache resp")):
        sides = [side for side in moved if side.startswith(scheme) and not side.endswith((" put", " get"))]
        if sides:
            figures[name] = min(compute_ratio(speeds[1], "ours", side) for side in sides)
    figures |= {f"{side.replace(' ', '_')}_gb_s": statistics.median(found) for side, found in speeds[0].items()}
    for each in speeds:
        print_table(each, "GB/s")
    if given.is_full:
        draw_plot(speeds[0], speeds[1], latencies)
    return figures | latencies


def draw_plot(read: Seconds, moved: Seconds, latencies: dict[str, float]) -> None:
    """Draw the speed of every side in every round, and the latencies by size."""
    figure = Figure(figsize=(13, 4.6))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    speeds = {side: found for side, found in read.items() if not side.endswith(("drained", "shm put", "shm get"))}
    speeds |= {f"{side}, put and get": each for side, each in moved.items() if not side.endswith(("put", "get"))}
    left.boxplot(list(speeds.values()), tick_labels=list(speeds), orientation="horizontal")
    left.set(title="64 MB in blocks of 1.75 MiB", xlabel="GB/s", xlim=(0, None))
    left.invert_yaxis()
    for axis, what in ((middle, "get"), (right, "put")):
        for (number, tier), (percent, line) in itertools.product(enumerate(TIERS), ((50, "-"), (99, ":"))):
            values = [latencies[f"{tier}_{what}_p{percent}_us_{label}"] for label in BLOCK_SIZES]
            name = tier.replace("_", " ") if percent == 50 else None
            axis.plot(list(BLOCK_SIZES.values()), values, line, color=f"C{number}", label=name)
        axis.set(xscale="log", yscale="log", title=f"one {what}, p50 and p99 (dotted)", xlabel="bytes of the block")
        axis.set_xticks(list(BLOCK_SIZES.values()), list(BLOCK_SIZES), minor=False)
        axis.legend()
    middle.set_ylabel("microseconds")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    save_plot(figure, "kv")


if __name__ == "__main__":
    run_benchmark(__doc__, run)
