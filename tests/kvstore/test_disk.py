"""What only the disk tier does; its contract is in test_tiers.py, deaths and faults in test_disk_faults.py."""

import errno
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from penstock.kvstore.directory.layout import DirectoryLayout, round_to_pages
from penstock.kvstore.tiers.disk import DiskTier

from penstock.kvstore.block import HEADER_BYTES, BlockKey
from penstock.kvstore.codec import PayloadShape, make_codecs
from penstock.kvstore.tiers import disk
from penstock.waiting import wait_until
from tests.kvstore.blocks import (
    FORM,
    PAYLOAD_BYTES,
    block,
    content,
    is_here,
    keys_of,
    new_name,
    new_names,
    put,
    read,
)

AMPLE = 2**20
FILE_BYTES = round_to_pages(HEADER_BYTES + PAYLOAD_BYTES)
SHAPE = PayloadShape("float32", ((PAYLOAD_BYTES // 100, 25),))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open(FORM, tmp_path, AMPLE)
    yield tier
    tier.close()


def path_of(directory: Path, name: BlockKey) -> Path:
    return directory / name.hash.hex()[:2] / f"{name.hash.hex()}.kv"


# Opening.


def test_after_a_restart_of_the_machine_files_are_counted(tier: DiskTier, tmp_path: Path) -> None:
    """The record may be older than what is there, or newer."""
    name, other = new_names(2)
    put(tier, [name, other])
    record = bytearray((tmp_path / "lock").read_bytes())
    tier.close()
    path_of(tmp_path, name).unlink()
    (tmp_path / "lock").write_bytes(record)
    again = DiskTier.open(FORM, tmp_path, AMPLE)
    again._directory.ledger._boot = bytes(range(16))
    assert again.read_usage().blocks == 1
    assert again.check_integrity() == []
    again.close()


# Damage.


def test_files_cut_off_while_they_are_read(tier: DiskTier, tmp_path: Path) -> None:
    """At any time, to any length: a miss, never a signal, never a wrong block."""
    names, stop, rng = new_names(6), threading.Event(), random.Random(3)
    put(tier, names)

    def cut() -> None:
        while not stop.is_set():
            name = rng.choice(names)
            try:
                os.truncate(path_of(tmp_path, name), rng.randrange(HEADER_BYTES + PAYLOAD_BYTES))
            except FileNotFoundError:
                put(tier, [name])

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        while tier.counters.damaged < 200:
            for name, got in zip(names, read(tier, names), strict=True):
                assert got in (None, content(name))
    finally:
        stop.set()
        thread.join()
    assert tier.counters.errors == 0
    tier.remove_blocks(keys_of(names))
    assert tier.read_usage().bytes == 0
    assert tier.check_integrity() == []


def test_a_damaged_block_that_was_replaced_stays(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read and the removal another worker wrote it anew."""
    name = new_name()
    put(tier, [name])
    path = path_of(tmp_path, name)
    os.truncate(path, 100)
    drop = tier._directory.drop_blocks

    def late(keys: dict[bytes, int | None]) -> int:
        other = DiskTier.open(FORM, tmp_path, AMPLE)
        kept = path.with_suffix(".old")
        path.rename(kept)  # its number stays taken
        put(other, [name])
        other.close()
        kept.unlink()
        return drop(keys)

    monkeypatch.setattr(tier._directory, "drop_blocks", late)
    assert read(tier, [name]) == [None]
    assert read(tier, [name]) == [content(name)]


def test_a_directory_in_the_place_of_a_block(tier: DiskTier, tmp_path: Path) -> None:
    name = new_name()
    path_of(tmp_path, name).mkdir(parents=True)
    assert read(tier, [name]) == [None]
    assert (tier.counters.misses, tier.counters.errors) == (1, 1)


def test_a_block_that_the_disk_lost_goes(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could never be read again, and each question after it would be a use."""
    lost, kept = new_names(2)
    put(tier, [lost, kept])
    tier.lease_blocks("a job", [lost.hash], 600)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        assert read(tier, [lost]) == [None]
    assert (tier.counters.damaged, tier.counters.errors) == (1, 0)
    assert is_here(tier, [lost, kept]) == [False, True]
    assert tier.check_integrity() == []
    assert put(tier, [lost]) == [True]
    assert read(tier, [lost]) == [content(lost)]


def test_a_block_that_was_copied_in_and_removed(tier: DiskTier, tmp_path: Path) -> None:
    """More blocks go than are known of."""
    mine, copied = new_names(2)
    put(tier, [mine])
    path_of(tmp_path, copied).parent.mkdir(exist_ok=True)
    shutil.copy(path_of(tmp_path, mine), path_of(tmp_path, copied))
    assert [tier.remove_blocks([name.hash]) for name in (mine, copied)] == [1, 1]
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (0, 0)
    assert tier.counters.errors == 0


def test_a_lease_of_a_file_that_is_gone_is_none_of_the_next(tier: DiskTier, tmp_path: Path) -> None:
    (name,) = new_names(1)
    put(tier, [name])
    tier.lease_blocks("a job", [name.hash], 600)
    path_of(tmp_path, name).unlink()
    tier.lease_blocks("a job", [name.hash], 600)
    assert not list((tmp_path / "leases").rglob("*.*"))
    put(tier, [name])
    tier.lease_blocks("a job", [name.hash], 600)
    path_of(tmp_path, name).unlink()
    put(tier, [name])
    for _ in range(2):
        tier.lease_blocks("a job", [name.hash], 600)
    assert path_of(tmp_path, name).stat().st_nlink == 2
    assert [entry.leases for entry in tier.list_entries()] == [1]


# A disk that takes no more.


def test_a_full_disk_is_counted_and_left_alone_for_a_while(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may have no more than so many bytes: writing fails in the middle of a block."""
    kept, lost, later = new_names(3)
    put(tier, [kept])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert put(tier, [lost]) == [False]
        assert tier.counters.errors == 1
        assert put(tier, [later]) == [False]
        assert tier.counters.errors == 1, "it was not left alone"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert read(tier, [kept, lost]) == [content(kept), None]
    assert tier.read_usage().blocks == 1
    assert tier.check_integrity() == []
    monkeypatch.setattr(disk, "WRITE_PAUSE_S", 0.0)
    wait_until(lambda: put(tier, [lost]) == [True], 30, "the disk is tried again")
    assert read(tier, [lost]) == [content(lost)]


def test_an_error_in_the_middle_of_a_batch_keeps_what_was_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = new_names(3)
    write = tier._files.write_block

    def fails_once(path: str, header: bytes, stored: memoryview) -> None:
        if stored == content(names[1]):
            raise OSError(28, "No space left on device")
        write(path, header, stored)

    monkeypatch.setattr(tier._files, "write_block", fails_once)
    assert put(tier, names) == [True, False, False]
    assert read(tier, names) == [content(names[0]), None, None]
    assert tier.check_integrity() == []


def test_an_error_of_the_caller_leaves_no_draft(tier: DiskTier, tmp_path: Path) -> None:
    def fails() -> bool:
        raise RuntimeError("a tag that cannot be asked")

    good, bad = new_names(2)
    with pytest.raises(RuntimeError):
        tier.put([block(good), block(bad, is_valid=fails)])
    assert is_here(tier, [good, bad]) == [True, False]
    assert tier.check_integrity() == []
    assert [path.name for path in (tmp_path / "writers").glob("*/*")] == ["reserved"]


# Room.


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[DirectoryLayout]:
    """Grows by one whenever all blocks are listed."""
    found, blocks = list[DirectoryLayout](), DirectoryLayout.list_blocks

    def listed(layout: DirectoryLayout) -> Iterator[tuple[bytes, os.stat_result]]:
        found.append(layout)
        return blocks(layout)

    monkeypatch.setattr(DirectoryLayout, "list_blocks", listed)
    return found


def test_the_directory_is_not_listed_for_every_put(tmp_path: Path, listings: list[DirectoryLayout]) -> None:
    tier, names = DiskTier.open(FORM, tmp_path, 200 * FILE_BYTES), new_names(600)
    put(tier, names)
    assert tier.counters.evictions == 400
    assert len(listings) <= 10
    assert is_here(tier, names) == [False] * 400 + [True] * 200
    assert tier.check_integrity() == []
    tier.close()


def test_where_all_is_leased_the_directory_is_not_listed_again(tmp_path: Path, listings: list[DirectoryLayout]) -> None:
    tier, names = DiskTier.open(FORM, tmp_path, 4 * FILE_BYTES), new_names(4)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names), 600)
    before = len(listings)
    assert put(tier, new_names(3)) == [False] * 3
    assert (len(listings) - before, tier.counters.refused) == (1, 3)
    tier.release_leases("a job", keys_of(names[:1]))
    assert put(tier, new_names(1)) == [True]
    tier.close()


# Codecs.


@pytest.mark.parametrize("choice", ["lossless", "int8"])
def test_blocks_are_written_as_the_codec_says(tmp_path: Path, choice: str) -> None:
    name, payload = new_name(), bytes(PAYLOAD_BYTES)
    tier = DiskTier.open(FORM, tmp_path, AMPLE, make_codecs(choice, SHAPE))  # type: ignore[arg-type]
    assert tier.put([replace(block(name), payload=memoryview(payload))]) == [True]
    stored = tier.read_stored(name.hash)
    assert stored is not None
    assert len(stored) < HEADER_BYTES + PAYLOAD_BYTES
    assert read(tier, [name]) == [payload]
    plain = DiskTier.open(FORM, tmp_path, AMPLE)
    assert read(plain, [name]) == [None]
    assert is_here(tier, [name]) == [False], "what nobody here can read is removed"
    plain.close()
    tier.close()


def test_damage_in_compressed_blocks(tmp_path: Path) -> None:
    tier, rng = DiskTier.open(FORM, tmp_path, AMPLE, make_codecs("lossless", SHAPE)), random.Random(1)
    for _ in range(50):
        name = new_name()
        payload = bytes(rng.choices(range(4), k=PAYLOAD_BYTES))
        tier.put([replace(block(name), payload=memoryview(payload))])
        path = path_of(tmp_path, name)
        stored = bytearray(path.read_bytes())
        stored[rng.randrange(len(stored))] ^= 1 << rng.randrange(8)
        path.write_bytes(stored)
        assert read(tier, [name]) == [None]
    assert tier.counters.damaged == 50
    assert tier.read_usage().blocks == 0
    tier.close()


# The checker itself.


def test_the_checker_sees_what_is_wrong(tier: DiskTier, tmp_path: Path) -> None:
    name, leased = new_names(2)
    put(tier, [name, leased])
    tier.lease_blocks("a job", [leased.hash], 600)
    path_of(tmp_path, leased).unlink()
    (tmp_path / "writers" / "0123").mkdir()
    (tmp_path / "writers" / "0123" / "draft").write_bytes(b"left")
    found = "\n".join(tier.check_integrity())
    for words in ("no lease of a block", "dead process", "are recorded"):
        assert words in found
