"""The state that all routes of one gateway process share, and which tenant calls."""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings
from penstock.errors import PenstockError
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.loosen import LoosenedGrammar
from penstock.ingest.batch.answer import ModelPipeline, Pipelines
from penstock.ingest.batch.runner import BatchService
from penstock.ingest.errors import ApiError
from penstock.ingest.fetching import PictureFetcher
from penstock.ingest.gateway.kept_responses import ResponseKeeper
from penstock.ingest.gateway.pictures import PictureDesk
from penstock.ingest.keys import open_key_source
from penstock.ingest.leased_reader import read_forever
from penstock.ingest.metering import UsageMeter
from penstock.ingest.models import ServedModels
from penstock.ingest.regions.copies import CopyIndex, check_bus, read_copy_state, watch_copies
from penstock.ingest.regions.forward import Forwarder
from penstock.ingest.regions.lending import Lender
from penstock.ingest.regions.limits import SharedLimits
from penstock.ingest.regions.peers import Peers
from penstock.ingest.regions.returning import LOOK_S, RegionReturn
from penstock.ingest.regions.state import StateReader
from penstock.ingest.search_loop import SearchLoop
from penstock.ingest.streaming.state import Streams
from penstock.ingest.streaming.unread import LOOK_S as UNREAD_LOOK_S
from penstock.ingest.tenants import Caller, Keyring, check_residency
from penstock.ingest.tokenizer import ModelTokenizers
from penstock.ingest.webhooks import Webhooks
from penstock.messages import GrammarSpec
from penstock.names import Pipeline
from penstock.pictures.store import PictureStore, delete_old_pictures
from penstock.redis.client import redis_client
from penstock.telemetry.meters import Meters

PICTURE_SWEEP_S = 3600.0
"""How often to look for pictures in the object store whose time is over."""
PIPELINE_CHECK_S = 5.0
"""How often to look for further pipelines whose results are to be counted."""


class Gateway(Streams):
    """Connections and caches of one event loop, beside those of its streams; nothing that outlives a request.

    Created with the app, opened and closed with its event loop.
    """

    def __init__(self, settings: GatewayProcessSettings, addresses: Addresses, meters: Meters) -> None:
        super().__init__(settings, addresses, meters)
        self.bus = connect_bus(addresses, settings.bus)
        self.models = ServedModels(self.redis, addresses.pipeline)
        self._key_source = open_key_source(settings.admission, settings.gateway.host, self.redis)
        self.keyring = Keyring(self._key_source)
        self.tokenizers = ModelTokenizers()
        self._checker = GrammarChecker()
        self._readers: dict[tuple[str, str], asyncio.Task[None]] = {}
        """What counts the results of each pipeline, and indexes its copies of each region."""
        self._loops = [
            SearchLoop("pipelines to count", self._follow_pipelines, PIPELINE_CHECK_S),
            SearchLoop("open streams", self.stream_metas.renew_all, self.stream_metas.renew_s),
            SearchLoop("streams without readers", self._look_unread, UNREAD_LOOK_S),
            SearchLoop("old pictures", self._sweep_pictures, PICTURE_SWEEP_S),
        ]
        self.peers: Peers | None = None
        """None without regions."""
        self.forwarder: Forwarder | None = None
        if settings.region.peers:
            home, lags = settings.region.name, self.admission.lag_cache
            reader = StateReader(home, Pipeline(addresses.pipeline), self.redis, self.models, lags, self.prices)
            self.limits = SharedLimits(self.redis, self._key_source)
            self.peers = Peers(settings.region, reader, self.limits, meters)
            self.forwarder = Forwarder(self.peers, settings.region.secret, settings.gateway.keep_alive_s)
            self.returning = RegionReturn(settings.region, self.redis, self.peers, self._give_away)
            self._loops += [*self.peers.loops, SearchLoop("what peers have adopted", self.returning.look, LOOK_S)]
        if settings.region.list_copies():
            check_bus(addresses)
            read_state = partial(read_copy_state, redis_client(addresses.first_url))
            watch_copies(meters, self.metrics.pipelines, settings.region.list_copies(), read_state)
        self.lender = None if self.peers is None else Lender(self.peers)
        self.lent_pipelines = Pipelines(self.find_pipeline, settings.batch.rows_in_flight)
        """They answer lines of other regions' batches."""
        # Its own thread: checks wait for each other, and nothing else waits for them.
        self._checking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def open(self) -> None:
        """Start what runs in the background. Call it before the first request."""
        self.webhooks = Webhooks(self.redis, self._key_source, self.settings.webhook, self.metrics.meters)
        self.webhooks.start()
        home, lender = self.settings.region.name, self.lender
        self.batch_service = BatchService(
            self.redis, self.find_pipeline, self.settings.batch, self.webhooks, home, lender
        )
        objects = self.batch_service.objects
        self._fetcher = PictureFetcher(self.settings.gateway)
        self._picture_store = PictureStore(self.addresses, objects, self.settings.picture, self.settings.record)
        self.pictures = PictureDesk(self.settings.picture, self._fetcher, self.batch_service.files, self._picture_store)
        self.responses = ResponseKeeper(
            self.redis,
            self.stream_metas,
            objects,
            self.read_events,
            self.settings.responses,
            self.settings.record,
            self.webhooks,
        )
        self.responses.start(lambda: set(self.metrics.pipelines))
        for loop in self._loops:
            loop.start()

    def begin_stop(self) -> None:
        """Let all streams end, each with an event that says where to go on."""
        self.is_stopping = True
        for client in self.clients.values():
            client.wake_readers()
        if self.forwarder is not None:
            self.forwarder.begin_stop()

    async def close(self) -> None:
        """Stop it and close all connections. Call it after the last request."""
        await asyncio.gather(*(loop.close() for loop in self._loops))
        tasks = {*self._readers.values(), *self.later}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.peers is not None:
            await self.peers.http.aclose()
        await self.admission.close()
        await self.models.close()
        self.broadcast.stop()
        self._checking.shutdown(wait=False, cancel_futures=True)
        self._checker.close()
        await self.responses.close()
        await self.tokenizers.close()
        await self.batch_service.close()
        self.pictures.close()
        await asyncio.to_thread(self._picture_store.close)
        self._fetcher.close()
        await self.webhooks.close()
        for client in self.clients.values():
            await client.close()
        await asyncio.to_thread(self.bus.close)
        for server in self.servers.parts:
            await server.aclose()

    def is_peer(self, secret: str) -> bool:
        """Return whether a caller knows the secret that gateways of all regions have."""
        return secrets.compare_digest(secret.encode(), self.settings.region.secret.encode())

    def check_residency(self, caller: Caller) -> None:
        """Raise `ApiError` 403 where this region may not have a caller's data: see `tenants.check_residency`."""
        check_residency(caller, self.settings.region.name, has_kafka=bool(self.addresses.kafka))

    async def loosen_grammar(self, spec: GrammarSpec, names: frozenset[str]) -> LoosenedGrammar:
        """Have a child process check a grammar, as `GrammarChecker.loosen_grammar` does."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._checking, self._checker.loosen_grammar, spec, names)

    async def _give_away(self, region: str, pipeline: str, ids: Sequence[str]) -> None:
        await self.get_client(pipeline).give_away(ids, region)

    async def find_pipeline(self, model: str) -> ModelPipeline:
        """Return the pipeline that serves a model. Raises as `ServedModels.find_model`."""
        served = await self.models.find_model(model)
        return ModelPipeline(
            self.get_client(served.pipeline),
            served.response_template,
            self.loosen_grammar,
            self.pictures.store_pictures if served.sees else None,
            self.settings.gateway.takes_token_ids,
        )

    async def _follow_pipelines(self) -> None:
        """Count the results of every pipeline that is served now, and index its copies of other regions."""
        with suppress(PenstockError):
            self.metrics.pipelines |= await self.models.list_pipelines()
        bus = self.settings.bus
        for which in itertools.product(self.metrics.pipelines, ("", *self.settings.region.list_copies())):
            if which not in self._readers or self._readers[which].done():
                name, region = which
                own = self.addresses.model_copy(update={"pipeline": name})
                reader = CopyIndex(own, bus, region) if region else UsageMeter(own, bus)
                self._readers[which] = asyncio.create_task(read_forever(reader))

    async def _sweep_pictures(self) -> None:
        await delete_old_pictures(self.batch_service.objects, self.settings.record)

    async def _look_unread(self) -> None:
        if not self.is_stopping:
            await self.unread.check_streams(self.cancel_requests)


def get_gateway(request: HTTPConnection) -> Gateway:
    """Return the gateway that a request came to."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


_BEARER = HTTPBearer(auto_error=False, description="An API key, `psk_…`. An open gateway asks for none.")
_API_KEY = APIKeyHeader(name="x-api-key", auto_error=False, description="The same, as Anthropic's SDKs send it.")


async def find_caller(
    request: Request,
    _bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    _api_key: Annotated[str | None, Security(_API_KEY)],
) -> Caller:
    """Return the caller, from the key alone. Raises `ApiError` 401."""
    given = request.headers.getlist("authorization")
    given += [f"Bearer {key}" for key in request.headers.getlist("x-api-key") if f"Bearer {key}" not in given]
    if len(given) > 1:
        raise ApiError(401, "more than one API key", code="invalid_api_key")
    return await get_gateway(request).keyring.authenticate_caller(given[0] if given else None)


CallerDep = Annotated[Caller, Depends(find_caller)]
"""The parameter of a route that needs a key: `caller: CallerDep`."""


async def find_asked(request: Request, x_penstock_peer: Annotated[str, Header()] = "") -> Gateway:
    """Return the gateway that a peer asks. Raises `ApiError` 404 for all who do not know `PENSTOCK_REGION_SECRET`."""
    gateway = get_gateway(request)
    if gateway.peers is None or not gateway.is_peer(x_penstock_peer):
        raise ApiError(404, f"there is no path {request.url.path}", code="not_found")
    return gateway


PeerDep = Annotated[Gateway, Depends(find_asked)]
"""The parameter of a route for the gateways of other regions."""
