"""The engine of an endpoint worker: it asks servers for the answers, and gives their text to the loop as tokens.

Each answer is read on a thread of its own (`reply.py`), which hands over events. The loop's step takes what has
arrived: pieces of text are the tokens that the step sampled, and ends of answers are events that the loop collects.

An endpoint that fails interrupts its running answers. The operator chooses how these go on
(`PENSTOCK_ENDPOINT_INTERRUPTED`): another endpoint continues after their text, or starts over if there is none, or they
end with an error. A refused request waits for that endpoint until it is known whose fault the refusal was (`Refusal`);
other requests are sent meanwhile. A request without an available endpoint waits as long as its deadline allows.
"""

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.config.settings import EndpointSettings, RecordSettings
from penstock.endpoint_worker.answer import AnswerWriter, Piece, ToldAnswer
from penstock.endpoint_worker.endpoints import Endpoint, Endpoints, draw_pause_s
from penstock.endpoint_worker.question import Question, build_question
from penstock.endpoint_worker.reply import Begun, EndpointReply, Failed, Finished, Refused, ReplyEvent
from penstock.engine.contract import Ended, Outcome, StepShare
from penstock.errors import AnswerInterrupted, ModelError, RequestError
from penstock.failpoints import failpoint
from penstock.messages import Logprobs, Request, Usage
from penstock.names import CLASSES, PriorityClass, piece_token
from penstock.record.claim import GOOD_PROGRESS
from penstock.worker.failure import confine_error
from penstock.worker.whole_engine import EVENT_WAIT_S, WholeEngine

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
"""Seconds that a leaving worker waits for the threads of its answers."""
NEVER_ALONE = ("401", "407", "429", "503")
"""Refusals for the key, or because the endpoint is busy: they count only beside others that were answered."""
MAX_HELD_REQUESTS = 1000
"""The most requests of a worker whose endpoint refuses all of them: it claims further requests to try them."""


@dataclass(eq=False)
class Refusal:
    """An endpoint's refusal: it was asked for a request and did not answer it."""

    failed: Failed
    asked_s: float
    until_s: float
    """The time before which the request is not sent to this endpoint again."""
    judged_s: float
    """The time from which the refusal counts even if no other request was answered."""
    was_crowded: bool
    """Whether the endpoint had other questions of this worker when it was asked."""
    is_open: bool = True
    """Whether it may still be counted against the request."""

    def counts(self, endpoint: Endpoint, now_s: float) -> bool:
        """Return whether the refusal is known by now to be the request's fault.

        It is known once the endpoint has answered another request that was sent later. A busy endpoint proves nothing
        about a request that was sent among others. A refusal alone counts after a pause, if the endpoint does not fail
        at other requests as well. Refusals for the key, and of a busy endpoint, never count alone.
        """
        if self.asked_s < endpoint.answered_s:
            return not (self.failed.is_busy and self.was_crowded)
        return now_s >= self.judged_s and not endpoint.num_failures and self.failed.cause not in NEVER_ALONE


@dataclass(eq=False)
class EndpointSequence:
    """A request that endpoints are asked for. Its prompt counts as no work, because the endpoint computes it."""

    request: Request
    priority_class: PriorityClass
    context: Any
    """The caller's, which events return unchanged."""
    pieces: list[str] = field(default_factory=list)
    """The text so far: the pieces in the log, and those of answers since."""
    answer: EndpointReply | None = None
    """The answer that is being read; None while the request waits for an endpoint."""
    asked_s: float = 0.0
    """The time at which this answer was asked for, or else the last one."""
    num_pieces_before: int = 0
    """Pieces so far when the answer was asked for."""
    num_failures: int = 0
    """Failures of endpoints at this request since an answer brought more pieces than each that failed before."""
    most_pieces: int = 0
    """The most pieces that an answer brought before it failed, and no more than `GOOD_PROGRESS`."""
    refusals: dict[Endpoint, Refusal] = field(default_factory=dict)
    """The last failure at each endpoint that was not asked again since."""
    num_refusals: int = 0
    """Failures since the last piece. The pauses between them grow."""
    failed_at_s: float = -math.inf
    """The time of the last failure. Requests that never failed are tried first, then those that failed longest ago."""
    was_crowded: bool = False
    """Whether the endpoint had other questions of this worker when it was asked."""
    num_prompt_tokens = num_cached_tokens = num_computed_tokens = num_pending_tokens = num_retained_blocks = 0
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
        """The most pieces that may follow, if each is a token."""
        return max(0, self.request.sampling.max_tokens - len(self.pieces))

    def list_paused(self, now_s: float) -> list[Endpoint]:
        """Return the endpoints at which it is not to be asked for again yet."""
        return [endpoint for endpoint, refusal in self.refusals.items() if now_s < refusal.until_s]


@dataclass(frozen=True)
class SampledPiece:
    """A piece of an answer's text. To the loop it is a token that a step sampled."""

    seq: EndpointSequence
    text: str
    logprobs: Logprobs | None = None
    is_grammar_ended: bool = False

    @property
    def token_id(self) -> int:
        """The number that the log has in place of a token id."""
        return piece_token(self.text)


class EndpointEngine(WholeEngine):
    """Asks endpoints for the answers of requests."""

    def __init__(
        self,
        endpoints: Endpoints,
        settings: EndpointSettings,
        record: RecordSettings,
        count_retry: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`record` says how often a request may fail. `count_retry` is called with the cause of each retry."""
        super().__init__()
        self.endpoints, self.settings = endpoints, settings
        self._record, self._count_retry = record, count_retry
        self._sequences: dict[str, EndpointSequence] = {}
        self._by_answer: dict[EndpointReply, EndpointSequence] = {}
        self._cut: list[EndpointReply] = []
        """Answers that are not wanted any more, whose threads may still run."""
        self._arrived: queue.SimpleQueue[tuple[EndpointReply, ReplyEvent]] = queue.SimpleQueue()
        self._pieces: list[SampledPiece] = []

    def count_free(self) -> int:
        """Return how many more requests can be asked for now.

        Requests in a pause of their own take no place from others. If an endpoint refuses all requests that are here,
        one further request is claimed for each try: it may be the first good one.
        """
        now_s, waiting = self.endpoints.clock(), [seq for seq in self._sequences.values() if seq.is_waiting]
        num_ready = sum(any(one not in seq.list_paused(now_s) for one in self.endpoints.all) for seq in waiting)
        num_tries = self.endpoints.count_refusing() if len(self._sequences) < MAX_HELD_REQUESTS else 0
        num_untried = sum(seq.failed_at_s == -math.inf for seq in waiting)
        return max(0, self.endpoints.count_free() - num_ready, num_tries - num_untried)

    def add_request(
        self, request: Request, priority_class: PriorityClass, pieces: Iterable[str], context: Any
    ) -> EndpointSequence:
        """Have a request answered, after the `pieces` of its text so far."""
        seq = self._sequences[request.id] = EndpointSequence(request, priority_class, context, list(pieces))
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

    @property
    def step_shares(self) -> Sequence[StepShare]:
        """Nothing: servers compute the answers."""
        return ()

    def wait_for_event(self) -> None:
        """Wait a moment at most for text, or for `wake_waiter`."""
        self._wake.wait(EVENT_WAIT_S)

    def report_state(self) -> dict[str, object]:
        """Return fields of the heartbeat: how many requests wait, and why no endpoint can be asked. Any thread may call
        it.
        """
        problem, rests = self.endpoints.current_problem, self.endpoints.describe_rests()
        waiting = sum(seq.is_waiting for seq in list(self._sequences.values()))
        state = {"waiting": waiting, "pool": {"used": 0, "total": 0}, "kv": {}, "endpoints": rests}
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

    def _ask_endpoints(self) -> None:
        """Ask for all waiting requests, as far as endpoints can be asked. Interactive requests come first, and requests
        at which endpoints failed come last, so that each try is of another request.
        """
        now_s = self.endpoints.clock()
        waiting = [seq for seq in self._sequences.values() if seq.is_waiting]
        for seq in sorted(waiting, key=lambda one: (one.failed_at_s, CLASSES.index(one.priority_class))):
            self._judge_refusals(seq, now_s)
            endpoint = self.endpoints.choose(seq.list_paused(now_s))
            if endpoint is None or self._sequences.get(seq.id) is not seq:
                continue
            with confine_error(seq.id, partial(self._end_with_error, seq)):
                text = "".join(seq.pieces)
                question = self._build_question(seq, text, endpoint.model or self.settings.model)
                writer = AnswerWriter(seq.request, ToldAnswer.parse_log(text))
                seq.num_pieces_before = len(seq.pieces)
                seq.asked_s, seq.was_crowded = self.endpoints.clock(), bool(endpoint.under_way)
                answer = EndpointReply(endpoint, question, writer, self.settings.silence_s, self._report_event)
                endpoint.under_way.append(seq.asked_s)
                seq.refusals.pop(endpoint, None)
                seq.answer, self._by_answer[answer] = answer, seq
                failpoint("endpoint.2.asked")

    def _build_question(self, seq: EndpointSequence, text: str, model: str) -> Question:
        """Return the question behind a text. Raises `AnswerInterrupted` if it must not or cannot be continued."""
        if text and self.settings.interrupted != "continue":
            raise AnswerInterrupted("it was cut when readers had seen a part of it")
        return build_question(seq.request, model, text, len(seq.pieces))

    def _report_event(self, answer: EndpointReply, event: ReplyEvent) -> None:
        """Hand over an event. An answer's thread calls this."""
        self._arrived.put((answer, event))
        self._wake.set()

    # What arrives

    def _handle_event(self, seq: EndpointSequence, answer: EndpointReply, event: ReplyEvent) -> None:
        if isinstance(event, Piece):
            self._add_piece(seq, answer, event)
            return
        if isinstance(event, Begun):
            answer.endpoint.note_answer(seq.asked_s)
            return
        self._forget_answer(answer)
        match event:
            case Finished(reason, usage, stop):
                answer.endpoint.note_answer(seq.asked_s)
                counted = _count_pieces(usage, seq.num_pieces_before, is_in_prompt=answer.question.is_continued)
                self._end(seq, Outcome(reason, usage=counted, stop=stop))
            case Refused(error, has_begun):
                if has_begun:
                    answer.endpoint.note_answer(seq.asked_s)
                self._end_with_error(seq, error)
            case Failed():
                self._handle_failure(seq, answer, event)

    def _add_piece(self, seq: EndpointSequence, answer: EndpointReply, piece: Piece) -> None:
        """Hand a piece of text over. A piece beyond `max_tokens` is dropped, and ends the answer."""
        if not seq.num_left:
            self._end(seq, Outcome("length"))
            return
        answer.endpoint.note_answer(seq.asked_s)
        seq.num_refusals = 0
        seq.pieces.append(piece.text)
        if seq.num_made > seq.most_pieces:
            seq.num_failures = 0
        self._pieces.append(SampledPiece(seq, piece.text, piece.logprobs))

    def _handle_failure(self, seq: EndpointSequence, answer: EndpointReply, failed: Failed) -> None:
        """Send a request again, to any available endpoint, or end it.

        The request ends if the operator does not allow another attempt, or if endpoints have failed at it as often as a
        request may fail. A lost answer, or one that broke off after its first piece, counts at once; the fault of any
        other failure is known later. An endpoint that cannot be reached does not count.
        """
        endpoint, now_s = answer.endpoint, self.endpoints.clock()
        log.warning("endpoint %s failed for request %s: %s", endpoint.url, seq.id, failed.problem)
        self._count_retry("endpoint_busy" if failed.is_busy else "endpoint_failed")
        seq.failed_at_s = now_s
        if not failed.is_asked:
            endpoint.note_failure(failed.cause, failed.problem, seq.asked_s, now_s)
            return
        endpoint.note_refusal(failed.cause, failed.problem, seq.id, seq.asked_s, now_s, failed.wait_s)
        until_s = now_s + max(draw_pause_s(seq.num_refusals), failed.wait_s or 0.0)
        is_last = seq.num_failures + 1 >= self._count_max_failures(failed)
        refusal = Refusal(failed, seq.asked_s, until_s, now_s if is_last else until_s, seq.was_crowded)
        seq.refusals[endpoint] = refusal
        # While a busy endpoint answers others, the next place may be free soon.
        seq.num_refusals += not (failed.is_busy and refusal.was_crowded)
        if failed.may_have_begun and self.settings.interrupted == "fail":
            self._end_with_error(seq, AnswerInterrupted(failed.problem))
        elif failed.error is not None and seq.num_made:
            self._end_with_error(seq, failed.error)
        elif failed.is_lost or seq.num_made:
            self._count_failure(seq, refusal)
        else:
            self._judge_refusals(seq, now_s)

    def _judge_refusals(self, seq: EndpointSequence, now_s: float) -> None:
        """Count the refusals that are known by now to be the request's fault. It may end with that."""
        for endpoint, refusal in list(seq.refusals.items()):
            if refusal.is_open and refusal.counts(endpoint, now_s) and self._sequences.get(seq.id) is seq:
                self._count_failure(seq, refusal)

    def _count_max_failures(self, failed: Failed) -> int:
        """Return how often in a row a request may fail: more often where the connection was lost, or all are busy."""
        is_outside = failed.is_lost or failed.is_busy
        return self._record.max_attempts if is_outside else self._record.fail_attempts

    def _count_failure(self, seq: EndpointSequence, refusal: Refusal) -> None:
        """Count a failure against a request, which ends where it fails too often, or its text is long enough."""
        failed, refusal.is_open = refusal.failed, False
        seq.num_failures += 1
        seq.most_pieces = max(seq.most_pieces, min(seq.num_made, GOOD_PROGRESS))
        if seq.num_failures >= self._count_max_failures(failed):
            error = ModelError(f"endpoints failed {seq.num_failures} times: {failed.problem}")
            self._end_with_error(seq, failed.error or error)
        elif not seq.num_left:
            self._end(seq, Outcome("length"))

    def _end_with_error(self, seq: EndpointSequence, error: RequestError) -> None:
        self._end(seq, Outcome.of_error(error))

    def _end(self, seq: EndpointSequence, outcome: Outcome) -> None:
        """Drop a request, and report its end after the text that was handed over."""
        self.remove_request(seq.id)
        self._ended.append(Ended(seq.context, outcome))

    def _forget_answer(self, answer: EndpointReply) -> None:
        if (seq := self._by_answer.pop(answer, None)) is not None:
            answer.endpoint.under_way.remove(seq.asked_s)
            seq.answer = None


def _count_pieces(usage: Usage | None, num_before: int, *, is_in_prompt: bool) -> Usage | None:
    """Return the tokens that an endpoint has counted, and the pieces before as answered.

    The endpoint counted them with the prompt if it went on behind them (`is_in_prompt`).
    """
    if usage is None:
        return None
    before = min(num_before, usage.prompt_tokens) if is_in_prompt else num_before
    prompt = usage.prompt_tokens - (before if is_in_prompt else 0)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=min(usage.cached_tokens, prompt),
        completion_tokens=usage.completion_tokens + before,
    )
