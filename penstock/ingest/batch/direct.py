"""A batch straight to the pipeline, without a gateway: from a file, into a file."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from penstock.client.aio import AsyncClient
from penstock.ingest.batch.answer import Finished, Terms, answer
from penstock.ingest.batch.journal import Journal, JournalError
from penstock.ingest.batch.lines import PIECE, Row, check, parse_row, split
from penstock.ingest.openai import ENDPOINTS

ROWS_IN_FLIGHT = 256
GROUP_ROWS, GROUP_S = 200, 1.0
"""Rows are synced together: that many, or those of so many seconds."""
URLS = tuple(ENDPOINTS)


async def looked_at(path: Path) -> tuple[int, str]:
    """How many rows a file has, and its hash. Raises `JournalError` for what is no batch file."""
    digest = hashlib.sha256()

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in _pieces(path):
            digest.update(piece)
            yield piece

    total, errors = await check(split(pieces()), URLS, max_lines=10**9)
    if errors:
        told = [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:10]]
        raise JournalError(f"{path} is no batch file:\n  " + "\n  ".join(told))
    return total, digest.hexdigest()


async def run(client: AsyncClient, path: Path, journal: Journal, finished: Callable[[Finished], None]) -> None:
    """Answer all rows that the journal does not have yet. However this ends, what was finished is written.

    Rows are written in the order in which they are finished. Raises `JournalError` where they cannot be.
    """
    room, flushing = asyncio.Semaphore(ROWS_IN_FLIGHT), asyncio.Lock()

    waiting: list[tuple[int, bytes, bool]] = []

    async def flush() -> None:
        async with flushing:
            group = waiting.copy()
            waiting.clear()
            await asyncio.shield(asyncio.to_thread(journal.write, group))

    async def flush_on() -> None:
        while True:
            await asyncio.sleep(GROUP_S)
            await flush()

    async def one(row: Row) -> None:
        try:
            done = await answer(client, row, f"{journal.run}-{row.number}", Terms())
        finally:
            room.release()
        finished(done)
        waiting.append((row.number, done.row, done.is_ok))
        if len(waiting) >= GROUP_ROWS:
            await flush()

    clock = asyncio.create_task(flush_on())
    try:
        async with asyncio.TaskGroup() as group:
            async for number, line in split(_pieces(path)):
                if number not in journal.done:
                    await room.acquire()
                    group.create_task(one(parse_row(number, line, URLS)))
    except ExceptionGroup as found:
        unwritten, _ = found.split(JournalError)
        raise found if unwritten is None else unwritten.exceptions[0] from None
    finally:
        clock.cancel()
        with suppress(asyncio.CancelledError):
            await clock
        await flush()


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
            await asyncio.sleep(0)
