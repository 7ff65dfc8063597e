import ctypes
import fcntl
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.kernels import build
from penstock.engine.kernels.library import Library
from penstock.engine.loading.loading import load_model
from penstock.engine.model.model import LoadedModel
from tests.engine.helpers import make_small_model, use_instruction_set

HEADER = Path(__file__).parent / "emulated_tiles.h"
EMULATED = "emulated tiles"
CACHE = Path(__file__).parents[2] / ".cache"
"""Of the checkout. What is compiled for tests stays there until its sources change."""


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model(EngineSettings())


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model on disk, with the demo model's tokenizer."""
    return make_small_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=list(build.instruction_sets()))
def native(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The native kernels on each instruction set that this processor has."""
    with use_instruction_set(request.param) as native:
        yield native


@pytest.fixture
def unknown_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers expect answers to end at once until they have seen some tokens, so that small pools run short."""
    monkeypatch.setattr("penstock.engine.memory.tables.FIRST_TOKENS", 1e-9)


@pytest.fixture(params=[*build.instruction_sets(), EMULATED])
def native_or_emulated(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The library on each instruction set; and its code for tiles, with tiles in plain C++."""
    with use_instruction_set("avx512_bf16" if request.param == EMULATED else request.param) as native:
        yield _emulate() if request.param == EMULATED else native


@cache
def _emulate() -> Library:
    CACHE.mkdir(exist_ok=True)
    path, header = CACHE / "libemulated.so", f"-DHEADER={zlib.crc32(HEADER.read_bytes())}"
    flags = [*build.instruction_sets()["amx"], "-O1", "-include", str(HEADER), header]
    with path.with_suffix(".lock").open("w") as lock:  # one process compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        build.build_library(path, {"avx512_bf16": flags})
    return Library(ctypes.CDLL(str(path)))
