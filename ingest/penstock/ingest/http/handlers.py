"""Answers every exception in the form that the SDKs expect."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from penstock.errors import AcceptanceUnknown, BusUnavailable, PenstockError
from penstock.ingest.endpoints import find_prompt_field, make_error_body
from penstock.ingest.errors import ApiError, ErrorBody, to_api_error
from penstock.ingest.http.metrics import ACCEPTED_KEY, REFUSAL_KEY, UNSENT_KEY
from penstock.ingest.openai.body import validation_error
from penstock.ingest.openai.response_items import ID_PREFIX

log = logging.getLogger(__name__)

REFUSAL_STATUSES = (401, 403, 429)
"""Statuses of callers that may not make the request, or not now."""
Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]
_STATUS_DESCRIPTIONS = {
    400: "The request cannot be answered: `param` names what is wrong with it.",
    401: "No valid API key.",
    403: "This API key may not do that.",
    404: "There is no such thing, or it is another tenant's.",
    408: "What was to be sent comes too slowly.",
    409: "In conflict with an earlier request, or cancelled.",
    413: "Too large.",
    415: "The body is compressed.",
    429: "Too many requests or tokens, or too much is waiting: `Retry-After` says when to come again.",
    431: "Too many headers, or too long.",
    500: "The pipeline failed.",
    501: "This gateway cannot do it, for the reason that it gives.",
    503: "The pipeline cannot be reached now: try again.",
    504: "Not within the time that was given.",
}


_INSTEAD = {
    "/v1/conversations": " There are no conversations here: send 'previous_response_id', or all turns as 'input'.",
    "/v1/messages/batches": " Batches of messages are not supported: /v1/batches takes chats and responses.",
}
"""What to use in place of paths of other servers."""


def error_responses(*statuses: int, model: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return the error answers of a route, for the OpenAPI document."""
    return {status: {"model": model, "description": _STATUS_DESCRIPTIONS[status]} for status in statuses}


def render_error(request: Request, error: ApiError) -> Response:
    """Return an error as the answer to a request."""
    body = make_error_body(request.url.path, error).model_dump_json()
    return Response(body, error.status, error.headers, "application/json")


async def _handle_penstock_error(request: Request, error: PenstockError) -> Response:
    found = to_api_error(error, find_prompt_field(request.url.path))
    if found.status == 500 and found.code == "internal_error":
        log.error("answering %s %s failed", request.method, request.url.path, exc_info=error)
    if found.status in REFUSAL_STATUSES:
        request.scope[REFUSAL_KEY] = found.code
    if (
        isinstance(error, BusUnavailable)
        and not isinstance(error, AcceptanceUnknown)
        and ACCEPTED_KEY not in request.scope
    ):
        request.scope[UNSENT_KEY] = found.code
    return render_error(request, found)


async def _handle_invalid_value(request: Request, error: RequestValidationError) -> Response:
    return render_error(request, validation_error([{**line, "loc": line["loc"][1:]} for line in error.errors()]))


async def _handle_http_error(request: Request, error: HTTPException, routes: Sequence[BaseRoute]) -> Response:
    # The routes of a response take the last part of any path for its id.
    name = request.url.path.removeprefix("/v1/responses/")
    if error.status_code == 405 and name != request.url.path and not name.startswith(ID_PREFIX):
        error = HTTPException(404)
    message, code, headers = str(error.detail), None, error.headers
    if error.status_code == 404:
        message, code = f"Unknown request URL: {request.method} {request.url.path}.", "unknown_url"
        message += "".join(advice for path, advice in _INSTEAD.items() if f"{request.url.path}/".startswith(f"{path}/"))
        if (path := _find_meant_path(request, routes)) is not None:
            message += f" {path} is known: a base URL ends with /v1 once, or without it for programs that add it."
    elif error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request, routes))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        message, code = f"{request.method} is not allowed at {request.url.path}: use {allowed}.", "method_not_allowed"
        headers = {"Allow": allowed}
    return render_error(request, ApiError(error.status_code, message, code=code, headers=headers))


def _find_meant_path(request: Request, routes: Sequence[BaseRoute]) -> str | None:
    """Return the path of a route that a base URL without /v1, or with two of them, has missed."""
    path = request.url.path
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    is_known = any(route.matches({**request.scope, "path": meant})[0] is Match.FULL for route in routes)
    return meant if is_known else None


def _allowed_methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """Return the methods of all routes at the path of a request: the one that refused it knows only its own."""
    here = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in here if isinstance(route, Route) for method in route.methods or ()})


async def _handle_bug(request: Request, error: Exception) -> Response:
    return render_error(request, ApiError(500, "internal error", code="internal_error"))


def error_handlers(routes: Sequence[BaseRoute]) -> dict[int | type[Exception], Handler]:
    """Return the exception handlers of an app with these routes."""
    http = partial(_handle_http_error, routes=routes)
    return {
        PenstockError: _handle_penstock_error,
        RequestValidationError: _handle_invalid_value,
        HTTPException: http,
        Exception: _handle_bug,
    }
