"""Prove at load that the engine gives the model's own tokens.

1. A tiny random model with the same kinds of layers gives the tokens of `generate()` in every way a request can take:
   a few prompts go through one engine together, in chunks; again, with their prefix in its pool; and through a second
   engine, from the first one's blocks. This is done in float32, takes about a second whatever the model's size, and the
   windows are so short that they matter.
2. The model itself reads one short prompt in two chunks and a single token on the backend that will serve it. Its
   logits must be those of the plain transformers model, as far as the dtype goes. That finds what depends on real
   sizes, and costs as much as two passes.

Where no tiny model can be made, the model itself is proved as in 1, in blocks and scan chunks as short as the tiny
model's. The reference is always the transformers model alone, greedy, with its own attention.
"""

import copy
import functools
import hashlib
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.files import Progress
from penstock.engine.handover import export_blocks, export_state, import_blocks, import_state
from penstock.engine.kernels.forms import GGUF
from penstock.engine.kernels.library import load_library
from penstock.engine.masks import Unsupported
from penstock.engine.model import LoadedModel
from penstock.engine.probe import probe_layout
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import BlockLayout
from penstock.engine.tiny import CannotShrink, build_tiny_model, shrink_model
from penstock.engine.weights import MappedWeights
from penstock.errors import EngineCheckFailed
from penstock.messages import Sampling

PROMPT_LENGTHS = (21, 1, 34, 9)
NUM_NEW_TOKENS = 12
MAX_STEP_TOKENS = 13
"""Tokens per step, both of the tiny model and of the model itself."""
MIN_DISTINCT_TOKENS = 12
"""How many different tokens all the answers together must have. With fewer they prove nothing."""
NUM_SEEDS = 5
"""How many tiny models are tried until one has answers that differ enough."""
MAX_BLOCK_SIZE = 16
"""The largest block size, and scan chunk of a state, in a proof: its prompts must fill some."""
MAX_RELATIVE_ERROR = {torch.float32: 0.01}
"""Root mean square of the error of the logits after a token, relative to their standard deviation."""
MAX_RELATIVE_ERROR_16_BIT = 0.1
"""The limit for 16-bit dtypes, where one differently chosen expert changes all logits a little."""

MAX_QUANTIZED_ERROR = {"int8": 0.3, "int4": 1.0, GGUF: 0.3}
"""The limit where inputs, or weights too, were made integers. Logits of no relation are off by 1.4."""
MAX_INT8_KV_ERROR = 0.3
"""The limit, at least, where K and V are int8."""

_GREEDY = Sampling(temperature=0.0)


class Inconclusive(Exception):
    """The model's answers prove nothing; the message says why."""


@dataclass(frozen=True)
class ReferenceAnswers:
    """Prompts, and the answer of `generate()` to each."""

    prompts: list[list[int]]
    expected: list[list[int]]


def prove_model(model: LoadedModel, settings: EngineSettings, progress: Progress | None = None) -> LoadedModel:
    """Return the model with the backend that it was proved on. Only the returned model can be used any more.

    Raises `EngineCheckFailed` if the engine's tokens are not the model's own.
    """
    report = progress or (lambda what, done: None)
    report("checking the engine", 0.0)
    tokens = _make_prompt(model)
    plain = _compute_plain_logits(model, tokens)
    report("checking the engine", 0.2)
    try:
        prove_kind(model, settings)
    except CannotShrink:
        prove_engine(replace(model, layout=_shorten_blocks(model.layout)), settings, _generate_with_model(model))
    report("checking the engine", 0.8)
    model = accelerate_model(model, settings.weights)
    _compare_logits(model, settings, tokens, plain)
    report("checking the engine", 1.0)
    return model


def prove_kind(model: LoadedModel, settings: EngineSettings) -> None:
    """Prove the engine on a tiny model of the same kind; the model's own weights are not read.

    Raises `EngineCheckFailed`, or `CannotShrink` where no tiny model can be made.
    """
    tiny, references = _build_tiny_model(model, settings)
    prove_engine(tiny, settings, references)


def describe_proof(model: LoadedModel, settings: EngineSettings, packed: str = "") -> dict[str, Any]:
    """Return all that the outcome of the proof depends on: where it is the same, so is the outcome.

    `packed` names the content of the packed file that the model is mapped from.
    """
    native = load_library()
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    return {
        "content": model.content_fingerprint,  # with dtype and layout, and so the block size
        "weights": "" if packed else settings.weights, "packed": packed,  # threads do not matter
        "device": [str(model.device), device, native.isa if native else torch.backends.cpu.get_cpu_capability()],
        "versions": [torch.__version__, transformers.__version__, platform.python_version()],
        "program": _hash_program(),
    }  # fmt: skip


@functools.cache
def _hash_program() -> str:
    """Return a hash of the engine's sources and of the kernels' library."""
    folder, combined = Path(__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.so")]):
        combined.update(f"{path.relative_to(folder)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return combined.hexdigest()


def _shorten_blocks(layout: BlockLayout) -> BlockLayout:
    """Return a layout with blocks, and scan chunks of states, that the prompts of a proof fill.

    K and V are as they are computed: what int8 loses is not what `generate()` is compared for.
    """
    size = min(layout.block_size, MAX_BLOCK_SIZE)
    states = layout.states and replace(layout.states, scan_chunk_tokens=size)
    return replace(layout, is_int8=False, block_size=size, states=states)


def _build_tiny_model(model: LoadedModel, settings: EngineSettings) -> tuple[LoadedModel, ReferenceAnswers]:
    """Return a tiny model of the same kind, ready for the engine, and the answers of an untouched copy of it."""
    config = shrink_model(model.module)
    for seed in range(NUM_SEEDS):
        reference = build_tiny_model(type(model.module), config, seed, model.device, model.stock_attention)
        try:
            tiny = _replace_module(model, copy.deepcopy(reference), min(settings.block_size, MAX_BLOCK_SIZE))
            tiny = accelerate_model(tiny)
            return tiny, generate_references(reference, tiny.vocab_size, tiny.context_length, tiny.device)
        except Inconclusive:
            continue
    raise CannotShrink("its answers have too few different tokens")


def _replace_module(model: LoadedModel, module: Any, block_size: int) -> LoadedModel:
    """Return `model` with another module of its kind, in float32. Raises `ModelLoadError` if that cannot be paged."""
    return replace(
        model,
        module=module,
        dtype=torch.float32,
        layout=probe_layout(module, block_size, torch.float32, model.device, scan_chunk_tokens=block_size),
        weights=MappedWeights([]),
        vocab_size=module.get_input_embeddings().num_embeddings,
    )


def _generate_with_model(model: LoadedModel) -> ReferenceAnswers:
    """Return the answers of the model itself, even if they have few different tokens."""
    model.module.set_attn_implementation(model.stock_attention)
    try:
        return generate_references(model.module, model.vocab_size, model.context_length, model.device, min_distinct=1)
    except Inconclusive as error:
        raise EngineCheckFailed(f"{_describe_model(model)} cannot be checked: {error}") from error


def _make_prompt(model: LoadedModel) -> list[int]:
    """Return tokens for two chunks, and one more that is computed alone."""
    length = max(1, min(2 * MAX_STEP_TOKENS + 1, model.context_length - 1))
    prompt: list[int] = torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(20)).tolist()
    return prompt


@torch.inference_mode()
def _compute_plain_logits(model: LoadedModel, tokens: list[int]) -> Tensor:
    """Return the transformers model's logits after the last token: [vocabulary]."""
    model.module.set_attn_implementation(model.stock_attention)
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model.module(input_ids=ids, use_cache=False).logits[0, -1].float()
    return logits


@torch.inference_mode()
def _compare_logits(model: LoadedModel, settings: EngineSettings, tokens: list[int], plain: Tensor) -> None:
    """Raise `EngineCheckFailed` if the engine's logits after the last token differ from the plain model's."""
    num_blocks = -(-len(tokens) // model.layout.block_size)
    runner = model.backend.create_runner(model, settings, num_blocks)  # with a row for the state of one sequence
    seq = Sequence("check", tokens, sampling=_GREEDY, seed=0, max_new_tokens=1)
    seq.block_table = list(range(num_blocks))
    while seq.num_pending_tokens:
        num_tokens = min(seq.num_pending_tokens, MAX_STEP_TOKENS)
        logits = runner.run_step(StepBatch([(seq, num_tokens)], model.layout.block_size, model.device))
        seq.num_computed_tokens += num_tokens
    error = float((logits[0].float() - plain).square().mean().sqrt() / plain.std())
    tolerance = MAX_RELATIVE_ERROR.get(model.dtype, MAX_RELATIVE_ERROR_16_BIT)
    tolerance = MAX_QUANTIZED_ERROR.get(model.weight_form, tolerance)
    if model.layout.is_int8:
        tolerance = max(tolerance, MAX_INT8_KV_ERROR)
    if not error <= tolerance:
        raise EngineCheckFailed(
            f"{_describe_model(model)} gives other logits on this engine than by itself: they are off by {error:.1%} "
            f"of their spread, and {model.weight_form or model.dtype} allows {tolerance:.0%}"
        )


def generate_references(
    reference: Any,
    vocab_size: int,
    context_length: int,
    device: torch.device,
    *,
    min_distinct: int = MIN_DISTINCT_TOKENS,
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
    if num_distinct < min_distinct:
        raise Inconclusive(f"its answers have only {num_distinct} different tokens")
    return ReferenceAnswers(prompts, expected)


@torch.inference_mode()
def _generate_greedily(reference: Any, prompt: list[int], device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    output = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def prove_engine(model: LoadedModel, settings: EngineSettings, references: ReferenceAnswers) -> None:
    """Raise `EngineCheckFailed` if the engine gives other tokens than `references`, or cannot be asked for all."""
    small = make_proof_settings(model, settings, references)
    try:
        outcomes = _run_every_way(model, small, references)
    except Unsupported as error:
        raise EngineCheckFailed(f"{_describe_model(model)} cannot be served: {error}") from error
    except Inconclusive as error:
        raise EngineCheckFailed(f"{_describe_model(model)} cannot be checked: {error}") from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise EngineCheckFailed(
            f"{_describe_model(model)} does not run on this engine: {type(error).__name__}: {text}"
        ) from error
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


def _describe_model(model: LoadedModel) -> str:
    """Return the names of the model and its architecture, for messages."""
    return f"{model.name!r} ({type(model.module).__name__})"


def _compare_tokens(model: LoadedModel, seq: Sequence, expected: list[int], how: str) -> None:
    if seq.output_token_ids == expected:
        return
    at = next(i for i, pair in enumerate(zip(seq.output_token_ids, expected, strict=True)) if pair[0] != pair[1])
    detail = f"token {at} after a prompt of {seq.num_prompt_tokens} is {seq.output_token_ids[at]}, not {expected[at]}"
    raise EngineCheckFailed(
        f"{_describe_model(model)} gives other tokens on this engine than `generate()`: {how}, {detail}"
    )
