"""Writes the outputs of settlements, with and without transactions, and commits offsets."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.buffer import Commit
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    FENCED_ERRORS,
    TOO_LARGE_ERRORS,
    bus_errors,
    produce_message,
    producer_settings,
)
from penstock.bus.kafka.offsets import NO_EPOCH, Partition
from penstock.bus.kafka.partitioner import LEADERS_TIMEOUT_S, Partitioner, ReadBeats
from penstock.errors import MemberFenced, NameShared, ReplyRefused
from penstock.failpoints import failpoint
from penstock.pace import ServerPace

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 20.0
"""How long an output may wait to be acknowledged. It takes less to elect a new leader for a partition."""


GIVEN_UP_ERRORS = (
    KafkaError._PURGE_QUEUE,  # noqa: SLF001 - that is its name
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
    KafkaError._STATE,  # noqa: SLF001
)
"""Errors of messages that the client gave up itself, or did not take, as the transaction failed by another one."""


class OutputWriter:
    """Writes outputs without transactions. Thread-safe.

    Its producer is idempotent: a message that it sends again by itself is written once.
    """

    def __init__(self, clients: Mapping[str, Any], read_beats: ReadBeats | None = None) -> None:
        """`read_beats`: see `Partitioner`."""
        self._producer = Producer(
            producer_settings(clients) | {"enable.idempotence": True, "message.timeout.ms": int(WRITE_TIMEOUT_S * 1000)}
        )
        self._partitions = Partitioner(self._producer, read_beats)

    def write_outputs(self, outputs: Sequence[Outgoing]) -> None:
        """Write messages; all are acknowledged by all in-sync replicas. Raise `KafkaException`: some may be written."""
        try:
            write_and_flush(self._producer, self._partitions, outputs, WRITE_TIMEOUT_S + 1)
        except KafkaException:
            self._partitions.forget_leaders()
            raise


def write_and_flush(
    producer: Producer,
    partitions: Partitioner,
    outputs: Sequence[Outgoing],
    timeout_s: float,
    reply_timeout_s: float = 0.0,
) -> None:
    """Write messages and wait until all are acknowledged. Raise `KafkaException`, or `ReplyRefused` where replies alone
    are at fault: they are refused, or not acknowledged within `reply_timeout_s` though all else is.
    """
    waiting, errors = dict(enumerate(outputs)), list[tuple[KafkaError, Outgoing]]()

    def report(number: int, error: KafkaError | None) -> None:
        output = waiting.pop(number)
        if error is not None:
            errors.append((error, output))

    replies = {output.topic for output in outputs if output.is_reply}
    for number, output in enumerate(outputs):
        with _report_known_error(partial(report, number), is_wanted=bool(replies)):
            produce_message(producer, output, partitions, lambda error, _, number=number: report(number, error))
    num_left = _flush_producer(producer, reply_timeout_s if replies else timeout_s) if outputs else 0
    if num_left and replies:
        if not errors and all(output.is_reply for output in waiting.values()):
            late = {output.topic: "no acknowledgement in time" for output in waiting.values()}
            raise ReplyRefused(late, is_sure=len(late) == 1)
        num_left = _flush_producer(producer, timeout_s)
    if num_left:
        timed_out = KafkaError._TIMED_OUT  # noqa: SLF001 - that is its name
        raise KafkaException(KafkaError(timed_out, "outputs are not acknowledged"))
    if errors:
        if replies:
            _raise_refused(errors, replies)
        # With a message that is too large others fail that are fine, so the error is about that one.
        codes = [error for error, _ in errors]
        raise KafkaException(next((one for one in codes if one.code() in TOO_LARGE_ERRORS), codes[0]))


@contextlib.contextmanager
def _report_known_error(report: Callable[[KafkaError], None], *, is_wanted: bool) -> Iterator[None]:
    """Report an error that the client knows at once, as that a topic has no such partition; else raise it on."""
    try:
        yield
    except KafkaException as raised:
        if not is_wanted:
            raise
        report(raised.args[0])


def _raise_refused(errors: Sequence[tuple[KafkaError, Outgoing]], replies: Iterable[str]) -> None:
    """Raise `ReplyRefused` if no message failed by itself but replies. What the client gave up because another message
    had failed does not count; where there is nothing else, any of the `replies` may have been refused.
    """
    if any(error.fatal() or error.code() in FENCED_ERRORS for error, _ in errors):
        return
    named = [(error, output) for error, output in errors if error.code() not in GIVEN_UP_ERRORS]
    if not named:
        raise ReplyRefused(dict.fromkeys(replies, "the brokers refused a transaction with this reply"), is_sure=False)
    if all(output.is_reply for _, output in named):
        reasons = {output.topic: error.str() for error, output in named}
        # Smaller ones fit; and of several that were late all but one may have waited for that one.
        late = len(reasons) > 1 and any(error.code() == KafkaError._MSG_TIMED_OUT for error, _ in named)  # noqa: SLF001
        is_sure = not late and all(error.code() not in TOO_LARGE_ERRORS for error, _ in named)
        raise ReplyRefused(reasons, is_sure=is_sure)


def _flush_producer(producer: Producer, timeout_s: float) -> int:
    """Return how many outputs are not acknowledged."""
    # A fatal error in a callback of `flush` comes as the cause of a `SystemError`.
    try:
        return producer.flush(timeout_s)
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from error
        raise


INIT_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 3.0
LATE_ERRORS = (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT)  # noqa: SLF001 - that is their name
REBALANCE_ERRORS = (
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_MEMBER_EPOCH,
)


class GroupRebalanced(Exception):
    """The group was rebalanced during a transaction, which was aborted. Check again which deliveries are still held."""


class Transactions:
    """Writes outputs and commits offsets together. The caller locks: there is one transaction at a time."""

    # This producer does not re-bootstrap. That would forget brokers that are down for a moment, and in librdkafka 2.14
    # to 2.16 a transaction whose group coordinator was forgotten waits for it without end, whatever timeout it is
    # given. All other clients re-bootstrap: a broker that comes back from a long pause may name no broker at all for a
    # moment, and a client that believes it would never find one again. Where that happens to this producer nothing
    # settles any more, and the worker makes a new member.

    def __init__(
        self,
        clients: Mapping[str, Any],
        transactional_id: str,
        pace: ServerPace,
        read_beats: ReadBeats | None = None,
    ) -> None:
        """The brokers' present pace decides how long a transaction may last. `read_beats`: see `Partitioner`."""
        self._pace, self.slowness, timeout_s = pace, pace.slowness, pace.transaction_timeout_s
        write_s = 0.6 * timeout_s  # a failed write must leave time to abort, or the broker fences the producer
        self._flush_s, self._timeout_s = write_s + 1, timeout_s
        # Their topics may have been deleted since they were looked at, and librdkafka waits for these without end.
        self._reply_s = write_s / 2
        self._id, self._brokers = transactional_id, clients["bootstrap.servers"]
        self._begun_s = 0.0
        self._producer = Producer(
            producer_settings(clients)
            | {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": int(timeout_s * 1000),
                "socket.timeout.ms": int(timeout_s * 1000),  # librdkafka accepts no longer timeout
                "metadata.recovery.strategy": "none",
                "message.timeout.ms": int(write_s * 1000),
            }
        )
        self._partitions = Partitioner(self._producer, read_beats, timeout_s=pace.stretch(LEADERS_TIMEOUT_S))
        self._open = False
        self._in_doubt = False
        self.is_broken = False
        """Whether this object can write nothing more, though no other has its id."""
        with bus_errors():
            try:  # this ends a transaction that an older member of the same name left open
                self._producer.init_transactions(pace.stretch(INIT_TIMEOUT_S))
            except KafkaException as raised:
                if raised.args[0].code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
                    pace.note_refused(self.slowness)
                raise

    def is_late(self, raised: KafkaException | MemberFenced) -> bool:
        """Return whether a transaction failed by its time limits, and left no doubt that it was not committed."""
        if isinstance(raised, MemberFenced):  # the brokers have ended it
            return not (isinstance(raised, NameShared) or self._in_doubt)
        return raised.args[0].code() in LATE_ERRORS and not self._in_doubt

    def clear_doubt(self, timeout_s: float) -> bool:
        """Repeat a commit whose outcome is unknown, or abort an open transaction.

        Return whether a transaction was committed. Raise `KafkaException` or `MemberFenced`.
        """
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
        """Run one transaction: steps 3 to 5 of `KafkaMember._run_transaction`.

        Raise `GroupRebalanced`, `MemberFenced`, `ReplyRefused` or `KafkaException`. After the last of these, call
        `clear_doubt` before the next transaction.
        """
        try:
            self._producer.begin_transaction()
            self._open, self._begun_s = True, time.monotonic()
            write_and_flush(self._producer, self._partitions, outputs, self._flush_s, self._reply_s)  # 3
            failpoint("kafka.3.written")
            if offsets:  # else the membership may not be known yet
                limit_s = self._pace.stretch(BROKER_TIMEOUT_S)
                self._producer.send_offsets_to_transaction(offsets, membership, limit_s)  # 4
            failpoint("kafka.4.offsets")
            self._commit(self._pace.stretch(BROKER_TIMEOUT_S))  # 5
            failpoint("kafka.5.committed")
        except ReplyRefused:
            self._abort_refused()
            raise
        except KafkaException as raised:
            self._handle_error(raised)
            raise

    def close(self) -> None:
        """Free the producer. A transaction that was not committed is left to the brokers."""
        del self._producer, self._partitions

    def _commit(self, timeout_s: float) -> None:
        self._in_doubt = True
        self._producer.commit_transaction(timeout_s)
        self._in_doubt = self._open = False
        self._pace.note_heard()

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(self._pace.stretch(ABORT_TIMEOUT_S))
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.retriable():
                raise
            # The broker ended the transaction of a producer that was silent. librdkafka cannot use it any more then.
            raise MemberFenced(f"away too long, this producer is of no more use: {error.str()}") from raised
        self._open = False

    def _abort_refused(self) -> None:
        """Abort after a reply that was refused. Raise `KafkaException` or `MemberFenced`.

        Brokers that know no partition of the transaction, as they have refused all with the first, know no transaction
        to abort either. For librdkafka that is fatal: `is_broken` is set, and a new producer goes on.
        """
        try:
            self._abort()
        except MemberFenced as fenced:
            cause = fenced.__cause__
            if not isinstance(cause, KafkaException) or cause.args[0].code() != KafkaError.INVALID_TXN_STATE:
                raise
            self.is_broken = True

    def _handle_error(self, raised: KafkaException) -> None:
        """Abort after a failed step, if possible now. Raise `MemberFenced` or `GroupRebalanced` if that was why."""
        self._partitions.forget_leaders()
        error: KafkaError = raised.args[0]
        if error.fatal() or error.code() in FENCED_ERRORS:
            # The brokers end a transaction that lasts too long. Before that, only another producer of this id ends it.
            if time.monotonic() - self._begun_s < self._timeout_s:
                raise NameShared(
                    f"another process uses the transactional id {self._id} at Kafka {self._brokers}: each worker of a"
                    " pipeline needs a name of its own. Where that process has other Redis servers, names are not"
                    " compared: stop it, or give it another PENSTOCK_PIPELINE or PENSTOCK_WORKER_NAME"
                )
            raise MemberFenced(f"a newer member has this one's place, or it was away too long: {error.str()}")
        if self._in_doubt and error.retriable():
            return  # the commit may have happened: the next settlement repeats it
        self._in_doubt = False
        self._abort()
        if error.code() in REBALANCE_ERRORS:
            raise GroupRebalanced(error.str())


COMMIT_INTERVAL_S = 0.05
COMMIT_RETRY_S = 0.5
"""How long after a failed commit the next one is sent."""


class OffsetCommitter:
    """Commits the offsets of finished work, where that need not happen together with the outputs.

    Only the consumer's polling thread may use it: librdkafka's commit waits without end on another thread. At most one
    commit is under way, so that none overtakes another; when partitions are given up, a last one is sent behind it. A
    commit that fails is not repeated, as the next one commits the offsets of that time.
    """

    def __init__(self) -> None:
        self._under_way: deque[Sequence[Commit]] = deque()
        self._next_s = 0.0
        self._behind_s: float | None = None
        self._error = ""
        self._is_in_doubt = False

    @property
    def may_come_late(self) -> bool:
        """Whether brokers may yet execute a commit: it has no answer, or the last one was not a broker's."""
        return bool(self._under_way) or self._is_in_doubt

    def is_due(self, now_s: float) -> bool:
        """Return whether the next commit may be sent."""
        return not self._under_way and now_s >= self._next_s

    def send_commits(self, consumer: Consumer, commits: Sequence[Commit], epochs: dict[Partition, int]) -> None:
        """Send commits and return. `note_answer` has to be called with the brokers' answer."""
        if not commits:
            return
        self._under_way.append(commits)
        self._next_s = time.monotonic() + COMMIT_INTERVAL_S
        self._behind_s = self._behind_s or time.monotonic()
        try:
            consumer.commit(offsets=to_topic_partitions(commits, epochs), asynchronous=True)
        except KafkaException as raised:
            self._note_outcome(self._under_way.pop(), raised.args[0], [])

    def note_answer(self, error: KafkaError | None, places: Iterable[TopicPartition]) -> Sequence[Commit]:
        """Note the brokers' answer to the first commit under way. Return the partitions' commits that were made."""
        self._is_in_doubt = error is not None and error.code() < 0  # librdkafka's own
        return self._note_outcome(self._under_way.popleft(), error, places)

    def note_nothing_to_commit(self) -> None:
        """Note that there is nothing to commit: partitions whose commits were refused have gone to other members."""
        if not self._under_way:
            self._behind_s = None

    def _note_outcome(
        self, commits: Sequence[Commit], error: KafkaError | None, places: Iterable[TopicPartition]
    ) -> Sequence[Commit]:
        refused = {(place.topic, place.partition): place.error for place in places if place.error}
        if error is None and not refused:
            self._behind_s = None
            return commits
        self._error = str(error or next(iter(refused.values())))
        log.info("Kafka: committing offsets failed, retrying: %s", self._error)
        self._next_s = time.monotonic() + COMMIT_RETRY_S
        return [] if error is not None else [commit for commit in commits if commit[0] not in refused]

    def describe_problem(self, now_s: float, patience_s: float) -> str:
        """Return why nothing was committed for `patience_s` though something was finished; else an empty string."""
        behind_s = now_s - (self._behind_s or now_s)
        return f"Kafka: offsets were not committed for {behind_s:.0f} s: {self._error}" if behind_s > patience_s else ""


def to_topic_partitions(commits: Iterable[Commit], epochs: dict[Partition, int]) -> list[TopicPartition]:
    """Return commits in the client's form, each with its leader epoch."""
    return [
        TopicPartition(*partition, offset, metadata, epochs.get(partition, NO_EPOCH))
        for partition, offset, metadata in commits
    ]
