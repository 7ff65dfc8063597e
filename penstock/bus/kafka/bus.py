"""The bus on Apache Kafka: KIP-848 groups, results settled in transactions, read_committed readers."""

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.bus.contract import (
    Outgoing,
    check_size,
    create_started_future,
    find_size_error,
    wait_until_acknowledged,
)
from penstock.bus.kafka.backlog import GroupLag
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    MAX_BATCH_BYTES,
    bus_errors,
    parse_headers,
    parse_key,
    produce_message,
    producer_settings,
)
from penstock.bus.kafka.clients import KafkaClientFactory
from penstock.bus.kafka.follower import KafkaFollower
from penstock.bus.kafka.member import KafkaMember
from penstock.bus.kafka.partitions import Partitioner
from penstock.bus.kafka.upgrade import count_old_retries, move_old_retries
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.names import Pipeline, Stage
from penstock.waiting import wait_until

log = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 20.0
"""How long a published message may wait to be acknowledged."""
CHECK_TIMEOUT_S = 5.0
OPEN_TRANSACTION_WAIT_S = 3.0
"""How long who reads a whole topic waits for transactions that are open there."""

WORK_RETENTION_MS = 14 * 86400 * 1000
RESULTS_RETENTION_MS = 7 * 86400 * 1000


class KafkaBus(KafkaClientFactory):
    """Kafka as the bus of one pipeline."""

    def __init__(
        self, pipeline: Pipeline, bootstrap: str, settings: BusSettings, access: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(pipeline, bootstrap, settings, access)
        self._backlog: GroupLag | None = None
        self._lock = threading.Lock()

    def create_topics(self) -> list[str]:
        """Make the topics that are missing, and wait until the brokers know them. Without any no right is needed."""
        missing = self.find_missing_topics()
        if not missing:
            return []
        admin = AdminClient(self.clients)
        made: list[str] = []
        with bus_errors():
            for topic, future in admin.create_topics([self._define_topic(topic) for topic in missing]).items():
                try:
                    future.result(BROKER_TIMEOUT_S)
                    made.append(topic)
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                        raise
            wait_until(lambda: self._have_all_leaders(admin), BROKER_TIMEOUT_S, "every partition has a leader")
        return made

    def find_missing_topics(self) -> list[str]:
        """Those of the pipeline's topics that the brokers do not know."""
        with bus_errors():
            known = AdminClient(self.clients).list_topics(timeout=BROKER_TIMEOUT_S).topics
        return [topic for topic in self.pipeline.all_topics() if topic not in known]

    def count_old_retries(self) -> int:
        """What an older version left, see `penstock.bus.kafka.upgrade`."""
        with bus_errors():
            return count_old_retries(self)

    def move_old_retries(self) -> int:
        """Put it back to where it came from."""
        with bus_errors():
            return move_old_retries(self)

    def create_publisher(self) -> "KafkaPublisher":
        """A producing side of its own."""
        return KafkaPublisher(self)

    def join_group(self, stage: Stage, name: str) -> KafkaMember:
        """Join a stage's group; in decode an older member of the same name is fenced."""
        return KafkaMember(self, stage, name)

    def count_unsettled(self) -> dict[str, int]:
        """How far each stage's group is behind, see `GroupLag`."""
        with self._lock:
            self._backlog = self._backlog or GroupLag(self.pipeline, self.clients)
        with bus_errors():
            return self._backlog.count_unsettled()

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> KafkaFollower:
        """Read a topic's committed messages; a part is a partition, a place an offset."""
        return KafkaFollower(self.clients, topic, after)

    def read_all(self, topic: str) -> list[Outgoing]:
        """Every message in a topic whose transaction is committed, partition by partition.

        A transaction that is just being committed counts: its producer knows of it before its readers do. So it is read
        as far as the log goes, and what is still open there is waited for, for a moment.
        """
        reader = Consumer(
            self.clients
            | {
                "group.id": f"{topic}.tool-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
            }
        )
        try:
            with bus_errors():
                partitions = reader.list_topics(topic, BROKER_TIMEOUT_S).topics[topic].partitions
                reader.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
                return _read_to_end(reader, topic, set(partitions))
        finally:
            reader.close()

    def check_connection(self, timeout_s: float = CHECK_TIMEOUT_S) -> str:
        """One line about the brokers reached; raises `BusUnavailable`."""
        with bus_errors():
            metadata = AdminClient(self.clients).list_topics(timeout=timeout_s)
        return f"Kafka at {self.bootstrap}, brokers: {len(metadata.brokers)}, cluster {metadata.cluster_id}"

    def topic_settings(self, topic: str) -> dict[str, str]:
        """What a topic is made with, whatever the cluster's defaults are."""
        return {
            "max.message.bytes": str(MAX_BATCH_BYTES),
            "retention.ms": str(RESULTS_RETENTION_MS if topic == self.pipeline.results_topic else WORK_RETENTION_MS),
            "min.insync.replicas": "2" if self.settings.replication > 2 else "1",
            # Compaction would keep one of several messages of a key; a limit of bytes would delete unread ones.
            "cleanup.policy": "delete",
            "retention.bytes": "-1",
            # A replica that is behind would become the leader, without what was acknowledged since.
            "unclean.leader.election.enable": "false",
            # By a producer's clock that is 14 days behind, a request would be deleted before it is read.
            "message.timestamp.type": "LogAppendTime",
        }

    def _define_topic(self, topic: str) -> NewTopic:
        return NewTopic(topic, self.settings.partitions, self.settings.replication, config=self.topic_settings(topic))

    def _have_all_leaders(self, admin: AdminClient) -> bool:
        known = admin.list_topics(timeout=BROKER_TIMEOUT_S).topics
        return all(
            topic in known and known[topic].partitions and all(p.leader >= 0 for p in known[topic].partitions.values())
            for topic in self.pipeline.all_topics()
        )


def _read_to_end(reader: Consumer, topic: str, unread: set[int]) -> list[Outgoing]:
    """Read these partitions to where they ended when their end was reached first; see `KafkaBus.read_all`."""
    found: list[Outgoing] = []
    ends: dict[int, int] = {}  # of partitions with a transaction that is open
    until = time.monotonic() + BROKER_TIMEOUT_S
    while unread or (ends and time.monotonic() < until):
        message = reader.poll(0.1 if ends else 1.0)
        if message is None:
            if unread and time.monotonic() > until:
                raise BusUnavailable(f"Kafka: {topic} cannot be read to its end")
            continue
        error, number, offset, had_more = message.error(), message.partition() or 0, message.offset() or 0, bool(unread)
        if error is None:
            found.append(Outgoing(topic, message.value() or b"", parse_key(message), parse_headers(message)))
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is its name
            if number in unread:
                unread.discard(number)
                ends[number] = reader.get_watermark_offsets(TopicPartition(topic, number), cached=True)[1]
        elif not error.retriable():
            raise KafkaException(error)
        if ends.get(number, offset + 1) <= offset:
            del ends[number]
        if had_more:
            until = time.monotonic() + (BROKER_TIMEOUT_S if unread else OPEN_TRANSACTION_WAIT_S)
    return found


class KafkaPublisher:
    """Writes messages, each acknowledged by all in-sync replicas.

    Not idempotent on purpose: a request that a retry writes twice is one request by its id, and an idempotent
    producer's first message waits half a second for its producer id.
    """

    def __init__(self, bus: KafkaBus) -> None:
        settings = producer_settings(bus.clients) | {
            # Longer than a new leader takes to be chosen where brokers have Kafka's defaults: 13 s.
            "message.timeout.ms": int(ACKNOWLEDGE_TIMEOUT_S * 1000),
            # Else the first question for a topic's partitions waits 50 ms for a connection.
            "enable.sparse.connections": False,
        }
        self._producer = Producer(settings)
        self._partitions = Partitioner(self._producer)
        self._closing = threading.Event()
        self._reports = threading.Thread(target=self._serve_reports, name="kafka-publisher", daemon=True)
        self._reports.start()

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[None]]:
        """Hand the messages to the producer; see `contract.Publisher.send_messages`."""
        return [self._send_message(message) for message in messages]

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Write the messages, all acknowledged; raises `BusUnavailable`, or `RequestTooLarge`."""
        check_size(messages)
        wait_until_acknowledged(self.send_messages(messages), ACKNOWLEDGE_TIMEOUT_S + BROKER_TIMEOUT_S)

    def close(self) -> None:
        """Send what is left and end. What is not acknowledged in time raises `BusUnavailable` to whoever waits."""
        if not self._closing.is_set():
            if self._producer.flush(BROKER_TIMEOUT_S):
                self._producer.purge()
                self._producer.flush(BROKER_TIMEOUT_S)
            self._closing.set()
            self._reports.join()

    def _send_message(self, message: Outgoing) -> Future[None]:
        sent = create_started_future()

        def report(error: KafkaError | None, _: Message | None = None) -> None:
            if error is None:
                sent.set_result(None)
            else:
                self._partitions.forget_leaders()
                sent.set_exception(BusUnavailable(f"Kafka: {error.str()}"))

        if (refused := find_size_error(message)) is not None:
            sent.set_exception(refused)
            return sent
        try:
            produce_message(self._producer, message, self._partitions, report)
        except KafkaException as raised:
            report(raised.args[0])
        return sent

    def _serve_reports(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(0.1)
