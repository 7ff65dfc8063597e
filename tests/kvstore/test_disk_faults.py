"""What may happen to a directory of blocks: its users die at any step, disks fill up, files are cut off and vanish."""

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from penstock.kvstore.directory.files import BlockFiles
from penstock.kvstore.tiers.disk import DiskTier

from penstock import failpoints
from penstock.errors import KVStoreError
from penstock.local.processes import Child
from penstock.waiting import wait_until
from tests.kvstore import children
from tests.kvstore.blocks import PAYLOAD_BYTES, content, is_here, keys_of, put, read
from tests.kvstore.disk_child import BUDGET, FORM, NAMES, NUM_ROOMS, main, open_tier

start = partial(children.start, main)


def files(directory: Path) -> list[Path]:
    """The files of blocks."""
    return sorted((directory / "kv").glob("??/*.kv"))


def check_sound(tier: DiskTier, directory: Path) -> None:
    """The directory agrees with itself, nothing torn is in it, and it can be filled with other blocks to the brim."""
    found = read(tier, NAMES, FORM)
    assert all(got in (None, content(name, FORM)) for name, got in zip(NAMES, found, strict=True))
    assert tier.counters.damaged == 0
    for owner in ("a job", "another", "late", "0", "1"):
        tier.release_leases(owner, keys_of(NAMES))
    assert tier.read_usage().leased == 0
    for name in NAMES:
        assert put(tier, [name], FORM) == [True]
    assert sum(is_here(tier, NAMES)) == tier.read_usage().blocks == len(files(directory)) == NUM_ROOMS
    assert (tier.counters.refused, tier.counters.errors) == (0, 0)
    assert tier.read_usage().bytes == BUDGET
    assert tier.check_integrity() == []
    assert all(path.stat().st_nlink == 1 for path in files(directory))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = open_tier(tmp_path)
    yield opened
    opened.close()


# Deaths.

DEATHS = [(step, 1) for step in failpoints.DISK]
DEATHS += [(step, 7) for step in failpoints.DISK if not step.startswith("disk.open")]


@pytest.mark.parametrize(("step", "times"), DEATHS)
def test_killed_at_a_step(tmp_path: Path, step: str, times: int) -> None:
    child = start(tmp_path, "die", step, str(times))
    assert child.wait(60) == -9, child.read_log_tail()
    tier = open_tier(tmp_path)
    assert tier.check_integrity() == []
    check_sound(tier, tmp_path)
    tier.close()


@pytest.mark.parametrize(
    "step", ["disk.put.1.1", "disk.put.2.1", "disk.put.4.2", "disk.evict.2", "disk.lease.1", "disk.remove.2"]
)
def test_killed_while_another_one_has_it_open(tmp_path: Path, tier: DiskTier, step: str) -> None:
    """Who has the directory open all the time goes on too, without opening it again."""
    assert start(tmp_path, "die", step, "2").wait(60) == -9
    check_sound(tier, tmp_path)


@pytest.fixture
def halted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    with children.halted(main, tmp_path, request.param) as child:
        yield child


@pytest.mark.parametrize("halted", ["disk.put.4.1"], indirect=True)
def test_the_lock_of_a_dead_holder_is_free(tmp_path: Path, halted: Child) -> None:
    """It stands still with the lock in its hands; who waits goes on when it dies."""
    found: list[DiskTier] = []
    opener = threading.Thread(target=lambda: found.append(open_tier(tmp_path)))
    opener.start()
    opener.join(0.2)
    assert opener.is_alive(), "it waits for the lock"
    halted.kill()
    opener.join(30)
    check_sound(found[0], tmp_path)
    found[0].close()


@pytest.mark.parametrize("halted", ["disk.put.2"], indirect=True)
def test_files_of_the_living_are_left_alone_and_count(tmp_path: Path, halted: Child, tier: DiskTier) -> None:
    """While it writes, its drafts count against the budget, however wanted room is; when it is dead, they go."""
    drafts = [path for path in (tmp_path / "kv" / "writers").rglob("*") if path.is_file() and path.stat().st_size > 64]
    assert drafts
    for name in NAMES:
        put(tier, [name], FORM)
    assert all(path.exists() for path in drafts)
    usage = tier.read_usage()
    assert usage.bytes <= BUDGET
    assert usage.blocks < NUM_ROOMS
    assert tier.check_integrity() == []
    halted.kill()
    assert tier.check_integrity() != []
    check_sound(tier, tmp_path)
    assert not any(path.exists() for path in drafts)


def test_two_writers_at_a_small_budget(tmp_path: Path, tier: DiskTier) -> None:
    workers = [start(tmp_path, "work", str(seed)) for seed in range(2)]
    assert [child.wait(120) for child in workers] == [0, 0], [child.read_log_tail() for child in workers]
    check_sound(tier, tmp_path)


def test_killed_again_and_again_while_others_work(tmp_path: Path, tier: DiskTier) -> None:
    worker = start(tmp_path, "work", "0")
    for step in ("disk.put.4.2", "disk.put.2", "disk.lease.1", "disk.remove.1"):
        assert start(tmp_path, "die", step, "3").wait(60) == -9
        tier.release_leases("a job", keys_of(NAMES))
        tier.release_leases("another", keys_of(NAMES))
    assert worker.wait(120) == 0, worker.read_log_tail()
    check_sound(tier, tmp_path)


# Opening.


def test_nobody_else_can_read_it(tmp_path: Path, tier: DiskTier) -> None:
    put(tier, NAMES[:3], FORM)
    tier.lease_blocks("a job", keys_of(NAMES[:3]), 600)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path, tier: DiskTier) -> None:
    put(tier, NAMES[:NUM_ROOMS], FORM)
    smaller = DiskTier.open(FORM, tmp_path / "kv", BUDGET // 2)
    usage = smaller.read_usage()
    assert usage.bytes <= usage.budget == BUDGET // 2
    assert len(files(tmp_path)) == usage.blocks == NUM_ROOMS // 2
    smaller.close()


def test_what_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KVStoreError, match="PENSTOCK_KV_STORE_DISK_DIR"):
        DiskTier.open(FORM, tmp_path / "file" / "kv", BUDGET)


def test_a_budget_without_room_for_a_block(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match="PENSTOCK_KV_STORE_DISK_MB"):
        DiskTier.open(FORM, tmp_path / "kv", PAYLOAD_BYTES)


def test_attached_for_tools(tmp_path: Path, tier: DiskTier) -> None:
    names = NAMES[:3]
    put(tier, names, FORM)
    tool = DiskTier.attach(tmp_path / "kv")
    assert tool.read_usage() == tier.read_usage()
    assert {entry.key for entry in tool.list_entries()} == set(keys_of(names))
    assert tool.read_stored(names[0].hash) == tier.read_stored(names[0].hash)
    assert tool.remove_blocks(keys_of(names[:2])) == 2
    assert is_here(tier, names) == [False, False, True]
    tool.close()
    assert tier.check_integrity() == []


def test_a_tool_makes_no_lock(tmp_path: Path, tier: DiskTier) -> None:
    """It may be run by another user than the workers."""
    (lock := tmp_path / "kv" / "lock").unlink()
    with pytest.raises(KVStoreError, match="no directory with KV blocks"):
        DiskTier.attach(tmp_path / "kv")
    assert not lock.exists()
    put(tier, NAMES[:3], FORM)
    tool = DiskTier.attach(tmp_path / "kv")
    lock.unlink()
    assert tool.remove_blocks(keys_of(NAMES[:2])) == tool.read_usage().blocks == 0
    assert tool.counters.errors == 2
    assert not lock.exists()
    tool.close()
    assert put(tier, NAMES[3:4], FORM) == [True]
    assert tier.check_integrity() == []


# Failures of the file system.


def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, tries = NAMES[:2], list[str]()
    put(tier, kept, FORM)

    def write(files: BlockFiles, path: str, *_: object) -> None:
        tries.append(path)
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "write_block", write)
        assert put(tier, NAMES[2:5], FORM) == [False] * 3
        assert (len(tries), tier.counters.errors) == (1, 1)
        assert put(tier, NAMES[5:6], FORM) == [False]
        assert len(tries) == 1, "not asked again at once"
    assert read(tier, kept, FORM) == [content(name, FORM) for name in kept]
    assert tier.read_usage().blocks == 2
    assert tier.check_integrity() == []
    assert not any(Path(path).exists() for path in tries)
    wait_until(lambda: put(tier, NAMES[2:5], FORM) == [True] * 3, 30, "it takes blocks again")


def test_a_disk_that_can_only_be_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, NAMES[:2], FORM)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        for name in ("utime", "unlink", "mkdir", "rename", "link", "pwrite", "writev"):
            patch.setattr(os, name, refuse)
        for call in everything(tier):
            call()
        assert is_here(tier, NAMES[:3]) == [True, True, False]
        assert read(tier, NAMES[:2], FORM) == [content(name, FORM) for name in NAMES[:2]]
    assert tier.counters.errors > 0
    wait_until(lambda: put(tier, NAMES[3:4], FORM) == [True], 30, "it takes blocks again")
    assert tier.check_integrity() == []


def test_a_failure_while_room_is_made(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reserved for the batch until then is free again."""
    put(tier, NAMES[: NUM_ROOMS - 1], FORM)

    def refuse(_: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert put(tier, NAMES[NUM_ROOMS : NUM_ROOMS + 2], FORM) == [False, False]
    assert tier.counters.errors == 1
    assert tier.read_usage().bytes == BUDGET // NUM_ROOMS * (NUM_ROOMS - 1)
    assert tier.check_integrity() == []
    wait_until(lambda: put(tier, NAMES[-2:], FORM) == [True, True], 30, "it takes blocks again")
    assert tier.read_usage().bytes == BUDGET


@pytest.mark.parametrize("what", [".", "*", "??", "lock", "writers", "leases"])
def test_parts_of_the_directory_are_deleted(tmp_path: Path, tier: DiskTier, what: str) -> None:
    """Nothing is raised, and after a while it is all as new, also for who opens it now."""
    put(tier, NAMES[:4], FORM)
    tier.lease_blocks("a job", keys_of(NAMES[:2]), 600)
    for path in [tmp_path / "kv"] if what == "." else list((tmp_path / "kv").glob(what)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for call in everything(tier):
        call()
    other = open_tier(tmp_path)
    for one in (tier, other):
        wait_until(partial(takes, one), 30, "it takes blocks again")
        assert read(one, NAMES[5:7], FORM) == [content(name, FORM) for name in NAMES[5:7]]
    check_sound(other, tmp_path)
    assert tier.read_usage() == other.read_usage()
    other.close()


def test_another_thing_in_the_place_of_the_directory(tmp_path: Path, tier: DiskTier) -> None:
    """The lock that was taken meanwhile is not kept."""
    put(tier, NAMES[:1], FORM)
    (moved := tmp_path / "moved").parent.joinpath("kv").rename(moved)
    (tmp_path / "kv").touch()
    tier.lease_blocks("a job", keys_of(NAMES[:1]), 600)
    assert tier.counters.errors == 1
    with (moved / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / "kv").unlink()
    moved.rename(tmp_path / "kv")
    tier.lease_blocks("a job", keys_of(NAMES[:1]), 600)
    assert tier.read_usage().leased == 1
    assert tier.check_integrity() == []


def takes(tier: DiskTier) -> bool:
    return put(tier, NAMES[5:7], FORM) == [True, True]


def everything(tier: DiskTier) -> list[Callable[[], object]]:
    """All that can be asked of a tier."""
    keys = keys_of(NAMES[:3])
    return [
        lambda: put(tier, NAMES[:6], FORM), lambda: read(tier, NAMES[:6], FORM), lambda: tier.has_blocks(keys),
        lambda: tier.lease_blocks("a job", keys, 600),
        lambda: tier.release_leases("a job", keys), lambda: tier.read_stored(keys[0]),
        tier.read_usage, lambda: list(tier.list_entries()), lambda: tier.remove_blocks(keys),
    ]  # fmt: skip


def test_strangers_in_the_directory(tmp_path: Path, tier: DiskTier) -> None:
    """Files that are not ours are left where they are, and harm nothing."""
    put(tier, NAMES[:2], FORM)
    root = tmp_path / "kv"
    strangers = [root / "ab", root / "notes.txt", root / "leases" / "what", root / "writers" / "what"]
    strangers = [path for path in strangers if not path.exists()]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("not ours")
    for call in everything(tier):
        call()
    for name in NAMES:
        if not (root / name.hash.hex()[:2]).is_file():
            assert put(tier, [name], FORM) == [True]
    assert tier.read_usage().bytes == BUDGET
    assert tier.counters.errors == 0


def test_a_closed_tier_does_nothing(tier: DiskTier) -> None:
    put(tier, NAMES[:2], FORM)
    tier.close()
    for call in everything(tier):
        call()


def test_leases_that_ran_out_do_not_stay(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, NAMES[:NUM_ROOMS], FORM)
    tier.lease_blocks("a job that died", keys_of(NAMES[:NUM_ROOMS]), 0)
    assert put(tier, NAMES[NUM_ROOMS:], FORM)[-1]
    assert not list((tmp_path / "kv" / "leases").rglob("*.*"))
    assert tier.check_integrity() == []


def test_leases_that_ran_out_go_when_it_is_opened(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, NAMES[:2], FORM)
    tier.lease_blocks("a job that died", keys_of(NAMES[:2]), 0)
    open_tier(tmp_path).close()
    assert all(path.stat().st_nlink == 1 for path in files(tmp_path))
