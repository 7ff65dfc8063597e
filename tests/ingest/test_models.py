"""The models of `/v1/models`, from heartbeats that workers have written."""

from typing import Any

import pytest

from penstock.ingest.errors import ApiError
from penstock.ingest.models import ServedModels
from penstock.names import Pipeline
from penstock.redis.client import async_redis_client
from penstock.worker.heartbeat import Heartbeat

pytestmark = pytest.mark.proof


def beat(redis_url: str, pipeline: Pipeline, name: str = "d-0", **status: Any) -> None:
    """Write a heartbeat as a decode worker that is ready."""
    heartbeat = Heartbeat(redis_url, pipeline, "decode", name, 60)
    heartbeat.update_status(**{"model": pipeline.name, "state": "ready", **status})
    heartbeat.write_beat()


@pytest.mark.parametrize(("lengths", "expected"), [((512, 1024, None), 512), ((None,), None)])
async def test_a_model_has_the_context_that_all_its_workers_take(
    redis_url: str, pipeline: Pipeline, lengths: tuple[int | None, ...], expected: int | None
) -> None:
    """One that asks endpoints reports none."""
    for number, length in enumerate(lengths):
        beat(redis_url, pipeline, f"d-{number}", **({} if length is None else {"max_model_len": length}))
    async with async_redis_client(redis_url) as client:
        assert (await ServedModels(client, "").find_model(pipeline.name)).max_model_len == expected


async def test_a_model_is_listed_by_its_name_and_found_by_its_directory_too(redis_url: str, pipeline: Pipeline) -> None:
    """Two directories of one name are two models: each is found by its path."""
    name, other = pipeline.name, Pipeline(f"{pipeline.name}-other")
    for served, source in ((pipeline, f"/a/{name}"), (other, f"/b/{name}")):
        beat(redis_url, served, model=name, model_source=source)
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, pipeline.name)
        mine = [model for model in await models.list_models() if name in model.name]
        assert [(model.name, model.source) for model in mine] == [(name, f"/a/{name}")]
        for asked, found in ((name, pipeline), (f"/a/{name}", pipeline), (f"/b/{name}", other)):
            assert (await models.find_model(asked)).pipeline == found.name
        with pytest.raises(ApiError, match=rf"'nothing' does not exist .* Served here: .*{name!r}") as unknown:
            await models.find_model("nothing")
        assert f"/a/{name}" not in str(unknown.value)
        assert {name, f"/a/{name}", f"/b/{name}"} <= set(await models.read_names() or ())


async def test_the_models_of_the_gateways_own_pipeline_come_first(redis_url: str, pipeline: Pipeline) -> None:
    before = Pipeline(f"a-{pipeline.name}")
    beat(redis_url, before)
    beat(redis_url, pipeline)
    async with async_redis_client(redis_url) as client:
        for own, other in ((pipeline, before), (before, pipeline)):
            listed = [model.name for model in await ServedModels(client, own.name).list_models()]
            assert listed[0] == own.name
            assert other.name in listed


async def test_a_model_is_found_as_soon_as_its_first_worker_has_reported(redis_url: str, pipeline: Pipeline) -> None:
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        with pytest.raises(ApiError):
            await models.find_model(pipeline.name)
        beat(redis_url, pipeline)
        assert (await models.find_model(pipeline.name)).pipeline == pipeline.name


async def test_a_list_without_models_is_not_kept(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_no_workers() -> list[tuple[str, dict[str, Any]]]:
        return []

    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        with monkeypatch.context() as before:
            before.setattr(models, "_read_heartbeats", find_no_workers)
            assert await models.list_models() == []
        beat(redis_url, pipeline)
        assert pipeline.name in [model.name for model in await models.list_models()]
