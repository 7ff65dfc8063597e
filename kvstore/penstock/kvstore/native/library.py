"""The binding of the compiled library, where it was built."""

import contextlib
import ctypes
import functools
import logging
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_ssize_t, c_uint64, c_void_p, py_object, pythonapi
from typing import ClassVar

from penstock.kvstore.native.build import LIBRARY

log = logging.getLogger("penstock.kv")

HashState = c_uint64 * 8
"""State of the hash between the chunks of a copy."""

_READ = 0
_WRITE = 1


class _PyBuffer(Structure):
    """Python's `Py_buffer`: memory that is pinned until it is released."""

    _fields_: ClassVar = [
        ("start", c_void_p), ("owner", c_void_p), ("bytes", c_ssize_t), ("item_bytes", c_ssize_t),
        ("readonly", c_int), ("dimensions", c_int), ("format", c_char_p), ("shape", c_void_p), ("strides", c_void_p),
        ("suboffsets", c_void_p), ("internal", c_void_p),
    ]  # fmt: skip


_get_buffer = pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = [py_object, c_void_p, c_int], c_int
_release_buffer = pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = [c_void_p], None


class Library:
    """Functions of the library. Calls release the interpreter's lock."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._copy_hashed = handle.penstock_copy_hashed
        self._copy_hashed.argtypes, self._copy_hashed.restype = [c_void_p, c_void_p, c_size_t], c_uint64
        self._copy_piece = handle.penstock_copy_piece
        self._copy_piece.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t]
        self._copy_piece.restype = c_uint64
        self._select = handle.penstock_copying_select
        self._select.argtypes, self._select.restype = [c_char_p], c_char_p
        self.isa = ""
        self.select_isa("")

    def select_isa(self, isa: str) -> bool:
        """Use the named instruction set, or the best one for "". Return whether this processor has it."""
        name = self._select(isa.encode())
        if name is not None:
            self.isa = name.decode()
        return name is not None

    def copy_and_hash(self, into: memoryview, source: memoryview) -> int:
        """Implement `penstock.kvstore.copying.copy_and_hash`."""
        with _pinned_buffer(into, _WRITE) as target, _pinned_buffer(source, _READ) as origin:
            if target.bytes != origin.bytes:
                raise ValueError(f"{origin.bytes} bytes do not fit over {target.bytes}")
            return int(self._copy_hashed(target.start, origin.start, target.bytes))

    def copy_chunk(self, sums: "ctypes.Array[c_uint64]", into: memoryview, source: memoryview, start: int) -> int:
        """Copy `source` to `into[start:]`. Return the checksum after the last chunk, else 0."""
        with _pinned_buffer(into, _WRITE) as target, _pinned_buffer(source, _READ) as origin:
            if start + origin.bytes > target.bytes:
                raise ValueError(f"{origin.bytes} bytes do not fit over the last {target.bytes - start}")
            return int(self._copy_piece(sums, target.start, origin.start, start, origin.bytes, target.bytes))


class _pinned_buffer(contextlib.AbstractContextManager[_PyBuffer]):  # noqa: N801 (used as a function)
    """Pins the memory of an object."""

    def __init__(self, found: memoryview, flags: int) -> None:
        self._view = _PyBuffer()
        _get_buffer(found, byref(self._view), flags)

    def __enter__(self) -> _PyBuffer:
        return self._view

    def __exit__(self, *_: object) -> None:
        _release_buffer(byref(self._view))


@functools.cache
def load_library() -> Library | None:
    """Return the library, or None if it was not built, or was built for another machine or version."""
    if not LIBRARY.is_file():
        return None
    try:
        return Library(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError) as error:  # the second: a function is missing
        log.warning(
            "the native copy library does not load, KV blocks are copied and verified in two passes"
            " (python -m penstock.kvstore.native.build builds it again): %s",
            error,
        )
        return None
