"""What any gateway must know of a request to stream it: its `StreamMeta`, in Redis; with several servers, in the first.

It lives for `PENSTOCK_RECORD_KEEP_S`. The gateway that wrote it, or found it for a reader, renews it until its
requests have ended. If that gateway dies and no reader comes back, the meta data of an unfinished request expires;
the request is answered all the same.
"""

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

import redis.asyncio

from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable
from penstock.ingest.errors import not_found_error
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.messages import now_s
from penstock.names import GATEWAY_SECRET_KEY, Pipeline, is_request_id, stream_meta_key
from penstock.redis.client import translate_outages
from penstock.redis.servers import Sharded

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 60.0
"""How often the meta data of unfinished requests is renewed; more often if it lives for less than four times this."""
MAX_RENEWED_PER_TRIP = 500
"""How many requests are renewed in one round trip."""


class StreamMetaStore:
    """The meta data of the requests of all gateways. All methods raise `BusUnavailable`."""

    def __init__(self, servers: "Sharded[redis.asyncio.Redis]", settings: RecordSettings) -> None:
        self._servers, self._client = servers, servers.parts[0]
        self._pending_s, self.keep_ms = settings.pending_keep_s, round(settings.keep_s * 1000)
        self._renew_s = min(RENEW_INTERVAL_S, settings.keep_s / 4)
        self._secret = secrets.token_hex(32).encode()
        """The one in Redis, once it was read. A Redis that lost it gets it back, so that ids stay the same."""
        self._open: dict[str, StreamMeta] = {}
        """By id, the unfinished requests that this gateway knows."""

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
                await self._client.set(
                    stream_meta_key(meta.id), meta.model_dump_json(), nx=True, get=True, px=self.keep_ms
                ),
            )
        kept = meta if found is None else StreamMeta.model_validate_json(found)
        self._open[kept.id] = kept
        return kept

    async def note_published(self, meta: StreamMeta) -> None:
        """Note that the requests are durable as of now."""
        noted = meta.model_copy(update={"published": now_s()})
        with translate_outages():
            await self._client.set(stream_meta_key(meta.id), noted.model_dump_json(), xx=True, keepttl=True)

    async def find_meta(self, stream_id: str) -> StreamMeta | None:
        """Return the meta data of an id, of any tenant, or None."""
        if not is_request_id(stream_id):
            return None
        with translate_outages():
            found: Any = await self._client.get(stream_meta_key(stream_id))
        return None if found is None else StreamMeta.model_validate_json(found)

    async def find_of_tenant(self, stream_id: str, tenant: str, kind: str = "stream") -> StreamMeta:
        """Return a tenant's meta data. Raises `ApiError` 404, the same if it is another tenant's."""
        meta = await self.find_meta(stream_id)
        if meta is None or meta.tenant != tenant:
            raise not_found_error(kind, stream_id[:256])
        self._open[meta.id] = meta
        return meta

    async def delete_meta(self, meta: StreamMeta) -> None:
        """Delete meta data, so that its stream cannot be read any more."""
        self._open.pop(meta.id, None)
        with translate_outages():
            await self._client.delete(stream_meta_key(meta.id))

    async def note_ended(self, meta: StreamMeta) -> None:
        """Note that the requests have ended: from now on it is kept as long as their records."""
        self._open.pop(meta.id, None)
        with translate_outages():
            await self._client.pexpire(stream_meta_key(meta.id), self.keep_ms)

    def stop_renewing(self, meta: StreamMeta) -> None:
        """Stop renewing, because it is not known whether the requests are durable."""
        self._open.pop(meta.id, None)

    async def renew_forever(self) -> None:
        """Renew the meta data of unfinished requests until cancelled."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self.renew_all()
            except BusUnavailable:
                continue  # they live for three more of these rounds
            except Exception:
                log.exception("what is stored of open streams was not renewed; it is tried again")

    async def renew_all(self) -> None:
        """Renew once. Requests that have ended are not renewed again."""
        renewed = list(self._open.values())
        for first in range(0, len(renewed), MAX_RENEWED_PER_TRIP):
            metas = renewed[first : first + MAX_RENEWED_PER_TRIP]
            has_ended = await self.check_ended(metas)
            is_there = await self.renew_ids(meta.id for meta in metas)
            for meta, ended, there in zip(metas, has_ended, is_there, strict=True):
                if ended or not there or now_s() > meta.created + self._pending_s:
                    self._open.pop(meta.id, None)

    async def renew_ids(self, ids: Iterable[str]) -> list[int]:
        """Renew the meta data of these ids, in one round trip; return for each whether it is there."""
        with translate_outages():
            async with self._client.pipeline(transaction=False) as batch:
                for one in ids:
                    batch.pexpire(stream_meta_key(one), self.keep_ms)
                is_there: list[int] = await batch.execute()
        return is_there

    async def find_ended(self, keys: Iterable[tuple[str, str]]) -> set[str]:
        """Return which records have ended, of pairs of request id and record key; none of a server in an outage."""
        places, ended = list(keys), set[str]()
        for server in self._servers.parts:
            own = [key for request_id, key in places if self._servers[request_id] is server]
            with suppress(BusUnavailable):  # the next round asks again
                ended.update(await _find_ended(server, own))
        return ended

    async def check_ended(self, metas: list[StreamMeta]) -> list[bool]:
        """Return for each whether all its requests have ended; False while their server is away."""
        keys = [[(one, Pipeline(meta.pipeline).record_key(one)) for one in meta.request_ids] for meta in metas]
        ended = await self.find_ended(itertools.chain.from_iterable(keys))
        return [all(key in ended for _, key in own) for own in keys]


async def _find_ended(server: "redis.asyncio.Redis", keys: list[str]) -> list[str]:
    """Return which of these records on a server have ended. Raises `BusUnavailable`."""
    with translate_outages():
        async with server.pipeline(transaction=False) as batch:
            for key in keys:
                batch.hget(key, "stage")
            stages: list[bytes | None] = await batch.execute()
    return [key for key, stage in zip(keys, stages, strict=True) if stage == b"end"]
