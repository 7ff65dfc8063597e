"""Metering: what each tenant used, counted from the results, which say it once for each request.

Any number of gateways may run a `Meter`; one at a time counts, the others wait for its lease to run out. A turn of it:

    1  read      the results after the stored place of each part of the topic (a Kafka partition, the Redis stream)
    2  count     one script for each part: adds to the sums and moves the stored place, if it still is where it was

A crash before 2 costs nothing, and after it neither: the next one reads on from the stored place. Two that count at
once (the lease ran out in a pause) start from the same place; the second one's script does nothing, and it reads again.

So the sums are exactly what the topic said up to the stored places. A part that ends before its stored place, because
the servers lost the end of its log, is gone on with at its end, which is stored: rather too little is counted than
twice. A second result of one id, possible where Redis lost the request's record, is left out if the first is among the
last `WINDOW` counted. If Redis loses the sums it loses the places with them, and all that the topic still keeps is
counted again.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from penstock.bus.connect import connect
from penstock.bus.contract import Followed, Follower
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import BusUnavailable, RequestError
from penstock.failpoints import failpoint
from penstock.messages import Result, decode_message
from penstock.names import Pipeline
from penstock.redis.client import backoff_pauses, is_away, redis_client
from penstock.redis.scripts import RENEW_LEASE, load_script

log = logging.getLogger(__name__)

WINDOW = 100_000
"""So many ids are remembered."""
MOST = 200
"""Results read at once."""
MOST_TOKENS = 2**31
"""No request uses so many: a sum of larger numbers may be none that Redis can keep."""
LEASE_S, WAIT_S = 5.0, 1.0
COUNTERS = ("requests", "prefill_tokens", "cached_tokens", "decode_tokens")

COUNT_RESULTS = load_script("penstock.ingest", "count_results")


@dataclass(frozen=True)
class Sums:
    """What was used. Prompt tokens are either computed (`prefill`) or found in the KV store (`cached`)."""

    requests: int = 0
    """Of the pipeline: one with `n` answers counts n times."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0


class Meter:
    """Counts the results of one pipeline. For one thread."""

    def __init__(self, addresses: Addresses) -> None:
        self._pipeline = Pipeline(addresses.pipeline)
        self._bus = connect(addresses, load_settings(BusSettings))
        self._client = redis_client(addresses.first_url)
        self._token = uuid.uuid4().hex
        self._follower: Follower | None = None
        self._places: dict[str, str] = {}

    def turn(self, timeout_s: float = WAIT_S) -> int | None:
        """Count what came, waiting up to `timeout_s` for any; how many results. None: another one counts.

        Raises `BusUnavailable` or `redis.RedisError`: another turn may be taken at any time.
        """
        key = self._pipeline.meter_key("reader")
        if not RENEW_LEASE.run(self._client, [key], [self._token, int(LEASE_S * 1000)]):
            self._let_go()
            return None
        try:
            return self._turn(timeout_s)
        except (BusUnavailable, redis.RedisError):
            self._let_go()
            raise

    def _turn(self, timeout_s: float) -> int:
        if self._follower is None:
            self._places = _text(self._client.hgetall(self._pipeline.meter_key("places")))
            self._follower = self._bus.follow(self._pipeline.results_topic, self._places)
        found = self._follower.read(timeout_s, MOST)
        failpoint("meter.1.read")
        parts: dict[str, list[Followed]] = {}
        for message in found:
            parts.setdefault(message.part, []).append(message)
        for part, messages in parts.items():
            if not self._add(part, messages):
                self._let_go()
                return 0
            failpoint("meter.2.counted")
        return len(found)

    def _add(self, part: str, messages: Sequence[Followed]) -> bool:
        """Count one part's messages; False if somebody else did."""
        days: dict[str, int] = {}
        words: list[Any] = [part, self._places.get(part, ""), messages[-1].place, WINDOW]
        for result in _results(messages):
            number = days.setdefault(day_of(result.timings.finished), len(days) + 1)
            usage = result.usage
            computed = usage.prompt_tokens - usage.cached_tokens
            words += [result.id, number, result.tenant, computed, usage.cached_tokens, usage.completion_tokens]
        keys = [self._pipeline.meter_key(name) for name in ("places", "seen", *(f"day:{day}" for day in days))]
        is_done = bool(COUNT_RESULTS.run(self._client, keys, words))
        self._places[part] = messages[-1].place
        return is_done

    def _let_go(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            with contextlib.suppress(BusUnavailable):
                follower.close()

    def close(self) -> None:
        """Free the connections; another one may count after `LEASE_S`."""
        self._let_go()
        self._client.close()


def _results(messages: Iterable[Followed]) -> Iterable[Result]:
    """What can be read of them, and counted; anybody may write into a topic."""
    for followed in messages:
        if followed.message is None:
            continue
        try:
            result = decode_message(Result, followed.message.value)
        except RequestError as error:
            log.warning("%s is no result: %s", followed.place, error)
            continue
        usage = result.usage
        if 0 <= usage.cached_tokens <= usage.prompt_tokens < MOST_TOKENS and 0 <= usage.completion_tokens < MOST_TOKENS:
            yield result
        else:
            log.warning("%s is no result: %s cannot have been used", followed.place, usage)


async def meter_forever(addresses: Addresses) -> None:
    """Count a pipeline's results until cancelled, whatever is away meanwhile."""
    meter, thread = Meter(addresses), ThreadPoolExecutor(1, "meter")
    loop, waits = asyncio.get_running_loop(), backoff_pauses()
    try:
        while True:
            try:
                counted = await _to_the_end(loop.run_in_executor(thread, meter.turn))
            except (BusUnavailable, redis.RedisError) as error:
                if not is_away(error):
                    log.error("metering: %s", error)
                await asyncio.sleep(next(waits))
                continue
            waits = backoff_pauses()
            if counted is None:
                await asyncio.sleep(WAIT_S)
    finally:
        thread.submit(meter.close)
        thread.shutdown(wait=False)


async def _to_the_end(turn: "asyncio.Future[int | None]") -> int | None:
    """Cancelled or not, the thread is through with its turn."""
    try:
        return await asyncio.shield(turn)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnavailable, redis.RedisError):
            await turn
        raise


# What was counted.

Days = Mapping[str, Mapping[str, Sums]]
"""By day (UTC), then by tenant."""


def day_of(seconds: float) -> str:
    """`2026-11-21`, in UTC; of a result that does not say when it finished, or when it cannot have, today."""
    now = time.time()
    return time.strftime("%Y-%m-%d", time.gmtime(seconds if 0 < seconds < now + 86400 else now))


def last_days(num_days: int) -> list[str]:
    """Today and those before it, the oldest first."""
    now = time.time()
    return [day_of(now - 86400 * ago) for ago in reversed(range(num_days))]


def day_keys(pipeline: Pipeline, days: Iterable[str]) -> list[str]:
    """Where the sums of these days are."""
    return [pipeline.meter_key(f"day:{day}") for day in days]


def sums_of(fields: Mapping[bytes, bytes]) -> dict[str, Sums]:
    """One day's sums by tenant, from its hash."""
    counts: dict[str, dict[str, int]] = {}
    for field, number in fields.items():
        counter, _, tenant = field.decode().partition(":")
        counts.setdefault(tenant, {})[counter] = int(number)
    return {tenant: Sums(**{name: found.get(name, 0) for name in COUNTERS}) for tenant, found in counts.items()}


def total(sums: Iterable[Sums]) -> Sums:
    """All of them together."""
    found = list(sums)
    return Sums(**{name: sum(getattr(one, name) for one in found) for name in COUNTERS})


def _text(fields: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}
