"""Messages that take longer to come than a member waits for them, over a link that brings few bytes at a time."""

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock import pace
from penstock.bus.contract import Outgoing, Settlement
from penstock.bus.kafka import member as kafka_member
from penstock.bus.kafka import places, position_lookup
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.client import FETCH_LIMITS
from penstock.bus.kafka.writers import Transactions
from penstock.bus.streams.bus import StreamsBus
from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable
from penstock.local.processes import find_free_port
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.record.record import UnclaimedMessage
from penstock.redis.client import redis_client
from sim.chaos.proxy import Proxy
from sim.kafka_server import KafkaServer
from sim.servers import start_or_skip
from sim.waiting import wait_for
from tests.bus.buses import (
    CAPACITY,
    SETTINGS,
    SHORT_TIMEOUT_SETTINGS,
    list_values,
    make_messages,
    make_settlement,
    publish_messages,
    take_deliveries,
)
from tests.record.play import alive

LARGE_BYTES = 4_000_000
"""At least 61 of the proxy's pieces."""
DELAY_S = 0.05
LATE_S = 0.5
"""How late brokers answer. A write in a transaction takes three answers, and has 1.2 s."""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The one way to a broker, which lets all through at first."""
    with Proxy(find_free_port()) as proxy:
        server = KafkaServer(tmp_path_factory.mktemp("kafka"), proxy.target_port, advertised=proxy.port)
        with start_or_skip(server.start):
            yield proxy


def test_what_cannot_be_handed_off_is_held(link: Proxy, pipeline: Pipeline) -> None:
    bus = KafkaBus(pipeline, f"127.0.0.1:{link.port}", SHORT_TIMEOUT_SETTINGS)
    bus.create_topics()
    publish_messages(bus, make_messages(pipeline.request_topic("interactive"), 1))
    with bus.join_group("prefill", "a") as member:
        (delivery,) = take_deliveries(member, 1)
        with pytest.raises(BusUnavailable):
            member.settle([Settlement(delivery, [Outgoing("no-such-topic", b"")])])
        assert member.is_holding(delivery)


def test_a_small_message_does_not_wait_for_all_that_others_may_bring(link: Proxy, pipeline: Pipeline) -> None:
    """What is fetched at once is one message, or about a MB of several."""
    bus, topic = KafkaBus(pipeline, f"127.0.0.1:{link.port}", SETTINGS), pipeline.request_topic("batch")
    bus.create_topics()
    producer = Producer(bus.clients | {"linger.ms": 0})
    for partition, value in [(0, os.urandom(900_000))] * 12 + [(1, b"beside")]:
        producer.produce(topic, value, partition=partition)
        assert producer.flush(30) == 0
    consumer, num_before = Consumer(bus.clients | FETCH_LIMITS | {"group.id": topic}), link.num_reply_bytes
    consumer.assign([TopicPartition(topic, number, 0) for number in range(2)])
    values: list[bytes | None] = []
    while b"beside" not in values:
        values += [message.value() for message in consumer.consume(1, 1.0)]
    consumer.close()
    assert link.num_reply_bytes - num_before < 6_000_000


def test_a_message_that_takes_long_is_answered_and_so_are_those_behind_it_and_beside_it(
    link: Proxy, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 3 seconds or more, and the first member waits for one."""
    monkeypatch.setattr(position_lookup, "QUIET_PARTITION_S", 0.1)
    monkeypatch.setattr(position_lookup, "STALLED_PARTITION_S", 1.0)
    monkeypatch.setattr(kafka_member, "STALL_PATIENCE_S", 0.05)
    bus, topic = KafkaBus(pipeline, f"127.0.0.1:{link.port}", SETTINGS), pipeline.request_topic("interactive")
    bus.create_topics()
    producer, large = Producer(bus.clients | {"message.max.bytes": 2 * LARGE_BYTES}), os.urandom(LARGE_BYTES)
    for partition, value in ((0, large), (0, b"behind"), (1, b"beside")):
        producer.produce(topic, value, partition=partition)
        assert producer.flush(30) == 0
    came: set[bytes] = set()
    link.delay_forwarding(DELAY_S)
    while len(came) < 3:
        with suppress(BusUnavailable), bus.join_group("prefill", "a") as member:
            while len(came) < 3:
                found = member.poll(0.1, CAPACITY)
                came |= {delivery.value for delivery in found}
                member.settle([Settlement(delivery) for delivery in found])
    link.forward_normally()
    assert came == {large, b"behind", b"beside"}
    assert bus.read_all(pipeline.dead_letter_topic) == []


@pytest.mark.parametrize(("is_slow_at_first", "late_s", "timeout_s"), [(True, LATE_S, 2.0), (False, 0.3, 5.0)])
def test_brokers_that_answer_late_are_waited_for(
    link: Proxy,
    pipeline: Pipeline,
    is_slow_at_first: bool,
    late_s: float,
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transaction takes longer than it usually may: each settlement succeeds the first time, and once, nothing counts
    as away, and each new producer has longer limits than the one before. Limits are short when brokers are quick again.
    """
    settings = SETTINGS.model_copy(update={"transaction_timeout_s": timeout_s})
    bus, made = KafkaBus(pipeline, f"127.0.0.1:{link.port}", settings), list[Transactions]()
    bus.create_topics()
    publish_messages(bus, make_messages(pipeline.job_topic("interactive"), 3))
    create = bus.create_transactions

    def create_transactions(transactional_id: str) -> Transactions:
        made.append(create(transactional_id))
        return made[-1]

    monkeypatch.setattr(bus, "create_transactions", create_transactions)
    link.delay_replies(late_s * is_slow_at_first)
    with bus.join_group("decode", "a") as member:
        held = take_deliveries(member, 3)
        link.delay_replies(late_s)
        for delivery in held[:2]:
            member.settle([make_settlement(pipeline, delivery)])
            assert member.current_problem == ""
            wait_for(lambda: member.slowness > 1, "it is known that they are slow")
        rates = [one.slowness for one in made]
        assert rates == sorted(set(rates))
        assert rates[-1] > 1
        link.delay_replies(0.0)
        monkeypatch.setattr(pace, "QUICK_S", 0.5)
        monkeypatch.setattr(kafka_member, "PROBE_INTERVAL_S", 0.1)
        wait_for(lambda: member.slowness == 1, "brokers are quick again")
        member.settle([make_settlement(pipeline, held[2])])
        assert made[-1].slowness == member.slowness
    assert list_values(bus.read_all(pipeline.results_topic)) == [b"0", b"1", b"2"]


def test_notes_of_commits_are_made_though_brokers_are_late_to_tell_a_topics_id(
    link: Proxy, pipeline: Pipeline, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "TOPIC_TIMEOUT_S", LATE_S)
    bus, topic = KafkaBus(pipeline, f"127.0.0.1:{link.port}", SETTINGS), pipeline.job_topic("interactive")
    bus.create_topics()
    for slowness in (1, 2, 4, 8):
        bus.pace.note_too_short(slowness, 0.0)
    keeper = places.PlaceKeeper(pipeline, bus.clients, redis_url, bus.pace)
    link.delay_replies(LATE_S)
    keeper.note_commits({(topic, 0): (1, "")})
    link.delay_replies(0.0)
    assert set(keeper._topic_ids) == {topic}


def test_transactions_grow_no_longer_than_brokers_allow(pipeline: Pipeline, tmp_path: Path) -> None:
    with start_or_skip(KafkaServer(tmp_path, timeouts={"transaction.max.timeout.ms": "15000"}).start) as server:
        bus = KafkaBus(pipeline, server.bootstrap, SETTINGS.model_copy(update={"transaction_timeout_s": 5.0}))
        assert [bus.pace.note_too_short(slowness, 0.0) for slowness in (1, 2)] == [True, True]
        with pytest.raises(BusUnavailable):
            bus.create_transactions("x")
        bus.create_transactions("x").close()
        assert (bus.pace.slowness, bus.pace.note_too_short(2, 0.0)) == (2, False)


def test_a_large_result_is_settled_over_a_link_that_takes_longer_than_redis_may(
    redis_url: str, pipeline: Pipeline
) -> None:
    """It takes three seconds or more, and a command of the usual size has two."""
    with Proxy(int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        bus = StreamsBus(pipeline, f"redis://127.0.0.1:{proxy.port}/0", SETTINGS)
        publish_messages(bus, [Outgoing(pipeline.request_topic("interactive"), b"asked")])
        with bus.join_group("prefill", "a") as member:
            (taken,) = take_deliveries(member, 1)
            proxy.delay_forwarding(DELAY_S)
            result = Outgoing(pipeline.results_topic, os.urandom(LARGE_BYTES))
            member.settle([Settlement(taken, [result])])
            proxy.forward_normally()
        assert [message.value for message in bus.read_all(pipeline.results_topic)] == [result.value]
        assert bus.count_unsettled()[pipeline.request_topic("interactive")] == 0


def test_a_large_request_is_claimed_over_such_a_link(redis_url: str, pipeline: Pipeline) -> None:
    """The claim takes the message to Redis, for whoever takes the request over."""
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy, closing(redis_client(f"redis://127.0.0.1:{proxy.port}/0")) as client:
        record = Record(client, pipeline, RecordSettings(lease_s=60))
        session = alive(record, "p1")
        proxy.delay_forwarding(DELAY_S)
        asked = UnclaimedMessage("r1", "b", "", os.urandom(LARGE_BYTES))
        (claim,) = record.claim_all("prefill", session, [asked])
        assert isinstance(claim, Claim)
        proxy.forward_normally()
        record.close()
