"""Sequences that are computed without an engine: what a load compares has its blocks chosen by hand."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from penstock.engine.sequence import Plan, Sequence
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.steps.step_batch import StepBatch
from penstock.messages import Sampling


def draw_tokens(vocab_size: int, length: int, seed: int) -> list[int]:
    """Return random tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return tokens


def make_trial_sequence(
    prompt: list[int], answer: Items[int] = (), *, blocks: Iterable[int], state_row: int = 0, num_computed: int = 0
) -> Sequence:
    """Return a greedy sequence in these blocks and this row of states, of which so many tokens are computed."""
    seq = Sequence(
        "trial", prompt, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=len(answer) + 2,
        output_token_ids=answer,
    )  # fmt: skip
    seq.block_table, seq.state_row, seq.num_computed_tokens = list(blocks), state_row, num_computed
    return seq


def compute_tokens(runner: ModelRunner, plan: Plan) -> Tensor:
    """Compute the tokens of a plan whose sequences with one token are its first.

    Returns a copy of the logits after each sequence of which no token is left: [sequences, vocabulary], float32.
    """
    storage = runner.storage
    batch = StepBatch(plan, storage.layout.block_size, storage.data.device)
    logits = runner.run_step(batch)[: batch.num_sampled_rows].float().clone()
    for seq, num_tokens in plan:
        seq.num_computed_tokens += num_tokens
    return logits
