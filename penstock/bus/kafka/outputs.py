"""Writing what settlements bring forth to Kafka: all of it acknowledged by all in-sync replicas, or an error."""

from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.client import produce_message, producer_settings
from penstock.bus.kafka.partitions import Partitioner

WRITE_TIMEOUT_S = 20.0
"""How long an output may wait to be acknowledged: longer than a partition has no leader after its leader died."""


class OutputWriter:
    """One idempotent producer: what the client sends again by itself is written once. Thread-safe."""

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._producer = Producer(
            producer_settings(clients) | {"enable.idempotence": True, "message.timeout.ms": int(WRITE_TIMEOUT_S * 1000)}
        )
        self._partitions = Partitioner(self._producer)

    def write_outputs(self, outputs: Sequence[Outgoing]) -> None:
        """Return when all are acknowledged. Raises `KafkaException`: then some may have been written."""
        try:
            write_and_flush(self._producer, self._partitions, outputs, WRITE_TIMEOUT_S + 1)
        except KafkaException:
            self._partitions.forget_leaders()
            raise


def write_and_flush(producer: Producer, partitions: Partitioner, outputs: Sequence[Outgoing], timeout_s: float) -> None:
    """Write messages and wait until all are acknowledged. Raises `KafkaException`."""
    errors: list[KafkaError] = []
    for output in outputs:
        produce_message(producer, output, partitions, lambda error, _: errors.append(error) if error else None)
    if outputs and _flush_producer(producer, timeout_s):
        timed_out = KafkaError._TIMED_OUT  # noqa: SLF001 - that is its name
        raise KafkaException(KafkaError(timed_out, "outputs are not acknowledged"))
    if errors:
        raise KafkaException(errors[0])


def _flush_producer(producer: Producer, timeout_s: float) -> int:
    """How many outputs are not acknowledged. A fatal error in a callback of flush's comes wrapped."""
    try:
        return producer.flush(timeout_s)
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from error
        raise
