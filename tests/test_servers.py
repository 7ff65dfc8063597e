"""Which server a request is on, and that all processes of a pipeline agree on it."""

import json
import re
from pathlib import Path

import pytest
import redis
from pydantic import ValidationError

from penstock.config.addresses import Addresses
from penstock.errors import ServersDiffer
from penstock.local.processes import find_free_port
from penstock.names import WORKERS_KEY, Pipeline
from penstock.redis.servers import check_server_list, choose_server, store_server_list, store_server_lists
from penstock.redis.urls import server_name
from tests.commands import Terminal

PROTOCOL = (Path(__file__).parents[1] / "docs/protocol.md").read_text("utf-8")
THREE = ("s1", "s2", "s3")
IDS = [f"request-{number}" for number in range(6000)]


@pytest.mark.proof
def test_the_choice_is_that_of_the_protocol() -> None:
    found = re.findall(
        r"^\| `([^`]+)` \| `(\w{16})` \| `(\w{16})` \| `(\w{16})` \| `(s\d)` \|$", PROTOCOL, re.MULTILINE
    )
    assert len(found) >= 3
    for request_id, *scores, chosen in found:
        assert THREE[choose_server(THREE, request_id)] == chosen
        assert THREE[scores.index(max(scores))] == chosen
    assert {chosen for *_, chosen in found} == set(THREE)


def test_a_server_more_takes_its_part_and_all_else_stays() -> None:
    """Wherever in the list it is put."""
    for place in range(4):
        four = (*THREE[:place], "s4", *THREE[place:])
        moved = [one for one in IDS if four[choose_server(four, one)] != THREE[choose_server(THREE, one)]]
        assert {four[choose_server(four, one)] for one in moved} == {"s4"}
        assert 0.22 < len(moved) / len(IDS) < 0.28


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://me:secret@Redis-1:6380/2", "redis-1:6380/2"),
        ("redis://redis-1", "redis-1:6379/0"),
        ("rediss://redis-1?db=3", "redis-1:6379/3"),
        ("redis://[::1]:6380", "[::1]:6380/0"),
        ("unix:///run/redis.sock?db=1", "/run/redis.sock/1"),
        ("redis+sentinel://me:secret@a:1,b:2/main/0", "main/0"),
        ("redis+sentinel://me:secret@a:1,b:2/main/0#left", "left"),
        ("redis://me:secret@redis-1/0#left", "left"),
    ],
)
def test_a_server_s_name_stays_where_its_password_or_master_changes(url: str, name: str) -> None:
    assert server_name(url) == name
    assert Addresses(stream_url=f"{url},redis://other:1/0").first_url == url


@pytest.mark.parametrize(
    "urls", ["redis://a,redis://:secret@a:6379/0", "redis://a#x,redis://b#x", "redis://a#b c", "redis://:se#secret@a/0"]
)
def test_names_that_are_none_or_not_their_own_are_refused(urls: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Addresses(stream_url=urls)
    assert "secret" not in json.dumps(
        refused.value.errors(include_url=False, include_context=False, include_input=False)
    )


@pytest.mark.proof
def test_who_comes_with_another_list_is_refused(server: "redis.Redis", pipeline: Pipeline) -> None:
    check_server_list(server, pipeline, ["a", "b"])
    store_server_list(server, pipeline, ["a", "b"])
    store_server_list(server, pipeline, ["a", "b"])
    for other in (["b", "a"], ["a"], ["a", "b", "c"]):
        with pytest.raises(ServersDiffer, match="penstock servers change"):
            store_server_list(server, pipeline, other)


def test_one_server_alone_may_be_called_by_any_name(redis_url: str, pipeline: Pipeline) -> None:
    """Also where another one, of which it is not known yet whether it keeps the same, is away."""
    store_server_lists(redis_url, pipeline)
    store_server_lists(f"{redis_url}#other", pipeline)
    with pytest.raises(ServersDiffer, match="one server"):
        store_server_lists(f"redis://127.0.0.1:{find_free_port()}/0,{redis_url}", pipeline)


@pytest.mark.proof
def test_the_list_is_changed_when_nothing_is_under_way(terminal: Terminal, redis_url: str, pipeline: Pipeline) -> None:
    """Here two servers are two databases of one. Workers and gateways with another list do not start."""
    both = f"{redis_url}#s1,{redis_url.removesuffix('/0')}/1#s2"
    here = {"PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_STREAM_URL": both, "PENSTOCK_TELEMETRY": "off"}
    alone = here | {"PENSTOCK_STREAM_URL": redis_url}
    store_server_lists(both, pipeline)
    for command in (["worker", "prefill"], ["worker", "decode"], ["gateway", "--port", str(find_free_port())]):
        refused = terminal(*command, **alone)
        assert refused.returncode == 1
        assert "spread over s1, s2, and PENSTOCK_STREAM_URL here names one server" in refused.stderr
    assert "stream servers" in terminal("doctor", **alone).stdout
    listed = terminal("servers", "list", **here).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["name", "s1", "s2"]
    assert listed.count("s1, s2") == 2
    with redis.Redis.from_url(redis_url) as client:
        beat = json.dumps({"stage": "decode", "name": "d1", "state": "ready"})
        client.set(pipeline.worker_key("decode", "d1"), beat)
        client.sadd(WORKERS_KEY, pipeline.worker_key("decode", "d1"))
        assert "d1 still run" in terminal("servers", "change", **alone).stderr
        client.delete(pipeline.worker_key("decode", "d1"))
        job = client.xadd(pipeline.stream_key(pipeline.job_topic("batch")), {"value": "{}"})
        assert "1 jobs wait" in terminal("servers", "change", **alone).stderr
        client.xdel(pipeline.stream_key(pipeline.job_topic("batch")), job)
    assert terminal("servers", "change", **alone).returncode == 0
    store_server_lists(redis_url, pipeline)
