"""Prove that the engine gives the model's tokens: compare every way a request can take with `generate()`.

A few prompts go through one engine together, in chunks; again, with their prefix in its pool; and through a
second engine, from the first one's blocks. The reference is the transformers model, alone and greedy.
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.masks import Unsupported
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.errors import EngineCheckFailed
from penstock.messages import Sampling

PROMPT_LENGTHS = (21, 1, 34, 9)
NUM_NEW_TOKENS = 12
MAX_STEP_TOKENS = 13
MIN_DISTINCT_TOKENS = 12
"""How many different tokens all the answers together must have. With fewer they prove nothing."""

_GREEDY = Sampling(temperature=0.0)


class Inconclusive(Exception):
    """The model says nothing that equality could be held against; the message says why."""


@dataclass(frozen=True)
class ReferenceAnswers:
    """The prompts, and what `generate()` says to each."""

    prompts: list[list[int]]
    expected: list[list[int]]


def generate_references(
    reference: Any,
    vocab_size: int,
    context_length: int,
    device: torch.device,
    *,
    min_distinct: int = MIN_DISTINCT_TOKENS,
) -> ReferenceAnswers:
    """Greedy answers of the transformers model as it is, to prompts spread over the vocabulary.

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
    if num_distinct < min_distinct:
        raise Inconclusive(f"it says only {num_distinct} different tokens")
    return ReferenceAnswers(prompts, expected)


@torch.inference_mode()
def _generate_greedily(reference: Any, prompt: list[int], device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    output = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def prove_engine(
    model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers, *, control: bool = False
) -> None:
    """Raise `EngineCheckFailed` if the engine gives other tokens than `references`.

    With `control`, damaged KV blocks must give other tokens than `references`; `Inconclusive` if they do not.
    """
    small = settings.model_copy(
        update={
            "max_batch": len(references.prompts),
            "max_step_tokens": MAX_STEP_TOKENS,
            "pool_mb": _choose_pool_mb(model, references),
            "block_size": model.layout.block_size,
        }
    )
    try:
        outcomes = _run_every_way(model, small, references, control=control)
    except Unsupported as error:
        raise EngineCheckFailed(f"{describe_model(model)} cannot be served: {error}") from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise EngineCheckFailed(
            f"{describe_model(model)} does not run on this engine: {type(error).__name__}: {text}"
        ) from error
    damaged = outcomes.pop("damaged", None)
    for how, seqs in outcomes.items():
        for seq, expected in zip(seqs, references.expected, strict=True):
            _compare_tokens(model, seq, expected, how)
    if damaged and [seq.output_token_ids for seq in damaged] == references.expected:
        raise Inconclusive("damaged KV blocks change none of its tokens")


def _run_every_way(
    model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers, *, control: bool
) -> dict[str, list[Sequence]]:
    """The same sequences, served in each way."""
    engine, second = (Engine(model, settings, quarantine=False) for _ in range(2))
    first = [_make_sequence(model, prompt) for prompt in references.prompts]
    _run_to_end(engine, first)
    blocks = [export_blocks(engine, seq) for seq in first]
    handed = [_hand_over(second, seq, payloads) for seq, payloads in zip(first, blocks, strict=True)]
    for seq in first:
        engine.remove_sequence(seq)
    again = [_make_sequence(model, prompt) for prompt in references.prompts]
    _run_to_end(engine, again)
    size = model.layout.block_size
    assert all(seq.num_cached_tokens >= (seq.num_prompt_tokens - 1) // size * size for seq in again), "no prefix hit"
    _run_to_end(second, handed[::-1])
    found = {"batched and in chunks": first, "with its prefix in the pool": again, "from handed-over KV blocks": handed}
    if control:
        third = Engine(model, settings, quarantine=False)
        wrong = [[_damage_payload(model, payload) for payload in payloads] for payloads in blocks]
        found["damaged"] = [_hand_over(third, seq, payloads) for seq, payloads in zip(first, wrong, strict=True)]
        _run_to_end(third, found["damaged"])
    return found


def _make_sequence(model: LoadedModel, prompt: list[int], given: list[int] | None = None) -> Sequence:
    size = model.layout.block_size
    keys = [repr(prompt[:end]).encode() for end in range(size, len(prompt) + 1, size)]
    return Sequence(
        "check",
        prompt,
        sampling=_GREEDY,
        seed=0,
        max_new_tokens=NUM_NEW_TOKENS,
        output_token_ids=given or (),
        block_keys=keys,
    )


def _choose_pool_mb(model: LoadedModel, references: ReferenceAnswers) -> int:
    size = model.layout.block_size
    num_blocks = sum(-(-(len(prompt) + NUM_NEW_TOKENS) // size) for prompt in references.prompts)
    return -(-2 * num_blocks * model.layout.block_bytes // 2**20)


def _run_to_end(engine: Engine, seqs: list[Sequence]) -> None:
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        engine.step()


def _hand_over(engine: Engine, seq: Sequence, payloads: list[bytes]) -> Sequence:
    """The sequence as a decode worker's engine gets it: the prompt's KV as bytes, and the first token."""
    copy = _make_sequence(engine.model, seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids[:1])
    assert import_blocks(engine, copy, payloads) == len(copy.block_keys), "no room for what is handed over"
    return copy


def _damage_payload(model: LoadedModel, payload: bytes) -> bytes:
    """A block's bytes, moved on by a token and a half."""
    shift = 3 * len(payload) // (2 * len(model.layout.layers) * model.layout.block_size)
    shift -= shift % model.dtype.itemsize
    return payload[shift:] + payload[:shift]


def describe_model(model: LoadedModel) -> str:
    """The model and its architecture, for messages."""
    return f"{model.name!r} ({type(model.module).__name__})"


def _compare_tokens(model: LoadedModel, seq: Sequence, expected: list[int], how: str) -> None:
    if seq.output_token_ids == expected:
        return
    at = next(i for i, pair in enumerate(zip(seq.output_token_ids, expected, strict=True)) if pair[0] != pair[1])
    detail = f"token {at} after a prompt of {seq.num_prompt_tokens} is {seq.output_token_ids[at]}, not {expected[at]}"
    raise EngineCheckFailed(
        f"{describe_model(model)} gives other tokens on this engine than `generate()`: {how}, {detail}"
    )
