"""Metering: exact, whoever is killed where, and however many count at once."""

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Outgoing
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.ingest import leased_reader, metering
from penstock.ingest.metering import UsageMeter, UsageSums, list_last_days, make_day_keys, parse_day_sums, utc_day
from penstock.local.processes import Child
from penstock.messages import Result, Timings, Usage, now_s
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.forked import fork_process
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.ingest import meter_process


class PublishedResults:
    """A pipeline whose results are made up here."""

    def __init__(self, pipeline: Pipeline, kafka: str, redis_url: str) -> None:
        self.pipeline, self.random = pipeline, random.Random(7)
        self.addresses = Addresses(kafka=kafka, stream_url=redis_url, pipeline=pipeline.name)
        self.bus: Bus = connect_bus(self.addresses, BusSettings(partitions=2))
        self.bus.create_topics()
        self.client: redis.Redis = redis_client(redis_url)
        self.publisher = self.bus.create_publisher()
        self.used: dict[str, UsageSums] = {}
        self.sent: list[bytes] = []

    def publish(self, count: int) -> None:
        """Results of three tenants, and what they used."""
        made: list[Outgoing] = []
        for _ in range(count):
            tenant = self.random.choice(("acme", "b.c-d", "default"))
            prompt = self.random.randrange(1000)
            cached, output = self.random.randint(0, prompt), self.random.randrange(500)
            usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
            name = f"r{len(self.sent)}"
            timings = Timings(finished=now_s())
            result = Result(id=name, tenant=tenant, finish_reason="stop", usage=usage, timings=timings)
            made.append(Outgoing(self.pipeline.results_topic, result.encode(), name))
            self.sent.append(result.encode())
            so_far = self.used.get(tenant, UsageSums())
            self.used[tenant] = metering.add_sums([so_far, UsageSums(1, prompt - cached, cached, output)])
        self.publisher.publish(made)

    def read_sums(self) -> dict[str, UsageSums]:
        """What was counted, today or, near midnight, yesterday."""
        found: dict[str, UsageSums] = {}
        for key in make_day_keys(self.pipeline, list_last_days(2)):
            for tenant, sums in parse_day_sums(self.client.hgetall(key)).items():  # type: ignore[arg-type]
                found[tenant] = metering.add_sums([found.get(tenant, UsageSums()), sums])
        return found

    def read_ends(self) -> dict[bytes, bytes]:
        """The offset of the last result in each part of the topic."""
        ends: dict[bytes, bytes] = {}
        num_left = len(self.bus.read_all(self.pipeline.results_topic))
        with closing(self.bus.follow_topic(self.pipeline.results_topic, {})) as follower:
            while num_left:
                for found in follower.read_messages(0.3):
                    ends[found.partition.encode()] = found.offset.encode()
                    num_left -= 1
        return ends

    def free_lease(self) -> None:
        """As if its time had run out."""
        self.client.delete(self.pipeline.meter_key("reader"))


@pytest.fixture(params=["streams", "kafka"])
def results(request: pytest.FixtureRequest, pipeline: Pipeline, redis_url: str) -> Iterator[PublishedResults]:
    kafka = request.getfixturevalue("kafka") if request.param == "kafka" else ""
    made = PublishedResults(pipeline, kafka, redis_url)
    yield made
    made.publisher.close()
    made.client.close()


def count_all(results: PublishedResults, meter: UsageMeter | None = None) -> None:
    """Let a meter, by default a new one, count until there is nothing more."""
    if meter is None:
        with closing(UsageMeter(results.addresses, BusSettings())) as made:
            return count_all(results, made)
    results.free_lease()
    ends, places = results.read_ends(), results.pipeline.meter_key("places")
    wait_for(
        lambda: meter.count_once(0.3) is not None and results.client.hgetall(places) == ends, "nothing more to count"
    )
    return None


def start(results: PublishedResults, tmp_path: Path, name: str, order: str = "") -> Child:
    addresses = {"KAFKA": results.addresses.kafka, "STREAM_URL": results.addresses.stream_url}
    own = {f"PENSTOCK_{key}": value for key, value in addresses.items()}
    own |= {"PENSTOCK_PIPELINE": results.pipeline.name, "PENSTOCK_FAILPOINTS": order}
    return fork_process(name, tmp_path / f"{name}.log", meter_process.main, environment=os.environ | own)


@pytest.mark.proof
def test_killed_at_every_step_and_counted_exactly(results: PublishedResults, tmp_path: Path) -> None:
    orders = ["meter.1.read=kill@2", "meter.2.counted=kill@2"]
    for number, order in enumerate(orders):
        results.publish(500)
        results.free_lease()
        child = start(results, tmp_path, f"meter-{number}", order)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL, child.read_log_tail()
    results.publish(200)
    again = [Outgoing(results.pipeline.results_topic, value, json.loads(value)["id"]) for value in results.sent[-150:]]
    results.publisher.publish([*again, Outgoing(results.pipeline.results_topic, b"no result")])
    count_all(results)
    assert results.read_sums() == results.used


def test_two_that_count_at_once_count_once(results: PublishedResults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither knows of the other: each holds the lease when it looks."""
    monkeypatch.setattr(leased_reader, "LEASE_S", 600.0)
    results.publish(900)
    meters = [UsageMeter(results.addresses, BusSettings()), UsageMeter(results.addresses, BusSettings())]

    def both() -> bool:
        found = []
        for meter in meters:
            results.free_lease()
            found.append(meter.count_once(0.3))
        return found == [0, 0] and sum(sums.requests for sums in results.read_sums().values()) == 900

    wait_for(both, "nothing more to count")
    assert results.read_sums() == results.used
    assert meters[0].count_once(0) is None  # the other one has the lease
    for meter in meters:
        meter.close()


def test_lost_sums_are_counted_again_with_their_places(results: PublishedResults) -> None:
    results.publish(50)
    count_all(results, meter := UsageMeter(results.addresses, BusSettings()))
    for name in ("places", "seen", f"day:{utc_day(now_s())}"):
        results.client.delete(results.pipeline.meter_key(name))
    results.publish(10)
    count_all(results, meter)  # its place is not the stored one: it reads again
    count_all(results, meter)
    meter.close()
    assert results.read_sums() == results.used


def test_the_window_is_bounded(results: PublishedResults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "MAX_SEEN_IDS", 20)
    results.publish(100)
    count_all(results)
    assert results.client.zcard(results.pipeline.meter_key("seen")) == 20


@pytest.mark.parametrize("results", ["kafka"], indirect=True)
def test_a_log_that_lost_its_end_is_not_counted_again(results: PublishedResults) -> None:
    results.publish(50)
    count_all(results)
    places = results.pipeline.meter_key("places")
    stored = results.client.hgetall(places)
    results.client.hset(places, mapping={part: int(offset) + 1000 for part, offset in stored.items()})
    results.client.delete(results.pipeline.meter_key("seen"))  # longer ago than the window
    results.free_lease()
    meter = UsageMeter(results.addresses, BusSettings())
    wait_for(lambda: meter.count_once(0.3) is not None and results.client.hgetall(places) == stored, "the logs' ends")
    results.publish(10)
    count_all(results, meter)
    meter.close()
    assert results.read_sums() == results.used


@pytest.mark.parametrize("results", ["streams"], indirect=True)
def test_a_result_that_cannot_be_does_not_stop_the_counting(results: PublishedResults) -> None:
    wild = [
        Result(id="late", finish_reason="stop", timings=Timings(finished=1e300), usage=Usage(prompt_tokens=5)),
        Result(id="large", finish_reason="stop", usage=Usage(prompt_tokens=2**70)),
        Result(id="less", finish_reason="stop", usage=Usage(completion_tokens=-1)),
    ]
    results.publisher.publish([Outgoing(results.pipeline.results_topic, result.encode(), result.id) for result in wild])
    results.publish(10)
    count_all(results)
    results.used["default"] = metering.add_sums([results.used.get("default", UsageSums()), UsageSums(1, 5)])
    assert results.read_sums() == results.used


@given(st.floats(allow_nan=False))
def test_every_time_has_a_day(seconds: float) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", utc_day(seconds))


@pytest.mark.proof
def test_operators_see_it(results: PublishedResults, terminal: Terminal) -> None:
    here = {"PENSTOCK_STREAM_URL": results.addresses.stream_url, "PENSTOCK_PIPELINE": results.pipeline.name}
    assert "nothing was counted" in terminal("usage", **here).stdout
    results.publish(20)
    count_all(results)
    days = json.loads(terminal("usage", "--json", "--days", "2", **here).stdout)
    assert {name: UsageSums(**sums) for tenants in days.values() for name, sums in tenants.items()} == results.used
    shown = terminal("usage", **here).stdout
    assert all(f"{sums.decode_tokens:,}" in shown for sums in results.used.values())
