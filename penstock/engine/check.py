"""Check before serving that the engine gives the model's own tokens.

1. A tiny random model with the same kinds of layers is proved equal to `generate()` in every way a request can take
   (`proof.py`), in float32. That takes about a second, whatever the model's size, and its windows are so short that
   they matter.
2. The model itself reads one short prompt in two chunks and a single token: its logits must be those of the plain
   transformers model, as far as the dtype goes. That finds what depends on real sizes and costs two passes' worth.

Where no tiny model can be made, the model itself is proved as in 1.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel, Progress
from penstock.engine.probe import probe_layout
from penstock.engine.proof import Inconclusive, ReferenceAnswers, describe_model, generate_references, prove_engine
from penstock.engine.sequence import Sequence
from penstock.engine.shrink import CannotShrink, shrink_config
from penstock.engine.tiny import build_tiny_model, find_layer_kinds
from penstock.engine.weights import MappedWeights
from penstock.errors import EngineCheckFailed
from penstock.messages import Sampling

NUM_SEEDS = 5
MAX_TINY_BLOCK_SIZE = 16
"""The largest block size of the tiny model: its prompts must fill some blocks."""
CHECK_STEP_TOKENS = 13
"""Tokens per step when the model itself is checked."""
MAX_RELATIVE_ERROR = {torch.float32: 0.01}
"""Root mean square of the error of the logits after a token, relative to their standard deviation."""
MAX_RELATIVE_ERROR_16_BIT = 0.1
"""The limit for 16-bit dtypes, where one differently chosen expert changes all logits a little."""


def check_engine(model: LoadedModel, settings: EngineSettings, progress: Progress | None = None) -> None:
    """Raise `EngineCheckFailed` if the engine's tokens are not the model's own."""
    report = progress or (lambda what, done: None)
    report("checking the engine", 0.0)
    tokens = _make_prompt(model)
    plain = _compute_plain_logits(model, tokens)
    report("checking the engine", 0.2)
    try:
        tiny, told = _build_tiny_model(model, settings)
    except CannotShrink:
        tiny, told = model, _generate_with_model(model)
    report("checking the engine", 0.6)
    prove_engine(tiny, settings, told)
    report("checking the engine", 0.8)
    accelerate_model(model)
    _compare_logits(model, settings, tokens, plain)
    report("checking the engine", 1.0)


def _build_tiny_model(model: LoadedModel, settings: EngineSettings) -> tuple[LoadedModel, ReferenceAnswers]:
    """Return a tiny model of the same kind, ready for the engine, and the answers of an untouched copy of it."""
    config = shrink_config(model.module.config)
    for seed in range(NUM_SEEDS):
        reference = build_tiny_model(type(model.module), config, seed, model.device, model.stock_attention)
        missing = find_layer_kinds(model.module) - find_layer_kinds(reference)
        if missing:
            raise CannotShrink(f"{len(missing)} kinds of layers were lost")
        try:
            tiny = replace_module(model, copy.deepcopy(reference), min(settings.block_size, MAX_TINY_BLOCK_SIZE))
            accelerate_model(tiny)
            return tiny, generate_references(reference, tiny.vocab_size, tiny.context_length, tiny.device)
        except Inconclusive:
            continue
    raise CannotShrink("what it says does not vary")


def replace_module(model: LoadedModel, module: Any, block_size: int) -> LoadedModel:
    """Return `model` with another module of its kind, in float32. Raises `ModelLoadError` if that cannot be paged."""
    return replace(
        model,
        module=module,
        dtype=torch.float32,
        layout=probe_layout(module, block_size, torch.float32, model.device),
        weights=MappedWeights([]),
        vocab_size=module.get_input_embeddings().num_embeddings,
    )


def _generate_with_model(model: LoadedModel) -> ReferenceAnswers:
    """Return the answers of the model itself, even if they have few different tokens."""
    model.module.set_attn_implementation(model.stock_attention)
    try:
        return generate_references(model.module, model.vocab_size, model.context_length, model.device, min_distinct=1)
    except Inconclusive as error:
        raise EngineCheckFailed(f"{describe_model(model)} cannot be checked: {error}") from error


def _make_prompt(model: LoadedModel) -> list[int]:
    """Return tokens for two chunks, and one more that is computed alone."""
    length = max(1, min(2 * CHECK_STEP_TOKENS + 1, model.context_length - 1))
    prompt: list[int] = torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(20)).tolist()
    return prompt


@torch.inference_mode()
def _compute_plain_logits(model: LoadedModel, tokens: list[int]) -> Tensor:
    """Return the transformers model's logits after the last token: [vocabulary]."""
    model.module.set_attn_implementation(model.stock_attention)
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model.module(input_ids=ids, use_cache=False).logits[0, -1].float()
    return logits


def _compare_logits(model: LoadedModel, settings: EngineSettings, tokens: list[int], plain: Tensor) -> None:
    """Raise `EngineCheckFailed` if the engine's logits after the last token differ from the plain model's."""
    num_blocks = -(-(len(tokens) + 1) // model.layout.block_size)
    pool_mb = -(-num_blocks * model.layout.block_bytes // 2**20)
    seq = Sequence("check", tokens, sampling=Sampling(temperature=0.0), seed=0, max_new_tokens=1)
    engine = Engine(
        model, settings.model_copy(update={"max_step_tokens": CHECK_STEP_TOKENS, "pool_mb": pool_mb}), quarantine=False
    )
    with _capture_last_logits(model) as seen:
        engine.add_sequence(seq)
        while engine.has_work():
            engine.step()
    error = float((seen[-1] - plain).square().mean().sqrt() / plain.std())
    tolerance = MAX_RELATIVE_ERROR.get(model.dtype, MAX_RELATIVE_ERROR_16_BIT)
    if not error <= tolerance:
        raise EngineCheckFailed(
            f"{describe_model(model)} gives other logits on this engine than by itself: they are off by {error:.1%} "
            f"of their spread, and {model.dtype} allows {tolerance:.0%}"
        )


@contextmanager
def _capture_last_logits(model: LoadedModel) -> Iterator[list[Tensor]]:
    """Collect the logits of the last position of each forward pass within the context."""
    seen: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        if model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # it is only recorded
        seen.append(output.logits[0, -1].float().clone())

    handle = (model.body or model.module).register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
