"""The client: submit requests, read their streams, from anywhere that reaches the bus and Redis.

    with Client(redis="redis://127.0.0.1:6379/0", pipeline="demo") as client:
        for event in client.generate("Once upon a time", max_tokens=50):
            print(event.text, end="")

`penstock.client.aio.AsyncClient` has the same methods for asyncio.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from opentelemetry.trace import Span
from redis import RedisError

from penstock import messages, names
from penstock.bus.affinity import affinity_of
from penstock.bus.connect import connect
from penstock.bus.contract import Outgoing, Publisher
from penstock.client.reader import Event, StreamReader
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings, load_settings
from penstock.errors import BusUnavailable, IdConflict, InvalidRequest, StreamExpired, StreamTimeout
from penstock.messages import (
    ChatMessage,
    EndEvent,
    FinishReason,
    Logprobs,
    Request,
    Sampling,
    Timings,
    TokenEvent,
    Usage,
)
from penstock.names import Pipeline, PriorityClass
from penstock.ops.lag import LagWatch, PipelineLag
from penstock.record.claim import body_hash
from penstock.record.live import LiveThread
from penstock.record.log import Log, Status, parse_event
from penstock.redis.client import is_away, redis_client
from penstock.redis.servers import ByServer
from penstock.telemetry import tracing
from penstock.telemetry.genai import operation_of, request_attributes

MAX_LIVE_SILENCE_S = 1.0
"""A stream silent for this long is looked up in the log: its live events may be going nowhere."""
MAX_LOG_READ_EVENTS = 128
"""Events that are read of a log at once."""


class RequestFields(TypedDict, total=False):
    """What may be said of a request besides its prompt: the fields of `Request` and `Sampling`."""

    messages: Sequence[ChatMessage | dict[str, str]] | None
    token_ids: Sequence[int] | None
    id: str | None
    model: str | None
    tenant: str
    weight: float
    session: str | None
    klass: PriorityClass
    deadline: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    max_tokens: int
    fit_context: Literal[True] | None
    ignore_eos: bool


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[Logprobs]
    """One for each of `token_ids`; empty unless asked for."""


class Client:
    """Submits requests and reads their streams. Thread-safe; one pub/sub connection however many streams.

    Addresses come from `addresses`, else from the settings; `kafka`, `redis` and `pipeline` override both. `bus` and
    `record` come from the settings where they are not given. Settings are read when a client is made, and not again.
    """

    def __init__(
        self,
        addresses: Addresses | None = None,
        *,
        kafka: str = "",
        redis: str = "",
        pipeline: str = "",
        bus: BusSettings | None = None,
        record: RecordSettings | None = None,
    ) -> None:
        self._addresses = resolve_addresses(addresses, kafka, redis, pipeline)
        self._settings = bus or load_settings(BusSettings)
        self._pipeline = Pipeline(self._addresses.pipeline)
        settings, self._servers = (
            record or load_settings(RecordSettings),
            ByServer.of(self._addresses.stream_url, redis_client),
        )
        self._logs = self._servers.each(lambda client: Log(client, self._pipeline, settings))
        self._watch = LagWatch(self._addresses, self._settings)
        self._lock = threading.Lock()
        self._publisher: Publisher | None = None
        self._live: ByServer[LiveThread] | None = None

    def submit(self, prompt: str | None = None, **fields: Unpack[RequestFields]) -> str:
        """Send a request; returns its id once it is durable, and so will be answered.

        Raises `InvalidRequest`, `RequestTooLarge` or `IdConflict` before sending; `BusUnavailable` when it is
        not known to be durable: submitting it again under the same id is safe.
        """
        called_s = messages.now_s()
        request = make_request(prompt, fields)
        if fields.get("id") is not None:
            with suppress(BusUnavailable), raise_bus_unavailable():  # then the workers will tell
                check_conflict(request.id, body_hash(request), self._logs[request.id].status(request.id))
        with self._lock:
            if self._publisher is None:
                self._publisher = connect(self._addresses, self._settings).publisher()
        span, message = prepare_message(self._pipeline, request, called_s)
        with end_span(span):
            self._publisher.publish([message])
        return request.id

    def stream(self, request_id: str, after: str | None = None, timeout_s: float = 60.0) -> Iterator[Event]:
        """A request's tokens as they come, after the event id `after`; the last item is the `EndEvent`.

        An end with an error raises it instead. `timeout_s` is the longest silence borne, also before the
        first token: an outage is silence. Raises `StreamTimeout`; `StreamExpired` when the log is gone;
        `StreamDiverged` when it is not the one that was read.

        A log that vanishes while it is read was lost with its server, and is made again where the bus still has
        the request; that is waited for.
        """
        return self._read_stream(request_id, StreamReader(after), timeout_s)

    def generate(
        self, prompt: str | None = None, timeout_s: float = 60.0, **fields: Unpack[RequestFields]
    ) -> Iterator[Event]:
        """Submit a request and stream its answer."""
        return self.stream(self.submit(prompt, **fields), timeout_s=timeout_s)

    def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        """The whole answer, when it is complete; raises as `stream` does."""
        return build_answer(request_id, list(self.stream(request_id, timeout_s=timeout_s)))

    def cancel(self, request_id: str) -> bool:
        """Ask for a request's end; False when it has ended already. Raises `BusUnavailable`."""
        with raise_bus_unavailable():
            return self._logs[request_id].cancel(request_id)

    def lag(self) -> PipelineLag:
        """How much work waits in the pipeline, in tokens. Raises `BusUnavailable`."""
        with raise_bus_unavailable():
            return self._watch.look()

    def estimated_wait(self, klass: PriorityClass = "interactive") -> float | None:
        """Seconds until a request submitted now is worked on, about; None where nothing was measured yet.

        Raises `BusUnavailable`.
        """
        return self.lag().estimated_wait_s(klass)

    def close(self) -> None:
        """Free all connections. Streams that are being read come to nothing."""
        with self._lock:
            publisher, self._publisher = self._publisher, None
            live, self._live = self._live, None
        if publisher is not None:
            publisher.close()
        for thread in live.parts if live is not None else ():
            thread.close()
        self._watch.close()
        for client in self._servers.parts:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_stream(self, request_id: str, reader: StreamReader, timeout_s: float) -> Iterator[Event]:
        """Subscribe, read the log, go on live; read the log again at a gap and after a silence."""
        with self._lock:
            if self._live is None:
                self._live = ByServer.of(self._addresses.stream_url, LiveThread)
        with self._live[request_id].listen(self._pipeline.live_channel(request_id)) as mailbox:
            over = time.monotonic() + timeout_s
            while reader.end is None:
                payload = mailbox.get(min(MAX_LIVE_SILENCE_S, over - time.monotonic()))
                news = reader.feed_live(parse_event(payload)) if payload is not None else []
                is_more = payload is None or reader.is_behind
                while news or is_more:
                    if news:
                        yield from raise_error_end(news)
                        over = time.monotonic() + timeout_s
                    is_last = time.monotonic() >= over
                    news, is_more = self._catch_up(request_id, reader, is_last=is_last) if is_more else ([], False)
                if time.monotonic() >= over and reader.end is None:
                    raise StreamTimeout(f"nothing new about {request_id} for {timeout_s:g} s")

    def _catch_up(self, request_id: str, reader: StreamReader, *, is_last: bool) -> tuple[list[Event], bool]:
        """A piece of what the log has more, and whether there may be another."""
        try:
            with raise_bus_unavailable():
                read = self._logs[request_id].read(request_id, reader.log_after, MAX_LOG_READ_EVENTS)
                news = reader.feed_log(read)
                if reader.should_give_up(is_last=is_last) and self._logs[request_id].status(request_id) is None:
                    raise StreamExpired(f"the log of {request_id} is gone")
        except BusUnavailable:
            return [], False  # the next silence tries again
        return news, len(read) == MAX_LOG_READ_EVENTS and reader.end is None


def resolve_addresses(addresses: Addresses | None, kafka: str, redis: str, pipeline: str) -> Addresses:
    """`addresses`, or those of the environment, with what is given put in place."""
    given = {"kafka": kafka, "stream_url": redis, "pipeline": pipeline}
    given = {name: value for name, value in given.items() if value}
    return load_settings(Addresses, **given) if addresses is None else addresses.model_copy(update=given)


def make_request(prompt: str | None, fields: RequestFields) -> Request:
    """A valid request from what a caller gave. Raises `InvalidRequest` or `RequestTooLarge`."""
    body: dict[str, Any] = {"v": messages.VERSION, "prompt": prompt, "sampling": {}}
    for name, value in fields.items():
        part = body["sampling"] if name in Sampling.model_fields else body
        part["class" if name == "klass" else name] = value
    body["id"] = uuid.uuid4().hex if body.get("id") is None else body["id"]
    try:
        encoded = json.dumps(body, ensure_ascii=False, default=_to_plain_value).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from None
    return messages.decode_message(Request, encoded)


def _to_plain_value(value: Any) -> Any:
    if isinstance(value, ChatMessage):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a request cannot carry {type(value).__name__}")


def check_conflict(request_id: str, body: str, status: Status | None) -> None:
    """Raise `IdConflict` if the id is known to belong to another body than that with this hash."""
    if status is not None and status.body not in ("", body):
        raise IdConflict(f"{request_id} was used for another request")


def prepare_message(pipeline: Pipeline, request: Request, since_s: float | None = None) -> tuple[Span, Outgoing]:
    """The message to publish, and the span it begins, now or in the past, which is still to be ended."""
    klass = request.klass or "interactive"
    context = tracing.about(pipeline, request.id)
    span = tracing.begin("request", context, since_s, id=request.id, klass=klass)
    span.set_attributes(request_attributes(operation_of(request), request.model))
    headers = {names.VERSION: str(request.v), names.TENANT: request.tenant, names.CLASS: klass}
    if request.deadline is not None:
        headers[names.DEADLINE] = str(request.deadline)
    headers |= tracing.headers_of(tracing.within(span))
    topic = pipeline.requests(klass)
    return span, Outgoing(topic, request.encode(), request.id, headers, affinity_of(request))


@contextmanager
def raise_bus_unavailable() -> Iterator[None]:
    """Turn an outage of Redis into `BusUnavailable`."""
    try:
        yield
    except RedisError as error:
        if is_away(error):
            raise BusUnavailable(f"Redis: {error}") from error
        raise


@contextmanager
def end_span(span: Span) -> Iterator[None]:
    """End the span with the context."""
    try:
        yield
    finally:
        span.end()


def raise_error_end(news: Sequence[Event]) -> Iterator[Event]:
    """The events; an end with an error raises it."""
    for event in news:
        if isinstance(event, EndEvent) and event.error is not None:
            raise event.error.to_exception()
        yield event


def build_answer(request_id: str, events: Sequence[Event]) -> Answer:
    """The answer that a whole stream makes."""
    *tokens, end = events
    assert isinstance(end, EndEvent), "a stream that raised nothing has its end"
    return Answer(
        id=request_id,
        text="".join(event.text for event in events),
        token_ids=[event.token for event in tokens if isinstance(event, TokenEvent)],
        finish_reason=end.finish_reason,
        usage=end.usage,
        timings=end.timings,
        logprobs=[event.logprobs for event in tokens if isinstance(event, TokenEvent) and event.logprobs is not None],
    )
