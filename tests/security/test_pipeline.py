"""The pipeline on servers that demand TLS, users and rights: whole, and with the least rights that work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings, load_settings
from penstock.local.processes import Child
from penstock.names import WORKERS_KEY, Pipeline
from penstock.ops.status import read_worker_status
from penstock.record import Record
from penstock.redis.client import redis_client
from sim.forked import fork_process, run_penstock
from sim.line import InProcessPipeline
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests
from tests.commands import Terminal
from tests.gateways import GatewayProcess
from tests.pipeline.checks import Streams, check_results, check_streams, results_of
from tests.pipeline.site import submit
from tests.record.play import die, end, prefill
from tests.security.conftest import WORDS, SecureServers

NUM_REQUESTS = 4
WORKER = {
    "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_MAX_STEP_TOKENS": str(ENGINE_SETTINGS.max_step_tokens),
    "PENSTOCK_ENGINE_POOL_MB": "64", "PENSTOCK_TESTING": '{"worker_heartbeat_s": 0.3}',
    "PENSTOCK_KV_STORE_SHARED_MB": "0", "PENSTOCK_KV_STORE_REDIS_MB": "64",
}  # fmt: skip
"""KV goes through Redis, too."""


@contextmanager
def workers(directory: Path, access: dict[str, str]) -> Iterator[list[Child]]:
    """One of each stage, until they are told to leave."""
    environment = {**os.environ, **WORKER, **access}
    children = [
        fork_process(stage, directory / stage, run_penstock, "worker", stage, environment=environment)
        for stage in ("prefill", "decode")
    ]
    try:
        yield children
        for child in children:
            assert child.stop(PATIENCE_S) == 0, child.read_log_tail()
    finally:
        for child in children:
            if child.is_alive():
                child.kill()


def addresses_of(access: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Addresses:
    """As a program with that environment has them."""
    with monkeypatch.context() as patched:
        for name, value in access.items():
            patched.setenv(name, value)
        return load_settings(Addresses)


def are_ready(addresses: Addresses) -> bool:
    return [status["state"] for status in read_worker_status(addresses)] == ["ready", "ready"]


SCRAM = pytest.param("SCRAM-SHA-512", marks=pytest.mark.proof)


@pytest.mark.parametrize("bus", ["redis", SCRAM, "PLAIN", "client certificate"])
def test_the_pipeline(servers: SecureServers, bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers as the one user, whoever asks and reads as the other; KV goes through Redis."""
    worker, client = (
        addresses_of(servers.redis_access(user) | kafka(servers, bus, user), monkeypatch)
        for user in ("penstock-worker", "penstock-client")
    )
    asked = make_requests(NUM_REQUESTS, bus.partition(" ")[0])
    expected = compute_answers(asked)
    with servers.admin() as admin, InProcessPipeline(worker) as line, Client(client) as reader:
        # Who reads heartbeats tries to drop the names of other tests' workers, which a client may not.
        admin.delete(WORKERS_KEY)
        admin.acl_log_reset()
        before = len(line.read_results())
        streams = Streams(reader, asked)
        for request in asked:
            submit(reader, request)
        line.run_until_results(before + NUM_REQUESTS)
        streams.finish()
        assert reader.lag().as_json()
        assert not reader.cancel(asked[0].id), "it has ended"
        assert reader.cancel(f"{asked[0].id}-later"), "no worker has seen it"
        check_streams(streams, expected)
        check_results(results_of(client), expected)
        assert admin.acl_log() == [], "every right that is used is given"


def test_a_client_cancels_what_a_worker_holds(servers: SecureServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that holds the request is told, with the client's rights."""
    worker, client = (
        addresses_of(servers.redis_access(user), monkeypatch) for user in ("penstock-worker", "penstock-client")
    )
    pipeline = Pipeline(worker.pipeline)
    with redis_client(worker.stream_url) as server, Client(client) as asker, servers.admin() as admin:
        record = Record(server, pipeline, RecordSettings(lease_s=30))
        claim = prefill(record, "held", "cancels")
        try:
            assert asker.cancel(claim.id)
            assert admin.lrange(pipeline.news_key("cancels/1"), 0, -1) == ["c:held"]
        finally:
            record.finish_request(claim, end("cancelled"))
            die(record, "cancels")
            record.close()


def test_the_processes(
    servers: SecureServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    """Workers and a gateway as they are started; a password that changes meanwhile is an outage as any other."""
    access = {
        user: servers.redis_access(user) | servers.kafka_access(user)
        for user in ("penstock-worker", "penstock-gateway", "penstock-client")
    }
    addresses = addresses_of(access["penstock-client"], monkeypatch)

    def change(password: str) -> None:
        with servers.admin() as admin:
            admin.execute_command("ACL", "SETUSER", "penstock-worker", "resetpass", f">{password}")
            admin.execute_command("CLIENT", "KILL", "USER", "penstock-worker")

    with servers.admin() as admin, workers(tmp_path, access["penstock-worker"]) as children:
        admin.acl_log_reset()
        wait_for(lambda: are_ready(addresses), "both workers are ready", every_s=0.05)
        ask_gateway(terminal, tmp_path, addresses, access["penstock-gateway"])
        assert admin.acl_log() == [], "every right that is used is given"
        change("another")
        try:
            wait_for(lambda: not read_worker_status(addresses), "no heartbeat is written", every_s=0.05)
        finally:
            change(WORDS["WORKER_PASSWORD"])
        wait_for(lambda: are_ready(addresses), "both workers are ready again", every_s=0.05)
        with Client(addresses) as client:
            assert list(client.generate("And God said", max_tokens=4))
        assert all(child.is_alive() for child in children)
        assert all("Traceback" not in child.read_log_tail(1000) for child in children)


def kafka(servers: SecureServers, bus: str, user: str) -> dict[str, str]:
    """What is said of Kafka; nothing for Redis Streams."""
    if bus == "redis":
        return {}
    if bus == "client certificate":
        certificate, key = servers.authority.sign(user)
        return {
            "PENSTOCK_KAFKA": servers.kafka.tls, "PENSTOCK_KAFKA_SECURITY": "ssl",
            "PENSTOCK_KAFKA_CA_FILE": str(servers.authority.file), "PENSTOCK_KAFKA_CERT_FILE": str(certificate),
            "PENSTOCK_KAFKA_KEY_FILE": str(key),
        }  # fmt: skip
    return servers.kafka_access(user, bus)


def ask_gateway(terminal: Terminal, directory: Path, addresses: Addresses, access: dict[str, str]) -> None:
    """A stream over a gateway whose keys are in that Redis; who may not see the keys is refused."""
    keyed = access | {"PENSTOCK_GATEWAY_KEYS": "redis", "PENSTOCK_BATCH_STORE": str(directory / "files")}
    made = terminal("keys", "create", "acme", **keyed)
    key = next(word for word in made.stdout.split() if word.startswith("psk_"))
    settings = {name.removeprefix("PENSTOCK_"): value for name, value in keyed.items()}
    body = {"model": "demo", "prompt": "In the beginning", "max_tokens": 8, "stream": True}
    with GatewayProcess(addresses, directory, settings) as gateway:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=None)
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert gateway.process.stop(PATIENCE_S) == 0, gateway.process.read_log_tail()
