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
    Blocks,
    Copies,
    Files,
    Reader,
    Socket,
    form,
    get,
    put,
    put_and_get,
    timed,
)
from benchmarks.peers.process import Side
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.disk import DiskTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.kvstore.tiers.shared import SharedTier
from penstock.local.valkey import ValkeyServer

BLOCKS = 35
"""64 MB."""
CHUNKS = {256: 2, 16: 32}
"""LMCache's chunks of so many tokens that make a round of the comparison with it."""
BUDGET = 512 * 2**20
KEEP_S = 600.0
SIZES = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "256k": 2**18, "1m": 2**20, "4m": 2**22}
_SHM = Path("/dev/shm")
_WARM = 2
"""Rounds that do not count."""


@dataclass
class Rounds:
    """Seconds and bytes of every side, a pair a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    def take(self, count: int, num_bytes: int, what: str, sides: Mapping[str, Callable[[int], float]]) -> None:
        """Let the sides take turns: forwards in one round, backwards in the next. They get the round's number."""
        for number in track(range(count + _WARM), what, transient=True):
            for side in sides if number % 2 == 0 else reversed(list(sides)):
                seconds = sides[side](number)
                if number >= _WARM:
                    self.add(side, seconds, num_bytes)

    def add(self, side: str, seconds: float, num_bytes: int) -> None:
        """One round of a side."""
        self.seconds.setdefault(side, []).append(seconds)
        self.num_bytes[side] = num_bytes

    def speeds(self, side: str) -> list[float]:
        """In GB/s."""
        return [self.num_bytes[side] / seconds / 1e9 for seconds in self.seconds[side]]

    def ratio(self, side: str, other: str) -> float:
        """How many times as fast as the other, the median of the rounds."""
        both = zip(self.seconds[side], self.seconds[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in both)


class Bench:
    """Everything that is measured, with a directory each for memory, disk and server, which go with `exits`."""

    def __init__(self, exits: contextlib.ExitStack, quick: bool) -> None:
        def room(parent: Path | None = None) -> Path:
            return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kv-", dir=parent)))

        self._rounds = 7 if quick else 25
        self._samples = 60 if quick else 400
        self._shm, self._disk, self._logs = room(_SHM if _SHM.is_dir() else None), room(), room()
        self._server = exits.enter_context(ValkeyServer(room(), appendonly=False))
        self._redis = exits.enter_context(redis.Redis.from_url(self._server.url))

    def hand_off(self, rounds: Rounds) -> None:
        """Through shared memory to another process, and two copies in this one."""
        blocks = Blocks(BLOCKS, BLOCK_BYTES)
        copies, tier = Copies(blocks), SharedTier.open(blocks.form, PIPELINE, BUDGET, str(self._shm))
        reader = Reader(BLOCKS, BLOCK_BYTES, BUDGET, self._shm)
        inside: dict[str, list[float]] = {"shm put": [], "shm get": []}

        def through(number: int) -> float:
            writing = blocks.blocks(number)

            def hand_over() -> None:
                inside["shm put"].append(timed(lambda: put(tier, writing)))
                inside["shm get"].append(reader.read(number))

            taken_s = timed(hand_over)
            reader.check()
            tier.remove_blocks([block.key.hash for block in writing])
            return taken_s

        sides = {"shm": through, "memcpy": lambda _: copies.seconds()}
        try:
            rounds.take(self._rounds, len(blocks.source), "shared memory", sides)
        finally:
            reader.close()
            tier.close()
        for side, each in inside.items():
            for seconds in each[_WARM:]:
                rounds.add(side, seconds, len(blocks.source))

    def redis(self, rounds: Rounds, name: str) -> None:
        """Reads from the server over `unix` or `tcp`, and a plain socket."""
        blocks = Blocks(BLOCKS, BLOCK_BYTES)
        url = self._server.unix_url if name == "unix" else self._server.url
        tier = RedisTier.open(blocks.form, [url], BUDGET, KEEP_S)
        plain, wanted = Socket(self._server, blocks, unix=name == "unix"), blocks.wanted(0)
        put(tier, blocks.blocks(0))
        sides = {
            f"redis {name}": lambda _: timed(lambda: get(tier, wanted)),
            f"socket {name}": lambda _: plain.seconds(0, drain=False),
            f"socket {name} drained": lambda _: plain.seconds(0, drain=True),
        }
        rounds.take(self._rounds, len(blocks.source), f"Redis, {name}", sides)
        blocks.check("Redis")
        plain.close()
        tier.close()
        self._redis.flushall()

    def files(self, rounds: Rounds) -> None:
        """Reads from the disk tier, and of its files."""
        blocks = Blocks(BLOCKS, BLOCK_BYTES)
        directory = self._disk / "blocks"
        tier = DiskTier.open(blocks.form, directory, BUDGET)
        put(tier, blocks.blocks(0))
        wanted, plain = blocks.wanted(0), Files(directory)

        def ours(_: int) -> float:
            return timed(lambda: get(tier, wanted))

        def theirs(_: int) -> float:
            return plain.seconds()

        def cold(side: Callable[[int], float]) -> Callable[[int], float]:
            def cooled(number: int) -> float:
                plain.cool()
                return side(number)

            return cooled

        size, both = len(blocks.source), {"disk": ours, "preadv": theirs}
        rounds.take(self._rounds, size, "disk, warm", {f"{name} warm": side for name, side in both.items()})
        colds = {f"{name} cold": cold(side) for name, side in both.items()}
        rounds.take(max(3, self._rounds // 3), size, "disk, cold", colds)
        blocks.check("the disk")
        tier.close()

    def lmcache(self, rounds: Rounds) -> None:
        """Put and get of our tier and of LMCache's connectors. Raises `SideFailed`."""
        blocks = Blocks(CHUNKS[16], BLOCK_BYTES)
        tier = RedisTier.open(blocks.form, [self._server.url], BUDGET, KEEP_S)
        halves: dict[str, list[float]] = {}

        def noted(name: str, pair: tuple[float, float]) -> float:
            for half, seconds in zip(("put", "get"), pair, strict=True):
                halves.setdefault(f"{name} {half}", []).append(seconds)
            return sum(pair)

        def ours(number: int) -> float:
            self._redis.flushall()
            return noted("ours", put_and_get(tier, blocks, number))

        def theirs(name: str, side: Side) -> Callable[[int], float]:
            def once(number: int) -> float:
                self._redis.flushall()
                return noted(name, (float(side.ask("put", number=number)), float(side.ask("get", number=number))))

            return once

        with contextlib.ExitStack() as exits:
            sides: dict[str, Callable[[int], float]] = {"ours": ours}
            for scheme, chunk in itertools.product(("redis", "resp"), CHUNKS):
                name = f"LMCache {scheme}, chunks of {chunk}"
                sides[name] = theirs(name, self._lmcache_side(exits, scheme, chunk))
            rounds.take(max(5, self._rounds // 2), len(blocks.source), "LMCache", sides)
        tier.close()
        self._redis.flushall()
        for half, each in halves.items():
            for seconds in each[_WARM:]:
                rounds.add(half, seconds, len(blocks.source))

    def _lmcache_side(self, exits: contextlib.ExitStack, scheme: str, chunk: int) -> Side:
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
            chunks=CHUNKS[chunk],
        )
        return side

    def _tiers(self, size: int) -> Iterator[tuple[str, Tier]]:
        """Each tier with blocks of that size, one after the other."""
        yield "shm", SharedTier.open(form(size), f"{PIPELINE}-{size}", BUDGET // 8, str(self._shm))
        yield "disk", DiskTier.open(form(size), self._disk / str(size), BUDGET)
        yield "redis_unix", RedisTier.open(form(size), [self._server.unix_url], BUDGET, KEEP_S)
        yield "redis_tcp", RedisTier.open(form(size), [self._server.url], BUDGET, KEEP_S)

    def latencies(self) -> dict[str, float]:
        """Puts and gets of one block at a time, in microseconds."""
        figures = {}
        for label, size in track(SIZES.items(), "one block at a time", transient=True):
            samples = min(self._samples, 2**29 // size)
            for name, tier in self._tiers(size):
                one = Blocks(1, size)
                pairs = [put_and_get(tier, one, number) for number in range(samples + _WARM)][_WARM:]
                for what, seconds in zip(("put", "get"), zip(*pairs, strict=True), strict=True):
                    for percent in (50, 99):
                        figures[f"{name}_{what}_p{percent}_us_{label}"] = float(np.percentile(seconds, percent)) * 1e6
                tier.close()
        return figures
