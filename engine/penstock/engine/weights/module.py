"""The transformers model: its structure from the configuration, its parameters from the mapped files."""

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from penstock.engine.weights.files import Progress, to_one_line
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError, build_damage_error

MAX_TIMES_STORED = 2
"""How many parameters a model may have for each value that is stored, beside `MAX_UNSTORED`."""
MAX_UNSTORED = 2**20
MAX_TABLE_BYTES = 2**27
"""The largest size of a model's buffers beside its weights."""


def build_skeleton(config: Any, dtype: torch.dtype, max_parameters: int | None = None, *, sees: bool = True) -> Any:
    """The model that transformers has for a configuration, without memory: every tensor is on `meta`.

    With more than `max_parameters` tensors it is not built to its end; without `sees` it lacks its vision part. Raises
    `ModelLoadError`.
    """
    auto = find_auto_class(config)
    try:
        with torch.device("meta"), _limit_parameters(max_parameters):
            skeleton = auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
        if not sees:
            leave_out_vision(skeleton)
        return skeleton
    except ModelLoadError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {to_one_line(error)}"
        raise build_damage_error(f"config.json describes no model that can be built ({reason})") from error


def leave_out_vision(model: Any) -> int:
    """Take the other modules out of a model than its decoder and its head. Return how many bytes they have."""
    num_bytes, base, decoder = count_bytes(model), model.base_model, model.get_decoder()
    for name, part in list(base.named_children()):
        if part is not decoder:
            setattr(base, name, None)
    return num_bytes - count_bytes(model)


@contextmanager
def _limit_parameters(limit: int | None) -> Iterator[None]:
    """Raise `ModelLoadError` where modules are given more than so many parameters within the context."""
    numbers = itertools.count(1)

    def count_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if limit is not None and parameter is not None and next(numbers) > limit:
            raise build_damage_error(
                f"config.json describes a model with more than {limit:,} tensors, and the weights have far fewer: its "
                "numbers of layers or experts are not those of the weights"
            )

    handle = register_module_parameter_registration_hook(count_parameter)
    try:
        yield
    finally:
        handle.remove()


def find_auto_class(config: Any) -> Any:
    """Return the auto class of transformers that has a model for the configuration. Raises `ModelLoadError`.

    A model that also sees, and has no class for its text alone, is served as a whole, and is given text only.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ModelLoadError(
        f"transformers has no causal language model of type {config.model_type!r}; docs/models.md has those"
    )


def check_weight_sizes(skeleton: nn.Module, weights: MappedWeights) -> None:
    """Raise `ModelLoadError` where configuration and weights give a tensor another number of elements, or kind.

    Before anything is allocated. A name that only one of them knows may be renamed at loading, and an equal number in
    another shape be transposed: those are judged after it, unless all of them together are far more than the weights.
    """
    for name, tensor in skeleton.state_dict().items():
        if name in weights.tensors:
            stored = weights.tensors[name]
            if tensor.numel() != math.prod(stored.get_shape()):
                raise _shape_error(name, stored.get_shape(), tensor.shape)
            if tensor.is_floating_point() and not stored.get_dtype().startswith(("F", "BF")):
                raise build_damage_error(f"{name} is of type {stored.get_dtype()} in the weights, not a float")
    described = sum(parameter.numel() for parameter in {*skeleton.parameters()})
    stored_values = sum(math.prod(part.get_shape()) for part in weights.tensors.values())
    tables = sum(buffer.nbytes for buffer in {*skeleton.buffers()})
    if described > MAX_TIMES_STORED * stored_values + MAX_UNSTORED:
        raise build_damage_error(f"config.json describes {described:,} values, and the weights have {stored_values:,}")
    if tables > weights.num_bytes + MAX_TABLE_BYTES:
        raise build_damage_error(
            f"the tables that config.json asks for take {tables / 2**20:,.0f} MiB beside the weights, as those of "
            "positions do: max_position_embeddings or the like is too large"
        )


def count_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared ones count once."""
    return sum(tensor.nbytes for tensor in {*module.parameters(), *module.buffers()})


def load_module(
    skeleton: Any, config: Any, weights: MappedWeights, device: torch.device, report: Progress, *, sees: bool = True
) -> Any:
    """The model in evaluation mode. transformers renames and merges what a checkpoint has in another form.

    Without `sees`, the weights of its vision part are not read.
    """
    # A model that reads and sees may be served by the class for its text alone, which has the inner configuration.
    own = config if type(skeleton.config) is type(config) else config.get_text_config()
    module, info = (type(skeleton) if sees else _drop_vision(type(skeleton))).from_pretrained(
        None,
        config=own,
        dtype=skeleton.config.dtype,
        state_dict=weights.as_state_dict(report),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _check_loaded_keys(module, info)
    weights.drop_pages()
    # Only the check calls `generate()`; its answer must not depend on the author's defaults.
    plain: Any = GenerationConfig
    module.generation_config = plain(pad_token_id=0)
    return module.eval().requires_grad_(False).to(device)


def _drop_vision(kind: Any) -> Any:
    """Return a class whose models lack their vision part before they get weights."""

    def init(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        leave_out_vision(self)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def load_generation_config(directory: Path) -> Any:
    """Load the author's generation settings from their own file or config.json, as transformers does."""
    plain: Any = GenerationConfig
    if (directory / "generation_config.json").is_file():
        return plain.from_pretrained(directory)
    return plain.from_pretrained(directory, config_file_name="config.json", _from_model_config=True)


def _check_loaded_keys(module: nn.Module, info: Any) -> None:
    """Raise `ModelLoadError` unless every parameter came from the weights in its shape, and no layer was left over."""
    for name, stored, configured in sorted(info["mismatched_keys"], key=str):
        raise _shape_error(name, stored, configured)
    if info["missing_keys"]:
        missing = sorted(map(str, info["missing_keys"]))
        raise build_damage_error(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    left = _find_surplus_layers(info["unexpected_keys"], module.state_dict())
    if left:
        raise build_damage_error(f"the weights have more layers than config.json says: {left[0]} is left over")


def _find_surplus_layers(unexpected: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return left-over tensors that the model also has in other layers."""
    forms = {re.sub(r"\.\d+\.", ".#.", name) for name in known}
    return sorted(name for name in unexpected if re.sub(r"\.\d+\.", ".#.", name) in forms)


def _shape_error(name: str, stored: Iterable[int], configured: Iterable[int]) -> ModelLoadError:
    return build_damage_error(f"{name} is {list(stored)} in the weights, and {list(configured)} by config.json")
