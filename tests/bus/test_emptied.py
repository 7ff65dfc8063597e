"""A server that lost all that it had: its members make the groups anew and go on."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.bus.contract import Outgoing
from penstock.bus.streams import StreamsBus
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.reach import redis_client
from penstock.settings import BusSettings


@pytest.mark.parametrize("is_reclaiming", [False, True])
def test_a_member_outlives_the_loss_of_everything(tmp_path: Path, pipeline: Pipeline, is_reclaiming: bool) -> None:
    """Also where it is to look for what members hold that are gone."""
    with ValkeyServer(tmp_path) as server, redis_client(server.url) as redis:
        bus = StreamsBus(pipeline, server.url, BusSettings())
        bus.create_topics()
        with bus.member("prefill", "a") as member, closing(bus.publisher()) as publisher:
            assert member.poll(0, {"interactive": 1}) == []
            member._reclaim_at = 0.0 if is_reclaiming else time.monotonic() + 60
            redis.flushall()
            assert member.poll(0, {"interactive": 1}) == []
            publisher.publish([Outgoing(pipeline.requests("interactive"), b"after")])
            assert [found.value for found in member.poll(5, {"interactive": 1})] == [b"after"]
