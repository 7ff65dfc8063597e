"""A server that lost all that it had, or does not answer: what its members do."""

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.bus.contract import Outgoing
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.member import StreamsMember
from penstock.config.settings import BusSettings
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.waiting import PATIENCE_S, wait_for


@pytest.mark.parametrize("is_reclaiming", [False, True])
def test_a_member_outlives_the_loss_of_everything(tmp_path: Path, pipeline: Pipeline, is_reclaiming: bool) -> None:
    """Also where it is to look for what members hold that are gone."""
    with ValkeyServer(tmp_path) as server, redis_client(server.url) as redis:
        bus = StreamsBus(pipeline, server.url, BusSettings())
        bus.create_topics()
        with bus.join_group("prefill", "a") as member, closing(bus.create_publisher()) as publisher:
            assert member.poll(0, {"interactive": 1}) == []
            member._reclaim_at = 0.0 if is_reclaiming else time.monotonic() + 60
            redis.flushall()
            assert member.poll(0, {"interactive": 1}) == []
            publisher.publish([Outgoing(pipeline.request_topic("interactive"), b"after")])
            assert [found.value for found in member.poll(PATIENCE_S, {"interactive": 1})] == [b"after"]


def test_a_member_that_leaves_does_not_wait_for_a_beat_under_way(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = StreamsBus(pipeline, redis_url, BusSettings(session_timeout_s=0.5))
    bus.create_topics()
    begun, go_on, is_over = threading.Event(), threading.Event(), threading.Event()
    member = bus.join_group("prefill", "a")

    class SlowScript:
        def run(self, *_: object) -> int:
            begun.set()
            go_on.wait(PATIENCE_S)
            is_over.set()
            return 1

    monkeypatch.setattr("penstock.bus.streams.member.RENEW_LEASE", SlowScript())
    assert begun.wait(PATIENCE_S)
    member.close()
    assert not is_over.is_set()
    go_on.set()


def test_a_member_whose_lease_is_not_renewed_any_more_says_so(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no outage ends the thread that renews its lease: others will have its deliveries."""
    bus = StreamsBus(pipeline, redis_url, BusSettings(session_timeout_s=0.5))
    bus.create_topics()

    class BrokenScript:
        def run(self, *_: object) -> int:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr("penstock.bus.streams.member.RENEW_LEASE", BrokenScript())
    with bus.join_group("prefill", "a") as member:
        assert isinstance(member, StreamsMember)
        wait_for(lambda: not member._heart.is_alive(), "the thread has ended")
        with pytest.raises(ZeroDivisionError):
            member.poll(0.0, {"interactive": 1})
