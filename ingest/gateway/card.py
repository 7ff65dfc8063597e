"""Cards: what any gateway must know of a request to stream it, in Redis."""

from typing import Any, cast

import redis.asyncio

from ingest.gateway.errors import not_found
from ingest.openai.endpoint import Card
from penstock.client import outages_named
from penstock.names import card_key, is_request_id
from penstock.settings import RecordSettings


class Cards:
    """The cards of all requests that gateways took. All methods raise `BusUnavailable`."""

    def __init__(self, client: "redis.asyncio.Redis", settings: RecordSettings) -> None:
        self._client = client
        self._pending_ms, self._keep_ms = round(settings.pending_keep_s * 1000), round(settings.keep_s * 1000)

    async def put(self, card: Card) -> Card:
        """Keep a card; returns it, or the one that was there before under its id."""
        with outages_named():
            found = cast(
                "bytes | None",
                await self._client.set(
                    card_key(card.id), card.model_dump_json(), nx=True, get=True, px=self._pending_ms
                ),
            )
        return card if found is None else Card.model_validate_json(found)

    async def find(self, stream_id: str) -> Card | None:
        """The card of an id, whoever's it is."""
        if not is_request_id(stream_id):
            return None
        with outages_named():
            found: Any = await self._client.get(card_key(stream_id))
        return None if found is None else Card.model_validate_json(found)

    async def of_tenant(self, stream_id: str, tenant: str, kind: str = "stream") -> Card:
        """A tenant's card. Raises `ApiError` 404, the same for none and for another tenant's."""
        card = await self.find(stream_id)
        if card is None or card.tenant != tenant:
            raise not_found(kind, stream_id[:256])
        return card

    async def forget(self, card: Card) -> None:
        """Nobody can read its stream any more."""
        with outages_named():
            await self._client.delete(card_key(card.id))

    async def ended(self, card: Card) -> None:
        """Its requests have ended: it is kept as long as their records from now on."""
        with outages_named():
            await self._client.pexpire(card_key(card.id), self._keep_ms, lt=True)
