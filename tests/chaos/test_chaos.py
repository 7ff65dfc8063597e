"""A short round on each bus: every worker dies again and again, and everything is answered, once, and right."""

from itertools import islice
from pathlib import Path

import pytest

from penstock.local.kafka import find_jars, find_java
from penstock.names import STAGES
from sim.chaos.faults import ANY_TIME, MISHAPS, MISHAPS_ON_KAFKA, Bus, fate_of, faults, mishaps, points_of
from sim.chaos.nursery import Nursery
from sim.chaos.recovery import Plan, measured
from sim.chaos.runner import Round, run
from sim.servers import started

pytestmark = pytest.mark.timeout(300)
BUSES: tuple[Bus, ...] = ("embedded", "kafka")


def needs(bus: Bus) -> None:
    if bus == "kafka":
        started(find_java)
        started(find_jars)


@pytest.mark.parametrize("bus", BUSES)
def test_nothing_is_lost_doubled_or_wrong(bus: Bus, nursery: Nursery, tmp_path: Path) -> None:
    needs(bus)
    plan = Round(seed=7, bus=bus, seconds=20.0, kills=12, prefill=2, decode=3, under_way=12)
    outcome = run(plan, tmp_path / "round", nursery)
    assert outcome.findings == []
    assert {process for process, _ in outcome.toll.kills} >= set(STAGES)
    assert sum(count for (_, step), count in outcome.toll.kills.items() if step != ANY_TIME) > 0


@pytest.mark.thorough  # a figure of `benchmarks.chaos`
def test_streams_of_a_dead_worker_go_on_soon(nursery: Nursery, tmp_path: Path) -> None:
    """Far sooner than any bus would give the work to another; what it takes on a quiet machine is a benchmark."""
    plan = Plan(waves=1, kills=1, streams=12, length=150)
    with measured("embedded", tmp_path / "recovery", nursery, plan) as found:
        assert found.seconds
    assert found.findings == []
    assert found.kills == 1
    assert found.quantile(0.5) < 6.0


def test_a_seed_says_what_happens() -> None:
    def said(seed: int) -> list[object]:
        workers = ["prefill-0", "decode-0"]
        fates = [fate_of(seed, "kafka", "decode", "decode-0", life) for life in range(50)]
        return [*fates, *islice(faults(seed, "kafka", workers), 50), *islice(mishaps(seed, "kafka"), 50)]

    assert said(3) == said(3)
    assert said(3) != said(4)


@pytest.mark.parametrize("bus", BUSES)
@pytest.mark.parametrize("stage", STAGES)
def test_every_point_has_its_turn(bus: Bus, stage: str) -> None:
    kind = next(known for known in STAGES if known == stage)
    fates = {fate_of(1, bus, kind, f"{stage}-0", life).point for life in range(200)}
    assert fates == {*points_of(kind, bus), ANY_TIME}


@pytest.mark.parametrize("bus", BUSES)
def test_every_mishap_has_its_turn(bus: Bus) -> None:
    kinds = {*MISHAPS, *(MISHAPS_ON_KAFKA if bus == "kafka" else ())}
    assert {fault.what for fault in islice(mishaps(1, bus), 3 * len(kinds))} == {*kinds, "burst"}
