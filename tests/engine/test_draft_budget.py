"""How much is drafted: what is worth its rows, and where it leaves others what they need."""

from penstock.engine.drafts import Drafter
from penstock.engine.memory.pool import BlockPool
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.scheduling.draft_budget import MAX_DRAFT_TOKENS, MIN_PROBABILITY, draft_tokens
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.names import PriorityClass
from tests.engine.helpers import sequence


def _plan_drafts(
    seqs: list[Sequence], *, cost: StepCost | None = None, num_blocks: int = 100, max_tokens: int = 256
) -> list[int]:
    """Return how many tokens are drafted for each of some decoding sequences, in a step of `max_tokens` tokens."""
    scheduler = Scheduler(BlockPool(num_blocks, 16))
    scheduler.cost = cost
    for seq in seqs:
        scheduler.add_sequence(seq)
    for seq, num in scheduler.schedule(10_000, 64):
        seq.num_computed_tokens += num
        seq.append_token(seq.token_ids[-3])
    plan = scheduler.schedule(max_tokens, 64)
    draft_tokens(plan, scheduler, max_tokens)
    scheduler.check_integrity()
    return [len(seq.draft) for seq in seqs]


def _make_copying(number: int = 0, priority_class: PriorityClass = "interactive") -> Sequence:
    """Return a sequence that repeats its prompt."""
    return sequence(
        [5 * number + 5, 5 * number + 6, 5 * number + 7] * 9, 30, name=f"s{number}", priority_class=priority_class
    )


CHEAP_ROWS = StepCost(fixed_s=1.0, row_s=0.01, context_s=0.0, chunk_s=0.0, token_s=0.01)
DEAR_ROWS = StepCost(fixed_s=0.1, row_s=1.0, context_s=0.0, chunk_s=0.0, token_s=1.0)


def test_rows_that_cost_little_are_drafted_and_others_are_not() -> None:
    assert _plan_drafts([_make_copying()], cost=CHEAP_ROWS)[0] >= 3
    assert _plan_drafts([_make_copying()], cost=DEAR_ROWS) == [0]


def test_many_sequences_draft_less_each() -> None:
    counts = _plan_drafts([_make_copying(i) for i in range(40)], cost=CHEAP_ROWS)
    assert max(counts) < _plan_drafts([_make_copying()], cost=CHEAP_ROWS)[0]


def test_guesses_that_fail_are_not_drafted() -> None:
    """Behind each 5 comes another token than before."""
    drafter, tokens = Drafter(), [5, 6]
    found = []
    for token in range(7, 40):
        tokens += [token, 5]
        drafter.propose_tokens([*tokens], None, MAX_DRAFT_TOKENS)
        draft, probabilities = drafter.propose_tokens(tokens, None, MAX_DRAFT_TOKENS)
        assert draft
        found.append(probabilities[0])
    assert found == sorted(found, reverse=True)
    assert found[-1] < MIN_PROBABILITY < found[0]


def test_batch_sequences_draft_nothing_beside_interactive_ones() -> None:
    assert _plan_drafts([_make_copying(0), _make_copying(1, "batch")])[1] == 0
    assert _plan_drafts([_make_copying(1, "batch")])[0] > 0


def test_a_draft_ends_before_the_last_token_that_is_allowed() -> None:
    prompt = [5, 6, 7] * 9
    assert _plan_drafts([sequence(prompt, 3)]) == [1]
    assert _plan_drafts([sequence(prompt, 2)]) == [0]


def test_a_draft_takes_no_block_that_others_need() -> None:
    prompt = [5, 6, 7] * 10  # with the first token 31 of the 32 that two blocks hold
    assert _plan_drafts([sequence(prompt, 30)], num_blocks=100)[0] > 1
    assert _plan_drafts([sequence(prompt, 30)], num_blocks=2) == [1]


def test_drafts_keep_to_the_token_budget_of_a_step() -> None:
    assert sum(_plan_drafts([_make_copying(0), _make_copying(1)])) > 4
    assert sum(_plan_drafts([_make_copying(0), _make_copying(1)], max_tokens=6)) == 4
