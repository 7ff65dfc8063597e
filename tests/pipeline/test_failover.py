"""One of several servers is killed for good while real worker processes answer: another one takes its place."""

import random
from collections.abc import Iterator

import pytest

from tests.pipeline.site import ReplicatedSite, site_on, streaming

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedSite]:
    yield from site_on("embedded", tmp_path_factory, ReplicatedSite)


@pytest.fixture(scope="module")
def on_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedSite]:
    yield from site_on("kafka", tmp_path_factory, ReplicatedSite)


def test_the_master_of_redis_is_killed_while_streams_run(embedded: ReplicatedSite) -> None:
    """Redis is the bus too. No worker ends, all is answered, nothing doubled."""
    with streaming(embedded):
        embedded.group.master.kill()
    embedded.wait_ready()


@pytest.mark.thorough  # the test above, and bus/test_cluster.py
def test_a_broker_and_the_master_of_redis_are_killed_again_and_again(on_kafka: ReplicatedSite) -> None:
    """At the brokers' own timeouts. Each is started again before the next one's turn."""
    assert on_kafka.brokers is not None
    for _ in range(3):
        with streaming(on_kafka):
            on_kafka.group.master.kill()
        for server in on_kafka.group.servers.values():
            server.start()
        broker = random.choice(list(on_kafka.brokers.servers.values()))
        with streaming(on_kafka):
            broker.kill()
        broker.start()
        on_kafka.group.wait_until_replicated()
