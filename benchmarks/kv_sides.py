"""The sides of `benchmarks.kv`: blocks to move, the tiers that move them, and the plain ways to move the same bytes."""

import hashlib
import mmap
import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.peers.shapes import SHAPES
from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, BlockKey, ReadRequest
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.shared import SharedTier
from penstock.kvstore.tiers.wire import encode_command
from penstock.local.valkey import ValkeyServer
from penstock.names import kv_key

SHAPE = SHAPES["q06"]
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size * BLOCK_TOKENS
"""K and V in bf16."""
PIPELINE = "benchmark"
_PIECE = 2**20
_AHEAD = 4
"""GETs that the raw socket keeps under way; more are not faster."""
_TIMEOUT_S = 60.0
_CHECK = -1


def form(block_bytes: int) -> BlockFormat:
    """The form of a model with blocks of that size."""
    return BlockFormat(hashlib.sha256(b"%d" % block_bytes).digest(), b"benchmark layout", block_bytes)


def touched(num_bytes: int) -> memoryview:
    """Memory of this process, all of it there, in huge pages where the system gives them: like the engine's pool."""
    memory = mmap.mmap(-1, num_bytes)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    np.frombuffer(view, np.uint8)[:] = 1
    return view


def pieces(memory: memoryview, size: int) -> list[memoryview]:
    """The memory, cut."""
    return [memory[start : start + size] for start in range(0, len(memory), size)]


class Blocks:
    """`count` blocks of random content, and room to read them into."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.count, self.form = size, count, form(size)
        self.source, self.target = touched(count * size), touched(count * size)
        chance = np.random.default_rng(0)
        np.frombuffer(self.source, np.uint64)[:] = chance.integers(0, 2**63, count * size // 8, np.uint64)

    def names(self, number: int) -> list[BlockKey]:
        """New names in every round."""
        keys = (hashlib.sha256(b"%d %d %d" % (self.size, number, at)).digest() for at in range(self.count))
        return [BlockKey(key, BLOCK_TOKENS, b"benchmark tenant") for key in keys]

    def blocks(self, number: int) -> list[Block]:
        """To write."""
        return [Block(*pair) for pair in zip(self.names(number), pieces(self.source, self.size), strict=True)]

    def wanted(self, number: int) -> list[ReadRequest]:
        """To read."""
        return [ReadRequest(*pair) for pair in zip(self.names(number), pieces(self.target, self.size), strict=True)]

    def check(self, where: str) -> None:
        """Raises `RuntimeError` if what was read last is not what was written."""
        if not np.array_equal(np.frombuffer(self.target, np.uint64), np.frombuffer(self.source, np.uint64)):
            raise RuntimeError(f"{where} gave back something else")


def timed(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def put(tier: Tier, blocks: Sequence[Block]) -> None:
    """Raises `RuntimeError` if the tier does not take them all."""
    if not all(tier.put(blocks)):
        raise RuntimeError(f"the {tier.name} tier did not take all blocks: {tier.counters}")


def get(tier: Tier, wanted: Sequence[ReadRequest]) -> None:
    """Raises `RuntimeError` if the tier does not have them all."""
    if not all(tier.get(wanted)):
        raise RuntimeError(f"the {tier.name} tier did not have all blocks: {tier.counters}")


def put_and_get(tier: Tier, blocks: Blocks, number: int) -> tuple[float, float]:
    """Seconds of writing and of reading; what was read is compared, and forgotten."""
    writing, reading = blocks.blocks(number), blocks.wanted(number)
    np.frombuffer(blocks.target, np.uint8)[:] = 0
    put_s, get_s = timed(lambda: put(tier, writing)), timed(lambda: get(tier, reading))
    blocks.check(f"the {tier.name} tier")
    tier.remove_blocks([block.key.hash for block in writing])
    return put_s, get_s


class Reader:
    """Another process on this host, which reads blocks of the shared tier into memory of its own."""

    def __init__(self, count: int, size: int, budget_bytes: int, directory: Path) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, count, size, budget_bytes, str(directory))
        self._process = context.Process(target=_read_forever, args=given, name="reader", daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def read(self, number: int) -> float:
        """Until it has read the blocks of a round; the seconds that it took for that itself."""
        self._pipe.send(number)
        return self._answer()

    def check(self) -> None:
        """Let it compare what it read. It ends, and is not heard of again, if that is not what was written."""
        self._pipe.send(_CHECK)
        self._answer()

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()

    def _answer(self) -> float:
        if not self._pipe.poll(_TIMEOUT_S):
            raise TimeoutError("the reading process says nothing")
        return float(self._pipe.recv())


def _read_forever(pipe: Connection, count: int, size: int, budget_bytes: int, directory: str) -> None:
    blocks = Blocks(count, size)
    tier = SharedTier.open(blocks.form, PIPELINE, budget_bytes, directory)
    pipe.send(0.0)
    while (number := pipe.recv()) is not None:
        if number == _CHECK:
            blocks.check("shared memory")
            pipe.send(0.0)
            continue
        wanted = blocks.wanted(number)
        pipe.send(timed(lambda wanted=wanted: get(tier, wanted)))  # type: ignore[misc]
    tier.close()


class Copies:
    """Two plain copies of the same bytes: into a buffer between, and on from there."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._between = blocks, touched(len(blocks.source))

    def seconds(self) -> float:
        """Of both."""
        blocks, between = self._blocks, self._between
        begun_s = time.perf_counter()
        between[:] = blocks.source
        blocks.target[:] = between
        return time.perf_counter() - begun_s


class Socket:
    """Reads the stored blocks of a round with GETs on a plain socket, and looks at nothing."""

    def __init__(self, server: ValkeyServer, blocks: Blocks, *, unix: bool) -> None:
        self._blocks = blocks
        if unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(server.unix_url.removeprefix("unix://").partition("?")[0])
        else:
            self._socket = socket.create_connection(("127.0.0.1", server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stored = HEADER_BYTES + blocks.size
        self._reply_bytes = len(b"$%d\r\n" % stored) + stored + 2
        self._room = touched(blocks.count * self._reply_bytes)

    def seconds(self, number: int, *, drain: bool) -> float:
        """Of reading them all side by side; with `drain` each over the one before, so that they stay in the caches."""
        gets = [encode_command("GET", kv_key(name.hash)) for name in self._blocks.names(number)]
        size, receive = self._reply_bytes, self._socket.recv_into
        begun_s = time.perf_counter()
        self._socket.sendall(b"".join(gets[:_AHEAD]))
        for at in range(len(gets)):
            start = 0 if drain else at * size
            done = 0
            while done < size:
                piece = self._room[start + done : start + min(size, done + _PIECE)]
                count = receive(piece)
                if count == 0:
                    raise ConnectionError("the server closed the connection")
                done += count
            if at + _AHEAD < len(gets):
                self._socket.sendall(gets[at + _AHEAD])
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Files:
    """The files that a disk tier made, read with nothing but `preadv`."""

    def __init__(self, directory: Path) -> None:
        found = (file for file in directory.rglob("*") if file.is_file())
        self.files = [file for file in found if file.stat().st_size > BLOCK_BYTES // 2]
        self._sizes = [file.stat().st_size for file in self.files]
        self._room = touched(sum(self._sizes))

    def seconds(self) -> float:
        """Of reading them all, whole, side by side."""
        begun_s, start = time.perf_counter(), 0
        for file, size in zip(self.files, self._sizes, strict=True):
            descriptor, done = os.open(file, os.O_RDONLY), 0
            while done < size:
                done += os.preadv(descriptor, [self._room[start + done : start + size]], done)
            os.close(descriptor)
            start += size
        return time.perf_counter() - begun_s

    def cool(self) -> None:
        """Let the page cache forget them."""
        for file in self.files:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
