"""The common part of all clients of Kafka: their settings, how they write and read a message, and their errors."""

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing, as_bytes, as_text
from penstock.bus.kafka.offsets import Partition
from penstock.bus.kafka.partitioner import ANY_PARTITION, Partitioner
from penstock.config.tokens import describe_token_error
from penstock.errors import BusUnavailable, MemberFenced, RequestTooLarge
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import PriorityClass
from penstock.redis.client import log_outage

log = logging.getLogger(__name__)


BROKER_TIMEOUT_S = 15.0
"""Brokers that do not answer within this time count as not reachable."""
SOCKET_TIMEOUT_S = 10.0
MAX_BATCH_BYTES = 2 * MAX_REQUEST_BYTES
FETCH_BYTES = 2**20
"""How much brokers send at once; a larger batch comes alone. It arrives together: over a slow link
a small message waits for all of it, and a member takes what does not arrive for long for a fault.
"""
FETCH_LIMITS = {
    "max.partition.fetch.bytes": FETCH_BYTES,
    "fetch.max.bytes": FETCH_BYTES,
    "receive.message.max.bytes": 4 * MAX_BATCH_BYTES,
}
"""Settings of all consumers of a stage's topics.

The last one also limits the size of a batch once it is unpacked. It is equal for all, so that all pass over the same
batches.
"""
FENCED_ERRORS = (
    KafkaError._FENCED,  # noqa: SLF001 - that is its name
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
)
TOO_LARGE_ERRORS = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
"""Errors with which brokers refuse a message that is larger than its topic takes."""
DAMAGED_BATCH_ERRORS = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG)  # noqa: SLF001 - that is their name
"""Errors that a consumer returns in place of a batch that it cannot unpack: it is damaged, or larger than allowed."""
MAX_UNPACK_ATTEMPTS = 3
"""How often a batch is fetched before it is passed over: it may have been damaged on the way here."""


def client_settings(bootstrap: str, access: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of all clients. librdkafka writes nothing to the console: lost connections show in errors."""
    return {
        **(access or {}),
        "bootstrap.servers": bootstrap,
        "log_level": 0,
        "reconnect.backoff.max.ms": 1000,
        "socket.timeout.ms": int(SOCKET_TIMEOUT_S * 1000),
        # A client without a token knows by itself only that the brokers do not answer in time.
        "error_cb": _log_missing_token,
    }


def _log_missing_token(error: KafkaError) -> None:
    if reason := describe_token_error(error.str()):
        log_outage(log, f"Kafka: {reason}")


def producer_settings(clients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all producers. Keys go to the same partitions as with Java clients."""
    return {
        **clients,
        "acks": "all",
        "linger.ms": 0,
        "partitioner": "murmur2_random",
        "message.max.bytes": MAX_BATCH_BYTES,
        "queue.buffering.max.kbytes": 16 * MAX_BATCH_BYTES // 1024,
    }


def produce_message(producer: Producer, message: Outgoing, partitions: Partitioner, report: Any) -> None:
    """Hand a message to the producer. Wait while its queue is full."""
    if message.is_reply:  # by its key, as all its partitions have leaders
        partition = ANY_PARTITION if message.partition is None else message.partition
    else:
        partition = partitions.choose_partition(message)
    while True:
        try:
            producer.produce(
                message.topic,
                message.value,
                None if message.key is None else as_bytes(message.key),
                partition,
                headers=[(name, as_bytes(text)) for name, text in message.headers.items()],
                on_delivery=report,
            )
            return
        except BufferError:
            producer.poll(0.1)


def to_bus_error(error: KafkaError) -> RequestTooLarge | BusUnavailable:
    """Return the error that stands for one of Kafka's client."""
    kind = RequestTooLarge if error.code() in TOO_LARGE_ERRORS else BusUnavailable
    return kind(f"Kafka: {error.str()}")


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Raise `MemberFenced`, `RequestTooLarge` or `BusUnavailable` instead of the errors of Kafka's client."""
    try:
        yield
    except KafkaException as raised:
        error: KafkaError = raised.args[0]
        if error.code() in FENCED_ERRORS:
            raise MemberFenced(f"a newer member has this one's place ({error.str()})") from raised
        raise to_bus_error(error) from raised
    except TimeoutError as raised:
        raise BusUnavailable(f"Kafka: {raised}") from raised


def parse_delivery(message: Message, priority_class: PriorityClass) -> Delivery:
    """Return a message as a delivery, whose position is `<partition>:<offset>`.

    A value may be larger than a message may be, if compression made it fit into its topic: the rest is cut off.
    """
    return Delivery(
        message.topic() or "",
        f"{message.partition()}:{message.offset()}",
        (message.value() or b"")[:MAX_MESSAGE_BYTES],
        parse_key(message),
        parse_headers(message),
        priority_class,
        message.timestamp()[1] / 1000,
    )


def parse_key(message: Message) -> str | None:
    """Return a message's key as text, or None."""
    key = message.key()
    return as_text(key) if isinstance(key, bytes) else key


# `message.headers()` itself is not used: once a line has run often, the interpreter calls a method without arguments in
# a faster way, and that way does not notice the error which the client leaves behind with an incomplete list.
_get_headers = operator.methodcaller("headers")


def parse_headers(message: Message) -> Mapping[str, str]:
    """Return a message's headers as text: of several with one name the last, and none at all if a name is not UTF-8.

    Call this only once for a message: the client keeps the incomplete list, and a second access ends the process.
    """
    try:
        pairs: Any = _get_headers(message) or []
    except (SystemError, UnicodeDecodeError):
        log.warning("%s: a header's name is not UTF-8, the headers are left out", message.topic())
        return {}
    return {name: as_text(raw or b"") for name, raw in pairs}


def ask_bounds(consumer: Consumer, partition: Partition, limit_s: float) -> tuple[int, int]:
    """Return where a partition begins and ends, as its leader says. Raise `KafkaException` or `BusUnavailable`."""
    place = TopicPartition(*partition)
    try:
        found = consumer.get_watermark_offsets(place, timeout=limit_s)
    except KafkaException as error:
        if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001 - that is its name
            raise
        # It was added since this consumer saw its topic, which it looks at every five minutes by itself.
        consumer.list_topics(partition[0], limit_s)
        found = consumer.get_watermark_offsets(place, timeout=limit_s)
    if found is None:
        raise BusUnavailable("no leader answers")
    return found


class DamagedBatches:
    """Counts for each partition how often its current batch could not be unpacked."""

    def __init__(self) -> None:
        self._attempts: dict[Partition, tuple[int, int]] = {}
        """The last such batch of a partition: the offset where it begins, and how often it was tried."""
        self._passed: dict[Partition, int] = {}

    def note_attempt(self, partition: Partition, batch: int) -> bool:
        """Note that the batch at the offset `batch` could not be unpacked. Return whether it is to be passed over.

        A batch is unpacked as a whole and fails from whichever of its offsets it is fetched. Where it ends is not
        known, so the caller goes on one offset further at a time.
        """
        known, attempts = self._attempts.get(partition, (batch, 0))
        attempts = attempts + 1 if known == batch else 1
        self._attempts[partition] = batch, attempts
        return attempts >= MAX_UNPACK_ATTEMPTS

    def pass_over(self, consumer: Consumer, partition: Partition, batch: int, next_offset: int = 0) -> int | None:
        """Note that a batch could not be unpacked, and go on behind its next offset once it was tried often enough.

        `next_offset` is the one that the caller has to read next, if it knows more than this object does. Return the
        offset that was passed over; None where the batch is tried again.
        """
        if not self.note_attempt(partition, batch):
            return None
        passed = self._passed[partition] = max(batch, next_offset, self._passed.get(partition, -1) + 1)
        consumer.seek(TopicPartition(*partition, passed + 1))
        return passed
