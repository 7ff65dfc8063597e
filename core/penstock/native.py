"""Compiles the C++ parts, the engine's kernels and the KV store's copying, in place.

This needs a C++20 compiler (`CXX`, or c++) and nothing else. The wheel's build runs it before anything is installed, so
it imports only the standard library.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

COMPILE_FLAGS = (
    "-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fstack-protector-strong", "-pthread", "-Wall", "-Wextra",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread", *(("-Wl,-z,relro,-z,now",) if sys.platform == "linux" else ()))
# GCC 12 gives these warnings for its own headers.
SILENCED_WARNINGS = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")


def run_compiler(arguments: Sequence[str]) -> str:
    """Run the compiler, and return its output. Raises `OSError` if there is none, `CalledProcessError` if it fails."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_build_id(sources: Iterable[Path], options: str = "") -> str:
    """Return a hash of what a library depends on: sources, options, compiler, machine. Raises as `run_compiler`."""
    words = options, os.environ.get("CXX", ""), run_compiler(["--version"]), platform.machine()
    content = (path.read_bytes() for path in (Path(__file__), *sorted(sources)))
    return hashlib.sha256("\0".join(words).encode() + b"\0".join(content)).hexdigest()[:40]


def is_built(library: Path, build_id: str) -> bool:
    """Return whether `library` was linked with this id."""
    return library.exists() and bytes.fromhex(build_id) in library.read_bytes()


def link_library(library: Path, arguments: Sequence[str], build_id: str = "") -> None:
    """Link `library`. It replaces the old file, so that processes which have mapped that one keep it."""
    scratch = library.with_suffix(f".{os.getpid()}")
    marked = [f"-Wl,--build-id=0x{build_id}"] if build_id and sys.platform == "linux" else []
    try:
        run_compiler([*arguments, *LINK_FLAGS, *marked, "-o", str(scratch)])
        scratch.replace(library)
    finally:
        scratch.unlink(missing_ok=True)


def build_in_place(build: Callable[[], None], what: str, consequence: str) -> int:
    """Run `build` for the command line. Returns 0, or prints the reason and `consequence` and returns 1."""
    try:
        build()
    except OSError as error:
        sys.stderr.write(f"penstock: no C++ compiler, {consequence}: {error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"penstock: {what} does not compile:\n{error.stderr[-4000:]}\n")
        return 1
    return 0
