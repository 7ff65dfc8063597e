"""Sends a request on to a gateway of another region, and sends its answer back as it comes.

    1  ask     the request goes there byte for byte, with the regions that it came through and the peers' secret
    2  answer  status and headers come back when the other gateway has them, then the body, piece by piece; of a stream
               whole events and comments, so that an error can follow at any time

Where no connection is made in 1, or the answer says that the request was refused before anything was written
(`REFUSED_HEADER`), it may be tried elsewhere. After any other failure it may have been accepted there: the client is
told so (504), and nobody asks again. A client that leaves closes the connection to the other gateway, which treats the
request as that of any client that left.

A crash of this gateway at any time is such a leaving. A crash of the other one ends a stream with an error behind the
last whole event, and the stream goes on after it at any gateway.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple

import httpx2
from starlette.types import Message, Scope, Send

from penstock.ingest.endpoints import make_error_body
from penstock.ingest.errors import ApiError
from penstock.ingest.regions.peers import Peers
from penstock.regions import HOPS_HEADER, PEER_HEADER, REGION_HEADER

REFUSED_HEADER = "x-penstock-refused"
"""In the answer to a peer's request: nothing of it was written here, so it may go elsewhere. Its value is the code."""
SILENT_SHARE = 2.5
"""How many times `keep_alive_s` a stream may be silent: comments come after twice this time at most."""
CONNECT_S = 2.0
"""How long a connection to a peer may take."""
_OWN_HEADERS = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer", b"upgrade",
    b"http2-settings",
})  # fmt: skip
"""They are about one connection alone."""
_UNSENT_HEADERS = _OWN_HEADERS | {
    b"host", b"content-length", b"expect", b"origin", HOPS_HEADER.encode(), PEER_HEADER.encode(),
}  # fmt: skip
"""Of a request: the client of this connection makes its own. Which origins may ask is this gateway's matter."""
_UNRETURNED_HEADERS = _OWN_HEADERS | {b"date", b"server", REGION_HEADER.encode()}


class Hop(NamedTuple):
    """A region that a request came through, and why it was sent on."""

    region: str
    why: str


class NotAccepted(Exception):
    """A region has not accepted a request, for certain, and its client was sent nothing."""

    def __init__(self, error: ApiError, answer: "tuple[Message, Message] | None" = None) -> None:
        """`answer` is what the region said, if it said anything; `error` stands for it where it did not."""
        super().__init__(str(error))
        self.error, self.answer = error, answer


def region_away_error(region: str, why: str, *, may_repeat: bool = True) -> ApiError:
    """Return the error of a request that only one region could answer. `may_repeat`: a client may ask again."""
    headers = {"Retry-After": "1"} if may_repeat else {}
    return ApiError(503 if may_repeat else 504, f"the region {region!r} {why}", code="region_away", headers=headers)


class Forwarder:
    """Sends requests of one gateway on."""

    def __init__(self, peers: Peers, secret: str, keep_alive_s: float) -> None:
        """`keep_alive_s` is that of streams' comments, which come after twice this at most."""
        self.peers, self._secret, self._silence_s = peers, secret, SILENT_SHARE * keep_alive_s
        self._is_stopping = False
        self._limits = set[asyncio.Timeout]()
        """Those of streams under way: they are over when the gateway stops."""

    def begin_stop(self) -> None:
        """Let all streams end, each with an event that says where to go on."""
        self._is_stopping = True
        for limit in [limit for limit in self._limits if not limit.expired()]:
            limit.reschedule(asyncio.get_running_loop().time())

    async def pass_on(self, region: str, why: str, hops: Iterable[Hop], scope: Scope, body: bytes, send: Send) -> None:
        """Have a region answer a request, and send its answer.

        Raises `NotAccepted`, and `httpx2.HTTPError` where it is not known whether the request was accepted. The client
        was sent nothing then.
        """
        answer = await self._ask(region, self._build_request(region, [*hops, Hop(self.peers.own, why)], scope, body))
        try:
            if (code := answer.headers.get(REFUSED_HEADER)) is not None:
                whole = {"type": "http.response.body", "body": b"".join([piece async for piece in answer.aiter_raw()])}
                error = region_away_error(region, f"has refused the request: {code}")
                raise NotAccepted(error, (_make_start(answer, region, why), whole))
            await self._return_answer(region, why, answer, scope, send)
        finally:
            await answer.aclose()

    def _build_request(self, region: str, hops: Iterable[Hop], scope: Scope, body: bytes) -> httpx2.Request:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = httpx2.URL(self.peers.find_url(region)).copy_with(raw_path=scope["raw_path"] + query)
        headers = [pair for pair in scope["headers"] if pair[0] not in _UNSENT_HEADERS]
        told = ", ".join(f"{hop.region};{hop.why}" for hop in hops)
        headers += [(HOPS_HEADER.encode(), told.encode()), (PEER_HEADER.encode(), self._secret.encode())]
        # How long an answer may take is known to whoever computes it, and `_ask` looks whether that lives.
        limits = {"connect": CONNECT_S, "read": None, "write": self._silence_s, "pool": None}
        return httpx2.Request(scope["method"], url, headers=headers, content=body, extensions={"timeout": limits})

    async def _ask(self, region: str, request: httpx2.Request) -> httpx2.Response:
        """Return the answer once it has begun. A region that says nothing is waited for while it tells its state."""
        asking = asyncio.create_task(self.peers.http.send(request, stream=True))
        try:
            while not (await asyncio.wait((asking,), timeout=self._silence_s))[0]:
                if self.peers.find_state(region) != "ready":
                    raise httpx2.ReadTimeout("it does not answer")
        except BaseException:
            asking.add_done_callback(_close_unused)
            asking.cancel()
            raise
        try:
            return asking.result()
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            message = f"cannot be reached now: {error or type(error).__name__}"
            raise NotAccepted(region_away_error(region, message)) from None

    async def _return_answer(self, region: str, why: str, answer: httpx2.Response, scope: Scope, send: Send) -> None:
        """Send an answer's status, headers and body. One that breaks off stays incomplete, or ends in an event."""
        await send(_make_start(answer, region, why))
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        rest, error, loop = b"", None, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit, aclosing(answer.aiter_raw()) as pieces:
                if is_stream:
                    self._limits.add(limit)
                try:
                    while True:
                        limit.reschedule(loop.time() + (0 if self._is_stopping and is_stream else self._silence_s))
                        if (piece := await anext(pieces, None)) is None:
                            break
                        whole, rest = split_events(rest + piece) if is_stream else (piece, b"")
                        limit.reschedule(None)  # a client that reads slowly is waited for
                        await send({"type": "http.response.body", "body": whole, "more_body": True})
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            error = region_away_error(region, "says nothing any more")
            if self._is_stopping:
                error = ApiError(503, "this gateway stops: go on after the last event's id", code="gateway_stopping")
        except httpx2.HTTPError as failure:
            error = region_away_error(region, f"broke off its answer ({failure!r}): go on after the last event's id")
        if error is None:
            await send({"type": "http.response.body", "body": rest})
        elif is_stream:
            body = make_error_body(scope["path"], error).model_dump_json()
            await send({"type": "http.response.body", "body": f"event: error\ndata: {body}\n\n".encode()})


def split_events(received: bytes) -> tuple[bytes, bytes]:
    """Return what may be sent of a stream, whole events and lines of comments, and the rest."""
    end = received.rfind(b"\n\n") + 2 if b"\n\n" in received else 0
    tail = received[end:]
    if tail.startswith((b":", b"retry:")) and tail.endswith(b"\n"):
        return received, b""
    return received[:end], tail


def _make_start(answer: httpx2.Response, region: str, why: str) -> Message:
    """Return the beginning of an answer. It says where it comes from; of several hops this gateway's was the first."""
    found = answer.headers.get(REGION_HEADER, region)
    told = f"{region}; {why}" if found.partition(";")[0] == region else f"{found}, by way of {region}"
    given = ((name.lower(), value) for name, value in answer.headers.raw)
    headers = [pair for pair in given if pair[0] not in _UNRETURNED_HEADERS]
    headers.append((REGION_HEADER.encode(), told.encode()))
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


def _close_unused(asking: "asyncio.Task[httpx2.Response]") -> None:
    """Close an answer that began in the moment in which nobody waited for it any more."""
    if not asking.cancelled() and asking.exception() is None:
        asyncio.get_running_loop().create_task(asking.result().aclose())
