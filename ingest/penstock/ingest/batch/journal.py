"""The files of a batch from the command line: input, output, and a journal with which an interrupted run goes on.

    1  a group of finished rows is appended to the output and to the error file, and synced
    2  the journal gets a line with their numbers and the new lengths of both files, and is synced

After a crash between 1 and 2, or with a line half written, the files are truncated to the lengths in the journal,
and those rows are asked again under the same ids. So no row is written twice, is missing, or is cut. A write that
fails, for example because the disk is full, counts as such a crash: nothing is written after it.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from penstock.errors import PenstockError
from penstock.ingest.batch.answer import BatchJob, BatchRun, FindPipeline, Pipelines
from penstock.ingest.batch.lines import CHUNK_BYTES, FinishedRow, check_lines, split_lines
from penstock.ingest.openai import ENDPOINTS

MAX_ROWS_IN_FLIGHT = 256
FLUSH_INTERVAL_S = 1.0
BATCH_URLS = tuple(ENDPOINTS)


class JournalError(PenstockError):
    """A run that cannot start, or cannot go on."""


class Journal:
    """The files of one run. One process at a time has them open."""

    def __init__(self, output: Path, errors: Path, digest: str) -> None:
        """Begin a run, or continue one. `digest` is the hash of the input. Raises `JournalError`."""
        self.path = output.with_name(f"{output.name}.journal")
        self.run_id, self.finished_rows, self.num_failed = uuid.uuid4().hex, set[int](), 0
        """The run's id, which is in all its requests' ids; the finished rows' numbers; how many of them failed."""
        self._files: dict[str, IO[bytes]] = {}
        self._write_error: JournalError | None = None
        if not self.path.exists():
            for file in (output, errors):
                if file.exists():
                    raise JournalError(f"{file} is there and was not made by this: move it away, or name another")
        try:
            self._journal = self.path.open("a+b")
            self._lock_journal()
            sizes = self._load_entries(digest)
            if not sizes:
                sizes = {"output": 0, "errors": 0}
                self._write_entry({"v": 1, "run": self.run_id, "input": digest, **sizes})
            for name, file in (("output", output), ("errors", errors)):
                self._files[name] = _open_truncated(file, sizes[name])
            for folder in {output.parent, errors.parent}:
                _sync_folder(folder)
        except OSError as error:
            self.close()
            raise JournalError(f"{error.filename or self.path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def write_rows(self, rows: Sequence[FinishedRow]) -> None:
        """Write finished rows, steps 1 and 2. One call at a time.

        Raises `JournalError` if that fails, and at every later call.
        """
        if self._write_error is not None:
            raise self._write_error
        try:
            self._append_rows(rows)
        except OSError as error:
            self._write_error = JournalError(f"cannot write beside {self.path}: {error.strerror}; then go on from here")
            raise self._write_error from error

    def _append_rows(self, rows: Sequence[FinishedRow]) -> None:
        for name, wanted in (("output", True), ("errors", False)):
            lines = [row.line + b"\n" for row in rows if row.is_ok is wanted]
            if lines:
                self._files[name].write(b"".join(lines))
                _sync_file(self._files[name])
        sizes = {name: file.tell() for name, file in self._files.items()}
        ok = [row.number for row in rows if row.is_ok]
        failed = [row.number for row in rows if not row.is_ok]
        self._write_entry({"ok": ok, "failed": failed, **sizes})
        self.finished_rows.update(ok, failed)
        self.num_failed += len(failed)

    def close(self) -> None:
        """Close the files, so that another process can open them."""
        for file in [*self._files.values(), *([self._journal] if hasattr(self, "_journal") else [])]:
            with suppress(OSError):  # what is left to write cannot be written: `write_rows` has raised for it
                file.close()

    def _lock_journal(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self.path}: another run has it now") from None

    def _load_entries(self, digest: str) -> dict[str, int]:
        """Read the finished rows, cut off a half-written last line, and return the lengths of both files."""
        self._journal.seek(0)
        num_good_bytes, sizes = 0, dict[str, int]()
        for line in self._journal:
            entry = _parse_entry(line)
            if entry is None:
                break
            if "run" in entry:
                if entry["input"] != digest:
                    raise JournalError(
                        f"the input is another one than {self.path} was begun with: "
                        "name another output, or delete that journal and the output to begin anew"
                    )
                self.run_id = entry["run"]
            self.finished_rows.update(entry.get("ok", ()), entry.get("failed", ()))
            self.num_failed += len(entry.get("failed", ()))
            sizes = {name: entry[name] for name in ("output", "errors")}
            num_good_bytes += len(line)
        self._journal.seek(num_good_bytes)
        self._journal.truncate()
        return sizes

    def _write_entry(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry).encode() + b"\n")
        _sync_file(self._journal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def check_batch_file(path: Path) -> tuple[int, str]:
    """Return how many rows a file has, and its hash. Raises `JournalError` if it is not a batch file."""
    digest = hashlib.sha256()

    async def hash_chunks() -> AsyncIterator[bytes]:
        async for chunk in _read_chunks(path):
            digest.update(chunk)
            yield chunk

    total, errors = await check_lines(split_lines(hash_chunks()), BATCH_URLS, max_lines=10**9)
    if errors:
        messages = [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:10]]
        raise JournalError(f"{path} is no batch file:\n  " + "\n  ".join(messages))
    return total, digest.hexdigest()


async def answer_batch_file(
    find_pipeline: FindPipeline, path: Path, journal: Journal, on_finished: Callable[[FinishedRow], None]
) -> None:
    """Answer all rows that the journal does not have yet. However this ends, finished rows are written.

    Raises `JournalError` if they cannot be written.
    """

    async def write_rows(rows: Sequence[FinishedRow]) -> None:
        await asyncio.to_thread(journal.write_rows, rows)

    batch = BatchJob(BATCH_URLS, lambda: _read_chunks(path), FLUSH_INTERVAL_S, name=journal.run_id)
    run = BatchRun(batch, Pipelines(find_pipeline, MAX_ROWS_IN_FLIGHT), write_rows, on_finished)
    await run.answer_rows(journal.finished_rows)


async def _read_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
            await asyncio.sleep(0)


def _parse_entry(line: bytes) -> dict[str, Any] | None:
    """Return a line of the journal, or None if it is incomplete."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _open_truncated(path: Path, size: int) -> IO[bytes]:
    """Open a file for appending, cut to `size` bytes."""
    file = path.open("ab")
    if path.stat().st_size < size:
        file.close()
        raise JournalError(f"{path} was changed: it has less than its journal says")
    file.truncate(size)
    file.seek(size)
    return file


def _sync_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the name of a new file in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
