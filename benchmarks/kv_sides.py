"""The sides of `benchmarks.kv`: blocks to move, the tiers that move them, and the plain ways to move the same bytes."""

import hashlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.peers.shapes import SHAPES
from penstock.kvstore.arena.directory import find_slot_files
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, BlockKey, ReadRequest
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.wire import encode_command
from penstock.local.valkey import ValkeyServer
from penstock.names import kv_key

SHAPE = SHAPES["q06"]
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size * BLOCK_TOKENS
"""K and V in bf16."""
PIPELINE = "benchmark"
_CHUNK_BYTES = 2**20
_MAX_OPEN_GETS = 4
"""GETs that the raw socket keeps open; more are not faster."""
CHECK_CONTENT = -1


def make_block_format(block_bytes: int) -> BlockFormat:
    """Return the format of a model with blocks of this size."""
    return BlockFormat(hashlib.sha256(b"%d" % block_bytes).digest(), b"benchmark layout", block_bytes)


def allocate_touched(num_bytes: int) -> memoryview:
    """Allocate memory with all its pages mapped, in huge pages if the system has them, like the engine's pool."""
    memory = mmap.mmap(-1, num_bytes)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    np.frombuffer(view, np.uint8)[:] = 1
    return view


class RandomBlocks:
    """`count` blocks of random content, and memory to read them into."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.count, self.block_format = size, count, make_block_format(size)
        self.source, self.target = allocate_touched(count * size), allocate_touched(count * size)
        chance = np.random.default_rng(0)
        np.frombuffer(self.source, np.uint64)[:] = chance.integers(0, 2**63, count * size // 8, np.uint64)

    def make_keys(self, number: int) -> list[BlockKey]:
        """Return new keys for each round."""
        keys = (hashlib.sha256(b"%d %d %d" % (self.size, number, at)).digest() for at in range(self.count))
        return [BlockKey(key, BLOCK_TOKENS, b"benchmark tenant") for key in keys]

    def make_blocks(self, number: int) -> list[Block]:
        """Return the blocks to write in a round."""
        return [Block(key, self._cut(self.source, at)) for at, key in enumerate(self.make_keys(number))]

    def make_reads(self, number: int) -> list[ReadRequest]:
        """Return the reads of a round."""
        return [ReadRequest(key, self._cut(self.target, at)) for at, key in enumerate(self.make_keys(number))]

    def _cut(self, memory: memoryview, at: int) -> memoryview:
        return memory[at * self.size : (at + 1) * self.size]

    def check_content(self, where: str) -> None:
        """Raise `RuntimeError` if what was read last is not what was written."""
        if not np.array_equal(np.frombuffer(self.target, np.uint64), np.frombuffer(self.source, np.uint64)):
            raise RuntimeError(f"{where} gave back something else")


def measure_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def put_blocks(tier: Tier, blocks: Sequence[Block]) -> None:
    """Raise `RuntimeError` if the tier does not take them all."""
    if not all(tier.put(blocks)):
        raise RuntimeError(f"the {tier.name} tier did not take all blocks: {tier.counters}")


def get_blocks(tier: Tier, wanted: Sequence[ReadRequest]) -> None:
    """Raise `RuntimeError` if the tier does not have them all."""
    if not all(tier.get(wanted)):
        raise RuntimeError(f"the {tier.name} tier did not have all blocks: {tier.counters}")


def measure_put_and_get(tier: Tier, blocks: RandomBlocks, number: int) -> tuple[float, float]:
    """Return the seconds of writing and of reading; what was read is compared, and removed."""
    writing, reading = blocks.make_blocks(number), blocks.make_reads(number)
    np.frombuffer(blocks.target, np.uint8)[:] = 0
    put_s = measure_seconds(lambda: put_blocks(tier, writing))
    get_s = measure_seconds(lambda: get_blocks(tier, reading))
    blocks.check_content(f"the {tier.name} tier")
    tier.remove_blocks([block.key.hash for block in writing])
    return put_s, get_s


def read_shared_blocks(pipe: Connection, count: int, size: int, budget_bytes: int, directory: str) -> None:
    """Run another process on this host, which reads blocks of the shared tier into its own memory.

    It answers the number of a round with the seconds that it took to read the round's blocks, and `CHECK_CONTENT` once
    it has compared what it read. It ends without an answer if that is not what was written.
    """
    blocks = RandomBlocks(count, size)
    tier = HostTier.open_shared(blocks.block_format, PIPELINE, budget_bytes, directory)
    pipe.send(0.0)
    while (number := pipe.recv()) is not None:
        if number == CHECK_CONTENT:
            blocks.check_content("shared memory")
            pipe.send(0.0)
            continue
        wanted = blocks.make_reads(number)
        pipe.send(measure_seconds(partial(get_blocks, tier, wanted)))
    tier.close()


class PlainCopies:
    """Two plain copies of the same bytes: into a buffer, and on from there."""

    def __init__(self, blocks: RandomBlocks) -> None:
        self._blocks, self._buffer = blocks, allocate_touched(len(blocks.source))

    def measure_copies(self) -> float:
        """Return the seconds of both copies."""
        blocks, between = self._blocks, self._buffer
        begun_s = time.perf_counter()
        between[:] = blocks.source
        blocks.target[:] = between
        return time.perf_counter() - begun_s


class PlainSocket:
    """Reads the stored blocks of a round with GETs on a plain socket, without checking them."""

    def __init__(self, server: ValkeyServer, blocks: RandomBlocks, *, unix: bool) -> None:
        self._blocks = blocks
        if unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(server.unix_url.removeprefix("unix://").partition("?")[0])
        else:
            self._socket = socket.create_connection(("127.0.0.1", server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stored = HEADER_BYTES + blocks.size
        self._reply_bytes = len(b"$%d\r\n" % stored) + stored + 2
        self._buffer = allocate_touched(blocks.count * self._reply_bytes)

    def measure_gets(self, number: int, *, drain: bool) -> float:
        """Return the seconds of reading them all side by side; with `drain` each over the one before, in the caches."""
        gets = [encode_command("GET", kv_key(name.hash)) for name in self._blocks.make_keys(number)]
        size = self._reply_bytes
        begun_s = time.perf_counter()
        self._socket.sendall(b"".join(gets[:_MAX_OPEN_GETS]))
        for at in range(len(gets)):
            start, done = 0 if drain else at * size, 0
            while done < size:
                count = self._socket.recv_into(self._buffer[start + done : start + min(size, done + _CHUNK_BYTES)])
                if count == 0:
                    raise ConnectionError("the server closed the connection")
                done += count
            if at + _MAX_OPEN_GETS < len(gets):
                self._socket.sendall(gets[at + _MAX_OPEN_GETS])
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class PlainFiles:
    """The blocks of a disk tier, read with nothing but `preadv`."""

    def __init__(self, directory: Path, num_blocks: int) -> None:
        (self.file,) = find_slot_files(directory)
        self._geometry = Geometry(BLOCK_BYTES, num_blocks, on_disk=True)
        self._buffer = allocate_touched(num_blocks * BLOCK_BYTES)

    def measure_reads(self) -> float:
        """Return the seconds of reading them all, side by side."""
        begun_s, descriptor = time.perf_counter(), os.open(self.file, os.O_RDONLY)
        for number in range(self._geometry.num_slots):
            start, done, at = number * BLOCK_BYTES, 0, self._geometry.slot_offset(number) + HEADER_BYTES
            while done < BLOCK_BYTES:
                done += os.preadv(descriptor, [self._buffer[start + done : start + BLOCK_BYTES]], at + done)
        os.close(descriptor)
        return time.perf_counter() - begun_s

    def drop_page_cache(self) -> None:
        """Make the page cache forget them."""
        descriptor = os.open(self.file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
