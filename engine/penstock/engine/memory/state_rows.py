"""Assigns the rows of recurrent states: one to each running sequence, and the others to snapshots. The least recently
used snapshot goes first.

A snapshot is a cached block of a pool of its own: its key is a hash over the tokens that it has read. A sequence goes
on from the last snapshot up to which its KV is cached, too, and takes a copy of it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.config.settings import EngineSettings
from penstock.engine.memory.memory import MIN_POOL_MB
from penstock.engine.memory.pool import BlockPool
from penstock.engine.memory.staging import PinnedPoolBlock
from penstock.engine.memory.states import StateStorage
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.sequence import Sequence
from penstock.errors import ModelLoadError
from penstock.kvstore.block import derive_state_hash, find_last_scan_chunk


class PoolSizes(NamedTuple):
    """How the memory of an engine's pool is divided."""

    num_blocks: int
    num_running: int
    """Sequences that run at once: each has a row for its state if layers keep one."""
    num_state_rows: int
    """Rows for states, snapshots included."""


def divide_memory(layout: BlockLayout, settings: EngineSettings, name: str) -> PoolSizes:
    """Return how many blocks and states the pool has room for, which has 256 MiB where the settings do not say.

    Each sequence of a full batch has a row for its state, in up to half of the memory. The rest is divided so that
    there is a snapshot for the KV of each interval, and some for the prompts that run. Raises `ModelLoadError` if there
    is no room for a block and a state.
    """
    pool_mb, states = settings.pool_mb or MIN_POOL_MB, layout.states
    num_bytes = pool_mb * 2**20
    num_rows, num_running, needed = 0, settings.max_batch, ""
    if states is not None:
        num_running = max(1, min(num_running, num_bytes // 2 // states.row_bytes - 1))
        left = num_bytes - (num_running + 1) * states.row_bytes
        interval_bytes = states.interval_tokens // layout.block_size * layout.block_bytes
        by_interval = left // (states.row_bytes + interval_bytes)
        num_rows = num_running + 1 + max(0, by_interval, min(num_running, left // 4 // states.row_bytes))
        num_bytes -= num_rows * states.row_bytes
        needed = f", and the state of a sequence {states.row_bytes:,} with as many for a snapshot"
    if num_bytes < layout.block_bytes:
        raise ModelLoadError(
            f"one KV block of {name!r} has {layout.block_bytes:,} bytes{needed}: "
            f"PENSTOCK_ENGINE_POOL_MB={pool_mb} has no room for it"
        )
    return PoolSizes(num_bytes // layout.block_bytes, num_running, num_rows)


class StateRows:
    """The rows of one storage. One thread calls its methods."""

    def __init__(self, storage: StateStorage, num_rows: int, num_running: int, block_size: int) -> None:
        self.layout = storage.layout
        self.pool = BlockPool(num_rows, 1)
        self._storage, self._num_running, self._block_size = storage, num_running, block_size
        self._num_held = 0
        """Rows of running sequences."""

    def take_row(self, seq: Sequence) -> None:
        """Give a sequence that starts to run a row, with the state after the tokens that are computed already."""
        (seq.state_row,) = self.pool.allocate_blocks(1)
        self._num_held += 1
        self._storage.zero_row(seq.state_row)

    def restore_snapshot(self, seq: Sequence) -> None:
        """Give a sequence a row with the state after its computed tokens: a snapshot's if there are any."""
        key = self._find_key(seq, seq.num_computed_tokens) if seq.num_computed_tokens else None
        pinned = self.pool.pin_cached_prefix([key] if key is not None else [], counted=False)
        assert len(pinned) == bool(seq.num_computed_tokens), f"{seq}: its snapshot is gone"
        self.take_row(seq)
        for row in pinned:
            self._storage.copy_row(row, seq.state_row)
        self.pool.free_blocks(pinned)

    def free_row(self, seq: Sequence) -> None:
        """Take back the row of a sequence that stops running."""
        self.pool.free_blocks([seq.state_row])
        self._num_held -= 1
        seq.state_row = 0

    def find_start(self, seq: Sequence, num_cached_tokens: int) -> int:
        """Return from which token on a sequence is to be computed whose first `num_cached_tokens` have their KV.

        It is the last snapshot's position; within a block only where the KV ends there, too.
        """
        for position in self.list_positions(seq, num_cached_tokens):
            if (position % self._block_size == 0 or position == num_cached_tokens) and self.has_snapshot(seq, position):
                return position
        return 0

    def list_positions(self, seq: Sequence, end: int) -> Iterator[int]:
        """Yield where a sequence may have snapshots, from `end` backwards."""
        layout, num_prompt = self.layout, seq.num_prompt_tokens
        step = layout.interval_tokens
        yield from range(end // step * step, num_prompt, -step)
        if end >= num_prompt:
            yield num_prompt
        last_scan_chunk = min(
            end // layout.scan_chunk_tokens * layout.scan_chunk_tokens,
            find_last_scan_chunk(num_prompt, layout.scan_chunk_tokens),
        )
        yield from range(last_scan_chunk, 0, -layout.scan_chunk_tokens)

    def _find_key(self, seq: Sequence, position: int) -> bytes | None:
        """Return the key of a sequence's snapshot, or None if its tokens up to there have no name."""
        if position == seq.num_prompt_tokens:
            return None if seq.prompt_key is None else derive_state_hash(seq.prompt_key)
        index = position // self._block_size - 1
        if index < len(seq.block_keys):
            return derive_state_hash(seq.block_keys[index])
        if seq.hasher is None:
            return None
        seq.hasher.hash_full_blocks(seq.token_ids)
        return derive_state_hash(seq.hasher.keys[index].hash)

    # Snapshots

    def reserve_snapshots(self, seq: Sequence, num_tokens: int) -> dict[tuple[Sequence, int], int]:
        """Return rows for the snapshots that are to be kept while a sequence computes `num_tokens` tokens.

        There are fewer where so many others are in use.
        """
        start, rows = seq.num_computed_tokens, dict[tuple[Sequence, int], int]()
        for position in self.list_positions(seq, start + num_tokens):
            if position <= start:
                break
            if not self.layout.is_kept_at(position, seq.num_prompt_tokens):
                continue
            if self._has_room() and self._find_key(seq, position) and not self.has_snapshot(seq, position):
                (rows[seq, position],) = self.pool.allocate_blocks(1)
        return rows

    def commit_snapshots(self, rows: dict[tuple[Sequence, int], int], *, is_done: bool) -> None:
        """Give the snapshots that a step has made their keys; or give the rows back if the step failed."""
        for (seq, position), row in rows.items():
            key = self._find_key(seq, position)
            if is_done and key is not None:
                self.pool.register_block(row, key)
                seq.new_snapshots.append(position)
            self.pool.free_blocks([row])

    def _has_room(self) -> bool:
        """Return whether a snapshot would leave a row for each sequence that may start to run."""
        return self.pool.num_free_blocks > self._num_running - self._num_held

    def has_snapshot(self, seq: Sequence, position: int) -> bool:
        """Return whether there is a snapshot of a sequence after `position` tokens."""
        key = self._find_key(seq, position)
        return key is not None and self.pool.count_cached_prefix([key]) == 1

    def add_snapshot(self, seq: Sequence, position: int, payload: memoryview | bytes) -> None:
        """Keep a snapshot that was made elsewhere, if there is a row for it."""
        key = self._find_key(seq, position)
        if key is not None and self._has_room() and not self.has_snapshot(seq, position):
            (row,) = self.pool.allocate_blocks(1)
            self._storage.write_row(row, payload[: self.layout.row_bytes])
            self.pool.register_block(row, key)
            self.pool.free_blocks([row])

    def pin_parts(self, seq: Sequence, position: int, part_bytes: int) -> list[PinnedPoolBlock]:
        """Pin the snapshot of a sequence after `position` tokens in parts of equal size; none if there is none.

        The last part is filled up with zeros.
        """
        key, parts = self._find_key(seq, position), list[PinnedPoolBlock]()
        for start in range(0, self.layout.row_bytes, part_bytes):
            for row in self.pool.pin_cached_prefix([key] if key is not None else [], counted=False):
                payload = self._storage.view_row(row)[start : start + part_bytes]
                if payload.nbytes < part_bytes:
                    payload = memoryview(bytes(payload) + bytes(part_bytes - payload.nbytes))
                parts.append(PinnedPoolBlock(self.pool, payload, row))
        return parts
