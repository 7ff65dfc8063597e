"""The engine: sequences in, one token each a step out.

add() ─▶ waiting ─▶ [admit: blocks, cached prefix, tail] ─▶ running ─▶ step() … ─▶ remove()
            ▲                    ▲                            │ │
            │       commit_staged_blocks() ◀─ … ◀─ land()            │ └─▶ lend() ─▶ … ─▶ unpin_block()
            └──────────── [preempt: no blocks are left] ──────┘
"""

import inspect
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine import hooks
from penstock.engine.batch import Batch
from penstock.engine.cost import TRIAL_CHUNK_TOKENS, TRIAL_CONTEXT_TOKENS, TRIAL_DECODES, TrialStep, measure_cost
from penstock.engine.cuda.decode import CudaRecorder, DecodeGraphs, Recorder
from penstock.engine.cuda.varlen import VarlenStep, make_calls
from penstock.engine.limits import check_sequence, cut_max_tokens, max_length
from penstock.engine.memory import keep_freed_memory
from penstock.engine.model import LoadedModel
from penstock.engine.pool import BlockPool
from penstock.engine.quarantine import Quarantine
from penstock.engine.rates import PrefillRate, measure_prefill_rate
from penstock.engine.sampler import SamplingParams, compute_logprobs, sample_tokens
from penstock.engine.scheduler import Plan, Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.staging import BlockStaging, PinnedBlock, StagedBlocks
from penstock.engine.storage import KVStorage
from penstock.errors import ModelLoadError
from penstock.messages import Logprobs, Sampling
from penstock.names import CLASSES, PriorityClass


class Sampled(NamedTuple):
    """A token that a step decided; it is in `seq.token_ids` already."""

    seq: Sequence
    token_id: int
    logprobs: Logprobs | None
    """Where its request asks for them."""


class Engine:
    """One model, one pool of KV blocks, and the sequences on them. One thread drives it."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, quarantine: bool = True) -> None:
        """Without `quarantine` a step raises whatever made it fail."""
        self.model = model
        self.settings = settings
        num_blocks = settings.pool_mb * 2**20 // model.layout.block_bytes
        if num_blocks < 1:
            raise ModelLoadError(
                f"one KV block of {model.name!r} has {model.layout.block_bytes:,} bytes: "
                f"PENSTOCK_ENGINE_POOL_MB={settings.pool_mb} has no room for it"
            )
        self._set_threads()
        self.pool = BlockPool(num_blocks, settings.block_size)
        self.scheduler = Scheduler(self.pool)
        on_gpu = model.device.type == "cuda"
        # On a GPU one more: what pads a recorded step needs somewhere to write.
        self.storage = KVStorage(model.layout, num_blocks + on_gpu, model.device)
        self.staging = BlockStaging(self.pool, self.storage)
        self.has_run = False
        """Whether there was anything to compute in the last step. If not, blocks have to come free first, or there is
        no work.
        """
        self._quarantine = Quarantine(settings.max_step_tokens) if quarantine else None
        self._rate = PrefillRate()
        self._last_step_ended_s, self._num_last_sampled = 0.0, 0
        """When the last step was computed, and how many tokens it decided."""
        self._cache = hooks.PagedCache(self.storage, model.direct_layers)
        model.module.set_attn_implementation(hooks.ATTENTION_NAME)
        # Rows that nobody wrote are met only where whole blocks are gathered, behind a mask.
        self._gathers = model.native is None or model.direct_layers != self.storage.keys.keys()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        self._graphs = self._make_graphs(CudaRecorder(model.device)) if on_gpu else None

    def _make_graphs(self, recorder: Recorder) -> DecodeGraphs | None:
        """For a model of which every layer attends by `varlen_attn`."""
        if self.model.varlen_windows.keys() != self.storage.keys.keys():
            return None
        return DecodeGraphs(
            self.storage,
            self.model.varlen_windows,
            max_batch=self.settings.max_batch,
            max_blocks=min(self.pool.num_blocks, -(-self.model.context_length // self.settings.block_size)),
            spare=self.pool.num_blocks,
            recorder=recorder,
        )

    def _set_threads(self) -> None:
        """The kernels have threads of their own; torch's would spin beside them."""
        keep_freed_memory()
        native = self.model.native
        torch.set_num_threads(1 if native else self.settings.threads)
        if native is not None:
            native.set_threads(self.settings.threads)

    # What is in it

    @property
    def block_bytes(self) -> int:
        """Size of a block, all layers: what views and payloads have."""
        return self.model.layout.block_bytes

    @property
    def num_waiting(self) -> int:
        """Sequences added and not admitted, or preempted."""
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences admitted that still generate."""
        return self.scheduler.num_running

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new sequence could have, those only kept as cache included."""
        return self.pool.num_free_blocks

    def free_capacity(self, klass: PriorityClass = "batch", num_tokens: int = 1) -> int:
        """How many more sequences of a class, of so many tokens each, would run soon if they were added.

        There are places and blocks for so many; batch makes way for interactive, and beside it comes in only as far as
        it would not pause. There is no room while some of the class wait for blocks.
        """
        num_places = max(0, self.settings.max_batch - self.scheduler.count_sequences_ahead(klass))
        if klass == "batch":
            num_places = int(min(num_places, self.scheduler.count_batch_slots_beside_interactive()))
        return min(num_places, self.scheduler.count_fitting_sequences(CLASSES.index(klass), num_tokens))

    def has_work(self) -> bool:
        """Whether `step()` may have something to do."""
        return self.num_running + self.num_waiting > 0

    def count_cached_blocks(self, keys: list[bytes]) -> int:
        """How many of the leading prefix keys the pool holds now."""
        return self.pool.count_cached_prefix(keys)

    # Sequences come and go

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence. Raises what `check` raises."""
        self.check_sequence(seq)
        self.scheduler.add_sequence(seq)

    def check_sequence(self, seq: Sequence, max_new_tokens: int = 0) -> None:
        """Raise `PromptTooLong` for a sequence that can never run, `InvalidRequest` for unknown token ids.

        `max_new_tokens`: as if so many were to be generated, if that is more than it says.
        """
        check_sequence(seq, self.model, self.pool.num_blocks, max_new_tokens)

    def cut_max_tokens(self, sampling: Sampling, num_prompt_tokens: int) -> Sampling:
        """Return the sampling with `max_tokens` cut to what context and pool have room for, where it asks for that."""
        return cut_max_tokens(sampling, num_prompt_tokens, max_length(self.model, self.pool.num_blocks))

    def remove_sequence(self, seq: Sequence) -> None:
        """Take a sequence out, finished or not, and free its blocks. A second time does nothing."""
        self.scheduler.remove_sequence(seq)

    def count_completed_blocks(self, seq: Sequence) -> int:
        """Full blocks of the sequence whose KV is in the pool; none again once it is preempted."""
        return seq.num_computed_tokens // self.settings.block_size

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """The keys of the sequence's full blocks after those that have one, generated tokens included.

        Others find a block by its key once its KV is computed, and the sequence itself does if it was preempted.
        """
        self.scheduler.add_block_keys(seq, keys)

    # KV comes and goes, see `landing`; all on the engine's thread

    def stage_blocks(self, keys: list[bytes], klass: PriorityClass = "interactive") -> StagedBlocks | None:
        """Room in the pool for the KV of `keys`, to be filled while steps run.

        It takes what others of its class and above leave: what the waiting need, and one block for each that still
        grows. None if that is too little and more will be left soon, or if the first block that is missing is landing
        already: ask again. Where waiting is no use, it has fewer views than keys are missing, or none.
        """
        rank, num_held = CLASSES.index(klass), self.pool.count_cached_prefix(keys)
        if self.staging.is_staging(keys[num_held : num_held + 1]):
            return None
        num_reserved = self.scheduler.count_reserved_blocks(rank)
        num_left = self.pool.count_free_blocks_besides(keys[:num_held]) - num_reserved
        may_wait = self.staging.has_open or self.scheduler.runs_only(rank)
        if len(keys) - num_held > num_left and may_wait:
            return None
        return self.staging.stage_blocks(keys, num_reserved)

    def commit_staged_blocks(self, landing: StagedBlocks, num_filled: int) -> None:
        """The first `num_filled` views hold the KV of their keys; nobody writes to any of them now. Twice is harmless.

        A sequence added from now on finds the filled blocks, until the space is needed.
        """
        self.staging.commit_staged_blocks(landing, num_filled)

    def pin_block(self, seq: Sequence, index: int) -> PinnedBlock:
        """The sequence's `index`-th block for reading while steps run; rows not computed are zero.

        It stays as it is until it is given back, whatever becomes of the sequence.
        """
        num_rows = seq.num_computed_tokens - index * self.settings.block_size
        assert num_rows > 0, f"block {index} of {seq!r} holds nothing"
        return self.staging.pin_block(seq.block_table[index], min(num_rows, self.settings.block_size))

    def unpin_block(self, lent: PinnedBlock) -> None:
        """Nobody reads the lent block any more. Twice is harmless."""
        self.staging.unpin_block(lent)

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""
        return self._rate.tokens_per_s

    def measure_speed(self) -> None:
        """Compute a few prompts for `rates()`: a decode worker has to choose between fetching and computing at once.
        Then a few steps, for batch work's share of those with interactive work.
        """
        room = self.pool.num_blocks * self.settings.block_size
        most = min(self.settings.max_step_tokens, self.model.context_length - 1, room)
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(self.model.vocab_size, (max(1, most),), generator=generator).tolist()
        self._rate = measure_prefill_rate(lambda num_tokens: self._time_prompt(tokens[:num_tokens]), len(tokens))
        rows = min(TRIAL_DECODES, self.settings.max_batch)
        context = min(TRIAL_CONTEXT_TOKENS, self.model.context_length - 1, room // rows - self.settings.block_size)
        if rows > 1 and context > 0 and len(tokens) >= TRIAL_CHUNK_TOKENS[-1]:  # else there is little to share
            self.scheduler.cost = measure_cost(partial(self._time_step, tokens), rows, context)
        self._num_last_sampled = 0

    def _time_prompt(self, tokens: list[int]) -> float:
        """Seconds for a prompt that leaves nothing behind."""
        begun_s = time.perf_counter()
        seq = Sequence("measure", tokens, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=1)
        self.add_sequence(seq)
        while self.has_work():
            self.step()
        self.remove_sequence(seq)
        return time.perf_counter() - begun_s

    @torch.inference_mode()
    def _time_step(self, tokens: list[int], one: TrialStep) -> float:
        """Seconds for a step that nobody planned. What is in the blocks makes no difference.

        On a CPU its time counts, so that what else runs there does not.
        """
        is_cpu = self.model.device.type == "cpu"
        clock, threads = (time.process_time, self.settings.threads) if is_cpu else (time.perf_counter, 1)
        plan: Plan = []
        for num_before, num_tokens in [(one.context_tokens, 1)] * one.num_decodes + [(0, one.prompt_tokens)] * (
            one.prompt_tokens > 0
        ):
            prompt = [tokens[at % len(tokens)] for at in range(num_before + num_tokens)]
            seq = Sequence("measure", prompt, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=1)
            seq.block_table = self.pool.allocate_blocks(-(-len(prompt) // self.settings.block_size))
            seq.num_computed_tokens = num_before
            plan.append((seq, num_tokens))
        begun_s = clock()
        self._run_plan(plan)
        taken_s = (clock() - begun_s) / threads
        for seq, _ in plan:
            self.pool.free_blocks(seq.block_table)
        return taken_s

    # The step

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Run one batch: a token for each decoding sequence, and a part of the prompts that wait for theirs.

        Returns the tokens decided; empty if nothing could run, only prompts were read, or the step failed: then the
        next ones look for the culprit, and find all others as they were. Raises `SequenceFailed` once that is known:
        take it out.
        """
        begun_s = time.perf_counter()
        quarantine = self._quarantine
        max_tokens = quarantine.max_tokens if quarantine else self.settings.max_step_tokens
        plan = self.scheduler.schedule(max_tokens, self.settings.max_batch)
        self.has_run = bool(plan)
        self._record_time_outside()
        if not plan:
            return []
        before = [seq.num_computed_tokens for seq, _ in plan]
        try:
            sampled = self._run_plan(plan)
        except BaseException as error:
            for (seq, _), num_computed_tokens in zip(plan, before, strict=True):  # as if the step had not been
                seq.num_computed_tokens = num_computed_tokens
            if quarantine is None or not isinstance(error, Exception):
                raise
            quarantine.record_failure(plan, error)
            return []
        self._last_step_ended_s, self._num_last_sampled = time.perf_counter(), len(sampled)
        if quarantine is not None:
            quarantine.record_success()
        for seq, num_tokens in plan:
            self.scheduler.register_blocks(seq, seq.num_computed_tokens - num_tokens)
        for item in sampled:
            item.seq.append_token(item.token_id)
        self._rate.record_step(
            sum(num for _, num in plan if num > 1),
            sum(num for _, num in plan),
            time.perf_counter() - begun_s,
            is_done=bool(sampled) or self.model.device.type == "cpu",
        )
        return sampled

    def _record_time_outside(self) -> None:
        """The next step is planned: what came between it and the last one, its tokens caused."""
        if self._num_last_sampled and self.scheduler.cost is not None:
            self.scheduler.cost.record_outside(time.perf_counter() - self._last_step_ended_s, self._num_last_sampled)
        self._num_last_sampled = 0

    def _run_plan(self, plan: Plan) -> list[Sampled]:
        """Compute what is planned, and decide the tokens; nobody has taken them yet."""
        for seq, _ in plan:
            if seq.tail_payload is not None:
                self.storage.write_block(
                    seq.block_table[seq.num_prompt_tokens // self.settings.block_size], seq.tail_payload
                )
                seq.tail_payload = None
        batch = Batch(plan, self.settings.block_size, self.model.device)
        logits = self._forward(batch)
        for seq, num_tokens in plan:
            seq.num_computed_tokens += num_tokens
        return self._sample(batch, logits)

    def _sample(self, batch: Batch, logits: Tensor) -> list[Sampled]:
        """The tokens that the step decides; meanwhile a GPU's next step is prepared."""
        if self._graphs is not None:
            self._graphs.prepare_next_step(batch.sampled_sequences)
        draws = [
            SamplingParams(seq.sampling, seq.seed, seq.num_output_tokens, seq.token_ids)
            for seq in batch.sampled_sequences
        ]
        logits = logits[: len(draws)]
        tokens = sample_tokens(logits, draws)
        told = compute_logprobs(logits, draws, tokens)
        return [Sampled(*entry) for entry in zip(batch.sampled_sequences, tokens, told, strict=True)]

    def _forward(self, batch: Batch) -> Tensor:
        """Logits [rows to keep, vocabulary]; the KV of all the batch's tokens is in the pool afterwards."""
        if batch.partial_new_blocks and self._gathers:
            self.storage.zero_blocks(batch.partial_new_blocks)
        if self._graphs is not None and self._graphs.can_run(batch.plan):
            return self._graphs.run_step([seq for seq, _ in batch.plan], self._compute)
        if self.model.native is not None:
            batch.enable_native_attention(self.model.native, self.storage)
        if self.model.varlen_windows:
            parts = make_calls(batch.plan, self.settings.block_size, self.model.device)
            batch.varlen = VarlenStep(self.storage, self.model.varlen_windows, parts, batch.slots)
        if not self._keeps_logits:
            return self._compute(batch)[batch.logits_to_keep]
        return self._compute(batch, logits_to_keep=batch.logits_to_keep)

    def _compute(self, batch: Batch, **keep: Tensor) -> Tensor:
        """The model's forward pass over the batch: logits [rows to keep or all, vocabulary]."""
        token = hooks.current_batch.set(batch)
        try:
            output = (self.model.body or self.model.module)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                past_key_values=self._cache,
                use_cache=True,
                **keep,
            )
        finally:
            hooks.current_batch.reset(token)
        logits: Tensor = output.logits[0]
        return logits
