"""A member of a stage's group on Kafka: one thread polls, and the threads that finished work settle it."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from penstock.bus.contract import Delivery, OrphanReader, Outgoing, Settlement
from penstock.bus.kafka.buffer import PrefetchBuffer
from penstock.bus.kafka.client import (
    DAMAGED_BATCH_ERRORS,
    FETCH_LIMITS,
    MAX_BATCH_BYTES,
    SOCKET_TIMEOUT_S,
    bus_errors,
    parse_delivery,
)
from penstock.bus.kafka.client_factory import KafkaClientFactory
from penstock.bus.kafka.damage import DamagedMessages
from penstock.bus.kafka.offsets import NO_EPOCH, Partition
from penstock.bus.kafka.orphans import KafkaOrphanReader, format_partition
from penstock.bus.kafka.places import PlaceKeeper
from penstock.bus.kafka.position_lookup import LookupThread, PositionLookup, ReadProgress
from penstock.bus.kafka.reply_topics import ReplyTopics
from penstock.bus.kafka.settling import MemberSettling
from penstock.bus.kafka.shared import SharedState
from penstock.bus.kafka.writers import (
    INIT_TIMEOUT_S,
)
from penstock.errors import BusUnavailable
from penstock.names import PriorityClass, WorkerKind, find_shared_topic
from penstock.redis.scripts import ScriptCall

log = logging.getLogger(__name__)

POLL_INTERVAL_S, IDLE_POLL_INTERVAL_S = 0.05, 0.25
"""How long the poller waits for a message at most, while anything is under way, and while nothing is."""
FETCH_WAIT_S = 0.25
"""How long a broker holds a fetch back that finds nothing. A message that comes meanwhile answers it at once, but a
partition that is begun or resumed is not in it, and waits for the next one.
"""
MEMBERSHIP_REFRESH_S = 0.02
COUNT_INTERVAL_S = 0.25
"""How often unread messages are counted, for the heartbeat."""
PAUSED_INTERVAL_S = 2.0
"""How often the brokers are asked where paused partitions end."""
PROBE_INTERVAL_S, PROBE_RETRY_S = 2.0, 1.0
"""How often the brokers are probed, while they answer as expected, and while they do not answer. While they answer more
slowly than before they are probed at once.
"""
PROBES_PER_LISTING = 15
"""Every so many probes all topics are listed: partitions of a dead member's may be in tenants' own ones."""
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


class KafkaMember:
    """Consumes a stage's topics. It settles in transactions; in prefill it does so from its first result on.

    Three threads use it. The poller reads, and runs the callbacks for partitions that are assigned or revoked. The
    lookup thread makes the calls that take time: where an assigned partition begins, where a quiet one ends, and how
    late the brokers answer. It does so for both members of a worker that is in two groups. The third thread is the
    caller's, which settles.

    The broker checks that a settling member is in the group, but not that it owns the partition. So there are two
    locks: that of `MemberSettling`, which the callback for revoked partitions waits for, and `_state`, which guards
    `_holdings`.

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
        self.reply_prefixes, self._reply_topics = bus.settings.find_reply_prefixes(), ReplyTopics(bus.clients)
        self._holdings, self._leaving = PrefetchBuffer(bus.pipeline), threading.Event()
        self._shared = SharedState(self._holdings, wake)
        self._state, self._closing = self._shared.changed, self._shared.closing
        self._damage = DamagedMessages(self._shared, bus.pipeline)
        # The poller's.
        self._starting: set[Partition] = set()
        self._paused: set[Partition] = set()
        self._progress = ReadProgress(bus.fetch_attempts)
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
        # The lookup thread's.
        self._places = places = PlaceKeeper(bus.pipeline, bus.clients, bus.redis_url, bus.pace)
        settings = _lookup_settings(self._group)
        self._lookup = PositionLookup(bus.create_consumer(settings), lookups.requested, places, self._pace)
        self._topic_parts: list[str] = []
        """All partitions of the interactive topic, as the brokers told last."""
        self._own_parts: list[str] = []
        """The same of tenants' own ones."""
        self._num_probes = 0
        if stage != "prefill":  # its first producer has limits that suit the brokers' pace
            with bus_errors():
                self._lookup.learn_pace(self._topics["interactive"], INIT_TIMEOUT_S)
        self._settling = MemberSettling(
            self._shared,
            self._pace,
            self._pipeline.results_topic,
            partial(bus.create_transactions, f"{self._group}.{name}"),
            bus.create_output_writer() if stage == "prefill" else None,
        )
        self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        settings = _consumer_settings(self._group, name) | {"on_commit": self._settling.note_committed}
        # A response that takes longer than the time limit of a socket is dropped, and asked for again from its start.
        timeout_s = min(MAX_SOCKET_TIMEOUT_S, max(SOCKET_TIMEOUT_S, bus.fetch_attempts.longest_patience_s))
        self._consumer = bus.create_consumer(settings | {"socket.timeout.ms": int(timeout_s * 1000)})
        self._turned_at = time.monotonic()
        lookups.serve(self)
        self._poller = threading.Thread(target=self._poll_forever, name=f"kafka-{name}", daemon=True)
        self._poller.start()

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
        self._damage.bury_damaged(self._settling)
        with self._state:
            while True:
                self._shared.raise_failure()
                found = self._holdings.hand_out(capacity)
                left_s = end - time.monotonic()
                if found or left_s <= 0 or self._closing.is_set():
                    return found
                self._state.wait(left_s)

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish the outputs and finish the deliveries; see `contract.Member.settle` for what each stage promises."""
        self._settling.settle(settlements)

    def find_reply_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return why topics would not take replies; see `contract.Member.find_reply_refusals`."""
        return self._reply_topics.find_refusals(replies)

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
        interactive = self._topics["interactive"]
        return [format_partition(one) for one in self._list_read() if find_shared_topic(one[0]) == interactive]

    def _list_read(self) -> list[Partition]:
        if self._pace.describe_silence() or self._describe_stall():
            return []
        with self._state:
            partitions = self._holdings.partitions
        standing = self._progress.standing_partitions
        return [one for one in partitions if one[0] not in self._refused and one not in standing]

    def count_waiting(self) -> dict[Partition, int]:
        """Return what waits in each partition; see `contract.Member.count_waiting`.

        Messages in the buffer count, and those that were unread when they were counted last: within a part of a second.
        Partitions that are paused, as the buffer is full, are counted every few seconds.
        """
        buffered = Counter(delivery.offset[0] for delivery in self.list_prefetched())
        return {one: self._unread.get(one, 0) + buffered[one] for one in self._list_read()}

    def create_orphan_readers(self) -> list[OrphanReader]:
        """Return a reader for partitions of dead members that the brokers still count as alive."""
        return [
            KafkaOrphanReader(
                self._pipeline,
                self._stage,
                self._clients,
                self._places.find_start,
                lambda: [*self._topic_parts, *self._own_parts],
            )
        ]

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
        if not self.current_problem:
            self._settling.finish_last(LEAVE_TIMEOUT_S)
        self._closing.set()
        with self._state:
            self._state.notify_all()
        self._poller.join(LEAVE_TIMEOUT_S)
        self._places.note_commits(self._holdings.commits, is_last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The polling thread.

    def _poll_forever(self) -> None:
        try:
            self._consumer.subscribe(
                [*self._topics.values(), self._pipeline.own_inputs_pattern(self._stage)],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._leaving.is_set():
                message = self._consumer.poll(IDLE_POLL_INTERVAL_S if self._is_idle() else POLL_INTERVAL_S)
                self._turned_at = time.monotonic()
                if message is not None:
                    self._note_message(message)
                    self._buffer_message(message)
                self._begin_partitions()
                self._settling.commit_finished(self._consumer, self._turned_at)
                self._pause_full()
                self._refresh_membership()
                self._count_unread()
                self._watch_progress()
        except Exception as error:  # the member cannot go on: its methods raise the error
            self._shared.note_failure(BusUnavailable(f"Kafka: {error}") if isinstance(error, KafkaException) else error)
        finally:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumer.close()
            # The consumer has this member's callbacks: without this only the garbage collector frees both, on any
            # thread.
            del self._consumer

    def _is_idle(self) -> bool:
        """Return whether the member reads partitions, and has no message, no commit and no partition to treat."""
        with self._state:
            is_reading = bool(self._holdings.partitions) and not self._holdings.num_messages
        return is_reading and not (self._starting or self._paused or self._holdings.has_uncommitted)

    def _note_message(self, message: Message) -> None:
        """Note what a message, or an error in its place, shows about its partition."""
        partition = message.topic() or "", message.partition() or 0
        self._progress.note_message(partition, self._turned_at)
        error = message.error()
        if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._refused[partition[0]] = f"Kafka does not let this worker read {partition[0]}: {error.str()}"
        elif error is None or error.code() == EOF:
            self._refused.pop(partition[0], None)
            self._damage.note_read(partition, message.offset() or 0)
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
                self._damage.pass_damaged(self._consumer, partition, message.offset() or 0, error.str())
            return
        delivery = parse_delivery(message, self._pipeline.find_class(message.topic() or ""))
        with self._state:
            self._holdings.add_message(delivery, _epoch_of(message))
            self._shared.notify_poll()

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
                log.debug("beginning %s failed, retrying: %s", partition, error)
                self._lookup.request_starts([partition])
                continue
            with self._state:
                self._holdings.assign_partition(partition, start, epoch)
            self._starting.discard(partition)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what is finished of partitions, and forget them. librdkafka revokes them after the answer."""
        gone = {(old.topic, old.partition) for old in partitions}
        self._settling.commit_revoked(consumer, gone)
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
        self._damage.forget_partitions(gone)
        limit_s, now, self._is_losing = self._pace.stretch(REVOKE_TIMEOUT_S), time.monotonic(), True
        # A member that is made anew because of such a settlement leaves its group at once.
        is_over = self._settling.lock.acquire(timeout=max(0.0, (self._settling.since_s or now) + limit_s - now))
        self._turned_at, self._is_losing = time.monotonic(), False
        if not is_over:
            self._shared.note_failure(
                BusUnavailable(f"Kafka: a settlement does not end, its partitions go after {limit_s:g} s")
            )
        try:
            with self._state:
                self._holdings.revoke_partitions(gone)
        finally:
            if is_over:
                self._settling.lock.release()

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
            self._settling.membership = self._consumer.consumer_group_metadata()
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
            if partition not in positions:
                continue
            position = positions[partition]
            if self._progress.compare_end(partition, position, end, self._turned_at) and self._damage.pass_unfetched(
                self._consumer, partition, position
            ):
                self._progress.note_message(partition, self._turned_at)
        quiet = [one for one in self._progress.take_quiet(self._turned_at) if one[0] not in self._refused]
        if quiet:
            self._lookup.request_ends(quiet)

    # The lookup thread.

    @property
    def has_requests(self) -> bool:
        """Whether the brokers are to be asked something, by a member that can go on."""
        return self._shared.failure is None and self._lookup.has_requests

    def look_up(self) -> bool:
        """Look up what is asked for; see `position_lookup.LookingUp.look_up`."""
        if self._closing.is_set():
            with contextlib.suppress(KafkaException, RuntimeError):
                self._lookup.close()
            self._settling.close()
            return False
        try:
            if self._shared.failure is None:
                self._probe_brokers()
                self._lookup.answer_requests()
                self._places.note_commits(self._holdings.commits)
                self._settling.commit_passed()
        except Exception as error:
            self._shared.note_failure(error)
        return True

    def _probe_brokers(self) -> None:
        """Check whether the brokers answer, and how soon: librdkafka reports neither that they hang, nor that they are
        back.
        """
        if (asked_s := time.monotonic()) < self._probe_at:
            return
        self._probe_at = asked_s + PROBE_RETRY_S
        with contextlib.suppress(KafkaException):
            known = self._lookup.list_partitions(interactive := self._topics["interactive"])
            self._topic_parts = [format_partition(one) for one in known]
            if self._num_probes % PROBES_PER_LISTING == 0:
                self._own_parts = [format_partition(one) for one in self._lookup.list_own_partitions(interactive)]
            self._num_probes += 1
            self._probe_at = time.monotonic() + (PROBE_INTERVAL_S if self._pace.is_steady else 0.0)

    # Problems. Any thread.

    def _describe_stall(self) -> str:
        """Return why this member stands still though the brokers answer; empty if it works."""
        if self._shared.failure is not None:
            return str(self._shared.failure)
        if self._leaving.is_set():
            return ""
        now, since, limit_s = time.monotonic(), self._settling.since_s, self._pace.stretch(MAX_SETTLEMENT_S)
        if not self._is_losing and now - self._turned_at > MAX_POLLER_PAUSE_S:
            return f"Kafka: nothing was read for {now - self._turned_at:.0f} s"
        if since is not None and now - since > limit_s:
            return f"Kafka: a settlement takes {now - since:.0f} s"
        return self._progress.current_problem or self._settling.commits.describe_problem(now, limit_s)

    def _check_alive(self) -> None:
        """Raise `BusUnavailable` if the member has stood still for `STALL_PATIENCE_S`, and has to be made anew."""
        problem, now = self._describe_stall(), time.monotonic()
        if not problem:
            self._stalled_at = None
        elif self._stalled_at is None:
            self._stalled_at = now
        elif now - self._stalled_at > STALL_PATIENCE_S:
            self._shared.note_failure(BusUnavailable(f"{problem}: this member is to be made anew"))


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
        "fetch.wait.max.ms": int(FETCH_WAIT_S * 1000),
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 20,
        "queued.min.messages": 64,
        "queued.max.messages.kbytes": MAX_BATCH_BYTES // 1024,
    }
