"""The measurements of `benchmarks.kv`: rounds in which all sides take turns."""

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import redis
from rich.progress import track

from benchmarks.kv_sides import (
    BLOCK_BYTES,
    PIPELINE,
    SHAPE,
    PlainCopies,
    PlainFiles,
    PlainSocket,
    RandomBlocks,
    SharedReader,
    get_blocks,
    make_block_format,
    measure_put_and_get,
    measure_seconds,
    put_blocks,
)
from benchmarks.peers.process import Side
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.local.valkey import ValkeyServer

NUM_BLOCKS = 35
"""Blocks of a round: 64 MB."""
CHUNKS_PER_ROUND = {256: 2, 16: 32}
"""By the tokens of an LMCache chunk: how many chunks a round of the comparison moves."""
BUDGET_BYTES = 512 * 2**20
BLOCK_KEEP_S = 600.0
BLOCK_SIZES = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "256k": 2**18, "1m": 2**20, "4m": 2**22}
_SHM = Path("/dev/shm")
_WARM_ROUNDS = 2
"""Rounds that do not count."""


@dataclass
class KVRounds:
    """Seconds and bytes of every side, a pair for each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    def run_rounds(self, count: int, num_bytes: int, what: str, sides: Mapping[str, Callable[[int], float]]) -> None:
        """Run all sides in turn, forwards in one round and backwards in the next. They get the round's number."""
        for number in track(range(count + _WARM_ROUNDS), what, transient=True):
            for side in sides if number % 2 == 0 else reversed(list(sides)):
                seconds = sides[side](number)
                if number >= _WARM_ROUNDS:
                    self.add_round(side, seconds, num_bytes)

    def add_round(self, side: str, seconds: float, num_bytes: int) -> None:
        """Add one round of a side."""
        self.seconds.setdefault(side, []).append(seconds)
        self.num_bytes[side] = num_bytes

    def compute_speeds(self, side: str) -> list[float]:
        """Return the speed of each round, in GB/s."""
        return [self.num_bytes[side] / seconds / 1e9 for seconds in self.seconds[side]]

    def compute_ratio(self, side: str, other: str) -> float:
        """Return how many times as fast a side is as another, the median of the rounds."""
        both = zip(self.seconds[side], self.seconds[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in both)


class KVBench:
    """All measurements, with directories for memory, disk and server, which are removed with `exits`."""

    def __init__(self, exits: contextlib.ExitStack, rounds: int, samples: int) -> None:
        def room(parent: Path | None = None) -> Path:
            return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kv-", dir=parent)))

        self._rounds, self._samples = rounds, samples
        self._shm, self._disk, self._logs = room(_SHM if _SHM.is_dir() else None), room(), room()
        self._server = exits.enter_context(ValkeyServer(room(), appendonly=False))
        self._redis = exits.enter_context(redis.Redis.from_url(self._server.url))

    def measure_shared_memory(self, rounds: KVRounds) -> None:
        """Measure the way through shared memory to another process, and two copies in this one."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        copies, tier = (
            PlainCopies(blocks),
            HostTier.open_shared(blocks.block_format, PIPELINE, BUDGET_BYTES, str(self._shm)),
        )
        reader = SharedReader(NUM_BLOCKS, BLOCK_BYTES, BUDGET_BYTES, self._shm)
        inside: dict[str, list[float]] = {"shm put": [], "shm get": []}

        def through(number: int) -> float:
            writing = blocks.make_blocks(number)

            def hand_over() -> None:
                inside["shm put"].append(measure_seconds(lambda: put_blocks(tier, writing)))
                inside["shm get"].append(reader.read_blocks(number))

            taken_s = measure_seconds(hand_over)
            reader.check_content()
            tier.remove_blocks([block.key.hash for block in writing])
            return taken_s

        sides = {"shm": through, "memcpy": lambda _: copies.measure_copies()}
        try:
            rounds.run_rounds(self._rounds, len(blocks.source), "shared memory", sides)
        finally:
            reader.close()
            tier.close()
        for side, each in inside.items():
            for seconds in each[_WARM_ROUNDS:]:
                rounds.add_round(side, seconds, len(blocks.source))

    def measure_redis(self, rounds: KVRounds, name: str) -> None:
        """Measure reads from the server over `unix` or `tcp`, and over a plain socket."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        url = self._server.unix_url if name == "unix" else self._server.url
        tier = RedisTier.open(blocks.block_format, [url], BUDGET_BYTES, BLOCK_KEEP_S)
        plain, wanted = PlainSocket(self._server, blocks, unix=name == "unix"), blocks.make_reads(0)
        put_blocks(tier, blocks.make_blocks(0))
        sides = {
            f"redis {name}": lambda _: measure_seconds(lambda: get_blocks(tier, wanted)),
            f"socket {name}": lambda _: plain.measure_gets(0, drain=False),
            f"socket {name} drained": lambda _: plain.measure_gets(0, drain=True),
        }
        rounds.run_rounds(self._rounds, len(blocks.source), f"Redis, {name}", sides)
        blocks.check_content("Redis")
        plain.close()
        tier.close()
        self._redis.flushall()

    def measure_disk(self, rounds: KVRounds) -> None:
        """Measure reads from the disk tier, and plain reads of its files."""
        blocks = RandomBlocks(NUM_BLOCKS, BLOCK_BYTES)
        directory = self._disk / "blocks"
        tier = HostTier.open_disk(blocks.block_format, directory, BUDGET_BYTES, str(self._shm))
        put_blocks(tier, blocks.make_blocks(0))
        wanted, plain = blocks.make_reads(0), PlainFiles(directory, NUM_BLOCKS)

        def ours(_: int) -> float:
            return measure_seconds(lambda: get_blocks(tier, wanted))

        def theirs(_: int) -> float:
            return plain.measure_reads()

        def cold(side: Callable[[int], float]) -> Callable[[int], float]:
            def cooled(number: int) -> float:
                plain.drop_page_cache()
                return side(number)

            return cooled

        size, both = len(blocks.source), {"disk": ours, "preadv": theirs}
        rounds.run_rounds(self._rounds, size, "disk, warm", {f"{name} warm": side for name, side in both.items()})
        colds = {f"{name} cold": cold(side) for name, side in both.items()}
        rounds.run_rounds(max(3, self._rounds // 3), size, "disk, cold", colds)
        blocks.check_content("the disk")
        tier.close()

    def measure_lmcache(self, rounds: KVRounds) -> None:
        """Measure put and get of our tier and of LMCache's connectors. Raises `SideFailed`."""
        blocks = RandomBlocks(CHUNKS_PER_ROUND[16], BLOCK_BYTES)
        tier = RedisTier.open(blocks.block_format, [self._server.url], BUDGET_BYTES, BLOCK_KEEP_S)
        halves: dict[str, list[float]] = {}

        def noted(name: str, pair: tuple[float, float]) -> float:
            for half, seconds in zip(("put", "get"), pair, strict=True):
                halves.setdefault(f"{name} {half}", []).append(seconds)
            return sum(pair)

        def ours(number: int) -> float:
            self._redis.flushall()
            return noted("ours", measure_put_and_get(tier, blocks, number))

        def theirs(name: str, side: Side) -> Callable[[int], float]:
            def once(number: int) -> float:
                self._redis.flushall()
                return noted(name, (float(side.ask("put", number=number)), float(side.ask("get", number=number))))

            return once

        with contextlib.ExitStack() as exits:
            sides: dict[str, Callable[[int], float]] = {"ours": ours}
            for scheme, chunk in itertools.product(("redis", "resp"), CHUNKS_PER_ROUND):
                name = f"LMCache {scheme}, chunks of {chunk}"
                sides[name] = theirs(name, self._start_lmcache(exits, scheme, chunk))
            rounds.run_rounds(max(5, self._rounds // 2), len(blocks.source), "LMCache", sides)
        tier.close()
        self._redis.flushall()
        for half, each in halves.items():
            for seconds in each[_WARM_ROUNDS:]:
                rounds.add_round(half, seconds, len(blocks.source))

    def _start_lmcache(self, exits: contextlib.ExitStack, scheme: str, chunk: int) -> Side:
        side = Side("lmcache", self._logs / f"{scheme}-{chunk}.log", threads=2, pool_mb=0)
        exits.callback(side.close)
        side.ask(
            "load",
            model=str(self._logs),
            url=f"{scheme}://127.0.0.1:{self._server.port}",
            layers=SHAPE.layers,
            kv_heads=SHAPE.kv_heads,
            head_size=SHAPE.head_size,
            chunk=chunk,
            chunks=CHUNKS_PER_ROUND[chunk],
        )
        return side

    def _open_tiers(self, size: int) -> Iterator[tuple[str, Tier]]:
        """Yield each tier with blocks of this size, one after the other."""
        yield (
            "shm",
            HostTier.open_shared(make_block_format(size), f"{PIPELINE}-{size}", BUDGET_BYTES // 8, str(self._shm)),
        )
        yield "disk", HostTier.open_disk(make_block_format(size), self._disk / str(size), BUDGET_BYTES, str(self._shm))
        yield "redis_unix", RedisTier.open(make_block_format(size), [self._server.unix_url], BUDGET_BYTES, BLOCK_KEEP_S)
        yield "redis_tcp", RedisTier.open(make_block_format(size), [self._server.url], BUDGET_BYTES, BLOCK_KEEP_S)

    def measure_latencies(self) -> dict[str, float]:
        """Measure puts and gets of one block at a time, in microseconds."""
        figures = {}
        for label, size in track(BLOCK_SIZES.items(), "one block at a time", transient=True):
            samples = min(self._samples, 2**29 // size)
            for name, tier in self._open_tiers(size):
                one = RandomBlocks(1, size)
                pairs = [measure_put_and_get(tier, one, number) for number in range(samples + _WARM_ROUNDS)][
                    _WARM_ROUNDS:
                ]
                for what, seconds in zip(("put", "get"), zip(*pairs, strict=True), strict=True):
                    for percent in (50, 99):
                        figures[f"{name}_{what}_p{percent}_us_{label}"] = float(np.percentile(seconds, percent)) * 1e6
                tier.close()
        return figures
