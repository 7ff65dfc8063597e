"""The places where a process may die that differ in what it leaves behind.

Tests put something in the place of `reached` that ends or halts the process at one of them.
"""

from collections.abc import Callable

ARENA = (
    "open 1", "open 2", "open 4",
    "put 1.1", "put 1.2", "put 1", "put 2", "put 3", "put 4", "put 5.1", "put 5.2", "put 5",
    "forget 1", "forget 2", "forget 3",
    "lease 1", "lease 2",
    "release 1", "release 2",
    "rebuild 1", "rebuild 2", "rebuild 3", "rebuild 4",
    "allocate 1", "allocate 2", "allocate 3", "allocate 4",
    "get 1", "get 2", "get 3",
)  # fmt: skip
"""Those of shared memory, named after the protocols in `arena/arena.py`, `arena/growth.py` and `tiers/shared.py`."""
DISK = (
    "open 1", "open 2", "open 3",
    "put 1.1", "put 1.2", "put 1", "put 2.1", "put 2", "put 3", "put 4.1", "put 4.2", "put 4.3", "put 4",
    "evict 1", "evict 2",
    "lease 1", "lease 2",
    "release 1", "release 2",
    "remove 1", "remove 2", "remove 3",
    "get 1", "get 2", "get 3",
)  # fmt: skip
"""Those on disk, named after the protocols in `directory/directory.py` and `tiers/disk.py`."""


def _go_on(_: str) -> None:
    """Nothing happens at a step."""


reached: Callable[[str], None] = _go_on
