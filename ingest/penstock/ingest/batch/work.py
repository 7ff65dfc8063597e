"""Work on one batch of a gateway.

    1  validate    every line is checked; a file that is not a batch file fails here
    2  load        which lines the parts hold; finished lines are not asked again
    3  answer      the others (`answer.py`); finished lines are written in a part, then the counts
    4  finalize    lines that were not answered before the cancellation or the end of the window get an error line
    5  collect     output and error file are made of the parts
    6  end         the batch names them; the webhook's event is due; parts and input are deleted

A crash after 1 costs nothing. One in 3 or 4 costs what `answer.py` says. A crash after 5 costs a second pair of files
that the batch does not name; they expire. One in 6 costs what `batches.py` says.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from penstock.config.settings import BatchSettings
from penstock.errors import ContentErased
from penstock.ingest.batch.answer import BatchJob, BatchRun, Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore, FinishedParts, object_path
from penstock.ingest.batch.lines import FinishedRow, check_lines, estimate_row_tokens, parse_row, split_lines
from penstock.ingest.batch.shapes import BatchState, LineError, LineErrors, RequestCounts, Status
from penstock.ingest.batch.store import FileStore, parse_home
from penstock.ingest.webhooks import Webhooks
from penstock.objects import ObjectStorage
from penstock.sealing import open_file

FLUSH_INTERVAL_S = 5.0
CHECK_INTERVAL_S = 1.0
STALLED_AFTER_S = 60.0
"""A batch stands still if no line was finished for this long."""


class BatchWork:
    """The work of one process on one batch."""

    def __init__(
        self,
        objects: ObjectStorage,
        spec: BatchSpec,
        pipelines: Pipelines,
        settings: BatchSettings,
        webhooks: Webhooks | None = None,
    ) -> None:
        self._objects, self._spec, self._settings, self._webhooks = objects, spec, settings, webhooks
        self._batches, self._parts = BatchStore(objects), FinishedParts(objects, spec)
        self._files = FileStore(objects, parse_home(spec.id))
        self._state = BatchState()
        self._progress_at = time.monotonic()
        batch = BatchJob(
            name=spec.id.removeprefix("batch_"),
            urls=(spec.endpoint,),
            read_input=self._read_input,
            flush_interval_s=FLUSH_INTERVAL_S,
            tenant=spec.tenant,
            key=spec.key,
            regions=spec.regions,
            weight=spec.weight,
            deadline=float(spec.expires_at),
            max_request_tokens=spec.max_request_tokens,
            models=None if spec.models is None else frozenset(spec.models),
        )
        self._run = BatchRun(batch, pipelines, self._write_rows, self._note_progress)

    @property
    def is_moving(self) -> bool:
        """Whether a line was finished lately, or the work has only just begun."""
        return time.monotonic() < self._progress_at + STALLED_AFTER_S

    async def run(self) -> None:
        """Work until the batch has ended. Raises `StorageUnavailable`; begin anew then.

        If this is cancelled, finished lines and the counts are written first, for another process to continue.
        """
        if await self._batches.has_ended(self._spec):
            await self._leave_batch()
            return
        self._state = await self._batches.read_state(self._spec)
        try:
            await self._work_on()
        except ContentErased as error:
            errors = LineErrors(data=[LineError(code=error.code, message=str(error))])
            await self._end_batch(BatchState(status="failed", errors=errors, failed_at=int(time.time())))

    async def _work_on(self) -> None:
        if self._state.status == "validating" and not await self._validate_input():
            return
        await self._parts.load_finished()
        self._count_rows()
        status = await self._answer_until_end()
        await self._finalize_batch(status)

    def _note_progress(self, _: FinishedRow) -> None:
        self._progress_at = time.monotonic()

    async def _write_rows(self, rows: Sequence[FinishedRow]) -> None:
        await self._parts.write_rows(rows)
        self._count_rows()
        await self._batches.save_state(self._spec, self._state)

    def _count_rows(self) -> None:
        total, num_ok = self._state.request_counts.total, self._parts.num_ok
        num_failed = len(self._parts.finished_rows) - num_ok
        self._state.request_counts = RequestCounts(total=total, completed=num_ok, failed=num_failed)

    async def _validate_input(self) -> bool:
        lines = split_lines(self._read_input())
        total, errors = await check_lines(lines, (self._spec.endpoint,), self._settings.max_lines)
        errors = errors or await self._check_token_limit()
        now = int(time.time())
        if errors:
            failed = BatchState(status="failed", errors=LineErrors(data=errors), failed_at=now)
            await self._end_batch(failed)
            return False
        counts = RequestCounts(total=total)
        self._state = BatchState(status="in_progress", in_progress_at=now, request_counts=counts)
        await self._batches.save_state(self._spec, self._state)
        return True

    async def _check_token_limit(self) -> list[LineError]:
        """Return an error if the tenant's open batches would have too many tokens with this one."""
        max_tokens, urls = self._spec.max_batch_tokens, (self._spec.endpoint,)
        if max_tokens is None:
            return []
        lines = split_lines(self._read_input())
        wanted = sum([estimate_row_tokens(parse_row(number, line, urls), line) async for number, line in lines])
        enqueued = await self._batches.enqueue_tokens(self._spec, wanted)
        if enqueued <= max_tokens:
            return []
        message = (
            f"Enqueued token limit reached. Limit: {max_tokens:,} enqueued tokens; this batch has about {wanted:,}, "
            f"your others {enqueued - wanted:,}. Please try again once some of them have been completed."
        )
        return [LineError(code="token_limit_exceeded", message=message)]

    async def _answer_until_end(self) -> Status:
        """Step 3, until all lines are answered or the batch ends before; return its final status."""
        answering = asyncio.create_task(self._run.answer_rows(self._parts.finished_rows))
        status: Status = "completed"
        try:
            while not answering.done() and status == "completed":
                left_s = self._spec.expires_at - time.time()
                await asyncio.wait((answering,), timeout=min(CHECK_INTERVAL_S, max(0.0, left_s)))
                status = await self._check_early_end()
            if answering.done():
                answering.result()
                return "completed"
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        return status

    async def _check_early_end(self) -> Status:
        if await self._batches.read_cancel_time(self._spec) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._spec.expires_at else "completed"

    async def _finalize_batch(self, status: Status) -> None:
        await self._run.flush_rows()  # again where the store was away: a line that was answered is not skipped
        self._state.status, self._state.finalizing_at = "finalizing", int(time.time())
        await self._batches.save_state(self._spec, self._state)
        if status != "completed":
            await self._run.skip_rows(self._parts.finished_rows, f"batch_{status}")
        end = self._state.model_copy(update={"status": status, f"{status}_at": int(time.time())})
        end.output_file_id = await self._save_output_file("output", ok=True)
        end.error_file_id = await self._save_output_file("error", ok=False)
        if not await self._end_batch(end):
            for file_id in (end.output_file_id, end.error_file_id):
                if file_id is not None:
                    await self._files.delete_file(self._spec.tenant, file_id)

    async def _end_batch(self, end: BatchState) -> bool:
        """Step 6. Return False if another process had ended the batch."""
        is_first = await self._batches.end_batch(self._spec, end)
        await self._leave_batch()
        return is_first

    async def _leave_batch(self) -> None:
        """Do what comes after the end, as it was written."""
        end = await self._batches.read_state(self._spec)
        if self._webhooks is not None:
            ended_at: int = getattr(end, f"{end.status}_at")
            await self._webhooks.add_event(self._spec.tenant, f"batch.{end.status}", self._spec.id, ended_at)
        await self._batches.clear_batch(self._spec)

    async def _save_output_file(self, name: str, *, ok: bool) -> str | None:
        """Step 5, for one of the two files; None if it would be empty."""
        if (self._parts.num_ok if ok else len(self._parts.finished_rows) - self._parts.num_ok) == 0:
            return None
        filename, spec = f"{self._spec.id}_{name}.jsonl", self._spec
        made = await self._files.save_file(
            spec.tenant, filename, "batch_output", self._parts.read_file_rows(ok=ok), life_s=spec.output_life_s
        )
        return made.id

    def _read_input(self) -> AsyncIterator[bytes]:
        return open_file(self._spec.tenant, self._objects.read_stream(object_path(self._spec, "input")))
