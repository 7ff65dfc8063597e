"""How many drafted tokens a step computes: as many as make it give more tokens a second.

A drafted token adds a row to the step, so the step takes longer for all its sequences. By the measured cost of steps
(`cost`) it is worth that as long as

    probability that it is accepted / seconds of its row > tokens that the step gives / seconds of the step

Where one sequence decodes, a step mostly reads weights and rows cost little. With many sequences only drafts that are
all but certain are worth their rows.
"""

import math

from penstock.engine.scheduling.cost import StepCost
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Plan, Sequence

MAX_DRAFT_TOKENS = 7
"""Drafted tokens of a sequence in one step."""
MIN_PROBABILITY = 0.1
"""A token that is less likely to be accepted is not drafted, even where its row costs nothing."""
COST_MARGIN = 1.5
"""How many times its cost a drafted token has to be worth: sampling and masks cost time that is not measured."""


def draft_tokens(plan: Plan, scheduler: Scheduler, max_tokens: int) -> None:
    """Give the decoding sequences of a step their drafts, `max_tokens` tokens in all at most.

    The likeliest tokens go first, as long as they make more of the step's time than they cost: the tokens that a
    second gives have to become more, by the measured cost of steps. Beside interactive sequences no others draft.
    """
    room = max_tokens - sum(num for _, num in plan)
    has_interactive = any(seq.priority_class == "interactive" for seq, _ in plan)
    drafts: list[tuple[Sequence, list[int]]] = []
    guesses: list[tuple[float, int]] = []
    for seq, _ in plan:
        num_left = min(MAX_DRAFT_TOKENS, seq.max_new_tokens - seq.num_output_tokens - 1)
        # The last token of a prompt that was found cached is alone, too. What follows it may need other weights.
        if seq.num_pending_tokens > 1 or seq.num_output_tokens == 0 or seq.is_suspect or num_left < 1:
            continue
        draft, probabilities = seq.drafter.propose_tokens(seq.token_ids, seq.grammar, num_left)
        if seq.priority_class == "batch" and has_interactive:
            continue
        guesses += [(probability, len(drafts)) for probability in probabilities]
        drafts.append((seq, draft))
    if not guesses or room < 1:
        return
    counts = [0] * len(drafts)
    has_chunk = any(seq.num_pending_tokens > 1 for seq, _ in plan)
    max_s = scheduler.max_gap_s if has_interactive and has_chunk else math.inf
    for number in _choose_guesses(guesses, plan, scheduler.cost, max_s)[:room]:
        counts[number] += 1
    for (seq, draft), count in zip(drafts, counts, strict=True):
        if count:
            seq.draft = draft[: scheduler.reserve_draft_blocks(seq, count)]


def _choose_guesses(guesses: list[tuple[float, int]], plan: Plan, cost: StepCost | None, max_s: float) -> list[int]:
    """Return which sequences get one more drafted token, once for each, in a step of `max_s` seconds at most.

    `guesses`: probabilities and sequences.
    """
    guesses.sort(key=lambda guess: -guess[0])
    if cost is None:
        return [number for probability, number in guesses if probability >= MIN_PROBABILITY]
    has_chunk = any(seq.num_pending_tokens > 1 for seq, _ in plan)
    seconds = cost.step_seconds(plan)
    tokens = float(sum(num == seq.num_pending_tokens for seq, num in plan))
    row_s = (cost.token_s if has_chunk else cost.row_s) * COST_MARGIN
    chosen = []
    for probability, number in guesses:
        if probability < MIN_PROBABILITY or probability * seconds < tokens * row_s or seconds + row_s > max_s:
            break
        chosen.append(number)
        tokens, seconds = tokens + probability, seconds + row_s
    return chosen
