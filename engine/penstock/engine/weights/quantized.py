"""Published quantised checkpoints: each weight is unpacked, when it is read, to the plain one that the model has.

    quantization_config ─▶ a format of the table? ─▶ stored tensors: complete, of the right shapes? ─▶ when read: unpack

`_FORMATS` at the end is the table: the function that takes a format's tensors (`integers.py`, `floats.py`), what the
format may say of itself, and how the names of its tensors end. Only weights are unpacked: activations and the KV cache
are never quantised here, so scales that a checkpoint has for them are left out.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.engine.gguf.gguf_file import FLOAT_KINDS
from penstock.engine.gguf.gguf_model import rename_tensor
from penstock.engine.gguf.gguf_weights import GgufMatrix
from penstock.engine.weights.floats import take_fp8, take_modelopt, take_mxfp4
from penstock.engine.weights.integers import take_bitsandbytes, take_by_inputs, take_compressed
from penstock.engine.weights.stored import Options, Settings, Stored, expect_option, make_refusal
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError, build_damage_error

UNPACKING_VERSION = 1
"""Counts the changes of what is computed from stored tensors; part of the fingerprint of quantised models."""

log = logging.getLogger(__name__)
_PACKED_NAMES = (".qweight", ".weight_packed")


def take_quantization(config: Any) -> Settings | None:
    """Remove `quantization_config` from a configuration, so that transformers builds a plain model, and return it.

    Raises `ModelLoadError` for a format that cannot be unpacked.
    """
    found: Any = None
    for part in (config.get_text_config(), config):
        if getattr(part, "quantization_config", None) is not None:
            found = part.quantization_config
            del part.quantization_config
    if found is None:
        return None
    settings: Settings = found if isinstance(found, dict) else found.to_dict()
    method = settings.get("quant_method")
    if method not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ModelLoadError(
            f"its weights are quantised by {method or 'an unnamed format'}, which cannot be unpacked: use a checkpoint "
            f"that is not quantised, or by one of {known}"
        )
    return settings


def unpack_weights(weights: MappedWeights, settings: Settings | None, dtype: torch.dtype) -> None:
    """Replace the stored tensors of quantised weights by plain ones, which are computed when they are read.

    Raises `ModelLoadError` with the name of the option that is not known, or of the tensor that is missing or has
    another shape or type than the format says. Damaged values are found, and raised, at reading.
    """
    if settings is None:
        for name, part in weights.tensors.items():
            if name.endswith(_PACKED_NAMES) or part.get_dtype().startswith("F8_"):
                raise ModelLoadError(f"its weights are quantised ({name}), but config.json has no quantization_config")
        return
    stored, form = Stored(weights.tensors, dtype), _FORMATS[settings["quant_method"]]
    for option, known in form.options.items():
        expect_option(settings, option, *known)
    form.take_weights(stored, settings)
    stored.refuse_left(*form.endings)
    weights.group_sizes = stored.group_sizes
    for name, part in stored.left.items():
        if name.endswith(".pre_quant_scale"):
            raise make_refusal("inputs that are scaled", name, "no pre_quant_scale")
        is_packed = part.get_dtype() == "U8" and name.endswith(".weight")
        if is_packed or part.get_dtype() == "I8" or part.get_dtype().startswith("F8_"):
            raise build_damage_error(f"{name} is of type {part.get_dtype()}, and quantization_config does not say how")
    if stored.num_left_out:
        log.info("%d scales of activations and of a KV cache are left out", stored.num_left_out)
    log.info(
        "%d of %d tensors are quantised (%s) and unpacked to %s", len(stored.unpacked),
        len(stored.unpacked) + len(stored.left), settings["quant_method"], str(dtype).removeprefix("torch."),
    )  # fmt: skip
    weights.set_tensors({**stored.left, **stored.unpacked})


def _take_gguf(stored: Stored, settings: Settings) -> None:
    """GGUF: blocks with scales of their own, under llama.cpp's names."""
    for name in list(stored.left):
        part = stored.left.pop(name)
        plain = rename_tensor(name, settings["architecture"])
        heads = settings["rotary_heads"].get(name.split(".")[-2], 0)
        kind, shape = part.get_dtype(), part.get_shape()
        if plain is None:
            continue  # factors of the rotary embedding, which the configuration has
        if kind in FLOAT_KINDS and not heads:
            stored.left[plain] = part
            continue
        if len(shape) != 2:
            raise build_damage_error(f"{name} is {shape} in the weights, which is no matrix")
        matrix = GgufMatrix(part, plain, heads)
        stored.add_weight(plain, shape, [part], matrix.fill_weight, matrix)


class _Format(NamedTuple):
    """How the weights of a checkpoint are quantised."""

    take_weights: Callable[[Stored, Settings], None]
    options: Options
    """The values that the configuration may have; an option without a row says nothing of the weights."""
    endings: tuple[str, ...]
    """Ends of names. A tensor that is left with one of these has lost the others of its weight."""


_FORMATS = {
    "compressed-tensors": _Format(
        take_compressed, {},
        (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
         ".weight_global_scale"),
    ),
    "gptq": _Format(
        partial(take_by_inputs, is_awq=False),
        {"bits": (4, 8), "checkpoint_format": (None, "gptq", "gptq_v2"), "format": (None, "gptq", "gptq_v2"),
         "pack_dtype": (None, "int32"), "is_marlin_format": (None, False)},
        (".qweight", ".qzeros", ".scales", ".g_idx"),
    ),
    "awq": _Format(
        partial(take_by_inputs, is_awq=True),
        {"bits": (None, 4), "zero_point": (None, True), "version": (None, "gemm", "GEMM"),
         "format": (None, "gemm", "GEMM")},
        (".qweight", ".qzeros", ".scales"),
    ),
    "fp8": _Format(
        take_fp8, {"activation_scheme": (None, "dynamic", "static"), "expert_dtype": (None, "fp8")},
        ("weight_scale", "weight_scale_inv", "_proj_scale_inv"),
    ),
    "mxfp4": _Format(take_mxfp4, {}, ("_blocks", "_scales")),
    "modelopt": _Format(
        take_modelopt, {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")},
        ("weight_scale", "weight_scale_inv", "_proj_scale_inv"),
    ),
    "bitsandbytes": _Format(
        take_bitsandbytes, {},
        (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
    ),
    "gguf": _Format(_take_gguf, {}, ()),
}  # fmt: skip
"""By `quant_method`, which for a GGUF file is what `gguf_model.py` writes."""
