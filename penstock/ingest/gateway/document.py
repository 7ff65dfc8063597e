"""The OpenAPI document: what FastAPI knows of the routes, and the bodies that they parse themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from penstock.ingest.gateway.handlers import errors
from penstock.ingest.openai import ENDPOINTS

_FASTAPI_OWN = ("HTTPValidationError", "ValidationError")
_ANYWHERE = (400, 404, 408, 413, 431, 503)
"""What the guard answers before any route is asked: no HTTP, an impossible path, too slow, too large, too many."""


def document(app: FastAPI, *, is_open: bool, only_local: bool) -> dict[str, Any]:
    """The document of all routes. `is_open`: nobody is asked for a key; `only_local`: other hosts are refused."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = [(endpoint.body, "validation") for endpoint in ENDPOINTS.values()]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components = made.setdefault("components", {}).setdefault("schemas", {})
    components |= schemas["$defs"]
    for name in _FASTAPI_OWN:
        components.pop(name, None)
    statuses = (*_ANYWHERE, 403) if only_local else _ANYWHERE
    for path in made["paths"].values():
        for operation in path.values():
            _true_errors(operation["responses"], statuses)
            if is_open and "security" in operation:
                operation["security"].append({})
    return made


def _true_errors(responses: dict[str, Any], anywhere: tuple[int, ...]) -> None:
    """A value that cannot be is answered with 400 in our own shape, never with FastAPI's 422."""
    responses.pop("422", None)
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for status, told in errors(*anywhere).items():
        responses.setdefault(str(status), {"description": told["description"], "content": body})
