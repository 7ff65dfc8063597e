"""Layout of the file of an arena's tables: the superblock, the tables and, for an arena in memory, the slots.

The slots of an arena on disk are in a file of their own, after a page that says whose they are (`directory.py`).
The superblock has 64-bit words (`W_…` are their numbers), then the format and the pipeline's name. The tables `state`,
`key`, `generation`, `owner` and the leases are authoritative; `next_free`, `lease_count` and `index` follow from them
and can be rebuilt.
"""

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.kvstore.block import HEADER_BYTES, BlockFormat

MAGIC = int.from_bytes(b"PKVARENA", "little")
VERSION = 1
PAGE_BYTES = 4096
LEASES_PER_SLOT = 4
NO_SLOT = 0xFFFFFFFF
"""Marks the end of the free list."""
FREE, WRITING, READY = 0, 1, 2
"""States of a slot. A state is changed by writing one byte."""

W_MAGIC, W_VERSION, W_NUM_SLOTS, W_PAYLOAD_BYTES = 0, 1, 2, 3
W_TABLES_ID = 4
"""The random id of these tables, which the slot file of an arena on disk names. 0: the slots are in memory."""
W_DIRTY = 8
"""1 while the tables are being changed. A process that takes the lock and finds 1 rebuilds the tables."""
W_ALLOCATED = 9
"""Number of slots that have memory, or space on disk, and are in the tables, counted from slot 0."""
W_FREE_HEAD, W_NUM_FREE, W_NUM_READY = 10, 11, 12
W_CLOCK = 13
"""The latest time of use: nanoseconds of the host's monotonic clock, made unique."""
W_NUM_UNLEASED = 14
"""Counts blocks that lost their last lease. When it changes, processes choose again which blocks to evict."""
W_NEXT_LEASE_END, W_LEASE_TOP = 15, 16
"""Time before which no lease ends; row from which on the lease table is free."""
_FORM_AT, _PIPELINE_AT, _SUPERBLOCK = 1024, 1088, 4096
NEVER = 2**63 - 1


@dataclass(frozen=True)
class Geometry:
    """Sizes of an arena."""

    payload_bytes: int
    num_slots: int
    on_disk: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of header and payload, in whole pages."""
        return _round_up(HEADER_BYTES + self.payload_bytes, PAGE_BYTES)

    @property
    def num_leases(self) -> int:
        """Rows of the lease table."""
        return LEASES_PER_SLOT * self.num_slots

    @property
    def index_size(self) -> int:
        """Entries of the index: a power of two, at least twice the slots."""
        return 1 << (2 * self.num_slots - 1).bit_length()

    @property
    def table_specs(self) -> list[tuple[str, str, int]]:
        """Name, type and number of elements of each table, in order."""
        return [
            ("key", "B", 32 * self.num_slots), ("generation", "Q", self.num_slots), ("used", "Q", self.num_slots),
            ("next_free", "I", self.num_slots), ("lease_count", "I", self.num_slots), ("owner", "H", self.num_slots),
            ("state", "B", self.num_slots), ("lease_owner", "Q", self.num_leases),
            ("lease_generation", "Q", self.num_leases), ("lease_end", "Q", self.num_leases),
            ("lease_slot", "I", self.num_leases), ("index", "I", self.index_size),
        ]  # fmt: skip

    @property
    def metadata_bytes(self) -> int:
        """Bytes of superblock and tables."""
        sizes = (_round_up(count * np.dtype(kind).itemsize, 64) for _, kind, count in self.table_specs)
        return _round_up(_SUPERBLOCK + sum(sizes), PAGE_BYTES)

    @property
    def slots_at(self) -> int:
        """Offset of the first slot in the file that has the slots."""
        return PAGE_BYTES if self.on_disk else self.metadata_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the file that has the slots, which the budget bounds."""
        return self.slots_at + self.num_slots * self.slot_bytes

    @property
    def tables_file_bytes(self) -> int:
        """Bytes of the file that has the tables: in memory it has the slots, too."""
        return self.metadata_bytes if self.on_disk else self.total_bytes

    def slot_offset(self, slot: int) -> int:
        """Return the offset of a slot in the file that has the slots."""
        return self.slots_at + slot * self.slot_bytes

    @classmethod
    def fit_budget(cls, payload_bytes: int, budget_bytes: int, *, on_disk: bool = False) -> "Geometry":
        """Return the geometry of the largest arena within a budget. It may have no slots."""
        few, many = 0, budget_bytes // _round_up(HEADER_BYTES + payload_bytes, PAGE_BYTES) + 1
        while many - few > 1:
            middle = (few + many) // 2
            fits = cls(payload_bytes, middle, on_disk).total_bytes <= budget_bytes
            few, many = (middle, many) if fits else (few, middle)
        return cls(payload_bytes, few, on_disk)


class Tables:
    """Views of an arena's memory: memoryviews for single elements, arrays (`…_array`) for whole tables."""

    def __init__(self, memory: mmap.mmap, geometry: Geometry) -> None:
        whole = memoryview(memory)
        self.memory, self.geometry = whole, geometry
        self.tier = "disk" if geometry.on_disk else "shared"
        """The tier's name, with which the names of its failpoints begin."""
        self.words: memoryview[int] = whole[:1024].cast("Q")
        views: dict[str, memoryview[int]] = {}
        at = _SUPERBLOCK
        for name, kind, count in geometry.table_specs:
            num_bytes = count * np.dtype(kind).itemsize
            views[name] = whole[at : at + num_bytes].cast(kind)  # type: ignore[call-overload]
            at += _round_up(num_bytes, 64)
        self.key, self.generation, self.used = views["key"], views["generation"], views["used"]
        self.next_free, self.lease_count = views["next_free"], views["lease_count"]
        self.owner, self.state, self.index = views["owner"], views["state"], views["index"]
        self.lease_owner, self.lease_generation = views["lease_owner"], views["lease_generation"]
        self.lease_end, self.lease_slot = views["lease_end"], views["lease_slot"]
        self.generation_array, self.used_array = _as_array(self.generation), _as_array(self.used)
        self.owner_array, self.state_array = _as_array(self.owner), _as_array(self.state)
        self.index_array, self.lease_count_array = _as_array(self.index), _as_array(self.lease_count)
        self.lease_owner_array, self.lease_generation_array = (
            _as_array(self.lease_owner),
            _as_array(self.lease_generation),
        )
        self.lease_end_array, self.lease_slot_array = _as_array(self.lease_end), _as_array(self.lease_slot)

    def slot_key(self, slot: int) -> bytes:
        """Return the key of a slot."""
        return bytes(self.key[32 * slot : 32 * slot + 32])


def write_superblock(
    memory: mmap.mmap, geometry: Geometry, form: BlockFormat, pipeline: str, tables_id: int = 0
) -> None:
    """Turn a file of zeros into an arena. The version is written last; without it the file is no arena."""
    words = memoryview(memory)[:1024].cast("Q")
    memory[_FORM_AT : _FORM_AT + 48] = form.fingerprint + form.layout
    name = pipeline.encode()[: _SUPERBLOCK - _PIPELINE_AT]
    memory[_PIPELINE_AT : _PIPELINE_AT + len(name)] = name
    words[W_NUM_SLOTS], words[W_PAYLOAD_BYTES] = geometry.num_slots, geometry.payload_bytes
    words[W_FREE_HEAD], words[W_NEXT_LEASE_END], words[W_TABLES_ID] = NO_SLOT, NEVER, tables_id
    words[W_MAGIC] = MAGIC
    words[W_VERSION] = VERSION


def read_superblock(start: bytes) -> tuple[Geometry, BlockFormat] | None:
    """Return geometry and format from a superblock; None if it is none, of another version, or incomplete."""
    if len(start) < _SUPERBLOCK:
        return None
    words = memoryview(start)[:1024].cast("Q")
    if (words[W_MAGIC], words[W_VERSION]) != (MAGIC, VERSION):
        return None
    payload_bytes = words[W_PAYLOAD_BYTES]
    form = BlockFormat(start[_FORM_AT : _FORM_AT + 32], start[_FORM_AT + 32 : _FORM_AT + 48], payload_bytes)
    return Geometry(payload_bytes, words[W_NUM_SLOTS], words[W_TABLES_ID] != 0), form


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _as_array(view: "memoryview[int]") -> NDArray[np.unsignedinteger]:
    return np.frombuffer(view, dtype=view.format)
