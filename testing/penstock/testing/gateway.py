"""The HTTP gateway in a test's own process: the real application on an event loop of its own, asked without sockets.

    with TestPipeline(lambda prompt: "No.") as pipeline, pipeline.gateway() as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=gateway.client()) as sdk:
            assert sdk.completions.create(model="formula", prompt="Now?").choices[0].text == "No."

What belongs to the web server is not there: sockets, and what is no HTTP. Answers are streamed, and who closes an
answer before its end has left.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, RecordSettings, load_group
from penstock.ingest.gateway.app import create_app
from penstock.ingest.gateway.state import Gateway
from penstock.names import WORKERS_KEY, Pipeline
from penstock.record.live import LiveFeed
from penstock.record.log import AsyncTokenLog
from penstock.redis.client import async_redis_client, redis_client
from penstock.telemetry.meters import Meters
from penstock.testing.bus import MemoryBus
from penstock.testing.client import MemoryAsyncLog, MemoryFeed
from penstock.testing.doubles import replace_values
from penstock.testing.record import MemoryRecord, MemoryRecords

T = TypeVar("T")
Message = dict[str, Any]
URL = "http://127.0.0.1"


class TestGateway:
    """A gateway that answers. Leaving the context stops it as SIGTERM does, and raises its unexpected errors."""

    __test__ = False  # for pytest, which takes each class for tests whose name begins so

    def __init__(self, addresses: Addresses, /, meters: Meters | None = None, **settings: Mapping[str, object]) -> None:
        """`settings` are values by their field in `GatewayProcessSettings`: `batch={"look_s": 0.2}`."""
        self.url, self.app = URL, create_app(load_group(GatewayProcessSettings, **settings), addresses, meters)
        self.gateway: Gateway = self.app.state.gateway
        self.loop, self.failures = asyncio.new_event_loop(), list[BaseException]()
        self.loop.set_exception_handler(lambda _, context: self._note_failure(context.get("exception")))
        self._thread = threading.Thread(target=self.loop.run_forever, name="penstock-gateway")
        self._lifespan = self.app.router.lifespan_context(self.app)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._lifespan.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell readers to go on elsewhere, and stop."""
        try:
            self.run(self._finish_answers())
            self.run(self._lifespan.__aexit__(None, None, None))
        finally:
            self._end_loop()
        if self.failures and error is None:
            raise self.failures[0]

    async def _finish_answers(self) -> None:
        """Let streams end, wait until every answer under way has ended, and cut off the rest."""
        self.gateway.begin_stop()
        if answers := [task for task in asyncio.all_tasks() if task.get_name() == URL]:
            _, late = await asyncio.wait(answers, timeout=self.gateway.settings.gateway.stop_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _end_loop(self) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, work: Awaitable[T]) -> T:
        """Return what a coroutine returns that runs on the gateway's loop."""

        async def wait() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    def client(self, **options: Any) -> httpx2.Client:
        """Return a client of this gateway; `options` are httpx2's."""
        return httpx2.Client(transport=GatewayTransport(self), **{"base_url": self.url, "timeout": None} | options)

    def _note_failure(self, error: BaseException | None) -> None:
        if error is not None:
            self.failures.append(error)

    def send(self, scope: Message, body: bytes) -> "HttpAnswer":
        """Let the application answer a request."""
        answer = HttpAnswer(self.loop)

        async def run() -> None:
            try:
                await answer_request(self.app, scope, body, answer.left, answer.messages.put)
            except Exception as error:  # an application answers all errors that it expects
                self._note_failure(error)
            finally:
                answer.messages.put(None)

        def start(work: Coroutine[Any, Any, None]) -> None:
            answer.task = self.loop.create_task(work, name=URL)

        self.loop.call_soon_threadsafe(start, run())
        return answer


class HttpAnswer(httpx2.SyncByteStream):
    """The answer to a request, as it comes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.left, self.messages = loop, asyncio.Event(), SimpleQueue[Message | None]()
        self.task: asyncio.Task[None] | None = None

    def read_start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers. Raise `httpx2.RemoteProtocolError` where none came."""
        if (message := self.messages.get()) is None:
            raise httpx2.RemoteProtocolError("the gateway sent no response")
        return message["status"], message["headers"]

    def __iter__(self) -> Iterator[bytes]:
        while (message := self.messages.get()) is not None:
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return
        raise httpx2.RemoteProtocolError("the gateway did not end its response")

    def close(self) -> None:
        """Leave."""
        with suppress(RuntimeError):  # the gateway has ended
            self._loop.call_soon_threadsafe(self.left.set)


class GatewayTransport(httpx2.BaseTransport):
    """Sends the requests of a client on any thread to a gateway."""

    def __init__(self, gateway: TestGateway) -> None:
        self._gateway = gateway

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer when it begins."""
        path, _, query = request.url.raw_path.partition(b"?")
        scope = make_scope(request.method, request.url.path, request.headers.raw) | {
            "raw_path": path, "query_string": query,
        }  # fmt: skip
        answer = self._gateway.send(scope, request.read())
        status, headers = answer.read_start()
        return httpx2.Response(status, headers=headers, stream=answer)


def make_scope(method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Message:
    """Return the ASGI scope of a request."""
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.lower(), value) for name, value in headers],
        "client": ("127.0.0.1", 1), "server": ("localhost", 8080),
    }  # fmt: skip


async def answer_request(
    app: Any, scope: Message, body: bytes, left: asyncio.Event, put: Callable[[Message], object]
) -> None:
    """Let an application answer a request whose client has left when `left` is set. `put` gets its messages."""
    waiting = iter([{"type": "http.request", "body": body}])

    async def receive() -> Message:
        if (message := next(waiting, None)) is not None:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        put(message)

    await app(scope, receive, send)


def note_worker(keys: Any, pipeline: Pipeline, name: str, **beat: object) -> None:
    """Write the heartbeat of a worker that serves a model of its own name. `keys` is a client of Redis."""
    told = {"stage": "prefill", "name": name, "model": name, "state": "ready", "since": 0} | beat
    keys.set(key := pipeline.worker_key("prefill", name), json.dumps(told))
    keys.sadd(WORKERS_KEY, key)


class MemoryServers:
    """A gateway's connections without servers: bus and record in memory, other keys in fakeredis."""

    def __init__(self, bus: MemoryBus, records: MemoryRecords) -> None:
        import fakeredis  # here, because tests against real servers do not need the package

        self._bus, self._records, server = bus, records, fakeredis.FakeServer(server_type="valkey")
        self._open_client = partial(fakeredis.FakeRedis, server=server)
        self._open_async_client = partial(fakeredis.FakeAsyncRedis, server=server)
        self.keys: Any = self._open_client()

    def serve_model(self, name: str, **beat: object) -> None:
        """Let a worker's heartbeat say that it serves a model."""
        note_worker(self.keys, self._bus.pipeline, name, **beat)

    @contextmanager
    def open_gateway(self, **settings: Mapping[str, object]) -> Iterator[TestGateway]:
        """Run a gateway, whose connections lead here; see `TestGateway`."""
        doubles: dict[int, object] = {
            id(connect_bus): lambda *_: self._bus,
            id(redis_client): lambda *_: self._open_client(),
            id(async_redis_client): lambda *_: self._open_async_client(),
            id(LiveFeed): lambda *_: MemoryFeed(self._records),
            id(AsyncTokenLog): lambda *_: MemoryAsyncLog(MemoryRecord(self._records, RecordSettings())),
        }
        with (
            replace_values("penstock.", doubles),
            TestGateway(Addresses(pipeline=self._bus.pipeline.name), Meters(is_on=False), **settings) as gateway,
        ):
            yield gateway
