import asyncio
import gc
import re
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from penstock.config.settings import GuardSettings
from penstock.ingest.http import protocol
from penstock.ingest.http.protocol import MAX_JOINED_BYTES, GuardedProtocol, JoiningTransport, make_guarded_protocol

GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"


class KeptTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


async def test_what_is_written_in_one_turn_goes_out_together_and_in_order() -> None:
    kept = KeptTransport()
    joining = JoiningTransport(kept, asyncio.get_running_loop())
    joining.write(b"a")
    joining.write(bytearray(b"b"))
    assert kept.written == []
    await asyncio.sleep(0)
    joining.write(b"c")
    await asyncio.sleep(0)
    assert kept.written == [b"ab", b"c"]


async def test_a_turn_holds_back_little() -> None:
    kept = KeptTransport()
    joining = JoiningTransport(kept, asyncio.get_running_loop())
    joining.write(b"a")
    joining.write(bytes(MAX_JOINED_BYTES))
    assert len(kept.written) == 1
    joining.write(b"b")
    await asyncio.sleep(0)
    assert kept.written[1:] == [b"b"]


async def test_a_connection_is_closed_behind_what_was_written_and_aborted_without_it() -> None:
    closed, aborted = KeptTransport(), KeptTransport()
    for kept in (closed, aborted):
        joining = JoiningTransport(kept, asyncio.get_running_loop())
        joining.write(b"a")
        joining.close() if kept is closed else joining.abort()
        await asyncio.sleep(0)
    assert closed.written == [b"a"]
    assert aborted.written == []


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop that a gateway has."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


class Server:
    """An application on a port, on the event loop of the test."""

    def __init__(self, **limits: Any) -> None:
        self.state, self.made, self.clients = ServerState(), list[GuardedProtocol](), list[Client]()
        self.kind: Any = make_guarded_protocol(GuardSettings(**limits))
        self.config = uvicorn.Config(self.answer, interface="asgi3", lifespan="off", log_config=None)
        self.may_answer = asyncio.Event()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the path; `early`: before the body is read, `late`: when it is let, `large`: much."""
        name = scope["path"].removeprefix("/")
        while name != "early" and (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
        if name == "late":
            await self.may_answer.wait()
        body = name.encode() * (200_000 if name == "large" else 1)
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        await send({**start, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    def make(self) -> GuardedProtocol:
        made: GuardedProtocol = self.kind(self.config, self.state, {})
        self.made.append(made)
        return made

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Server"]:
        loop = asyncio.get_running_loop()
        self.config.load()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        self.port = listener.getsockname()[1]
        server = await loop.create_server(self.make, sock=listener)
        try:
            yield self
        finally:
            server.close()
            for client in self.clients:
                client.writer.transport.abort()
            await wait_until(lambda: not self.state.connections)

    async def connect(self, sent: bytes = b"") -> "Client":
        num = len(self.made)
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.connect(("127.0.0.1", self.port))
        client = Client(*await asyncio.open_connection(sock=own, limit=64))
        client.writer.write(sent)
        await wait_until(lambda: len(self.made) > num)
        client.protocol = self.made[-1]
        self.clients.append(client)
        return client


class Client:
    protocol: GuardedProtocol

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read_statuses(self) -> list[int]:
        """Return the status of each answer until the end."""
        got = await self.reader.read(-1)
        return [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


@on_uvloop
async def test_an_idle_connection_whose_client_takes_nothing_gives_its_place_after_a_moment() -> None:
    async with Server(max_connections=2).listen() as server:
        silent = [await server.connect(GET % b"large") for _ in range(2)]
        await wait_until(lambda: server.state.total_requests == 2)
        for one in silent:
            assert one.protocol.transport.get_write_buffer_size(), "its client has not taken all"
        others = [await server.connect() for _ in range(2)]
        await wait_until(lambda: len(server.state.connections) == 2)  # by default a reader may stand still for a minute
        assert [other.protocol in server.state.connections for other in others] == [True, True]


@on_uvloop
async def test_the_time_of_a_reader_goes_on_when_its_connection_is_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    async with Server(max_connections=1).listen() as server:
        slow = await server.connect(GET % b"large")
        await wait_until(lambda: server.state.total_requests == 1)
        await server.connect()
        slow.protocol.resume_writing()  # as when it takes something, and then nothing more
        await wait_until(lambda: slow.protocol not in server.state.connections)


@on_uvloop
async def test_a_connection_is_idle_when_the_body_of_an_answered_request_is_complete() -> None:
    async with Server(max_connections=1, body_s=600).listen() as server:
        client = await server.connect(POST % b"early" + b"12")
        assert await client.reader.readuntil(b"early")
        assert not server.kind.idle
        assert await (await server.connect()).read_statuses() == [503]
        client.writer.write(b"345" + GET % b"next")
        await client.reader.readuntil(b"next")
        assert list(server.kind.idle) == [client.protocol]


@on_uvloop
async def test_a_body_that_never_ends_keeps_no_connection_that_is_answered() -> None:
    async with Server(body_s=0.1).listen() as server:
        assert await (await server.connect(POST % b"early" + b"12")).read_statuses() == [200]


@pytest.mark.parametrize(
    ("bad", "statuses"),
    [
        (b"NONSENSE\r\n\r\n", [200, 200, 400]),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", [200, 200, 400]),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", [200, 200, 431]),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", [200, 200, 400]),
    ],
    ids=["no HTTP", "two hosts", "a header too long", "a body that is none"],
)
@on_uvloop
async def test_requests_before_a_bad_one_are_answered_first(bad: bytes, statuses: list[int]) -> None:
    async with Server().listen() as server:
        client = await server.connect(GET % b"late" + POST % b"second" + b"12345" + bad + b"more")
        await wait_until(lambda: client.protocol._refusal is not None)
        server.may_answer.set()
        assert await client.read_statuses() == statuses


@pytest.mark.parametrize("before", [GET % b"first", POST % b"first" + b"12345"], ids=["no body", "a body"])
@on_uvloop
async def test_a_header_that_comes_with_the_request_before_it_is_counted_at_once(before: bytes) -> None:
    async with Server().listen() as server:
        fits = await server.connect(before + b"GET /next HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 32000)
        assert await fits.reader.readuntil(b"first")
        assert fits.protocol._refusal is None
        client = await server.connect(before + b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 33000)
        assert await client.read_statuses() == [200, 431]


@on_uvloop
async def test_a_page_can_read_why_a_connection_is_refused() -> None:
    for origins, header in (
        ("", None),
        ("*", b"*"),
        ("https://a", b"https://a"),
        ("https://a,https://b", b"https://b"),
    ):
        async with Server(origins=origins).listen() as server:
            client = await server.connect(GET.replace(b"host: x", b"host: x\r\nhost: x\r\norigin: https://b") % b"")
            got = await client.reader.read(-1)
        granted = re.findall(rb"access-control-allow-origin: (\S+)", got)
        assert granted == ([header] if header and header != b"https://a" else []), "another page's"


@on_uvloop
async def test_a_request_whose_own_body_is_bad_is_refused_at_once() -> None:
    async with Server().listen() as server:
        chunked = b"POST /late HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
        client = await server.connect(chunked + b"zz\r\n")
        assert await client.read_statuses() == [400]


@on_uvloop
async def test_a_connection_that_is_closed_is_freed_without_the_garbage_collector() -> None:
    async with Server().listen() as server:
        gc.disable()
        try:
            for _ in range(2):
                client = await server.connect(GET % b"a")
                await client.reader.readuntil(b"a")
                client.writer.close()
            await wait_until(lambda: not server.state.connections and not server.state.tasks)
            left = [weakref.ref(one) for one in server.made]
            server.made.clear()
            server.clients.clear()
            del client
            await wait_until(lambda: all(one() is None for one in left))
        finally:
            gc.enable()
