"""Choose the sequences of the next step and how many tokens each computes. Plain Python: no tensors, I/O or clock.

Order. Running sequences are ordered by priority (class), then by arrival. Within a class, waiting sequences are
admitted in an order that is fair between tenants (`fairness`), preempted ones first.

Prompts. The first one that is too long for what is left of a step shares that with prompts that need at most half as
many tokens as it does itself: they get up to half of it, the shortest first, so that a short prompt does not wait for a
long one. Waiting ones are admitted for this in their order. They pass longer ones of their own tenant as long as a
place in the batch is left for those, but none of another tenant: that would not be fair.

Blocks. A sequence is admitted with blocks for the tokens it has, on two conditions. One more block is left for each
running sequence that still grows, so that a new sequence is not preempted at once, and the blocks will do for what is
expected of all (`BlockTables`). It gets further blocks as it grows. When there are none, the last sequence in order is
preempted: its blocks are freed, its tokens are kept, and KV that is not in the pool any more is computed again later.
If the growing sequence is itself the last one, it pauses and keeps its blocks. So the first in order always makes
progress, and all end.

Backfill. If the head of the queue does not fit, smaller sequences behind it run, and are preempted as soon as that lets
the head in. So it starts no later than it would without them. In the same way all batch sequences make way for an
interactive one.

Aging. Every `AGING_STEPS` steps the oldest batch sequence that computed nothing since the last time is promoted: it
counts as interactive until it is done. There is one such sequence at a time, so a backlog of batch work takes one slot
of the interactive class, not all.

Batch work. In a step that interactive sequences take part in, batch sequences (the promoted one too) get a small share
of the time (`batch_budget`). Those beyond it pause and keep their blocks.

Gaps. Beside decoding interactive sequences a step has as many prompt tokens as it computes within the longest gap that
their answers may have (`choose_budget`), by the measured cost of steps. Where a prompt would then have its first token
too late, it has as many more as it needs, up to what it has without them.

Long queues. While more prompt tokens wait than `WAITING_STEPS` steps compute, steps without such sequences are larger:
prompts are through sooner, and batch answers wait longer for each token, `MAX_STEP_S` at most.

Suspects. They are admitted like others and then computed alone, one at a time, in every other step as long as other
sequences want the steps between.
"""

import math
from bisect import insort
from collections import Counter
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.config.settings import PACED_SHARE, SloSettings
from penstock.engine.memory.pool import BlockPool
from penstock.engine.memory.tables import BlockTables
from penstock.engine.scheduling.batch_budget import FORCED_BATCH_PERIOD_STEPS, MAX_BATCH_SHARE, BatchBudget
from penstock.engine.scheduling.cost import StepCost, StepPace
from penstock.engine.scheduling.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairQueue
from penstock.engine.sequence import Plan, Sequence, State
from penstock.names import CLASSES, PriorityClass

if TYPE_CHECKING:  # it imports torch, which is not needed to schedule
    from penstock.engine.memory.state_rows import StateRows


AGING_STEPS = 64
WAITING_STEPS = 4
"""A step is larger than usual while more prompt tokens wait than so many steps compute: by up to so many times."""
MAX_STEP_S = 0.2
"""How long a step may take that is larger than usual, where no longest gap bounds it."""
MAX_PASSED_SEQUENCES = 8
"""Waiting sequences of a class that backfilling may pass over in one step."""

_by_scheduling_order = attrgetter("scheduling_order")


class _StepPlan:
    """The step as planned so far, and what is left of its token budget and its batch budget."""

    def __init__(self, running: list[Sequence], token_budget: int, batch_budget: BatchBudget) -> None:
        self.num_tokens_by_sequence: dict[Sequence, int] = {}
        self.budget = token_budget
        self.batch_budget = batch_budget
        self.decodes = {seq for seq in running if seq.num_pending_tokens == 1}
        """Decoding sequences that are not planned yet."""
        self.long_prompt: Sequence | None = None
        """The first prompt that is too long for the step. It is planned last, with what shorter ones leave."""
        self._num_kept_tokens = 0
        """Tokens of the budget that are kept for the long prompt."""

    @property
    def prompt_budget(self) -> int:
        """Tokens that prompts may use, besides one for each decoding sequence that is not planned yet."""
        return self.budget - len(self.decodes) - self._num_kept_tokens

    def keep_for_long_prompt(self, seq: Sequence) -> None:
        """Let shorter prompts have half of the prompt budget, and this one the rest."""
        self.long_prompt, self._num_kept_tokens = seq, self.prompt_budget - self.prompt_budget // 2

    def release_long_prompt(self) -> Sequence | None:
        """Return the long prompt if there is one; the whole budget is free from now on."""
        seq, self.long_prompt, self._num_kept_tokens = self.long_prompt, None, 0
        return seq

    def is_too_long(self, num_tokens: int) -> bool:
        """Return whether a prompt of so many tokens must not share the step with the long prompt."""
        return self.long_prompt is not None and 2 * num_tokens > self.long_prompt.num_pending_tokens

    def schedule_tokens(self, seq: Sequence, num_tokens: int) -> None:
        self.num_tokens_by_sequence[seq] = num_tokens
        self.budget -= num_tokens
        self.batch_budget.add_sequence(seq, num_tokens)

    def unschedule(self, seq: Sequence) -> None:
        """Take a preempted sequence out of the step, whether it was planned or not."""
        self.budget += self.num_tokens_by_sequence.pop(seq, 0)
        if seq is self.long_prompt:
            self.release_long_prompt()
        self.decodes.discard(seq)
        self.batch_budget.remove_sequence(seq)


class Scheduler:
    """The waiting and the running sequences of one pool."""

    def __init__(self, pool: BlockPool, states: "StateRows | None" = None) -> None:
        self.pool = pool
        self._states = states
        """The allocator of recurrent-state rows. None if the model has no recurrent layers."""
        self.cost: StepCost | None = None
        """The measured cost of steps. None if it was not measured: batch work is not limited then, and all steps have
        their usual size."""
        self.slo = SloSettings()
        """The longest gap of interactive answers, and the longest time to their first token."""
        self.gap_pace = StepPace()
        """How much longer than by the cost of steps interactive answers wait for a token beside prompts."""
        self.running: list[Sequence] = []
        """In scheduling order: the last is preempted first. Sequences that are done leave with the next step."""
        self.num_preemptions = 0
        self._queues = [FairQueue() for _ in CLASSES]
        self._tables = BlockTables(pool, states)
        self._promoted: Sequence | None = None
        self._num_added = 0
        self._num_steps = 0

    def count_sequences_ahead(self, priority_class: PriorityClass) -> int:
        """Return how many running and waiting sequences a new one of the class would not preempt."""
        alive = [seq for seq in self.running if seq.state is State.RUNNING]
        return sum(
            CLASSES.index(seq.priority_class) <= CLASSES.index(priority_class) for seq in chain(alive, *self._queues)
        )

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are not admitted yet, or preempted."""
        return sum(map(len, self._queues))

    @property
    def num_running(self) -> int:
        """Number of admitted sequences that are not done."""
        return sum(seq.state is State.RUNNING for seq in self.running)

    # Sequences come and go

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a new sequence behind the others of its class and tenant."""
        assert seq.state is State.WAITING
        self._num_added += 1
        seq.arrival_number, seq.last_scheduled_step = self._num_added, self._num_steps
        self._queues[seq.priority].push(seq)

    def remove_sequence(self, seq: Sequence) -> None:
        """Remove a sequence in any state and free its blocks. A second call does nothing."""
        if seq.state is State.WAITING and seq in self._queues[seq.priority]:
            self._queues[seq.priority].remove(seq)
        if seq in self.running:
            self._stop_running(seq)
        if seq.state is not State.DONE:
            if seq.state is State.RUNNING:
                self._tables.growth.record_end()
            seq.move_to(State.DONE)
        self.pool.free_blocks(seq.block_table)
        seq.block_table = []
        seq.tail_payload = None

    # Blocks and their keys

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """Add the keys of further full blocks. Blocks that are computed can be shared at once, others when they are."""
        first = len(seq.block_keys) * self.pool.block_size
        assert (len(seq.block_keys) + len(keys)) * self.pool.block_size <= len(seq.token_ids), f"{seq}: too many keys"
        seq.block_keys += keys
        self.register_blocks(seq, first)

    def register_blocks(self, seq: Sequence, first_token: int) -> None:
        """Register the sequence's full blocks that have a key, from the one that holds token `first_token` on."""
        self._tables.register_blocks(seq, first_token)

    def count_reserved_blocks(self, priority: int) -> int:
        """Return how many blocks a new sequence of this priority must leave to others.

        These are the blocks that waiting sequences of this and higher priorities need at admission, and one for each
        running sequence that may grow.
        """
        return self._tables.count_growing(self.running) + self._count_admission_blocks(priority)

    def _count_admission_blocks(self, priority: int) -> int:
        waiting = chain(*self._queues[: priority + 1])
        return sum(map(self._tables.count_blocks_at_admission, waiting))

    def count_batch_slots_beside_interactive(self) -> float:
        """Return how many more batch sequences would run and not pause beside the interactive ones.

        One more than the batch budget allows, so that one is always ready; infinite without interactive sequences.
        """
        everybody = chain(self.running, *self._queues)
        num_batch = sum(seq.priority_class == "batch" and seq.state is not State.DONE for seq in everybody)
        return max(0, 1 + BatchBudget(self.cost, self.running).count_affordable_rows() - num_batch)

    def count_fitting_sequences(self, priority: int, num_tokens: int, max_sequences: int) -> int:
        """Return for how many more sequences of a priority there are blocks, at `num_tokens` tokens each, and no more
        than `max_sequences`.

        At least 1 while any block is left over, because the sequence may share cached blocks; 0 if none is.
        """
        ahead = [seq for seq in self.running if seq.priority <= priority and seq.state is State.RUNNING]
        waiting = list(chain(*self._queues[: priority + 1]))
        num_displaced = sum(len(seq.block_table) for seq in self.running if seq.priority > priority)
        num_left = self.pool.num_free_blocks + num_displaced - self._count_admission_blocks(priority)
        num_each = -(-num_tokens // self.pool.block_size)
        if num_left - self._tables.bound_growth([*self.running, *waiting]) >= max_sequences * num_each:
            return max_sequences
        num_growth = max(self._tables.count_growing(self.running), self._tables.estimate_growth([*ahead, *waiting]))
        num_available = num_left - num_growth
        if num_available <= 0 and self.has_sequences(priority):
            return 0
        return min(max_sequences, max(1, num_available // num_each))

    def has_sequences(self, priority: int) -> bool:
        """Return whether there is any sequence of this or a higher priority."""
        alive = (seq.priority for seq in self.running if seq.state is State.RUNNING)
        return any(map(len, self._queues[: priority + 1])) or any(one <= priority for one in alive)

    def runs_only(self, priority: int) -> bool:
        """Return whether only sequences of this and higher priorities run: none of them can be preempted for it."""
        running = [seq for seq in self.running if seq.state is State.RUNNING]
        return bool(running or self.num_waiting) and all(seq.priority <= priority for seq in running)

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.is_backfilled = False
        self._tables.stop_computing(seq)
        if self._states is not None:
            self._states.free_row(seq)

    def _preempt(self, seq: Sequence, step: _StepPlan) -> None:
        step.unschedule(seq)
        self.preempt_sequence(seq)

    def preempt_sequence(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence that is in no step. It waits, and is computed again."""
        self._stop_running(seq)
        self.pool.free_blocks(seq.block_table)
        seq.preempt()
        self.num_preemptions += 1
        self._queues[seq.priority].push_front(seq)

    # The step

    def find_max_tokens(self, usual: int, tokens_per_s: float = math.inf) -> int:
        """Return how many tokens a step has at most now whose usual number is `usual`: more while many wait.

        By the measured cost, beside all that decode, and by how fast prompts were computed lately, if that is given:
        that has the time for what came before them. Where the cost was not measured all steps have their usual size.
        """
        if self.cost is None:
            return usual
        rows_s = sum(self.cost.row_seconds(seq) for seq in self.running if seq.num_pending_tokens == 1)
        left_s = MAX_STEP_S - self.cost.fixed_s - self.cost.chunk_s - rows_s
        num_in_time = min(self.cost.count_chunk_tokens(left_s, 0), tokens_per_s * MAX_STEP_S)
        return max(usual, int(min(num_in_time, WAITING_STEPS * usual)))

    def choose_budget(self, usual: int, tokens_per_s: float = math.inf, at_s: float = 0.0) -> int:
        """Return how many tokens the next step may have, which begins at `at_s` by the clock of `Sequence.since_s`.

        It is `usual` as a rule, or the `WAITING_STEPS`th part of the prompt tokens that are still to be computed, if
        that is more, and `find_max_tokens` at most. Beside interactive answers it is what the longest gap allows, or
        what first tokens need that would be late by that. Only the highest class that has sequences counts.
        """
        most = usual * WAITING_STEPS
        prompts = self._list_prompts(most)
        share = sum(num_left for _, num_left in prompts) // WAITING_STEPS
        budget = usual if share <= usual else max(usual, min(share, self.find_max_tokens(usual, tokens_per_s)))
        decodes = [seq for seq in self.running if seq.num_pending_tokens == 1 and seq.state is State.RUNNING]
        rows = [seq for seq in decodes if seq.priority_class == "interactive"]
        if self.cost is None or not rows or not prompts:
            return budget
        seconds = [self.cost.row_seconds(seq) for seq in rows]
        step_s = self.cost.fixed_s + self.cost.chunk_s
        if step_s + max(seconds) > self.max_gap_s:  # one answer alone takes longer: no prompt can be blamed
            return budget
        step_s += sum(seconds)
        num_in_gap = self._count_within_gap(self.cost, step_s, prompts, most)
        num_in_time = min(self._count_in_time(self.cost, step_s, prompts, at_s), budget - len(decodes))
        return len(decodes) + max(num_in_gap, math.ceil(num_in_time))

    def _list_prompts(self, num_certain: int) -> Plan:
        """Return the prompts of the highest class that has sequences, with how many tokens of each are to be computed:
        fewer than all, where more than `num_certain` are left, as what the pool has of those that wait is not computed.
        """
        alive = [seq for seq in chain(self.running, *self._queues) if seq.state is not State.DONE]
        first = min((seq.priority for seq in alive), default=0)
        prompts = [(seq, seq.num_pending_tokens) for seq in alive if seq.priority == first]
        prompts = [(seq, num_left) for seq, num_left in prompts if num_left > 1]
        if sum(num_left for _, num_left in prompts) <= num_certain:
            return prompts
        count = self._tables.count_tokens_to_compute
        return [(seq, count(seq) if seq.state is State.WAITING else num_left) for seq, num_left in prompts]

    def _count_within_gap(self, cost: StepCost, step_s: float, prompts: Plan, most: int) -> int:
        """Return how many tokens of the prompts, `most` of them, a step computes within the longest gap that would take
        `step_s` without them.
        """
        num_tokens, max_s = 0, self.max_gap_s
        for seq, num_left in prompts:
            num_fitting = cost.count_chunk_tokens(max_s - step_s, seq.num_computed_tokens)
            num_fitting = min(num_left, most - num_tokens, num_fitting)
            step_s += cost.chunk_seconds(num_fitting, seq.num_computed_tokens)
            num_tokens += num_fitting
        return num_tokens

    def _count_in_time(self, cost: StepCost, step_s: float, prompts: Plan, at_s: float) -> float:
        """Return how many prompt tokens each step needs, so that every first token is in time if the prompts are
        computed one after the other in steps that would take `step_s` without them; infinite where none is enough.

        Of `n` tokens a step and `N` up to a prompt's end there are `N / n` steps, which take `N / n * step_s` and what
        the tokens themselves take.
        """
        most, num_tokens, tokens_s = 0.0, 0, 0.0
        for seq, num_left in prompts:
            num_tokens += num_left
            tokens_s += cost.chunk_seconds(num_left, seq.num_computed_tokens)
            due_s = seq.since_s + PACED_SHARE * self.slo.interactive_ttft_s
            left_s = (due_s - at_s) / self.gap_pace.high_slowdown - tokens_s
            most = max(most, num_tokens * step_s / left_s if left_s > 0 else math.inf)
        return most

    @property
    def max_gap_s(self) -> float:
        """How long a step with prompts may take by its cost beside interactive answers, so that their gaps stay within
        the longest one: less by what batch work may add, and while steps take longer than they cost.
        """
        has_batch = any(seq.priority_class == "batch" and seq.state is not State.DONE for seq in self.running)
        return self.slo.interactive_gap_s / self.gap_pace.high_slowdown / (1 + MAX_BATCH_SHARE * has_batch)

    def schedule(self, token_budget: int, max_batch: int) -> Plan:
        """Plan the next step: for each class the running sequences, then the waiting ones that can be admitted.

        A step has at most `token_budget` tokens. Each decoding sequence gets one before prompts get any. At most
        `max_batch` sequences run.
        """
        self._num_steps += 1
        for seq in [seq for seq in self.running if seq.state is State.DONE]:
            self._stop_running(seq)
        if self._num_steps % AGING_STEPS == 0:
            self._promote_starving()
        suspects = [seq for seq in self.running if seq.is_suspect]
        plan = {} if self._num_steps % 2 else self._schedule_alone(suspects, token_budget)
        plan = plan or self._schedule_all(token_budget, max_batch, self._open_budget())
        plan = (
            plan
            or self._schedule_all(token_budget, max_batch, BatchBudget(None, ()))
            # Suspects, and prompts for which nothing is left beside decoding sequences that find no block.
            or self._schedule_alone(list(self.running), token_budget)
        )
        if self._states is not None:  # a step may be larger than its budget by the rest of a scan chunk
            plan = {seq: self._complete_scan_chunk(seq, num_tokens) for seq, num_tokens in plan.items()}
        for seq, num_tokens in plan.items():
            seq.last_scheduled_step = self._num_steps
            if num_tokens == seq.num_pending_tokens and not seq.is_pooled:
                self.charge_token(seq)
        return list(plan.items())

    def _complete_scan_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many tokens a sequence computes if `num_tokens` are planned: it ends within no scan chunk."""
        assert self._states is not None
        start = seq.num_computed_tokens
        return self._states.layout.find_cell_end(start + num_tokens, seq.num_prompt_tokens) - start

    def _open_budget(self) -> BatchBudget:
        running = [seq for seq in self.running if not seq.is_suspect]
        return BatchBudget(self.cost, running, is_share_limited=self._num_steps % FORCED_BATCH_PERIOD_STEPS != 0)

    def _schedule_all(self, token_budget: int, max_batch: int, batch_budget: BatchBudget) -> dict[Sequence, int]:
        """Plan a step of all sequences that are not suspect. Suspects are admitted, but compute nothing."""
        step = _StepPlan([seq for seq in self.running if not seq.is_suspect], token_budget, batch_budget)
        for priority in range(len(CLASSES)):
            prompts: list[Sequence] = []
            for seq in [seq for seq in self.running if seq.priority == priority and not seq.is_suspect]:
                if seq.num_pending_tokens > 1:
                    prompts.append(seq)
                elif seq.state is State.RUNNING:  # and was not preempted for one before it
                    self._schedule_running(seq, step)
            self._schedule_prompts([seq for seq in prompts if seq.state is State.RUNNING], step)
            self._admit_waiting(priority, step, max_batch)
            long_prompt = step.release_long_prompt()
            if long_prompt is not None:
                self._schedule_running(long_prompt, step)
        return step.num_tokens_by_sequence

    def _schedule_prompts(self, prompts: list[Sequence], step: _StepPlan) -> None:
        """Plan running prompts in order up to the first that is too long for the step, then the shortest others."""
        for number, seq in enumerate(prompts, 1):
            self._schedule_prompt(seq, step)
            if step.long_prompt is not None:
                for other in sorted(prompts[number:], key=attrgetter("num_pending_tokens")):
                    if not step.is_too_long(other.num_pending_tokens):
                        self._schedule_running(other, step)
                return

    def _schedule_prompt(self, seq: Sequence, step: _StepPlan) -> None:
        """Plan a prompt, or keep tokens for it if it is the first that is too long for the step."""
        num_tokens = step.batch_budget.limit_tokens(seq, min(seq.num_pending_tokens, step.prompt_budget))
        if step.long_prompt is None and num_tokens == step.prompt_budget < seq.num_pending_tokens:
            step.keep_for_long_prompt(seq)
        else:
            self._schedule_running(seq, step)

    def _schedule_alone(self, seqs: list[Sequence], token_budget: int) -> dict[Sequence, int]:
        """Plan a step of the first of these sequences that can compute something, and of no other."""
        for seq in seqs:
            if seq.state is State.RUNNING:
                step = _StepPlan([seq], token_budget, BatchBudget(None, ()))
                self._schedule_running(seq, step)
                if step.num_tokens_by_sequence:
                    return step.num_tokens_by_sequence
        return {}

    def _schedule_running(self, seq: Sequence, step: _StepPlan) -> None:
        step.decodes.discard(seq)
        num_pending_tokens = seq.num_pending_tokens
        num_tokens = min(num_pending_tokens, step.budget if num_pending_tokens == 1 else step.prompt_budget)
        num_tokens = step.batch_budget.limit_tokens(seq, num_tokens)
        if num_tokens > 0 and self._grow_block_table(seq, seq.num_computed_tokens + num_tokens, step):
            step.schedule_tokens(seq, num_tokens)

    def _grow_block_table(self, seq: Sequence, num_tokens: int, step: _StepPlan) -> bool:
        """Give the sequence blocks for its first `num_tokens` tokens, preempting those behind it if need be.

        Returns whether there were enough.
        """
        num_missing = self._tables.count_missing_blocks(seq, num_tokens)
        if num_missing <= 0:
            return True
        while self.pool.num_free_blocks < num_missing:
            if self.running[-1] is seq:
                return False
            self._preempt(self.running[-1], step)
        seq.block_table += self.pool.allocate_blocks(num_missing)
        return True

    def reserve_draft_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Return for how many of `num_tokens` drafted tokens a planned sequence has blocks, or gets them now.

        Drafts preempt nothing, and leave a block for each running sequence that still grows. None of them is one behind
        which a snapshot of the state is kept.
        """
        if self._states is not None:
            num_tokens = min(num_tokens, self._states.layout.count_until_kept(len(seq.token_ids)))
        num_missing = self._tables.count_missing_blocks(seq, len(seq.token_ids) + num_tokens)
        if num_missing > 0 and self.pool.num_free_blocks >= num_missing + self._tables.count_growing(self.running):
            seq.block_table += self.pool.allocate_blocks(num_missing)
        return min(num_tokens, len(seq.block_table) * self.pool.block_size - len(seq.token_ids))

    def charge_token(self, seq: Sequence) -> None:
        """Charge the sequence's tenant for an output token."""
        self._charge_tenant(seq, OUTPUT_TOKEN_COST)
        self._tables.growth.record_tokens(1)

    def _charge_tenant(self, seq: Sequence, cost: int) -> None:
        self._queues[CLASSES.index(seq.priority_class)].charge_tenant(seq.tenant, cost, seq.weight)

    def _promote_starving(self) -> None:
        """Let the oldest starving batch sequence count as interactive, unless another one does."""
        if self._promoted is not None and self._promoted.state is not State.DONE:
            return
        since = self._num_steps - AGING_STEPS
        starving = [
            seq for seq in chain(self.running, *self._queues) if seq.priority > 0 and seq.last_scheduled_step <= since
        ]
        if not starving:
            return
        seq = self._promoted = min(starving, key=attrgetter("arrival_number"))
        if seq.state is State.WAITING:
            self._queues[seq.priority].remove(seq)
            self._queues[0].push_front(seq)
        seq.priority, seq.is_backfilled = 0, False
        self.running.sort(key=_by_scheduling_order)

    # Admission

    def _admit_waiting(self, priority: int, step: _StepPlan, max_batch: int) -> None:
        """Admit waiting sequences of a priority, as far as token budget, batch size and blocks allow."""
        queue = self._queues[priority]
        passed: list[Sequence] = []
        is_head_blocked = False
        passed_tenant: str | None = None
        while step.prompt_budget > 0 and len(passed) <= MAX_PASSED_SEQUENCES:
            if len(self.running) >= max_batch and self.running[-1].scheduling_order < (priority, True):
                return  # the batch is full, and nothing that runs may be preempted for this priority
            seq = queue.peek(passed)
            if seq is None:
                self._accept_backfilled(priority, is_head_blocked)
                return
            if priority > 0 and not step.batch_budget.can_admit:
                return
            if step.long_prompt is not None and step.is_too_long(self._tables.count_tokens_to_compute(seq)):
                passed.append(seq)
                passed_tenant = seq.tenant
            elif passed_tenant is not None and (seq.tenant != passed_tenant or len(self.running) + 1 >= max_batch):
                return  # it is not this tenant's turn, or there is no place beside the longer one's
            elif self._tables.is_being_computed(seq) or not self._has_seen(seq):
                passed.append(seq)
            elif self._try_make_room(seq, step, max_batch, is_backfill=is_head_blocked):
                queue.remove(seq)
                self._start_running(seq, is_backfill=is_head_blocked)
                if not seq.is_suspect:
                    self._schedule_prompt(seq, step)
            else:
                passed.append(seq)
                is_head_blocked = True

    def _has_seen(self, seq: Sequence) -> bool:
        """Return whether the model has seen the pictures of which a waiting sequence misses KV. If not, it now will."""
        return seq.pictures is None or seq.pictures.has_seen_behind(self._tables.find_start(seq))

    def _accept_backfilled(self, priority: int, is_head_blocked: bool) -> None:
        """Let backfilled sequences stay if no sequence of their class waits for blocks any more."""
        backfilled = (
            [] if is_head_blocked else [seq for seq in self.running if seq.is_backfilled and seq.priority == priority]
        )
        for seq in backfilled:
            seq.is_backfilled = False
        if backfilled:
            self.running.sort(key=_by_scheduling_order)

    def _try_make_room(self, seq: Sequence, step: _StepPlan, max_batch: int, *, is_backfill: bool) -> bool:
        """Preempt what has to make way for a waiting sequence. Returns whether it can be admitted now."""
        last_to_stay = (seq.priority + 1, False) if is_backfill else (seq.priority, True)
        candidates = [one for one in reversed(self.running) if one.scheduling_order > last_to_stay]
        num_places = len(self.running) + 1 - max_batch
        num_preempted = self._tables.count_preemptions_needed(seq, self.running, candidates)
        if num_preempted is None or num_places > len(candidates):
            return False
        for one in candidates[: max(num_preempted, num_places, 0)]:
            self._preempt(one, step)
        return True

    def _start_running(self, seq: Sequence, *, is_backfill: bool) -> None:
        self._tables.allocate_table(seq)
        if not seq.num_preemptions:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self._charge_tenant(seq, PROMPT_TOKEN_COST * seq.num_pending_tokens)
        seq.is_backfilled = is_backfill
        seq.move_to(State.RUNNING)
        insort(self.running, seq, key=_by_scheduling_order)

    def check_integrity(self, others: Counter[int] | None = None) -> None:
        """Assert that every sequence is in one place, and that the block tables are consistent. For tests.

        `others`: how often each block is pinned by anything but running sequences; None if that is not known.
        """
        for priority, queue in enumerate(self._queues):
            queue.check_integrity()
            assert all(seq.priority == priority for seq in queue), "waits in the queue of another priority"
        waiting = list(chain(*self._queues))
        everybody = [*waiting, *self.running]
        assert len(set(everybody)) == len(everybody), "a sequence is queued or running twice"
        assert all(a.scheduling_order < b.scheduling_order for a, b in pairwise(self.running)), (
            "running sequences are out of order"
        )
        assert all(seq.state in (State.RUNNING, State.DONE) for seq in self.running), (
            "a running sequence has another state"
        )
        assert all(seq.state is State.WAITING for seq in waiting), "a waiting sequence has another state"
        assert not any(seq.block_table or seq.num_computed_tokens or seq.is_backfilled for seq in waiting), (
            "a waiting sequence holds blocks"
        )
        promoted = [
            seq for seq in everybody if seq.priority < CLASSES.index(seq.priority_class) and seq.state is not State.DONE
        ]
        assert promoted in ([], [self._promoted]), "more than one sequence is promoted"
        self._tables.check_integrity(self.running, others)
