"""A process that works on a tier of the host, as tests tell it, or on a disk that is too small:
`python -m tests.kvstore.host_child DIRECTORY WHAT`.

`die TIER STEP N`: does all that the tier can do, over and over, until it has come to the step N times, and is killed.
`halt TIER STEP`: the same, but it stands still there until it is killed, and says so by making the file `halted`.
`work TIER SEED`: puts and gets blocks of a few names, and ends with the number of wrong ones as its status.
`turn`, `start`, `wait`: the disk is smaller than the budget; ends with 0 if that does no harm.
"""

import random
import sys
from functools import partial
from pathlib import Path

from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.layout import W_DIRTY
from penstock.kvstore.arena.medium import SlotFile
from penstock.kvstore.block import BlockKey
from penstock.kvstore.tiers import host
from penstock.kvstore.tiers.host import HostTier
from sim.container import fill_disk
from sim.waiting import wait_for
from tests.kvstore.blocks import TAG, block, content, is_here, keys_of, make_form, new_names, put, read
from tests.kvstore.children import die, halt
from tests.kvstore.places import open_host

FORM = make_form("a model that dies")
NAMES = [BlockKey(random.Random(number).randbytes(32), 16, TAG) for number in range(24)]
NUM_SLOTS = 8


def open_tier(directory: Path, tier: str) -> HostTier:
    """The tier that all these processes and their test share."""
    return open_host(tier, directory, FORM, NUM_SLOTS)


def live(directory: Path, which: str) -> None:
    """Pass every step: the arena is full, so that blocks are evicted; some leases stay and some end; some blocks go."""
    tier = open_tier(directory, which)
    for turn in range(1000):
        some = random.Random(turn).sample(NAMES, 4)
        put(tier, some, FORM)
        tier.lease_blocks("a job", keys_of(some[:1]), 600)
        tier.lease_blocks("another", keys_of(some[1:2]), 600)
        read(tier, some, FORM)
        tier.put([block(some[0], FORM), block(NAMES[turn % 24], FORM, lambda: False)])
        tier.release_leases("another", keys_of(some[1:2]))
        tier.remove_blocks(keys_of(some[3:]))
        tier.arena.tables.words[W_DIRTY] = turn % 5 == 4
        is_here(tier, some)
        if turn % 5 == 4:
            tier.release_leases("a job", keys_of(NAMES))


def work(directory: Path, which: str, seed: int) -> int:
    """Write and read with others; how many blocks were read wrong."""
    tier, rng, num_wrong, num_hits = open_tier(directory, which), random.Random(seed), 0, 0
    for turn in range(400):
        some = rng.sample(NAMES, 3)
        if seed % 2 and turn % 2:
            tier.lease_blocks(str(seed), keys_of(some), 600)
            tier.release_leases(str(seed), keys_of(some))
        if seed % 2:
            put(tier, some, FORM)
        for name, got in zip(some, read(tier, some, FORM), strict=True):
            num_wrong += got not in (None, content(name, FORM))
            num_hits += got is not None
    if seed % 2 and not num_hits:
        return 99
    return num_wrong + tier.counters.damaged + tier.counters.errors


def open_large(directory: Path) -> HostTier:
    """Blocks where they are sooner too many for the disk than for the budget. The tables are elsewhere."""
    return HostTier(Arena.open_on_disk(FORM, directory / "kv", 800 * 4096, str(directory.parent)))


def turn(directory: Path) -> None:
    """New blocks take the place of old ones, as within a budget; what is leased stays."""
    tier, leased = open_large(directory), new_names(3)
    assert all(put(tier, leased, FORM))
    tier.lease_blocks("a job", keys_of(leased), 600)
    for _ in range(20):
        some = new_names(4)
        assert put(tier, some, FORM) == [True] * 4
        assert read(tier, some, FORM) == [content(name, FORM) for name in some]
        assert tier.check_integrity() == []
    assert is_here(tier, leased) == [True] * 3
    assert tier.counters.evictions > 0
    assert tier.counters.errors == 0
    tier.close()


def start(directory: Path) -> None:
    """The disk filled up while nobody had the directory open: what is there can be read, and evicted for others."""
    tier, names = open_large(directory), new_names(10)
    put(tier, names, FORM)
    tier.close()
    fill_disk(directory)
    tier = open_large(directory)
    assert is_here(tier, names) == [True] * 10
    assert put(tier, NAMES[:12], FORM) == [True] * 12
    assert tier.counters.errors == 0
    assert tier.check_integrity() == []
    tier.close()


def wait(directory: Path) -> None:
    """There is nothing that could go: it is opened all the same, and takes blocks when there is room."""
    host.WRITE_PAUSE_S = SlotFile.retry_s = 0.0
    (directory / "kv").mkdir()
    other = fill_disk(directory)
    tier = open_large(directory)
    again = open_large(directory)
    assert put(tier, NAMES[:2], FORM) == [False, False]
    assert tier.counters.errors > 0
    assert is_here(tier, NAMES[:2]) == [False, False]
    assert tier.read_usage().blocks == 0
    other.unlink()
    wait_for(lambda: put(tier, NAMES[:2], FORM) == [True, True], "there is room")
    assert read(again, NAMES[:2], FORM) == [content(name, FORM) for name in NAMES[:2]]
    assert tier.check_integrity() == []
    tier.close()
    again.close()


def main(directory: Path, what: str, tier: str, *rest: str) -> int:
    """Do what is said above; the status to end with."""
    if what == "die":
        return die(f"{tier}.{rest[0]}", int(rest[1]), partial(live, directory, tier))
    if what == "halt":
        return halt(f"{tier}.{rest[0]}", partial(live, directory, tier), directory)
    return work(directory, tier, int(rest[0]))


if __name__ == "__main__":
    {"turn": turn, "start": start, "wait": wait}[sys.argv[2]](Path(sys.argv[1]))
