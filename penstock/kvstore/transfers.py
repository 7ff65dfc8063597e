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

from penstock.kvstore.block import Block, Name, Wanted
from penstock.kvstore.store import KVStore, Lack
from penstock.messages import now_s
from penstock.names import CLASSES, PriorityClass

log = logging.getLogger(__name__)

MOMENT_S = 0.01
FOR_NOBODY = len(CLASSES)
"""The rank of what no job waits for, after those of the classes."""


class Lent(Protocol):
    """A block that the pool lends for reading."""

    payload: memoryview

    def is_valid(self) -> bool:
        """The page tag: whether the memory is still this block's."""


class Landing(Protocol):
    """Room in the pool for the blocks of some keys: `held` leading ones are there, the next go to `views`."""

    held: int
    views: list[memoryview]


class Pool(Protocol):
    """What transfers ask of the engine."""

    def land(self, keys: list[bytes], klass: PriorityClass) -> Any:
        """A `Landing`, or None as long as it has to wait. What it holds stays in the pool until it is closed."""

    def close_landing(self, landing: Any, num_filled: int) -> None:
        """The first views hold their blocks; who comes now finds them."""

    def lend(self, seq: Any, index: int) -> Any:
        """A sequence's block as `Lent`."""

    def give_back(self, lent: Any) -> None:
        """It was read."""


@dataclass(eq=False)
class Fetch:
    """What a sequence wants from the tiers, and what it got."""

    ticket: Any
    """Whose it is; comes back as it was."""
    names: Sequence[Name]
    """Of the full blocks, from the first on."""
    tail: Name | None = None
    """The prompt's partial block: read if no full one is there in its place, and all before it are."""
    tail_index: int = 0
    lease_to: str = ""
    """Keep what the hand-off tier has, for this job."""
    klass: PriorityClass = "interactive"
    held: int = 0
    """Blocks that the pool had already."""
    lacks: list[Lack] = field(default_factory=list)
    """For each leading block that is in the pool now: which tiers are to be given it."""
    tail_payload: memoryview | None = None
    begun_s: float = 0.0
    ended_s: float = 0.0
    """When it was read, in seconds since the epoch."""


@dataclass(eq=False)
class Ship:
    """Blocks of a sequence on their way down."""

    ticket: Any
    """Whose they are; comes back as it was."""
    blocks: Sequence[tuple[int, Name, Lack]]
    """Index, name, and the tiers that are to be given it."""
    lease_to: str = ""
    """Keep them in the hand-off tier, for this job. Without one nobody waits for them, and they may be left out."""
    klass: PriorityClass = "interactive"
    written: "Future[float]" = field(default_factory=Future)
    """Done with `ended_s`, once they are written or cannot be; never, where everything was dropped."""
    begun_s: float = 0.0
    ended_s: float = 0.0
    """When it was written up to the hand-off tier."""


class _Cargo(NamedTuple):
    name: Name
    lent: Lent
    lack: Lack
    is_optional: bool
    """Whether anybody waits for it."""
    is_behind: bool
    """Whether it is to be written behind the hand-off tier, too."""

    def block(self) -> tuple[Block, Lack]:
        return Block(self.name, self.lent.payload, self.lent.is_valid), self.lack


class Transfers:
    """The threads of one worker. All methods but `wake` are called by one thread, the worker's loop.

    Blocks on their way take up room in the pool: of those that nobody waits for, at most `max_optional` do.
    """

    def __init__(self, store: KVStore, pool: Pool, max_optional: int) -> None:
        self._store, self._pool, self._max_optional = store, pool, max_optional
        self._num_open = self._num_optional = 0
        self._wanting: dict[PriorityClass, deque[Fetch]] = {klass: deque() for klass in CLASSES}
        """Fetches for which the pool has no room yet."""
        self._is_closing = self._is_abandoned = False
        self._done: queue.SimpleQueue[tuple[Fetch | Ship | None, Landing | None, list[_Cargo]]] = queue.SimpleQueue()
        """What is done, None for writes behind, and what of the pool's it had."""
        self._is_done = threading.Event()
        self._in, self._out, self._behind = _Thread("in"), _Thread("out"), _Thread("behind")

    def __len__(self) -> int:
        """Fetches and ships that were not collected yet."""
        return self._num_open

    # The loop's side.

    def is_wanting(self, klass: PriorityClass) -> bool:
        """Whether fetches of that class and above wait for room in the pool."""
        return any(self._wanting[one] for one in CLASSES[: CLASSES.index(klass) + 1])

    def fetch(self, fetch: Fetch) -> None:
        """Read what the tiers have of it and the pool has not."""
        self._num_open += 1
        if fetch.names or fetch.tail is not None:
            self._wanting[fetch.klass].append(fetch)
            self._begin_fetches()
        else:
            fetch.begun_s = fetch.ended_s = now_s()
            self._report(fetch, None, [])

    def _begin_fetches(self) -> None:
        """Those that there is room for, in order."""
        for rank, klass in enumerate(CLASSES):
            waiting = self._wanting[klass]
            while waiting:
                fetch = waiting[0]
                landing = self._pool.land([name.key for name in fetch.names], klass)
                if landing is None:
                    return
                waiting.popleft()
                fetch.held = landing.held
                self._store.stats.pool_hits += landing.held
                self._store.stats.pool_misses += len(fetch.names) - landing.held
                self._in.do(rank, partial(self._fetch, fetch, landing))

    def ship(self, seq: Any, ship: Ship) -> None:
        """Write its blocks; it is collected when others can read them."""
        needs_behind = self._store.needs_behind
        num_optional = sum(not ship.lease_to or needs_behind(lack) for *_, lack in ship.blocks)
        has_room = self._num_optional + num_optional <= self._max_optional
        if has_room:
            self._num_optional += num_optional
        else:
            self._store.stats.not_written += num_optional
        cargo = [
            _Cargo(name, self._pool.lend(seq, index), lack, is_behind or not ship.lease_to, is_behind)
            for index, name, lack in ship.blocks
            if ship.lease_to or has_room
            for is_behind in (has_room and needs_behind(lack),)
        ]
        self._num_open += 1
        rank = CLASSES.index(ship.klass) if ship.lease_to else FOR_NOBODY
        self._out.do(rank, partial(self._ship, ship, cargo))

    def release(self, owner: str, names: Sequence[Name]) -> None:
        """End a job's leases."""
        self._out.do(FOR_NOBODY, partial(self._release, owner, names))

    def collect(self) -> Iterator[Fetch | Ship]:
        """What is done, in the order of its doing. The pool gets back what it gave.

        At the end fetches begin that there was no room for: after the caller has added what was fetched.
        """
        self._is_done.clear()
        while not self._done.empty():
            one, landing, cargo = self._done.get()
            if landing is not None:
                assert isinstance(one, Fetch)
                self._pool.close_landing(landing, max(0, len(one.lacks) - one.held))
            for each in cargo:
                self._pool.give_back(each.lent)
            self._num_optional -= sum(each.is_optional for each in cargo)
            if one is not None:
                self._num_open -= 1
                yield one
        self._begin_fetches()

    def wait(self) -> None:
        """Until something can be collected, for a moment: who has nothing to compute looks at other things too."""
        self._is_done.wait(MOMENT_S)

    def wake(self) -> None:
        """End a `wait` under way, or else the next one, as something other than a transfer is done. Any thread may."""
        self._is_done.set()

    def close(self) -> None:
        """Write what jobs wait for, drop the rest, and stop. Nothing may be handed in afterwards."""
        self._end()

    def abandon(self) -> None:
        """Drop everything, and stop: no job is to be settled here any more. A block on its way is waited for, as its
        memory is the pool's.
        """
        self._is_abandoned = True
        self._end()

    def _end(self) -> None:
        self._is_closing = True
        for waiting in self._wanting.values():
            waiting.clear()
        for thread in (self._in, self._out, self._behind):
            thread.close()
        list(self.collect())

    # The threads' side.

    def _fetch(self, fetch: Fetch, landing: Landing) -> None:
        fetch.begun_s = now_s()
        try:
            if not self._is_closing:
                self._read(fetch, landing)
        finally:
            fetch.ended_s = now_s()
            self._report(fetch, landing, [])

    def _read(self, fetch: Fetch, landing: Landing) -> None:
        store, held = self._store, landing.held
        keys = [name.key for name in fetch.names]
        wanted = [Wanted(name, view) for name, view in zip(fetch.names[held:], landing.views, strict=False)]
        depths = [*store.depths(keys[:held]), *store.load(wanted)]
        if fetch.tail is not None and len(depths) == fetch.tail_index:
            into = memoryview(bytearray(store.layout.payload_bytes))
            fetch.tail_payload = into if store.load([Wanted(fetch.tail, into)]) else None
        fetch.lacks = store.lacking(keys[: len(depths)], depths, hand_off=bool(fetch.lease_to))
        if fetch.lease_to:
            named = zip(fetch.names, fetch.lacks, strict=False)
            store.lease(fetch.lease_to, [name for name, lack in named if store.has_handed_off(lack)])

    def _ship(self, ship: Ship, cargo: list[_Cargo]) -> None:
        ship.begun_s = now_s()
        try:
            is_wanted = not self._is_abandoned if ship.lease_to else not self._is_closing
            if is_wanted:
                self._store.put([one.block() for one in cargo], behind=False)
            if is_wanted and ship.lease_to:
                self._store.lease(ship.lease_to, [one.name for one in cargo])
        finally:
            ship.ended_s = now_s()
            behind = [one for one in cargo if one.is_behind]
            if behind:
                self._behind.do(FOR_NOBODY, partial(self._write_behind, behind))
            self._report(ship, None, [one for one in cargo if not one.is_behind])
            if not self._is_abandoned:
                ship.written.set_result(ship.ended_s)

    def _release(self, owner: str, names: Sequence[Name]) -> None:
        if not self._is_abandoned:
            self._store.release(owner, names)

    def _write_behind(self, cargo: list[_Cargo]) -> None:
        try:
            if not self._is_closing:
                self._store.put([one.block() for one in cargo], behind=True)
        finally:
            self._report(None, None, cargo)

    def _report(self, done: Fetch | Ship | None, landing: Landing | None, cargo: list[_Cargo]) -> None:
        self._done.put((done, landing, cargo))
        self._is_done.set()


class _Thread:
    """Does one task after the other, by rank. One that fails is logged, and what it was to bring is computed again.

    The thread starts with its first task: without a tier behind the hand-off tier nothing is ever written there.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)

    def do(self, rank: int, task: Callable[[], None]) -> None:
        """Have a task done. Only one thread at a time may call this."""
        self._tasks.put((rank, next(self._count), task))
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Once all is done."""
        if self._thread.ident is not None:
            self.do(FOR_NOBODY + 1, self._stop)
            self._thread.join()

    def _stop(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        while not self._is_closed:
            *_, task = self._tasks.get()
            try:
                task()
            except Exception:
                log.exception("a transfer failed")
