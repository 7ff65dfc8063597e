"""Formats of whole numbers: compressed-tensors, which has floats too, GPTQ, AWQ and bitsandbytes."""

import json
import math
import re
from typing import Any

import torch
from torch import Tensor

from penstock.engine.weights.floats import NVFP4_WIDTH, take_nvfp4
from penstock.engine.weights.stored import (
    FLOATS,
    FP8,
    Options,
    ReadRows,
    Settings,
    Stored,
    expect_option,
    fill_rows,
    group_columns,
    list_shapes,
    make_refusal,
    read_block_size,
    read_positive,
    spread_rows,
)
from penstock.errors import ModelLoadError, build_damage_error

_NVFP4_FORMAT = "nvfp4-pack-quantized"
_AWQ_SHIFTS = torch.tensor([[0], [16], [4], [20], [8], [24], [12], [28]], dtype=torch.int32)
"""By column: where its 4 bits are within a word of eight columns."""
_BYTE_SCALE = 1.0 / 127
"""bitsandbytes scales each row so that 127 stands for its largest value."""
_BYTES: Options = {"num_bits": (8,), "type": ("int", "float")}
_SCHEMES: dict[str, Options] = {
    "pack-quantized": {"num_bits": (4, 8), "type": ("int",)},
    "int-quantized": _BYTES, "float-quantized": _BYTES, "naive-quantized": _BYTES,
    _NVFP4_FORMAT: {"num_bits": (4,), "group_size": (None, NVFP4_WIDTH)},
}  # fmt: skip
"""By format of a group of compressed-tensors."""


def take_compressed(stored: Stored, settings: Settings) -> None:
    """compressed-tensors: whole numbers packed into words or stored as bytes, FP8, or NVFP4, by groups of modules."""
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise make_refusal("transform_config", repr(settings["transform_config"]), "no transform_config")
    expect_option(settings.get("sparsity_config") or {}, "format", None, "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise build_damage_error("quantization_config has no config_groups")
    schemes = [_check_scheme(name, group, settings) for name, group in groups.items()]
    for module in stored.find_modules(".weight_packed"):
        if stored.has_type(f"{module}.weight_packed", "U8"):
            _find_scheme(module, schemes, _NVFP4_FORMAT)
            take_nvfp4(stored, module, "weight_packed", "weight_global_scale", is_divisor=True)
        else:
            _take_scheme(stored, module, _find_scheme(module, schemes, "pack-quantized"))
    for name in stored.find_of_type(("I8", *FP8)):
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            _take_scheme(stored, module, _find_scheme(module, schemes, "int-quantized"))


def _check_scheme(name: str, group: Any, settings: Settings) -> Settings:
    """Return what a group of compressed-tensors says of its weights, with its targets and format."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise build_damage_error(f"quantization_config has no weights in its group {name}")
    scheme = {**weights, "targets": group.get("targets") or [], "format": group.get("format") or settings.get("format")}
    expect_option(scheme, "format", *_SCHEMES)
    for option, known in _SCHEMES[scheme["format"]].items():
        expect_option(scheme, option, *known)
    size = scheme.get("group_size") or 0
    scheme["strategy"] = scheme.get("strategy") or ("group" if size > 0 else "channel" if size == -1 else "tensor")
    if scheme["format"] != _NVFP4_FORMAT:
        expect_option(scheme, "strategy", "tensor", "channel", "group", "block")
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


def _take_scheme(stored: Stored, module: str, scheme: Settings) -> None:
    """Take a weight of one number in a byte, or of 4 or 8 bits in words: [rows, columns * bits / 32]."""
    name, is_packed = f"{module}.weight", scheme["format"] == "pack-quantized"
    bits: int = scheme["num_bits"]
    half = 1 << (bits - 1)
    if is_packed:
        rows, columns = _read_shape(stored, f"{name}_shape")
        numbers = stored.take_tensor(f"{name}_packed", ("I32",), [rows, math.ceil(columns * bits / 32)])
    else:
        numbers, rows, columns = stored.take_matrix(name, ("I8",) if scheme["type"] == "int" else FP8)
    height, width = _find_block(scheme, rows, columns)
    if bits == 4 and width < columns:
        stored.group_sizes.add(width)
    grid = math.ceil(rows / height), math.ceil(columns / width)
    scales = stored.take_tensor(f"{name}_scale", FLOATS, *list_shapes(grid))
    has_words = is_packed and stored.has_type(f"{name}_zero_point", "I32")  # older writers stored zeros as bytes
    zeros = stored.take_tensor(
        f"{name}_zero_point", ("I32",) if has_words else ("I8", *FP8),
        *([[math.ceil(grid[0] * bits / 32), grid[1]]] if has_words else list_shapes(grid)),
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

        spread = spread_rows(scales.reshape(grid), rows, height)
        spread_zeros = None if zeros is None else spread_rows(zeros.reshape(grid), rows, height)
        read_rows: ReadRows = read_words if is_packed else numbers.__getitem__
        fill_rows(out, read_rows, spread, spread_zeros, group_columns(columns, width, order))

    stored.add_weight(name, [rows, columns], [numbers, scales, zeros, order], fill_weight)


def _read_shape(stored: Stored, name: str) -> tuple[int, int]:
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
            return 1, read_positive(scheme, "group_size")
        case "block":
            return read_block_size(scheme, "block_structure")
    return rows, columns


def take_by_inputs(stored: Stored, settings: Settings, *, is_awq: bool) -> None:
    """Take words of GPTQ, of several inputs each, or of AWQ, of several outputs: [inputs, outputs] both."""
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if changes and not pattern.startswith("-:"):
            raise make_refusal("other settings for some modules", f"dynamic {pattern!r}", "one setting for all")
    for module in stored.find_modules(".qweight"):
        _take_words(stored, module, settings, is_awq=is_awq)


def _take_words(stored: Stored, module: str, settings: Settings, *, is_awq: bool) -> None:
    """Take a weight of GPTQ, whose groups may have inputs in any order, or of AWQ in its order for GEMM."""
    bits = settings.get("bits") or 4
    qweight, inputs, outputs = stored.take_matrix(f"{module}.qweight", ("I32",))
    inputs, outputs = (inputs, outputs * 8) if is_awq else (inputs * 32 // bits, outputs)
    width = settings.get("group_size", 128 if is_awq else -1)
    width = inputs if width == -1 else read_positive({"group_size": width}, "group_size")
    if bits == 4 and width < inputs:
        stored.group_sizes.add(width)
    num_groups = math.ceil(inputs / width)
    qzeros = stored.take_tensor(f"{module}.qzeros", ("I32",), [num_groups, math.ceil(outputs * bits / 32)])
    scales = stored.take_tensor(f"{module}.scales", FLOATS, [num_groups, outputs])
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
        fill_rows(out, read_rows, scales.T, zeros, group_columns(inputs, width, order))

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


def take_bitsandbytes(stored: Stored, settings: Settings) -> None:
    """bitsandbytes: 4 bits that stand for 16 values, with a largest value for each block; or 8 bits by rows."""
    for name in [name for name in stored.left if ".weight.quant_state.bitsandbytes__" in name]:
        _take_blocks_of_4_bits(stored, name)
    for module in stored.find_modules(".SCB"):
        weight, rows, columns = stored.take_matrix(f"{module}.weight", ("I8",))
        most = stored.take_tensor(f"{module}.SCB", ("F32",), [rows])
        stored.left.pop(f"{module}.weight_format", None)

        def fill_weight(out: Tensor, weight: Tensor, most: Tensor) -> None:
            fill_rows(out, weight.__getitem__, most[:, None] * _BYTE_SCALE)

        stored.add_weight(f"{module}.weight", [rows, columns], [weight, most], fill_weight)


def _take_blocks_of_4_bits(stored: Stored, name: str) -> None:
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
        fill_rows(out.view(num_blocks, block), lambda chosen: by_byte[by_block[chosen].int()].flatten(1), most[:, None])

    stored.add_weight(weight_name, [rows, columns], [pairs, most, values, *nested], fill_weight)


# Arithmetic


def _unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers in each word of 32 bits, the lowest first: [n, words] to [n, words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)
