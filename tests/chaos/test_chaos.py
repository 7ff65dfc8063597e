"""A short round on each bus: every worker dies again and again, and everything is answered, once, and right."""

from itertools import islice
from pathlib import Path

import pytest

from penstock.local.kafka import find_jars, find_java
from penstock.names import STAGES
from sim.chaos.faults import ANY_TIME, MISHAPS, MISHAPS_ON_KAFKA, Bus, fate_of, faults, mishaps, points_of
from sim.chaos.nursery import Nursery
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
