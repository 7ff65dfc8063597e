"""A process that works on an arena, as tests tell it: `python -m tests.kvstore.arena_child DIRECTORY WHAT …`.

`die STEP N`: does all that an arena can do, over and over, until it has come to the step N times, and is killed there.
`halt STEP`: the same, but it stands still there until it is killed, and says so by making the file `halted`.
`work SEED`: puts and gets blocks of a few names, and ends with the number of wrong ones as its status.
"""

import random
import sys
from functools import partial
from pathlib import Path

from penstock.kvstore.tiers.shared import SharedTier

from penstock.kvstore.arena.layout import W_DIRTY, Geometry
from penstock.kvstore.block import BlockKey
from tests.kvstore.blocks import PAYLOAD_BYTES, TAG, block, content, is_here, keys_of, make_form, put, read
from tests.kvstore.children import die, halt

FORM = make_form("a model that dies")
NAMES = [BlockKey(random.Random(number).randbytes(32), 16, TAG) for number in range(24)]
NUM_SLOTS = 8


def open_tier(directory: Path, num_slots: int = NUM_SLOTS) -> SharedTier:
    """The arena that all these processes and their test share."""
    return SharedTier.open(FORM, "demo", Geometry(PAYLOAD_BYTES, num_slots).total_bytes, str(directory))


def live(directory: Path) -> None:
    """Pass every step: the arena is full, so that blocks are evicted; some leases stay and some end; some blocks go."""
    tier = open_tier(directory)
    for turn in range(1000):
        some = random.Random(turn).sample(NAMES, 4)
        put(tier, some, FORM)
        tier.lease_blocks("a job", keys_of(some[:2]), 600)
        tier.lease_blocks("another", keys_of(some[1:3]), 600)
        read(tier, some, FORM)
        tier.put([block(some[0], FORM), block(NAMES[turn % 24], FORM, lambda: False)])
        tier.release_leases("another", keys_of(some[1:3]))
        tier.remove_blocks(keys_of(some[3:]))
        tier.arena.tables.words[W_DIRTY] = turn % 5 == 4
        is_here(tier, some)
        if turn % 5 == 4:
            tier.release_leases("a job", keys_of(NAMES))


def work(directory: Path, seed: int) -> int:
    """Write and read with others; how many blocks were read wrong."""
    tier, rng, num_wrong, num_hits = open_tier(directory), random.Random(seed), 0, 0
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
    return num_wrong + tier.counters.damaged


def main(directory: Path, what: str, *rest: str) -> int:
    """Do what is said above; the status to end with."""
    if what == "die":
        return die(rest[0], int(rest[1]), partial(live, directory))
    if what == "halt":
        return halt(rest[0], partial(live, directory), directory)
    return work(directory, int(rest[0]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
