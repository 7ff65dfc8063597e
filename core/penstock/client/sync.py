"""The client: submit requests, read their streams, from anywhere that reaches the bus and Redis.

    with Client(redis="redis://127.0.0.1:6379/0", pipeline="demo") as client:
        for event in client.generate("Once upon a time", max_tokens=50):
            print(event.text, end="")

`penstock.client.aio.AsyncClient` has the same methods for asyncio; what both share is in `penstock.client.core`.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from penstock.bus.connect import connect_bus
from penstock.client.core import (
    MAX_LOG_READ_EVENTS,
    Answer,
    BaseClient,
    Event,
    IsGone,
    ReadLog,
    ReadStatus,
    RequestFields,
    StreamQuestion,
    StreamReader,
    TakeLive,
    build_answer,
    check_conflict,
    end_span,
    join_vectors,
    make_request,
    prepare_message,
    raise_on_error,
    read_stream,
    split_texts,
    unpack_floats,
)
from penstock.errors import BusUnavailable, PenstockError
from penstock.messages import Detail, Picture, Text, encode_request, now_s
from penstock.names import PriorityClass
from penstock.ops.lag import PipelineLag
from penstock.record.live import LiveThread, Mailbox
from penstock.record.log import TokenLog
from penstock.redis.client import is_away, redis_client, translate_outages
from penstock.redis.servers import Sharded


class Client(BaseClient):
    """Submits requests and reads their streams. Thread-safe; one pub/sub connection however many streams.

    Addresses come from `addresses`, else from the settings; `kafka`, `redis` and `pipeline` override both. `bus` and
    `record` come from the settings where they are not given. Settings are read when a client is made, and not again.
    Requests are `tenant`'s where they name none. With `topics="own"` they go to their tenant's own topics
    (`penstock topics create --tenant NAME`), which only Kafka has.
    """

    def _open_logs(self) -> None:
        self._servers = Sharded.from_urls(self._addresses.stream_url, redis_client)
        self._logs = self._servers.map_parts(lambda client: TokenLog(client, self._pipeline, self._record_settings))
        self._lock = threading.Lock()
        self._live: Sharded[LiveThread] | None = None

    def submit(self, prompt: str | None = None, **fields: Unpack[RequestFields]) -> str:
        """Send a request and return its id once it is durable, so that it will be answered.

        Raises `InvalidRequest`, `RequestTooLarge` or `IdConflict` before sending; `BusUnavailable` when it is
        not known to be durable: submitting it again under the same id is safe. Raises `TopicsMissing`, one of these,
        where a tenant's own topics do not exist.
        """
        called_s = now_s()
        encoded = encode_request(make_request(prompt, self._defaults | fields))
        request_id = encoded.request.id
        if fields.get("id") is not None:
            with suppress(BusUnavailable), translate_outages():  # then the workers find a conflict
                check_conflict(request_id, encoded.body_hash, self._logs[request_id].read_status(request_id))
        with self._lock:
            if self._publisher is None:
                self._publisher = connect_bus(self._addresses, self._bus_settings).create_publisher()
        span, message = prepare_message(self._pipeline, encoded, called_s, own_topics=self._own_topics)
        with end_span(span):
            (place,) = self._publisher.publish([message])
        self._note_place(request_id, place)
        return request_id

    def stream(self, request_id: str, after: str | None = None, timeout_s: float = 60.0) -> Iterator[Event]:
        """Yield a request's tokens as they come, after the event id `after`; the last item is the `EndEvent`.

        An end with an error raises the error instead. `timeout_s` is the longest time without a new event, also
        before the first token and during an outage. Raises `StreamTimeout` after it, `StreamExpired` if the log is
        gone, and `StreamDiverged` if the log is not the one that was read. Raises `RequestLost` if the message of a
        request that this client submitted was deleted unread.

        A log that vanishes while it is read was lost with its server. A worker writes it again if the bus still has the
        request, and the stream waits for that.
        """
        return self._read_stream(request_id, StreamReader(after), timeout_s, begins_with_log=True)

    def generate(
        self, prompt: str | None = None, timeout_s: float = 60.0, **fields: Unpack[RequestFields]
    ) -> Iterator[Event]:
        """Submit a request and stream its answer."""
        return self._read_stream(self.submit(prompt, **fields), StreamReader(), timeout_s, begins_with_log=False)

    def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        """Return the whole answer once it is complete. Raises as `stream` does."""
        return build_answer(request_id, list(self.stream(request_id, timeout_s=timeout_s)))

    def embed(
        self,
        texts: Sequence[Text],
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: Literal["start", "end"] | None = None,
        timeout_s: float = 60.0,
    ) -> list[list[float]]:
        """Return a vector of each text, which workers of kind `embed` compute. `EmbedOptions` has what the arguments
        mean. Several requests are submitted where the texts are many. The first error ends the others, and is raised.

        Raises as `submit` and `stream`; `ModelError` also where the answers are not vectors of these texts.
        """
        options = {"prompt": prompt, "dimensions": dimensions, "truncate": truncate}
        return self._compute(texts, options, timeout_s)

    def score(self, query: str, texts: Sequence[str], timeout_s: float = 60.0) -> list[float]:
        """Return how well each text answers a query, as the model's own scores. Raises as `embed`."""
        return [score for (score,) in self._compute(texts, {"query": query}, timeout_s)]

    def put_picture(self, file: bytes | str | PathLike[str], detail: Detail | None = None) -> Picture:
        """Store a picture, given as its bytes or its path, and return what a turn has of it.

            picture = client.put_picture("cat.png")
            client.submit(messages=[{"role": "user", "content": ["What is this?", picture]}])

        It needs `penstock[images]`. A picture lies in Redis, or if it is large in `PENSTOCK_BATCH_STORE`, for as long
        as the record of a request that waits. Raises `InvalidRequest` for a file that is none, or is too large,
        `BusUnavailable`, `StorageUnavailable` and `OSError`.
        """
        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop, as in a notebook
            return thread.submit(self._store_picture, file, detail).result()

    def cancel(self, request_id: str) -> bool:
        """Ask for a request's end. Returns False when it has ended already. Raises `BusUnavailable`."""
        with translate_outages():
            return self._logs[request_id].cancel_request(request_id)

    def lag(self) -> PipelineLag:
        """Return how much work waits in the pipeline, in tokens. Raises `BusUnavailable`."""
        with translate_outages():
            return self._watch.read_latest()

    def estimated_wait(self, priority_class: PriorityClass = "interactive") -> float | None:
        """Return about how many seconds a request submitted now would wait; None where nothing was measured yet.

        Raises `BusUnavailable`.
        """
        return self.lag().estimated_wait_s(priority_class)

    def close(self) -> None:
        """Free all connections. Streams that are still being read receive nothing more."""
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

    def _compute(self, texts: Sequence[Text], options: Mapping[str, Any], timeout_s: float) -> list[list[float]]:
        parts, ids = split_texts(texts), list[str]()
        try:
            for part in parts:
                ids.append(self.submit(texts=[texts[place] for place in part], embed={**options, "in_result": False}))
            answers = [self.result(request_id, timeout_s) for request_id in ids]
        except PenstockError:
            with suppress(BusUnavailable):
                for request_id in ids:
                    self.cancel(request_id)
            raise
        places = [*chain.from_iterable(parts)]
        return [[*unpack_floats(one)] for one in join_vectors(places, answers, is_score="query" in options)]

    def _read_stream(
        self, request_id: str, reader: StreamReader, timeout_s: float, *, begins_with_log: bool
    ) -> Iterator[Event]:
        with self._lock:
            if self._live is None:
                self._live = Sharded.from_urls(self._addresses.stream_url, LiveThread)
        live, mailbox = self._live[request_id], None
        steps = read_stream(request_id, reader, timeout_s, begins_with_log=begins_with_log)
        with ExitStack() as listening, suppress(StopIteration):
            step = next(steps)
            while True:
                if isinstance(step, list):
                    yield from raise_on_error(step)
                    step = next(steps)
                    continue
                if mailbox is None and isinstance(step, TakeLive):
                    mailbox = listening.enter_context(live.open_mailbox(self._pipeline.live_channel(request_id)))
                try:
                    with translate_outages():
                        reply = self._run_step(step, request_id, mailbox)
                except BusUnavailable as outage:
                    if not (self.is_let_in or is_away(outage)):
                        raise
                    step = steps.throw(outage)
                else:
                    self.is_let_in = self.is_let_in or not isinstance(step, TakeLive)
                    step = steps.send(reply)

    def _run_step(self, step: StreamQuestion, request_id: str, mailbox: Mailbox | None) -> object:
        """Do what `read_stream` asks for, and return the reply."""
        match step:
            case TakeLive():
                assert mailbox is not None, "whoever takes live events listens to them"
                return mailbox.take_events(step.timeout_s)
            case ReadLog():
                return self._logs[request_id].read_events(request_id, step.after, MAX_LOG_READ_EVENTS)
            case ReadStatus():
                return self._logs[request_id].read_status(request_id)
            case IsGone():
                return self._is_gone(request_id)
