"""The answering of a batch's rows, of a gateway's batch and of one from the command line; the pipeline is scripted."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from penstock.config.settings import BatchSettings
from penstock.errors import BusUnavailable, ModelError, PromptTooLong, StorageUnavailable, StreamExpired, StreamTimeout
from penstock.ingest.batch import answer as answer_module
from penstock.ingest.batch import journal as journal_module
from penstock.ingest.batch import runner as runner_module
from penstock.ingest.batch import work as work_module
from penstock.ingest.batch.answer import BatchJob, BatchRun, ModelPipeline, Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore, object_path
from penstock.ingest.batch.journal import Journal, JournalError, answer_batch_file, check_batch_file
from penstock.ingest.batch.lines import FinishedRow
from penstock.ingest.batch.runner import BatchRunner
from penstock.ingest.batch.shapes import LineError
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.errors import ApiError
from penstock.ingest.tenants import Caller
from penstock.objects import ObjectStorage
from penstock.redis.client import async_redis_client
from tests.ingest.answers import TEMPLATE
from tests.ingest.batch_files import ScriptedClient, create_batch, each_once, lines, read, read_file, row

MAX_ROWS = 4
CALLER = Caller(tenant="t", max_request_tokens=500)


class GatewayBatch:
    """A batch that a gateway works on."""

    def __init__(self, objects: ObjectStorage, caller: Caller = CALLER) -> None:
        self.objects, self.batches, self.files, self.caller = objects, BatchStore(objects), FileStore(objects), caller
        self.settings = BatchSettings(rows_in_flight=MAX_ROWS, max_lines=30)
        self.spec: BatchSpec

    async def create(self, content: bytes) -> list[tuple[int | None, str]]:
        """Make the batch; return the line and the message of what is wrong with its file."""
        self.spec = await create_batch(self.objects, self.caller, content)
        return [(one.line, one.message) for one in await self.find_errors()]

    async def find_errors(self) -> list[LineError]:
        pipeline = ScriptedClient()
        pipeline.is_open.clear()
        async with under_way(self.run(pipeline)):
            while (state := await self.batches.read_state(self.spec)).status == "validating":
                await asyncio.sleep(0.01)
        return [] if state.errors is None else state.errors.data

    async def run(self, pipeline: ScriptedClient) -> None:
        """Answer what is not finished."""
        await BatchWork(self.objects, self.spec, Pipelines(pipeline.find, MAX_ROWS), self.settings).run()

    async def read_rows(self) -> list[dict[str, Any]]:
        """Return all rows that were written, of the output and of the error file."""
        state, content = await self.batches.read_state(self.spec), b""
        for name in filter(None, (state.output_file_id, state.error_file_id)):
            file = await self.files.find_file(self.caller.tenant, name)
            content += b"".join([chunk async for chunk in self.files.read_content(self.caller.tenant, file)])
        return read(content)


class CommandBatch:
    """The same of `penstock batch run`."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output, self.errors = (folder / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))

    async def create(self, content: bytes) -> list[tuple[int | None, str]]:
        self.source.write_bytes(content)
        try:
            await check_batch_file(self.source)
        except JournalError as error:
            errors = [line.strip().partition(": ") for line in str(error).splitlines()[1:]]
            return [(int(where.removeprefix("line ")), what) if what else (None, where) for where, _, what in errors]
        return []

    async def run(self, pipeline: ScriptedClient) -> None:
        _, digest = await check_batch_file(self.source)
        with Journal(self.output, self.errors, digest) as journal:
            await answer_batch_file(pipeline.find, self.source, journal, lambda _: None)

    async def read_rows(self) -> list[dict[str, Any]]:
        return read_file(self.output) + read_file(self.errors)


BatchKind = GatewayBatch | CommandBatch


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (journal_module, work_module):
        monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(work_module, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(journal_module, "MAX_ROWS_IN_FLIGHT", MAX_ROWS)


@pytest.fixture
def objects() -> Iterator[ObjectStorage]:
    with closing(ObjectStorage(MemoryStore())) as made:
        yield made


Clients = dict[str, ScriptedClient]


@pytest.fixture
def clients() -> Clients:
    """Two models: `demo` is served, and nobody works for `dead`."""
    made = {"demo": ScriptedClient(), "dead": ScriptedClient()}
    made["dead"].is_open.clear()
    return made


@pytest.fixture(params=["gateway", "command"])
def batch(request: pytest.FixtureRequest, tmp_path: Path, objects: ObjectStorage) -> BatchKind:
    return GatewayBatch(objects) if request.param == "gateway" else CommandBatch(tmp_path)


URLS = {
    GatewayBatch: "'/v1/chat/completions'",
    CommandBatch: "'/v1/chat/completions' or '/v1/completions' or '/v1/responses' or '/v1/embeddings'",
}


@asynccontextmanager
async def under_way(running: Any) -> AsyncIterator["asyncio.Task[None]"]:
    """Run in the background, and stop as a process that is told to."""
    task = asyncio.create_task(running)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_rows_are_no_responses_that_last(tmp_path: Path) -> None:
    batch, asked = CommandBatch(tmp_path), {"model": "demo", "input": "x", "max_output_tokens": 6}
    bodies = [asked, asked | {"background": True}, asked | {"previous_response_id": "resp_1"}]
    rows = [row(number) | {"url": "/v1/responses", "body": body} for number, body in enumerate(bodies)]
    assert await batch.create(lines(rows)) == []
    await batch.run(ScriptedClient())
    found = {one["custom_id"]: one["response"]["body"] for one in await batch.read_rows()}
    assert (found["row-0"]["status"], found["row-0"]["store"]) == ("completed", False)
    assert [found[f"row-{n}"]["error"]["param"] for n in (1, 2)] == ["background", "previous_response_id"]


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TURNS = [{"role": "user", "content": "x"}]
CHAT: dict[str, Any] = {"messages": TURNS, "tools": [{"type": "function", "function": TOOL}]}
CALLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOL}]}),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}),
]  # fmt: skip


async def test_rows_with_tools_are_told_apart_as_at_the_gateway(tmp_path: Path) -> None:
    batch, pipeline = CommandBatch(tmp_path), ScriptedClient()
    pipeline.response_template = TEMPLATE
    pipeline.texts = ["<think>", "Hm", "</think>", '<tool_call>{"name": "f", ', '"arguments": {}}', "</tool_call>"]
    rows = [row(n) | {"url": url, "body": {"model": "demo", **body}} for n, (url, body) in enumerate(CALLING)]
    assert await batch.create(lines(rows)) == []
    await batch.run(pipeline)
    assert all(fields.get("special_text") for fields in pipeline.fields)
    assert sorted(bool(fields.get("grammar")) for fields in pipeline.fields) == [False, False, True]
    chat, response, _ = [
        one["response"]["body"] for one in sorted(await batch.read_rows(), key=lambda one: one["custom_id"])
    ]
    (choice,) = chat["choices"]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "Hm")
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": "{}"}]
    thought, call = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", "{}")


@pytest.mark.proof
async def test_each_row_is_answered_once_and_a_bad_one_fails_alone(batch: BatchKind) -> None:
    rows = [row(number) for number in range(20)]
    rows[3], rows[4], rows[5] = row(3, temperature=99), row(4, stream=True), row(5)
    del rows[5]["body"]["model"]
    assert await batch.create(lines(rows)) == []
    pipeline = ScriptedClient()
    await batch.run(pipeline)
    found = await batch.read_rows()
    assert each_once(found, 20)
    failed = {
        one["custom_id"]: one["response"]["body"]["error"] for one in found if one["response"]["status_code"] > 200
    }
    params = {name: error["param"] for name, error in failed.items()}
    assert params == {"row-3": "temperature", "row-4": "stream", "row-5": "model"}
    for one in found:
        if one["custom_id"] not in failed:
            assert one["response"]["body"]["choices"][0]["message"]["content"] == f"of {one['response']['request_id']}"
    assert len(pipeline.submitted) == len(set(pipeline.submitted)) == 17
    assert {fields["priority_class"] for fields in pipeline.fields} == {"batch"}


async def test_so_many_rows_are_under_way_and_no_more(batch: BatchKind) -> None:
    await batch.create(lines([row(number) for number in range(3 * MAX_ROWS)]))
    pipeline = ScriptedClient()
    pipeline.is_open.clear()
    async with under_way(batch.run(pipeline)) as running:
        await until(lambda: pipeline.num_waiting == MAX_ROWS)
        pipeline.is_open.set()
        await running
    assert pipeline.max_waiting == MAX_ROWS
    assert len(pipeline.answered) == 3 * MAX_ROWS


@pytest.mark.parametrize("first", [1, 5, 11])
async def test_stopped_it_goes_on_and_asks_no_finished_row_again(batch: BatchKind, first: int) -> None:
    """What is finished is written when it stops; what is asked again is asked under its old id."""
    await batch.create(lines([row(number) for number in range(12)]))
    before, after = ScriptedClient(), ScriptedClient()
    before.close_after = first
    async with under_way(batch.run(before)):
        await until(lambda: not before.is_open.is_set())
        for _ in range(10):  # an answer becomes a finished row within some turns of the loop
            await asyncio.sleep(0)
    await batch.run(after)
    assert each_once(await batch.read_rows(), 12)
    assert len(before.answered) >= first
    assert not set(before.answered) & set(after.submitted)
    assert set(before.submitted) - set(before.answered) <= set(after.submitted)
    assert len(set(before.submitted + after.submitted)) == 12


@pytest.mark.parametrize(
    "failure",
    [BusUnavailable("away"), StreamTimeout("silent"), StreamExpired("gone")],
    ids=lambda error: type(error).__name__,
)
async def test_an_outage_is_waited_for(batch: BatchKind, failure: Exception) -> None:
    await batch.create(lines([row(number) for number in range(3)]))
    pipeline = ScriptedClient()
    pipeline.failures = [failure] * 2
    await batch.run(pipeline)
    found = await batch.read_rows()
    assert each_once(found, 3)
    assert all(one["response"]["status_code"] == 200 for one in found)


TOO_LONG = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."
TELLS_TOO_LONG = {
    "message": TOO_LONG, "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded",
}  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [(ModelError("it cannot"), 500, {"code": "model_error"}), (PromptTooLong(TOO_LONG), 400, TELLS_TOO_LONG)],
)
async def test_a_request_that_fails_is_the_line_of_its_row(
    batch: BatchKind, failure: Exception, status: int, error: dict[str, str]
) -> None:
    await batch.create(lines([row(number) for number in range(3)]))
    pipeline = ScriptedClient()
    pipeline.failures = [failure]
    await batch.run(pipeline)
    found = await batch.read_rows()
    assert each_once(found, 3)
    (failed,) = [one["response"] for one in found if one["response"]["status_code"] != 200]
    assert (failed["status_code"], failed["body"]["error"] | error) == (status, failed["body"]["error"])


@pytest.mark.proof
async def test_what_is_no_batch_file_is_refused_with_its_lines(batch: BatchKind) -> None:
    assert await batch.create(lines([row(0), row(0), {**row(1), "url": "/v1/none"}]) + b"{") == [
        (2, "The custom_id 'row-0' was used before in this file."), (3, f"The 'url' must be {URLS[type(batch)]}."),
        (4, "This line is not parseable as valid JSON."),
    ]  # fmt: skip
    assert await batch.create(b"\n \n") == [(None, "The file has no requests.")]


class Sink:
    """Where rows are written; it can be held up, and it can fail. As on a thread a write ends even if nobody waits."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.num_writers = self.num_read = 0
        """Writes under way, and rows of the input that were read."""
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.error: Exception | None = None

    async def write_rows(self, rows: Sequence[FinishedRow]) -> None:
        await asyncio.shield(asyncio.create_task(self._write_rows(rows)))

    async def _write_rows(self, rows: Sequence[FinishedRow]) -> None:
        self.num_writers += 1
        assert self.num_writers == 1, "one group at a time"
        try:
            await self.is_free.wait()
            if self.error is not None:
                raise self.error
            self.written += [one.number for one in rows]
        finally:
            self.num_writers -= 1


def make_run(sink: Sink, pipeline: ScriptedClient, num_rows: int, flush_interval_s: float = 0.01) -> BatchRun:
    async def chunks() -> AsyncIterator[bytes]:
        for number in range(num_rows):
            sink.num_read += 1
            yield lines([row(number)])

    batch = BatchJob(("/v1/chat/completions",), chunks, flush_interval_s, name="b")
    return BatchRun(batch, Pipelines(pipeline.find, MAX_ROWS), sink.write_rows, lambda _: None)


ASKED = sorted(range(1, 101), key=lambda number: str(number - 1))
"""The numbers of lines as they are asked: by their prompts, see `row`."""


async def test_no_more_rows_are_read_than_are_under_way_and_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a batch takes no more memory than that, however slow its pipeline is."""
    monkeypatch.setattr(answer_module, "MAX_WINDOW_ROWS", 3)
    sink, pipeline = Sink(), ScriptedClient()
    pipeline.is_open.clear()
    async with under_way(make_run(sink, pipeline, 5 * MAX_ROWS).answer_rows(frozenset())):
        await until(lambda: pipeline.num_waiting == MAX_ROWS)
        assert sink.num_read == 6, "two windows"


@pytest.mark.parametrize(("window", "same"), [(100, 10), (6, 2)])
async def test_rows_whose_prompts_begin_alike_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, batch: BatchKind, window: int, same: int
) -> None:
    """Within a window of the file. A run that goes on after a crash asks the others in the same order."""
    monkeypatch.setattr(answer_module, "MAX_WINDOW_ROWS", window)
    books = ("Genesis", "Exodus", "Ruth")
    prompts = [[{"role": "user", "content": f"{books[number % 3]} {number}"}] for number in range(30)]
    assert await batch.create(lines([row(number, messages=prompts[number]) for number in range(30)])) == []
    asked = list[str]()
    for close_after in (7, None):
        pipeline = ScriptedClient()
        pipeline.close_after = close_after
        async with under_way(batch.run(pipeline)) as running:
            await until(lambda at=pipeline: at.close_after == len(at.answered) or running.done())
        asked += pipeline.answered
    numbers = [int(request_id.rpartition("-")[2]) - 1 for request_id in asked]
    assert sorted(numbers) == list(range(30))
    found = [(book, len(list(group))) for book, group in groupby(numbers, key=lambda number: books[number % 3])]
    assert found == [(book, same) for _ in range(0, 30, window) for book in sorted(books)]


@pytest.mark.parametrize(("interval_s", "most", "count"), [(0.01, 1000, 3), (3600.0, 5, 5)])
async def test_rows_are_written_while_others_are_under_way(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, most: int, count: int
) -> None:
    """So a process that is killed loses those of the last moment alone; many are written before their time."""
    monkeypatch.setattr(answer_module, "MAX_GROUP_ROWS", most)
    sink, pipeline = Sink(), ScriptedClient()
    pipeline.close_after = count + 1
    async with under_way(make_run(sink, pipeline, 12, interval_s).answer_rows(frozenset())):
        await until(lambda: len(sink.written) >= count)
        assert pipeline.num_waiting > 0


async def test_stopping_in_the_middle_of_a_write_writes_each_row_once() -> None:
    sink, pipeline = Sink(), ScriptedClient()
    sink.is_free.clear()
    pipeline.close_after = 6
    run = make_run(sink, pipeline, 12)
    answering = asyncio.create_task(run.answer_rows(frozenset()))
    await until(lambda: sink.num_writers and len(pipeline.answered) >= 6)
    answering.cancel()
    for _ in range(100):  # what is cancelled comes to its end, but for the write
        await asyncio.sleep(0)
    sink.is_free.set()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert set(sink.written) == set([one for one in ASKED if one <= 12][: len(pipeline.answered)])


async def test_a_write_that_fails_ends_the_run_and_keeps_the_rows() -> None:
    sink, pipeline = Sink(), ScriptedClient()
    sink.error, pipeline.close_after = StorageUnavailable("the file store cannot be used now"), 3
    run = make_run(sink, pipeline, 12)
    with pytest.raises(StorageUnavailable, match="the file store"):
        await run.answer_rows(frozenset())
    assert not sink.written
    sink.error = None
    await run.flush_rows()
    assert set(sink.written) == set([one for one in ASKED if one <= 12][: len(pipeline.answered)])


async def test_rows_that_are_skipped_are_cancelled_if_they_may_be_under_way() -> None:
    sink, pipeline = Sink(), ScriptedClient()
    await make_run(sink, pipeline, 3 * MAX_ROWS).skip_rows({1, 2}, "batch_cancelled")
    skipped = [one for one in ASKED if 2 < one <= 3 * MAX_ROWS]
    assert sink.written == skipped
    assert pipeline.cancelled == [f"chatcmpl-b-{number}" for number in skipped[:MAX_ROWS]]
    assert pipeline.submitted == []


async def test_counts_are_right_after_a_crash_between_a_part_and_its_counts(
    objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = GatewayBatch(objects)
    await batch.create(lines([row(number) for number in range(3)]))

    async def crash(store: BatchStore, spec: BatchSpec, state: Any) -> None:
        raise ApiError(503, "crashed")

    with monkeypatch.context() as patch:
        patch.setattr(BatchStore, "save_state", crash)
        with pytest.raises(ApiError, match="crashed"):
            await batch.run(ScriptedClient())
    after = ScriptedClient()
    await batch.run(after)
    assert after.submitted == []
    state = await batch.batches.read_state(batch.spec)
    assert (state.status, state.request_counts.completed, state.request_counts.failed) == ("completed", 3, 0)
    assert each_once(await batch.read_rows(), 3)


async def test_a_file_with_too_many_lines_is_refused(objects: ObjectStorage) -> None:
    batch = GatewayBatch(objects)
    assert await batch.create(lines([row(number) for number in range(31)])) == [(None, "A batch may have 30 requests.")]
    state = await batch.batches.read_state(batch.spec)
    assert (state.status, state.output_file_id) == ("failed", None)


@pytest.mark.proof
@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_gives_what_is_finished(objects: ObjectStorage, status: str) -> None:
    """It is cancelled, or its window ends, while no gateway works on it."""
    batch, before, after = GatewayBatch(objects), ScriptedClient(), ScriptedClient()
    await batch.create(lines([row(number) for number in range(24)]))
    before.close_after = 4
    async with under_way(batch.run(before)):
        await until(lambda: not before.is_open.is_set())
    if status == "cancelled":
        await batch.batches.cancel_batch(batch.caller.tenant, batch.spec.id)
    else:
        batch.spec = batch.spec.model_copy(update={"expires_at": int(time.time())})
    after.is_open.clear()
    await batch.run(after)
    found, state = await batch.read_rows(), await batch.batches.read_state(batch.spec)
    assert state.status == status
    assert each_once(found, 24)
    failed = [one for one in found if one["response"] is None]
    assert {one["error"]["code"] for one in failed} == {f"batch_{status}"}
    assert state.request_counts.completed == len(before.answered) == 24 - len(failed) >= 4
    assert state.request_counts.failed == len(failed)


@pytest.mark.proof
async def test_open_batches_have_a_limit_of_tokens(objects: ObjectStorage) -> None:
    """They are counted until they end; a batch that would be too much fails."""
    poor = Caller(tenant="poor", max_batch_tokens=1500)
    first, second, third = (GatewayBatch(objects, poor) for _ in range(3))
    content = lines([row(number, 8) for number in range(15)])
    assert await first.create(content) == []
    second.spec = await create_batch(objects, poor, content)
    await second.run(ScriptedClient())  # to its end: it counts until then
    assert [one.code for one in await second.find_errors()] == ["token_limit_exceeded"]
    assert await GatewayBatch(objects, Caller(tenant="rich")).create(content) == []
    await first.run(ScriptedClient())
    assert await third.create(content) == []


async def test_a_pipeline_without_workers_holds_up_its_own_rows_alone(objects: ObjectStorage, clients: Clients) -> None:
    pipelines = Pipelines(lambda model: clients[model].find(model), MAX_ROWS)
    settings = BatchSettings(rows_in_flight=MAX_ROWS)
    content = {model: lines([row(number, model=model) for number in range(3 * MAX_ROWS)]) for model in clients}
    dead, live = [await create_batch(objects, CALLER, content[model]) for model in ("dead", "demo")]
    async with under_way(BatchWork(objects, dead, pipelines, settings).run()):
        await until(lambda: clients["dead"].num_waiting == MAX_ROWS)
        await BatchWork(objects, live, pipelines, settings).run()
    state = await BatchStore(objects).read_state(live)
    assert (state.status, state.request_counts.completed) == ("completed", 3 * MAX_ROWS)


class FadingPipelines:
    """The model `demo` is not seen for hours while another one is; each look takes a virtual hour."""

    def __init__(self, client: ScriptedClient, num_misses: float) -> None:
        self.client, self.num_misses, self.hours = client, num_misses, 0

    def monotonic(self) -> float:
        return self.hours * 3600.0

    async def find(self, model: str) -> ModelPipeline:
        self.hours += 1
        await asyncio.sleep(0)
        if self.hours <= self.num_misses:
            raise ApiError(404, "only another model is served", code="model_not_found", param="model")
        return await self.client.find(model)


@pytest.mark.proof
async def test_lines_wait_for_their_model_whatever_else_is_served(
    objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient()
    fading = FadingPipelines(client, num_misses=100)
    monkeypatch.setattr(answer_module, "MODEL_CHECK_S", 0.0)
    monkeypatch.setattr(answer_module, "time", fading, raising=False)
    batch = GatewayBatch(objects)
    batch.spec = await create_batch(objects, CALLER, lines([row(number) for number in range(10)]))
    await BatchWork(objects, batch.spec, Pipelines(fading.find, MAX_ROWS), batch.settings).run()
    found = await batch.read_rows()
    assert each_once(found, 10)
    assert {one["response"]["status_code"] for one in found} == {200}


async def test_a_model_that_was_unknown_when_the_batch_was_accepted_stays_so(objects: ObjectStorage) -> None:
    """One gateway began, another goes on, which knows the model meanwhile: its lines fail all the same, alone."""
    batch = GatewayBatch(objects)
    content = lines([row(number, model="demo" if number % 2 else "typo") for number in range(12)])
    batch.spec = await create_batch(objects, CALLER, content, ["demo", "other"])
    before, after = ScriptedClient(), ScriptedClient()
    before.close_after = 3
    async with under_way(batch.run(before)):
        await until(lambda: not before.is_open.is_set())
    await batch.run(after)
    found = await batch.read_rows()
    assert each_once(found, 12)
    for one in found:
        is_good = int(one["custom_id"].removeprefix("row-")) % 2
        assert one["response"]["status_code"] == (200 if is_good else 404)
        assert is_good or one["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_batch_is_cancelled_while_its_lines_wait_for_their_model(
    objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fading = FadingPipelines(ScriptedClient(), num_misses=float("inf"))
    monkeypatch.setattr(answer_module, "MODEL_CHECK_S", 0.0)
    batch = GatewayBatch(objects)
    batch.spec = await create_batch(objects, CALLER, lines([row(number) for number in range(10)]), ["demo"])
    async with asyncio.TaskGroup() as tasks:
        work = BatchWork(objects, batch.spec, Pipelines(fading.find, MAX_ROWS), batch.settings)
        running = tasks.create_task(work.run())
        await until(lambda: fading.hours > 100)
        assert not running.done()
        await batch.batches.cancel_batch(CALLER.tenant, batch.spec.id)
    found = await batch.read_rows()
    assert each_once(found, 10)
    assert {one["error"]["code"] for one in found} == {"batch_cancelled"}


async def test_a_journal_of_an_older_version_is_gone_on_with(tmp_path: Path) -> None:
    """What was finished is kept, what the journal does not name is cut off, and ids are those of before."""
    batch = CommandBatch(tmp_path)
    await batch.create(lines([row(number) for number in range(4)]))
    batch.output.write_bytes(b'{"custom_id": "row-1"}\n{"custom_id": "row-3"')
    batch.errors.write_bytes(b'{"custom_id": "row-0"}\n')
    _, digest = await check_batch_file(batch.source)
    (tmp_path / "out.jsonl.journal").write_text(
        f'{{"v": 1, "run": "9a7c", "input": "{digest}", "output": 0, "errors": 0}}\n'
        '{"ok": [2], "failed": [1], "output": 23, "errors": 23}\n'
    )
    pipeline = ScriptedClient()
    await batch.run(pipeline)
    assert sorted(pipeline.submitted) == ["chatcmpl-9a7c-3", "chatcmpl-9a7c-4"]
    assert each_once(await batch.read_rows(), 4)
    with Journal(batch.output, batch.errors, digest) as journal:
        assert (journal.finished_rows, journal.num_failed) == ({1, 2, 3, 4}, 1)


RUNNER_SETTINGS = BatchSettings(rows_in_flight=4, look_s=0.1, lease_s=2)


@pytest.fixture
async def runner(redis_url: str, objects: ObjectStorage, clients: Clients) -> AsyncIterator[BatchRunner]:
    async with async_redis_client(redis_url) as client:
        made = BatchRunner(objects, client, lambda model: clients[model].find(model), RUNNER_SETTINGS)
        yield made
        await made.close()


async def make_batch(objects: ObjectStorage, tenant: str, model: str) -> BatchSpec:
    return await create_batch(objects, Caller(tenant=tenant), lines([row(0, max_tokens=1, model=model)]))


async def wait_for_state(objects: ObjectStorage, spec: BatchSpec, status: str) -> None:
    while (await BatchStore(objects).read_state(spec)).status != status:
        await asyncio.sleep(0.02)


async def let_one_pass(objects: ObjectStorage, runner: BatchRunner, tenants: list[str]) -> None:
    """Check that another tenant's batch is completed beside batches of these tenants, none of which will end."""
    specs = [await make_batch(objects, tenant, "dead") for tenant in tenants]
    runner.start()
    for spec in specs:
        await wait_for_state(objects, spec, "in_progress")
    late = await make_batch(objects, "late", "demo")
    runner.look_now()
    await wait_for_state(objects, late, "completed")


@pytest.mark.proof
async def test_a_tenant_with_many_batches_makes_way_for_another(objects: ObjectStorage, runner: BatchRunner) -> None:
    """One gateway works on so many at once."""
    await let_one_pass(objects, runner, ["many"] * runner_module.MAX_MOVING_BATCHES)


async def test_batches_that_stand_still_take_no_turn(
    objects: ObjectStorage, runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "STALLED_AFTER_S", 0.0)
    await let_one_pass(objects, runner, [f"t{n}" for n in range(runner_module.MAX_MOVING_BATCHES)])


async def test_a_batch_that_cannot_be_read_is_named_and_left_alone(
    objects: ObjectStorage, runner: BatchRunner, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = [await make_batch(objects, "acme", "demo") for _ in range(2)]
    await objects.put(object_path(damaged, "birth.json"), b"{half")
    with caplog.at_level(logging.ERROR):
        runner.start()
        await wait_for_state(objects, whole, "completed")
    assert [damaged.id in message for message in caplog.messages] == [True]
