"""Batches beside batches that do not move: of pipelines that nobody works for, and of tenants with many."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from penstock.client.aio import AsyncClient
from penstock.config.settings import BatchSettings
from penstock.ingest.batch import runner as runner_module
from penstock.ingest.batch import work
from penstock.ingest.batch.answer import FindClient, Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore, object_path
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.runner import BatchRunner
from penstock.ingest.batch.shapes import NewBatch
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.tenants import Caller
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.redis.client import async_redis_client
from tests.ingest.batch_files import lines, row

SETTINGS = BatchSettings(rows_in_flight=4, look_s=0.1, lease_s=2)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStorage]:
    with closing(ObjectStorage.open(str(tmp_path))) as made:
        yield made


@pytest.fixture
async def client_of(line: Stack, pipeline: Pipeline) -> AsyncIterator[Callable[[str], Awaitable[AsyncClient]]]:
    """Clients of two pipelines: `demo` is served, and nobody works for `dead`."""
    nobodys = line.addresses.model_copy(update={"pipeline": pipeline.name})
    async with AsyncClient(line.addresses) as live, AsyncClient(nobodys) as dead:

        async def find(model: str) -> AsyncClient:
            return {"demo": live, "dead": dead}[model]

        yield find


@pytest.fixture
async def runner(line: Stack, objects: ObjectStorage, client_of: FindClient) -> AsyncIterator[BatchRunner]:
    async with async_redis_client(line.addresses.stream_url) as redis:
        made = BatchRunner(objects, redis, client_of, SETTINGS)
        yield made
        await made.close()


async def make_batch(objects: ObjectStorage, tenant: str, model: str, num_rows: int = 1) -> BatchSpec:
    async def pieces() -> AsyncIterator[bytes]:
        yield lines([row(number, max_tokens=1, model=model) for number in range(num_rows)])

    file = await FileStore(objects).save_file(tenant, "in.jsonl", "batch", pieces())
    new = NewBatch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    made = await BatchStore(objects).create_batch(Caller(tenant=tenant), new, file)
    birth = await BatchStore(objects).find_spec(tenant, made.id)
    assert birth is not None
    return birth


async def wait_for_state(objects: ObjectStorage, birth: BatchSpec, status: str) -> None:
    async with asyncio.timeout(60):
        while (await BatchStore(objects).read_state(birth)).status != status:
            await asyncio.sleep(0.02)


async def test_a_pipeline_without_workers_holds_up_its_own_rows_alone(
    objects: ObjectStorage, client_of: FindClient
) -> None:
    pipelines = Pipelines(client_of, SETTINGS.rows_in_flight)
    births = [await make_batch(objects, "acme", model, 3 * SETTINGS.rows_in_flight) for model in ("dead", "demo")]
    dead = asyncio.create_task(BatchWork(objects, births[0], pipelines, SETTINGS).run())
    async with asyncio.timeout(60):
        while not pipelines.row_slots[await client_of("dead")].locked():
            await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        await BatchWork(objects, births[1], pipelines, SETTINGS).run()
    state = await BatchStore(objects).read_state(births[1])
    assert (state.status, state.request_counts.completed) == ("completed", 3 * SETTINGS.rows_in_flight)
    dead.cancel()
    with suppress(asyncio.CancelledError):
        await dead


async def test_a_tenant_with_many_batches_makes_way_for_another(objects: ObjectStorage, runner: BatchRunner) -> None:
    """None of the first tenant's will end, and one gateway works on so many at once."""
    births = [await make_batch(objects, "many", "dead") for _ in range(runner_module.MAX_MOVING_BATCHES)]
    runner.start()
    for birth in births:
        await wait_for_state(objects, birth, "in_progress")
    late = await make_batch(objects, "few", "demo")
    runner.look_now()
    await wait_for_state(objects, late, "completed")


async def test_batches_that_stand_still_take_no_turn(
    objects: ObjectStorage, runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "STALLED_AFTER_S", 0.0)
    births = [await make_batch(objects, f"t{n}", "dead") for n in range(runner_module.MAX_MOVING_BATCHES)]
    runner.start()
    for birth in births:
        await wait_for_state(objects, birth, "in_progress")
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
    assert [damaged.id in told for told in caplog.messages] == [True]
