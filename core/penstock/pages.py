"""Pages of memory that the kernel maps before they are used, so that no access waits for it to clear them."""

import ctypes
import os

_POPULATE_WRITE = 23  # since Linux 5.14


def populate_pages(address: int, num_bytes: int) -> None:
    """Map the pages from `address` on, which starts one, for writing. Their content stays, and others may use it.

    Raise `OSError` where the kernel cannot do this, or has no memory for them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
