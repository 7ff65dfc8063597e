"""Measures how late servers answer, and stretches time limits by that: a slow server does not count as away."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

USUAL_ANSWER_S = 0.25
"""Up to this time for an answer all time limits hold as they are: transactions have 5 s. One takes seven answers in a
row, and up to twenty where brokers are slow to answer each other too.
"""
MAX_SLOWNESS = 16
MAX_UNMEASURED = 4
"""By how many times limits may be longer than the answers to questions demand, because transactions failed by them:
brokers with slow disks answer questions at once. One of several brokers that stands still makes transactions fail too.
"""
NUM_STEADY = 3
"""Brokers count as slow after this many late answers in a row: a busy machine may delay a single one."""
QUICK_S = 60.0
"""Seconds of quick answers only after which limits become shorter by half."""
AWAY_S = 5.0
"""Brokers that have answered no question for this time count as away."""
MAX_ANSWER_S = 15.0
"""The longest time limit: servers that do not answer within this time count as away, however slow they were before."""
NUM_KEPT = 64


class ServerPace:
    """Knows how late the brokers of a bus answer, or a Redis, over all clients of this process. Thread-safe.

    `slowness` multiplies the time limits of all calls. It is a power of two, so that no more than four transactional
    producers, whose limits are fixed when they are made, are made anew while brokers become slower.
    """

    def __init__(self, transaction_timeout_s: float = 0.0) -> None:
        """`transaction_timeout_s`: that of Kafka's transactions while brokers answer in their usual time."""
        self.slowness, self._most = 1, MAX_SLOWNESS
        self._usual_timeout_s = transaction_timeout_s
        self._lock = threading.Lock()
        self._answers: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        """The last answers: the time of each, and the seconds that it took."""
        self._changed_s = self._heard_s = time.monotonic()
        self._num_unanswered = 0

    @property
    def transaction_timeout_s(self) -> float:
        """Seconds that a transaction may last, and so that a dead worker's one may hold up readers."""
        longer_s = 20 * USUAL_ANSWER_S * self.slowness if self.slowness > 1 else 0.0
        return max(self._usual_timeout_s, longer_s)

    @property
    def is_steady(self) -> bool:
        """Whether brokers were asked, and the last answer was as quick as limits expect."""
        return bool(self._answers) and self._rate(self._answers[-1][1]) <= self.slowness

    def stretch(self, limit_s: float) -> float:
        """Return a time limit as long as the brokers' pace demands."""
        return limit_s * self.slowness

    @contextmanager
    def ask(self, limit_s: float) -> Iterator[float]:
        """A block that asks brokers one question, whose time it measures. It gets the time limit: one that grows with
        each question in a row that has no answer, up to that of a broker.
        """
        begun_s = time.monotonic()
        try:
            yield min(self.stretch(limit_s) * 2**self._num_unanswered, MAX_ANSWER_S)
        except Exception:
            self._num_unanswered = min(self._num_unanswered + 1, NUM_STEADY)
            raise
        now_s = time.monotonic()
        self.note_answer(now_s - begun_s, now_s)

    def note_heard(self) -> None:
        """Note that brokers have done something."""
        self._heard_s, self._num_unanswered = time.monotonic(), 0

    def note_answer(self, seconds: float, now_s: float) -> None:
        """Note how long brokers took to answer."""
        with self._lock:
            self.note_heard()
            self._answers.append((now_s, seconds))
            last = [took_s for _, took_s in self._answers][-NUM_STEADY:]
            since_s = max(self._changed_s, now_s - QUICK_S)
            slowest_s = max(took_s for at_s, took_s in self._answers if at_s >= since_s)
            if len(last) == NUM_STEADY and self._rate(min(last)) > self.slowness:
                self.slowness, self._changed_s = self._rate(min(last)), now_s
            elif now_s - self._changed_s > QUICK_S and self._rate(slowest_s) < self.slowness:
                self.slowness, self._changed_s = self.slowness // 2, now_s

    def note_too_short(self, slowness: int, begun_s: float) -> bool:
        """Note that a transaction that began at `begun_s` failed by its limits, which were chosen by `slowness`. Return
        whether there are longer ones by now. Where brokers have answered nothing since then limits stay, and they grow
        no further than `MAX_UNMEASURED` allows.
        """
        with self._lock:
            measured = self._rate(self._answers[-1][1]) if self._answers else self._most
            if slowness == self.slowness < min(self._most, MAX_UNMEASURED * measured) and self._heard_s > begun_s:
                self.slowness, self._changed_s = 2 * slowness, time.monotonic()
            return self.slowness > slowness

    def note_refused(self, slowness: int) -> None:
        """Note that brokers allow no transactions as long as those of this `slowness`."""
        with self._lock:
            self._most = max(1, slowness // 2)
            self.slowness = min(self.slowness, self._most)

    def describe_silence(self) -> str:
        """Return for how long brokers have answered no question, where they count as away; else an empty string."""
        silent_s = time.monotonic() - self._heard_s
        is_away = self._num_unanswered and silent_s > min(self.stretch(AWAY_S), MAX_ANSWER_S)
        return f"Kafka: no broker has answered for {silent_s:.0f} s" if is_away else ""

    def _rate(self, answer_s: float) -> int:
        """Return by how many times limits have to be longer for answers that take so long."""
        slowness = 1
        while slowness < self._most and answer_s > slowness * USUAL_ANSWER_S:
            slowness *= 2
        return slowness
