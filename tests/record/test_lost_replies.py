"""Connections that break after a script was run and before its reply came: nothing is done twice, or passed over."""

from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.names import Pipeline, Stage
from penstock.record import AppendOutcome, Claim, Record, UnclaimedMessage
from penstock.redis.client import learn_pace, redis_client
from sim.chaos.proxy import Proxy
from sim.waiting import wait_for
from tests.record.play import alive, claim_decode, claim_prefill, decode, die

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
    claim = claim_prefill if stage == "prefill" else claim_decode
    with pytest.raises(redis.ConnectionError):
        claim(distant, "r1", session, "b", b"message")
    status = record.read_status("r1")
    assert status is not None
    assert (status.session, status.attempts) == (session, 1)


def test_tokens_travel_without_being_waited_for(proxy: Proxy, distant: Record, record: Record) -> None:
    """Others are sent behind them, and the outcomes come in the order of sending."""
    claim = decode(distant)
    assert distant.append_tokens([(claim, claim.next_event(1, "a"))]) == [AppendOutcome.OK]
    proxy.stop_forwarding()
    for token in (2, 3):
        distant.send_tokens([(claim, claim.next_event(token, "b"))])
        assert distant.collect_outcomes(waits=False) == []
    proxy.forward_normally()
    wait_for(lambda: distant.wait_for_outcome(0.0), "an answer has come")
    found = distant.collect_outcomes(waits=False)
    assert [*found, *distant.collect_outcomes()] == [AppendOutcome.OK] * 2
    assert found
    assert len(record.read_log("r1")) == 3


def test_leases_and_limits_are_longer_while_redis_is_slow(proxy: Proxy, distant: Record) -> None:
    """A server that answers later than its limit is asked with longer ones, until it is known how late it answers."""
    limit_s = 0.3
    proxy.delay_replies(2 * limit_s)
    with redis_client(f"redis://127.0.0.1:{proxy.port}/0", limit_s) as client:
        with pytest.raises(redis.TimeoutError):
            client.ping()
        while distant.pace.slowness == 1:
            with suppress(redis.TimeoutError):
                learn_pace(client, limit_s)
        assert distant.lease_s > distant.settings.lease_s
        assert distant.pace.stretch(limit_s) > 2 * limit_s
        client.ping()
    proxy.delay_replies(0.0)


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
    claim = claim_decode(record, "r1", alive(record, "d1"), "j1", b"message")
    assert isinstance(claim, Claim)
    distant.release_claim(claim, failed=True, delivered=False)
    (again,) = record.take_over_free("decode", alive(record, "d1"), 1)
    proxy.cut_after(0)
    distant.release_claim(again.claim, delivered=False)
    status = record.read_status("r1")
    assert status is not None
    assert status.attempts == 1
    assert record.count_free("decode") == 1
