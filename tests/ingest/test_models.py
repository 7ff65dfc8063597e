"""The models of `/v1/models`, from heartbeats that workers have written."""

import uuid

from penstock.ingest.gateway.models import ServedModels
from penstock.names import Pipeline
from penstock.redis.client import async_redis_client
from penstock.worker.heartbeat import Heartbeat


async def test_a_model_has_the_context_that_all_its_workers_take(redis_url: str) -> None:
    pipeline = Pipeline(f"models-{uuid.uuid4().hex[:8]}")
    beats = [Heartbeat(redis_url, pipeline, "decode", name, 60) for name in ("small", "large", "of-before")]
    for beat, length in zip(beats, (512, 1024, None), strict=True):
        beat.update_status(model=pipeline.name, state="ready", max_model_len=length)
        beat.write_beat()
    async with async_redis_client(redis_url) as client:
        assert (await ServedModels(client, "").find_model(pipeline.name)).max_model_len == 512


async def test_workers_of_an_older_version_do_not_tell_the_context(redis_url: str) -> None:
    pipeline = Pipeline(f"models-{uuid.uuid4().hex[:8]}")
    beat = Heartbeat(redis_url, pipeline, "decode", "of-before", 60)
    beat.update_status(model=pipeline.name, state="ready")
    beat.write_beat()
    async with async_redis_client(redis_url) as client:
        assert (await ServedModels(client, "").find_model(pipeline.name)).max_model_len is None
