"""Working off one batch.

    1  validate    every line is looked at; what is no batch file fails here
    2  recall      which lines the parts hold: what is finished is not asked again
    3  ask         the others, a bounded number at a time, class `batch`; a request's id is made of batch and line
    4  note        finished lines go to a part, then the counts
    5  finalize    what was left out, because of a cancel or the end of the window, gets its line in the error file
    6  collect     output and error file are made of the parts
    7  end         the batch names them; parts and input are deleted

Dying after 1 costs nothing; in 3 and 4 the lines that are asked but not yet in a part: they are asked again under their
ids, which joins what runs or has ended within the hour that a stream is kept, and generates again what is older. There
are at most `rows_in_flight` of them and one unwritten part. After 6 it costs a second pair of files, which the batch's
end does not name; they go with their time.

A row takes two places: one of its batch, which bounds what is in memory, and then one of the pipeline that answers it,
which bounds what all batches ask of that. So a pipeline that is slow, or has no workers, holds up its own rows alone.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from penstock.client.aio import AsyncClient
from penstock.config.settings import BatchSettings
from penstock.errors import BusUnavailable
from penstock.ingest.batch.answer import Terms, answer, cancel, left_out, refused
from penstock.ingest.batch.batches import Batches, Birth, place
from penstock.ingest.batch.lines import Row, check, num_tokens, parse_row, split
from penstock.ingest.batch.objects import Objects
from penstock.ingest.batch.parts import Parts
from penstock.ingest.batch.shapes import BatchState, LineError, LineErrors, RequestCounts, Status
from penstock.ingest.batch.store import FileStore
from penstock.ingest.errors import ApiError

ClientOf = Callable[[str], Awaitable[AsyncClient]]
"""The client of the pipeline that serves a model. Raises `ApiError`: 404 for an unknown one, else 503."""
FLUSH_S = 5.0
LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long a model that no worker serves is waited for: its workers may be starting."""
STANDSTILL_S = 60.0
"""A batch of which no line was finished for so long stands still."""

Places = defaultdict[AsyncClient, asyncio.Semaphore]
"""How many more rows this process may ask of a pipeline, whichever batches they are of."""


def make_places(num_rows: int) -> Places:
    """So many places of each pipeline."""
    return defaultdict(lambda: asyncio.Semaphore(num_rows))


class Work:
    """One batch in one process's hands."""

    def __init__(
        self,
        objects: Objects,
        birth: Birth,
        client_of: ClientOf,
        places: Places,
        settings: BatchSettings,
    ) -> None:
        self._objects, self._birth, self._client_of, self._places = objects, birth, client_of, places
        self._batches, self._files, self._parts = Batches(objects), FileStore(objects), Parts(objects, birth)
        self._settings = settings
        self._terms = Terms(birth.tenant, birth.weight, float(birth.expires_at), birth.max_request_tokens)
        self._state = BatchState()
        self._noting = asyncio.Lock()
        self._flushed_at = time.monotonic()
        self._begun_at = self._moved_at = time.monotonic()

    @property
    def is_moving(self) -> bool:
        """Whether a line was finished lately, or the work has only just begun."""
        return time.monotonic() < self._moved_at + STANDSTILL_S

    async def run(self) -> None:
        """To the batch's end. Raises `ApiError` 503 without the store: to be tried again."""
        if await self._batches.has_ended(self._birth):
            await self._batches.clear_ended(self._birth)
            return
        self._state = await self._batches.state(self._birth)
        if self._state.status == "validating" and not await self._validate():
            return
        await self._parts.load()
        why = await self._ask_unless_ended()
        await self._finalize(why)

    async def flush(self) -> None:
        """Write what is finished: also before this work is given up for another to go on."""
        async with self._noting:
            await self._parts.flush()
            self._flushed_at = time.monotonic()
            num_done = len(self._parts.done)
            counts = RequestCounts(
                total=self._state.request_counts.total,
                completed=self._parts.num_ok,
                failed=num_done - self._parts.num_ok,
            )
            if counts != self._state.request_counts:
                self._state.request_counts = counts
                await self._batches.save(self._birth, self._state)

    async def _validate(self) -> bool:
        total, errors = await check(self._lines(), (self._birth.endpoint,), self._settings.max_lines)
        errors = errors or await self._over_limit()
        now = int(time.time())
        if errors:
            failed = BatchState(status="failed", errors=LineErrors(data=errors), failed_at=now)
            await self._batches.end(self._birth, failed)
            return False
        counts = RequestCounts(total=total)
        self._state = BatchState(status="in_progress", in_progress_at=now, request_counts=counts)
        await self._batches.save(self._birth, self._state)
        return True

    async def _over_limit(self) -> list[LineError]:
        """What is wrong with a batch of a tenant whose open ones may not have so many tokens together."""
        most = self._birth.max_batch_tokens
        if most is None:
            return []
        wanted = sum([num_tokens(row, line) async for row, line in self._rows_and_lines()])
        enqueued = await self._batches.enqueue(self._birth, wanted)
        if enqueued <= most:
            return []
        message = (
            f"Enqueued token limit reached. Limit: {most:,} enqueued tokens; this batch has about {wanted:,}, "
            f"your others {enqueued - wanted:,}. Please try again once some of them have been completed."
        )
        return [LineError(code="token_limit_exceeded", message=message)]

    async def _ask_unless_ended(self) -> Status:
        """Step 3 and 4, until all is answered or the end comes first; the status it ends with."""
        asking = asyncio.create_task(self._ask_all())
        why: Status = "completed"
        try:
            while not asking.done() and why == "completed":
                left_s = self._birth.expires_at - time.time()
                await asyncio.wait((asking,), timeout=min(LOOK_S, max(0.0, left_s)))
                why = await self._end_before_its_time()
                if time.monotonic() > self._flushed_at + FLUSH_S:
                    await self.flush()
            if asking.done():
                asking.result()
                return "completed"
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return why

    async def _end_before_its_time(self) -> Status:
        if await self._batches.cancelled_at(self._birth) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._birth.expires_at else "completed"

    async def _ask_all(self) -> None:
        room = asyncio.Semaphore(self._settings.rows_in_flight)
        async with asyncio.TaskGroup() as group:
            async for row in self._rows():
                if row.number not in self._parts.done:
                    await room.acquire()
                    group.create_task(self._one(row)).add_done_callback(lambda _: room.release())

    async def _one(self, row: Row) -> None:
        try:
            client = await self._served(row)
        except ApiError as error:
            finished = refused(row, self._name(row), error)
        else:
            async with self._places[client]:
                finished = await answer(client, row, self._name(row), self._terms)
        self._moved_at = time.monotonic()
        if self._parts.add(row.number, finished.row, is_ok=finished.is_ok):
            await self.flush()

    async def _served(self, row: Row) -> AsyncClient:
        """The client for a row's model, waited for while no worker is there."""
        model = row.body.get("model")
        if not isinstance(model, str):
            raise ApiError(
                400, "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
            )
        while True:
            try:
                return await self._client_of(model)
            except BusUnavailable:
                pass
            except ApiError as error:
                if error.status < 500 and time.monotonic() > self._begun_at + PATIENCE_S:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _finalize(self, why: Status) -> None:
        self._state.status, self._state.finalizing_at = "finalizing", int(time.time())
        await self._batches.save(self._birth, self._state)
        if why != "completed":
            await self._leave_out(why)
        await self.flush()
        end = self._state.model_copy(update={"status": why, f"{why}_at": int(time.time())})
        end.output_file_id = await self._file("output", ok=True)
        end.error_file_id = await self._file("error", ok=False)
        if not await self._batches.end(self._birth, end):
            for file_id in (end.output_file_id, end.error_file_id):
                if file_id is not None:
                    await self._files.delete(self._birth.tenant, file_id)

    async def _leave_out(self, why: Status) -> None:
        """Step 5. Lines are asked in order, so only the first of the rest may be under way, whoever asked them."""
        num_asked = self._settings.rows_in_flight
        async for row in self._rows():
            if row.number not in self._parts.done:
                if num_asked > 0:
                    num_asked -= 1
                    with suppress(ApiError, BusUnavailable):
                        await cancel(await self._client_of(str(row.body.get("model"))), row, self._name(row))
                rest = left_out(row, self._name(row), f"batch_{why}")
                if self._parts.add(row.number, rest.row, is_ok=False):
                    await self.flush()

    async def _file(self, name: str, *, ok: bool) -> str | None:
        """Step 6, for one of the two; None where it would be empty."""
        if (self._parts.num_ok if ok else len(self._parts.done) - self._parts.num_ok) == 0:
            return None
        filename, birth = f"{self._birth.id}_{name}.jsonl", self._birth
        made = await self._files.save(
            birth.tenant, filename, "batch_output", self._parts.file(ok=ok), life_s=birth.output_life_s
        )
        return made.id

    def _name(self, row: Row) -> str:
        return f"{self._birth.id.removeprefix('batch_')}-{row.number}"

    def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        return split(self._objects.read(place(self._birth, "input")))

    async def _rows_and_lines(self) -> AsyncIterator[tuple[Row, bytes]]:
        async for number, line in self._lines():
            yield parse_row(number, line, (self._birth.endpoint,)), line

    async def _rows(self) -> AsyncIterator[Row]:
        async for row, _ in self._rows_and_lines():
            yield row
