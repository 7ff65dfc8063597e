"""Messages that no worker works on are parked, whatever fails meanwhile."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing

import pytest
import redis

from penstock.bus.contract import Delivery
from penstock.names import Pipeline, Stage
from penstock.record import Record, Session, UnclaimedMessage
from penstock.worker.rescue import MAX_BATCH_BYTES, MAX_FREE_REQUESTS, Rescuer
from sim.waiting import wait_for
from tests.record.play import alive


def delivery(
    name: str, value: bytes = b"message", priority_class: str = "interactive", topic: str = "topic"
) -> Delivery:
    return Delivery(topic, name, value, name, {}, priority_class, 0.0)  # type: ignore[arg-type]


def read_message(found: Delivery) -> UnclaimedMessage:
    return UnclaimedMessage(found.key or "", "body", "", found.value)


class Member:
    """A member with messages that wait in it, and messages of others' partitions that it can read."""

    topic = "topic"

    def __init__(self, waiting: Sequence[Delivery], others: Mapping[str, Sequence[Delivery]]) -> None:
        self.readers = [self]
        self._waiting, self._others = list(waiting), {part: list(found) for part, found in others.items()}
        self.error: Exception | None = None
        self.own: list[str] = []

    def create_orphan_readers(self) -> "list[Member]":
        return self.readers

    def list_prefetched(self) -> list[Delivery]:
        if self.error is not None:
            raise self.error
        return list(self._waiting)

    def list_partitions(self) -> list[str]:
        return self.own

    def read_orphans(self, partitions: Sequence[str], max_messages: int) -> list[Delivery]:
        found = [one for part in partitions for one in self._others.get(part, [])][:max_messages]
        for part in partitions:
            self._others[part] = [one for one in self._others.get(part, []) if one not in found]
        return found

    def close(self) -> None:
        pass


class Reader(Member):
    """Reads partitions of others."""

    def list_partitions(self) -> list[str]:
        return list(self._others)


def start_rescuer(
    record: Record, session: Session, member: Member, read: Callable[[Delivery], UnclaimedMessage] = read_message
) -> AbstractContextManager[Rescuer]:
    stages: dict[str, Stage] = {"jobs": "decode", "topic": "prefill"}
    return closing(Rescuer(record, stages, session, member, read))  # type: ignore[arg-type]


@pytest.fixture
def session(hasty: Record) -> Iterator[Session]:
    with Session(hasty, "p1") as made:
        yield made


def test_what_waits_is_parked_once_and_batch_work_is_not(hasty: Record, session: Session) -> None:
    member = Member([delivery("r1"), delivery("b1", priority_class="batch"), delivery("r2")], {})
    with start_rescuer(hasty, session, member) as rescuer:
        wait_for(lambda: hasty.count_free("prefill") == 2, "both are free")
        assert hasty.read_status("b1") is None
        assert {taken.claim.id for taken in hasty.take_over_free("prefill", session.id, 9)} == {"r1", "r2"}
        rescuer.park_waiting_messages()
        assert hasty.count_free("prefill") == 0


class Full(Record):
    """A record that refuses the first batch, and checks the size of each."""

    failures = 1

    def park_messages(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        if waiting and self.failures:
            self.failures -= 1
            raise redis.TimeoutError("slow")
        num_bytes = sum(len(one.message) for one in waiting)
        assert num_bytes <= MAX_BATCH_BYTES or len(waiting) == 1
        return super().park_messages(stage, waiting)


class Half(Record):
    """A record on two servers, of which that of `r1` and `r3` is away at first."""

    is_away = True

    def park_messages(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        left = [one for one in waiting if self.is_away and one.id in ("r1", "r3")]
        return left + super().park_messages(stage, [one for one in waiting if one not in left])


def test_messages_of_a_server_that_is_away_are_parked_when_it_answers(
    client: "redis.Redis", pipeline: Pipeline, hasty: Record
) -> None:
    """Both those that wait here and those read for others. Messages of another server do not wait."""
    hasty.renew_session("dead/1", 0, ["topic:0"])
    hasty.end_expired_sessions(0, "dead/1")
    record = Half(client, pipeline, hasty.settings)
    member = Member([delivery("r1"), delivery("r2")], {"topic:0": [delivery("r3"), delivery("r4")]})
    with Session(record, "p1") as session, start_rescuer(record, session, member):
        wait_for(lambda: record.count_free("prefill") == 2, "those of the other server are free")
        assert {taken.claim.id for taken in record.take_over_free("prefill", session.id, 9)} == {"r2", "r4"}
        record.is_away = False
        wait_for(lambda: record.count_free("prefill") == 2, "these are free, too")


def test_what_was_read_for_others_is_not_lost_when_putting_down_fails(
    client: "redis.Redis", pipeline: Pipeline, hasty: Record
) -> None:
    large = bytes(MAX_BATCH_BYTES * 2 // 3)
    others = [delivery(f"r{number}", large) for number in range(3)] + [delivery("r3", large * 2)]
    hasty.renew_session("dead/1", 0, ["topic:0"])
    hasty.end_expired_sessions(0, "dead/1")
    record = Full(client, pipeline, hasty.settings)
    member = Member([], {"topic:0": others})
    with Session(record, "p1") as session, start_rescuer(record, session, member):
        wait_for(lambda: record.count_free("prefill") == 4, "all are free")
        assert not record.failures
    record.close()


def test_what_no_session_names_for_two_leases_is_adopted(
    hasty: Record, client: "redis.Redis", pipeline: Pipeline
) -> None:
    """Its reader died before it was named, or Redis was emptied after that."""
    member, reader, readers = Member([], {}), Reader([], {}), pipeline.readers_key
    member.own, member.readers = ["topic:0"], [reader]
    reader._others = {"topic:0": [], "topic:1": [delivery("r1")]}
    with Session(hasty, "p1", member.list_partitions) as session, start_rescuer(hasty, session, member):
        wait_for(lambda: hasty.count_free("prefill") == 1, "what nobody named is read")
        client.delete(readers)
        wait_for(lambda: client.hget(readers, "topic:1") == session.id.encode(), "it is adopted again")
    assert reader._others == {"topic:0": [], "topic:1": []}


def test_a_partition_that_is_named_meanwhile_is_not_adopted(hasty: Record) -> None:
    one, other = alive(hasty, "one"), alive(hasty, "other")
    hasty.renew_session(other, 1, ["topic:1"])
    assert hasty.adopt_partitions(one, ["topic"], ["topic:0", "topic:1"]) == ["topic:0"]


def test_a_fault_of_its_thread_is_the_loops(hasty: Record, session: Session) -> None:
    member = Member([], {})
    member.error = ZeroDivisionError("a bug")
    with start_rescuer(hasty, session, member) as rescuer:
        wait_for(lambda: rescuer._thread is not None and rescuer._thread.failure is not None, "it fails")
        with pytest.raises(ZeroDivisionError):
            rescuer.run_once()


def test_where_nothing_can_be_adopted_the_loop_parks_what_waits(hasty: Record, session: Session) -> None:
    member = Member([delivery("r1")], {})
    member.readers = []
    with start_rescuer(hasty, session, member) as rescuer:

        def has_parked() -> bool:
            rescuer.run_once()
            return hasty.count_free("prefill") == 1

        assert rescuer._thread is None
        wait_for(has_parked, "it is free")


def test_requests_and_jobs_are_parked_each_in_their_stage(hasty: Record, session: Session) -> None:
    """A worker that serves both stages looks after the topics of both, and after no others."""
    hasty.renew_session("dead/1", 0, ["topic:0", "jobs:0", "others:0"])
    hasty.end_expired_sessions(0, "dead/1")
    member = Member([delivery("j1", topic="jobs"), delivery("r1")], {"topic:0": [delivery("r2")]})
    reader = Reader([], {"jobs:0": [delivery("j2", topic="jobs")], "others:0": [delivery("o1", topic="others")]})
    reader.topic, member.readers = "jobs", [member, reader]
    with start_rescuer(hasty, session, member):
        wait_for(lambda: hasty.count_free("prefill") == hasty.count_free("decode") == 2, "all are free")
        found = {taken.claim.id for taken in hasty.take_over_free("decode", session.id, 9)}
        assert found == {"j1", "j2"}
        heir = alive(hasty, "heir")
        assert hasty.adopt_partitions(heir, ["others"]) == ["others:0"]


def test_where_one_stage_has_enough_free_requests_the_other_is_read_for(hasty: Record, session: Session) -> None:
    hasty.renew_session("dead/1", 0, ["topic:0", "jobs:0"])
    hasty.end_expired_sessions(0, "dead/1")
    parked = [UnclaimedMessage(f"p{number}", "body", "", b"message") for number in range(MAX_FREE_REQUESTS)]
    hasty.park_messages("prefill", parked)
    member, reader = Member([], {"topic:0": [delivery("r1")]}), Reader([], {"jobs:0": [delivery("j1", topic="jobs")]})
    reader.topic, member.readers = "jobs", [member, reader]
    with start_rescuer(hasty, session, member):
        wait_for(lambda: hasty.count_free("decode") == 1, "the job is free")
        assert hasty.count_free("prefill") == MAX_FREE_REQUESTS
        assert len(hasty.take_over_free("prefill", session.id, 1)) == 1
        wait_for(lambda: hasty.read_status("r1") is not None, "there is room for the request")


def test_a_message_that_cannot_be_read_stops_nobody(hasty: Record, session: Session) -> None:
    def read(found: Delivery) -> UnclaimedMessage:
        if found.key == "r1":
            raise ZeroDivisionError("a bug")
        return read_message(found)

    member = Member([delivery("r1"), delivery("r2")], {})
    with start_rescuer(hasty, session, member, read) as rescuer:
        wait_for(lambda: hasty.count_free("prefill") == 1, "the other is free")
        rescuer.run_once()
