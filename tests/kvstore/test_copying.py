"""The copying's checksum is XXH3 as python-xxhash has it, on every instruction set, and is of what was stored."""

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.kvstore.copying import (
    HASH_UNIT_BYTES,
    HashingCopy,
    compute_checksum,
    copy_and_hash,
    copy_and_hash_in_chunks,
)
from penstock.kvstore.native import build, library

CopyHashed = Callable[[memoryview, memoryview], int]
LARGE, UNIT = 3 * 2**20, HASH_UNIT_BYTES
VARIANTS = ["avx512", "avx2", "plain", "chunks"]


@pytest.fixture(params=VARIANTS, scope="module")
def copying(request: pytest.FixtureRequest) -> Iterator[CopyHashed]:
    """Each way to copy that this machine has."""
    if request.param == "chunks":
        yield copy_and_hash_in_chunks
        return
    loaded = library.load_library()
    if loaded is None or not loaded.select_isa(request.param):
        pytest.skip(f"no native copying with {request.param} here")
    assert loaded.isa == request.param
    yield copy_and_hash
    loaded.select_isa("")


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(5).randbytes(LARGE)


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")


@needs_compiler
def test_the_library_is_built_where_there_is_a_compiler() -> None:
    assert library.load_library() is not None


def test_every_length_up_to_5000(copying: CopyHashed, content: bytes) -> None:
    source = memoryview(content)
    for length in range(5001):
        into = bytearray(length + 2)
        checksum = copying(memoryview(into)[1:-1], source[:length])
        assert checksum == xxhash.xxh3_64_intdigest(source[:length]), length
        assert into == b"\0" + source[:length] + b"\0", length


@settings(max_examples=60)
@given(st.integers(0, LARGE - 128), st.integers(0, 64), st.integers(0, 64))
def test_any_length_at_any_address(
    copying: CopyHashed, content: bytes, length: int, source_at: int, into_at: int
) -> None:
    source = memoryview(content)[source_at : source_at + length]
    memory = bytearray(length + into_at + 1)
    assert copying(memoryview(memory)[into_at:-1], source) == xxhash.xxh3_64_intdigest(source)
    assert memory[into_at:-1] == source
    assert not any(memory[:into_at])
    assert memory[-1] == 0


def test_a_source_that_changes_meanwhile_gives_the_checksum_of_the_copy(copying: CopyHashed, content: bytes) -> None:
    """A writer goes over the source all the time; copies are torn, but their checksum is their own."""
    source, into = bytearray(content), bytearray(LARGE)
    stop = threading.Event()

    def scribble() -> None:
        others = [content, bytes(LARGE)]
        while not stop.is_set():
            others.reverse()
            copy_and_hash(memoryview(source), memoryview(others[0]))

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(30):
            assert copying(memoryview(into), memoryview(source)) == xxhash.xxh3_64_intdigest(into)
    finally:
        stop.set()
        writer.join()


def test_views_of_other_items_count_bytes(copying: CopyHashed) -> None:
    into = bytearray(32)
    source = memoryview(bytes(range(32))).cast("I")
    assert copying(memoryview(into).cast("Q"), source) == compute_checksum(bytes(range(32)))
    assert into == bytes(range(32))


@settings(max_examples=60)
@given(st.integers(0, 9 * HASH_UNIT_BYTES), st.lists(st.integers(1, 4), max_size=8), st.integers(0, 64), st.booleans())
@example(0, [], 0, True)
@example(240, [], 0, True)
@example(3 * HASH_UNIT_BYTES, [1, 1, 1], 0, True)
@example(3 * HASH_UNIT_BYTES + 1, [1, 1, 1], 0, True)
def test_in_chunks(
    copying: CopyHashed, content: bytes, length: int, sizes: list[int], into_at: int, has_empty: bool
) -> None:
    """Any chunks of whole units, and what is left; empty chunks between them change nothing."""
    memory, source = bytearray(length + into_at + 1), memoryview(content)[:length]
    sizes = [size * HASH_UNIT_BYTES for size in sizes]
    _in_chunks(copying, memoryview(memory)[into_at:-1], source, sizes, has_empty=has_empty)
    assert memory[into_at:-1] == source
    assert not any(memory[:into_at])
    assert memory[-1] == 0


@pytest.mark.parametrize("length", [0, 1, 240, 241, UNIT, UNIT + 1, 2 * UNIT, LARGE, LARGE - 1, LARGE - UNIT])
def test_in_large_chunks(copying: CopyHashed, content: bytes, length: int) -> None:
    _in_chunks(copying, memoryview(bytearray(length)), memoryview(content)[:length], [2**20] * 2)


def _in_chunks(
    copying: CopyHashed, into: memoryview, source: memoryview, sizes: list[int], *, has_empty: bool = False
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if copying is copy_and_hash_in_chunks:
            patch.setattr(library, "load_library", lambda: None)
        chunks, start = HashingCopy(into), 0
        for size in sizes:
            if start + size < len(source):
                chunks.add_chunk(source[start : start + size])
                start += size
            if has_empty:
                chunks.add_chunk(source[:0])
        if start < len(source):
            with pytest.raises(ValueError, match="only"):
                chunks.finish_checksum()
            chunks.add_chunk(source[start:])
        for _ in range(2 * has_empty):
            chunks.add_chunk(source[:0])
        assert chunks.finish_checksum() == xxhash.xxh3_64_intdigest(source)
        assert into == source


def test_a_chunk_that_is_none(copying: CopyHashed) -> None:
    chunks = HashingCopy(memoryview(bytearray(3 * HASH_UNIT_BYTES)))
    for wrong in (HASH_UNIT_BYTES - 1, 3 * HASH_UNIT_BYTES + 1):
        with pytest.raises(ValueError, match="no chunk"):
            chunks.add_chunk(memoryview(bytes(wrong)))
    chunks.add_chunk(memoryview(bytes(HASH_UNIT_BYTES)))
    with pytest.raises(ValueError, match="no chunk"):
        chunks.add_chunk(memoryview(bytes(2 * HASH_UNIT_BYTES + 1)))
    chunks.add_chunk(memoryview(bytes(2 * HASH_UNIT_BYTES)))
    assert chunks.finish_checksum() == compute_checksum(bytes(3 * HASH_UNIT_BYTES))


def test_what_cannot_be_copied_is_refused_and_nothing_is_held(copying: CopyHashed) -> None:
    into = bytearray(8)
    with pytest.raises(ValueError, match="do not fit"):
        copying(memoryview(into), memoryview(bytes(9)))
    with pytest.raises((BufferError, TypeError)):
        copying(memoryview(bytes(8)), memoryview(into))
    into.clear()  # a view that is still held would forbid it


def test_a_foreign_library_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "libcopying.so"
    monkeypatch.setattr(library, "LIBRARY", foreign)
    for content in (None, b"no library"):
        if content is not None:
            foreign.write_bytes(content)
        assert library.load_library.__wrapped__() is None


@needs_compiler
def test_a_library_of_another_version_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was built before a function was added."""
    source, older = tmp_path / "older.cpp", tmp_path / "libcopying.so"
    source.write_text('extern "C" int penstock_copy_hashed() { return 0; }')
    native.link_library(older, ["-fPIC", str(source)])
    monkeypatch.setattr(library, "LIBRARY", older)
    assert library.load_library.__wrapped__() is None
    assert "penstock_copy_piece" in caplog.text
    assert "python -m penstock.kvstore.native.build" in caplog.text


@needs_compiler
def test_it_builds_into_a_new_place_once_for_the_same_sources_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "libcopying.so"
    build.build_library(place)
    assert list(tmp_path.iterdir()) == [place]
    written_ns = place.stat().st_mtime_ns
    build.build_library(place)
    assert place.stat().st_mtime_ns == written_ns
    monkeypatch.setenv("CXX", "c++ -O1")
    build.build_library(place)
    assert place.stat().st_mtime_ns > written_ns
