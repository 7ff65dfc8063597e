"""`GET /v1/usage`: the usage of the caller's tenant, as metering counted it."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from penstock.ingest.gateway.state import CallerDep, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.metering import USAGE_COUNTERS, UsageSums, add_sums, list_last_days, make_day_keys, parse_day_sums
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
    """The usage of one day, in UTC."""

    day: str


class UsageBody(BaseModel):
    """The usage of a tenant, over all models."""

    object: Literal["usage"] = "usage"
    tenant: str
    data: list[Day]
    """Days without usage are left out."""
    total: Counts


@router.get("/v1/usage", summary="What the tenant used", responses=error_responses(400, 401, 503))
async def usage(
    request: Request,
    caller: CallerDep,
    days: Annotated[int, Query(ge=1, le=366, description="Today and those before it, in UTC.")] = 30,
) -> UsageBody:
    """The usage of the caller's own tenant, counted from the results: about a second behind."""
    gateway = get_gateway(request)
    pipelines = {gateway.addresses.pipeline} | await gateway.models.list_pipelines()
    wanted = list_last_days(days)
    fields = [f"{name}:{caller.tenant}" for name in USAGE_COUNTERS]
    batch = gateway.redis.pipeline(transaction=False)
    for name in sorted(pipelines):
        for key in make_day_keys(Pipeline(name), wanted):
            batch.hmget(key, fields)
    with translate_outages():
        rows: list[list[bytes | None]] = raise_first_error(await batch.execute(raise_on_error=False))
    found: dict[str, list[UsageSums]] = {}
    for number, row in enumerate(rows):
        counted = {field.encode(): raw for field, raw in zip(fields, row, strict=True) if raw is not None}
        if counted:
            found.setdefault(wanted[number % len(wanted)], []).append(parse_day_sums(counted)[caller.tenant])
    days_ = [(day, add_sums(sums)) for day, sums in sorted(found.items())]
    return UsageBody(
        tenant=caller.tenant,
        data=[Day(day=day, **vars(sums)) for day, sums in days_],
        total=Counts(**vars(add_sums(sums for _, sums in days_))),
    )
