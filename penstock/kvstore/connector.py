"""All that a worker's loop asks of the KV store: it loads, stores and leases the blocks of its sequences.

The loop handles keys, leases and events; the blocks' bytes go between the engine's pool and the tiers. An engine that
moves its own KV can take the place of all this.

    hash_prompt        computes the keys of a prompt's blocks
    load_blocks        loads the blocks that some tier has; `Loaded` says when the engine can compute the rest
    store_full_blocks  writes the blocks of a sequence that became full to the tiers that miss them
    hand_off_prompt    writes all blocks of a prompt, a partial last one too; `Stored` says that others can read them
    release_leases     ends a job's leases on its blocks
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.kvstore.block import BlockHasher, BlockKey
from penstock.kvstore.store import KVStore, MissingTiers
from penstock.kvstore.transfers import LoadOperation, Pool, StoreOperation, Transfers
from penstock.names import PriorityClass


class Engine(Pool, Protocol):
    """What the connector needs of the engine, besides its pool."""

    def count_completed_blocks(self, seq: Any) -> int:
        """Return how many full blocks of the sequence have their KV in the pool."""

    def add_block_keys(self, seq: Any, keys: list[bytes]) -> None:
        """Give the next full blocks of the sequence, those without a key, their keys."""


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one sequence."""

    hasher: BlockHasher
    """Has the keys of the full blocks."""
    tail_key: BlockKey | None
    """Key of the prompt's last block, if that is partial."""
    num_prompt_blocks: int
    """Full blocks of the prompt."""
    seq: Any = None
    """The engine's sequence, once blocks are loaded for one."""
    context: Any = None
    """Opaque caller context, which events return unchanged."""
    lease_owner: str = ""
    """The job for which the blocks are leased."""
    missing_tiers: dict[int, MissingTiers] = field(default_factory=dict)
    """By index: blocks that are still to be written, and the tiers that miss them. Known once blocks were loaded."""
    num_full_blocks: int = 0
    """Full blocks of the sequence at the last call of `store_full_blocks`."""

    def prompt_keys(self) -> list[BlockKey]:
        """Return the keys of the prompt's blocks, a partial last one included."""
        keys = self.hasher.keys[: self.num_prompt_blocks]
        return [*keys, self.tail_key] if self.tail_key else keys

    @property
    def last_prompt_hash(self) -> str:
        """Hash of the prompt's last block in hex. It covers all tokens of the prompt."""
        return self.prompt_keys()[-1].hash.hex()


@dataclass(frozen=True)
class Loaded:
    """The blocks of a sequence that could be found are in the pool: the engine can compute the rest."""

    context: Any
    """The caller's context, as it was given to `load_blocks`."""
    num_blocks: int
    """Blocks of the prompt."""
    num_pool_blocks: int
    """Blocks that the pool had already."""
    num_tier_blocks: int
    """Blocks that were read from a tier."""
    started_s: float
    finished_s: float


@dataclass(frozen=True)
class Stored:
    """The blocks that a job waits for can be read by decode workers, or could not be written."""

    context: Any
    """The caller's context, as it was given to `load_blocks`."""
    num_blocks: int
    started_s: float
    finished_s: float


class KVConnector:
    """The KV connector of one worker. All methods but `wake_waiter` are called by one thread, the worker's loop."""

    def __init__(self, store: KVStore, engine: Engine, num_blocks: int) -> None:
        """`num_blocks` is the size of the engine's pool."""
        self.store, self._engine = store, engine
        self._transfers = Transfers(store, engine, num_blocks // 8)

    def __len__(self) -> int:
        """Return how many operations are under way or were not collected yet."""
        return len(self._transfers)

    def hash_prompt(self, tenant: str, token_ids: Sequence[int]) -> SequenceBlocks:
        """Return the blocks of a tenant's prompt, with their keys."""
        hasher = self.store.make_hasher(tenant)
        hasher.hash_full_blocks(token_ids)
        return SequenceBlocks(hasher, hasher.hash_tail_block(token_ids), len(hasher.keys))

    def load_blocks(self, context: Any, blocks: SequenceBlocks, seq: Any, lease_owner: str = "") -> None:
        """Load the blocks of all tokens that a sequence has, output included. `Loaded` says what was found.

        With `lease_owner` the prompt is computed for that job, and its blocks in the hand-off tier are leased. Without,
        the sequence is that job: its prompt's partial block is read too, and blocks that are gone are counted.
        """
        blocks.context, blocks.seq, blocks.lease_owner = context, seq, lease_owner
        blocks.hasher.hash_full_blocks(seq.token_ids)
        seq.block_keys = [key.hash for key in blocks.hasher.keys]
        num_loadable = (len(seq.token_ids) - 1) // self.store.layout.block_size  # the last token is always computed
        load = LoadOperation(blocks, blocks.hasher.keys[:num_loadable], klass=seq.klass, lease_owner=lease_owner)
        if not lease_owner:
            load.tail_key, load.tail_index = blocks.tail_key, blocks.num_prompt_blocks
        self._transfers.submit_load(load)

    def has_waiting_loads(self, klass: PriorityClass) -> bool:
        """Return whether loads of that class and the classes above it wait for capacity in the pool."""
        return self._transfers.has_waiting_loads(klass)

    def store_full_blocks(self, blocks: SequenceBlocks) -> bool:
        """Write full blocks that some tier misses, those of the answer too. Return whether there were any.

        A later request that goes on with this conversation finds them, and so does a worker that takes this one over.
        """
        seq = blocks.seq
        num_full = self._engine.count_completed_blocks(seq)
        if num_full <= blocks.num_full_blocks:
            return False
        added = blocks.hasher.hash_full_blocks(seq.token_ids) if not blocks.lease_owner else []
        if added:
            self._engine.add_block_keys(seq, [key.hash for key in added])
            first = len(blocks.hasher.keys) - len(added)
            blocks.missing_tiers |= {first + n: self.store.all_tiers for n in range(len(added))}
        blocks.num_full_blocks = num_full
        store = self._make_store_operation(blocks, num_full)
        if store.blocks:
            self._transfers.submit_store(seq, store)
        return bool(store.blocks)

    def hand_off_prompt(self, blocks: SequenceBlocks) -> "Future[float]":
        """Write all blocks of a prompt that are not written yet.

        The future resolves to the time at which the job may go out: the blocks are written, or cannot be. The loop gets
        a `Stored` event, too.
        """
        store = self._make_store_operation(blocks, len(blocks.prompt_keys()))
        self._transfers.submit_store(blocks.seq, store)
        return store.is_written

    def _make_store_operation(self, blocks: SequenceBlocks, end: int) -> StoreOperation:
        """Return the operation that writes the blocks before index `end` to the tiers that miss them."""
        keys = [*blocks.hasher.keys, *([blocks.tail_key] if blocks.tail_key else [])]
        indices = [index for index in blocks.missing_tiers if index < end]
        to_write = [(index, keys[index], blocks.missing_tiers.pop(index)) for index in indices]
        return StoreOperation(blocks, to_write, lease_owner=blocks.lease_owner, klass=blocks.seq.klass)

    def release_leases(self, owner: str, blocks: SequenceBlocks) -> None:
        """End a job's leases on the blocks of its prompt."""
        self._transfers.submit_release(owner, blocks.prompt_keys())

    def collect_events(self) -> Iterator[Loaded | Stored]:
        """Yield an event for each operation that is done, in the order in which they finished."""
        for operation in self._transfers.collect_finished():
            match operation:
                case LoadOperation():
                    yield self._make_loaded_event(operation)
                case StoreOperation() if operation.lease_owner and operation.blocks:
                    blocks: SequenceBlocks = operation.context
                    yield Stored(blocks.context, len(operation.blocks), operation.started_s, operation.finished_s)

    def _make_loaded_event(self, load: LoadOperation) -> Loaded:
        blocks: SequenceBlocks = load.context
        num_read = len(load.missing_tiers)
        wanted = [*blocks.hasher.keys, *([blocks.tail_key] if load.lease_owner and blocks.tail_key else [])]
        missing_tiers = [*load.missing_tiers, *[self.store.all_tiers] * (len(wanted) - num_read)]
        blocks.missing_tiers = {index: missing for index, missing in enumerate(missing_tiers) if missing}
        blocks.seq.tail_payload = load.tail_payload
        num_prompt, has_tail = len(blocks.prompt_keys()), load.tail_payload is not None
        if not load.lease_owner:
            self.store.count_recomputed(num_prompt - num_read - has_tail)
        num_tier_blocks = num_read - load.num_pool_blocks + has_tail
        return Loaded(
            blocks.context, num_prompt, load.num_pool_blocks, num_tier_blocks, load.started_s, load.finished_s
        )

    def wait_for_event(self) -> None:
        """Wait a moment at most for something to collect, or for `wake_waiter`."""
        self._transfers.wait_for_finished()

    def wake_waiter(self) -> None:
        """End the current `wait_for_event`, or else the next one. Any thread may call this."""
        self._transfers.wake_waiter()

    def close(self) -> None:
        """Write the blocks that jobs wait for, drop all other work, and stop."""
        self._transfers.close()

    def abandon(self) -> None:
        """Drop all work, and stop: no job may be settled here any more."""
        self._transfers.abandon()
