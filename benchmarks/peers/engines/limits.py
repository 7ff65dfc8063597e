"""The machine's limits, measured: how fast memory can be read, how fast matrices can be multiplied.

Bandwidth is that of reading a gigabyte that no cache holds, by as many threads as the engines have; the best of several
ways to read is taken, and likewise the best of several sizes of a product.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_READ_BYTES = 2**30
_GEMM_SIZES = ((2048, 1024, 3072), (2048, 3072, 1024), (2048, 4096, 4096), (4096, 4096, 4096))
"""Rows, inputs, outputs."""


def prepare(model: Path) -> Path:
    """There is nothing to convert."""
    return model


def load(*, model: Path, threads: int, pool_mb: int, device: str) -> "Limits":
    """The threads; the model does not matter."""
    torch.set_num_threads(threads)
    return Limits(device)


class Limits:
    """Both limits, over and over."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)

    def bandwidth(self) -> float:
        """Bytes a second."""
        words = self._memory.view(torch.int32)
        ways: tuple[Callable[[], object], ...] = (
            self._memory.sum,
            self._memory.max,
            words.max,
            lambda: torch.dot(self._memory, self._memory),
        )
        return _READ_BYTES / min(self._best(ways, 3))

    def gemm(self) -> float:
        """Operations a second, of bf16 by bf16."""
        return max(map(self._product, _GEMM_SIZES))

    @torch.inference_mode()
    def _product(self, size: tuple[int, int, int]) -> float:
        rows, inputs, outputs = size
        left = torch.randn(rows, inputs, device=self._device).to(torch.bfloat16)
        right = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=self._device)
        return 2.0 * rows * inputs * outputs / min(self._best((lambda: right(left),), 4))

    def _best(self, ways: tuple[Callable[[], object], ...], repeats: int) -> Iterator[float]:
        """The shortest time of each way, in seconds; its first call does not count."""
        for way in ways:
            self._seconds(way)
            yield min(self._seconds(way) for _ in range(repeats))

    def _seconds(self, way: Callable[[], object]) -> float:
        begun_s = time.perf_counter()
        way()
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s
