"""The metrics of a gateway: its own requests and streams, and the state of its pipelines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import redis
from opentelemetry.trace import INVALID_SPAN, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.messages import now_s
from penstock.names import CLASSES, STAGES
from penstock.ops.account import Prices
from penstock.ops.live import Json, LiveWatch
from penstock.telemetry import catalog
from penstock.telemetry.meters import Meters, Reading

REFUSAL_KEY = "penstock.refused"
"""In the scope of a request that was refused: the error's code."""
UNSENT_KEY = "penstock.unsent"
"""In the scope of a request for which the bus or Redis was away before any message was sent: the error's code."""
ACCEPTED_KEY = "penstock.accepted"
"""In the scope of a request whose messages are durable."""
ARRIVAL_KEY = "penstock.came_s"
"""In the scope of every request: when it came, in seconds since the epoch."""
STREAM_KEY = "penstock.stream"
"""In the scope of a request whose answer is a stream that has begun: what sends the rest, given the server's `receive`,
when the layers within have returned."""
SPAN_KEY = "penstock.span"
"""In the scope of a request that other requests are made for: its span, which ends with the last byte of the answer."""
REGION_KEY = "penstock.region"
"""In the scope of a request, where there are peers: attributes of spans, which say where it is answered and why."""
_SERVER_KEYS = {"type", "method", "path", "http_version", SPAN_KEY}
"""Keys that uvicorn and the outermost layer read in the scope of an answer that has begun."""
WORKER_STATES = ("loading", "ready", "degraded", "draining")
NO_ROUTE = "none"


class GatewayMetrics:
    """The metrics of one gateway. Its event loop counts, any thread may read."""

    def __init__(
        self, meters: Meters, addresses: Addresses, settings: BusSettings, prices: Prices | None = None
    ) -> None:
        self.meters, self._prices = meters, prices
        self.pipelines: set[str] = {addresses.pipeline}
        """The pipelines to report."""
        self._addresses, self._settings = addresses, settings
        self._watches: dict[str, LiveWatch] = {}
        self._lock = threading.Lock()
        self._num_streams = 0
        self.count_unread: Callable[[], int] = lambda: 0
        """Counts the streams that were left here."""
        meters.add_source(self._read_all)

    def watch_pipeline(self, pipeline: str) -> LiveWatch:
        """Return the watch of a pipeline that all in this process share."""
        with self._lock:
            if pipeline not in self._watches:
                addresses = self._addresses.model_copy(update={"pipeline": pipeline})
                self._watches[pipeline] = LiveWatch(addresses, self._settings, self._prices)
            return self._watches[pipeline]

    def count_answer(self, scope: Scope, status: int) -> None:
        """Count an answer, which has begun at least."""
        route = getattr(scope.get("route"), "path", NO_ROUTE)
        self.meters.get_counter(catalog.GATEWAY_REQUESTS, route, str(status)).add()
        if REFUSAL_KEY in scope:
            self.meters.get_counter(catalog.GATEWAY_REFUSED, scope[REFUSAL_KEY]).add()

    @contextmanager
    def count_reader(self) -> Iterator[None]:
        """Count a reader of a stream until the block ends."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _read_all(self) -> Iterator[Reading]:
        yield Reading(catalog.GATEWAY_STREAMS, (), self._num_streams)
        yield Reading(catalog.GATEWAY_UNREAD, (), self.count_unread())
        for name in sorted(self.pipelines):
            snapshot: Json | None = None
            with suppress(BusUnavailable, redis.RedisError):  # told by `penstock_pipeline_up`
                snapshot = self.watch_pipeline(name).read_latest()
            yield Reading(catalog.PIPELINE_UP, (name,), int(snapshot is not None))
            if snapshot is not None:
                yield Reading(catalog.REDIS_EVICTS, (name,), int(self.watch_pipeline(name).eviction != ""))
                if (share := self.watch_pipeline(name).memory_share) is not None:
                    yield Reading(catalog.REDIS_MEMORY, (name,), share)
                for topic, count in self.watch_pipeline(name).lost.items():
                    yield Reading(catalog.MESSAGES_LOST, (name, topic), count)
                yield from _read_pipeline(name, snapshot)
                for part, amount in snapshot.get("account", {}).items():
                    if part != "currency":
                        yield Reading(catalog.ACCOUNT, (name, part), amount)


def _read_pipeline(name: str, snapshot: Json) -> Iterator[Reading]:
    for priority_class in CLASSES:
        for stage in STAGES:
            lag, place = snapshot["lag"][priority_class][stage], (name, stage, priority_class)
            yield Reading(catalog.LAG_MESSAGES, place, lag["messages"])
            for kind in ("prompt", "output"):
                if (tokens := lag[f"{kind}_tokens"]) is not None:
                    yield Reading(catalog.LAG_TOKENS, (*place, kind), tokens)
        if (wait_s := snapshot["lag"][priority_class]["estimated_wait_s"]) is not None:
            yield Reading(catalog.ESTIMATED_WAIT, (name, priority_class), wait_s)
    for worker in snapshot["workers"]:
        for state in WORKER_STATES:
            labels = (name, worker["stage"], worker["name"], state)
            yield Reading(catalog.WORKER_STATE, labels, int(worker["state"] == state))
    for worker in snapshot["lost"]:
        yield Reading(catalog.WORKER_STATE, (name, worker["stage"], worker["name"], "lost"), 1)
    if (scaling := snapshot["scaling"]) is not None:
        yield from _read_scaling(name, scaling)


def _read_scaling(name: str, scaling: Json) -> Iterator[Reading]:
    for kind in scaling["reasons"]:
        yield Reading(catalog.AUTOSCALE_WORKERS, (name, kind), scaling["workers"][kind])
        yield Reading(catalog.AUTOSCALE_STARTING, (name, kind), scaling["starting"].get(kind, 0))
    yield Reading(catalog.AUTOSCALE_ALERTS, (name,), len(scaling["alerts"]))
    for source in ("predicted", "observed"):
        if (p99_s := scaling[f"{source}_ttft_p99_s"]) is not None:
            yield Reading(catalog.AUTOSCALE_FIRST_TOKEN, (name, source), p99_s)


class CountingMiddleware:
    """The outermost of the gateway's own layers: notes when a request comes, counts each answer when it begins, and
    sends streams, so that no layer within waits for their ends: these take more memory than a stream that is idle.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVAL_KEY] = now_s()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_answer(scope, status := message["status"])
                span = scope.get(SPAN_KEY, INVALID_SPAN)
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        try:
            await self._app(scope, receive, counted)
            if (send_stream := scope.pop(STREAM_KEY, None)) is not None:
                for key in scope.keys() - _SERVER_KEYS:
                    del scope[key]
                scope["headers"] = []  # an error's handler reads them
                await send_stream(receive)
        finally:
            scope.get(SPAN_KEY, INVALID_SPAN).end()
