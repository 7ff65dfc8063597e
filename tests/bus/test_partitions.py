"""Partitions on Kafka: requests of one session in one of them, those of many in all, and none without a leader."""

import itertools
import json
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import redis
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from penstock.bus.contract import Delivery, Outgoing, Settlement
from penstock.bus.kafka import partitioner
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.client import client_settings
from penstock.bus.kafka.partitioner import ANY_PARTITION, Partitioner
from penstock.bus.placement import JobNeed, PromptChain, WorkerBeat, chain_prompt, choose_by_hash
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.messages import Request, decode_message
from penstock.names import CLASSES, STAGES, Pipeline
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import WorkerLoad
from penstock.worker_speed import WorkerSpeed
from sim.waiting import wait_for
from tests.bus.buses import list_values, make_messages, publish_messages, take_deliveries

NUM = 4


@pytest.fixture
def bus(kafka: str, pipeline: Pipeline) -> KafkaBus:
    made = KafkaBus(pipeline, kafka, BusSettings(partitions=NUM, transaction_timeout_s=30.0))
    made.create_topics()
    return made


def partition(delivery: Delivery) -> int:
    return int(delivery.position.split(":")[0])


def home(session: str, tenant: str) -> int:
    return choose_by_hash(chain_prompt(Request(id="r", prompt="x", session=session, tenant=tenant)).home, range(NUM))


def make_chain(home: str) -> PromptChain:
    """Return that of a prompt of which nothing but its home is known."""
    return PromptChain("interactive", home.encode(), (), 1)


def choose_hashed(home: str, count: int = NUM) -> int:
    return choose_by_hash(home.encode(), range(count))


@pytest.mark.proof
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
    with bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, 72)
        for delivery in taken:
            request = decode_message(Request, delivery.value)
            assert delivery.key == request.id
            found[request.session or ""].add(partition(delivery))
        member.settle([Settlement(delivery) for delivery in taken])
    assert len(found) == 12
    for name, partitions in found.items():
        assert partitions == {home(name, f"t{int(name[1:]) % 2}")}
    assert set.union(*found.values()) == set(range(NUM))


def test_a_client_reads_in_redis_which_worker_has_the_least_to_do(
    bus: KafkaBus, kafka: str, redis_url: str, pipeline: Pipeline
) -> None:
    for name, partitions, num_waiting in (("busy", [0, 1], 10**6), ("idle", [2, 3], 0)):
        beat, held = Heartbeat(redis_url, pipeline, "prefill", name, 100.0), dict.fromkeys(product(CLASSES, STAGES), 0)
        told = WorkerLoad().summarize_load(
            [], held, dict.fromkeys(CLASSES, partitions), dict.fromkeys(CLASSES, num_waiting)
        )
        beat.set_load_source(lambda told=told: {"load": told})  # type: ignore[misc]
        beat.take_name()
    addresses = Addresses(pipeline=pipeline.name, kafka=kafka, stream_url=redis_url)
    last = list[int]()

    def is_placed() -> bool:
        """Until the heartbeats are read a hash chooses."""
        client.submit("one more", session=f"s{len(last)}")
        last.extend(partition(delivery) for delivery in member.poll(0.1, {"interactive": 100}))
        return len(last) > 40 and {2, 3} == set(last[-20:])

    with Client(addresses) as client, bus.join_group("prefill", "a") as member:
        wait_for(is_placed, "all go to the partitions of the worker that has nothing to do", every_s=0.0)


@pytest.mark.proof
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_job_goes_to_the_worker_that_decodes_least(
    in_transaction: bool, kafka: str, redis_url: str, pipeline: Pipeline
) -> None:
    bus = KafkaBus(pipeline, kafka, BusSettings(partitions=NUM, transaction_timeout_s=30.0), redis_url=redis_url)
    bus.create_topics()
    for name, partitions, num_rows, used in (("few", [0], 3, 50), ("more", [1], 9, 50), ("full", [2, 3], 0, 99)):
        beat, held = Heartbeat(redis_url, pipeline, "decode", name, 100.0), dict.fromkeys(product(CLASSES, STAGES), 0)
        told = WorkerLoad().summarize_load(
            [], held, dict.fromkeys(CLASSES, ()), dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, partitions)
        )
        told["speed"] = WorkerSpeed(0.001, 0.001, num_rows, step_s=0.02, row_s=0.001).as_json()
        beat.set_load_source(lambda told=told, used=used: {"load": told, "pool": {"used": used, "total": 100}})  # type: ignore[misc]
        beat.take_name()
    topic, result, need = pipeline.job_topic("interactive"), pipeline.results_topic, JobNeed("interactive", 2)
    with bus.join_group("prefill", "a") as member, bus.join_group("decode", "b") as after:
        last = list[int]()

        def is_placed() -> bool:
            """Until the heartbeats are read the hash of the key chooses."""
            publish_messages(bus, make_messages(pipeline.request_topic("interactive"), 1))
            (taken,) = take_deliveries(member, 1)
            job = Outgoing(topic, b"job", f"k{len(last)}", job=need)
            outputs = [job, Outgoing(result, b"{}", "k")] if in_transaction else [job]
            member.settle([Settlement(taken, outputs)])
            last.extend(partition(delivery) for delivery in take_deliveries(after, 1))
            return len(last) > 3 and set(last[-3:]) == {0}

        wait_for(is_placed, "jobs go to the worker with the fewest rows and room", every_s=0.0)


def test_outputs_of_a_settlement_keep_together_too(bus: KafkaBus, pipeline: Pipeline) -> None:
    publish_messages(bus, make_messages(pipeline.request_topic("batch"), 12))
    topic = pipeline.job_topic("batch")
    with bus.join_group("prefill", "a") as member, bus.join_group("decode", "b") as after:
        taken = take_deliveries(member, 12)
        outputs = [Outgoing(topic, d.value, d.key, {}, make_chain(f"a{number % 3}")) for number, d in enumerate(taken)]
        member.settle([Settlement(d, [o]) for d, o in zip(taken, outputs, strict=True)])
        where = {d.value: partition(d) for d in take_deliveries(after, 12)}
    assert where == {o.value: choose_hashed(f"a{number % 3}") for number, o in enumerate(outputs)}


def test_partitions_that_are_added_are_used(bus: KafkaBus, kafka: str, pipeline: Pipeline) -> None:
    topic = pipeline.request_topic("interactive")
    moves = next(key for key in map(str, range(1000)) if choose_hashed(key, NUM + 1) == NUM)
    with closing(bus.create_publisher()) as publisher, bus.join_group("prefill", "a") as member:
        publisher.publish([Outgoing(topic, b"before", "k", {}, make_chain(moves))])
        assert partition(take_deliveries(member, 1)[0]) == choose_hashed(moves)
        admin = AdminClient(client_settings(kafka))
        admin.create_partitions([NewPartitions(topic, NUM + 1)])[topic].result()
        seen: set[int] = set()

        def arrived() -> bool:
            publisher.publish([Outgoing(topic, b"after", "k", {}, make_chain(moves))])
            seen.update(partition(d) for d in member.poll(0.5, {"interactive": 100}))
            return NUM in seen

        wait_for(arrived, "the new partition is used")


class Brokers:
    """Stands for a producer: says which partitions of any topic have a leader, as librdkafka does."""

    def __init__(self, leaders: list[int]) -> None:
        self.leaders, self.num_asked = leaders, 0
        self.failure: Exception | None = None
        self.knows = True

    def list_topics(self, topic: str, _timeout_s: float) -> SimpleNamespace:
        self.num_asked += 1
        if self.failure is not None:
            raise self.failure
        partitions = {number: SimpleNamespace(leader=leader) for number, leader in enumerate(self.leaders)}
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=partitions)} if self.knows else {})


def among(leaders: list[int]) -> tuple[Partitioner, Brokers]:
    brokers = Brokers(leaders)
    return Partitioner(brokers), brokers  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [None, KafkaException(KafkaError(KafkaError._TIMED_OUT))])
def test_brokers_that_do_not_know_a_topic_or_do_not_answer_are_asked_again_soon(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioner, "LEADERS_RETRY_S", 0.0)
    partitions, brokers = among([0] * NUM)
    message = Outgoing("requests", b"", "k", {}, make_chain("a"))
    brokers.failure, brokers.knows = failure, failure is not None
    assert partitions.choose_partition(message) == ANY_PARTITION
    brokers.failure, brokers.knows = None, True
    assert partitions.choose_partition(message) == choose_hashed("a")


def test_no_message_is_put_in_a_partition_without_leader() -> None:
    partitions, brokers = among([1, -1, 2, -1])
    messages = [Outgoing("requests", b"", f"k{n}", {}, make_chain(f"a{n}") if n % 2 else None) for n in range(100)]
    assert {partitions.choose_partition(message) for message in messages} == {0, 2}
    kept = next(m for m in messages if m.chain and choose_by_hash(m.chain.home, range(NUM)) == 2)
    assert partitions.choose_partition(kept) == 2, "the others stay where they are"
    assert brokers.num_asked == 1, "not for each message"


def test_while_no_partition_has_a_leader_each_message_waits_in_its_own() -> None:
    partitions, _ = among([-1] * NUM)
    assert partitions.choose_partition(Outgoing("requests", b"", "k", {}, make_chain("a"))) == choose_hashed("a")
    assert partitions.choose_partition(Outgoing("requests", b"", "k")) == ANY_PARTITION


def test_a_leader_that_is_lost_or_comes_back_is_noticed_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "LEADERS_REFRESH_S", 0.0)
    partitions, brokers = among([1] * NUM)
    of_two = next(key for key in map(str, itertools.count()) if choose_hashed(key) == 2)

    def used() -> int:
        return partitions.choose_partition(Outgoing("requests", b"", "k", {}, make_chain(of_two)))

    assert used() == 2
    brokers.leaders[2] = -1
    wait_for(lambda: used() != 2, "the other partitions are used")
    brokers.leaders[2] = 2
    wait_for(lambda: used() == 2, "their own partition is used again")


def test_requests_go_where_heartbeats_say_as_soon_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read on a thread, and where Redis is away the last ones hold until they are too old."""
    monkeypatch.setattr(partitioner, "BEATS_REFRESH_S", 0.0)
    answers: list[list[WorkerBeat] | Exception] = [redis.ConnectionError("away")]
    num_read = 0

    def read_beats() -> list[WorkerBeat]:
        nonlocal num_read
        num_read += 1
        if isinstance(answer := answers[0], Exception):
            raise answer
        return answer

    partitions = Partitioner(Brokers([0] * NUM), read_beats)  # type: ignore[arg-type]
    told = list[str]()
    message = Outgoing("requests", b"", "k", {}, replace(make_chain("a"), explain=told.append))

    def choose() -> int:
        return partitions.choose_partition(message)

    free = (choose_hashed("a") + 1) % NUM
    wait_for(lambda: choose() == choose_hashed("a") and num_read > 3, "it was asked again, in vain")
    assert choose() == choose_hashed("a")
    read, none = {"interactive": [free], "batch": []}, {"interactive": 0, "batch": 0}
    now_s = time.monotonic()
    answers[0] = [WorkerBeat("prefill:a", now_s, now_s + 1e6, read, none)]  # type: ignore[arg-type]
    wait_for(lambda: choose() == free, "the worker's partition is used")
    answers[0], num_before = redis.ConnectionError("away"), num_read
    wait_for(lambda: choose() == free and num_read > num_before + 2, "it was asked again, in vain")
    assert choose() == free
    assert json.loads(told[-1])["worker"] == "prefill:a"
    answers[0] = []
    wait_for(lambda: choose() == choose_hashed("a"), "there is no worker any more")


def test_a_message_that_the_brokers_refuse_fails_alone(
    bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Partitioner.choose_partition

    def nowhere(partitions: Partitioner, message: Outgoing) -> int:
        return NUM + 7 if message.value == b"bad" else choose(partitions, message)

    monkeypatch.setattr(Partitioner, "choose_partition", nowhere)
    topic = pipeline.request_topic("interactive")
    with closing(bus.create_publisher()) as publisher:
        publisher.publish([Outgoing(topic, b"0")])  # now the number of partitions is known
        good, bad, after = publisher.send_messages(
            [Outgoing(topic, b"1"), Outgoing(topic, b"bad"), Outgoing(topic, b"2")]
        )
        assert good.result() != after.result()
        with pytest.raises(BusUnavailable):
            bad.result()
    assert list_values(bus.read_all(topic)) == [b"0", b"1", b"2"]
