"""The simulated world: nothing is lost, doubled or wrong in some seeds, a seed repeats, and a planted flaw is found."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.worker.failure import UNWRITABLE
from sim.forked import fork_process
from sim.waiting import PATIENCE_S, wait_for
from sim.world.__main__ import INTERRUPTED, SIGNALS, main
from sim.world.flaws import FLAWS, Flaw, find_flaw
from sim.world.scene import Plan, Scene

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0"}
RunWorld = Callable[..., str]


@pytest.fixture
def run_world(tmp_path: Path) -> RunWorld:
    """Runs the world in a process of its own, as it replaces the clock and the threads of all modules."""

    def run_process(*words: str) -> str:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        child = fork_process("world", log, main, *words, environment=ENVIRONMENT)
        assert child.wait(PATIENCE_S) == 0, log.read_text()
        return log.read_text()

    return run_process


def test_nothing_is_lost_doubled_or_wrong(run_world: RunWorld) -> None:
    told = run_world("--seed", "1", "--seeds", "15", "--requests", "20")
    found = re.search(r"^[0-9]+ requests, ([0-9]+) kills, 0 findings,", told, re.MULTILINE)
    assert found is not None, told
    assert int(found[1]) > 0


@pytest.mark.parametrize(
    ("seed", "rates"),
    [
        pytest.param(1, ["gateways=1", "kill_s=3", "batches=0.2"], id="gateways"),
        pytest.param(2, ["gateways=0", "endpoint=0.3", "crash=0.003"], id="endpoints"),
        pytest.param(3, ["gateways=0", "endpoint=0", "bug=0.002", "hostile_s=1", "full_s=10", "slow=0.02"], id="bugs"),
        pytest.param(4, ["gateways=0", "endpoint=0", "wedge=0.002", "stall=0", "deadlines=0.5"], id="endless steps"),
        pytest.param(5, ["resize_s=0.5"], id="starts and stops"),
        pytest.param(6, ["pictures=0.8", "kv_loss=0.02", "wipe_s=10", "gateways=0", "endpoint=0"], id="pictures"),
    ],
)
def test_nothing_is_lost_doubled_or_wrong_with(run_world: RunWorld, seed: int, rates: list[str]) -> None:
    told = run_world("--seed", str(seed), "--seeds", "3", *(word for rate in rates for word in ("--rate", rate)))
    assert ", 0 findings," in told, told


def test_what_stays_is_in_its_tenants_topics_alone(run_world: RunWorld) -> None:
    told = run_world("--seed", "6", "--seeds", "3", "--level", "kafka", "--rate", "stays=0.5")
    assert ", 0 findings," in told, told


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--seed 77770020 --requests 31", id="a bug ends a line of a batch"),
        pytest.param("--seed 5 --level regions --rate gateways=1", id="an outage while a gateway asks who answers"),
        pytest.param("--seed 20002959 --level streams", id="a long prompt behind one whose reading never ends"),
        pytest.param(
            "--seed 5055 --rate bug=0.02 --rate gateways=0.6 --rate batches=0.3 --rate endpoint=0",
            id="a bug ends an answer that is not streamed",
        ),
    ],
)
def test_a_seed_that_once_found_something_finds_nothing(run_world: RunWorld, words: str) -> None:
    told = run_world(*words.split())
    assert ", 0 findings," in told, told


def test_only_errors_of_injected_exceptions_are_allowed() -> None:
    scene = Scene(Plan.draw(1, 0))
    assert scene.is_injected("InjectedError: ")
    assert not scene.is_injected("ZeroDivisionError: ")
    assert not scene.is_injected(UNWRITABLE), "none was injected yet"
    scene.history.append({"what": "bug"})
    assert scene.is_injected(UNWRITABLE)


def run_and_interrupt_as_it_forks(*words: str) -> None:
    """Run scenes, and get a signal as soon as their process was forked."""
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
    main(*words)


def test_a_run_that_is_told_to_end_as_it_forks_ends(tmp_path: Path) -> None:
    child = fork_process(
        "world", tmp_path / "log", run_and_interrupt_as_it_forks, "--seeds", "1000", environment=ENVIRONMENT
    )
    assert child.wait(PATIENCE_S) == INTERRUPTED


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_told_to_end_ends_with_its_process_of_scenes(tmp_path: Path, number: signal.Signals) -> None:
    child = fork_process("world", log := tmp_path / "log", main, "--seeds", "1000", environment=ENVIRONMENT)
    listed = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    wait_for(listed.read_text, "scenes run")
    scenes = Path(f"/proc/{listed.read_text().strip()}/stat")

    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            return ") Z " in scenes.read_text()
        return True

    child.send_signal(number)
    assert child.wait(PATIENCE_S) == INTERRUPTED
    assert re.search(r"^[0-9]+ requests, [0-9]+ kills, 0 findings,", log.read_text(), re.MULTILINE)
    wait_for(is_gone, "their process is gone")


def test_nothing_is_lost_or_seen_otherwise_when_a_region_dies_and_is_adopted(run_world: RunWorld) -> None:
    told = run_world("--seed", "6", "--requests", "5", "--level", "regions", "--history")
    assert ", 0 findings," in told, told
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert [one["how"] for one in events if one["what"] == "region lost"][:1] == ["dies"]
    assert [one["order"] for one in events if one["what"] == "order done"][:1] == ["adopt"]


def test_a_picture_is_gone_where_its_region_is_adopted_and_right_else(run_world: RunWorld) -> None:
    told = run_world(
        "--seed", "4", "--seeds", "2", "--level", "regions", "--rate", "gateways=0", "--rate", "pictures=1"
    )
    assert ", 0 findings," in told, told


def test_nothing_is_found_over_redis_streams(run_world: RunWorld) -> None:
    told = run_world("--seed", "1", "--seeds", "2", "--requests", "12", "--level", "streams")
    assert "24 requests" in told, told
    assert ", 0 findings," in told, told


@pytest.mark.parametrize("level", ["fast", "kafka", "regions"])
def test_a_seed_repeats(run_world: RunWorld, level: str) -> None:
    rates = [] if level != "fast" else ["--rate", "gateways=0.5", "--rate", "kill_s=2"]
    requests = "15" if level != "regions" else "4"
    first, second = (run_world("--seed", "5", "--requests", requests, "--level", level, *rates) for _ in range(2))
    histories = [[line for line in told.splitlines() if line.startswith("seed 5:")] for told in (first, second)]
    assert len(histories[0]) == 1, first
    assert histories[0] == histories[1], "the same history"
    assert ", 0 findings," in first, first


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.name)
def test_each_flaw_has_its_place(flaw: Flaw) -> None:
    assert (ROOT / flaw.file).read_text().count(flaw.before) == 1


def test_a_planted_flaw_is_found() -> None:
    flaw = next(one for one in FLAWS if one.name == "the log is not read")
    seed, found, _ = find_flaw(flaw, ROOT, seeds=20)
    assert seed is not None
    assert found.startswith(("diverged", "wrong"))  # other tokens than another reader's, or the model's
