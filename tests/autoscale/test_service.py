"""One of many controllers decides, on a real Redis, with workers that the test plays."""

import json
import threading
from collections.abc import Iterator

import pytest
import redis

from penstock.autoscale.controller import Bounds
from penstock.autoscale.service import LOOK_AT_ZERO_S, LOOK_S, AutoscaleService
from penstock.bus.connect import connect_bus
from penstock.cli.autoscale import parse_bounds
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError
from penstock.names import Pipeline
from penstock.ops.live import LiveWatch
from penstock.worker.heartbeat import Heartbeat
from tests.autoscale.fluid import TARGETS
from tests.autoscale.test_signals import beat


@pytest.fixture
def services(addresses: Addresses) -> Iterator[list[AutoscaleService]]:
    """Two controllers of one pipeline."""
    connect_bus(addresses, BusSettings()).create_topics()
    made = [AutoscaleService(addresses, BusSettings(), TARGETS, Bounds(least=1, most=6), 16) for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


def write_beats(addresses: Addresses, *names: str) -> None:
    """Let workers of kind `auto` write a heartbeat each."""
    for name in names:
        worker = Heartbeat(addresses.stream_url, Pipeline(addresses.pipeline), "auto", name, 60)
        told = {key: value for key, value in beat(name).items() if key not in ("stage", "name", "token", "since")}
        worker.update_status(**told, host="h", pid=1)
        worker.write_beat()


def run_out(client: "redis.Redis", pipeline: Pipeline) -> None:
    """Let the lease end, as time would."""
    client.delete(pipeline.autoscale_lease_key)


def test_one_decides_and_all_tell_the_same(
    addresses: Addresses, services: list[AutoscaleService], client: "redis.Redis", pipeline: Pipeline
) -> None:
    one, other = services
    assert other.look_and_decide() is not None
    told = one.look_and_decide()
    assert told is not None
    assert told["workers"] == {"auto": 1, "prefill": 0, "decode": 0}, "as many as are asked for at least"
    live = LiveWatch(addresses, BusSettings()).read_latest()["scaling"]
    assert live == {name: value for name, value in told.items() if name != "state"}
    holder = client.get(pipeline.autoscale_lease_key)
    other.look_and_decide()
    assert client.get(pipeline.autoscale_lease_key) == holder


def test_where_one_was_killed_another_goes_on_with_what_it_knew(
    addresses: Addresses, services: list[AutoscaleService], client: "redis.Redis", pipeline: Pipeline
) -> None:
    one, other = services
    write_beats(addresses, "a", "b", "c")
    first = one.look_and_decide()
    assert first is not None
    assert first["workers"]["auto"] == 3, "what there is, as nothing is known of the load"
    run_out(client, pipeline)
    second = other.look_and_decide()
    assert second is not None
    assert second["workers"] == first["workers"]
    assert second["state"]["kinds"]["auto"]["ready"] == ["a", "b", "c"]


def test_what_another_version_has_written_is_begun_anew(
    services: list[AutoscaleService], client: "redis.Redis", pipeline: Pipeline
) -> None:
    client.set(pipeline.autoscale_key, json.dumps({"state": {"kinds": {"auto": {"novel": 1}}, "passed": [[1.0]]}}))
    told = services[0].look_and_decide()
    assert told is not None
    assert told["workers"]["auto"] == 1


def test_one_that_was_cut_off_in_the_middle_tells_nothing(
    addresses: Addresses,
    services: list[AutoscaleService],
    client: "redis.Redis",
    pipeline: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = services
    write_beats(addresses, "a")
    real = one._watch.read_latest

    def cut_off() -> object:
        found = real()
        run_out(client, pipeline)
        write_beats(addresses, "b", "c")
        assert other.look_and_decide() is not None
        return found

    monkeypatch.setattr(one._watch, "read_latest", cut_off)
    told = one.look_and_decide()
    assert told is not None
    assert told["workers"]["auto"] == 3, "the other one's"
    stored = client.get(pipeline.autoscale_key)
    assert stored is not None
    assert json.loads(stored)["workers"]["auto"] == 3
    monkeypatch.undo()
    assert one.look_and_decide() == json.loads(stored), "it follows"


def test_at_zero_an_arrival_wakes_it(addresses: Addresses, pipeline: Pipeline, client: "redis.Redis") -> None:
    bus = connect_bus(addresses, BusSettings())
    bus.create_topics()
    service = AutoscaleService(addresses, BusSettings(), TARGETS, Bounds(zero_after_s=0.0), 16)
    numbers = list[int]()

    def follow_decision(told: dict[str, dict[str, int]]) -> None:
        numbers.append(told["workers"]["auto"])
        if len(numbers) == 2:  # the first look has no past
            client.xadd(pipeline.stream_key(pipeline.request_topic("interactive")), {"x": "x"})

    service.run_until_stopped(lambda left_s: len(numbers) == 3 or threading.Event().wait(left_s), follow_decision)
    service.close()
    assert numbers == [0, 0, 1]


def test_between_looks_it_waits_for_its_stop_alone(addresses: Addresses, services: list[AutoscaleService]) -> None:
    waited, decided = list[float](), list[object]()

    def wait(left_s: float) -> bool:
        waited.append(left_s)
        return left_s > 0.0 or len(decided) == 1

    write_beats(addresses, "a")
    services[0].run_until_stopped(wait, decided.append)
    assert len(decided) == 1, "once it is stopped it looks no more"
    begin, between, end = waited
    assert begin == end == 0.0
    assert LOOK_AT_ZERO_S < between <= LOOK_S, "one wait for all of the time until the next look"


@pytest.mark.parametrize("text", ["", "3", "a..b", "-1..2", "4..2", "0..0"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"MIN\.\.MAX|MAX is"):
        parse_bounds(text)
    assert parse_bounds("0..") == Bounds(0, None)
    assert parse_bounds("1..6") == Bounds(1, 6)
