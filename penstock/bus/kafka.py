"""The bus on Apache Kafka: transactions for settling, KIP-848 groups, read_committed readers."""

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

from penstock.bus.contract import Delivery, Outgoing, check_size
from penstock.bus.kafka_partitions import Partitions
from penstock.errors import BusUnavailable, MemberFenced
from penstock.local.processes import wait_until
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import Pipeline, PriorityClass, Stage
from penstock.settings import BusSettings

if TYPE_CHECKING:
    from penstock.bus.kafka_backlog import Backlog
    from penstock.bus.kafka_follower import KafkaFollower
    from penstock.bus.kafka_member import KafkaMember

ANSWER_S = 15.0
"""How long the servers may take to answer before they count as not reachable."""
CHECK_S = 5.0

MAX_BATCH_BYTES = 2 * MAX_REQUEST_BYTES
WORK_KEPT_MS = 14 * 86400 * 1000
RESULTS_KEPT_MS = 7 * 86400 * 1000
FENCED = (
    KafkaError._FENCED,  # noqa: SLF001 - that is its name
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
)


class KafkaBus:
    """Kafka as the bus of one pipeline."""

    def __init__(
        self, pipeline: Pipeline, bootstrap: str, settings: BusSettings, access: Mapping[str, str] | None = None
    ) -> None:
        """`access`: what the brokers ask clients for, see `transport.kafka_access`."""
        self.pipeline = pipeline
        self.bootstrap = bootstrap
        self.settings = settings
        self.clients = client_settings(bootstrap, access)
        """What all clients of this bus share."""
        self._backlog: Backlog | None = None
        self._lock = threading.Lock()

    def create_topics(self) -> list[str]:
        """Make the topics that are missing, and wait until the brokers know them. Without any no right is needed."""
        missing = self.missing_topics()
        if not missing:
            return []
        admin = AdminClient(self.clients)
        made: list[str] = []
        with bus_errors():
            for topic, future in admin.create_topics([self._new(topic) for topic in missing]).items():
                try:
                    future.result(ANSWER_S)
                    made.append(topic)
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                        raise
            wait_until(lambda: self._all_led(admin), ANSWER_S, "every partition has a leader")
        return made

    def missing_topics(self) -> list[str]:
        """Those of the pipeline's topics that the brokers do not know."""
        with bus_errors():
            known = AdminClient(self.clients).list_topics(timeout=ANSWER_S).topics
        return [topic for topic in self.pipeline.topics() if topic not in known]

    def publisher(self) -> "KafkaPublisher":
        """A producing side of its own."""
        return KafkaPublisher(self)

    def member(self, stage: Stage, name: str) -> "KafkaMember":
        """Join a stage's group; an older member of the same name is fenced."""
        from penstock.bus.kafka_member import KafkaMember

        return KafkaMember(self, stage, name)

    def unsettled(self) -> dict[str, int]:
        """How far each stage's group is behind, see `kafka_backlog`."""
        from penstock.bus.kafka_backlog import Backlog

        with self._lock:
            self._backlog = self._backlog or Backlog(self.pipeline, self.clients)
        with bus_errors():
            return self._backlog.unsettled()

    def follow(self, topic: str, after: Mapping[str, str]) -> "KafkaFollower":
        """Read a topic's committed messages; a part is a partition, a place an offset."""
        from penstock.bus.kafka_follower import KafkaFollower

        return KafkaFollower(self.clients, topic, after)

    def read_all(self, topic: str) -> list[Outgoing]:
        """Every message in a topic whose transaction is committed, partition by partition."""
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
        found: list[Outgoing] = []
        try:
            with bus_errors():
                num_partitions = len(reader.list_topics(topic, ANSWER_S).topics[topic].partitions)
                reader.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(num_partitions)])
                unread = set(range(num_partitions))
                end = time.monotonic() + ANSWER_S
                while unread:
                    message = reader.poll(1.0)
                    if message is None:
                        if time.monotonic() > end:
                            raise BusUnavailable(f"Kafka: {topic} cannot be read to its end")
                        continue
                    end = time.monotonic() + ANSWER_S
                    error = message.error()
                    if error is None:
                        found.append(Outgoing(topic, message.value() or b"", read_key(message), read_headers(message)))
                    elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                        unread.discard(message.partition())
                    elif not error.retriable():
                        raise KafkaException(error)
        finally:
            reader.close()
        return found

    def check(self, timeout_s: float = CHECK_S) -> str:
        """One line about the brokers reached; raises `BusUnavailable`."""
        with bus_errors():
            metadata = AdminClient(self.clients).list_topics(timeout=timeout_s)
        return f"Kafka at {self.bootstrap}, brokers: {len(metadata.brokers)}, cluster {metadata.cluster_id}"

    def topic_settings(self, topic: str) -> dict[str, str]:
        """What a topic is made with, whatever the cluster's defaults are."""
        return {
            "max.message.bytes": str(MAX_BATCH_BYTES),
            "retention.ms": str(RESULTS_KEPT_MS if topic == self.pipeline.results else WORK_KEPT_MS),
            "min.insync.replicas": "2" if self.settings.replication > 2 else "1",
            # Compaction would keep one of several messages of a key; a limit of bytes would delete unread ones.
            "cleanup.policy": "delete",
            "retention.bytes": "-1",
            # A replica that is behind would become the leader, without what was acknowledged since.
            "unclean.leader.election.enable": "false",
            # By a producer's clock that is 14 days behind, a request would be deleted before it is read.
            "message.timestamp.type": "LogAppendTime",
        }

    def _new(self, topic: str) -> NewTopic:
        return NewTopic(topic, self.settings.partitions, self.settings.replication, config=self.topic_settings(topic))

    def _all_led(self, admin: AdminClient) -> bool:
        known = admin.list_topics(timeout=ANSWER_S).topics
        return all(
            topic in known and known[topic].partitions and all(p.leader >= 0 for p in known[topic].partitions.values())
            for topic in self.pipeline.topics()
        )


class KafkaPublisher:
    """Writes messages, each acknowledged by all in-sync replicas.

    Not idempotent on purpose: a request that a retry writes twice is one request by its id, and an idempotent
    producer's first message waits half a second for its producer id.
    """

    def __init__(self, bus: KafkaBus) -> None:
        settings = producer_settings(bus.clients) | {
            "message.timeout.ms": 10_000,
            # Else the first question for a topic's partitions waits 50 ms for a connection.
            "enable.sparse.connections": False,
        }
        self._producer = Producer(settings)
        self._partitions = Partitions(self._producer)
        self._closing = threading.Event()
        self._reports = threading.Thread(target=self._serve_reports, name="kafka-publisher", daemon=True)
        self._reports.start()

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Write the messages, all acknowledged; raises `BusUnavailable`, or `RequestTooLarge`."""
        check_size(messages)
        if not messages:
            return
        outcome = _Outcome(len(messages))
        with bus_errors():
            try:
                for message in messages:
                    produce(self._producer, message, self._partitions, outcome.report)
                outcome.wait(2 * ANSWER_S)
            except KafkaException:
                self._partitions.forget()
                raise

    def close(self) -> None:
        """Send what is left and end."""
        if not self._closing.is_set():
            self._producer.flush(ANSWER_S)
            self._closing.set()
            self._reports.join()

    def _serve_reports(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(0.1)


class _Outcome:
    """Collects the delivery reports of one call."""

    def __init__(self, num_messages: int) -> None:
        self._num_open = num_messages
        self._error: KafkaError | None = None
        self._lock = threading.Lock()
        self._all = threading.Event()

    def report(self, error: KafkaError | None, _: Message) -> None:
        with self._lock:
            self._error = self._error or error
            self._num_open -= 1
            if self._num_open == 0:
                self._all.set()

    def wait(self, timeout_s: float) -> None:
        if not self._all.wait(timeout_s):
            raise BusUnavailable(f"Kafka: no acknowledgement within {timeout_s:g} s")
        if self._error is not None:
            raise KafkaException(self._error)


def client_settings(bootstrap: str, access: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What all clients share. Lost connections show in errors, not on the console."""
    return {
        **(access or {}),
        "bootstrap.servers": bootstrap,
        "log_level": 0,
        "reconnect.backoff.max.ms": 1000,
        "socket.timeout.ms": 10_000,
    }


def producer_settings(clients: Mapping[str, Any]) -> dict[str, Any]:
    """What all producers share, beside what all clients do; keys go to the partitions where Java clients put them."""
    return {
        **clients,
        "acks": "all",
        "linger.ms": 0,
        "partitioner": "murmur2_random",
        "message.max.bytes": MAX_BATCH_BYTES,
        "queue.buffering.max.kbytes": 16 * MAX_BATCH_BYTES // 1024,
    }


def produce(producer: Producer, message: Outgoing, partitions: Partitions, report: Any) -> None:
    """Hand a message to the producer; when its queue is full, wait for room."""
    partition = partitions.choose(message)
    while True:
        try:
            producer.produce(
                message.topic,
                message.value,
                message.key,
                partition,
                headers=[(name, text.encode()) for name, text in message.headers.items()],
                on_delivery=report,
            )
            return
        except BufferError:
            producer.poll(0.1)


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Turn what the client raises into `MemberFenced` or `BusUnavailable`."""
    try:
        yield
    except KafkaException as raised:
        error: KafkaError = raised.args[0]
        if error.code() in FENCED:
            raise MemberFenced(f"a newer member has this one's place ({error.str()})") from raised
        raise BusUnavailable(f"Kafka: {error.str()}") from raised
    except TimeoutError as raised:
        raise BusUnavailable(f"Kafka: {raised}") from raised


def read_delivery(message: Message, klass: PriorityClass) -> Delivery:
    """A message as its partition's owner holds it; its position is partition and offset."""
    return Delivery(
        message.topic() or "",
        f"{message.partition()}:{message.offset()}",
        message.value() or b"",
        read_key(message),
        read_headers(message),
        klass,
        message.timestamp()[1] / 1000,
    )


def read_key(message: Message) -> str | None:
    """A message's key as text."""
    key = message.key()
    return key.decode(errors="replace") if isinstance(key, bytes) else key


def read_headers(message: Message) -> Mapping[str, str]:
    """A message's headers as text; of several with one name, the last."""
    pairs: Any = message.headers() or []
    return {name: (raw or b"").decode(errors="replace") for name, raw in pairs}
