"""A short round on each bus: every worker dies again and again, and everything is answered, once, and right."""

from itertools import islice
from pathlib import Path

import pytest

from penstock.names import STAGES, WorkerKind
from sim.chaos.clients import Load
from sim.chaos.faults import (
    ANY_TIME,
    KAFKA_FAULTS,
    SYSTEM_FAULTS,
    Bus,
    generate_faults,
    generate_reply_faults,
    generate_system_faults,
    list_failpoints,
    plan_kill,
)
from sim.chaos.runner import ChaosRound, run_round
from sim.kafka_server import find_jars, find_java
from sim.servers import start_or_skip
from sim.waiting import PATIENCE_S

BUSES: tuple[Bus, ...] = ("embedded", "kafka")


def needs(bus: Bus) -> None:
    if bus == "kafka":
        start_or_skip(find_java)
        start_or_skip(find_jars)


@pytest.mark.parametrize(
    ("bus", "load", "kills", "decode"),
    [
        ("embedded", "forms", 12, 3),
        ("embedded", "states", 12, 3),
        ("embedded", "endpoint", 12, 3),
        ("embedded", "agents", 12, 3),
        # The slowest bus, and all that a request of text does.
        pytest.param("kafka", "tools", 4, 2, marks=pytest.mark.proof),
    ],
)
def test_nothing_is_lost_doubled_or_wrong(bus: Bus, load: Load, kills: int, decode: int, tmp_path: Path) -> None:
    needs(bus)
    plan = ChaosRound(
        seed=7, bus=bus, seconds=PATIENCE_S, kills=kills, prefill=decode - 1, decode=decode, num_in_flight=4 * decode,
        load=load,
    )  # fmt: skip
    outcome = run_round(plan, tmp_path / "round")
    assert outcome.findings == []
    assert {process for process, _ in outcome.counts.kills} >= ({"endpoint"} if load == "endpoint" else set(STAGES))
    assert sum(count for (_, step), count in outcome.counts.kills.items() if step != ANY_TIME) > 0


def test_a_seed_says_what_happens() -> None:
    def list_plans(seed: int) -> list[object]:
        workers = ["prefill-0", "decode-0"]
        plans = [plan_kill(seed, "kafka", "decode", "decode-0", life) for life in range(50)]
        return [
            *plans,
            *islice(generate_faults(seed, "kafka", workers), 50),
            *islice(generate_system_faults(seed, "kafka"), 50),
            *islice(generate_reply_faults(seed, 10), 50),
        ]

    assert list_plans(3) == list_plans(3)
    assert list_plans(3) != list_plans(4)


@pytest.mark.parametrize("bus", BUSES)
@pytest.mark.parametrize("kind", [*STAGES, "auto", "endpoint", "embed"])
def test_every_point_has_its_turn(bus: Bus, kind: WorkerKind) -> None:
    plans = {plan_kill(1, bus, kind, f"{kind}-0", life).point for life in range(200)}
    assert plans == {*list_failpoints(kind, bus), ANY_TIME}


@pytest.mark.parametrize("bus", BUSES)
def test_every_mishap_has_its_turn(bus: Bus) -> None:
    kinds = {*SYSTEM_FAULTS, *(KAFKA_FAULTS if bus == "kafka" else ())}
    assert {fault.what for fault in islice(generate_system_faults(1, bus), 3 * len(kinds))} == {*kinds, "burst"}
