"""Room that is not there: a disk smaller than the budget, and what is reserved for blocks that are not written."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.kvstore.directory.layout import round_to_pages
from penstock.kvstore.tiers.disk import DiskTier

from penstock.kvstore.tiers import disk
from sim.small_disk import run_on_small_disk
from tests.kvstore.blocks import block, content, new_name, new_names, put, read
from tests.kvstore.disk_child import BUDGET, FORM, NUM_ROOMS, open_tier

SIZE = BUDGET // NUM_ROOMS


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    monkeypatch.setattr(disk, "WRITE_PAUSE_S", 0.0)
    opened = open_tier(tmp_path)
    yield opened
    opened.close()


def check_nothing_is_left(tier: DiskTier, directory: Path) -> None:
    """All the room there is can be had, and it is all that is taken."""
    names = new_names(NUM_ROOMS)
    assert put(tier, names, FORM) == [True] * NUM_ROOMS
    assert read(tier, names, FORM) == [content(name, FORM) for name in names]
    usage = tier.read_usage()
    assert (usage.blocks, usage.bytes) == (NUM_ROOMS, BUDGET)
    assert [path.name for path in (directory / "kv" / "writers").glob("*/*")] == ["reserved"]
    assert tier.check_integrity() == []


# What is reserved.


def test_batches_that_cannot_be_published_leave_nothing(tier: DiskTier, tmp_path: Path) -> None:
    """The usage has to be counted just then, and the process may open no file more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def then_no_more() -> bool:
        (tmp_path / "kv" / "lock").write_bytes(b"")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        return True

    for number in range(NUM_ROOMS + 1):
        try:
            assert tier.put([block(new_name(), FORM), block(new_name(), FORM, then_no_more)]) == [False, False]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert tier.counters.errors == number + 1
        assert tier.read_usage().bytes <= 2 * SIZE, "those of this batch alone"
        assert tier.check_integrity() == []
    check_nothing_is_left(tier, tmp_path)


def test_batches_that_cannot_be_recorded_leave_nothing(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reserved that was not written down as such."""
    write = os.pwrite

    def refuse(fd: int, record: bytes, offset: int) -> int:
        if len(record) == 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, record, offset)

    for _ in range(NUM_ROOMS + 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            assert put(tier, new_names(2), FORM) == [False, False]
        assert tier.read_usage().bytes == 0
    check_nothing_is_left(tier, tmp_path)


def test_a_draft_that_cannot_be_removed_counts_until_it_can(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert tier.put([block(new_name(), FORM, lambda: False), block(new_name(), FORM)]) == [False, True]
        assert (tier.read_usage().blocks, tier.read_usage().bytes) == (1, 2 * SIZE)
        assert tier.check_integrity() == []
    check_nothing_is_left(tier, tmp_path)


# A full disk.


@pytest.mark.parametrize("what", ["turn", "start", "wait"])
def test_a_disk_smaller_than_the_budget(tmp_path: Path, what: str) -> None:
    """See `disk_child.py`."""
    child = run_on_small_disk(tmp_path, 24, "tests.kvstore.disk_child", what)
    assert child.returncode == 0, child.read_log_tail()


def test_a_disk_that_stays_full_is_left_alone(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take what is freed: each put tries that once, and what it could not write leaves nothing."""
    tries, kept = list[str](), new_names(4)
    put(tier, kept, FORM)
    monkeypatch.setattr(disk, "WRITE_PAUSE_S", 600.0)

    def refuse(path: str, *_: object) -> None:
        tries.append(path)
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tier._files, "write_block", refuse)
    for _ in range(2):
        assert put(tier, new_names(2), FORM) == [False, False]
    assert (len(tries), tier.counters.errors, tier.counters.evictions) == (2, 1, 2)
    assert [found is not None for found in read(tier, kept, FORM)] == [False, False, True, True]
    assert tier.read_usage().bytes == 2 * round_to_pages(SIZE)
    assert tier.check_integrity() == []
    assert not any(Path(path).exists() for path in tries)
