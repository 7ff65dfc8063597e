"""A history: everything that clients and topics saw, and what was done to the system, as JSON lines."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class History:
    """Writes entries, each with the time since it was opened. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._begun_s = time.monotonic()

    def add_entry(self, what: str, **fields: Any) -> float:
        """Write an entry and return its time in seconds since the history was opened."""
        with self._lock:
            at = time.monotonic() - self._begun_s
            self._file.write(json.dumps({"at": round(at, 4), "what": what, **fields}) + "\n")
        return at

    def flush(self) -> None:
        """Flush the file, so that all entries can be read."""
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a history in the order in which they were written."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
