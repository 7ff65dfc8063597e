"""Redis behind a Sentinel: addresses, who is refused and why, and all kinds of connection when the master is killed."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from penstock.bus.streams.client import connect_client
from penstock.cli import doctor
from penstock.cli.error_lines import format_address
from penstock.config.addresses import Addresses
from penstock.config.settings import load_settings
from penstock.errors import AccessRefused, SettingsError
from penstock.kvstore.tiers.redis import RedisTier, url_identity
from penstock.local.processes import find_free_port
from penstock.ops.access import check_access
from penstock.record.live import LiveFeed
from penstock.redis.client import async_redis_client, is_away, redis_client
from penstock.redis.sentinel import parse_sentinels
from penstock.redis.urls import hide_password, hide_passwords, server_name, split_urls
from sim.forked import pause_process
from sim.redis_servers import ReplicatedValkey
from sim.servers import serve_server
from sim.waiting import wait_for
from tests.kvstore.blocks import FORM, new_names, put, read
from tests.kvstore.redis_checks import AMPLE

TWO = "rediss+sentinel://me:p%40ss,word@one:1,two:2/the%20service/3?sentinel_username=s&sentinel_password=mark"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedValkey]:
    """Its master is killed by the last test here."""
    yield from serve_server(ReplicatedValkey(tmp_path_factory.mktemp("group")))


@pytest.mark.proof
def test_an_address_names_sentinels_users_service_and_database() -> None:
    found = parse_sentinels(TWO)
    assert (found.hosts, found.service, found.db) == ((("one", 1), ("two", 2)), "the service", 3)
    assert (found.username, found.password) == ("s", "mark")
    options = found.server_options()
    assert {name: options[name] for name in ("username", "password", "db", "ssl")} == {
        "username": "me", "password": "p@ss,word", "db": 3, "ssl": True,
    }  # fmt: skip
    assert found.server_url(("::1", 7)) == "rediss://me:p%40ss,word@[::1]:7/3"
    several = "redis+sentinel://[::1],two/svc"
    plain = parse_sentinels(several)
    assert split_urls(several) == [several]
    assert server_name(several) == "svc/0"
    assert (url_identity(several), format_address(several)) == (several, several)
    assert (plain.hosts, plain.db) == ((("::1", 26379), ("two", 26379)), 0)
    assert not plain.server_options()["ssl"]


def test_certificates_are_for_servers_and_sentinels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STREAM_URL", TWO)
    monkeypatch.setenv("PENSTOCK_REDIS_CA_FILE", __file__)
    found = parse_sentinels(load_settings(Addresses).stream_url)
    assert found.server_options()["ssl_ca_certs"] == found.sentinel_options()["ssl_ca_certs"] == __file__
    assert found.sentinel_options()["password"] == "mark"


def test_commas_of_an_address_do_not_divide_a_setting() -> None:
    assert split_urls(f"redis://a, {TWO},redis://b, c") == ["redis://a", TWO, "redis://b", "c"]
    assert split_urls(" redis://a, ,redis://b/1,") == ["redis://a", "redis://b/1"]
    assert split_urls("") == []


@given(st.text("abc:@/?#,&%", max_size=12).map("MARK{}".format))
def test_no_password_is_shown(word: str) -> None:
    for url in (
        f"redis+sentinel://me:{word}@one:1,two:2/svc/0",
        f"redis+sentinel://one:1,two:{word}",
        f"redis+sentinel://one:1,two:2/svc?sentinel_password={word.replace('&', '').replace('#', '')}",
    ):
        assert "MARK" not in hide_passwords(f"redis://a,{url}")
    assert (
        hide_password(TWO)
        == "rediss+sentinel://me:***@one:1,two:2/the%20service/3?sentinel_username=s&sentinel_password=***"
    )


@pytest.mark.parametrize(
    "url", ["redis+sentinel://one:1", "redis+sentinel:///svc", "redis+sentinel://one:x/svc", "redis+sentinel://one/s/d"]
)
def test_a_bad_address_is_an_error_that_shows_a_good_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STREAM_URL", url)
    with pytest.raises(SettingsError, match=r"host1:26379,host2:26379/service"):
        load_settings(Addresses)


def test_who_is_not_let_in_is_told_why(group: ReplicatedValkey) -> None:
    url = group.url
    check_access(Addresses(stream_url=url), "gateway", kv=True)
    with pytest.raises(AccessRefused, match="know no service 'other': see PENSTOCK_STREAM_URL"):
        check_access(Addresses(stream_url=url.replace("/penstock/", "/other/")))
    with pytest.raises(AccessRefused, match="wrong user or password: see PENSTOCK_STREAM_URL"):
        check_access(Addresses(stream_url=url.replace("//", "//me:wrong@")))
    check_access(Addresses(stream_url=f"redis+sentinel://127.0.0.1:{find_free_port()}/penstock/0"))  # away: waited for


def test_a_sentinel_that_is_away_is_passed_over(group: ReplicatedValkey) -> None:
    """Doctor says which."""
    away = find_free_port()
    url = group.url.replace("//", f"//127.0.0.1:{away},")
    with redis_client(url) as client:
        assert client.ping()
    sentinels, server = doctor._check_redis("stream Redis", url, evicting_is_fine=False)
    assert sentinels.state == "note"
    assert sentinels.detail == f"1 of 2 answer, and name 127.0.0.1:{group.master.port} as the master of 'penstock'"
    assert sentinels.advice == f"start those that do not answer: redis://127.0.0.1:{away}"
    assert (server.state, server.detail.split(": ")[0]) == ("ok", url)
    with redis_client(f"redis+sentinel://me:MARK@127.0.0.1:{away}/penstock/0") as client:
        with pytest.raises(redis.ConnectionError, match="none of the Sentinels at 127") as raised:
            client.ping()
        assert is_away(raised.value)
        assert "MARK" not in str(raised.value)


def test_a_late_reply_is_never_taken_for_that_to_the_next_command(group: ReplicatedValkey) -> None:
    with redis_client(group.url, answer_s=0.4) as client:
        client.mset({"first": "1", "second": "2"})
        master = group.master.pid
        assert master is not None
        pause_process(master)
        with pytest.raises(redis.TimeoutError):
            client.get("first")
        going_on = threading.Timer(0.1, os.kill, (master, signal.SIGCONT))  # the second command is sent before or after
        going_on.start()
        found: list[object] = []

        def has_answered() -> bool:
            with contextlib.suppress(redis.TimeoutError):
                found.append(client.get("second"))
            return bool(found)

        wait_for(has_answered, "the second command is answered")
        assert found == [b"2"]
        going_on.join()


@pytest.mark.proof
def test_every_kind_of_connection_finds_the_next_master(group: ReplicatedValkey) -> None:
    """The last test here: it kills the first one."""
    client, bus = redis_client(group.url), connect_client(group.url)
    tier, names = RedisTier.open(FORM, [group.url], AMPLE, 60), new_names(3)
    assert put(tier, names) == [True] * 3
    bus.set("here", "before")

    async def follow() -> None:
        feed, received = LiveFeed(group.url), asyncio.Queue[bytes | None]()
        feed.add_listener("channel", received.put_nowait)
        client_async = async_redis_client(group.url)
        assert await received.get() is None
        first = group.master
        await asyncio.to_thread(first.kill)
        while True:
            with contextlib.suppress(redis.RedisError):
                if await client_async.publish("channel", b"after"):
                    break
        while await received.get() != b"after":
            pass
        assert group.master is not first
        await client_async.aclose()
        await feed.close()

    asyncio.run(follow())
    assert client.get("here") == b"before"
    bus.set("here", "after")
    assert client.get("here") == b"after"
    wait_for(lambda: None not in read(tier, names), "the blocks are read from the replica that took over")
    tier.close()
    for one in (client, bus):
        one.close()
