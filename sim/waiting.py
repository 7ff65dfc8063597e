"""How long tests wait: for a condition, and for whatever else wants a number."""

from collections.abc import Callable

from penstock.waiting import wait_until

PATIENCE_S = 540.0
"""The one limit of a wait. It ends hangs, like pytest's `timeout`, and is shorter, so that its message is seen."""


def wait_for(condition: Callable[[], object], what: str, every_s: float = 0.01) -> None:
    """Wait until `condition()` is true. Raises a `TimeoutError` that says that `what` did not happen."""
    wait_until(condition, PATIENCE_S, what, every_s)
