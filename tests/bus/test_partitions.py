"""Affinity on Kafka: requests of one session in one partition, those of many in all."""

from collections import defaultdict
from contextlib import closing

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from penstock.affinity import affinity_of, ranking
from penstock.bus import kafka_partitions
from penstock.bus.contract import Delivery, Outgoing, Settlement
from penstock.bus.kafka import KafkaBus, client_settings
from penstock.bus.kafka_partitions import ANY, Partitions
from penstock.client import Client, outgoing
from penstock.local.processes import wait_until
from penstock.messages import Request, decode
from penstock.names import Pipeline
from penstock.settings import Addresses, BusSettings
from tests.bus.buses import numbered, publish, take, values

NUM = 4


@pytest.fixture
def bus(kafka: str, pipeline: Pipeline) -> KafkaBus:
    made = KafkaBus(pipeline, kafka, BusSettings(partitions=NUM, transaction_timeout_s=30.0))
    made.create_topics()
    return made


def partition(delivery: Delivery) -> int:
    return int(delivery.position.split(":")[0])


def home(session: str, tenant: str) -> int:
    return ranking(affinity_of(Request(id="r", prompt="x", session=session, tenant=tenant)), NUM)[0]


def test_a_session_is_in_one_partition_and_many_are_in_all(
    bus: KafkaBus, kafka: str, redis_url: str, pipeline: Pipeline
) -> None:
    addresses = Addresses(pipeline=pipeline.name, kafka=kafka, stream_url=redis_url)
    for _ in range(2):  # two producers agree
        with Client(addresses) as client:
            for turn in range(3):
                for session in range(12):
                    client.submit(f"turn {turn} of {session}", session=f"s{session}", tenant=f"t{session % 2}")
    found: defaultdict[str, set[int]] = defaultdict(set)
    with bus.member("prefill", "a") as member:
        taken = take(member, 72)
        for delivery in taken:
            request = decode(Request, delivery.value)
            assert delivery.key == request.id
            found[request.session or ""].add(partition(delivery))
        member.settle([Settlement(delivery) for delivery in taken])
    assert len(found) == 12
    for name, partitions in found.items():
        assert partitions == {home(name, f"t{int(name[1:]) % 2}")}
    assert set.union(*found.values()) == set(range(NUM))


def test_outputs_of_a_settlement_keep_together_too(bus: KafkaBus, pipeline: Pipeline) -> None:
    publish(bus, numbered(pipeline.requests("batch"), 12))
    topic = pipeline.jobs("batch")
    with bus.member("prefill", "a") as member, bus.member("decode", "b") as after:
        taken = take(member, 12)
        outputs = [Outgoing(topic, d.value, d.key, {}, f"a{number % 3}") for number, d in enumerate(taken)]
        member.settle([Settlement(d, [o]) for d, o in zip(taken, outputs, strict=True)])
        where = {d.value: partition(d) for d in take(after, 12)}
    assert where == {o.value: ranking(o.affinity or "", NUM)[0] for o in outputs}


def test_a_plain_producer_and_its_retries_go_anywhere(bus: KafkaBus, kafka: str, pipeline: Pipeline) -> None:
    topic = pipeline.requests("interactive")
    producer = Producer(client_settings(kafka))
    for number in range(40):
        producer.produce(topic, str(number), key=f"k{number}")
    producer.produce(topic, b"put there", key="k", partition=3)
    assert producer.flush(15) == 0
    publish(bus, [Outgoing(topic, b"with", "k0", {}, "a"), Outgoing(topic, b"without", "k0")])
    with bus.member("prefill", "a") as member:
        taken = {d.value: d for d in take(member, 43)}
        assert {partition(d) for d in taken.values()} == set(range(NUM))
        assert partition(taken[b"put there"]) == 3
        assert partition(taken[b"with"]) == ranking("a", NUM)[0]
        member.retry(taken[b"with"], "again", 0.0)
        (again,) = take(member, 1)
        assert (again.value, again.key, again.attempt) == (b"with", "k0", 1)


def test_a_hot_session_is_spread(bus: KafkaBus, pipeline: Pipeline) -> None:
    messages = []
    for number in range(120):
        span, message = outgoing(pipeline, Request(id=f"r{number}", prompt="x", session="hot"))
        span.end()
        messages.append(message)
    publish(bus, messages)
    with bus.member("prefill", "a") as member:
        taken = take(member, 120, {"interactive": 120})
        counts = [sum(partition(d) == number for d in taken) for number in range(NUM)]
    assert min(counts) >= 20


def test_partitions_that_are_added_are_used(
    bus: KafkaBus, kafka: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "REFRESH_S", 0.0)
    topic = pipeline.requests("interactive")
    moves = next(key for key in map(str, range(1000)) if ranking(key, NUM + 1)[0] == NUM)
    with closing(bus.publisher()) as publisher, bus.member("prefill", "a") as member:
        publisher.publish([Outgoing(topic, b"before", "k", {}, moves)])
        assert partition(take(member, 1)[0]) == ranking(moves, NUM)[0]
        admin = AdminClient(client_settings(kafka))
        admin.create_partitions([NewPartitions(topic, NUM + 1)])[topic].result(15)
        seen: set[int] = set()

        def arrived() -> bool:
            publisher.publish([Outgoing(topic, b"after", "k", {}, moves)])
            seen.update(partition(d) for d in member.poll(0.5, {"interactive": 100}))
            return NUM in seen

        wait_until(arrived, 30, "the new partition is used")


def test_a_topic_that_is_not_there_is_left_to_the_producer(kafka: str) -> None:
    partitions = Partitions(Producer(client_settings(kafka)))
    assert partitions.choose(Outgoing("no-such-topic", b"", "k", {}, "a")) == ANY


def test_a_topic_that_is_made_later_is_found_soon(
    kafka: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "RETRY_S", 0.05)
    partitions = Partitions(Producer(client_settings(kafka)))
    message = Outgoing(pipeline.requests("batch"), b"", "k", {}, "a")
    assert partitions.choose(message) == ANY
    KafkaBus(pipeline, kafka, BusSettings(partitions=NUM)).create_topics()
    wait_until(lambda: partitions.choose(message) == ranking("a", NUM)[0], 30, "its partitions are known")


def test_brokers_that_did_not_answer_in_time_are_asked_again_soon(
    bus: KafkaBus, kafka: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "RETRY_S", 0.05)
    partitions = Partitions(Producer(client_settings(kafka)))
    message = Outgoing(pipeline.requests("batch"), b"", "k", {}, "a")
    with monkeypatch.context() as patch:
        patch.setattr(kafka_partitions, "ANSWER_S", 0.0)
        assert partitions.choose(message) == ANY
    wait_until(lambda: partitions.choose(message) == ranking("a", NUM)[0], 30, "its partitions are known")


def test_without_an_answer_from_the_brokers_the_key_decides(
    bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "ANSWER_S", 0.0)
    topic = pipeline.requests("batch")
    publish(bus, [Outgoing(topic, b"x", "k", {}, "a")])
    assert values(bus.read_all(topic)) == [b"x"]
