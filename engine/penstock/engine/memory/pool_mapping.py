"""The pool's memory is mapped before requests need it: to clear a block's pages takes longer than to fill it with KV.

A thread maps it piece by piece in the order of addresses, in which blocks are given out the first time. It rests
between pieces, as the first requests need the processor more. It ends when all is mapped, when the engine is gone, or
when memory runs short: then the rest is mapped as it is used, as all of it is by kernels before Linux 5.14. There a
thread could only write to the pages, and would overwrite KV that is put there meanwhile.
"""

import logging
import threading
import time

from torch import Tensor

from penstock.engine.memory.memory import count_available_bytes
from penstock.pages import populate_pages

log = logging.getLogger(__name__)

PIECE_BYTES = 2 * 2**20
PIECES_PER_LOOK = 8
"""After so many pieces the thread looks how much memory is available, which takes as long as to map one."""
RESTS_PER_PIECE = 9.0
"""The thread rests so much longer than a piece takes: it takes a tenth of a core."""
KEPT_SHARE = 0.25
"""The share of the memory that was available at first which is left to others. Other workers map theirs meanwhile."""


CLOSE_TIMEOUT_S = 1.0
"""How long a process that ends waits for the thread."""


class PoolMapping:
    """Maps tensors in host memory, each of which starts a page. Any thread may call its methods."""

    def __init__(self, memory: list[Tensor]) -> None:
        self.num_bytes = sum(tensor.nbytes for tensor in memory)
        self.num_mapped_bytes = 0
        self._memory = memory
        # Known before the thread runs, which calls nothing of torch: at the process's end such a call would abort it.
        self._pieces = [
            (tensor.data_ptr() + start, min(PIECE_BYTES, tensor.nbytes - start))
            for tensor in memory
            for start in range(0, tensor.nbytes, PIECE_BYTES)
        ]
        self._stopped, self._rests_per_piece = threading.Event(), RESTS_PER_PIECE
        self._thread = threading.Thread(target=self._map_memory, name="kv pool", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is anything to map."""
        if self.num_bytes:
            self._thread.start()

    def stop(self) -> None:
        """End the thread after the piece that it maps now. It is not waited for."""
        self._stopped.set()

    def close(self) -> None:
        """End the thread, and wait for the piece that it maps now: some milliseconds."""
        self.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def wait_until_done(self) -> None:
        """Wait until a thread that was started has ended, which rests no more. Measurements begin after that."""
        self._rests_per_piece = 0.0
        if self._thread.ident is not None:
            self._thread.join()

    def _map_memory(self) -> None:
        begun_s, available = time.perf_counter(), count_available_bytes()
        if available is None:
            return None
        for number, (address, num_bytes) in enumerate(self._pieces):
            piece_begun_s = time.perf_counter()
            if number % PIECES_PER_LOOK == 0 and self._count_bytes_left() < available * KEPT_SHARE:
                return self._log_end(logging.WARNING, "the rest would leave too little memory to others")
            try:
                populate_pages(address, num_bytes)
            except OSError as error:
                return self._log_end(logging.INFO, f"the rest is mapped as it is used: {error.strerror}")
            self.num_mapped_bytes += num_bytes
            if self._stopped.wait(self._rests_per_piece * (time.perf_counter() - piece_begun_s)):
                return None
        return self._log_end(logging.INFO, f"after {time.perf_counter() - begun_s:.2f} s")

    def _count_bytes_left(self) -> int:
        """Return how much memory will be available when the pieces before the next look are mapped."""
        return (count_available_bytes() or 0) - PIECES_PER_LOOK * PIECE_BYTES

    def _log_end(self, level: int, how: str) -> None:
        log.log(
            level, "%.0f of %.0f MiB of the KV pool are mapped, %s",
            self.num_mapped_bytes / 2**20, self.num_bytes / 2**20, how,
        )  # fmt: skip
