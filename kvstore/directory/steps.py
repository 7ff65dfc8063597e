"""The places where a process may die that differ in what it leaves behind.

Tests put something in the place of `reached` that ends or halts the process at one of them.
"""

from collections.abc import Callable

STEPS = (
    "open 1", "open 2", "open 3",
    "put 1.1", "put 1.2", "put 1", "put 2.1", "put 2", "put 3", "put 4.1", "put 4.2", "put 4.3", "put 4",
    "evict 1", "evict 2",
    "lease 1", "lease 2",
    "release 1", "release 2",
    "remove 1", "remove 2", "remove 3",
    "get 1", "get 2", "get 3",
)  # fmt: skip
"""All of them, named after the protocols in the tier and here."""


def _go_on(_: str) -> None:
    """Nothing happens at a step."""


reached: Callable[[str], None] = _go_on
