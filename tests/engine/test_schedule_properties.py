"""Whatever comes, in whatever order: all of it ends, and every block is whose it should be."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.sequence import State
from penstock.names import CLASSES, PriorityClass
from tests.engine.helpers import keys_of, sequence
from tests.engine.schedules import SIZE, Dummy

TENANTS = ("", "a", "b")


class Scheduling(RuleBasedStateMachine):
    """Sequences come, run, are cancelled; prompts often share their beginning."""

    @initialize(num_blocks=st.integers(7, 24), budget=st.integers(1, 24), max_batch=st.integers(1, 6))
    def begin(self, num_blocks: int, budget: int, max_batch: int) -> None:
        self.dummy = Dummy(num_blocks, budget=budget, max_batch=max_batch)
        self.num_blocks = num_blocks

    @rule(
        length=st.integers(1, 18),
        common=st.integers(0, 18),
        salt=st.integers(100, 102),
        max_new=st.integers(1, 10),
        num_given=st.integers(0, 4),
        imported=st.sets(st.integers(0, 3)),
        klass=st.sampled_from(CLASSES),
        tenant=st.sampled_from(TENANTS),
    )
    def add(
        self,
        length: int,
        common: int,
        salt: int,
        max_new: int,
        num_given: int,
        imported: set[int],
        klass: PriorityClass,
        tenant: str,
    ) -> None:
        prompt = [i if i < common else salt + i for i in range(length)]
        given = range(length, length + min(num_given, max_new - 1))
        seq = sequence(prompt, max_new, given=given, prefix_keys=keys_of(prompt, SIZE), klass=klass, tenant=tenant)
        seq.imported = [(index, b"") for index in sorted(imported) if index * SIZE < length]
        self.dummy.add(seq)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.dummy.step()

    @rule(budget=st.integers(1, 24))
    def change_the_budget(self, budget: int) -> None:
        self.dummy.budget = budget

    @precondition(lambda self: self.dummy.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.dummy.remove(data.draw(st.sampled_from(self.dummy.alive)))

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler, alive = self.dummy.scheduler, self.dummy.alive
        scheduler.check_integrity()
        assert scheduler.num_waiting == sum(seq.state is State.WAITING for seq in alive)
        assert scheduler.num_running == sum(seq.state is State.RUNNING for seq in alive)
        assert self.num_blocks - self.dummy.pool.num_free == len({block for seq in alive for block in seq.blocks})

    def teardown(self) -> None:
        if not hasattr(self, "dummy"):
            return
        rest = list(self.dummy.alive)
        self.dummy.run()
        for seq in rest:
            assert seq.num_output == seq.max_new
            assert seq.output == list(range(seq.num_prompt, seq.num_prompt + seq.max_new))
        assert self.dummy.pool.num_free == self.num_blocks


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
