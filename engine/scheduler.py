"""Which sequences take part in the next step, and with how many tokens. Plain Python, no tensors.

A sequence is admitted only when all the blocks it can ever need are free, so nothing that runs is ever put
back.
"""

from collections import deque

from engine.pool import BlockPool
from engine.sequence import Payload, Sequence, State
from penstock.names import CLASSES, PriorityClass

Plan = list[tuple[Sequence, int]]
"""Sequences of one step with the number of tokens each computes in it."""


class Scheduler:
    """Waiting and running sequences over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.waiting: dict[PriorityClass, deque[Sequence]] = {klass: deque() for klass in CLASSES}
        self.running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet."""
        return sum(map(len, self.waiting.values()))

    @property
    def num_running(self) -> int:
        """Admitted sequences that are not done."""
        return sum(seq.state is State.RUNNING for seq in self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind those of its class."""
        assert seq.state is State.WAITING
        self.waiting[seq.klass].append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget the sequence, whatever its state, and let go of its blocks. Twice is harmless."""
        if seq.state is State.WAITING and seq in self.waiting[seq.klass]:
            self.waiting[seq.klass].remove(seq)
        if seq in self.running:
            self.running.remove(seq)
        if seq.state is not State.DONE:
            seq.move_to(State.DONE)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.imported = []

    def schedule(self, token_budget: int, max_batch: int) -> Plan:
        """The next step: decodes first, then class by class prefill chunks and new sequences, up to the budget.

        A step has at most `token_budget` tokens; at most `max_batch` sequences are running. While one of a class has
        to wait, none of a lower class is admitted.
        """
        self.running = [seq for seq in self.running if seq.state is State.RUNNING]
        prefills = [seq for seq in self.running if seq.num_pending > 1]
        plan: Plan = []
        for seq in self.running:
            if seq.num_pending == 1:
                token_budget -= _plan(plan, seq, token_budget)
        may_admit = True
        for klass in CLASSES:
            for seq in prefills:
                if seq.klass == klass:
                    token_budget -= _plan(plan, seq, token_budget)
            while may_admit and token_budget > 0 and len(self.running) < max_batch:
                admitted = self._admit_next(klass)
                if admitted is None:
                    break
                token_budget -= _plan(plan, admitted, token_budget)
            may_admit = may_admit and not self.waiting[klass]
        return plan

    def _admit_next(self, klass: PriorityClass) -> Sequence | None:
        """Admit the first in line of a class; None if nobody waits or the first has to wait for blocks."""
        queue = self.waiting[klass]
        if not queue or not self._fits(queue[0]):
            return None
        seq = queue.popleft()
        self._admit(seq)
        self.running.append(seq)
        return seq

    def _shareable(self, seq: Sequence) -> list[bytes]:
        """Keys of the prompt's blocks that may be taken from the cache if they are there.

        The last token is always computed, for its logits, and a cached block is never written: so the block
        it falls in is not among them.
        """
        return seq.prefix_keys[: (len(seq.token_ids) - 1) // self.pool.block_size]

    def _fits(self, seq: Sequence) -> bool:
        keys = self._shareable(seq)
        keys = keys[: self.pool.count_prefix(keys)]
        return seq.blocks_needed(self.pool.block_size) - len(keys) <= self.pool.num_free_beside(keys)

    def _admit(self, seq: Sequence) -> None:
        """Give the sequence its blocks, and set what of it need not be computed."""
        seq.blocks = self.pool.take_prefix(self._shareable(seq))
        num_shared = len(seq.blocks)
        seq.blocks += self.pool.allocate(seq.blocks_needed(self.pool.block_size) - num_shared)
        seq.imported = _contiguous(seq.imported, num_shared)
        num_known = min((num_shared + len(seq.imported)) * self.pool.block_size, seq.num_prompt)
        seq.num_computed = min(num_known, len(seq.token_ids) - 1)
        seq.num_cached = seq.num_computed
        seq.move_to(State.RUNNING)


def _contiguous(imported: list[tuple[int, Payload]], first: int) -> list[tuple[int, Payload]]:
    """The imported blocks from `first` on without a gap; behind a gap they are of no use."""
    by_index = dict(imported)
    last = first
    while last in by_index:
        last += 1
    return [(index, by_index[index]) for index in range(first, last)]


def _plan(plan: Plan, seq: Sequence, token_budget: int) -> int:
    """Plan as much of a sequence as the budget has room for; returns how many tokens."""
    num_tokens = min(seq.num_pending, token_budget)
    if num_tokens > 0:
        plan.append((seq, num_tokens))
    return num_tokens
