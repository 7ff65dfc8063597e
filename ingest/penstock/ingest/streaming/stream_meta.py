"""The data by which any gateway can stream a request: its `StreamMeta`, in Redis; with several servers, in the first.

It lives for `PENSTOCK_RECORD_KEEP_S`. The gateway that wrote it, or found it for a reader, renews it until its
requests have ended. If that gateway dies and no reader comes back, the meta data of an unfinished request expires;
the request is answered all the same. With each renewal it looks for requests that no worker has seen though their
messages are gone from their topics, and ends them.
"""

import hmac
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import redis.asyncio

from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable, ContentErased, TenantKeyMissing
from penstock.ingest.errors import not_found_error
from penstock.ingest.openai.endpoint import StreamMeta, decode_meta, encode_meta
from penstock.messages import now_s
from penstock.names import GATEWAY_SECRET_KEY, Pipeline, is_request_id, stream_meta_key
from penstock.redis.client import translate_outages
from penstock.redis.servers import Sharded

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 20.0
"""How often the meta data of unfinished requests is renewed; more often if it lives for less than four times this."""
MAX_RENEWED_PER_TRIP = 500
"""How many requests are renewed in one round trip."""
EndLost = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""`AsyncClient.end_lost` of a pipeline."""


class StreamMetaStore:
    """The meta data of the requests of all gateways. All methods raise `BusUnavailable`."""

    def __init__(self, servers: "Sharded[redis.asyncio.Redis]", settings: RecordSettings, end_lost: EndLost) -> None:
        self._servers, self._client, self._end_lost = servers, servers.parts[0], end_lost
        self._pending_s, self.keep_ms = settings.pending_keep_s, round(settings.keep_s * 1000)
        self.renew_s = min(RENEW_INTERVAL_S, settings.keep_s / 4)
        """How often `renew_all` is to be called."""
        self._secret = secrets.token_hex(32).encode()
        """The one in Redis, once it was read. A Redis that lost it gets it back, so that ids stay the same."""
        self._open: dict[str, StreamMeta] = {}
        """By id, the unfinished requests that this gateway knows."""
        self._unwritten: set[str] = set()
        """The ids of meta data whose places are not in Redis yet."""

    async def derive_name(self, tenant: str, key: str) -> str:
        """Return 32 hex digits for a tenant's `Idempotency-Key`, the same at all gateways.

        They are derived with a secret that the first gateway writes to Redis. So a producer that knows tenant and
        key cannot make a request of its own under the id that a gateway will use.
        """
        with translate_outages():
            found = cast("bytes | None", await self._client.set(GATEWAY_SECRET_KEY, self._secret, nx=True, get=True))
        self._secret = found or self._secret
        return hmac.digest(self._secret, f"{tenant}\n{key}".encode(), "sha256").hex()[:32]

    async def put(self, meta: StreamMeta) -> StreamMeta:
        """Store meta data; return it, or what was stored before under its id."""
        with translate_outages():
            found = cast(
                "bytes | None",
                await self._client.set(stream_meta_key(meta.id), encode_meta(meta), nx=True, get=True, px=self.keep_ms),
            )
        kept = meta if found is None else decode_meta(meta.id, found)
        self._open[kept.id] = kept
        return kept

    async def note_published(self, meta: StreamMeta, places: Mapping[str, str], *, at_once: bool) -> None:
        """Note that the requests are durable as of now, and where their messages are; in Redis `at_once` or when the
        meta data is renewed.
        """
        noted = meta.model_copy(update={"published": now_s(), "places": {**meta.places, **places}})
        self._open[meta.id] = noted
        self._unwritten.add(meta.id)
        if at_once:
            await self.renew_ids([meta.id])

    async def find_meta(self, stream_id: str) -> StreamMeta | None:
        """Return the meta data of an id, of any tenant, or None, also where its tenant's key was dropped."""
        if not is_request_id(stream_id):
            return None
        with translate_outages():
            found: Any = await self._client.get(stream_meta_key(stream_id))
        with suppress(ContentErased):
            return None if found is None else decode_meta(stream_id, found)
        return None

    async def find_of_tenant(self, stream_id: str, tenant: str) -> StreamMeta:
        """Return a tenant's meta data. Raises `ApiError` 404, the same if it is another tenant's."""
        meta = await self.find_meta(stream_id)
        if meta is None or meta.tenant != tenant:
            raise not_found_error("stream", stream_id[:256])
        if now_s() > meta.published + self.keep_ms / 1000:  # a record that is not there may have ended and expired
            meta = meta.model_copy(update={"places": {}})
        return self._open.setdefault(meta.id, meta)

    async def delete_meta(self, meta: StreamMeta) -> None:
        """Delete meta data, so that its stream cannot be read any more."""
        self.stop_renewing(meta)
        with translate_outages():
            await self._client.delete(stream_meta_key(meta.id))

    async def note_ended(self, meta: StreamMeta) -> None:
        """Note that the requests have ended: from now on it is kept as long as their records."""
        self.stop_renewing(meta)
        with translate_outages():
            await self._client.pexpire(stream_meta_key(meta.id), self.keep_ms)

    def stop_renewing(self, meta: StreamMeta) -> None:
        """Stop renewing: the requests have ended, or it is not known whether they are durable."""
        self._open.pop(meta.id, None)
        self._unwritten.discard(meta.id)

    async def renew_all(self) -> None:
        """Renew the meta data of unfinished requests once; it lives for three more of these rounds.

        Requests that have ended are not renewed again. End those that no worker has seen and whose messages are gone.
        """
        renewed, unread = list(self._open.values()), defaultdict[str, dict[str, str]](dict)
        for first in range(0, len(renewed), MAX_RENEWED_PER_TRIP):
            metas = renewed[first : first + MAX_RENEWED_PER_TRIP]
            stages = await self._read_stages(itertools.chain.from_iterable(map(_list_records, metas)))
            is_there = await self.renew_ids(meta.id for meta in metas)
            for meta, there in zip(metas, is_there, strict=True):
                found = {one: stages.get(key, b"") for one, key in _list_records(meta)}
                has_ended = all(stage == b"end" for stage in found.values())
                if has_ended or not there or now_s() > meta.created + self._pending_s:
                    self.stop_renewing(meta)
                else:
                    places = meta.places.items()
                    unread[meta.pipeline] |= {one: place for one, place in places if found[one] in (None, b"new")}
        for pipeline, lost in unread.items():
            with suppress(BusUnavailable):  # the next round asks again
                await self._end_lost(pipeline, lost)

    async def renew_ids(self, ids: Iterable[str]) -> list[int]:
        """Renew the meta data of these ids, in one round trip, and write places that are not in Redis; return for each
        whether it is there.
        """
        renewed = list(ids)
        written = self._unwritten.intersection(renewed)
        with translate_outages():
            async with self._client.pipeline(transaction=False) as batch:
                for one in renewed:
                    if one in written and (encoded := _try_to_encode(self._open[one])) is not None:
                        batch.set(stream_meta_key(one), encoded, xx=True, px=self.keep_ms)
                    else:
                        batch.pexpire(stream_meta_key(one), self.keep_ms)
                is_there: list[int] = await batch.execute()
        self._unwritten -= written
        return is_there

    async def find_ended(self, keys: Iterable[tuple[str, str]]) -> set[str]:
        """Return which records have ended, of pairs of request id and record key; none of a server in an outage."""
        return {key for key, stage in (await self._read_stages(keys)).items() if stage == b"end"}

    async def _read_stages(self, keys: Iterable[tuple[str, str]]) -> dict[str, bytes | None]:
        """Return the stages of records, None where there is no record; without those of a server in an outage."""
        places, found = list(keys), dict[str, bytes | None]()
        for server in self._servers.parts:
            own = [key for request_id, key in places if self._servers[request_id] is server]
            with suppress(BusUnavailable), translate_outages():  # the next round asks again
                async with server.pipeline(transaction=False) as batch:
                    for key in own:
                        batch.hget(key, "stage")
                    found |= zip(own, await batch.execute(), strict=True)
        return found

    async def check_ended(self, metas: Sequence[StreamMeta]) -> list[bool]:
        """Return for each whether all its requests have ended; False while their server is away."""
        ended = await self.find_ended(itertools.chain.from_iterable(map(_list_records, metas)))
        return [all(key in ended for _, key in _list_records(meta)) for meta in metas]


def _try_to_encode(meta: StreamMeta) -> bytes | None:
    """Return meta data as JSON; None where the key of its tenant was dropped or lost: nobody can read it anyway."""
    try:
        return encode_meta(meta)
    except (ContentErased, TenantKeyMissing):
        return None


def _list_records(meta: StreamMeta) -> list[tuple[str, str]]:
    """Return the ids of the requests, each with its record's key."""
    return [(one, Pipeline(meta.pipeline).record_key(one)) for one in meta.request_ids]
