"""Published quantised checkpoints: each weight is unpacked, when it is read, to the plain one that the model has.

    quantization_config ─▶ a format of the table? ─▶ stored tensors: complete, of the right shapes? ─▶ when read: unpack

`_FORMATS` at the end is the table: who takes a format's tensors, what it may say of itself, what its names end with.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.gguf.gguf_file import FLOAT_KINDS
from penstock.engine.gguf.gguf_model import rename_tensor
from penstock.engine.gguf.gguf_weights import GgufMatrix
from penstock.engine.weights.weights import MappedWeights, PackedTensor
from penstock.errors import ModelLoadError, build_damage_error

UNPACKING_VERSION = 1
"""Counts the changes of what is computed from stored tensors; part of the fingerprint of quantised models."""

Settings = dict[str, Any]
"""The `quantization_config` of a config.json, or a part of it."""
Options = dict[str, tuple[object, ...]]
"""By option of a `quantization_config`: the values that are known."""
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
    stored, form = _Stored(weights.tensors, dtype), _FORMATS[settings["quant_method"]]
    for option, known in form.options.items():
        _expect_option(settings, option, *known)
    form.take_weights(stored, settings)
    stored.refuse_left(*form.endings)
    weights.group_sizes = stored.group_sizes
    for name, part in stored.left.items():
        if name.endswith(".pre_quant_scale"):
            raise _make_refusal("inputs that are scaled", name, "no pre_quant_scale")
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


class _Stored:
    """The tensors of a checkpoint, of which some are taken for weights that will be unpacked."""

    def __init__(self, tensors: dict[str, Any], dtype: torch.dtype) -> None:
        self.left = {name: part for name, part in tensors.items() if not name.endswith(_LEFT_OUT)}
        """What is not part of a quantised weight, by name."""
        self.num_left_out = len(tensors) - len(self.left)
        """Number of tensors that are for activations or a KV cache."""
        self.unpacked: dict[str, PackedTensor] = {}
        """By the names that the weights have in the plain model."""
        self.group_sizes: set[int] = set()
        """How many inputs have one scale, of integers of 4 bits where that is not all inputs."""
        self.dtype = dtype

    def find_modules(self, ending: str) -> list[str]:
        """Return the names that end so, without the ending."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def find_of_type(self, kinds: Iterable[str]) -> list[str]:
        """Return the names of all tensors of these types of safetensors."""
        return [name for name, part in self.left.items() if part.get_dtype() in kinds]

    def take_tensor(self, name: str, kinds: Iterable[str], *shapes: list[int], is_needed: bool = True) -> Any:
        """Return the slice of a tensor, which is then no longer left; None if it is neither there nor needed.

        Raises `ModelLoadError` if it is missing, is of no such type, or has none of the shapes where some are given.
        """
        part = self.left.pop(name, None)
        if part is None:
            if not is_needed:
                return None
            raise build_damage_error(f"{name} is missing in the weights")
        if part.get_dtype() not in kinds:
            raise build_damage_error(f"{name} is of type {part.get_dtype()} in the weights, not {' or '.join(kinds)}")
        if shapes and part.get_shape() not in shapes:
            expected = " or ".join(map(str, shapes))
            raise build_damage_error(f"{name} is {part.get_shape()} in the weights, and {expected} by config.json")
        return part

    def take_matrix(self, name: str, kinds: Iterable[str]) -> tuple[Any, int, int]:
        """Return the slice of a matrix, and its rows and columns. Raises `ModelLoadError` if there is none."""
        part = self.take_tensor(name, kinds)
        if len(shape := part.get_shape()) != 2:
            raise build_damage_error(f"{name} is {shape} in the weights, which is no matrix")
        return part, shape[0], shape[1]

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
        if min(shape) < 1:
            raise build_damage_error(f"{name} has no values: {shape}")
        if name in self.left or name in self.unpacked:
            raise build_damage_error(f"{name} is in the weights twice, plain and quantised")
        self.unpacked[name] = PackedTensor(name, parts, shape, self.dtype, fill_weight, matrix)

    def refuse_left(self, *endings: str) -> None:
        """Raise `ModelLoadError` for a tensor with one of these endings that was not taken: its weight is missing."""
        for name in self.left:
            if name.endswith(endings):
                raise build_damage_error(f"{name} is in the weights without the tensors that belong to it")


# How weights are stored. Each function takes the tensors of some, and raises `ModelLoadError` for what is not known.


def _take_compressed(stored: _Stored, settings: Settings) -> None:
    """compressed-tensors: whole numbers packed into words or stored as bytes, FP8, or NVFP4, by groups of modules."""
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _make_refusal("transform_config", repr(settings["transform_config"]), "no transform_config")
    _expect_option(settings.get("sparsity_config") or {}, "format", None, "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise build_damage_error("quantization_config has no config_groups")
    schemes = [_check_scheme(name, group, settings) for name, group in groups.items()]
    for module in stored.find_modules(".weight_packed"):
        if stored.has_type(f"{module}.weight_packed", "U8"):
            _find_scheme(module, schemes, _NVFP4_FORMAT)
            _take_nvfp4(stored, module, "weight_packed", "weight_global_scale", is_divisor=True)
        else:
            _take_scheme(stored, module, _find_scheme(module, schemes, "pack-quantized"))
    for name in stored.find_of_type(("I8", *_FP8)):
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            _take_scheme(stored, module, _find_scheme(module, schemes, "int-quantized"))


def _check_scheme(name: str, group: Any, settings: Settings) -> Settings:
    """Return what a group of compressed-tensors says of its weights, with its targets and format."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise build_damage_error(f"quantization_config has no weights in its group {name}")
    scheme = {**weights, "targets": group.get("targets") or [], "format": group.get("format") or settings.get("format")}
    _expect_option(scheme, "format", *_SCHEMES)
    for option, known in _SCHEMES[scheme["format"]].items():
        _expect_option(scheme, option, *known)
    size = scheme.get("group_size") or 0
    scheme["strategy"] = scheme.get("strategy") or ("group" if size > 0 else "channel" if size == -1 else "tensor")
    if scheme["format"] != _NVFP4_FORMAT:
        _expect_option(scheme, "strategy", "tensor", "channel", "group", "block")
    return scheme


def _find_scheme(module: str, schemes: list[Settings], kind: str) -> Settings:
    """Return the scheme that has the module as a target: by its name if there is one, else by its class.

    Its tensors are stored as those of the format `kind`: all formats of bytes are like each other.
    """
    named = [s for s in schemes if any(_is_target(module, target) for target in s["targets"])]
    by_class = [s for s in schemes if any(target[:1].isupper() for target in s["targets"])]
    kinds = (kind,) if kind.endswith("pack-quantized") else _SCHEMES.keys() - {"pack-quantized", _NVFP4_FORMAT}
    fitting = [s for s in named or by_class if s["format"] in kinds]
    if len(fitting) != 1:
        raise build_damage_error(f"{module} is in {len(fitting)} groups of quantization_config, not in one")
    return fitting[0]


def _is_target(module: str, target: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _take_scheme(stored: _Stored, module: str, scheme: Settings) -> None:
    """Take a weight of one number in a byte, or of 4 or 8 bits in words: [rows, columns * bits / 32]."""
    name, is_packed = f"{module}.weight", scheme["format"] == "pack-quantized"
    bits: int = scheme["num_bits"]
    half = 1 << (bits - 1)
    if is_packed:
        rows, columns = _read_shape(stored, f"{name}_shape")
        numbers = stored.take_tensor(f"{name}_packed", ("I32",), [rows, math.ceil(columns * bits / 32)])
    else:
        numbers, rows, columns = stored.take_matrix(name, ("I8",) if scheme["type"] == "int" else _FP8)
    height, width = _find_block(scheme, rows, columns)
    if bits == 4 and width < columns:
        stored.group_sizes.add(width)
    grid = math.ceil(rows / height), math.ceil(columns / width)
    scales = stored.take_tensor(f"{name}_scale", _FLOATS, *_list_shapes(grid))
    has_words = is_packed and stored.has_type(f"{name}_zero_point", "I32")  # older writers stored zeros as bytes
    zeros = stored.take_tensor(
        f"{name}_zero_point", ("I32",) if has_words else ("I8", *_FP8),
        *([[math.ceil(grid[0] * bits / 32), grid[1]]] if has_words else _list_shapes(grid)),
        is_needed=scheme.get("symmetric") is False,
    )  # fmt: skip
    order = None
    if is_packed:
        is_needed = scheme.get("actorder") in ("group", "dynamic")
        order = stored.take_tensor(f"{name}_g_idx", ("I32", "I64"), [columns], is_needed=is_needed)

    def fill_weight(out: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> None:
        if has_words and zeros is not None:
            zeros = _unpack_bits(zeros.T, bits)[:, : grid[0]].T - half
        if order is not None and bool((order == -1).all()):  # so it is where columns were not reordered
            order = None

        def read_words(chosen: slice) -> Tensor:
            return _unpack_bits(numbers[chosen], bits)[:, :columns] - half

        spread = _spread_rows(scales.reshape(grid), rows, height)
        spread_zeros = None if zeros is None else _spread_rows(zeros.reshape(grid), rows, height)
        read_rows: ReadRows = read_words if is_packed else numbers.__getitem__
        _fill_weight(out, read_rows, spread, spread_zeros, _group_columns(columns, width, order))

    stored.add_weight(name, [rows, columns], [numbers, scales, zeros, order], fill_weight)


def _read_shape(stored: _Stored, name: str) -> tuple[int, int]:
    """Return a weight's numbers of rows and columns, which are stored as a tensor."""
    shape = stored.take_tensor(name, ("I64", "I32"), [2])[...].tolist()
    if min(shape) < 1:
        raise build_damage_error(f"{name} is damaged: {shape}")
    return shape[0], shape[1]


def _find_block(scheme: Settings, rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    match scheme["strategy"]:
        case "channel":
            return 1, columns
        case "group":
            return 1, _read_positive(scheme, "group_size")
        case "block":
            return _read_block_size(scheme, "block_structure")
    return rows, columns


def _take_by_inputs(stored: _Stored, settings: Settings, *, is_awq: bool) -> None:
    """Take words of GPTQ, of several inputs each, or of AWQ, of several outputs: [inputs, outputs] both."""
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if changes and not pattern.startswith("-:"):
            raise _make_refusal("other settings for some modules", f"dynamic {pattern!r}", "one setting for all")
    for module in stored.find_modules(".qweight"):
        _take_words(stored, module, settings, is_awq=is_awq)


def _take_words(stored: _Stored, module: str, settings: Settings, *, is_awq: bool) -> None:
    """Take a weight of GPTQ, whose groups may have inputs in any order, or of AWQ in its order for GEMM."""
    bits = settings.get("bits") or 4
    qweight, inputs, outputs = stored.take_matrix(f"{module}.qweight", ("I32",))
    inputs, outputs = (inputs, outputs * 8) if is_awq else (inputs * 32 // bits, outputs)
    width = settings.get("group_size", 128 if is_awq else -1)
    width = inputs if width == -1 else _read_positive({"group_size": width}, "group_size")
    if bits == 4 and width < inputs:
        stored.group_sizes.add(width)
    num_groups = math.ceil(inputs / width)
    qzeros = stored.take_tensor(f"{module}.qzeros", ("I32",), [num_groups, math.ceil(outputs * bits / 32)])
    scales = stored.take_tensor(f"{module}.scales", _FLOATS, [num_groups, outputs])
    order = None
    if not is_awq:
        is_needed = bool(settings.get("desc_act"))
        order = stored.take_tensor(f"{module}.g_idx", ("I32", "I64"), [inputs], is_needed=is_needed)

    def fill_weight(out: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, order: Tensor | None) -> None:
        def read_rows(chosen: slice) -> Tensor:
            if is_awq:
                return _unpack_awq(qweight[:, chosen.start // 8 : chosen.stop // 8])
            return _unpack_bits(qweight[:, chosen].T, bits)

        zeros = _unpack_awq(qzeros) if is_awq else _find_zeros(qzeros, outputs, settings, bits, module).T
        _fill_weight(out, read_rows, scales.T, zeros, _group_columns(inputs, width, order))

    stored.add_weight(f"{module}.weight", [outputs, inputs], [qweight, qzeros, scales, order], fill_weight)


def _find_zeros(qzeros: Tensor, outputs: int, settings: Settings, bits: int, module: str) -> Tensor:
    """Return GPTQ's zeros, [groups, outputs]: its first form has one less in each place."""
    is_second = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
    if not is_second and not settings.get("sym"):
        qzeros = qzeros + sum(1 << place for place in range(0, 32, bits))  # whole words: a zero of 0 has borrowed
    zeros = _unpack_bits(qzeros, bits)[:, :outputs]
    if settings.get("sym"):
        # Some writers name the first form and store zeros as in the second. Symmetric ones are known anyway.
        half = 1 << (bits - 1)
        if not bool(((zeros == half - 1) | (zeros == half)).all()) or bool((zeros != zeros[0, 0]).any()):
            raise ValueError(f"{module}.qzeros is not symmetric, as quantization_config says it is")
        zeros = torch.full_like(zeros, half)
    return zeros


def _unpack_awq(words: Tensor) -> Tensor:
    """Return the numbers in words of eight outputs each: of [inputs, words] to [words * 8, inputs]."""
    return ((words.T.contiguous().unsqueeze(1) >> _AWQ_SHIFTS) & 15).flatten(0, 1)


def _take_fp8(stored: _Stored, settings: Settings) -> None:
    """FP8 with a scale for the tensor, for each row, or for each block of rows and columns, also in stacks."""
    block = settings.get("weight_block_size")
    height, width = _read_block_size(settings, "weight_block_size") if block else (0, 0)
    for name in stored.find_of_type(_FP8):
        weight = stored.take_tensor(name, _FP8)
        shape = weight.get_shape()
        if len(shape) < 2:
            raise build_damage_error(f"{name} is {shape} in the weights, which is no matrix")
        scale = f"{name}_scale" if f"{name}_scale" in stored.left else f"{name}_scale_inv"
        _take_floats(stored, name, weight, scale, (height or shape[-2], width or shape[-1]))


def _take_floats(stored: _Stored, name: str, weight: Any, scale: str, block: tuple[int, int]) -> None:
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
            spread, grouping = _spread_rows(grid_of_part, rows, height), _group_columns(columns, width)
            _fill_weight(part, stored_part.__getitem__, spread, None, grouping)

    stored.add_weight(name, shape, [weight, scales], fill_weight)


def _take_mxfp4(stored: _Stored, settings: Settings) -> None:
    """MXFP4 as in gpt-oss: [experts, outputs, groups, 16] bytes of two numbers each, and the power of two of a group.

    The plain weight has inputs before outputs.
    """
    for name in stored.find_modules("_blocks"):
        shape = stored.left[f"{name}_blocks"].get_shape()
        if len(shape) != 4 or shape[-1] != 16:
            raise build_damage_error(f"{name}_blocks is {shape} in the weights, not [experts, outputs, groups, 16]")
        blocks = stored.take_tensor(f"{name}_blocks", ("U8",))
        scales = stored.take_tensor(f"{name}_scales", ("U8",), shape[:-1])

        def fill_weight(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
            for part, numbers, powers in zip(out, blocks, scales, strict=True):
                _fill_weight(part.T, partial(_read_fp4, numbers), _POWERS_OF_TWO[powers.int()])

        stored.add_weight(name, [shape[0], shape[2] * 32, shape[1]], [blocks, scales], fill_weight)


def _take_modelopt(stored: _Stored, settings: Settings) -> None:
    """ModelOpt: FP8 with a scale for the tensor or for each row, and NVFP4; both beside each other in one model."""
    for module in stored.find_modules(".weight_scale_2"):
        _take_nvfp4(stored, module, "weight", "weight_scale_2", is_divisor=False)
    for name in stored.find_of_type(_FP8):
        if name.endswith(".weight_scale"):
            raise build_damage_error(f"{name}_2 is missing in the weights")
    _take_fp8(stored, {})


def _take_nvfp4(stored: _Stored, module: str, packed: str, global_scale: str, *, is_divisor: bool) -> None:
    """Take a weight in NVFP4: two numbers of 4 bits in a byte, an FP8 scale for 16 of them, and one for all scales.

    `is_divisor`: whether scales are divided by the one for all, or multiplied by it.
    """
    shape = stored.left[f"{module}.{packed}"].get_shape() if f"{module}.{packed}" in stored.left else []
    if len(shape) != 2 or shape[1] * 2 % _NVFP4_WIDTH:
        raise build_damage_error(f"{module}.{packed} is {shape or 'missing'} in the weights, not [outputs, inputs / 2]")
    rows, columns = shape[0], 2 * shape[1]
    pairs = stored.take_tensor(f"{module}.{packed}", ("U8",))
    scales = stored.take_tensor(f"{module}.weight_scale", ("F8_E4M3",), [rows, columns // _NVFP4_WIDTH])
    whole = stored.take_tensor(f"{module}.{global_scale}", ("F32",), [], [1])

    def fill_weight(out: Tensor, pairs: Tensor, scales: Tensor, whole: Tensor) -> None:
        by_group = scales.float() / whole if is_divisor else scales.float() * whole
        _fill_weight(out, partial(_read_fp4, pairs), by_group)

    stored.add_weight(f"{module}.weight", [rows, columns], [pairs, scales, whole], fill_weight)


def _take_bitsandbytes(stored: _Stored, settings: Settings) -> None:
    """bitsandbytes: 4 bits that stand for 16 values, with a largest value for each block; or 8 bits by rows."""
    for name in [name for name in stored.left if ".weight.quant_state.bitsandbytes__" in name]:
        _take_blocks_of_4_bits(stored, name)
    for module in stored.find_modules(".SCB"):
        weight, rows, columns = stored.take_matrix(f"{module}.weight", ("I8",))
        most = stored.take_tensor(f"{module}.SCB", ("F32",), [rows])
        stored.left.pop(f"{module}.weight_format", None)

        def fill_weight(out: Tensor, weight: Tensor, most: Tensor) -> None:
            _fill_weight(out, weight.__getitem__, most[:, None] * _BYTE_SCALE)

        stored.add_weight(f"{module}.weight", [rows, columns], [weight, most], fill_weight)


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
        raise build_damage_error(f"{weight_name} has {rows} x {columns} values, and no whole blocks of {block}")
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


def _take_gguf(stored: _Stored, settings: Settings) -> None:
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
        raise build_damage_error(f"quantization_config has {option} {value!r}, not a positive number")
    return value


def _read_block_size(settings: Settings, option: str) -> tuple[int, int]:
    value = settings.get(option)
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise build_damage_error(f"quantization_config has {option} {value!r}, not two positive numbers")
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


def _spread_rows(grid: Tensor, rows: int, height: int) -> Tensor:
    """Return the grid of parts so high with a row for each row of the weight."""
    return grid if len(grid) == rows else grid.float().repeat_interleave(height, dim=0)[:rows]


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


# The table


_BYTES: Options = {"num_bits": (8,), "type": ("int", "float")}
_SCHEMES: dict[str, Options] = {
    "pack-quantized": {"num_bits": (4, 8), "type": ("int",)},
    "int-quantized": _BYTES, "float-quantized": _BYTES, "naive-quantized": _BYTES,
    _NVFP4_FORMAT: {"num_bits": (4,), "group_size": (None, _NVFP4_WIDTH)},
}  # fmt: skip
"""By format of a group of compressed-tensors."""


class _Format(NamedTuple):
    """How the weights of a checkpoint are quantised."""

    take_weights: Callable[[_Stored, Settings], None]
    options: Options
    """What the configuration may say; without a row an option says nothing of the weights."""
    endings: tuple[str, ...]
    """Of names: a tensor that is left with one of these has lost the others of its weight."""


_FORMATS = {
    "compressed-tensors": _Format(
        _take_compressed, {},
        (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
         ".weight_global_scale"),
    ),
    "gptq": _Format(
        partial(_take_by_inputs, is_awq=False),
        {"bits": (4, 8), "checkpoint_format": (None, "gptq", "gptq_v2"), "format": (None, "gptq", "gptq_v2"),
         "pack_dtype": (None, "int32"), "is_marlin_format": (None, False)},
        (".qweight", ".qzeros", ".scales", ".g_idx"),
    ),
    "awq": _Format(
        partial(_take_by_inputs, is_awq=True),
        {"bits": (None, 4), "zero_point": (None, True), "version": (None, "gemm", "GEMM"),
         "format": (None, "gemm", "GEMM")},
        (".qweight", ".qzeros", ".scales"),
    ),
    "fp8": _Format(
        _take_fp8, {"activation_scheme": (None, "dynamic", "static"), "expert_dtype": (None, "fp8")},
        ("weight_scale", "weight_scale_inv", "_proj_scale_inv"),
    ),
    "mxfp4": _Format(_take_mxfp4, {}, ("_blocks", "_scales")),
    "modelopt": _Format(
        _take_modelopt, {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")},
        ("weight_scale", "weight_scale_inv", "_proj_scale_inv"),
    ),
    "bitsandbytes": _Format(
        _take_bitsandbytes, {},
        (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
    ),
    "gguf": _Format(_take_gguf, {}, ()),
}  # fmt: skip
"""By `quant_method`, which for a GGUF file is what `gguf_model.py` writes."""
