"""Before it serves, the engine proves on a few short prompts that it gives the model's own tokens.

Each prompt runs in the engine among the others, in small chunks; and a second time in a second engine, from
KV blocks handed over. Both must say what `generate()` says with the attention that transformers would use.
"""

from dataclasses import dataclass

import torch

from engine.engine import Engine
from engine.model import LoadedModel, Progress
from engine.sequence import Payload, Sequence
from penstock.errors import EngineCheckFailed
from penstock.messages import Sampling
from penstock.settings import EngineSettings

PROMPT_LENGTHS = (21, 1, 34, 9)
NUM_NEW = 12
STEP_TOKENS = 13
LOGIT_TOLERANCE = 8
"""How far below the best a token's logit may be: times the dtype's precision, times the largest logit."""

_GREEDY = Sampling(temperature=0.0)


@dataclass
class _Case:
    prompt: list[int]
    expected: list[int]


def check(model: LoadedModel, settings: EngineSettings, progress: Progress | None = None) -> None:
    """Raise `EngineCheckFailed` if the engine's tokens are not the model's own."""
    report = progress or (lambda what, done: None)
    report("checking the engine", 0.0)
    prompts = _prompts(model)
    expected = _generate(model, prompts)
    report("checking the engine", 0.4)
    small = settings.model_copy(
        update={"max_batch": len(prompts), "max_step_tokens": STEP_TOKENS, "pool_mb": _pool_mb(model)}
    )
    try:
        first = [Sequence(f"check-{i}", p, sampling=_GREEDY, seed=0, max_new=NUM_NEW) for i, p in enumerate(prompts)]
        engine = Engine(model, small)
        _run(engine, first)
        report("checking the engine", 0.7)
        second = [_handed_over(engine, seq) for seq in first]
        _run(Engine(model, small), second)
    except Exception as error:
        architecture = type(model.module).__name__
        raise EngineCheckFailed(
            f"{model.name!r} ({architecture}) does not run on this engine: {type(error).__name__}: {error}"
        ) from error
    report("checking the engine", 0.9)
    for how, seqs in (("batched and in chunks", first), ("from handed-over KV blocks", second)):
        for seq, tokens in zip(seqs, expected, strict=True):
            _compare(model, seq, tokens, how)
    report("checking the engine", 1.0)


def _prompts(model: LoadedModel) -> list[list[int]]:
    """Token ids spread over the vocabulary, the same every time."""
    generator = torch.Generator().manual_seed(20)
    size = min(model.vocab_size, len(model.tokenizer))
    lengths = [min(length, model.context_length - NUM_NEW) for length in PROMPT_LENGTHS]
    return [torch.randint(size, (max(1, length),), generator=generator).tolist() for length in lengths]


def _pool_mb(model: LoadedModel) -> int:
    size = model.layout.block_size
    num_blocks = sum(-(-(length + NUM_NEW) // size) for length in PROMPT_LENGTHS)
    return -(-num_blocks * model.layout.block_bytes // 2**20)


@torch.inference_mode()
def _generate(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers itself says, greedily, one prompt at a time."""
    model.module.set_attn_implementation(model.stock_attention)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def _run(engine: Engine, seqs: list[Sequence]) -> None:
    for seq in seqs:
        engine.add(seq)
    while engine.has_work():
        engine.step()


def _handed_over(engine: Engine, seq: Sequence) -> Sequence:
    """The sequence as a decode worker gets it: the prompt's KV as bytes, and the first token."""
    copy = Sequence(f"{seq.id}-again", seq.token_ids[: seq.num_prompt], sampling=_GREEDY, seed=0,
                    max_new=NUM_NEW, given=seq.output[:1])  # fmt: skip
    num_blocks = -(-seq.num_prompt // engine.settings.block_size)
    blocks: list[tuple[int, Payload]] = [(index, engine.export_block(seq, index)) for index in range(num_blocks)]
    copy.imported = blocks
    return copy


def _compare(model: LoadedModel, seq: Sequence, expected: list[int], how: str) -> None:
    if seq.output == expected:
        return
    at = next(i for i, pair in enumerate(zip(seq.output, expected, strict=True)) if pair[0] != pair[1])
    detail = f"token {at} after a prompt of {seq.num_prompt} is {seq.output[at]}, not {expected[at]}"
    if model.dtype != torch.float32:
        worst = _worst_gap(model, seq)
        if worst <= LOGIT_TOLERANCE:
            return
        detail += f"; its logit is {worst:.1f} times the precision of {model.dtype} below the best"
    raise EngineCheckFailed(
        f"{model.name!r} ({type(model.module).__name__}) gives other tokens on this engine than "
        f"`generate()`: {how}, {detail}"
    )


@torch.inference_mode()
def _worst_gap(model: LoadedModel, seq: Sequence) -> float:
    """How far the engine's tokens are below the reference's best at most, in units of the precision."""
    model.module.set_attn_implementation(model.stock_attention)
    ids = torch.tensor([seq.token_ids[:-1]], device=model.device)
    logits = model.module(input_ids=ids, use_cache=False).logits[0, seq.num_prompt - 1 :].float()
    chosen = logits.gather(-1, torch.tensor(seq.output, device=model.device)[:, None])[:, 0]
    unit = torch.finfo(model.dtype).eps * logits.abs().amax(-1)
    return float(((logits.amax(-1) - chosen) / unit).max())
