"""Gateways of regions know each other: what they tell, whether they are there, and that one name is one model."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from penstock.config.addresses import Addresses
from penstock.ingest.regions.peers import MAX_REFUSED, STALE_S, STATE_PATH, _Region
from penstock.ingest.regions.state import RegionState, describe_model
from penstock.local.processes import find_free_port
from penstock.local.valkey import ValkeyServer
from penstock.names import CLASSES, STAGES, Pipeline
from penstock.ops.lag import PipelineLag
from penstock.testing.gateway import TestGateway
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import WorkerLoad
from sim.waiting import wait_for
from tests.gateways import GatewayProcess

SECRET = "a secret of all regions"
DEMO = Pipeline("demo")
PARTITIONS: dict[Any, list[int]] = {"interactive": [0], "batch": [0]}


def make_load(token_s: float = 0.002, **numbers: Any) -> dict[str, Any]:
    """Return the load of an idle worker's heartbeat."""
    held: dict[Any, int] = dict.fromkeys(product(CLASSES, STAGES), 0)
    load = WorkerLoad().summarize_load([], held, PARTITIONS, dict.fromkeys(CLASSES, 0))
    speed = {"prompt_token_s": token_s, "idle_prompt_token_s": token_s, "num_rows": 0}
    return load | {"prompt_tokens_per_s": 1 / token_s, "output_tokens_per_s": 10.0, "speed": speed} | numbers


class PlayedRegion:
    """A region with its own Redis, a gateway, and one worker that a test plays."""

    def __init__(self, name: str, folder: Path, peers: Mapping[str, str], exits: ExitStack) -> None:
        folder = folder / name
        folder.mkdir()
        self.server = exits.enter_context(ValkeyServer(folder / "valkey"))
        self.beat = Heartbeat(self.server.url, DEMO, "auto", "auto-0", 10.0)
        self.beat.set_load_source(lambda: {"load": make_load()})
        self.beat.update_status(state="ready", model="demo")
        self.beat.take_name()
        told = ",".join(f"{peer}={url}" for peer, url in peers.items())
        settings = {"REGION_NAME": name, "REGION_PEERS": told, "REGION_SECRET": SECRET}
        addresses = Addresses(stream_url=self.server.url, pipeline=DEMO.name)
        self.gateway = exits.enter_context(GatewayProcess(addresses, folder, settings))

    def say(self, **status: Any) -> None:
        """Have the worker say this, too."""
        self.beat.update_status(**status)
        self.beat.write_beat()

    def see(self) -> dict[str, Any]:
        """Return how the gateway sees all regions, by name."""
        seen = httpx.get(f"{self.gateway.url}/v1/penstock/regions", timeout=None).raise_for_status().json()
        return {region["name"]: region for region in seen["regions"]}


@contextmanager
def two_regions(folder: Path) -> Iterator[tuple[PlayedRegion, PlayedRegion]]:
    with ExitStack() as exits:
        closed = f"http://127.0.0.1:{find_free_port()}"
        us = PlayedRegion("us", folder, {"eu": closed}, exits)
        us.beat.set_load_source(lambda: {"load": make_load(token_s=0.004)})
        us.say(fingerprint="abc")
        peers = {"us": us.gateway.url, "asia": us.gateway.url, "moon": closed}
        eu = PlayedRegion("eu", folder, peers, exits)
        yield eu, us


@pytest.mark.proof
def test_gateways_know_their_peers_and_whether_one_name_is_one_model(tmp_path: Path) -> None:
    with two_regions(tmp_path) as (eu, us):
        wait_for(lambda: eu.see()["us"]["state"] == "ready", "the peer is known")
        wait_for(lambda: eu.see()["moon"]["state"] == "unavailable", "it refuses connections")
        seen = eu.see()
        assert list(seen) == ["eu", "us", "asia", "moon"]
        assert "no connection" in seen["moon"]["reason"]
        assert (seen["eu"]["state"], seen["eu"]["round_trip_s"]) == ("ready", 0.0)
        assert 0 < seen["us"]["round_trip_s"] < 2
        assert seen["us"]["models"]["demo"] == {
            "fingerprint": "abc", "prompt_token_s": 0.004, "num_workers": 1, "coverage": 1.0, "differs": False,
            "wait_s": {"interactive": 0.0, "batch": 0.0},
        }  # fmt: skip
        assert seen["asia"]["state"] == "unknown"
        assert "PENSTOCK_REGION_PEERS has the address of the region us" in seen["asia"]["reason"]
        assert httpx.get(us.gateway.url + STATE_PATH).status_code == 404, "peers alone are told"
        assert httpx.get(us.gateway.url + STATE_PATH, headers={b"x-penstock-peer": "é".encode()}).status_code == 404
        told = httpx.get(us.gateway.url + STATE_PATH, headers={"x-penstock-peer": SECRET}).json()
        assert (told["region"], told["adopted"], told["is_stopping"]) == ("us", [], False)

        eu.say(fingerprint="def")
        wait_for(lambda: eu.see()["us"]["models"]["demo"]["differs"], "another model of this name")
        metrics = httpx.get(f"{eu.gateway.url}/metrics").text
        assert 'penstock_region_models_differ{region="us"} 1' in metrics
        assert 'penstock_region_state{region="us",state="ready"} 1' in metrics
        assert 'penstock_region_round_trip_seconds{region="us"}' in metrics
        wait_for(lambda: "neither region stands in for the other" in eu.gateway.log.read_text(), "the log says so")
        with redis.Redis.from_url(eu.server.url) as client:
            assert b'"moon"' in client.get(DEMO.regions_key)

        us.gateway.process.stop(30.0)
        wait_for(lambda: eu.see()["us"]["state"] == "unavailable", "it has gone")
        assert eu.gateway.log.read_text().count("neither region stands in for the other") == 1, "it is said once"


def test_without_peers_there_is_nothing(addresses: Addresses, server: "redis.Redis") -> None:
    with TestGateway(addresses, region={"name": "eu", "secret": SECRET}) as gateway, gateway.client() as http:
        assert gateway.gateway.peers is None
        assert http.get("/v1/penstock/regions").json() == {"regions": []}
        assert http.get(STATE_PATH, headers={"x-penstock-peer": SECRET}).status_code == 404
    assert not server.exists(Pipeline(addresses.pipeline).regions_key)


def make_state(*, is_stopping: bool = False, **fingerprints: str | None) -> RegionState:
    models = {
        name: {
            "fingerprint": found, "prompt_token_s": None, "num_workers": 0, "coverage": 0.0,
            "wait_s": {"interactive": None, "batch": None},
        }
        for name, found in fingerprints.items()
    }  # fmt: skip
    return RegionState.model_validate(
        {"region": "us", "incarnation": "1", "models": models, "adopted": [], "is_stopping": is_stopping}
    )


def test_a_region_is_ready_unavailable_or_unknown() -> None:
    region = _Region("us")
    assert region.judge_state(time.monotonic())[0] == "unknown"
    region.num_refused = MAX_REFUSED
    assert region.judge_state(time.monotonic())[0] == "unavailable"
    region.note_state(make_state(demo="abc"))
    assert region.judge_state(region.at_s) == ("ready", "")
    assert region.judge_state(region.at_s + STALE_S + 0.1)[0] == "unknown", "what it told is old"
    region.note_state(make_state(is_stopping=True, demo=None))
    assert region.judge_state(region.at_s)[0] == "unavailable"
    assert region.fingerprints == {"demo": "abc"}, "its workers are away: it has the model still"


def tell_worker(name: str, lease_ms: int = 4000, left_ms: int = 4000, **beat: Any) -> tuple[bytes, bytes, int]:
    told = {"stage": "auto", "model": "demo", "lease_ms": lease_ms, "load": make_load(), "state": "ready"} | beat
    return DEMO.worker_key("auto", name).encode(), json.dumps(told).encode(), left_ms


def test_what_is_missing_is_none_and_old_heartbeats_are_not_covered() -> None:
    nothing = describe_model("demo", DEMO, [], None, 0.0)
    assert (nothing.fingerprint, nothing.prompt_token_s, nothing.coverage) == (None, None, 0.0)
    assert nothing.wait_s == {"interactive": None, "batch": None}
    fast, slow = make_load(token_s=0.001), make_load(token_s=0.004)
    workers = [
        tell_worker("a", load=fast, fingerprint="abc"),
        tell_worker("b", load=slow, fingerprint="abc"),
        tell_worker("c", left_ms=500),
        tell_worker("other", model="another", fingerprint="xyz"),
    ]
    lag = PipelineLag({}, dict.fromkeys(CLASSES), None, dict.fromkeys(CLASSES))
    found = describe_model("demo", DEMO, workers, lag, 0.0)
    assert (found.num_workers, found.fingerprint) == (2, "abc")
    assert found.coverage == pytest.approx(2 / 3)
    assert found.prompt_token_s is not None
    assert 0.001 < found.prompt_token_s < 0.0025, "faster workers get more requests, so they count more"
    mixed = describe_model("demo", DEMO, [*workers, tell_worker("d", fingerprint="def")], lag, 0.0)
    assert mixed.fingerprint == "abc def", "it is no other region's"
    assert describe_model("demo", DEMO, [tell_worker("e", load={})], lag, 0.0).coverage == 0.0
    having = tell_worker("f", load=fast, fingerprint="abc", adapters={"sql": "1" * 64})
    adapter = describe_model("sql", DEMO, [*workers, having], lag, 0.0)
    assert (adapter.num_workers, adapter.fingerprint) == (1, f"abc+{'1' * 64}"), "each version is one model"
    for away in (None, replace(lag, is_served=False)):
        found = describe_model("demo", DEMO, workers, away, 0.0)
        assert (found.num_workers, found.coverage) == (2, 0.0), "the bus is away, or nobody serves a stage"


def test_on_redis_streams_the_workers_of_one_model_are_those_that_take_requests() -> None:
    load = make_load(token_s=0.001)
    load |= {one: load[one] | {"partitions": []} for one in CLASSES}
    key = DEMO.worker_key("decode", "b").encode()
    workers = [tell_worker("a", load=load), (key, *tell_worker("b", load=load)[1:])]
    found = describe_model("demo", DEMO, workers, None, 0.0)
    assert (found.num_workers, found.prompt_token_s) == (1, 0.001)
