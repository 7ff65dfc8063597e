"""Formats of small floats: FP8, MXFP4 and NVFP4."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.weights.stored import (
    FLOATS,
    FP8,
    Settings,
    Stored,
    fill_rows,
    group_columns,
    read_block_size,
    spread_rows,
)
from penstock.errors import build_damage_error

_E8M0 = "F8_E8M0"

_FP4_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FP4_PAIRS = torch.stack([_FP4_VALUES.repeat(16), _FP4_VALUES.repeat_interleave(16)], dim=1)
"""By byte: the two numbers of 4 bits in it, the lower half first."""
NVFP4_WIDTH = 16
"""How many numbers share a scale."""
_POWERS_OF_TWO = torch.cat([2.0 ** (torch.arange(255, dtype=torch.float64) - 127), torch.tensor([math.nan])]).float()
"""By byte: the scale that it stands for in E8M0."""


def take_fp8(stored: Stored, settings: Settings) -> None:
    """FP8 with a scale for the tensor, for each row, or for each block of rows and columns, also in stacks."""
    block = settings.get("weight_block_size")
    height, width = read_block_size(settings, "weight_block_size") if block else (0, 0)
    for name in stored.find_of_type(FP8):
        weight = stored.take_tensor(name, FP8)
        shape = weight.get_shape()
        if len(shape) < 2:
            raise build_damage_error(f"{name} is {shape} in the weights, which is no matrix")
        scale = f"{name}_scale" if f"{name}_scale" in stored.left else f"{name}_scale_inv"
        _take_floats(stored, name, weight, scale, (height or shape[-2], width or shape[-1]))


def _take_floats(stored: Stored, name: str, weight: Any, scale: str, block: tuple[int, int]) -> None:
    shape: list[int] = weight.get_shape()
    *stack, rows, columns = shape
    grids = {(math.ceil(rows / block[0]), math.ceil(columns / block[1])): block, (1, 1): (rows, columns)}
    grids[rows, 1] = (1, columns)
    by_shape = {(): (1, 1), (1,): (1, 1), tuple(stack): (1, 1), (*stack, rows): (rows, 1)}
    by_shape |= {(*stack, *grid): grid for grid in grids}
    scales = stored.take_tensor(scale, (*FLOATS, _E8M0), *map(list, by_shape))
    grid = by_shape[tuple(scales.get_shape())]
    height, width = grids[grid]

    def fill_weight(out: Tensor, weight: Tensor, scales: Tensor) -> None:
        grid_of_each = scales.float().reshape(-1, *grid).expand(math.prod(stack), *grid)
        for part, stored_part, grid_of_part in zip(
            out.view(-1, rows, columns), weight.view(-1, rows, columns), grid_of_each, strict=True
        ):
            spread, grouping = spread_rows(grid_of_part, rows, height), group_columns(columns, width)
            fill_rows(part, stored_part.__getitem__, spread, None, grouping)

    stored.add_weight(name, shape, [weight, scales], fill_weight)


def take_mxfp4(stored: Stored, settings: Settings) -> None:
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
                fill_rows(part.T, partial(_read_fp4, numbers), _POWERS_OF_TWO[powers.int()])

        stored.add_weight(name, [shape[0], shape[2] * 32, shape[1]], [blocks, scales], fill_weight)


def take_modelopt(stored: Stored, settings: Settings) -> None:
    """ModelOpt: FP8 with a scale for the tensor or for each row, and NVFP4; both beside each other in one model."""
    for module in stored.find_modules(".weight_scale_2"):
        take_nvfp4(stored, module, "weight", "weight_scale_2", is_divisor=False)
    for name in stored.find_of_type(FP8):
        if name.endswith(".weight_scale"):
            raise build_damage_error(f"{name}_2 is missing in the weights")
    take_fp8(stored, {})


def take_nvfp4(stored: Stored, module: str, packed: str, global_scale: str, *, is_divisor: bool) -> None:
    """Take a weight in NVFP4: two numbers of 4 bits in a byte, an FP8 scale for 16 of them, and one for all scales.

    `is_divisor`: whether scales are divided by the one for all, or multiplied by it.
    """
    shape = stored.left[f"{module}.{packed}"].get_shape() if f"{module}.{packed}" in stored.left else []
    if len(shape) != 2 or shape[1] * 2 % NVFP4_WIDTH:
        raise build_damage_error(f"{module}.{packed} is {shape or 'missing'} in the weights, not [outputs, inputs / 2]")
    rows, columns = shape[0], 2 * shape[1]
    pairs = stored.take_tensor(f"{module}.{packed}", ("U8",))
    scales = stored.take_tensor(f"{module}.weight_scale", ("F8_E4M3",), [rows, columns // NVFP4_WIDTH])
    whole = stored.take_tensor(f"{module}.{global_scale}", ("F32",), [], [1])

    def fill_weight(out: Tensor, pairs: Tensor, scales: Tensor, whole: Tensor) -> None:
        by_group = scales.float() / whole if is_divisor else scales.float() * whole
        fill_rows(out, partial(_read_fp4, pairs), by_group)

    stored.add_weight(f"{module}.weight", [rows, columns], [pairs, scales, whole], fill_weight)


def _read_fp4(pairs: Tensor, chosen: slice) -> Tensor:
    """Return the numbers of some rows of FP4: of [rows, groups, bytes] to [n, groups * bytes * 2]."""
    return _FP4_PAIRS[pairs[chosen].int()].flatten(1)
