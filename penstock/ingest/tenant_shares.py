"""Tenants' shares of a pipeline that is full.

Topics are worked off in order of arrival, so a tenant's share of what is served is its share of what waits. While a
request would have to wait, a tenant that holds more of all that is admitted and not yet answered than its weight is of
the weights of all who hold any gets no more. While nothing has to wait, anybody may have all of it.

A ticket counts until it is settled, at most `TICKET_S`: what a gateway that died had admitted is forgotten by then.
"""

import uuid
from dataclasses import dataclass

import redis.asyncio

from penstock.names import Pipeline
from penstock.redis.client import translate_outages
from penstock.redis.scripts import load_script

HELD_TTL_S = 60
FULL_WAIT_S = 1.0
"""A pipeline in which a request would wait for longer is full."""

ENTER_SHARE = load_script("penstock.ingest", "enter_share")
LEAVE_SHARE = load_script("penstock.ingest", "leave_share")


@dataclass(frozen=True)
class HeldTokens:
    """Tokens that a tenant holds of a pipeline."""

    pipeline: Pipeline
    ticket: str
    tenant: str
    num_tokens: int


class TenantShares:
    """Who holds how much, of all pipelines."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def hold_tokens(
        self, pipeline: Pipeline, tenant: str, weight: float, num_tokens: int, *, is_full: bool
    ) -> HeldTokens | None:
        """Hold tokens; None: the tenant has more than its share. Raises `BusUnavailable`."""
        num_tokens = max(1, num_tokens)
        held = HeldTokens(pipeline, f"{uuid.uuid4().hex}|{tenant}|{num_tokens}", tenant, num_tokens)
        arguments: list[str | float] = [held.ticket, tenant, num_tokens, weight, HELD_TTL_S, int(is_full)]
        with translate_outages():
            return held if await ENTER_SHARE.run_async(self._client, _share_keys(pipeline), arguments) else None

    async def release_tokens(self, held: HeldTokens) -> None:
        """Hold them no more. Raises `BusUnavailable`: then they count until their time is over."""
        with translate_outages():
            await LEAVE_SHARE.run_async(
                self._client, _share_keys(held.pipeline), [held.ticket, held.tenant, held.num_tokens]
            )


def _share_keys(pipeline: Pipeline) -> list[str]:
    return [pipeline.shares_key(part) for part in ("tickets", "tokens", "weights")]
