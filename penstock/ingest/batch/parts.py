"""The finished lines of a batch, in parts: objects that are written once.

A part has one line for each finished row: its number, `o` (output) or `e` (error file), and the row. Each holder of
a batch names its parts after itself, so two holders never write the same object. A row that two holders finished,
one of them after a pause, is in two parts; the first in the order of names counts.
"""

import time
import uuid
from collections.abc import AsyncIterator

from penstock.ingest.batch.batches import BatchSpec, object_path
from penstock.ingest.batch.lines import PIECE_BYTES, split_lines
from penstock.ingest.batch.objects import ObjectStorage

MAX_PART_LINES = 500


class FinishedParts:
    """The parts of a batch, as one holder sees them."""

    def __init__(self, objects: ObjectStorage, spec: BatchSpec) -> None:
        self._objects, self._folder = objects, object_path(spec, "parts")
        self._holder = f"{time.time_ns() // 1_000_000:012x}-{uuid.uuid4().hex[:8]}"
        self._count = 0
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self.finished_rows: set[int] = set()
        """Numbers of the finished lines, including those not yet written."""
        self.num_ok = 0

    async def load_finished(self) -> None:
        """Read which lines other holders have finished."""
        async for number, is_ok, _ in self.read_rows():
            self._note_finished(number, is_ok=is_ok)

    def add_row(self, number: int, row: bytes, *, is_ok: bool) -> bool:
        """Add a finished line, once; return True when it is time to call `flush_rows`."""
        if number in self.finished_rows:
            return False
        self._note_finished(number, is_ok=is_ok)
        self._waiting.append(b"%d %s %s\n" % (number, b"o" if is_ok else b"e", row))
        self._num_bytes += len(row)
        return len(self._waiting) >= MAX_PART_LINES or self._num_bytes >= PIECE_BYTES

    async def flush_rows(self) -> None:
        """Write the lines that wait as a new part. They are kept if that fails."""
        if not self._waiting:
            return
        taken, self._waiting, self._num_bytes = self._waiting, [], 0
        self._count += 1
        try:
            await self._objects.put(f"{self._folder}/{self._holder}-{self._count:06d}", b"".join(taken))
        except BaseException:
            self._waiting = taken + self._waiting
            raise

    async def read_rows(self) -> AsyncIterator[tuple[int, bool, bytes]]:
        """Yield all written lines: number, whether it is output, row. A line can come twice."""
        for name in await self._objects.list_names(self._folder):
            async for _, line in split_lines(self._objects.read_stream(f"{self._folder}/{name}")):
                number, kind, row = line.split(b" ", 2)
                yield int(number), kind == b"o", row

    async def read_file_rows(self, *, ok: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the output, or of the error file, each once, in the order in which they finished."""
        seen = set[int]()
        async for number, is_ok, row in self.read_rows():
            if number not in seen and is_ok is ok:
                yield row + b"\n"
            seen.add(number)

    def _note_finished(self, number: int, *, is_ok: bool) -> None:
        if number not in self.finished_rows:
            self.finished_rows.add(number)
            self.num_ok += is_ok
