"""What only the disk tier does: it outlives its tables, shares a budget between models, and survives a failing disk."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from penstock.errors import KVStoreError
from penstock.kvstore.arena import growth
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.directory import find_slot_files
from penstock.kvstore.arena.layout import PAGE_BYTES, Geometry
from penstock.kvstore.arena.medium import SlotFile
from penstock.kvstore.block import BlockFormat
from penstock.kvstore.tiers import host
from penstock.kvstore.tiers.host import HostTier
from sim.container import run_on_small_disk
from sim.waiting import PATIENCE_S, wait_for
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, content, is_here, keys_of, make_form, new_names, put, read
from tests.kvstore.places import overwrite_slot, peek_slot, read_slot, wait_until_mapped

NUM_SLOTS = 8
BUDGET, HALF = (Geometry(PAYLOAD_BYTES, slots, on_disk=True).total_bytes for slots in (NUM_SLOTS, NUM_SLOTS // 2))
SLOT_BYTES = (BUDGET - PAGE_BYTES) // NUM_SLOTS
Open = Callable[..., HostTier]


@pytest.fixture
def open_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: ExitStack) -> Open:
    monkeypatch.setattr(growth, "CHUNK_BYTES", SLOT_BYTES)
    monkeypatch.setattr(growth, "ADOPTED_CHUNK", 3)

    def make(form: BlockFormat = FORM, budget: int = BUDGET, tables: str = "memory") -> HostTier:
        (tmp_path / tables).mkdir(exist_ok=True)
        tier = HostTier(Arena.open_on_disk(form, tmp_path / "kv", budget, str(tmp_path / tables)))
        assert wait_until_mapped(exits.enter_context(closing(tier)), PATIENCE_S)
        return tier

    return make


@pytest.fixture
def tier(open_tier: Open) -> HostTier:
    return open_tier()


def lose_tables(directory: Path) -> None:
    """Do what starting the host anew does, when no tier is open."""
    for path in (directory / "memory").iterdir():
        path.unlink()


def tables_of(directory: Path) -> list[Path]:
    return list((directory / "memory").iterdir())


# Tables that are lost.


@pytest.mark.proof
def test_blocks_outlive_their_tables(open_tier: Open, tmp_path: Path) -> None:
    """Leases do not, and what was removed on purpose does not come back."""
    first, names = open_tier(), new_names(NUM_SLOTS)
    put(first, names)
    first.lease_blocks("a job", keys_of(names), 600)
    assert first.remove_blocks(keys_of(names[2:4])) == 2
    first.close()
    lose_tables(tmp_path)
    tier = open_tier()
    found = [None if index in (2, 3) else content(name) for index, name in enumerate(names)]
    assert read(tier, names) == found
    assert (tier.counters.damaged, tier.read_usage().blocks, tier.read_usage().leased) == (0, 6, 0)
    assert put(tier, new_names(NUM_SLOTS)) == [True] * NUM_SLOTS
    assert tier.check_integrity() == []


def test_a_block_in_two_slots_is_found_once(open_tier: Open, tmp_path: Path) -> None:
    """Its process died when it had evicted a block, and had written nothing yet; then the block was stored again."""
    first, names = open_tier(), new_names(NUM_SLOTS)
    put(first, names)
    slot, last = (peek_slot(first, name.hash) for name in (names[0], names[-1]))
    assert slot is not None
    assert last is not None
    first.remove_blocks(keys_of(names[3:]))
    overwrite_slot(first, last, read_slot(first, slot))
    first.close()
    names = names[:3]
    for _ in range(2):
        lose_tables(tmp_path)
        tier = open_tier()
        assert tier.read_usage().blocks == 3
        assert read(tier, names) == [content(name) for name in names]
        assert tier.check_integrity() == []
        tier.remove_blocks(keys_of(names[:1]))
        names = names[1:] + new_names(1)
        put(tier, names)
        tier.close()


def test_a_smaller_budget_cuts_the_file_off_when_nobody_has_it_open(open_tier: Open, tmp_path: Path) -> None:
    first, names = open_tier(), new_names(NUM_SLOTS)
    put(first, names)
    second = open_tier(budget=HALF)
    assert second.read_usage().budget == BUDGET, "while others have the file open theirs holds"
    second.close()
    first.close()
    tier = open_tier(budget=HALF)
    (path,) = find_slot_files(tmp_path / "kv")
    assert path.stat().st_size <= HALF
    assert tier.read_usage().blocks == sum(is_here(tier, names)) == NUM_SLOTS // 2
    tier.close()
    larger = open_tier()
    assert put(larger, new_names(4)) == [True] * 4
    assert sum(is_here(larger, names)) == 4
    assert larger.counters.evictions == 0


# Processes without the same shared memory.


@pytest.mark.proof
def test_who_has_other_shared_memory_is_refused(open_tier: Open, tmp_path: Path) -> None:
    """As in another container. When the others are gone it may, and theirs are not taken for current later."""
    first, (kept, gone) = open_tier(), new_names(2)
    put(first, [kept, gone])
    with pytest.raises(KVStoreError, match=r"PENSTOCK_KV_STORE_DISK_DIR.*another shared memory"):
        open_tier(tables="elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert read(first, [kept]) == [content(kept)]
    first.close()
    other = open_tier(tables="elsewhere")
    assert other.remove_blocks(keys_of([gone])) == 1
    with pytest.raises(KVStoreError, match="another shared memory"):
        open_tier()
    other.close()
    again = open_tier()
    assert is_here(again, [kept, gone]) == [True, False]
    assert again.counters.damaged == 0
    assert again.check_integrity() == []


# Several models in one directory.


def test_an_unused_model_s_blocks_go_when_space_is_needed(open_tier: Open, tmp_path: Path) -> None:
    former, form, names = open_tier(), make_form("a new model"), new_names(NUM_SLOTS)
    put(former, new_names(NUM_SLOTS - 2))
    former.close()
    tier = open_tier(form)
    assert len(find_slot_files(tmp_path / "kv")) == len(tables_of(tmp_path)) == 2
    assert put(tier, names, form) == [True] * NUM_SLOTS
    assert tier.counters.evictions == 0
    assert len(find_slot_files(tmp_path / "kv")) == len(tables_of(tmp_path)) == 1


def test_models_in_use_share_the_budget(open_tier: Open, tmp_path: Path) -> None:
    used, form, names = open_tier(), make_form("a second model"), new_names(NUM_SLOTS)
    put(used, names[:5])
    tier = open_tier(form)
    assert put(tier, names, form) == [True] * NUM_SLOTS
    assert sum(path.stat().st_size for path in find_slot_files(tmp_path / "kv")) <= BUDGET
    assert tier.read_usage().blocks == 2
    assert is_here(used, names[:5]) == [True] * 5
    assert tier.check_integrity() == used.check_integrity() == []


def test_tables_of_a_deleted_file_are_removed(open_tier: Open, tmp_path: Path) -> None:
    first = open_tier()
    put(first, new_names(2))
    first.close()
    (path,) = find_slot_files(tmp_path / "kv")
    path.rename(tmp_path / "elsewhere.slots")
    assert open_tier().read_usage().blocks == 0
    assert len(tables_of(tmp_path)) == 1


# Opening.


def test_nobody_else_can_read_it(tier: HostTier, tmp_path: Path) -> None:
    put(tier, new_names(2))
    for path in [tmp_path / "kv", *(tmp_path / "kv").iterdir(), *tables_of(tmp_path)]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KVStoreError, match="PENSTOCK_KV_STORE_DISK_DIR"):
        HostTier(Arena.open_on_disk(FORM, tmp_path / "file" / "kv", BUDGET, str(tmp_path)))
    with pytest.raises(KVStoreError, match="PENSTOCK_KV_STORE_DISK_MB"):
        HostTier(Arena.open_on_disk(FORM, tmp_path / "kv", PAYLOAD_BYTES, str(tmp_path)))


def test_tools_attach_to_no_file_that_has_lost_its_tables(tier: HostTier, tmp_path: Path) -> None:
    put(tier, new_names(3))
    tier.close()
    lose_tables(tmp_path)
    with pytest.raises(KVStoreError, match="no worker"):
        HostTier(Arena.attach_on_disk(find_slot_files(tmp_path / "kv")[0], str(tmp_path / "memory")))
    assert tables_of(tmp_path) == []


# A disk that fails.


def refuse(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = new_names(2), new_names(3)
    put(tier, kept)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse(errno.EIO))
        assert put(tier, lost) == [False] * 3
        assert put(tier, [kept[0], lost[0]]) == [True, False]
        assert tier.counters.errors == 1, "it was not left alone"
        assert read(tier, kept) == [content(name) for name in kept]
        assert tier.remove_blocks(keys_of(kept[:1])) == 1
        assert tier.counters.errors == 2, "it may come back"
    monkeypatch.setattr(host, "WRITE_PAUSE_S", 0.0)
    wait_for(lambda: put(tier, lost) == [True] * 3, "it takes blocks again")
    assert tier.read_usage().blocks == 4
    assert tier.check_integrity() == []


def test_an_error_in_the_middle_of_a_batch_keeps_what_was_written(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, write = new_names(3), SlotFile.write_payload

    def fails_once(medium: SlotFile, slot: int, payload: memoryview) -> int:
        return refuse(errno.ENOSPC)() if payload == content(names[1]) else write(medium, slot, payload)

    monkeypatch.setattr(SlotFile, "write_payload", fails_once)
    stored = put(tier, names)
    assert stored[1:] == [False, False]
    assert read(tier, names) == [content(names[0]) if stored[0] else None, None, None]
    assert tier.check_integrity() == []


def test_a_block_that_the_disk_lost_goes_and_one_that_cannot_be_read_now_stays(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = new_names(2)
    put(tier, [lost, kept])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse(errno.EIO))
        assert read(tier, [lost]) == [None]
        patch.setattr(os, "preadv", refuse(errno.EMFILE))
        assert read(tier, [kept]) == [None]
    assert (tier.counters.damaged, tier.counters.errors, tier.counters.misses) == (1, 1, 2)
    assert is_here(tier, [lost, kept]) == [False, True]


def test_a_file_that_is_cut_off_is_no_signal(tier: HostTier, tmp_path: Path) -> None:
    names = new_names(NUM_SLOTS)
    put(tier, names)
    (path,) = find_slot_files(tmp_path / "kv")
    os.truncate(path, PAGE_BYTES + 2 * SLOT_BYTES + 100)
    found = read(tier, names)
    assert sum(got is not None for got in found) == tier.read_usage().blocks == 2
    assert tier.counters.damaged == NUM_SLOTS - 2
    assert put(tier, names) == [True] * NUM_SLOTS
    assert read(tier, names) == [content(name) for name in names]


# Space.


def test_space_is_taken_as_it_is_needed(tier: HostTier, tmp_path: Path) -> None:
    (path,) = find_slot_files(tmp_path / "kv")
    for count in range(1, NUM_SLOTS + 1):
        put(tier, new_names(1))
        assert path.stat().st_size == PAGE_BYTES + count * SLOT_BYTES
    assert put(tier, new_names(1)) == [True]
    assert path.stat().st_size == BUDGET
    assert tier.counters.evictions == 1


def test_where_the_disk_is_full_blocks_are_evicted(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    names = new_names(4)
    put(tier, names[:2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        assert put(tier, names[2:3]) == [True]
        assert is_here(tier, names[:3]) == [False, True, True]
        assert tier.counters.errors == 0
    monkeypatch.setattr(SlotFile, "retry_s", 0.0)
    tier.arena.allocator._retry_at_s = 0.0
    assert put(tier, names[3:]) == [True]
    assert is_here(tier, names) == [False, True, True, True]
    assert tier.check_integrity() == []


@pytest.mark.parametrize("what", ["turn", "start", "wait"])
def test_a_disk_smaller_than_the_budget(tmp_path: Path, what: str) -> None:
    """See `host_child.py`."""
    child = run_on_small_disk(tmp_path, 24, "tests.kvstore.host_child", what)
    assert child.returncode == 0, child.read_log_tail()
