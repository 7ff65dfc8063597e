"""A process may die at any step: the next one finds a sound arena, and goes on."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from penstock.kvstore.tiers.shared import SharedTier

from penstock import failpoints
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.file import find_arenas, remove_arena
from penstock.kvstore.arena.layout import W_DIRTY, WRITING
from penstock.local.processes import Child
from tests.kvstore import children
from tests.kvstore.arena_child import FORM, NAMES, NUM_SLOTS, main, open_tier
from tests.kvstore.blocks import content, is_here, keys_of, put, read

start = partial(children.start, main)


def check_sound(tier: SharedTier) -> None:
    """The arena agrees with itself, nothing is lost, every block in it is right, and it can be filled with others."""
    tier.arena.reclaim_stale()
    assert check_integrity(tier.arena) == []
    assert WRITING not in tier.arena.tables.state.tolist()
    found = read(tier, NAMES, FORM)
    assert all(got in (None, content(name, FORM)) for name, got in zip(NAMES, found, strict=True))
    assert tier.counters.damaged == 0
    for owner in ("a job", "another"):
        tier.release_leases(owner, keys_of(NAMES))
    assert tier.read_usage().leased == 0
    for name in NAMES:
        assert put(tier, [name], FORM) == [True]
    assert sum(is_here(tier, NAMES)) == tier.read_usage().blocks == NUM_SLOTS
    assert tier.counters.refused == 0
    assert check_integrity(tier.arena) == []


ONCE = [step for step in failpoints.SHARED if step.startswith(("shared.open", "shared.allocate"))]
DEATHS = [(step, 1) for step in failpoints.SHARED] + [(step, 7) for step in failpoints.SHARED if step not in ONCE]


@pytest.mark.parametrize(("step", "times"), DEATHS)
def test_killed_at_a_step(tmp_path: Path, step: str, times: int) -> None:
    child = start(tmp_path, "die", step, str(times))
    assert child.wait(60) == -9, child.read_log_tail()
    tier = open_tier(tmp_path)
    check_sound(tier)
    tier.close()
    (arena,) = find_arenas(str(tmp_path))
    assert not arena.is_in_use
    assert remove_arena(arena.path)


@pytest.mark.parametrize(
    "step",
    [
        "shared.put.1.2",
        "shared.put.2",
        "shared.put.5.1",
        "shared.forget.1",
        "shared.lease.1",
        "shared.rebuild.2",
        "shared.allocate.2",
    ],
)
def test_killed_while_another_one_has_it_open(tmp_path: Path, step: str) -> None:
    """Who has the arena open all the time goes on too, without opening it again."""
    tier = open_tier(tmp_path) if step != "shared.allocate.2" else None
    assert start(tmp_path, "die", step, "1").wait(60) == -9
    tier = tier or open_tier(tmp_path)
    check_sound(tier)
    tier.close()


@pytest.fixture
def halted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    with children.halted(main, tmp_path, request.param) as child:
        yield child


@pytest.mark.parametrize("halted", ["shared.put.5.1"], indirect=True)
def test_the_lock_of_a_dead_owner_is_free(tmp_path: Path, halted: Child) -> None:
    """It stands still with the lock in its hands, and the tables half changed; who waits goes on when it dies."""
    found: list[SharedTier] = []
    opener = threading.Thread(target=lambda: found.append(open_tier(tmp_path)))
    opener.start()
    opener.join(0.2)
    assert opener.is_alive(), "it waits for the lock"
    halted.kill()
    opener.join(30)
    check_sound(found[0])
    found[0].close()


@pytest.mark.parametrize("halted", ["shared.put.2"], indirect=True)
def test_slots_of_the_living_are_left_alone(tmp_path: Path, halted: Child) -> None:
    """While it writes, nobody takes its slots, however wanted room is; when it is dead, somebody does."""
    tier = open_tier(tmp_path)
    tables = tier.arena.tables
    being_written = [slot for slot in range(NUM_SLOTS) if tables.state[slot] == WRITING]
    assert being_written
    for name in NAMES:
        put(tier, [name], FORM)
    assert [slot for slot in range(NUM_SLOTS) if tables.state[slot] == WRITING] == being_written
    assert check_integrity(tier.arena) == []
    halted.kill()
    assert check_integrity(tier.arena) != []
    check_sound(tier)
    tier.close()


def test_readers_and_writers_at_once(tmp_path: Path) -> None:
    """Two that write and two that read, on an arena much smaller than what they want; every byte read is checked."""
    tier = open_tier(tmp_path)
    workers = [start(tmp_path, "work", str(seed)) for seed in range(4)]
    assert [child.wait(120) for child in workers] == [0] * 4
    assert tier.arena.tables.words[W_DIRTY] == 0
    check_sound(tier)
    tier.close()


def test_killed_again_and_again_while_others_work(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    workers = [start(tmp_path, "work", str(seed)) for seed in range(2)]
    for step in ("shared.put.5.2", "shared.put.2", "shared.lease.1", "shared.forget.2"):
        assert start(tmp_path, "die", step, "3").wait(60) == -9
        assert [wrong for wrong in check_integrity(tier.arena) if "is dead" not in wrong] == []
    assert [child.wait(120) for child in workers] == [0] * 2
    check_sound(tier)
    tier.close()
