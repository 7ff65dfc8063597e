"""Tenants' shares of a full pipeline.

Topics are read in order of arrival, so a tenant's share of the work done is its share of the work that waits. A
tenant's part of the tokens is its part of all tokens that are admitted and not answered. While a request would have to
wait, a tenant is refused if that is larger than its part of the weights of all tenants that hold tokens. While no
request has to wait, any tenant may hold all of it.

Tokens are held until their request is settled, at most for `HELD_TTL_S`: so the requests of a gateway that died stop
counting.
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
    """How many tokens each tenant holds of each pipeline, in Redis."""

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
