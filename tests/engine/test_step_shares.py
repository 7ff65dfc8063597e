"""What each row takes of a step's seconds."""

from dataclasses import replace

import pytest

from penstock.engine.model.trial import make_trial_sequence
from penstock.engine.scheduling.cost import StepCost, share_step
from penstock.engine.sequence import Sequence

COST = StepCost(fixed_s=0.010, row_s=0.001, context_s=0.00001, chunk_s=0.002, token_s=0.0005)


def decoding(num_before: int) -> Sequence:
    return make_trial_sequence([5] * num_before, [5], blocks=[0], num_computed=num_before)


def prompt(num_tokens: int) -> Sequence:
    return make_trial_sequence([5] * num_tokens, [], blocks=[0], num_computed=0)


def test_rows_share_a_step_as_its_cost_is_made_up() -> None:
    """The constant of the step is shared as the rest is."""
    rows = [decoding(100), decoding(200), prompt(10)]
    plan = list(zip(rows, (1, 1, 10), strict=True))
    found, expected_s = share_step(COST, plan)
    assert [(seq, stage) for seq, stage, _ in found] == [
        (rows[0], "decode"), (rows[1], "decode"), (rows[2], "prefill"),
    ]  # fmt: skip
    weights = [0.002, 0.003, 0.00745]  # the prompt's tokens read 0 + 1 + … + 9 = 45 others: 0.005 + 0.00045 + 0.002
    assert [share for _, _, share in found] == pytest.approx([one / sum(weights) for one in weights])
    assert expected_s == pytest.approx(0.010 + sum(weights)) == COST.step_seconds(plan)


def test_the_constant_for_a_first_chunk_is_the_prompts() -> None:
    two, _ = share_step(COST, [(prompt(10), 10), (prompt(30), 30), (decoding(100), 1)])
    weights = [0.00645, 0.02035, 0.002]
    assert [share for _, _, share in two] == pytest.approx([one / sum(weights) for one in weights])


def test_a_prompt_behind_others_counts_by_the_cost_of_its_own_context() -> None:
    """Its tokens read those before them many at a time, so each of these costs less than in an answer's row."""
    cost, later = replace(COST, prompt_context_s=1e-6), prompt(300)
    later.num_computed_tokens = 100
    found, _ = share_step(cost, [(later, 1), (decoding(100), 1)])
    weights = [0.002 + 0.0005 + 0.0001, 0.002]
    assert [share for _, _, share in found] == pytest.approx([one / sum(weights) for one in weights])


def test_drafts_count_and_the_seconds_of_their_step_are_not_known() -> None:
    row, other = decoding(100), decoding(100)
    row.draft = [7, 8]
    found, expected_s = share_step(COST, [(row, 1), (other, 1)])
    assert [share for _, _, share in found] == pytest.approx([0.6, 0.4])
    assert expected_s == 0.0


def test_without_a_cost_all_tokens_count_alike() -> None:
    plan = [(decoding(8), 1), (prompt(7), 7)]
    found, expected_s = share_step(None, plan)
    assert [share for _, _, share in found] == [0.125, 0.875]
    assert expected_s == 0.0
    found, _ = share_step(StepCost(0, 0, 0, 0, 0), plan)
    assert [share for _, _, share in found] == [0.5, 0.5]
