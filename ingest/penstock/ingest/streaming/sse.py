"""Server-sent events: a request's answer in pieces, from wherever its reader is.

Each event has an id (`penstock.ingest.openai.sse`), so a reader can go on at any gateway after the client, a worker
or this process died. Events come from the logs in Redis; nothing is kept here. A reader that is slow is waited for,
and what arrives meanwhile is dropped and read again (`AsyncClient.stream_batches`): it costs only what is buffered for
its socket.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from penstock.client.core import Event
from penstock.errors import AnswerInterrupted, PenstockError, RequestError, StreamDiverged, StreamExpired, is_failure
from penstock.ingest.endpoints import ENDPOINTS, find_prompt_field, make_error_body
from penstock.ingest.errors import ApiError, to_api_error
from penstock.ingest.openai.cursor import SentEvent, SseCursor
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.sse import DONE_ID, ResumePoint
from penstock.ingest.streaming.state import Streams
from penstock.messages import Usage

log = logging.getLogger(__name__)

BROWSER_RETRY_MS = 500
"""How soon a browser connects again."""
KEEP_ALIVE_FRAME = b": keep-alive\n"
"""One line: the SDKs take an empty line after an id for an event, even without data."""
KEEP_ALIVE_SHARE = 0.95
"""A comment is due after this share of `keep_alive_s`: timers of the loop may be a moment early."""
OnEnded = Callable[[Usage | None], Awaitable[None]]


class StreamFeed:
    """The events of a stream for one connection."""

    def __init__(
        self,
        streams: Streams,
        meta: StreamMeta,
        resume_point: ResumePoint,
        on_ended: OnEnded,
        *,
        after_number: int = -1,
        whole_log: list[Event] | None = None,
    ) -> None:
        """`on_ended` is awaited when the answer is complete or has failed, with the usage if all of it has ended.

        Only events after `after_number` are sent, of those with a sequence number. `whole_log` is the log of a
        request that ended long ago; otherwise the logs are read from Redis.
        """
        self._whole_log = whole_log
        self._streams, self._meta, self._on_ended = streams, meta, on_ended
        self._cursor = SseCursor(ENDPOINTS[meta.path], meta, resume_point, after_number)
        self.is_over = False
        """Whether this connection got everything that it is sent, so that a client that leaves now does not leave
        early."""

    async def read_frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes to send."""
        yield f"retry: {BROWSER_RETRY_MS}\n".encode()
        try:
            async with aclosing(self._read_new_frames()) as sent_events:
                async for sent in sent_events:
                    yield sent
        except PenstockError as error:
            self.is_over = True
            is_last = isinstance(error, (RequestError, StreamDiverged, StreamExpired))
            if isinstance(error, RequestError):
                await self._on_ended(self._cursor.usage if self._cursor.has_ended else None)
            if isinstance(error, StreamDiverged) and self._meta.is_adopted:
                error = AnswerInterrupted("the region that began this answer died, and this one gives other tokens")
            yield self._encode_error(to_api_error(error, find_prompt_field(self._meta.path)), is_last=is_last)
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("sending stream %s failed", self._meta.id)
            self.is_over = True
            yield self._encode_error(ApiError(500, "internal error", code="internal_error"), is_last=True)

    def _encode_error(self, error: ApiError, *, is_last: bool) -> bytes:
        """Return an error as an event, which the SDKs raise. After a final one a browser does not connect again."""
        event_id = f"id: {DONE_ID}\n" if is_last else ""
        body = make_error_body(self._meta.path, error).model_dump_json()
        return f"{event_id}event: error\ndata: {body}\n\n".encode()

    async def _read_new_frames(self) -> AsyncGenerator[bytes, None]:
        yield encode_frames(self._cursor.open_stream())
        last_sent_at = time.monotonic()
        async with aclosing(self._read_choice_events()) as updates:
            async for index, events in updates:
                sent, error = self._encode_choice_events(index, events)
                if sent:
                    yield sent
                    last_sent_at = time.monotonic()
                elif time.monotonic() > last_sent_at + KEEP_ALIVE_SHARE * self._streams.settings.gateway.keep_alive_s:
                    yield KEEP_ALIVE_FRAME
                    last_sent_at = time.monotonic()
                if error is not None:
                    raise error
                if self._streams.is_stopping and not self._cursor.has_ended:
                    message = f"this gateway stops: go on at /v1/streams/{self._meta.id}, after the last event's id"
                    raise ApiError(503, message, code="gateway_stopping")
        await self._on_ended(self._cursor.usage)
        self.is_over = True
        yield encode_frames(self._cursor.end_stream())

    def _encode_choice_events(self, index: int, events: list[Event]) -> tuple[bytes, PenstockError | None]:
        """Return the bytes that events of a choice add, and the error that ended them if there is one."""
        sent = bytearray()
        try:
            for event in events:
                sent += encode_frames(self._cursor.add_event(index, event))
        except PenstockError as error:
            return bytes(sent), error
        return bytes(sent), None

    async def _read_choice_events(self) -> AsyncGenerator[tuple[int, list[Event]], None]:
        """Yield the events of all choices as they come, from the beginning; an empty list now and then in a silence."""
        if self._whole_log is not None:
            yield 0, self._whole_log
            return
        found = self._streams.read_events(self._meta)
        if len(found) == 1:
            async with aclosing(found[0]) as only:
                async for events in only:
                    yield 0, events
            return
        async with aclosing(_merge_streams(found)) as merged:
            async for index, events in merged:
                yield index, events


async def _merge_streams(
    streams: list[AsyncGenerator[list[Event], None]],
) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield what all streams give, with their indices; at most one list of each waits."""
    queue: asyncio.Queue[tuple[int, list[Event] | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int) -> None:
        try:
            async with aclosing(streams[index]) as stream:
                async for events in stream:
                    await queue.put((index, events))
            await queue.put((index, None))
        except BaseException as error:  # raised by whoever reads
            if not is_failure(error):
                raise
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_left = len(tasks)
        while num_left:
            index, events = await queue.get()
            if isinstance(events, BaseException):
                raise events
            if events is None:
                num_left -= 1
            else:
                yield index, events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def encode_frames(sent_events: Sequence[SentEvent]) -> bytes:
    """Return events as they are sent."""
    return b"".join(map(_encode_frame, sent_events))


def _encode_frame(sent_events: SentEvent) -> bytes:
    event_id, event = sent_events
    id_line = f"id: {event_id}\n" if event_id else ""
    event_line = f"event: {event.event}\n" if event.event else ""
    return f"{id_line}{event_line}data: {event.data}\n\n".encode()
