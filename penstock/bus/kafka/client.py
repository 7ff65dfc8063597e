"""What all clients of Kafka share: their settings, how they write and read a message, and what their errors mean."""

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing, as_bytes, as_text
from penstock.bus.kafka.partitions import Partitioner
from penstock.errors import BusUnavailable, MemberFenced
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import PriorityClass

log = logging.getLogger(__name__)

BROKER_TIMEOUT_S = 15.0
"""How long the servers may take to answer before they count as not reachable."""
MAX_BATCH_BYTES = 2 * MAX_REQUEST_BYTES
FETCH_LIMITS = {
    "max.partition.fetch.bytes": MAX_BATCH_BYTES,
    "fetch.max.bytes": 2 * MAX_BATCH_BYTES,
    "receive.message.max.bytes": 4 * MAX_BATCH_BYTES,
}
"""For all that read a stage's topics. The last one also bounds what a batch may unpack to: all pass over the same."""
FENCED_ERRORS = (
    KafkaError._FENCED,  # noqa: SLF001 - that is its name
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
)


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


def produce_message(producer: Producer, message: Outgoing, partitions: Partitioner, report: Any) -> None:
    """Hand a message to the producer; when its queue is full, wait for room."""
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


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Turn what the client raises into `MemberFenced` or `BusUnavailable`."""
    try:
        yield
    except KafkaException as raised:
        error: KafkaError = raised.args[0]
        if error.code() in FENCED_ERRORS:
            raise MemberFenced(f"a newer member has this one's place ({error.str()})") from raised
        raise BusUnavailable(f"Kafka: {error.str()}") from raised
    except TimeoutError as raised:
        raise BusUnavailable(f"Kafka: {raised}") from raised


def parse_delivery(message: Message, klass: PriorityClass) -> Delivery:
    """A message as its partition's owner holds it; its position is partition and offset.

    Of a value that a compression made to fit into its topic, only as much is kept as a message may have.
    """
    return Delivery(
        message.topic() or "",
        f"{message.partition()}:{message.offset()}",
        (message.value() or b"")[:MAX_MESSAGE_BYTES],
        parse_key(message),
        parse_headers(message),
        klass,
        message.timestamp()[1] / 1000,
    )


def parse_key(message: Message) -> str | None:
    """A message's key as text."""
    key = message.key()
    return as_text(key) if isinstance(key, bytes) else key


# Not `message.headers()`: the interpreter calls a method without arguments in a faster way once the line has run often,
# and that way does not look for the error that the client leaves behind with a list that has a hole in it.
_ask_headers = operator.methodcaller("headers")


def parse_headers(message: Message) -> Mapping[str, str]:
    """Return a message's headers as text; of several with one name, the last. None if one of the names is not UTF-8.

    To be called once for a message: the client keeps the list with the hole, and whoever touches that ends the process.
    """
    try:
        pairs: Any = _ask_headers(message) or []
    except (SystemError, UnicodeDecodeError):
        log.warning("%s: a header's name is not UTF-8, the headers are left out", message.topic())
        return {}
    return {name: as_text(raw or b"") for name, raw in pairs}
