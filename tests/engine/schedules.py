"""An engine without a model, for the scheduler's tests: it writes down what each row of each block would hold."""

from collections.abc import Callable

from engine.pool import BlockPool
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, State
from penstock.names import PriorityClass
from tests.engine.helpers import keys_of, sequence

SIZE = 4


def seq_of(
    length: int, max_new: int = 4, *, klass: PriorityClass = "interactive", first: int = 0, tenant: str = ""
) -> Sequence:
    """A sequence with the prompt `first`, `first + 1` …"""
    prompt = list(range(first, first + length))
    return sequence(prompt, max_new, prefix_keys=keys_of(prompt, SIZE), klass=klass, tenant=tenant)


class Dummy:
    """A scheduler, and what the engine does around it. The token after n tokens is n."""

    def __init__(self, num_blocks: int = 100, *, budget: int = 100, max_batch: int = 8) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.scheduler = Scheduler(self.pool)
        self.budget, self.max_batch = budget, max_batch
        self.alive: list[Sequence] = []
        self._rows: dict[tuple[int, int], int] = {}
        """By block and row: the hash of the tokens up to the one whose KV is there."""

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)
            self.alive.append(seq)

    def remove(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.alive.remove(seq)

    def step(self) -> Plan:
        """One step, checked; sequences that are done are removed after it."""
        plan = self.scheduler.schedule(self.budget, self.max_batch)
        self.scheduler.check_integrity()
        assert sum(num for _, num in plan) <= self.budget
        assert self.scheduler.num_running <= self.max_batch
        assert len({seq for seq, _ in plan}) == len(plan)
        for seq, num in plan:
            self._compute(seq, num)
        self.scheduler.check_integrity()
        for seq in [seq for seq in self.alive if seq.state is State.DONE]:
            self.remove(seq)
        self.scheduler.check_integrity()
        return plan

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 5000) -> int:
        """Step until nothing is left, or `until`; returns the number of steps."""
        for num_steps in range(limit):
            if until() or not self.alive:
                return num_steps
            self.step()
        raise AssertionError(f"no end after {limit} steps: {self.alive}")

    def _compute(self, seq: Sequence, num: int) -> None:
        assert num > 0
        assert seq.state is State.RUNNING
        if seq.tail is not None:
            self._write(seq, range(seq.num_prompt // SIZE * SIZE, seq.num_prompt))
            seq.tail = None
        for position in range(seq.num_computed):
            assert self._rows[self._row(seq, position)] == self._content(seq, position), f"{seq}: foreign KV"
        self._write(seq, range(seq.num_computed, seq.num_computed + num))
        seq.num_computed += num
        self.scheduler.publish(seq, seq.num_computed - num)
        if seq.num_pending == 0:
            seq.append(len(seq.token_ids))

    def _write(self, seq: Sequence, positions: range) -> None:
        for position in positions:
            row = self._row(seq, position)
            assert self.pool.num_refs(row[0]) == 1, f"{seq} writes a shared block"
            self._rows[row] = self._content(seq, position)

    def _row(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.blocks[position // SIZE], position % SIZE

    def _content(self, seq: Sequence, position: int) -> int:
        return hash(tuple(seq.token_ids[: position + 1]))
