"""What the tiers of the KV store cost: blocks moved through each, against the plain way to move the same bytes.

python -m benchmarks.kv [--quick | --smoke] [--json FILE]

Blocks have the size of 16 tokens of the 0.6B shape in bf16 (1.75 MiB), 64 MB of them a round.

    shm     written by this process, read by another one, as seen from here, with the word to the other process and its
            answer; against two plain copies in one process, into a buffer and out of it
    redis   read over a unix socket and over TCP; against a plain socket that sends the same GETs to the same server and
            receives the replies side by side in one buffer, looking at nothing
    disk    read while the page cache has the files, against `preadv` of the same files side by side into one buffer
    LMCache its remote backend on the same server over TCP, without an engine, put and get of the same bytes: with its
            asyncio connector (`redis://`), in chunks of 256 tokens, its default, and of 16, of which the faster counts;
            and with the one in C++ (`resp://`, eight connections), the same way. It does not check what it reads. Ours
            does, and keeps the budget. (`python -m benchmarks.peers.setup` installs it.)
"""

import contextlib
import hashlib
import itertools
import mmap
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import redis

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, draw_boxes, measure_in_turns, print_table
from benchmarks.peers.process import Side, SideFailed, start_lmcache
from benchmarks.peers.shapes import SHAPES
from benchmarks.systems import PipedProcess
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.directory import find_slot_files
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, BlockKey, ReadRequest
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.kvstore.tiers.wire import encode_command
from penstock.local.valkey import SOCKET_NAME, ValkeyServer
from penstock.names import kv_key

SIDES_BY_RATIO = {
    "shm_vs_memcpy": ("shm", "memcpy"), "redis_unix_vs_socket": ("redis unix", "socket unix"),
    "redis_tcp_vs_socket": ("redis tcp", "socket tcp"), "disk_vs_read": ("disk warm", "preadv warm"),
}  # fmt: skip
SHAPE = SHAPES["q06"]
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size * BLOCK_TOKENS
"""K and V in bf16."""
NUM_BLOCKS = 35
"""Blocks of a round: 64 MB."""
CHUNKS_PER_ROUND = {256: 2, 16: 32}
"""By the tokens of an LMCache chunk: how many chunks a round of the comparison moves."""
BLOCK_FORMAT = BlockFormat(hashlib.sha256(b"%d" % BLOCK_BYTES).digest(), b"benchmark layout", BLOCK_BYTES)
BUDGET_BYTES = 512 * 2**20
BLOCK_KEEP_S = 600.0
PIPELINE = "benchmark"
CHECK_CONTENT = -1
_CHUNK_BYTES = 2**20
_MAX_OPEN_GETS = 4
"""GETs that the raw socket keeps open; more are not faster."""
_WARM_ROUNDS = 2
Seconds = dict[str, list[float]]
Sides = Mapping[str, Callable[[int], float]]


def allocate_touched(num_bytes: int) -> memoryview:
    """Allocate memory with all its pages mapped, in huge pages if the system has them, like the engine's pool."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    np.frombuffer(view, np.uint8)[:] = 1
    return view


class RandomBlocks:
    """`count` blocks of random content, and memory to read them into."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.source, self.target = allocate_touched(count * BLOCK_BYTES), allocate_touched(count * BLOCK_BYTES)
        chance = np.random.default_rng(0)
        np.frombuffer(self.source, np.uint64)[:] = chance.integers(0, 2**63, count * BLOCK_BYTES // 8, np.uint64)

    def make_keys(self, number: int) -> list[BlockKey]:
        """Return new keys for each round."""
        keys = (hashlib.sha256(b"%d %d" % (number, at)).digest() for at in range(self.count))
        return [BlockKey(key, BLOCK_TOKENS, b"benchmark tenant") for key in keys]

    def make_blocks(self, number: int) -> list[Block]:
        """Return the blocks to write in a round."""
        return [Block(key, _cut(self.source, at)) for at, key in enumerate(self.make_keys(number))]

    def make_reads(self, number: int) -> list[ReadRequest]:
        """Return the reads of a round."""
        return [ReadRequest(key, _cut(self.target, at)) for at, key in enumerate(self.make_keys(number))]

    def check_content(self, where: str) -> None:
        """Raise `RuntimeError` if what was read last is not what was written."""
        if not np.array_equal(np.frombuffer(self.target, np.uint64), np.frombuffer(self.source, np.uint64)):
            raise RuntimeError(f"{where} gave back something else")


def _cut(memory: memoryview, at: int) -> memoryview:
    return memory[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]


def put_blocks(tier: Tier, blocks: Sequence[Block]) -> float:
    """Return the seconds of putting blocks. Raises `RuntimeError` if the tier does not take them all."""
    begun_s = time.perf_counter()
    if not all(tier.put(blocks)):
        raise RuntimeError(f"the {tier.name} tier did not take all blocks: {tier.counters}")
    return time.perf_counter() - begun_s


def get_blocks(tier: Tier, wanted: Sequence[ReadRequest]) -> float:
    """Return the seconds of getting blocks. Raises `RuntimeError` if the tier does not have them all."""
    begun_s = time.perf_counter()
    if not all(tier.get(wanted)):
        raise RuntimeError(f"the {tier.name} tier did not have all blocks: {tier.counters}")
    return time.perf_counter() - begun_s


def read_shared_blocks(pipe: Connection, directory: str) -> None:
    """Run another process on this host, which reads blocks of the shared tier into its own memory.

    It answers the number of a round once it has read the round's blocks, and `CHECK_CONTENT` once it has compared what
    it read. It ends without an answer if that is not what was written.
    """
    blocks = RandomBlocks(NUM_BLOCKS)
    with contextlib.closing(HostTier(Arena.open(BLOCK_FORMAT, PIPELINE, BUDGET_BYTES, directory))) as tier:
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            if number == CHECK_CONTENT:
                blocks.check_content("shared memory")
            else:
                get_blocks(tier, blocks.make_reads(number))
            pipe.send("done")


class PlainSocket:
    """Reads the stored blocks of a round with GETs on a plain socket, without checking them."""

    def __init__(self, server: ValkeyServer, blocks: RandomBlocks, *, unix: bool) -> None:
        self._blocks = blocks
        if unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(server.directory.resolve() / SOCKET_NAME))
        else:
            self._socket = socket.create_connection(("127.0.0.1", server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = self._socket.close
        stored = HEADER_BYTES + BLOCK_BYTES
        self._reply_bytes = len(b"$%d\r\n" % stored) + stored + 2
        self._buffer = allocate_touched(blocks.count * self._reply_bytes)

    def measure_gets(self, number: int) -> float:
        """Return the seconds of reading them all side by side."""
        gets = [encode_command("GET", kv_key(name.hash)) for name in self._blocks.make_keys(number)]
        size = self._reply_bytes
        begun_s = time.perf_counter()
        self._socket.sendall(b"".join(gets[:_MAX_OPEN_GETS]))
        for at in range(len(gets)):
            start, done = at * size, 0
            while done < size:
                count = self._socket.recv_into(self._buffer[start + done : start + min(size, done + _CHUNK_BYTES)])
                if count == 0:
                    raise ConnectionError("the server closed the connection")
                done += count
            if at + _MAX_OPEN_GETS < len(gets):
                self._socket.sendall(gets[at + _MAX_OPEN_GETS])
        return time.perf_counter() - begun_s


class KVBench:
    """All measurements, with directories for memory, disk and server, which are removed with `exits`."""

    def __init__(self, exits: contextlib.ExitStack, rounds: int) -> None:
        def room(parent: str | None = None) -> Path:
            return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kv-", dir=parent)))

        self._rounds = rounds
        self._shm, self._disk, self._logs = room(SHM), room(), room()
        self._server = exits.enter_context(ValkeyServer(room(), appendonly=False))
        self._redis = exits.enter_context(redis.Redis.from_url(self._server.url))

    def _measure(self, what: str, sides: Sides, rounds: int = 0) -> Seconds:
        return measure_in_turns(sides, rounds or self._rounds, what, num_warm=_WARM_ROUNDS)

    def measure_shared_memory(self) -> Seconds:
        """Measure the way through shared memory to another process, and two copies in this one."""
        reader = PipedProcess(multiprocessing.get_context("fork"), read_shared_blocks, str(self._shm), timeout_s=60.0)
        blocks = RandomBlocks(NUM_BLOCKS)
        between = allocate_touched(len(blocks.source))
        tier = HostTier(Arena.open(BLOCK_FORMAT, PIPELINE, BUDGET_BYTES, str(self._shm)))

        def hand_over(number: int) -> float:
            writing, begun_s = blocks.make_blocks(number), time.perf_counter()
            put_blocks(tier, writing)
            reader.ask(number)
            taken_s = time.perf_counter() - begun_s
            reader.ask(CHECK_CONTENT)
            tier.remove_blocks([block.key.hash for block in writing])
            return taken_s

        def copy_twice(_: int) -> float:
            begun_s = time.perf_counter()
            between[:] = blocks.source
            blocks.target[:] = between
            return time.perf_counter() - begun_s

        with contextlib.closing(tier), contextlib.closing(reader):
            return self._measure("shared memory", {"shm": hand_over, "memcpy": copy_twice})

    def measure_redis(self, name: str) -> Seconds:
        """Measure reads from the server over `unix` or `tcp`, and over a plain socket."""
        blocks = RandomBlocks(NUM_BLOCKS)
        url = self._server.unix_url if name == "unix" else self._server.url
        tier = RedisTier.open(BLOCK_FORMAT, [url], BUDGET_BYTES, BLOCK_KEEP_S)
        plain, wanted = PlainSocket(self._server, blocks, unix=name == "unix"), blocks.make_reads(0)
        put_blocks(tier, blocks.make_blocks(0))
        sides: Sides = {
            f"redis {name}": lambda _: get_blocks(tier, wanted), f"socket {name}": lambda _: plain.measure_gets(0),
        }  # fmt: skip
        with contextlib.closing(tier), contextlib.closing(plain):
            found = self._measure(f"Redis, {name}", sides)
            blocks.check_content("Redis")
        self._redis.flushall()
        return found

    def measure_disk(self) -> Seconds:
        """Measure reads from the disk tier, and plain reads of its files side by side."""
        blocks = RandomBlocks(NUM_BLOCKS)
        tier = HostTier(Arena.open_on_disk(BLOCK_FORMAT, self._disk, BUDGET_BYTES, str(self._shm)))
        put_blocks(tier, blocks.make_blocks(0))
        (file,), geometry = find_slot_files(self._disk), Geometry(BLOCK_BYTES, NUM_BLOCKS, on_disk=True)
        wanted, buffer = blocks.make_reads(0), allocate_touched(NUM_BLOCKS * BLOCK_BYTES)

        def read_plainly(_: int) -> float:
            begun_s, descriptor = time.perf_counter(), os.open(file, os.O_RDONLY)
            for number in range(geometry.num_slots):
                room, done, at = _cut(buffer, number), 0, geometry.slot_offset(number) + HEADER_BYTES
                while done < BLOCK_BYTES:
                    done += os.preadv(descriptor, [room[done:]], at + done)
            os.close(descriptor)
            return time.perf_counter() - begun_s

        with contextlib.closing(tier):
            sides: Sides = {"disk warm": lambda _: get_blocks(tier, wanted), "preadv warm": read_plainly}
            found = self._measure("disk", sides)
            blocks.check_content("the disk")
        return found

    def measure_lmcache(self) -> Seconds:
        """Measure put and get of our tier and of LMCache's connectors. Raises `SideFailed`."""
        blocks = RandomBlocks(CHUNKS_PER_ROUND[16])
        tier = RedisTier.open(BLOCK_FORMAT, [self._server.url], BUDGET_BYTES, BLOCK_KEEP_S)

        def move_ours(number: int) -> float:
            self._redis.flushall()
            np.frombuffer(blocks.target, np.uint8)[:] = 0
            writing, reading = blocks.make_blocks(number), blocks.make_reads(number)
            taken_s = put_blocks(tier, writing) + get_blocks(tier, reading)
            blocks.check_content("the Redis tier")
            return taken_s

        def move_theirs(side: Side, number: int) -> float:
            self._redis.flushall()
            return float(side.ask("put", number=number)) + float(side.ask("get", number=number))

        with contextlib.ExitStack() as exits:
            exits.enter_context(contextlib.closing(tier))
            sides: dict[str, Callable[[int], float]] = {"ours": move_ours}
            for scheme, chunk in itertools.product(("redis", "resp"), CHUNKS_PER_ROUND):
                side = start_lmcache(
                    exits, self._logs, f"{scheme}://127.0.0.1:{self._server.port}", threads=2, layers=SHAPE.layers,
                    kv_heads=SHAPE.kv_heads, head_size=SHAPE.head_size, chunk=chunk, chunks=CHUNKS_PER_ROUND[chunk],
                )  # fmt: skip
                sides[f"LMCache {scheme}, chunks of {chunk}"] = partial(move_theirs, side)
            return self._measure("LMCache", sides, max(5, self._rounds // 2))


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    with contextlib.ExitStack() as exits:
        bench = KVBench(exits, given.choose_size(25, 7, 1))
        read = bench.measure_shared_memory() | bench.measure_redis("unix") | bench.measure_redis("tcp")
        read |= bench.measure_disk()
        moved: Seconds = {}
        try:
            moved = bench.measure_lmcache()
        except SideFailed as failed:
            print(f"without LMCache: {failed}")
    speeds, lmcache = (
        {side: [count * BLOCK_BYTES / 1e9 / one for one in seconds] for side, seconds in each.items()}
        for each, count in ((read, NUM_BLOCKS), (moved, CHUNKS_PER_ROUND[16]))
    )
    figures = {name: compute_ratio(speeds, *sides) for name, sides in SIDES_BY_RATIO.items()}
    for name, scheme in (("redis_vs_lmcache", "LMCache redis"), ("redis_vs_lmcache_resp", "LMCache resp")):
        if ratios := [compute_ratio(lmcache, "ours", side) for side in lmcache if side.startswith(scheme)]:
            figures[name] = min(ratios)
    print_table(speeds, "GB/s")
    print_table(lmcache, "GB/s, put and get")
    if given.is_full:
        moved_both_ways = {f"{side}, put and get": each for side, each in lmcache.items()}
        draw_boxes("kv", {"64 MB in blocks of 1.75 MiB, GB/s": speeds | moved_both_ways}, xlim=(0, None))
    return figures | {f"{side.replace(' ', '_')}_gb_s": statistics.median(found) for side, found in speeds.items()}


if __name__ == "__main__":
    run_benchmark(__doc__, run)
