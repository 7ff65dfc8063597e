"""Published quantised checkpoints: each weight is unpacked, when it is read, to the plain one that the model has.

    quantization_config ─▶ a known format? ─▶ stored tensors: complete, of the right shapes? ─▶ when read: unpack

Every format stores whole numbers or small floats in a grid of groups, and a scale for each group; some also the number
that stands for zero. A weight is (number - zero) * scale, computed in float32 and rounded once to the dtype in which
the engine runs. Only weights are unpacked: activations and the KV cache are never quantised here, so scales that a
checkpoint has for them are left out.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.gguf_file import FLOAT_KINDS
from penstock.engine.gguf_model import rename_tensor
from penstock.engine.gguf_weights import GgufMatrix
from penstock.engine.kernels.memory import map_zeros
from penstock.engine.weights import MappedWeights, PackedTensor
from penstock.errors import ModelLoadError

UNPACKING_VERSION = 1
"""Counts the changes of what is computed from stored tensors; part of the fingerprint of quantised models."""

Settings = dict[str, Any]
"""The `quantization_config` of a config.json, or a part of it."""
ReadRows = Callable[[slice], Tensor]
"""Returns the stored numbers of some rows of a weight: [rows, columns]."""

log = logging.getLogger(__name__)

_NVFP4_FORMAT = "nvfp4-pack-quantized"
_CHUNK = 2**18  # how many numbers are unpacked at a time: few enough to stay in the processor's cache
_FLOATS = ("F16", "BF16", "F32")
_FP8 = ("F8_E4M3", "F8_E5M2")
_E8M0 = "F8_E8M0"

_FP4_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FP4_PAIRS = torch.stack([_FP4_VALUES.repeat(16), _FP4_VALUES.repeat_interleave(16)], dim=1)
"""By byte: the two numbers of 4 bits in it, the lower half first."""
_NVFP4_WIDTH = 16
"""How many numbers share a scale."""
_POWERS_OF_TWO = torch.cat([2.0 ** (torch.arange(255, dtype=torch.float64) - 127), torch.tensor([math.nan])]).float()
"""By byte: the scale that it stands for in E8M0."""
_AWQ_SHIFTS = torch.tensor([[0], [16], [4], [20], [8], [24], [12], [28]], dtype=torch.int32)
"""By column: where its 4 bits are within a word of eight columns."""

_LEFT_OUT = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale",
    ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip
"""Ends of the names of what is stored for activations and for a KV cache."""
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
    another shape or type than the format says. What is wrong with a tensor's values is found, and raised, at reading.
    """
    if settings is None:
        for name, part in weights.tensors.items():
            if name.endswith(_PACKED_NAMES) or part.get_dtype().startswith("F8_"):
                raise ModelLoadError(f"its weights are quantised ({name}), but config.json has no quantization_config")
        return
    stored = _Stored(weights.tensors, dtype)
    _FORMATS[settings["quant_method"]](stored, settings)
    for name, part in stored.left.items():
        if name.endswith(".pre_quant_scale"):
            raise _make_refusal("inputs that are scaled", name, "no pre_quant_scale")
        is_packed = part.get_dtype() == "U8" and name.endswith(".weight")
        if is_packed or part.get_dtype() == "I8" or part.get_dtype().startswith("F8_"):
            raise ModelLoadError(f"{name} is of type {part.get_dtype()}, and quantization_config does not say how")
    if stored.num_left_out:
        log.info("%d scales of activations and of a KV cache are left out", stored.num_left_out)
    log.info(
        "%d of %d tensors are quantised (%s) and unpacked to %s",
        len(stored.unpacked),
        len(stored.unpacked) + len(stored.left),
        settings["quant_method"],
        str(dtype).removeprefix("torch."),
    )
    weights.set_tensors({**stored.left, **stored.unpacked})


class _Stored:
    """The tensors of a checkpoint, of which some are taken for weights that will be unpacked."""

    def __init__(self, tensors: dict[str, Any], dtype: torch.dtype) -> None:
        self.left = {name: part for name, part in tensors.items() if not name.endswith(_LEFT_OUT)}
        """What is not part of a quantised weight, by name."""
        self.num_left_out = len(tensors) - len(self.left)
        """Number of tensors that are for activations or a KV cache."""
        self.unpacked: dict[str, PackedTensor] = {}
        """By the names that the weights have in the plain model."""
        self.dtype = dtype

    def find_modules(self, ending: str) -> list[str]:
        """Return the names that end so, without the ending."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def find_of_type(self, kinds: Iterable[str]) -> list[str]:
        """Return the names of all tensors of these types of safetensors."""
        return [name for name, part in self.left.items() if part.get_dtype() in kinds]

    def take_tensor(self, name: str, kinds: Iterable[str], *shapes: list[int]) -> Any:
        """Return the slice of a tensor, which is then no longer left.

        Raises `ModelLoadError` if it is missing, is of no such type, or has none of the shapes where some are given.
        """
        part = self.left.pop(name, None)
        if part is None:
            raise ModelLoadError(f"{name} is missing in the weights")
        if part.get_dtype() not in kinds:
            raise ModelLoadError(f"{name} is of type {part.get_dtype()} in the weights, not {' or '.join(kinds)}")
        if shapes and part.get_shape() not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ModelLoadError(f"{name} is {part.get_shape()} in the weights, and {expected} by config.json")
        return part

    def take_tensor_if(self, is_needed: bool, name: str, kinds: Iterable[str], *shapes: list[int]) -> Any | None:
        """Return what `take_tensor` does, or None for a tensor that is neither needed nor there."""
        return self.take_tensor(name, kinds, *shapes) if is_needed or name in self.left else None

    def find_matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of a tensor. Raises `ModelLoadError` if there is no such matrix."""
        if name not in self.left:
            raise ModelLoadError(f"{name} is missing in the weights")
        shape = self.left[name].get_shape()
        if len(shape) != 2:
            raise ModelLoadError(f"{name} is {shape} in the weights, which is no matrix")
        return shape[0], shape[1]

    def has_type(self, name: str, kind: str) -> bool:
        """Return whether there is a tensor of this name and type."""
        return name in self.left and self.left[name].get_dtype() == kind

    def add_weight(
        self, name: str, shape: list[int], parts: list[Any], fill_weight: Callable[..., None],
        matrix: GgufMatrix | None = None,
    ) -> None:  # fmt: skip
        """Add a weight of this name and shape. `fill_weight(out, *parts)` computes it when it is read.

        A part that the checkpoint does not have is None, here and there. `matrix` is what it is stored as in GGUF.
        """

        def unpack_parts(*tensors: Tensor) -> Tensor:
            given = iter(tensors)
            # A mapping of its own goes back to the system when the kernels have packed the weight in their order.
            out = map_zeros(math.prod(shape), self.dtype).view(shape)
            try:
                fill_weight(out, *(None if part is None else next(given) for part in parts))
            except ValueError as error:
                raise ModelLoadError(f"{name} cannot be unpacked: {error}") from error
            return out

        if min(shape) < 1:
            raise ModelLoadError(f"{name} has no values: {shape}")
        if name in self.left or name in self.unpacked:
            raise ModelLoadError(f"{name} is in the weights twice, plain and quantised")
        given = tuple(part for part in parts if part is not None)
        self.unpacked[name] = PackedTensor(given, shape, unpack_parts, matrix)

    def refuse_left(self, *endings: str) -> None:
        """Raise `ModelLoadError` for a tensor with one of these endings that was not taken: its weight is missing."""
        for name in self.left:
            if name.endswith(endings):
                raise ModelLoadError(f"{name} is in the weights without the tensors that belong to it")


# Formats. Each takes what it knows, and raises `ModelLoadError` for the rest.


def _unpack_compressed_tensors(stored: _Stored, settings: Settings) -> None:
    """compressed-tensors: whole numbers packed into words or stored as bytes, FP8, or NVFP4."""
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _make_refusal("transform_config", repr(settings["transform_config"]), "no transform_config")
    _expect_option(settings.get("sparsity_config") or {}, "format", None, "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError("quantization_config has no config_groups")
    schemes = [_check_scheme(name, group, settings) for name, group in groups.items()]
    for module in stored.find_modules(".weight_packed"):
        if stored.has_type(f"{module}.weight_packed", "U8"):
            _find_scheme(module, schemes, "nvfp4-pack-quantized")
            _take_nvfp4(stored, module, "weight_packed", "weight_global_scale", is_divisor=True)
        else:
            _take_packed(stored, module, _find_scheme(module, schemes, "pack-quantized"))
    for name in stored.find_of_type(("I8", *_FP8)):
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            _take_bytes(stored, module, _find_scheme(module, schemes, "int-quantized"))
    endings = ("packed", "scale", "zero_point", "g_idx", "shape", "global_scale")
    stored.refuse_left(*(f".weight_{ending}" for ending in endings))


def _check_scheme(name: str, group: Any, settings: Settings) -> Settings:
    """Return what a group of compressed-tensors says of its weights, with its targets and format."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelLoadError(f"quantization_config has no weights in its group {name}")
    scheme = {**weights, "targets": group.get("targets") or [], "format": group.get("format") or settings.get("format")}
    _expect_option(
        scheme, "format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _NVFP4_FORMAT
    )
    if scheme["format"] == _NVFP4_FORMAT:
        _expect_option(scheme, "num_bits", 4)
        _expect_option(scheme, "group_size", None, _NVFP4_WIDTH)
        return scheme
    packed = scheme["format"] == "pack-quantized"
    _expect_option(scheme, "num_bits", *((4, 8) if packed else (8,)))
    _expect_option(scheme, "type", *(("int",) if packed else ("int", "float")))
    size = scheme.get("group_size") or 0
    scheme["strategy"] = scheme.get("strategy") or ("group" if size > 0 else "channel" if size == -1 else "tensor")
    _expect_option(scheme, "strategy", "tensor", "channel", "group", "block")
    return scheme


def _find_scheme(module: str, schemes: list[Settings], kind: str) -> Settings:
    """Return the scheme that has the module as a target: by its name if there is one, else by its class."""
    named = [s for s in schemes if any(_is_target(module, target) for target in s["targets"])]
    by_class = [s for s in schemes if any(target[:1].isupper() for target in s["targets"])]
    fitting = [s for s in named or by_class if _is_stored_as(s["format"], kind)]
    if len(fitting) != 1:
        raise ModelLoadError(f"{module} is in {len(fitting)} groups of quantization_config, not in one")
    return fitting[0]


def _is_stored_as(form: str, kind: str) -> bool:
    """Return whether tensors of a format are stored as those of another: all formats of bytes are like each other."""
    return form == kind if kind.endswith("pack-quantized") else not form.endswith("pack-quantized")


def _is_target(module: str, target: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _take_packed(stored: _Stored, module: str, scheme: Settings) -> None:
    """Take a weight of 4 or 8 bits in words of 32: [rows, columns * bits / 32], in rows of whole words."""
    bits = scheme["num_bits"]
    rows, columns = _read_shape(stored, f"{module}.weight_shape")
    words = stored.take_tensor(f"{module}.weight_packed", ("I32",), [rows, math.ceil(columns * bits / 32)])
    scales, grid, width = _take_scales(stored, f"{module}.weight_scale", rows, columns, scheme)
    half = 1 << (bits - 1)
    packed = stored.has_type(f"{module}.weight_zero_point", "I32")  # older writers stored them as bytes
    zero_shapes = [[math.ceil(grid[0] * bits / 32), grid[1]]] if packed else _list_shapes(grid)
    is_needed = scheme.get("symmetric") is False
    zeros = stored.take_tensor_if(is_needed, f"{module}.weight_zero_point", ("I32", "I8"), *zero_shapes)
    is_needed = scheme.get("actorder") in ("group", "dynamic")
    order = stored.take_tensor_if(is_needed, f"{module}.weight_g_idx", ("I32", "I64"), [columns])

    def fill_weight(out: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> None:
        if zeros is not None:
            zeros = _unpack_bits(zeros.T, bits)[:, : grid[0]].T - half if packed else zeros.reshape(grid)
        if order is not None and bool((order == -1).all()):  # so it is where columns were not reordered
            order = None
        _fill_weight(
            out,
            lambda chosen: _unpack_bits(words[chosen], bits)[:, :columns] - half,
            _spread_rows(scales.reshape(grid), rows, scheme),
            None if zeros is None else _spread_rows(zeros, rows, scheme),
            _group_columns(columns, width, order),
        )

    stored.add_weight(f"{module}.weight", [rows, columns], [words, scales, zeros, order], fill_weight)


def _read_shape(stored: _Stored, name: str) -> tuple[int, int]:
    """Return a weight's numbers of rows and columns, which are stored as a tensor."""
    shape = stored.take_tensor(name, ("I64", "I32"), [2])[...].tolist()
    if min(shape) < 1:
        raise ModelLoadError(f"{name} is damaged: {shape}")
    return shape[0], shape[1]


def _take_bytes(stored: _Stored, module: str, scheme: Settings) -> None:
    """Take a weight whose numbers are stored as they are, one in a byte."""
    name = f"{module}.weight"
    kinds = ("I8",) if scheme["type"] == "int" else _FP8
    rows, columns = stored.find_matrix_shape(name)
    weight = stored.take_tensor(name, kinds)
    scales, grid, width = _take_scales(stored, f"{name}_scale", rows, columns, scheme)
    is_needed = scheme.get("symmetric") is False
    zeros = stored.take_tensor_if(is_needed, f"{name}_zero_point", ("I8", *_FP8), *_list_shapes(grid))

    def fill_weight(out: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        _fill_weight(
            out,
            weight.__getitem__,
            _spread_rows(scales.reshape(grid), rows, scheme),
            None if zeros is None else _spread_rows(zeros.reshape(grid), rows, scheme),
            _group_columns(columns, width),
        )

    stored.add_weight(name, [rows, columns], [weight, scales, zeros], fill_weight)


def _take_scales(
    stored: _Stored, name: str, rows: int, columns: int, scheme: Settings
) -> tuple[Any, tuple[int, int], int]:
    """Return the slice of a weight's scales, their grid by rows and columns, and how many columns share one."""
    strategy, height, width = scheme["strategy"], rows, columns
    if strategy == "channel":
        height = 1
    elif strategy == "group":
        height, width = 1, _read_positive(scheme, "group_size")
    elif strategy == "block":
        height, width = _read_block_size(scheme, "block_structure")
    grid = math.ceil(rows / height), math.ceil(columns / width)
    return stored.take_tensor(name, _FLOATS, *_list_shapes(grid)), grid, width


def _unpack_gptq(stored: _Stored, settings: Settings) -> None:
    """GPTQ: words of 32 bits along the inputs, [inputs * bits / 32, outputs]; groups of inputs, in any order."""
    _expect_option(settings, "bits", 4, 8)
    _expect_option(settings, "checkpoint_format", None, "gptq", "gptq_v2")
    _expect_option(settings, "format", None, "gptq", "gptq_v2")
    _expect_option(settings, "pack_dtype", None, "int32")
    _expect_option(settings, "is_marlin_format", None, False)
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if changes and not pattern.startswith("-:"):
            raise _make_refusal("other settings for some modules", f"dynamic {pattern!r}", "one setting for all")
    is_second = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
    for module in stored.find_modules(".qweight"):
        _take_gptq(stored, module, settings, is_second=is_second)
    stored.refuse_left(".qweight", ".qzeros", ".scales", ".g_idx")


def _take_gptq(stored: _Stored, module: str, settings: Settings, *, is_second: bool) -> None:
    bits = settings["bits"]
    (words, outputs), size = stored.find_matrix_shape(f"{module}.qweight"), settings.get("group_size", -1)
    inputs = words * 32 // bits
    width = inputs if size == -1 else _read_positive(settings, "group_size")
    num_groups = math.ceil(inputs / width)
    qweight = stored.take_tensor(f"{module}.qweight", ("I32",))
    scales = stored.take_tensor(f"{module}.scales", _FLOATS, [num_groups, outputs])
    qzeros = stored.take_tensor(f"{module}.qzeros", ("I32",), [num_groups, math.ceil(outputs * bits / 32)])
    order = stored.take_tensor_if(bool(settings.get("desc_act")), f"{module}.g_idx", ("I32", "I64"), [inputs])

    def fill_weight(out: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, order: Tensor | None) -> None:
        # The first form has one less in each place. Its writers subtract from whole words, where a zero of 0 borrows.
        word = sum(1 << place for place in range(0, 32, bits))
        is_first = not is_second and not settings.get("sym")
        zeros = _unpack_bits(qzeros + word if is_first else qzeros, bits)[:, :outputs]
        if settings.get("sym"):
            # Some writers name the first form and store zeros as in the second. Symmetric ones are known anyway.
            half = 1 << (bits - 1)
            if not bool(((zeros == half - 1) | (zeros == half)).all()) or bool((zeros != zeros[0, 0]).any()):
                raise ValueError(f"{module}.qzeros is not symmetric, as quantization_config says it is")
            zeros = torch.full_like(zeros, half)
        grouping = _group_columns(inputs, width, order)
        _fill_weight(out, lambda chosen: _unpack_bits(qweight[:, chosen].T, bits), scales.T, zeros.T, grouping)

    stored.add_weight(f"{module}.weight", [outputs, inputs], [qweight, scales, qzeros, order], fill_weight)


def _unpack_awq(stored: _Stored, settings: Settings) -> None:
    """AWQ in its order for GEMM: eight outputs in a word, [inputs, outputs / 8]; groups of inputs."""
    _expect_option(settings, "bits", None, 4)
    _expect_option(settings, "zero_point", None, True)
    for option in ("version", "format"):
        _expect_option({option: str(settings.get(option) or "gemm").lower()}, option, "gemm")
    for module in stored.find_modules(".qweight"):
        _take_awq(stored, module, settings)
    stored.refuse_left(".qweight", ".qzeros", ".scales")


def _take_awq(stored: _Stored, module: str, settings: Settings) -> None:
    inputs, words = stored.find_matrix_shape(f"{module}.qweight")
    outputs = 8 * words
    size = settings.get("group_size", 128)
    width = inputs if size == -1 else _read_positive({"group_size": size}, "group_size")
    num_groups = math.ceil(inputs / width)
    qweight = stored.take_tensor(f"{module}.qweight", ("I32",))
    qzeros = stored.take_tensor(f"{module}.qzeros", ("I32",), [num_groups, outputs // 8])
    scales = stored.take_tensor(f"{module}.scales", _FLOATS, [num_groups, outputs])

    def unpack_words(words: Tensor) -> Tensor:
        return ((words.T.contiguous().unsqueeze(1) >> _AWQ_SHIFTS) & 15).flatten(0, 1)

    def fill_weight(out: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> None:
        def read_rows(chosen: slice) -> Tensor:
            return unpack_words(qweight[:, chosen.start // 8 : chosen.stop // 8])

        _fill_weight(out, read_rows, scales.T, unpack_words(qzeros), _group_columns(inputs, width))

    stored.add_weight(f"{module}.weight", [outputs, inputs], [qweight, qzeros, scales], fill_weight)


def _unpack_fp8(stored: _Stored, settings: Settings) -> None:
    """FP8 with a scale for the tensor, for each row, or for each block of rows and columns, also in stacks."""
    _expect_option(settings, "activation_scheme", None, "dynamic", "static")
    _expect_option(settings, "expert_dtype", None, "fp8")
    block = settings.get("weight_block_size")
    height, width = _read_block_size(settings, "weight_block_size") if block else (0, 0)
    for name in stored.find_of_type(_FP8):
        weight = stored.take_tensor(name, _FP8)
        shape = weight.get_shape()
        if len(shape) < 2:
            raise ModelLoadError(f"{name} is {shape} in the weights, which is no matrix")
        scale = f"{name}_scale" if f"{name}_scale" in stored.left else f"{name}_scale_inv"
        _take_fp8(stored, name, weight, scale, (height or shape[-2], width or shape[-1]))
    stored.refuse_left("weight_scale", "weight_scale_inv", "_proj_scale_inv")


def _take_fp8(stored: _Stored, name: str, weight: Any, scale: str, block: tuple[int, int]) -> None:
    shape: list[int] = weight.get_shape()
    *stack, rows, columns = shape
    grids = {(math.ceil(rows / block[0]), math.ceil(columns / block[1])): block, (1, 1): (rows, columns)}
    grids[rows, 1] = (1, columns)
    by_shape = {(): (1, 1), (1,): (1, 1), tuple(stack): (1, 1), (*stack, rows): (rows, 1)}
    by_shape |= {(*stack, *grid): grid for grid in grids}
    scales = stored.take_tensor(scale, (*_FLOATS, _E8M0), *map(list, by_shape))
    grid = by_shape[tuple(scales.get_shape())]
    height, width = grids[grid]

    def fill_weight(out: Tensor, weight: Tensor, scales: Tensor) -> None:
        grid_of_each = scales.float().reshape(-1, *grid).expand(math.prod(stack), *grid)
        for part, stored_part, grid_of_part in zip(
            out.view(-1, rows, columns), weight.view(-1, rows, columns), grid_of_each, strict=True
        ):
            _fill_weight(
                part,
                stored_part.__getitem__,
                grid_of_part.repeat_interleave(height, dim=0)[:rows],
                None,
                _group_columns(columns, width),
            )

    stored.add_weight(name, shape, [weight, scales], fill_weight)


def _unpack_mxfp4(stored: _Stored, settings: Settings) -> None:
    """MXFP4 as in gpt-oss: [experts, outputs, groups, 16] bytes of two numbers each, and the power of two of a group.

    The plain weight has inputs before outputs.
    """
    for name in stored.find_modules("_blocks"):
        shape = stored.left[f"{name}_blocks"].get_shape()
        if len(shape) != 4 or shape[-1] != 16:
            raise ModelLoadError(f"{name}_blocks is {shape} in the weights, not [experts, outputs, groups, 16]")
        blocks = stored.take_tensor(f"{name}_blocks", ("U8",))
        scales = stored.take_tensor(f"{name}_scales", ("U8",), shape[:-1])

        def fill_weight(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
            for part, numbers, powers in zip(out, blocks, scales, strict=True):
                _fill_weight(part.T, partial(_read_fp4, numbers), _POWERS_OF_TWO[powers.int()])

        stored.add_weight(name, [shape[0], shape[2] * 32, shape[1]], [blocks, scales], fill_weight)
    stored.refuse_left("_blocks", "_scales")


def _unpack_modelopt(stored: _Stored, settings: Settings) -> None:
    """ModelOpt: FP8 with a scale for the tensor or for each row, and NVFP4; both beside each other in one model."""
    _expect_option(settings, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
    for module in stored.find_modules(".weight_scale_2"):
        _take_nvfp4(stored, module, "weight", "weight_scale_2", is_divisor=False)
    for name in stored.find_of_type(_FP8):
        if name.endswith(".weight_scale"):
            raise ModelLoadError(f"{name}_2 is missing in the weights")
    _unpack_fp8(stored, {})


def _take_nvfp4(stored: _Stored, module: str, packed: str, global_scale: str, *, is_divisor: bool) -> None:
    """Take a weight in NVFP4: two numbers of 4 bits in a byte, an FP8 scale for 16 of them, and one for all scales.

    `is_divisor`: whether scales are divided by the one for all, or multiplied by it.
    """
    shape = stored.left[f"{module}.{packed}"].get_shape() if f"{module}.{packed}" in stored.left else []
    if len(shape) != 2 or shape[1] * 2 % _NVFP4_WIDTH:
        raise ModelLoadError(f"{module}.{packed} is {shape or 'missing'} in the weights, not [outputs, inputs / 2]")
    rows, columns = shape[0], 2 * shape[1]
    pairs = stored.take_tensor(f"{module}.{packed}", ("U8",))
    scales = stored.take_tensor(f"{module}.weight_scale", ("F8_E4M3",), [rows, columns // _NVFP4_WIDTH])
    whole = stored.take_tensor(f"{module}.{global_scale}", ("F32",), [], [1])

    def fill_weight(out: Tensor, pairs: Tensor, scales: Tensor, whole: Tensor) -> None:
        by_group = scales.float() / whole if is_divisor else scales.float() * whole
        _fill_weight(out, partial(_read_fp4, pairs), by_group)

    stored.add_weight(f"{module}.weight", [rows, columns], [pairs, scales, whole], fill_weight)


def _unpack_bitsandbytes(stored: _Stored, settings: Settings) -> None:
    """bitsandbytes: 4 bits that stand for 16 values, with a largest value for each block; or 8 bits by rows."""
    for name in [name for name in stored.left if ".weight.quant_state.bitsandbytes__" in name]:
        _take_blocks_of_4_bits(stored, name)
    for module in stored.find_modules(".SCB"):
        rows, columns = stored.find_matrix_shape(f"{module}.weight")
        weight = stored.take_tensor(f"{module}.weight", ("I8",))
        most = stored.take_tensor(f"{module}.SCB", ("F32",), [rows])
        stored.take_tensor_if(False, f"{module}.weight_format", ("U8",))

        def fill_weight(out: Tensor, weight: Tensor, most: Tensor) -> None:
            _fill_weight(out, weight.__getitem__, most[:, None] * _BYTE_SCALE)

        stored.add_weight(f"{module}.weight", [rows, columns], [weight, most], fill_weight)
    stored.refuse_left(".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")


_BYTE_SCALE = 1.0 / 127
"""What bitsandbytes multiplies a row's largest value by, so that 127 stands for it."""


def _take_blocks_of_4_bits(stored: _Stored, name: str) -> None:
    """Take a weight of bitsandbytes in 4 bits, by the name of the tensor that describes it as JSON.

    The upper half of a byte comes first. The blocks' largest values may be bytes again, with blocks of their own.
    """
    weight_name = name.partition(".quant_state.")[0]
    try:
        about = json.loads(bytes(stored.take_tensor(name, ("U8",))[...].tolist()))
        rows, columns = about["shape"]
        block, inner, offset = about["blocksize"], about.get("nested_blocksize"), about.get("nested_offset", 0.0)
        num_blocks, rest = divmod(rows * columns, block)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{name} is damaged: {error}") from error
    if rest or block % 2:
        raise ModelLoadError(f"{weight_name} has {rows} x {columns} values, and no whole blocks of {block}")
    pairs = stored.take_tensor(weight_name, ("U8",), [rows * columns // 2, 1])
    most = stored.take_tensor(f"{weight_name}.absmax", ("U8",) if inner else ("F32",), [num_blocks])
    values = stored.take_tensor(f"{weight_name}.quant_map", ("F32",), [16])
    nested: list[Any] = [None, None]
    if inner:
        nested[0] = stored.take_tensor(f"{weight_name}.nested_absmax", ("F32",), [math.ceil(num_blocks / inner)])
        nested[1] = stored.take_tensor(f"{weight_name}.nested_quant_map", ("F32",), [256])

    def fill_weight(
        out: Tensor, pairs: Tensor, most: Tensor, values: Tensor, outer: Tensor | None, inner_values: Tensor | None
    ) -> None:
        if outer is not None and inner_values is not None:
            most = inner_values[most.int()] * outer.repeat_interleave(inner)[:num_blocks] + offset
        by_byte = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
        by_block = pairs.view(num_blocks, block // 2)
        _fill_weight(
            out.view(num_blocks, block), lambda chosen: by_byte[by_block[chosen].int()].flatten(1), most[:, None]
        )

    stored.add_weight(weight_name, [rows, columns], [pairs, most, values, *nested], fill_weight)


def _unpack_gguf(stored: _Stored, settings: Settings) -> None:
    """GGUF: blocks with scales of their own, under llama.cpp's names."""
    for name in list(stored.left):
        part = stored.left.pop(name)
        plain, heads = (
            rename_tensor(name, settings["architecture"]),
            settings["rotary_heads"].get(name.split(".")[-2], 0),
        )
        kind, shape = part.get_dtype(), part.get_shape()
        if plain is None:
            continue  # factors of the rotary embedding, which the configuration has
        if kind in FLOAT_KINDS and not heads:
            stored.left[plain] = part
            continue
        if len(shape) != 2:
            raise ModelLoadError(f"{name} is {shape} in the weights, which is no matrix")
        matrix = GgufMatrix(part, heads)
        stored.add_weight(plain, shape, [part], matrix.fill_weight, matrix)


_FORMATS: dict[str, Callable[[_Stored, Settings], None]] = {
    "compressed-tensors": _unpack_compressed_tensors,
    "gptq": _unpack_gptq,
    "awq": _unpack_awq,
    "fp8": _unpack_fp8,
    "mxfp4": _unpack_mxfp4,
    "modelopt": _unpack_modelopt,
    "bitsandbytes": _unpack_bitsandbytes,
    "gguf": _unpack_gguf,
}


# Options


def _expect_option(settings: Settings, option: str, *known: object) -> None:
    """Raise `ModelLoadError` if an option has none of the known values."""
    if settings.get(option) not in known:
        wanted = " or ".join(str(value) for value in known if value not in (None, {}))
        raise _make_refusal(option, repr(settings.get(option)), f"{option} {wanted}" if wanted else f"no {option}")


def _make_refusal(what: str, value: str, wanted: str) -> ModelLoadError:
    return ModelLoadError(
        f"its weights are quantised with {what} ({value[:100]}), which cannot be unpacked: use a checkpoint with "
        f"{wanted}, or one that is not quantised"
    )


def _read_positive(settings: Settings, option: str) -> int:
    value = settings.get(option)
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"quantization_config has {option} {value!r}, not a positive number")
    return value


def _read_block_size(settings: Settings, option: str) -> tuple[int, int]:
    value = settings.get(option)
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise ModelLoadError(f"quantization_config has {option} {value!r}, not two positive numbers")
    return value[0], value[1]


def _list_shapes(grid: tuple[int, int]) -> list[list[int]]:
    """Return the shapes in which a grid of scales may be stored: a single column or number has fewer dimensions."""
    rows, columns = grid
    shapes = [[rows, columns]]
    if columns == 1:
        shapes.append([rows])
    return [*shapes, []] if grid == (1, 1) else shapes


# Arithmetic


def _unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers in each word of 32 bits, the lowest first: [n, words] to [n, words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _read_fp4(pairs: Tensor, chosen: slice) -> Tensor:
    """Return the numbers of some rows of FP4: of [rows, groups, bytes] to [n, groups * bytes * 2]."""
    return _FP4_PAIRS[pairs[chosen].int()].flatten(1)


def _spread_rows(grid: Tensor, rows: int, scheme: Settings) -> Tensor:
    """Return the grid with a row for each row of the weight."""
    if grid.shape[0] == rows:
        return grid
    height = _read_block_size(scheme, "block_structure")[0] if scheme["strategy"] == "block" else rows
    return grid.float().repeat_interleave(height, dim=0)[:rows]


def _group_columns(columns: int, width: int, order: Tensor | None = None) -> Tensor | None:
    """Return the group of each column, or None if the groups are in order and as wide as each other.

    `order` is what the checkpoint says. Raises `ValueError` if it has groups that there are not.
    """
    plain = torch.arange(columns) // width
    if order is not None and not torch.equal(order.long(), plain):
        if bool(((order < 0) | (order > plain[-1])).any()):
            raise ValueError(f"its g_idx has groups that are not among its {int(plain[-1]) + 1}")
        return order.long()
    return None if columns % width == 0 else plain


def _fill_weight(
    out: Tensor, read_rows: ReadRows, scales: Tensor, zeros: Tensor | None = None, grouping: Tensor | None = None
) -> None:
    """Fill `out` [rows, columns] with (number - zero) * scale, some rows at a time, so that little is held twice.

    `scales` and `zeros` are [rows, groups]. `grouping` has the group of each column; without it they are equally wide,
    and in order. Raises `ValueError` if a result is not a finite number.
    """
    rows, columns = out.shape
    step = max(8, _CHUNK // columns // 8 * 8)
    for first in range(0, rows, step):
        chosen = slice(first, min(rows, first + step))
        numbers = read_rows(chosen).float()  # a copy, as nothing is stored in float32
        by_group = numbers.view(len(numbers), scales.shape[1], -1) if grouping is None else numbers
        if zeros is not None:
            by_group -= _spread_columns(zeros[chosen], grouping)
        by_group *= _spread_columns(scales[chosen], grouping)
        out[chosen] = numbers
        if not bool(out[chosen].isfinite().all()):
            raise ValueError("it has values that are not finite, so its numbers or its scales are damaged")


def _spread_columns(grid: Tensor, grouping: Tensor | None) -> Tensor:
    """Return what each group has for all of its columns."""
    return grid.float().unsqueeze(-1) if grouping is None else grid.float()[:, grouping]
