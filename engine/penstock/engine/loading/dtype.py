"""The dtype in which a model is computed, where the settings leave that open.

It follows from the model and from what the machine is, never from a measurement at load: workers on machines of one
kind have the same one, as an answer's tokens depend on it.
"""

from typing import Any, NamedTuple

import torch

from penstock.engine.memory.memory import MIN_POOL_MB, count_total_bytes
from penstock.engine.model.layer import has_common_layers
from penstock.engine.model.recording import is_linear
from penstock.engine.weights.module import build_skeleton, count_bytes

BFLOAT16_ISAS = frozenset(["amx"])
"""Instruction sets on which a model is no slower in bfloat16 than in float32, in prompts as in answers, as measured."""
PARTLY_NATIVE = "the kernels compute a part of the model only, and in bfloat16 tokens would depend on the batch"


class ChosenDtype(NamedTuple):
    """A dtype, and why."""

    dtype: torch.dtype
    reason: str
    is_open: bool = False
    """Whether bfloat16 was chosen for its speed, so that float32 would do as well."""


def choose_dtype(
    name: str, config: Any, device: torch.device, isa: str = "", *, is_quantized: bool = False
) -> ChosenDtype:
    """Return the dtype of that name; for `auto` the model's own on a GPU.

    On a CPU `auto` is bfloat16 for a model that is stored so, in two cases: the kernels compute all of the model and
    are no slower with it, or the machine's memory is too small for float32. Otherwise it is float32, whose tokens are
    the same everywhere. `isa` is empty where torch computes. Raises `ModelLoadError` for a configuration that describes
    no model.
    """
    if name != "auto":
        return ChosenDtype(getattr(torch, name), "PENSTOCK_ENGINE_DTYPE")
    own = getattr(config.get_text_config(), "dtype", None)
    if device.type != "cpu" and isinstance(own, torch.dtype):
        return ChosenDtype(own, "the model's own")
    if is_quantized:
        return ChosenDtype(torch.float32, "its weights are quantised")
    if own != torch.bfloat16 or not isa:
        return ChosenDtype(torch.float32, "its tokens are the same on all processors")
    return _choose_for_kernels(config, isa)


def _choose_for_kernels(config: Any, isa: str) -> ChosenDtype:
    """Return the dtype of a model whose own is bfloat16, on the kernels."""
    skeleton, total = build_skeleton(config, torch.float32), count_total_bytes()
    needed = count_bytes(skeleton)
    if total is not None and needed + MIN_POOL_MB * 2**20 > total:
        lack = f"in float32 its weights would take {needed / 2**20:,.0f} MiB of {total / 2**20:,.0f}"
        return ChosenDtype(torch.bfloat16, lack)
    if isa not in BFLOAT16_ISAS:
        return ChosenDtype(torch.float32, f"prompts in the model's own bfloat16 take longer on {isa}")
    if not has_common_layers(skeleton, is_linear):
        return ChosenDtype(torch.float32, PARTLY_NATIVE)
    return ChosenDtype(torch.bfloat16, f"the model's own, no slower than float32 on {isa}", is_open=True)
