"""A process that works on blocks on disk, as tests tell it: `python -m tests.kvstore.disk_child DIRECTORY WHAT …`.

`die STEP N`: does all that the tier can do, over and over, until it has come to the step N times, and is killed there.
`halt STEP`: the same, but it stands still there until it is killed, and says so by making the file `halted` beside.
`work SEED`: puts and gets blocks of a few names, and ends with the number of wrong ones as its status.
`turn`, `start`, `wait`: the disk is smaller than the budget; ends with 0 if that does no harm.
"""

import random
import sys
from functools import partial
from pathlib import Path

from penstock.kvstore.directory.layout import round_to_pages
from penstock.kvstore.tiers.disk import DiskTier

from penstock.kvstore.block import HEADER_BYTES, BlockKey
from penstock.kvstore.tiers import disk
from penstock.waiting import wait_until
from sim.small_disk import fill_disk
from tests.kvstore.blocks import PAYLOAD_BYTES, TAG, block, content, is_here, keys_of, make_form, new_names, put, read
from tests.kvstore.children import die, halt

FORM = make_form("a model that dies")
NAMES = [BlockKey(random.Random(number).randbytes(32), 16, TAG) for number in range(24)]
NUM_ROOMS = 8
BUDGET = NUM_ROOMS * round_to_pages(HEADER_BYTES + PAYLOAD_BYTES)


def open_tier(directory: Path) -> DiskTier:
    """The directory that all these processes and their test share."""
    return DiskTier.open(FORM, directory / "kv", BUDGET)


def live(directory: Path) -> None:
    """Pass every step: there is little room, so blocks are evicted; some leases stay and some end; some blocks go."""
    tier = open_tier(directory)
    for turn in range(1000):
        some = random.Random(turn).sample(NAMES, 4)
        put(tier, some, FORM)
        tier.lease_blocks("a job", keys_of(some[:2]), 600)
        tier.lease_blocks("another", keys_of(some[1:3]), 600)
        tier.lease_blocks("late", keys_of(some[2:]), 0)
        read(tier, some, FORM)
        tier.put([block(some[0], FORM), block(NAMES[turn % 24], FORM, lambda: False)])
        tier.release_leases("another", keys_of(some[1:3]))
        tier.remove_blocks(keys_of(some[1:2] if turn % 2 else some[3:]))
        is_here(tier, some)
        if turn % 3 == 2:
            tier.release_leases("a job", keys_of(NAMES))


def work(directory: Path, seed: int) -> int:
    """Write and read with others, within the budget; how many blocks were read wrong."""
    tier, rng, num_wrong, num_hits = open_tier(directory), random.Random(seed), 0, 0
    for turn in range(300):
        some = rng.sample(NAMES, 3)
        if turn % 3:
            put(tier, some, FORM)
        if turn % 4 == 0:
            tier.lease_blocks(str(seed), keys_of(some), 600)
        for name, got in zip(some, read(tier, some, FORM), strict=True):
            num_wrong += got not in (None, content(name, FORM))
            num_hits += got is not None
        tier.release_leases(str(seed), keys_of(some))
        num_wrong += tier.read_usage().bytes > BUDGET
    counters = tier.counters
    tier.close()
    return num_wrong + counters.damaged + counters.errors + (not num_hits)


def open_large(directory: Path) -> DiskTier:
    """Blocks where they are sooner too many for the disk than for the budget."""
    return DiskTier.open(FORM, directory / "kv", 100 * BUDGET)


def turn(directory: Path) -> None:
    """New blocks take the place of old ones, as within a budget; what is leased stays."""
    tier, leased = open_large(directory), new_names(3)
    assert all(put(tier, leased, FORM))
    tier.lease_blocks("a job", keys_of(leased), 600)
    for _ in range(20):
        some = new_names(5)
        assert put(tier, some, FORM) == [True] * 5
        assert read(tier, some, FORM) == [content(name, FORM) for name in some]
        assert tier.check_integrity() == []
    assert is_here(tier, leased) == [True] * 3
    assert tier.counters.errors == 0
    tier.close()


def start(directory: Path) -> None:
    """The disk filled up while nobody had the directory open: who opens it makes room."""
    tier, names = open_large(directory), new_names(10)
    put(tier, names, FORM)
    tier.close()
    fill_disk(directory)
    tier = open_large(directory)
    assert is_here(tier, names) == [False] * 4 + [True] * 6, "a few of the oldest went"
    assert put(tier, NAMES[:4], FORM) == [True] * 4
    assert tier.check_integrity() == []
    tier.close()


def wait(directory: Path) -> None:
    """There is nothing that could go: it is opened all the same, and takes blocks when there is room."""
    disk.WRITE_PAUSE_S = 0.0
    other = fill_disk(directory)
    tier = open_large(directory)
    assert put(tier, NAMES[:2], FORM) == [False, False]
    assert tier.counters.errors > 0
    assert is_here(tier, NAMES[:2]) == [False, False]
    assert tier.read_usage().blocks == 0
    other.unlink()
    wait_until(lambda: put(tier, NAMES[:2], FORM) == [True, True], 30, "there is room")
    assert tier.read_usage().budget == 100 * BUDGET
    assert tier.check_integrity() == []
    tier.close()


def main(directory: Path, what: str, *rest: str) -> int:
    """Do what is said above; the status to end with."""
    if what == "die":
        return die(rest[0], int(rest[1]), partial(live, directory))
    if what == "halt":
        return halt(rest[0], partial(live, directory), directory)
    if rest:
        return work(directory, int(rest[0]))
    {"turn": turn, "start": start, "wait": wait}[what](directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
