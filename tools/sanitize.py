"""Run the tests of the native kernels under AddressSanitizer and UBSan: `make sanitize`. Needs GCC and its libraries.

python -m tools.sanitize [--only SET | --all]

The kernels are built apart, for the instruction sets that this processor runs, with checks of every access and of
undefined behaviour; the first violation ends the tests. `--only` takes one of the sets, `--all` compiles those too that
do not run here. The last line says which ran and which were left out. What torch allocates is checked at its ends, as
its allocator is replaced. KV pools and packed weights are mapped in one piece, and checked only at the ends of that.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.kernels import build
from penstock.engine.kernels.library import load_library
from penstock.errors import SettingsError

# Checks of accesses are calls. Pointers are not checked by themselves: AddressSanitizer sees what they are used for.
# With all checks a compiler takes ten minutes for the products of one set.
_FLAGS = (
    "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=undefined"
    " --param asan-instrumentation-with-call-threshold=0 -fno-omit-frame-pointer -g1"
)
_TESTS = tuple(
    f"tests/engine/{name}.py"
    for name in ("test_recurrence", "test_kernels", "test_attention_kernel", "test_experts_kernel", "test_sampler")
)
_PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so")
"""Python does not link them. The last one so that exceptions are seen, too."""


def list_supported_sets() -> list[str]:
    """Return the instruction sets that this processor runs, the best first."""
    native, found = load_library(), list[str]()
    if native is None:
        raise SystemExit("the native kernels were not built: python -m penstock.engine.kernels.build")
    for isa in build.instruction_sets():
        with contextlib.suppress(SettingsError):
            native.select_isa(isa)
            found.append(isa)
    return found


def main() -> int:
    """Build and test what the command line says. Returns pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=(__doc__ or "").splitlines()[0])
    every, usable = list(build.instruction_sets()), list_supported_sets()
    given_sets = parser.add_mutually_exclusive_group()
    given_sets.add_argument("--only", choices=usable, help="one set of those that this processor runs")
    given_sets.add_argument("--all", action="store_true", help="compile those that it does not run, too")
    given = parser.parse_args()
    ran = [given.only] if given.only else usable
    status = run_tests(every if given.all else ran, given.only or "")
    left_out = [isa for isa in every if isa not in ran]
    how = f"failed ({status})" if status else "passed"
    sys.stdout.write(f"sanitize: {', '.join(ran)} {how}; left out: {', '.join(left_out) or 'none'}\n")
    return status


def run_tests(compiled: Sequence[str], only: str) -> int:
    """Compile the kernels for some instruction sets, and test those that run here, or one only. Returns pytest's exit
    status.
    """
    compiler = os.environ.get("CXX", "c++")
    os.environ["CXX"] = f"{compiler} {_FLAGS}"  # of the library that tests build, too
    ask = shlex.split(compiler)
    found = (subprocess.check_output([*ask, f"-print-file-name={name}"], text=True) for name in _PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / build.LIBRARY.name
        # With more optimising the checks of the products' unrolled loops take a compiler longer than all tests.
        flags = {isa: [*flags, "-O1"] for isa, flags in build.instruction_sets().items()}
        build.build_library(library, {isa: flags[isa] for isa in flags if isa in (*compiled, "plain")})
        environment = {
            **os.environ,
            "TEST_KERNEL_LIBRARY": str(library),
            "LD_PRELOAD": " ".join(map(str.strip, found)),
            # Python and torch free at their exit little of what they took, and mix kinds of allocation.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "--timeout=900", *_TESTS]
        # Some tests choose `plain` themselves: it is always compiled, and has its own turn.
        command += ["-k", "not plain"] if only not in ("", "plain") else []
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
