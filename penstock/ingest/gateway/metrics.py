"""`/metrics`: this gateway's figures and its pipelines', for Prometheus. Asks for no key."""

import asyncio

from fastapi import APIRouter, Request, Response

from penstock.ingest.gateway.errors import ApiError
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.state import gateway_of
from penstock.telemetry.exposition import CONTENT_TYPE, exposition

router = APIRouter()


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus's text format.",
            "content": {CONTENT_TYPE: {"schema": {"type": "string"}}},
        },
        **errors(404),
    },
)
async def metrics(request: Request) -> Response:
    """What cannot be learned now is absent; 404 where telemetry is off."""
    figures = gateway_of(request).figures
    if not figures.meters.is_on:
        raise ApiError(404, "telemetry is off", code="telemetry_off")
    text = await asyncio.to_thread(exposition, figures.meters)
    return Response(text, headers={"content-type": CONTENT_TYPE})
