"""What all routes of one gateway process share."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from penstock.client.aio import AsyncClient
from penstock.client.core import Event
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    AdmissionSettings,
    BatchSettings,
    BusSettings,
    GatewaySettings,
    RecordSettings,
    load_settings,
)
from penstock.errors import PenstockError
from penstock.ingest.admission import Admission
from penstock.ingest.batch.runner import Desk
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.broadcast import Looks
from penstock.ingest.gateway.metrics import GatewayFigures
from penstock.ingest.gateway.models import Models
from penstock.ingest.gateway.stream_meta import Cards
from penstock.ingest.keys import source_of
from penstock.ingest.metering import meter_forever
from penstock.ingest.openai.endpoint import Card
from penstock.ingest.tenants import Caller, Keyring
from penstock.names import Pipeline
from penstock.ops.lag import PipelineLag
from penstock.redis.client import async_redis_client
from penstock.redis.servers import ByServer
from penstock.telemetry.meters import Meters

LOOK_S = 5.0
"""How often it looks for further pipelines."""


class Gateway:
    """Connections and what is known, for one event loop; nothing that outlives a request.

    Made with the app, opened and closed with its event loop.
    """

    def __init__(self, settings: GatewaySettings, addresses: Addresses, meters: Meters) -> None:
        self.settings, self.addresses = settings, addresses
        self.bus_settings, self._record_settings = load_settings(BusSettings), load_settings(RecordSettings)
        self.servers = ByServer.from_urls(addresses.stream_url, async_redis_client)
        self.redis = self.servers.parts[0]
        self.models = Models(self.redis, addresses.pipeline)
        self.figures = GatewayFigures(meters, addresses, self.bus_settings)
        self.cards = Cards(self.servers, self._record_settings)
        admission = load_settings(AdmissionSettings)
        self.keyring = Keyring(source_of(admission, settings.host, self.redis))
        self.admission = Admission(self.redis, self._lag_of, admission)
        self.looks = Looks(self.figures.watch(addresses.pipeline))
        self.is_stopping = False
        """Set when this process was told to stop: streams tell their readers to go on elsewhere."""
        self._clients: dict[str, AsyncClient] = {}
        self._later = set[asyncio.Task[None]]()

    async def open(self) -> None:
        """Before the first request."""
        self._metering = asyncio.create_task(count_all(self.models, self.addresses, self.figures.pipelines))
        self._renewing = asyncio.create_task(self.cards.renew_on())
        self.desk = Desk(self.redis, self.client_of, load_settings(BatchSettings))

    async def close(self) -> None:
        """After the last request."""
        tasks = {self._metering, self._renewing, *self._later}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self.looks.end()
        await self.desk.close()
        for client in self._clients.values():
            await client.close()
        for server in self.servers.parts:
            await server.aclose()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what nobody waits for; given up where this process stops."""
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def client(self, pipeline: str) -> AsyncClient:
        """The client of a pipeline."""
        if pipeline not in self._clients:
            addresses = self.addresses.model_copy(update={"pipeline": pipeline})
            self._clients[pipeline] = AsyncClient(addresses, bus=self.bus_settings, record=self._record_settings)
        return self._clients[pipeline]

    def news(self, card: Card) -> list[AsyncGenerator[list[Event], None]]:
        """The events of each of a card's requests, see `AsyncClient.news`; those of nobody else who used their ids."""
        client, bodies = self.client(card.pipeline), card.bodies or [""] * len(card.request_ids)
        return [
            client.news(request_id, timeout_s=self.settings.patience_s, body=body)
            for request_id, body in zip(card.request_ids, bodies, strict=True)
        ]

    async def client_of(self, model: str) -> AsyncClient:
        """The client of the pipeline that serves a model. Raises as `Models.find`."""
        return self.client((await self.models.find(model)).pipeline)

    async def _lag_of(self, pipeline: Pipeline) -> PipelineLag:
        return await self.client(pipeline.name).lag()


def gateway_of(request: HTTPConnection) -> Gateway:
    """The gateway that a request came to."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


async def count_all(models: Models, addresses: Addresses, found: set[str]) -> None:
    """Until cancelled. The names of all pipelines that were seen are put into `found`."""
    counting: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            found |= await _pipelines(models, addresses)
            for name in found:
                if name not in counting or counting[name].done():
                    own = addresses.model_copy(update={"pipeline": name})
                    counting[name] = asyncio.create_task(meter_forever(own))
            await asyncio.sleep(LOOK_S)
    finally:
        for task in counting.values():
            task.cancel()
        await asyncio.gather(*counting.values(), return_exceptions=True)


async def _pipelines(models: Models, addresses: Addresses) -> set[str]:
    try:
        served = {model.pipeline for model in await models.all()}
    except PenstockError:
        served = set()
    return served | {addresses.pipeline}


_BEARER = HTTPBearer(auto_error=False, description="An API key, `psk_…`. An open gateway asks for none.")


async def caller_of(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> Caller:
    """The caller, from the key alone. Raises `ApiError` 401."""
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise ApiError(401, "more than one Authorization header", code="invalid_api_key")
    return await gateway_of(request).keyring.caller_of(given[0] if given else None)


CallerDep = Annotated[Caller, Depends(caller_of)]
"""Of a route: `caller: CallerDep`."""
