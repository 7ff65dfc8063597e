"""Findings of a load, kept in the cache directory, so that the next load need not find them again.

A finding is a small JSON file. Its name is a hash over all that the finding depends on, and its content repeats that;
it is written to a temporary file and renamed. A finding that cannot be read, or is about something else, counts as
none, and one that cannot be written costs the next start the same time again.

About files, findings trust the system's word that a file is the same while its device, inode, size and both its times
(modified, changed) are: every write changes the latter, and no program can set it. Bits that rot on the disk
afterwards, and a clock that somebody sets back for a write, are not noticed. A user who can write to the cache
directory can also replace the program, so nothing in it is secret or signed.
"""

import hashlib
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("penstock.engine")

_MIN_AGE_NS = 50_000_000  # a file's times advance in ticks of up to 10 ms: two writes within one look alike


class LoadCache:
    """The findings in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read_finding(self, kind: str, about: Any, max_age_s: float = math.inf) -> Any:
        """Return what was noted about this JSON value in the last `max_age_s` seconds, or None."""
        about = json.loads(json.dumps(about))
        path = self._find_path(kind, about)
        try:
            if time.time() - path.stat().st_mtime > max_age_s:
                return None
            note = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return note.get("found") if isinstance(note, dict) and note.get("about") == about else None

    def write_finding(self, kind: str, about: Any, found: Any) -> None:
        """Note a JSON value. Where the directory cannot be written to, nothing is noted."""
        path = self._find_path(kind, about)
        scratch = path.with_suffix(f".{os.getpid()}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps({"about": about, "found": found}))
            scratch.replace(path)
        except OSError as error:
            log.info("findings of this load are not kept: %s", error)

    def _find_path(self, kind: str, about: Any) -> Path:
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        return self.directory / f"{kind}-{name[:32]}.json"


def describe_file(path: Path) -> list[Any] | None:
    """Return what names the present content of a file, or None while it was written to only just now."""
    stat = path.stat()
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < _MIN_AGE_NS:
        return None
    return [str(path.absolute()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
