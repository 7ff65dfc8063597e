"""The client for asyncio: `Client`'s methods, awaited.

async with AsyncClient(redis="redis://127.0.0.1:6379/0", pipeline="demo") as client:
    async for event in client.generate("Once upon a time", max_tokens=50):
        print(event.text, end="")
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from itertools import chain
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.client.core import (
    LOST_WORDS,
    MAX_LOG_READ_EVENTS,
    MAX_SILENCE_S,
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
from penstock.errors import BusUnavailable, ContentErased, PenstockError, RequestLost
from penstock.messages import Detail, EncodedRequest, EndEvent, ErrorInfo, Picture, Text, encode_request, now_s
from penstock.names import PriorityClass
from penstock.ops.lag import PipelineLag
from penstock.record.live import AsyncMailbox, LiveFeed
from penstock.record.log import AsyncTokenLog, RequestStatus
from penstock.redis.client import async_redis_client, is_away, translate_outages
from penstock.redis.servers import Sharded

log = logging.getLogger(__name__)


class AsyncClient(BaseClient):
    """`Client` for one event loop. Messages submitted while others are handed to the bus go out together after them."""

    def _open_logs(self) -> None:
        self._servers = Sharded.from_urls(self._addresses.stream_url, async_redis_client)
        self._logs = self._servers.map_parts(
            lambda client: AsyncTokenLog(client, self._pipeline, self._record_settings)
        )
        self._unsent: list[tuple[Outgoing, asyncio.Future[Future[str]]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._live: Sharded[LiveFeed] | None = None
        self._mailboxes = set[AsyncMailbox]()
        """The mailboxes of the streams that are being read."""

    async def submit(
        self, prompt: str | None = None, *, key: str = "", own_topics: bool = False, **fields: Unpack[RequestFields]
    ) -> str:
        """Send a request and return its id once it is durable. Raises as `Client.submit`. The rest: see `send`."""
        called_s = now_s()
        encoded = encode_request(make_request(prompt, self._defaults | fields))
        request_id = encoded.request.id
        if fields.get("id") is not None:
            with suppress(BusUnavailable):  # then the workers find a conflict
                check_conflict(request_id, encoded.body_hash, await self.status(request_id))
        await self.send(encoded, called_s, key, own_topics=own_topics)
        return request_id

    async def send(
        self,
        encoded: EncodedRequest,
        since_s: float | None = None,
        key: str = "",
        card: str = "",
        *,
        own_topics: bool = False,
    ) -> str:
        """Send a request as it is, and return the place of its message once it is durable. Raises `BusUnavailable`, as
        `Client.submit`.

        Its trace begins now, or at `since_s` (seconds since the epoch): the time of the caller's own request. `key` is
        the id of the API key that the request came with, `card` what gateways know of its stream. `own_topics`: its
        tenant's own topics get it, as they get all requests of a client that was made so. Raises `TopicsMissing` where
        there are none.
        """
        is_own = own_topics or self._own_topics
        span, message = prepare_message(self._pipeline, encoded, since_s, key, card, own_topics=is_own)
        with end_span(span):
            place = await self._publish_message(message)
        self._note_place(encoded.request.id, place)
        return place

    async def end_lost(self, places: Mapping[str, str]) -> None:
        """End those requests whose message is gone and that no worker has seen. Raises `BusUnavailable`.

        `places` has the place of each request's message.
        """
        gone = await asyncio.to_thread(self._watch.find_gone, list(places.values()))
        with translate_outages():
            for request_id, place in places.items():
                if place in gone and await self._logs[request_id].end_unread(request_id, RequestLost(LOST_WORDS)):
                    log.warning("request %s: %s", request_id, LOST_WORDS)

    async def give_away(self, request_ids: Sequence[str], region: str) -> None:
        """End requests that a region answers which has adopted this one. Raises `BusUnavailable`."""
        with translate_outages():
            for request_id in request_ids:
                if not await self._logs[request_id].give_away(request_id, region):
                    log.warning("request %s had ended here, and %s has answered it, too", request_id, region)

    async def stream(self, request_id: str, after: str | None = None, timeout_s: float = 60.0) -> AsyncIterator[Event]:
        """Yield the tokens after the event id `after` as they come, then the `EndEvent`. Raises as `Client.stream`.

        A slow consumer costs no more memory: events that it does not take are dropped, and read from the log later.
        """
        async with aclosing(self.stream_batches(request_id, after, timeout_s)) as batches:
            async for batch in batches:
                for event in raise_on_error(batch):
                    yield event

    async def stream_batches(
        self,
        request_id: str,
        after: str | None = None,
        timeout_s: float = 60.0,
        body: str = "",
        *,
        max_silence_s: float = MAX_SILENCE_S,
    ) -> AsyncGenerator[list[Event], None]:
        """Yield events as `stream`, in lists of those that came together, and an empty list after a silence.

        A silence takes a second, each next one is twice as long, `max_silence_s` at most.

        An end with an error is yielded as any other event. With `body`, the hash of a request's body
        (`EncodedRequest.body_hash`), `IdConflict` is raised before the first event if the id's record names another.
        """
        if self._live is None:
            self._live = Sharded.from_urls(self._addresses.stream_url, LiveFeed)
        live, channel, mailbox = self._live[request_id], self._pipeline.live_channel(request_id), AsyncMailbox()
        steps = read_stream(request_id, StreamReader(after), timeout_s, body, max_silence_s=max_silence_s)
        live.add_listener(channel, mailbox.put_event)
        self._mailboxes.add(mailbox)
        try:
            with suppress(StopIteration):
                step = next(steps)
                while True:
                    if isinstance(step, list):
                        yield step
                        step = next(steps)
                        continue
                    try:
                        with translate_outages():
                            reply = await self._run_step(step, request_id, mailbox)
                    except BusUnavailable as outage:
                        if not (self.is_let_in or is_away(outage)):
                            raise
                        step = steps.throw(outage)
                    else:
                        self.is_let_in = self.is_let_in or not isinstance(step, TakeLive)
                        step = steps.send(reply)
        except ContentErased as erased:  # nothing comes after it
            yield [EndEvent(finish_reason="error", error=ErrorInfo.from_error(erased))]
        finally:
            self._mailboxes.remove(mailbox)
            live.remove_listener(channel, mailbox.put_event)
            mailbox.close()

    def wake_readers(self) -> None:
        """Let all readers of streams read the logs now. A reader without new events gets an empty list."""
        for mailbox in self._mailboxes:
            mailbox.put_event(None)

    async def generate(
        self, prompt: str | None = None, timeout_s: float = 60.0, **fields: Unpack[RequestFields]
    ) -> AsyncIterator[Event]:
        """Submit a request and stream its answer."""
        async for event in self.stream(await self.submit(prompt, **fields), timeout_s=timeout_s):
            yield event

    async def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        """Return the whole answer once it is complete. Raises as `stream` does."""
        return build_answer(request_id, [event async for event in self.stream(request_id, timeout_s=timeout_s)])

    async def embed(
        self,
        texts: Sequence[Text],
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: Literal["start", "end"] | None = None,
        timeout_s: float = 60.0,
    ) -> list[list[float]]:
        """Return a vector of each text, as `Client.embed`."""
        options = {"prompt": prompt, "dimensions": dimensions, "truncate": truncate}
        return await self._compute(texts, options, timeout_s)

    async def score(self, query: str, texts: Sequence[str], timeout_s: float = 60.0) -> list[float]:
        """Return how well each text answers a query, as `Client.score`."""
        return [score for (score,) in await self._compute(texts, {"query": query}, timeout_s)]

    async def put_picture(self, file: bytes | str | PathLike[str], detail: Detail | None = None) -> Picture:
        """Store a picture as `Client.put_picture`."""
        return await asyncio.to_thread(self._store_picture, file, detail)

    async def cancel(self, request_id: str) -> bool:
        """Ask for a request's end. Returns False when it has ended already. Raises `BusUnavailable`."""
        with translate_outages():
            return await self._logs[request_id].cancel_request(request_id)

    async def status(self, request_id: str) -> RequestStatus | None:
        """Return a request's record; None before a worker has seen it and after it expired. Raises `BusUnavailable`."""
        with translate_outages():
            return await self._logs[request_id].read_status(request_id)

    async def is_remembered(self, request_id: str) -> bool:
        """Return whether a request has ended, and all but its id is forgotten (`PENSTOCK_RECORD_REMEMBER_DAYS`): it is
        answered no more. Raises `BusUnavailable`.
        """
        with translate_outages():
            return await self._logs[request_id].is_remembered(request_id)

    async def lag(self) -> PipelineLag:
        """Return how much work waits in the pipeline, in tokens. Raises `BusUnavailable`."""
        with translate_outages():
            return await asyncio.to_thread(self._watch.read_latest)

    async def estimated_wait(self, priority_class: PriorityClass = "interactive") -> float | None:
        """Return about how many seconds a request submitted now would wait, as `Client.estimated_wait`."""
        return (await self.lag()).estimated_wait_s(priority_class)

    async def close(self) -> None:
        """Send the messages that wait and free all connections."""
        if self._sending is not None:
            await self._sending
        publisher, self._publisher = self._publisher, None
        live, self._live = self._live, None
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
        for feed in live.parts if live is not None else ():
            await feed.close()
        await asyncio.to_thread(self._watch.close)
        for client in self._servers.parts:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _compute(self, texts: Sequence[Text], options: Mapping[str, Any], timeout_s: float) -> list[list[float]]:
        parts, ids = split_texts(texts), list[str]()
        try:
            for part in parts:
                own = [texts[place] for place in part]
                ids.append(await self.submit(texts=own, embed={**options, "in_result": False}))
            answers = [await self.result(request_id, timeout_s) for request_id in ids]
        except PenstockError:
            with suppress(BusUnavailable):
                for request_id in ids:
                    await self.cancel(request_id)
            raise
        places = [*chain.from_iterable(parts)]
        return [[*unpack_floats(one)] for one in join_vectors(places, answers, is_score="query" in options)]

    async def _run_step(self, step: StreamQuestion, request_id: str, mailbox: AsyncMailbox) -> object:
        """Do what `read_stream` asks for, and return the reply."""
        match step:
            case TakeLive():
                return await mailbox.take_events(step.timeout_s)
            case ReadLog():
                return await self._logs[request_id].read_events(request_id, step.after, MAX_LOG_READ_EVENTS)
            case ReadStatus():
                return await self.status(request_id)
            case IsGone():
                return await asyncio.to_thread(self._is_gone, request_id)

    async def _publish_message(self, message: Outgoing) -> str:
        """Publish a message, and return its place once it is durable, without waiting for those of other messages."""
        sent: asyncio.Future[Future[str]] = asyncio.get_running_loop().create_future()
        self._unsent.append((message, sent))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())
        return await asyncio.wrap_future(await sent)

    async def _send_waiting(self) -> None:
        """Hand messages to the bus until none wait. Runs on a thread, because that may block."""
        while self._unsent:
            batch, self._unsent = self._unsent, []
            try:
                acknowledged = await asyncio.to_thread(self._send_batch, [message for message, _ in batch])
            except Exception as error:  # raised by each `submit`
                acknowledged = [_make_failed_future(error) for _ in batch]
            for (_, sent), future in zip(batch, acknowledged, strict=True):
                if not sent.done():  # else its caller was cancelled
                    sent.set_result(future)

    def _send_batch(self, batch: list[Outgoing]) -> list[Future[str]]:
        """Hand messages to the bus and return a future for each one's acknowledgement."""
        if self._publisher is None:
            self._publisher = connect_bus(self._addresses, self._bus_settings).create_publisher()
        return self._publisher.send_messages(batch)


def _make_failed_future(error: Exception) -> Future[str]:
    future: Future[str] = Future()
    future.set_exception(error)
    return future
