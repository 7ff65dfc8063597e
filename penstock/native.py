"""What is written in C++: the engine's kernels, and the KV store's copying. Both are compiled by this, in place.

Needs a C++20 compiler (`CXX`, or c++) and nothing else. The wheel's build runs it before anything is installed, so it
imports the standard library alone.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

COMPILE_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# GCC 12 warns of these in its own headers.
SILENCED_WARNINGS = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")


def run_compiler(arguments: Sequence[str]) -> None:
    """Raises `OSError` without a compiler and `CalledProcessError` where it fails."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def link_library(library: Path, arguments: Sequence[str]) -> None:
    """Make `library`; a process that has the old one mapped keeps it."""
    scratch = library.with_suffix(f".{os.getpid()}")
    try:
        run_compiler([*arguments, "-shared", "-pthread", "-o", str(scratch)])
        scratch.replace(library)
    finally:
        scratch.unlink(missing_ok=True)


def build_in_place(build: Callable[[], None], what: str, without: str) -> int:
    """Build in place, for the command line; 1 and the compiler's words if that fails."""
    try:
        build()
    except OSError as error:
        sys.stderr.write(f"penstock: no C++ compiler, {without}: {error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"penstock: {what} does not compile:\n{error.stderr[-4000:]}\n")
        return 1
    return 0
