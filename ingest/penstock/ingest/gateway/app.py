"""The ASGI application: routes, error handlers, and an OpenAPI document that matches them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, is_loopback
from penstock.ingest.endpoints import ENDPOINTS, find_endpoint
from penstock.ingest.errors import ErrorBody
from penstock.ingest.gateway import (
    batches,
    health,
    inference,
    lending,
    live,
    regions,
    responses,
    scaling,
    streams,
    tokens,
    usage,
)
from penstock.ingest.gateway.elsewhere import RegionLayer
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.http.guard import GuardMiddleware
from penstock.ingest.http.handlers import error_handlers, error_responses
from penstock.ingest.http.metrics import CountingMiddleware
from penstock.ingest.http.site import make_router
from penstock.ingest.keys import KEYS_OPEN
from penstock.telemetry.meters import Meters

PARTS = (inference, responses, streams, live, batches, tokens, usage, scaling, regions, lending, health)


def create_app(settings: GatewayProcessSettings, addresses: Addresses, meters: Meters | None = None) -> FastAPI:
    """Return the gateway to all pipelines at these addresses. `app.state.gateway` is its `Gateway`."""
    gateway = Gateway(settings, addresses, meters or Meters(is_on=False))
    is_open = gateway.keyring.is_open
    # As base64, and beside the rest of a chat.
    max_image_bytes = min(settings.picture.max_bytes, round(settings.guard.max_body_mb * 0.7 * 2**20))
    page = make_router(is_open=is_open, max_images=settings.picture.max_count, max_image_bytes=max_image_bytes)
    routers = [*(part.router for part in PARTS), page]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(
        title="Penstock",
        description="OpenAI's API and Anthropic's messages over a durable pipeline: what is accepted is answered, "
        "every stream can be resumed.",
        lifespan=lifespan,
        # Its spans are of no request of a pipeline, and nobody reads them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        exception_handlers=error_handlers([route for router in routers for route in router.routes]),
    )
    app.state.gateway = gateway
    only_local = is_open and settings.admission.keys != KEYS_OPEN and is_loopback(settings.gateway.host)
    if gateway.forwarder is not None:
        app.add_middleware(RegionLayer, gateway=gateway, forwarder=gateway.forwarder)
    app.add_middleware(
        GuardMiddleware, settings=settings.guard, max_file_bytes=settings.batch.max_file_bytes, only_local=only_local
    )
    app.add_middleware(CountingMiddleware, metrics=gateway.metrics)
    for router in routers:
        app.include_router(router)

    def openapi() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or build_openapi(app, is_open=is_open, only_local=only_local)
        return app.openapi_schema

    def build_layers() -> ASGIApp:
        # Around all other layers: a page can read what the guard refuses and what ends with 500, too.
        return CORSMiddleware(
            FastAPI.build_middleware_stack(app),
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["*"],
        )

    app.openapi = openapi  # type: ignore[method-assign]
    if origins := settings.guard.list_origins():
        app.build_middleware_stack = build_layers  # type: ignore[method-assign]
    return app


_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
_GUARD_STATUSES = (400, 404, 408, 413, 415, 431, 503)
"""Statuses of the guard, before any route: invalid HTTP, impossible path, too slow, too large, compressed, too many."""


def build_openapi(app: FastAPI, *, is_open: bool, only_local: bool) -> dict[str, Any]:
    """Return the document of all routes. `is_open`: callers need no key; `only_local`: other hosts are refused."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    models = [*(endpoint.body_model for endpoint in ENDPOINTS.values()), *tokens.BODY_MODELS]
    bodies = [(model, "validation") for model in models]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components |= schemas["$defs"]
    for name in _UNUSED_SCHEMAS:
        components.pop(name, None)
    statuses = (*_GUARD_STATUSES, 403) if only_local else _GUARD_STATUSES
    for path, operations in document["paths"].items():
        endpoint = find_endpoint(path)
        model = ErrorBody if endpoint is None else endpoint.error_model
        for operation in operations.values():
            _correct_errors(operation["responses"], statuses, model)
            if is_open and "security" in operation:
                operation["security"].append({})
    return document


def _correct_errors(responses: dict[str, Any], anywhere: tuple[int, ...], model: type[BaseModel]) -> None:
    """Replace FastAPI's 422 by our 400 for invalid values, and add what the guard answers."""
    responses.pop("422", None)
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    for status, response in error_responses(*anywhere).items():
        responses.setdefault(str(status), {"description": response["description"], "content": body})
