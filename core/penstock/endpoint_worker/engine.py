"""The engine of an endpoint worker: it asks servers for the answers, and gives their text to the loop as tokens.

Each answer is read on a thread of its own (`reply.py`), which hands over events. The loop's step takes what has
arrived: pieces of text are the tokens that the step sampled, and ends of answers are events that the loop collects.

An endpoint that fails costs the answers that were under way there. What happens to those is the operator's choice
(`PENSTOCK_ENDPOINT_INTERRUPTED`): another endpoint goes on behind their text, or begins anew if there is none, or they
end with an error. A request that no endpoint has begun waits, for as long as its deadline allows.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.config.settings import EndpointSettings, RecordSettings
from penstock.endpoint_worker.endpoints import Endpoints
from penstock.endpoint_worker.question import Question, build_question
from penstock.endpoint_worker.reply import EndpointReply, Failed, Finished, Piece, Refused, ReplyEvent
from penstock.engine.contract import Ended, Outcome
from penstock.errors import AnswerInterrupted, ModelError, RequestError
from penstock.failpoints import failpoint
from penstock.messages import Logprobs, Request, Usage
from penstock.names import CLASSES, PriorityClass, piece_token
from penstock.record.claim import GOOD_PROGRESS
from penstock.worker.confine import confine_error

log = logging.getLogger(__name__)

EVENT_WAIT_S = 0.02
"""How long the loop waits for text while it works on requests: also how soon it polls for further ones."""
CLOSE_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for the threads of its answers."""


@dataclass(eq=False)
class EndpointSequence:
    """A request that endpoints are asked for. Its prompt counts as no work: how it is computed is not known here."""

    request: Request
    klass: PriorityClass
    context: Any
    """The caller's, which events return unchanged."""
    pieces: list[str] = field(default_factory=list)
    """The text so far: what was in the log, and what answers brought since."""
    answer: EndpointReply | None = None
    """The answer that is being read; None while the request waits for an endpoint."""
    num_pieces_before: int = 0
    """Pieces so far when the answer was asked for: they were a part of its prompt."""
    num_failures: int = 0
    """How often endpoints failed at this request since an answer brought more pieces than any that failed before."""
    most_pieces: int = 0
    """The most pieces that an answer brought before it failed, and no more than `GOOD_PROGRESS`."""
    num_prompt_tokens = num_cached_tokens = num_computed_tokens = num_pending_tokens = 0
    prompt_logprobs: Sequence[Logprobs] = ()

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an endpoint."""
        return self.answer is None

    @property
    def num_made(self) -> int:
        """The pieces that the last answer brought."""
        return len(self.pieces) - self.num_pieces_before

    @property
    def num_left(self) -> int:
        """How many pieces may follow, if each is a token."""
        return max(0, self.request.sampling.max_tokens - len(self.pieces))


@dataclass(frozen=True)
class SampledPiece:
    """A piece of an answer's text. To the loop it is a token that a step sampled."""

    seq: EndpointSequence
    text: str
    logprobs: Logprobs | None = None
    is_grammar_ended: bool = False

    @property
    def token_id(self) -> int:
        """What the log has in place of a token id."""
        return piece_token(self.text)


class EndpointEngine:
    """Asks endpoints for the answers of requests."""

    def __init__(
        self,
        endpoints: Endpoints,
        settings: EndpointSettings,
        record: RecordSettings,
        count_retry: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`record` says how often a request may fail. `count_retry` is called with the cause of each retry."""
        self.endpoints, self.settings = endpoints, settings
        self._record, self._count_retry = record, count_retry
        self._sequences: dict[str, EndpointSequence] = {}
        self._by_answer: dict[EndpointReply, EndpointSequence] = {}
        self._cut: list[EndpointReply] = []
        """Answers that are not wanted any more, whose threads may still run."""
        self._arrived: queue.SimpleQueue[tuple[EndpointReply, ReplyEvent]] = queue.SimpleQueue()
        self._pieces: list[SampledPiece] = []
        self._ended: list[Ended] = []
        self._wake = threading.Event()

    def count_free(self) -> int:
        """Return how many more requests can be asked for now."""
        return max(0, self.endpoints.count_free() - self._count_waiting())

    def add_request(
        self, request: Request, klass: PriorityClass, pieces: Iterable[str], context: Any
    ) -> EndpointSequence:
        """Have a request answered behind the `pieces` of its text so far."""
        seq = self._sequences[request.id] = EndpointSequence(request, klass, context, list(pieces))
        return seq

    def remove_request(self, request_id: str) -> None:
        """Drop a request, and cut its answer. Does nothing where there is none of that id."""
        seq = self._sequences.pop(request_id, None)
        if seq is not None and (answer := seq.answer) is not None:
            answer.cut()
            self._cut.append(answer)
            self._forget_answer(answer)

    def has_work(self) -> bool:
        """Return whether something has arrived that was not handed over yet."""
        return not self._arrived.empty()

    # The step

    def begin_step(self) -> bool:
        """Ask for all requests that wait, and take what has arrived. Return whether anything has."""
        self._wake.clear()
        self._ask_endpoints()
        arrived = []
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._arrived.get_nowait())
        for answer, event in arrived:
            if (seq := self._by_answer.get(answer)) is not None:
                with confine_error(seq.id, partial(self._end_with_error, seq)):
                    self._handle_event(seq, answer, event)
        self._cut = [answer for answer in self._cut if answer.is_alive]
        return bool(arrived)

    def finish_step(self) -> Sequence[SampledPiece]:
        """Return the pieces of text that have arrived, those of one request together, as one append takes them."""
        by_seq: dict[EndpointSequence, list[SampledPiece]] = {}
        for piece in self._pieces:
            by_seq.setdefault(piece.seq, []).append(piece)
        self._pieces = []
        return [piece for pieces in by_seq.values() for piece in pieces]

    def store_full_blocks(self) -> bool:
        """Return False: there is no KV here."""
        return False

    def collect_events(self) -> Iterable[Ended]:
        """Return the ends of answers whose text was handed over."""
        ended, self._ended = self._ended, []
        return ended

    def is_moving_blocks(self) -> bool:
        """Return whether ends of answers were not collected yet."""
        return bool(self._ended)

    def wait_for_event(self) -> None:
        """Wait a moment at most for text, or for `wake_waiter`."""
        self._wake.wait(EVENT_WAIT_S)

    def wake_waiter(self) -> None:
        """End the current `wait_for_event`, or else the next one. Any thread may call this."""
        self._wake.set()

    def report_state(self) -> dict[str, object]:
        """Return fields of the heartbeat: how many requests wait, and why no endpoint can be asked. Any thread may call
        it.
        """
        problem = self.endpoints.current_problem
        state = {"waiting": self._count_waiting(), "pool": {"used": 0, "total": 0}, "kv": {}}
        return state | ({"reason": problem} if problem else {})

    def close(self) -> None:
        """Cut all answers, and wait a moment for their threads."""
        for request_id in list(self._sequences):
            self.remove_request(request_id)
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for answer in self._cut:
            answer.join(max(0.0, until_s - time.monotonic()))

    def abandon(self) -> None:
        """Do as `close`."""
        self.close()

    # Asking

    def _count_waiting(self) -> int:
        return sum(seq.is_waiting for seq in list(self._sequences.values()))

    def _ask_endpoints(self) -> None:
        """Ask for all requests that wait, as far as endpoints can be asked: interactive ones first."""
        waiting = [seq for seq in self._sequences.values() if seq.is_waiting]
        for seq in sorted(waiting, key=lambda one: CLASSES.index(one.klass)):
            endpoint = self.endpoints.choose()
            if endpoint is None:
                return
            with confine_error(seq.id, partial(self._end_with_error, seq)):
                question = self._build_question(seq)
                endpoint.num_running += 1
                seq.num_pieces_before = len(seq.pieces)
                answer = EndpointReply(
                    endpoint, question, self.settings.key, self.settings.silence_s, self._report_event
                )
                seq.answer, self._by_answer[answer] = answer, seq
                failpoint("endpoint.2.asked")

    def _build_question(self, seq: EndpointSequence) -> Question:
        """Return what to ask. Raises `AnswerInterrupted` for text that is not to be, or cannot be, gone on with."""
        if seq.pieces and self.settings.interrupted != "continue":
            raise AnswerInterrupted("it was cut when readers had seen a part of it")
        return build_question(seq.request, self.settings.model, "".join(seq.pieces), len(seq.pieces))

    def _report_event(self, answer: EndpointReply, event: ReplyEvent) -> None:
        """Hand over an event. An answer's thread calls this."""
        self._arrived.put((answer, event))
        self._wake.set()

    # What arrives

    def _handle_event(self, seq: EndpointSequence, answer: EndpointReply, event: ReplyEvent) -> None:
        if isinstance(event, Piece):
            self._add_piece(seq, answer, event.text)
            return
        self._forget_answer(answer)
        match event:
            case Finished(reason, usage, stop):
                answer.endpoint.note_answer()
                counted = _subtract_prompt(usage, seq.num_pieces_before)
                self._end(seq, Outcome(reason, usage=counted, stop=stop))
            case Refused(error):
                answer.endpoint.note_answer()
                self._end_with_error(seq, error)
            case Failed():
                self._handle_failure(seq, answer, event)

    def _add_piece(self, seq: EndpointSequence, answer: EndpointReply, text: str) -> None:
        """Hand a piece of text over. What is behind `max_tokens` is dropped, and ends the answer."""
        if not seq.num_left:
            self._end(seq, Outcome("length"))
            return
        answer.endpoint.note_answer()
        seq.pieces.append(text)
        if seq.num_made > seq.most_pieces:
            seq.num_failures = 0
        self._pieces.append(SampledPiece(seq, text))

    def _handle_failure(self, seq: EndpointSequence, answer: EndpointReply, failed: Failed) -> None:
        """Have a request asked for again, at whichever endpoint can be, or end it.

        It ends where the operator does not want it to be asked for again, where the text is as long as it may be, and
        where endpoints have failed at it as often as a request may fail. That an endpoint is away or busy does not
        count.
        """
        endpoint, now_s = answer.endpoint, time.monotonic()
        log.warning("%s: %s", endpoint.url, failed.problem)
        if failed.is_busy and failed.wait_s is not None:
            endpoint.note_busy(failed.problem, failed.wait_s, now_s)
        else:
            endpoint.note_failure(failed.problem, answer.asked_s, now_s)
        self._count_retry("endpoint_busy" if failed.is_busy else "endpoint_failed")
        if not failed.may_have_begun:
            return
        seq.num_failures += 1
        seq.most_pieces = max(seq.most_pieces, min(seq.num_made, GOOD_PROGRESS))
        # In a row they may fail more often where the connection was lost.
        max_failures = self._record.max_attempts if failed.is_lost else self._record.fail_attempts
        if self.settings.interrupted == "fail":
            self._end_with_error(seq, AnswerInterrupted(failed.problem))
        elif seq.num_failures >= max_failures:
            self._end_with_error(seq, ModelError(f"endpoints failed {seq.num_failures} times: {failed.problem}"))
        elif not seq.num_left:
            self._end(seq, Outcome("length"))

    def _end_with_error(self, seq: EndpointSequence, error: RequestError) -> None:
        self._end(seq, Outcome.of_error(error))

    def _end(self, seq: EndpointSequence, outcome: Outcome) -> None:
        """Drop a request, and report its end behind the text that was handed over."""
        self.remove_request(seq.id)
        self._ended.append(Ended(seq.context, outcome))

    def _forget_answer(self, answer: EndpointReply) -> None:
        if (seq := self._by_answer.pop(answer, None)) is not None:
            answer.endpoint.num_running -= 1
            seq.answer = None


def _subtract_prompt(usage: Usage | None, num_before: int) -> Usage | None:
    """Return the tokens that an endpoint has counted, with text that it took for the prompt counted as answered."""
    if usage is None:
        return None
    before = min(num_before, usage.prompt_tokens)
    prompt = usage.prompt_tokens - before
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=min(usage.cached_tokens, prompt),
        completion_tokens=usage.completion_tokens + before,
    )
