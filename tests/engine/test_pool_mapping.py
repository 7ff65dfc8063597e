"""The pool's memory is mapped before it is used, as far as there is enough, and nothing waits for that."""

import ctypes
import errno
import gc
import logging
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.memory import map_zeros
from penstock.engine.memory import pool_mapping
from penstock.engine.memory.pool_mapping import PIECE_BYTES, PIECES_PER_LOOK, PoolMapping
from penstock.engine.memory.states import StateLayout, StatePart
from penstock.engine.memory.storage import BlockLayout, KVStorage, LayerShape
from penstock.engine.model.model import LoadedModel
from penstock.engine.opening import open_engine
from penstock.pages import populate_pages

MIB = 2**20
LOOK_BYTES = PIECES_PER_LOOK * PIECE_BYTES
LAYOUT = BlockLayout((LayerShape(0, (2, 64), (2, 64)),), 16, torch.float32)


def can_populate() -> bool:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        populate_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE)
    except OSError:
        return False
    return True


needs_kernel = pytest.mark.skipif(
    sys.platform != "linux" or not can_populate(), reason="this kernel maps no pages before they are used"
)


def count_pages(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // mmap.PAGESIZE)


def count_resident_pages(tensor: torch.Tensor) -> int:
    """Return how many pages of a tensor that starts one are in memory."""
    flags = (ctypes.c_ubyte * count_pages(tensor))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), flags) == 0
    return sum(flag & 1 for flag in flags)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The pieces that were mapped, as they are instead of being mapped."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(pool_mapping, "populate_pages", lambda *piece: found.append(piece))
    return found


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, int]]) -> dict[str, int | None]:
    """What the machine has for a mapping of pieces: `bytes` at first, less what was mapped."""
    given: dict[str, int | None] = {"bytes": None}

    def count() -> int | None:
        return None if given["bytes"] is None else given["bytes"] - sum(num_bytes for _, num_bytes in pieces)

    monkeypatch.setattr(pool_mapping, "count_available_bytes", count)
    return given


def run_mapping(*sizes: int) -> PoolMapping:
    """Map tensors of these sizes, and return the mapping that has ended."""
    mapping = PoolMapping([map_zeros(size, torch.uint8) for size in sizes])
    mapping.start()
    mapping.wait_until_done()
    return mapping


@needs_kernel
def test_all_blocks_and_states_are_in_memory_at_the_end() -> None:
    states = StateLayout((StatePart(1, "recurrent", 0, (3, 7), torch.float32),), 64, 256)
    storage = KVStorage(replace(LAYOUT, states=states), 700, torch.device("cpu"), 1000)
    blocks, rows = storage.list_host_memory()
    storage.write_block(3, content := bytes(range(256)) * (LAYOUT.block_bytes // 256))
    assert count_resident_pages(blocks) < count_pages(blocks)
    mapping = PoolMapping([blocks, rows])
    mapping.start()
    mapping.wait_until_done()
    assert mapping.num_mapped_bytes == mapping.num_bytes == blocks.nbytes + rows.nbytes
    for tensor in (blocks, rows):
        assert count_resident_pages(tensor) == count_pages(tensor)
    assert bytes(storage.view_block(3) or b"") == content, "what was written before has changed"
    assert not storage.data[4:].any()


def test_memory_is_mapped_in_the_order_in_which_blocks_are_given_out(
    pieces: list[tuple[int, int]], available: dict[str, int | None], demo: LoadedModel
) -> None:
    available["bytes"] = 2**40
    engine = Engine(demo, EngineSettings(pool_mb=20, max_batch=4))
    engine.pool_mapping.start()
    engine.pool_mapping.wait_until_done()
    data = engine.storage.data
    starts = [data.data_ptr() + offset for offset in range(0, data.nbytes, PIECE_BYTES)]
    assert [address for address, _ in pieces] == starts
    assert sum(num_bytes for _, num_bytes in pieces) == data.nbytes <= 20 * MIB
    assert engine.pool.allocate_blocks(data.shape[0]) == list(range(data.shape[0]))


@needs_kernel
def test_an_opened_engine_maps_its_pool() -> None:
    engine = open_engine(EngineSettings(pool_mb=8))
    engine.pool_mapping.wait_until_done()
    assert engine.pool_mapping.num_mapped_bytes == engine.storage.data.nbytes


def test_a_quarter_of_what_was_available_is_left(
    available: dict[str, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    available["bytes"] = 10 * LOOK_BYTES
    mapping = run_mapping(9 * LOOK_BYTES)
    assert mapping.num_mapped_bytes == 7 * LOOK_BYTES
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "112 of 144 MiB of the KV pool are mapped, the rest would leave too little memory to others"
    )


def test_where_nothing_is_told_nothing_is_mapped(
    available: dict[str, int | None], pieces: list[tuple[int, int]]
) -> None:
    assert run_mapping(PIECE_BYTES).num_mapped_bytes == len(pieces) == 0


def test_two_that_map_at_once_leave_a_quarter_between_them_but_for_one_look(
    available: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    available["bytes"] = 15 * LOOK_BYTES
    count: Callable[[], int | None] = vars(pool_mapping)["count_available_bytes"]
    both = threading.Barrier(2)

    def count_in_step() -> int | None:
        """Return what both see: neither maps while the other counts."""
        both.wait()
        found = count()
        both.wait()
        return found

    monkeypatch.setattr(pool_mapping, "count_available_bytes", count_in_step)
    mappings = [PoolMapping([map_zeros(10 * LOOK_BYTES, torch.uint8)]) for _ in range(2)]
    for mapping in mappings:
        mapping.start()
    for mapping in mappings:
        mapping.wait_until_done()
    # One alone would map 11 looks. At the last one that both take neither knows of the other's.
    assert [mapping.num_mapped_bytes for mapping in mappings] == [6 * LOOK_BYTES] * 2


def test_one_that_begins_later_leaves_a_quarter_of_what_it_finds(available: dict[str, int | None]) -> None:
    available["bytes"] = 16 * LOOK_BYTES
    assert [run_mapping(10 * LOOK_BYTES).num_mapped_bytes for _ in range(2)] == [10 * LOOK_BYTES, 4 * LOOK_BYTES]


def test_a_kernel_that_cannot_leaves_the_pool_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, num_bytes: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(pool_mapping, "count_available_bytes", lambda: 2**40)
    monkeypatch.setattr(pool_mapping, "populate_pages", refuse)
    caplog.set_level(logging.INFO)
    assert run_mapping(3 * PIECE_BYTES).num_mapped_bytes == 0
    (record,) = caplog.records
    assert "the rest is mapped as it is used: Invalid argument" in record.getMessage()


# The end of an engine, and of its process


@pytest.fixture
def held_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Event]]:
    """The mapping of a first piece goes on until the test ends it: [it has begun, it may end]."""
    begun, may_end = threading.Event(), threading.Event()

    def hold(address: int, num_bytes: int) -> None:
        begun.set()
        may_end.wait()

    monkeypatch.setattr(pool_mapping, "count_available_bytes", lambda: 2**40)
    monkeypatch.setattr(pool_mapping, "populate_pages", hold)
    yield [begun, may_end]
    may_end.set()


@pytest.mark.parametrize("by_whom", ["stop", "engine"])
def test_a_mapping_that_is_stopped_or_whose_engine_ends_ends_with_its_piece(
    by_whom: str, held_pieces: list[threading.Event], demo: LoadedModel
) -> None:
    begun, may_end = held_pieces
    engine = Engine(demo, EngineSettings(pool_mb=40)) if by_whom == "engine" else None
    mapping = engine.pool_mapping if engine else PoolMapping([map_zeros(5 * PIECE_BYTES, torch.uint8)])
    mapping.start()
    begun.wait()
    if engine is None:
        mapping.stop()
    del engine
    gc.collect()
    may_end.set()
    mapping.wait_until_done()
    assert mapping.num_mapped_bytes == PIECE_BYTES


EXITS_WHILE_MAPPING = """
import threading
import torch
from penstock.engine.memory import pool_mapping
from penstock.engine.kernels.memory import map_zeros

begun = threading.Event()
pool_mapping.count_available_bytes = lambda: 2**40
pool_mapping.populate_pages = lambda *piece: (begun.set(), threading.Event().wait())
pool_mapping.PoolMapping([map_zeros(2**24, torch.uint8)]).start()
begun.wait()
"""


def test_a_process_does_not_wait_for_the_mapping_when_it_ends() -> None:
    subprocess.run([sys.executable, "-c", EXITS_WHILE_MAPPING], check=True)
