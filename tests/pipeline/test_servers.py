"""Two stream servers, one of which is away while real worker processes answer: its requests wait, the others go on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.errors import ServersDiffer
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.ops.status import read_worker_status
from penstock.redis.client import redis_client
from penstock.redis.servers import Sharded, choose_server, store_server_lists
from penstock.telemetry.timeline import read_timeline
from sim.waiting import PATIENCE_S, wait_for
from tests.pipeline.checks import Streams, check_results, check_streams
from tests.pipeline.site import Site, answers, hanging, site_on, submit, wait_for_results, work

NAMES = ("left", "right")


class TwoServers(Site):
    """The bus is on the first."""

    def __init__(self, directory: Path, bus: str) -> None:
        super().__init__(directory, bus)
        self.second = ValkeyServer(directory / "second")
        self._servers.append(self.second)
        self._redis_url = f"{self.redis.url}#{NAMES[0]},{self.second.url}#{NAMES[1]}"

    @contextmanager
    def killed(self) -> Iterator[None]:
        """The second is dead meanwhile."""
        self.second.kill()
        yield
        self.second.start()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServers]:
    yield from site_on("embedded", tmp_path_factory, TwoServers)


@pytest.mark.parametrize("away", [lambda two: hanging(two.second.pid), TwoServers.killed], ids=["hangs", "killed"])
def test_requests_of_the_other_server_go_on(
    two: TwoServers, away: Callable[[TwoServers], AbstractContextManager[None]]
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
        with away(two):
            for request in later:
                submit(client, request)
            streams.wait_for(len(on_left))
            wait_for(lambda: two.states() == ["degraded", "degraded"], "both workers tell of it")
            assert all("right is away" in status["reason"] for status in read_worker_status(addresses))
        streams.finish()
    check_streams(streams, expected)
    check_results(wait_for_results(two.stack.addresses, expected), expected)
    assert two.pids() == before


def test_who_comes_with_another_list_is_refused(two: TwoServers) -> None:
    two.wait_ready()
    for server in (two.redis, two.second):
        with pytest.raises(ServersDiffer, match="left, right"):
            store_server_lists(server.url, Pipeline(two.stack.addresses.pipeline))


def test_the_spans_of_a_request_are_on_its_server(two: TwoServers) -> None:
    two.wait_ready()
    pipeline = Pipeline(two.stack.addresses.pipeline)
    servers = Sharded.from_urls(two.stack.addresses.stream_url, redis_client)
    asked: list[str] = []
    found: list[str] = []

    def is_told(request_id: str) -> bool:
        timeline = read_timeline(servers[request_id], pipeline, request_id)
        return timeline is not None and timeline.answered_s is not None

    def ask_until_told() -> bool:
        """Ask for one more answer: spans of the seconds after an outage are not kept."""
        request = work()[0]
        submit(client, request)
        client.result(request.id, timeout_s=PATIENCE_S)
        asked.append(request.id)
        found[:] = filter(is_told, asked)
        return bool(found)

    with Client(two.stack.addresses) as client:
        wait_for(ask_until_told, "the end of a request is in its timeline", every_s=1.0)
    (other,) = (server for server in servers.parts if server is not servers[found[0]])
    assert read_timeline(other, pipeline, found[0]) is None
    for server in servers.parts:
        server.close()
