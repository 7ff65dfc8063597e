"""Files and batches through the official SDK, against real gateways and workers."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from penstock.client.aio import AsyncClient
from penstock.config.settings import BatchSettings
from penstock.ingest.batch.batches import BatchStore, object_path
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.runner import BatchService
from penstock.ingest.batch.shapes import NewBatch
from penstock.ingest.tenants import Caller
from penstock.local.stack import Stack
from penstock.redis.client import async_redis_client
from penstock.waiting import wait_until
from tests.ingest.batch_files import each_once, lines, read, result_ids, row


@pytest.fixture
def stack(line: Stack) -> Stack:
    return line


def make(sdk: openai.OpenAI, content: bytes) -> openai.types.Batch:
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def ended(sdk: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    over = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: sdk.batches.retrieve(batch_id).status in over, 120, "the batch's end", every_s=0.1)
    return sdk.batches.retrieve(batch_id)


def content_of(sdk: openai.OpenAI, file_id: str | None) -> bytes:
    return b"" if file_id is None else sdk.files.content(file_id).read()


def test_a_file_comes_back_as_it_went(sdk: openai.OpenAI) -> None:
    content = bytes(range(256)) * 1000
    made = sdk.files.create(
        file=("späte worte.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.filename, made.purpose) == (len(content), "späte worte.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).read() == content
    assert sdk.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(made.id)


def test_lists_come_in_pages(sdk: openai.OpenAI) -> None:
    made = [sdk.files.create(file=(f"{number}.jsonl", b"{}"), purpose="batch").id for number in range(5)]
    listed = [file.id for file in sdk.files.list(limit=2, order="asc", after=made[0])]
    assert listed == made[1:]
    assert [file.id for file in sdk.files.list(limit=2)][:5] == made[::-1]
    assert sdk.files.list(purpose="batch_output", after=made[0], order="asc").data == []


def test_what_is_no_upload_is_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        sdk.files.create(file=("in.jsonl", b"{}"), purpose="vision")
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.files.create(file=("in.jsonl", b"x" * 300_001), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="multipart"):
        sdk.post("/files", cast_to=object, body={"purpose": "batch"})


def test_a_batch_is_answered_and_a_bad_row_fails_alone(sdk: openai.OpenAI) -> None:
    rows = [row(number) for number in range(20)]
    rows[3] = row(3, temperature=99)
    rows[7] = row(7, tools=[{"type": "function", "function": {"name": "f"}}])
    rows[9] = row(9, n=2)
    made = make(sdk, lines(rows))
    assert made.status == "validating"
    batch = ended(sdk, made.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 18, "failed": 2}
    answers, failed = read(content_of(sdk, batch.output_file_id)), read(content_of(sdk, batch.error_file_id))
    assert each_once([*answers, *failed], 20)
    assert {one["custom_id"]: one["response"]["status_code"] for one in failed} == {"row-3": 400, "row-7": 400}
    by_id = {one["custom_id"]: one["response"]["body"] for one in answers}
    direct = sdk.post("/chat/completions", cast_to=openai.types.chat.ChatCompletion, body=rows[5]["body"])
    assert by_id["row-5"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert len(by_id["row-9"]["choices"]) == 2
    assert by_id["row-9"]["usage"]["completion_tokens"] == 12
    assert made.id in [one.id for one in sdk.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError):
        sdk.batches.cancel(made.id)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (lines([row(0), {**row(1), "url": "/v1/completions"}]), "mismatched_url", 2),
        (lines([{**row(n), "body": {}} for n in range(501)]), "too_many_lines", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_batch_file_fails(sdk: openai.OpenAI, content: bytes, code: str, number: int | None) -> None:
    batch = ended(sdk, make(sdk, content).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.output_file_id is None


def test_a_cancelled_batch_gives_what_is_finished(sdk: openai.OpenAI) -> None:
    """Its file is deleted meanwhile, which does not matter to it."""
    rows = [row(number, 4 if number < 4 else 900) for number in range(24)]
    made = make(sdk, lines(rows))
    sdk.files.delete(made.input_file_id)

    def counts() -> openai.types.BatchRequestCounts:
        found = sdk.batches.retrieve(made.id).request_counts
        assert found is not None
        return found

    wait_until(lambda: counts().completed >= 4, 120, "some answers", every_s=0.1)
    assert sdk.batches.cancel(made.id).status == "cancelling"
    batch = ended(sdk, made.id)
    assert batch.status == "cancelled"
    answers, failed = read(content_of(sdk, batch.output_file_id)), read(content_of(sdk, batch.error_file_id))
    assert each_once([*answers, *failed], 24)
    assert {f"row-{number}" for number in range(4)} <= {one["custom_id"] for one in answers}
    assert failed
    assert all(one["response"] is None and one["error"]["code"] == "batch_cancelled" for one in failed)
    assert (counts().completed, counts().failed) == (len(answers), len(failed))


async def pieces_of(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def test_an_expired_batch_gives_what_is_finished(stack: Stack, tmp_path: Path) -> None:
    """Its window ends while no gateway is there."""
    settings = BatchSettings(store=str(tmp_path / "files"), look_s=0.1)
    redis = async_redis_client(stack.addresses.stream_url)
    async with AsyncClient(stack.addresses) as client:

        async def client_of(model: str) -> AsyncClient:
            return client

        desk = BatchService(redis, client_of, settings)
        content = lines([row(number, 4 if number < 4 else 900) for number in range(24)])
        file = await desk.files.save_file("late", "in.jsonl", "batch", pieces_of(content))
        new = NewBatch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        made = await desk.batches.create_batch(Caller(tenant="late"), new, file)
        while (await desk.batches.find_batch("late", made.id)).request_counts.completed < 4:
            await asyncio.sleep(0.05)
        await desk.close()

        objects = ObjectStorage.open(settings.store_url)
        birth = await BatchStore(objects).find_spec("late", made.id)
        assert birth is not None
        over = birth.model_copy(update={"expires_at": int(time.time())})
        await objects.put(object_path(birth, "birth.json"), over.model_dump_json().encode())
        objects.close()

        desk = BatchService(redis, client_of, settings)
        while (batch := await desk.batches.find_batch("late", made.id)).status != "expired":
            await asyncio.sleep(0.05)
        told = []
        for name in (batch.output_file_id, batch.error_file_id):
            found = await desk.files.find_file("late", name or "")
            told.append(read(b"".join([piece async for piece in desk.files.read_content("late", found)])))
        await desk.close()
    await redis.aclose()
    answers, failed = told
    assert each_once([*answers, *failed], 24)
    assert len(answers) >= 4
    assert {one["error"]["code"] for one in failed} == {"batch_expired"}
    assert batch.request_counts.total == batch.request_counts.completed + batch.request_counts.failed == 24


async def test_open_batches_have_a_limit_of_tokens(stack: Stack, tmp_path: Path) -> None:
    """They are counted until they end; a batch that would be too much fails when it is looked at."""
    redis = async_redis_client(stack.addresses.stream_url)
    is_there = asyncio.Event()
    async with AsyncClient(stack.addresses) as client:

        async def client_of(model: str) -> AsyncClient:
            await is_there.wait()
            return client

        desk = BatchService(redis, client_of, BatchSettings(store=str(tmp_path / "files"), look_s=0.1))
        caller = Caller(tenant="poor", max_batch_tokens=1500)

        async def made(count: int, tenant: Caller) -> str:
            file = await desk.files.save_file(
                tenant.tenant, "in", "batch", pieces_of(lines([row(n, 8) for n in range(count)]))
            )
            new = NewBatch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
            batch = await desk.batches.create_batch(tenant, new, file)
            desk.runner.look_now()
            return batch.id

        async def status(batch_id: str, tenant: Caller, *wanted: str) -> str:
            while (found := (await desk.batches.find_batch(tenant.tenant, batch_id)).status) not in wanted:
                await asyncio.sleep(0.05)
            return found

        first = await made(15, caller)
        await status(first, caller, "in_progress")
        second, other = await made(15, caller), await made(30, Caller(tenant="rich"))
        assert await status(second, caller, "failed", "in_progress") == "failed"
        assert await status(other, Caller(tenant="rich"), "failed", "in_progress") == "in_progress"
        errors = (await desk.batches.find_batch("poor", second)).errors
        assert errors is not None
        assert [one.code for one in errors.data] == ["token_limit_exceeded"]
        is_there.set()
        await status(first, caller, "completed")
        third = await made(15, caller)
        assert await status(third, caller, "failed", "completed") == "completed"
        await desk.close()
    await redis.aclose()


def test_a_batch_goes_on_when_its_gateway_is_killed(stack: Stack, sdk: openai.OpenAI) -> None:
    """Every line once, in the output and in the results topic: nothing that was finished is asked again."""
    count = 250
    made = make(sdk, lines([row(number, 16) for number in range(count)]))
    asked = f"chatcmpl-{made.id.removeprefix('batch_')}-"
    wait_until(lambda: len(result_ids(stack, asked)) > 40, 60, "some results")
    assert stack.gateway is not None
    assert stack.gateway.child is not None
    stack.gateway.child.kill()
    stack.gateway.was_ready = False
    stack.wait_until_ready(60)
    batch = ended(sdk, made.id)
    assert batch.status == "completed"
    assert each_once(read(content_of(sdk, batch.output_file_id)), count)
    ids = result_ids(stack, asked)
    assert len(ids) == len(set(ids)) == count
