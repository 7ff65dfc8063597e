"""The watch of a worker's loop: a loop that stands still holds its requests no longer than a limit.

A kernel, a driver, a tokenizer or a grammar that does not return stops the loop, or the thread that reads long messages
(`penstock.worker.message_reader`). The worker's other threads go on. The loop notes each turn and the length of
each engine step, and the thread each reading. When a turn or a reading lasts longer than the limit, then

    1  the session is not renewed any more (`penstock.record.session`): a lease later other workers have its requests
    2  the process logs where it stands, and ends itself. The supervisor of the workers starts it again

The thread that renews the session looks (`penstock.worker.heartbeat`), about once a second. Where Redis hangs it looks
when its calls have timed out, some seconds later.

What a crash costs: it does what 2 does. Writes of a loop that goes on after 1 are refused, as after any lost session.
A call that holds Python's global lock stops the watch as well, but also the session: 1 happens, 2 does not.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

DEFAULT_STALL_LIMIT_S = 60.0
LIMIT_IN_STEPS = 20
"""A turn may always last as long as this many of the longest steps that this process has had."""
STALLED_EXIT_CODE = 70
"""How a process ends whose loop stands still: `EX_SOFTWARE` of sysexits.h, which nothing else here uses."""
LOG_TIMEOUT_S = 5.0
"""The process ends after this time also where its log cannot be written."""


class _Standing:
    """How long a thread has been at one turn, or one reading."""

    def __init__(self) -> None:
        self.num = 0
        """The number of the turn."""
        self.thread_id: int | None = None
        """The thread that is at it; None while none is."""
        self._seen, self._stood_s = 0, 0.0

    def measure_s(self, passed_s: float) -> float:
        """Return for how long the thread has stood where it is. `passed_s` have passed since this was called last."""
        num = self.num
        self._stood_s = self._stood_s + passed_s if num == self._seen and self.thread_id is not None else 0.0
        self._seen = num
        return self._stood_s


class LoopWatch:
    """The watch of the one loop of a process, and of its readings."""

    def __init__(self, limit_s: float = DEFAULT_STALL_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._longest_step_s = 0.0
        self._turn, self._reading = _Standing(), _Standing()
        """The turn has no thread while the loop has no worker: the last one left, or the next one is being made."""
        self._stalled: _Standing | None = None
        self._lock = threading.Lock()
        """Guards the looks, which several threads take: the sessions on several servers have a thread each."""
        self._looked_s = time.monotonic()

    @property
    def look_interval_s(self) -> float:
        """How long may pass between two looks."""
        return min(1.0, self._limit_s / 8)

    @property
    def limit_s(self) -> float:
        """How long a turn may last."""
        return max(self._limit_s, LIMIT_IN_STEPS * self._longest_step_s)

    def note_turn(self) -> None:
        """Note that the loop begins a turn."""
        self._turn.num += 1
        self._turn.thread_id = threading.get_ident()

    @contextmanager
    def watch_reading(self) -> Iterator[None]:
        """Watch what the thread that reads messages does in this context."""
        self._reading.num += 1
        self._reading.thread_id = threading.get_ident()
        try:
            yield
        finally:
            self._reading.thread_id = None

    def note_step(self, begun_s: float) -> None:
        """Note that a step of the engine ended now which began at `begun_s`, by the monotonic clock."""
        # A step that was longer than the limit was none of the engine's doing: the whole process was stopped.
        self._longest_step_s = max(self._longest_step_s, min(time.monotonic() - begun_s, self._limit_s))

    def note_left(self) -> None:
        """Note that the loop's worker has left: until the next turn no time counts."""
        self._turn.num += 1
        self._turn.thread_id = None

    def is_stalled(self) -> bool:
        """Return whether a turn or a reading has lasted for longer than the limit. Any thread may call this, often.

        The time between two calls that find the same turn counts, up to a quarter of the limit. A process that was
        stopped as a whole, and goes on, therefore has not stood still.
        """
        with self._lock:
            now_s = time.monotonic()
            passed_s = min(now_s - self._looked_s, self._limit_s / 4)
            self._looked_s = now_s
            stalled = [one for one in (self._turn, self._reading) if one.measure_s(passed_s) > self.limit_s]
            self._stalled = stalled[0] if stalled else None
            return bool(stalled)

    def end_stalled_process(self) -> None:
        """End this process if its loop or a reading stands still (2)."""
        if self.is_stalled():
            self._end_process()

    def _end_process(self) -> None:
        # Standard error may be a pipe that is not read, and its lock may be held by the loop that stands still.
        timer = threading.Timer(LOG_TIMEOUT_S, os._exit, [STALLED_EXIT_CODE])
        timer.daemon = True
        timer.start()
        try:
            place, stack = self._describe_place()
            what = "reading a message" if self._stalled is self._reading else "the loop"
            log.critical(
                "%s has stood still for more than %.0f s at %s: this process ends itself with code %d, and other"
                " workers go on with its requests\n%s",
                what, self.limit_s, place, STALLED_EXIT_CODE, stack,
            )  # fmt: skip
        finally:
            os._exit(STALLED_EXIT_CODE)

    def _describe_place(self) -> tuple[str, str]:
        """Return where the thread that stands still is, and how it got there."""
        thread_id = None if self._stalled is None else self._stalled.thread_id
        frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  # the documented way
        if frame is None:
            return "an unknown place", ""
        code = frame.f_code
        return f"{code.co_filename}:{frame.f_lineno} {code.co_name}", "".join(traceback.format_stack(frame))
