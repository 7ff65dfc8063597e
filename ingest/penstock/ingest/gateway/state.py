"""The state that all routes of one gateway process share, and which tenant calls."""

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

from fastapi import Depends, Request, Security
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
from penstock.ingest.gateway.kept_responses import ResponseKeeper
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
from penstock.ingest.tenants import Caller, Keyring, check_residency
from penstock.ingest.tokenizer import ModelTokenizers
from penstock.ingest.webhooks import Webhooks
from penstock.messages import GrammarSpec
from penstock.redis.client import redis_client
from penstock.telemetry.meters import Meters

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
        self.peers: Peers | None = None
        """None without regions."""
        self.forwarder: Forwarder | None = None
        if settings.region.peers:
            reader = StateReader(settings.region.name, self.redis, self.models, self.admission.lag_cache, self.prices)
            self.limits = SharedLimits(self.redis, self._key_source)
            self.peers = Peers(settings.region, reader, self.limits, meters)
            self.forwarder = Forwarder(self.peers, settings.region.secret, settings.gateway.keep_alive_s)
            self._returning = RegionReturn(settings.region, self.redis, self.peers, self._give_away)
            self._return_loop = SearchLoop("what peers have adopted", self._returning.look, LOOK_S)
        if settings.region.list_copies():
            check_bus(addresses)
            read_state = partial(read_copy_state, redis_client(addresses.first_url))
            watch_copies(meters, self.metrics.pipelines, settings.region.list_copies(), read_state)
        self.lender = None if self.peers is None else Lender(self.peers, settings.region.secret)
        self.lent_pipelines = Pipelines(self.find_pipeline, settings.batch.rows_in_flight)
        """They answer lines of other regions' batches."""
        # Its own thread: checks wait for each other, and nothing else waits for them.
        self._checking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def open(self) -> None:
        """Start what runs in the background. Call it before the first request."""
        self._metering = asyncio.create_task(
            follow_pipelines(self.models, self.addresses, self.settings, self.metrics.pipelines)
        )
        self._renewing = asyncio.create_task(self.stream_metas.renew_forever())
        self._looking = asyncio.create_task(self.unread.look_forever(self.cancel_requests))
        self.webhooks = Webhooks(self.redis, self._key_source, self.settings.webhook, self.metrics.meters)
        self.webhooks.start()
        home, lender = self.settings.region.name, self.lender
        self.batch_service = BatchService(
            self.redis, self.find_pipeline, self.settings.batch, self.webhooks, home, lender
        )
        self.responses = ResponseKeeper(
            self.redis,
            self.stream_metas,
            self.batch_service.objects,
            self.read_events,
            self.settings.responses,
            self.settings.record,
            self.webhooks,
        )
        self.responses.start(self._list_pipelines)
        if self.peers is not None:
            self.peers.start()
            self._return_loop.start()

    def begin_stop(self) -> None:
        """Let all streams end, each with an event that says where to go on."""
        self.is_stopping = True
        self._looking.cancel()
        for client in self.clients.values():
            client.wake_readers()
        if self.forwarder is not None:
            self.forwarder.begin_stop()

    async def close(self) -> None:
        """Stop it and close all connections. Call it after the last request."""
        tasks = {self._metering, self._renewing, self._looking, *self.later}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self.peers is not None:
            await self._return_loop.close()
            await self.peers.close()
        await self.admission.close()
        await self.models.close()
        self.broadcast.stop()
        self._checking.shutdown(wait=False, cancel_futures=True)
        self._checker.close()
        await self.responses.close()
        await self.tokenizers.close()
        await self.batch_service.close()
        await self.webhooks.close()
        for client in self.clients.values():
            await client.close()
        await asyncio.to_thread(self.bus.close)
        for server in self.servers.parts:
            await server.aclose()

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
        return ModelPipeline(self.get_client(served.pipeline), served.response_template, self.loosen_grammar)

    def _list_pipelines(self) -> set[str]:
        return self.metrics.pipelines | {self.addresses.pipeline}


def get_gateway(request: HTTPConnection) -> Gateway:
    """Return the gateway that a request came to."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


async def follow_pipelines(
    models: ServedModels, addresses: Addresses, settings: GatewayProcessSettings, found: set[str]
) -> None:
    """Count the results of every served pipeline, and index its copies of other regions, until cancelled; add the
    pipelines' names to `found`.
    """
    tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
    try:
        while True:
            found |= await _find_pipelines(models, addresses)
            for which in itertools.product(found, ("", *settings.region.list_copies())):
                if which not in tasks or tasks[which].done():
                    name, region = which
                    own = addresses.model_copy(update={"pipeline": name})
                    reader = CopyIndex(own, settings.bus, region) if region else UsageMeter(own, settings.bus)
                    tasks[which] = asyncio.create_task(read_forever(reader))
            await asyncio.sleep(PIPELINE_CHECK_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _find_pipelines(models: ServedModels, addresses: Addresses) -> set[str]:
    try:
        served = {model.pipeline for model in await models.list_models()}
    except PenstockError:
        served = set()
    return served | {addresses.pipeline}


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
