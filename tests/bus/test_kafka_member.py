"""A Kafka member over brokers in memory: what is assigned is read, whatever comes, goes and hangs meanwhile."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast
from unittest import mock

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.bus.contract import Delivery, Outgoing, Settlement
from penstock.bus.kafka import member as kafka_member
from penstock.bus.kafka import position_lookup, settling
from penstock.bus.kafka.buffer import ROOM_S, PrefetchBuffer
from penstock.bus.kafka.member import KafkaMember, _lookup_settings
from penstock.bus.kafka.offsets import Partition, PartitionOffsets, StartPosition
from penstock.bus.kafka.orphans import format_partition
from penstock.bus.kafka.places import PlaceKeeper
from penstock.bus.kafka.position_lookup import FetchAttempts, PositionLookup, ReadProgress
from penstock.bus.kafka.writers import OffsetCommitter
from penstock.errors import BusUnavailable, DeliveryLost
from penstock.names import ORIGIN_HEADER, REASON_HEADER, Pipeline, Stage
from sim.waiting import PATIENCE_S, wait_for
from sim.world.kafka_broker import LEADER_EPOCH
from tests.bus.buses import CAPACITY
from tests.bus.kafka_world import PlayedBus, PlayedConsumer, PlayedWorld, played, refusal

NAMES = Pipeline("double")
ONE, OTHER, BATCH = (
    (NAMES.request_topic("interactive"), 0),
    (NAMES.request_topic("interactive"), 1),
    (NAMES.request_topic("batch"), 0),
)
JOBS, JOBS_OTHER, JOBS_BATCH = (
    (NAMES.job_topic("interactive"), 0),
    (NAMES.job_topic("interactive"), 1),
    (NAMES.job_topic("batch"), 0),
)
NUMBERS = st.integers(0, 2)


def place_of(delivery: Delivery) -> tuple[Partition, int]:
    number, _, offset = delivery.position.partition(":")
    return (delivery.topic, int(number)), int(offset)


def in_world(act: Callable[..., None]) -> Callable[..., None]:
    """Let a machine's method run in its world."""

    @functools.wraps(act)
    def run(self: "MemberMachine", *args: Any, **kwargs: Any) -> None:
        self.world.play(lambda: act(self, *args, **kwargs))

    return run


class MemberMachine(RuleBasedStateMachine):
    """The model: what was settled, and what came of each partition since it was assigned."""

    stage: Stage = "prefill"
    partitions: tuple[Partition, ...] = (ONE, OTHER, BATCH)

    def __init__(self) -> None:
        super().__init__()
        self._patches = contextlib.ExitStack()
        self.world = self._patches.enter_context(PlayedWorld())
        # Where the machine stands still, the member is not at fault.
        for module, limit in (
            (kafka_member, "MAX_POLLER_PAUSE_S"), (position_lookup, "STALLED_PARTITION_S"),
            (position_lookup, "UNKNOWN_START_S"),
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(module, limit, math.inf))
        self.bus = self.world.play(PlayedBus)
        self.member = self.world.play(lambda: KafkaMember(self.bus, self.stage, "a"))
        self.came: dict[Partition, set[int]] = {}
        self.settled: set[tuple[Partition, int]] = set()
        self.held: list[Delivery] = []

    @rule(number=NUMBERS, count=st.integers(1, 100), has_marker=st.booleans())
    def publish(self, number: int, count: int, has_marker: bool) -> None:
        partition = self.partitions[number]
        self.bus.publish(partition, *[b"x"] * count, *[None] * has_marker)

    @rule(number=NUMBERS)
    @in_world
    def give(self, number: int) -> None:
        partition = self.partitions[number]
        if partition not in self.came:
            self.came[partition] = set()
            self.bus.give(partition)

    @rule(number=NUMBERS)
    @in_world
    def take_away(self, number: int) -> None:
        partition = self.partitions[number]
        if partition in self.came:
            del self.came[partition]
            self.bus.take_away(partition)

    @rule(count=st.integers(1, 150))
    @in_world
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.bus.turn()

    @rule(count=st.integers(0, 100))
    @in_world
    def poll(self, count: int) -> None:
        self.take(count)

    def take(self, count: int) -> None:
        for delivery in self.member.poll(0.0, {"interactive": count, "batch": count}):
            partition, offset = place_of(delivery)
            assert offset not in self.came[partition], "it came twice"
            assert (partition, offset) not in self.settled, "it was done"
            self.came[partition].add(offset)
            self.held.append(delivery)

    @rule(numbers=st.sets(st.integers(0, 999), max_size=30))
    @in_world
    def settle(self, numbers: set[int]) -> None:
        # How many are held depends on the member's thread: what is drawn must not, or a seed draws other things again.
        picked = {number % len(self.held) for number in numbers} if self.held else set()
        chosen = [self.held[index] for index in picked]
        lost: list[Delivery] = []
        try:
            self.member.settle([Settlement(delivery) for delivery in chosen])
        except DeliveryLost as error:
            lost = error.deliveries
        done = [] if lost else chosen
        self.settled |= {place_of(delivery) for delivery in done}
        self.held = [delivery for delivery in self.held if delivery not in done and delivery not in lost]

    @rule(is_stable=st.booleans())
    def commits_are_stable(self, is_stable: bool) -> None:
        self.bus.broker.commit_error = None if is_stable else KafkaError.UNSTABLE_OFFSET_COMMIT

    @rule()
    @in_world
    def come_to_rest(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Everything that is assigned is read."""
        self.bus.broker.commit_error = None
        self.bus.turn_until(self.all_came, "what is assigned is read")

    def all_came(self) -> bool:
        self.take(100)
        logs = self.bus.logs
        wanted = {(one, n) for one in self.came for n, entry in enumerate(logs[one]) if entry.is_visible}
        return wanted <= self.settled | {(one, n) for one, came in self.came.items() for n in came}

    @invariant()
    def the_accounts_agree(self) -> None:
        reader = self.bus.reader
        assert reader is not None
        assert reader.paused & set(reader.positions) == self.member._paused
        assert self.member.current_problem == ""
        with self.member._state:
            self.member._holdings.check_integrity()

    def teardown(self) -> None:
        with self._patches:
            self.leave()

    @in_world
    def leave(self) -> None:
        self.rest()
        self.member.close()
        for partition in self.came:  # all that was settled is committed when it leaves
            done = {offset for one, offset in self.settled if one == partition}
            place = self.bus.commits.get(partition, TopicPartition(*partition, 0))
            begun = PartitionOffsets(place.offset, place.metadata or "")
            assert not any(begun.note_delivered(offset) for offset in sorted(done))


class DecodeMachine(MemberMachine):
    """The same with transactions."""

    stage = "decode"
    partitions = (JOBS, JOBS_OTHER, JOBS_BATCH)


TestPrefill, TestDecode = MemberMachine.TestCase, DecodeMachine.TestCase
TestPrefill.settings = TestDecode.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@contextmanager
def joined(bus: PlayedBus, stage: Stage = "prefill") -> Iterator[KafkaMember]:
    """A member. Nothing hangs or is away any more when it is left."""
    member = KafkaMember(bus, stage, "a")
    try:
        yield member
    finally:
        bus.goes_on.set()
        member.close()


@played
def test_one_partition_whose_commits_are_not_stable_holds_up_neither_the_others_nor_leaving() -> None:
    bus = PlayedBus()
    bus.publish(ONE, b"1")
    with joined(bus) as member:
        bus.give(ONE)
        bus.turn_until(lambda: member.poll(0.0, CAPACITY), "the first partition is read")
        bus.broker.commit_error = KafkaError.UNSTABLE_OFFSET_COMMIT
        bus.give(OTHER)
        bus.publish(ONE, b"2")
        bus.turn_until(lambda: member.poll(0.0, CAPACITY), "it is read on")
        assert member.list_partitions() == [f"{ONE[0]}:0"]
        member.stop_consuming()
        assert not member._poller.is_alive()


@played
def test_an_answer_counts_for_the_question_it_was_asked_for() -> None:
    """A partition that went and came back is begun where the member between stopped."""
    bus = PlayedBus()
    bus.commits[ONE] = TopicPartition(*ONE, 10)
    places = PlaceKeeper(bus.pipeline, {}, "", bus.pace)
    questions = PositionLookup(bus.create_consumer(_lookup_settings("group")), threading.Condition(), places, bus.pace)

    def answer_late(places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        found = [bus.commits[ONE]]
        if bus.commits[ONE].offset == 10:
            questions.cancel_requests([ONE])
            bus.commits[ONE] = TopicPartition(*ONE, 50)
            questions.request_starts([ONE])
        return found

    questions._consumer.committed = answer_late  # type: ignore[method-assign, assignment]
    questions.request_starts([ONE])
    questions.answer_requests()
    assert questions.take_starts() == {}
    questions.answer_requests()
    assert questions.take_starts()[ONE].offset == 50


@played
def test_commits_that_are_refused_are_not_asked_for_for_ever() -> None:
    bus = PlayedBus()
    bus.broker.commit_error = KafkaError.GROUP_AUTHORIZATION_FAILED
    with joined(bus) as member:
        bus.give(ONE)
        with pytest.raises(BusUnavailable, match="check its access"):
            member.poll(PATIENCE_S, CAPACITY)


@played
def test_a_partition_goes_while_a_job_is_written_and_the_job_counts() -> None:
    """Whoever has it now finds in the record that it was handed off: nobody waits, and nothing is done again here."""
    with reading(b"1") as (bus, member):
        pool = ThreadPoolExecutor(1)
        (delivery,) = member.poll(0.0, CAPACITY)
        bus.goes_on.clear()
        settling = pool.submit(member.settle, [make_output(JOBS[0], delivery)])
        wait_for(lambda: member._settling.since_s is not None, "it is being settled")
        member._on_lost(None, [TopicPartition(*ONE)])  # type: ignore[arg-type]
        bus.goes_on.set()
        wait_for(settling.done, "it has ended")
        settling.result()
        assert (member.count_held(), bus.commits) == (0, {})
        with pytest.raises(DeliveryLost):
            member.settle([Settlement(delivery)])


@played
def test_what_came_again_is_another_delivery_also_while_the_lost_one_is_settled() -> None:
    """It stays with this member until it is settled itself: another one may have done its request anew meanwhile."""
    with reading(b"1") as (bus, member):
        (lost,) = member.poll(0.0, CAPACITY)
        bus.take_away(ONE)
        bus.give(ONE)
        bus.turn_until(member.list_prefetched, "it has come again")
        (again,) = member.poll(0.0, CAPACITY)
        member._holdings.finish_deliveries([lost])
        assert [member.is_holding(one) for one in (lost, again)] == [False, True]
        with pytest.raises(DeliveryLost):
            member.settle([Settlement(lost)])
        member.settle([Settlement(again)])
        assert member.count_held() == 0


@played
def test_a_commit_that_is_refused_says_the_next_time_what_is_true_then() -> None:
    with reading(b"1", b"2", b"3") as (bus, member):
        first, second, third = member.poll(0.0, CAPACITY)
        bus.broker.commit_refusal = KafkaError.STALE_MEMBER_EPOCH
        member.settle([Settlement(third)])
        bus.turn_until(lambda: member._settling.commits._error, "it is refused")
        assert member._holdings.has_uncommitted
        member.settle([Settlement(first)])
        bus.broker.commit_refusal = None
        bus.turn_until(lambda: not member._holdings.has_uncommitted, "it is committed")
        assert (bus.commits[ONE].offset, member.is_holding(second)) == (1, True)
        assert PartitionOffsets(1, bus.commits[ONE].metadata or "").note_delivered(1)


Reading = tuple[PlayedBus, KafkaMember]


@contextmanager
def reading(*values: bytes | None, partition: Partition = ONE, committed: int | None = None) -> Iterator[Reading]:
    """A bus with messages in one partition, and a member that has begun it and fetched them all."""
    bus = PlayedBus()
    bus.publish(partition, *values)
    if committed is not None:
        bus.commits[partition] = TopicPartition(*partition, committed)
    with joined(bus, "decode" if partition == JOBS else "prefill") as member:
        bus.give(partition)
        bus.turn_until(lambda: member.list_partitions() and bus.has_all_fetched(), "all is fetched")
        yield bus, member


def make_output(topic: str, delivery: Delivery) -> Settlement:
    return Settlement(delivery, [Outgoing(topic, delivery.value)])


def settle_what_comes_again(bus: PlayedBus, num_unsettled: int) -> None:
    """Let another member have the partition, as after a crash, and settle what comes there but for the last ones."""
    dead = bus.reader
    with joined(bus) as heir:
        bus.give(ONE)
        bus.turn_until(lambda: ONE in heir._holdings.partitions and bus.has_all_fetched(), "all is fetched")
        found = heir.poll(0.0, CAPACITY)
        heir.settle([make_output(NAMES.results_topic, one) for one in found[: len(found) - num_unsettled]])
    bus.reader = dead


def list_results(bus: PlayedBus) -> list[bytes]:
    return [output.value for output in bus.written if output.topic == NAMES.results_topic]


@pytest.mark.parametrize("is_waited_for", [True, False])
@played
def test_a_commit_that_is_under_way_takes_no_result_back(is_waited_for: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the commit that is not waited for is executed behind the transaction."""
    with reading(b"1", b"2", b"3") as (bus, member):
        first, second, third = member.poll(0.0, CAPACITY)
        bus.broker.commits_go_on.clear()
        member.settle([make_output(JOBS[0], first)])
        bus.turn_until(lambda: member._settling.commits.may_come_late, "its commit is sent")
        if not is_waited_for:
            monkeypatch.setattr(OffsetCommitter, "may_come_late", False)
        thread = threading.Thread(target=member.settle, args=([make_output(NAMES.results_topic, second)],))
        thread.start()
        wait_for(lambda: member._settling.outputs is None, "it changes over")
        if is_waited_for:
            assert list_results(bus) == []
            bus.broker.commits_go_on.set()
            bus.turn_until(lambda: not thread.is_alive(), "the commit is answered")
        thread.join()
        bus.broker.commits_go_on.set()
        bus.turn()
        assert bus.commits[ONE].offset == (2 if is_waited_for else 1)
        if is_waited_for:
            member.settle([make_output(JOBS[0], third)])
            assert bus.commits[ONE].offset == 3, "hand-offs share the transactions from now on"
        settle_what_comes_again(bus, num_unsettled=1)
        assert list_results(bus) == ([b"2"] if is_waited_for else [b"2", b"2"])


@played
def test_a_commit_that_no_broker_answers_is_not_outrun_by_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "BROKER_TIMEOUT_S", 0.01)
    with reading(b"1", b"2") as (bus, member):
        first, second = member.poll(0.0, CAPACITY)
        bus.broker.commit_refusal = KafkaError._TIMED_OUT
        member.settle([make_output(JOBS[0], first)])
        bus.turn_until(lambda: member._settling.commits._error, "it is not answered in time")
        with pytest.raises(BusUnavailable, match="may come late"):
            member.settle([make_output(NAMES.results_topic, second)])
        with pytest.raises(BusUnavailable, match="may come late"):
            member.settle([make_output(JOBS[0], second)])
        assert (list_results(bus), bus.commits, member.is_holding(second)) == ([], {}, True)


@pytest.mark.parametrize(
    ("code", "mend"),
    [
        (KafkaError.GROUP_AUTHORIZATION_FAILED, lambda bus: setattr(bus.broker, "commit_refusal", None)),
        (KafkaError.STALE_MEMBER_EPOCH, lambda bus: bus.take_away(ONE)),
    ],
    ids=["until it is committed", "until its partition has gone"],
)
@played
def test_finished_work_that_cannot_be_committed_shows(
    code: int, mend: Callable[[PlayedBus], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_member, "MAX_SETTLEMENT_S", 0.0)
    with reading(b"1") as (bus, member):
        bus.broker.commit_refusal = code
        member.settle([Settlement(delivery) for delivery in member.poll(0.0, CAPACITY)])
        bus.turn_until(lambda: "were not committed" in member.current_problem, "it is noticed")
        mend(bus)
        bus.turn_until(lambda: member.current_problem == "", "nothing is left to commit")


def test_a_commit_that_cannot_be_sent_is_not_taken_for_the_one_under_way() -> None:
    class Refusing:
        num_sent = 0

        def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
            self.num_sent += 1
            if self.num_sent == 2:
                raise KafkaException(KafkaError(KafkaError._STATE))

    commits, consumer = OffsetCommitter(), cast("Consumer", Refusing())
    first, second = [(ONE, 1, "")], [(OTHER, 2, "")]
    commits.send_commits(consumer, first, {})
    commits.send_commits(consumer, second, {})
    assert commits.note_answer(None, []) == first
    commits.note_nothing_to_commit()
    assert commits.describe_problem(time.monotonic() + 1, 0.0) == ""


@pytest.mark.parametrize(("limit_s", "begun_s"), [(0.05, 0.0), (1000.0, 1000.0)], ids=["short", "over"])
@played
def test_a_settlement_without_end_keeps_no_partition(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, begun_s: float
) -> None:
    monkeypatch.setattr(kafka_member, "REVOKE_TIMEOUT_S", limit_s)
    with reading(b"1", partition=JOBS) as (bus, member):
        pool = ThreadPoolExecutor(1)
        (delivery,) = member.poll(0.0, CAPACITY)
        bus.goes_on.clear()
        settling = pool.submit(member.settle, [Settlement(delivery)])
        wait_for(lambda: member._settling.since_s is not None, "it is being settled")
        member._settling.since_s = time.monotonic() - begun_s
        member._on_revoke(None, [TopicPartition(*JOBS)])  # type: ignore[arg-type]
        assert not member.is_holding(delivery)
        with pytest.raises(BusUnavailable, match="does not end"):
            member.poll(0.0, CAPACITY)
        bus.goes_on.set()
        wait_for(settling.done, "it has ended")
        with pytest.raises(BusUnavailable):  # whether it was done is not known
            settling.result()


@played
def test_a_poller_that_hangs_names_no_partitions_and_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_member, "STALL_PATIENCE_S", 0.05)
    with reading() as (bus, member):
        monkeypatch.setattr(kafka_member, "MAX_POLLER_PAUSE_S", 0.1)
        bus.goes_on.clear()  # the next poll does not come back
        wait_for(lambda: "nothing was read" in member.current_problem, "it is noticed")
        assert member.list_partitions() == []
        with pytest.raises(BusUnavailable, match="made anew"):
            wait_for(lambda: member.poll(0.0, CAPACITY), "a poll raises")


@played
def test_a_settlement_without_end_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_member, "MAX_SETTLEMENT_S", 0.0)
    with joined(PlayedBus()) as member:
        with member._settling.time_settlement():
            wait_for(lambda: "a settlement takes" in member.current_problem, "it is noticed")
        assert member.current_problem == ""


def notice_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a member notice at once that a partition stands still."""
    monkeypatch.setattr(position_lookup, "QUIET_PARTITION_S", 0.01)
    monkeypatch.setattr(position_lookup, "STALLED_PARTITION_S", 0.03)


@pytest.mark.parametrize("has_leader", [True, False])
@played
def test_a_partition_that_is_not_read_though_it_has_more_shows(
    monkeypatch: pytest.MonkeyPatch, has_leader: bool
) -> None:
    """Not one that has no leader: that is an outage."""
    notice_soon(monkeypatch)
    bus = PlayedBus()
    bus.deaf.add(ONE)
    bus.publish(ONE, b"1")
    with joined(bus) as member:
        bus.give(ONE)
        bus.turn_until(lambda: ONE in member._holdings.partitions, "it is begun")
        bus.leaderless |= set() if has_leader else {ONE}
        if has_leader:
            bus.turn_until(lambda: "is not read beyond 0" in member.current_problem, "it is noticed")
            assert member.list_partitions() == []
        else:
            asked = member._progress._asked_s
            bus.turn_until(lambda: asked.get(ONE, 0.0) - member._progress._moved_s[ONE] > 0.1, "it is asked for long")
            assert member.current_problem == ""
        bus.deaf.clear()
        bus.turn_until(lambda: member.poll(0.0, CAPACITY), "it moves again")
        assert member.current_problem == ""


@pytest.mark.parametrize("seconds", [24.0, 70.0])
def test_a_message_that_takes_long_to_fetch_is_waited_for_twice_as_long_by_each_member(seconds: float) -> None:
    """Each member begins the fetch anew, and gives up as the first one would."""
    attempts, patience = FetchAttempts(), []
    while True:
        progress = ReadProgress(attempts)
        progress.track_partitions([ONE, OTHER], 0.0)
        now_s = 0.0
        while not progress.current_problem and now_s < seconds:
            now_s += 1.0
            if ONE in progress.take_quiet(now_s):
                assert not progress.compare_end(ONE, 4, 6, now_s), "it is not passed over"
        assert OTHER not in progress.standing_partitions, "the other one is its member's"
        if not progress.current_problem:
            break
        patience.append(now_s)
    assert patience == {24.0: [10.0, 20.0], 70.0: [10.0, 20.0, 40.0]}[seconds]


@pytest.mark.parametrize("has_more", [True, False])
@played
def test_a_message_that_cannot_be_fetched_is_passed_over_in_the_end(
    monkeypatch: pytest.MonkeyPatch, has_more: bool
) -> None:
    """Unless what is behind it does not come either: then the message is not at fault."""
    notice_soon(monkeypatch)
    monkeypatch.setattr(kafka_member, "STALL_PATIENCE_S", 0.01)
    bus = PlayedBus()
    bus.publish(ONE, b"0", b"1", b"2")
    bus.publish(OTHER, b"other")
    bus.unfetchable |= {(ONE, 1)} if has_more else {(ONE, 1), (ONE, 2)}
    came: set[bytes] = set()
    num_members = 0
    while b"2" not in came and num_members <= position_lookup.MAX_FETCH_ATTEMPTS:
        num_members += 1
        with joined(bus) as member, suppress(BusUnavailable):
            bus.give(ONE, OTHER)
            while b"2" not in came:
                found = member.poll(0.0, CAPACITY)
                came |= {delivery.value for delivery in found}
                member.settle([Settlement(delivery) for delivery in found])
                bus.turn()
            member.poll(0.0, CAPACITY)
    assert came == {b"0", b"other"} | ({b"2"} if has_more else set())
    reasons = [letter.headers[REASON_HEADER] for letter in bus.written]
    if has_more:
        assert reasons == ["partition 0, offset 1, cannot be fetched: it took too long to fetch"]
        assert num_members == position_lookup.MAX_FETCH_ATTEMPTS
    else:
        assert reasons == []
        bus.unfetchable.clear()
        with joined(bus) as member:
            bus.give(ONE)
            bus.turn_until(lambda: len(member.list_prefetched()) == 2, "both come")


@played
def test_a_partition_that_stands_still_is_not_named_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    notice_soon(monkeypatch)
    bus = PlayedBus()
    bus.fetch_attempts.note_stall(ONE, 0)
    bus.fetch_attempts._stalls[ONE] = 0, 20  # this member waits for hours
    bus.deaf.add(ONE)
    bus.publish(ONE, b"1")
    with joined(bus) as member:
        bus.give(ONE, OTHER)
        bus.turn_until(lambda: "is not read beyond 0" in member.current_problem, "it is noticed")
        assert member.list_partitions() == [format_partition(OTHER)]


@played
def test_a_partition_whose_committed_offset_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that hangs may hold up the answer for long."""
    monkeypatch.setattr(position_lookup, "UNKNOWN_START_S", 0.0)
    bus = PlayedBus()
    bus.broker.commit_error = KafkaError.UNSTABLE_OFFSET_COMMIT
    with joined(bus) as member:
        bus.give(ONE)
        what = f"{ONE[0]} partition 0 is not read, its committed offset is not known: "
        wait_for(lambda: what in member.current_problem, "it is told")
        assert member.list_partitions() == []
        bus.broker.commit_error = None
        bus.turn_until(member.list_partitions, "it is begun")
        assert member.current_problem == ""


@played
def test_a_commit_beyond_the_end_begins_the_partition_anew() -> None:
    """The log lost its tail: what is there now was accepted after that, whatever its offsets."""
    with reading(b"1", b"2", committed=60) as (bus, member):
        member.settle([Settlement(delivery) for delivery in member.poll(0.0, CAPACITY)])
    assert bus.commits[ONE].offset == 2


@pytest.mark.parametrize("ends_in_a_marker", [False, True])
@played
def test_a_commit_has_the_epoch_of_what_it_stands_behind_or_none(ends_in_a_marker: bool) -> None:
    """With one that is too low the next reader would believe that the log was cut, and begin before the commit."""
    with reading(b"1", *([None] if ends_in_a_marker else [])) as (bus, member):
        member.settle([Settlement(delivery) for delivery in member.poll(0.0, CAPACITY)])
        end = 1 + ends_in_a_marker
        bus.turn_until(lambda: ONE in bus.commits and bus.commits[ONE].offset == end, "all is committed")
        assert bus.commits[ONE].leader_epoch == (None if ends_in_a_marker else LEADER_EPOCH)


@played
def test_a_commit_behind_a_message_that_cannot_be_unpacked_has_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epoch is not known, and may be later than that of the message before it."""
    monkeypatch.setattr("penstock.bus.kafka.client.MAX_UNPACK_ATTEMPTS", 1)
    with reading(b"1") as (bus, member):
        bus.reader.errors.append(refusal(ONE, KafkaError._BAD_COMPRESSION, 1))
        bus.publish(ONE, b"2")
        bus.turn_until(member.count_held, "it is passed over")
        member.settle([Settlement(delivery) for delivery in member.poll(0.0, CAPACITY)])
        bus.turn_until(lambda: ONE in bus.commits and bus.commits[ONE].offset == 2, "both are committed")
        assert bus.commits[ONE].leader_epoch is None


@played
def test_nothing_is_passed_over_at_the_end_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that cannot be unpacked is behind the commit, which is at the log's end: the log was cut, and what comes
    at its end is a message that nobody has read.
    """
    monkeypatch.setattr("penstock.bus.kafka.client.MAX_UNPACK_ATTEMPTS", 1)
    bus = PlayedBus()
    bus.commits[ONE] = TopicPartition(*ONE, 2)
    bus.publish(ONE, b"1", b"2")
    bus.deaf.add(ONE)
    with joined(bus) as member:
        bus.give(ONE)
        bus.turn_until(member.list_partitions, "it is begun")
        bus.reader.high[ONE] = 2  # as the fetch said that brought the batch
        bus.reader.errors.append(refusal(ONE, KafkaError._BAD_COMPRESSION, 1))
        bus.turn_until(member.count_held, "the batch is passed over")
        bus.deaf.clear()
        bus.publish(ONE, b"3")
        bus.turn_until(member.list_prefetched, "it is fetched")
        assert [delivery.value for delivery in member.list_prefetched()] == [b"3"]


@pytest.mark.parametrize("is_all", [False, True])
@played
def test_what_was_deleted_is_told_and_not_what_the_log_leaves_out(
    is_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the log begins behind the position, at a message or at its end; and not what was finished before it."""
    bus = PlayedBus()
    with joined(bus) as member:
        bus.give(ONE)
        bus.publish(ONE, *[b"x"] * 4, None, None, b"y")
        bus.turn_until(bus.has_all_fetched, "all is read")
        taken = member.poll(0.0, {"interactive": 9})
        member.settle([Settlement(one) for one in taken if one.position != "0:2"])
        assert "deleted" not in caplog.text, "markers are no messages"
        bus.take_away(ONE)
        bus.publish(ONE, *[b"z"] * 3)
        bus.begins[ONE] = 10 if is_all else 8
        bus.give(ONE)
        bus.turn_until(bus.has_all_fetched, "all is read")
        assert f"partition 0: {4 if is_all else 2} messages" in caplog.text, "one not finished, and those behind it"
        assert len(member.poll(0.0, {"interactive": 9})) == (0 if is_all else 2)
        bus.turn_until(lambda: bus.commits[ONE].offset == (10 if is_all else 8), "it is committed")


@played
def test_a_log_that_loses_its_tail_makes_the_member_anew() -> None:
    """What it holds bears offsets that may mean something else now."""
    with reading(b"1", b"2", b"3") as (bus, member):
        del bus.logs[ONE][1:]
        wait_for(lambda: member._shared.failure is not None, "it is noticed")
        with pytest.raises(BusUnavailable, match="lost its tail"):
            member.poll(0.0, CAPACITY)


@played
def test_a_topic_that_may_not_be_read_shows() -> None:
    with reading() as (bus, member):
        bus.reader.errors.append(refusal(ONE, KafkaError.TOPIC_AUTHORIZATION_FAILED))
        bus.turn()
        assert "does not let this worker read" in member.current_problem
        assert member.list_partitions() == []
        bus.publish(ONE, b"1")
        bus.turn_until(lambda: member.poll(0.0, CAPACITY), "it is read again")
        assert member.current_problem == ""


@played
def test_a_message_of_nobody_is_buried_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bus.kafka.client.MAX_UNPACK_ATTEMPTS", 1)
    with reading() as (bus, member):
        bus.publish(ONE, b"what cannot be unpacked")
        bus.reader.errors.append(refusal(ONE, KafkaError._BAD_COMPRESSION))
        bus.turn_until(member.count_held, "it is read")
        bus.is_away = True
        with pytest.raises(BusUnavailable):
            member.poll(0.0, CAPACITY)
        bus.is_away = False
        member.poll(0.0, CAPACITY)
        assert [message.topic for message in bus.written] == [NAMES.dead_letter_topic]
        assert ORIGIN_HEADER in bus.written[0].headers
        assert member.count_held() == 0


def test_what_is_passed_over_during_a_commit_is_in_the_next() -> None:
    """Else the marker behind the last message would look like work that nobody does."""
    topic = NAMES.job_topic("interactive")
    holdings = PrefetchBuffer(NAMES)
    holdings.assign_partition((topic, 0), StartPosition(0, "", None))
    holdings.add_message(Delivery(topic, "0:0", b"job", None, {}, "interactive", 0.0))
    found = holdings.hand_out({"interactive": 1})
    commits = holdings.build_commits(found)
    assert commits == [((topic, 0), 1, "")]
    holdings.reach_end((topic, 0), 2)
    holdings.finish_deliveries(found)
    holdings.note_committed(commits)
    again = holdings.build_commits()
    assert again == [((topic, 0), 2, "")]
    holdings.note_committed(again)
    assert holdings.build_commits() == []
    holdings.check_integrity()


@played
def test_an_idle_member_asks_for_the_ends_of_its_partitions_in_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    notice_soon(monkeypatch)
    asked, single = list[int](), list[str]()
    ask_together, ask_one = PlayedConsumer.offsets_for_times, PlayedConsumer.get_watermark_offsets

    def note_together(self: PlayedConsumer, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        asked.append(len(places))
        return ask_together(self, places, timeout)

    def note_one(self: PlayedConsumer, place: TopicPartition, timeout: float = 0.0, *, cached: bool = False) -> Any:
        single.extend([place.topic] * (not cached))
        return ask_one(self, place, timeout, cached=cached)

    bus = PlayedBus()
    with joined(bus) as member:
        bus.give(ONE, OTHER, BATCH)
        bus.turn_until(lambda: len(member._holdings.partitions) == 3, "all are begun")
        monkeypatch.setattr(PlayedConsumer, "offsets_for_times", note_together)
        monkeypatch.setattr(PlayedConsumer, "get_watermark_offsets", note_one)
        bus.turn_until(lambda: len(asked) > 3, "it asks again and again")
    assert {*asked} == {3}
    assert not single


@played
def test_a_partition_without_a_leader_hides_no_other_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    notice_soon(monkeypatch)
    bus = PlayedBus()
    bus.deaf.add(OTHER)
    bus.publish(OTHER, b"1")
    with joined(bus) as member:
        bus.give(ONE, OTHER)
        bus.turn_until(lambda: len(member._holdings.partitions) == 2, "both are begun")
        bus.leaderless.add(ONE)
        bus.turn_until(lambda: "partition 1" in member.current_problem, "it is noticed")
        bus.leaderless.clear()
        bus.deaf.clear()
        bus.turn_until(lambda: member.poll(0.0, CAPACITY), "it moves again")
        bus.turn_until(lambda: member._lookup._are_ends_known, "they are asked for together again")


@played
def test_a_poller_waits_long_only_while_there_is_nothing_to_do() -> None:
    """Offsets are committed, partitions begun and resumed between two polls."""
    bus = PlayedBus()
    with joined(bus) as member:
        assert not member._is_idle(), "it has no partitions yet"
        bus.give(ONE)
        bus.turn_until(member._is_idle, "it is begun")
        bus.publish(ONE, b"1")
        bus.turn_until(lambda: not member._is_idle(), "a message is here")
        taken = member.poll(0.0, CAPACITY)
        assert not member._is_idle(), "it is not settled"
        member.settle([Settlement(one) for one in taken])
        bus.turn_until(member._is_idle, "it is committed")


def test_a_buffer_has_room_for_what_its_worker_takes_until_the_next_fetch_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a worker that takes more than half a full buffer in that time would stand still."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    holdings = PrefetchBuffer(NAMES)
    holdings.assign_partition(ONE, StartPosition(0, "", None))

    def take(first: int, count: int) -> set[Partition]:
        """Take messages that were fetched, and return what would have been paused before."""
        for offset in range(first, first + count):
            holdings.add_message(Delivery(ONE[0], f"{ONE[1]}:{offset}", b"", None, {}, "interactive", 0.0))
        paused = holdings.find_partitions_to_pause()
        holdings.finish_deliveries(holdings.hand_out({"interactive": count}))
        holdings.find_partitions_to_pause()
        return paused

    assert take(0, 400) == {ONE}
    now_s += ROOM_S
    assert take(400, 400) == {ONE}, "what it takes was not known"
    assert take(800, 400) == set()
    now_s += ROOM_S
    take(1200, 0)
    now_s += ROOM_S
    take(1200, 0)
    assert take(1200, 400) == {ONE}, "it has become slow"
    holdings.check_integrity()
