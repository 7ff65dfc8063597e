"""What each row takes of a step's seconds."""

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
    found = share_step(COST, list(zip(rows, (1, 1, 10), strict=True)))
    assert [(seq, stage) for seq, stage, _ in found] == [
        (rows[0], "decode"), (rows[1], "decode"), (rows[2], "prefill"),
    ]  # fmt: skip
    weights = [0.002, 0.003, 0.007]
    assert [share for _, _, share in found] == pytest.approx([one / sum(weights) for one in weights])


def test_the_constant_for_a_first_chunk_is_the_prompts() -> None:
    two = share_step(COST, [(prompt(10), 10), (prompt(30), 30), (decoding(100), 1)])
    weights = [0.006, 0.016, 0.002]
    assert [share for _, _, share in two] == pytest.approx([one / sum(weights) for one in weights])


def test_without_a_cost_all_tokens_count_alike() -> None:
    found = share_step(None, [(decoding(8), 1), (prompt(7), 7)])
    assert [share for _, _, share in found] == [0.125, 0.875]
    found = share_step(StepCost(0, 0, 0, 0, 0), [(decoding(8), 1), (prompt(7), 7)])
    assert [share for _, _, share in found] == [0.5, 0.5]
