"""The responses that are kept (`store`): first in Redis, where they are written anyway, then in the object store.

    tenants/<tenant>/responses/<id>        a line with the metadata and what was asked, then the log, an event a line

Keeping:   1  the metadata is written to Redis, with what was asked       2  it is marked as open in
`penstock:<pipeline>:responses`      3  its request is published: now the response exists      4  it has ended: any
gateway writes the object      5  with `background`: a webhook's event is due (`penstock.ingest.webhooks`)
6  the mark is removed

Deleting:  7  it is marked as deleted: now it is gone      8  the metadata is deleted      9  the object is deleted
10  an hour later a gateway deletes the object again, and removes the mark

A crash after 1 or 2 leaves metadata that nobody was told of: it expires, or is renewed for `pending_keep_s`. After 3
the request is an accepted one as any other; its metadata is renewed by whoever has the lease of step 4. After 4 the
object is written again, with the same content. After 5 the event is made due again: one that was delivered meanwhile is
delivered twice, with the same id. A gateway that was before 4 when the response was deleted looks at the
mark after 4, and deletes what it wrote; if it dies there, 10 does that, and until then the mark hides the object. After
7 or 8 the rest is done by 10. No mark after 4 means that another gateway has done 6: gateways stand still for less than
the hour for which a response is marked as deleted. Steps 6 and 10 remove a mark only if it is the one that they saw.

While it is marked as open, a response is read from Redis; without a mark from the object store. The log must be moved
before it expires: `PENSTOCK_RECORD_KEEP_S` after its end, of which a round of all marks takes a quarter at most. The
lease only saves work, as two gateways that move the same response write the same.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, cast

import redis.asyncio

from penstock.client.core import Event
from penstock.config.settings import RecordSettings, ResponsesSettings
from penstock.errors import RequestError, StreamDiverged, StreamExpired
from penstock.ingest.batch.shapes import DAY_S
from penstock.ingest.errors import not_found_error
from penstock.ingest.openai import RESPONSES, StreamMeta
from penstock.ingest.openai.responses import read_final_status
from penstock.ingest.search_loop import SearchLoop
from penstock.ingest.streaming.stream_meta import RENEW_INTERVAL_S, StreamMetaStore
from penstock.ingest.webhooks import Webhooks
from penstock.messages import EndEvent
from penstock.names import Pipeline, is_request_id
from penstock.objects import ObjectStorage
from penstock.record.log import parse_event
from penstock.redis.client import translate_outages
from penstock.redis.scripts import RENEW_LEASE, load_script
from penstock.sealing import open_bytes, seal_bytes

log = logging.getLogger(__name__)

REMOVE_MARK = load_script("penstock.ingest", "remove_mark")
MAX_MARKS_PER_TRIP = 500
MAX_MOVED_AT_ONCE = 8
EVENT_ROUND_S = 5.0
"""The longest round where webhooks are told when a response has ended."""
NUM_LEASE_ROUNDS = 3
"""A gateway that takes no part in this many rounds has lost the lease."""
MAX_PER_TENANT = 10_000
"""The most responses of a tenant that are kept: its oldest are deleted."""
EXPIRY_CHECK_S = 3600.0
DELETED_S = 3600.0
"""How long a response is marked as deleted."""
LOG_TIMEOUT_S = 60.0
"""How long one log may take to be read when it is moved; the next round tries again."""

ReadEvents = Callable[[StreamMeta], list[AsyncGenerator[list[Event], None]]]


class KeptResponse(NamedTuple):
    """A response that was found."""

    meta: StreamMeta
    events: list[Event] | None
    """Its whole log, from the object store; None: the log is in Redis."""


class _Mark(NamedTuple):
    is_deleted: bool
    since: int
    """When it was created, or deleted, in seconds since the epoch."""
    tenant: str

    def encode(self) -> str:
        return f"{'deleted' if self.is_deleted else 'open'} {self.since} {self.tenant}"


class ResponseKeeper:
    """All kept responses. Methods raise `BusUnavailable`, and `StorageUnavailable`."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        metas: StreamMetaStore,
        objects: ObjectStorage,
        read_events: ReadEvents,
        settings: ResponsesSettings,
        record: RecordSettings,
        webhooks: Webhooks,
    ) -> None:
        self._client, self._metas, self._objects, self._read_events = client, metas, objects, read_events
        self._webhooks = webhooks
        self._keep_s = settings.keep_days * DAY_S
        longest_round_s = EVENT_ROUND_S if webhooks.is_on else RENEW_INTERVAL_S
        self._round_s, self._pending_s = min(longest_round_s, record.keep_s / 4), record.pending_keep_s
        self._holder = uuid.uuid4().hex
        self._loop: SearchLoop | None = None
        self._expiry_checked_at = -EXPIRY_CHECK_S

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._keep_s > 0

    async def mark_open(self, meta: StreamMeta) -> None:
        """Step 2, for a response that is to be kept."""
        await self._write_mark(meta, _Mark(False, meta.created, meta.tenant))

    async def find_response(self, tenant: str, response_id: str) -> KeptResponse:
        """Return a tenant's response. Raises `ApiError` 404 also if it is another tenant's, or not kept."""
        missing = not_found_error("response", response_id[:256])
        if not is_request_id(response_id) or not response_id.startswith(RESPONSES.id_prefix):
            raise missing
        meta = await self._metas.find_meta(response_id)
        if meta is not None and (meta.tenant != tenant or meta.path != RESPONSES.path or meta.input_items is None):
            raise missing
        mark = None if meta is None else await self._read_mark(meta)
        found = None if meta is None else KeptResponse(meta, None)
        if mark is None:
            moved = await self._read_object(tenant, response_id)
            found = moved or found
            mark = None if moved is None else await self._read_mark(moved.meta)
        if found is None or (mark is not None and mark.is_deleted) or self._is_expired(found):
            raise missing
        return found

    async def delete_response(self, meta: StreamMeta) -> None:
        """Delete a response, steps 7 to 9."""
        await self._write_mark(meta, _Mark(True, int(time.time()), meta.tenant))
        await self._metas.delete_meta(meta)
        await self._objects.delete(_object_path(meta.tenant, meta.id))

    def start(self, list_pipelines: Callable[[], Iterable[str]]) -> None:
        """Start to move the ended responses of these pipelines, and to delete expired ones."""
        self._loop = SearchLoop("abandoned responses", partial(self._search, list_pipelines), self._round_s)
        self._loop.start()

    async def close(self) -> None:
        """Stop it; any other gateway goes on."""
        if self._loop is not None:
            await self._loop.close()

    async def _search(self, list_pipelines: Callable[[], Iterable[str]]) -> None:
        for name in list_pipelines():
            pipeline = Pipeline(name)
            if await self._acquire_lease(pipeline):
                await self.move_ended(pipeline)
        if time.monotonic() > self._expiry_checked_at + EXPIRY_CHECK_S:
            self._expiry_checked_at = time.monotonic()
            await self.delete_expired()

    async def move_ended(self, pipeline: Pipeline) -> None:
        """Go once through a pipeline's marks: renew what has not ended, and do steps 4 to 6 and 10 for the rest."""
        slots, failures = asyncio.Semaphore(MAX_MOVED_AT_ONCE), list[BaseException]()

        async def settle_one(response_id: str, mark: _Mark, *, has_ended: bool) -> None:
            async with slots:
                if mark.is_deleted:
                    await self._objects.delete(_object_path(mark.tenant, response_id))
                elif has_ended:
                    await self._move_response(response_id)
                else:
                    log.warning("%s is not kept: no gateway searched for too long, or it never ended", response_id)
                await self._remove_mark(pipeline, response_id, mark)

        async for marks in self._scan_marks(pipeline):
            open_keys = {
                response_id: pipeline.record_key(response_id)
                for response_id, mark in marks.items()
                if not mark.is_deleted
            }
            ended = await self._metas.find_ended(open_keys.items())
            oldest_s = time.time() - self._pending_s
            unended = [one for one, key in open_keys.items() if key not in ended and marks[one].since > oldest_s]
            is_there = await self._metas.renew_ids(unended)
            waiting = {one for one, there in zip(unended, is_there, strict=True) if there}
            waiting |= {one for one, mark in marks.items() if mark.is_deleted and mark.since > time.time() - DELETED_S}
            settling = [
                settle_one(response_id, mark, has_ended=open_keys.get(response_id) in ended)
                for response_id, mark in marks.items()
                if response_id not in waiting
            ]
            outcomes = await asyncio.gather(*settling, return_exceptions=True)
            failures += [outcome for outcome in outcomes if outcome is not None]
        if failures:  # the others were settled; these are tried again in the next round
            raise failures[0]

    async def delete_expired(self) -> None:
        """Delete responses that are too old, and the oldest of tenants that have too many."""
        for tenant in await self._objects.list_names("tenants"):
            found = await self._objects.list_by_age(_object_path(tenant, ""))
            num_over = len(found) - MAX_PER_TENANT
            for index, (written_s, name) in enumerate(found):
                if index >= num_over and written_s > time.time() - self._keep_s:
                    break
                await self._objects.delete(_object_path(tenant, name))

    async def _acquire_lease(self, pipeline: Pipeline) -> bool:
        args: list[str | int] = [self._holder, round(NUM_LEASE_ROUNDS * self._round_s * 1000)]
        return bool(await RENEW_LEASE.run_async(self._client, [pipeline.responses_lease_key], args))

    async def _move_response(self, response_id: str) -> None:
        """Write the object of a response that has ended, unless it was deleted meanwhile or is lost; steps 4 and 5."""
        meta = await self._metas.find_meta(response_id)
        if meta is None:
            log.warning("%s is not kept: its metadata is gone", response_id)
            return
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                events = await read_whole_log(self._read_events(meta))
        except (StreamExpired, StreamDiverged, RequestError) as error:
            log.warning("%s is not kept: %s", response_id, error)
            return
        content = await asyncio.to_thread(_encode_object, meta, events)
        sealed = bytes(seal_bytes("response", meta.tenant, response_id, content))
        await self._objects.put(_object_path(meta.tenant, response_id), sealed)
        now_marked = await self._read_mark(meta)
        if now_marked is not None and now_marked.is_deleted:
            await self._objects.delete(_object_path(meta.tenant, response_id))
        elif meta.options.get("background"):
            end = cast("EndEvent", events[-1])
            kind, ended_at = f"response.{read_final_status(end)}", _read_end_time(meta, end)
            await self._webhooks.add_event(meta.tenant, kind, response_id, ended_at)

    async def _read_object(self, tenant: str, response_id: str) -> KeptResponse | None:
        found = await self._objects.get(_object_path(tenant, response_id))
        if found is None:
            return None
        return await asyncio.to_thread(_decode_object, open_bytes("response", tenant, response_id, found))

    def _is_expired(self, found: KeptResponse) -> bool:
        end = None if found.events is None else found.events[-1]
        return isinstance(end, EndEvent) and _read_end_time(found.meta, end) + self._keep_s < time.time()

    async def _read_mark(self, meta: StreamMeta) -> _Mark | None:
        with translate_outages():
            value = await cast("Any", self._client.hget(Pipeline(meta.pipeline).responses_key, meta.id))
        return None if value is None else _parse_mark(value)

    async def _write_mark(self, meta: StreamMeta, mark: _Mark) -> None:
        with translate_outages():
            await cast("Any", self._client.hset(Pipeline(meta.pipeline).responses_key, meta.id, mark.encode()))

    async def _remove_mark(self, pipeline: Pipeline, response_id: str, mark: _Mark) -> None:
        with translate_outages():
            await REMOVE_MARK.run_async(self._client, [pipeline.responses_key], [response_id, mark.encode()])

    async def _scan_marks(self, pipeline: Pipeline) -> AsyncIterator[dict[str, _Mark]]:
        cursor = 0
        while True:
            with translate_outages():
                cursor, found = await cast(
                    "Any", self._client.hscan(pipeline.responses_key, cursor, count=MAX_MARKS_PER_TRIP)
                )
            if found:
                yield {name.decode(): _parse_mark(value) for name, value in found.items()}
            if cursor == 0:
                return


async def read_whole_log(streams: list[AsyncGenerator[list[Event], None]]) -> list[Event]:
    """Return all events of a response's one request, the end included, also if that is an error."""
    (stream,) = streams
    async with aclosing(stream):
        return [event async for events in stream for event in events]


def _read_end_time(meta: StreamMeta, end: EndEvent) -> int:
    """Return when a response ended, in seconds since the epoch; where nobody noted that, when it was created."""
    return int(end.timings.finished or meta.created)


def _parse_mark(value: bytes) -> _Mark:
    state, since, tenant = value.decode().split(" ", 2)
    return _Mark(state == "deleted", int(since), tenant)


def _object_path(tenant: str, response_id: str) -> str:
    """Return the path of a response's object. The id must have been checked."""
    return f"tenants/{tenant}/responses/{response_id}".removesuffix("/")


def _encode_object(meta: StreamMeta, events: list[Event]) -> bytes:
    return b"\n".join([meta.model_dump_json().encode(), *(event.encode() for event in events)])


def _decode_object(content: bytes) -> KeptResponse:
    first, *lines = content.split(b"\n")
    return KeptResponse(StreamMeta.model_validate_json(first), [parse_event(line) for line in lines])
