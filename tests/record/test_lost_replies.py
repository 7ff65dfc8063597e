"""Connections that break after a script was run and before its reply came: nothing is done twice, or passed over."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.names import Pipeline, Stage
from penstock.record import Claim, Record, UnclaimedMessage
from penstock.redis.client import redis_client
from sim.chaos.proxy import Proxy
from tests.record.play import alive, decode, die

pytestmark = pytest.mark.proof


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(urlsplit(redis_url).port or 6379) as made:
        yield made


@pytest.fixture
def distant(proxy: Proxy, record: Record, pipeline: Pipeline) -> Iterator[Record]:
    """The same records, over connections that break. The server knows the scripts, and one connection is open."""
    decode(record, "other", "warm")
    record.take_over_free("decode", alive(record, "warm"), 1)
    with redis_client(f"redis://127.0.0.1:{proxy.port}/0") as client:
        client.ping()
        made = Record(client, pipeline, RecordSettings(lease_s=30))
        yield made
        made.close()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_claim_is_not_made_twice(stage: Stage, proxy: Proxy, distant: Record, record: Record) -> None:
    """The second one would find the first one's session, its own: busy, for as long as that lives."""
    session = alive(record, "x")
    proxy.cut_after(0)
    claim = distant.claim_prefill if stage == "prefill" else distant.claim_decode
    with pytest.raises(redis.ConnectionError):
        claim("r1", session, "b", b"message")
    status = record.read_status("r1")
    assert status is not None
    assert (status.session, status.attempts) == (session, 1)


def test_requests_are_not_taken_twice(proxy: Proxy, distant: Record, record: Record) -> None:
    """The second time would bring another request, and nobody would know of the first one."""
    record.park_messages("decode", [UnclaimedMessage(name, "", "j1", b"message") for name in ("r1", "r2")])
    session = alive(record, "d1")
    proxy.cut_after(0)
    with pytest.raises(redis.ConnectionError):
        distant.take_over_free("decode", session, 1)
    assert record.count_free("decode") == 1
    die(record, "d1")
    assert record.count_free("decode") == 2
    assert len(distant.take_over_free("decode", alive(record, "d2"), 9)) == 2


def test_what_is_given_back_twice_counts_once(proxy: Proxy, distant: Record, record: Record) -> None:
    claim = record.claim_decode("r1", alive(record, "d1"), "j1", b"message")
    assert isinstance(claim, Claim)
    distant.release_claim(claim, failed=True, delivered=False)
    (again,) = record.take_over_free("decode", alive(record, "d1"), 1)
    proxy.cut_after(0)
    distant.release_claim(again.claim, delivered=False)
    status = record.read_status("r1")
    assert status is not None
    assert status.attempts == 1
    assert record.count_free("decode") == 1
