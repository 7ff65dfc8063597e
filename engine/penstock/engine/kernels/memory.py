"""Memory on huge pages for weights and KV blocks, which every step reads. Dumps of a crashed process leave it out."""

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger("penstock.engine")

HUGE_PAGE_BYTES = 2 * 2**20
_MAPPING_BYTES = 64 * 2**20
_CACHE_LINE_BYTES = 64


class Arena:
    """Gives out pieces of large mappings, so that small matrices lie on huge pages too.

    A huge page spares 512 lookups of the page table as its bytes stream by: a tenth to a quarter of the time. A mapping
    goes when the last of its pieces does.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def allocate_zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros that starts at a cache line."""
        num_bytes = num_elements * dtype.itemsize
        taken = -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if taken > _MAPPING_BYTES // 2:
            return map_zeros(num_elements, dtype)
        with self._lock:
            if taken > len(self._rest):
                self._rest = _map_memory(_MAPPING_BYTES)
            piece, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return piece.view(dtype)


def map_zeros(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of zeros in its own mapping, on huge pages if the system has them."""
    num_bytes = num_elements * dtype.itemsize
    return _map_memory(num_bytes + _CACHE_LINE_BYTES)[:num_bytes].view(dtype)  # kernels may load the rest of a line


def _map_memory(num_bytes: int) -> Tensor:
    """Return at least `num_bytes` zero bytes, starting at a huge page if they fill one."""
    huge = num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    memory = mmap.mmap(-1, max(1, num_bytes) + huge * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTDUMP"):  # gigabytes, and the KV of tenants' prompts
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTDUMP)
    if huge:
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :] if huge else whole


def drop_pages(first: int, end: int) -> None:
    """Take the pages of the addresses [first, end) out of this process.

    Those of an unwritten private mapping lose nothing: they are read from its file again. Others are zero from then on.
    """
    first -= first % mmap.PAGESIZE
    if _madvise(first, end - first, mmap.MADV_DONTNEED):
        log.warning("pages of the weights stay in memory: %s", os.strerror(ctypes.get_errno()))


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
