"""The KV of a worker's sequences, behind one object: what each wants from the tiers, and what they lack of it.

The worker's loop knows blocks by names, leases and events alone; their bytes go between the engine's pool and the
tiers. An engine that moves its own KV can take the place of all this.

    name     what a prompt's blocks are called
    load     have those fetched that there are; `Loaded` says when the engine can compute the rest
    store    as a sequence goes on, have the blocks written that became full and that some tier lacks
    hand off have all blocks of a prompt written, a partial last one too; `Stored` says that others can read them
    release  nobody waits for a job's blocks any more
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.kvstore.block import Name
from penstock.kvstore.chain import Chain
from penstock.kvstore.store import KVStore, Lack
from penstock.kvstore.transfers import Fetch, Pool, Ship, Transfers
from penstock.names import PriorityClass


class Engine(Pool, Protocol):
    """What is asked of the engine, besides its pool."""

    def completed_blocks(self, seq: Any) -> int:
        """Full blocks of the sequence whose KV is in the pool."""

    def name_blocks(self, seq: Any, keys: list[bytes]) -> None:
        """The keys of the full blocks after those that have one."""


@dataclass(eq=False)
class Blocks:
    """One sequence's blocks."""

    chain: Chain
    """Names the full ones."""
    tail: Name | None
    """Of the prompt's last block, if that is partial."""
    num_prompt: int
    """Full blocks of the prompt."""
    seq: Any = None
    """The engine's sequence, once they are loaded for one."""
    ticket: Any = None
    """Whose they are: events have it as it was."""
    lease_to: str = ""
    """The job that they are kept for."""
    lacks: dict[int, Lack] = field(default_factory=dict)
    """Blocks that are still to be written, and the tiers that lack them. Known when they were loaded."""
    num_seen: int = 0
    """Full blocks, as of the last look at them."""

    def prompt_names(self) -> list[Name]:
        """Of the prompt's blocks, a partial last one included."""
        names = self.chain.names[: self.num_prompt]
        return [*names, self.tail] if self.tail else names

    @property
    def prompt_key(self) -> str:
        """Hex key of the prompt's last block: a chain over all tokens before it."""
        return self.prompt_names()[-1].key.hex()


@dataclass(frozen=True)
class Loaded:
    """What could be had of a sequence's blocks is in the pool: the engine can compute the rest."""

    ticket: Any
    """Whose they are."""
    num_blocks: int
    """Of its prompt."""
    num_held: int
    """So many the pool had already."""
    num_found: int
    """So many a tier had."""
    begun_s: float
    ended_s: float


@dataclass(frozen=True)
class Stored:
    """Blocks that a job waits for are where decode workers can read them, or cannot be brought there."""

    ticket: Any
    num_blocks: int
    begun_s: float
    ended_s: float


class KVConnector:
    """One worker's. All methods but `wake` are called by one thread, the worker's loop."""

    def __init__(self, store: KVStore, engine: Engine, num_blocks: int) -> None:
        """`num_blocks`: how many the pool has."""
        self.store, self._engine = store, engine
        self._transfers = Transfers(store, engine, num_blocks // 8)

    def __len__(self) -> int:
        """What is under way and was not collected yet."""
        return len(self._transfers)

    def name_prompt(self, tenant: str, token_ids: Sequence[int]) -> Blocks:
        """Name the blocks of a tenant's prompt."""
        chain = self.store.chain(tenant)
        chain.extend(token_ids)
        return Blocks(chain, chain.tail(token_ids), len(chain.names))

    def load(self, ticket: Any, blocks: Blocks, seq: Any, lease_to: str = "") -> None:
        """Have the blocks fetched of all tokens that a sequence has, output included; `Loaded` says what came.

        With `lease_to` its prompt is computed for that job, and what the hand-off tier has of it is kept. Without, the
        sequence is that job: its prompt's partial block is read too, and what is gone is counted.
        """
        blocks.ticket, blocks.seq, blocks.lease_to = ticket, seq, lease_to
        blocks.chain.extend(seq.token_ids)
        seq.prefix_keys = [name.key for name in blocks.chain.names]
        to_share = (len(seq.token_ids) - 1) // self.store.layout.block_size  # the last token is always computed
        fetch = Fetch(blocks, blocks.chain.names[:to_share], klass=seq.klass, lease_to=lease_to)
        if not lease_to:
            fetch.tail, fetch.tail_index = blocks.tail, blocks.num_prompt
        self._transfers.fetch(fetch)

    def is_wanting(self, klass: PriorityClass) -> bool:
        """Whether some of that class and above wait for room in the pool."""
        return self._transfers.is_wanting(klass)

    def store_full(self, blocks: Blocks) -> bool:
        """Have the blocks written that are full and that some tier lacks, those of the answer too; whether there were
        any.

        A later request that goes on with this conversation finds them, and so does who takes this one over.
        """
        seq = blocks.seq
        num_full = self._engine.completed_blocks(seq)
        if num_full <= blocks.num_seen:
            return False
        added = blocks.chain.extend(seq.token_ids) if not blocks.lease_to else []
        if added:
            self._engine.name_blocks(seq, [name.key for name in added])
            first = len(blocks.chain.names) - len(added)
            blocks.lacks |= {first + n: self.store.everywhere for n in range(len(added))}
        blocks.num_seen = num_full
        ship = self._ship_of(blocks, num_full)
        if ship.blocks:
            self._transfers.ship(seq, ship)
        return bool(ship.blocks)

    def hand_off(self, blocks: Blocks) -> "Future[float]":
        """Have all blocks of a prompt written that are not yet. Returns what is done, with the time, once the job may
        go out: they are written, or cannot be. `Stored` says so to the loop.
        """
        ship = self._ship_of(blocks, len(blocks.prompt_names()))
        self._transfers.ship(blocks.seq, ship)
        return ship.written

    def _ship_of(self, blocks: Blocks, upto: int) -> Ship:
        names = [*blocks.chain.names, *([blocks.tail] if blocks.tail else [])]
        ready = [index for index in blocks.lacks if index < upto]
        cargo = [(index, names[index], blocks.lacks.pop(index)) for index in ready]
        return Ship(blocks, cargo, lease_to=blocks.lease_to, klass=blocks.seq.klass)

    def release(self, owner: str, blocks: Blocks) -> None:
        """End a job's leases on its prompt."""
        self._transfers.release(owner, blocks.prompt_names())

    def collect(self) -> Iterator[Loaded | Stored]:
        """What is done, in the order of its doing."""
        for done in self._transfers.collect():
            match done:
                case Fetch():
                    yield self._loaded(done)
                case Ship() if done.lease_to and done.blocks:
                    yield Stored(done.ticket.ticket, len(done.blocks), done.begun_s, done.ended_s)

    def _loaded(self, fetch: Fetch) -> Loaded:
        blocks: Blocks = fetch.ticket
        num_read = len(fetch.lacks)
        wanted = [*blocks.chain.names, *([blocks.tail] if fetch.lease_to and blocks.tail else [])]
        lacks = [*fetch.lacks, *[self.store.everywhere] * (len(wanted) - num_read)]
        blocks.lacks = {index: lack for index, lack in enumerate(lacks) if lack}
        blocks.seq.tail = fetch.tail_payload
        num_prompt, has_tail = len(blocks.prompt_names()), fetch.tail_payload is not None
        if not fetch.lease_to:
            self.store.count_recomputed(num_prompt - num_read - has_tail)
        found = num_read - fetch.held + has_tail
        return Loaded(blocks.ticket, num_prompt, fetch.held, found, fetch.begun_s, fetch.ended_s)

    def wait(self) -> None:
        """Until something can be collected, or `wake` is called, for a moment at most."""
        self._transfers.wait()

    def wake(self) -> None:
        """End a `wait` under way, or else the next one. Any thread may."""
        self._transfers.wake()

    def close(self) -> None:
        """Write what jobs wait for, drop the rest, and stop."""
        self._transfers.close()

    def abandon(self) -> None:
        """Drop everything, and stop: no job is to be settled here any more."""
        self._transfers.abandon()
