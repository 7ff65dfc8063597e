"""`GET /v1/usage`: what the caller's tenant used, as metering counted it."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.state import CallerDep, gateway_of
from penstock.ingest.metering import COUNTERS, Sums, day_keys, last_days, sums_of, total
from penstock.names import Pipeline
from penstock.redis.client import raise_first_error, translate_outages

router = APIRouter()


class Counts(BaseModel):
    """Requests, and their tokens: prompt tokens computed, prompt tokens found in the KV store, tokens generated."""

    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0


class Day(Counts):
    """One day's, in UTC."""

    day: str


class UsageBody(BaseModel):
    """What a tenant used, over all models."""

    object: Literal["usage"] = "usage"
    tenant: str
    data: list[Day]
    """Days without any are left out."""
    total: Counts


@router.get("/v1/usage", summary="What the tenant used", responses=errors(400, 401, 503))
async def usage(
    request: Request,
    caller: CallerDep,
    days: Annotated[int, Query(ge=1, le=366, description="Today and those before it, in UTC.")] = 30,
) -> UsageBody:
    """The caller's own tenant alone, counted from the results: about a second behind."""
    gateway = gateway_of(request)
    pipelines = {gateway.addresses.pipeline} | {served.pipeline for served in await gateway.models.all()}
    wanted = last_days(days)
    fields = [f"{name}:{caller.tenant}" for name in COUNTERS]
    batch = gateway.redis.pipeline(transaction=False)
    for name in sorted(pipelines):
        for key in day_keys(Pipeline(name), wanted):
            batch.hmget(key, fields)
    with translate_outages():
        rows: list[list[bytes | None]] = raise_first_error(await batch.execute(raise_on_error=False))
    found: dict[str, list[Sums]] = {}
    for number, row in enumerate(rows):
        counted = {field.encode(): raw for field, raw in zip(fields, row, strict=True) if raw is not None}
        if counted:
            found.setdefault(wanted[number % len(wanted)], []).append(sums_of(counted)[caller.tenant])
    days_ = [(day, total(sums)) for day, sums in sorted(found.items())]
    return UsageBody(
        tenant=caller.tenant,
        data=[Day(day=day, **vars(sums)) for day, sums in days_],
        total=Counts(**vars(total(sums for _, sums in days_))),
    )
