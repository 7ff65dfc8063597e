"""Short prompts beside long ones, and what memory is expected to be needed: counted in steps and tokens, no model."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from penstock.config.settings import SloSettings
from penstock.engine.memory.pool import BlockPool
from penstock.engine.memory.tables import FIRST_TOKENS, WINDOW_TOKENS, GrowthEstimate
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.scheduling.scheduler import MAX_STEP_S, Scheduler
from penstock.engine.sequence import Sequence
from penstock.names import PriorityClass
from tests.draws import mark_some
from tests.engine.helpers import make_block_keys, sequence
from tests.engine.schedules import SIZE, ScheduledEngine, seq_of

# Prompts of unequal length


def _step(scheduler: Scheduler, token_budget: int) -> list[tuple[Sequence, int]]:
    """Run one step without the checks of `ScheduledEngine`, whose time grows with the prompts."""
    plan = scheduler.schedule(token_budget, 256)
    for seq, num in plan:
        seq.num_computed_tokens += num
        if seq.num_pending_tokens == 0:
            seq.append_token(1)
    return plan


@pytest.mark.parametrize("num_steps_before", mark_some([0, 1, 10], pytest.mark.proof))
def test_short_prompts_do_not_wait_for_a_long_one_of_another_tenant(num_steps_before: int) -> None:
    scheduler = Scheduler(BlockPool(1000, 16))
    long = sequence(list(range(8192)), 4, tenant="a")
    scheduler.add_sequence(long)
    for _ in range(num_steps_before):
        _step(scheduler, 256)
    short = [sequence(list(range(10_000 * i, 10_000 * i + 64)), 4, tenant=f"b{i}") for i in range(1, 5)]
    for seq in short:
        scheduler.add_sequence(seq)
    for _ in range(4):
        _step(scheduler, 256)
    assert all(seq.num_output_tokens for seq in short)
    for _ in range(8192 // 256 + 1 - num_steps_before - 4 + 1):
        _step(scheduler, 256)
    assert long.num_output_tokens


def test_a_long_prompt_keeps_half_of_each_step_beside_a_flood_of_short_ones() -> None:
    dummy = ScheduledEngine(num_blocks=4000, budget=64, max_batch=64)
    long = seq_of(2000, tenant="long")
    dummy.add(long)
    dummy.step()
    number, served = 0, Counter[str]()
    while not long.num_output_tokens:
        while dummy.scheduler.num_waiting < 8:
            number += 1
            dummy.add(seq_of(24, 1, first=10_000 + 100 * number, tenant="flood"))
        plan = dummy.step()
        assert sum(num for _, num in plan) == 64
        served.update({seq.tenant: num for seq, num in plan})
    assert served["long"] == 2000 - 64
    assert served["flood"] <= 2000 + 64


COST = StepCost(fixed_s=0.01, row_s=0.001, context_s=0.0, chunk_s=0.0, token_s=0.0001)
"""A step computes 1,900 prompt tokens in `MAX_STEP_S`, fewer by ten for each decoding row."""


def _queue_prompts(
    lengths: list[int], cost: StepCost | None = COST, num_decodes: int = 0, priority_class: PriorityClass = "batch"
) -> Scheduler:
    """Return a scheduler with sequences that decode, whose gaps no bound has, and prompts that wait."""
    scheduler = Scheduler(BlockPool(10_000, 16))
    for number in range(num_decodes):
        scheduler.add_sequence(sequence([number], 99, priority_class=priority_class))
    if num_decodes:
        _step(scheduler, 256)
    scheduler.cost = cost
    for number, length in enumerate(lengths, 1):
        scheduler.add_sequence(sequence(list(range(20_000 * number, 20_000 * number + length)), 4))
    return scheduler


@pytest.mark.parametrize(("lengths", "tokens_per_s", "expected"), [
    ([], 1e9, 256),
    ([1024], 1e9, 256),
    ([1000, 1000], 1e9, 500),
    ([8192], 1e9, 1024),
    ([8192], 3000.0, 600),
    ([8192], 0.0, 256),
])  # fmt: skip
def test_a_step_is_larger_while_prompts_wait(lengths: list[int], tokens_per_s: float, expected: int) -> None:
    assert _queue_prompts(lengths, num_decodes=8).choose_budget(256, tokens_per_s) == expected


def test_what_a_step_computes_in_time_is_what_decoding_sequences_leave() -> None:
    assert _queue_prompts([8192]).find_max_tokens(1000) == pytest.approx(1900, abs=1)
    assert _queue_prompts([8192], num_decodes=130).find_max_tokens(256) == pytest.approx(600, abs=1)
    assert _queue_prompts([8192], num_decodes=200).find_max_tokens(256) == 256
    assert _queue_prompts([8192], None).find_max_tokens(256) == 256


def test_rows_are_timed_only_while_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _queue_prompts([8192], num_decodes=8)
    timed: list[Sequence] = []

    def time_row(cost: StepCost, seq: Sequence) -> float:
        timed.append(seq)
        return cost.row_s

    monkeypatch.setattr(StepCost, "row_seconds", time_row)
    assert scheduler.choose_budget(256) == 1024
    assert len(timed) == 8
    assert scheduler.choose_budget(8192) == 8192
    assert len(timed) == 8


def test_prompts_that_the_pool_has_make_no_step_larger() -> None:
    scheduler, shared = _queue_prompts([], num_decodes=1), list(range(1000, 1640))
    first = sequence(shared, 99, block_keys=make_block_keys(shared, 16), priority_class="batch")
    scheduler.add_sequence(first)
    while first.num_pending_tokens > 1:
        for seq, num in _step(scheduler, 256):
            scheduler.register_blocks(seq, seq.num_computed_tokens - num)
    chats = [[*shared, *range(9000 + 100 * one, 9040 + 100 * one)] for one in range(4)]
    for tokens in chats:
        scheduler.add_sequence(sequence(tokens, 4, block_keys=make_block_keys(tokens, 16)))
    assert sum(map(len, chats)) > 4 * 256
    assert scheduler.choose_budget(256) == 256


def test_a_queue_of_batch_prompts_makes_no_step_larger_beside_interactive_answers() -> None:
    scheduler = _queue_prompts([], num_decodes=4, priority_class="interactive")
    scheduler.add_sequence(sequence(list(range(50_000, 58_192)), 4, priority_class="batch"))
    assert scheduler.choose_budget(256) == 256
    for seq in scheduler.running[:]:
        scheduler.remove_sequence(seq)
    assert scheduler.choose_budget(256) == 1024


def test_a_queue_ends_in_a_third_of_the_steps_and_no_step_takes_too_long() -> None:
    lengths = [900] * 30
    scheduler, num_steps = _queue_prompts(lengths, num_decodes=8), 0
    scheduler.slo = SloSettings(interactive_gap_s=MAX_STEP_S)
    while any(seq.num_pending_tokens > 1 for seq in scheduler.running) or scheduler.num_waiting:
        plan = _step(scheduler, scheduler.choose_budget(256))
        assert COST.fixed_s + sum(COST.estimate_seconds(seq, num) for seq, num in plan) <= MAX_STEP_S
        num_steps += 1
    assert num_steps <= sum(lengths) / 256 / 3


def test_a_prompt_counts_as_what_is_not_cached_of_it() -> None:
    dummy = ScheduledEngine(num_blocks=400, budget=20)
    start = list(range(300))
    first = sequence(start, 1, block_keys=make_block_keys(start, SIZE))
    dummy.add(first)
    dummy.run()
    tokens = [*start, 900, 901]
    long, again = seq_of(100, first=1000), sequence(tokens, 4, block_keys=make_block_keys(tokens, SIZE))
    dummy.add(long, again)
    assert dict(dummy.step()) == {long: 18, again: 2}


# Growth


@dataclass
class Run:
    """What some requests took, from the first step to the last."""

    num_steps: int
    tokens_computed_per_useful: float
    mean_share_of_pool: float


def _simulate(answers: list[tuple[int, int]], *, token_budget: int) -> Run:
    """Run requests with prompts of 64 tokens. `answers`: the most tokens that each may get, and how many it gets."""
    pool = BlockPool(1000, 16)
    scheduler = Scheduler(pool)
    lengths = dict[Sequence, int]()
    for i, (max_new_tokens, length) in enumerate(answers):
        seq = sequence(list(range(1000 * i, 1000 * i + 64)), max_new_tokens, block_keys=[])
        lengths[seq] = length
        scheduler.add_sequence(seq)
    num_useful = sum(64 + length - 1 for length in lengths.values())
    num_steps = num_computed = num_held = 0
    while lengths:
        plan = _step(scheduler, token_budget)
        num_steps += 1
        num_held += pool.num_blocks - pool.num_free_blocks
        for seq, num in plan:
            num_computed += num
            if seq.num_output_tokens == lengths[seq]:
                scheduler.remove_sequence(seq)
                del lengths[seq]
    scheduler.check_integrity()
    assert pool.num_free_blocks == pool.num_blocks
    return Run(num_steps, num_computed / num_useful, num_held / num_steps / pool.num_blocks)


@pytest.mark.parametrize("token_budget", [256, 2048])
def test_little_is_computed_twice_where_answers_outgrow_the_pool(token_budget: int) -> None:
    rng = random.Random(1)
    lengths = [rng.randint(512, 1024) for _ in range(200)]
    run = _simulate([(length, length) for length in lengths], token_budget=token_budget)
    assert run.tokens_computed_per_useful < 1.15
    assert run.mean_share_of_pool > 0.8


def test_the_pool_is_used_where_most_answers_end_long_before_they_must() -> None:
    rng = random.Random(1)
    run = _simulate([(2048, 20 + rng.randrange(280)) for _ in range(400)], token_budget=2048)
    assert run.tokens_computed_per_useful < 1.05
    assert run.mean_share_of_pool > 0.7


def test_answers_that_all_may_end_at_any_token_need_no_more_than_they_hold() -> None:
    estimate = GrowthEstimate()
    estimate.record_tokens(10_000)
    for _ in range(500):
        estimate.record_end()
    assert estimate.estimate_peak_blocks([(1000, 10)] * 8, 16) == pytest.approx(80)


def test_without_early_ends_the_first_to_end_makes_room_for_the_growth_of_others() -> None:
    estimate = GrowthEstimate()
    estimate.record_tokens(2 * WINDOW_TOKENS - 1)
    # After 32 tokens the first holds 10 + 2 blocks and is gone, after 160 the second holds 2 + 10.
    assert estimate.estimate_peak_blocks([(32, 10), (160, 2)], 16) == pytest.approx(16, rel=0.01)
    assert estimate.estimate_peak_blocks([(32, 2), (160, 2)], 16) == pytest.approx(12, rel=0.01)
    assert estimate.estimate_peak_blocks([], 16) == 0


def test_what_was_seen_long_ago_counts_less() -> None:
    estimate, fresh = GrowthEstimate(), GrowthEstimate()
    for _ in range(1000):
        estimate.record_tokens(20)
        estimate.record_end()
    answers = [(2000, 4)] * 4
    assert estimate.estimate_peak_blocks(answers, 16) < fresh.estimate_peak_blocks(answers, 16)
    for _ in range(100):
        estimate.record_tokens(WINDOW_TOKENS)
    assert estimate.estimate_peak_blocks(answers, 16) > 4 * 120
    assert FIRST_TOKENS < WINDOW_TOKENS


def test_capacity_ends_where_the_growth_of_those_that_run_takes_the_pool() -> None:
    dummy = ScheduledEngine(num_blocks=40, budget=64)
    seqs = [seq_of(8, 80, first=100 * i) for i in range(6)]
    dummy.add(*seqs)
    dummy.step()
    running = [seq for seq in seqs if not seq.is_waiting]
    assert 1 <= len(running) < 6
    assert dummy.pool.num_free_blocks > 20  # for what runs, not for more
    assert dummy.scheduler.count_fitting_sequences(0, 8, 8) == 0
