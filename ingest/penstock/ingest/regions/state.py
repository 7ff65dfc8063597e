"""What a region's gateways tell those of its peers each second: how long each model waits, and how fast it is.

A figure that is not known is None, never zero. `coverage` says how much of the region the figures are about.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import redis.asyncio
from pydantic import BaseModel, Field

from penstock.bus.beats import BEATS, parse_beats
from penstock.bus.placement import average_token_s
from penstock.ingest.admission import LagCache
from penstock.ingest.models import ServedModels
from penstock.names import ADOPTED_REGIONS_KEY, WORKERS_KEY, Pipeline, PriorityClass
from penstock.ops.account import Prices
from penstock.ops.lag import PipelineLag
from penstock.redis.client import translate_outages


class ModelState(BaseModel):
    """What a region tells of one model."""

    fingerprint: str | None
    """Of the weights and their arithmetic, as workers tell it; all of them where workers differ. None: none tells any,
    as those that ask endpoints."""
    prompt_token_s: float | None
    """Seconds of a prompt token now, on the mean over workers."""
    num_workers: int
    """Those that read requests, and whose heartbeats are fresh."""
    wait_s: dict[PriorityClass, float | None]
    """How long a new request of a class would wait. None while no worker has measured what it takes."""
    coverage: float = Field(ge=0, le=1)
    """The share of the workers whose heartbeats are fresh; 0 where the bus does not answer, or a stage has no worker
    that serves.
    """


ToldBeat = tuple[bytes, bytes, int]
"""A heartbeat as it lies in Redis: its key, its value, and the milliseconds that are left of its lease."""


class BatchOffer(BaseModel):
    """On what terms a region takes lines of other regions' batches while it is idle."""

    worker_hour: float | None = None
    """What an hour of its workers costs; None: it has no table of prices."""
    is_welcome: bool = True
    """Whether it takes any at this hour."""


class RegionState(BaseModel):
    """What a gateway tells of its region."""

    region: str
    incarnation: str
    """Names the gateway's process: one that was started again is another."""
    models: dict[str, ModelState]
    adopted: list[str]
    """The regions that this one has adopted."""
    ended: dict[str, float] = {}
    """By peer that has adopted this region, the time of the list of ids that this gateway has ended."""
    used: dict[str, int] = {}
    """What tenants with limits have used here, as `regions.limits.Used`."""
    batch: BatchOffer = BatchOffer()
    is_stopping: bool
    """Whether this gateway stops, and takes no new requests."""


SEEN_LASTS_S = 5
"""For how long a gateway's view of the regions lasts in Redis."""


class StateReader:
    """Reads what this gateway tells of its own region."""

    def __init__(
        self,
        region: str,
        pipeline: Pipeline,
        client: "redis.asyncio.Redis",
        models: ServedModels,
        lag_cache: LagCache,
        prices: Prices | None = None,
    ) -> None:
        self._region, self._pipeline, self._client, self._models = region, pipeline, client, models
        self._lag_cache, self._prices, self._incarnation = lag_cache, prices, uuid.uuid4().hex

    async def read_state(self) -> RegionState:
        """Return the state as of now. Raises `BusUnavailable`."""
        served = await self._models.list_models()
        with translate_outages():
            prefixes = [Pipeline(name).worker_prefix for name in {one.pipeline for one in served}]
            beats: list[ToldBeat] = await BEATS.run_async(self._client, [WORKERS_KEY], prefixes)
            adopted = cast("list[bytes]", await cast(Any, self._client.hkeys(ADOPTED_REGIONS_KEY)))
        models, now_s = dict[str, ModelState](), time.monotonic()
        for one in served:
            if one.name not in models:  # two pipelines with one name: new requests go to the first
                pipeline = Pipeline(one.pipeline)
                lag = await self._lag_cache.get_lag(pipeline)
                models[one.name] = describe_model(one.name, pipeline, beats, lag, now_s)
        return RegionState(
            region=self._region,
            incarnation=self._incarnation,
            models=models,
            adopted=sorted(name.decode() for name in adopted),
            batch=describe_offer(self._prices, time.gmtime()),
            is_stopping=False,
        )

    async def write_seen(self, seen: bytes) -> None:
        """Write how this gateway sees all regions, for `penstock top` and the page. Raises `BusUnavailable`."""
        with translate_outages():
            await self._client.set(self._pipeline.regions_key, seen, ex=SEEN_LASTS_S)


def describe_offer(prices: Prices | None, now: time.struct_time) -> BatchOffer:
    """Return what a table of prices says of other regions' batches at this time (UTC)."""
    if prices is None:
        return BatchOffer()
    costs, hour = prices.worker_hour.values(), now.tm_hour
    welcome = [
        begin <= hour < end if begin < end else hour >= begin or hour < end  # as from 22 to 6
        for begin, end in prices.batch_hours
    ]
    return BatchOffer(worker_hour=sum(costs) / len(costs) if costs else None, is_welcome=any(welcome) or not welcome)


def describe_model(
    name: str, pipeline: Pipeline, told: Sequence[ToldBeat], lag: PipelineLag | None, now_s: float
) -> ModelState:
    """Return what heartbeats and lag say of a model. Both have been read at `now_s`."""
    found, written = dict[bytes, Mapping[str, Any]](), json.dumps(name).encode()
    for key, value, _ in told:
        if key.startswith(pipeline.worker_prefix.encode()) and written in value:
            beat = json.loads(value)
            digest = (beat.get("adapters") or {}).get(name)
            if beat.get("model") == name:
                found[key] = beat
            elif digest is not None:  # two versions of an adapter are two models
                whole = beat.get("fingerprint")
                found[key] = beat | {"fingerprint": whole and f"{whole}+{digest}"}
    beats = parse_beats(pipeline, [one for one in told if one[0] in found], now_s)
    fresh = [beat for beat in beats if now_s < beat.stale_s]
    # Only Kafka has partitions. On Redis Streams all workers that take requests read the same ones.
    has_partitions = any(any(beat.partitions.values()) for beat in beats)
    readers = {
        beat.worker: beat.speed
        for beat in fresh
        if (any(beat.partitions.values()) if has_partitions else not beat.worker.startswith("decode:"))
    }
    fingerprints = sorted({beat["fingerprint"] for beat in found.values() if beat.get("fingerprint")})
    return ModelState(
        fingerprint=" ".join(fingerprints) or None,
        prompt_token_s=average_token_s(readers),
        num_workers=len(readers),
        wait_s=dict.fromkeys(("interactive", "batch")) if lag is None else dict(lag.waits),
        coverage=len(fresh) / len(found) if found and lag is not None and lag.is_served else 0.0,
    )
