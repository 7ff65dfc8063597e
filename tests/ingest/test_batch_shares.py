"""Batches beside batches that do not move: of pipelines that nobody works for, and of tenants with many."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.config.settings import BatchSettings
from penstock.ingest.batch import runner as runner_module
from penstock.ingest.batch import work
from penstock.ingest.batch.answer import ModelPipeline
from penstock.ingest.batch.batches import BatchSpec, BatchStore, object_path
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.runner import BatchRunner
from penstock.ingest.tenants import Caller
from penstock.redis.client import async_redis_client
from tests.ingest.batch_files import ScriptedClient, create_batch, lines, row

SETTINGS = BatchSettings(rows_in_flight=4, look_s=0.1, lease_s=2)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStorage]:
    with closing(ObjectStorage.open(str(tmp_path))) as made:
        yield made


@pytest.fixture
async def runner(redis_url: str, objects: ObjectStorage) -> AsyncIterator[BatchRunner]:
    """It finds two pipelines: `demo` is served, and nobody works for `dead`."""
    clients = {"demo": ScriptedClient(), "dead": ScriptedClient()}
    clients["dead"].is_open.clear()

    async def find_pipeline(model: str) -> ModelPipeline:
        return await clients[model].find(model)

    async with async_redis_client(redis_url) as redis:
        made = BatchRunner(objects, redis, find_pipeline, SETTINGS)
        yield made
        await made.close()


async def make_batch(objects: ObjectStorage, tenant: str, model: str) -> BatchSpec:
    return await create_batch(objects, Caller(tenant=tenant), lines([row(0, max_tokens=1, model=model)]))


async def wait_for_state(objects: ObjectStorage, spec: BatchSpec, status: str) -> None:
    while (await BatchStore(objects).read_state(spec)).status != status:
        await asyncio.sleep(0.02)


async def test_a_tenant_with_many_batches_makes_way_for_another(objects: ObjectStorage, runner: BatchRunner) -> None:
    """None of the first tenant's will end, and one gateway works on so many at once."""
    specs = [await make_batch(objects, "many", "dead") for _ in range(runner_module.MAX_MOVING_BATCHES)]
    runner.start()
    for spec in specs:
        await wait_for_state(objects, spec, "in_progress")
    late = await make_batch(objects, "few", "demo")
    runner.look_now()
    await wait_for_state(objects, late, "completed")


async def test_batches_that_stand_still_take_no_turn(
    objects: ObjectStorage, runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "STALLED_AFTER_S", 0.0)
    specs = [await make_batch(objects, f"t{n}", "dead") for n in range(runner_module.MAX_MOVING_BATCHES)]
    runner.start()
    for spec in specs:
        await wait_for_state(objects, spec, "in_progress")
    late = await make_batch(objects, "late", "demo")
    runner.look_now()
    await wait_for_state(objects, late, "completed")


async def test_a_batch_that_cannot_be_read_is_named_and_left_alone(
    objects: ObjectStorage, runner: BatchRunner, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = [await make_batch(objects, "acme", "demo") for _ in range(2)]
    await objects.put(object_path(damaged, "birth.json"), b"{half")
    with caplog.at_level(logging.ERROR):
        runner.start()
        await wait_for_state(objects, whole, "completed")
    assert [damaged.id in message for message in caplog.messages] == [True]
