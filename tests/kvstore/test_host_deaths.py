"""A process may die at any step: the next one finds a sound arena in memory or on disk, and goes on."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.layout import WRITING
from penstock.kvstore.tiers.host import HostTier
from penstock.local.processes import Child
from sim.waiting import PATIENCE_S
from tests.draws import draw_cases
from tests.kvstore import children
from tests.kvstore.blocks import content, is_here, keys_of, put, read
from tests.kvstore.host_child import FORM, NAMES, NUM_SLOTS, main, open_tier
from tests.kvstore.places import wait_until_mapped

TIERS = ["shared", "disk"]
start = partial(children.start, main)


def check_sound(tier: HostTier, *, max_damaged: int = 0) -> None:
    """The arena agrees with itself, nothing is lost, every block in it is right, and it can be filled with others."""
    tier.arena.reclaim_stale()
    assert check_integrity(tier.arena) == []
    assert WRITING not in tier.arena.tables.state.tolist()
    found = read(tier, NAMES, FORM)
    assert all(got in (None, content(name, FORM)) for name, got in zip(NAMES, found, strict=True))
    assert tier.counters.damaged <= max_damaged
    for owner in ("a job", "another"):
        tier.release_leases(owner, keys_of(NAMES))
    assert tier.read_usage().leased == 0
    for name in NAMES:
        assert put(tier, [name], FORM) == [True]
    assert sum(is_here(tier, NAMES)) == tier.read_usage().blocks == NUM_SLOTS
    assert (tier.counters.refused, tier.counters.errors) == (0, 0)
    assert check_integrity(tier.arena) == []


def is_half_removed(tier: str, step: str) -> bool:
    """Whether a block on disk may have lost its header, and be in the tables still."""
    return tier == "disk" and step in ("remove.1", "forget.1")


STEPS = [tuple(point.split(".", 1)) for point in failpoints.SHARED + failpoints.DISK]
DEATHS = [pytest.param(tier, step, 1, marks=[pytest.mark.proof] if step == "put.2" else []) for tier, step in STEPS]
DEATHS += [pytest.param(tier, step, 7) for tier, step in STEPS if not step.startswith(("open", "allocate"))]
DRAWN = draw_cases(DEATHS, 40)


@pytest.mark.parametrize(("tier", "step", "times"), [one for one in DEATHS if one.marks or one in DRAWN])
def test_killed_at_a_step(tmp_path: Path, tier: str, step: str, times: int) -> None:
    child = start(tmp_path, "die", tier, step, str(times))
    assert child.wait(PATIENCE_S) == -9, child.read_log_tail()
    opened = open_tier(tmp_path, tier)
    assert wait_until_mapped(opened, PATIENCE_S)
    check_sound(opened, max_damaged=is_half_removed(tier, step))
    opened.close()


@pytest.mark.parametrize("step", [step for tier, step in STEPS if tier == "disk"])
def test_the_tables_of_a_disk_are_lost(tmp_path: Path, step: str) -> None:
    """As when the host is started anew: every block whose header is there is whole."""
    child = start(tmp_path, "die", "disk", step, "2" if step.startswith(("put", "get", "forget")) else "1")
    assert child.wait(PATIENCE_S) == -9, child.read_log_tail()
    for path in tmp_path.glob("penstock-kvdisk-*"):
        path.unlink()
    opened = open_tier(tmp_path, "disk")
    assert wait_until_mapped(opened, PATIENCE_S)
    assert opened.check_integrity() == []
    check_sound(opened)
    opened.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("step", ["put.1.2", "put.2", "put.5.1", "forget.1", "lease.1", "rebuild.2", "allocate.2"])
def test_killed_while_another_one_has_it_open(tmp_path: Path, tier: str, step: str) -> None:
    """Who has the arena open all the time goes on too, without opening it again."""
    opened = open_tier(tmp_path, tier) if step != "allocate.2" else None
    assert start(tmp_path, "die", tier, step, "1").wait(PATIENCE_S) == -9
    opened = opened or open_tier(tmp_path, tier)
    check_sound(opened, max_damaged=is_half_removed(tier, step))
    opened.close()


@pytest.fixture
def halted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    with children.halted(main, tmp_path, *request.param) as child:
        yield child


@pytest.mark.parametrize(("halted", "which"), [((tier, "put.5.1"), tier) for tier in TIERS], indirect=["halted"])
def test_the_lock_of_a_dead_owner_is_free(tmp_path: Path, halted: Child, which: str) -> None:
    """It stands still with the lock in its hands, and the tables half changed; who waits goes on when it dies."""
    found: list[HostTier] = []
    opener = threading.Thread(target=lambda: found.append(open_tier(tmp_path, which)))
    opener.start()
    opener.join(0.2)
    assert opener.is_alive(), "it waits for the lock"
    halted.kill()
    opener.join(PATIENCE_S)
    check_sound(found[0])
    found[0].close()


@pytest.mark.parametrize(("halted", "which"), [((tier, "put.2"), tier) for tier in TIERS], indirect=["halted"])
def test_slots_of_the_living_are_left_alone(tmp_path: Path, halted: Child, which: str) -> None:
    """While it writes, nobody takes its slots, however wanted room is; when it is dead, somebody does."""
    tier = open_tier(tmp_path, which)
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


@pytest.mark.parametrize("which", TIERS)
def test_killed_again_and_again_while_others_work(tmp_path: Path, which: str) -> None:
    tier = open_tier(tmp_path, which)
    workers = [start(tmp_path, "work", which, str(seed)) for seed in range(2)]
    for step in ("put.5.2", "put.2", "lease.1", "forget.2"):
        assert start(tmp_path, "die", which, step, "3").wait(PATIENCE_S) == -9
        assert [wrong for wrong in check_integrity(tier.arena) if "is dead" not in wrong] == []
    assert [child.wait(PATIENCE_S) for child in workers] == [0] * 2
    check_sound(tier)
    tier.close()
