"""What an older version put off to be tried again is moved back to where it came from, each message once."""

from types import SimpleNamespace
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.bus.contract import Bus, Outgoing
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.offsets import encode_ranges
from penstock.bus.kafka.upgrade import _read_batches
from penstock.bus.upgrade import NOT_BEFORE, check_upgraded
from penstock.config.settings import BusSettings
from penstock.errors import UpgradeNeeded
from penstock.names import ATTEMPT_HEADER, ORIGIN_HEADER, REASON_HEADER, STACK_HEADER, TENANT_HEADER, Pipeline, Stage
from sim.waiting import wait_for
from tests.bus.buses import list_values, make_messages, publish_messages, take_deliveries


@pytest.fixture
def old_bus(bus: Bus) -> Bus:
    """Each bus with the topics of an older version beside its own."""
    if isinstance(bus, KafkaBus):
        make_old_topics(bus)
    assert (bus.count_old_retries(), bus.move_old_retries()) == (0, 0)
    check_upgraded(bus)
    return bus


def make_old_topics(bus: KafkaBus) -> None:
    admin = AdminClient(bus.clients)
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in bus.pipeline.old_retry_topics()]).values():
        future.result()


def put_off(value: bytes, origin: str, klass_topic: str) -> Outgoing:
    headers = {
        TENANT_HEADER: "t",
        ATTEMPT_HEADER: "1",
        NOT_BEFORE: "99999999999999",
        ORIGIN_HEADER: origin,
        REASON_HEADER: "a bug",
        STACK_HEADER: "here",
    }
    return Outgoing(klass_topic, value, value.decode(), headers)


def test_what_waits_goes_back_once_and_no_worker_starts_before(old_bus: Bus, pipeline: Pipeline) -> None:
    bus = old_bus
    quick, slow = pipeline.old_retry_topics()
    waiting = [put_off(str(n).encode(), pipeline.request_topic("interactive"), quick) for n in range(250)]
    waiting += [put_off(b"job", pipeline.job_topic("batch"), slow), put_off(b"?", "elsewhere", slow)]
    publish_messages(bus, waiting)
    wait_for(lambda: bus.count_old_retries() == len(waiting), "all are counted")
    with pytest.raises(UpgradeNeeded, match="penstock topics create"):
        check_upgraded(bus)
    assert bus.move_old_retries() == len(waiting)
    assert bus.move_old_retries() == 0
    check_upgraded(bus)
    again = bus.read_all(pipeline.request_topic("interactive"))
    assert sorted(int(message.value) for message in again) == list(range(250))
    assert {(message.key == message.value.decode(), *message.headers.items()) for message in again} == {
        (True, (TENANT_HEADER, "t"))
    }
    assert list_values(bus.read_all(pipeline.job_topic("batch"))) == [b"job"]
    (dead,) = bus.read_all(pipeline.dead_letter_topic)
    assert (dead.value, dead.headers[ORIGIN_HEADER]) == (b"?", slow)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_nothing_is_moved_beside_a_worker_that_runs(old_bus: Bus, pipeline: Pipeline, stage: Stage) -> None:
    bus = old_bus
    publish_messages(bus, [put_off(b"x", pipeline.input_topics(stage)["batch"], pipeline.old_retry_topics()[1])])
    wait_for(bus.count_old_retries, "it is counted")
    with bus.join_group(stage, "a") as member:
        publish_messages(bus, make_messages(pipeline.input_topics(stage)["interactive"], 1))
        take_deliveries(member, 1)
        with pytest.raises(UpgradeNeeded, match="stop all workers"):
            bus.move_old_retries()
    assert len(bus.read_all(pipeline.input_topics(stage)["batch"])) == 0
    wait_for(lambda: bus.move_old_retries() == 1, "it has left")


def test_what_the_groups_had_settled_is_left(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    """Out of order too, by the metadata of commits."""
    bus = kafka_bus
    topic = pipeline.old_retry_topics()[0]
    make_old_topics(bus)
    requests, jobs = pipeline.request_topic("interactive"), pipeline.job_topic("interactive")
    publish_messages(bus, [put_off(str(n).encode(), requests if n % 2 else jobs, topic) for n in range(6)])
    for stage, offset, metadata in (("prefill", 1, encode_ranges([(2, 4)], 1)), ("decode", 6, "")):
        consumer = Consumer({**bus.clients, "group.id": f"penstock.{pipeline.name}.{stage}"})
        consumer.commit(offsets=[TopicPartition(topic, 0, offset, metadata)], asynchronous=False)
        consumer.close()
    assert bus.count_old_retries() == 2
    assert bus.move_old_retries() == 2
    assert (bus.count_old_retries(), bus.read_all(jobs)) == (0, [])
    assert list_values(bus.read_all(requests)) == [b"1", b"5"]


def test_nothing_is_read_where_the_committed_offset_is_not_known(pipeline: Pipeline) -> None:
    """It may still change, as when the transaction that commits it is open. Not the log's beginning is meant then."""

    class Unstable:
        def committed(self, partitions: list[TopicPartition], timeout: float) -> list[SimpleNamespace]:
            error = KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT)
            return [
                SimpleNamespace(topic=p.topic, partition=p.partition, offset=-1001, metadata="", error=error)
                for p in partitions
            ]

    bus, consumer = KafkaBus(pipeline, "", BusSettings()), cast("Consumer", Unstable())
    with pytest.raises(KafkaException, match="UNSTABLE"):
        next(_read_batches(bus, "decode", consumer, [(pipeline.old_retry_topics()[0], 0)]))
