"""Servers that tests stop, worker processes, and checks of what must be true once the servers are back."""

import itertools
import os
import random
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.local.processes import Child
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request, Result
from penstock.names import Stage
from penstock.ops.status import read_worker_status
from sim.forked import ForkedStack, fork_process, pause_process, run_penstock
from sim.kafka_server import KafkaServer
from sim.servers import Server, serve_server
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import ENGINE_SETTINGS, ExpectedAnswer, compute_answers, make_requests
from tests.pipeline.checks import Streams, check_results, check_streams, results_of

NUM_REQUESTS = 8
MAX_TOKENS = 160
_tags = itertools.count()
S = TypeVar("S", bound="Site")


class Site:
    """Servers that can be stopped, and one worker of each stage on them."""

    def __init__(self, directory: Path, bus: str) -> None:
        self.redis = ValkeyServer(directory / "redis")
        self.kafka = KafkaServer(directory / "kafka") if bus == "kafka" else None
        self._directory = directory
        self._servers: list[Server] = [server for server in (self.redis, self.kafka) if server is not None]
        self._redis_url, self._bootstrap = self.redis.url, self.kafka.bootstrap if self.kafka is not None else ""
        self.stack: ForkedStack

    def start(self) -> None:
        for server in self._servers:
            server.start()
        environment = {
            "PENSTOCK_ENGINE_DTYPE": "float32",
            "PENSTOCK_ENGINE_MAX_STEP_TOKENS": str(ENGINE_SETTINGS.max_step_tokens),
            "PENSTOCK_ENGINE_POOL_MB": "64",
            "PENSTOCK_TESTING": '{"worker_heartbeat_s": 0.3}',
            "PENSTOCK_KV_STORE_REDIS_MB": "0",
        }
        name = f"outages-{random.getrandbits(32):08x}"
        self.stack = ForkedStack(
            self._directory, pipeline=name, kafka=self._bootstrap, redis=self._redis_url, environment=environment
        )
        self.stack.start()

    def stop(self) -> None:
        if hasattr(self, "stack"):
            self.stack.stop()
        for server in self._servers:
            server.stop()

    def pids(self) -> list[int]:
        """Return the ids of the worker processes that run."""
        return [worker.child.pid for worker in self.stack.workers if worker.child and worker.child.is_alive()]

    def states(self) -> list[str]:
        return [status["state"] for status in read_worker_status(self.stack.addresses)]

    def wait_ready(self, *, tend: bool = False) -> None:
        """Wait until both workers are ready. With `tend`, those that have left are started again."""

        def are_ready() -> bool:
            if tend:
                self.stack.restart_dead()
            return self.states() == ["ready", "ready"]

        try:
            wait_for(are_ready, "both workers are ready", every_s=0.05)
        except TimeoutError as error:
            gone = [child.read_log_tail() for child in self._children() if not child.is_alive()]
            raise TimeoutError(f"{error}: {gone}, {read_worker_status(self.stack.addresses)}") from None

    def _children(self) -> list[Child]:
        """Return all processes: servers and workers."""
        children = [getattr(server, "_child", None) for server in self._servers]
        children += [worker.child for worker in self.stack.workers]
        return [child for child in children if child is not None]


def site_on(bus: str, tmp_path_factory: pytest.TempPathFactory, kind: type[S]) -> Iterator[S]:
    yield from serve_server(kind(tmp_path_factory.mktemp(bus), bus))


def work() -> list[Request]:
    """Return the same requests as always, under new ids."""
    longer = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        request.model_copy(update={"sampling": request.sampling.model_copy(update=longer)})
        for request in make_requests(NUM_REQUESTS, f"w{next(_tags)}")
    ]


@cache
def answers() -> list[ExpectedAnswer]:
    """Return the answers to these requests. They do not follow from the ids."""
    return list(compute_answers(work()).values())


def submit(client: Client, request: Request) -> None:
    client.submit(
        token_ids=request.token_ids or [], id=request.id, tenant=request.tenant, **request.sampling.model_dump()
    )


@contextmanager
def streaming(site: Site) -> Iterator[Streams]:
    """Stream answers, from their first tokens on; at the end check streams and results, and that no process ended."""
    asked = work()
    expected = dict(zip([request.id for request in asked], answers(), strict=True))
    site.wait_ready()
    before = site.pids()
    with Client(site.stack.addresses) as client:
        streams = Streams(client, asked)
        for request in asked:
            submit(client, request)
        wait_for(lambda: all(len(seen) > 3 for seen in streams.events.values()), "the first tokens")
        yield streams
        check_answers(site, streams, expected)
    assert site.pids() == before


def check_answers(site: Site, streams: Streams, expected: dict[str, ExpectedAnswer]) -> None:
    """Check that all streams end, with the expected answers, and that each request has one result, the same."""
    streams.finish()
    check_streams(streams, expected)
    check_results(wait_for_results(site.stack.addresses, expected), expected)


def wait_for_results(addresses: Addresses, expected: Collection[str]) -> list[Result]:
    """Wait until each id has a result; a settlement may wait for a dead worker's delivery. Return all results."""

    def are_there() -> bool:
        return set(expected) <= {result.id for result in results_of(addresses)}

    wait_for(are_there, "a result for each request", every_s=0.2)
    return results_of(addresses)


@contextmanager
def hanging(pid: int | None) -> Iterator[None]:
    """Stop a process meanwhile; its connections stay open."""
    assert pid is not None
    pause_process(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leave(site: Site) -> None:
    """Both workers end in order though a server hangs."""
    children = [worker.child for worker in site.stack.workers if worker.child is not None]
    for child in children:
        child.send_signal(signal.SIGTERM)
    assert [child.wait(PATIENCE_S) for child in children] == [0, 0]


@contextmanager
def worker_process(
    stage: Stage,
    addresses: Addresses,
    directory: Path,
    failpoints: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Child]:
    """Run `penstock worker` in a process that passes its failpoints; it is killed at the end.

    Settings are named without `PENSTOCK_`.
    """
    own = {
        "PIPELINE": addresses.pipeline,
        "STREAM_URL": addresses.stream_url,
        "RECORD_LEASE_S": "0.5",
        "RECORD_MAX_ATTEMPTS": "1000",
        "ENGINE_DTYPE": "float32",
        "KV_STORE_SHARED_MB": "0",
        "FAILPOINTS": failpoints,
        **settings,
    }
    environment = os.environ | {f"PENSTOCK_{name}": value for name, value in own.items()}
    child = fork_process(stage, directory / f"{stage}.log", run_penstock, "worker", stage, environment=environment)
    try:
        yield child
    finally:
        child.kill()
