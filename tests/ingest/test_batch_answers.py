"""The answering of a batch's rows, of a gateway's batch and of one from the command line; the pipeline is scripted."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Protocol, Unpack

import pytest
from obstore.store import MemoryStore

from penstock.client.aio import AsyncClient
from penstock.client.core import Answer, RequestFields
from penstock.config.addresses import Addresses
from penstock.config.settings import BatchSettings
from penstock.errors import BusUnavailable, ModelError, StreamExpired, StreamTimeout
from penstock.ingest.batch import answer as answer_module
from penstock.ingest.batch import journal as journal_module
from penstock.ingest.batch import work as work_module
from penstock.ingest.batch.answer import Batch, BatchRun, FinishedRow, Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore
from penstock.ingest.batch.journal import Journal, JournalError, answer_batch_file, check_batch_file
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.shapes import LineError, NewBatch
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.errors import ApiError
from penstock.ingest.tenants import Caller
from penstock.messages import Timings, Usage
from tests.ingest.batch_files import each_once, lines, read, read_file, row

MAX_ROWS = 4


class ScriptedPipeline(AsyncClient):
    """A client whose pipeline answers at once while it is open, and not at all while it is closed."""

    def __init__(self) -> None:
        super().__init__(Addresses(pipeline="scripted", stream_url="redis://127.0.0.1:1/0"))
        self.submitted: list[str] = []
        self.fields: list[RequestFields] = []
        self.answered: list[str] = []
        self.cancelled: list[str] = []
        self.failures: list[Exception] = []
        """The next submits and results fail with these."""
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.close_after: int | None = None
        """It closes after so many answers."""
        self.num_waiting = self.max_waiting = 0

    async def submit(self, prompt: str | None = None, **fields: Unpack[RequestFields]) -> str:
        if self.failures and isinstance(self.failures[0], BusUnavailable):
            raise self.failures.pop(0)
        self.submitted.append(str(fields["id"]))
        self.fields.append(fields)
        return self.submitted[-1]

    async def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        self.num_waiting += 1
        self.max_waiting = max(self.max_waiting, self.num_waiting)
        try:
            await asyncio.sleep(0)  # so that others can be asked
            if self.close_after is not None and len(self.answered) >= self.close_after:
                self.is_open.clear()
            await self.is_open.wait()
            if self.failures:
                raise self.failures.pop(0)
        finally:
            self.num_waiting -= 1
        self.answered.append(request_id)
        usage = Usage(prompt_tokens=3, completion_tokens=2)
        return Answer(request_id, f"of {request_id}", [1, 2], "stop", usage, Timings(), [])

    async def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True


class BatchKind(Protocol):
    """A batch, and whoever answers it."""

    async def create(self, content: bytes) -> list[tuple[int | None, str]]:
        """Make the batch; return the line and the message of what is wrong with its file."""

    async def run(self, pipeline: AsyncClient) -> None:
        """Answer what is not finished."""

    async def read_rows(self) -> list[dict[str, Any]]:
        """Return all rows that were written, of the output and of the error file."""


class GatewayBatch:
    """One that a gateway works on."""

    def __init__(self, objects: ObjectStorage) -> None:
        self.objects, self.batches, self.files = objects, BatchStore(objects), FileStore(objects)
        self.settings = BatchSettings(rows_in_flight=MAX_ROWS, max_lines=30)
        self.spec: BatchSpec

    async def create(self, content: bytes) -> list[tuple[int | None, str]]:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        file = await self.files.save_file("t", "in.jsonl", "batch", pieces())
        new = NewBatch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        made = await self.batches.create_batch(Caller(tenant="t", max_request_tokens=500), new, file)
        spec = await self.batches.find_spec("t", made.id)
        assert spec is not None
        self.spec = spec
        return [(one.line, one.message) for one in await self.find_errors()]

    async def find_errors(self) -> list[LineError]:
        pipeline = ScriptedPipeline()
        pipeline.is_open.clear()
        async with under_way(self.run(pipeline)):
            while (state := await self.batches.read_state(self.spec)).status == "validating":
                await asyncio.sleep(0.01)
        return [] if state.errors is None else state.errors.data

    async def run(self, pipeline: AsyncClient) -> None:
        async def find_client(_: str) -> AsyncClient:
            return pipeline

        await BatchWork(self.objects, self.spec, Pipelines(find_client, MAX_ROWS), self.settings).run()

    async def read_rows(self) -> list[dict[str, Any]]:
        state, content = await self.batches.read_state(self.spec), b""
        for name in filter(None, (state.output_file_id, state.error_file_id)):
            file = await self.files.find_file("t", name)
            content += b"".join([piece async for piece in self.files.read_content("t", file)])
        return read(content)


class CommandBatch:
    """One of `penstock batch run`."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output, self.errors = (folder / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))

    async def create(self, content: bytes) -> list[tuple[int | None, str]]:
        self.source.write_bytes(content)
        try:
            await check_batch_file(self.source)
        except JournalError as error:
            told = [line.strip().partition(": ") for line in str(error).splitlines()[1:]]
            return [(int(where.removeprefix("line ")), what) if what else (None, where) for where, _, what in told]
        return []

    async def run(self, pipeline: AsyncClient) -> None:
        _, digest = await check_batch_file(self.source)
        with Journal(self.output, self.errors, digest) as journal:
            await answer_batch_file(pipeline, self.source, journal, lambda _: None)

    async def read_rows(self) -> list[dict[str, Any]]:
        return read_file(self.output) + read_file(self.errors)


@pytest.fixture(params=["gateway", "command"])
def batch(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchKind]:
    for module in (journal_module, work_module):
        monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(work_module, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(journal_module, "MAX_ROWS_IN_FLIGHT", MAX_ROWS)
    with closing(ObjectStorage(MemoryStore())) as objects:
        yield GatewayBatch(objects) if request.param == "gateway" else CommandBatch(tmp_path)


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
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_each_row_is_answered_once_and_a_bad_one_fails_alone(batch: BatchKind) -> None:
    rows = [row(number) for number in range(20)]
    rows[3], rows[4], rows[5] = row(3, temperature=99), row(4, stream=True), row(5)
    del rows[5]["body"]["model"]
    assert await batch.create(lines(rows)) == []
    pipeline = ScriptedPipeline()
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
    assert {fields["klass"] for fields in pipeline.fields} == {"batch"}


async def test_so_many_rows_are_under_way_and_no_more(batch: BatchKind) -> None:
    await batch.create(lines([row(number) for number in range(3 * MAX_ROWS)]))
    pipeline = ScriptedPipeline()
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
    before, after = ScriptedPipeline(), ScriptedPipeline()
    before.close_after = first
    async with under_way(batch.run(before)):
        await until(lambda: not before.is_open.is_set())
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
    pipeline = ScriptedPipeline()
    pipeline.failures = [failure] * 2
    await batch.run(pipeline)
    found = await batch.read_rows()
    assert each_once(found, 3)
    assert all(one["response"]["status_code"] == 200 for one in found)


async def test_a_request_that_fails_is_the_line_of_its_row(batch: BatchKind) -> None:
    await batch.create(lines([row(number) for number in range(3)]))
    pipeline = ScriptedPipeline()
    pipeline.failures = [ModelError("it cannot")]
    await batch.run(pipeline)
    found = await batch.read_rows()
    assert each_once(found, 3)
    assert [one["response"]["body"]["error"]["code"] for one in found if one["response"]["status_code"] == 500] == [
        "model_error"
    ]


async def test_what_is_no_batch_file_is_refused_with_its_lines(batch: BatchKind) -> None:
    assert await batch.create(lines([row(0), row(0), {**row(1), "url": "/v1/none"}]) + b"{") == [
        (2, "The custom_id 'row-0' was used before in this file."),
        (3, ANY_URL_MESSAGE[type(batch)]),
        (4, "This line is not parseable as valid JSON."),
    ]


async def test_an_empty_file_is_refused(batch: BatchKind) -> None:
    assert await batch.create(b"\n \n") == [(None, "The file has no requests.")]


ANY_URL_MESSAGE = {
    GatewayBatch: "The 'url' must be '/v1/chat/completions'.",
    CommandBatch: "The 'url' must be '/v1/chat/completions' or '/v1/completions' or '/v1/responses'.",
}


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


def make_run(sink: Sink, pipeline: AsyncClient, num_rows: int, flush_interval_s: float = 0.01) -> BatchRun:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(num_rows):
            sink.num_read += 1
            yield lines([row(number)])

    async def find_client(_: str) -> AsyncClient:
        return pipeline

    batch = Batch("b", ("/v1/chat/completions",), pieces, flush_interval_s)
    return BatchRun(batch, Pipelines(find_client, MAX_ROWS), sink.write_rows, lambda _: None)


NONE: Set[int] = frozenset()


async def test_no_more_rows_are_read_than_are_under_way() -> None:
    """So a batch takes no more memory than that, however slow its pipeline is."""
    sink, pipeline = Sink(), ScriptedPipeline()
    pipeline.is_open.clear()
    async with under_way(make_run(sink, pipeline, 5 * MAX_ROWS).answer_rows(NONE)):
        await until(lambda: pipeline.num_waiting == MAX_ROWS)
        assert sink.num_read == MAX_ROWS + 1


async def test_rows_are_written_while_others_are_under_way() -> None:
    """So a process that is killed loses those of the last moment alone."""
    sink, pipeline = Sink(), ScriptedPipeline()
    pipeline.close_after = 3
    async with under_way(make_run(sink, pipeline, 6).answer_rows(NONE)):
        await until(lambda: len(sink.written) >= 3)
        assert pipeline.num_waiting > 0


async def test_stopping_in_the_middle_of_a_write_writes_each_row_once() -> None:
    sink, pipeline = Sink(), ScriptedPipeline()
    sink.is_free.clear()
    pipeline.close_after = 6
    run = make_run(sink, pipeline, 12)
    answering = asyncio.create_task(run.answer_rows(NONE))
    await until(lambda: sink.num_writers and len(pipeline.answered) >= 6)
    answering.cancel()
    for _ in range(100):  # what is cancelled comes to its end, but for the write
        await asyncio.sleep(0)
    sink.is_free.set()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert sorted(sink.written) == list(range(1, len(pipeline.answered) + 1))


async def test_a_write_that_fails_ends_the_run_and_keeps_the_rows() -> None:
    sink, pipeline = Sink(), ScriptedPipeline()
    sink.error, pipeline.close_after = ApiError(503, "the file store cannot be used now"), 3
    run = make_run(sink, pipeline, 12)
    with pytest.raises(ApiError, match="the file store"):
        await run.answer_rows(NONE)
    assert not sink.written
    sink.error = None
    await run.flush_rows()
    assert sorted(sink.written) == list(range(1, len(pipeline.answered) + 1))


async def test_many_rows_are_written_before_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "MAX_GROUP_ROWS", 5)
    sink, pipeline = Sink(), ScriptedPipeline()
    pipeline.close_after = 8
    async with under_way(make_run(sink, pipeline, 12, flush_interval_s=3600).answer_rows(NONE)):
        await until(lambda: len(sink.written) >= 5)


async def test_rows_that_are_skipped_are_cancelled_if_they_may_be_under_way() -> None:
    sink, pipeline = Sink(), ScriptedPipeline()
    await make_run(sink, pipeline, 3 * MAX_ROWS).skip_rows({1, 2}, "batch_cancelled")
    assert sink.written == list(range(3, 3 * MAX_ROWS + 1))
    assert pipeline.cancelled == [f"chatcmpl-b-{number}" for number in range(3, 3 + MAX_ROWS)]
    assert pipeline.submitted == []


async def test_counts_are_right_after_a_crash_between_a_part_and_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ObjectStorage(MemoryStore())) as objects:
        batch = GatewayBatch(objects)
        await batch.create(lines([row(number) for number in range(3)]))

        async def crash(store: BatchStore, spec: BatchSpec, state: Any) -> None:
            raise ApiError(503, "crashed")

        monkeypatch.setattr(BatchStore, "save_state", crash)
        with pytest.raises(ApiError, match="crashed"):
            await batch.run(ScriptedPipeline())
        monkeypatch.undo()
        after = ScriptedPipeline()
        await batch.run(after)
        assert after.submitted == []
        state = await batch.batches.read_state(batch.spec)
        assert (state.status, state.request_counts.completed, state.request_counts.failed) == ("completed", 3, 0)
        assert each_once(await batch.read_rows(), 3)


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
    pipeline = ScriptedPipeline()
    await batch.run(pipeline)
    assert sorted(pipeline.submitted) == ["chatcmpl-9a7c-3", "chatcmpl-9a7c-4"]
    assert each_once(await batch.read_rows(), 4)
    with Journal(batch.output, batch.errors, digest) as journal:
        assert (journal.finished_rows, journal.num_failed) == ({1, 2, 3, 4}, 1)
