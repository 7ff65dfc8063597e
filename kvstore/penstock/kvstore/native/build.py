"""Compile the copying: `python -m penstock.kvstore.native.build`, and a hook of the wheel's build.

One source with all its instruction sets; which one runs is chosen at run time.
"""

import sys
from pathlib import Path

from penstock import native

LIBRARY = Path(__file__).parent / "libcopying.so"
_SOURCE = LIBRARY.with_name("copying.cpp")


def build_library(library: Path = LIBRARY) -> None:
    """Compile and link `library`, unless it is that already.

    Raises `OSError` without a compiler and `CalledProcessError` where it fails.
    """
    build_id = native.make_build_id([Path(__file__), _SOURCE])
    if not native.is_built(library, build_id):
        native.link_library(library, [*native.COMPILE_FLAGS, *native.SILENCED_WARNINGS, str(_SOURCE)], build_id)


if __name__ == "__main__":
    sys.exit(
        native.build_in_place(build_library, "the KV store's copying", "blocks are copied and checked in two passes")
    )
