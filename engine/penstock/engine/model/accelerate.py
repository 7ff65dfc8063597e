"""Choose a model's backend, and replace parts of the model by native kernels where these are the backend.

1. The unchanged model reads a few tokens, and the inputs and outputs of its parts are recorded (`recording.py`).
2. `replacing.py` makes one native call of the experts of a mixture (`experts.py`), and of a decoder layer of the common
   form, with or without a mixture (`layer.py`). In other layers RMSNorms and linear layers are replaced one by one;
   linear layers with the same input are packed together.
3. New experts, a new layer or norm are given the recorded inputs of the original, and stay only if the output is the
   same.

An original's weights are freed as soon as they are packed, so that memory never holds the model twice.
"""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.kernels.library import TORCH, load_library
from penstock.engine.kernels.packed import DTYPES
from penstock.engine.memory.states import StateStorage
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.compare import find_tolerance, is_close
from penstock.engine.model.experts import NativeExperts
from penstock.engine.model.mixers import choose_together
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.recording import (
    NUM_PROBE_TOKENS,
    draw_probe,
    make_batch,
    make_storage,
    place_probe,
    record_forward,
)
from penstock.engine.model.replacing import Replacer, compute_all_rows
from penstock.engine.model.trial import compute_tokens, make_trial_sequence
from penstock.engine.sequence import Sequence
from penstock.engine.steps.latent import (
    LatentHeads,
    attend_twice,
    find_latent_layers,
    make_latent_heads,
    set_latent_heads,
)
from penstock.engine.steps.native_step import NativeParts, NativeStep
from penstock.engine.steps.rows import RowsApart, WatchedRows
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.weights.forms import GGUF, QUANTIZED
from penstock.errors import ModelLoadError


@torch.inference_mode()
def accelerate_model(model: LoadedModel, weights: str = "auto") -> LoadedModel:
    """Return the model with what computes it fastest here: the native kernels, or torch.

    For the native kernels the module is changed in place, and only the returned model can be used any more. `weights`
    is the setting. Raises `ModelLoadError` where the weights cannot have that form.
    """
    is_native = can_pack(model.device, model.dtype)
    if not is_native and weights in ("p12", *QUANTIZED):
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_WEIGHTS={weights} needs the native kernels, a CPU, and float32 or bfloat16: set `auto`"
        )
    if not is_native and model.layout.is_int8:
        raise ModelLoadError(
            "PENSTOCK_ENGINE_KV_DTYPE=int8 needs the native kernels, a CPU, and float32 or bfloat16: set `auto`"
        )
    native = load_library()
    if native is None or not is_native:
        return model
    if not model.layout.attends_internally:
        _absorb_projections(model)
    record = record_forward(model)
    if model.layout.is_int8 and (record.layers != model.layout.by_layer.keys() or model.layout.states is not None):
        raise ModelLoadError(
            "PENSTOCK_ENGINE_KV_DTYPE=int8 is for models whose attention the native kernels compute in all layers, and "
            "this is none: set `auto`"
        )
    replacer = Replacer(model, native, record, weights)
    replacer.replace_parts()
    is_quantized = weights in QUANTIZED
    if is_quantized and not replacer.packer.num_quantized:
        raise ModelLoadError(f"PENSTOCK_ENGINE_WEIGHTS={weights}: it has no linear layers that could be made integers")
    is_from_gguf = replacer.packer.num_from_gguf > 0
    model.weights.read_to_stay(*model.module.modules())
    has_experts = any(isinstance(part, NativeExperts) for part in model.module.modules())
    has_latents = any(isinstance(part, LatentHeads) for part in model.module.modules())
    parts = NativeParts(native, record.layers, replacer.build_native_model(), has_experts, has_latents)
    if model.layout.states is not None:
        parts = _read_together(model, parts)
    form = weights if is_quantized else GGUF if is_from_gguf else ""
    return replace(model, native=parts, weight_form=form)


def _read_together(model: LoadedModel, parts: NativeParts) -> NativeParts:
    """Return the parts, and with them whether states read single tokens at once, and rows do not depend on others."""
    torch.set_num_threads(1)  # as it will be beside the kernels
    together, rows = replace(parts, has_states=True), WatchedRows()
    a_token_each = dict.fromkeys(range(NUM_PROBE_TOKENS), 1)

    def read_answers(max_together: int) -> tuple[StateStorage, Tensor]:
        return _read_answers(model, parts, rows if max_together else None, [a_token_each] * 2)

    right = choose_together(model.module, model.dtype, read_answers)
    if right is None:
        return parts
    two_tokens_each = dict.fromkeys(range(1, NUM_PROBE_TOKENS), 2)
    found = [
        _read_answers(model, parts, rows, [{0: 1}, {0: 1, **two_tokens_each}]),
        _read_answers(model, parts, rows, [], guesses=True),
    ]
    is_same = all(torch.equal(states.data, right[0].data) and torch.equal(rest, right[1]) for states, rest in found)
    has_attention = parts.layers == model.layout.by_layer.keys()
    if not (is_same and has_attention and rows.is_exact):
        return together
    return replace(together, keeps_rows_apart=True, has_uneven_rows=rows.has_split)


def _read_answers(
    model: LoadedModel,
    parts: NativeParts,
    rows: RowsApart | None,
    steps: list[dict[int, int]],
    *,
    guesses: bool = False,
) -> tuple[StateStorage, Tensor]:
    """Read prompts, and two tokens of answers to them, in steps; return their states, and the logits of the last ones.

    A step has a number of tokens by prompt. With `guesses` one more step has all second tokens as guesses.
    """
    storage = KVStorage(model.layout, NUM_PROBE_TOKENS, model.device, 3 * NUM_PROBE_TOKENS)
    assert storage.states is not None
    runner, logits = ModelRunner(model.module, storage, parts, rows), torch.empty(0)
    tokens = [draw_probe(model, seed) for seed in range(NUM_PROBE_TOKENS)]
    seqs = [
        make_trial_sequence(some[:-2], some[-2:], blocks=[seed], state_row=2 * seed + 1)
        for seed, some in enumerate(tokens)
    ]
    prompts = {number: seq.num_prompt_tokens for number, seq in enumerate(seqs)}
    for step in (prompts, *steps):
        logits = compute_tokens(runner, [(seqs[number], num_tokens) for number, num_tokens in step.items()])
    if guesses:
        logits = _read_guesses(runner, seqs, model.vocab_size)
        storage.states.read_right_guesses()
    return storage.states, logits


def _read_guesses(runner: ModelRunner, seqs: list[Sequence], vocab_size: int) -> Tensor:
    """Read a token of each sequence, its last one as a guess, and a wrong guess; return the logits after the last ones.

    The caller still has to read the right guesses into the states.
    """
    for seq in seqs:
        last = seq.token_ids.pop()
        seq.draft = [last, (last + 1) % vocab_size]
    logits = compute_tokens(runner, [(seq, 1) for seq in seqs])
    for seq in seqs:
        seq.token_ids.append(seq.draft[0])
        seq.num_computed_tokens += 1
    return logits[1::3]


def _absorb_projections(model: LoadedModel) -> None:
    """Let tokens of answers attend to latents where that gives the same, but for rounding."""
    for part in list(find_latent_layers(model.module)):
        heads = make_latent_heads(part)
        right, mine = attend_twice(part, heads, NUM_PROBE_TOKENS)
        if is_close(mine, right, find_tolerance(model.dtype).part):
            set_latent_heads(part, heads)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the native kernels compute models of this dtype here."""
    native = load_library()
    return device.type == "cpu" and native is not None and native.isa != TORCH and dtype in DTYPES


@torch.inference_mode()
def compute_probe_logits(model: LoadedModel) -> Tensor:
    """Return the logits of a few tokens, computed by the native kernels as they serve the model: [T, vocabulary]."""
    native = model.native
    assert native is not None
    step = NativeStep(make_batch(model), make_storage(model), native.library, native.layers)
    return compute_all_rows(model.module, native.body, step, place_probe(model, step.batch))
