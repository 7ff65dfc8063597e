"""Waiting for a condition."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, every_s: float = 0.01) -> None:
    """Wait until `condition()` is true. Raises a `TimeoutError` that says that `what` did not happen."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)
