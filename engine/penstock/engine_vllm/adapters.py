"""LoRA adapters, which vLLM computes in place of the model: their files, and whether they fit the model.

The files are read at the start alone. An adapter's digest is in the names of its blocks, in its jobs and in the logs of
its answers: two adapters, and two versions of one name, share nothing.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from penstock.engine.weights.files import to_one_line
from penstock.engine.weights.module import build_skeleton
from penstock.engine.weights.quantized import take_quantization
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be told of."""
_PREFIX, _PARTS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


class Adapter(NamedTuple):
    """An adapter that fits the model."""

    directory: Path
    digest: str
    """Of its configuration and its weights, 64 hex digits."""
    rank: int
    """The largest of its modules."""


def read_adapters(directories: Mapping[str, Path], config: Any) -> dict[str, Adapter]:
    """Return the adapters by name. `config` is the model's. Raises `ModelLoadError` for one that does not fit it."""
    if not directories:
        return {}
    from vllm.lora.peft_helper import PEFTHelper

    if not hasattr(PEFTHelper, "get_rank_and_scaling"):
        raise ModelLoadError(
            "PENSTOCK_ENGINE_ADAPTERS: this version of vLLM computes one rank for all layers: take 0.32"
        )
    plain = copy.deepcopy(config)
    take_quantization(plain)
    skeleton = build_skeleton(plain, torch.float32)
    found = dict[str, Adapter]()
    for name, directory in directories.items():
        try:
            found[name] = _read_adapter(directory, skeleton)
        except (ModelLoadError, OSError, ValueError, TypeError) as error:
            raise ModelLoadError(f"PENSTOCK_ENGINE_ADAPTERS: {name!r} ({directory}): {to_one_line(error)}") from error
    return found


def make_arguments(adapters: Mapping[str, Adapter], *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments by which vLLM has places for all adapters at the same time, and reads none again."""
    if not adapters:
        return {}
    most = max(adapter.rank for adapter in adapters.values())
    # On a CPU it computes rows of the model alone with the last place (vllm#48421), which stays empty: all zeros.
    num_places = len(adapters) + is_cpu
    return {
        "enable_lora": True,
        "max_loras": num_places,
        "max_cpu_loras": num_places,
        "max_lora_rank": next(rank for rank in RANKS if rank >= most),
    }


def load_adapters(core: Any, adapters: Mapping[str, Adapter]) -> "dict[str, LoRARequest]":
    """Have vLLM load the adapters. Return them by digest, as its requests name them. `core` is its `EngineCore`.

    Raises `ModelLoadError` for one that vLLM refuses, or whose files have changed meanwhile.
    """
    loaded = dict[str, "LoRARequest"]()
    for number, (name, adapter) in enumerate(adapters.items(), 1):
        from vllm.lora.request import LoRARequest

        try:
            loaded[adapter.digest] = LoRARequest(adapter.digest, number, str(adapter.directory))
            core.add_lora(loaded[adapter.digest])
        except Exception as error:
            raise ModelLoadError(f"PENSTOCK_ENGINE_ADAPTERS: vLLM refuses {name!r}: {to_one_line(error)}") from error
        if _hash_adapter(adapter.directory) != adapter.digest:
            raise ModelLoadError(f"PENSTOCK_ENGINE_ADAPTERS: the files of {name!r} changed while they were read")
    return loaded


def _read_adapter(directory: Path, skeleton: nn.Module) -> Adapter:
    from vllm.lora.peft_helper import PEFTHelper

    for file in (CONFIG, WEIGHTS):
        if not (directory / file).is_file():
            raise ModelLoadError(f"there is no file {directory / file}: give the directory that PEFT has saved")
    digest, told = _hash_adapter(directory), json.loads((directory / CONFIG).read_bytes())
    if not isinstance(told, dict):
        raise ModelLoadError(f"its {CONFIG} is no JSON object")
    if (kind := told.get("peft_type", "LORA")) != "LORA":
        raise ModelLoadError(f"its peft_type is {kind!r}: vLLM computes LORA alone")
    helper = PEFTHelper.from_dict(told)
    rank = max([helper.r, *helper.rank_pattern.values()])
    if rank > RANKS[-1]:
        raise ModelLoadError(f"its rank is {rank}, and vLLM computes ranks up to {RANKS[-1]}")
    helper.validate_legal(_Limit(rank))
    _check_shapes(MappedWeights([directory / WEIGHTS]), skeleton, helper)
    return Adapter(directory, digest, rank)


class _Limit(NamedTuple):
    """What vLLM's check reads of its configuration."""

    max_lora_rank: int


def _check_shapes(weights: MappedWeights, skeleton: nn.Module, helper: "PEFTHelper") -> None:
    """Raise `ModelLoadError` unless each tensor is one of a pair for a linear layer of the model, in that one's shape.

    vLLM copies a smaller matrix into a larger place, and says nothing.
    """
    layers = {name: module for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in weights.tensors.items()}
    if not shapes:
        raise ModelLoadError("it has no weights")
    for name in shapes:
        end = next((part for part in _PARTS if name.endswith(part)), "")
        module = name.removeprefix(_PREFIX).removesuffix(end)
        if not end or not name.startswith(_PREFIX) or module not in layers:
            raise ModelLoadError(f"it has {name}, and the model has no linear layer {module}: it is of another model")
        layer, rank = layers[module], helper.get_rank_and_scaling(module)[0]
        found = tuple(shapes.get(f"{_PREFIX}{module}{part}") for part in _PARTS)
        fitting = (rank, layer.in_features), (layer.out_features, rank)
        if found != fitting:
            raise ModelLoadError(
                f"its matrices for {module} are {found}, and {fitting} would fit: it is of another model"
            )


def _hash_adapter(directory: Path) -> str:
    combined = hashlib.sha256(b"penstock adapter 1")
    for file in (CONFIG, WEIGHTS):
        with (directory / file).open("rb") as content:
            combined.update(hashlib.file_digest(content, "sha256").digest())
    return combined.hexdigest()
