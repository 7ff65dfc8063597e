"""`GET /v1/penstock/autoscale`: how many workers there should be, for KEDA's `metrics-api` scaler. It needs no key."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.names import Pipeline
from penstock.redis.client import translate_outages

router = APIRouter()


class WorkerNumbers(BaseModel):
    """Numbers of workers by kind; 0 of a kind that the pipeline does not have."""

    auto: int
    prefill: int
    decode: int


class Scaling(BaseModel):
    """The last decision of `penstock autoscale`."""

    at: float
    """When it was made, in seconds since the epoch."""
    workers: WorkerNumbers
    reasons: dict[str, str]
    """By kind, what the number follows from."""
    alerts: list[str]
    leave: dict[str, str | None]
    """By kind, the name of the worker that has the least to lose."""
    predicted_ttft_p99_s: float | None
    observed_ttft_p99_s: float | None


@router.get(
    "/v1/penstock/autoscale",
    summary="How many workers there should be",
    responses=error_responses(404, 503),
)
async def autoscale(request: Request) -> Scaling:
    """404 where no controller has decided within a minute: then nothing is to be scaled."""
    gateway = get_gateway(request)
    pipeline = Pipeline(gateway.addresses.pipeline)
    with translate_outages():
        told: Any = await gateway.redis.get(pipeline.autoscale_key)
    if told is None:
        raise ApiError(404, f"no `penstock autoscale` runs for the pipeline {pipeline.name}", code="no_decision")
    return Scaling.model_validate_json(told)
