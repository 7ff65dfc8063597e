"""The engine: it takes sequences, and samples a token of each running one per step, or several that it has guessed.

add_sequence() ─▶ waiting ─▶ [admit: blocks, cached prefix, tail] ─▶ running ─▶ step() … ─▶ remove_sequence()
                     ▲                    ▲                            │ │
                     │   commit_staged_blocks() ◀─ … ◀─ stage_blocks() │ └─▶ pin_block() ─▶ … ─▶ unpin_block()
                     └──────────── [preempt: no blocks are left] ──────┘
"""

import logging
import math
import time
import weakref
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.limits import check_sequence
from penstock.engine.memory.memory import keep_freed_memory
from penstock.engine.memory.pool import BlockPool
from penstock.engine.memory.pool_mapping import PoolMapping
from penstock.engine.memory.staging import BlockStaging, PinnedPoolBlock, StagedPoolBlocks
from penstock.engine.memory.state_rows import StateRows, divide_memory
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import make_trial_sequence
from penstock.engine.sampling.draw import make_sampling_params
from penstock.engine.sampling.sampler import (
    NOT_FINITE,
    SamplingParams,
    compute_logprobs,
    compute_row_logprobs,
    find_broken_rows,
    sample_tokens,
)
from penstock.engine.scheduling.cost import (
    TRIAL_CHUNK_TOKENS,
    TRIAL_CONTEXT_TOKENS,
    TRIAL_DECODES,
    WARM_UP_TOKENS,
    PrefillRate,
    StepCost,
    StepPace,
    TrialStep,
    measure_cost,
    measure_prefill_rate,
    share_step,
)
from penstock.engine.scheduling.draft_budget import draft_tokens
from penstock.engine.scheduling.quarantine import Quarantine
from penstock.engine.scheduling.scheduler import WAITING_STEPS, Scheduler
from penstock.engine.sequence import Plan, Sequence, State
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import ModelError, SequenceFailed, is_failure
from penstock.kvstore.block import derive_state_hash
from penstock.messages import Logprobs, Sampling, now_s
from penstock.names import CLASSES, PriorityClass, Stage
from penstock.worker_speed import WorkerSpeed

log = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 32
"""Rows of logits that are ranked at once: a float32 copy is made of them."""
SLOW_HALF_LIFE_S = 30.0
"""After how many seconds without a step it is half forgotten how much longer steps took than they cost."""


class Sampled(NamedTuple):
    """A token that a step sampled. It is in `seq.token_ids` already."""

    seq: Sequence
    token_id: int
    logprobs: Logprobs | None
    """None unless the request asks for them."""
    is_grammar_ended: bool = False
    """Whether the sequence's grammar has ended with this token."""


Drawn = tuple[Sequence, int, Logprobs | None]
"""A token that a step has drawn, before it is in its sequence."""


class Engine:
    """One model, one pool of KV blocks, and their sequences. One thread calls its methods."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, quarantine: bool = True) -> None:
        """Without `quarantine`, a step raises whatever made it fail."""
        self.model = model
        self.settings = settings
        num_blocks, num_running, num_state_rows = divide_memory(model.layout, settings, model.name)
        if num_running < settings.max_batch:
            log.warning(
                "%s: PENSTOCK_ENGINE_POOL_MB holds state for only %d sequences; running at most that many",
                model.name,
                num_running,
            )
            self.settings = settings = settings.model_copy(update={"max_batch": num_running})
        keep_freed_memory()
        self.pool = BlockPool(num_blocks, settings.block_size)
        self.runner = model.create_runner(settings, num_blocks, num_state_rows)
        self.storage = self.runner.storage
        self.pool_mapping = PoolMapping(self.storage.list_host_memory())
        """Maps the pool's memory before it is used, where `open_engine` has started it."""
        weakref.finalize(self, self.pool_mapping.close)
        self._prompt_runner: ModelRunner | None = None
        """Computes the tokens of prompts, if that takes other weights than answers."""
        if model.prompt_model is not None:
            self._prompt_runner = ModelRunner(model.prompt_model.module, self.storage, model.prompt_model.native)
        self.states: StateRows | None = None
        """The allocator of recurrent-state rows. None if the model has no recurrent layers."""
        if self.storage.states is not None:
            self.states = StateRows(self.storage.states, num_state_rows, settings.max_batch, settings.block_size)
        self.scheduler = Scheduler(self.pool, self.states)
        self.speculates = settings.speculate and self.runner.is_row_exact
        """Whether steps compute drafts. Where a draw depended on the batch, drafts would change tokens."""
        self.staging = BlockStaging(self.pool, self.storage)
        self.num_drafted_tokens = 0
        """Tokens that were computed as drafts."""
        self.num_accepted_tokens = 0
        """Drafted tokens that were drawn, too."""
        min_tokens = max(1, model.layout.scan_chunk_tokens)
        self._quarantine = Quarantine(WAITING_STEPS * settings.max_step_tokens, min_tokens)
        self._judges_failures = quarantine
        self._num_mask_threads = settings.num_threads - 1
        """How many threads compute masks beside the step's own."""
        self._mask_threads = ThreadPoolExecutor(max(1, self._num_mask_threads), "masks")  # starts none by itself
        self._rate, self._pace = PrefillRate(), StepPace()
        self.slow_products: list[str] = []
        """Matrix shapes on which the native kernels are slower than torch, as text."""
        self._plan: Plan = []
        """The step that was begun."""
        self._vectors: list[tuple[Sequence, NDArray[np.float32]]] = []
        """The vectors that the last step has computed. They are in their sequences once it has succeeded."""
        self.step_shares: list[tuple[Sequence, Stage, float]] = []
        """What each row of the last finished step took of it; all together 1."""
        self._step_begun_s = 0.0
        self._last_step_ended_s, self._num_last_sampled = 0.0, 0
        """When the last step ended, and how many tokens it sampled."""
        self._last_sampled: set[Sequence] = set()
        """The sequences that these are of."""

    # Load

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's KV in all layers: the length of views and payloads."""
        return self.model.layout.block_bytes

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are not admitted yet, or preempted."""
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Number of admitted sequences that are not done."""
        return self.scheduler.num_running

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return self.pool.num_free_blocks

    def free_capacity(self, priority_class: PriorityClass = "batch", num_tokens: int = 1) -> int:
        """Return how many more sequences of a class, of `num_tokens` tokens each, would run soon if they were added.

        Limited by batch size and blocks. Batch sequences make way for interactive ones, and beside them count only as
        far as they would not pause. The capacity is 0 while sequences of the class wait for blocks.
        """
        num_slots = max(0, self.settings.max_batch - self.scheduler.count_sequences_ahead(priority_class))
        if priority_class == "batch":
            num_slots = int(min(num_slots, self.scheduler.count_batch_slots_beside_interactive()))
        return self.scheduler.count_fitting_sequences(CLASSES.index(priority_class), num_tokens, num_slots)

    def has_work(self) -> bool:
        """Return whether any sequence is running or waiting."""
        return self.num_running + self.num_waiting > 0

    # Sequences

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence. Raises what `check_sequence` raises."""
        if self.model.stage_forms is not None and self._prompt_runner is None:
            assert seq.max_new_tokens == 1, "this engine has only the weights that compute prompts"
        self.check_sequence(seq)
        seq.since_s = seq.since_s or now_s()
        self.scheduler.add_sequence(seq)

    def check_sequence(self, seq: Sequence, max_new_tokens: int = 0) -> None:
        """Raise `PromptTooLong` for a sequence that can never run, `InvalidRequest` for unknown token ids.

        `max_new_tokens` replaces the sequence's own limit if it is higher.
        """
        check_sequence(seq, self.model, self.model.layout, self.pool.num_blocks, max_new_tokens)

    def remove_sequence(self, seq: Sequence) -> None:
        """Remove a sequence, finished or not, and free its blocks. A second call does nothing."""
        self.scheduler.remove_sequence(seq)

    def count_completed_blocks(self, seq: Sequence) -> int:
        """Return how many full blocks of the sequence are computed. A preempted sequence has none."""
        return seq.num_computed_tokens // self.settings.block_size

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """Add keys of further full blocks of the sequence, output tokens included.

        Other sequences find a block by its key once it is computed, and so does this one after a preemption.
        """
        self.scheduler.add_block_keys(seq, keys)

    def retain_blocks(self, keys: list[bytes], seconds: float) -> None:
        """Let blocks that the pool holds, and states behind them, outlive others for so long; 0 ends it."""
        self.pool.retain_blocks(keys, seconds)
        if self.states is not None:
            self.states.pool.retain_blocks(map(derive_state_hash, keys), seconds)

    # KV from and to the stores (see `staging`), on the engine's thread

    def stage_blocks(self, keys: list[bytes], priority_class: PriorityClass = "interactive") -> StagedPoolBlocks | None:
        """Stage blocks for the KV of `keys`, to be filled while steps run.

        Keeps enough blocks free for the waiting sequences of this and higher classes, plus one per growing sequence.
        Returns None if that leaves too few blocks now but more will be free soon, or if the first missing block is
        being staged already: call again later. If waiting is no use, fewer blocks are staged than keys are missing.
        """
        rank, num_cached = CLASSES.index(priority_class), self.pool.count_cached_prefix(keys)
        if self.staging.is_staging(keys[num_cached : num_cached + 1]):
            return None
        num_reserved = self.scheduler.count_reserved_blocks(rank)
        num_available = self.pool.count_free_blocks_besides(keys[:num_cached]) - num_reserved
        may_wait = self.staging.has_open or self.scheduler.runs_only(rank)
        if len(keys) - num_cached > num_available and may_wait:
            return None
        return self.staging.stage_blocks(keys, num_reserved)

    def commit_staged_blocks(self, staged: StagedPoolBlocks, num_filled: int) -> None:
        """Register the first `num_filled` staged blocks. Nothing may write to the views any more.

        A sequence that is added from now on finds these blocks until they are evicted. A second call does nothing.
        """
        self.staging.commit_staged_blocks(staged, num_filled)

    def pin_blocks(self, seq: Sequence, indices: Items[int]) -> list[PinnedPoolBlock]:
        """Pin these blocks of the sequence for reading while steps run. Rows that are not computed are zero.

        The payloads do not change until the blocks are unpinned, whatever becomes of the sequence.
        """
        size = self.settings.block_size
        return [
            self.staging.pin_block(seq.block_table[index], seq.count_computed_rows(index, size)) for index in indices
        ]

    def unpin_block(self, pinned: PinnedPoolBlock) -> None:
        """Unpin a block, or a part of a state, that is not read any more. A second call does nothing."""
        pinned.unpin()

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""
        return self._rate.tokens_per_s

    def report_speed(self) -> WorkerSpeed | None:
        """Return how long prompts and answers take now; None where that is not known. Any thread may call it."""
        rows = [seq for seq in list(self.scheduler.running) if seq.num_pending_tokens == 1]
        if (cost := self.scheduler.cost) is None:
            return self._rate.describe_speed(len(rows))
        # Without steps a slow worker counts as fast again after a while, and what is sent there then tells.
        kept = 0.5 ** ((time.perf_counter() - self._last_step_ended_s) / SLOW_HALF_LIFE_S)
        return cost.describe_speed(rows, self.settings.max_step_tokens, 1 + kept * (self._pace.slowdown - 1))

    def measure_speed(self) -> None:
        """Measure the speed of prefill and the cost of steps with a few prompts and steps.

        A decode worker has to choose between fetching and computing KV from its first request on.
        """
        capacity = self.pool.num_blocks * self.settings.block_size
        max_tokens = min(self.settings.max_step_tokens, self.model.context_length - 1, capacity)
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(self.model.vocab_size, (max(1, max_tokens),), generator=generator).tolist()
        self._rate = measure_prefill_rate(lambda num_tokens: self._time_prompt(tokens[:num_tokens]), len(tokens))
        rows = min(TRIAL_DECODES, self.settings.max_batch)
        chunk, size = TRIAL_CHUNK_TOKENS[-1], self.settings.block_size
        context = min(TRIAL_CONTEXT_TOKENS, self.model.context_length - 1, capacity - 2 * size) - chunk
        context = min(context, capacity // rows - size)
        if rows > 1 and context > 0 and len(tokens) >= chunk:  # else there is little to share
            self.scheduler.cost = measure_cost(partial(self._time_step, tokens), rows, context)
        self._num_last_sampled = 0

    @property
    def measured_speed(self) -> dict[str, Any]:
        """The result of `measure_speed` as JSON, for an engine of the same model and settings on this machine."""
        cost = self.scheduler.cost
        return {
            "tokens_per_s": self._rate.tokens_per_s,
            "cost": None if cost is None else {**asdict(cost), "outside_s": None},
        }

    def use_measured_speed(self, speed: dict[str, Any]) -> None:
        """Take what `measure_speed` found before. The rate is corrected as prompts are computed."""
        self._rate = PrefillRate()
        seconds = WARM_UP_TOKENS / speed["tokens_per_s"]
        self._rate.record_step(WARM_UP_TOKENS, WARM_UP_TOKENS, seconds)
        if speed["cost"] is not None:
            self.scheduler.cost = StepCost(**{**speed["cost"], "outside_s": math.inf})

    def _time_prompt(self, tokens: list[int]) -> float:
        """Return the seconds for a prompt that is removed afterwards."""
        started_s = time.perf_counter()
        seq = Sequence("measure", tokens, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=1)
        self.add_sequence(seq)
        while self.has_work():
            self.step()
        self.remove_sequence(seq)
        return time.perf_counter() - started_s

    @torch.inference_mode()
    def _time_step(self, tokens: list[int], trial: TrialStep) -> float:
        """Return the seconds for a trial step over blocks of arbitrary content.

        On a CPU this is processor time, so that other processes do not matter.
        """
        on_cpu = self.model.device.type == "cpu"
        clock, threads = (time.process_time, self.settings.num_threads) if on_cpu else (time.perf_counter, 1)
        plan: Plan = []
        chunk = (trial.prompt_context_tokens, trial.prompt_tokens)
        for num_before, num_tokens in [(trial.context_tokens, 1)] * trial.num_decodes + [chunk] * (chunk[1] > 0):
            ids = [tokens[at % len(tokens)] for at in range(num_before + num_tokens)]
            # A row that is computed behind other tokens is an answer's.
            num_prompt = num_before if num_before and num_tokens == 1 else len(ids)
            blocks = self.pool.allocate_blocks(-(-len(ids) // self.settings.block_size))
            seq = make_trial_sequence(ids[:num_prompt], ids[num_prompt:], blocks=blocks, num_computed=num_before)
            if self.states is not None:
                self.states.take_row(seq)
            plan.append((seq, num_tokens))
        started_s = clock()
        self._run_plan(plan)
        elapsed_s = (clock() - started_s) / threads
        for seq, _ in plan:
            self.pool.free_blocks(seq.block_table)
            if self.states is not None:
                self.states.free_row(seq)
        return elapsed_s

    # The step

    def step(self) -> list[Sampled]:
        """Run one batch. Returns and raises what `finish_step` does, and nothing if nothing could run."""
        return self.finish_step() if self.begin_step() else []

    def begin_step(self) -> bool:
        """Plan one batch: a token for each decoding sequence or several, and parts of prompts.

        Returns whether there is anything to compute. If not, there is no work, or it waits for blocks. Sequences may be
        removed before the step is finished.
        """
        self._step_begun_s = time.perf_counter()
        token_budget = self.scheduler.choose_budget(self._usual_step_tokens, self._rate.tokens_per_s or 0.0, now_s())
        token_budget = min(token_budget, self._quarantine.max_tokens)
        self._plan = self.scheduler.schedule(token_budget, self.settings.max_batch)
        self._record_time_outside()
        return bool(self._plan)

    @torch.inference_mode()
    def finish_step(self) -> list[Sampled]:
        """Compute the batch that was planned, and sample.

        Returns the sampled tokens, those of a sequence in their order. There are none if no prompt was finished, or if
        the step failed: then the next steps look for the sequence at fault, and all sequences are as before the failed
        step. Raises `SequenceFailed` once it is known; the caller removes that sequence.
        """
        plan = [(seq, num) for seq, num in self._plan if seq.state is State.RUNNING]
        self._plan, self.step_shares = [], []
        if not plan:
            return []
        if self.speculates and any(seq.num_output_tokens for seq, _ in plan):
            draft_tokens(plan, self.scheduler, self._usual_step_tokens)
        self._vectors = []
        before, do_answers_wait = [seq.num_computed_tokens for seq, _ in plan], self._do_answers_wait(plan)
        self.step_shares, expected_s = share_step(self.scheduler.cost, plan)
        try:
            drawn = self._run_plan(plan)
        except BaseException as error:
            self._undo_step(plan, before)
            if not self._judges_failures or not is_failure(error) or isinstance(error, SequenceFailed):
                raise
            self._quarantine.record_failure([(seq, num + len(seq.draft)) for seq, num in plan], error)
            return []
        finally:
            for seq, _ in plan:
                self.num_drafted_tokens += len(seq.draft)
                seq.draft = []
        sampled = self._append_tokens(drawn)
        for seq, vector in self._vectors:
            seq.set_vector(vector)
        ended_s = time.perf_counter()
        if expected_s and do_answers_wait:
            self.scheduler.gap_pace.record_step(ended_s - self._last_step_ended_s, expected_s)
        self._last_step_ended_s, self._num_last_sampled = ended_s, len(sampled)
        self._last_sampled = {one.seq for one in sampled}
        self._quarantine.record_success()
        for (seq, _), num_computed_tokens in zip(plan, before, strict=True):
            self.scheduler.register_blocks(seq, num_computed_tokens)
        seconds = time.perf_counter() - self._step_begun_s
        self._rate.record_step(sum(num for _, num in plan if num > 1), sum(num for _, num in plan), seconds)
        if expected_s:
            self._pace.record_step(seconds, expected_s)
        return sampled

    def _do_answers_wait(self, plan: Plan) -> bool:
        """Return whether interactive answers that the last step had a token of wait for prompts in this one."""
        has_row = any(seq.priority_class == "interactive" and seq in self._last_sampled for seq, _ in plan)
        return has_row and any(seq.num_pending_tokens > 1 for seq, _ in plan)

    def _undo_step(self, plan: Plan, before: list[int]) -> None:
        """Let the sequences of a step have computed the tokens that they had before."""
        for (seq, _), num_computed_tokens in zip(plan, before, strict=True):
            seq.num_computed_tokens = num_computed_tokens
            if self.states is not None:  # a state may have read tokens in some layers and not in others
                self.scheduler.preempt_sequence(seq)
        if self.storage.states is not None:
            self.storage.states.guesses = []

    @property
    def max_step_tokens(self) -> int:
        """How many tokens a step has at most now, beside those that decode, while many prompt tokens wait."""
        return self.scheduler.find_max_tokens(self.settings.max_step_tokens, self._rate.tokens_per_s or 0.0)

    @property
    def _usual_step_tokens(self) -> int:
        """How many tokens a step has as a rule: fewer after one that took too much memory."""
        return min(self.settings.max_step_tokens, self._quarantine.max_tokens)

    def _append_tokens(self, drawn: list[Drawn]) -> list[Sampled]:
        """Give the sequences of a step the tokens that were drawn."""
        sampled = []
        for seq, token_id, logprobs in drawn:
            if seq.num_pending_tokens:  # the token before this one was drafted and drawn: the step has computed its KV
                seq.num_computed_tokens += 1
                self.num_accepted_tokens += 1
                self.scheduler.charge_token(seq)
            seq.append_token(token_id)
            sampled.append(Sampled(seq, token_id, logprobs, seq.is_grammar_ended))
        if self.storage.states is not None:
            self.storage.states.read_right_guesses()
        return sampled

    def _record_time_outside(self) -> None:
        """Record the time between two steps, which the tokens of the first one caused."""
        if self._num_last_sampled and self.scheduler.cost is not None:
            self.scheduler.cost.record_outside(time.perf_counter() - self._last_step_ended_s, self._num_last_sampled)
        self._num_last_sampled = 0

    def _run_plan(self, plan: Plan) -> list[Drawn]:
        """Compute the planned tokens and the drafts, and sample. The tokens are not in their sequences yet."""
        self._write_tails(plan)
        if self._prompt_runner is None:
            return self._run_batch(plan, self.runner)
        # A sequence that was preempted may compute the end of its prompt and its output in one step: in this order.
        prompts = [(seq, min(num, left)) for seq, num in plan if (left := count_prompt_tokens_left(seq)) > 0]
        drawn = self._run_batch(prompts, self._prompt_runner) if prompts else []
        num_done = dict(prompts)
        answers = [(seq, rest) for seq, num in plan if (rest := num - num_done.get(seq, 0)) > 0]
        return drawn + self._run_batch(answers, self.runner) if answers else drawn

    def _run_batch(self, plan: Plan, runner: ModelRunner) -> list[Drawn]:
        """Compute the tokens of a plan and the drafts with the weights of one runner, and sample."""
        batch, logits = self._compute_plan(plan, runner)
        for seq, num_tokens in plan:
            seq.num_computed_tokens += num_tokens
        self._collect_prompt_logprobs(batch, logits)
        self._vectors += self._read_vectors(batch, runner)
        return self._sample(batch, logits)

    def _read_vectors(self, batch: StepBatch, runner: ModelRunner) -> list[tuple[Sequence, NDArray[np.float32]]]:
        """Return the vectors of the prompts without output that the step has computed. Raises `SequenceFailed`."""
        found, row = [], 0
        for seq in batch.sampled_sequences if batch.keeps_hidden else ():
            if seq.is_pooled:
                vector: NDArray[np.float32] = runner.hidden[row].float().cpu().numpy()
                if not np.isfinite(vector).all():
                    raise SequenceFailed(seq, ModelError(NOT_FINITE))
                found.append((seq, vector))
            row += 1 + len(seq.draft)
        return found

    def _write_tails(self, plan: Plan) -> None:
        """Write the partial blocks that sequences were handed over with."""
        for seq, _ in plan:
            if seq.tail_payload is not None:
                self.storage.write_block(
                    seq.block_table[seq.num_prompt_tokens // self.settings.block_size], seq.tail_payload
                )
                seq.tail_payload = None

    def _compute_plan(self, plan: Plan, runner: ModelRunner) -> tuple[StepBatch, Tensor]:
        """Compute the tokens of a plan, and keep the snapshots of states that fall due in it.

        Returns the batch, and what `run_step` does.
        """
        batch = StepBatch(plan, self.settings.block_size, self.model.device)
        if self.states is None:
            return batch, runner.run_step(batch)
        for seq, num_tokens in batch.plan:
            batch.snapshot_rows |= self.states.reserve_snapshots(seq, num_tokens)
        is_done = False
        try:
            logits = runner.run_step(batch)
            is_done = True
        finally:
            self.states.commit_snapshots(batch.snapshot_rows, is_done=is_done)
        return batch, logits

    def _collect_prompt_logprobs(self, batch: StepBatch, logits: Tensor) -> None:
        """Give sequences the log probabilities of the part of their prompts that the step has computed."""
        first = batch.num_sampled_rows
        for seq, positions in batch.prompt_rows:
            assert seq.num_prompt_logprobs is not None
            for begin in range(0, len(positions), PROMPT_LOGPROB_ROWS):
                part = positions[begin : begin + PROMPT_LOGPROB_ROWS]
                tokens = [seq.token_ids[position + 1] for position in part]
                rows = logits[first : first + len(part)]
                seq.prompt_logprobs += compute_row_logprobs(rows, [seq.num_prompt_logprobs] * len(part), tokens)
                first += len(part)

    def _sample(self, batch: StepBatch, logits: Tensor) -> list[Drawn]:
        """Sample the tokens of the step; while a device computes its logits, the next step is prepared.

        Every position of a draft is drawn as if the tokens before it had come. The draws count as far as they have.
        Raises `SequenceFailed` if a sequence cannot go on in its grammar, or its logits are no numbers.
        """
        seqs = [seq for seq in batch.sampled_sequences if not seq.is_pooled]
        if not seqs:
            return []
        masks = dict(zip(seqs, self._compute_batch_masks(seqs), strict=True))
        params: list[SamplingParams] = []
        rows: list[int] = []
        row = 0
        for seq in batch.sampled_sequences:
            seq_masks = masks.get(seq, [])
            rows += range(row, row + len(seq_masks))
            row += 1 + len(seq.draft)
            params += make_sampling_params(seq, seq_masks, self._find_end_token_ids(seq.sampling))
        if len(logits) != len(rows):
            logits = logits[: len(rows)] if len(rows) == row else logits[rows]
        broken = find_broken_rows(logits)
        tokens = sample_tokens(logits, params)
        logprobs = compute_logprobs(logits, params, tokens)
        drawn: list[Drawn] = []
        row = 0
        for seq, seq_masks in masks.items():
            for number in range(len(seq_masks)):
                if row + number in broken:
                    raise SequenceFailed(seq, ModelError(NOT_FINITE))
                drawn.append((seq, tokens[row + number], logprobs[row + number]))
                if seq.draft[number : number + 1] != [tokens[row + number]]:
                    break
            row += len(seq_masks)
        return drawn

    def _compute_batch_masks(self, seqs: list[Sequence]) -> list[list[NDArray[np.int32] | None]]:
        """Return the masks of each sequence. Threads share the work, as llguidance computes masks without the GIL.

        Raises `SequenceFailed` for a sequence that cannot go on in its grammar.
        """
        num_others = min(self._num_mask_threads, sum(seq.grammar is not None for seq in seqs) - 1)
        if num_others < 1:
            return [seq.compute_masks() for seq in seqs]
        found: dict[int, list[NDArray[np.int32] | None]] = {}
        waiting = iter(range(len(seqs)))

        def compute_next_masks() -> None:
            for index in waiting:
                found[index] = seqs[index].compute_masks()

        others = [self._mask_threads.submit(compute_next_masks) for _ in range(num_others)]
        try:
            compute_next_masks()
        finally:
            wait(others)  # no thread may use a sequence when the step is over
        for other in others:
            other.result()
        return [found[index] for index in range(len(seqs))]

    def _find_end_token_ids(self, sampling: Sampling) -> frozenset[int]:
        """Return the tokens that end an answer before it has the `min_tokens` that it must have, if it must."""
        return self.model.eos_token_ids | {*sampling.stop_token_ids} if sampling.min_tokens else frozenset()


def count_prompt_tokens_left(seq: Sequence) -> int:
    """Return how many tokens of the sequence's prompt are still to be computed; 0 or less if none."""
    return seq.num_prompt_tokens - seq.num_computed_tokens
