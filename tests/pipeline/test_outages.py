"""Servers away for longer than every timeout, while real worker processes answer.

Nothing is lost, no token is seen twice, the streams go on afterwards, and no worker process ends: no model is loaded
anew.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from penstock.client.aio import AsyncClient
from penstock.client.core import Answer as WholeAnswer
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.ops.status import check_health, read_worker_status
from penstock.redis.client import redis_client
from penstock.redis.servers import Sharded, choose_server
from penstock.telemetry.timeline import read_timeline
from sim.redis_servers import ReplicatedValkey
from sim.waiting import PATIENCE_S, wait_for
from tests.pipeline.checks import Streams
from tests.pipeline.site import (
    NUM_REQUESTS,
    Site,
    answers,
    check_answers,
    hanging,
    leave,
    site_on,
    streaming,
    submit,
    work,
)

NAMES = ("left", "right")


class ReplicatedSite(Site):
    """A site with Redis, which is the bus too, behind a Sentinel."""

    def __init__(self, directory: Path, bus: str) -> None:
        super().__init__(directory, "")
        self.group = ReplicatedValkey(directory / "group")
        self._servers = [self.group]
        self._redis_url = self.group.url


class TwoServers(Site):
    """A site with two stream servers. The bus is on the first."""

    def __init__(self, directory: Path, bus: str) -> None:
        super().__init__(directory, bus)
        self.second = ValkeyServer(directory / "second")
        self._servers.append(self.second)
        self._redis_url = f"{self.redis.url}#{NAMES[0]},{self.second.url}#{NAMES[1]}"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("embedded", tmp_path_factory, Site)


@pytest.fixture(scope="module")
def on_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("kafka", tmp_path_factory, Site)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedSite]:
    yield from site_on("embedded", tmp_path_factory, ReplicatedSite)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServers]:
    yield from site_on("embedded", tmp_path_factory, TwoServers)


def test_redis_is_killed_and_comes_back_with_what_it_had(embedded: Site) -> None:
    """What is asked of it meanwhile fails with a typed error; readers wait, those of `AsyncClient` too."""
    addresses = embedded.stack.addresses

    async def read(request_id: str) -> WholeAnswer:
        async with AsyncClient(addresses) as client:
            return await client.result(request_id)

    with Client(addresses) as client, ThreadPoolExecutor(1) as pool, streaming(embedded) as streams:
        reading = pool.submit(asyncio.run, read(list(streams.events)[-1]))
        embedded.redis.kill()
        for call in (lambda: client.cancel("any"), lambda: client.submit("any", id="any")):
            with pytest.raises(BusUnavailable):
                call()
        time.sleep(1.0)
        embedded.redis.start()
    assert reading.result().token_ids == answers()[-1].token_ids


def test_workers_leave_soon_while_redis_hangs(embedded: Site) -> None:
    """The last of its stack."""
    embedded.wait_ready()
    with hanging(embedded.redis.pid):
        leave(embedded)


@pytest.mark.proof
def test_the_master_of_redis_is_killed_while_streams_run(replicated: ReplicatedSite) -> None:
    """Redis is the bus too. No worker ends, all is answered, nothing doubled."""
    with streaming(replicated):
        replicated.group.master.kill()
    replicated.wait_ready()


def test_kafka_is_killed_and_comes_back(on_kafka: Site) -> None:
    """What runs is answered meanwhile; its results are settled afterwards."""
    assert on_kafka.kafka is not None
    with streaming(on_kafka) as streams:
        on_kafka.kafka.kill()
        wait_for(lambda: on_kafka.states() == ["degraded", "degraded"], "both workers say so", every_s=0.1)
        assert "Kafka" in read_worker_status(on_kafka.stack.addresses)[0]["reason"]
        streams.wait_for(NUM_REQUESTS)
        on_kafka.kafka.start()
    on_kafka.wait_ready()
    assert check_health(on_kafka.stack.addresses, BusSettings()).state == "ok"


def test_redis_comes_back_empty(on_kafka: Site) -> None:
    """Requests are generated again from the topics: readers go on where the new tokens are those they had."""
    with streaming(on_kafka):
        on_kafka.redis.kill()
        shutil.rmtree(on_kafka.redis.directory)
        on_kafka.redis.start()


def test_workers_leave_soon_while_kafka_hangs(on_kafka: Site) -> None:
    """With work that they cannot settle. The last of its stack."""
    assert on_kafka.kafka is not None
    asked = work()
    on_kafka.wait_ready()
    with Client(on_kafka.stack.addresses) as client:
        for request in asked:
            submit(client, request)
        assert next(client.stream(asked[-1].id)).text
        with hanging(on_kafka.kafka.pid):
            leave(on_kafka)


@contextmanager
def killed(server: ValkeyServer) -> Iterator[None]:
    """Kill a server, which is started again at the end."""
    server.kill()
    yield
    server.start()


@pytest.mark.parametrize("away", [lambda server: hanging(server.pid), killed], ids=["hangs", "killed"])
def test_requests_of_the_other_server_go_on(
    two: TwoServers, away: Callable[[ValkeyServer], AbstractContextManager[None]]
) -> None:
    """They end, and new ones are answered, while it is away. Then its own are answered, those that came meanwhile too:
    each token once, one result each, and no process ended.
    """
    two.wait_ready()
    before, addresses = two.pids(), two.stack.addresses
    asked, more = work(), work()
    on_right = [one for one in more if choose_server(NAMES, one.id) == 1]
    later = [one for one in more if one not in on_right[1:]]
    expected = dict(zip([request.id for request in asked], answers(), strict=True))
    expected |= {one.id: answer for one, answer in zip(more, answers(), strict=True) if one in later}
    on_left = {one for one in expected if choose_server(NAMES, one) == 0}
    assert len(on_left) not in (0, len(expected))
    with Client(addresses) as client:
        streams = Streams(client, [*asked, *later])
        for request in asked:
            submit(client, request)
        wait_for(lambda: all(len(streams.events[one.id]) > 3 for one in asked), "the first tokens")
        with away(two.second):
            for request in later:
                submit(client, request)
            streams.wait_for(len(on_left))
            wait_for(lambda: two.states() == ["degraded", "degraded"], "both workers tell of it")
            assert all("right is away" in status["reason"] for status in read_worker_status(addresses))
        check_answers(two, streams, expected)
    assert two.pids() == before


def test_the_spans_of_a_request_are_on_its_server(two: TwoServers) -> None:
    two.wait_ready()
    pipeline, addresses = Pipeline(two.stack.addresses.pipeline), two.stack.addresses
    servers = Sharded.from_urls(addresses.stream_url, redis_client)
    asked: list[str] = []

    def find_told() -> dict[str, list[int]]:
        """Return by request the servers that have its timeline to the end."""
        found = {
            name: [
                index
                for index, server in enumerate(servers.parts)
                if (told := read_timeline(server, pipeline, name)) is not None and told.answered_s is not None
            ]
            for name in asked
        }
        return {name: places for name, places in found.items() if places}

    def ask_until_told() -> bool:
        """Ask for one more answer: spans of the seconds after an outage are not kept."""
        request = work()[0]
        submit(client, request)
        client.result(request.id, timeout_s=PATIENCE_S)
        asked.append(request.id)
        return bool(find_told())

    with Client(addresses) as client:
        wait_for(ask_until_told, "the end of a request is in its timeline", every_s=1.0)
    assert all(places == [choose_server(NAMES, name)] for name, places in find_told().items())
    for server in servers.parts:
        server.close()
