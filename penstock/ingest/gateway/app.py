"""The ASGI application: routes, the form of errors, and a true OpenAPI document."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewaySettings, GuardSettings, is_loopback, load_settings
from penstock.ingest.gateway import (
    batches,
    files,
    health,
    inference,
    listing,
    live,
    metrics,
    responses,
    site,
    streams,
    usage,
)
from penstock.ingest.gateway.document import document
from penstock.ingest.gateway.figures import Counted
from penstock.ingest.gateway.guard import Guard
from penstock.ingest.gateway.handlers import error_handlers
from penstock.ingest.gateway.state import Gateway
from penstock.telemetry.meters import Meters

PARTS = (inference, responses, listing, streams, live, files, batches, usage, health, metrics, site)


def create_app(settings: GatewaySettings, addresses: Addresses, meters: Meters | None = None) -> FastAPI:
    """A gateway to all pipelines at these addresses. `app.state.gateway` is its `Gateway`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway: Gateway = app.state.gateway
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(
        title="Penstock",
        description="OpenAI's API over a durable pipeline: what is accepted is answered, every stream can be resumed.",
        lifespan=lifespan,
        exception_handlers=error_handlers([route for part in PARTS for route in part.router.routes]),
    )
    app.state.gateway = Gateway(settings, addresses, meters or Meters(is_on=False))
    is_open = app.state.gateway.keyring.is_open
    only_local = is_open and is_loopback(settings.host)
    app.add_middleware(Guard, settings=load_settings(GuardSettings), only_local=only_local)
    app.add_middleware(Counted, figures=app.state.gateway.figures)
    for part in PARTS:
        app.include_router(part.router)

    def openapi() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or document(app, is_open=is_open, only_local=only_local)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app
