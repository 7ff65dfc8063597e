"""Copies to the GPU and back through pinned memory, so that they run while the host goes on."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sequence import Payload

NUM_BUFFERS = 8
"""How many blocks can be copied at once."""


def to_device(values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy numbers to the device. The host does not wait for the copy."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def array_to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device. The host does not wait for the copy."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class CopyEvent(Protocol):
    """An event in a queue of copies."""

    def synchronize(self) -> None:
        """Wait until everything queued before the event is done."""


class CopyQueue(Protocol):
    """A queue of copies beside the compute queue. The two are not ordered except by these methods."""

    def wait_for_compute(self) -> None:
        """Let later copies wait for all compute work that is queued now."""

    def block_compute(self) -> None:
        """Let later compute work wait for all copies that are queued now."""

    def enqueue_copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Queue a copy."""


class CudaCopyStream:
    """A CUDA stream as a copy queue. The compute queue is the stream that is current when a method is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def wait_for_compute(self) -> None:
        """Let later copies wait for all compute work that is queued now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def block_compute(self) -> None:
        """Let later compute work wait for all copies that are queued now."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def enqueue_copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Queue a copy. The host does not wait for copies from or to pinned memory."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        mark: CopyEvent = self._stream.record_event()
        return mark


class BlockCopier:
    """Copies KV blocks between the pool on a GPU and host memory. `buffers` [n, block elements] is pinned."""

    def __init__(self, copy_queue: CopyQueue, buffers: Tensor) -> None:
        self._copy_queue, self._buffers = copy_queue, buffers
        self._bytes = buffers.view(torch.uint8).numpy()
        self._marks: list[CopyEvent | None] = [None] * len(buffers)
        self._last = -1

    @classmethod
    def create(cls, device: torch.device, block_elements: int, dtype: torch.dtype) -> "BlockCopier":
        """Make a copier for a CUDA device."""
        return cls(CudaCopyStream(device), torch.empty(NUM_BUFFERS, block_elements, dtype=dtype, pin_memory=True))

    def write_block(self, block: Tensor, payload: Payload) -> None:
        """Fill a block of the pool, [block elements]. The host does not wait, but later compute work does.

        Compute work that is queued already may still read the block for its last owner, so the copy waits for that.
        """
        index = self._wait_for_buffer()
        self._bytes[index] = np.frombuffer(payload, dtype=np.uint8)
        self._copy_queue.wait_for_compute()
        self._marks[index] = self._copy_queue.enqueue_copy(block, self._buffers[index])
        self._copy_queue.block_compute()

    def allocate_rows(self, count: int) -> Tensor:
        """Return memory for `upload_row`: [count, block elements], pinned like the buffers."""
        return torch.empty(count, *self._buffers.shape[1:], dtype=self._buffers.dtype,
                           pin_memory=self._buffers.is_pinned())  # fmt: skip

    def upload_row(self, block: Tensor, row: Tensor) -> None:
        """Fill a block of the pool from a row of `allocate_rows`, which must not be written any more."""
        self._copy_queue.wait_for_compute()
        self._copy_queue.enqueue_copy(block, row)
        self._copy_queue.block_compute()

    def read_block(self, block: Tensor) -> Tensor:
        """Return a copy of a block in ordinary memory, as the work queued now leaves it."""
        index = self._wait_for_buffer()
        self._copy_queue.wait_for_compute()
        self._copy_queue.enqueue_copy(self._buffers[index], block).synchronize()
        return self._buffers[index].clone()

    def _wait_for_buffer(self) -> int:
        """Return the index of a buffer, once no copy from it is under way."""
        self._last = (self._last + 1) % len(self._marks)
        mark = self._marks[self._last]
        if mark is not None:
            mark.synchronize()
            self._marks[self._last] = None
        return self._last
