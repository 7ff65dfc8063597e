"""Kafka as the bus is away for longer than every timeout while real worker processes answer."""

import shutil
from collections.abc import Iterator

import pytest

from penstock.bus.contract import Delivery, Outgoing, Settlement
from penstock.bus.kafka.bus import KafkaBus
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable, DeliveryLost, MemberFenced
from penstock.names import Pipeline
from penstock.ops.status import check_health, read_worker_status
from penstock.waiting import wait_until
from sim.waiting import PATIENCE_S, wait_for
from tests.pipeline.site import (
    NUM_REQUESTS,
    Site,
    hanging,
    leave,
    site_on,
    streaming,
    submit,
    work,
)


@pytest.fixture(scope="module")
def on_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("kafka", tmp_path_factory, Site)


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


def test_a_member_that_was_cut_off_while_it_settled_is_not_stuck(on_kafka: Site, pipeline: Pipeline) -> None:
    """The broker ends the open transaction of who is silent: settling goes on, or the member is done with."""
    assert on_kafka.kafka is not None
    bus = KafkaBus(pipeline, on_kafka.kafka.bootstrap, BusSettings(transaction_timeout_s=1.0))
    bus.create_topics()
    publisher = bus.create_publisher()
    publisher.publish([Outgoing(pipeline.request_topic("interactive"), b"x", str(n)) for n in range(2)])
    publisher.close()
    with bus.join_group("prefill", "a") as member:
        found: list[Delivery] = []
        while len(found) < 2:
            found += member.poll(1.0, {"interactive": 2})
        done, settlement = [Settlement(one, [Outgoing(pipeline.job_topic("interactive"), b"job")]) for one in found]
        member.settle([done])
        with hanging(on_kafka.kafka.pid):
            for _ in range(2):
                with pytest.raises(BusUnavailable):
                    member.settle([settlement])

        def is_decided() -> bool:
            try:
                member.settle([settlement])
            except BusUnavailable:
                return False
            except (DeliveryLost, MemberFenced):
                pass
            return True

        try:
            wait_until(is_decided, 10.0, "it is settled or refused")
        except TimeoutError:  # the broker named no broker for a moment: its worker makes a new member then
            member.close()
            with bus.join_group("prefill", "a") as anew:
                anew.settle([Settlement(delivery) for delivery in anew.poll(PATIENCE_S, {"interactive": 2})])


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
        first = next(client.stream(asked[-1].id))
        assert first.text
        with hanging(on_kafka.kafka.pid):
            leave(on_kafka)
