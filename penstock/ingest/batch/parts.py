"""The finished lines of a batch, in parts: objects that are written once.

A part has a line for each: its number, `o` (output) or `e` (error file), and the row itself. Holders name their parts
after themselves, so nobody writes into another's. A line that two holders finished, one of them after a pause, is in
two parts; the first in the order of names counts.
"""

import time
import uuid
from collections.abc import AsyncIterator

from penstock.ingest.batch.batches import BatchSpec, object_path
from penstock.ingest.batch.lines import PIECE_BYTES, split_lines
from penstock.ingest.batch.objects import ObjectStorage

MAX_PART_LINES = 500


class FinishedParts:
    """One holder's view of a batch's parts."""

    def __init__(self, objects: ObjectStorage, spec: BatchSpec) -> None:
        self._objects, self._folder = objects, object_path(spec, "parts")
        self._holder = f"{time.time_ns() // 1_000_000:012x}-{uuid.uuid4().hex[:8]}"
        self._count = 0
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self.finished_rows: set[int] = set()
        """Numbers of the lines that are finished, those that wait to be written among them."""
        self.num_ok = 0

    async def load_finished(self) -> None:
        """Learn what others have finished."""
        async for number, is_ok, _ in self.read_rows():
            self._note_finished(number, is_ok=is_ok)

    def add_row(self, number: int, row: bytes, *, is_ok: bool) -> bool:
        """Note a finished line, once; True when it is time to `flush`."""
        if number in self.finished_rows:
            return False
        self._note_finished(number, is_ok=is_ok)
        self._waiting.append(b"%d %s %s\n" % (number, b"o" if is_ok else b"e", row))
        self._num_bytes += len(row)
        return len(self._waiting) >= MAX_PART_LINES or self._num_bytes >= PIECE_BYTES

    async def flush_rows(self) -> None:
        """Write what waits. If that fails it waits on."""
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
        """All that is written: numbers, whether it is output, rows. A line may come twice."""
        for name in await self._objects.list_names(self._folder):
            async for _, line in split_lines(self._objects.read_stream(f"{self._folder}/{name}")):
                number, kind, row = line.split(b" ", 2)
                yield int(number), kind == b"o", row

    async def read_file_rows(self, *, ok: bool) -> AsyncIterator[bytes]:
        """The output, or the error file: each line once, in the order in which they were finished."""
        seen = set[int]()
        async for number, is_ok, row in self.read_rows():
            if number not in seen and is_ok is ok:
                yield row + b"\n"
            seen.add(number)

    def _note_finished(self, number: int, *, is_ok: bool) -> None:
        if number not in self.finished_rows:
            self.finished_rows.add(number)
            self.num_ok += is_ok
