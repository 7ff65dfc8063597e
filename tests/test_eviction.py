"""A stream server that evicts is refused, or told: in logs, on the page, by a metric."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.ingest.http.metrics import GatewayMetrics
from penstock.local.processes import find_free_port, start_child
from penstock.local.valkey import ValkeyServer, find_binary
from penstock.ops import eviction, live
from penstock.ops.eviction import measure_memory, watch_eviction
from penstock.telemetry.exposition import render_metrics
from penstock.telemetry.meters import Meters
from sim.servers import start_or_skip
from sim.waiting import wait_for
from tests.commands import Terminal


@pytest.fixture
def evicting(tmp_path: Path) -> Iterator[tuple[Addresses, "redis.Redis"]]:
    with start_or_skip(ValkeyServer(tmp_path / "valkey").start) as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 10**9)
        client.config_set("maxmemory-policy", "volatile-lru")
        yield Addresses(stream_url=server.url, pipeline="demo"), client


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with `cluster-enabled yes`, and no slots yet."""
    port, directory = find_free_port(), tmp_path_factory.mktemp("clustered")
    command = [
        str(find_binary()),
        "--port",
        str(port),
        "--cluster-enabled",
        "yes",
        "--dir",
        str(directory),
        "--save",
        "",
    ]
    server = start_child(command, name="Valkey", log=directory / "log", directory=directory)
    with redis.Redis(port=port) as client:

        def is_answering() -> bool:
            with suppress(redis.ConnectionError):
                return bool(client.ping())
            return False

        wait_for(is_answering, "it answers")
    yield f"redis://127.0.0.1:{port}/0"
    server.stop()


@pytest.mark.parametrize("command", [("gateway",), ("worker", "endpoint")])
def test_nothing_starts_with_it(
    evicting: tuple[Addresses, "redis.Redis"], terminal: Terminal, command: tuple[str, ...]
) -> None:
    given = {"PENSTOCK_STREAM_URL": evicting[0].stream_url, "PENSTOCK_ENDPOINT_URLS": "http://127.0.0.1:1"}
    done = terminal(*command, **given, PENSTOCK_ENGINE_KIND="openai")
    assert done.returncode == 1
    assert "evicts keys at its memory limit (volatile-lru): token logs must not be evicted" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("gateway",), ("worker", "endpoint"), ("doctor",)])
def test_a_server_in_cluster_mode_is_refused_by_name(
    clustered: str, terminal: Terminal, command: tuple[str, ...]
) -> None:
    given = {"PENSTOCK_STREAM_URL": clustered, "PENSTOCK_ENDPOINT_URLS": "http://127.0.0.1:1"}
    done = terminal(*command, **given, PENSTOCK_ENGINE_KIND="openai")
    assert done.returncode == 1
    told = " ".join((done.stdout + done.stderr).split())
    assert "is in cluster mode, where one script cannot change keys in several slots" in told
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lfu"])
def test_what_is_accepted_or_comes_later_is_told_until_it_is_mended(
    evicting: tuple[Addresses, "redis.Redis"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
) -> None:
    addresses, client = evicting
    for module in (eviction, live):
        monkeypatch.setattr(module, "LOOK_S", 0.05)
    client.config_set("maxmemory-policy", policy)
    metrics = GatewayMetrics(meters := Meters(), addresses, BusSettings())
    watch = metrics.watch_pipeline("demo")
    with watch_eviction(addresses, "warn"):
        assert any(f"({policy})" in reason for reason in watch.read_latest()["health"]["reasons"])
        assert b'penstock_redis_evicts{pipeline="demo"} 1.0' in render_metrics(meters)
        used, limit = client.info("memory")["used_memory"], 10**9
        assert measure_memory(addresses) == pytest.approx(used / limit, rel=0.5)
        assert re.search(rb'penstock_redis_memory_share{pipeline="demo"} 0\.00', render_metrics(meters))
        wait_for(lambda: caplog.text.count(f"({policy})") > 1, "it is said again")
        client.config_set("maxmemory-policy", "noeviction")
        wait_for(lambda: b'penstock_redis_evicts{pipeline="demo"} 0.0' in render_metrics(meters), "it is mended")
        wait_for(lambda: not any("evicts" in reason for reason in watch.read_latest()["health"]["reasons"]), "all know")
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", 0)
        assert eviction.describe_eviction(addresses) == "", "without a limit it evicts nothing"
    watch.close()
