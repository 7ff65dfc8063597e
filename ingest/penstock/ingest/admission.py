"""Admission: what a request has to pass before it is published. All gateways share the counts, which are in Redis.

    1  limits    the classes that the caller may use, and how much one request may ask for
    2  lag       how long the request would wait, by the tokens that wait before it
    3  share     while the pipeline is full, a tenant gets no more than its part of it (`TenantShares`)
    4  buckets   one request and its tokens are taken, both or neither. The tokens are an estimate: prompt and limit,
                 or, where an answer has no limit, the mean length of recent answers
    5  settle    when the request ends, its real usage replaces the estimate, and its share is released

A crash after 3 or 4 costs the tenant the estimate, which the bucket refills within a minute. Nothing else has been
done by then, as the request is published afterwards. While Redis is away nothing is admitted (`BusUnavailable`,
503): answers could not be streamed either.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import redis.asyncio

from penstock.config.settings import AdmissionSettings
from penstock.errors import BusUnavailable
from penstock.ingest.errors import ApiError
from penstock.ingest.tenants import Caller
from penstock.messages import Usage, estimate_open_answer_tokens
from penstock.names import REGION_USED_KEY, Pipeline, PriorityClass, rate_key
from penstock.ops.lag import PipelineLag
from penstock.redis.client import translate_outages
from penstock.redis.scripts import load_script

log = logging.getLogger(__name__)

LAG_REFRESH_S, LAG_MAX_AGE_S = 0.5, 2.0
"""The lag is read again after `LAG_REFRESH_S`. Until that has answered, a value of up to `LAG_MAX_AGE_S` is used."""

TAKE_TOKENS = load_script("penstock.ingest", "bucket", "take_tokens")
GIVE_TOKENS = load_script("penstock.ingest", "bucket", "give_tokens")
ENTER_SHARE = load_script("penstock.ingest", "enter_share")
LEAVE_SHARE = load_script("penstock.ingest", "leave_share")
MAX_BATCH_WAIT_S = 6 * 3600.0
"""A request of class `batch` that would wait for longer is refused with 429."""
HELD_TTL_S = 60
FULL_WAIT_S = 1.0
"""A pipeline in which a request would wait for longer is full."""


@dataclass(frozen=True)
class HeldTokens:
    """Tokens that a tenant holds of a pipeline."""

    pipeline: Pipeline
    ticket: str
    tenant: str
    num_tokens: int


@dataclass
class Ticket:
    """An admitted request, and what was taken for it."""

    caller: Caller
    num_tokens: int
    """The estimated number of tokens."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """OpenAI's `x-ratelimit-*` headers for the answer; empty for a tenant without limits."""
    held_tokens: HeldTokens | None = None
    """Its share of the pipeline."""
    is_settled: bool = False

    @property
    def has_bucket_tokens(self) -> bool:
        """Whether tokens were taken from the tenant's bucket, to be corrected when the request has ended."""
        return self.caller.tokens_per_min is not None


class TenantShares:
    """How many tokens each tenant holds of each pipeline, in Redis.

    Topics are read in order of arrival, so a tenant's share of the work done is its share of the work that waits. A
    tenant's part of the tokens is its part of all tokens that are admitted and not answered. While a request would have
    to wait, a tenant is refused if that is larger than its part of the weights of all tenants that hold tokens. While
    no request has to wait, any tenant may hold all of it.

    Tokens are held until their request is settled, at most for `HELD_TTL_S`: so the requests of a gateway that died
    stop counting.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def hold_tokens(
        self, pipeline: Pipeline, tenant: str, weight: float, num_tokens: int, *, is_full: bool
    ) -> HeldTokens | None:
        """Hold tokens; None if the tenant has more than its share. Raises `BusUnavailable`."""
        num_tokens = max(1, num_tokens)
        held = HeldTokens(pipeline, f"{uuid.uuid4().hex}|{tenant}|{num_tokens}", tenant, num_tokens)
        arguments: list[str | float] = [held.ticket, tenant, num_tokens, weight, HELD_TTL_S, int(is_full)]
        with translate_outages():
            return held if await ENTER_SHARE.run_async(self._client, _share_keys(pipeline), arguments) else None

    async def release_tokens(self, held: HeldTokens) -> None:
        """Release held tokens. Raises `BusUnavailable`; they count until their time is over then."""
        with translate_outages():
            await LEAVE_SHARE.run_async(
                self._client, _share_keys(held.pipeline), [held.ticket, held.tenant, held.num_tokens]
            )


def _share_keys(pipeline: Pipeline) -> list[str]:
    return [pipeline.shares_key(part) for part in ("tickets", "tokens", "weights")]


class Admission:
    """Admits requests, or refuses them and says when to try again."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        fetch_lag: Callable[[Pipeline], Awaitable[PipelineLag]],
        settings: AdmissionSettings,
        *,
        has_peers: bool = False,
    ) -> None:
        """With peers, what tenants use is counted for them (`penstock.ingest.regions.limits`)."""
        self._used_keys = [REGION_USED_KEY] if has_peers else []
        self._settings, self.lag_cache = settings, LagCache(fetch_lag)
        self._client, self._shares = client, TenantShares(client)

    async def close(self) -> None:
        """Stop what it reads in the background."""
        await self.lag_cache.close()

    async def admit(
        self,
        caller: Caller,
        pipeline: Pipeline,
        priority_class: PriorityClass,
        num_tokens: int,
        *,
        max_output: int = 0,
        num_open: int = 0,
        max_wait_s: float | None = None,
    ) -> Ticket:
        """Admit a request of about `num_tokens`, prompt and output together, which may generate up to `max_output`.

        `num_open` is how many of its answers have no limit of their own. `num_tokens` leaves them out; for each of
        them the mean length of recent answers is added. With `max_wait_s` the request is refused if it would wait
        for longer.

        Raises `ApiError`: 403 for a class that the caller may not use, 400 for more output than it may ask for, 413
        for more tokens than its bucket ever holds, 429 with `Retry-After`; `BusUnavailable`.
        """
        check_caller_limits(caller, priority_class, num_tokens, max_output)
        lag = await self.lag_cache.get_lag(pipeline)
        wait_s = None if lag is None else lag.waits[priority_class]
        mean_output = None if lag is None else lag.mean_output_tokens[priority_class]
        if num_open:
            num_tokens += estimate_open_output(caller, num_tokens, max_output, num_open, mean_output)
        self._check_wait(wait_s, priority_class, max_wait_s)
        is_full = wait_s is not None and wait_s > FULL_WAIT_S
        held = await self._shares.hold_tokens(pipeline, caller.tenant, caller.weight, num_tokens, is_full=is_full)
        if held is None:
            message = "others wait as well, and this tenant has its share of the pipeline"
            raise too_many_requests(message, wait_s or 1, code="over_share")
        try:
            return Ticket(caller, num_tokens, await self._take_from_buckets(caller, num_tokens), held)
        except ApiError:
            await self._shares.release_tokens(held)
            raise

    async def take_request(self, caller: Caller) -> None:
        """Take one request and no tokens from the caller's bucket. Raises `ApiError` 429, and `BusUnavailable`."""
        await self._take_from_buckets(caller, 0)

    async def _take_from_buckets(self, caller: Caller, num_tokens: int) -> dict[str, str]:
        """Take one request and `num_tokens`; return headers for the answer. Raises `ApiError` 429."""
        if caller.requests_per_min is None and caller.tokens_per_min is None:
            return {}
        with translate_outages():
            limits = [caller.requests_per_min or 0, caller.tokens_per_min or 0]
            keys = [rate_key(caller.tenant), *self._used_keys]
            taken: list[int] = await TAKE_TOKENS.run_async(self._client, keys, [*limits, num_tokens, caller.tenant])
        requests, tokens = taken[1] / 1000, taken[2] / 1000
        headers = _rate_headers(caller, requests, tokens)
        if not taken[0]:
            raise _rate_limit_error(caller, requests, tokens, num_tokens, headers)
        return headers

    async def settle(self, ticket: Ticket, usage: Usage) -> None:
        """Replace the estimate by the real usage, once. `Usage()` gives all tokens back.

        Raises `BusUnavailable`; the estimate stands then.
        """
        if ticket.is_settled:
            return
        ticket.is_settled = True
        if ticket.held_tokens is not None:
            await self._shares.release_tokens(ticket.held_tokens)
        limit, back = ticket.caller.tokens_per_min, ticket.num_tokens - usage.prompt_tokens - usage.completion_tokens
        if limit is None or not back:
            return
        with translate_outages():
            tenant = ticket.caller.tenant
            args: list[str | int] = [ticket.caller.requests_per_min or 0, limit, back, tenant]
            await GIVE_TOKENS.run_async(self._client, [rate_key(tenant), *self._used_keys], args)

    def _check_wait(self, wait_s: float | None, priority_class: PriorityClass, wanted_s: float | None) -> None:
        limit_s = self._settings.max_wait_s if priority_class == "interactive" else MAX_BATCH_WAIT_S
        if wanted_s is not None and (wait_s is None or wait_s > wanted_s):
            after_s = 1 if wait_s is None else wait_s - wanted_s
            message = "how long the request would have to wait is not known yet"
            if wait_s is not None:
                message = f"the request would have to wait for about {wait_s:.1f} s"
            raise too_many_requests(message, after_s, code="busy")
        if wait_s is not None and wait_s > limit_s:
            raise too_many_requests(f"a new request would wait for {wait_s:.0f} s", wait_s - limit_s, code="overloaded")


def check_caller_limits(caller: Caller, priority_class: PriorityClass, num_tokens: int, max_output: int) -> None:
    """Raise `ApiError` for a request that the caller may not make at any time."""
    if priority_class not in caller.classes:
        raise ApiError(
            403, f"this API key may not make requests of the class {priority_class!r}", code="class_not_allowed"
        )
    if caller.max_request_tokens is not None and max_output > caller.max_request_tokens:
        message = f"one request may ask for {caller.max_request_tokens:,} output tokens, not {max_output:,}"
        raise ApiError(400, message, code="too_many_tokens", param="max_tokens")
    if caller.tokens_per_min is not None and num_tokens > caller.tokens_per_min:
        message = f"about {num_tokens:,} tokens in one request; {caller.tokens_per_min:,} a minute are allowed"
        raise ApiError(413, message, code="request_too_large")


def estimate_open_output(
    caller: Caller, num_tokens: int, max_output: int, num_open: int, mean_output: float | None
) -> int:
    """Return how many tokens to reserve for answers without a limit, beside the `num_tokens` of their request.

    It is at most what a full bucket has left, so that an estimate alone never refuses a request for good.
    """
    capacity = math.inf if caller.tokens_per_min is None else max(0, caller.tokens_per_min - num_tokens)
    return int(min(num_open * estimate_open_answer_tokens(mean_output), max_output, capacity))


def too_many_requests(message: str, after_s: float, *, code: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return a 429 that says when to try again: in seconds, and in milliseconds for clients that read those."""
    after = {"Retry-After": str(max(1, math.ceil(after_s))), "retry-after-ms": str(max(1, math.ceil(after_s * 1000)))}
    return ApiError(429, message, code=code, headers={**(headers or {}), **after})


class LagCache:
    """The lag of each pipeline. Requests that need it at the same time share one look-up."""

    def __init__(self, fetch_lag: Callable[[Pipeline], Awaitable[PipelineLag]]) -> None:
        self._fetch_lag = fetch_lag
        self._cached: dict[Pipeline, tuple[float, PipelineLag | None]] = {}
        self._refreshing: dict[Pipeline, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel all look-ups: one that went on would open a closed connection again."""
        tasks = [*self._refreshing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def get_lag(self, pipeline: Pipeline) -> PipelineLag | None:
        """Return a recent lag, or None while it is not known or no worker serves the pipeline."""
        age_s = time.monotonic() - self._cached.get(pipeline, (-math.inf, None))[0]
        if age_s > LAG_REFRESH_S and pipeline not in self._refreshing:
            self._refreshing[pipeline] = asyncio.create_task(self._refresh_lag(pipeline))
        if age_s > LAG_MAX_AGE_S:
            await asyncio.shield(self._refreshing[pipeline])
        return self._cached[pipeline][1]

    async def _refresh_lag(self, pipeline: Pipeline) -> None:
        lag: PipelineLag | None = None
        try:
            lag = await self._fetch_lag(pipeline)
        except BusUnavailable:  # whoever publishes is told
            pass
        except Exception:  # not to know the lag is no reason to refuse
            log.exception("reading the lag of %s failed", pipeline.name)
        finally:
            self._cached[pipeline] = (time.monotonic(), lag)
            del self._refreshing[pipeline]


def _rate_limit_error(
    caller: Caller, requests: float, tokens: float, num_tokens: int, headers: Mapping[str, str]
) -> ApiError:
    waits = [(0.0, "")]
    if caller.requests_per_min is not None:
        waits.append(((1 - requests) * 60 / caller.requests_per_min, f"{caller.requests_per_min:,} requests"))
    if caller.tokens_per_min is not None:
        waits.append(((num_tokens - tokens) * 60 / caller.tokens_per_min, f"{caller.tokens_per_min:,} tokens"))
    after_s, what = max(waits)
    message = f"over the limit of {what} a minute; try again in {after_s:.1f} s"
    return too_many_requests(message, after_s, code="rate_limit_exceeded", headers=headers)


def _rate_headers(caller: Caller, requests: float, tokens: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, left in (
        ("requests", caller.requests_per_min, requests),
        ("tokens", caller.tokens_per_min, tokens),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(left)))
            headers[f"x-ratelimit-reset-{name}"] = _format_duration((limit - left) * 60 / limit)
    return headers


def _format_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `120ms`, `7.66s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{round(rest, 2):g}s"
