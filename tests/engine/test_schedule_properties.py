"""Whatever comes, in whatever order: all of it ends, and every block is whose it should be."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.cost import StepCost
from penstock.engine.sequence import State
from penstock.engine.staging import PinnedBlock, StagedBlocks
from penstock.names import CLASSES, PriorityClass
from tests.engine.helpers import keys_of, sequence
from tests.engine.schedules import SIZE, Dummy, kv_of

TENANTS = ("", "a", "b")
COSTS = (None, StepCost(20.0, 1.0, 0.0, 0.0, 0.5), StepCost(1.0, 1.0, 0.1, 9.0, 1.0))
"""Unknown; room for some batch work beside interactive work; room for none."""


@dataclass
class Fetched:
    """A landing, and who writes to it."""

    landing: StagedBlocks
    tokens: list[int]
    num_filled: int = 0


@dataclass
class Read:
    """A lent block, and what it has to say until it is given back."""

    lent: PinnedBlock
    content: bytes


def _text(length: int, common: int, salt: int, num_said: int) -> tuple[list[int], list[int]]:
    """A prompt that often begins as others do, and what is said to it."""
    return [i if i < common else salt + i for i in range(length)], list(range(length, length + num_said))


class Scheduling(RuleBasedStateMachine):
    """Sequences come, run, are cancelled; prompts often share their beginning; KV comes from below and goes there."""

    @initialize(
        num_blocks=st.integers(7, 24),
        budget=st.integers(1, 24),
        max_batch=st.integers(1, 6),
        cost=st.sampled_from(COSTS),
    )
    def begin(self, num_blocks: int, budget: int, max_batch: int, cost: StepCost | None) -> None:
        self.dummy = Dummy(num_blocks, budget=budget, max_batch=max_batch)
        self.dummy.scheduler.cost = cost
        self.num_blocks = num_blocks
        self.landings: list[Fetched] = []
        self.lent: list[Read] = []

    @rule(
        length=st.integers(1, 18),
        common=st.integers(0, 18),
        salt=st.integers(100, 102),
        max_new_tokens=st.integers(1, 10),
        num_given=st.integers(0, 8),
        has_tail=st.booleans(),
        names_given=st.booleans(),
        klass=st.sampled_from(CLASSES),
        tenant=st.sampled_from(TENANTS),
    )
    def add(
        self,
        length: int,
        common: int,
        salt: int,
        max_new_tokens: int,
        num_given: int,
        has_tail: bool,
        names_given: bool,
        klass: PriorityClass,
        tenant: str,
    ) -> None:
        prompt, given = _text(length, common, salt, min(num_given, max_new_tokens - 1))
        keys = keys_of(prompt + given if names_given else prompt, SIZE)
        seq = sequence(prompt, max_new_tokens, output_token_ids=given, block_keys=keys, klass=klass, tenant=tenant)
        seq.tail_payload = b"" if has_tail and length % SIZE else None
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

    @precondition(lambda self: self.dummy.alive)
    @rule(data=st.data(), count=st.integers(1, 4))
    def name(self, data: st.DataObject, count: int) -> None:
        seq = data.draw(st.sampled_from(self.dummy.alive))
        further = keys_of(seq.token_ids, SIZE)[len(seq.block_keys) :][:count]
        self.dummy.scheduler.add_block_keys(seq, further)

    # In

    @rule(length=st.integers(1, 18), common=st.integers(0, 18), salt=st.integers(100, 102), num_said=st.integers(0, 10))
    def land(self, length: int, common: int, salt: int, num_said: int) -> None:
        prompt, said = _text(length, common, salt, num_said)
        landing = self.dummy.stage_blocks(keys_of(prompt + said, SIZE))
        self.landings.append(Fetched(landing, prompt + said))

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        fetched = data.draw(st.sampled_from(self.landings))
        views = fetched.landing.views
        if fetched.num_filled < len(views):
            assert fetched.landing.is_valid()
            views[fetched.num_filled][:] = kv_of(fetched.tokens, fetched.landing.num_cached + fetched.num_filled)
            fetched.num_filled += 1

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), wasted=st.integers(0, 1))
    def commit_staged_blocks(self, data: st.DataObject, wasted: int) -> None:
        fetched = data.draw(st.sampled_from(self.landings))
        self.landings.remove(fetched)
        count = max(0, fetched.num_filled - wasted)
        keys = fetched.landing.keys[: fetched.landing.num_cached + count]
        for _ in range(2):
            self.dummy.staging.commit_staged_blocks(fetched.landing, count)
        assert self.dummy.pool.count_cached_prefix(keys) == len(keys)
        assert not fetched.landing.is_valid()

    # Out

    @precondition(lambda self: any(seq.num_computed_tokens for seq in self.dummy.alive))
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.dummy.alive if seq.num_computed_tokens]))
        index = data.draw(st.integers(0, (seq.num_computed_tokens - 1) // SIZE))
        lent = self.dummy.staging.pin_block(seq.block_table[index], min(SIZE, seq.num_computed_tokens - index * SIZE))
        self.lent.append(Read(lent, kv_of(seq.token_ids[: seq.num_computed_tokens], index)))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def unpin_block(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.lent))
        self.lent.remove(read)
        for _ in range(2):
            self.dummy.staging.unpin_block(read.lent)

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler, alive, visitors = self.dummy.scheduler, self.dummy.alive, self.dummy.staging.count_pins()
        scheduler.check_integrity(visitors)
        assert scheduler.num_waiting == sum(seq.state is State.WAITING for seq in alive)
        assert scheduler.num_running == sum(seq.state is State.RUNNING for seq in alive)
        held = {block for seq in alive for block in seq.block_table} | visitors.keys()
        assert self.num_blocks - self.dummy.pool.num_free_blocks == len(held)

    @invariant()
    def what_is_lent_stays(self) -> None:
        for read in self.lent:
            assert bytes(read.lent.payload) == read.content
            assert read.lent.is_valid()

    def teardown(self) -> None:
        if not hasattr(self, "dummy"):
            return
        for fetched in self.landings:
            self.dummy.staging.commit_staged_blocks(fetched.landing, fetched.num_filled)
        for read in self.lent:
            self.dummy.staging.unpin_block(read.lent)
        rest = list(self.dummy.alive)
        self.dummy.run()
        for seq in rest:
            assert seq.num_output_tokens == seq.max_new_tokens
            assert seq.output_token_ids == list(
                range(seq.num_prompt_tokens, seq.num_prompt_tokens + seq.max_new_tokens)
            )
        assert self.dummy.pool.num_free_blocks == self.num_blocks


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=50)
