"""In which form the weights of a model's linear layers are packed: as the setting says, or as is fastest here."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from penstock.engine.gguf.gguf_file import FLOAT_KINDS
from penstock.engine.gguf.gguf_weights import GgufMatrix
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import (
    GGUF_FORMS,
    GROUP_INPUTS,
    INT4_GROUPS,
    Activation,
    PackedLinears,
    Release,
    WeightForm,
    keep_weight,
    make_linear,
    weight_of,
)
from penstock.engine.kernels.products import compare_times
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError

QUANTIZED = ("int8", "int4")
GGUF = "gguf"
"""The name of the form in which weights stay a GGUF file's blocks."""
GGUF_ISAS = ("amx", "avx512_bf16", "avx512", "avx2")
"""Instruction sets whose products with a GGUF file's blocks are faster than with what the blocks stand for."""

log = logging.getLogger("penstock.engine")

MIN_QUANTIZED_WEIGHTS = 2**14
"""A matrix with fewer weights, such as a router of experts, does not become integers."""
MAX_PROBED_OUTPUTS, MAX_PROBED_LINEARS = 8192, 4
"""A probe packs a group twice more: of a large output layer or of many experts a part will do."""
_CACHE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_USUAL_CACHE_BYTES = 32 * 2**20


class WeightPacker:
    """Packs the linear layers of one model."""

    def __init__(
        self, native: Library, weights: str, dtype: torch.dtype, vocab_size: int, stored: MappedWeights,
        matrices: Mapping[nn.Module, GgufMatrix] | None = None,
    ) -> None:  # fmt: skip
        """`weights` is the setting, `stored` what the model was loaded from.

        `matrices` are the weights of linear layers and embeddings in a GGUF file.
        Raises `ModelLoadError` for a form that the model cannot have.
        """
        if weights == "p12" and dtype != torch.bfloat16:
            raise ModelLoadError("PENSTOCK_ENGINE_WEIGHTS=p12 is for bfloat16: set PENSTOCK_ENGINE_DTYPE=bfloat16 too")
        self._native, self._weights, self._vocab_size, self._stored = native, weights, vocab_size, stored
        self._group_size = _choose_group_size(stored.group_sizes) if weights == "int4" else GROUP_INPUTS
        self._cache_bytes = read_cache_bytes()
        # What fits into the cache is not bound by memory, and has nothing to gain.
        self._may_compress = weights == "p12" or (
            weights == "auto" and dtype == torch.bfloat16 and stored.num_bytes > self._cache_bytes
        )
        self._found: dict[object, WeightForm] = {}
        """By the sizes of a group: the form that was faster."""
        self.num_quantized = 0
        """Linear layers whose weights were made integers."""
        self.num_from_gguf = 0
        """Those whose weights are a GGUF file's."""
        self._matrices = matrices if can_use_blocks(native, weights) and matrices is not None else {}
        if matrices and weights == "auto" and not self._matrices:
            log.info("unpacking the file's blocks: the kernels cannot multiply with them on %s", native.isa)

    def pack_linears(
        self, linears: Sequence[nn.Module], release: Release, activation: Activation = Activation.NONE
    ) -> PackedLinears:
        """Pack linear layers that have the same input."""
        matrices = self._find_matrices(linears, activation)
        if self._weights in QUANTIZED:
            form = self._choose_quantized(linears)
            self.num_quantized += len(linears) * (form != WeightForm.STORED)
        elif matrices:
            self.num_from_gguf += len(linears)
            return self._pack_blocks(linears, activation, matrices)
        else:
            self._stored.read_to_stay(*linears)
            form = self._choose_lossless(linears, activation)
        return PackedLinears.pack(self._native, linears, release, activation, form, group_size=self._group_size)

    def _choose_lossless(self, linears: Sequence[nn.Module], activation: Activation) -> WeightForm:
        if not self._may_compress:
            return WeightForm.STORED
        if self._weights == "p12":
            return WeightForm.COMPRESSED
        sizes = (*(tuple(weight_of(linear).shape) for linear in linears), activation)
        if sizes not in self._found:
            self._found[sizes] = self._probe_forms(linears, activation)
        return self._found[sizes]

    def pack_matrix(self, embedding: nn.Embedding) -> PackedLinears | None:
        """Pack the weight of an embedding if it is in a GGUF file, and the kernels read its type; else return None."""
        if not (matrices := self._find_matrices([embedding], Activation.NONE)):
            return None
        return self._pack_blocks([embedding], Activation.NONE, matrices)

    def _pack_blocks(
        self, linears: Sequence[nn.Module], activation: Activation, matrices: list[GgufMatrix]
    ) -> PackedLinears:
        """Pack layers whose values are in no memory, so that there is nothing to release but the file's pages."""
        group = PackedLinears.pack(self._native, linears, keep_weight, activation, WeightForm.GGUF, matrices)
        self._stored.drop_pages()
        return group

    def _find_matrices(self, linears: Sequence[nn.Module], activation: Activation) -> list[GgufMatrix]:
        """Return the layers' weights in a GGUF file, or none, after it is logged why they cannot be used together."""
        found = [self._matrices.get(linear) for linear in linears]
        kinds = [FLOAT_KINDS[0] if matrix is None else matrix.kind for matrix in found]
        is_known = all(kind in GGUF_FORMS for kind in kinds)
        if is_known and (not activation or kinds[::2] == kinds[1::2]):
            return [matrix for matrix in found if matrix is not None]
        if any(kind not in FLOAT_KINDS for kind in kinds):
            log.info("unpacking blocks of %s: the kernels cannot multiply with all of them together", ", ".join(kinds))
        return []

    def _probe_forms(self, linears: Sequence[nn.Module], activation: Activation) -> WeightForm:
        """Return the form in which the first outputs of a group are faster."""
        parts = [make_linear(weight_of(linear)[:MAX_PROBED_OUTPUTS]) for linear in linears[:MAX_PROBED_LINEARS]]
        compressed = PackedLinears.pack(self._native, parts, keep_weight, activation, WeightForm.COMPRESSED)
        stored = PackedLinears.pack(self._native, parts, keep_weight, activation)
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
        # Nothing of the weights is left in the cache.
        forget = partial(self._native.read, sweep.data_ptr(), sweep.nbytes)
        return compare_times(partial(one, x), partial(other, x), forget) < 1


def can_use_blocks(native: Library, weights: str) -> bool:
    """Return whether the kernels compute with a GGUF file's blocks here, with this setting."""
    return weights == "auto" and native.isa in GGUF_ISAS


def _choose_group_size(sizes: Iterable[int]) -> int:
    """Return how many inputs have one scale in 4 bits: those of a checkpoint's groups, so that its numbers stay.

    Raises `ModelLoadError` for groups that the kernels have not, which would have to be rounded anew.
    """
    size = math.gcd(GROUP_INPUTS, *sizes)
    if size not in INT4_GROUPS:
        raise ModelLoadError(
            f"its weights have 4 bits in groups of {', '.join(map(str, sorted(sizes)))} inputs, and "
            f"PENSTOCK_ENGINE_WEIGHTS=int4 has multiples of {INT4_GROUPS[0]}: set `auto`, which keeps their values"
        )
    return size


def read_cache_bytes() -> int:
    """Return the bytes of the processor's last cache, or a usual size where the system does not tell."""
    try:
        text = _CACHE_FILE.read_text().strip()
        return int(text.removesuffix("K")) * 2**10 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        return _USUAL_CACHE_BYTES
