"""Data on its way to the GPU and back, through pinned memory: from there copies run while the host goes on."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sequence import Payload

NUM_BUFFERS = 8
"""Blocks that can be under way to the GPU at once."""


def to_device(values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The numbers on the device. The host does not wait for them to be there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class CopyEvent(Protocol):
    """A place in a queue of work."""

    def synchronize(self) -> None:
        """Return when all before it is done."""


class CopyQueue(Protocol):
    """A queue of copies beside the queue that computes. What is not ordered here may happen in any order."""

    def wait_for_compute(self) -> None:
        """What comes into the lane from now on waits for all that is queued for computing by now."""

    def block_compute(self) -> None:
        """What is queued for computing from now on waits for all that is in the lane by now."""

    def enqueue_copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Queue a copy."""


class CudaCopyStream:
    """A CUDA stream as a lane. The other queue is the stream that is current where a method is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def wait_for_compute(self) -> None:
        """See `Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def block_compute(self) -> None:
        """See `Lane`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def enqueue_copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """See `Lane`; from or to pinned memory, the host does not wait."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        mark: CopyEvent = self._stream.record_event()
        return mark


class BlockCopier:
    """KV blocks between the pool and ordinary memory. `buffers` [n, block elements] is pinned where there is a GPU."""

    def __init__(self, lane: CopyQueue, buffers: Tensor) -> None:
        self._lane, self._buffers = lane, buffers
        self._bytes = buffers.view(torch.uint8).numpy()
        self._marks: list[CopyEvent | None] = [None] * len(buffers)
        self._last = -1

    @classmethod
    def create(cls, device: torch.device, block_elements: int, dtype: torch.dtype) -> "BlockCopier":
        """For a CUDA device."""
        return cls(CudaCopyStream(device), torch.empty(NUM_BUFFERS, block_elements, dtype=dtype, pin_memory=True))

    def write_block(self, block: Tensor, payload: Payload) -> None:
        """Fill a block of the pool, [block elements]. The host does not wait; what is computed next does.

        What is computing already may still read the block for its last owner, so the copy waits for that.
        """
        index = self._wait_for_buffer()
        self._bytes[index] = np.frombuffer(payload, dtype=np.uint8)
        self._lane.wait_for_compute()
        self._marks[index] = self._lane.enqueue_copy(block, self._buffers[index])
        self._lane.block_compute()

    def allocate_rows(self, count: int) -> Tensor:
        """Memory that `upload` may copy from: [count, block elements], pinned as the buffers are."""
        return torch.empty(count, *self._buffers.shape[1:], dtype=self._buffers.dtype,
                           pin_memory=self._buffers.is_pinned())  # fmt: skip

    def upload_row(self, block: Tensor, row: Tensor) -> None:
        """Fill a block of the pool from a row of `room`, in the same order as `put`; it is not written any more."""
        self._lane.wait_for_compute()
        self._lane.enqueue_copy(block, row)
        self._lane.block_compute()

    def read_block(self, block: Tensor) -> Tensor:
        """A block of the pool in ordinary memory, as what is queued by now leaves it."""
        index = self._wait_for_buffer()
        self._lane.wait_for_compute()
        self._lane.enqueue_copy(self._buffers[index], block).synchronize()
        return self._buffers[index].clone()

    def _wait_for_buffer(self) -> int:
        """A buffer that nothing is copied from any more."""
        self._last = (self._last + 1) % len(self._marks)
        mark = self._marks[self._last]
        if mark is not None:
            mark.synchronize()
            self._marks[self._last] = None
        return self._last
