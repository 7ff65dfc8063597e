"""The tensors of a model's safetensors or GGUF files, mapped into memory and not read before they are used.

A tensor that is wanted in the file's own dtype is a view of the mapping: it costs no memory but the page cache,
which all workers of a host share. One that is converted or merged with others is a copy; the pages it was made from
are let go as loading goes on, so that the peak is what stays in the end and a little more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.engine.files import Progress, to_one_line
from penstock.engine.gguf_weights import GgufMatrix, map_gguf_tensors
from penstock.engine.kernels.memory import drop_pages, map_zeros
from penstock.engine.kernels.packed import GGUF_FORMS
from penstock.errors import ModelLoadError

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
        self._unread = WeakKeyDictionary[nn.Module, _Unread]()
        self._mappings: list[tuple[int, int]] = []  # (first address, address after the last)
        self._num_bytes_read = self._num_bytes_dropped = 0
        for file in files:
            try:
                if file.suffix == ".gguf":
                    self._add_slices(map_gguf_tensors(file))
                    continue
                opened: Any = safe_open(file, framework="pt", backend="mmap")
                self._add_slices({name: opened.get_slice(name) for name in opened.offset_keys()})
            except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
                raise ModelLoadError(f"{file.name} is damaged or cut off: {to_one_line(error)}") from error

    def _add_slices(self, slices: dict[str, Any]) -> None:
        """Add the tensors of a file, in the order in which they are in it."""
        views = [view for view in (part[...] for part in slices.values()) if view.nbytes]
        if views:
            self._mappings.append((views[0].data_ptr(), views[-1].data_ptr() + views[-1].nbytes))
        self.num_bytes += sum(view.nbytes for view in views)
        self.tensors.update(slices)

    def set_tensors(self, tensors: dict[str, Any]) -> None:
        """Have these instead: slices of the same files, and tensors that are packed in them."""
        self.tensors = tensors
        slices = [part for tensor in tensors.values() for part in _find_slices(tensor)]
        self.num_bytes = sum(part[...].nbytes for part in slices)

    def as_state_dict(self, report: Progress) -> dict[str, Any]:
        """Return a state dict for `from_pretrained`, which reads one tensor after the other with `[...]`."""
        return {name: _LazyTensor(self, part, report) for name, part in self.tensors.items()}

    def map_tensor(self, part: Any, report: Progress) -> Tensor:
        """Return the mapped tensor of a slice, or a packed one unpacked, and report how much of all bytes was read."""
        if isinstance(part, PackedTensor):
            out, stored = part.allocate_tensor(), [self.map_tensor(one, report) for one in part.parts]
            if not self.stays_in_file(part):
                part.fill(out, *stored)
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
        What is still used of it is read from the file again; what somebody wrote to it is lost.
        """
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and end <= high for low, high in self._mappings):
            drop_pages(first, end)

    # Blocks of a GGUF file

    def stays_in_file(self, part: Any) -> bool:
        """Return whether a tensor's values are in memory only while a module computes with them."""
        matrix = part.matrix if isinstance(part, PackedTensor) else None
        return self.keeps_blocks and matrix is not None and matrix.kind in GGUF_FORMS

    def find_matrices(self, module: nn.Module) -> WeakKeyDictionary[nn.Module, GgufMatrix]:
        """Return by linear layer and embedding what its weight is in a GGUF file."""
        found, by_address = WeakKeyDictionary[nn.Module, GgufMatrix](), dict[int, GgufMatrix]()
        for name, weight in module.named_parameters():
            stored = self.tensors.get(name)
            if isinstance(stored, PackedTensor) and stored.matrix is not None:
                by_address[weight.data_ptr()] = stored.matrix
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding) and part.weight.data_ptr() in by_address:
                found[part] = by_address[part.weight.data_ptr()]
        return found

    def read_when_used(self, module: nn.Module) -> None:
        """Let the parts of a module whose weights stay in a file read them at each call, and drop them behind it."""
        if not self.keeps_blocks:
            return
        for part, matrix in self.find_matrices(module).items():
            if matrix.kind in GGUF_FORMS:
                self._unread[part] = _Unread(part, matrix, self.drop_pages)

    def read_to_stay(self, *modules: nn.Module) -> None:
        """Read the weights of these modules where they are in a file, so that they stay in memory."""
        wanted = {self._unread[part].address: self._unread[part] for part in modules if part in self._unread}
        for one in wanted.values():
            one.read_weight()
            self.drop_pages()
        for part, one in list(self._unread.items()):
            if one.address in wanted:
                self._unread.pop(part).remove_hooks()


class _Unread:
    """A module's weight that stays in a file: it is read before each call, and its memory goes back behind it."""

    def __init__(self, module: nn.Module, matrix: GgufMatrix, drop_file: Callable[[], None]) -> None:
        assert isinstance(module.weight, Tensor)
        weight: Tensor = module.weight.detach()
        self.address = weight.data_ptr()
        self.read_weight: Callable[..., None] = partial(matrix.fill_weight, weight)
        drop = partial(drop_pages, self.address, self.address + weight.nbytes)

        def read_before_call(module: nn.Module, args: tuple[Any, ...]) -> None:
            # Of an embedding, what the tokens need.
            self.read_weight(rows=args[0].unique() if isinstance(module, nn.Embedding) else None)
            drop_file()

        self._handles = (
            module.register_forward_pre_hook(read_before_call), module.register_forward_hook(lambda *_: drop())
        )  # fmt: skip

    def remove_hooks(self) -> None:
        """Let the module compute with what is in memory."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class PackedTensor:
    """A tensor that is not stored itself, but computed from others when it is read."""

    parts: tuple[Any, ...]
    """The slices of what is stored."""
    shape: list[int]
    dtype: torch.dtype
    fill: Callable[..., None]
    """Computes it of the mapped parts, into memory that it is given first."""
    matrix: GgufMatrix | None = None
    """What it is stored as in a GGUF file."""

    def allocate_tensor(self) -> Tensor:
        """Return zeros for it, in a mapping of its own: that goes back to the system when the weight is packed."""
        return map_zeros(math.prod(self.shape), self.dtype).view(self.shape)

    def get_shape(self) -> list[int]:
        """Return its shape once it is unpacked."""
        return self.shape

    def get_dtype(self) -> str:
        """Return safetensors' name for the type in which its values are computed."""
        return "F32"


def _find_slices(tensor: Any) -> tuple[Any, ...]:
    return tensor.parts if isinstance(tensor, PackedTensor) else (tensor,)


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
