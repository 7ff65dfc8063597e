"""The engine as workers use it (`contract`): a core computes, and transfers move its KV.

A request is a sequence of the core: of this project's (`engine.Engine`), or of vLLM's (`penstock.engine_vllm`). The
core's pool and the tiers of the KV store exchange blocks by `penstock.kvstore.transfers`, on threads of their own; a
sequence goes to the core when its blocks are in the pool.
"""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.config.settings import EngineSettings
from penstock.engine.contract import (
    Ended,
    EngineLimits,
    Loaded,
    ModelCard,
    Outcome,
    SampledToken,
    SequenceProgress,
    StepShare,
    Stored,
)
from penstock.engine.limits import max_length
from penstock.engine.memory.memory import count_resident_bytes
from penstock.engine.memory.state_rows import StateRows
from penstock.engine.pictures.rows import Pictures, PromptPicture, SeenPicture
from penstock.engine.sequence import Sequence, State
from penstock.engine.vectors import TextRequest, normalize_vectors
from penstock.errors import SequenceFailed
from penstock.kvstore.block import BlockKey, PromptBlocks, Span
from penstock.kvstore.retention import RetentionChange
from penstock.kvstore.store import KVStore, PooledModel
from penstock.kvstore.transfers import LoadOperation, Pool, StateSearch, StateWrite, StoreOperation, Transfers
from penstock.messages import Sampling
from penstock.names import CLASSES, PriorityClass
from penstock.worker_speed import WorkerSpeed

if TYPE_CHECKING:  # `penstock plan` schedules sequences without torch
    from penstock.engine.pictures.vision import Pixels, Vision

ANSWER_STRIDE = 4
"""Store an answer's blocks in batches of this size: every store has a fixed cost. A worker that takes the request over
computes the blocks that were not stored."""


class CoreModel(ModelCard, PooledModel, Protocol):
    """A core's model."""

    @property
    def arithmetic(self) -> str:
        """How numbers are rounded, in words. Models of the same weights and words give the same tokens."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether tokens follow from the request alone, and not from what is computed beside them, too."""

    @property
    def vision(self) -> "Vision | None":
        """Its part that sees pictures, where it has a `picture_reader`."""


class EngineCore(Pool, Protocol):
    """A core computes sequences, over a pool of KV blocks in this process. One thread calls it."""

    settings: EngineSettings
    """How it is run."""
    slow_products: list[str]
    """Matrix shapes on which the native kernels are slower than torch, as text."""
    num_drafted_tokens: int
    """Tokens that were computed as drafts."""
    num_accepted_tokens: int
    """Drafted tokens that were drawn, too."""

    @property
    def model(self) -> CoreModel:
        """The model."""

    @property
    def states(self) -> StateRows | None:
        """The allocator of recurrent-state rows. None if the model has no recurrent layers."""

    @property
    def max_step_tokens(self) -> int:
        """How many tokens a step has at most."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted yet, or preempted."""

    def free_capacity(self, priority_class: PriorityClass, num_tokens: int) -> int:
        """Return how many more sequences of a class, of `num_tokens` tokens each, would run soon."""

    def has_work(self) -> bool:
        """Return whether any sequence is running or waiting."""

    def check_sequence(self, seq: Sequence, max_new_tokens: int) -> None:
        """Raise `PromptTooLong` for a sequence that can never run, `InvalidRequest` for unknown token ids."""

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence."""

    def remove_sequence(self, seq: Sequence) -> None:
        """Remove a sequence, wherever it is, and free its blocks. A second call does nothing."""

    def count_completed_blocks(self, seq: Sequence) -> int:
        """Return how many full blocks of the sequence have their KV in the pool."""

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """Give the next full blocks of the sequence, those without a key, their keys."""

    def retain_blocks(self, keys: list[bytes], seconds: float) -> None:
        """Let those of the blocks that the pool holds outlive others for so long, if it can; 0 ends it."""

    def begin_step(self) -> bool:
        """Begin a step. Return whether there is anything to compute."""

    def finish_step(self) -> Items[SampledToken]:
        """Finish it. Return the sampled tokens, those of a sequence in their order; they are in the sequence already.
        Raises `SequenceFailed`.
        """

    @property
    def step_shares(self) -> Items[StepShare]:
        """What each row of the last finished step took of it; all together 1."""

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""

    def report_speed(self) -> WorkerSpeed | None:
        """Return how long prompts and answers take now; None where that is not known. Any thread may call it."""


class ServingEngine:
    """An engine's core over a KV store. All methods but those that say so are called by one thread."""

    def __init__(self, core: EngineCore, store: KVStore) -> None:
        self.core, self.store = core, store
        self._seqs: dict[str, Sequence] = {}
        """By id: the requests that it has, those included whose blocks are being loaded."""
        self._rows: dict[str, tuple[Sequence, TextRequest, int]] = {}
        """By id: the prompts of texts that are not computed yet, each with its request and its place in that."""
        self._unfed: dict[str, deque[Sequence]] = {}
        """By request: those of them that the core does not have yet."""
        self._unseen: list[tuple[Sequence, list[Future[SeenPicture]]]] = []
        """Requests whose blocks were loaded, with the pictures that the model is still to see for them."""
        self._ended: list[Ended] = []
        """The ends of requests with texts that were not collected yet."""
        self._transfers = self._make_transfers()
        self._retentions = store.make_retentions(core.num_blocks * store.layout.payload_bytes)

    def _make_transfers(self) -> Transfers:
        return Transfers(self.store, self.core, self.core.num_blocks // 8)

    @property
    def model(self) -> CoreModel:
        """The model."""
        return self.core.model

    @property
    def limits(self) -> EngineLimits:
        """How much it takes."""
        settings = self.core.settings
        length = max_length(self.model, self.model.layout, self.core.num_blocks)
        return EngineLimits(settings.max_batch, self.core.max_step_tokens, length)

    def free_capacity(self, priority_class: PriorityClass, num_tokens: int) -> int:
        """Return how many more requests of a class, of `num_tokens` tokens each, would run soon if they were added.

        None while loads of that class or the classes above it wait for capacity in the pool.
        """
        return (
            0
            if self._transfers.has_waiting_loads(priority_class)
            else self.core.free_capacity(priority_class, num_tokens)
        )

    def count_waiting_tokens(self, priority_class: PriorityClass, max_tokens: int) -> int:
        """Return the prompt tokens of requests of this class and those above it that are waiting.

        At most `max_tokens` of each request count.
        """
        classes = CLASSES[: CLASSES.index(priority_class) + 1]
        seqs = self._seqs.values()
        waiting = [seq for seq in seqs if seq.state is State.WAITING and seq.priority_class in classes]
        texts = {request for _, request, _ in self._rows.values() if request.priority_class in classes}
        return sum(min(seq.num_prompt_tokens, max_tokens) for seq in waiting) + sum(
            min(request.num_pending_tokens, max_tokens) for request in texts
        )

    def has_work(self) -> bool:
        """Return whether any sequence is in the core."""
        return self.core.has_work()

    # Requests

    def hash_prompt(
        self, tenant: str, token_ids: Items[int], spans: Items[Span] = (), adapter: str = ""
    ) -> PromptBlocks:
        """Return the names of the blocks of a tenant's prompt, in which spans stand for pictures."""
        return self.store.hash_prompt(tenant, token_ids, spans, adapter)

    def make_pictures(
        self,
        tenant: str,
        token_ids: Items[int],
        pictures: Items[PromptPicture],
        read: "Callable[[PromptPicture], Pixels]",
    ) -> Pictures:
        """Return the pictures of a tenant's prompt. Any thread may call it.

        What was seen in one tenant's picture is kept for that tenant alone: another could tell by the time.
        """
        vision = self.model.vision
        if vision is None:
            return Pictures(token_ids, pictures)
        by_name = {picture.name: picture for picture in pictures}

        def see(name: bytes) -> "Future[SeenPicture]":
            picture = by_name[name]
            return vision.see(tenant.encode() + b"\n" + name, partial(read, picture), picture.num_rows)

        return Pictures(token_ids, pictures, see)

    def add_request(self, request: Sequence) -> None:
        """Load the blocks of all tokens that a request has, output included, then compute it.

        With a lease owner, its blocks in the hand-off tier are leased. Where it was handed off, the prompt's partial
        block is read too, and blocks that are gone are counted. Raises what the core's `check_sequence` raises.
        """
        seq, blocks = request, request.blocks
        assert seq.id not in self._seqs, f"{seq.id}: added twice"
        self.core.check_sequence(seq, seq.sampling.max_tokens)
        blocks.hasher.hash_full_blocks(seq.token_ids)
        seq.block_keys = [key.hash for key in blocks.hasher.keys]
        num_loadable = (len(seq.token_ids) - 1) // self.store.layout.block_size  # the last token is always computed
        seq.num_named_blocks = len(blocks.hasher.keys)
        blocks.num_handed_blocks = seq.num_named_blocks if seq.was_handed_off else 0
        self._seqs[seq.id] = seq
        keys = blocks.hasher.keys[:num_loadable]
        load = LoadOperation(seq, keys, priority_class=seq.priority_class, lease_owner=seq.lease_owner)
        load.must_read = seq.pictures is not None and not seq.pictures.can_see
        if seq.was_handed_off:
            load.tail_key, load.tail_index = blocks.tail_key, blocks.num_full_blocks
        if self.core.states is not None:
            seq.prompt_key, num_tokens = blocks.prompt_keys()[-1].hash, len(seq.token_ids) - 1
            positions = list(self.core.states.list_positions(seq, num_tokens))
            load.states = StateSearch(blocks, positions, self.core.states.find_start(seq, num_tokens))
        self._transfers.submit_load(load)

    def add_texts(self, request: TextRequest, tenant: str, weight: float, *, is_suspect: bool = False) -> None:
        """Compute the vectors of a request's texts, each as a prompt without output; an `Ended` tells the end.

        Prefixes of its prompts that are in the pool are not computed again. Nothing is read from the stores and nothing
        written there: texts are seldom asked for twice, and would take the room of chats. Raises what the core's
        `check_sequence` raises.
        """
        rows = [
            Sequence(
                f"{request.id}#{place}",
                row.token_ids,
                sampling=Sampling(max_tokens=1),
                seed=0,
                max_new_tokens=1,
                block_keys=[key.hash for key in self.hash_prompt(tenant, row.token_ids).hasher.keys],
                priority_class=request.priority_class,
                tenant=tenant,
                weight=weight,
                is_suspect=is_suspect,
                is_pooled=True,
                context=request,
            )
            for place, row in enumerate(request.rows)
        ]
        for seq in rows:
            self.core.check_sequence(seq, seq.max_new_tokens)
        self._rows |= {seq.id: (seq, request, place) for place, seq in enumerate(rows)}
        self._unfed[request.id] = deque(rows)
        self._feed_rows(request)

    def _feed_rows(self, request: TextRequest) -> None:
        """Give the core rows of a request for two steps: more would keep the places in its batch from others."""
        unfed, most = self._unfed[request.id], 2 * self.core.max_step_tokens
        num_left = most - sum(
            seq.num_prompt_tokens for seq, other, _ in self._rows.values() if other is request and seq not in unfed
        )
        while unfed and num_left > 0:
            seq = unfed.popleft()
            num_left -= seq.num_prompt_tokens
            self.core.add_sequence(seq)

    def remove_request(self, request_id: str) -> None:
        """Drop a request, and free its blocks. Those that are on their way from the store will be cached."""
        self._unfed.pop(request_id, None)
        for row, request, _ in list(self._rows.values()):
            if request.id == request_id:
                del self._rows[row.id]
                self.core.remove_sequence(row)
        if (seq := self._seqs.pop(request_id, None)) is not None:
            self.core.remove_sequence(seq)

    def lease_request(self, request_id: str, owner: str) -> None:
        """Lease the blocks of a request to a job, those that are stored and those that will be."""
        seq = self._seqs[request_id]
        self._name_full_blocks(seq)
        seq.lease_owner, blocks, missing_tiers = owner, seq.blocks, seq.missing_tiers
        is_here = self.store.is_in_hand_off_tier
        stored = [key for index, key in enumerate(blocks.hasher.keys) if is_here(missing_tiers.get(index, 0))]
        if seq.num_output_tokens == 0 and blocks.tail_key is not None:
            missing_tiers[blocks.num_full_blocks] = self.store.all_tiers
        if stored:
            self._transfers.submit_store(seq, StoreOperation(seq, (), owner, seq.priority_class, leased=stored))

    def finish_request(self, request_id: str, *, ends_in_call: bool = False) -> "Future[float] | None":
        """Write all blocks of a request that are not written yet, retain those of a request that asks for it or whose
        answer `ends_in_call`, and remove it.

        Where it is handed off the future tells when the job may go out, and at its first token the prompt's partial
        block is among them.
        """
        seq = self._seqs[request_id]
        if seq.lease_owner:
            is_at_first_token = seq.num_computed_tokens == seq.num_prompt_tokens
            end = len(seq.blocks.prompt_keys()) if is_at_first_token else self.core.count_completed_blocks(seq)
            store = self._submit_store(seq, end, always=True)
        else:
            store = self._store_full_blocks_of(seq)
        self._retain_request(seq, self.store.call_retention_s if ends_in_call else 0.0)
        self.remove_request(request_id)
        return None if store is None else store.is_written

    def release_leases(self, owner: str, blocks: PromptBlocks) -> None:
        """End a job's leases on the blocks that were handed over with it."""
        self._transfers.submit_release(owner, blocks.handed_keys())

    def _retain_request(self, seq: Sequence, call_s: float) -> None:
        """Retain a request's full blocks, or end what it has taken over of the prompts before it."""
        seconds = max(seq.retain_s, call_s)
        if seq.lease_owner and not seconds:
            return  # how it ends is known in the next worker
        num_full = self.core.count_completed_blocks(seq)
        if self.store.layout.has_separate_answer_keys:  # a prompt has no use for those of the answer
            num_full = min(num_full, seq.blocks.num_full_blocks)
        keys, num_prompt = seq.blocks.hasher.keys[:num_full], seq.blocks.num_full_blocks
        change = self._retentions.replace_retention(seq.tenant, seq.id, keys, seconds, num_prompt)
        seq.num_retained_blocks = len(change.retained)
        # The pool may lose next what the tiers have lost.
        lost = [
            (index, key, self.store.all_tiers)
            for index, key in enumerate(change.retained)
            if self.store.lacks_block(key)
        ]
        for start in range(0, len(lost), ANSWER_STRIDE):
            self._transfers.submit_store(seq, StoreOperation(seq, lost[start : start + ANSWER_STRIDE]))
        self._apply_retention(seq, change)

    def _apply_retention(self, seq: Sequence, change: RetentionChange) -> None:
        """Change the order of eviction in the pool at once, and in the tiers behind the writes that wait."""
        for keys, seconds in ((change.retained, change.seconds), (change.released, 0.0)):
            if keys:
                self.core.retain_blocks([key.hash for key in keys], seconds)
                self._transfers.submit_retention([*keys, *self._list_state_keys(seq, keys)], seconds)

    def _list_state_keys(self, seq: Sequence, keys: Items[BlockKey]) -> list[BlockKey]:
        """Return the keys of a request's states that are kept behind one of these blocks."""
        states, size, names = self.core.states, self.store.layout.block_size, seq.blocks.hasher.keys
        if states is None:
            return []
        positions, meant = states.list_positions(seq, len(names) * size), {key.hash for key in keys}
        return [
            key
            for position in positions
            if position >= size and states.layout.is_kept_at(position, seq.num_prompt_tokens)
            if names[position // size - 1].hash in meant
            for key in seq.blocks.make_state_keys(position)
        ]

    # The step

    def begin_step(self) -> bool:
        """Begin a step. Returns whether there is anything to compute."""
        return self.core.begin_step()

    def finish_step(self) -> Items[SampledToken]:
        """Finish the step. Returns and raises what the core's `finish_step` does."""
        try:
            sampled = self.core.finish_step()
        except SequenceFailed as error:
            if (found := self._rows.get(error.seq.id)) is None:
                raise
            raise SequenceFailed(found[1], error.error) from error
        self._take_vectors()
        return sampled

    def _take_vectors(self) -> None:
        """Give requests the vectors of their texts that the step has computed."""
        done = [one for one in self._rows.values() if one[0].state is State.DONE]
        for seq, request, place in done:
            del self._rows[seq.id]
            self.core.remove_sequence(seq)
            reader, vector = self.model.text_reader, seq.vector
            assert vector is not None
            assert reader is not None
            request.found[place] = normalize_vectors(vector[None])[0] if reader.normalizes else vector
            request.num_cached_tokens += seq.num_cached_tokens
            if request.is_done:
                del self._unfed[request.id]
                self._ended.append(Ended(request.context, Outcome.of_texts(request)))
        for request in {request for _, request, _ in done if not request.is_done}:
            self._feed_rows(request)

    @property
    def step_shares(self) -> Items[StepShare]:
        """What each row of the last finished step took of it; all together 1."""
        return [(_find_request(seq), stage, part) for seq, stage, part in self.core.step_shares]

    def store_full_blocks(self) -> bool:
        """Begin to write full blocks that some tier misses, those of answers too, some at once. Returns whether there
        are any.

        A later request that goes on with a conversation finds them, and so does a worker that takes a request over.
        """
        size = self.store.layout.block_size
        stores = [
            self._store_full_blocks_of(seq, ANSWER_STRIDE if is_in_answer and not seq.new_snapshots else 1)
            for seq in self._seqs.values()
            if seq.state is State.RUNNING
            for is_in_answer in (seq.num_full_blocks * size > seq.num_prompt_tokens - size,)
        ]
        return any(stores)

    def _store_full_blocks_of(self, seq: Sequence, min_blocks: int = 1) -> StoreOperation | None:
        num_full = self.core.count_completed_blocks(seq)
        if num_full < seq.num_full_blocks + min_blocks:
            return None
        if not seq.lease_owner:
            self._name_full_blocks(seq)
        seq.num_full_blocks = num_full
        return self._submit_store(seq, num_full)

    def _name_full_blocks(self, seq: Sequence) -> None:
        """Name the blocks that became full: no tier has them yet."""
        hasher, first = seq.blocks.hasher, seq.num_named_blocks
        hasher.hash_full_blocks(seq.token_ids)
        if len(hasher.keys) > first:
            self.core.add_block_keys(seq, [key.hash for key in hasher.keys[first:]])
            seq.missing_tiers |= dict.fromkeys(range(first, len(hasher.keys)), self.store.all_tiers)
            seq.num_named_blocks = len(hasher.keys)

    def _submit_store(self, seq: Sequence, end: int, *, always: bool = False) -> StoreOperation | None:
        """Write the blocks before index `end` to the tiers that miss them. None if there are none, unless `always`."""
        blocks, owner = seq.blocks, seq.lease_owner
        keys = blocks.prompt_keys() if seq.num_computed_tokens == seq.num_prompt_tokens else blocks.hasher.keys
        indices = [index for index in seq.missing_tiers if index < end]
        to_write = [(index, keys[index], seq.missing_tiers.pop(index)) for index in indices]
        states = self._pin_new_states(seq)
        if not to_write and not states and not always:
            return None
        store = StoreOperation(seq, to_write, lease_owner=owner, priority_class=seq.priority_class, states=states)
        self._transfers.submit_store(seq, store)
        return store

    def _pin_new_states(self, seq: Sequence) -> list[StateWrite]:
        """Pin the parts of the states that were kept since the last call."""
        positions, seq.new_snapshots = seq.new_snapshots, []
        found: list[StateWrite] = []
        for position in positions:
            assert self.core.states is not None
            parts = self.core.states.pin_parts(seq, position, self.store.layout.payload_bytes)
            is_handed = bool(seq.lease_owner) and position == seq.num_prompt_tokens
            keys = seq.blocks.make_state_keys(position) if parts else []
            found += [StateWrite(key, part, is_handed) for key, part in zip(keys, parts, strict=True)]
        return found

    # What becomes of KV

    def collect_events(self) -> Iterator[Loaded | Stored | Ended]:
        """Yield an event for each load that is done, and each store that a job waited for, in the order of their ends,
        and before these for each request whose texts are computed.

        Sequences whose blocks were loaded are in the core then, unless the model is still to see their pictures.
        """
        ended, self._ended = self._ended, []
        yield from ended
        for operation in self._transfers.collect_finished():
            seq: Sequence = operation.context
            match operation:
                case LoadOperation():
                    loaded = self._finish_load(seq, operation)
                    if self._seqs.get(seq.id) is seq:
                        num_found = len(operation.missing_tiers) * self.store.layout.block_size
                        self._see_pictures(seq, seq.num_prompt_tokens if seq.tail_payload is not None else num_found)
                        yield loaded
                case StoreOperation() if operation.lease_owner and operation.blocks:
                    num_blocks = len(operation.blocks)
                    yield Stored(seq.context, num_blocks, operation.started_s, operation.finished_s)

        unseen, self._unseen = self._unseen, []
        for seq, pictures in unseen:
            if self._seqs.get(seq.id) is not seq:
                continue
            if all(picture.done() for picture in pictures):
                self.core.add_sequence(seq)
            else:
                self._unseen.append((seq, pictures))

    def _see_pictures(self, seq: Sequence, num_found: int) -> None:
        """Have the model see the pictures of a request that KV was not found of, on its thread beside the steps; then
        compute the request.
        """
        pictures = [] if seq.pictures is None else seq.pictures.see_behind(num_found)
        if not pictures:
            self.core.add_sequence(seq)
            return
        self._unseen.append((seq, pictures))
        for picture in pictures:
            picture.add_done_callback(lambda _: self.wake_waiter())

    def _finish_load(self, seq: Sequence, load: LoadOperation) -> Loaded:
        """Note what is to be written of a sequence whose blocks were loaded, and return the event."""
        blocks, num_read = seq.blocks, len(load.missing_tiers)
        wanted = [*blocks.hasher.keys, *([blocks.tail_key] if load.lease_owner and blocks.tail_key else [])]
        missing_tiers = [*load.missing_tiers, *[self.store.all_tiers] * (len(wanted) - num_read)]
        seq.missing_tiers = {index: missing for index, missing in enumerate(missing_tiers) if missing}
        seq.tail_payload = load.tail_payload
        if load.state is not None:
            assert self.core.states is not None
            self.core.states.add_snapshot(seq, *load.state)
        num_prompt, has_tail = len(blocks.prompt_keys()), load.tail_payload is not None
        if seq.was_handed_off:
            self.store.count_recomputed(num_prompt - num_read - has_tail)
        num_tier_blocks = num_read - load.num_pool_blocks + has_tail
        num_retained, change = self._retentions.take_over(seq.tenant, seq.id, blocks.hasher.keys, num_read)
        self._apply_retention(seq, change)
        found = num_prompt, load.num_pool_blocks, num_tier_blocks, num_retained
        return Loaded(seq.context, *found, load.started_s, load.finished_s)

    def is_moving_blocks(self) -> bool:
        """Return whether transfers are under way or were not collected yet, or pictures are to be seen."""
        return len(self._transfers) > 0 or bool(self._ended) or bool(self._unseen)

    def wait_for_event(self) -> None:
        """Wait a moment at most for something to collect, or for `wake_waiter`."""
        self._transfers.wait_for_finished()

    def wake_waiter(self) -> None:
        """End the current `wait_for_event`, or else the next one. Any thread may call this."""
        self._transfers.wake_waiter()

    # Figures

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""
        return self.core.prefill_tokens_per_s()

    def report_speed(self) -> WorkerSpeed | None:
        """Return how long prompts and answers take now; None where that is not known. Any thread may call it."""
        return self.core.report_speed()

    def report_state(self) -> dict[str, object]:
        """Return fields of the heartbeat. Any thread may call it."""
        core = self.core
        return {
            "waiting": core.num_waiting,
            "pool": {"used": core.num_blocks - core.num_free_blocks, "total": core.num_blocks},
            "drafts": {"drafted": core.num_drafted_tokens, "accepted": core.num_accepted_tokens},
            "slow_products": len(core.slow_products),
            "kv": self.store.collect_stats(),
            "retention": self._retentions.report_retentions(),
            "resident_bytes": count_resident_bytes(),
        }

    # The end of a worker

    def close(self) -> None:
        """Write the blocks that jobs wait for, and drop everything else. Computed KV stays in the pool, as cache."""
        self._drop_requests()
        self._transfers.close()
        self._transfers = self._make_transfers()

    def abandon(self) -> None:
        """Drop everything: no job may be settled any more. Computed KV stays in the pool, as cache."""
        self._drop_requests()
        self._transfers.abandon()
        self._transfers = self._make_transfers()

    def _drop_requests(self) -> None:
        for request_id in [*self._seqs, *{request.id: None for _, request, _ in self._rows.values()}]:
            self.remove_request(request_id)
        self._ended.clear()
        self._unseen.clear()


def _find_request(seq: SequenceProgress) -> SequenceProgress:
    """Return the request that a row of a step belongs to."""
    if isinstance(seq, Sequence) and seq.is_pooled:
        request: SequenceProgress = seq.context
        return request
    return seq
