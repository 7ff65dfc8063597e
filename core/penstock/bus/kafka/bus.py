"""The bus on Apache Kafka: KIP-848 groups, results settled in transactions, read_committed readers."""

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, ResourceType, TopicMetadata  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from penstock.bus.beats import BeatReader
from penstock.bus.contract import (
    Member,
    Outgoing,
    check_size,
    create_started_future,
    find_size_error,
    wait_until_acknowledged,
)
from penstock.bus.joined import EventBell, JoinedMember, join_both
from penstock.bus.kafka.admin_lookups import GroupLag, read_settings
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    MAX_BATCH_BYTES,
    bus_errors,
    produce_message,
    producer_settings,
    to_bus_error,
)
from penstock.bus.kafka.client_factory import KafkaClientFactory
from penstock.bus.kafka.follower import KafkaFollower, read_topic
from penstock.bus.kafka.member import KafkaMember
from penstock.bus.kafka.partitioner import Partitioner
from penstock.bus.kafka.position_lookup import LookupThread
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError, TopicsMissing
from penstock.names import Pipeline, WorkerKind, add_tenant, find_shared_topic, split_topic
from penstock.waiting import wait_until

log = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 20.0
"""How long a published message may wait to be acknowledged."""
CHECK_TIMEOUT_S = 5.0
WORK_RETENTION_MS = 14 * 86400 * 1000
RESULTS_RETENTION_MS = 7 * 86400 * 1000
MAX_TENANTS_WITH_TOPICS = 100
"""How many tenants of a pipeline may have topics of their own. Each has four of as many partitions as there are in the
shared ones, and two of one: 18 where there are 4. A worker asks for all that it reads in each fetch.
"""
MINIMUM_SETTINGS = ("max.message.bytes", "retention.ms", "min.insync.replicas")
"""Settings of an existing topic that may be larger than `KafkaBus.topic_settings`; all others have to be equal."""
UNLIMITED = -1


class KafkaBus(KafkaClientFactory):
    """Kafka as the bus of one pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        bootstrap: str,
        settings: BusSettings,
        access: Mapping[str, Any] | None = None,
        redis_url: str = "",
    ) -> None:
        """`redis_url`: see `redis_url` of the factory; without it a hash places requests."""
        super().__init__(pipeline, bootstrap, settings, access)
        self.redis_url = redis_url
        self._backlog: GroupLag | None = None
        self._admin: AdminClient | None = None
        self._lock = threading.Lock()

    def create_topics(self, tenant: str = "") -> list[str]:
        """Create the topics that are missing, and wait until the brokers know them. If none is, no right is needed.

        With a tenant these are its own, in this order: 1. those of results, dead letters and jobs; 2. those of
        requests. After a crash between the two nothing can be sent to them yet: what is accepted can be answered.
        """
        if not tenant:
            return self._create_missing(self.pipeline.all_topics())
        self._check_own_topics(tenant)
        *outputs, batch, interactive = self.pipeline.list_own_topics(tenant)
        return [*self._create_missing(outputs), *self._create_missing([batch, interactive])]

    def _check_own_topics(self, tenant: str) -> None:
        """Raise `SettingsError` where a tenant's own topics would be too many, or the shared ones are missing."""
        known = self.list_topics()
        if self.pipeline.results_topic not in known:
            raise SettingsError(f"the pipeline {self.pipeline.name!r} has no topics yet: penstock topics create")
        owners = {split_topic(topic)[1] for topic in self.pipeline.find_own_topics(known)}
        if len(owners - {add_tenant("", tenant)}) >= MAX_TENANTS_WITH_TOPICS:
            raise SettingsError(
                f"{MAX_TENANTS_WITH_TOPICS} tenants of {self.pipeline.name!r} have own topics, the most there may be: "
                "give some of them a pipeline of their own"
            )

    def _create_missing(self, topics: Sequence[str]) -> list[str]:
        missing = self.find_missing(topics)
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
            wait_until(lambda: _have_all_leaders(admin, topics), BROKER_TIMEOUT_S, "every partition has a leader")
        return made

    def find_missing_topics(self) -> list[str]:
        """Return the pipeline's topics that the brokers do not know."""
        return self.find_missing(self.pipeline.all_topics())

    def find_missing(self, topics: Sequence[str]) -> list[str]:
        """Return those of some topics that the brokers do not know."""
        known = self.list_topics()
        return [topic for topic in topics if topic not in known]

    def find_own_topics(self) -> list[str]:
        """Return the topics that tenants have of their own."""
        return self.pipeline.find_own_topics(self.list_topics())

    def list_topics(self) -> dict[str, TopicMetadata]:
        """Return all topics that the brokers know. Raise `BusUnavailable`."""
        with bus_errors():
            return AdminClient(self.clients).list_topics(timeout=BROKER_TIMEOUT_S).topics

    def create_publisher(self) -> "KafkaPublisher":
        """Return a publisher with a connection of its own."""
        return KafkaPublisher(self)

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group, and return the member. One with transactions fences an older one of the same name."""
        if stage == "auto":
            bell, lookups = EventBell(), LookupThread(name)
            both = join_both(lambda kind: KafkaMember(self, kind, name, bell.ring, lookups))
            return JoinedMember(self.pipeline, *both, bell)
        return KafkaMember(self, stage, name)

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled, see `GroupLag`."""
        with bus_errors():
            return self._open_backlog().count_unsettled()

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places at which no message waits; see `contract.Bus.find_gone`."""
        with bus_errors():
            return self._open_backlog().find_gone(places)

    def _open_backlog(self) -> GroupLag:
        with self._lock:
            self._backlog = self._backlog or GroupLag(self.pipeline, self.clients)
            return self._backlog

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> KafkaFollower:
        """Return a follower of a topic's committed messages."""
        return KafkaFollower(self.clients | self.near, topic, after)

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every committed message in a topic that can be unpacked, partition by partition."""
        return read_topic(self.clients, topic)

    def check_connection(self, timeout_s: float = CHECK_TIMEOUT_S) -> str:
        """Return one line about the brokers. Raise `BusUnavailable`."""
        with self._lock:
            admin = self._admin = self._admin or AdminClient(self.clients)
        with bus_errors(), self.pace.ask(timeout_s) as limit_s:  # brokers that are slow answer one of the next calls
            metadata = admin.list_topics(timeout=limit_s)
        return f"Kafka at {self.bootstrap}, brokers: {len(metadata.brokers)}, cluster {metadata.cluster_id}"

    def close(self) -> None:
        """Free the connections that `count_unsettled` and `check_connection` keep."""
        with self._lock:
            backlog, self._backlog, self._admin = self._backlog, None, None
        if backlog is not None:
            backlog.close()

    def topic_settings(self, topic: str) -> dict[str, str]:
        """Return the settings with which a topic is created, whatever the cluster's defaults are."""
        is_result = find_shared_topic(topic) == self.pipeline.results_topic
        return {
            "max.message.bytes": str(MAX_BATCH_BYTES),
            "retention.ms": str(RESULTS_RETENTION_MS if is_result else WORK_RETENTION_MS),
            "min.insync.replicas": "2" if self.settings.replication > 2 else "1",
            # Compaction would keep one of several messages of a key; a limit of bytes would delete unread ones.
            "cleanup.policy": "delete",
            "retention.bytes": "-1",
            # Else a replica that is behind could become the leader, and acknowledged messages would be lost.
            "unclean.leader.election.enable": "false",
            # By the clock of a producer that is 14 days behind, a request would be deleted before it is read.
            "message.timestamp.type": "LogAppendTime",
        }

    def _define_topic(self, topic: str) -> NewTopic:
        shared, own = split_topic(topic)
        # As many partitions as the shared topic has: then the assignor gives each worker those of the same numbers, so
        # that a partition is chosen in them as there. One tenant's results and dead letters need no more than one.
        is_output = shared in {self.pipeline.results_topic, self.pipeline.dead_letter_topic}
        num_partitions = 1 if own and is_output else self._count_partitions(shared) if own else self.settings.partitions
        return NewTopic(topic, num_partitions, self.settings.replication, config=self.topic_settings(topic))

    def _count_partitions(self, topic: str) -> int:
        known = AdminClient(self.clients).list_topics(topic, BROKER_TIMEOUT_S).topics[topic]
        return len(known.partitions) or self.settings.partitions


def _have_all_leaders(admin: AdminClient, topics: Iterable[str]) -> bool:
    known = admin.list_topics(timeout=BROKER_TIMEOUT_S).topics
    return all(
        topic in known and known[topic].partitions and all(p.leader >= 0 for p in known[topic].partitions.values())
        for topic in topics
    )


def find_wrong_settings(bus: KafkaBus) -> dict[str, dict[str, str]]:
    """Return the settings of the pipeline's existing topics that break a promise, by topic, with their present values.

    Raise `BusUnavailable`, also where the user may not see the settings.
    """
    found = {
        topic: {
            name: value
            for name, value in settings.items()
            if not _is_sufficient(name, value, bus.topic_settings(topic)[name])
        }
        for topic, settings in read_topic_settings(bus).items()
    }
    return {topic: wrong for topic, wrong in found.items() if wrong}


def describe_own_topics(bus: KafkaBus) -> tuple[str, list[str]]:
    """Return how many topics tenants have of their own, empty without any, and what is wrong with them. Raise
    `BusUnavailable`.
    """
    known = bus.list_topics()
    counts = {name: len(topic.partitions) for name, topic in known.items()}
    own, shared = bus.pipeline.find_own_topics(known), bus.pipeline.all_topics()
    tenants = sorted({split_topic(topic)[1] for topic in own})
    wrong = [f"{topic}{tenant} is missing" for tenant in tenants for topic in shared if topic + tenant not in known]
    for topic in own:
        name = find_shared_topic(topic)
        if name not in {bus.pipeline.results_topic, bus.pipeline.dead_letter_topic} and counts[topic] != counts[name]:
            wrong.append(f"{topic} has {counts[topic]} partitions, and {name} {counts[name]}")
    found = f"tenants: {len(tenants)}, partitions: {sum(counts[topic] for topic in own)}" if tenants else ""
    return found, wrong


def find_old_work(bus: KafkaBus) -> list[str]:
    """Return the topics with a message that its group has not finished for half of the time for which it is kept.

    Raise `BusUnavailable`.
    """
    kept = {topic: int(settings["retention.ms"]) for topic, settings in read_topic_settings(bus).items()}
    with contextlib.closing(GroupLag(bus.pipeline, bus.clients)) as lag, bus_errors():
        limits = {one: kept[one] for one in lag.topics if kept.get(one, UNLIMITED) != UNLIMITED}
        return [one for one, limit_ms in limits.items() if lag.has_older(one, limit_ms / 2)]


def read_topic_settings(bus: KafkaBus) -> dict[str, dict[str, str]]:
    """Return those settings of the pipeline's topics that it sets, by topic. Raise `BusUnavailable`."""
    topics = [*bus.pipeline.all_topics(), *bus.find_own_topics()]
    with bus_errors():
        found = read_settings(AdminClient(bus.clients), ResourceType.TOPIC, topics)
    return {topic: {name: found[topic][name] for name in bus.topic_settings(topic)} for topic in topics}


def alter_command(bus: KafkaBus, topic: str, names: Mapping[str, str]) -> str:
    """Return the command of Kafka's own tools that gives these settings of a topic their values for new topics."""
    wanted = bus.topic_settings(topic)
    config = ",".join(f"{name}={wanted[name]}" for name in names)
    return (
        f"kafka-configs.sh --bootstrap-server {bus.bootstrap} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {config}"
    )


def _is_sufficient(name: str, value: str, wanted: str) -> bool:
    if name in MINIMUM_SETTINGS:
        return int(value) == UNLIMITED or int(value) >= int(wanted)
    return value == wanted


class KafkaPublisher:
    """Writes messages, each acknowledged by all in-sync replicas."""

    # Its producer is not idempotent on purpose: a request that a retry writes twice is one request by its id, and the
    # first message of an idempotent producer waits half a second for its producer id.

    def __init__(self, bus: KafkaBus) -> None:
        settings = producer_settings(bus.clients) | {
            # Longer than it takes to elect a new leader where brokers have Kafka's defaults, which is 13 s.
            "message.timeout.ms": int(ACKNOWLEDGE_TIMEOUT_S * 1000),
            # Else the first lookup of a topic's partitions waits 50 ms for a connection.
            "enable.sparse.connections": False,
        }
        self._producer = Producer(settings)
        self._beats = BeatReader(bus.redis_url, bus.pipeline) if bus.redis_url else None
        self._partitions = Partitioner(self._producer, self._beats.read_beats if self._beats else None)
        self._closing = threading.Event()
        self._reports = threading.Thread(target=self._serve_reports, name="kafka-publisher", daemon=True)
        self._reports.start()

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[str]]:
        """Hand the messages to the producer, and return a future for each; see `contract.Publisher.send_messages`."""
        return [self._send_message(message) for message in messages]

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """Write the messages, all acknowledged. Return their places. Raise `BusUnavailable` or `RequestTooLarge`."""
        check_size(messages)
        return wait_until_acknowledged(self.send_messages(messages), ACKNOWLEDGE_TIMEOUT_S + BROKER_TIMEOUT_S)

    def close(self) -> None:
        """Send what is left and end. Futures of messages that are not acknowledged in time raise `BusUnavailable`."""
        if not self._closing.is_set():
            if self._producer.flush(BROKER_TIMEOUT_S):
                self._producer.purge()
                self._producer.flush(BROKER_TIMEOUT_S)
            self._closing.set()
            self._reports.join()
            if self._beats is not None:
                self._beats.close()

    def _send_message(self, message: Outgoing) -> Future[str]:
        sent = create_started_future()

        def report(error: KafkaError | None, written: Message | None = None) -> None:
            if error is None:
                assert written is not None, "what is acknowledged is told"
                sent.set_result(f"{message.topic}@{written.partition()}:{written.offset()}")
            else:
                self._partitions.forget_leaders()
                sent.set_exception(to_bus_error(error))

        if (refused := find_size_error(message)) is not None:
            sent.set_exception(refused)
            return sent
        try:
            produce_message(self._producer, message, self._partitions, report)
        except KafkaException as raised:
            report(raised.args[0])
        except TopicsMissing as raised:
            sent.set_exception(raised)
        return sent

    def _serve_reports(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(0.1)
