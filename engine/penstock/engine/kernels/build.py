"""Compile the native kernels: `python -m penstock.engine.kernels.build`, and a hook of the wheel's build.

Needs a C++20 compiler (`CXX`, or c++) and nothing else: neither torch nor Python headers. Each source is compiled
once for each instruction set; which one runs is chosen at run time, so that a wheel serves every processor of its
platform.
"""

import hashlib
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock import native

HERE = Path(__file__).parent
LIBRARY = HERE / "libpenstock.so"

_FLAGS = [*native.COMPILE_FLAGS, *native.SILENCED_WARNINGS, "-ffp-contract=off", "-fno-math-errno"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
X86: dict[str, list[str]] = {
    "amx": [*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
    "avx512_bf16": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
_SHARED = ("api", "pool")


def instruction_sets() -> dict[str, list[str]]:
    """Name and compiler flags of each that this kind of machine may have, the best first."""
    return {**(X86 if platform.machine() in ("x86_64", "AMD64") else {}), "plain": []}


def interface_mark() -> bytes:
    """Return what a library of the present sources contains: its functions and structures are those of `library`."""
    # A stale library would read structures of another form, and so write anywhere.
    texts = [(HERE / "src" / name).read_bytes() for name in ("api.cpp", "kernels.h")]
    return b"penstock interface " + hashlib.sha256(b"".join(texts)).hexdigest()[:16].encode()


def is_current(library: Path) -> bool:
    """Return whether `library` was built from the present interface."""
    return interface_mark() in library.read_bytes()


def build_library(library: Path = LIBRARY, variants: dict[str, list[str]] | None = None) -> None:
    """Compile and link `library`, unless it is that already.

    Raises `OSError` without a compiler and `CalledProcessError` where it fails.
    """
    variants = variants or instruction_sets()
    build_id = native.make_build_id([Path(__file__), *(HERE / "src").iterdir()], repr(variants))
    if native.is_built(library, build_id):
        return
    listed = [
        f"-DISAS={' '.join(f'EACH({name})' for name in variants)}",
        f'-DINTERFACE="{interface_mark().decode().split()[-1]}"',
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = []
        for source in sorted((HERE / "src").glob("*.cpp")):
            for name, flags in {"": listed}.items() if source.stem in _SHARED else variants.items():
                target = Path(folder) / f"{source.stem}-{name}.o"
                define = [f"-DISA={name}"] if name else []
                command = [*_FLAGS, *flags, *define, "-c", str(source), "-o", str(target)]
                objects.append((target, threads.submit(native.run_compiler, command)))
        for _, done in objects:
            done.result()
        native.link_library(library, [str(target) for target, _ in objects], build_id)


if __name__ == "__main__":
    sys.exit(native.build_in_place(build_library, "the native kernels", "the engine runs without native kernels"))
