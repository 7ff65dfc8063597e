"""A batch without a gateway: reads a file, asks the pipeline, writes the answers into a file."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from penstock.client.aio import AsyncClient
from penstock.ingest.batch.answer import BatchTerms, FinishedRow, answer_row
from penstock.ingest.batch.journal import Journal, JournalError
from penstock.ingest.batch.lines import PIECE_BYTES, Row, check_lines, parse_row, split_lines
from penstock.ingest.openai import ENDPOINTS

MAX_ROWS_IN_FLIGHT = 256
MAX_GROUP_ROWS, MAX_GROUP_DELAY_S = 200, 1.0
"""Finished rows are written and synced in groups of up to `MAX_GROUP_ROWS`, at least each `MAX_GROUP_DELAY_S`."""
BATCH_URLS = tuple(ENDPOINTS)


async def check_batch_file(path: Path) -> tuple[int, str]:
    """Return how many rows a file has, and its hash. Raises `JournalError` if it is not a batch file."""
    digest = hashlib.sha256()

    async def hash_pieces() -> AsyncIterator[bytes]:
        async for piece in _read_pieces(path):
            digest.update(piece)
            yield piece

    total, errors = await check_lines(split_lines(hash_pieces()), BATCH_URLS, max_lines=10**9)
    if errors:
        messages = [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:10]]
        raise JournalError(f"{path} is no batch file:\n  " + "\n  ".join(messages))
    return total, digest.hexdigest()


async def answer_batch_file(
    client: AsyncClient, path: Path, journal: Journal, on_finished: Callable[[FinishedRow], None]
) -> None:
    """Answer all rows that the journal does not have yet. However this ends, finished rows are written.

    Rows are written in the order in which they finish. Raises `JournalError` if they cannot be written.
    """
    row_slots, flush_lock = asyncio.Semaphore(MAX_ROWS_IN_FLIGHT), asyncio.Lock()

    waiting: list[tuple[int, bytes, bool]] = []

    async def flush_rows() -> None:
        async with flush_lock:
            group = waiting.copy()
            waiting.clear()
            await asyncio.shield(asyncio.to_thread(journal.write_rows, group))

    async def flush_forever() -> None:
        while True:
            await asyncio.sleep(MAX_GROUP_DELAY_S)
            await flush_rows()

    async def answer_one(row: Row) -> None:
        try:
            finished = await answer_row(client, row, f"{journal.run_id}-{row.number}", BatchTerms())
        finally:
            row_slots.release()
        on_finished(finished)
        waiting.append((row.number, finished.line, finished.is_ok))
        if len(waiting) >= MAX_GROUP_ROWS:
            await flush_rows()

    flusher = asyncio.create_task(flush_forever())
    try:
        async with asyncio.TaskGroup() as group:
            async for number, line in split_lines(_read_pieces(path)):
                if number not in journal.finished_rows:
                    await row_slots.acquire()
                    group.create_task(answer_one(parse_row(number, line, BATCH_URLS)))
    except ExceptionGroup as found:
        unwritten, _ = found.split(JournalError)
        raise found if unwritten is None else unwritten.exceptions[0] from None
    finally:
        flusher.cancel()
        with suppress(asyncio.CancelledError):
            await flusher
        await flush_rows()


async def _read_pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
            await asyncio.sleep(0)
