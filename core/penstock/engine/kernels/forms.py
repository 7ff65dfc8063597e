"""In which form the weights of a model's linear layers are packed: as the setting says, or as is fastest here."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock.engine.gguf_file import FLOAT_KINDS
from penstock.engine.gguf_weights import GgufMatrix
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import (
    GGUF_FORMS,
    Activation,
    PackedLinears,
    Release,
    WeightForm,
    keep_weight,
    make_linear,
    weight_of,
)
from penstock.errors import ModelLoadError

QUANTIZED = ("int8", "int4")
GGUF = "gguf"
"""What the form of weights is called that are a GGUF file's."""
GGUF_ISAS = ("amx", "avx512_bf16", "avx512", "avx2")
"""Instruction sets whose products with a GGUF file's blocks are faster than with what the blocks stand for."""

log = logging.getLogger("penstock.engine")

MIN_QUANTIZED_WEIGHTS = 2**14
"""A matrix with fewer weights, such as a router of experts, does not become integers."""
NUM_PROBES = 5
MAX_PROBED_OUTPUTS, MAX_PROBED_LINEARS = 8192, 4
"""A probe packs a group twice more: of a large output layer or of many experts a part will do."""
_CACHE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_CACHE_BYTES = 32 * 2**20


class WeightPacker:
    """Packs the linear layers of one model."""

    def __init__(
        self, native: Library, weights: str, dtype: torch.dtype, num_bytes: int, vocab_size: int,
        matrices: Mapping[nn.Module, GgufMatrix] | None = None,
    ) -> None:  # fmt: skip
        """`weights` is the setting, `num_bytes` what the model's weights take as they are stored.

        `matrices` are the weights of linear layers in a GGUF file.
        Raises `ModelLoadError` for a form that the model cannot have.
        """
        if weights == "p12" and dtype != torch.bfloat16:
            raise ModelLoadError("PENSTOCK_ENGINE_WEIGHTS=p12 is for bfloat16: set PENSTOCK_ENGINE_DTYPE=bfloat16 too")
        self._native, self._weights, self._vocab_size = native, weights, vocab_size
        self._cache_bytes = read_cache_bytes()
        # What fits into the cache is not bound by memory, and has nothing to gain.
        self._may_compress = weights == "p12" or (
            weights == "auto" and dtype == torch.bfloat16 and num_bytes > self._cache_bytes
        )
        self._found: dict[object, WeightForm] = {}
        """By the sizes of a group: the form that was faster."""
        self.num_quantized = 0
        """Linear layers whose weights were made integers."""
        self.num_from_gguf = 0
        """Those whose weights are a GGUF file's."""
        self._matrices = matrices if weights == "auto" and matrices is not None else {}
        if self._matrices and native.isa not in GGUF_ISAS:
            log.info("the file's blocks are unpacked: the kernels have no products with them on %s", native.isa)
            self._matrices = {}

    def pack_linears(
        self, linears: Sequence[nn.Module], release: Release, activation: Activation = Activation.NONE
    ) -> PackedLinears:
        """Pack linear layers that have the same input."""
        if self._weights in QUANTIZED:
            form = self._choose_quantized(linears)
            self.num_quantized += len(linears) * (form != WeightForm.STORED)
            return PackedLinears(self._native, linears, release, activation, form)
        matrices = self._find_matrices(linears, activation)
        if matrices:
            self.num_from_gguf += len(linears)
            return PackedLinears(self._native, linears, release, activation, WeightForm.GGUF, matrices)
        if not self._may_compress:
            return PackedLinears(self._native, linears, release, activation)
        if self._weights == "p12":
            return PackedLinears(self._native, linears, release, activation, WeightForm.COMPRESSED)
        sizes = (*(tuple(weight_of(linear).shape) for linear in linears), activation)
        if sizes not in self._found:
            self._found[sizes] = self._probe_forms(linears, activation)
        return PackedLinears(self._native, linears, release, activation, self._found[sizes])

    def _find_matrices(self, linears: Sequence[nn.Module], activation: Activation) -> list[GgufMatrix]:
        """Return the layers' weights in a GGUF file, or none, after it is logged why they cannot be used together."""
        found = [self._matrices.get(linear) for linear in linears]
        kinds = [FLOAT_KINDS[0] if matrix is None else matrix.kind for matrix in found]
        is_known = all(kind in GGUF_FORMS for kind in kinds)
        if is_known and (not activation or kinds[::2] == kinds[1::2]):
            return [matrix for matrix in found if matrix is not None]
        if any(kind not in FLOAT_KINDS for kind in kinds):
            log.info(
                "blocks of %s are unpacked: the kernels have no products with all of them together", ", ".join(kinds)
            )
        return []

    def _probe_forms(self, linears: Sequence[nn.Module], activation: Activation) -> WeightForm:
        """Return the form in which the first outputs of a group are faster."""
        parts = [make_linear(weight_of(linear)[:MAX_PROBED_OUTPUTS]) for linear in linears[:MAX_PROBED_LINEARS]]
        compressed = PackedLinears(self._native, parts, keep_weight, activation, WeightForm.COMPRESSED)
        stored = PackedLinears(self._native, parts, keep_weight, activation)
        is_faster = compressed.form == WeightForm.COMPRESSED and self._is_faster(compressed, stored)
        return WeightForm.COMPRESSED if is_faster else WeightForm.STORED

    def _choose_quantized(self, linears: Sequence[nn.Module]) -> WeightForm:
        if min(weight_of(linear).numel() for linear in linears) < MIN_QUANTIZED_WEIGHTS:
            return WeightForm.STORED
        is_output = any(len(weight_of(linear)) == self._vocab_size for linear in linears)
        return WeightForm.INT4 if self._weights == "int4" and not is_output else WeightForm.INT8

    def _is_faster(self, one: PackedLinears, other: PackedLinears) -> bool:
        """Return whether one group takes less of the processor than the other for a row, both read from memory."""
        x = torch.randn(1, one.inputs).to(one.dtype)
        sweep = torch.zeros(2 * self._cache_bytes, dtype=torch.uint8)
        groups, spent = (one, other), [float("inf"), float("inf")]
        for _ in range(NUM_PROBES):
            for number, group in enumerate(groups):
                self._native.read(sweep.data_ptr(), sweep.nbytes)  # nothing of the weights is left in the cache
                begun_s = time.thread_time()
                group(x)
                spent[number] = min(spent[number], time.thread_time() - begun_s)
        return spent[0] < spent[1]


def read_cache_bytes() -> int:
    """Return the bytes of the processor's last cache, or a usual size where the system does not tell."""
    try:
        text = _CACHE_FILE.read_text().strip()
        return int(text.removesuffix("K")) * 2**10 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        return _USUAL_CACHE_BYTES
