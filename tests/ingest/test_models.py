"""The models of `/v1/models`, from heartbeats that workers have written."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx
import pytest

from penstock.ingest import errors
from penstock.ingest.errors import ApiError
from penstock.ingest.models import ServedModels
from penstock.names import MODELS_KEY, Pipeline, WorkerKind
from penstock.redis.client import async_redis_client, redis_client
from penstock.worker.heartbeat import Heartbeat
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.gateways import open_stack

pytestmark = pytest.mark.proof


def beat(redis_url: str, pipeline: Pipeline, name: str = "d-0", kind: WorkerKind = "decode", /, **status: Any) -> None:
    """Write a heartbeat as a worker that is ready."""
    heartbeat = Heartbeat(redis_url, pipeline, kind, name, 60)
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


@pytest.mark.parametrize(("told", "expected"), [((True, True), True), ((True, None), False), ((None, True), False)])
async def test_a_model_sees_where_all_workers_that_read_requests_say_so(
    redis_url: str, pipeline: Pipeline, told: tuple[bool | None, ...], expected: bool
) -> None:
    """While workers are replaced, an earlier one may read the request. A decode worker never sees."""
    beat(redis_url, pipeline)
    for number, sees in enumerate(told):
        beat(redis_url, pipeline, f"p-{number}", "prefill", **({} if sees is None else {"sees": sees}))
    async with async_redis_client(redis_url) as client:
        assert (await ServedModels(client, "").find_model(pipeline.name)).sees is expected


async def test_a_model_sees_once_the_first_worker_that_reads_requests_says_so(
    redis_url: str, pipeline: Pipeline
) -> None:
    """At a start decode workers may be ready first: the heartbeats are read again then, whenever they were before."""
    beat(redis_url, pipeline)
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        assert not (await models.find_model(pipeline.name)).sees
        beat(redis_url, pipeline, "p-0", "prefill", sees=True)
        assert (await models.find_model(pipeline.name)).sees


async def test_a_rule_of_tokens_that_is_not_known_here_is_none(redis_url: str, pipeline: Pipeline) -> None:
    """As that of a newer worker."""
    beat(redis_url, pipeline, "p-0", "prefill", sees=True, picture_tokens={"kind": "spiral"})
    async with async_redis_client(redis_url) as client:
        served = await ServedModels(client, "").find_model(pipeline.name)
    assert (served.sees, served.picture_tokens) == (True, None)


async def test_a_model_is_listed_by_its_name_and_found_by_its_directory_too(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories of one name are two models: each is found by its path."""
    monkeypatch.setattr(errors, "MAX_NAMED", 10_000)  # other tests' models are served by this Redis as well
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


async def test_an_adapter_is_a_model_whose_tokenizer_is_that_of_its_parent(redis_url: str, pipeline: Pipeline) -> None:
    """Also once none of its workers lives. Asked by its directory, the parent answers."""
    name, told = pipeline.name, {f"{pipeline.name}-sql": "1" * 64, f"{pipeline.name}-chat": "2" * 64}
    beat(redis_url, pipeline, "p-0", "prefill", model_source=f"/a/{name}", max_model_len=64, sees=True, adapters=told)
    async with async_redis_client(redis_url) as client:
        for is_gone in (False, True):
            if is_gone:
                await client.delete(pipeline.worker_key("prefill", "p-0"))
            models = ServedModels(client, pipeline.name)
            mine = [model.name for model in await models.list_models() if name in model.name]
            assert mine == sorted([name, *told])
            found = await models.find_model(f"{name}-sql")
            assert (found.source, found.pipeline, found.max_model_len) == (f"/a/{name}", name, 64)
            assert (found.card, found.task) == ({"parent": name}, "generate")
            assert (await models.find_model(f"/a/{name}")).name == name


def test_an_unknown_models_error_names_some_and_counts_the_rest() -> None:
    names = [f"m-{number:02}" for number in range(errors.MAX_NAMED + 3)]
    assert str(errors.unknown_model_error("x", names)).endswith(f"{names[errors.MAX_NAMED - 1]!r} and 3 more.")
    assert str(errors.unknown_model_error("x", [*names[:2], names[0]])).endswith("Served here: 'm-00', 'm-01'.")
    assert str(errors.unknown_model_error("x", ())).endswith("No model is served now.")


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

    async def find_no_notes() -> dict[str, Any]:
        return {}

    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        with monkeypatch.context() as before:
            before.setattr(models, "_read_heartbeats", find_no_workers)
            before.setattr(models, "_read_notes", find_no_notes)
            assert await models.list_models() == []
        beat(redis_url, pipeline)
        assert pipeline.name in [model.name for model in await models.list_models()]


def stop(redis_url: str, pipeline: Pipeline, name: str = "d-0") -> None:
    """Take a worker's heartbeat away, as if it had ended."""
    with redis_client(redis_url) as client:
        client.delete(pipeline.worker_key("decode", name))


async def test_a_model_that_was_served_stays_known_until_it_is_forgotten(
    redis_url: str, pipeline: Pipeline, terminal: Terminal
) -> None:
    """By a gateway that never saw its worker, and with all that accepting a request takes."""

    def run(*words: str) -> "CompletedProcess[str]":
        return terminal("models", *words, PENSTOCK_STREAM_URL=redis_url)

    template: dict[str, Any] = {"fields": {"content": {}}}
    beat(redis_url, pipeline, model_source=f"/a/{pipeline.name}", max_model_len=512, response_template=template)
    async with async_redis_client(redis_url) as client:
        before = await ServedModels(client, "").find_model(pipeline.name)
        stop(redis_url, pipeline)
        models = ServedModels(client, "")
        assert before == await models.find_model(pipeline.name) == await models.find_model(f"/a/{pipeline.name}")
        assert (before.max_model_len, before.response_template) == (512, template)
        assert pipeline.name in run("list").stdout
        assert run("forget", pipeline.name).returncode == 0
        with pytest.raises(ApiError, match="does not exist"):
            await ServedModels(client, "").find_model(pipeline.name)
        await models.read_names()
        with pytest.raises(ApiError, match="does not exist"):
            await models.find_model(pipeline.name)
        assert f"no model {pipeline.name!r} was served" in run("forget", pipeline.name).stderr
        beat(redis_url, pipeline)
        assert (await ServedModels(client, "").find_model(pipeline.name)).max_model_len is None


async def test_a_model_of_which_redis_lost_the_note_is_noted_again(redis_url: str, pipeline: Pipeline) -> None:
    beat(redis_url, pipeline)
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        await models.find_model(pipeline.name)
        stop(redis_url, pipeline)
        await client.hdel(MODELS_KEY, f"{pipeline.name}:{pipeline.name}")
        await models.read_names()
        assert (await ServedModels(client, "").find_model(pipeline.name)).pipeline == pipeline.name


async def test_workers_that_live_come_before_a_model_of_the_same_name_without_any(
    redis_url: str, pipeline: Pipeline
) -> None:
    """Also before the gateway's own pipeline; once that has workers again it gets the requests."""
    other = Pipeline(f"{pipeline.name}-other")
    beat(redis_url, pipeline)
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, pipeline.name)
        await models.find_model(pipeline.name)
        stop(redis_url, pipeline)
        beat(redis_url, other, model=pipeline.name)
        await models.read_names()
        assert (await models.find_model(pipeline.name)).pipeline == other.name
        beat(redis_url, pipeline)
        await models.read_names()
        assert (await models.find_model(pipeline.name)).pipeline == pipeline.name


async def test_what_endpoints_serve_of_the_same_name_is_the_fallback(redis_url: str, pipeline: Pipeline) -> None:
    """Also where the own workers are away: a request does not go to endpoints unless its tenant allows that."""
    other, third = Pipeline(f"a-{pipeline.name}"), Pipeline(f"b-{pipeline.name}")
    name, template = pipeline.name, dict[str, Any](fields={"content": {}})
    beat(redis_url, pipeline)
    for one in (other, third):
        beat(redis_url, one, "e-0", "endpoint", model=name, response_template=template)
    async with async_redis_client(redis_url) as client:
        models = ServedModels(client, "")
        for is_away in (False, True):
            if is_away:
                stop(redis_url, pipeline)
                models = ServedModels(client, "")
            assert (await models.find_model(name)).pipeline == pipeline.name
            fallback = models.find_fallback(name)
            assert fallback is not None
            assert (fallback.pipeline, fallback.response_template) == (other.name, template)
            assert models.find_at(name, third.name) is not None
            assert await models.list_pipelines() >= {pipeline.name, other.name, third.name}, "their results are counted"
        await client.delete(other.worker_key("endpoint", "e-0"))
        beat(redis_url, other, "e-1", "endpoint", model=name, state="degraded")
        await models.read_names()
        found = models.find_fallback(name)
        assert found is not None
        assert found.pipeline == third.name, "the endpoints of the first one rest"
        own = ServedModels(client, other.name)
        assert (await own.find_model(name)).pipeline == other.name, "it is the gateway's own pipeline"
        assert own.find_fallback(name) is None


def test_at_zero_workers_a_gateway_that_is_restarted_accepts_what_the_next_worker_answers(tmp_path: Path) -> None:
    with open_stack(tmp_path, pipeline="zero", prefill=0, decode=0, auto=1) as stack:
        gateway, body = stack.gateway, {"model": "demo", "prompt": "Once", "max_tokens": 4, "temperature": 0}
        assert gateway is not None
        assert gateway.child is not None
        first = httpx.post(f"{stack.gateway_url}/v1/completions", json=body, timeout=None).json()
        stack.stop_workers()
        gateway.child.stop(PATIENCE_S)
        stack._start_slot(gateway)
        wait_for(stack._is_gateway_answering, "the gateway answers again")
        assert httpx.get(f"{stack.gateway_url}/v1/models").json()["data"][0]["id"] == "demo"
        with httpx.stream(
            "POST", f"{stack.gateway_url}/v1/completions", json=body | {"stream": True}, timeout=None
        ) as answer:
            assert answer.status_code == 200, "it is accepted, and waits"
            assert stack.restart_dead() == []  # starts the worker
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
        assert text == first["choices"][0]["text"]
