"""Prove at load that the engine computes the model: on the model itself, on the backend that will serve it.

1. A prompt is read in two chunks, and a token of the answer behind it. Both times the logits must be those of the plain
   transformers model with its own attention, as far as the dtype goes.
2. The prompt's KV is copied to other places of another pool, and the answer's token computed there, in a batch with
   another prompt. Each must have the logits that it has alone, bit by bit where the backend promises that.

The proof takes six passes over a few tokens, or over some more than a window of the model has, where that is short
(`windows.py`). `tools/proof.py` proves longer windows, whole answers and float32 with a small model of each class of
docs/models.md. A model of another class is served if it passes here.
"""

import functools
import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.kernels.library import load_library
from penstock.engine.loading.windows import MAX_READ_AT_LOAD, find_windows
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.compare import find_tolerance, measure_logits_error
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import compute_tokens, draw_tokens, make_trial_sequence
from penstock.engine.sequence import Sequence
from penstock.engine.steps.choice import FirstOfEqual
from penstock.engine.steps.masks import Unsupported
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.weights.files import Progress, ignore_progress
from penstock.errors import EngineCheckFailed, ModelLoadError, ModelUnavailable, choose_load_error, is_failure

NUM_TOKENS = 25
"""Tokens of the sequence that is compared, at least, and beyond a window: the last one is an answer's."""
CHUNK_TOKENS = 16
"""Tokens of its prompt's first chunk. The chunk behind it is shorter."""
NUM_NEIGHBOUR_TOKENS = 9
"""Tokens of the prompt beside it."""
MAX_INT8_KV_ERROR = 0.3
"""The largest error of logits, at least, where K and V are int8."""


def prove_model(model: LoadedModel, settings: EngineSettings, report: Progress = ignore_progress) -> LoadedModel:
    """Return the model with the backend that it was proved on. Only the returned model can be used any more.

    Raises `EngineCheckFailed` if the engine's logits are not the model's own, `ModelLoadError` if those are no numbers.
    """
    report("checking the engine", 0.0)
    plain = _compute_plain_logits(model)
    if not plain.isfinite().all():
        if where := model.weights.find_not_finite():
            raise ModelLoadError(f"{where} has values that are no finite numbers: the file is damaged, get it anew")
        raise ModelLoadError(
            f"its logits are no finite numbers in {model.dtype}, though its weights are: "
            "set PENSTOCK_ENGINE_DTYPE=float32"
            if model.dtype != torch.float32
            else "its logits are no finite numbers, though its weights are: a number in config.json is wrong, such as "
            "one of its rope or the epsilon of its norms"
        )
    report("checking the engine", 0.2)
    model = accelerate_model(model, settings.weights)
    report("checking the engine", 0.7)
    prove_backend(model, settings, plain)
    report("checking the engine", 1.0)
    return model


def prove_backend(model: LoadedModel, settings: EngineSettings, plain: Tensor | None = None) -> None:
    """Raise `EngineCheckFailed` if a model's backend computes a sequence otherwise handed over, or beside another.

    The same if its logits are not those that the plain model has after each token, where these are given.
    """
    with as_check_failures(model):
        _compare_runs(model, settings, plain)


@contextmanager
def as_check_failures(model: LoadedModel) -> Iterator[None]:
    """Whatever is raised in this context becomes `EngineCheckFailed`, with the model's name, or `ModelUnavailable`."""
    try:
        yield
    except EngineCheckFailed:
        raise
    except Unsupported as error:
        raise EngineCheckFailed(f"{describe_model(model)} cannot be served: {error}") from error
    except BaseException as error:
        if not is_failure(error):
            raise
        text = " ".join(str(error).split())[:300]
        kind = EngineCheckFailed if choose_load_error(error) is ModelLoadError else ModelUnavailable
        raise kind(f"{describe_model(model)} does not run on this engine: {type(error).__name__}: {text}") from error


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
    folder, combined = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.so")]):
        combined.update(f"{path.relative_to(folder)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return combined.hexdigest()


def _make_tokens(model: LoadedModel) -> list[int]:
    return draw_proof_tokens(model.config, model.vocab_size, model.context_length)


def draw_proof_tokens(config: Any, vocab_size: int, context_length: int) -> list[int]:
    """Return the tokens of the sequence that is compared: more than fit in a window that is short."""
    windows = [size + NUM_TOKENS for size in find_windows(config).values() if size <= MAX_READ_AT_LOAD]
    return draw_tokens(vocab_size, max(2, min(max([NUM_TOKENS, *windows]), context_length)), 20)


@torch.inference_mode()
def _compute_plain_logits(model: LoadedModel) -> Tensor:
    """Return the transformers model's logits after the prompt, and after the answer's token: [2, vocabulary]."""
    model.module.set_attn_implementation(model.stock_attention)
    ids = torch.tensor([_make_tokens(model)], device=model.device)
    with FirstOfEqual() if model.layout.attends_internally else nullcontext():
        logits: Tensor = model.module(input_ids=ids, use_cache=False).logits[0, -2:].float()
    return logits


@torch.inference_mode()
def _compare_runs(model: LoadedModel, settings: EngineSettings, plain: Tensor | None) -> None:
    """Raise as `prove_backend`, and whatever a forward pass raises."""
    tokens, size = _make_tokens(model), model.layout.block_size
    prompt, answer = tokens[:-1], tokens[-1]
    neighbour_prompt = tokens[::-1][:NUM_NEIGHBOUR_TOKENS]
    num_blocks, num_others = -(-len(tokens) // size), -(-len(neighbour_prompt) // size)
    total = num_blocks + num_others
    first, second = (model.create_runner(settings, total, num_states=2) for _ in range(2))
    seq = make_trial_sequence(prompt, blocks=range(total - 1, num_others - 1, -1))
    neighbour = make_trial_sequence(neighbour_prompt, blocks=range(num_others), state_row=1)
    for num_tokens in (len(prompt[:CHUNK_TOKENS]), len(prompt[CHUNK_TOKENS:])):
        if num_tokens:
            of_prompt = compute_tokens(first, [(seq, num_tokens)])
    handed = make_trial_sequence(prompt, [answer], blocks=range(num_blocks), state_row=1, num_computed=len(prompt))
    _copy_cached(first, seq, second, handed)
    seq = make_trial_sequence(prompt, [answer], blocks=seq.block_table, num_computed=len(prompt))
    alone = torch.cat([compute_tokens(first, [(seq, 1)]), compute_tokens(first, [(neighbour, len(neighbour_prompt))])])
    tolerance = _find_tolerance(model)
    if plain is not None:
        _compare_logits(model, torch.cat([of_prompt, alone[:1]]), plain, tolerance, "than in transformers")
    neighbour = make_trial_sequence(neighbour_prompt, blocks=range(num_blocks, total))
    together = compute_tokens(second, [(handed, 1), (neighbour, len(neighbour_prompt))])
    if not (second.is_row_exact and torch.equal(together, alone)):
        how = "handed over and beside another sequence than alone"
        _compare_logits(model, together, alone, 0.0 if second.is_row_exact else tolerance, how)


def _copy_cached(source: ModelRunner, seq: Sequence, target: ModelRunner, copy: Sequence) -> None:
    """Copy blocks and states of a sequence from one pool to another, as they travel between workers."""
    size = source.storage.layout.block_size
    for block, its_copy in zip(seq.block_table, copy.block_table, strict=True):
        target.storage.write_block(its_copy, source.storage.copy_block(block, size))
    if source.storage.states is not None and target.storage.states is not None:
        target.storage.states.write_row(copy.state_row, source.storage.states.view_row(seq.state_row))


def _find_tolerance(model: LoadedModel) -> float:
    tolerance = find_tolerance(model.dtype, model.weight_form).logits
    return max(tolerance, MAX_INT8_KV_ERROR) if model.layout.is_int8 else tolerance


def _compare_logits(model: LoadedModel, found: Tensor, right: Tensor, tolerance: float, how: str) -> None:
    """Raise `EngineCheckFailed` if rows of logits differ by more than the tolerance."""
    errors = list(map(measure_logits_error, found, right))
    if not all(error <= tolerance for error in errors):
        raise EngineCheckFailed(
            f"{describe_model(model)} gives other logits on this engine {how}: they are off by {max(errors):.1%} of "
            f"their spread, and {model.weight_form or model.dtype} allows {tolerance:.0%}. It would give other tokens, "
            "and is not served: use a model that docs/models.md has"
        )


def describe_model(model: LoadedModel) -> str:
    """Return the names of the model and its architecture, for messages."""
    return f"{model.name!r} ({type(model.module).__name__})"
