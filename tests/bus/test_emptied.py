"""A server that lost all that it had, or does not answer: what its members do."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.bus.contract import Outgoing
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.member import StreamsMember
from penstock.config.settings import BusSettings, RecordSettings
from penstock.errors import MemberFenced
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline, PriorityClass
from penstock.record import Record, Session
from penstock.redis.client import redis_client
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import take_deliveries


@pytest.mark.proof
@pytest.mark.parametrize("is_reclaiming", [False, True])
def test_a_member_outlives_the_loss_of_everything(tmp_path: Path, pipeline: Pipeline, is_reclaiming: bool) -> None:
    """Also where it is to look for what members hold that are gone."""
    with ValkeyServer(tmp_path) as server, redis_client(server.url) as redis:
        bus = StreamsBus(pipeline, server.url, BusSettings())
        bus.create_topics()
        with bus.join_group("prefill", "a") as member, closing(bus.create_publisher()) as publisher:
            assert isinstance(member, StreamsMember)
            assert member.poll(0, {"interactive": 1}) == []
            member._reclaim_at = 0.0 if is_reclaiming else time.monotonic() + 60
            redis.flushall()
            assert member.poll(0, {"interactive": 1}) == []
            publisher.publish([Outgoing(pipeline.request_topic("interactive"), b"after")])
            assert [found.value for found in member.poll(PATIENCE_S, {"interactive": 1})] == [b"after"]


def test_a_member_lives_as_long_as_its_workers_session(redis_url: str, pipeline: Pipeline) -> None:
    """Its loop is in a step meanwhile, and polls nothing. A session that was lost and opened anew changes nothing."""
    bus = StreamsBus(pipeline, redis_url, BusSettings(session_timeout_s=30))
    bus.create_topics()
    capacity: dict[PriorityClass, int] = {"interactive": 1}
    client = redis_client(redis_url)
    record = Record(client, pipeline, RecordSettings(lease_s=0.2))
    with bus.join_group("prefill", "a") as member, bus.join_group("prefill", "b") as other:
        assert isinstance(member, StreamsMember)
        session = Session(record, "a", renew_membership=member.build_renewal)
        with closing(bus.create_publisher()) as publisher:
            publisher.publish([Outgoing(pipeline.request_topic("interactive"), b"x")])
        (held,) = take_deliveries(member, 1, capacity)
        before = session.id
        record.end_expired_sessions(0, before)
        wait_for(lambda: session.id != before, "it has another session")
        client.delete(member._key)
        wait_for(lambda: client.exists(member._key), "its session says that it lives")
        assert other.poll(0.0, capacity) == []
        assert member.is_holding(held)
        session.stop()
        client.delete(member._key)  # as it runs out
        assert [one.value for one in take_deliveries(other, 1, capacity)] == [held.value]
        session.close()
    record.close()


def test_a_members_timeout_begins_when_its_session_is_over(redis_url: str, pipeline: Pipeline) -> None:
    with StreamsBus(pipeline, redis_url, BusSettings(session_timeout_s=3)).join_group("prefill", "a") as member:
        assert isinstance(member, StreamsMember)
        renewal, _ = member.build_renewal(20.0)
        renewal.run(member.client)
        assert 3_000 < member.client.pttl(member._key) <= 23_000
        assert not member._fenced


def test_a_member_whose_place_was_taken_hears_of_it_by_its_session(redis_url: str, pipeline: Pipeline) -> None:
    bus = StreamsBus(pipeline, redis_url, BusSettings())
    bus.create_topics()
    record = Record(redis_client(redis_url), pipeline, RecordSettings(lease_s=0.2))
    with (
        bus.join_group("prefill", "a") as member,
        Session(record, "a", renew_membership=member.build_renewal) as session,
        bus.join_group("prefill", "a") as newer,
    ):
        assert isinstance(member, StreamsMember)
        wait_for(lambda: member._fenced, "it is told")
        with pytest.raises(MemberFenced):
            member.poll(0.0, {"interactive": 1})
        assert newer.poll(0.0, {"interactive": 1}) == []
        assert session.collect_events() == []
    record.close()
