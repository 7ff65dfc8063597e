"""Transactions of a decode worker's member: outputs and offsets together, and what to do when one fails half-way."""

from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.client import BROKER_TIMEOUT_S, FENCED_ERRORS, bus_errors, producer_settings
from penstock.bus.kafka.outputs import write_and_flush
from penstock.bus.kafka.partitions import Partitioner
from penstock.errors import MemberFenced
from penstock.failpoints import failpoint

INIT_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 3.0
REBALANCE_ERRORS = (
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_MEMBER_EPOCH,
)


class GroupRebalanced(Exception):
    """The group moved on while we settled; nothing was done. Look again what is still ours."""


class Transactions:
    """One transactional producer; one transaction at a time. The caller sees to the locking.

    It does not re-bootstrap: that forgets brokers that are down for a moment, and in librdkafka 2.14 to 2.16 a
    transaction whose group coordinator was forgotten waits for it without end, whatever timeout it is given. All other
    clients do: a broker that comes back from a long pause may name no broker at all for a moment, and who believes that
    would never find one again. This producer may: then nothing settles, and the worker makes a new member.
    """

    def __init__(self, clients: Mapping[str, Any], transactional_id: str, timeout_s: float) -> None:
        write_s = 0.6 * timeout_s  # a failed write must leave time to abort, or the broker fences us
        self._flush_s = write_s + 1
        self._producer = Producer(
            producer_settings(clients)
            | {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": int(timeout_s * 1000),
                "socket.timeout.ms": int(timeout_s * 1000),  # librdkafka takes no longer one
                "metadata.recovery.strategy": "none",
                "message.timeout.ms": int(write_s * 1000),
            }
        )
        self._partitions = Partitioner(self._producer)
        self._open = False
        self._in_doubt = False
        with bus_errors():  # ends what an older member of this name left open
            self._producer.init_transactions(INIT_TIMEOUT_S)

    def clear_doubt(self, timeout_s: float = BROKER_TIMEOUT_S) -> bool:
        """Repeat a commit whose outcome is unknown, or abort what is open. True if that committed it after all."""
        if self._in_doubt:
            try:
                self._commit(timeout_s)
            except KafkaException as raised:
                self._handle_error(raised)
                raise
            return True
        if self._open:
            self._abort()
        return False

    def run_transaction(self, outputs: Sequence[Outgoing], offsets: list[TopicPartition], membership: object) -> None:
        """One transaction: `KafkaMember.settle` numbers its steps.

        Raises `GroupRebalanced`, `MemberFenced`, or `KafkaException`; after the last, `clear_doubt` before the next.
        """
        try:
            self._producer.begin_transaction()
            self._open = True
            write_and_flush(self._producer, self._partitions, outputs, self._flush_s)  # 3
            failpoint("kafka.3.written")
            self._producer.send_offsets_to_transaction(offsets, membership, BROKER_TIMEOUT_S)  # 4
            failpoint("kafka.4.offsets")
            self._commit()  # 5
            failpoint("kafka.5.committed")
        except KafkaException as raised:
            self._handle_error(raised)
            raise

    def close(self) -> None:
        """Let go of the producer, and of what was not committed. Nobody may use it now or later."""
        del self._producer, self._partitions

    def _commit(self, timeout_s: float = BROKER_TIMEOUT_S) -> None:
        self._in_doubt = True
        self._producer.commit_transaction(timeout_s)
        self._in_doubt = self._open = False

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(ABORT_TIMEOUT_S)
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.retriable():
                raise
            # The broker ended the transaction of a producer that was silent; librdkafka does not get over that.
            raise MemberFenced(f"away too long, this producer is of no more use: {error.str()}") from raised
        self._open = False

    def _handle_error(self, raised: KafkaException) -> None:
        """After a failed step: abort if that is possible now, and say if we were fenced or the group moved."""
        self._partitions.forget_leaders()
        error: KafkaError = raised.args[0]
        if error.fatal() or error.code() in FENCED_ERRORS:
            raise MemberFenced(f"a newer member has this one's place, or it was away too long: {error.str()}")
        if self._in_doubt and error.retriable():
            return  # the commit may have happened: the next settlement asks again
        self._in_doubt = False
        self._abort()
        if error.code() in REBALANCE_ERRORS:
            raise GroupRebalanced(error.str())
