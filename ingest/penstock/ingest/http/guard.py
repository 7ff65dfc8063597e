"""The ASGI layer around the gateway: limits the size and duration of bodies, and which paths are possible.

It is the outermost layer, so what it refuses costs nothing further. Bodies are counted as they arrive, whatever
their `Content-Length` is. A client may get its answer before all of its body has arrived. Then the guard reads on for a
moment, so that the client sees the answer, and closes the connection.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.settings import GuardSettings, is_loopback
from penstock.errors import InternalError, is_failure
from penstock.ingest.endpoints import make_error_body
from penstock.ingest.errors import ApiError
from penstock.ingest.http.metrics import REFUSAL_KEY
from penstock.ingest.http.protocol import LINGER_S, UNREAD_KEY

MB = 2**20
FORM_BYTES = MB
"""The most that the form around an uploaded file may have."""
DRAIN_S = 0.05
"""How long to read what is on its way of a body that is not needed any more."""
_PATH_PATTERN = re.compile(r"/[A-Za-z0-9._:~@+,=/-]*")
"""The characters of ids, files and model names: no line breaks, and nothing that a shell or a store interprets."""
_CODING_HEADERS = (b"content-encoding", b"transfer-encoding")
HOST_NAMES = frozenset({
    "host.docker.internal", "gateway.docker.internal", "host.containers.internal", "host.lima.internal",
    "host.rancher-desktop.internal", "host.orb.internal", "host.minikube.internal", "host.k3d.internal",
})  # fmt: skip
"""Names of the host in containers and machines of Docker, Podman, Lima (also Colima), Rancher Desktop, OrbStack,
minikube and k3d. Nobody else can own a name that ends with `.internal`. (`*.orb.local` names containers, and any
machine of the network may answer to a name that ends with `.local`.)"""
_PORT_PATTERN = re.compile(r":\d*$")


class GuardMiddleware:
    """Limits around an ASGI application."""

    def __init__(
        self, app: ASGIApp, settings: GuardSettings, *, max_file_bytes: int = 0, only_local: bool = False
    ) -> None:
        """Wrap `app`, which takes files of `max_file_bytes`.

        `only_local`: no key is needed, so pages of other sites and other host names are refused.
        """
        self._app, self._settings, self._only_local = app, settings, only_local
        self._origins = settings.list_origins()
        self._max_body_bytes, self._max_form_bytes = int(settings.max_body_mb * MB), max_file_bytes + FORM_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        is_file = scope["method"] == "POST" and path.rstrip("/") == "/v1/files"
        max_bytes = self._max_form_bytes if is_file else self._max_body_bytes
        request = _GuardedRequest(scope, receive, send, max_bytes, self._settings)
        refusal = _check_path(path) or request.check_coding() or request.check_length()
        if self._only_local and refusal is None:
            refusal = _check_origin(dict(scope["headers"]), self._origins)
        if refusal is not None:
            request.refusal = refusal
            scope[REFUSAL_KEY] = refusal.code
            await request.send_refusal()
            return
        try:
            await self._app(scope, request.receive, request.send)
        except BaseException as error:
            if isinstance(error, Exception) or not is_failure(error):
                raise
            raise InternalError(f"{type(error).__name__}: {error}") from error  # what answers it knows `Exception`s


def _check_path(path: str) -> ApiError | None:
    if _PATH_PATTERN.fullmatch(path) is None or ".." in path.split("/") or "." in path.split("/"):
        return ApiError(404, "Unknown request URL.", code="unknown_url")
    return None


def _check_origin(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> ApiError | None:
    """Refuse a page of another site, and a foreign name that resolves to this machine (DNS rebinding)."""
    names = [headers.get(b"host", b"localhost").decode("latin-1")]
    if b"origin" in headers and (origin := headers[b"origin"].decode("latin-1")) not in allowed and "*" not in allowed:
        names.append(origin.partition("://")[2])
    if all(is_this_machine(_PORT_PATTERN.sub("", name).strip("[]")) for name in names):
        return None
    message = (
        "a gateway without keys answers to this machine's names and pages alone: set PENSTOCK_GATEWAY_KEYS to keys, "
        "or to 'open' if all names may reach it; for a page of another origin PENSTOCK_GATEWAY_ORIGINS"
    )
    return ApiError(403, message, code="host_not_allowed")


@lru_cache(64)
def is_this_machine(host: str) -> bool:
    """Return whether a name in `Host` or `Origin` can only mean this machine, seen from itself or a container on it."""
    return is_loopback(host.lower()) or host.lower() in HOST_NAMES


class _GuardedRequest:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int, settings: GuardSettings) -> None:
        headers = dict(scope["headers"])
        self._path: str = scope["path"]
        self._receive, self._send, self._max_bytes, self._settings = receive, send, max_bytes, settings
        values = ",".join(value.decode("latin-1") for name, value in scope["headers"] if name in _CODING_HEADERS)
        codings = [coding for one in values.lower().split(",") if (coding := one.strip()) not in {"", "identity"}]
        self._coding = "" if codings in ([], ["chunked"]) else ", ".join(codings)
        self._length: bytes | None = headers.get(b"content-length")
        self._is_complete = self._length in {None, b"0"} and b"transfer-encoding" not in headers
        # Any of several lines, as the protocol takes it.
        self._expects_continue = (b"expect", b"100-continue") in ((name, one.lower()) for name, one in scope["headers"])
        self._has_unread: Callable[[], bool] = scope.get(UNREAD_KEY, lambda: False)
        self._num_bytes = 0
        self._started_at = time.monotonic()
        self._is_answered = self._is_closing = False
        self.refusal: ApiError | None = None

    def check_coding(self) -> ApiError | None:
        """Return the refusal of a body that is compressed, or None."""
        if not self._coding or self._is_complete:
            return None
        message = f"the body has the encoding {self._coding[:64]!r}: send it as it is, without compression"
        return ApiError(415, message, code="unsupported_encoding")

    def check_length(self) -> ApiError | None:
        """Return the refusal of a body that is too large by its header, or None."""
        is_too_long = self._length is not None and (len(self._length) > 15 or int(self._length) > self._max_bytes)
        return self._too_large_error() if is_too_long else None

    async def receive(self) -> Message:
        """Receive as the application does. Raises `ApiError` for a body that is too large or too slow."""
        if self._is_complete:
            return await self._receive()
        self._expects_continue = False
        allowed_s = self._settings.body_s + self._num_bytes / (self._settings.body_kb_per_s * 1024)
        message, wait_s = None, self._started_at + allowed_s - time.monotonic()
        while message is None:
            try:
                async with asyncio.timeout(wait_s):
                    message = await self._receive()
            except TimeoutError:
                if not self._has_unread():
                    self.refusal = ApiError(408, "the body comes too slowly", code="request_timeout")
                    raise self.refusal from None
                wait_s = LINGER_S  # It has come while this process stood still, and is read by then.
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            self.refusal = self._too_large_error()
            raise self.refusal
        return message

    async def send(self, message: Message) -> None:
        """Send as the application does. Once the request is refused, the refusal is sent instead."""
        if self.refusal is not None and not self._is_answered:
            await self.send_refusal()
            return
        if self._is_closing and self.refusal is not None:
            return
        if message["type"] == "http.response.start":
            self._is_answered = True
            if not self._is_complete:
                await self._drop_body(DRAIN_S)
            if not self._is_complete:
                self._is_closing = True
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        elif self._is_closing and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drop_body(LINGER_S)
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def send_refusal(self) -> None:
        """Send the error, and end the connection."""
        assert self.refusal is not None
        self._is_answered = self._is_closing = True
        body = make_error_body(self._path, self.refusal).model_dump_json().encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **self.refusal.headers}
        if not self._is_complete:
            headers["connection"] = "close"
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": self.refusal.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self._drop_body(LINGER_S)
        await self._send({"type": "http.response.body", "body": b""})

    async def _drop_body(self, seconds: float) -> None:
        """Read the rest of the body for some seconds, and drop it."""
        if self._expects_continue:  # it has not begun to send, and will not
            return
        try:
            async with asyncio.timeout(seconds):
                while not self._is_complete:
                    message = await self._receive()
                    self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        except TimeoutError:
            pass

    def _too_large_error(self) -> ApiError:
        return ApiError(413, f"the body may have {self._max_bytes / MB:g} MB", code="request_too_large")
