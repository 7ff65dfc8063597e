"""What a region's gateways tell those of its peers each second: how long each model waits, and how fast it is.

A figure that is not known is None, never zero. `coverage` says how much of the region the figures are about.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import redis.asyncio
from pydantic import BaseModel, Field

from penstock.bus.beats import parse_beats
from penstock.bus.placement import average_token_s
from penstock.ingest.admission import LagCache
from penstock.ingest.models import ServedModels
from penstock.names import ADOPTED_REGIONS_KEY, REGIONS_SEEN_KEY, WORKERS_KEY, Pipeline, PriorityClass
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
    """How long a new request of a class would wait."""
    coverage: float = Field(ge=0, le=1)
    """The share of the workers whose heartbeats are fresh."""


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
    used: dict[str, tuple[int, int]] = {}
    """By tenant with limits, the requests and tokens that it has used here, as counted since this region's Redis began.
    """
    batch: BatchOffer = BatchOffer()
    is_stopping: bool
    """Whether this gateway stops, and takes no new requests."""


class ToldBeat(NamedTuple):
    """A heartbeat as it lies in Redis."""

    key: bytes
    value: bytes | None
    left_ms: int


SEEN_LASTS_S = 5
"""For how long a gateway's view of the regions lasts in Redis."""


class StateReader:
    """Reads what this gateway tells of its own region."""

    def __init__(
        self,
        region: str,
        client: "redis.asyncio.Redis",
        models: ServedModels,
        lag_cache: LagCache,
        prices: Prices | None = None,
    ) -> None:
        self._region, self._client, self._models, self._lag_cache = region, client, models, lag_cache
        self._prices = prices
        self._incarnation = uuid.uuid4().hex

    async def read_state(self) -> RegionState:
        """Return the state as of now. Raises `BusUnavailable`."""
        served = await self._models.list_models()
        with translate_outages():
            beats = await self._read_beats()
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
            await self._client.set(REGIONS_SEEN_KEY, seen, ex=SEEN_LASTS_S)

    async def _read_beats(self) -> list[ToldBeat]:
        keys = sorted(cast("set[bytes]", await cast(Any, self._client.smembers(WORKERS_KEY))))
        if not keys:
            return []
        async with self._client.pipeline(transaction=False) as asked:
            asked.mget(keys)
            for key in keys:
                asked.pttl(key)
            values, *left = await asked.execute()
        return [ToldBeat(*one) for one in zip(keys, values, left, strict=True)]


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
    found = dict[bytes, Mapping[str, Any]]()
    for one in told:
        if one.value is not None and one.key.startswith(pipeline.worker_prefix.encode()):
            beat = json.loads(one.value)
            found |= {one.key: beat} if beat.get("model") == name else {}
    beats = parse_beats(pipeline, (one for one in told if one.key in found), now_s)
    fresh = [beat for beat in beats if now_s < beat.stale_s]
    readers = {beat.worker: beat.speed for beat in fresh if any(beat.partitions.values())}
    fingerprints = sorted({beat["fingerprint"] for beat in found.values() if beat.get("fingerprint")})
    return ModelState(
        fingerprint=" ".join(fingerprints) or None,
        prompt_token_s=average_token_s(readers),
        num_workers=len(readers),
        wait_s=dict.fromkeys(("interactive", "batch")) if lag is None else dict(lag.waits),
        coverage=len(fresh) / len(found) if found else 0.0,
    )
