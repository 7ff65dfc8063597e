"""Linear layers and embeddings whose weights are packed for the native kernels."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from penstock.engine.gguf.gguf_weights import GgufMatrix, split_blocks
from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.memory import Arena, map_zeros
from penstock.errors import ModelLoadError

PANEL_COLUMNS = 32
"""Number of output columns in a panel."""
DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that the kernels support."""

PACKING_VERSION = 3
"""Counts the changes of how packed weights lie in memory: files of packed weights are of one version."""

_ARENA = Arena()
_PAIR_BYTES = 192  # of a compressed panel, for four inputs
_PACKED_ROWS_PER_RELEASE = 128 * PANEL_COLUMNS  # rows of a weight that are packed before their memory is let go

Release = Callable[[Tensor], None]
"""Called with each original weight after it was packed, so that its memory can be freed."""


class Activation(IntEnum):
    """The activation of the gate before it is multiplied."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    BOUNDED_SWISH = 3
    """As in gpt-oss: a swish with a slope, of a bounded gate, times what is bounded too, and one more."""


class WeightForm(IntEnum):
    """How weights are packed."""

    STORED = 0
    """As they are stored."""
    INT8 = 1
    """8 bits, a scale for each output."""
    INT4 = 2
    """4 bits, a scale for each output and group of inputs."""
    COMPRESSED = 3
    """bf16 in 12 bits, without loss."""
    GGUF = 4
    """The numbers and scales of a GGUF file's blocks."""


class GgufForm(NamedTuple):
    """How the kernels keep the blocks of a type."""

    number: int
    bits: int
    group: int
    """Inputs with one scale."""
    nested: int = 0
    """Float16 that 8-bit scales, and minimums, are multiplied by."""

    def count_panel_bytes(self, inputs: int) -> int:
        """Return the bytes of a panel."""
        halves, small = PANEL_COLUMNS * 2, PANEL_COLUMNS * (inputs // self.group)
        scales = self.nested * (halves * (inputs // GROUP_INPUTS) + small) if self.nested else 2 * small
        return inputs * self.bits * PANEL_COLUMNS // 8 + scales


GGUF_FORMS = {
    "Q8_0": GgufForm(0, 8, 32), "Q4_0": GgufForm(1, 4, 32), "Q5_0": GgufForm(2, 6, 32), "Q4_K": GgufForm(3, 4, 32, 2),
    "Q5_K": GgufForm(4, 6, 32, 2), "Q6_K": GgufForm(5, 6, 16, 1),
}  # fmt: skip
"""By GGUF's name of a type."""


def count_packed_bytes(matrix: GgufMatrix) -> int:
    """Return what a matrix of one of these types takes once it is packed."""
    rows, columns = matrix.part.get_shape()
    return -(-rows // PANEL_COLUMNS) * GGUF_FORMS[matrix.kind].count_panel_bytes(columns)


MAX_EXCEPTIONS = 0.003
"""Share of a group's weights that compression may keep apart: with more it is slow, and all stay as they are."""
GROUP_INPUTS = 128
"""Inputs that are made integers with one scale."""
INT4_GROUPS = (32, 64, 128)
"""Group sizes (inputs per scale) that the 4-bit kernels support."""


@dataclass(eq=False)
class PackedLinears:
    """The weights of linear layers with the same input, packed together: one pass over them serves all.

    With 8 or 4 bits, and from GGUF, the inputs are made integers of 8 bits, too: products are summed exactly within a
    group of inputs. With an `activation` they are pairs of gate and up, and the result of each is act(gate) * up,
    rounded where the separate modules round. Rows [.., inputs] in, a tensor [.., outputs] for each layer or pair out. A
    row's result depends on that row alone.
    """

    native: Library
    outputs: list[int]
    inputs: int
    dtype: torch.dtype
    form: WeightForm
    activation: Activation
    group_size: int
    """How many inputs have one scale with 4 bits: one of `INT4_GROUPS`."""
    tensors: dict[str, Tensor]
    """`memory` has the panels. All others, which a group need not have, are called as in `Packed`."""

    def __post_init__(self) -> None:
        firsts, num_panels = _place_panels(self.outputs, self.activation)
        self.packed = library.Packed(
            data=self.tensors["memory"].data_ptr(), inputs=self.inputs, num_panels=num_panels,
            element_bytes=self.dtype.itemsize, form=self.form, group=self.group_size,
        )  # fmt: skip
        for name in self.tensors.keys() - {"memory"}:
            setattr(self.packed, name, self.tensors[name].data_ptr())
        together = 2 if self.activation else 1  # layers that share panels
        count = len(self.outputs) // together
        parts = (library.Part(None, n, n, first) for n, first in zip(self.outputs, firsts, strict=True))
        self._parts = (library.Part * count)(*list(parts)[::together])
        self._args = library.LinearArgs(
            weight=ctypes.pointer(self.packed), parts=self._parts, num_parts=count, activation=int(self.activation)
        )
        self._address = ctypes.addressof(self._args)

    @classmethod
    def pack(
        cls,
        native: Library,
        linears: Sequence[nn.Module],
        release: Release,
        activation: Activation = Activation.NONE,
        form: WeightForm = WeightForm.STORED,
        matrices: Sequence[GgufMatrix] = (),
        group_size: int = GROUP_INPUTS,
    ) -> "PackedLinears":
        """Return the group of these layers. `matrices` are what the weights are in a GGUF file, for that form."""
        weights = [weight_of(linear) for linear in linears]
        outputs, inputs, dtype = [len(weight) for weight in weights], weights[0].shape[1], weights[0].dtype
        firsts, num_panels = _place_panels(outputs, activation)
        width, together = (PANEL_COLUMNS // 2, 2) if activation else (PANEL_COLUMNS, 1)
        if form == WeightForm.GGUF:
            tensors = _allocate_gguf(matrices, [-(-n // width) for n in outputs], firsts, num_panels)
        else:
            tensors = _allocate(form, num_panels, inputs, dtype, group_size)
        bias = _pack_bias(linears, firsts, width, num_panels)
        tensors |= {} if bias is None else {"bias": bias}
        stored_form = WeightForm.STORED if form == WeightForm.COMPRESSED else form
        group = cls(native, outputs, inputs, dtype, stored_form, activation, group_size, tensors)
        for i, weight in enumerate(weights):
            column = width * (i % together)
            if form == WeightForm.GGUF:
                group._pack_gguf(matrices[i], firsts[i], width, column)
                continue
            for row in range(0, len(weight), _PACKED_ROWS_PER_RELEASE):
                piece = weight[row : row + _PACKED_ROWS_PER_RELEASE]
                group._pack_weight(piece, firsts[i] + row // width, width, column)
                release(piece)
        return group._compress() if form == WeightForm.COMPRESSED else group

    @classmethod
    def restore(cls, native: Library, about: dict[str, Any], tensors: dict[str, Tensor]) -> "PackedLinears":
        """Return the group that was described so, over tensors that may lie in a mapped file."""
        return cls(
            native, about["outputs"], about["inputs"], getattr(torch, about["dtype"]), WeightForm(about["form"]),
            Activation(about["activation"]), about["group_size"], tensors,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return a JSON object of which, with the tensors, `restore` makes the group again."""
        return {
            "outputs": self.outputs, "inputs": self.inputs, "dtype": str(self.dtype).removeprefix("torch."),
            "form": int(self.form), "activation": int(self.activation), "group_size": self.group_size,
        }  # fmt: skip

    def _compress(self) -> "PackedLinears":
        """Return the group with compressed weights, or itself if they are not bf16 or have too many exceptions."""
        if self.dtype != torch.bfloat16 or self.inputs % 4:
            return self
        num_panels = self.packed.num_panels
        data = _ARENA.allocate_zeros(num_panels * self.inputs // 4 * _PAIR_BYTES, torch.uint8)
        palettes, counts = torch.empty(num_panels * 16, dtype=torch.uint8), torch.empty(num_panels, dtype=torch.int32)
        args = library.CompressArgs(
            self.packed.data, self.inputs, num_panels, data.data_ptr(), palettes.data_ptr(), counts.data_ptr()
        )
        self.native.compress(ctypes.addressof(args))
        if int(counts.sum()) > MAX_EXCEPTIONS * num_panels * PANEL_COLUMNS * self.inputs:
            return self
        first = torch.cat([torch.zeros(1, dtype=torch.int32), (counts + 1).cumsum(0).int()])  # each list has an end
        exceptions = torch.empty(int(first[-1]), dtype=torch.int32)
        args.first_exception, args.exceptions = first.data_ptr(), exceptions.data_ptr()
        self.native.compress(ctypes.addressof(args))
        found = {"memory": data, "palettes": palettes, "exceptions": exceptions, "first_exception": first}
        return replace(self, form=WeightForm.COMPRESSED, tensors=self.tensors | found)

    def _pack_weight(self, weight: Tensor, first_panel: int, columns: int, first_column: int) -> None:
        weight = weight.contiguous()
        args = library.PackArgs(
            weight.data_ptr(), weight.shape[0], self.inputs, weight.stride(0), self.packed.data, first_panel, columns,
            first_column, self.dtype.itemsize, self.form, self.group_size, self.packed.scales,
        )  # fmt: skip
        self.native.pack(ctypes.addressof(args))

    def _pack_gguf(self, matrix: GgufMatrix, first_panel: int, columns: int, first_column: int) -> None:
        places = matrix.find_rows()
        for row in range(0, len(places), _PACKED_ROWS_PER_RELEASE):
            some = places[row : row + _PACKED_ROWS_PER_RELEASE]
            parts = split_blocks(matrix.read_rows(some), matrix.kind)
            if not bool(parts.halves.isfinite().all()):
                raise ModelLoadError(f"{matrix.name} cannot be packed: it has scales that are not finite")
            given = (parts.numbers, parts.halves, parts.scales, parts.minimums)
            whole = [None if part is None else part.contiguous() for part in given]
            args = library.PackGgufArgs(
                *(None if part is None else part.data_ptr() for part in whole), len(some), self.inputs,
                self.packed.data, self.packed.places, first_panel + row // columns, columns, first_column,
                GGUF_FORMS[matrix.kind].number,
            )  # fmt: skip
            self.native.pack_gguf(ctypes.addressof(args))

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return a tensor [.., outputs] for each layer, or with an activation for each pair."""
        rows = x.reshape(-1, self.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        outs = []
        for part in self._parts:
            out = torch.empty(*x.shape[:-1], part.columns, dtype=x.dtype)
            part.out = out.data_ptr()
            outs.append(out)
        self._args.x, self._args.x_stride, self._args.rows = rows.data_ptr(), rows.stride(0), rows.shape[0]
        self.repeat_product()
        return outs

    def repeat_product(self) -> None:
        """Compute the last call again, into its outputs, which are still there."""
        self.native.linear(self._address)


def _allocate(form: WeightForm, num_panels: int, inputs: int, dtype: torch.dtype, group_size: int) -> dict[str, Tensor]:
    """Return memory for weights, all of them zero, and for their scales where they have some."""
    if form in (WeightForm.INT8, WeightForm.INT4):
        bits = 8 if form == WeightForm.INT8 else 4
        lines, groups = -(-inputs // 4), 1 if bits == 8 else -(-inputs // group_size)
        codes = _ARENA.allocate_zeros(num_panels * lines * 16 * bits, torch.uint8)
        codes.fill_(0x80 if bits == 8 else 0x88)  # the code of zero
        return {"memory": codes, "scales": _ARENA.allocate_zeros(num_panels * groups * PANEL_COLUMNS, torch.float32)}
    allocate = map_zeros if form == WeightForm.COMPRESSED else _ARENA.allocate_zeros  # compressed, it goes
    return {"memory": allocate(num_panels * -(-inputs * dtype.itemsize // 4) * PANEL_COLUMNS, torch.int32)}


def _allocate_gguf(
    matrices: Sequence[GgufMatrix], counts: list[int], firsts: list[int], num_panels: int
) -> dict[str, Tensor]:
    """Return zeros for blocks, the kind of each panel, and where each is in memory, with the end of all.

    `counts` and `firsts` are the number of panels and the first one of each matrix.
    """
    kinds, sizes = torch.empty(num_panels, dtype=torch.uint8), torch.empty(num_panels, dtype=torch.int64)
    for matrix, first, count in zip(matrices, firsts, counts, strict=True):
        form, panels = GGUF_FORMS[matrix.kind], slice(first, first + count)
        kinds[panels], sizes[panels] = form.number, form.count_panel_bytes(matrix.part.get_shape()[1])
    places = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return {"memory": _ARENA.allocate_zeros(int(places[-1]), torch.uint8), "kinds": kinds, "places": places}


def _place_panels(outputs: Sequence[int], activation: Activation) -> tuple[list[int], int]:
    """Return the first panel of each layer of a group, and the number of panels. Gate and up share theirs."""
    width, together = (PANEL_COLUMNS // 2, 2) if activation else (PANEL_COLUMNS, 1)
    ends = list(itertools.accumulate(-(-n // width) for n in outputs[::together]))
    return [end for end in (0, *ends[:-1]) for _ in range(together)], ends[-1]


def find_library(rows: Tensor) -> Library | None:
    """Return the kernels' library if it was built and can look at rows [rows, columns] like these."""
    is_readable = rows.device.type == "cpu" and rows.dtype in DTYPES and rows.stride(1) == 1
    return library.load_library() if is_readable else None


def find_best_columns(native: Library, scores: Tensor) -> list[int]:
    """Return the column of each row's highest value, the first of equal ones, of scores [rows, columns]."""
    return _look_at_rows(native.best, scores)


def find_broken_rows(native: Library, logits: Tensor) -> set[int]:
    """Return the rows of logits [rows, columns] with a value that is no number, or a highest value that is infinite."""
    return {row for row, is_broken in enumerate(_look_at_rows(native.broken, logits)) if is_broken}


def _look_at_rows(function: Callable[[int], object], rows: Tensor) -> list[int]:
    found = (ctypes.c_int64 * len(rows))()
    args = library.RowsArgs(
        rows.data_ptr(), *rows.shape, rows.stride(0), ctypes.addressof(found), rows.element_size()
    )  # fmt: skip
    function(ctypes.addressof(args))
    return list(found)


def weight_of(linear: nn.Module) -> Tensor:
    """Return a linear layer's weight as [outputs, inputs]."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if isinstance(linear, Conv1D) else weight.detach()


def make_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer of a weight [outputs, inputs] that is a view of another tensor."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def keep_weight(weight: Tensor) -> None:
    """Keep a weight that is packed: it is small, or still needed."""


def _pack_bias(linears: Sequence[nn.Module], firsts: list[int], width: int, num_panels: int) -> Tensor | None:
    """Return the biases by panel column, float32 [num_panels * 32]; None if no layer has a bias."""
    biases = [getattr(linear, "bias", None) for linear in linears]
    if all(bias is None for bias in biases):
        return None
    columns = torch.zeros(num_panels, PANEL_COLUMNS // width, width)
    for i, (bias, first) in enumerate(zip(biases, firsts, strict=True)):
        if bias is None:
            continue
        part = columns[first:, i % columns.shape[1]]
        padded = torch.zeros(-(-len(bias) // width) * width)
        padded[: len(bias)] = bias.detach().float()
        part[: len(padded) // width] = padded.view(-1, width)
    return columns.flatten()


class PackedLinear(nn.Module):
    """Replaces a linear layer, and computes all layers of the group; the others take their outputs from it."""

    def __init__(self, group: PackedLinears) -> None:
        super().__init__()
        self.group = group
        self.in_features, self.out_features = group.inputs, group.outputs[0]
        self.weight = torch.empty(0, dtype=group.dtype)
        """Empty; some models read its dtype."""
        self._x: Tensor | None = None
        self._outs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        outs = self.group(x)
        if len(outs) > 1:
            self._x, self._outs = x, outs
        return outs[0]

    def take_output(self, index: int, x: Tensor) -> Tensor:
        """Return the output of the group's layer `index` for the input that the first layer has just had."""
        if self._x is not x:
            raise NotImplementedError("linear layers that had one input when they were grouped now have several")
        if index == len(self._outs) - 1:
            self._x, outs, self._outs = None, self._outs, []
            return outs[index]
        return self._outs[index]


class PackedFollower(nn.Module):
    """Replaces a further linear layer of a group."""

    def __init__(self, first: PackedLinear, index: int) -> None:
        super().__init__()
        self._first = [first]  # in a list, so that it is not a submodule of this one too
        self.index = index
        self.in_features, self.out_features = first.group.inputs, first.group.outputs[index]
        self.weight = torch.empty(0, dtype=first.group.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        return self.first.take_output(self.index, x)

    @property
    def first(self) -> PackedLinear:
        """The first layer of the group."""
        return self._first[0]


class PackedEmbedding(nn.Module):
    """Token embeddings read from the packed output layer they are tied to."""

    def __init__(self, native: Library, group: PackedLinears) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = group.outputs[0], group.inputs
        self._native, self.group = native, group

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [..] to [.., embedding_dim]."""
        ids = ids.long().contiguous()
        out = torch.empty(*ids.shape, self.embedding_dim, dtype=self.group.dtype)
        args = library.LookupArgs(ctypes.pointer(self.group.packed), ids.data_ptr(), out.data_ptr(), ids.numel())
        self._native.lookup(ctypes.addressof(args))
        return out


class PackedWeight(Tensor):
    """Stands for a router's weight, which routers multiply in ways of their own: `linear` with it is the native one.

    It has no values, and everything that a router does but reading its shape or dtype, converting it, and `linear`
    raises an error.
    """

    group: PackedLinears

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch that has such a weight among its arguments. Raises `TypeError` if it cannot."""
        if func is linear and isinstance(args[1], PackedWeight):
            x, group = args[0], args[1].group
            if x.dtype != group.dtype:
                raise TypeError(f"the packed weight is of {group.dtype}, and its input of {x.dtype}")
            return group(x)[0]
        if func in (Tensor.type, Tensor.to, Tensor.float):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - so does torch's documentation
            return func(*args, **(kwargs or {}))


def make_packed_weight(weight: Tensor, group: PackedLinears) -> PackedWeight:
    """Return what stands for a router's weight that is packed."""
    packed: PackedWeight = torch.empty_like(weight, device="meta").as_subclass(PackedWeight)
    packed.group = group
    return packed
