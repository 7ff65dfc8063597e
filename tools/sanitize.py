"""Run the tests of the native kernels under AddressSanitizer and UBSan: `make sanitize`. Needs GCC and its libraries.

The kernels are built apart, for all instruction sets, with checks of every access and of undefined behaviour; the first
violation ends the tests. What torch allocates is checked at its ends, as its allocator is replaced. KV pools and packed
weights are mapped in one piece, and checked only at the ends of that.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.engine.kernels import build

_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
_TESTS = tuple(
    f"tests/engine/{name}.py"
    for name in ("test_recurrence", "test_kernels", "test_attention_kernel", "test_experts_kernel", "test_sampler")
)
_PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so")
"""Python does not link them. The last one so that exceptions are seen, too."""


def main() -> int:
    """Build and test. Returns pytest's exit status."""
    compiler = os.environ.get("CXX", "c++")
    os.environ["CXX"] = f"{compiler} {_FLAGS}"  # of the library that tests build, too
    ask = shlex.split(compiler)
    found = (subprocess.check_output([*ask, f"-print-file-name={name}"], text=True) for name in _PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / build.LIBRARY.name
        # With more optimising the checks of the products' unrolled loops take a compiler longer than all tests.
        build.build_library(library, {isa: [*flags, "-O1"] for isa, flags in build.instruction_sets().items()})
        environment = {
            **os.environ,
            "TEST_KERNEL_LIBRARY": str(library),
            "LD_PRELOAD": " ".join(map(str.strip, found)),
            # Python and torch free at their exit little of what they took, and mix kinds of allocation.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "--timeout=900", *_TESTS]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
