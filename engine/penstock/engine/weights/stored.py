"""The stored tensors of a quantised checkpoint, from which weights are taken, and what its formats share.

Every format stores whole numbers or small floats in a grid of groups, and a scale for each group; some also the number
that stands for zero. A weight is (number - zero) * scale, computed in float32 and rounded once to the dtype in which
the engine runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.engine.gguf.gguf_weights import GgufMatrix
from penstock.engine.weights.weights import PackedTensor
from penstock.errors import ModelLoadError, build_damage_error

Settings = dict[str, Any]
"""The `quantization_config` of a config.json, or a part of it."""
Options = dict[str, tuple[object, ...]]
"""By option of a `quantization_config`: the values that are known."""
ReadRows = Callable[[slice], Tensor]
"""Returns the stored numbers of some rows of a weight: [rows, columns]."""
_CHUNK = 2**18  # how many numbers are unpacked at a time: few enough to stay in the processor's cache
FLOATS = ("F16", "BF16", "F32")
FP8 = ("F8_E4M3", "F8_E5M2")

_LEFT_OUT = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale",
    ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip
"""Ends of the names of what is stored for activations and for a KV cache."""


class Stored:
    """The tensors of a checkpoint, of which some are taken for weights that will be unpacked."""

    def __init__(self, tensors: dict[str, Any], dtype: torch.dtype) -> None:
        self.left = {name: part for name, part in tensors.items() if not name.endswith(_LEFT_OUT)}
        """The tensors that are not part of a quantised weight, by name."""
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


# Options


def expect_option(settings: Settings, option: str, *known: object) -> None:
    """Raise `ModelLoadError` if an option has none of the known values."""
    if settings.get(option) not in known:
        wanted = " or ".join(str(value) for value in known if value not in (None, {}))
        raise make_refusal(option, repr(settings.get(option)), f"{option} {wanted}" if wanted else f"no {option}")


def make_refusal(what: str, value: str, wanted: str) -> ModelLoadError:
    """Return the error for weights that are quantised in a way that cannot be unpacked."""
    return ModelLoadError(
        f"its weights are quantised with {what} ({value[:100]}), which cannot be unpacked: use a checkpoint with "
        f"{wanted}, or one that is not quantised"
    )


def read_positive(settings: Settings, option: str) -> int:
    """Return a positive number of the configuration. Raises `ModelLoadError` for another value."""
    value = settings.get(option)
    if type(value) is not int or value < 1:
        raise build_damage_error(f"quantization_config has {option} {value!r}, not a positive number")
    return value


def read_block_size(settings: Settings, option: str) -> tuple[int, int]:
    """Return the rows and columns of a block in the configuration. Raises `ModelLoadError` for another value."""
    value = settings.get(option)
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise build_damage_error(f"quantization_config has {option} {value!r}, not two positive numbers")
    return value[0], value[1]


def list_shapes(grid: tuple[int, int]) -> list[list[int]]:
    """Return the shapes in which a grid of scales may be stored: a single column or number has fewer dimensions."""
    rows, columns = grid
    shapes = [[rows, columns]]
    if columns == 1:
        shapes.append([rows])
    return [*shapes, []] if grid == (1, 1) else shapes


# Arithmetic


def spread_rows(grid: Tensor, rows: int, height: int) -> Tensor:
    """Return the grid of parts so high with a row for each row of the weight."""
    return grid if len(grid) == rows else grid.float().repeat_interleave(height, dim=0)[:rows]


def group_columns(columns: int, width: int, order: Tensor | None = None) -> Tensor | None:
    """Return the group of each column, or None if the groups are in order and as wide as each other.

    `order` is what the checkpoint says. Raises `ValueError` if it has groups that there are not.
    """
    plain = torch.arange(columns) // width
    if order is not None and not torch.equal(order.long(), plain):
        if bool(((order < 0) | (order > plain[-1])).any()):
            raise ValueError(f"its g_idx has groups that are not among its {int(plain[-1]) + 1}")
        return order.long()
    return None if columns % width == 0 else plain


def fill_rows(
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
