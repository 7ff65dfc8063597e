"""vLLM as the core of an engine, in this process: it computes and schedules, and this project's sampler draws.

A sequence is a request of vLLM, whose blocks have the names that this project gives them: vLLM's prefix cache finds
them, and blocks from the KV store are put there under these names. vLLM takes whole blocks from its cache, so the rest
of a prompt is computed again where an answer goes on elsewhere.

One process on a CPU, models with one kind of attention. A step that fails ends the worker, as vLLM cannot undo it.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.files import Progress, find_model, find_weight_files
from penstock.engine.fingerprint import compute_fingerprint, hash_files
from penstock.engine.limits import check_sequence
from penstock.engine.loading import (
    as_load_errors,
    choose_dtype,
    find_context_length,
    find_eos_token_ids,
    load_tokenizer,
    prepare_transformers,
)
from penstock.engine.module import load_generation_config
from penstock.engine.rates import PrefillRate
from penstock.engine.response_template import find_response_template
from penstock.engine.sequence import Sequence, State
from penstock.errors import DependencyMissing, ModelLoadError, SequenceFailed
from penstock.messages import Logprobs, TokenLogprob
from penstock.names import CLASSES, PriorityClass

CPU_BLOCK_SIZE = 32
"""vLLM's attention on a CPU takes multiples of this many tokens as a block."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the last token of a sequence has no place in vLLM's own limit
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes all cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class VllmLayout:
    """The layout of a block: for each layer and head the block's tokens, K and V of each side by side."""

    block_size: int
    num_layers: int
    num_heads: int
    vector_size: int
    """Numbers of K and V of a token and head together."""
    element_type: Literal["float32", "bfloat16", "float16"]

    @property
    def vector_shapes(self) -> tuple[tuple[int, int], ...]:
        """(Rows, numbers in a row) of each layer."""
        return ((self.num_heads * self.block_size, self.vector_size),) * self.num_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        itemsize = 4 if self.element_type == "float32" else 2
        return self.num_heads * self.block_size * self.vector_size * itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.layer_bytes * self.num_layers


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
    layout: VllmLayout


class Sampled(NamedTuple):
    """A token that a step sampled. It is in `seq.token_ids` already."""

    seq: Sequence
    token_id: int
    logprobs: Logprobs | None
    is_grammar_ended: bool


@dataclass(eq=False)
class StagedBlocks:
    """Blocks of vLLM's pool for the KV of `keys`. What is written to `views` is copied to them at the end."""

    keys: list[bytes]
    num_cached: int
    views: list[memoryview]
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
    """What vLLM has scheduled."""
    begun_s: float
    num_prompt_tokens: int
    sampled: list[Sampled] | None = None
    """What it has drawn, once it is computed."""
    failed: SequenceFailed | None = None


@dataclass
class _Cache:
    """The tensors of vLLM's KV: for each layer [blocks, heads, block size, vector]."""

    layers: list[torch.Tensor]
    layout: VllmLayout
    _bytes: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._bytes = [layer.view(torch.uint8).numpy() for layer in self.layers]

    def write_block(self, block: int, payload: memoryview) -> None:
        """Make the payload the content of a block."""
        size = self.layout.layer_bytes
        for index, layer in enumerate(self._bytes):
            layer[block] = np.frombuffer(payload, np.uint8, size, index * size).reshape(layer[block].shape)

    def copy_block(self, block: int, num_rows: int) -> memoryview:
        """Return a copy of a block in which the rows (tokens) from `num_rows` on are zero."""
        copy = np.stack([layer[block] for layer in self._bytes])
        copy[:, :, num_rows:] = 0
        return memoryview(copy.data).cast("B").toreadonly()


class VllmCore:
    """vLLM's scheduler and model over a pool of KV blocks. One thread calls its methods."""

    num_drafted_tokens = num_accepted_tokens = 0

    def __init__(self, model: VllmModel, settings: EngineSettings, core: Any, cache: _Cache) -> None:
        """`core` is vLLM's `EngineCore`."""
        from penstock.engine_vllm.sampler import step_sampling

        self.model, self.settings = model, settings
        self._core, self._cache, self._step_sampling = core, cache, step_sampling
        self._step_sampling.eos_token_ids = model.eos_token_ids
        self._manager = core.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._sequences: dict[str, Sequence] = {}
        """By id in vLLM."""
        self._ids: dict[Sequence, str] = {}
        self._numbers = itertools.count()
        self._staged: set[StagedBlocks] = set()
        self._step: _Step | None = None
        self._failed: SequenceFailed | None = None
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

    def free_capacity(self, klass: PriorityClass, num_tokens: int) -> int:
        """Return how many more sequences of a class, of `num_tokens` tokens each, would run soon.

        Batch makes way for interactive. The capacity is 0 while sequences of the class wait for blocks.
        """
        rank = CLASSES.index(klass)
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
        """Raise `PromptTooLong` for a sequence that can never run, `InvalidRequest` for unknown token ids."""
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
            priority=seq.priority,
            block_hasher=_make_block_hasher(seq),
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

    # KV from and to the stores

    def stage_blocks(self, keys: list[bytes], klass: PriorityClass) -> StagedBlocks | None:
        """Stage blocks for the KV of `keys`, as `Engine.stage_blocks` does."""
        cached = self._find_cached_blocks(keys)
        pending = {key for staged in self._staged for key in staged.keys[staged.num_cached :]}
        if keys[len(cached) : len(cached) + 1] and keys[len(cached)] in pending:
            return None
        rank = CLASSES.index(klass)
        self._pool.touch(cached)
        num_missing = len(keys) - len(cached)
        num_available = max(0, self.num_free_blocks - self._count_reserved(rank))
        may_wait = bool(self._staged) or (bool(self._ids) and all(seq.priority <= rank for seq in self._ids))
        if num_missing > num_available and may_wait:
            self._pool.free_blocks(reversed(cached))
            return None
        new = self._pool.get_new_blocks(min(num_missing, num_available))
        views = [memoryview(bytearray(self.model.layout.block_bytes)) for _ in new]
        staged = StagedBlocks(keys, len(cached), views, cached, new)
        self._staged.add(staged)
        return staged

    def _find_cached_blocks(self, keys: list[bytes]) -> list[Any]:
        found = []
        for key in keys:
            blocks = self._pool.get_cached_block(key, [0])
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def commit_staged_blocks(self, staged: StagedBlocks, num_filled: int) -> None:
        """Put the first `num_filled` staged blocks into the cache, and free all of them. A second call does nothing."""
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        if staged not in self._staged:
            return
        self._staged.remove(staged)
        first = staged.num_cached
        for number, (block, view) in enumerate(zip(staged.new_blocks[:num_filled], staged.views, strict=False)):
            key = BlockHash(staged.keys[first + number])
            self._cache.write_block(block.block_id, view)
            num_tokens = (first + number + 1) * self.settings.block_size
            self._pool._insert_block_hash(make_block_hash_with_group_id(key, 0), block, num_tokens=num_tokens)  # noqa: SLF001 - what `cache_full_blocks` does, without a request
        self._pool.free_blocks(reversed([*staged.cached_blocks, *staged.new_blocks]))

    def pin_block(self, seq: Sequence, index: int) -> CopiedBlock:
        """Return a copy of the sequence's `index`-th block. Rows that are not computed are zero."""
        num_rows = seq.num_computed_tokens - index * self.settings.block_size
        assert num_rows > 0, f"block {index} of {seq!r} holds nothing"
        block = self._manager.get_block_ids(self._ids[seq])[0][index]
        return CopiedBlock(self._cache.copy_block(block, min(num_rows, self.settings.block_size)))

    def unpin_block(self, pinned: CopiedBlock) -> None:
        """Do nothing: a copy holds no block."""

    def drop_cache(self) -> None:
        """Forget all cached blocks that no sequence uses."""
        self._pool.reset_prefix_cache()

    # The step

    def begin_step(self) -> bool:
        """Schedule a step. Returns whether there is anything to compute."""
        if self._failed is not None:
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

        A sequence that cannot go on in its grammar fails in the next step: `SequenceFailed` is raised then.
        """
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        step = self._step
        if step is None:
            return []
        if step.sampled is None:
            self._compute_step(step)
        self._step, self._failed = None, step.failed
        assert step.sampled is not None
        return [one for one in step.sampled if one.seq in self._ids]

    def _is_over(self, step: _Step) -> bool:
        """Return whether a step was computed for sequences that were removed since."""
        return step.sampled is not None and not any(one.seq in self._ids for one in step.sampled)

    @torch.inference_mode()
    def _compute_step(self, step: _Step) -> None:
        if step.sampled is not None:
            return
        step.sampled = []
        sampling, requests = self._step_sampling, self._core.scheduler.requests
        num_after = {
            request_id: requests[request_id].num_computed_tokens for request_id in step.output.num_scheduled_tokens
        }  # vLLM counts the tokens of a step as computed when it is scheduled
        whole = {
            request_id: self._sequences[request_id]
            for request_id, num_tokens in num_after.items()
            if num_tokens == requests[request_id].num_tokens
        }
        sampling.begin(whole)
        outputs = self._execute(step.output)
        for request_id, num_tokens in num_after.items():
            self._sequences[request_id].num_computed_tokens = num_tokens
        for failed in sampling.failures.values():
            step.failed = step.failed or failed
        for one in outputs:
            seq = self._sequences[one.request_id]
            if (prompt_logprobs := one.new_prompt_logprobs_tensors) is not None:
                seq.prompt_logprobs += _describe_prompt_logprobs(prompt_logprobs)
            drawn = sampling.drawn.get(one.request_id)
            if drawn is not None and one.new_token_ids and seq.state is State.RUNNING:
                token_id, logprobs = drawn
                assert one.new_token_ids == [token_id], "vLLM took another token than the one that was drawn"
                seq.append_token(token_id)
                step.sampled.append(Sampled(seq, token_id, logprobs, seq.is_grammar_ended))
        num_tokens = step.output.total_num_scheduled_tokens
        self._rate.record_step(step.num_prompt_tokens, num_tokens, time.perf_counter() - step.begun_s, is_done=True)

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


def _make_block_hasher(seq: Sequence) -> Callable[[Any], list[Any]]:
    """Return what names the blocks of a request of vLLM: it is asked again after each token."""

    def name_blocks(request: Any) -> list[Any]:
        assert seq.hasher is not None
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


def open_vllm_core(settings: EngineSettings, progress: Progress | None = None) -> VllmCore:
    """Load the model into vLLM. Raises `ModelLoadError`, and `DependencyMissing` where vLLM is not installed."""
    if settings.block_size % CPU_BLOCK_SIZE:
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_BLOCK_SIZE={settings.block_size}: vLLM needs a multiple of {CPU_BLOCK_SIZE} on a CPU"
        )
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads)} | ENVIRONMENT
    torch.set_num_threads(settings.threads)  # vLLM does not let anybody change it afterwards
    try:
        import vllm
    except ImportError as error:
        raise DependencyMissing(f"PENSTOCK_ENGINE_KIND=vllm needs vLLM ({error})") from None
    with as_load_errors(settings.model):
        return _open_core(settings, progress or (lambda what, done: None), vllm.__version__)


def _open_core(settings: EngineSettings, report: Progress, version: str) -> VllmCore:
    from transformers import AutoConfig
    from vllm import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from penstock.engine_vllm.sampler import PenstockSampler
    from penstock.engine_vllm.scheduler import PreemptingScheduler

    prepare_transformers()
    directory = find_model(settings.model, report)
    files = find_weight_files(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    tokenizer = load_tokenizer(directory)
    context_length = find_context_length(config, tokenizer)
    dtype = choose_dtype(settings.dtype, config, torch.device("cpu"))
    args = EngineArgs(
        model=str(directory),
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=True,
        max_model_len=context_length + 1,
        max_num_seqs=settings.max_batch,
        max_num_batched_tokens=max(settings.max_step_tokens, settings.max_batch),
        scheduling_policy="priority",
        block_size=settings.block_size,
        kv_cache_memory_bytes=settings.pool_mb * 2**20,
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        logits_processors=[PenstockSampler],
        scheduler_cls=PreemptingScheduler,
        seed=0,
    )
    vllm_config = args.create_engine_config()
    core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ModelLoadError("it has several kinds of layers, whose blocks vLLM keeps apart")
    layers = list(core.model_executor.driver_worker.worker.model_runner.kv_caches)
    layout = _read_layout(layers, settings.block_size)
    form = f"penstock kv layout of vllm {version}\n{layout}"
    name = compute_fingerprint(directory, files, hash_files(files, report), config, form)
    model = VllmModel(
        settings.model,
        tokenizer,
        find_response_template(tokenizer, config.model_type, settings.response_template),
        find_eos_token_ids(load_generation_config(directory), config, tokenizer),
        context_length,
        config.get_text_config().vocab_size,
        name,
        layout,
    )
    return VllmCore(model, settings, core, _Cache(layers, layout))


def _read_layout(layers: list[torch.Tensor], block_size: int) -> VllmLayout:
    """Return the layout of vLLM's KV. Raises `ModelLoadError` for one that cannot be copied block by block."""
    shapes = {(tuple(layer.shape[1:]), layer.dtype) for layer in layers}
    ((_, num_heads, num_tokens, vector_size), dtype) = (layers[0].shape, layers[0].dtype)
    if len(shapes) != 1 or num_tokens != block_size or not all(layer[0].is_contiguous() for layer in layers):
        raise ModelLoadError(f"vLLM keeps its KV in a form that is not known here: {sorted(map(str, shapes))}")
    names: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]] = {
        torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
    }  # fmt: skip
    return VllmLayout(block_size, len(layers), num_heads, vector_size, names[dtype])
