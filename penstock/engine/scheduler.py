"""Which sequences take part in the next step, and with how many tokens. Plain Python: no tensors, no I/O, no clock.

Order. Running sequences are ordered by class, then by arrival. Within a class the waiting are admitted in an order
that is fair between tenants (`fairness`), and one that was preempted before all of them.

Blocks. A sequence is admitted with blocks for the tokens it has, if one more is left for each that still grows: who
comes in is not put out at once. It takes further blocks as it grows. When there are none, the last in order is
preempted for the one that needs them: its blocks are released, its tokens kept, and what the pool does not find of them
is computed again. A sequence that is itself the last keeps what it has, and pauses. So the first in order always goes
on, and everything ends.

Nobody is held up for nothing. Who does not fit is passed by those behind it that do; they are guests, and are preempted
as soon as that lets the first in line in. So it comes no later than if nobody had passed. In the same way all batch
sequences make way for an interactive one.

Nobody starves. Every `AGING_STEPS` steps the oldest batch sequence of which nothing was computed since the last time is
promoted: it counts as interactive until it is done. There is one such sequence at a time, so a backlog of batch work
takes one place of the interactive class, not all.

Batch work fills what interactive work leaves. In a step that interactive sequences take part in, batch ones have a
small share of its time (`share`), the promoted one too; those beyond it pause, and keep their blocks.

Suspects. They are admitted as all are, and then computed alone, one a step, in every other step as long as others want
the steps between.
"""

from bisect import insort
from collections import Counter
from itertools import chain, pairwise
from operator import attrgetter

from penstock.engine.batch_budget import FORCED_BATCH_STEPS, BatchBudget
from penstock.engine.cost import StepCost
from penstock.engine.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairQueue
from penstock.engine.pool import BlockPool
from penstock.engine.sequence import Sequence, State
from penstock.engine.tables import BlockTables
from penstock.names import CLASSES, PriorityClass

Plan = list[tuple[Sequence, int]]
"""Sequences of one step with the number of tokens each computes in it."""

AGING_STEPS = 64
LOOKAHEAD = 8
"""How many waiting sequences of a class may be passed over in one step."""

_place = attrgetter("scheduling_order")


class _StepPlan:
    """The plan so far and what is left of the budget, and of what batch work may add."""

    def __init__(self, running: list[Sequence], token_budget: int, share: BatchBudget) -> None:
        self.plan: dict[Sequence, int] = {}
        self.budget = token_budget
        self.share = share
        self.decodes = {seq for seq in running if seq.num_pending_tokens == 1}
        """Running sequences whose turn is still to come with one token to compute."""

    @property
    def left(self) -> int:
        """Tokens for prompts: they leave one to each that decodes."""
        return self.budget - len(self.decodes)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.plan[seq] = num_tokens
        self.budget -= num_tokens
        self.share.add_sequence(seq, num_tokens)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that is preempted, planned or not."""
        self.budget += self.plan.pop(seq, 0)
        self.decodes.discard(seq)
        self.share.remove_sequence(seq)


class Scheduler:
    """Waiting and running sequences over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.cost: StepCost | None = None
        """What steps take; None: not known, and batch sequences share them as they come."""
        self.running: list[Sequence] = []
        """In order, the first to be preempted last. Those done leave it with the next step."""
        self.num_preemptions = 0
        self._queues = [FairQueue() for _ in CLASSES]
        self._tables = BlockTables(pool)
        self._promoted: Sequence | None = None
        self._num_added = 0
        self._num_steps = 0

    def count_sequences_ahead(self, klass: PriorityClass) -> int:
        """Sequences, running and waiting, that a new one of the class would not displace."""
        alive = [seq for seq in self.running if seq.state is State.RUNNING]
        return sum(CLASSES.index(seq.klass) <= CLASSES.index(klass) for seq in chain(alive, *self._queues))

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet, or preempted."""
        return sum(map(len, self._queues))

    @property
    def num_running(self) -> int:
        """Admitted sequences that are not done."""
        return sum(seq.state is State.RUNNING for seq in self.running)

    # Sequences come and go

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a new sequence behind those of its class and tenant."""
        assert seq.state is State.WAITING
        self._num_added += 1
        seq.arrival_number, seq.last_scheduled_step = self._num_added, self._num_steps
        self._queues[seq.priority].push(seq)

    def remove_sequence(self, seq: Sequence) -> None:
        """Forget the sequence, whatever its state, and let go of its blocks. Twice is harmless."""
        if seq.state is State.WAITING and seq in self._queues[seq.priority]:
            self._queues[seq.priority].remove(seq)
        if seq in self.running:
            self._stop_running(seq)
        if seq.state is not State.DONE:
            seq.move_to(State.DONE)
        self.pool.free_blocks(seq.block_table)
        seq.block_table = []
        seq.tail_payload = None

    # Blocks and their keys

    def add_block_keys(self, seq: Sequence, keys: list[bytes]) -> None:
        """The keys of the full blocks after those that have one; blocks of unknown tokens cannot have any.

        What is computed of them can be shared at once, the rest when it is.
        """
        first = len(seq.block_keys) * self.pool.block_size
        assert (len(seq.block_keys) + len(keys)) * self.pool.block_size <= len(seq.token_ids), f"{seq}: too many keys"
        seq.block_keys += keys
        self.register_blocks(seq, first)

    def register_blocks(self, seq: Sequence, first_token: int) -> None:
        """Let others share the sequence's blocks that are full and named, from the one `first_token` is in."""
        self._tables.register_blocks(seq, first_token)

    def count_reserved_blocks(self, rank: int) -> int:
        """Blocks that somebody new of a class leaves to others: to the waiting of that class and above what they come
        in with, and one to each of the running that may need another.
        """
        waiting = chain(*self._queues[: rank + 1])
        return self._tables.count_growing(self.running) + sum(map(self._tables.count_blocks_held, waiting))

    def count_batch_slots_beside_interactive(self) -> float:
        """How many more batch sequences would run soon, and not pause, beside the interactive ones; infinite without
        those. One is always ready to come in.
        """
        everybody = chain(self.running, *self._queues)
        num_batch = sum(seq.klass == "batch" and seq.state is not State.DONE for seq in everybody)
        return max(0, 1 + BatchBudget(self.cost, self.running).count_affordable_rows() - num_batch)

    def count_fitting_sequences(self, rank: int, num_tokens: int) -> int:
        """For how many more sequences of a class, of so many tokens each, there are blocks.

        For one at least, as it may share some, if those that are there leave any; for none, if they need more.
        """
        num_displaced = sum(len(seq.block_table) for seq in self.running if seq.priority > rank)
        num_left = self.pool.num_free_blocks + num_displaced - self.count_reserved_blocks(rank)
        if num_left <= 0 and self.has_sequences(rank):
            return 0
        return max(1, num_left // -(-num_tokens // self.pool.block_size))

    def has_sequences(self, rank: int) -> bool:
        """Whether any sequence of that class and above is there."""
        alive = (seq.priority for seq in self.running if seq.state is State.RUNNING)
        return any(map(len, self._queues[: rank + 1])) or any(one <= rank for one in alive)

    def runs_only(self, rank: int) -> bool:
        """Whether there are sequences of that class and above only: nobody would make way for one of them."""
        running = [seq for seq in self.running if seq.state is State.RUNNING]
        return bool(running or self.num_waiting) and all(seq.priority <= rank for seq in running)

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.is_backfilled = False
        self._tables.stop_computing(seq)

    def _preempt(self, seq: Sequence, step: _StepPlan) -> None:
        step.drop(seq)
        self._stop_running(seq)
        self.pool.free_blocks(seq.block_table)
        seq.preempt()
        self.num_preemptions += 1
        self._queues[seq.priority].push_front(seq)

    # The step

    def schedule(self, token_budget: int, max_batch: int) -> Plan:
        """The next step: class by class what runs, then what comes in, up to the budget.

        A step has at most `token_budget` tokens, one for each decoding sequence before prompts get any; at most
        `max_batch` sequences are running.
        """
        self._num_steps += 1
        for seq in [seq for seq in self.running if seq.state is State.DONE]:
            self._stop_running(seq)
        if self._num_steps % AGING_STEPS == 0:
            self._promote_starving()
        plan = {} if self._num_steps % 2 else self._schedule_suspect(token_budget)
        plan = plan or self._schedule_all(token_budget, max_batch, self._open_budget())
        plan = (
            plan
            or self._schedule_all(token_budget, max_batch, BatchBudget(None, ()))
            or self._schedule_suspect(token_budget)
        )
        for seq, num_tokens in plan.items():
            seq.last_scheduled_step = self._num_steps
            if num_tokens == seq.num_pending_tokens:
                self._charge_tenant(seq, OUTPUT_TOKEN_COST)
        return list(plan.items())

    def _open_budget(self) -> BatchBudget:
        running = [seq for seq in self.running if not seq.suspect]
        return BatchBudget(self.cost, running, is_patient=self._num_steps % FORCED_BATCH_STEPS != 0)

    def _schedule_all(self, token_budget: int, max_batch: int, share: BatchBudget) -> dict[Sequence, int]:
        """All that are not suspect. Suspects are admitted, and no more."""
        step = _StepPlan([seq for seq in self.running if not seq.suspect], token_budget, share)
        for rank in range(len(CLASSES)):
            for seq in [seq for seq in self.running if seq.priority == rank and not seq.suspect]:
                if seq.state is State.RUNNING:  # and was not preempted for one before it
                    self._schedule_running(seq, step)
            self._admit_waiting(rank, step, max_batch)
        return step.plan

    def _schedule_suspect(self, token_budget: int) -> dict[Sequence, int]:
        """The first suspect that can go on."""
        for seq in [seq for seq in self.running if seq.suspect and seq.state is State.RUNNING]:
            step = _StepPlan([seq], token_budget, BatchBudget(None, ()))
            self._schedule_running(seq, step)
            if step.plan:
                return step.plan
        return {}

    def _schedule_running(self, seq: Sequence, step: _StepPlan) -> None:
        step.decodes.discard(seq)
        num_pending_tokens = seq.num_pending_tokens
        num_tokens = min(num_pending_tokens, step.budget if num_pending_tokens == 1 else step.left)
        num_tokens = step.share.limit_tokens(seq, num_tokens)
        if num_tokens > 0 and self._grow_block_table(seq, seq.num_computed_tokens + num_tokens, step):
            step.take(seq, num_tokens)

    def _grow_block_table(self, seq: Sequence, num_tokens: int, step: _StepPlan) -> bool:
        """Give the sequence blocks for its first `num_tokens` tokens; False if those behind it have too few."""
        num_missing = self._tables.count_missing_blocks(seq, num_tokens)
        if num_missing <= 0:
            return True
        while self.pool.num_free_blocks < num_missing:
            if self.running[-1] is seq:
                return False
            self._preempt(self.running[-1], step)
        seq.block_table += self.pool.allocate_blocks(num_missing)
        return True

    def _charge_tenant(self, seq: Sequence, cost: int) -> None:
        self._queues[CLASSES.index(seq.klass)].charge_tenant(seq.tenant, cost, seq.weight)

    def _promote_starving(self) -> None:
        """Make the oldest batch sequence that went without for long count as interactive."""
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
        self.running.sort(key=_place)

    # Admission

    def _admit_waiting(self, rank: int, step: _StepPlan, max_batch: int) -> None:
        """Admit from the waiting of a class, as far as budget, places and blocks go."""
        queue = self._queues[rank]
        passed: list[Sequence] = []
        some_lack = False
        while step.left > 0 and len(passed) <= LOOKAHEAD:
            if len(self.running) >= max_batch and self.running[-1].scheduling_order < (rank, True):
                return  # no place, and nobody who would make way
            seq = queue.peek(passed)
            if seq is None:
                self._accept_backfilled(rank, some_lack)
                return
            if rank > 0 and not step.share.can_admit:
                return
            if self._tables.is_being_computed(seq):
                passed.append(seq)
            elif self._try_make_room(seq, step, max_batch, is_guest=some_lack):
                queue.remove(seq)
                self._start_running(seq, is_guest=some_lack)
                num_tokens = 0 if seq.suspect else step.share.limit_tokens(seq, min(seq.num_pending_tokens, step.left))
                if num_tokens > 0:
                    step.take(seq, num_tokens)
            else:
                passed.append(seq)
                some_lack = True

    def _accept_backfilled(self, rank: int, some_lack: bool) -> None:
        """Guests stay when none of their class waits for blocks any more."""
        guests = [] if some_lack else [seq for seq in self.running if seq.is_backfilled and seq.priority == rank]
        for seq in guests:
            seq.is_backfilled = False
        if guests:
            self.running.sort(key=_place)

    def _try_make_room(self, seq: Sequence, step: _StepPlan, max_batch: int, *, is_guest: bool) -> bool:
        """Whether a waiting sequence can come in now; those that have to make way for it are preempted."""
        last_to_stay = (seq.priority + 1, False) if is_guest else (seq.priority, True)
        leaving = [one for one in reversed(self.running) if one.scheduling_order > last_to_stay]
        num_places = len(self.running) + 1 - max_batch
        num_preempted = self._tables.count_preemptions_needed(seq, self.running, leaving)
        if num_preempted is None or num_places > len(leaving):
            return False
        for one in leaving[: max(num_preempted, num_places, 0)]:
            self._preempt(one, step)
        return True

    def _start_running(self, seq: Sequence, *, is_guest: bool) -> None:
        self._tables.allocate_table(seq)
        if not seq.num_preemptions:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self._charge_tenant(seq, PROMPT_TOKEN_COST * seq.num_pending_tokens)
        seq.is_backfilled = is_guest
        seq.move_to(State.RUNNING)
        insort(self.running, seq, key=_place)

    def check_integrity(self, others: Counter[int] | None = None) -> None:
        """Every sequence is in one place, and all of `tables` holds. For tests.

        `others`: how often blocks are held by all that is not running; None if that is not known.
        """
        for rank, queue in enumerate(self._queues):
            queue.check_integrity()
            assert all(seq.priority == rank for seq in queue), "waits in another class"
        waiting = list(chain(*self._queues))
        everybody = [*waiting, *self.running]
        assert len(set(everybody)) == len(everybody), "a sequence is in two places"
        assert all(a.scheduling_order < b.scheduling_order for a, b in pairwise(self.running)), "out of order"
        assert all(seq.state in (State.RUNNING, State.DONE) for seq in self.running), "runs, and its state denies it"
        assert all(seq.state is State.WAITING for seq in waiting), "waits, and its state denies it"
        assert not any(seq.block_table or seq.num_computed_tokens or seq.is_backfilled for seq in waiting), (
            "waits with blocks"
        )
        promoted = [seq for seq in everybody if seq.priority < CLASSES.index(seq.klass) and seq.state is not State.DONE]
        assert promoted in ([], [self._promoted]), "more than one is promoted"
        self._tables.check_integrity(self.running, others)
