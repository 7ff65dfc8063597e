"""Moving KV while the engine computes: up to three threads between the pool's memory and the tiers.

    in       reads KV blocks into staged blocks of the pool; their sequence is computed when they have been read
    out      writes blocks of the pool to the hand-off tier and those above it; a job is settled after its own blocks
    behind   writes blocks to the tiers below the hand-off tier; nothing waits for that

Each thread does interactive work before batch work, and work that no job waits for last. A load for which the pool has
no capacity yet waits, and loads of its class and the classes below wait behind it.

The worker's loop submits operations and collects them when they are done. The pool is changed by the loop alone, when
it does so. Blocks that are read go to blocks that the pool has staged for them; a block that is written is pinned in
the pool, so that its memory is not reused meanwhile. If a process dies with operations under way, blocks that were not
written are computed again.
"""

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from penstock.errors import is_failure
from penstock.kvstore.block import Block, BlockKey, PromptBlocks, ReadRequest
from penstock.kvstore.store import KVStore, MissingTiers
from penstock.messages import now_s
from penstock.names import CLASSES, PriorityClass

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.01
LOWEST_RANK = len(CLASSES)
"""Rank of work that no job waits for, after the ranks of the classes."""


class PinnedBlock(Protocol):
    """A block of the pool that is pinned so that it can be read."""

    @property
    def payload(self) -> memoryview:
        """The block's bytes. Reading this property may wait until they have been copied."""

    def is_valid(self) -> bool:
        """Return whether the memory still holds this block, by its page tag."""


class StagedBlocks(Protocol):
    """Blocks of the pool for some keys: the pool has the first `num_cached`, the next are written to `views`."""

    num_cached: int
    views: list[memoryview]


class Pool(Protocol):
    """The part of the engine's block pool that transfers use."""

    def stage_blocks(self, keys: list[bytes], priority_class: PriorityClass) -> StagedBlocks | None:
        """Stage blocks for these keys, which stay in the pool until they are committed. None: wait for capacity."""

    def commit_staged_blocks(self, staged: Any, num_filled: int) -> None:
        """Make the first `num_filled` views findable by their keys, and free the rest."""

    def pin_blocks(self, seq: Any, indices: Sequence[int]) -> Sequence[PinnedBlock]:
        """Pin these blocks of a sequence."""

    def unpin_block(self, pinned: Any) -> None:
        """Unpin a block that was read."""


@dataclass(frozen=True)
class StateSearch:
    """The states from which a sequence can continue. KV after the last state found is of no use to the sequence."""

    blocks: PromptBlocks
    positions: Sequence[int]
    """The numbers of tokens after which states may be stored, the largest first."""
    num_pool_tokens: int
    """The number of tokens before the last state that the engine has; 0 if it has none."""


@dataclass(eq=False)
class LoadOperation:
    """Blocks that a sequence wants from the tiers, and what was found."""

    context: Any
    """Opaque caller context, returned unchanged."""
    keys: Sequence[BlockKey]
    """Keys of the full blocks, from the first on."""
    tail_key: BlockKey | None = None
    """Key of the prompt's partial block: read if all blocks before it are there and no full one is in its place."""
    tail_index: int = 0
    lease_owner: str = ""
    """The job for which blocks that are in the hand-off tier are leased; empty: no lease."""
    must_read: bool = False
    """Whether blocks are read though computing them would be faster: they cannot be computed here."""
    priority_class: PriorityClass = "interactive"
    states: StateSearch | None = None
    """The wanted recurrent state; None if the model has none."""
    num_pool_blocks: int = 0
    """Blocks that the pool had already."""
    missing_tiers: list[MissingTiers] = field(default_factory=list)
    """For each leading block that is in the pool now: the tiers to which it is to be written."""
    tail_payload: memoryview | None = None
    state: tuple[int, memoryview] | None = None
    """The state that was read: the number of tokens before it, and the bytes of all its parts."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """The time at which the blocks were read, in seconds since the epoch."""


@dataclass(eq=False)
class StoreOperation:
    """Blocks of a sequence to write to tiers."""

    context: Any
    """Opaque caller context, returned unchanged."""
    blocks: Sequence[tuple[int, BlockKey, MissingTiers]]
    """Index in the sequence, key, and the tiers to write to."""
    lease_owner: str = ""
    """The job for which the blocks are leased in the hand-off tier. Empty: nothing waits, and blocks may be skipped."""
    priority_class: PriorityClass = "interactive"
    states: Sequence["StateWrite"] = ()
    """Parts of states to write to all tiers."""
    leased: Sequence[BlockKey] = ()
    """Blocks that the hand-off tier has already. They are leased together with the written blocks."""
    is_written: "Future[float]" = field(default_factory=Future)
    """Resolves to `finished_s` once the blocks are written or cannot be. It never does after `Transfers.abandon`."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """The time at which the blocks were in the hand-off tier, in seconds since the epoch."""


class StateWrite(NamedTuple):
    """A part of a state to write."""

    key: BlockKey
    pinned: PinnedBlock
    is_handed: bool
    """Whether a job waits for it. If not, it may be skipped."""


class _BlockWrite(NamedTuple):
    key: BlockKey
    pinned: PinnedBlock
    missing_tiers: MissingTiers
    is_optional: bool
    """Whether it counts against `max_optional`."""
    is_below: bool
    """Whether the block is also written below the hand-off tier."""
    is_leased: bool = True

    def make_block(self) -> tuple[Block, MissingTiers]:
        return Block(self.key, self.pinned.payload, self.pinned.is_valid), self.missing_tiers


class Transfers:
    """The transfer threads of one worker. All methods but `wake_waiter` are called by one thread, the worker's loop.

    Pinned blocks take up memory of the pool: of those that no job waits for, at most `max_optional` are pinned at once.
    """

    def __init__(self, store: KVStore, pool: Pool, max_optional: int) -> None:
        self._store, self._pool, self._max_optional = store, pool, max_optional
        self._num_open = self._num_optional = 0
        self._waiting_loads: dict[PriorityClass, deque[LoadOperation]] = {
            priority_class: deque() for priority_class in CLASSES
        }
        """Loads for which the pool has no capacity yet."""
        self._is_closing = self._is_abandoned = False
        self._finished: queue.SimpleQueue[
            tuple[LoadOperation | StoreOperation | None, StagedBlocks | None, list[_BlockWrite]]
        ] = queue.SimpleQueue()
        """Operations that are done (None: writes below the hand-off tier), and the pool's blocks that they used."""
        self._has_finished = threading.Event()
        self._in, self._out, self._below = _TransferThread("in"), _TransferThread("out"), _TransferThread("behind")

    def __len__(self) -> int:
        """Return how many operations were submitted and not collected yet."""
        return self._num_open

    # The loop's side.

    def has_waiting_loads(self, priority_class: PriorityClass) -> bool:
        """Return whether loads of that class and the classes above it wait for capacity in the pool."""
        return any(self._waiting_loads[one] for one in CLASSES[: CLASSES.index(priority_class) + 1])

    def submit_load(self, load: LoadOperation) -> None:
        """Read the blocks that the pool does not have from the tiers that have them."""
        self._num_open += 1
        if load.keys or load.tail_key is not None:
            self._waiting_loads[load.priority_class].append(load)
            self._start_loads()
        else:
            load.started_s = load.finished_s = now_s()
            self._post_finished(load, None, [])

    def _start_loads(self) -> None:
        """Start the waiting loads for which the pool has capacity, in order."""
        for rank, priority_class in enumerate(CLASSES):
            waiting = self._waiting_loads[priority_class]
            while waiting:
                load = waiting[0]
                staged = self._pool.stage_blocks([key.hash for key in load.keys], priority_class)
                if staged is None:
                    return
                waiting.popleft()
                load.num_pool_blocks = staged.num_cached
                self._store.stats.pool_hits += staged.num_cached
                self._store.stats.pool_misses += len(load.keys) - staged.num_cached
                if self._is_nowhere(load, staged):
                    load.started_s = load.finished_s = now_s()
                    self._post_finished(load, staged, [])
                else:
                    self._in.submit(rank, partial(self._run_load, load, staged))

    def _is_nowhere(self, load: LoadOperation, staged: StagedBlocks) -> bool:
        """Return whether it is known without waiting that no tier has a block to read.

        No thread is woken then, because the first token would wait for it. A tail is read only after all full blocks.
        """
        is_simple = bool(load.keys) and load.states is None and not staged.num_cached
        is_nowhere = is_simple and self._store.lacks_block(load.keys[0])
        for tier in self._store.tiers if is_nowhere else ():
            self._store.count_misses(tier, len(staged.views))
        return is_nowhere

    def submit_store(self, seq: Any, store: StoreOperation) -> None:
        """Write the operation's blocks. It is collected once other workers can read them."""
        is_missing_below = self._store.is_missing_below
        num_optional = sum(not store.lease_owner or is_missing_below(missing) for *_, missing in store.blocks)
        has_capacity = self._num_optional + num_optional <= self._max_optional
        if has_capacity:
            self._num_optional += num_optional
        else:
            self._store.stats.not_written += num_optional
        blocks = store.blocks if store.lease_owner or has_capacity else []
        pinned_blocks = self._pool.pin_blocks(seq, [index for index, *_ in blocks])
        writes = [
            _BlockWrite(key, pinned, missing, is_below or not store.lease_owner, is_below)
            for (_, key, missing), pinned in zip(blocks, pinned_blocks, strict=True)
            for is_below in (has_capacity and is_missing_below(missing),)
        ]
        missing, is_below = self._store.all_tiers, has_capacity and is_missing_below(self._store.all_tiers)
        for key, pinned, is_handed in store.states:
            if is_handed or has_capacity:
                writes.append(
                    _BlockWrite(key, pinned, missing, is_optional=False, is_below=is_below, is_leased=is_handed)
                )
            else:
                self._pool.unpin_block(pinned)
        self._num_open += 1
        # A store that only leases blocks comes after all writes: an earlier write of such a block may still wait.
        rank = CLASSES.index(store.priority_class) if store.lease_owner and not store.leased else LOWEST_RANK
        self._out.submit(rank, partial(self._run_store, store, writes))

    def submit_release(self, owner: str, keys: Sequence[BlockKey]) -> None:
        """End a job's leases on these blocks."""
        self._out.submit(LOWEST_RANK, partial(self._run_release, owner, keys))

    def submit_retention(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Retain these blocks for so long, once those that were submitted before are written; 0 ends it."""
        if keys:
            self._out.submit(LOWEST_RANK, partial(self._run_retention, keys, seconds))

    def collect_finished(self) -> Iterator[LoadOperation | StoreOperation]:
        """Yield the operations that are done, in the order in which they finished, and return their blocks to the pool.

        Waiting loads are started at the end, after the caller has added the sequences whose blocks were loaded.
        """
        self._has_finished.clear()
        while not self._finished.empty():
            operation, staged, writes = self._finished.get()
            if staged is not None:
                assert isinstance(operation, LoadOperation)
                num_filled = max(0, len(operation.missing_tiers) - operation.num_pool_blocks)
                self._pool.commit_staged_blocks(staged, num_filled)
            for write in writes:
                self._pool.unpin_block(write.pinned)
            self._num_optional -= sum(write.is_optional for write in writes)
            if operation is not None:
                self._num_open -= 1
                yield operation
        self._start_loads()

    def wait_for_finished(self) -> None:
        """Wait until something can be collected, or `wake_waiter` is called, for at most `MAX_WAIT_S`."""
        self._has_finished.wait(MAX_WAIT_S)

    def wake_waiter(self) -> None:
        """End the current `wait_for_finished`, or else the next one. Any thread may call this."""
        self._has_finished.set()

    def close(self) -> None:
        """Write the blocks that jobs wait for, drop all other work, and stop. Nothing may be submitted afterwards."""
        self._shut_down()

    def abandon(self) -> None:
        """Drop all work, and stop: no job may be settled here any more."""
        self._is_abandoned = True
        self._shut_down()  # waits for blocks that are being copied: their memory is the pool's

    def _shut_down(self) -> None:
        self._is_closing = True
        for waiting in self._waiting_loads.values():
            waiting.clear()
        for thread in (self._in, self._out, self._below):
            thread.close()
        list(self.collect_finished())

    # The threads' side.

    def _run_load(self, load: LoadOperation, staged: StagedBlocks) -> None:
        load.started_s = now_s()
        try:
            if not self._is_closing:
                self._read_blocks(load, staged)
        finally:
            load.finished_s = now_s()
            self._post_finished(load, staged, [])

    def _read_blocks(self, load: LoadOperation, staged: StagedBlocks) -> None:
        store, num_cached = self._store, staged.num_cached
        hashes = [key.hash for key in load.keys]
        if load.states is not None:
            num_useful = self._read_state(load, load.states, hashes, num_cached)
            hashes = hashes[: num_useful // store.layout.block_size]
            num_cached = min(num_cached, len(hashes))
        requests = [
            ReadRequest(key, view)
            for key, view in zip(load.keys[staged.num_cached : len(hashes)], staged.views, strict=False)
        ]
        tiers = [*store.find_tiers(hashes[:num_cached]), *store.load_blocks(requests, must_read=load.must_read)]
        if load.tail_key is not None and len(tiers) == load.tail_index:
            payload = memoryview(bytearray(store.layout.payload_bytes))
            load.tail_payload = (
                payload if store.load_blocks([ReadRequest(load.tail_key, payload)], must_read=load.must_read) else None
            )
        load.missing_tiers = store.find_missing_tiers(hashes[: len(tiers)], tiers, hand_off=bool(load.lease_owner))
        if load.lease_owner:
            pairs = zip(load.keys, load.missing_tiers, strict=False)
            store.lease_blocks(load.lease_owner, [key for key, missing in pairs if store.is_in_hand_off_tier(missing)])

    def _read_state(self, load: LoadOperation, states: StateSearch, hashes: list[bytes], num_cached: int) -> int:
        """Read the last state up to which the KV can be had. Return from which token on the sequence is computed."""
        store, size = self._store, self._store.layout.block_size
        num_tiers = len(store.tiers)
        found = store.find_tiers(hashes[num_cached:])
        num_found = num_cached + next((index for index, tier in enumerate(found) if tier == num_tiers), len(found))
        num_tokens, num_prompt = num_found * size, states.blocks.hasher.num_prompt_tokens
        if load.tail_key is not None and num_found == load.tail_index:
            num_tokens = num_prompt if store.find_tiers([load.tail_key.hash]) != [num_tiers] else num_tokens
        num_pool_tokens = states.num_pool_tokens if states.num_pool_tokens <= num_tokens else 0
        positions = [
            position
            for position in states.positions
            if num_pool_tokens < position <= num_tokens and (position % size == 0 or position == num_tokens)
        ]
        names = [states.blocks.make_state_keys(position) for position in positions]
        where = store.find_tiers([keys[0].hash for keys in names])
        for position, keys, tier in zip(positions, names, where, strict=True):
            if tier < num_tiers:
                payload = memoryview(bytearray(len(keys) * store.layout.payload_bytes))
                parts = range(0, len(payload), store.layout.payload_bytes)
                targets = [payload[start : start + store.layout.payload_bytes] for start in parts]
                requests = [ReadRequest(key, target) for key, target in zip(keys, targets, strict=True)]
                if store.load_state(requests, position - num_pool_tokens):
                    load.state = position, payload
                    return position
        return num_pool_tokens or num_tokens

    def _run_store(self, store: StoreOperation, writes: list[_BlockWrite]) -> None:
        store.started_s = now_s()
        try:
            is_wanted = not self._is_abandoned if store.lease_owner else not self._is_closing
            if is_wanted:
                self._store.store_blocks([write.make_block() for write in writes], below=False)
            if is_wanted and store.lease_owner:
                written = [write.key for write in writes if write.is_leased]
                self._store.lease_blocks(store.lease_owner, [*store.leased, *written])
        finally:
            store.finished_s = now_s()
            writes_below = [write for write in writes if write.is_below]
            if writes_below:
                self._below.submit(LOWEST_RANK, partial(self._run_store_below, writes_below))
            self._post_finished(store, None, [write for write in writes if not write.is_below])
            if not self._is_abandoned:
                store.is_written.set_result(store.finished_s)

    def _run_release(self, owner: str, keys: Sequence[BlockKey]) -> None:
        if not self._is_abandoned:
            self._store.release_leases(owner, keys)

    def _run_retention(self, keys: Sequence[BlockKey], seconds: float) -> None:
        try:
            if not self._is_closing:
                self._store.retain_blocks(keys, seconds, below=False)
        finally:
            if self._store.is_missing_below(self._store.all_tiers):
                self._below.submit(LOWEST_RANK, partial(self._run_retention_below, keys, seconds))

    def _run_retention_below(self, keys: Sequence[BlockKey], seconds: float) -> None:
        if not self._is_closing:
            self._store.retain_blocks(keys, seconds, below=True)

    def _run_store_below(self, writes: list[_BlockWrite]) -> None:
        try:
            if not self._is_closing:
                self._store.store_blocks([write.make_block() for write in writes], below=True)
        finally:
            self._post_finished(None, None, writes)

    def _post_finished(
        self, operation: LoadOperation | StoreOperation | None, staged: StagedBlocks | None, writes: list[_BlockWrite]
    ) -> None:
        self._finished.put((operation, staged, writes))
        self._has_finished.set()


class _TransferThread:
    """Runs tasks one after the other, by rank. A task that fails is logged; its blocks are computed again.

    The thread starts with its first task: without a tier below the hand-off tier, one thread is never needed.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_tasks, name=f"kv-{name}", daemon=True)

    def submit(self, rank: int, task: Callable[[], None]) -> None:
        """Queue a task. Only one thread at a time may call this."""
        self._tasks.put((rank, next(self._count), task))
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Run the tasks that are queued, then end the thread."""
        if self._thread.ident is not None:
            self.submit(LOWEST_RANK + 1, self._mark_closed)
            self._thread.join()

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _run_tasks(self) -> None:
        while not self._is_closed:
            *_, task = self._tasks.get()
            try:
                task()
            except BaseException as error:
                if not is_failure(error):
                    raise
                log.exception("a transfer of KV blocks failed")
