"""Metering: the usage of each tenant, counted from the results, of which each request has one.

Any number of gateways may run a `UsageMeter`. One at a time counts, the others wait until its lease runs out. A
turn:

    1  read      the results after the stored offset of each part of the topic (a Kafka partition, the Redis stream)
    2  count     one script for each part adds to the sums and moves the stored offset, unless that was moved meanwhile

A crash before or after 2 loses nothing: the next meter reads on from the stored offset. If two meters count at once,
because the lease ran out during a pause, both start from the same offset; the second one's script does nothing, and
it reads again.

So the sums are exactly the usage in the topic up to the stored offsets. If a part ends before its stored offset,
because the servers lost the end of its log, counting goes on at its end, and that is stored: some results may not be
counted, but none is counted twice. A second result of one id, possible where Redis lost the request's record, is
left out if the first is among the last `MAX_SEEN_IDS` counted. If Redis loses the sums it loses the offsets as well,
and all results that the topic still keeps are counted again.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from penstock.bus.connect import connect_bus
from penstock.bus.contract import FollowedMessage, Follower
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable, RequestError
from penstock.failpoints import failpoint
from penstock.messages import Result, decode_message
from penstock.names import Pipeline, find_key
from penstock.redis.client import backoff_pauses, is_away, log_outage, redis_client
from penstock.redis.scripts import RENEW_LEASE, load_script

log = logging.getLogger(__name__)

MAX_SEEN_IDS = 100_000
"""How many ids of counted results are remembered."""
MAX_RESULTS_PER_READ = 200
"""How many results are read at once."""
MAX_TOKENS_PER_REQUEST = 2**31
"""Larger counts are rejected as impossible: their sums might not fit a number in Redis."""
METER_LEASE_S, READ_TIMEOUT_S = 5.0, 1.0
GATHER_S = 0.25
"""After a turn that read all results there were, the next one begins this much later: a turn for each result costs the
gateway a tenth of what a request costs it.
"""
USAGE_COUNTERS = ("requests", "prefill_tokens", "cached_tokens", "decode_tokens")

COUNT_RESULTS = load_script("penstock.ingest", "count_results")


@dataclass(frozen=True)
class UsageSums:
    """Usage. Prompt tokens are either computed (`prefill`) or found in the KV store (`cached`)."""

    requests: int = 0
    """Requests of the pipeline: an HTTP request with `n` answers counts n times."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0


class UsageMeter:
    """Counts the results of one pipeline. Used by one thread."""

    def __init__(self, addresses: Addresses, settings: BusSettings) -> None:
        self._pipeline = Pipeline(addresses.pipeline)
        self._bus = connect_bus(addresses, settings)
        self._client = redis_client(addresses.first_url)
        self._token = uuid.uuid4().hex
        self._follower: Follower | None = None
        self._offsets: dict[str, str] = {}

    def count_once(self, timeout_s: float = READ_TIMEOUT_S) -> int | None:
        """Wait up to `timeout_s` for results, count them, and return how many; None while another meter counts.

        Raises `BusUnavailable` or `redis.RedisError`; it can be called again at any time.
        """
        key = self._pipeline.meter_key("reader")
        if not RENEW_LEASE.run(self._client, [key], [self._token, int(METER_LEASE_S * 1000)]):
            self._close_follower()
            return None
        try:
            return self._count_new_results(timeout_s)
        except (BusUnavailable, redis.RedisError):
            self._close_follower()
            raise

    def _count_new_results(self, timeout_s: float) -> int:
        if self._follower is None:
            self._offsets = _decode_hash(self._client.hgetall(self._pipeline.meter_key("places")))
            self._follower = self._bus.follow_topic(self._pipeline.results_topic, self._offsets)
        found = self._follower.read_messages(timeout_s, MAX_RESULTS_PER_READ)
        failpoint("meter.1.read")
        parts: dict[str, list[FollowedMessage]] = {}
        for message in found:
            parts.setdefault(message.partition, []).append(message)
        for part, messages in parts.items():
            if not self._count_part(part, messages):
                self._close_follower()
                return 0
            failpoint("meter.2.counted")
        return len(found)

    def _count_part(self, part: str, messages: Sequence[FollowedMessage]) -> bool:
        """Count the messages of one part. Return False if another meter did."""
        days: dict[str, int] = {}
        arguments: list[Any] = [part, self._offsets.get(part, ""), messages[-1].offset, MAX_SEEN_IDS]
        for result, key in _parse_results(messages):
            number = days.setdefault(utc_day(result.timings.finished), len(days) + 1)
            usage = result.usage
            computed = usage.prompt_tokens - usage.cached_tokens
            whose = json.dumps([result.tenant, key, result.model, result.priority_class])
            arguments += [result.id, number, result.tenant, whose]
            arguments += [computed, usage.cached_tokens, usage.completion_tokens]
        hashes = (f"{what}:{day}" for day in days for what in ("day", "detail"))
        keys = [self._pipeline.meter_key(name) for name in ("places", "seen", *hashes)]
        is_done = bool(COUNT_RESULTS.run(self._client, keys, arguments))
        self._offsets[part] = messages[-1].offset
        return is_done

    def _close_follower(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            with contextlib.suppress(BusUnavailable):
                follower.close()

    def close(self) -> None:
        """Free the connections. Another meter can count after `METER_LEASE_S`."""
        self._close_follower()
        self._client.close()


def _parse_results(messages: Iterable[FollowedMessage]) -> Iterable[tuple[Result, str]]:
    """Yield the messages that are valid results, each with the id of its request's API key.

    A topic can hold anything, as many may write into it.
    """
    for followed in messages:
        if followed.message is None:
            continue
        try:
            result = decode_message(Result, followed.message.value)
        except RequestError as error:
            log.warning("skipped %s, which is no result: %s", followed.offset, error)
            continue
        usage = result.usage
        if (
            0 <= usage.cached_tokens <= usage.prompt_tokens < MAX_TOKENS_PER_REQUEST
            and 0 <= usage.completion_tokens < MAX_TOKENS_PER_REQUEST
        ):
            yield result, find_key(followed.message.headers)
        else:
            log.warning("%s is no result: %s cannot have been used", followed.offset, usage)


async def meter_forever(addresses: Addresses, settings: BusSettings) -> None:
    """Count a pipeline's results until cancelled. Outages are waited for."""
    meter, thread = UsageMeter(addresses, settings), ThreadPoolExecutor(1, "meter")
    loop, waits = asyncio.get_running_loop(), backoff_pauses()
    try:
        while True:
            try:
                counted = await _finish_before_cancel(loop.run_in_executor(thread, meter.count_once))
            except (BusUnavailable, redis.RedisError) as error:
                if not is_away(error):
                    log_outage(log, f"metering: {error}")
                await asyncio.sleep(next(waits))
                continue
            waits = backoff_pauses()
            if counted is None:
                await asyncio.sleep(READ_TIMEOUT_S)
            elif 0 < counted < MAX_RESULTS_PER_READ:
                await asyncio.sleep(GATHER_S)
    finally:
        thread.submit(meter.close)
        thread.shutdown(wait=False)


async def _finish_before_cancel(turn: "asyncio.Future[int | None]") -> int | None:
    """Wait for a turn on the thread; if this is cancelled, wait all the same before raising it."""
    try:
        return await asyncio.shield(turn)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnavailable, redis.RedisError):
            await turn
        raise


# What was counted.

UsageByDay = Mapping[str, Mapping[str, UsageSums]]
"""By day (UTC), then by tenant."""


def utc_day(seconds: float) -> str:
    """Return a day such as `2026-11-21`, in UTC; today for a time that is 0 or in the future."""
    now = time.time()
    return time.strftime("%Y-%m-%d", time.gmtime(seconds if 0 < seconds < now + 86400 else now))


def list_last_days(num_days: int) -> list[str]:
    """Return the last `num_days` days including today, the oldest first."""
    now = time.time()
    return [utc_day(now - 86400 * ago) for ago in reversed(range(num_days))]


def make_day_keys(pipeline: Pipeline, days: Iterable[str]) -> list[str]:
    """Return the Redis keys of the sums of these days."""
    return [pipeline.meter_key(f"day:{day}") for day in days]


def parse_day_sums(fields: Mapping[bytes, bytes]) -> dict[str, UsageSums]:
    """Return one day's usage by tenant, from its hash."""
    counts: dict[str, dict[str, int]] = {}
    for field, number in fields.items():
        counter, _, tenant = field.decode().partition(":")
        counts.setdefault(tenant, {})[counter] = int(number)
    return {
        tenant: UsageSums(**{name: found.get(name, 0) for name in USAGE_COUNTERS}) for tenant, found in counts.items()
    }


def add_sums(sums: Iterable[UsageSums]) -> UsageSums:
    """Return the sum of several."""
    found = list(sums)
    return UsageSums(**{name: sum(getattr(one, name) for one in found) for name in USAGE_COUNTERS})


def _decode_hash(fields: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}
