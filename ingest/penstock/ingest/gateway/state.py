"""What all routes of one gateway process share, and which tenant calls."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from penstock.bus.connect import connect_bus
from penstock.client.aio import AsyncClient
from penstock.client.core import MAX_SILENCE_S, Event
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, GatewayProcessSettings
from penstock.errors import PenstockError
from penstock.grammar.checker import GrammarChecker
from penstock.ingest.admission import Admission
from penstock.ingest.batch.answer import ModelPipeline
from penstock.ingest.batch.runner import BatchService
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.broadcast import LiveBroadcast
from penstock.ingest.gateway.kept_responses import ResponseKeeper
from penstock.ingest.gateway.metrics import GatewayMetrics
from penstock.ingest.gateway.stream_meta import StreamMetaStore
from penstock.ingest.gateway.unread import UnreadStreams
from penstock.ingest.keys import open_key_source
from penstock.ingest.metering import meter_forever
from penstock.ingest.models import ServedModels
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.tenants import Caller, Keyring
from penstock.ingest.tokenizer import ModelTokenizers
from penstock.ingest.webhooks import Webhooks
from penstock.messages import GrammarSpec
from penstock.names import Pipeline
from penstock.ops.lag import PipelineLag
from penstock.redis.client import async_redis_client
from penstock.redis.servers import Sharded
from penstock.telemetry.meters import Meters

PIPELINE_CHECK_S = 5.0
"""How often to look for further pipelines whose results are to be counted."""


class Gateway:
    """Connections and caches of one event loop; nothing that outlives a request.

    Created with the app, opened and closed with its event loop.
    """

    def __init__(self, settings: GatewayProcessSettings, addresses: Addresses, meters: Meters) -> None:
        self.settings, self.addresses = settings, addresses
        self.bus = connect_bus(addresses, settings.bus)
        self.servers = Sharded.from_urls(addresses.stream_url, async_redis_client)
        self.redis = self.servers.parts[0]
        self.models = ServedModels(self.redis, addresses.pipeline)
        self.metrics = GatewayMetrics(meters, addresses, settings.bus)
        self.stream_metas = StreamMetaStore(self.servers, settings.record, self._end_lost)
        self.unread = UnreadStreams(self.redis, self.stream_metas, settings.gateway.cancel_unread_s)
        self.metrics.count_unread = self.unread.count
        self._key_source = open_key_source(settings.admission, settings.gateway.host, self.redis)
        self.keyring = Keyring(self._key_source)
        self.admission = Admission(self.redis, self._fetch_lag, settings.admission)
        self.broadcast = LiveBroadcast(self.metrics.watch_pipeline(addresses.pipeline))
        self.tokenizers = ModelTokenizers()
        self._checker = GrammarChecker()
        # Its own thread: checks wait for each other, and nothing else waits for them.
        self._checking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self.is_stopping = False
        """Whether this process was told to stop."""
        self._clients: dict[str, AsyncClient] = {}
        self._later = set[asyncio.Task[None]]()

    async def open(self) -> None:
        """Start what runs in the background. Call it before the first request."""
        self._metering = asyncio.create_task(
            meter_pipelines(self.models, self.addresses, self.settings.bus, self.metrics.pipelines)
        )
        self._renewing = asyncio.create_task(self.stream_metas.renew_forever())
        self._looking = asyncio.create_task(self.unread.look_forever(self.cancel_requests))
        self.webhooks = Webhooks(self.redis, self._key_source, self.settings.webhook, self.metrics.meters)
        self.webhooks.start()
        self.batch_service = BatchService(self.redis, self.find_pipeline, self.settings.batch, self.webhooks)
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

    def begin_stop(self) -> None:
        """Let all streams end, each with an event that says where to go on."""
        self.is_stopping = True
        self._looking.cancel()
        for client in self._clients.values():
            client.wake_readers()

    async def close(self) -> None:
        """Stop it and close all connections. Call it after the last request."""
        tasks = {self._metering, self._renewing, self._looking, *self._later}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.admission.close()
        await self.models.close()
        self.broadcast.stop()
        self._checking.shutdown(wait=False, cancel_futures=True)
        self._checker.close()
        await self.responses.close()
        await self.tokenizers.close()
        await self.batch_service.close()
        await self.webhooks.close()
        for client in self._clients.values():
            await client.close()
        await asyncio.to_thread(self.bus.close)
        for server in self.servers.parts:
            await server.aclose()

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; it is cancelled when this process stops."""
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def check_grammar(self, spec: GrammarSpec) -> None:
        """Have a child process check a grammar. Raises `UnsupportedSchema` or `InvalidRequest`."""
        await asyncio.get_running_loop().run_in_executor(self._checking, self._checker.check_grammar, spec)

    def get_client(self, pipeline: str) -> AsyncClient:
        """Return the client of a pipeline."""
        if pipeline not in self._clients:
            addresses = self.addresses.model_copy(update={"pipeline": pipeline})
            self._clients[pipeline] = AsyncClient(addresses, bus=self.settings.bus, record=self.settings.record)
        return self._clients[pipeline]

    async def cancel_requests(self, meta: StreamMeta) -> bool:
        """Cancel all requests of a stream; return whether any had not ended yet. Raises `BusUnavailable`."""
        client = self.get_client(meta.pipeline)
        return any(await asyncio.gather(*(client.cancel(request_id) for request_id in meta.request_ids)))

    def read_events(self, meta: StreamMeta) -> list[AsyncGenerator[list[Event], None]]:
        """Return the events of each request, as `AsyncClient.stream_batches` yields them, if its body is the one
        sent.
        """
        client, bodies = self.get_client(meta.pipeline), meta.bodies or [""] * len(meta.request_ids)
        settings = self.settings.gateway
        client.is_let_in = True  # Redis took or gave the stream's meta data: a refusal from now on may be over soon
        return [
            client.stream_batches(
                request_id,
                timeout_s=settings.patience_s,
                body=body,
                max_silence_s=min(settings.keep_alive_s, MAX_SILENCE_S),
            )
            for request_id, body in zip(meta.request_ids, bodies, strict=True)
        ]

    async def find_pipeline(self, model: str) -> ModelPipeline:
        """Return the pipeline that serves a model. Raises as `ServedModels.find_model`."""
        served = await self.models.find_model(model)
        return ModelPipeline(self.get_client(served.pipeline), served.response_template)

    def _list_pipelines(self) -> set[str]:
        return self.metrics.pipelines | {self.addresses.pipeline}

    async def _end_lost(self, pipeline: str, places: Mapping[str, str]) -> None:
        await self.get_client(pipeline).end_lost(places)

    async def _fetch_lag(self, pipeline: Pipeline) -> PipelineLag:
        return await self.get_client(pipeline.name).lag()


def get_gateway(request: HTTPConnection) -> Gateway:
    """Return the gateway that a request came to."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


async def meter_pipelines(models: ServedModels, addresses: Addresses, settings: BusSettings, found: set[str]) -> None:
    """Count the results of every served pipeline until cancelled; add the pipelines' names to `found`."""
    meter_tasks: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            found |= await _find_pipelines(models, addresses)
            for name in found:
                if name not in meter_tasks or meter_tasks[name].done():
                    own = addresses.model_copy(update={"pipeline": name})
                    meter_tasks[name] = asyncio.create_task(meter_forever(own, settings))
            await asyncio.sleep(PIPELINE_CHECK_S)
    finally:
        for task in meter_tasks.values():
            task.cancel()
        await asyncio.gather(*meter_tasks.values(), return_exceptions=True)


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
