"""What MirrorMaker copies with the configuration of `docker/mirror`, between two real brokers."""

import uuid
from contextlib import closing
from dataclasses import dataclass

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.names import Pipeline, copy_topic
from penstock.waiting import wait_until
from sim.mirror_maker import MirroredKafkas

COPY_LIMIT_S = 300.0
"""It ends hangs only."""
LARGE = b"x" * 2_000_000


@dataclass(frozen=True)
class Copied:
    """A pipeline of `eu`, and clients of both brokers."""

    pipeline: Pipeline
    eu: str
    us: str

    @property
    def results(self) -> str:
        return self.pipeline.results_topic

    def read(self, server: str, topic: str, wanted: set[bytes]) -> dict[bytes, Message]:
        """Return the visible messages of a topic by key, once the wanted ones are among them."""
        found: dict[bytes, Message] = {}
        assigned = set[int]()
        settings = {"bootstrap.servers": server, "group.id": uuid.uuid4().hex, "log_level": 0}
        with closing(Consumer(settings | {"isolation.level": "read_committed"})) as consumer:

            def has_all() -> bool:
                known = consumer.list_topics(topic, 5.0).topics[topic]
                fresh = known.partitions.keys() - assigned if known.error is None else set()
                if fresh:
                    consumer.incremental_assign([TopicPartition(topic, number, 0) for number in fresh])
                    assigned.update(fresh)
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    found[message.key() or b""] = message
                return wanted <= found.keys()

            wait_until(has_all, COPY_LIMIT_S, f"{wanted} in {topic}")
        return found

    def read_copy(self, topic: str, *wanted: bytes) -> dict[bytes, Message]:
        return self.read(self.us, copy_topic("eu", topic), {*wanted})

    def read_setting(self, server: str, topic: str, name: str) -> str:
        admin = AdminClient({"bootstrap.servers": server})
        [future] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
        return str(future.result(10)[name].value)


@pytest.fixture
def copied(regions: MirroredKafkas, pipeline: Pipeline) -> Copied:
    addresses = Addresses(kafka=regions.eu.bootstrap, pipeline=pipeline.name)
    connect_bus(addresses, BusSettings(partitions=2, replication=1)).create_topics()
    return Copied(pipeline, regions.eu.bootstrap, regions.us.bootstrap)


def open_producer(copied: Copied, **more: str) -> Producer:
    return Producer({"bootstrap.servers": copied.eu, "message.max.bytes": 16_777_216, **more})


def test_results_are_copied_as_they_were_decided(copied: Copied) -> None:
    """A result of an aborted transaction is not, one of 2 MB is, and each has the time of its first broker."""
    producer = open_producer(copied, **{"transactional.id": copied.pipeline.name})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(copied.results, b"{}", key=b"aborted", partition=0)
    producer.flush()
    producer.abort_transaction()
    producer.begin_transaction()
    producer.produce(copied.results, LARGE, key=b"large", partition=0)
    producer.produce(copied.results, b"{}", key=b"kept", partition=0, headers={"penstock-tenant": b"acme"})
    producer.commit_transaction()

    found = copied.read_copy(copied.results, b"large", b"kept")

    assert found.keys() == {b"large", b"kept"}
    assert found[b"large"].value() == LARGE
    assert found[b"kept"].headers() == [("penstock-tenant", b"acme")]
    original = copied.read(copied.eu, copied.results, {b"kept"})[b"kept"]
    # By the clock of the home's broker (LogAppendTime there), in both.
    assert found[b"kept"].timestamp()[1] == original.timestamp()[1]
    assert copied.read_setting(copied.eu, copied.results, "message.timestamp.type") == "LogAppendTime"
    assert copied.read_setting(copied.us, copy_topic("eu", copied.results), "message.timestamp.type") == "CreateTime"


def test_partitions_that_are_added_are_copied(copied: Copied) -> None:
    topic, producer = copied.pipeline.request_topic("interactive"), open_producer(copied)
    producer.produce(topic, b"{}", key=b"first", partition=0)
    producer.flush()
    copied.read_copy(topic, b"first")
    admin = AdminClient({"bootstrap.servers": copied.eu})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(10)
    producer = open_producer(copied)
    producer.produce(topic, b"{}", key=b"third", partition=2)
    producer.flush()

    assert copied.read_copy(topic, b"third")[b"third"].partition() == 2


def test_copies_are_as_durable_as_the_first(copied: Copied) -> None:
    """MirrorMaker's own list of settings leaves out min.insync.replicas."""
    topic = copied.pipeline.request_topic("batch")
    wanted = ConfigEntry("min.insync.replicas", "2", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[wanted])
    home, admin = AdminClient({"bootstrap.servers": copied.eu}), AdminClient({"bootstrap.servers": copied.us})
    home.incremental_alter_configs([resource])[resource].result(10)
    copy = copy_topic("eu", topic)

    wait_until(lambda: copy in admin.list_topics(timeout=5).topics, COPY_LIMIT_S, "the topic is copied")
    wait_until(
        lambda: copied.read_setting(copied.us, copy, "min.insync.replicas") == "2", COPY_LIMIT_S, "so is its setting"
    )
    largest = copied.read_setting(copied.eu, topic, "max.message.bytes")
    assert copied.read_setting(copied.us, copy, "max.message.bytes") == largest


def test_topics_of_one_tenant_and_jobs_stay_at_home(copied: Copied) -> None:
    own = f"{copied.results}.t-0123456789abcdef"
    admin = AdminClient({"bootstrap.servers": copied.eu})
    admin.create_topics([NewTopic(own, 1, 1)])[own].result(10)
    producer = open_producer(copied)
    for topic in (own, copied.pipeline.job_topic("interactive"), copied.results):
        producer.produce(topic, b"{}", key=b"one")
    producer.flush()
    copied.read_copy(copied.results, b"one")

    topics = AdminClient({"bootstrap.servers": copied.us}).list_topics(timeout=5).topics
    names = (copied.pipeline.request_topic("interactive"), copied.pipeline.request_topic("batch"), copied.results)
    assert {topic for topic in topics if copied.pipeline.name in topic} == {copy_topic("eu", name) for name in names}
