"""Cards: what any gateway must know of a request to stream it, in Redis; where there are several, in the first.

A card lives for `PENSTOCK_RECORD_KEEP_S`. The gateway that wrote it, or found it for a reader, renews it until its
requests have ended. If that gateway dies, the card of a request that nobody comes back to is forgotten; the request is
answered all the same.
"""

import asyncio
import hmac
import logging
import secrets
from contextlib import suppress
from typing import Any, cast

import redis.asyncio

from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable
from penstock.ingest.errors import not_found_error
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.messages import now_s
from penstock.names import GATEWAY_SECRET_KEY, Pipeline, card_key, is_request_id
from penstock.redis.client import translate_outages
from penstock.redis.servers import ByServer

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 60.0
"""How often the cards of unfinished requests are renewed; cards that live for less than four times this, more often."""
MAX_RENEWED_PER_TRIP = 500
"""Cards that are looked at in one round trip."""


class StreamMetaStore:
    """The cards of all requests that gateways took. All methods raise `BusUnavailable`."""

    def __init__(self, servers: "ByServer[redis.asyncio.Redis]", settings: RecordSettings) -> None:
        self._servers, self._client = servers, servers.parts[0]
        self._pending_s, self._keep_ms = settings.pending_keep_s, round(settings.keep_s * 1000)
        self._renew_s = min(RENEW_INTERVAL_S, settings.keep_s / 4)
        self._secret = secrets.token_hex(32).encode()
        """The one in Redis, once it was read: a Redis that lost it gets it back, and ids stay as they are."""
        self._open: dict[str, StreamMeta] = {}
        """By id, the cards of requests that have not ended, as far as this gateway knows."""

    async def derive_name(self, tenant: str, key: str) -> str:
        """Return 32 hex digits for a tenant's `Idempotency-Key`, the same at all gateways.

        They are made with a secret, which the first gateway leaves in Redis. Whoever knows tenant and key cannot tell
        them, and so cannot produce a request of his own under an id that a gateway will use.
        """
        with translate_outages():
            found = cast("bytes | None", await self._client.set(GATEWAY_SECRET_KEY, self._secret, nx=True, get=True))
        self._secret = found or self._secret
        return hmac.digest(self._secret, f"{tenant}\n{key}".encode(), "sha256").hex()[:32]

    async def put(self, meta: StreamMeta) -> StreamMeta:
        """Keep a card; returns it, or the one that was there before under its id."""
        with translate_outages():
            found = cast(
                "bytes | None",
                await self._client.set(card_key(meta.id), meta.model_dump_json(), nx=True, get=True, px=self._keep_ms),
            )
        kept = meta if found is None else StreamMeta.model_validate_json(found)
        self._open[kept.id] = kept
        return kept

    async def note_published(self, meta: StreamMeta) -> None:
        """Note in a card that its requests are durable, as of now."""
        noted = meta.model_copy(update={"published": now_s()})
        with translate_outages():
            await self._client.set(card_key(meta.id), noted.model_dump_json(), xx=True, keepttl=True)

    async def find_meta(self, stream_id: str) -> StreamMeta | None:
        """The card of an id, whoever's it is."""
        if not is_request_id(stream_id):
            return None
        with translate_outages():
            found: Any = await self._client.get(card_key(stream_id))
        return None if found is None else StreamMeta.model_validate_json(found)

    async def find_of_tenant(self, stream_id: str, tenant: str, kind: str = "stream") -> StreamMeta:
        """A tenant's card. Raises `ApiError` 404, the same for none and for another tenant's."""
        meta = await self.find_meta(stream_id)
        if meta is None or meta.tenant != tenant:
            raise not_found_error(kind, stream_id[:256])
        self._open[meta.id] = meta
        return meta

    async def delete_meta(self, meta: StreamMeta) -> None:
        """Nobody can read its stream any more."""
        self._open.pop(meta.id, None)
        with translate_outages():
            await self._client.delete(card_key(meta.id))

    async def note_ended(self, meta: StreamMeta) -> None:
        """Its requests have ended: it is kept as long as their records from now on."""
        self._open.pop(meta.id, None)
        with translate_outages():
            await self._client.pexpire(card_key(meta.id), self._keep_ms)

    def stop_renewing(self, meta: StreamMeta) -> None:
        """Renew a card no more: it is not known whether its requests are durable."""
        self._open.pop(meta.id, None)

    async def renew_forever(self) -> None:
        """Renew the cards of requests that have not ended, for ever."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self.renew_all()
            except BusUnavailable:
                continue  # they live for three more of these rounds
            except Exception:
                log.exception("cards are not renewed")

    async def renew_all(self) -> None:
        """Renew them once; one whose requests have ended is kept as long as their records from now on."""
        renewed = list(self._open.values())
        for first in range(0, len(renewed), MAX_RENEWED_PER_TRIP):
            metas = renewed[first : first + MAX_RENEWED_PER_TRIP]
            has_ended = await self._check_ended(metas)
            with translate_outages():
                async with self._client.pipeline(transaction=False) as batch:
                    for meta in metas:
                        batch.pexpire(card_key(meta.id), self._keep_ms)
                    is_there: list[int] = await batch.execute()
            for meta, ended, there in zip(metas, has_ended, is_there, strict=True):
                if ended or not there or now_s() > meta.created + self._pending_s:
                    self._open.pop(meta.id, None)

    async def _check_ended(self, metas: list[StreamMeta]) -> list[bool]:
        """Return of each card whether all its requests have ended; where a server is away, its requests have not."""
        places = [
            (request_id, Pipeline(meta.pipeline).record_key(request_id))
            for meta in metas
            for request_id in meta.request_ids
        ]
        ended = set[str]()
        for server in self._servers.parts:
            keys = [key for request_id, key in places if self._servers[request_id] is server]
            with suppress(BusUnavailable):  # the next round asks again
                ended.update(await _find_ended(server, keys))
        return [
            all(Pipeline(meta.pipeline).record_key(request_id) in ended for request_id in meta.request_ids)
            for meta in metas
        ]


async def _find_ended(server: "redis.asyncio.Redis", keys: list[str]) -> list[str]:
    """Return which of these records on a server say that their requests have ended. Raises `BusUnavailable`."""
    with translate_outages():
        async with server.pipeline(transaction=False) as batch:
            for key in keys:
                batch.hget(key, "stage")
            stages: list[bytes | None] = await batch.execute()
    return [key for key, stage in zip(keys, stages, strict=True) if stage == b"end"]
