"""The engine of an embed worker: it computes batches of texts on a thread, and gives whole answers to the loop.

    1  add      a request comes with the tokens of its texts
    2  plan     the loop makes a batch of texts of about one length, of bounded tokens: interactive requests come first,
                then those that came first; each batch has the longest text that is left of the first request
    3  compute  a thread computes the batches, one after the other, so that the loop's turns go on. It has two at most
    4  collect  a request ends once each of its texts has its numbers

The loop alone touches requests. A batch that fails is computed again, each request by itself: the one at fault ends,
and is tried again as often as a request may fail.
"""

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from penstock.engine.contract import Ended, Outcome, SampledToken, StepShare
from penstock.engine.vectors import Floats, TextRequest, TextRow
from penstock.errors import ModelError, OutOfMemory, RequestError, is_failure
from penstock.names import CLASSES, PriorityClass, Stage
from penstock.running_mean import RunningMean
from penstock.worker.whole_engine import EVENT_WAIT_S, WholeEngine

log = logging.getLogger(__name__)

MAX_BATCHES_AHEAD = 2
"""Batches with the thread: the one that it computes, and the next, so that it never waits for the loop."""
NUM_BATCHES_SORTED = 8
"""Batches' worth of texts among which those of about one length are found."""
NUM_BATCHES_HELD = 3
"""Batches' worth of texts that are here at least before no more requests are taken."""
MAX_HELD_S = 1.0
"""Seconds of work that may be here where that is more: other workers may have time for the rest."""
MAX_HELD_REQUESTS = 256
SPEED_TOKENS = 2**20
"""About how many of the last tokens the speed covers."""


class TextModel(Protocol):
    """What the engine needs of a model."""

    batch_tokens: int

    def compute_rows(self, rows: Sequence[TextRow]) -> Floats:
        """Return the numbers of each row."""


@dataclass(eq=False)
class EmbedSequence(TextRequest):
    """A request whose texts are computed."""

    is_alone: bool = False
    """Whether it is computed apart from others, as it may make batches fail."""
    waiting: list[int] = field(default_factory=list)
    """The numbers of its rows that are in no batch, by length, the shortest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_waiting(*range(len(self.rows)))

    def add_waiting(self, *indices: int) -> None:
        """Let rows wait that are in no batch, or not any more."""
        self.waiting = sorted([*self.waiting, *indices], key=lambda index: len(self.rows[index]))

    @property
    def is_waiting(self) -> bool:
        """Whether none of its rows is computed now, or was."""
        return len(self.waiting) == len(self.rows)


class _Row(NamedTuple):
    """A row of a batch: the text of a request at a place."""

    seq: EmbedSequence
    place: int

    @property
    def row(self) -> TextRow:
        return self.seq.rows[self.place]


class _Batch(NamedTuple):
    rows: Sequence[_Row]
    done: "Future[tuple[Floats, float]]"
    """The numbers of the rows, and the seconds that they took."""


class EmbedEngine(WholeEngine):
    """Computes the texts of requests."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self._model = model
        self._sequences: dict[str, EmbedSequence] = {}
        self._batches: deque[_Batch] = deque()
        self._shares: list[StepShare] = []
        self._speed = RunningMean(SPEED_TOKENS)
        """Seconds for each token: the tokens are the weight."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="computing")

    @property
    def tokens_per_s(self) -> float | None:
        """How many tokens were computed per second lately; None before the first. Any thread may read it."""
        seconds = self._speed.value
        return 1.0 / seconds if seconds else None

    def count_free(self, priority_class: PriorityClass, mean_tokens: float) -> int:
        """Return how many more requests of a class, of `mean_tokens` tokens each, to take: enough to fill some batches,
        or a second.
        """
        rank = CLASSES.index(priority_class)
        before = [seq for seq in list(self._sequences.values()) if CLASSES.index(seq.priority_class) <= rank]
        most = max(NUM_BATCHES_HELD * self._model.batch_tokens, MAX_HELD_S * (self.tokens_per_s or 0.0))
        num_free = (most - sum(seq.num_pending_tokens for seq in before)) / max(1.0, mean_tokens)
        return max(0, min(MAX_HELD_REQUESTS - len(self._sequences), int(np.ceil(num_free))))

    def add_request(self, seq: EmbedSequence) -> EmbedSequence:
        """Have a request computed. An interactive one is computed before a batch that the thread has not begun."""
        self._sequences[seq.id] = seq
        if seq.priority_class == CLASSES[0]:
            self._take_back_batch()
        return seq

    def _take_back_batch(self) -> None:
        """Take the last batch back, if it is of another class than interactive and not begun."""
        if self._batches and self._batches[-1].rows[0].seq.priority_class != CLASSES[0]:
            batch = self._batches[-1]
            if batch.done.cancel():
                self._batches.pop()
                _put_back(batch.rows)

    def remove_request(self, request_id: str) -> None:
        """Drop a request. Its rows that are in batches are computed for nothing."""
        self._sequences.pop(request_id, None)

    def has_work(self) -> bool:
        """Return whether there are requests."""
        return bool(self._sequences)

    # The step

    def begin_step(self) -> bool:
        """Give the thread batches to compute. Return whether there are any."""
        self._fill_thread()
        return bool(self._batches)

    def finish_step(self) -> Sequence[SampledToken]:
        """Wait a moment for a batch, and take what was computed. There are no tokens."""
        shares = [(one.seq, len(one.row)) for one in self._batches[0].rows]
        num_tokens = sum(num for _, num in shares)
        stage: Stage = "prefill"
        self._shares = [(seq, stage, num / num_tokens) for seq, num in shares]
        if not self._batches[0].done.done():
            self._wake.wait(EVENT_WAIT_S)
        self._wake.clear()
        while self._batches and self._batches[0].done.done():
            self._take_batch(self._batches.popleft())
        self._fill_thread()
        return ()

    @property
    def step_shares(self) -> Sequence[StepShare]:
        """What each row of the batch under way took of the step."""
        return self._shares

    def wait_for_event(self) -> None:
        """Wait a moment at most for a batch, or for `wake_waiter`."""
        self._wake.wait(EVENT_WAIT_S)
        self._wake.clear()

    def report_state(self) -> dict[str, object]:
        """Return fields of the heartbeat: how many requests wait. Any thread may call it."""
        waiting = sum(seq.is_waiting for seq in list(self._sequences.values()))
        return {"waiting": waiting, "pool": {"used": 0, "total": 0}, "kv": {}}

    def close(self) -> None:
        """Drop all requests. The thread stays, and another worker may go on with the engine."""
        self._sequences.clear()
        self._ended.clear()
        for batch in self._batches:
            batch.done.cancel()
        self._batches.clear()

    def abandon(self) -> None:
        """Do as `close`."""
        self.close()

    # Planning

    def _fill_thread(self) -> None:
        """Give the thread as many batches as it may have. A request that is computed apart has the thread alone."""
        while len(self._batches) < MAX_BATCHES_AHEAD and (rows := self._plan_batch()):
            for seq, index in rows:
                seq.waiting.remove(index)
            future = self._thread.submit(self._compute, [one.row for one in rows])
            future.add_done_callback(lambda _: self._wake.set())
            self._batches.append(_Batch(rows, future))

    def _plan_batch(self) -> list[_Row]:
        """Return the rows of the next batch: of the batches that the next texts make by length, the one with the
        longest text of the request that is due.
        """
        ready = [seq for seq in self._sequences.values() if seq.waiting]
        if not ready:
            return []
        first = min(ready, key=lambda seq: CLASSES.index(seq.priority_class))
        limit, head = self._model.batch_tokens, _Row(first, first.waiting[-1])
        num_left, rows = NUM_BATCHES_SORTED * limit, list[_Row]()
        for seq in [first] if first.is_alone else ready:
            if seq.priority_class == first.priority_class and (seq is first or not seq.is_alone) and num_left > 0:
                rows += [_Row(seq, index) for index in seq.waiting if seq.rows[index].shared == head.row.shared]
                num_left -= sum(len(seq.rows[index]) for index in seq.waiting)
        batch = list[_Row]()
        for one in sorted(rows, key=lambda one: len(one.row), reverse=True):
            if batch and len(batch[0].row) * (len(batch) + 1) > limit:
                if head in batch:
                    break
                batch = []
            batch.append(one)
        return batch

    def _compute(self, rows: Sequence[TextRow]) -> tuple[Floats, float]:
        """Return the numbers of each row, and the seconds that they took. The thread calls this."""
        begun_s = time.monotonic()
        return self._model.compute_rows(rows), time.monotonic() - begun_s

    # What was computed

    def _take_batch(self, batch: _Batch) -> None:
        """Take the numbers of a batch. The requests end that have all of theirs."""
        rows = [one for one in batch.rows if self._sequences.get(one.seq.id) is one.seq]
        if (error := batch.done.exception()) is not None:
            self._handle_failure({one.seq for one in rows}, rows, error)
            return
        numbers, passed_s = batch.done.result()
        num_tokens = sum(len(one.row) for one in batch.rows)
        self._speed.add(passed_s, num_tokens)
        for one, found in zip(batch.rows, numbers, strict=True):
            one.seq.found[one.place] = found
        for seq in dict.fromkeys(one.seq for one in rows):
            if seq.is_done:
                self._end(seq, Outcome.of_texts(seq))

    def _handle_failure(self, seqs: Collection[EmbedSequence], rows: Sequence[_Row], error: BaseException) -> None:
        """End the request whose batch failed, or have the requests of a batch computed apart."""
        if not is_failure(error):
            raise error
        log.warning("a batch of %d texts of %d requests failed", len(rows), len(seqs), exc_info=error)
        if len(seqs) == 1:
            (seq,) = seqs
            self._end(seq, Outcome.of_error(_classify_error(error), is_final=False))
            return
        for seq in seqs:
            seq.is_alone = True
        _put_back(rows)

    def _end(self, seq: EmbedSequence, outcome: Outcome) -> None:
        self.remove_request(seq.id)
        self._ended.append(Ended(seq.context, outcome))


def _put_back(rows: Iterable[_Row]) -> None:
    """Let rows wait again that were in a batch."""
    for seq, index in rows:
        seq.add_waiting(index)


def _classify_error(error: BaseException) -> RequestError:
    text = f"{type(error).__name__}: {error}"
    is_memory = isinstance(error, MemoryError) or "OutOfMemory" in text or "memory" in text
    found = OutOfMemory(text) if is_memory else ModelError(text)
    found.stack = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # the frames hold the batch's tensors
        traceback.clear_frames(error.__traceback__)
    return found
