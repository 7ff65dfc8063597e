"""How far behind the groups are, on both buses."""

import pytest

from penstock.bus.contract import Bus, Member, Outgoing, Settlement
from penstock.bus.kafka import offsets
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.member import KafkaMember
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import CAPACITY, make_bus, make_messages, make_settlement, publish_messages, take_deliveries


def wait_for_lag(bus: Bus, topic: str, count: int) -> None:
    """Wait until `count` messages of a topic are unsettled: a transaction is seen a moment after its commit."""
    wait_for(lambda: bus.count_unsettled()[topic] == count, f"{count} in {topic}, not {bus.count_unsettled()[topic]}")


@pytest.mark.proof
def test_what_is_not_settled_counts_with_and_without_a_holder(bus: Bus, pipeline: Pipeline) -> None:
    requests, jobs = pipeline.request_topic("batch"), pipeline.job_topic("batch")
    assert set(bus.count_unsettled().values()) == {0}
    publish_messages(bus, make_messages(requests, 30))
    wait_for_lag(bus, requests, 30)
    with bus.join_group("prefill", "p") as prefill, bus.join_group("decode", "d") as decode:
        taken = sorted(take_deliveries(prefill, 30), key=lambda delivery: int(delivery.value))
        wait_for_lag(bus, requests, 30)
        for done in taken[5:]:  # out of order, each in a settlement of its own
            prefill.settle([Settlement(done, [Outgoing(jobs, done.value)])])
        wait_for_lag(bus, requests, 5)
        given = take_deliveries(decode, 25)
        assert bus.count_unsettled()[jobs] >= 25
        decode.settle([make_settlement(pipeline, delivery) for delivery in given])
        prefill.settle([Settlement(delivery) for delivery in taken[:5]])

        def is_empty() -> bool:
            """Prefill on Kafka commits the offsets of what it settled a moment later."""
            assert decode.poll(0.0, {"interactive": 1, "batch": 1}) == []
            return set(bus.count_unsettled().values()) == {0}

        wait_for(is_empty, f"nothing is left: {bus.count_unsettled()}")


def test_topics_that_are_not_there_yet_are_empty(request: pytest.FixtureRequest, redis_url: str, kafka: str) -> None:
    for kind, address in (("streams", redis_url), ("kafka", kafka)):
        assert set(make_bus(kind, Pipeline("not-made"), address).count_unsettled().values()) == {0}


def test_a_bus_that_is_away_is_said_to_be(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bus.kafka.admin_lookups.BROKER_TIMEOUT_S", 0.3)
    for kind, address in (("streams", "redis://127.0.0.1:1/0"), ("kafka", "127.0.0.1:1")):
        with pytest.raises(BusUnavailable):
            make_bus(kind, pipeline, address).count_unsettled()


def answer_messages(member: Member, pipeline: Pipeline, count: int) -> None:
    """Take and settle that many deliveries, some hundred at a time."""
    while count:
        taken = member.poll(PATIENCE_S, {"interactive": min(count, 300)})
        assert taken, f"{count} more do not come"
        member.settle([make_settlement(pipeline, delivery) for delivery in taken])
        count -= len(taken)


def test_a_partition_that_is_far_ahead_of_a_request_waits_for_it(
    kafka_bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that one: the other class goes on, and so does this one once the request is done. Two lives of a worker."""
    monkeypatch.setattr(offsets, "MAX_OFFSETS_AHEAD", 1000)
    topic, count = pipeline.request_topic("interactive"), 2500
    publish_messages(kafka_bus, make_messages(topic, count))
    seen: set[bytes] = set()
    for life in range(2):
        with kafka_bus.join_group("prefill", f"life-{life}") as member:
            assert isinstance(member, KafkaMember)
            (slow,) = take_deliveries(member, 1, {"interactive": 1})
            seen.add(slow.value)
            answer_messages(member, pipeline, 0 if life else 999)
            assert member.poll(0.5, CAPACITY) == []
            wait_for_lag(kafka_bus, topic, count - 999)
            publish_messages(kafka_bus, make_messages(pipeline.request_topic("batch"), 1))
            member.settle([Settlement(delivery) for delivery in take_deliveries(member, 1)])
    assert len(seen) == 1
    with kafka_bus.join_group("prefill", "last") as member:
        answer_messages(member, pipeline, count - 999)
        wait_for_lag(kafka_bus, topic, 0)
    assert sorted(int(message.value) for message in kafka_bus.read_all(pipeline.results_topic)) == list(range(count))
