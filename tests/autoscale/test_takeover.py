"""Controllers that are killed, cut off and doubled: another one goes on, and no number swings."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import redis

from benchmarks.placement import SPEC
from penstock.autoscale.controller import Bounds, Controller, Seen
from penstock.autoscale.service import AutoscaleService
from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from penstock.ops import lag
from penstock.plan.placing import PlacedRequest
from penstock.worker.heartbeat import Heartbeat
from sim.growing import LOOK_S, GrowingSimulation
from tests.autoscale.fluid import TARGETS, count_reversals
from tests.autoscale.test_signals import beat

BEGUN_S, END_S = 130.0, 550.0
"""From when on controllers are disturbed, with a load that is constant, and until when."""
RATE = 9.0


class HandedOn(GrowingSimulation):
    """Controllers decide in turn; nobody does while none is there."""

    def __init__(self, away: Sequence[tuple[float, float]], *, is_other: bool, is_known: bool) -> None:
        """`away`: from when to when no controller decides; `is_other`: another one goes on then, without a look before,
        and `is_known`: with what the last one wrote down.
        """
        super().__init__(SPEC, TARGETS, Bounds(least=1, most=8), start_s=10.0, num_first=5)
        self._away, self._is_other, self._is_known = list(away), is_other, is_known
        self._is_first = False

    def _look(self) -> None:
        if self._away and self._away[0][0] <= self._now_s < self._away[0][1]:
            self._at(self._now_s + LOOK_S, self._look)
            return
        if self._away and self._now_s >= self._away[0][1]:
            self._away.pop(0)
            if self._is_other:
                state = json.loads(json.dumps(self._controller.export_state())) if self._is_known else None
                self._controller, self._is_first = Controller(TARGETS, Bounds(least=1, most=8), state), True
        super()._look()

    def _see(self, present: Sequence[object]) -> Seen:
        seen, is_first = super()._see(present), self._is_first  # type: ignore[arg-type]
        self._is_first = False
        return replace(seen, passed=None) if is_first else seen


@pytest.mark.parametrize(
    ("gap_s", "is_other", "is_known"),
    [
        pytest.param(20.0, True, True, id="killed, and another goes on once the lease is over"),
        pytest.param(75.0, True, False, id="killed for so long that what it knew is gone"),
        pytest.param(60.0, False, True, id="cut off for a minute"),
    ],
)
def test_a_constant_load_turns_no_number(gap_s: float, is_other: bool, is_known: bool) -> None:
    away = [(at_s, at_s + gap_s) for at_s in (BEGUN_S, BEGUN_S + 140.0, BEGUN_S + 280.0)]
    played = HandedOn(away, is_other=is_other, is_known=is_known).play_requests(make_requests(), END_S)
    numbers = [one for at_s, one in played.numbers if at_s <= BEGUN_S][-1:]
    numbers += [one for at_s, one in played.numbers if BEGUN_S < at_s < END_S]
    assert numbers[0] > 2, "of which some could go"
    assert count_reversals(numbers) <= 1
    assert all(after >= before - 1 for before, after in pairwise(numbers))
    in_time = [one.first_s - one.request.at_s <= TARGETS.ttft_s for one in played.outcomes]
    assert sum(in_time) > 0.95 * len(in_time)


def make_requests() -> list[PlacedRequest]:
    """Return requests of a Poisson process."""
    rng, at_s, found = random.Random(3), 0.0, list[PlacedRequest]()
    while (at_s := at_s + rng.expovariate(RATE)) < END_S:
        found.append(PlacedRequest(f"r{len(found)}", at_s, rng.randint(200, 4000), rng.randint(20, 150)))
    return found


# On a real Redis.


@pytest.fixture
def services(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AutoscaleService]]:
    """Two controllers of one pipeline, each look of which is new."""
    monkeypatch.setattr(lag, "MAX_AGE_S", 0.0)
    connect_bus(addresses, BusSettings()).create_topics()
    made = [AutoscaleService(addresses, BusSettings(), TARGETS, Bounds(least=1, most=8), 16) for _ in range(2)]
    yield made
    for one in made:
        one.close()


class PlayedWorkers:
    """Heartbeats of workers of kind `auto`."""

    def __init__(self, addresses: Addresses, client: "redis.Redis") -> None:
        self._addresses, self._client, self._pipeline = addresses, client, Pipeline(addresses.pipeline)

    def beat(self, *names: str) -> None:
        """Write a heartbeat of each."""
        for name in names:
            worker = Heartbeat(self._addresses.stream_url, self._pipeline, "auto", name, 60)
            told = {key: value for key, value in beat(name).items() if key not in ("stage", "name", "token", "since")}
            worker.update_status(**told, host="h", pid=1)
            worker.write_beat()

    def vanish(self, *names: str) -> None:
        """Let their heartbeats run out, as those of workers that are killed or cut off."""
        self._client.delete(*(self._pipeline.worker_key("auto", name) for name in names))

    def leave(self, *names: str) -> None:
        """Let them say goodbye."""
        self.vanish(*names)
        for name in names:
            self._client.set(self._pipeline.left_key("auto", name), 1)

    def forget_goodbyes(self, *names: str) -> None:
        """Let the minute pass for which Redis remembers a goodbye, and the lease of the one that decides."""
        self._client.delete(*(self._pipeline.left_key("auto", name) for name in names))

    def end_lease(self) -> None:
        """Let the one that decides be killed."""
        self._client.delete(self._pipeline.autoscale_lease_key)


@pytest.fixture
def workers(addresses: Addresses, redis_url: str) -> Iterator[PlayedWorkers]:
    with redis.Redis.from_url(redis_url) as client:
        yield PlayedWorkers(addresses, client)


def decide(service: AutoscaleService) -> int:
    told = service.look_and_decide()
    assert told is not None
    return int(told["workers"]["auto"])


def test_workers_that_vanish_while_no_controller_looks_are_expected_back(
    services: list[AutoscaleService], workers: PlayedWorkers
) -> None:
    """As after an outage of Redis in which the controller was killed, where one worker is back before the others."""
    one, other = services
    workers.beat(*"abcdef")
    assert decide(one) == 6
    workers.end_lease()
    workers.vanish(*"bcdef")
    assert decide(other) == 6


def test_workers_that_went_while_another_one_decided_are_not_expected_back(
    services: list[AutoscaleService], workers: PlayedWorkers
) -> None:
    one, other = services
    workers.beat(*"abcdef")
    assert decide(one) == 6
    workers.end_lease()
    assert decide(other) == 6
    workers.leave(*"bcdef")
    assert decide(other) == 1
    assert decide(one) == 1, "the other one's"
    workers.forget_goodbyes(*"bcdef")
    workers.end_lease()
    assert decide(one) == 1
