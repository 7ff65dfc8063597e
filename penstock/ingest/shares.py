"""Tenants' shares of a pipeline that is full.

Topics are worked off in order of arrival, so a tenant's share of what is served is its share of what waits. While a
request would have to wait, a tenant that holds more of all that is admitted and not yet answered than its weight is of
the weights of all who hold any gets no more. While nothing has to wait, anybody may have all of it.

A ticket counts until it is settled, at most `TICKET_S`: what a gateway that died had admitted is forgotten by then.
"""

import uuid
from dataclasses import dataclass

import redis.asyncio

from penstock.client.sync import outages_named
from penstock.names import Pipeline

TICKET_S = 60
BUSY_S = 1.0
"""A pipeline in which a request would wait for longer is full."""

ENTER = """
-- Hold tokens, if the share allows it. KEYS: 1 tickets by end, 2 tokens held by tenant, 3 weights by tenant.
-- ARGV: 1 ticket, 2 tenant, 3 tokens, 4 weight, 5 seconds it counts, 6 1 if the pipeline is full.
-- Returns 1, or 0 if the tenant has more than its share.
local now = tonumber(redis.call('TIME')[1])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
  local tenant, tokens = string.match(old, '^[^|]*|([^|]*)|(%d+)$')
  redis.call('ZREM', KEYS[1], old)
  if redis.call('HINCRBY', KEYS[2], tenant, -tokens) <= 0 then
    redis.call('HDEL', KEYS[2], tenant)
    redis.call('HDEL', KEYS[3], tenant)
  end
end
local tenant, tokens, weight = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local mine = tonumber(redis.call('HGET', KEYS[2], tenant) or 0)
if ARGV[6] == '1' and mine > 0 then
  local held, weights = 0, weight
  local flat = redis.call('HGETALL', KEYS[2])
  for i = 1, #flat, 2 do
    held = held + tonumber(flat[i + 1])
    if flat[i] ~= tenant then weights = weights + tonumber(redis.call('HGET', KEYS[3], flat[i]) or 1) end
  end
  if mine * weights > held * weight then return 0 end
end
redis.call('ZADD', KEYS[1], now + ARGV[5], ARGV[1])
redis.call('HINCRBY', KEYS[2], tenant, tokens)
redis.call('HSET', KEYS[3], tenant, weight)
return 1
"""
LEAVE = """
-- Hold them no more, once. KEYS: as above. ARGV: 1 ticket, 2 tenant, 3 tokens.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 and redis.call('HINCRBY', KEYS[2], ARGV[2], -ARGV[3]) <= 0 then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[3], ARGV[2])
end
return 1
"""


@dataclass(frozen=True)
class Held:
    """Tokens that a tenant holds of a pipeline."""

    pipeline: Pipeline
    ticket: str
    tenant: str
    num_tokens: int


class Shares:
    """Who holds how much, of all pipelines."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._enter, self._leave = client.register_script(ENTER), client.register_script(LEAVE)

    async def enter(
        self, pipeline: Pipeline, tenant: str, weight: float, num_tokens: int, *, is_full: bool
    ) -> Held | None:
        """Hold tokens; None: the tenant has more than its share. Raises `BusUnavailable`."""
        num_tokens = max(1, num_tokens)
        held = Held(pipeline, f"{uuid.uuid4().hex}|{tenant}|{num_tokens}", tenant, num_tokens)
        words: list[str | float] = [held.ticket, tenant, num_tokens, weight, TICKET_S, int(is_full)]
        with outages_named():
            return held if await self._enter(_keys(pipeline), words) else None

    async def leave(self, held: Held) -> None:
        """Hold them no more. Raises `BusUnavailable`: then they count until their time is over."""
        with outages_named():
            await self._leave(_keys(held.pipeline), [held.ticket, held.tenant, held.num_tokens])


def _keys(pipeline: Pipeline) -> list[str]:
    return [pipeline.shares_key(part) for part in ("tickets", "tokens", "weights")]
