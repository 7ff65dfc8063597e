"""The compiled library: its functions, and its structures, which are read from `src/kernels.h`.

`load_library()` returns None if it was not built (no compiler at install); the engine then runs on torch alone. One of
another interface is built anew.
"""

import ctypes
import fcntl
import functools
import logging
import os
import re
import subprocess
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from penstock.engine.kernels.build import HERE, LIBRARY, build_library, is_current
from penstock.errors import DependencyMissing, SettingsError

log = logging.getLogger("penstock.engine")

TORCH = "torch"
"""The name in place of an instruction set's where torch computes the models, and the kernels only what lies beside
them."""


_HEADER = (HERE / "src" / "kernels.h").read_text("utf-8")
_DECLARATIONS = dict(re.findall(r"^struct (\w+) {(.*?)^};", re.sub(r"//.*", "", _HEADER), re.M | re.S))
"""By name of a structure in `kernels.h`: what is between its braces."""
_POINTED = ("Packed", "Part", "LayerArgs", "PagedLayer")
"""Structures to which pointers are kept as such, and not as addresses."""
_TYPES: dict[str, Any] = {"float": c_float, "double": c_double, "int32_t": c_int32, "int64_t": c_int64}


def _declare(name: str) -> type[Structure]:
    """Return the structure that has this name in `kernels.h`, after those that it has in it."""
    fields: list[tuple[str, Any]] = []
    for declaration in _DECLARATIONS[name].replace("const ", "").split(";")[:-1]:
        kind, names = declaration.strip().replace("*", " *").split(maxsplit=1)
        for one in names.split(","):
            pointer = POINTER(_TYPES[kind]) if kind in _POINTED else c_void_p
            fields.append((one.strip("* "), pointer if "*" in one else _TYPES[kind]))
    declared = type(name, (Structure,), {"_fields_": fields})
    _TYPES[name] = declared
    return declared


(Packed, Part, LinearArgs, ExpertsArgs, Segment, AttentionArgs, WriteArgs, NormArgs, RopeArgs, LayerArgs, PagedLayer,
 StepArgs, NativeModelArgs, PackArgs, PackGgufArgs, CompressArgs, LookupArgs, RowsArgs, SampleRow, SampleArgs, RankArgs,
 ConvolveArgs, DeltaArgs, SpaceArgs,
) = map(_declare, (
    "Packed", "Part", "LinearArgs", "ExpertsArgs", "Segment", "AttentionArgs", "WriteArgs", "NormArgs", "RopeArgs",
    "LayerArgs", "PagedLayer", "StepArgs", "NativeModelArgs", "PackArgs", "PackGgufArgs", "CompressArgs", "LookupArgs",
    "RowsArgs", "SampleRow", "SampleArgs", "RankArgs", "ConvolveArgs", "DeltaArgs", "SpaceArgs",
))  # fmt: skip


def _check_status(status: int) -> None:
    """Raise what a function of the library returned."""
    if status:
        raise (
            MemoryError("the kernels found no memory")
            if status == 1
            else IndexError("there is no such token, position, row or expert")
        )


def _find_function(handle: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    """Return a function of the library that takes such arguments and returns a status."""
    function = getattr(handle, f"penstock_{name}")
    function.argtypes, function.restype = arguments, _check_status
    return function


class Library:
    """The functions and the instruction set they run on. Calls release the interpreter's lock.

    They raise `MemoryError`, and an `IndexError` for tokens that are not in the vocabulary, for positions without
    cosines, and for unknown rows and experts.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        handle.penstock_select.argtypes, handle.penstock_select.restype = [c_char_p], c_char_p
        handle.penstock_set_threads.argtypes = [c_int]
        handle.penstock_read.argtypes, handle.penstock_read.restype = [c_void_p, c_int64], c_uint64
        (self.pack, self.pack_gguf, self.compress, self.linear, self.experts, self.lookup, self.attention, self.write,
         self.norm, self.rope, self.best, self.broken, self.sample, self.rank, self.convolve, self.delta, self.space,
         ) = (_find_function(handle, name, c_void_p) for name in (
             "pack", "pack_gguf", "compress", "linear", "experts", "lookup", "attention", "write",
             "norm", "rope", "best", "broken", "sample", "rank", "convolve", "delta", "space",
         ))  # fmt: skip
        self.layers = _find_function(handle, "layers", c_void_p, c_int64, c_void_p)
        self.body = _find_function(handle, "body", c_void_p, c_void_p)
        self.read = handle.penstock_read
        self._set_threads = handle.penstock_set_threads
        self._select = handle.penstock_select
        self.isa = ""
        self.select_isa("")

    def set_threads(self, count: int) -> None:
        """Compute on so many threads from now on, the caller's included. A forked child starts with that one alone."""
        num_threads = self._set_threads(count)
        if num_threads < count:
            log.warning("the kernels run on %d threads: the system allows no more", num_threads)

    def select_isa(self, isa: str) -> None:
        """Run on the named instruction set from now on, or on the best there is for "" and for `TORCH`.

        Raises `SettingsError` if that cannot run here.
        """
        name = self._select(b"" if isa == TORCH else isa.encode())
        if name is None:
            raise SettingsError(f"PENSTOCK_ENGINE_ISA={isa}: this processor or this build does not have it: set `auto`")
        self.isa = TORCH if isa == TORCH else name.decode()


@functools.cache
def load_library() -> Library | None:
    """Return the library of this process, or None if it was not built or is for another kind of machine.

    Raises `DependencyMissing` if it was built from another interface and cannot be built anew.
    """
    if not LIBRARY.is_file():
        return None
    if not is_current(LIBRARY):
        _rebuild_library()
    try:
        handle = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        log.warning("the native kernels do not load, the engine runs without them: %s", error)
        return None
    return Library(handle)


def _rebuild_library() -> None:
    """Build the library anew, in one process at a time. It must not be loaded before: a path is loaded only once."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not is_current(LIBRARY):
            log.warning("the native kernels were built from other sources: they are built anew")
            build_library(LIBRARY)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DependencyMissing(
            f"{LIBRARY} was built from other sources and cannot be built anew ({error}): install a C++ compiler and run"
            f" python -m penstock.engine.kernels.build, or remove the file to run without kernels"
        ) from error
    finally:
        os.close(folder)
