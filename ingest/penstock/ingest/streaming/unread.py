"""Streams that nobody reads before their end: they are counted, and cancelled where the operator wants that.

    1  a reader closes its connection before the end: that is counted in Redis, and this gateway notes the stream
    2  a reader comes, at any gateway, and is counted in Redis before it gets anything
    3  once a second a gateway looks which streams of its list have ended, or are read again, and forgets them
    4  one that was left for `PENSTOCK_GATEWAY_CANCEL_UNREAD_S` is cancelled, unless its caller gave something by which
       to come back

A gateway that ends, or dies, forgets its list and cancels nothing. Readers that it sent elsewhere count as still there,
so their streams are computed to the end.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio

from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.streaming.stream_meta import StreamMetaStore
from penstock.names import stream_readers_key
from penstock.redis.client import translate_outages

log = logging.getLogger(__name__)

LOOK_S = 1.0
Cancel = Callable[[StreamMeta], Awaitable[object]]


class UnreadStreams:
    """The streams that readers left at this gateway and nobody has come back to."""

    def __init__(self, client: "redis.asyncio.Redis", metas: StreamMetaStore, cancel_s: float) -> None:
        self._client, self._metas, self._cancel_s = client, metas, cancel_s
        self._left: dict[str, tuple[StreamMeta, float, int]] = {}
        """By id, with the time of the leaving and how many readers had come until then, after the first."""

    def count(self, tenant: str | None = None) -> int:
        """Return how many there are, of one tenant or of all. Any thread may call this."""
        return sum(tenant in (None, meta.tenant) for meta, *_ in list(self._left.values()))

    async def note_reader(self, meta: StreamMeta) -> None:
        """Step 2, but for the reader that made the request. Raises `BusUnavailable`."""
        await self._count(meta, "come")
        self._left.pop(meta.id, None)

    async def note_left(self, meta: StreamMeta) -> None:
        """Step 1. Raises `BusUnavailable`: then the stream counts as read."""
        self._left[meta.id] = (meta, time.monotonic(), await self._count(meta, "left"))

    async def _count(self, meta: StreamMeta, what: str) -> int:
        """Count a reader that came or left; return how many have come."""
        key = stream_readers_key(meta.id)
        with translate_outages():
            async with self._client.pipeline(transaction=False) as batch:
                batch.hincrby(key, what, 1)
                batch.pexpire(key, self._metas.keep_ms)
                batch.hget(key, "come")
                return int((await batch.execute())[2] or 0)

    async def check_streams(self, cancel: Cancel) -> None:
        """Do steps 3 and 4 once. Raises `BusUnavailable`."""
        noted = list(self._left.values())
        have_ended = await self._metas.check_ended([meta for meta, *_ in noted])
        with translate_outages():
            async with self._client.pipeline(transaction=False) as batch:
                for meta, *_ in noted:
                    batch.hmget(stream_readers_key(meta.id), "come", "left")
                counts: list[Any] = await batch.execute()
        for one, has_ended, (come, left) in zip(noted, have_ended, counts, strict=True):
            meta, left_at, num_come = one
            is_over = has_ended or int(come or 0) != num_come or num_come + 1 > int(left or 0)
            is_late = 0 < self._cancel_s < time.monotonic() - left_at and meta.is_lost_unread
            if (is_over or is_late) and self._left.get(meta.id) is one:
                if not is_over:
                    await cancel(meta)
                self._left.pop(meta.id, None)
