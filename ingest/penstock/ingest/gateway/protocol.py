"""The connection under the gateway: limits what uvicorn does not.

Its parser bounds neither the size of headers nor the time they take, and a client that does not read keeps its
answer forever. Here a connection costs bounded memory and bounded time outside of a request's body, which `guard`
limits. What is not HTTP is answered here too, with the same error body as any other error.
"""

import asyncio
import logging
import socket
import struct
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.config.settings import GuardSettings
from penstock.ingest.errors import ApiError

LINGER_S = 1.0
"""How long a refused client may go on sending, so that it gets to read the answer. What it sends is dropped."""


MAX_JOINED_BYTES = 32 * 1024
"""What a connection holds back at most until the end of a turn of the event loop."""


class JoiningTransport(asyncio.Transport):
    """Sends what is written within a turn of the event loop in one call, as each call of the system costs as much as
    all else that is done for an event. The wrapped transport limits what waits for a client, as before.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._waiting: list[bytes | bytearray | memoryview] = []
        self._num_waiting_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes by the end of this turn."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)
        if self._num_waiting_bytes >= MAX_JOINED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what waits now."""
        waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))

    def write_eof(self) -> None:
        """Send what waits, and that nothing follows."""
        self.flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """Return whether `write_eof` is possible."""
        return self._transport.can_write_eof()

    def close(self) -> None:
        """Send what waits, and close the connection."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once; what waits is dropped."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Receive nothing for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the wrapped transport says of the connection."""
        return self._transport.get_extra_info(name, default)


class _Refused(Exception):
    """Ends the parser's work."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    guard: GuardSettings
    """Set in a subclass for each server, by `make_guarded_protocol`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaits_headers = True
        self._num_header_bytes = 0
        """Bytes of the headers that are complete."""
        self._num_bare_bytes = 0
        """Bytes since the last headers or body bytes: what the parser may have to keep."""
        self._refusal: ApiError | None = None
        self._parse_error: ApiError | None = None
        """Why a callback of the parser refuses the request."""
        self._running: RequestResponseCycle | None = None
        """The request that was begun last. `cycle` is the one that came last, which may wait behind it."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._cut_timer: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the time until a client's first request, and the number of connections."""
        super().connection_made(JoiningTransport(transport, self.loop))
        self._header_timer = self.loop.call_later(self.guard.headers_s, self._on_headers_late)
        if len(self.connections) > self.guard.max_connections:
            self._refuse_connection(
                ApiError(503, "too many connections", code="unavailable", headers={"Retry-After": "1"})
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and end the requests of a connection."""
        self._stop_header_timer()
        self._stop_cut_timer()
        self._end_cycles()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Send what waits for the end of this turn: the wrapped transport closes itself behind this."""
        if isinstance(self.transport, JoiningTransport):
            self.transport.flush()
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and refuse headers that are too large."""
        if self._refusal is not None:
            return
        self._num_bare_bytes += len(data)
        super().data_received(data)
        if self._num_bare_bytes > self.guard.max_header_kb * 1024:
            self._refuse_connection(self._headers_too_large())
        elif self._awaits_headers and self._header_timer is None:  # those of a further request
            self._header_timer = self.loop.call_later(self.guard.headers_s, self._on_headers_late)

    def pause_writing(self) -> None:
        """Limit the time for which a client may stop reading."""
        super().pause_writing()
        self._cut_after(self.guard.stalled_s)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop_cut_timer()

    # The parser.

    def on_message_begin(self) -> None:
        """Count the headers of a new request."""
        super().on_message_begin()
        self._awaits_headers, self._num_header_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request line."""
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Trailers of a chunked body are dropped."""
        self._count_header_bytes(len(name) + len(value))
        if not self._awaits_headers:
            return
        if len(self.headers) >= self.guard.max_headers:
            self._parse_error = self._headers_too_large()
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit for headers."""
        self._awaits_headers, self._num_bare_bytes = False, 0
        self._stop_header_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on some of the body."""
        self._num_bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one begins with its headers."""
        self._awaits_headers, self._num_bare_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the client to read the end of the answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_after(self.guard.stalled_s)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; limit the time for what was sent and not read."""
        super().timeout_keep_alive_handler()
        self._cut_after(self.guard.stalled_s)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or exceeds a limit."""
        self._refuse_connection(self._parse_error or ApiError(400, msg, code="invalid_http"))

    # Refusing.

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.guard.max_header_kb * 1024:
            self._parse_error = self._headers_too_large()
            raise _Refused

    def _headers_too_large(self) -> ApiError:
        limits = f"{self.guard.max_header_kb} KB and {self.guard.max_headers} lines"
        return ApiError(431, f"request line and headers may have {limits}", code="headers_too_large")

    def _on_headers_late(self) -> None:
        self._header_timer = None
        if self._is_answering():
            self._header_timer = self.loop.call_later(self.guard.headers_s, self._on_headers_late)  # first things first
        elif not self.transport.is_closing():
            message = f"no complete request within {self.guard.headers_s:g} s"
            self._refuse_connection(ApiError(408, message, code="request_timeout"))

    def _refuse_connection(self, error: ApiError) -> None:
        """Send an error, stop reading, and close."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._stop_header_timer()
        is_mid_answer = self._running is not None and self._is_answering() and self._running.response_started
        self._end_cycles()
        self.flow.resume_reading()
        if not is_mid_answer:
            self.transport.write(encode_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._cut_after(LINGER_S)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _end_cycles(self) -> None:
        """Tell the requests that run or wait that their client is gone."""
        cycles = [cycle for cycle, _ in self.pipeline] + ([self._running] if self._running is not None else [])
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()

    # Timers.

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cut_after(self, seconds: float) -> None:
        self._stop_cut_timer()
        self._cut_timer = self.loop.call_later(seconds, self._cut_connection)

    def _cut_connection(self) -> None:
        """Close at once; the kernel drops what the client did not read. It takes no further descriptor."""
        try:
            if (found := self.transport.get_extra_info("socket")) is not None and found.fileno() >= 0:
                own = socket.socket(fileno=found.fileno())
                try:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                finally:
                    own.detach()
        finally:
            self.transport.abort()

    def _stop_cut_timer(self) -> None:
        if self._cut_timer is not None and self._refusal is None:
            self._cut_timer.cancel()
            self._cut_timer = None


def encode_response(error: ApiError) -> bytes:
    """Return an error as a whole HTTP response."""
    body = error.body.model_dump_json().encode()
    try:
        phrase = HTTPStatus(error.status).phrase
    except ValueError:
        phrase = "Error"
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def make_guarded_protocol(settings: GuardSettings) -> type[asyncio.Protocol]:
    """Return the protocol with these limits, as `uvicorn.Config(http=…)` takes it."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": settings})


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Keep clients that send rubbish from filling the log."""
    return record.getMessage() != "Invalid HTTP request received."
