"""A member of a stage's group on Kafka: one thread polls, and the threads that finished work settle it."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from penstock.bus.contract import Delivery, OrphanReader, Outgoing, Settlement, check_size
from penstock.bus.dead_letters import build_dead_letter
from penstock.bus.kafka.buffer import Commit, PrefetchBuffer
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    DAMAGED_BATCH_ERRORS,
    FETCH_LIMITS,
    MAX_BATCH_BYTES,
    SOCKET_TIMEOUT_S,
    DamagedBatches,
    bus_errors,
    parse_delivery,
)
from penstock.bus.kafka.client_factory import KafkaClientFactory
from penstock.bus.kafka.offsets import NO_EPOCH, Partition
from penstock.bus.kafka.orphans import KafkaOrphanReader, format_partition
from penstock.bus.kafka.places import PlaceKeeper
from penstock.bus.kafka.position_lookup import LookupThread, PositionLookup, ReadProgress
from penstock.bus.kafka.writers import (
    INIT_TIMEOUT_S,
    GroupRebalanced,
    OffsetCommitter,
    OutputWriter,
    Transactions,
    to_topic_partitions,
)
from penstock.errors import BusUnavailable, DeliveryLost, MemberFenced
from penstock.failpoints import failpoint
from penstock.names import PriorityClass, WorkerKind
from penstock.redis.scripts import ScriptCall

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
MEMBERSHIP_REFRESH_S = 0.02
COUNT_INTERVAL_S = 0.25
"""How often unread messages are counted, for the heartbeat."""
PAUSED_INTERVAL_S = 2.0
"""How often the brokers are asked where paused partitions end."""
PROBE_INTERVAL_S, PROBE_RETRY_S = 2.0, 1.0
"""How often the brokers are probed, while they answer as expected, and while they do not answer. While they answer more
slowly than before they are probed at once.
"""
LEAVE_TIMEOUT_S = 2.0
"""How long leaving may take. Brokers that do not answer notice it after the session timeout."""
REVOKE_TIMEOUT_S = 30.0
"""How long a settlement under way may delay that its partitions go to another member."""
MAX_POLLER_PAUSE_S = 2.0
"""A poller whose turn takes longer counts as not reading its partitions."""
MAX_SETTLEMENT_S = 45.0
"""A settlement that takes longer counts as hung: the time limits of its steps add up to less. It grows as they do where
brokers are slow.
"""
STALL_PATIENCE_S = 5.0
"""How long a member may stand still before the worker has to make a new one. A process may be paused for a moment."""
MAX_SOCKET_TIMEOUT_S = 300.0
"""The longest time limit that librdkafka takes."""
EOF = KafkaError._PARTITION_EOF  # noqa: SLF001 - that is its name
MARKER_COMMIT_INTERVAL_S = 1.0
"""How often offsets of markers that were passed over are committed while nothing is settled. Where brokers are slow it
is seldom: it takes a transaction, which holds up the next settlement.
"""


class KafkaMember:
    """Consumes a stage's topics. It settles in transactions; in prefill it does so from its first result on.

    Three threads use it. The poller reads, and runs the callbacks for partitions that are assigned or revoked. The
    lookup thread makes the calls that take time: where an assigned partition begins, where a quiet one ends, and how
    late the brokers answer. It does so for both members of a worker that is in two groups. The third thread is the
    caller's, which settles.

    The broker checks that a settling member is in the group, but not that it owns the partition. So there are two
    locks. `_settling` is held through a transaction and by the revocation callback, which thereby waits until the
    transaction is over; after that, deliveries of the partition are refused here. `_state` guards `_holdings`, for
    moments only.

    An assigned partition is begun in this order:

    1. It is assigned to the consumer, and paused. librdkafka keeps a pause until the partition is resumed, also when
    the partition goes and comes back: `_paused` is the last state that librdkafka was given. 2. The lookup thread reads
    what the group committed. This waits for a dead member's open transaction, and the poller goes on meanwhile. 3. The
    poller seeks there. From now on `list_partitions` returns the partition. 4. It is resumed, if the buffer has room.

    A crash between any two of them costs nothing: the next owner does the same.
    """

    def __init__(
        self,
        bus: KafkaClientFactory,
        stage: WorkerKind,
        name: str,
        wake: Callable[[], None] = lambda: None,
        lookups: LookupThread | None = None,
    ) -> None:
        """`wake` is called, on any thread, when `poll` has something to return or to raise. `lookups` is the lookup
        thread of the worker's other member; None where there is none.
        """
        lookups = lookups or LookupThread(name)
        self._pipeline, self._stage, self._clients, self._pace = bus.pipeline, stage, bus.clients, bus.pace
        self._group = bus.pipeline.consumer_group(stage)
        self._topics = bus.pipeline.input_topics(stage)
        self._classes: dict[str, PriorityClass] = {topic: klass for klass, topic in self._topics.items()}
        self._settling = threading.Lock()
        self._settling_since: float | None = None
        self._state, self._wake = threading.Condition(), wake
        self._holdings = PrefetchBuffer(bus.pipeline, stage)
        self._damaged = DamagedBatches()
        self._failure: Exception | None = None
        self._leaving, self._closing = threading.Event(), threading.Event()
        self._doubtful: tuple[list[Commit], list[Delivery]] = [], []
        # The poller's.
        self._starting: set[Partition] = set()
        self._paused: set[Partition] = set()
        self._progress = ReadProgress(bus.fetch_attempts)
        self._passing: dict[Partition, int] = {}
        """Partitions that are read on behind a message that could not be fetched, with its offset."""
        self._refresh_at = self._count_at = self._ask_paused_at = 0.0
        self._turned_at = time.monotonic()
        self._is_losing = False
        """Whether it waits for a settlement of partitions that go."""
        self._unread: dict[Partition, int] = {}
        """How many messages of each partition were not read when they were counted last."""
        self._told_ends: dict[Partition, int] = {}
        """Where paused partitions end, as the brokers said last."""
        # The problems that `current_problem` describes, each kind by itself.
        self._refused: dict[str, str] = {}
        self._stalled_at: float | None = None
        self._membership: object = None
        # The lookup thread's.
        self._places = places = PlaceKeeper(bus.pipeline, bus.clients, bus.redis_url, bus.pace)
        settings = _lookup_settings(self._group)
        self._lookup = PositionLookup(bus.create_consumer(settings), lookups.requested, places, self._pace)
        self._topic_parts: list[str] = []
        """All partitions of the interactive topic, as the brokers told last."""
        self._commit_at = 0.0
        """When offsets of markers that were passed over are to be committed, if nothing is settled before."""
        self._open_transactions = partial(bus.create_transactions, f"{self._group}.{name}")
        self._transactions = self._begin_transactions() if stage != "prefill" else None
        self._outputs = bus.create_output_writer() if self._transactions is None else None
        """Writes hand-offs of prefill; None where transactions alone commit offsets, and the consumer none. `_state`
        guards it.
        """
        self._commits = OffsetCommitter()
        self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        settings = _consumer_settings(self._group, name) | {"on_commit": self._on_commit}
        # A response that takes longer than the time limit of a socket is dropped, and asked for again from its start.
        timeout_s = min(MAX_SOCKET_TIMEOUT_S, max(SOCKET_TIMEOUT_S, bus.fetch_attempts.longest_patience_s))
        self._consumer = bus.create_consumer(settings | {"socket.timeout.ms": int(timeout_s * 1000)})
        self._turned_at = time.monotonic()
        lookups.serve(self)
        self._poller = threading.Thread(target=self._poll_forever, name=f"kafka-{name}", daemon=True)
        self._poller.start()

    def _begin_transactions(self) -> Transactions:
        """Return the member's first producer with transactions, whose limits suit the brokers' pace."""
        with bus_errors():
            self._lookup.learn_pace(self._topics["interactive"], INIT_TIMEOUT_S)
        return self._open_transactions()

    @property
    def current_problem(self) -> str:
        """Why this member cannot work now; see `contract.Member.current_problem`."""
        return (
            self._pace.describe_silence()
            or self._describe_stall()
            or next(iter(self._refused.values()), "")
            or self._lookup.current_problem
            or next(iter(self._progress.standing_partitions.values()), "")
        )

    @property
    def slowness(self) -> int:
        """By how many times longer than usual its calls may take; see `contract.Member.slowness`."""
        return self._pace.slowness

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        end = time.monotonic() + timeout_s
        self._check_alive()
        self._bury_damaged()
        with self._state:
            while True:
                self._raise_failure()
                found = self._holdings.hand_out(capacity)
                left_s = end - time.monotonic()
                if found or left_s <= 0 or self._closing.is_set():
                    return found
                self._state.wait(left_s)

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish the outputs and finish the deliveries; see `contract.Member.settle` for what each stage promises."""
        deliveries = [settlement.delivery for settlement in settlements if settlement.delivery.is_held]
        outputs = [output for settlement in settlements for output in settlement.outputs]
        check_size(outputs)
        if self._closing.is_set():
            raise BusUnavailable("Kafka: this member has left its group")
        writer = self._outputs
        if writer is not None and all(output.topic != self._pipeline.results_topic for output in outputs):
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
            self._raise_failure()
            lost = self._holdings.find_lost(deliveries)
        if lost:
            raise DeliveryLost(lost)
        with self._time_settlement(), bus_errors():
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
        with self._time_settlement(), self._state:
            self._outputs, limit_s = None, self._pace.stretch(BROKER_TIMEOUT_S)  # 1
            is_over = self._state.wait_for(lambda: self._failure or not self._commits.may_come_late, limit_s)
            self._raise_failure()
            if not is_over:  # 2
                raise BusUnavailable("Kafka: a commit of offsets may come late, as no broker has answered it")
        with self._settling, self._time_settlement():
            if self._closing.is_set():
                raise BusUnavailable("Kafka: this member has left its group")
            self._raise_failure()
            self._transactions = self._transactions or self._open_transactions()  # 3
            return self._transactions

    def _settle_together(self, deliveries: list[Delivery], outputs: list[Outgoing]) -> None:
        """Make a settlement in a transaction.

        If the group is rebalanced meanwhile (another member joined or left), try again with what is still held. If the
        brokers are slow, and the producer's limits too short for that, try again with a producer that has longer ones.
        """
        end = time.monotonic() + self._pace.stretch(BROKER_TIMEOUT_S)
        while True:
            writer = self._transactions or self._change_over()
            with self._settling, self._time_settlement(), bus_errors():
                begun_s, slowness = time.monotonic(), self._pace.slowness
                try:
                    self._run_transaction(writer, deliveries, outputs)
                    return
                except GroupRebalanced as moved:
                    if time.monotonic() > end:
                        raise BusUnavailable(f"Kafka: the group does not come to rest: {moved}") from None
                except (KafkaException, MemberFenced) as raised:
                    if not self._is_too_short(raised, slowness, begun_s):
                        if isinstance(raised, MemberFenced):
                            self._note_failure(raised)
                        raise
            self._closing.wait(0.02)  # the callbacks run meanwhile

    def _is_too_short(self, raised: KafkaException | MemberFenced, slowness: int, begun_s: float) -> bool:
        """Return whether a transaction failed as its limits were too short, and longer ones hold by now. It began at
        `begun_s`, and its limits were chosen by `slowness`.

        The brokers also end the transaction of a member that was away. Then limits follow only from what the lookup
        thread has measured.
        """
        writer = self._transactions
        if writer is None or not writer.is_late(raised):
            return False
        log.info("Kafka: a transaction took too long: %s", raised)
        if not isinstance(raised, MemberFenced):
            return self._pace.note_too_short(slowness, begun_s)
        if self._pace.slowness > writer.slowness:
            self._transactions = None  # it is of no more use: the next settlement opens them
            writer.close()
        return self._transactions is None

    def count_held(self) -> int:
        """Return how many deliveries this member holds unsettled."""
        with self._state:
            return self._holdings.num_handed_out

    def is_holding(self, delivery: Delivery) -> bool:
        """Return whether the delivery's partition is still assigned, as of the last answer of the brokers."""
        with self._state:
            return delivery.is_held and not self._holdings.find_lost([delivery])

    def list_prefetched(self) -> list[Delivery]:
        """Return the deliveries that are fetched and not handed out yet."""
        with self._state:
            return self._holdings.list_buffered()

    def list_partitions(self) -> list[str]:
        """Return the partitions of the interactive topic that this member reads.

        The list is empty while the brokers are away, or the member stands still. A partition that has messages and
        brings none is not in it.
        """
        return [format_partition(one) for one in self._list_read() if one[0] == self._topics["interactive"]]

    def _list_read(self) -> list[Partition]:
        if self._pace.describe_silence() or self._describe_stall():
            return []
        with self._state:
            partitions = self._holdings.partitions
        standing = self._progress.standing_partitions
        return [one for one in partitions if one[0] not in self._refused and one not in standing]

    def count_waiting(self) -> dict[Partition, int]:
        """Return what waits in each partition of requests; see `contract.Member.count_waiting`.

        It is what is buffered, and what was unread at the last look, within a part of a second, or, of a partition that
        is paused as the buffer is full, within some seconds.
        """
        if self._stage == "decode":
            return {}
        buffered = Counter(delivery.offset[0] for delivery in self.list_prefetched())
        return {one: self._unread.get(one, 0) + buffered[one] for one in self._list_read()}

    def create_orphan_readers(self) -> list[OrphanReader]:
        """Return a reader for partitions of dead members that the brokers still count as alive."""
        find_start = self._places.find_start
        return [KafkaOrphanReader(self._pipeline, self._stage, self._clients, find_start, lambda: self._topic_parts)]

    def build_renewal(self, session_s: float) -> list[ScriptCall]:
        """Return nothing: the brokers know which members live."""
        return []

    def stop_consuming(self) -> None:
        """Give up the partitions, and with them all deliveries."""
        self._leaving.set()
        self._poller.join(LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Leave the group: other members get the partitions, and with them the unsettled deliveries.

        Threads that still wait for brokers end by themselves later.
        """
        self._leaving.set()
        writer = self._transactions
        if (
            writer
            and not self.current_problem
            and not self._closing.is_set()
            and self._settling.acquire(timeout=LEAVE_TIMEOUT_S)
        ):
            try:
                with contextlib.suppress(KafkaException, MemberFenced, GroupRebalanced):
                    self._clear_doubt(writer, LEAVE_TIMEOUT_S)
            finally:
                self._settling.release()
        self._closing.set()
        with self._state:
            self._state.notify_all()
        self._poller.join(LEAVE_TIMEOUT_S)
        self._places.note_commits(self._holdings.commits, is_last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bury_damaged(self) -> None:
        with self._state:
            damaged = self._holdings.list_damaged()
        letters = [
            Settlement(delivery, [build_dead_letter(self._pipeline, delivery, reason)]) for delivery, reason in damaged
        ]
        while letters:
            try:
                self.settle(letters)
                break
            except DeliveryLost as gone:  # the partition's new owner finds them again
                letters = [letter for letter in letters if letter.delivery not in gone.deliveries]

    # Settling in transactions: with `_settling` held.

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
        if self._closing.is_set():
            raise BusUnavailable("Kafka: this member has left its group")
        self._clear_doubt(writer, self._pace.stretch(BROKER_TIMEOUT_S))  # 1
        if writer.slowness != self._pace.slowness:
            self._transactions = None  # the next settlement opens them where this fails
            writer.close()
            self._transactions = writer = self._open_transactions()
        with self._state:  # 2
            self._raise_failure()
            lost = self._holdings.find_lost(deliveries)
            commits, epochs = [] if lost else self._holdings.build_commits(deliveries), self._holdings.commit_epochs
        if lost:
            raise DeliveryLost(lost)
        self._doubtful = commits, deliveries
        writer.run_transaction(outputs, to_topic_partitions(commits, epochs), self._membership)  # 3, 4, 5
        self._commit_at = time.monotonic() + MARKER_COMMIT_INTERVAL_S * self.slowness**2
        with self._state:  # 6
            self._raise_failure()  # `_on_lost` does not wait for a step that does not end
            self._holdings.finish_deliveries(deliveries)
            self._holdings.note_committed(commits)

    def _clear_doubt(self, writer: Transactions, timeout_s: float) -> None:
        if writer.clear_doubt(timeout_s):
            with self._state:
                commits, deliveries = self._doubtful
                self._holdings.finish_deliveries(deliveries)
                self._holdings.note_committed(commits)

    @contextlib.contextmanager
    def _time_settlement(self) -> Iterator[None]:
        self._settling_since = time.monotonic()
        try:
            yield
        finally:
            self._settling_since = None

    # The polling thread.

    def _poll_forever(self) -> None:
        try:
            self._consumer.subscribe(
                list(self._classes),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._leaving.is_set():
                message = self._consumer.poll(POLL_INTERVAL_S)
                self._turned_at = time.monotonic()
                if message is not None:
                    self._note_message(message)
                    self._buffer_message(message)
                self._begin_partitions()
                self._commit_finished()
                self._pause_full()
                self._refresh_membership()
                self._count_unread()
                self._watch_progress()
        except Exception as error:  # the member cannot go on: its methods raise the error
            self._note_failure(BusUnavailable(f"Kafka: {error}") if isinstance(error, KafkaException) else error)
        finally:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumer.close()
            # The consumer has this member's callbacks: without this only the garbage collector frees both, on any
            # thread.
            del self._consumer

    def _note_message(self, message: Message) -> None:
        """Note what a message, or an error in its place, shows about its partition."""
        partition = message.topic() or "", message.partition() or 0
        self._progress.note_message(partition, self._turned_at)
        error = message.error()
        if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._refused[partition[0]] = f"Kafka does not let this worker read {partition[0]}: {error.str()}"
        elif error is None or error.code() == EOF:
            self._refused.pop(partition[0], None)
            self._bury_unfetched(partition, message.offset() or 0)
            self._note_deleted(partition, message.offset() or 0)
            if error is None:  # its end is counted later, perhaps after this member's last note
                self._places.note_read(partition, message.offset() or 0)

    def _note_deleted(self, partition: Partition, offset: int) -> None:
        """Tell of messages that were deleted before they were read: the log begins behind what was to be read next."""
        low, _ = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        begin = min(offset, low)
        with self._state:
            first, count = self._holdings.skip_deleted(partition, begin)
        if count:
            self._places.tell_lost(partition, first, begin, count, "were deleted before they were read")

    def _buffer_message(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() == EOF:
                partition = message.topic() or "", message.partition() or 0
                with self._state:
                    # librdkafka gives the epoch 0 here, whatever it really is.
                    self._holdings.reach_end(partition, message.offset() or 0)
                return
            if error.fatal():
                raise KafkaException(error)
            log.warning("Kafka: %s", error.str())
            if error.code() in DAMAGED_BATCH_ERRORS:
                partition = message.topic() or "", message.partition() or 0
                self._pass_damaged(partition, message.offset() or 0, error.str())
            return
        delivery = parse_delivery(message, self._classes[message.topic() or ""])
        with self._state:
            self._holdings.add_message(delivery, _epoch_of(message))
            self._notify_poll()

    def _pass_damaged(self, partition: Partition, batch: int, why: str) -> None:
        """Pass over a message that cannot be unpacked, once that was tried a few times. It becomes a dead letter."""
        if not self._damaged.note_attempt(partition, batch):
            return
        with self._state:
            if partition not in self._holdings.partitions:
                return
            _, end = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            if end >= 0:
                self._holdings.check_end(partition, batch, end)
            offset = self._holdings.add_damaged_message(partition, batch, self._classes[partition[0]], why)
            self._notify_poll()
        self._consumer.seek(TopicPartition(*partition, offset))

    def _pass_unfetched(self, partition: Partition, offset: int) -> None:
        """Read a partition on behind a message that could not be fetched.

        It becomes a dead letter when the partition brings something from behind it. If it does not, the message is not
        at fault: nothing is passed over, and this member is made anew.
        """
        if partition in self._passing:
            return
        log.warning("Kafka: %s partition %d is read on behind offset %d", *partition, offset)
        self._passing[partition] = offset
        self._consumer.seek(TopicPartition(*partition, offset + 1))
        self._progress.note_message(partition, self._turned_at)

    def _bury_unfetched(self, partition: Partition, offset: int) -> None:
        """Make a dead letter of the message that was passed over, as the partition brought something behind it."""
        unfetched = self._passing.get(partition)
        if unfetched is None:
            return
        del self._passing[partition]
        if offset > unfetched:
            with self._state:
                if partition in self._holdings.partitions and self._holdings.next_offset(partition) == unfetched:
                    why = "it took too long to fetch"
                    self._holdings.add_damaged_message(
                        partition, unfetched, self._classes[partition[0]], why, "fetched"
                    )
                    self._notify_poll()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Do steps 1 and 2 for assigned partitions. The offset does not matter, as nothing is read before 3."""
        came = [(new.topic, new.partition) for new in partitions]
        consumer.incremental_assign([TopicPartition(*partition, 0) for partition in came])
        consumer.pause([TopicPartition(*partition) for partition in came])
        self._paused.update(came)
        self._starting.update(came)
        with self._state:  # what was committed is read again, and may be another topic's
            for partition in came:
                self._holdings.commits.pop(partition, None)
        self._places.begin_partitions(came)
        self._lookup.request_starts(came)

    def _begin_partitions(self) -> None:
        """Do steps 3 and 4 for partitions whose beginning was found."""
        for partition, start in self._lookup.take_starts().items():
            epoch = NO_EPOCH if start.leader_epoch is None else start.leader_epoch
            try:
                # The epoch makes the brokers say if the log was cut before this offset, and written anew.
                self._consumer.seek(TopicPartition(*partition, start.offset, "", epoch))
            except KafkaException as error:  # librdkafka has not begun with it, or not ended its last assignment
                log.debug("%s is begun later: %s", partition, error)
                self._lookup.request_starts([partition])
                continue
            with self._state:
                self._holdings.assign_partition(partition, start, epoch)
            self._starting.discard(partition)

    def _commit_finished(self) -> None:
        """Do step 4 of settlements without transactions."""
        if not self._holdings.has_uncommitted:
            self._commits.note_nothing_to_commit()
        elif self._commits.is_due(self._turned_at):
            with self._state:
                if self._outputs is not None:
                    commits, epochs = self._holdings.build_commits(), self._holdings.commit_epochs
                    self._commits.send_commits(self._consumer, commits, epochs)

    def _on_commit(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        """Note the brokers' answer to a commit.

        Offsets that were refused, as the group was rebalanced, are committed again if the partition is still assigned.
        Otherwise its next owner settles the messages from the record.
        """
        with self._state:
            self._holdings.note_committed(self._commits.note_answer(error, places))
            self._state.notify_all()

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what is finished of partitions, and forget them. librdkafka revokes them after the answer."""
        gone = {(old.topic, old.partition) for old in partitions}
        with self._state:
            if self._outputs is not None:
                commits = [commit for commit in self._holdings.build_commits() if commit[0] in gone]
                self._commits.send_commits(consumer, commits, self._holdings.commit_epochs)
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget partitions. They stay assigned until this returns, so it waits for a transaction under way.

        A settlement that takes longer than `REVOKE_TIMEOUT_S`, or more where brokers are slow, is not waited for. The
        member fails then, and the brokers refuse what it still settles, as it is not in the group any more.
        """
        gone = {(old.topic, old.partition) for old in partitions}
        self._lookup.cancel_requests(gone)
        self._starting -= gone
        self._paused -= gone
        self._passing = {one: offset for one, offset in self._passing.items() if one not in gone}
        limit_s, now, self._is_losing = self._pace.stretch(REVOKE_TIMEOUT_S), time.monotonic(), True
        # A member that is made anew because of such a settlement leaves its group at once.
        is_over = self._settling.acquire(timeout=max(0.0, (self._settling_since or now) + limit_s - now))
        self._turned_at, self._is_losing = time.monotonic(), False
        if not is_over:
            self._note_failure(
                BusUnavailable(f"Kafka: a settlement does not end, its partitions go after {limit_s:g} s")
            )
        try:
            with self._state:
                self._holdings.revoke_partitions(gone)
        finally:
            if is_over:
                self._settling.release()

    def _pause_full(self) -> None:
        with self._state:
            wanted = self._holdings.find_partitions_to_pause() | self._starting
            assigned = self._starting.union(self._holdings.partitions)
        for changed, change in (
            (wanted - self._paused, self._consumer.pause),
            (self._paused - wanted, self._consumer.resume),
        ):
            if changed:
                change([TopicPartition(*partition) for partition in changed])
        self._paused = wanted
        self._progress.track_partitions(assigned - wanted, self._turned_at)

    def _refresh_membership(self) -> None:
        """Fetch the member's epoch for transactions.

        The brokers refuse an old one; the settlement is tried again then.
        """
        # This is done on the poller's thread, as librdkafka hangs if two threads use a consumer.
        now = time.monotonic()
        if now >= self._refresh_at:
            self._membership = self._consumer.consumer_group_metadata()
            self._refresh_at = now + MEMBERSHIP_REFRESH_S

    def _count_unread(self) -> None:
        """Count what is unread, by the ends of logs that came with what was fetched. Paused partitions bring none, so
        the brokers are asked for theirs now and then.
        """
        if self._turned_at < self._count_at:
            return
        self._count_at = self._turned_at + COUNT_INTERVAL_S
        with self._state:
            positions = {one: self._holdings.next_offset(one) for one in self._holdings.partitions}
        unread = dict[Partition, int]()
        for partition, position in positions.items():
            with contextlib.suppress(KafkaException):
                _, end = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
                end = max(end, self._told_ends.get(partition, 0))
                self._places.note_end(partition, end)
                unread[partition] = max(0, end - position)
        self._unread = unread
        self._told_ends = {one: self._told_ends[one] for one in self._told_ends if one in self._paused}
        if self._paused and self._turned_at >= self._ask_paused_at:
            self._ask_paused_at = self._turned_at + PAUSED_INTERVAL_S
            self._lookup.request_ends(self._paused - self._starting)

    def _watch_progress(self) -> None:
        """Request the ends of quiet partitions, and compare the answers with what was read."""
        with self._state:
            positions = {one: self._holdings.next_offset(one) for one in self._holdings.partitions}
        for partition, end in self._lookup.take_ends().items():
            self._told_ends[partition] = end or 0
            if partition in positions and self._progress.compare_end(
                partition, positions[partition], end, self._turned_at
            ):
                self._pass_unfetched(partition, positions[partition])
        quiet = [one for one in self._progress.take_quiet(self._turned_at) if one[0] not in self._refused]
        if quiet:
            self._lookup.request_ends(quiet)

    # The lookup thread.

    @property
    def has_requests(self) -> bool:
        """Whether the brokers are to be asked something, by a member that can go on."""
        return self._failure is None and self._lookup.has_requests

    def look_up(self) -> bool:
        """Look up what is asked for; see `position_lookup.LookingUp.look_up`."""
        if self._closing.is_set():
            with contextlib.suppress(KafkaException, RuntimeError):
                self._lookup.close()
            with self._settling:  # a settlement under way uses the producer
                if self._transactions is not None:
                    self._transactions.close()
            return False
        try:
            if self._failure is None:
                self._probe_brokers()
                self._lookup.answer_requests()
                self._places.note_commits(self._holdings.commits)
                writer, now_s = self._transactions, time.monotonic()
                if writer and self._holdings.has_uncommitted and now_s >= self._commit_at:
                    self._commit_at = now_s + MARKER_COMMIT_INTERVAL_S * self.slowness**2
                    self._commit_passed(writer)
        except Exception as error:
            self._note_failure(error)
        return True

    def _probe_brokers(self) -> None:
        """Check whether the brokers answer, and how soon: librdkafka reports neither that they hang, nor that they are
        back.
        """
        if (asked_s := time.monotonic()) < self._probe_at:
            return
        self._probe_at = asked_s + PROBE_RETRY_S
        with contextlib.suppress(KafkaException):
            known = self._lookup.list_partitions(self._topics["interactive"])
            self._topic_parts = [format_partition(one) for one in known]
            self._probe_at = time.monotonic() + (PROBE_INTERVAL_S if self._pace.is_steady else 0.0)

    def _commit_passed(self, writer: Transactions) -> None:
        """Commit the offsets of markers that were passed over, unless a settlement runs, which commits them too.

        A producer with transactions leaves them in the requests topics, which endpoint workers read.
        """
        if not self._settling.acquire(blocking=False):
            return
        try:
            with self._time_settlement(), bus_errors():  # the consumer's own commit could wait without end
                try:
                    self._run_transaction(writer, [], [])
                except MemberFenced as fenced:
                    if not self._is_too_short(fenced, writer.slowness, 0.0):
                        raise
        except (BusUnavailable, GroupRebalanced) as error:
            log.debug("offsets are committed later: %s", error)
        finally:
            self._settling.release()

    # Problems. Any thread.

    def _describe_stall(self) -> str:
        """Return why this member stands still though the brokers answer; empty if it works."""
        if self._failure is not None:
            return str(self._failure)
        if self._leaving.is_set():
            return ""
        now, since, limit_s = time.monotonic(), self._settling_since, self._pace.stretch(MAX_SETTLEMENT_S)
        if not self._is_losing and now - self._turned_at > MAX_POLLER_PAUSE_S:
            return f"Kafka: nothing was read for {now - self._turned_at:.0f} s"
        if since is not None and now - since > limit_s:
            return f"Kafka: a settlement takes {now - since:.0f} s"
        return self._progress.current_problem or self._commits.describe_problem(now, limit_s)

    def _check_alive(self) -> None:
        """Raise `BusUnavailable` if the member has stood still for `STALL_PATIENCE_S`, and has to be made anew."""
        problem, now = self._describe_stall(), time.monotonic()
        if not problem:
            self._stalled_at = None
        elif self._stalled_at is None:
            self._stalled_at = now
        elif now - self._stalled_at > STALL_PATIENCE_S:
            self._note_failure(BusUnavailable(f"{problem}: this member is to be made anew"))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify_poll(self) -> None:
        """Wake who polls. `_state` is held."""
        self._state.notify_all()
        self._wake()

    def _note_failure(self, failure: Exception) -> None:
        with self._state:
            self._failure = self._failure or failure
            self._notify_poll()


def _epoch_of(message: Message) -> int:
    """Return the leader epoch under which a message was written."""
    epoch = message.leader_epoch()
    return NO_EPOCH if epoch is None else epoch


def _lookup_settings(group: str) -> dict[str, Any]:
    return {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}


def _consumer_settings(group: str, name: str) -> dict[str, Any]:
    return {
        **FETCH_LIMITS,
        "group.id": group,
        "group.protocol": "consumer",
        # This assignor deals out each topic by itself. The brokers' default balances the sum of partitions: of two
        # members one may have all interactive partitions, and the other all batch partitions.
        "group.remote.assignor": "range",
        "client.id": name,
        "max.poll.interval.ms": 60_000,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,  # behind the last message there may be markers: committed too, nothing lags
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 20,
        "queued.min.messages": 64,
        "queued.max.messages.kbytes": MAX_BATCH_BYTES // 1024,
    }
