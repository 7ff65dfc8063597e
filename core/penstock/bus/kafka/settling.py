"""Settles the deliveries of a Kafka member, in transactions or without."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.bus.contract import Delivery, Outgoing, Settlement, check_size
from penstock.bus.kafka.buffer import Commit
from penstock.bus.kafka.client import BROKER_TIMEOUT_S, bus_errors
from penstock.bus.kafka.offsets import Partition
from penstock.bus.kafka.shared import SharedState
from penstock.bus.kafka.writers import (
    GroupRebalanced,
    OffsetCommitter,
    OutputWriter,
    Transactions,
    to_topic_partitions,
)
from penstock.errors import BusUnavailable, DeliveryLost, MemberFenced, ReplyRefused
from penstock.failpoints import failpoint
from penstock.names import find_shared_topic
from penstock.pace import ServerPace

log = logging.getLogger(__name__)

MARKER_COMMIT_INTERVAL_S = 1.0
"""How often offsets of markers that were passed over are committed while nothing is settled. Where brokers are slow it
is seldom: it takes a transaction, which holds up the next settlement.
"""


class MemberSettling:
    """Settles what a member has finished: in transactions, or in prefill without them until its first result.

    `lock` is held through a transaction and by the callback that revokes partitions. So the callback waits until the
    transaction is over, and the member refuses deliveries of the partitions after that.
    """

    def __init__(
        self,
        shared: SharedState,
        pace: ServerPace,
        results_topic: str,
        open_transactions: Callable[[], Transactions],
        outputs: OutputWriter | None,
    ) -> None:
        """`outputs` writes hand-offs of prefill. It is None in a member that only settles in transactions, which are
        opened now.
        """
        self._shared, self._pace, self._results_topic = shared, pace, results_topic
        self._state, self._holdings, self._open_transactions = shared.changed, shared.holdings, open_transactions
        self.lock = threading.Lock()
        self.since_s: float | None = None
        """Since when a settlement is under way."""
        self.membership: object = None
        """The member's epoch for transactions, which the poller fetches."""
        self.transactions = open_transactions() if outputs is None else None
        self.outputs = outputs
        """None where transactions alone commit offsets, and the consumer commits none. `_state` guards it."""
        self.commits = OffsetCommitter()
        self._doubtful: tuple[list[Commit], list[Delivery]] = [], []
        """The commits and deliveries of the last transaction, until its outcome is known."""
        self._commit_at = 0.0
        """When offsets of markers that were passed over are to be committed, if nothing is settled before."""

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish the outputs and finish the deliveries; see `contract.Member.settle` for what each stage promises."""
        deliveries = [settlement.delivery for settlement in settlements if settlement.delivery.is_held]
        outputs = [output for settlement in settlements for output in settlement.place_outputs()]
        check_size(outputs)
        self._shared.check_open()
        writer = self.outputs
        if writer is not None and all(find_shared_topic(output.topic) != self._results_topic for output in outputs):
            self._publish_then_finish(writer, deliveries, outputs)
        elif settlements:
            self._settle_together(deliveries, outputs)

    def _publish_then_finish(self, writer: OutputWriter, deliveries: list[Delivery], outputs: list[Outgoing]) -> None:
        """Make a settlement of the prefill stage, in this order.

        1. Check that the deliveries are still held; if not, nothing is published. 2. Write the outputs, all
        acknowledged. 3. Finish the deliveries here. 4. The poller commits their offsets, a moment later
        (`_commit_finished`).

        After a crash in 2, or between it and 4, the deliveries come again though their outputs are out. If the record
        says by then that the request was handed off, they are settled without output. Otherwise it is handed off again:
        its second job is stale, as the first one is bound, and a dead letter is there twice. The same happens where a
        partition goes to another member meanwhile, as revocation does not wait for this settlement.
        """
        with self._state:  # 1
            self._shared.raise_failure()
            lost = self._holdings.find_lost(deliveries)
        if lost:
            raise DeliveryLost(lost)
        with self.time_settlement(), bus_errors():
            writer.write_outputs(outputs)  # 2
        failpoint("kafka.2.acknowledged")
        with self._state:  # 3
            self._holdings.finish_deliveries(deliveries)
        failpoint("kafka.3.finished")

    def _change_over(self) -> Transactions:
        """Settle in transactions from now on, in a member of the prefill stage that has its first result.

        A result and its message's offset are one transaction, and no commit of the consumer may come behind it: that
        would take the offset back, and the result would be there a second time.

        1. No commit of the consumer is begun any more. 2. Those under way are answered. 3. The transactions are opened.

        A crash between any two of them costs what it did before: hand-offs whose offsets were not committed come again.
        After 3 the next transaction commits those too. Raise `BusUnavailable` if 2 or 3 fails: the next settlement goes
        on there. Where no broker will answer a commit any more this member has to be made anew.
        """
        with self.time_settlement(), self._state:
            self.outputs, limit_s = None, self._pace.stretch(BROKER_TIMEOUT_S)  # 1
            is_over = self._state.wait_for(lambda: self._shared.failure or not self.commits.may_come_late, limit_s)
            self._shared.raise_failure()
            if not is_over:  # 2
                raise BusUnavailable("Kafka: a commit of offsets may come late, as no broker has answered it")
        with self.lock, self.time_settlement():
            self._shared.check_open()
            self._shared.raise_failure()
            self.transactions = self.transactions or self._open_transactions()  # 3
            return self.transactions

    def _settle_together(self, deliveries: list[Delivery], outputs: list[Outgoing]) -> None:
        """Make a settlement in a transaction.

        If the group is rebalanced meanwhile (another member joined or left), try again with what is still held. If the
        brokers are slow, and the producer's limits too short for that, try again with a producer that has longer ones.
        """
        end = time.monotonic() + self._pace.stretch(BROKER_TIMEOUT_S)
        while True:
            writer = self.transactions or self._change_over()
            with self.lock, self.time_settlement(), bus_errors():
                begun_s, slowness = time.monotonic(), self._pace.slowness
                try:
                    self._run_transaction(writer, deliveries, outputs)
                    return
                except ReplyRefused:
                    if writer.is_broken:
                        self.transactions = None  # the next settlement opens them
                        writer.close()
                    raise
                except GroupRebalanced as moved:
                    if time.monotonic() > end:
                        raise BusUnavailable(f"Kafka: the group does not come to rest: {moved}") from None
                except (KafkaException, MemberFenced) as raised:
                    if not self._is_too_short(raised, slowness, begun_s):
                        if isinstance(raised, MemberFenced):
                            self._shared.note_failure(raised)
                        raise
            self._shared.closing.wait(0.02)  # the callbacks run meanwhile

    def _is_too_short(self, raised: KafkaException | MemberFenced, slowness: int, begun_s: float) -> bool:
        """Return whether a transaction failed as its limits were too short, and longer ones hold by now. It began at
        `begun_s`, and its limits were chosen by `slowness`.

        The brokers also end the transaction of a member that was away. Then limits follow only from what the lookup
        thread has measured.
        """
        writer = self.transactions
        if writer is None or not writer.is_late(raised):
            return False
        log.info("Kafka: a transaction took too long: %s", raised)
        if not isinstance(raised, MemberFenced):
            return self._pace.note_too_short(slowness, begun_s)
        if self._pace.slowness > writer.slowness:
            self.transactions = None  # it is of no more use: the next settlement opens them
            writer.close()
        return self.transactions is None

    def finish_last(self, timeout_s: float) -> None:
        """Repeat a commit whose outcome is unknown, before the member leaves. Give up after `timeout_s`."""
        writer = self.transactions
        if writer and not self._shared.closing.is_set() and self.lock.acquire(timeout=timeout_s):
            try:
                with contextlib.suppress(KafkaException, MemberFenced, GroupRebalanced):
                    self._clear_doubt(writer, timeout_s)
            finally:
                self.lock.release()

    def close(self) -> None:
        """Free the producer with transactions, once no settlement uses it."""
        with self.lock:
            if self.transactions is not None:
                self.transactions.close()

    def commit_finished(self, consumer: Consumer, now_s: float) -> None:
        """Do step 4 of settlements without transactions, on the polling thread."""
        if not self._holdings.has_uncommitted:
            self.commits.note_nothing_to_commit()
        elif self.commits.is_due(now_s):
            with self._state:
                if self.outputs is not None:
                    commits, epochs = self._holdings.build_commits(), self._holdings.commit_epochs
                    self.commits.send_commits(consumer, commits, epochs)

    def note_committed(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        """Note the brokers' answer to a commit.

        Offsets that were refused, as the group was rebalanced, are committed again if the partition is still assigned.
        Otherwise its next owner settles the messages from the record.
        """
        with self._state:
            self._holdings.note_committed(self.commits.note_answer(error, places))
            self._state.notify_all()

    def commit_revoked(self, consumer: Consumer, gone: set[Partition]) -> None:
        """Commit what is finished of partitions that go, on the polling thread."""
        with self._state:
            if self.outputs is not None:
                commits = [commit for commit in self._holdings.build_commits() if commit[0] in gone]
                self.commits.send_commits(consumer, commits, self._holdings.commit_epochs)

    def commit_passed(self) -> None:
        """Commit the offsets of markers that were passed over, unless a settlement runs, which commits them too.

        A producer with transactions leaves them in the requests topics, which endpoint workers read.
        """
        writer, now_s = self.transactions, time.monotonic()
        if writer is None or not self._holdings.has_uncommitted or now_s < self._commit_at:
            return
        self._commit_at = now_s + MARKER_COMMIT_INTERVAL_S * self._pace.slowness**2
        if not self.lock.acquire(blocking=False):
            return
        try:
            with self.time_settlement(), bus_errors():  # the consumer's own commit could wait without end
                try:
                    self._run_transaction(writer, [], [])
                except MemberFenced as fenced:
                    if not self._is_too_short(fenced, writer.slowness, 0.0):
                        raise
        except (BusUnavailable, GroupRebalanced) as error:
            log.debug("Kafka: committing offsets failed, retrying: %s", error)
        finally:
            self.lock.release()

    # With `lock` held.

    def _run_transaction(self, writer: Transactions, deliveries: list[Delivery], outputs: list[Outgoing]) -> None:
        """Make a settlement, in this order.

        1. Clear what an earlier settlement left unclear: repeat its commit, or abort its transaction. Then change the
        producer if the brokers' pace has changed since it was made: its limits are fixed. 2. Check that the
        deliveries are still held; if not, nothing is done. 3. Write the outputs, and flush them: otherwise the next
        step waits for librdkafka's own interval. 4. Add the offsets to the transaction. 5. Commit the transaction. 6.
        Finish the deliveries here too.

        A crash before 5 leaves nothing visible; readers wait for the transaction's timeout, or until a member of the
        same name starts. A crash in 5 is decided by the broker, for outputs and offsets alike. A crash before 6 costs
        nothing.
        """
        self._shared.check_open()
        self._clear_doubt(writer, self._pace.stretch(BROKER_TIMEOUT_S))  # 1
        if writer.slowness != self._pace.slowness:
            self.transactions = None  # the next settlement opens them where this fails
            writer.close()
            self.transactions = writer = self._open_transactions()
        with self._state:  # 2
            self._shared.raise_failure()
            lost = self._holdings.find_lost(deliveries)
            commits, epochs = [] if lost else self._holdings.build_commits(deliveries), self._holdings.commit_epochs
        if lost:
            raise DeliveryLost(lost)
        self._doubtful = commits, deliveries
        writer.run_transaction(outputs, to_topic_partitions(commits, epochs), self.membership)  # 3, 4, 5
        self._commit_at = time.monotonic() + MARKER_COMMIT_INTERVAL_S * self._pace.slowness**2
        with self._state:  # 6
            self._shared.raise_failure()  # `_on_lost` does not wait for a step that does not end
            self._holdings.finish_deliveries(deliveries)
            self._holdings.note_committed(commits)

    def _clear_doubt(self, writer: Transactions, timeout_s: float) -> None:
        if writer.clear_doubt(timeout_s):
            with self._state:
                commits, deliveries = self._doubtful
                self._holdings.finish_deliveries(deliveries)
                self._holdings.note_committed(commits)

    @contextlib.contextmanager
    def time_settlement(self) -> Iterator[None]:
        """Note for how long a settlement is under way."""
        self.since_s = time.monotonic()
        try:
            yield
        finally:
            self.since_s = None
