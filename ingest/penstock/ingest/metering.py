"""Metering: the usage of each tenant, counted from the results, of which each request has one.

A meter is a `LeasedReader`, whose steps and crashes stand there. Its script adds to the sums and moves the stored
offset, in one step.

So the sums are exactly the usage in the topic up to the stored offsets. If a part ends before its stored offset,
because the servers lost the end of its log, counting goes on at its end, and that is stored: some results may not be
counted, but none is counted twice. A second result of one id, possible where Redis lost the request's record, is
left out if the first is among the last `MAX_SEEN_IDS` counted. If Redis loses the sums it loses the offsets as well,
and all results that the topic still keeps are counted again.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import failpoints
from penstock.bus.contract import FollowedMessage
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import RequestError
from penstock.ingest.leased_reader import LeasedReader
from penstock.messages import Result, decode_clear_part
from penstock.names import Pipeline, find_key
from penstock.redis.scripts import load_script

log = logging.getLogger(__name__)

MAX_SEEN_IDS = 100_000
"""How many ids of counted results are remembered."""
MAX_TOKENS_PER_REQUEST = 2**31
"""Larger counts are rejected as impossible: their sums might not fit a number in Redis."""
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


class UsageMeter(LeasedReader):
    """Counts the results of one pipeline. Used by one thread."""

    work = "metering"
    points = failpoints.METER

    def __init__(self, addresses: Addresses, settings: BusSettings) -> None:
        pipeline = Pipeline(addresses.pipeline)
        places = {pipeline.results_topic: pipeline.meter_key("places")}
        super().__init__(addresses, settings, pipeline.meter_key("reader"), places)

    def take_part(self, topic: str, part: str, before: str, messages: Sequence[FollowedMessage]) -> bool:
        """Count the messages of one part. Return False if another meter did."""
        days: dict[str, int] = {}
        arguments: list[Any] = [part, before, messages[-1].offset, MAX_SEEN_IDS]
        for result, key in _parse_results(messages):
            number = days.setdefault(utc_day(result.timings.finished), len(days) + 1)
            usage = result.usage
            computed = usage.prompt_tokens - usage.cached_tokens
            whose = json.dumps([result.tenant, key, result.model, result.priority_class])
            arguments += [result.id, number, result.tenant, whose]
            arguments += [computed, usage.cached_tokens, usage.completion_tokens]
        hashes = (f"{what}:{day}" for day in days for what in ("day", "detail"))
        keys = [self.pipeline.meter_key(name) for name in ("places", "seen", *hashes)]
        return bool(COUNT_RESULTS.run(self.client, keys, arguments))


def _parse_results(messages: Iterable[FollowedMessage]) -> Iterable[tuple[Result, str]]:
    """Yield the messages that are valid results, each with the id of its request's API key.

    A topic can hold anything, as many may write into it.
    """
    for followed in messages:
        if followed.message is None:
            continue
        try:
            result = decode_clear_part(Result, followed.message.value)
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
