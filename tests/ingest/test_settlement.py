"""What a request takes of its tenant's bucket: an estimate at first, in the end what it used, however it ended."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import redis

from penstock.bus.connect import connect_bus
from penstock.config.settings import AdmissionSettings, BusSettings
from penstock.ingest.admission import HELD_TTL_S, Admission
from penstock.ingest.tenants import Caller, TenantEntry
from penstock.local.stack import Stack
from penstock.messages import Result, Usage, decode_message
from penstock.names import CLASSES, Pipeline, rate_key
from penstock.ops.lag import PipelineLag
from penstock.redis.client import async_redis_client, redis_client
from sim.waiting import wait_for
from tests.draws import mark_some
from tests.gateways import GatewayProcess, write_keys

PER_MIN, HAS = 60_000, 5_000
"""What fits into the bucket, and what is in it at first: for most of a minute it does not flow over."""
TENANT = "settler"
ASKED: dict[str, Any] = {
    "model": "demo", "prompt": "In the days 1, 2, 3, 4, 5, 6, 7 the king", "max_tokens": 200, "temperature": 0,
}  # fmt: skip


def estimate(body: dict[str, Any]) -> int:
    return len(body["prompt"]) // 4 + 1 + int(body["max_tokens"])


class Bucket:
    """A tenant's bucket as it is in Redis, and what the pipeline's results say of the tenant's requests."""

    def __init__(self, server: "redis.Redis", line: Stack) -> None:
        self.server, self.pipeline = server, Pipeline(line.addresses.pipeline)
        self._bus = connect_bus(line.addresses, BusSettings())
        self._num_before = len(self._usages())
        seconds, micros = server.time()
        self._begun_at = seconds + micros / 1e6
        server.delete(rate_key(TENANT))
        server.hset(rate_key(TENANT), mapping={"requests": "0", "tokens": str(HAS), "at": f"{self._begun_at:.6f}"})

    def taken(self) -> int:
        """How much was taken and not given back; what flows in meanwhile is left out."""
        tokens, at = map(float, cast("list[bytes]", self.server.hmget(rate_key(TENANT), ["tokens", "at"])))
        return round(HAS + (at - self._begun_at) * PER_MIN / 60 - tokens)

    def used(self) -> int | None:
        """What the request used; None: there is no result yet."""
        usages = self._usages()[self._num_before :]
        return usages[0].prompt_tokens + usages[0].completion_tokens if usages else None

    def counts(self) -> bool:
        """Whether the tenant holds a part of the pipeline."""
        return bool(self.server.hexists(self.pipeline.shares_key("tokens"), TENANT))

    def _usages(self) -> list[Usage]:
        results = [decode_message(Result, message.value) for message in self._bus.read_all(self.pipeline.results_topic)]
        return [result.usage for result in results if result.tenant == TENANT]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file with the tenant's key, and the key."""
    file = tmp_path_factory.mktemp("settlement") / "keys.json"
    (key,) = write_keys(file, TENANT, **{TENANT: TenantEntry(tokens_per_min=PER_MIN)})
    return file, key


@contextmanager
def open_gateway(line: Stack, key_file: tuple[Path, str]) -> Iterator[tuple[GatewayProcess, httpx.Client]]:
    """A gateway that asks for keys, and a client with the tenant's."""
    file, key = key_file
    own = {"GATEWAY_KEYS": str(file), "BATCH_STORE": str(file.parent / "files")}
    headers = {"authorization": f"Bearer {key}"}
    with (
        GatewayProcess(line.addresses, file.parent, own) as made,
        httpx.Client(base_url=made.url, headers=headers, timeout=None) as client,
    ):
        yield made, client


@pytest.fixture(scope="module")
def http(line: Stack, key_file: tuple[Path, str]) -> Iterator[httpx.Client]:
    with open_gateway(line, key_file) as (_, client):
        yield client


@pytest.fixture
def bucket(line: Stack) -> Iterator[Bucket]:
    with redis_client(line.addresses.stream_url) as server:
        yield Bucket(server, line)


Ask = Callable[[httpx.Client, Bucket, dict[str, Any]], None]
"""Sends a body, and reads as much of its answer as the function's name says."""


def post(http: httpx.Client, _: Bucket, body: dict[str, Any], says: str, *, stream: bool = False) -> None:
    """Read the whole answer, which says so."""
    assert says in http.post("/v1/completions", json={**body, "stream": stream}).text


def left(http: httpx.Client, _: Bucket, body: dict[str, Any]) -> None:
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())


def left_unheard(http: httpx.Client, bucket: Bucket, body: dict[str, Any]) -> None:
    connection = HTTPConnection(http.base_url.host, http.base_url.port)
    headers = {"authorization": http.headers["authorization"], "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    wait_for(lambda: bucket.counts() or bucket.used() is not None, "it is accepted")
    connection.close()


STOPS, GOES_ON, TOO_LONG = {"stop": [" the"]}, {"ignore_eos": True}, {"prompt": "of the LORD " * 1000}
TELLS_TOO_LONG = "context_length_exceeded"


@pytest.mark.parametrize(
    ("ask", "more"),
    mark_some([
        (partial(post, says='"usage"'), STOPS), (partial(post, says="[DONE]", stream=True), STOPS),
        (partial(post, says=TELLS_TOO_LONG), TOO_LONG), (partial(post, says=TELLS_TOO_LONG, stream=True), TOO_LONG),
        (left, GOES_ON), (left_unheard, GOES_ON),
    ], pytest.mark.proof, 2),
)  # fmt: skip
def test_the_estimate_gives_way_to_what_was_used(
    http: httpx.Client, bucket: Bucket, ask: Ask, more: dict[str, Any]
) -> None:
    body = ASKED | more
    ask(http, bucket, body)
    wait_for(lambda: bucket.used() is not None, "its result")
    assert bucket.used() != estimate(body)
    wait_for(lambda: bucket.taken() == bucket.used(), "its settlement")
    wait_for(lambda: not bucket.counts(), "its place is free")


async def test_what_a_killed_gateway_took_is_back_within_a_minute(
    line: Stack, key_file: tuple[Path, str], bucket: Bucket
) -> None:
    """The estimate stands, runs out, and leaves nothing behind."""
    body = ASKED | GOES_ON
    with (
        open_gateway(line, key_file) as (gateway, http),
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
        gateway.process.kill()
    wait_for(lambda: bucket.used() is not None, "its result")
    assert bucket.taken() == estimate(body)
    assert bucket.counts()
    assert 0 < bucket.server.ttl(rate_key(TENANT)) <= 61

    server, tickets = bucket.server, bucket.pipeline.shares_key("tickets")
    (ticket,) = (one for one in cast("list[bytes]", server.zrange(tickets, 0, -1)) if TENANT.encode() in one)
    assert cast(float, server.zscore(tickets, ticket)) <= time.time() + HELD_TTL_S
    server.zincrby(tickets, -HELD_TTL_S, ticket)  # as if a minute had passed
    server.hincrbyfloat(rate_key(TENANT), "at", -60)

    async def no_lag(_: Pipeline) -> PipelineLag:
        return PipelineLag({}, dict.fromkeys(CLASSES, 0.0), None, dict.fromkeys(CLASSES))

    client = async_redis_client(line.addresses.stream_url)
    another = Admission(client, no_lag, AdmissionSettings())
    admitted = await another.admit(Caller(TENANT, tokens_per_min=PER_MIN), bucket.pipeline, "interactive", 100)
    assert admitted.headers["x-ratelimit-remaining-tokens"] == str(PER_MIN - 100)
    assert server.zscore(tickets, ticket) is None
    await another.settle(admitted, Usage())
    await client.aclose()
    assert not bucket.counts()
