"""Calls side by side."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from penstock.errors import KVStoreError

T = TypeVar("T")


class ParallelCalls:
    """Does calls in threads of its own. They are all there from the start: later there may be none to be had."""

    def __init__(self, count: int) -> None:
        """With 0 threads calls are done one after the other. Raises `KVStoreError` where there are not so many."""
        self._pool = ThreadPoolExecutor(count, "kv-redis") if count else None
        if self._pool is None:
            return
        started = threading.Barrier(count + 1)
        try:
            for _ in range(count):
                self._pool.submit(started.wait)
            started.wait()
        except RuntimeError as error:
            started.abort()
            self._pool.shutdown()
            raise KVStoreError(f"{count} threads for the KV Redis cannot be started: {error}") from None

    def run_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each returns. Raises what one raised, but not before all are over: they use memory of the caller's."""
        futures: list[Future[T]] = []
        if self._pool is not None and len(calls) > 1:
            try:
                for call in calls:
                    futures.append(self._pool.submit(call))  # noqa: PERF401 (those before one that fails are needed)
            except RuntimeError:
                pass  # closed: the rest is done here
            finally:
                wait(futures)
        return [future.result() for future in futures] + [call() for call in calls[len(futures) :]]

    def close(self) -> None:
        """End the threads after what they still do. Calls are done one after the other from now on."""
        if self._pool is not None:
            self._pool.shutdown()
