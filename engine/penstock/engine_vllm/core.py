"""vLLM as the core of an engine, in this process: it computes and schedules, and this project's sampler draws.

A sequence is a request of vLLM, whose blocks have the names that this project gives them: vLLM's prefix cache finds
them, and blocks from the KV store are put there under these names. vLLM takes whole blocks from its cache, so the rest
of a prompt is computed again where an answer goes on elsewhere.

The model's ranks are in this process, or in others (`penstock.engine_vllm.rank`): the scheduler is here.
A step that fails ends the worker, as vLLM cannot undo it.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.settings import EngineSettings
from penstock.engine.limits import check_sequence
from penstock.engine.sampling.draw import make_sampling_params
from penstock.engine.sampling.sampler import NOT_FINITE, SamplingParams
from penstock.engine.scheduling.cost import PrefillRate, measure_prefill_rate, share_step
from penstock.engine.sequence import Sequence, State
from penstock.engine_vllm.blocks import RankBlocks, VllmLayout
from penstock.errors import InvalidRequest, ModelError, SequenceFailed, is_failure
from penstock.messages import Logprobs, Sampling, TokenLogprob
from penstock.names import CLASSES, PriorityClass, Stage
from penstock.worker_speed import WorkerSpeed


@dataclass(frozen=True)
class VllmModel:
    """The model that vLLM serves."""

    name: str
    tokenizer: Any
    response_template: dict[str, Any] | None
    eos_token_ids: frozenset[int]
    context_length: int
    vocab_size: int
    fingerprint: str
    arithmetic: str
    layout: VllmLayout
    is_batch_invariant: bool
    adapters: Mapping[str, str]
    """By name, the digest of each."""
    has_separate_answer_keys: bool = False
    """vLLM computes prompts and answers with the same weights."""
    text_reader: None = None
    """vLLM is asked for no vectors, and for texts alone."""
    picture_reader: None = None
    vision: None = None


class Sampled(NamedTuple):
    """A token that a step sampled. It is in `seq.token_ids` already."""

    seq: Sequence
    token_id: int
    logprobs: Logprobs | None
    is_grammar_ended: bool


@dataclass(eq=False)
class StagedVllmBlocks:
    """Blocks of vLLM's pool for the KV of `keys`. The content of `views` is copied to them at the end."""

    keys: list[bytes]
    num_cached: int
    buffer: NDArray[np.uint8]
    """At least as many rows as there are new blocks, each of a block's bytes."""
    views: list[memoryview]
    """The first rows of the buffer."""
    cached_blocks: list[Any]
    new_blocks: list[Any]


@dataclass
class CopiedBlock:
    """A copy of a block."""

    payload: memoryview

    def is_valid(self) -> bool:
        """Return True: a copy is nobody else's."""
        return True


@dataclass
class _Step:
    """A step that was begun."""

    output: Any
    """The output of vLLM's scheduler."""
    begun_s: float
    num_prompt_tokens: int
    sampled: list[Sampled] | None = None
    """The tokens that the step has drawn, once it is computed."""
    failed: list[SequenceFailed] = field(default_factory=list)


class VllmCore:
    """vLLM's scheduler and model over a pool of KV blocks. One thread calls its methods."""

    num_drafted_tokens = num_accepted_tokens = 0
    slow_products: list[str] = []  # noqa: RUF012 - never changed

    def __init__(
        self,
        model: VllmModel,
        settings: EngineSettings,
        core: Any,
        blocks: RankBlocks,
        adapters: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`core` is vLLM's `EngineCore`. `adapters`: by digest, how its requests name those that are loaded."""
        self.model, self.settings = model, settings
        self.states = None
        """None: its layers keep nothing but KV."""
        self._core, self._blocks, self._adapters = core, blocks, adapters
        self._output_rank: int = getattr(core.model_executor, "output_rank", 0)  # in one process there is one rank
        self._manager = core.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._sequences: dict[str, Sequence] = {}
        """By id in vLLM."""
        self._ids: dict[Sequence, str] = {}
        self._numbers = itertools.count()
        self._staged: set[StagedVllmBlocks] = set()
        self._spare_buffer: NDArray[np.uint8] | None = None
        self._step: _Step | None = None
        self.step_shares: list[tuple[Sequence, Stage, float]] = []
        """What each row of the last computed step took of it, where all tokens count alike; all together 1."""
        self._failed: list[SequenceFailed] = []
        self._rate = PrefillRate()
        self.num_preemptions = 0

    # Load

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool. vLLM keeps one for itself."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted yet, or preempted. Any thread may ask."""
        return sum(seq.state is State.WAITING for seq in list(self._ids))

    def has_work(self) -> bool:
        """Return whether any sequence is running or waiting."""
        return any(seq.state is not State.DONE for seq in self._ids)

    @property
    def max_step_tokens(self) -> int:
        """How many tokens a step has at most."""
        return int(self._core.scheduler.max_num_scheduled_tokens)

    def choose_step_tokens(self, gap_s: float) -> None:
        """Measure how fast prompts are computed. Let steps have as many tokens as take so long, which is the longest
        gap of answers beside prompts, and one for each sequence; no more than vLLM has memory for.
        """
        most, capacity = self.max_step_tokens, self.num_blocks * self.settings.block_size
        self._rate = measure_prefill_rate(self._time_prompt, min(most, self.model.context_length - 1, capacity))
        self.drop_cache()
        num_tokens = int(gap_s * (self._rate.tokens_per_s or 0.0))
        self._core.scheduler.max_num_scheduled_tokens = min(most, self.settings.max_batch + num_tokens)

    def _time_prompt(self, num_tokens: int) -> float:
        """Return the seconds for a prompt, which is forgotten."""
        prompt = [number % self.model.vocab_size for number in range(num_tokens)]
        seq = Sequence("measure", prompt, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=1)
        begun_s = time.perf_counter()
        self.add_sequence(seq)
        while seq.state is not State.DONE and self.begin_step():
            self.finish_step()
        self.remove_sequence(seq)
        return time.perf_counter() - begun_s

    def free_capacity(self, priority_class: PriorityClass, num_tokens: int) -> int:
        """Return how many more sequences of a class, of `num_tokens` tokens each, would run soon.

        Batch makes way for interactive. The capacity is 0 while sequences of the class wait for blocks.
        """
        rank = CLASSES.index(priority_class)
        ahead = [seq for seq in self._ids if seq.state is not State.DONE and seq.priority <= rank]
        num_slots = max(0, self.settings.max_batch - len(ahead))
        displaced = sum(self._count_blocks(seq.num_computed_tokens) for seq in self._ids if seq.priority > rank)
        num_available = self.num_free_blocks + displaced - self._count_reserved(rank)
        if num_available <= 0 and ahead:
            return 0
        return min(num_slots, max(1, num_available // self._count_blocks(num_tokens)))

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.block_size)

    def _count_reserved(self, rank: int) -> int:
        """Return the blocks that waiting sequences of this and higher priorities need, and one for each running one."""
        waiting = (seq for seq in self._ids if seq.state is State.WAITING and seq.priority <= rank)
        num_running = sum(seq.state is State.RUNNING for seq in self._ids)
        return num_running + sum(self._count_blocks(len(seq.token_ids)) for seq in waiting)

    # Sequences

    def check_sequence(self, seq: Sequence, max_new_tokens: int = 0) -> None:
        """Raise `PromptTooLong` for one that can never run, `InvalidRequest` for unknown token ids and pictures."""
        if seq.pictures is not None:
            raise InvalidRequest("vLLM is given no pictures here: workers with Penstock's engine see them")
        check_sequence(seq, self.model, self.model.layout, self.num_blocks, max_new_tokens)

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence. Its tail payload is not used."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from penstock.engine_vllm.sampler import REQUEST_KEY

        seq.tail_payload = None
        request_id = f"{next(self._numbers)}-{seq.id}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.model.context_length,  # the caller ends it
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=seq.num_prompt_logprobs,
            extra_args={REQUEST_KEY: request_id},
        )
        request = Request(
            request_id,
            list(seq.token_ids),
            params,
            None,
            lora_request=self._adapters[seq.adapter] if seq.adapter else None,
            priority=seq.priority,
            block_hasher=_make_block_hasher(seq, self.settings.block_size),
        )
        self._sequences[request_id], self._ids[seq] = seq, request_id
        self._core.add_request(request)

    def remove_sequence(self, seq: Sequence) -> None:
        """Remove a sequence, wherever it is, and free its blocks. A second call does nothing."""
        if seq.state is not State.DONE:
            seq.move_to(State.DONE)
        request_id = self._ids.pop(seq, None)
        if request_id is None:
            return
        if self._step is not None and request_id in self._step.output.num_scheduled_tokens:
            self._compute_step(self._step)  # it writes to the blocks that it was scheduled with
        del self._sequences[request_id]
        self._core.abort_requests([request_id])

    def count_completed_blocks(self, seq: Sequence) -> int:
        """Return how many full blocks of the sequence are computed. A preempted sequence has none."""
        return seq.num_computed_tokens // self.settings.block_size

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """Add keys of further full blocks of the sequence. vLLM has asked the hasher for them."""
        seq.block_keys += keys

    def retain_blocks(self, keys: list[bytes], seconds: float) -> None:
        """Do nothing: vLLM's cache has an order of its own. The tiers below it retain the blocks."""

    # KV from and to the stores

    def stage_blocks(self, keys: list[bytes], priority_class: PriorityClass) -> StagedVllmBlocks | None:
        """Stage blocks for the KV of `keys`, as `Engine.stage_blocks` does."""
        cached = self._find_cached_blocks(keys)
        pending = {key for staged in self._staged for key in staged.keys[staged.num_cached :]}
        if keys[len(cached) : len(cached) + 1] and keys[len(cached)] in pending:
            return None
        rank = CLASSES.index(priority_class)
        self._pool.touch(cached)
        num_missing = len(keys) - len(cached)
        num_available = max(0, self.num_free_blocks - self._count_reserved(rank))
        may_wait = bool(self._staged) or (bool(self._ids) and all(seq.priority <= rank for seq in self._ids))
        if num_missing > num_available and may_wait:
            self._pool.free_blocks(reversed(cached))
            return None
        new = self._pool.get_new_blocks(min(num_missing, num_available))
        buffer = self._take_buffer(len(new))
        views = [memoryview(row) for row in buffer[: len(new)]]
        staged = StagedVllmBlocks(keys, len(cached), buffer, views, cached, new)
        self._staged.add(staged)
        return staged

    def _take_buffer(self, num_blocks: int) -> NDArray[np.uint8]:
        """Return memory for at least so many blocks: that of an earlier load, or new."""
        spare, self._spare_buffer = self._spare_buffer, None
        if spare is not None and len(spare) >= num_blocks:
            return spare
        return np.empty((num_blocks, self.model.layout.block_bytes), np.uint8)

    def _keep_buffer(self, buffer: NDArray[np.uint8]) -> None:
        """Keep the memory of a load for the next one: the first access to new pages takes as long as reading does."""
        is_larger = self._spare_buffer is None or len(buffer) > len(self._spare_buffer)
        if is_larger and len(buffer) <= self.num_blocks // 4:
            self._spare_buffer = buffer

    def _find_cached_blocks(self, keys: list[bytes]) -> list[Any]:
        found = []
        for key in keys:
            blocks = self._pool.get_cached_block(key, [0])
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def commit_staged_blocks(self, staged: StagedVllmBlocks, num_filled: int) -> None:
        """Put the first `num_filled` staged blocks into the cache, and free all of them. A second call does nothing."""
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        if staged not in self._staged:
            return
        self._staged.remove(staged)
        first, filled = staged.num_cached, staged.new_blocks[:num_filled]
        if filled:
            self._blocks.write_blocks([block.block_id for block in filled], staged.buffer[:num_filled])
        for number, block in enumerate(filled):
            key = BlockHash(staged.keys[first + number])
            num_tokens = (first + number + 1) * self.settings.block_size
            self._pool._insert_block_hash(make_block_hash_with_group_id(key, 0), block, num_tokens=num_tokens)  # noqa: SLF001 - what `cache_full_blocks` does, without a request
        self._pool.free_blocks(reversed([*staged.cached_blocks, *staged.new_blocks]))
        self._keep_buffer(staged.buffer)

    def pin_blocks(self, seq: Sequence, indices: Items[int]) -> list[CopiedBlock]:
        """Return copies of these blocks of the sequence. Rows that are not computed are zero."""
        if not indices:
            return []
        table = self._manager.get_block_ids(self._ids[seq])[0]
        rows = [seq.count_computed_rows(index, self.settings.block_size) for index in indices]
        return [CopiedBlock(payload) for payload in self._blocks.copy_blocks([table[index] for index in indices], rows)]

    def unpin_block(self, pinned: CopiedBlock) -> None:
        """Do nothing: a copy holds no block."""

    def drop_cache(self) -> None:
        """Forget all cached blocks that no sequence uses."""
        self._pool.reset_prefix_cache()

    # The step

    def begin_step(self) -> bool:
        """Schedule a step. Returns whether there is anything to compute."""
        if self._failed:
            return True
        if self._step is not None and not self._is_over(self._step):
            return True
        self._step, scheduler = None, self._core.scheduler
        if not scheduler.has_requests():
            return False
        begun_s = time.perf_counter()
        output = scheduler.schedule()
        for request_id in output.preempted_req_ids or ():
            if (seq := self._sequences.get(request_id)) is not None:
                seq.preempt()
                self.num_preemptions += 1
        for data in output.scheduled_new_reqs:
            seq = self._sequences[data.req_id]
            seq.move_to(State.RUNNING)
            seq.num_cached_tokens = min(seq.num_prompt_tokens, data.num_computed_tokens)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._sequences[request_id].move_to(State.RUNNING)
        if not output.total_num_scheduled_tokens:
            self._execute(output)  # the model runner hears what has ended
            return False
        num_prompt_tokens = sum(num for num in output.num_scheduled_tokens.values() if num > 1)
        self._step = _Step(output, begun_s, num_prompt_tokens)
        return True

    def finish_step(self) -> list[Sampled]:
        """Compute the step. Returns the sampled tokens.

        A sequence that cannot go on in its grammar, or whose logits are no numbers, fails before the next step is
        computed: `SequenceFailed` is raised then, once for each.
        """
        while self._failed:
            failed = self._failed.pop(0)
            if failed.seq in self._ids:
                raise failed
        step = self._step
        if step is None:
            self.step_shares = []
            return []
        if step.sampled is None:
            self._compute_step(step)
        self._step, self._failed = None, step.failed
        assert step.sampled is not None
        return [one for one in step.sampled if one.seq in self._ids]

    def _is_over(self, step: _Step) -> bool:
        """Return whether a step was computed for sequences that were removed since."""
        return step.sampled is not None and not any(one.seq in self._ids for one in step.sampled)

    def _compute_step(self, step: _Step) -> None:
        if step.sampled is not None:
            return
        step.sampled = []
        plan = [(self._sequences[name], num_tokens) for name, num_tokens in step.output.num_scheduled_tokens.items()]
        self.step_shares, _ = share_step(None, plan)
        requests = self._core.scheduler.requests
        num_after = {
            request_id: requests[request_id].num_computed_tokens for request_id in step.output.num_scheduled_tokens
        }  # vLLM counts the tokens of a step as computed when it is scheduled
        draws: dict[str, SamplingParams] = {}
        for request_id, num_tokens in num_after.items():
            if num_tokens == requests[request_id].num_tokens:
                try:
                    draws[request_id] = self._make_draw(self._sequences[request_id])
                except SequenceFailed as failed:
                    step.failed.append(failed)
        call_ranks = self._core.model_executor.collective_rpc
        call_ranks("penstock_begin_sampling", args=(draws,))
        outputs = self._execute(step.output)
        drawn = call_ranks("penstock_take_drawn")[self._output_rank] if draws else {}
        for request_id, num_tokens in num_after.items():
            self._sequences[request_id].num_computed_tokens = num_tokens
        for one in outputs:
            seq = self._sequences[one.request_id]
            if (prompt_logprobs := one.new_prompt_logprobs_tensors) is not None:
                seq.prompt_logprobs += _describe_prompt_logprobs(prompt_logprobs)
            if one.request_id in draws and one.new_token_ids and seq.state is State.RUNNING:
                if (found := drawn[one.request_id]) is None:
                    step.failed.append(SequenceFailed(seq, ModelError(NOT_FINITE)))
                    continue
                token_id, logprobs = found
                assert one.new_token_ids == [token_id], "vLLM took another token than the one that was drawn"
                seq.append_token(token_id)
                step.sampled.append(Sampled(seq, token_id, logprobs, seq.is_grammar_ended))
        num_tokens = step.output.total_num_scheduled_tokens
        self._rate.record_step(step.num_prompt_tokens, num_tokens, time.perf_counter() - step.begun_s)

    def _make_draw(self, seq: Sequence) -> SamplingParams:
        """Return how the sequence's next token is chosen. Raises `SequenceFailed` where its grammar has no way on, or
        fails.
        """
        ends = self.model.eos_token_ids | {*seq.sampling.stop_token_ids} if seq.sampling.min_tokens else frozenset()
        try:
            return make_sampling_params(seq, seq.compute_masks(), ends)[0]
        except BaseException as error:
            if isinstance(error, SequenceFailed) or not is_failure(error):
                raise
            raise SequenceFailed(seq, ModelError(f"{type(error).__name__}: {error}")) from error

    @torch.inference_mode()
    def _execute(self, output: Any) -> list[Any]:
        """Run vLLM's model on what was scheduled. Returns vLLM's outputs."""
        core = self._core
        model_output = core.model_executor.execute_model(output, non_block=True).result()
        if model_output is None:
            model_output = core.model_executor.sample_tokens(None)
        found = core.scheduler.update_from_output(output, model_output)
        return found[0].outputs if found else []

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""
        return self._rate.tokens_per_s

    def report_speed(self) -> WorkerSpeed | None:
        """Return how long prompts take now; None where that is not known. Any thread may call it."""
        return self._rate.describe_speed(sum(seq.num_pending_tokens == 1 for seq in list(self._ids)))


def _make_block_hasher(seq: Sequence, block_size: int) -> Callable[[Any], list[Any]]:
    """Return what names the blocks of a request of vLLM: it is asked again after each token."""

    def name_blocks(request: Any) -> list[Any]:
        if seq.hasher is None:  # a load compares its logits, and nobody finds its blocks
            numbers = range(len(request.block_hashes), len(request.all_token_ids) // block_size)
            return [f"{request.request_id} {number}".encode() for number in numbers]
        seq.hasher.hash_full_blocks(request.all_token_ids)
        return [key.hash for key in seq.hasher.keys[len(request.block_hashes) :]]

    return name_blocks


def _describe_prompt_logprobs(tensors: Any) -> list[Logprobs]:
    """Return vLLM's log probabilities of a prompt: the first column is the prompt's own token."""
    found = []
    for ids, values in zip(tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), strict=True):
        pairs = list(zip(ids, (min(0.0, round(value, 6)) for value in values), strict=True))
        top = [TokenLogprob(token=token, logprob=value) for token, value in pairs[1:]]
        found.append(Logprobs(logprob=pairs[0][1], top=top))
    return found
