"""The simulated world: nothing is lost, doubled or wrong in some seeds, a seed repeats, and a planted flaw is found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sim.world.flaws import FLAWS, Flaw, find_flaw

ROOT = Path(__file__).parents[1]


def run_world(*arguments: str) -> str:
    """Run the world in a process of its own, as it replaces the clock and the threads of all modules."""
    command = [sys.executable, "-m", "sim.world", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_nothing_is_lost_doubled_or_wrong() -> None:
    told = run_world("--seed", "1", "--seeds", "15", "--requests", "20")
    found = re.search(r"^300 requests, ([0-9]+) kills, 0 findings,", told, re.MULTILINE)
    assert found is not None, told
    assert int(found[1]) > 0


def test_nothing_is_found_over_redis_streams() -> None:
    told = run_world("--seed", "1", "--seeds", "2", "--requests", "12", "--level", "streams")
    assert "24 requests" in told, told
    assert ", 0 findings," in told, told


@pytest.mark.parametrize("level", ["fast", "kafka"])
def test_a_seed_repeats(level: str) -> None:
    first, second = (run_world("--seed", "5", "--requests", "15", "--level", level) for _ in range(2))
    assert first.splitlines()[0] == second.splitlines()[0], "the same history"
    assert ", 0 findings," in first, first


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.name)
def test_each_flaw_has_its_place(flaw: Flaw) -> None:
    assert (ROOT / flaw.file).read_text().count(flaw.before) == 1


@pytest.mark.full
def test_a_planted_flaw_is_found() -> None:
    flaw = next(one for one in FLAWS if one.name == "the log is not read")
    seed, found, _ = find_flaw(flaw, ROOT, seconds=600.0)
    assert seed is not None
    assert "diverged" in found
