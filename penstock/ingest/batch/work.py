"""Work on one batch.

    1  validate    every line is checked; a file that is not a batch file fails here
    2  load        which lines the parts hold; finished lines are not asked again
    3  ask         the others, a bounded number at a time, in class `batch`; request ids are made of batch and line
    4  store       finished lines in a part, then the counts
    5  finalize    lines that were not answered before the cancellation or the end of the window get an error line
    6  collect     output and error file are made of the parts
    7  end         the batch names them; parts and input are deleted

A crash after 1 costs nothing. A crash in 3 or 4 costs the lines that were asked and are not yet in a part: they are
asked again under their ids, which joins requests that run, or ended within the hour that a stream is kept, and
generates older ones again. There are at most `rows_in_flight` of them and one unwritten part. A crash after 6 costs
a second pair of files that the batch does not name; they expire.

A row takes two slots: one of its batch, which bounds memory, and one of the pipeline that answers it, which bounds
what all batches ask of that. So a pipeline that is slow, or has no workers, delays its own rows alone.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from penstock.client.aio import AsyncClient
from penstock.config.settings import BatchSettings
from penstock.errors import BusUnavailable
from penstock.ingest.batch.answer import BatchTerms, answer_row, cancel_row, make_error_row, make_skipped_row
from penstock.ingest.batch.batches import BatchSpec, BatchStore, object_path
from penstock.ingest.batch.lines import Row, check_lines, estimate_row_tokens, parse_row, split_lines
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.parts import FinishedParts
from penstock.ingest.batch.shapes import BatchState, LineError, LineErrors, RequestCounts, Status
from penstock.ingest.batch.store import FileStore
from penstock.ingest.errors import ApiError

FindClient = Callable[[str], Awaitable[AsyncClient]]
"""Returns the client of the pipeline that serves a model. Raises `ApiError`: 404 for an unknown model, else 503."""
FLUSH_INTERVAL_S = 5.0
CHECK_INTERVAL_S = 1.0
MODEL_WAIT_S = 60.0
"""How long to wait for workers that serve a model, which may be starting."""
STALLED_AFTER_S = 60.0
"""A batch stands still if no line was finished for this long."""

RowSlots = defaultdict[AsyncClient, asyncio.Semaphore]
"""How many more rows this process may ask of each pipeline, for all batches together."""


def make_row_slots(num_rows: int) -> RowSlots:
    """Return `num_rows` slots for each pipeline."""
    return defaultdict(lambda: asyncio.Semaphore(num_rows))


class BatchWork:
    """The work of one process on one batch."""

    def __init__(
        self,
        objects: ObjectStorage,
        spec: BatchSpec,
        find_client: FindClient,
        row_slots: RowSlots,
        settings: BatchSettings,
    ) -> None:
        self._objects, self._spec, self._find_client, self._row_slots = objects, spec, find_client, row_slots
        self._batches, self._files, self._parts = BatchStore(objects), FileStore(objects), FinishedParts(objects, spec)
        self._settings = settings
        self._terms = BatchTerms(spec.tenant, spec.weight, float(spec.expires_at), spec.max_request_tokens)
        self._state = BatchState()
        self._flush_lock = asyncio.Lock()
        self._flushed_at = time.monotonic()
        self._started_at = self._progress_at = time.monotonic()

    @property
    def is_moving(self) -> bool:
        """Whether a line was finished lately, or the work has only just begun."""
        return time.monotonic() < self._progress_at + STALLED_AFTER_S

    async def run(self) -> None:
        """Work until the batch has ended. Raises `ApiError` 503 without the store; call it again then."""
        if await self._batches.has_ended(self._spec):
            await self._batches.clear_batch(self._spec)
            return
        self._state = await self._batches.read_state(self._spec)
        if self._state.status == "validating" and not await self._validate_input():
            return
        await self._parts.load_finished()
        status = await self._answer_until_end()
        await self._finalize_batch(status)

    async def flush_progress(self) -> None:
        """Write finished lines and counts, also when this work is stopped for another process to continue."""
        async with self._flush_lock:
            await self._parts.flush_rows()
            self._flushed_at = time.monotonic()
            num_done = len(self._parts.finished_rows)
            counts = RequestCounts(
                total=self._state.request_counts.total,
                completed=self._parts.num_ok,
                failed=num_done - self._parts.num_ok,
            )
            if counts != self._state.request_counts:
                self._state.request_counts = counts
                await self._batches.save_state(self._spec, self._state)

    async def _validate_input(self) -> bool:
        total, errors = await check_lines(self._read_lines(), (self._spec.endpoint,), self._settings.max_lines)
        errors = errors or await self._check_token_limit()
        now = int(time.time())
        if errors:
            failed = BatchState(status="failed", errors=LineErrors(data=errors), failed_at=now)
            await self._batches.end_batch(self._spec, failed)
            return False
        counts = RequestCounts(total=total)
        self._state = BatchState(status="in_progress", in_progress_at=now, request_counts=counts)
        await self._batches.save_state(self._spec, self._state)
        return True

    async def _check_token_limit(self) -> list[LineError]:
        """Return an error if the tenant's open batches would have too many tokens with this one."""
        max_tokens = self._spec.max_batch_tokens
        if max_tokens is None:
            return []
        wanted = sum([estimate_row_tokens(row, line) async for row, line in self._read_rows_and_lines()])
        enqueued = await self._batches.enqueue_tokens(self._spec, wanted)
        if enqueued <= max_tokens:
            return []
        message = (
            f"Enqueued token limit reached. Limit: {max_tokens:,} enqueued tokens; this batch has about {wanted:,}, "
            f"your others {enqueued - wanted:,}. Please try again once some of them have been completed."
        )
        return [LineError(code="token_limit_exceeded", message=message)]

    async def _answer_until_end(self) -> Status:
        """Steps 3 and 4, until all lines are answered or the batch ends before; return its final status."""
        asking = asyncio.create_task(self._answer_rows())
        status: Status = "completed"
        try:
            while not asking.done() and status == "completed":
                left_s = self._spec.expires_at - time.time()
                await asyncio.wait((asking,), timeout=min(CHECK_INTERVAL_S, max(0.0, left_s)))
                status = await self._check_early_end()
                if time.monotonic() > self._flushed_at + FLUSH_INTERVAL_S:
                    await self.flush_progress()
            if asking.done():
                asking.result()
                return "completed"
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return status

    async def _check_early_end(self) -> Status:
        if await self._batches.read_cancel_time(self._spec) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._spec.expires_at else "completed"

    async def _answer_rows(self) -> None:
        row_slots = asyncio.Semaphore(self._settings.rows_in_flight)
        async with asyncio.TaskGroup() as group:
            async for row in self._read_rows():
                if row.number not in self._parts.finished_rows:
                    await row_slots.acquire()
                    group.create_task(self._answer_one(row)).add_done_callback(lambda _: row_slots.release())

    async def _answer_one(self, row: Row) -> None:
        try:
            client = await self._wait_for_client(row)
        except ApiError as error:
            finished = make_error_row(row, self._row_name(row), error)
        else:
            async with self._row_slots[client]:
                finished = await answer_row(client, row, self._row_name(row), self._terms)
        self._progress_at = time.monotonic()
        if self._parts.add_row(row.number, finished.line, is_ok=finished.is_ok):
            await self.flush_progress()

    async def _wait_for_client(self, row: Row) -> AsyncClient:
        """Return the client for a row's model; wait while no worker serves it."""
        model = row.body.get("model")
        if not isinstance(model, str):
            raise ApiError(
                400, "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
            )
        while True:
            try:
                return await self._find_client(model)
            except BusUnavailable:
                pass
            except ApiError as error:
                if error.status < 500 and time.monotonic() > self._started_at + MODEL_WAIT_S:
                    raise
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _finalize_batch(self, status: Status) -> None:
        self._state.status, self._state.finalizing_at = "finalizing", int(time.time())
        await self._batches.save_state(self._spec, self._state)
        if status != "completed":
            await self._skip_unanswered(status)
        await self.flush_progress()
        end = self._state.model_copy(update={"status": status, f"{status}_at": int(time.time())})
        end.output_file_id = await self._save_output_file("output", ok=True)
        end.error_file_id = await self._save_output_file("error", ok=False)
        if not await self._batches.end_batch(self._spec, end):
            for file_id in (end.output_file_id, end.error_file_id):
                if file_id is not None:
                    await self._files.delete_file(self._spec.tenant, file_id)

    async def _skip_unanswered(self, status: Status) -> None:
        """Step 5. Lines are asked in order, so only the first of the rest may be under way and are cancelled."""
        num_asked = self._settings.rows_in_flight
        async for row in self._read_rows():
            if row.number not in self._parts.finished_rows:
                if num_asked > 0:
                    num_asked -= 1
                    with suppress(ApiError, BusUnavailable):
                        await cancel_row(await self._find_client(str(row.body.get("model"))), row, self._row_name(row))
                rest = make_skipped_row(row, self._row_name(row), f"batch_{status}")
                if self._parts.add_row(row.number, rest.line, is_ok=False):
                    await self.flush_progress()

    async def _save_output_file(self, name: str, *, ok: bool) -> str | None:
        """Step 6, for one of the two files; None if it would be empty."""
        if (self._parts.num_ok if ok else len(self._parts.finished_rows) - self._parts.num_ok) == 0:
            return None
        filename, spec = f"{self._spec.id}_{name}.jsonl", self._spec
        made = await self._files.save_file(
            spec.tenant, filename, "batch_output", self._parts.read_file_rows(ok=ok), life_s=spec.output_life_s
        )
        return made.id

    def _row_name(self, row: Row) -> str:
        return f"{self._spec.id.removeprefix('batch_')}-{row.number}"

    def _read_lines(self) -> AsyncIterator[tuple[int, bytes]]:
        return split_lines(self._objects.read_stream(object_path(self._spec, "input")))

    async def _read_rows_and_lines(self) -> AsyncIterator[tuple[Row, bytes]]:
        async for number, line in self._read_lines():
            yield parse_row(number, line, (self._spec.endpoint,)), line

    async def _read_rows(self) -> AsyncIterator[Row]:
        async for row, _ in self._read_rows_and_lines():
            yield row
