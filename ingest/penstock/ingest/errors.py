"""Errors as the OpenAI SDKs expect them: `{"error": {"message", "type", "param", "code"}}`, with an HTTP status."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from penstock.errors import (
    BusError,
    PenstockError,
    PromptTooLong,
    RequestError,
    StorageUnavailable,
    StreamDiverged,
    StreamError,
    StreamExpired,
    StreamTimeout,
    TenantKeyMissing,
    TopicsMissing,
)

STATUS_BY_CODE: Mapping[str, int] = {
    "invalid_request": 400,
    "unsupported_version": 400,
    "unsupported_schema": 400,
    "grammar_failed": 500,
    "unknown_model": 404,
    "request_too_large": 413,
    "request_lost": 503,
    "id_conflict": 409,
    "cancelled": 409,
    "deadline_exceeded": 504,
    "out_of_memory": 500,
    "store_unreachable": 503,
    "picture_gone": 503,
    "content_erased": 410,
    "answer_interrupted": 502,
    "attempts_exhausted": 500,
    "model_error": 500,
    "internal_error": 500,
}
"""HTTP status for each code of a `RequestError`."""
TYPE_BY_STATUS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
"""`type` for each HTTP status; any other status is a `server_error`."""
MAX_NAMED = 10
"""The most models that a 404 names."""
NO_RETRY_STATUSES = (409, 504)
"""Statuses that the SDKs would retry by themselves, although a retry gives the same answer or repeats unwanted work."""


class ErrorDetail(BaseModel):
    """The error, for programs (`type`, `code`, `param`) and for people (`message`)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class ApiError(PenstockError):
    """An error that is sent as an HTTP answer. `headers` are sent with it, such as `Retry-After`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {**(headers or {}), **({"x-should-retry": "false"} if status in NO_RETRY_STATUSES else {})}

    @property
    def body(self) -> ErrorBody:
        """The body to send."""
        kind = TYPE_BY_STATUS.get(self.status, "server_error")
        return ErrorBody(error=ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code))


def not_found_error(what: str, name: str) -> ApiError:
    """Return a 404. It is the same for an object that does not exist and for one of another tenant."""
    return ApiError(404, f"no such {what}: {name!r}", code=f"{what}_not_found")


def unknown_model_error(name: str, served: Iterable[str]) -> ApiError:
    """Return a 404 for a model that no worker serves, with the names of those that are."""
    names = sorted({*served})
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    listed = f"Served here: {', '.join(map(repr, names[:MAX_NAMED]))}{more}." if names else "No model is served now."
    message = f"The model {name[:256]!r} does not exist or you do not have access to it. {listed}"
    return ApiError(404, message, code="model_not_found", param="model")


def to_api_error(error: PenstockError, prompt: str | None = None) -> ApiError:
    """Return the answer to one of Penstock's errors. `prompt` is the parameter that has the prompt, if known."""
    match error:
        case ApiError():
            found = error
        case PromptTooLong():  # by this code clients shorten a chat, or go to a model with more context
            found = ApiError(400, str(error), param=prompt, code="context_length_exceeded")
        case RequestError():
            found = ApiError(STATUS_BY_CODE.get(error.code, 500), str(error), code=error.code)
        case TenantKeyMissing():
            found = ApiError(503, "the key of this tenant is not here now", code="tenant_key_missing")
        case StreamExpired():
            found = ApiError(404, str(error), code="stream_expired")
        case StreamDiverged():
            found = ApiError(500, str(error), code="stream_diverged")
        case StreamTimeout():  # it goes on: asking anew would do the work twice
            found = ApiError(504, f"{error}; it goes on", code="timeout")
        case TopicsMissing():
            found = ApiError(503, str(error), code="topics_missing", headers={"Retry-After": "60"})
        case BusError() | StreamError() | StorageUnavailable():
            message = str(error) if isinstance(error, StorageUnavailable) else "the pipeline cannot be reached now"
            found = ApiError(503, message, code="unavailable", headers={"Retry-After": "1"})
        case _:
            found = ApiError(500, "internal error", code="internal_error")
    return found
