"""After any history of requests, every sequence ends with its tokens, and every block belongs to its owners alone."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.memory.staging import PinnedPoolBlock, StagedPoolBlocks
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.sequence import Sequence, State
from penstock.names import CLASSES, PriorityClass
from tests.engine.helpers import make_block_keys, sequence
from tests.engine.schedules import SIZE, ScheduledEngine, make_block_kv

TENANTS = ("", "a", "b")
COSTS = (None, StepCost(20.0, 1.0, 0.0, 0.0, 0.5), StepCost(1.0, 1.0, 0.1, 9.0, 1.0))
"""Unknown; room for some batch work beside interactive work; room for none."""


@dataclass
class Staging:
    """Staged blocks, and how many of them are written."""

    blocks: StagedPoolBlocks
    tokens: list[int]
    num_filled: int = 0


@dataclass
class Pin:
    """A pinned block, and its content until it is unpinned."""

    block: PinnedPoolBlock
    content: bytes


def _make_tokens(length: int, common: int, salt: int, num_output: int) -> tuple[list[int], list[int]]:
    """Return a prompt that often begins as others do, and output tokens."""
    return [i if i < common else salt + i for i in range(length)], list(range(length, length + num_output))


class Scheduling(RuleBasedStateMachine):
    """Sequences come, run and are cancelled; prompts often share their beginning; blocks are staged and pinned."""

    @initialize(
        num_blocks=st.integers(7, 24), budget=st.integers(1, 24), max_batch=st.integers(1, 6),
        cost=st.sampled_from(COSTS), first_tokens=st.sampled_from((1e-9, 16.0, 512.0)),
    )  # fmt: skip
    def begin(self, num_blocks: int, budget: int, max_batch: int, cost: StepCost | None, first_tokens: float) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("penstock.engine.memory.tables.FIRST_TOKENS", first_tokens)
        self.dummy = ScheduledEngine(num_blocks, budget=budget, max_batch=max_batch)
        self.dummy.scheduler.cost = cost
        self.num_blocks = num_blocks
        self.staged: list[Staging] = []
        self.pins: list[Pin] = []

    @rule(
        length=st.integers(1, 18), common=st.integers(0, 18), salt=st.integers(100, 102),
        max_new_tokens=st.integers(1, 10), num_given=st.integers(0, 8), has_tail=st.booleans(),
        names_given=st.booleans(), priority_class=st.sampled_from(CLASSES), tenant=st.sampled_from(TENANTS),
    )  # fmt: skip
    def add(
        self, length: int, common: int, salt: int, max_new_tokens: int, num_given: int, has_tail: bool,
        names_given: bool, priority_class: PriorityClass, tenant: str,
    ) -> None:  # fmt: skip
        prompt, given = _make_tokens(length, common, salt, min(num_given, max_new_tokens - 1))
        keys = make_block_keys(prompt + given if names_given else prompt, SIZE)
        seq = sequence(
            prompt,
            max_new_tokens,
            output_token_ids=given,
            block_keys=keys,
            priority_class=priority_class,
            tenant=tenant,
        )
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
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        """A step with this sequence failed. `step` checks that it is alone until its next token."""
        data.draw(st.sampled_from(self.dummy.alive)).is_suspect = True

    @precondition(lambda self: self.dummy.alive)
    @rule(data=st.data(), count=st.integers(1, 4))
    def add_block_keys(self, data: st.DataObject, count: int) -> None:
        seq = data.draw(st.sampled_from(self.dummy.alive))
        further = make_block_keys(seq.token_ids, SIZE)[len(seq.block_keys) :][:count]
        self.dummy.scheduler.add_block_keys(seq, further)

    # Blocks from a tier

    @rule(
        length=st.integers(1, 18), common=st.integers(0, 18), salt=st.integers(100, 102), num_output=st.integers(0, 10)
    )
    def stage(self, length: int, common: int, salt: int, num_output: int) -> None:
        prompt, output = _make_tokens(length, common, salt, num_output)
        blocks = self.dummy.stage_blocks(make_block_keys(prompt + output, SIZE))
        self.staged.append(Staging(blocks, prompt + output))

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        staging = data.draw(st.sampled_from(self.staged))
        views = staging.blocks.views
        if staging.num_filled < len(views):
            assert staging.blocks.is_valid()
            views[staging.num_filled][:] = make_block_kv(staging.tokens, staging.blocks.num_cached + staging.num_filled)
            staging.num_filled += 1

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), wasted=st.integers(0, 1))
    def commit_staged_blocks(self, data: st.DataObject, wasted: int) -> None:
        staging = data.draw(st.sampled_from(self.staged))
        self.staged.remove(staging)
        count = max(0, staging.num_filled - wasted)
        keys = staging.blocks.keys[: staging.blocks.num_cached + count]
        for _ in range(2):
            self.dummy.staging.commit_staged_blocks(staging.blocks, count)
        assert self.dummy.pool.count_cached_prefix(keys) == len(keys)
        assert not staging.blocks.is_valid()

    # Blocks to a tier

    @property
    def _pinnable(self) -> list[Sequence]:
        """The sequences with KV in their blocks. A tail payload is written in the first step."""
        return [seq for seq in self.dummy.alive if seq.num_computed_tokens and seq.tail_payload is None]

    @precondition(lambda self: self._pinnable)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self._pinnable))
        index = data.draw(st.integers(0, (seq.num_computed_tokens - 1) // SIZE))
        block = self.dummy.staging.pin_block(seq.block_table[index], min(SIZE, seq.num_computed_tokens - index * SIZE))
        self.pins.append(Pin(block, make_block_kv(seq.token_ids[: seq.num_computed_tokens], index)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin_block(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        for _ in range(2):
            pin.block.unpin()

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler, alive = self.dummy.scheduler, self.dummy.alive
        staged = (block for one in self.staged for block in one.blocks.cached_blocks + one.blocks.new_blocks)
        visitors = Counter(staged) + Counter(pin.block.block for pin in self.pins if pin.block.block is not None)
        scheduler.check_integrity(visitors)
        assert scheduler.num_waiting == sum(seq.state is State.WAITING for seq in alive)
        assert scheduler.num_running == sum(seq.state is State.RUNNING for seq in alive)
        held = {block for seq in alive for block in seq.block_table} | visitors.keys()
        assert self.num_blocks - self.dummy.pool.num_free_blocks == len(held)

    @invariant()
    def the_bound_of_growth_holds(self) -> None:
        scheduler = self.dummy.scheduler
        tables, waiting = scheduler._tables, [seq for queue in scheduler._queues for seq in queue]
        for seqs in (scheduler.running, [*scheduler.running, *waiting]):
            assert tables.bound_growth(seqs) >= max(tables.count_growing(seqs), tables.estimate_growth(seqs))

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for pin in self.pins:
            assert bytes(pin.block.payload) == pin.content
            assert pin.block.is_valid()

    def teardown(self) -> None:
        if not hasattr(self, "dummy"):
            return
        for staging in self.staged:
            self.dummy.staging.commit_staged_blocks(staging.blocks, staging.num_filled)
        for pin in self.pins:
            pin.block.unpin()
        rest = list(self.dummy.alive)
        self.dummy.run()
        self.patch.undo()
        for seq in rest:
            assert (seq.num_output_tokens, seq.is_suspect) == (seq.max_new_tokens, False)
            assert seq.output_token_ids == list(
                range(seq.num_prompt_tokens, seq.num_prompt_tokens + seq.max_new_tokens)
            )
        assert self.dummy.pool.num_free_blocks == self.num_blocks


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=50)
