"""Moving KV while the engine computes: up to three threads between the pool's memory and the tiers.

    in       reads blocks into a landing of the pool; the sequence that wants them is added when they are there
    out      writes blocks of the pool to the hand-off tier and those above it; a job is settled when its own are there
    behind   writes them to the tiers below; nobody waits for that

Each does what is interactive before what is batch, and last what no job waits for. A fetch for which the pool has no
room yet waits, and those of its class and below behind it.

The worker's loop hands in work and collects what became of it; the pool's books are kept by the loop alone, when it
does so. Blocks that are read go to a landing, room that the pool keeps for them; a block that is written is lent by the
pool, so that nobody else is given its memory meanwhile. If a process dies with work under way, what was not written is
computed again by whoever needs it.
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

from penstock.kvstore.block import Block, BlockKey, ReadRequest
from penstock.kvstore.store import KVStore, MissingTiers
from penstock.messages import now_s
from penstock.names import CLASSES, PriorityClass

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.01
LOWEST_RANK = len(CLASSES)
"""The rank of what no job waits for, after those of the classes."""


class PinnedBlock(Protocol):
    """A block that the pool lends for reading."""

    payload: memoryview

    def is_valid(self) -> bool:
        """The page tag: whether the memory is still this block's."""


class StagedBlocks(Protocol):
    """Room in the pool for the blocks of some keys: the pool has the first `num_cached`, the next go to `views`."""

    num_cached: int
    views: list[memoryview]


class Pool(Protocol):
    """What transfers ask of the engine."""

    def stage_blocks(self, keys: list[bytes], klass: PriorityClass) -> Any:
        """A `Landing`, or None as long as it has to wait. What it holds stays in the pool until it is closed."""

    def commit_staged_blocks(self, landing: Any, num_filled: int) -> None:
        """The first views hold their blocks; who comes now finds them."""

    def pin_block(self, seq: Any, index: int) -> Any:
        """A sequence's block as `Lent`."""

    def unpin_block(self, lent: Any) -> None:
        """It was read."""


@dataclass(eq=False)
class LoadOperation:
    """What a sequence wants from the tiers, and what it got."""

    context: Any
    """Whose it is; comes back as it was."""
    keys: Sequence[BlockKey]
    """Of the full blocks, from the first on."""
    tail_key: BlockKey | None = None
    """The prompt's partial block: read if no full one is there in its place, and all before it are."""
    tail_index: int = 0
    lease_owner: str = ""
    """Keep what the hand-off tier has, for this job."""
    klass: PriorityClass = "interactive"
    num_pool_blocks: int = 0
    """Blocks that the pool had already."""
    missing_tiers: list[MissingTiers] = field(default_factory=list)
    """For each leading block that is in the pool now: which tiers are to be given it."""
    tail_payload: memoryview | None = None
    started_s: float = 0.0
    finished_s: float = 0.0
    """When it was read, in seconds since the epoch."""


@dataclass(eq=False)
class StoreOperation:
    """Blocks of a sequence on their way down."""

    context: Any
    """Whose they are; comes back as it was."""
    blocks: Sequence[tuple[int, BlockKey, MissingTiers]]
    """Index, name, and the tiers that are to be given it."""
    lease_owner: str = ""
    """Keep them in the hand-off tier, for this job. Without one nobody waits for them, and they may be left out."""
    klass: PriorityClass = "interactive"
    is_written: "Future[float]" = field(default_factory=Future)
    """Done with `ended_s`, once they are written or cannot be; never, where everything was dropped."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """When it was written up to the hand-off tier."""


class _BlockWrite(NamedTuple):
    key: BlockKey
    pinned: PinnedBlock
    missing_tiers: MissingTiers
    is_optional: bool
    """Whether anybody waits for it."""
    is_below: bool
    """Whether it is to be written behind the hand-off tier, too."""

    def make_block(self) -> tuple[Block, MissingTiers]:
        return Block(self.key, self.pinned.payload, self.pinned.is_valid), self.missing_tiers


class Transfers:
    """The threads of one worker. All methods but `wake` are called by one thread, the worker's loop.

    Blocks on their way take up room in the pool: of those that nobody waits for, at most `max_optional` do.
    """

    def __init__(self, store: KVStore, pool: Pool, max_optional: int) -> None:
        self._store, self._pool, self._max_optional = store, pool, max_optional
        self._num_open = self._num_optional = 0
        self._waiting_loads: dict[PriorityClass, deque[LoadOperation]] = {klass: deque() for klass in CLASSES}
        """Fetches for which the pool has no room yet."""
        self._is_closing = self._is_abandoned = False
        self._done: queue.SimpleQueue[
            tuple[LoadOperation | StoreOperation | None, StagedBlocks | None, list[_BlockWrite]]
        ] = queue.SimpleQueue()
        """What is done, None for writes behind, and what of the pool's it had."""
        self._is_done = threading.Event()
        self._in, self._out, self._below = _TransferThread("in"), _TransferThread("out"), _TransferThread("behind")

    def __len__(self) -> int:
        """Fetches and ships that were not collected yet."""
        return self._num_open

    # The loop's side.

    def has_waiting_loads(self, klass: PriorityClass) -> bool:
        """Whether fetches of that class and above wait for room in the pool."""
        return any(self._waiting_loads[one] for one in CLASSES[: CLASSES.index(klass) + 1])

    def submit_load(self, fetch: LoadOperation) -> None:
        """Read what the tiers have of it and the pool has not."""
        self._num_open += 1
        if fetch.keys or fetch.tail_key is not None:
            self._waiting_loads[fetch.klass].append(fetch)
            self._start_loads()
        else:
            fetch.started_s = fetch.finished_s = now_s()
            self._post_finished(fetch, None, [])

    def _start_loads(self) -> None:
        """Those that there is room for, in order."""
        for rank, klass in enumerate(CLASSES):
            waiting = self._waiting_loads[klass]
            while waiting:
                fetch = waiting[0]
                landing = self._pool.stage_blocks([name.hash for name in fetch.keys], klass)
                if landing is None:
                    return
                waiting.popleft()
                fetch.num_pool_blocks = landing.held
                self._store.stats.pool_hits += landing.held
                self._store.stats.pool_misses += len(fetch.keys) - landing.held
                self._in.submit(rank, partial(self._run_load, fetch, landing))

    def submit_store(self, seq: Any, ship: StoreOperation) -> None:
        """Write its blocks; it is collected when others can read them."""
        needs_behind = self._store.is_missing_below
        num_optional = sum(not ship.lease_owner or needs_behind(lack) for *_, lack in ship.blocks)
        has_room = self._num_optional + num_optional <= self._max_optional
        if has_room:
            self._num_optional += num_optional
        else:
            self._store.stats.not_written += num_optional
        cargo = [
            _BlockWrite(name, self._pool.pin_block(seq, index), lack, is_behind or not ship.lease_owner, is_behind)
            for index, name, lack in ship.blocks
            if ship.lease_owner or has_room
            for is_behind in (has_room and needs_behind(lack),)
        ]
        self._num_open += 1
        rank = CLASSES.index(ship.klass) if ship.lease_owner else LOWEST_RANK
        self._out.submit(rank, partial(self._run_store, ship, cargo))

    def submit_release(self, owner: str, names: Sequence[BlockKey]) -> None:
        """End a job's leases."""
        self._out.submit(LOWEST_RANK, partial(self._run_release, owner, names))

    def collect_finished(self) -> Iterator[LoadOperation | StoreOperation]:
        """What is done, in the order of its doing. The pool gets back what it gave.

        At the end fetches begin that there was no room for: after the caller has added what was fetched.
        """
        self._is_done.clear()
        while not self._done.empty():
            one, landing, cargo = self._done.get()
            if landing is not None:
                assert isinstance(one, LoadOperation)
                self._pool.commit_staged_blocks(landing, max(0, len(one.missing_tiers) - one.num_pool_blocks))
            for each in cargo:
                self._pool.unpin_block(each.pinned)
            self._num_optional -= sum(each.is_optional for each in cargo)
            if one is not None:
                self._num_open -= 1
                yield one
        self._start_loads()

    def wait_for_finished(self) -> None:
        """Until something can be collected, for a moment: who has nothing to compute looks at other things too."""
        self._is_done.wait(MAX_WAIT_S)

    def wake_waiter(self) -> None:
        """End a `wait` under way, or else the next one, as something other than a transfer is done. Any thread may."""
        self._is_done.set()

    def close(self) -> None:
        """Write what jobs wait for, drop the rest, and stop. Nothing may be handed in afterwards."""
        self._shut_down()

    def abandon(self) -> None:
        """Drop everything, and stop: no job is to be settled here any more. A block on its way is waited for, as its
        memory is the pool's.
        """
        self._is_abandoned = True
        self._shut_down()

    def _shut_down(self) -> None:
        self._is_closing = True
        for waiting in self._waiting_loads.values():
            waiting.clear()
        for thread in (self._in, self._out, self._below):
            thread.close()
        list(self.collect_finished())

    # The threads' side.

    def _run_load(self, fetch: LoadOperation, landing: StagedBlocks) -> None:
        fetch.started_s = now_s()
        try:
            if not self._is_closing:
                self._read_blocks(fetch, landing)
        finally:
            fetch.finished_s = now_s()
            self._post_finished(fetch, landing, [])

    def _read_blocks(self, fetch: LoadOperation, landing: StagedBlocks) -> None:
        store, held = self._store, landing.num_cached
        keys = [name.hash for name in fetch.keys]
        wanted = [ReadRequest(name, view) for name, view in zip(fetch.keys[held:], landing.views, strict=False)]
        depths = [*store.find_tiers(keys[:held]), *store.load_blocks(wanted)]
        if fetch.tail_key is not None and len(depths) == fetch.tail_index:
            into = memoryview(bytearray(store.layout.payload_bytes))
            fetch.tail_payload = into if store.load_blocks([ReadRequest(fetch.tail_key, into)]) else None
        fetch.missing_tiers = store.find_missing_tiers(keys[: len(depths)], depths, hand_off=bool(fetch.lease_owner))
        if fetch.lease_owner:
            named = zip(fetch.keys, fetch.missing_tiers, strict=False)
            store.lease_blocks(fetch.lease_owner, [name for name, lack in named if store.is_in_hand_off_tier(lack)])

    def _run_store(self, ship: StoreOperation, cargo: list[_BlockWrite]) -> None:
        ship.started_s = now_s()
        try:
            is_wanted = not self._is_abandoned if ship.lease_owner else not self._is_closing
            if is_wanted:
                self._store.store_blocks([one.make_block() for one in cargo], behind=False)
            if is_wanted and ship.lease_owner:
                self._store.lease_blocks(ship.lease_owner, [one.key for one in cargo])
        finally:
            ship.finished_s = now_s()
            behind = [one for one in cargo if one.is_below]
            if behind:
                self._below.submit(LOWEST_RANK, partial(self._run_store_below, behind))
            self._post_finished(ship, None, [one for one in cargo if not one.is_below])
            if not self._is_abandoned:
                ship.is_written.set_result(ship.finished_s)

    def _run_release(self, owner: str, names: Sequence[BlockKey]) -> None:
        if not self._is_abandoned:
            self._store.release_leases(owner, names)

    def _run_store_below(self, cargo: list[_BlockWrite]) -> None:
        try:
            if not self._is_closing:
                self._store.store_blocks([one.make_block() for one in cargo], behind=True)
        finally:
            self._post_finished(None, None, cargo)

    def _post_finished(
        self, done: LoadOperation | StoreOperation | None, landing: StagedBlocks | None, cargo: list[_BlockWrite]
    ) -> None:
        self._done.put((done, landing, cargo))
        self._is_done.set()


class _TransferThread:
    """Does one task after the other, by rank. One that fails is logged, and what it was to bring is computed again.

    The thread starts with its first task: without a tier behind the hand-off tier nothing is ever written there.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_tasks, name=f"kv-{name}", daemon=True)

    def submit(self, rank: int, task: Callable[[], None]) -> None:
        """Have a task done. Only one thread at a time may call this."""
        self._tasks.put((rank, next(self._count), task))
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Once all is done."""
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
            except Exception:
                log.exception("a transfer failed")
