"""The compiled library: it is that of the present sources, and what fails in it fails in Python alone."""

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock import native
from penstock.config.settings import EngineSettings
from penstock.engine.diagnosis import check_kernels
from penstock.engine.kernels import build, library
from penstock.engine.kernels.memory import HUGE_PAGE_BYTES, map_zeros
from penstock.engine.kernels.packed import PackedEmbedding, PackedLinears
from penstock.engine.memory.states import StateLayout, StatePart, StateStorage
from penstock.errors import DependencyMissing

pytestmark = pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")


# Of other sources


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library of another interface, where that of the present one is looked for."""
    path = tmp_path / "libpenstock.so"
    path.write_bytes(build.LIBRARY.read_bytes().replace(build.interface_mark(), b"penstock interface 0123456789abcdef"))
    monkeypatch.setattr(library, "LIBRARY", path)
    assert not build.is_current(path)
    return path


def test_a_library_of_other_sources_is_built_anew(
    stale: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[Path] = []

    def build_library(path: Path) -> None:
        built.append(path)
        shutil.copyfile(build.LIBRARY, path)

    monkeypatch.setattr(library, "build_library", build_library)
    for _ in range(2):
        assert library.load_library.__wrapped__() is not None
    assert built == [stale]
    assert "built anew" in caplog.text


@pytest.mark.usefixtures("stale")
def test_a_library_of_other_sources_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(ctypes, "CDLL", None)
    with pytest.raises(DependencyMissing, match=r"built from other sources .*install a C"):
        library.load_library.__wrapped__()
    monkeypatch.setattr(library, "load_library", library.load_library.__wrapped__)
    (found,) = check_kernels(EngineSettings())
    assert found.state == "fail"
    assert "install a C" in found.detail


def _structures() -> list[type[ctypes.Structure]]:
    found = [value for value in vars(library).values() if isinstance(value, type) and value is not ctypes.Structure]
    return [value for value in found if issubclass(value, ctypes.Structure)]


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """By the size of each, and the place and size of each field."""
    lines, expected = ['#include "kernels.h"', "#include <cstddef>", "#include <cstdio>", "int main() {"], list[str]()
    for structure in _structures():
        name = structure.__name__
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({name}::{field}));')
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    source, program = tmp_path / "structures.cpp", tmp_path / "structures"
    source.write_text("\n".join([*lines, "}"]))
    native.run_compiler(["-std=c++20", "-I", str(build.HERE / "src"), str(source), "-o", str(program)])
    assert len(_structures()) > 10
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n") == [*expected, ""]


# Code of several instruction sets in one file


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_no_function_is_shared_between_instruction_sets() -> None:
    """A template of the standard library has one name in all of them: the linker would keep any one."""
    listed = subprocess.run(["nm", "-C", build.LIBRARY], check=True, capture_output=True, text=True).stdout
    functions = re.findall(r"^[0-9a-f]+ [tTwWuVi] (.*::.*)$", listed, re.MULTILINE)  # others are no templates
    ours = [rf"\b{name}::" for name in build.instruction_sets()]
    # What `pool` and `api` are made of, which are compiled once, for every processor.
    others = [r"\bpool::", r"^\(anonymous namespace\)::", r"^std::__detail::__waiter", r"^std::thread::_"]
    assert sum(re.search(ours[0], name) is not None for name in functions) > 10
    assert [name for name in functions if not any(re.search(known, name) for known in [*ours, *others])] == []


# Failures


def _run_child(script: str) -> str:
    """Run a program that has the library as `lib`, and no torch."""
    begin = "import ctypes, os\nfrom penstock.engine.kernels import library\nlib = library.load_library()\n"
    done = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
lib.set_threads(3)
segments = (library.Segment * 8)(*(library.Segment(i, 1, 0, 0) for i in range(8)))
args = library.AttentionArgs(
    segments=ctypes.addressof(segments), num_segments=8, heads=1, kv_heads=1, k_size=16, v_size=1 << 28, block_size=16,
    element_bytes=4,
)
for call in range(3):
    try:
        lib.attention(ctypes.addressof(args))
    except MemoryError:
        print(call)
    lib.set_threads(3 - call)  # the last time on this thread alone
values = (ctypes.c_float * 3)(1.0, 3.0, 2.0)
best = ctypes.c_int64()
args = library.RowsArgs(ctypes.addressof(values), 1, 3, 3, ctypes.addressof(best), 4)
lib.best(ctypes.addressof(args))
print(best.value)
"""


def test_without_memory_a_call_raises_on_whatever_thread_it_failed() -> None:
    assert _run_child(NO_MEMORY).split() == ["0", "1", "2", "1"]


FORKED = """
from pathlib import Path
lib.set_threads(3)
data = ctypes.create_string_buffer(4 << 20)
def compute(): return lib.read(ctypes.addressof(data), len(data))
def count_threads(): return len(os.listdir("/proc/self/task"))
compute()
pid = os.fork()
if pid == 0:
    alone = count_threads()
    compute()
    lib.set_threads(3)
    compute()
    print(alone, count_threads(), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
compute()
print(count_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_forked_child_has_threads_of_its_own() -> None:
    assert _run_child(FORKED).split() == ["1", "3", "3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_ids_of_any_integer_dtype_are_looked_up_and_others_refused(dtype: torch.dtype) -> None:
    lib = library.load_library()
    assert lib is not None
    linear = torch.nn.Linear(24, 70, bias=False, dtype=dtype).requires_grad_(False)
    weight = linear.weight.clone()
    embedding = PackedEmbedding(lib, PackedLinears.pack(lib, [linear], lambda _: None))
    for ids in (torch.tensor([[3, 69, 0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int16)):
        assert torch.equal(embedding(ids), weight[ids.long()])
    for bad in (-1, 96, 2**40):
        with pytest.raises(IndexError, match="no such token"):
            embedding(torch.tensor([1, bad]))


# Dumps


def map_plain(num_bytes: int) -> Tensor:
    return map_zeros(num_bytes, torch.uint8)


def map_states(num_bytes: int) -> Tensor:
    part = StatePart(0, "recurrent", 0, (num_bytes // 8,), torch.float32)
    return StateStorage(StateLayout((part,), 16, 16), 2).data


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTDUMP"), reason="not on this system")
@pytest.mark.parametrize("num_bytes", [1000, 3 * HUGE_PAGE_BYTES])
@pytest.mark.parametrize("map_memory", [map_plain, map_states], ids=["weights and KV", "states"])
def test_weights_kv_and_states_are_left_out_of_dumps(map_memory: Callable[[int], Tensor], num_bytes: int) -> None:
    memory = map_memory(num_bytes)
    flags, found = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if part := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(part[1], 16) <= memory.data_ptr() < int(part[2], 16)
        elif found and line.startswith("VmFlags:"):
            flags = line
    assert " dd" in flags
