"""`/healthz`: the process answers. `/readyz`: it can take requests. `/metrics`, for Prometheus. None needs a key."""

import asyncio
import os
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.redis.client import REDIS_TIMEOUT_S
from penstock.telemetry.exposition import CONTENT_TYPE, render_metrics

router = APIRouter()


class Health(BaseModel):
    """The state of the process."""

    status: Literal["ok"] = "ok"
    pid: int
    """The id of the process that answers."""


@router.get("/health", summary="The same as /healthz: load tools ask for it by this name")
@router.get("/healthz", summary="Whether the process answers")
async def healthz() -> Health:
    """Checks nothing else."""
    return Health(pid=os.getpid())


@router.get("/readyz", summary="Whether requests can be taken", responses=error_responses(503))
async def readyz(request: Request) -> Health:
    """503 while it stops, while the bus or Redis cannot be reached, and until a worker has ever served a model."""
    gateway = get_gateway(request)
    if gateway.is_stopping:
        raise ApiError(503, "this gateway stops", code="gateway_stopping")
    await asyncio.to_thread(gateway.bus.check_connection, REDIS_TIMEOUT_S)
    if not await gateway.models.list_models():
        raise ApiError(503, "no worker is ready yet", code="unavailable", headers={"Retry-After": "1"})
    return Health(pid=os.getpid())


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus's text format.",
            "content": {CONTENT_TYPE: {"schema": {"type": "string"}}},
        },
        **error_responses(404),
    },
)
async def metrics(request: Request) -> Response:
    """Values that cannot be read now are left out; 404 where telemetry is off."""
    metrics_ = get_gateway(request).metrics
    if not metrics_.meters.is_on:
        raise ApiError(404, "telemetry is off", code="telemetry_off")
    text = await asyncio.to_thread(render_metrics, metrics_.meters)
    return Response(text, headers={"content-type": CONTENT_TYPE})
