"""A request in an endpoint worker."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span

from penstock.bus.contract import Delivery, Outgoing
from penstock.endpoint_worker.answer import Answer
from penstock.endpoint_worker.question import check_request, estimate_prompt_tokens
from penstock.errors import RequestError, RequestTooLarge
from penstock.messages import (
    EndEvent,
    ErrorInfo,
    FinishReason,
    Job,
    Request,
    Timings,
    TokenEvent,
    Usage,
    compute_body_hash,
    decode_message,
    extract_request_id,
    now_s,
)
from penstock.names import Pipeline, PriorityClass
from penstock.record import Claim, UnclaimedMessage
from penstock.telemetry import tracing
from penstock.telemetry.genai import Operation, get_operation
from penstock.worker.delivery_queue import serialize_delivery
from penstock.worker.result import build_result, build_result_message
from penstock.worker.retry import make_dead_letters, to_request_error

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EndpointTask:
    """A request from its message to its settlement. Only the loop changes it."""

    id: str
    delivery: Delivery
    """The delivery that it came with. It is not held where the request was taken over."""
    request: Request | None
    """The decoded message; None where it could not be read."""
    body_hash: str
    """A request with the same id and another hash is a conflict."""
    operation: Operation
    error: RequestError | None = None
    """The error that the request ends with."""
    claim: Claim = field(init=False)
    """The claim under which it is held, once it is claimed."""
    answer: Answer | None = None
    """The answer that is being read; None while the request waits for an endpoint."""
    num_failures: int = 0
    """How often endpoints failed at this request since an answer brought more pieces than any that failed before."""
    most_pieces: int = 0
    """The most pieces that an answer brought before it failed, and no more than `GOOD_PROGRESS`."""
    log_events: list[TokenEvent] = field(default_factory=list)
    """The events of the log: those that were read, and those sent to it since."""
    finish_reason: FinishReason | None = None
    told_usage: Usage | None = None
    """What the endpoint says that the answer took."""
    told_stop: str | None = None
    """The stop string that ended the answer, where the endpoint tells."""
    num_pieces_before: int = 0
    """Pieces in the log when the endpoint was asked that told the usage: they were a part of its prompt."""
    end_event: EndEvent | None = None
    """The log's end, once this worker or another has written it."""
    parent_context: Context = field(default_factory=Context)
    span: Span = INVALID_SPAN
    context: Context = field(default_factory=Context)
    """The trace context for the spans of the work on it."""
    started_s: float = field(default_factory=now_s)
    first_token_s: float = 0.0
    last_written_s: float | None = None
    """When its last piece was written, by the monotonic clock; None before this worker wrote one."""

    @property
    def klass(self) -> PriorityClass:
        """The priority class of the topic that it came by."""
        return self.delivery.klass

    @property
    def deadline(self) -> float | None:
        """The request's deadline in seconds since the epoch, or None."""
        return None if self.request is None else self.request.deadline

    @property
    def message_name(self) -> str:
        """The name of its message, which is bound to the request as a job is: that of its place in the topic."""
        return f"{self.delivery.topic}@{self.delivery.position}"

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(event.text for event in self.log_events)

    @property
    def max_pieces_left(self) -> int:
        """How many pieces may follow, if each is a token."""
        return 0 if self.request is None else self.request.sampling.max_tokens - len(self.log_events)

    def to_claim_request(self) -> UnclaimedMessage:
        """Return what a claim needs to know of the request; without the message where it is too large to keep."""
        is_kept = not isinstance(self.error, RequestTooLarge)
        message = serialize_delivery(self.delivery) if is_kept else b""
        return UnclaimedMessage(self.id, self.body_hash, self.message_name, message)

    def start_span(self) -> None:
        """Start the span of the work on the request."""
        self.span = tracing.start_span(
            "endpoint", self.parent_context, self.started_s, attempt=self.claim.attempts, pieces=len(self.log_events)
        )
        self.context = tracing.with_span(self.span, self.parent_context)

    def measure_gap(self, now_s: float) -> float | None:
        """Note that a piece was written. Returns the seconds since the one before, if this worker wrote that."""
        before_s, self.last_written_s = self.last_written_s, now_s
        return None if before_s is None else now_s - before_s

    def build_end_event(self) -> EndEvent:
        """Return the end of its log, stamped now."""
        if self.error is not None:
            self.finish_reason = "cancelled" if self.error.code == "cancelled" else "error"
        timings = Timings(
            published=self.delivery.timestamp_s,
            prefill_started=self.started_s,
            first_token=self.first_token_s,
            finished=now_s(),
        )
        error = None if self.error is None else ErrorInfo.from_error(self.error)
        tells_stop = self.request is not None and self.request.sampling.tell_stop
        return EndEvent(
            finish_reason=self.finish_reason or "error",
            stop=self.told_stop if tells_stop else None,
            usage=self._count_usage(),
            timings=timings,
            error=error,
            pieces=self.claim.num_tokens,
        )

    def _count_usage(self) -> Usage:
        """Return the tokens that the endpoint has counted; else each piece counts as one, and the prompt by its length.

        Where an answer was continued, the text so far was a part of the prompt that the endpoint counted.
        """
        num_pieces = len(self.log_events)
        if (told := self.told_usage) is None:
            prompt = estimate_prompt_tokens(self.request) if self.request is not None and num_pieces else 0
            return Usage(prompt_tokens=prompt, completion_tokens=num_pieces)
        before = min(self.num_pieces_before, told.prompt_tokens)
        prompt = told.prompt_tokens - before
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=min(told.cached_tokens, prompt),
            completion_tokens=told.completion_tokens + before,
        )

    def build_outputs(self, pipeline: Pipeline, model: str) -> tuple[list[Outgoing], list[Outgoing]] | None:
        """Return the result and the dead letters of a log with its end; None where Redis has lost it."""
        events: Sequence[TokenEvent | EndEvent] = (
            [*self.log_events, self.end_event] if self.end_event is not None else self.claim.log
        )
        result = build_result(self._describe_as_job(), model, events)
        if result is None:
            return None
        error = None if result.error is None else result.error.to_exception()
        if self.end_event is not None and self.error is not None:
            error = self.error
        message = build_result_message(pipeline, result, tracing.inject_headers(self.parent_context))
        return [message], make_dead_letters(pipeline, self.delivery, error, self.claim)

    def _describe_as_job(self) -> Job:
        request = self.request
        if request is None:
            return Job(id=self.id, job=self.message_name, klass=self.klass)
        return Job(id=self.id, job=self.message_name, klass=self.klass, tenant=request.tenant)


def read_task(pipeline: Pipeline, model: str, delivery: Delivery) -> EndpointTask | None:
    """Return the request of a message, with an error if it is invalid; None where not even an id can be read."""
    started_s = now_s()
    request, error = None, None
    try:
        request = decode_message(Request, delivery.value)
        check_request(request, delivery.klass, model)
    except RequestError as refused:
        error = refused
    except Exception as bug:  # this request's, not its neighbours'
        log.exception("a message of %s", delivery.topic)
        error = to_request_error(bug)
    request_id = extract_request_id(delivery.value, delivery.key) if request is None else request.id
    if request_id is None:
        return None
    if request is None:
        body = hashlib.sha256(delivery.value).hexdigest()
    else:
        body = compute_body_hash(request, delivery.value, delivery.headers)
    task = EndpointTask(request_id, delivery, request, body, get_operation(request), error, started_s=started_s)
    whose = tracing.with_request(pipeline, task.id, Context())
    task.context = task.parent_context = tracing.extract_context(delivery.headers, whose, delivery.timestamp_s)
    return task
