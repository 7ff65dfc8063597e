"""Arenas in memory as files: sizes, names, opening, growth, attaching, removing, and the checker."""

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import KVStoreError
from penstock.kvstore.arena import growth
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.file import find_arenas, open_in_use, remove_arena
from penstock.kvstore.arena.layout import (
    NEVER,
    NO_SLOT,
    W_ALLOCATED,
    W_FREE_HEAD,
    W_LEASE_TOP,
    W_NEXT_LEASE_END,
    W_NUM_FREE,
    W_NUM_READY,
    Geometry,
)
from penstock.kvstore.arena.locks import ALLOCATION_BYTE, ByteLocks
from penstock.kvstore.block import HEADER_BYTES, BlockFormat
from penstock.kvstore.tiers.host import HostTier
from sim.waiting import PATIENCE_S
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, content, keys_of, make_form, new_names, put, read
from tests.kvstore.places import wait_until_mapped

BUDGET = 2**18
Open = Callable[..., HostTier]


@pytest.fixture
def open_tier(tmp_path: Path, exits: ExitStack) -> Open:
    def make(form: BlockFormat = FORM, pipeline: str = "demo", budget: int = BUDGET) -> HostTier:
        return exits.enter_context(closing(HostTier(Arena.open(form, pipeline, budget, str(tmp_path)))))

    return make


def paths(directory: Path) -> list[Path]:
    return [arena.path for arena in find_arenas(str(directory))]


# Sizes.


@given(st.integers(0, 10**7), st.integers(0, 10**9), st.booleans())
def test_an_arena_is_the_largest_that_its_budget_holds(payload_bytes: int, budget: int, on_disk: bool) -> None:
    geometry = Geometry.fit_budget(payload_bytes, budget, on_disk=on_disk)
    if geometry.num_slots:
        assert geometry.total_bytes <= budget
    assert Geometry(payload_bytes, geometry.num_slots + 1, on_disk).total_bytes > budget
    assert geometry.slot_bytes % 4096 == geometry.metadata_bytes % 4096 == 0
    assert HEADER_BYTES + payload_bytes <= geometry.slot_bytes < HEADER_BYTES + payload_bytes + 4096


def test_the_budget_is_that_of_the_file(open_tier: Open) -> None:
    tier = open_tier()
    assert wait_until_mapped(tier, PATIENCE_S)
    put(tier, new_names(200))
    status = tier.arena.path.stat()
    assert BUDGET - 8192 < status.st_blocks * 512 <= BUDGET
    assert status.st_size <= BUDGET


# Opening.


def test_the_file_is_the_user_s_alone(open_tier: Open, tmp_path: Path) -> None:
    open_tier(pipeline="a-b/c d")
    (arena,) = find_arenas(str(tmp_path))
    assert arena.pipeline == "a-b/c d"
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    assert arena.is_in_use


@pytest.mark.parametrize(
    ("form", "budget", "directory"),
    [
        *((FORM, budget, "") for budget in (0, 1, 4096, Geometry(PAYLOAD_BYTES, 1).total_bytes - 1)),
        (make_form(payload_bytes=2**30), 2**50, ""),
        (FORM, BUDGET, "missing"),
        (FORM, BUDGET, "file"),
    ],
    ids=["0", "1", "4096", "too small", "more than the directory has", "missing", "no directory"],
)
def test_what_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path, form: BlockFormat, budget: int, directory: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KVStoreError, match="PENSTOCK_KV_STORE_SHARED_MB"):
        HostTier(Arena.open(form, "demo", budget, str(tmp_path / directory)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_and_a_file_that_others_may_write_are_refused(open_tier: Open, tmp_path: Path) -> None:
    path = (tier := open_tier()).arena.path
    tier.close()
    path.chmod(0o666)
    with pytest.raises(KVStoreError, match="is not a private file of this user"):
        open_tier()
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KVStoreError):
        open_tier()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps

    before = held()
    for _ in range(20):
        tier = HostTier(Arena.open(FORM, "demo", BUDGET, str(tmp_path)))
        put(tier, new_names(3))
        tier.close()
        del tier
    with pytest.raises(KVStoreError):
        HostTier(Arena.open(FORM, "demo", 1, str(tmp_path)))
    assert held() == before


# Memory that comes by and by.


def test_opening_does_not_wait_for_memory(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here another process is at it, and does not get on. When it is gone the next one goes on."""
    monkeypatch.setattr(growth, "CHUNK_BYTES", 8192)
    first = open_tier()
    assert wait_until_mapped(first, PATIENCE_S)
    path = first.arena.path
    first.close()
    path.unlink()
    empty = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    ByteLocks(empty).lock_byte(ALLOCATION_BYTE)
    tier, names = open_tier(), new_names(5)
    writer = threading.Thread(target=put, args=(tier, names))
    writer.start()
    assert not wait_until_mapped(tier, 0.1)
    assert tier.read_usage().blocks == tier.arena.tables.words[W_ALLOCATED] == 0
    os.close(empty)
    writer.join(PATIENCE_S)
    assert read(tier, names) == [content(name) for name in names]
    assert wait_until_mapped(tier, PATIENCE_S)
    assert tier.arena.tables.words[W_ALLOCATED] == tier.arena.geometry.num_slots
    assert check_integrity(tier.arena) == []


def test_nothing_is_evicted_before_all_memory_is_there(open_tier: Open) -> None:
    tier = open_tier()
    assert all(put(tier, new_names(tier.arena.geometry.num_slots)))
    assert tier.counters.evictions == 0
    put(tier, new_names(1))
    assert tier.counters.evictions == 1


@pytest.mark.parametrize("num_chunks", [0, 4])
def test_memory_that_runs_out(
    tmp_path: Path, num_chunks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else fills the directory: the arena stays as small as it is, and is none if it has no memory."""
    monkeypatch.setattr(growth, "CHUNK_BYTES", 16384)
    left, allocate = [num_chunks], os.posix_fallocate

    def runs_out(fd: int, offset: int, length: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", runs_out)
    if not num_chunks:
        with pytest.raises(KVStoreError, match=r"No space left on device.*PENSTOCK_KV_STORE_SHARED_MB"):
            HostTier(Arena.open(FORM, "demo", BUDGET, str(tmp_path)))
        assert list(tmp_path.iterdir()) == []
        return
    with caplog.at_level(logging.WARNING):
        tier, names = HostTier(Arena.open(FORM, "demo", BUDGET, str(tmp_path))), new_names(30)
        assert wait_until_mapped(tier, PATIENCE_S)
        assert all(put(tier, names))
    assert tier.read_usage().blocks == tier.arena.tables.words[W_ALLOCATED] == 12
    assert read(tier, names[-12:]) == [content(name) for name in names[-12:]]
    assert caplog.text.count("PENSTOCK_KV_STORE_SHARED_MB") == 1
    assert check_integrity(tier.arena) == []
    tier.close()


# Several arenas.


def test_memory_of_a_former_model_is_given_back(open_tier: Open, tmp_path: Path) -> None:
    """Of the same pipeline, and only when nobody has it open."""
    old, elsewhere = open_tier(), open_tier(make_form("a third"), "another")
    elsewhere.close()
    new = open_tier(make_form("a new model"))
    assert set(paths(tmp_path)) == {old.arena.path, new.arena.path, elsewhere.arena.path}
    old.close()
    open_tier(make_form("a new model"))
    assert set(paths(tmp_path)) == {new.arena.path, elsewhere.arena.path}
    newest = open_tier(make_form("the newest model"))
    assert set(paths(tmp_path)) == {newest.arena.path, new.arena.path, elsewhere.arena.path}


def test_an_arena_is_removed_when_nobody_has_it_open(open_tier: Open, tmp_path: Path) -> None:
    tier, other = open_tier(), open_tier()
    path = tier.arena.path
    tier.close()
    assert not remove_arena(path)
    assert put(other, new_names(1)) == [True]
    other.close()
    assert [arena.is_in_use for arena in find_arenas(str(tmp_path))] == [False]
    assert remove_arena(path)
    assert remove_arena(path)
    assert paths(tmp_path) == []
    assert open_tier().read_usage().blocks == 0


def test_who_waited_while_it_was_removed_makes_a_new_one(open_tier: Open, tmp_path: Path) -> None:
    """It opened the file before, and holds no file that nobody else will ever find."""
    tier = open_tier()
    path = tier.arena.path
    tier.close()
    remover = os.open(path, os.O_RDWR)
    assert ByteLocks(remover).try_lock(2)
    opened: list[int] = []
    waiting = threading.Thread(target=lambda: opened.append(open_in_use(path, create=True)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    path.unlink()
    os.close(remover)
    waiting.join(PATIENCE_S)
    assert os.fstat(opened[0]).st_ino == path.stat().st_ino
    os.close(opened[0])


# Attaching.


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: b"", lambda whole: b"something else", lambda whole: bytes(10000),
        lambda whole: b"PKVARENA" + bytes(10000), lambda whole: whole[:8] + b"\2" + whole[9:], lambda whole: whole[:-1],
    ],
    ids=["nothing", "text", "zeros", "an arena's first bytes", "another version", "cut off"],
)  # fmt: skip
def test_what_is_no_arena_is_not_attached(open_tier: Open, change: Callable[[bytes], bytes]) -> None:
    path = (tier := open_tier()).arena.path
    tier.close()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(KVStoreError, match="not an arena of this version"):
        HostTier(Arena.attach(path))
    path.unlink(missing_ok=True)
    with pytest.raises(KVStoreError):
        HostTier(Arena.attach(path))


# Leases.


def test_the_lease_table_is_bounded(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever finds no place gets no lease, and that is said once; leases that ran out make place."""
    tier, names = open_tier(budget=Geometry(PAYLOAD_BYTES, 2).total_bytes), new_names(2)
    put(tier, names)
    for number in range(8):
        tier.lease_blocks(str(number), keys_of(names[:1]), 0 if number == 5 else 600)
        wait_until_mapped(tier, PATIENCE_S)
    tier.arena.reclaim_stale()
    tier.lease_blocks("5", keys_of(names[:1]), 60)
    for _ in range(3):
        tier.lease_blocks("late", keys_of(names), 600)
    assert [entry.leases for entry in sorted(tier.list_entries(), key=lambda entry: entry.leases)] == [0, 8]
    assert caplog.text.count("lease table") == 1
    tier.lease_blocks("5", keys_of(names[::-1]), 600)  # it is renewed, also behind a block that gets none
    assert (tier.arena.tables.lease_end_array > time.monotonic_ns() + 500 * 10**9).sum() == 8
    tier.lease_blocks("3", keys_of(names[:1]), 0)
    tier.lease_blocks("late", keys_of(names[1:]), 600)
    assert {entry.key: entry.leases for entry in tier.list_entries()} == {names[0].hash: 7, names[1].hash: 1}
    assert check_integrity(tier.arena) == []


# The checker.


def set_word(word: int, value: int) -> Callable[[Arena], None]:
    return lambda arena: arena.tables.words.__setitem__(word, value)


def change(table: str, at: int, value: int) -> Callable[[Arena], None]:
    return lambda arena: getattr(arena.tables, table).__setitem__(at, value)


def swap_in_index(arena: Arena) -> None:
    index = arena.tables.index
    index[:] = memoryview(bytes(index)[4:] + bytes(index)[:4]).cast("I")


@pytest.mark.parametrize(
    "damage",
    [
        set_word(W_FREE_HEAD, NO_SLOT), set_word(W_NUM_FREE, 3), set_word(W_NUM_READY, 3),
        set_word(W_ALLOCATED, 3), set_word(W_LEASE_TOP, 0), set_word(W_NEXT_LEASE_END, NEVER), change("state", 0, 0),
        change("state", 1, 1), change("state", 9, 1), change("state", 9, 2), change("generation", 0, 7),
        change("lease_count", 2, 1), change("lease_end", 0, 0), change("lease_slot", 1, 0), change("next_free", 7, 2),
        swap_in_index,
    ],
)  # fmt: skip
def test_the_checker_finds_what_is_wrong(open_tier: Open, damage: Callable[[Arena], None]) -> None:
    tier, names = open_tier(budget=Geometry(PAYLOAD_BYTES, 10).total_bytes), new_names(4)
    assert wait_until_mapped(tier, PATIENCE_S)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names[:2]), 600)
    assert check_integrity(tier.arena) == []
    damage(tier.arena)
    assert check_integrity(tier.arena) != []


def test_the_checker_finds_leases_that_nobody_ended(open_tier: Open) -> None:
    put(tier := open_tier(), names := new_names(1))
    tier.lease_blocks("a job", keys_of(names), -2)
    assert check_integrity(tier.arena) == ["a lease was not ended in time"]
    tier.arena.reclaim_stale()
    assert check_integrity(tier.arena) == []
