"""The machine's limits, measured: how fast memory can be read, how fast bf16 matrices can be multiplied.

Bandwidth is that of reading a gigabyte that no cache holds, by as many threads as the engines have; less where their
pool is less. Of several ways to read the best is taken, and likewise the best product: torch's and our own kernels',
over several sizes.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from penstock.engine.kernels import library
from penstock.engine.kernels.packed import PackedLinears

_READ_BYTES = 2**30
_GEMM_SIZES = ((2048, 1024, 3072), (2048, 3072, 1024), (2048, 4096, 4096))
"""Rows, inputs, outputs."""
_REPEATS = 4


def prepare(model: Path) -> Path:
    """There is nothing to convert."""
    return model


def load(*, model: Path, threads: int, pool_mb: int) -> "Limits":
    """The threads and a bound of what is read; the model does not matter."""
    torch.set_num_threads(threads)
    native = library.load_library()
    if native is not None:
        native.set_threads(threads)
    return Limits(native, min(_READ_BYTES, pool_mb * 2**20))


class Limits:
    """Both limits, over and over."""

    def __init__(self, native: library.Library | None, read_bytes: int) -> None:
        self._native, self._read_bytes = native, read_bytes
        self._memory = torch.ones(read_bytes // 4, dtype=torch.float32)

    def bandwidth(self) -> float:
        """Bytes a second."""
        ways: list[Callable[[], object]] = [self._memory.sum, self._memory.max]
        if (native := self._native) is not None:
            ways.append(lambda: native.read(self._memory.data_ptr(), self._read_bytes))
        return self._read_bytes / min(self._repeat_best(ways))

    @torch.inference_mode()
    def gemm(self) -> float:
        """Operations a second."""
        return max(2.0 * rows * inputs * outputs / min(self._repeat_best(self._make_products(rows, inputs, outputs)))
                   for rows, inputs, outputs in _GEMM_SIZES)  # fmt: skip

    def _make_products(self, rows: int, inputs: int, outputs: int) -> Iterator[Callable[[], object]]:
        left = torch.randn(rows, inputs).to(torch.bfloat16)
        right = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        yield lambda: right(left)
        if self._native is not None:
            packed = PackedLinears.pack(self._native, [right], release=lambda original: None)
            yield lambda: packed(left)

    def _repeat_best(self, ways: Iterable[Callable[[], object]]) -> Iterator[float]:
        """The shortest time of each way, in seconds; its first call does not count."""
        for way in ways:
            self._measure_seconds(way)
            yield min(self._measure_seconds(way) for _ in range(_REPEATS))

    def _measure_seconds(self, way: Callable[[], object]) -> float:
        begun_s = time.perf_counter()
        way()
        return time.perf_counter() - begun_s
