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

from penstock.kvstore.block import BlockKey
from penstock.kvstore.chain import BlockHasher
from penstock.kvstore.store import KVStore, MissingTiers
from penstock.kvstore.transfers import LoadOperation, Pool, StoreOperation, Transfers
from penstock.names import PriorityClass


class Engine(Pool, Protocol):
    """What is asked of the engine, besides its pool."""

    def count_completed_blocks(self, seq: Any) -> int:
        """Full blocks of the sequence whose KV is in the pool."""

    def add_block_keys(self, seq: Any, keys: list[bytes]) -> None:
        """The keys of the full blocks after those that have one."""


@dataclass(eq=False)
class SequenceBlocks:
    """One sequence's blocks."""

    hasher: BlockHasher
    """Names the full ones."""
    tail_key: BlockKey | None
    """Of the prompt's last block, if that is partial."""
    num_prompt_blocks: int
    """Full blocks of the prompt."""
    seq: Any = None
    """The engine's sequence, once they are loaded for one."""
    context: Any = None
    """Whose they are: events have it as it was."""
    lease_owner: str = ""
    """The job that they are kept for."""
    missing_tiers: dict[int, MissingTiers] = field(default_factory=dict)
    """Blocks that are still to be written, and the tiers that lack them. Known when they were loaded."""
    num_stored_blocks: int = 0
    """Full blocks, as of the last look at them."""

    def prompt_keys(self) -> list[BlockKey]:
        """Of the prompt's blocks, a partial last one included."""
        names = self.hasher.keys[: self.num_prompt_blocks]
        return [*names, self.tail_key] if self.tail_key else names

    @property
    def last_prompt_hash(self) -> str:
        """Hex key of the prompt's last block: a chain over all tokens before it."""
        return self.prompt_keys()[-1].hash.hex()


@dataclass(frozen=True)
class Loaded:
    """What could be had of a sequence's blocks is in the pool: the engine can compute the rest."""

    context: Any
    """Whose they are."""
    num_blocks: int
    """Of its prompt."""
    num_pool_blocks: int
    """So many the pool had already."""
    num_tier_blocks: int
    """So many a tier had."""
    started_s: float
    finished_s: float


@dataclass(frozen=True)
class Stored:
    """Blocks that a job waits for are where decode workers can read them, or cannot be brought there."""

    context: Any
    num_blocks: int
    started_s: float
    finished_s: float


class KVConnector:
    """One worker's. All methods but `wake` are called by one thread, the worker's loop."""

    def __init__(self, store: KVStore, engine: Engine, num_blocks: int) -> None:
        """`num_blocks`: how many the pool has."""
        self.store, self._engine = store, engine
        self._transfers = Transfers(store, engine, num_blocks // 8)

    def __len__(self) -> int:
        """What is under way and was not collected yet."""
        return len(self._transfers)

    def hash_prompt(self, tenant: str, token_ids: Sequence[int]) -> SequenceBlocks:
        """Name the blocks of a tenant's prompt."""
        chain = self.store.make_hasher(tenant)
        chain.hash_full_blocks(token_ids)
        return SequenceBlocks(chain, chain.hash_tail_block(token_ids), len(chain.keys))

    def load_blocks(self, ticket: Any, blocks: SequenceBlocks, seq: Any, lease_to: str = "") -> None:
        """Have the blocks fetched of all tokens that a sequence has, output included; `Loaded` says what came.

        With `lease_to` its prompt is computed for that job, and what the hand-off tier has of it is kept. Without, the
        sequence is that job: its prompt's partial block is read too, and what is gone is counted.
        """
        blocks.context, blocks.seq, blocks.lease_owner = ticket, seq, lease_to
        blocks.hasher.hash_full_blocks(seq.token_ids)
        seq.block_keys = [name.hash for name in blocks.hasher.keys]
        to_share = (len(seq.token_ids) - 1) // self.store.layout.block_size  # the last token is always computed
        fetch = LoadOperation(blocks, blocks.hasher.keys[:to_share], klass=seq.klass, lease_owner=lease_to)
        if not lease_to:
            fetch.tail_key, fetch.tail_index = blocks.tail_key, blocks.num_prompt_blocks
        self._transfers.submit_load(fetch)

    def has_waiting_loads(self, klass: PriorityClass) -> bool:
        """Whether some of that class and above wait for room in the pool."""
        return self._transfers.has_waiting_loads(klass)

    def store_full_blocks(self, blocks: SequenceBlocks) -> bool:
        """Have the blocks written that are full and that some tier lacks, those of the answer too; whether there were
        any.

        A later request that goes on with this conversation finds them, and so does who takes this one over.
        """
        seq = blocks.seq
        num_full = self._engine.count_completed_blocks(seq)
        if num_full <= blocks.num_stored_blocks:
            return False
        added = blocks.hasher.hash_full_blocks(seq.token_ids) if not blocks.lease_owner else []
        if added:
            self._engine.add_block_keys(seq, [name.hash for name in added])
            first = len(blocks.hasher.keys) - len(added)
            blocks.missing_tiers |= {first + n: self.store.all_tiers for n in range(len(added))}
        blocks.num_stored_blocks = num_full
        ship = self._make_store_operation(blocks, num_full)
        if ship.blocks:
            self._transfers.submit_store(seq, ship)
        return bool(ship.blocks)

    def hand_off_prompt(self, blocks: SequenceBlocks) -> "Future[float]":
        """Have all blocks of a prompt written that are not yet. Returns what is done, with the time, once the job may
        go out: they are written, or cannot be. `Stored` says so to the loop.
        """
        ship = self._make_store_operation(blocks, len(blocks.prompt_keys()))
        self._transfers.submit_store(blocks.seq, ship)
        return ship.is_written

    def _make_store_operation(self, blocks: SequenceBlocks, upto: int) -> StoreOperation:
        names = [*blocks.hasher.keys, *([blocks.tail_key] if blocks.tail_key else [])]
        ready = [index for index in blocks.missing_tiers if index < upto]
        cargo = [(index, names[index], blocks.missing_tiers.pop(index)) for index in ready]
        return StoreOperation(blocks, cargo, lease_owner=blocks.lease_owner, klass=blocks.seq.klass)

    def release_leases(self, owner: str, blocks: SequenceBlocks) -> None:
        """End a job's leases on its prompt."""
        self._transfers.submit_release(owner, blocks.prompt_keys())

    def collect_events(self) -> Iterator[Loaded | Stored]:
        """What is done, in the order of its doing."""
        for done in self._transfers.collect_finished():
            match done:
                case LoadOperation():
                    yield self._make_loaded_event(done)
                case StoreOperation() if done.lease_owner and done.blocks:
                    yield Stored(done.context.context, len(done.blocks), done.started_s, done.finished_s)

    def _make_loaded_event(self, fetch: LoadOperation) -> Loaded:
        blocks: SequenceBlocks = fetch.context
        num_read = len(fetch.missing_tiers)
        wanted = [*blocks.hasher.keys, *([blocks.tail_key] if fetch.lease_owner and blocks.tail_key else [])]
        lacks = [*fetch.missing_tiers, *[self.store.all_tiers] * (len(wanted) - num_read)]
        blocks.missing_tiers = {index: lack for index, lack in enumerate(lacks) if lack}
        blocks.seq.tail_payload = fetch.tail_payload
        num_prompt, has_tail = len(blocks.prompt_keys()), fetch.tail_payload is not None
        if not fetch.lease_owner:
            self.store.count_recomputed(num_prompt - num_read - has_tail)
        found = num_read - fetch.num_pool_blocks + has_tail
        return Loaded(blocks.context, num_prompt, fetch.num_pool_blocks, found, fetch.started_s, fetch.finished_s)

    def wait_for_event(self) -> None:
        """Until something can be collected, or `wake` is called, for a moment at most."""
        self._transfers.wait_for_finished()

    def wake_waiter(self) -> None:
        """End a `wait` under way, or else the next one. Any thread may."""
        self._transfers.wake_waiter()

    def close(self) -> None:
        """Write what jobs wait for, drop the rest, and stop."""
        self._transfers.close()

    def abandon(self) -> None:
        """Drop everything, and stop: no job is to be settled here any more."""
        self._transfers.abandon()
