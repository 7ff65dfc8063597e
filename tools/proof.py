"""Prove that the engine gives the tokens of `generate()`, in every way a request can take.

A few prompts go through one engine together, in chunks; again, with their prefix in its pool; and through a second
engine, from the first one's blocks and states. The reference is the transformers model alone, greedy, with its own
attention. It is done with tiny models in float32 (`tiny.py`), whose windows are so short that they matter, for each
class of model of docs/models.md (`compatibility.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.proof import as_check_failures, describe_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.steps.choice import FirstOfEqual
from penstock.errors import EngineCheckFailed
from penstock.messages import Sampling
from tools.handover import export_blocks, export_state, import_blocks, import_state

PROMPT_LENGTHS = (21, 1, 34, 9)
NUM_NEW_TOKENS = 12
MAX_STEP_TOKENS = 13
"""Tokens per step."""
MIN_DISTINCT_TOKENS = 12
"""How many different tokens all the answers together must have. With fewer they prove nothing."""
_GREEDY = Sampling(temperature=0.0)


class Inconclusive(Exception):
    """The model's answers prove nothing; the message says why."""


@dataclass(frozen=True)
class ReferenceAnswers:
    """Prompts, and the answer of `generate()` to each."""

    prompts: list[list[int]]
    expected: list[list[int]]


def generate_references(
    reference: Any,
    vocab_size: int,
    context_length: int,
    device: torch.device,
) -> ReferenceAnswers:
    """Return the transformers model's own greedy answers to random prompts.

    The last prompt shares all but its last token with the longest. Raises `Inconclusive`.
    """
    generator = torch.Generator().manual_seed(20)
    lengths = [max(1, min(length, context_length - NUM_NEW_TOKENS)) for length in PROMPT_LENGTHS]
    prompts = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    longest = max(prompts, key=len)
    prompts.append([*longest[:-1], (longest[-1] + 1) % vocab_size])
    try:
        expected = [_generate_greedily(reference, prompt, device) for prompt in prompts]
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise Inconclusive(f"`generate()` itself fails: {type(error).__name__}: {text}") from error
    num_distinct = len({token for answer in expected for token in answer})
    if num_distinct < MIN_DISTINCT_TOKENS:
        raise Inconclusive(f"its answers have only {num_distinct} different tokens")
    return ReferenceAnswers(prompts, expected)


@torch.inference_mode()
def _generate_greedily(reference: Any, prompt: list[int], device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    with FirstOfEqual():  # as the engine chooses, where an indexer has equal scores
        output = reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def prove_engine(model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers) -> None:
    """Raise `EngineCheckFailed` if the engine gives other tokens than `references`, or cannot be asked for all."""
    small = make_proof_settings(model, settings, references)
    with as_check_failures(model):
        try:
            outcomes = _run_every_way(model, small, references)
        except Inconclusive as error:
            raise EngineCheckFailed(f"{describe_model(model)} cannot be checked: {error}") from error
    for how, seqs in outcomes.items():
        for seq, expected in zip(seqs, references.expected, strict=True):
            _compare_tokens(model, seq, expected, how)


def make_proof_settings(model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers) -> EngineSettings:
    """Return the settings of an engine that runs all prompts at once, in small chunks."""
    return settings.model_copy(
        update={
            "max_batch": len(references.prompts),
            "max_step_tokens": MAX_STEP_TOKENS,
            "pool_mb": _choose_pool_mb(model, references),
            "block_size": model.layout.block_size,
        }
    )


def _run_every_way(
    model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers
) -> dict[str, list[Sequence]]:
    """Return finished sequences of all prompts, by the way in which they were served. Raises `Inconclusive`."""
    engine, second = (Engine(model, settings, quarantine=False) for _ in range(2))
    first = run_prompts(engine, references.prompts)
    handed = [hand_over(second, seq, export_blocks(engine, seq), export_state(engine, seq)) for seq in first]
    for seq in first:
        engine.remove_sequence(seq)
    again = run_prompts(engine, references.prompts)
    size = model.layout.block_size
    if any(seq.num_cached_tokens < (seq.num_prompt_tokens - 1) // size * size for seq in again):
        raise Inconclusive("the prefix of a prompt that it has computed before is not found in its pool")
    run_to_end(second, handed[::-1])
    if model.layout.states and any(seq.num_cached_tokens < seq.num_prompt_tokens for seq in handed):
        raise Inconclusive("what its layers keep of a prompt is not found by the engine that it is handed over to")
    return {"batched and in chunks": first, "with its prefix in the pool": again, "from handed-over KV blocks": handed}


def _make_sequence(model: LoadedModel, prompt: list[int], given: list[int] | None = None) -> Sequence:
    size = model.layout.block_size
    keys = [repr(prompt[:end]).encode() for end in range(size, len(prompt) + 1, size)]
    seq = Sequence(
        "check",
        prompt,
        sampling=_GREEDY,
        seed=0,
        max_new_tokens=NUM_NEW_TOKENS,
        output_token_ids=given or (),
        block_keys=keys,
    )
    seq.prompt_key = repr(prompt).encode()
    return seq


def _choose_pool_mb(model: LoadedModel, references: ReferenceAnswers) -> int:
    size = model.layout.block_size
    num_blocks = sum(-(-(len(prompt) + NUM_NEW_TOKENS) // size) for prompt in references.prompts)
    num_bytes = 2 * num_blocks * model.layout.block_bytes
    if (states := model.layout.states) is not None:  # a row for each, and snapshots of each as often as they are kept
        num_tokens = sum(map(len, references.prompts)) + NUM_NEW_TOKENS * len(references.prompts)
        num_rows = 4 * len(references.prompts) + 2 * num_tokens // states.scan_chunk_tokens
        num_bytes += 4 * num_rows * states.row_bytes
    return -(-num_bytes // 2**20)


def run_prompts(engine: Engine, prompts: list[list[int]]) -> list[Sequence]:
    """Run a greedy sequence of each prompt to its end, and return them."""
    seqs = [_make_sequence(engine.model, prompt) for prompt in prompts]
    run_to_end(engine, seqs)
    return seqs


def run_to_end(engine: Engine, seqs: list[Sequence]) -> None:
    """Run sequences until none has a token left to compute; they stay in the engine."""
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        engine.step()


def hand_over(engine: Engine, seq: Sequence, payloads: list[bytes], state: bytes | None = None) -> Sequence:
    """Return a sequence's copy as a decode worker's engine gets it: with the prompt's KV and the first token.

    `state` is what layers without KV keep of the prompt. Raises `Inconclusive` where the blocks have no room.
    """
    copy = _make_sequence(engine.model, seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids[:1])
    if import_blocks(engine, copy, payloads) < len(copy.block_keys):
        raise Inconclusive("its pool has no room for the blocks that are handed over")
    import_state(engine, copy, state)
    return copy


def _compare_tokens(model: LoadedModel, seq: Sequence, expected: list[int], how: str) -> None:
    if seq.output_token_ids == expected:
        return
    at = next(i for i, pair in enumerate(zip(seq.output_token_ids, expected, strict=True)) if pair[0] != pair[1])
    detail = f"token {at} after a prompt of {seq.num_prompt_tokens} is {seq.output_token_ids[at]}, not {expected[at]}"
    raise EngineCheckFailed(
        f"{describe_model(model)} gives other tokens on this engine than `generate()`: {how}, {detail}"
    )
