"""The connection under the gateway: limits what uvicorn does not, and frames requests and answers as HTTP says.

Uvicorn's parser bounds neither the size of headers nor the time they take, and a client that does not read keeps its
answer forever. Here a connection costs bounded memory and bounded time outside of a request's body, which `guard`
limits. Bytes that are not HTTP are answered here too, with the same error body as any other error.

A connection is idle from its beginning, or from the end of its last request and answer, until the first byte of a
request. An idle connection is closed without a word: after its time, or because another client needs its place. A
request that is refused is the last one of its connection, and those before it are answered first.
"""

import asyncio
import fcntl
import logging
import re
import select
import socket
import struct
import termios
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.config.settings import GuardSettings
from penstock.ingest.errors import ApiError

LINGER_S = 1.0
"""How long a refused client may go on sending, so that it gets to read the answer. Its bytes are dropped."""
UNREAD_KEY = "penstock.has_unread"
"""In the scope of a request: returns whether bytes of the connection have come that the application has not read."""
MAX_HEADER_KB, MAX_HEADERS = 32, 100
"""The most that request line and headers together may have, and the most header lines."""
MAX_JOINED_BYTES = 32 * 1024
"""The most bytes that a connection holds back until the end of a turn of the event loop."""


class JoiningTransport:
    """Sends what is written within a turn of the event loop in one call. A system call costs as much as all other
    work for an event. The wrapped transport limits what waits for a client, as before.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
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

    def close(self) -> None:
        """Send what waits, and close the connection."""
        self.flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes were written that the kernel has not taken yet."""
        return self._num_waiting_bytes + self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped transport has of everything else."""
        return getattr(self._transport, name)


_ABSOLUTE_PATTERN = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
"""The beginning of a URL that names the server too."""


class _Refused(Exception):
    """Ends the parser's work."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    guard: GuardSettings
    """Set in a subclass for each server, by `make_guarded_protocol`."""
    idle: "dict[GuardedProtocol, None]"
    """The server's idle connections: the one that is idle for the longest time comes first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaits_headers = False
        """Whether a request has begun whose headers are not complete."""
        self._is_offer = False
        """Whether the parser skips what follows, as the request that it reads offers to change the protocol."""
        self._num_header_bytes = 0
        """Bytes of the headers that are complete."""
        self._num_bare_bytes = 0
        """Bytes since the last headers or body bytes: what the parser may have to keep."""
        self._num_body_bytes = 0
        """Body bytes among those that came last, since the last headers."""
        self._has_ended = False
        """Whether a request ended among the bytes that came last."""
        self._refusal: ApiError | None = None
        """Why nothing more is read. It is sent when the requests before it are answered."""
        self._is_refused = False
        """Whether the refusal was sent."""
        self._parse_error: ApiError | None = None
        """Why a callback of the parser refuses the request."""
        self._running: RequestResponseCycle | None = None
        """The request that was begun last. `cycle` is the one that came last, which may wait behind it."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._cut_timer: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the number of connections: one too many takes the place of an idle one."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))
        if len(self.connections) > self.guard.max_connections and not self._take_idle_place():
            self._refuse_connection(
                ApiError(503, "too many connections", code="unavailable", headers={"Retry-After": "1"})
            )
        else:
            self._begin_idling()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and end the requests of a connection."""
        self.idle.pop(self, None)
        self._unset_keepalive_if_required()
        self._stop_header_timer()
        self._stop_cut_timer()
        self._end_cycles()
        super().connection_lost(exc)
        # A scope has a method of this object: without the references to it memory is free at once.
        self.scope = self.cycle = self._running = None  # type: ignore[assignment]

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
        self._num_body_bytes, self._has_ended = 0, False
        self._parse(memoryview(data))
        if self._has_ended and self._awaits_headers:  # what follows the request that ended is kept
            end = data.rfind(b"\r\n\r\n")
            self._num_bare_bytes = max(0, len(data) - (end + 4 if end >= 0 else 0) - self._num_body_bytes)
        if self._num_bare_bytes > MAX_HEADER_KB * 1024:
            self._refuse_connection(self._headers_too_large())
        elif self._awaits_headers and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.guard.headers_s, self._on_headers_late)

    def _parse(self, data: memoryview) -> None:
        """Parse bytes. An offer to change the protocol is ignored (RFC 9110, 7.8).

        The parser takes what follows such an offer for the other protocol, the body too. So a new parser reads the
        request again without the offer, and then what follows.
        """
        waiting = [data]
        while waiting and self._refusal is None:
            data = waiting.pop()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                waiting += [data[offer.args[0] :], memoryview(self._encode_head())]
                self._is_offer = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")

    def _encode_head(self) -> bytes:
        """Return the head of the request that was read last, without its offer to change the protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def pause_writing(self) -> None:
        """Limit the time for which a client may stop reading."""
        super().pause_writing()
        self._cut_if_stalled()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_cut_timer()

    # The parser.

    def on_message_begin(self) -> None:
        """End the idle time, and count the headers of a new request."""
        self.idle.pop(self, None)
        self._unset_keepalive_if_required()
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
        if len(self.headers) >= MAX_HEADERS:
            self._refuse_head(self._headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit for headers, and begin the request unless it has to be read again."""
        self._awaits_headers, self._num_bare_bytes, self._num_body_bytes = False, 0, 0
        self._stop_header_timer()
        self._check_head()
        self._is_offer = self.parser.should_upgrade()
        if not self._is_offer:
            self.scope[UNREAD_KEY] = self._has_unread_body  # type: ignore[literal-required]
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on some of the body."""
        self._num_bare_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete, unless it has to be read again."""
        self._num_bare_bytes, self._has_ended = 0, True
        if self._is_offer:
            return
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._begin_idling()

    def on_response_complete(self) -> None:
        """Limit the time for the client to read the end of the answer, to send the rest of its body, or to idle."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_if_stalled()
        elif self._refusal is not None:
            if not self._is_answering():
                self._send_refusal(self._refusal)
        elif self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            if self.cycle.more_body:
                self.timeout_keep_alive_task = self.loop.call_later(self.guard.body_s, self.close_idle)
            elif not self._awaits_headers:  # else the next request has begun
                self._begin_idling()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or exceeds a limit."""
        self._refuse_connection(self._parse_error or ApiError(400, msg, code="invalid_http"))

    def _check_head(self) -> None:
        """Refuse a head that no client may send, and make of each URL the path that it has here (RFC 9112, 3.2)."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        hosts = [value for name, value in self.headers if name == b"host"]
        if version not in {"1.0", "1.1"} or method == b"CONNECT":
            self._refuse_head(ApiError(400, "this is a server of HTTP/1.1, and no proxy", code="invalid_http"))
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._refuse_head(ApiError(400, "a request has one Host", code="invalid_http"))
        if version == "1.0":
            self.expect_100_continue = False
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                self._refuse_head(ApiError(400, "HTTP/1.0 has no Transfer-Encoding", code="invalid_http"))
        if (absolute := _ABSOLUTE_PATTERN.match(self.url)) is not None:
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", absolute[1])]
            self.url = b"/" + self.url[absolute.end() :].removeprefix(b"/")
        elif self.url == b"*" and method == b"OPTIONS":
            self.url = b"/"

    def _refuse_head(self, error: ApiError) -> None:
        """End the parser's work with an error."""
        self._parse_error = error
        raise _Refused

    # Idle connections.

    def _begin_idling(self) -> None:
        self._unset_keepalive_if_required()
        self.idle[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(self.guard.idle_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request has come while this process stood still."""
        if self.can_read():
            self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.timeout_keep_alive_handler)
        else:
            self.close_idle()

    def close_idle(self) -> None:
        """Close the connection, which is idle."""
        self.idle.pop(self, None)
        self.transport.close()
        self._cut_if_stalled()

    def _take_idle_place(self) -> bool:
        """Close the connection that is idle for the longest time; return whether there was one."""
        found = next((one for one in self.idle if not one.can_read()), None)
        if found is not None:
            found.close_idle()
            found.cut_soon()
        return found is not None

    def can_read(self) -> bool:
        """Return whether bytes, or the end, of this connection wait in the socket."""
        descriptor = self._find_descriptor()
        poll = select.poll()
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def _has_unread_body(self) -> bool:
        """Return whether more of the running request has come than the application has read."""
        running = self._running
        return running is not None and (bool(running.body) or not running.more_body or self.can_read())

    def _find_descriptor(self) -> int:
        """Return the descriptor of the connection's socket, or -1."""
        found = self.transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    # Refusing.

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_KB * 1024:
            self._refuse_head(self._headers_too_large())

    def _headers_too_large(self) -> ApiError:
        message = f"request line and headers may have {MAX_HEADER_KB} KB and {MAX_HEADERS} lines"
        return ApiError(431, message, code="headers_too_large")

    def _on_headers_late(self) -> None:
        self._header_timer = None
        if self._is_answering() or self.can_read():  # first things first
            wait_s = self.guard.headers_s if self._is_answering() else LINGER_S
            self._header_timer = self.loop.call_later(wait_s, self._on_headers_late)
        elif not self.transport.is_closing():
            message = f"no complete request within {self.guard.headers_s:g} s"
            self._refuse_connection(ApiError(408, message, code="request_timeout"))

    def _refuse_connection(self, error: ApiError) -> None:
        """Stop reading, answer the requests before the one that is bad, send an error, and close."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._stop_header_timer()
        has_bad_body = self.cycle is not None and self.cycle.more_body and self.cycle.scope is self.scope
        if has_bad_body and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        if not self._is_answering() or (has_bad_body and self._running is self.cycle):
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        self.idle.pop(self, None)
        self._unset_keepalive_if_required()
        is_mid_answer = self._running is not None and self._is_answering() and self._running.response_started
        self._end_cycles()
        self.flow.resume_reading()
        if not is_mid_answer:
            self.transport.write(encode_response(error, self._find_allowed_origin()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.cut_soon()
        self._is_refused = True

    def _find_allowed_origin(self) -> str | None:
        """Return the origin whose page may read a refusal. Without a head it is the only one that is allowed."""
        allowed = self.guard.list_origins()
        if "*" in allowed or not self.headers:
            return "*" if "*" in allowed else allowed[0] if len(allowed) == 1 else None
        sent = [value.decode("latin-1") for name, value in self.headers if name == b"origin"]
        return sent[0] if sent and sent[0] in allowed else None

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, partial(_run_without_chunks, app, cycle) if is_old else app)

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

    def _cut_if_stalled(self) -> None:
        """Cut the connection if its client takes nothing of what was sent for too long."""
        self._stop_cut_timer()
        self._cut_timer = self.loop.call_later(self.guard.stalled_s, self._on_stalled, self._count_unsent())

    def cut_soon(self) -> None:
        """Give the client a moment to take what was sent, and cut the connection."""
        self._stop_cut_timer()
        self._cut_timer = self.loop.call_later(LINGER_S, self._cut_connection)

    def _on_stalled(self, num_unsent: int) -> None:
        if self._count_unsent() < num_unsent:
            self._cut_if_stalled()
        else:
            self._cut_connection()

    def _count_unsent(self) -> int:
        """Return how many bytes the client has not received of what was sent."""
        if (descriptor := self._find_descriptor()) < 0:
            return 0
        (num_queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return int(num_queued) + self.transport.get_write_buffer_size()

    def _cut_connection(self) -> None:
        """Close at once; the kernel drops what the client did not read. It takes no further descriptor."""
        try:
            if (descriptor := self._find_descriptor()) >= 0:
                own = socket.socket(fileno=descriptor)
                try:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                finally:
                    own.detach()
        finally:
            self.transport.abort()

    def _stop_cut_timer(self) -> None:
        if self._cut_timer is not None and not self._is_refused:
            self._cut_timer.cancel()
            self._cut_timer = None


async def _run_without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run an application for a client of HTTP/1.0. It knows no chunks: an answer without a length ends with the
    connection.
    """
    has_length = False

    async def send_unframed(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unframed)


def encode_response(error: ApiError, origin: str | None = None) -> bytes:
    """Return an error as a whole HTTP response, which pages of `origin` may read."""
    body = error.body.model_dump_json().encode()
    try:
        phrase = HTTPStatus(error.status).phrase
    except ValueError:
        phrase = "Error"
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    if origin is not None:
        headers |= {"access-control-allow-origin": origin, "vary": "Origin"}
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def make_guarded_protocol(settings: GuardSettings) -> type[asyncio.Protocol]:
    """Return the protocol with these limits, as `uvicorn.Config(http=…)` takes it."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": settings, "idle": {}})


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Keep clients that send rubbish from filling the log."""
    return record.getMessage() != "Invalid HTTP request received."
