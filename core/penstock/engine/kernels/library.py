"""The compiled library: its structures and functions as `src/kernels.h` has them.

`load_library()` returns None if it was not built (no compiler at install); the engine then runs on torch alone. One of
another interface is built anew.
"""

import ctypes
import fcntl
import functools
import logging
import os
import subprocess
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import ClassVar

from penstock.engine.kernels.build import HERE, LIBRARY, build_library, is_current
from penstock.errors import DependencyMissing, SettingsError

log = logging.getLogger("penstock.engine")

TORCH = "torch"
"""What stands for an instruction set where torch computes the models, and the kernels only what lies beside them."""


class Packed(Structure):
    """A packed group of linear layers."""

    _fields_: ClassVar = [
        ("data", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("num_panels", c_int64),
        ("element_bytes", c_int32), ("form", c_int32), ("scales", c_void_p), ("palettes", c_void_p),
        ("exceptions", c_void_p), ("first_exception", c_void_p), ("kinds", c_void_p), ("places", c_void_p),
    ]  # fmt: skip


class Part(Structure):
    """Where a part of the output columns goes."""

    _fields_: ClassVar = [("out", c_void_p), ("stride", c_int64), ("columns", c_int64), ("first_panel", c_int64)]


class LinearArgs(Structure):
    """One call of a packed group."""

    _fields_: ClassVar = [
        ("weight", POINTER(Packed)), ("x", c_void_p), ("x_stride", c_int64), ("rows", c_int64),
        ("parts", POINTER(Part)), ("num_parts", c_int32), ("activation", c_int32), ("residual", c_void_p),
        ("residual_stride", c_int64), ("limit", c_float), ("slope", c_float),
    ]  # fmt: skip


class ExpertsArgs(Structure):
    """One call of a mixture of experts."""

    _fields_: ClassVar = [
        ("gate_up", POINTER(Packed)), ("down", POINTER(Packed)), ("x", c_void_p), ("chosen", c_void_p),
        ("shares", c_void_p), ("out", c_void_p), ("rows", c_int64), ("top_k", c_int64), ("num_experts", c_int64),
        ("intermediate", c_int64), ("activation", c_int32), ("share_bytes", c_int32), ("limit", c_float),
        ("slope", c_float),
    ]  # fmt: skip


class Segment(Structure):
    """The new tokens of one sequence."""

    _fields_: ClassVar = [("first_row", c_int32), ("num_rows", c_int32), ("start", c_int32), ("table", c_int32)]


class AttentionArgs(Structure):
    """One layer's attention over the step's batch."""

    _fields_: ClassVar = [
        ("q", c_void_p), ("q_row_stride", c_int64), ("q_head_stride", c_int64), ("keys", c_void_p),
        ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p), ("block_stride", c_int64),
        ("tables", c_void_p), ("segments", c_void_p),
        ("first_key", c_void_p), ("sinks", c_void_p), ("out", c_void_p), ("num_segments", c_int32),
        ("heads", c_int32), ("kv_heads", c_int32), ("k_size", c_int32), ("v_size", c_int32), ("block_size", c_int32),
        ("scale", c_float), ("softcap", c_float), ("element_bytes", c_int32),
    ]  # fmt: skip


class WriteArgs(Structure):
    """New K or V rows into the pool."""

    _fields_: ClassVar = [
        ("x", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64), ("pool", c_void_p), ("scales", c_void_p),
        ("block_stride", c_int64), ("blocks", c_void_p), ("offsets", c_void_p), ("rows", c_int64), ("heads", c_int32),
        ("size", c_int32), ("block_size", c_int32), ("element_bytes", c_int32),
    ]  # fmt: skip


class NormArgs(Structure):
    """RMSNorm of rows, or of each head of rows."""

    _fields_: ClassVar = [
        ("x", c_void_p), ("out", c_void_p), ("weight", c_void_p), ("rows", c_int64), ("groups", c_int64),
        ("size", c_int64), ("x_stride", c_int64), ("x_group_stride", c_int64), ("out_stride", c_int64),
        ("out_group_stride", c_int64), ("eps", c_float), ("plus_one", c_int32), ("element_bytes", c_int32),
    ]  # fmt: skip


class RopeArgs(Structure):
    """Rotary embedding in place."""

    _fields_: ClassVar = [
        ("x", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64), ("cos", c_void_p), ("sin", c_void_p),
        ("rows", c_int64), ("heads", c_int32), ("size", c_int32), ("element_bytes", c_int32),
    ]  # fmt: skip


class PackArgs(Structure):
    """One weight into the panels of its group."""

    _fields_: ClassVar = [
        ("weight", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("row_stride", c_int64), ("data", c_void_p),
        ("first_panel", c_int64), ("columns", c_int32), ("first_column", c_int32), ("element_bytes", c_int32),
        ("form", c_int32), ("scales", c_void_p),
    ]  # fmt: skip


class PackGgufArgs(Structure):
    """The parts of one weight's blocks into the panels of its group."""

    _fields_: ClassVar = [
        ("codes", c_void_p), ("halves", c_void_p), ("scales", c_void_p), ("minimums", c_void_p), ("outputs", c_int64),
        ("inputs", c_int64), ("data", c_void_p), ("places", c_void_p), ("first_panel", c_int64), ("columns", c_int32),
        ("first_column", c_int32), ("kind", c_int32),
    ]  # fmt: skip


class CompressArgs(Structure):
    """Stored panels, to be compressed."""

    _fields_: ClassVar = [
        ("stored", c_void_p), ("inputs", c_int64), ("num_panels", c_int64), ("data", c_void_p), ("palettes", c_void_p),
        ("counts", c_void_p), ("first_exception", c_void_p), ("exceptions", c_void_p),
    ]  # fmt: skip


class RowsArgs(Structure):
    """A number found in each row: the column of its highest value, or whether a token can be drawn from it."""

    _fields_: ClassVar = [
        ("values", c_void_p), ("rows", c_int64), ("columns", c_int64), ("row_stride", c_int64), ("found", c_void_p),
        ("element_bytes", c_int32),
    ]  # fmt: skip


class SampleRow(Structure):
    """How the token of one row is drawn."""

    _fields_: ClassVar = [
        ("mask", c_void_p), ("forbidden", c_void_p), ("num_forbidden", c_int64), ("biased", c_void_p),
        ("biases", c_void_p), ("num_biased", c_int64), ("tokens", c_void_p), ("counts", c_void_p),
        ("num_tokens", c_int64), ("presence", c_double), ("frequency", c_double), ("repetition", c_float),
        ("rate", c_float), ("top_k", c_int64), ("top_p", c_double), ("min_p", c_double), ("uniform", c_double),
    ]  # fmt: skip


class SampleArgs(Structure):
    """A token of each row of logits."""

    _fields_: ClassVar = [
        ("logits", c_void_p), ("rows", c_int64), ("columns", c_int64), ("row_stride", c_int64), ("each", c_void_p),
        ("drawn", c_void_p), ("element_bytes", c_int32),
    ]  # fmt: skip


class RankArgs(Structure):
    """The likeliest tokens of each row of logits, and the weight of all."""

    _fields_: ClassVar = [
        ("logits", c_void_p), ("rows", c_int64), ("columns", c_int64), ("row_stride", c_int64), ("width", c_int64),
        ("rate", c_float), ("values", c_void_p), ("ids", c_void_p), ("totals", c_void_p), ("element_bytes", c_int32),
    ]  # fmt: skip


class ConvolveArgs(Structure):
    """Tokens of sequences through a depthwise convolution."""

    _fields_: ClassVar = [
        ("state", c_void_p), ("runs", c_void_p), ("x", c_void_p), ("x_stride", c_int64), ("x_channel_stride", c_int64),
        ("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p), ("num_runs", c_int64), ("channels", c_int64),
        ("row_stride", c_int64), ("width", c_int32), ("length", c_int32), ("has_silu", c_int32),
        ("element_bytes", c_int32),
    ]  # fmt: skip


class DeltaArgs(Structure):
    """Tokens of sequences through a delta rule."""

    _fields_: ClassVar = [
        ("state", c_void_p), ("runs", c_void_p), ("query", c_void_p), ("key", c_void_p), ("value", c_void_p),
        ("decay", c_void_p), ("beta", c_void_p), ("out", c_void_p), ("num_runs", c_int64), ("heads", c_int64),
        ("key_heads", c_int64), ("keys", c_int64), ("values", c_int64), ("row_stride", c_int64),
        ("is_normed", c_int32), ("has_key_decays", c_int32),
    ]  # fmt: skip


class SpaceArgs(Structure):
    """Tokens of sequences through a state space."""

    _fields_: ClassVar = [
        ("state", c_void_p), ("runs", c_void_p), ("x", c_void_p), ("steps", c_void_p), ("step_bias", c_void_p),
        ("rates", c_void_p), ("b", c_void_p), ("c", c_void_p), ("skip", c_void_p), ("gate", c_void_p),
        ("out", c_void_p), ("num_runs", c_int64), ("heads", c_int64), ("parts", c_int64), ("size", c_int64),
        ("groups", c_int64), ("row_stride", c_int64), ("has_rates", c_int32), ("has_softplus", c_int32),
        ("element_bytes", c_int32),
    ]  # fmt: skip


class LookupArgs(Structure):
    """Rows of a packed weight."""

    _fields_: ClassVar = [("weight", POINTER(Packed)), ("ids", c_void_p), ("out", c_void_p), ("rows", c_int64)]


class LayerArgs(Structure):
    """The weights of one decoder layer."""

    _fields_: ClassVar = [
        ("qkv", POINTER(Packed)), ("output", POINTER(Packed)), ("gate_up", POINTER(Packed)), ("down", POINTER(Packed)),
        ("input_norm", c_void_p), ("mid_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("eps", c_float),
        ("mid_eps", c_float), ("head_eps", c_float), ("activation", c_int32), ("plus_one", c_int32),
        ("intermediate", c_int32),
    ]  # fmt: skip


class PagedLayer(Structure):
    """A decoder layer over a pool."""

    _fields_: ClassVar = [("weights", POINTER(LayerArgs)), ("attention", AttentionArgs)]


class StepArgs(Structure):
    """What all layers of a step share."""

    _fields_: ClassVar = [
        ("x", c_void_p), ("out", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("blocks", c_void_p),
        ("offsets", c_void_p), ("rows", c_int64), ("hidden", c_int64), ("tables", c_void_p), ("segments", c_void_p),
        ("first_key", c_void_p), ("num_segments", c_int32), ("normed", c_void_p),
    ]  # fmt: skip


class NativeModelArgs(Structure):
    """A whole model of decoder layers."""

    _fields_: ClassVar = [
        ("layers", POINTER(PagedLayer)), ("num_layers", c_int64), ("packed_embedding", POINTER(Packed)),
        ("embedding", c_void_p), ("num_tokens", c_int64), ("ids", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("num_positions", c_int64), ("positions", c_void_p), ("norm", c_void_p), ("head", POINTER(Packed)),
        ("kept", c_void_p), ("num_kept", c_int64), ("logits", c_void_p), ("num_logits", c_int64), ("eps", c_float),
        ("plus_one", c_int32), ("head_size", c_int32), ("element_bytes", c_int32),
    ]  # fmt: skip


def _check_status(status: int) -> None:
    """Raise what a function of the library returned."""
    if status:
        raise (
            MemoryError("the kernels found no memory")
            if status == 1
            else IndexError("there is no such token, position, row or expert")
        )


class Library:
    """The functions and the instruction set they run on. Calls release the interpreter's lock.

    They raise `MemoryError`, and an `IndexError` for tokens that are not in the vocabulary, for positions without
    cosines, and for unknown rows and experts.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        handle.penstock_select.argtypes, handle.penstock_select.restype = [c_char_p], c_char_p
        handle.penstock_set_threads.argtypes = [c_int]
        handle.penstock_read.argtypes, handle.penstock_read.restype = [c_void_p, c_int64], c_uint64
        for name in (
            "pack", "pack_gguf", "compress", "linear", "experts", "lookup", "attention", "write", "norm", "rope",
            "best", "broken", "sample", "rank", "convolve", "delta", "space",
        ):  # fmt: skip
            getattr(handle, f"penstock_{name}").argtypes = [c_void_p]
            getattr(handle, f"penstock_{name}").restype = _check_status
        handle.penstock_layers.argtypes = [c_void_p, c_int64, c_void_p]
        handle.penstock_layers.restype = _check_status
        handle.penstock_body.argtypes = [c_void_p, c_void_p]
        handle.penstock_body.restype = _check_status
        self.layers = handle.penstock_layers
        self.body = handle.penstock_body
        self.read = handle.penstock_read
        self.pack = handle.penstock_pack
        self.pack_gguf = handle.penstock_pack_gguf
        self.compress = handle.penstock_compress
        self.linear = handle.penstock_linear
        self.experts = handle.penstock_experts
        self.lookup = handle.penstock_lookup
        self.attention = handle.penstock_attention
        self.write = handle.penstock_write
        self.norm = handle.penstock_norm
        self.rope = handle.penstock_rope
        self.best = handle.penstock_best
        self.broken = handle.penstock_broken
        self.sample = handle.penstock_sample
        self.rank = handle.penstock_rank
        self.convolve = handle.penstock_convolve
        self.delta = handle.penstock_delta
        self.space = handle.penstock_space
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
            log.warning("the native kernels were built from other sources, and are built anew")
            build_library(LIBRARY)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DependencyMissing(
            f"{LIBRARY} was built from other sources and cannot be built anew ({error}): install a C++ compiler and run"
            f" python -m penstock.engine.kernels.build, or remove the file to run without kernels"
        ) from error
    finally:
        os.close(folder)
