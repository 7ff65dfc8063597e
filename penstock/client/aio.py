"""The client for asyncio: `Client`'s methods, awaited.

async with AsyncClient(redis="redis://127.0.0.1:6379/0", pipeline="demo") as client:
    async for event in client.generate("Once upon a time", max_tokens=50):
        print(event.text, end="")
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self, Unpack

from penstock.bus.connect import connect
from penstock.bus.contract import Outgoing, Publisher
from penstock.client.reader import Event, StreamReader
from penstock.client.sync import (
    MAX_LIVE_SILENCE_S,
    MAX_LOG_READ_EVENTS,
    Answer,
    RequestFields,
    build_answer,
    check_conflict,
    end_span,
    make_request,
    prepare_message,
    raise_bus_unavailable,
    raise_error_end,
    resolve_addresses,
)
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings, load_settings
from penstock.errors import BusUnavailable, StreamExpired, StreamTimeout
from penstock.messages import Request, now_s
from penstock.names import Pipeline, PriorityClass
from penstock.ops.lag import LagWatch, PipelineLag
from penstock.record.claim import body_hash
from penstock.record.live import AsyncMailbox, LiveFeed
from penstock.record.log import AsyncLog, Status, parse_event
from penstock.redis.client import async_redis_client
from penstock.redis.servers import ByServer


class AsyncClient:
    """`Client` for one event loop. What is submitted while messages are handed to the bus goes out with the next."""

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
        settings = record or load_settings(RecordSettings)
        self._servers = ByServer.of(self._addresses.stream_url, async_redis_client)
        self._logs = self._servers.each(lambda client: AsyncLog(client, self._pipeline, settings))
        self._watch = LagWatch(self._addresses, self._settings)
        self._publisher: Publisher | None = None
        self._waiting: list[tuple[Outgoing, asyncio.Future[Future[None]]]] = []
        self._handing_over: asyncio.Task[None] | None = None
        self._live: ByServer[LiveFeed] | None = None

    async def submit(self, prompt: str | None = None, **fields: Unpack[RequestFields]) -> str:
        """Send a request; returns its id once it is durable. Raises as `Client.submit`."""
        called_s = now_s()
        request = make_request(prompt, fields)
        if fields.get("id") is not None:
            with suppress(BusUnavailable):  # then the workers will tell
                check_conflict(request.id, body_hash(request), await self.status(request.id))
        await self.send(request, called_s)
        return request.id

    async def send(self, request: Request, since_s: float | None = None) -> None:
        """Send a request as it is; returns once it is durable. Raises `BusUnavailable`, as `Client.submit`.

        Its trace begins now, or at `since_s` (seconds since the epoch), where somebody has waited for it since then.
        """
        span, message = prepare_message(self._pipeline, request, since_s)
        with end_span(span):
            await self._publish_message(message)

    async def stream(self, request_id: str, after: str | None = None, timeout_s: float = 60.0) -> AsyncIterator[Event]:
        """The tokens after the event id `after` as they come, then the `EndEvent`; as `Client.stream`.

        Who takes them slowly costs no more memory: what is not taken is dropped, and read from the log later.
        """
        async with aclosing(self.news(request_id, after, timeout_s)) as batches:
            async for batch in batches:
                for event in raise_error_end(batch):
                    yield event

    async def news(
        self, request_id: str, after: str | None = None, timeout_s: float = 60.0, body: str = ""
    ) -> AsyncGenerator[list[Event], None]:
        """As `stream`, of the events that came together a list; an empty one after each second without any.

        An end with an error is an event as any other. With the hash of a `body` (`record.claim.body_hash`),
        `IdConflict` is raised before the first event if the id belongs to a request with another one.
        """
        reader, is_known = StreamReader(after), not body
        news: list[Event] = []  # what came, until it is known whose it is
        if self._live is None:
            self._live = ByServer.of(self._addresses.stream_url, LiveFeed)
        live, channel, box = self._live[request_id], self._pipeline.live_channel(request_id), AsyncMailbox()
        live.listen(channel, box.deliver)
        try:
            over = time.monotonic() + timeout_s
            while reader.end is None or news:
                payloads, is_more = await box.take(min(MAX_LIVE_SILENCE_S, over - time.monotonic()))
                news += [event for payload in payloads for event in reader.feed_live(parse_event(payload))]
                is_more = is_more or reader.is_behind
                while news or is_more:
                    if news:
                        try:
                            is_known = is_known or await self._has_body(request_id, body)
                        except BusUnavailable:
                            break  # the next silence tries again
                        yield news
                        over = time.monotonic() + timeout_s
                    is_last = time.monotonic() >= over
                    news, is_more = (
                        await self._catch_up(request_id, reader, is_last=is_last) if is_more else ([], False)
                    )
                if time.monotonic() >= over and (reader.end is None or news):
                    raise StreamTimeout(f"nothing new about {request_id} for {timeout_s:g} s")
                if not payloads:
                    yield []
        finally:
            live.leave(channel, box.deliver)
            box.close()

    async def generate(
        self, prompt: str | None = None, timeout_s: float = 60.0, **fields: Unpack[RequestFields]
    ) -> AsyncIterator[Event]:
        """Submit a request and stream its answer."""
        async for event in self.stream(await self.submit(prompt, **fields), timeout_s=timeout_s):
            yield event

    async def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        """The whole answer, when it is complete; raises as `stream` does."""
        return build_answer(request_id, [event async for event in self.stream(request_id, timeout_s=timeout_s)])

    async def cancel(self, request_id: str) -> bool:
        """Ask for a request's end; False when it has ended already. Raises `BusUnavailable`."""
        with raise_bus_unavailable():
            return await self._logs[request_id].cancel(request_id)

    async def status(self, request_id: str) -> Status | None:
        """What is known of a request; None: nothing yet, or nothing any more. Raises `BusUnavailable`."""
        with raise_bus_unavailable():
            return await self._logs[request_id].status(request_id)

    async def lag(self) -> PipelineLag:
        """How much work waits in the pipeline, in tokens; as `Client.lag`."""
        with raise_bus_unavailable():
            return await asyncio.to_thread(self._watch.look)

    async def estimated_wait(self, klass: PriorityClass = "interactive") -> float | None:
        """Seconds until a request submitted now is worked on, about; as `Client.estimated_wait`."""
        return (await self.lag()).estimated_wait_s(klass)

    async def close(self) -> None:
        """Send what is waiting and free all connections."""
        if self._handing_over is not None:
            await self._handing_over
        publisher, self._publisher = self._publisher, None
        live, self._live = self._live, None
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
        for feed in live.parts if live is not None else ():
            await feed.close()
        self._watch.close()
        for client in self._servers.parts:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _catch_up(self, request_id: str, reader: StreamReader, *, is_last: bool) -> tuple[list[Event], bool]:
        """A piece of what the log has more, and whether there may be another."""
        try:
            with raise_bus_unavailable():
                read = await self._logs[request_id].read(request_id, reader.log_after, MAX_LOG_READ_EVENTS)
                news = reader.feed_log(read)
                if reader.should_give_up(is_last=is_last) and await self._logs[request_id].status(request_id) is None:
                    raise StreamExpired(f"the log of {request_id} is gone")
        except BusUnavailable:
            return [], False  # the next silence tries again
        return news, len(read) == MAX_LOG_READ_EVENTS and reader.end is None

    async def _has_body(self, request_id: str, body: str) -> bool:
        """Return whether a request's record names its body, which is then this one. Raises as `check_conflict`."""
        status = await self.status(request_id)
        check_conflict(request_id, body, status)
        return status is not None and status.body != ""

    async def _publish_message(self, message: Outgoing) -> None:
        """Return once the message is durable; it waits for no other message's acknowledgement."""
        handed_over: asyncio.Future[Future[None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, handed_over))
        if self._handing_over is None or self._handing_over.done():
            self._handing_over = asyncio.create_task(self._publish_waiting())
        await asyncio.wrap_future(await handed_over)

    async def _publish_waiting(self) -> None:
        """Hand all that waits to the bus, until nothing does; on a thread, because that may block."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                sent = await asyncio.to_thread(self._send_batch, [message for message, _ in batch])
            except Exception as error:  # whoever submitted it raises it
                sent = [_make_failed_future(error) for _ in batch]
            for (_, handed_over), one in zip(batch, sent, strict=True):
                if not handed_over.done():  # else its caller was cancelled
                    handed_over.set_result(one)

    def _send_batch(self, batch: list[Outgoing]) -> list[Future[None]]:
        if self._publisher is None:
            self._publisher = connect(self._addresses, self._settings).publisher()
        return self._publisher.send(batch)


def _make_failed_future(error: Exception) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future
