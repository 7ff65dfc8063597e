"""Gateways of the world: the real application, asked by clients without a web server between them.

A gateway is a process with one event loop. Clients call the application as a server of ASGI would, and lose their
connection where its process dies. They send their request again then under its key, or go on behind the last event.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.bus.connect import connect_bus
from penstock.bus.contract import FollowedMessage
from penstock.config.settings import GatewayProcessSettings, RecordSettings, load_group
from penstock.ingest.gateway.app import create_app
from penstock.record.live import Deliver, LiveFeed
from penstock.record.log import AsyncTokenLog
from penstock.redis.client import async_redis_client, redis_client
from penstock.testing.bus import MemoryBus, MemoryFollower
from penstock.testing.client import MemoryAsyncLog, MemoryFeed
from penstock.testing.gateway import answer_request, make_scope, note_worker
from sim.world.loop import WorldLoop
from sim.world.network import Link, WorldPublisher, WorldRecord
from sim.world.redis_server import AsyncClient
from sim.world.runtime import Process, SimQueue
from sim.world.servers import MemoryServers
from sim.world.ways import Place

T = TypeVar("T")
STOP_S = 2.0
"""How long a gateway that is told to stop waits for its readers."""


class LinkedBus:
    """The bus, as a process sees it over its link."""

    def __init__(self, bus: MemoryBus, link: Link) -> None:
        self._bus, self._link = bus, link

    def create_publisher(self) -> WorldPublisher:
        """Return a publisher."""
        return WorldPublisher(self._bus, self._link)

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled."""
        counted: dict[str, int] = self._link.call(self._bus.count_unsettled)
        return counted

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places at which no message is."""
        gone: set[str] = self._link.call(lambda: self._bus.find_gone(places))
        return gone

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> "LinkedFollower":
        """Return a follower of a topic."""
        return LinkedFollower(self._bus.follow_topic(topic, after), self._link)

    def check_connection(self, timeout_s: float = 5.0) -> str:
        """Return one line about the bus. Raises `BusUnavailable`."""
        return str(self._link.call(lambda: "it answers"))

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LinkedFollower:
    """A follower of a topic, over a link."""

    def __init__(self, follower: MemoryFollower, link: Link) -> None:
        self._follower, self._link = follower, link

    def read_messages(self, timeout_s: float, max_messages: int = 1000) -> list[FollowedMessage]:
        """Return the next messages. Raises `BusUnavailable`."""
        self._link.call(lambda: None)
        return self._follower.read_messages(timeout_s, max_messages)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LinkedLog(MemoryAsyncLog):
    """`AsyncTokenLog` over the records in memory. A question waits on a thread of its own."""

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Return the answer to a question."""
        return await asyncio.to_thread(question, *args)


class LinkedFeed(MemoryFeed):
    """`LiveFeed` over the records in memory. Events may be late, or lost."""

    def __init__(self, servers: MemoryServers, link: Link) -> None:
        super().__init__(servers.records)
        self._link, self._last_due_s = link, 0.0
        assert link.world.current is not None, "only a process of the world connects"
        self._process = link.world.current.process

    def pass_on(self, channel: str, deliver: Deliver, payload: bytes | None) -> None:
        """Let the loop deliver what was written, if it arrives."""
        link = self._link
        if not self._process.is_alive or link.is_cut() or link.chance.random() < link.loss:
            return
        due_s = link.world.now_s + link.chance.expovariate(1 / link.delay_s)
        self._last_due_s = max(self._last_due_s + 1e-9, due_s)  # a connection keeps the order
        self.loop.call_soon_threadsafe(self.loop.call_at, self._last_due_s, self.deliver, channel, deliver, payload)


@dataclass(eq=False)
class Connection:
    """A client's request to a gateway, and what came back."""

    messages: SimQueue
    """The messages of the answer; None behind the last, and where the connection is lost."""
    loop: asyncio.AbstractEventLoop
    left: asyncio.Event
    """Set when the client has left."""

    def leave(self) -> None:
        """Close it from the client's side."""
        self.loop.call_soon_threadsafe(self.left.set)

    def read_start(self, timeout_s: float) -> tuple[int, dict[str, str]] | None:
        """Return the status and the headers of the answer; None where none came in time."""
        message = self.read_message(timeout_s)
        if message is None:
            return None
        return int(message["status"]), {name.decode(): value.decode() for name, value in message["headers"]}

    def read_chunks(self, timeout_s: float) -> Iterator[bytes | None]:
        """Yield the body as it comes, then None where the connection was lost, or was silent for so long."""
        while (message := self.read_message(timeout_s)) is not None:
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body", False):
                return
        yield None

    def read_message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None where the connection was lost, or was silent for so long."""
        with contextlib.suppress(Exception):
            message: dict[str, Any] | None = self.messages.get(timeout=timeout_s)
            return message
        return None


@dataclass(eq=False)
class RunningGateway:
    """A gateway that answers."""

    app: Any
    loop: WorldLoop
    process: Process
    connections: set[Connection] = field(default_factory=set)


class Gateways:
    """The gateways of a scene."""

    def __init__(
        self, servers: Any, note_failure: Callable[[Process, BaseException], None], on_left: Callable[[Place], None]
    ) -> None:
        """`on_left` is called when a gateway that was told to stop has ended."""
        self._servers, self._world = servers, servers.world
        self._note_failure, self._on_left = note_failure, on_left
        self.places: list[Place] = []
        self.running: dict[Place, RunningGateway] = {}

    def add_place(self, name: str) -> Place:
        """Return a place for a gateway. Beside the pipeline's there is another model, which a worker always serves."""
        note_worker(self._servers.keys, self._servers.pipeline, "other")
        self.places.append(made := Place(name, self._start))
        return made

    def list_doubles(self) -> list[tuple[object, object]]:
        """Return what a process connects with, each with the double that leads to the world's servers."""
        servers = self._servers
        return [
            (connect_bus, lambda *_: LinkedBus(servers.bus, self._link("bus"))),
            (async_redis_client, lambda url: AsyncClient(redis_client(url))),
            (LiveFeed, lambda _: LinkedFeed(servers, self._link("redis"))),
            (AsyncTokenLog, lambda *_: LinkedLog(self._make_record())),
        ]

    def load_settings(self, place: Place) -> GatewayProcessSettings:
        """Return the settings of a gateway."""
        return load_group(GatewayProcessSettings)

    def _link(self, server: str) -> Link:
        """Return the way to a server from the process that runs."""
        assert self._world.current is not None
        link: Link | None = self._servers.ways.find_link(self._world.current.process.name, server)
        assert link is not None, "the judge connects with nothing"
        return link

    def _make_record(self) -> WorldRecord:
        return WorldRecord(self._servers.records, RecordSettings(), self._link("redis"))

    def _start(self, place: Place) -> None:
        place.process = Process(place.name, on_failure=self._note_failure)
        self._world.start_thread(place.process, "main", lambda: self._run(place))

    def _run(self, place: Place) -> None:
        process, loop = place.process, WorldLoop(self._world)
        assert process is not None
        loop.set_exception_handler(lambda _, context: self._handle_error(process, context))
        kept = set[asyncio.Task[Any]]()
        """Nothing of a process that was killed runs any more: also not what a task would do when it is dropped."""

        def make_task(loop: Any, coroutine: Any, **kwargs: Any) -> "asyncio.Task[Any]":
            task = asyncio.Task(coroutine, loop=loop, **kwargs)
            kept.add(task)
            task.add_done_callback(kept.discard)
            return task

        loop.set_task_factory(make_task)
        loop.run_until_complete(self._serve(place, process, loop))
        self._on_left(place)
        self._world.kill(process)

    async def _serve(self, place: Place, process: Process, loop: WorldLoop) -> None:
        stopped = asyncio.Event()
        place.stop = lambda: loop.call_soon_threadsafe(stopped.set)  # type: ignore[assignment]
        app = create_app(self.load_settings(place), self._servers.find_addresses(place.name))
        async with app.router.lifespan_context(app):
            self.running[place] = running = RunningGateway(app, loop, process)
            await stopped.wait()
            app.state.gateway.begin_stop()
            await asyncio.sleep(STOP_S)
            del self.running[place]
            self.break_connections(running)

    def _handle_error(self, process: Process, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:
            self._note_failure(process, error)

    def note_killed(self, place: Place) -> None:
        """Break the connections of a gateway whose process was killed."""
        if (running := self.running.pop(place, None)) is not None:
            self.break_connections(running)

    def break_connections(self, running: RunningGateway) -> None:
        """Let clients notice that their connections are lost."""
        for connection in running.connections:
            connection.messages.put(None)

    def connect(
        self, place: Place, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", query: bytes = b""
    ) -> Connection | None:
        """Send a request to a gateway; return None where none answers there."""
        running = self.running.get(place)
        if running is None:
            return None
        connection = Connection(SimQueue(self._world), running.loop, asyncio.Event())
        running.connections.add(connection)
        sent = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        scope = make_scope(
            method, path, [(name.encode(), value.encode()) for name, value in (sent | dict(headers)).items()]
        ) | {"query_string": query}
        running.loop.call_soon_threadsafe(
            lambda: running.loop.create_task(self._answer(running, connection, scope, body))
        )
        return connection

    async def _answer(
        self, running: RunningGateway, connection: Connection, scope: dict[str, Any], body: bytes
    ) -> None:
        try:
            await answer_request(running.app, scope, body, connection.left, connection.messages.put)
        except Exception as error:  # an application answers all errors that it expects
            self._note_failure(running.process, error)
        running.connections.discard(connection)
        connection.messages.put(None)


def parse_frames(buffer: bytes) -> tuple[list[dict[str, str]], bytes]:
    """Return the events of a stream's beginning, by field, and the rest of it."""
    *frames, rest = buffer.split(b"\n\n")
    events = []
    for frame in frames:
        fields = (line.split(": ", 1) for line in frame.decode().split("\n") if not line.startswith(":"))
        events.append({one[0]: one[1] for one in fields if len(one) == 2})
    return events, rest


def read_error(body: bytes) -> str:
    """Return the code in an error's body."""
    return str(json.loads(body)["error"]["code"])
