"""The state that the streams of one gateway process share."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from penstock.client.aio import AsyncClient
from penstock.client.core import MAX_SILENCE_S, Event
from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings
from penstock.ingest.admission import Admission
from penstock.ingest.http.metrics import GatewayMetrics
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.streaming.broadcast import LiveBroadcast
from penstock.ingest.streaming.stream_meta import StreamMetaStore
from penstock.ingest.streaming.unread import UnreadStreams
from penstock.names import Pipeline
from penstock.ops.account import read_prices
from penstock.ops.lag import PipelineLag
from penstock.redis.client import async_redis_client
from penstock.redis.servers import Sharded
from penstock.telemetry.meters import Meters


class Streams:
    """The clients of all pipelines, the meta data of streams, and what is settled when a stream has ended."""

    def __init__(self, settings: GatewayProcessSettings, addresses: Addresses, meters: Meters) -> None:
        self.settings, self.addresses = settings, addresses
        self.servers = Sharded.from_urls(addresses.stream_url, async_redis_client)
        self.redis = self.servers.parts[0]
        self.prices = read_prices(settings.gateway.prices) if settings.gateway.prices else None
        self.metrics = GatewayMetrics(meters, addresses, settings.bus, self.prices)
        self.stream_metas = StreamMetaStore(self.servers, settings.record, self._end_lost)
        self.unread = UnreadStreams(self.redis, self.stream_metas, settings.gateway.cancel_unread_s)
        self.metrics.count_unread = self.unread.count
        has_peers = settings.region.peers != ""
        self.admission = Admission(self.redis, self._fetch_lag, settings.admission, has_peers=has_peers)
        self.broadcast = LiveBroadcast(self.metrics.watch_pipeline(addresses.pipeline))
        self.is_stopping = False
        """Whether this process was told to stop."""
        self.clients: dict[str, AsyncClient] = {}
        """By pipeline."""
        self.later = set[asyncio.Task[None]]()
        """The tasks in the background."""

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; it is cancelled when this process stops."""
        task = asyncio.create_task(work)
        self.later.add(task)
        task.add_done_callback(self.later.discard)

    def get_client(self, pipeline: str) -> AsyncClient:
        """Return the client of a pipeline."""
        if pipeline not in self.clients:
            addresses = self.addresses.model_copy(update={"pipeline": pipeline})
            self.clients[pipeline] = AsyncClient(addresses, bus=self.settings.bus, record=self.settings.record)
        return self.clients[pipeline]

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

    async def _end_lost(self, pipeline: str, places: Mapping[str, str]) -> None:
        await self.get_client(pipeline).end_lost(places)

    async def _fetch_lag(self, pipeline: Pipeline) -> PipelineLag:
        return await self.get_client(pipeline.name).lag()
