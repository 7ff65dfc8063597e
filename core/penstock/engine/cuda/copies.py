"""Copies to the GPU and back through pinned memory, so that they run while the host goes on."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sequence import Payload

NUM_BUFFERS = 8
"""How many single blocks can be copied at once."""
UPLOAD_BYTES, DOWNLOAD_BYTES = 2**30, 2**29
"""Pinned memory for blocks on their way to the GPU and back; no more than the pool has."""


def to_device(values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy numbers to the device. The host does not wait for the copy, and numbers in an array stay where they are."""
    if device.type == "cpu" and isinstance(values, array):
        return torch.frombuffer(values, dtype=dtype)
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


class PinnedRows:
    """Pinned memory for the content of some blocks, `rows` [n, block elements], which is used again and again."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.bytes = rows.view(torch.uint8).numpy()
        """The same memory: [n, block bytes]."""
        self._free = list(range(len(rows)))
        self._copied: deque[tuple[CopyEvent, list[int]]] = deque()
        """Rows that are free after an event."""

    @property
    def num_free(self) -> int:
        """How many rows can be taken."""
        return len(self._free) + sum(len(rows) for _, rows in self._copied)

    def take_rows(self, count: int) -> list[int] | None:
        """Return rows that nothing reads or writes any more, or None if so many are not free."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            event, rows = self._copied.popleft()
            event.synchronize()
            self._free += rows
        return [self._free.pop() for _ in range(count)]

    def return_rows(self, rows: list[int], event: CopyEvent | None = None) -> None:
        """Give rows back, which copies up to the event still read."""
        if event is None:
            self._free += rows
        else:
            self._copied.append((event, rows))


@dataclass(frozen=True)
class Landing:
    """Host memory for blocks that are to be copied to the GPU."""

    rows: list[Tensor]
    """By block: its content, [block elements]."""
    taken: list[int]
    """Which of the copier's rows these are; empty if they are memory of their own."""


class BlockDownload:
    """The copy of one block to the host."""

    def __init__(self, row: Tensor, event: CopyEvent | None, release: Callable[[], None]) -> None:
        self._row, self._event, self._release = row, event, release

    def wait_for_content(self) -> Tensor:
        """Return the content, [block elements], once it is there. Any thread may call it, until `release`."""
        if self._event is not None:
            self._event.synchronize()
        return self._row

    def release(self) -> None:
        """Let the memory be used again, once the copy is done."""
        self._release()


class BlockCopier:
    """Copies KV blocks between the pool on a GPU and host memory. One thread calls its methods."""

    def __init__(self, copy_queue: CopyQueue, buffers: Tensor, uploads: Tensor, downloads: Tensor) -> None:
        """All tensors are [n, block elements]: pinned memory for single blocks, and for blocks in each direction."""
        self._copy_queue, self._buffers = copy_queue, PinnedRows(buffers)
        self._uploads, self._downloads = PinnedRows(uploads), PinnedRows(downloads)

    @classmethod
    def create(cls, device: torch.device, block_elements: int, dtype: torch.dtype, num_blocks: int) -> "BlockCopier":
        """Make a copier for a CUDA device and a pool of so many blocks."""

        def allocate_rows(num_bytes: int) -> Tensor:
            count = max(1, min(num_blocks, num_bytes // (block_elements * dtype.itemsize)))
            return torch.empty(count, block_elements, dtype=dtype, pin_memory=True)

        buffers = torch.empty(NUM_BUFFERS, block_elements, dtype=dtype, pin_memory=True)
        return cls(CudaCopyStream(device), buffers, allocate_rows(UPLOAD_BYTES), allocate_rows(DOWNLOAD_BYTES))

    def write_block(self, block: Tensor, payload: Payload) -> None:
        """Fill a block of the pool, [block elements]. The host does not wait, but later compute work does.

        Compute work that is queued already may still read the block for its last owner, so the copy waits for that.
        """
        rows = self._buffers.take_rows(1)
        assert rows is not None, "every buffer is free after its copy"
        self._buffers.bytes[rows[0]] = np.frombuffer(payload, dtype=np.uint8)
        self._copy_queue.wait_for_compute()
        self._buffers.return_rows(rows, self._copy_queue.enqueue_copy(block, self._buffers.rows[rows[0]]))
        self._copy_queue.block_compute()

    @property
    def num_free_uploads(self) -> int:
        """For how many blocks there is memory now that `begin_upload` need not allocate."""
        return self._uploads.num_free

    def begin_upload(self, count: int) -> Landing:
        """Return memory for the content of so many blocks, which `finish_upload` copies to the GPU."""
        taken = self._uploads.take_rows(count)
        if taken is not None:
            return Landing([self._uploads.rows[row] for row in taken], taken)
        like = self._uploads.rows
        own = torch.empty(count, like.shape[1], dtype=like.dtype, pin_memory=like.is_pinned())
        return Landing(list(own), [])

    def finish_upload(self, blocks: list[Tensor], landing: Landing) -> None:
        """Fill blocks of the pool from the first rows of a landing, none of which may be written any more."""
        event = None
        if blocks:
            self._copy_queue.wait_for_compute()
            for block, row in zip(blocks, landing.rows, strict=False):
                event = self._copy_queue.enqueue_copy(block, row)
            self._copy_queue.block_compute()
        self._uploads.return_rows(landing.taken, event)

    def begin_download(self, block: Tensor) -> BlockDownload:
        """Begin to copy a block as the work queued now leaves it. It may not be written before the copy is released.

        The host waits only if more blocks are under way than there is pinned memory for.
        """
        rows = self._downloads.take_rows(1)
        if rows is None:
            return BlockDownload(self._read_block(block), None, _release_nothing)
        self._copy_queue.wait_for_compute()
        event = self._copy_queue.enqueue_copy(self._downloads.rows[rows[0]], block)
        return BlockDownload(self._downloads.rows[rows[0]], event, partial(self._downloads.return_rows, rows, event))

    def _read_block(self, block: Tensor) -> Tensor:
        """Return a copy of a block in ordinary memory, as the work queued now leaves it."""
        rows = self._buffers.take_rows(1)
        assert rows is not None, "every buffer is free after its copy"
        self._copy_queue.wait_for_compute()
        self._copy_queue.enqueue_copy(self._buffers.rows[rows[0]], block).synchronize()
        copy = self._buffers.rows[rows[0]].clone()
        self._buffers.return_rows(rows)
        return copy


def _release_nothing() -> None:
    """Do nothing: the memory is the copy's own."""
