"""The tensors of a model's safetensors or GGUF files, mapped into memory and not read before they are used.

A tensor that is wanted in the file's own dtype is a view of the mapping: it costs no memory but the page cache,
which all workers of a host share. One that is converted or merged with others is a copy; the pages it was made from
are let go as loading goes on, so that the peak is what stays in the end and a little more.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.files import Progress, to_one_line
from penstock.engine.gguf_weights import GgufMatrix, map_gguf_tensors
from penstock.errors import ModelLoadError

log = logging.getLogger("penstock.engine")

_DROP_INTERVAL_BYTES = 8 * 2**20  # how much is read before its pages are let go


class MappedWeights:
    """All tensors of some safetensors or GGUF files. Raises `ModelLoadError` if a file is damaged."""

    def __init__(self, files: list[Path]) -> None:
        self.tensors: dict[str, Any] = {}
        """By name: safetensors' slices, with `get_shape()`, `get_dtype()`, and `[...]` for the view, or packed ones."""
        self.num_bytes = 0
        """Bytes of all tensors as they are stored."""
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
            return part.unpack(*(self.map_tensor(stored, report) for stored in part.parts))
        view: Tensor = part[...]
        if self._num_bytes_read - self._num_bytes_dropped > _DROP_INTERVAL_BYTES:
            self.drop_pages()
        self._num_bytes_read += view.nbytes
        report("loading weights", self._num_bytes_read / max(1, self.num_bytes))
        return view

    def drop_pages(self) -> None:
        """Drop all pages from memory. Views must be unwritten, because dropped pages are read from the file again."""
        for first, end in self._mappings:
            _drop_pages(first, end)
        self._num_bytes_dropped = self._num_bytes_read

    def drop_tensor_pages(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages when it was packed elsewhere; nothing if it is not a view of a file.

        A large one in pieces (`release(weight[:rows])`): until then its pages and the packed copy are both in memory.
        What is still used of it is read from the file again; what somebody wrote to it is lost.
        """
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and end <= high for low, high in self._mappings):
            _drop_pages(first, end)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor that is not stored itself, but computed from others when it is read."""

    parts: tuple[Any, ...]
    """The slices of what is stored."""
    shape: list[int]
    unpack: Callable[..., Tensor]
    """Returns the tensor, in memory of its own, of the mapped parts."""
    matrix: GgufMatrix | None = None
    """What it is stored as in a GGUF file."""

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


def _drop_pages(first: int, end: int) -> None:
    """Take the pages of [first, end) out of this process. Pages of an unwritten private mapping lose nothing."""
    first -= first % mmap.PAGESIZE
    if _madvise(first, end - first, mmap.MADV_DONTNEED):
        log.warning("pages of the weights stay in memory: %s", os.strerror(ctypes.get_errno()))


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
