"""The tensors of a model's safetensors or GGUF files, mapped into memory and not read before they are used.

A tensor that is wanted in the file's own dtype is a view of the mapping: it costs no memory but the page cache,
which all workers of a host share. One that is converted or merged with others is a copy; the pages it was made from
are let go as loading goes on, so that the peak is what stays in the end and a little more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.gguf.gguf_weights import GgufMatrix, map_gguf_tensors
from penstock.engine.kernels.memory import drop_pages, map_zeros
from penstock.engine.kernels.packed import GGUF_FORMS, count_packed_bytes
from penstock.engine.weights.files import Progress, to_one_line
from penstock.errors import ModelLoadError, build_damage_error

_DROP_INTERVAL_BYTES = 8 * 2**20  # how much is read before its pages are let go


class MappedWeights:
    """All tensors of some safetensors or GGUF files. Raises `ModelLoadError` if a file is damaged."""

    def __init__(self, files: list[Path]) -> None:
        self.tensors: dict[str, Any] = {}
        """By name: safetensors' slices, with `get_shape()`, `get_dtype()`, and `[...]` for the view, or packed ones."""
        self.num_bytes = 0
        """Bytes of all tensors as they are stored."""
        self.keeps_blocks = False
        """Whether matrices of a GGUF file stay there that are of types with which the kernels compute."""
        self.group_sizes: set[int] = set()
        """How many inputs have one scale, of weights that are stored as integers of 4 bits."""
        self._matrices: dict[int, GgufMatrix] = {}
        """By the address of a weight: what it is in a GGUF file."""
        self._unread = WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]]()
        """The modules that read their weights at each call, by hooks with these handles."""
        self._stored: dict[str, tuple[Any, str]] = {}
        """By the name in its file: a tensor as it is stored, and the file's name."""
        self._mappings: list[tuple[int, int]] = []  # (first address, address after the last)
        self._num_bytes_read = self._num_bytes_dropped = 0
        for file in files:
            try:
                if file.suffix == ".gguf":
                    self._add_slices(map_gguf_tensors(file), file.name)
                    continue
                opened: Any = safe_open(file, framework="pt", backend="mmap")
                self._add_slices({name: opened.get_slice(name) for name in opened.offset_keys()}, file.name)
            except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
                raise build_damage_error(f"{file.name} is damaged or cut off: {to_one_line(error)}") from error

    def _add_slices(self, slices: dict[str, Any], file_name: str) -> None:
        """Add the tensors of a file, in the order in which they are in it."""
        views = [view for view in (part[...] for part in slices.values()) if view.nbytes]
        if views:
            self._mappings.append((views[0].data_ptr(), views[-1].data_ptr() + views[-1].nbytes))
        self.num_bytes += sum(view.nbytes for view in views)
        self.tensors.update(slices)
        self._stored |= {name: (part, file_name) for name, part in slices.items()}

    def find_not_finite(self) -> str:
        """Return which stored tensor has values that are no finite numbers, and its file; empty where none has."""
        for name, (part, file_name) in self._stored.items():
            view: Tensor = part[...]
            pieces = torch.split(view.flatten(), _DROP_INTERVAL_BYTES) if view.is_floating_point() else ()
            if not all(bool(piece.float().isfinite().all()) for piece in pieces):
                return f"{name} in {file_name}"
        return ""

    def set_tensors(self, tensors: dict[str, Any]) -> None:
        """Have these instead: slices of the same files, and tensors that are packed in them."""
        self.tensors = tensors
        slices = (one.parts if isinstance(one, PackedTensor) else [one] for one in tensors.values())
        self.num_bytes = sum(part[...].nbytes for parts in slices for part in parts if part is not None)

    def as_state_dict(self, report: Progress) -> dict[str, Any]:
        """Return a state dict for `from_pretrained`, which reads one tensor after the other with `[...]`."""
        return {name: _LazyTensor(self, part, report) for name, part in self.tensors.items()}

    def map_tensor(self, part: Any, report: Progress) -> Tensor:
        """Return the mapped tensor of a slice, or a packed one unpacked, and report how much of all bytes was read."""
        if isinstance(part, PackedTensor):
            # In a mapping of its own, which goes back to the system when the weight is packed.
            out = map_zeros(math.prod(part.shape), part.dtype).view(part.shape)
            stored = [None if one is None else self.map_tensor(one, report) for one in part.parts]
            if part.matrix is not None:
                self._matrices[out.data_ptr()] = part.matrix
            try:
                if not self.stays_in_file(part):
                    part.fill(out, *stored)
            except ValueError as error:
                raise ModelLoadError(f"{part.name} cannot be unpacked: {error}") from error
            return out
        view: Tensor = part[...]
        if self._num_bytes_read - self._num_bytes_dropped > _DROP_INTERVAL_BYTES:
            self.drop_pages()
        self._num_bytes_read += view.nbytes
        report("loading weights", self._num_bytes_read / max(1, self.num_bytes))
        return view

    def drop_pages(self) -> None:
        """Drop all pages from memory. Views must be unwritten, because dropped pages are read from the file again."""
        for first, end in self._mappings:
            drop_pages(first, end)
        self._num_bytes_dropped = self._num_bytes_read

    def drop_tensor_pages(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages when it was packed elsewhere; nothing if it is not a view of a file.

        A large one in pieces (`release(weight[:rows])`): until then its pages and the packed copy are both in memory.
        A page that is used later is read from the file again; values that were written to it are lost.
        """
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and end <= high for low, high in self._mappings):
            drop_pages(first, end)

    # Blocks of a GGUF file

    def stays_in_file(self, part: Any) -> bool:
        """Return whether a tensor's values are in memory only while a module computes with them."""
        matrix = part.matrix if isinstance(part, PackedTensor) else None
        return self.keeps_blocks and matrix is not None and matrix.kind in GGUF_FORMS

    def count_saved_bytes(self) -> int:
        """Return how much less the model takes as some matrices stay in the file until they are packed.

        The largest is unpacked beside the packed ones. One is packed only if the kernels know the types of all that it
        is packed with, which are in one module.
        """
        unpacked = {
            _find_parent(name)
            for name, part in self.tensors.items()
            if len(part.get_shape()) == 2 and not self.stays_in_file(part)
        }
        kept = [
            part
            for name, part in self.tensors.items()
            if self.stays_in_file(part) and _find_parent(name) not in unpacked
        ]
        sizes: list[int] = [math.prod(part.shape) * part.dtype.itemsize for part in kept]
        packed = sum(count_packed_bytes(part.matrix) for part in kept)
        return sum(sizes) - max(sizes, default=0) - packed

    def find_matrices(self, module: nn.Module) -> WeakKeyDictionary[nn.Module, GgufMatrix]:
        """Return by linear layer and embedding what its weight is in a GGUF file."""
        found = WeakKeyDictionary[nn.Module, GgufMatrix]()
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding) and part.weight.data_ptr() in self._matrices:
                found[part] = self._matrices[part.weight.data_ptr()]
        return found

    def read_when_used(self, module: nn.Module) -> None:
        """Let the parts of a module whose weights stay in a file read them at each call, and drop them behind it.

        Raises `ModelLoadError` if the module has another tensor than was allocated for a matrix: it would be zero.
        """
        if not self.keeps_blocks:
            return
        unread = {address for address, matrix in self._matrices.items() if matrix.kind in GGUF_FORMS}
        moved = unread - {weight.data_ptr() for weight in module.parameters()}
        if moved:
            name = self._matrices[moved.pop()].name
            raise ModelLoadError(f"{name} was copied while it was loaded: set PENSTOCK_ENGINE_WEIGHTS=bf16")
        for part, matrix in self.find_matrices(module).items():
            if matrix.kind in GGUF_FORMS:
                self._unread[part] = _read_at_calls(part, matrix, self.drop_pages)

    def read_to_stay(self, *modules: nn.Module) -> None:
        """Read the weights of these modules where they are in a file, so that they stay in memory."""
        wanted = {_get_weight(part).data_ptr(): part for part in modules if part in self._unread}
        for address, part in wanted.items():
            self._matrices[address].fill_weight(_get_weight(part))
            self.drop_pages()
        for part in [part for part in self._unread if _get_weight(part).data_ptr() in wanted]:  # some share a weight
            for handle in self._unread.pop(part):
                handle.remove()


def _find_parent(name: str) -> str:
    """Return the name of the module that has the module with a weight of this name."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _get_weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight.detach()


def _read_at_calls(
    module: nn.Module, matrix: GgufMatrix, drop_file: Callable[[], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Let a module read its weight before each call, and give its memory back behind it, while it has the hooks."""
    weight = _get_weight(module)

    def read_before_call(module: nn.Module, args: tuple[Any, ...]) -> None:
        # Of an embedding, what the tokens need.
        matrix.fill_weight(weight, rows=args[0].unique() if isinstance(module, nn.Embedding) else None)
        drop_file()

    def drop_after_call(*_call: Any) -> None:
        drop_pages(weight.data_ptr(), weight.data_ptr() + weight.nbytes)

    return module.register_forward_pre_hook(read_before_call), module.register_forward_hook(drop_after_call)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor that is not stored itself, but computed from others when it is read."""

    name: str
    parts: list[Any]
    """The slices of what is stored; None for what a checkpoint need not have."""
    shape: list[int]
    dtype: torch.dtype
    fill: Callable[..., None]
    """Computes it of the mapped parts, into memory that it is given first. Raises `ValueError`."""
    matrix: GgufMatrix | None = None
    """The matrix of a GGUF file that it is stored as."""

    def get_shape(self) -> list[int]:
        """Return its shape once it is unpacked."""
        return self.shape

    def get_dtype(self) -> str:
        """Return safetensors' name for the type in which its values are computed."""
        return "F32"


class _LazyTensor:
    """One tensor of a file, in the form that `from_pretrained` expects."""

    def __init__(self, weights: MappedWeights, part: Any, report: Progress) -> None:
        self._weights, self._part, self._report = weights, part, report

    def __getitem__(self, key: object) -> Tensor:
        assert key is Ellipsis, "transformers took whole tensors when this was written"
        return self._weights.map_tensor(self._part, self._report)

    def get_shape(self) -> list[int]:
        shape: list[int] = self._part.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._part.get_dtype()
        return dtype
