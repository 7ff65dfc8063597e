"""Requests that endpoints answer: their text goes to the logs, and results go out. There is one stage.

In the record a request is what a job is in decode, without prefill before it: the name of its message is bound to it.
The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`, the engine `engine.py`):

    1  a message is read and claimed. A request that cannot be answered ends here, and continues at 5
    2  the request goes to the endpoint with the least load. Text that the log already has is part of the question
    3  pieces of text that arrived go to their logs
    4  finish reason, usage and timings are appended
    5  the result is published

A crash before 2 costs nothing. A crash after 2 costs the endpoint's work since the last piece in the log: the
connection is closed, and the next holder finds in the log the text that readers have seen.
"""

import hashlib
import logging
from collections.abc import Collection

from opentelemetry.context import Context

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.endpoint_worker.answer import ToldAnswer
from penstock.endpoint_worker.engine import EndpointEngine, SampledPiece
from penstock.endpoint_worker.question import check_request, estimate_prompt_tokens
from penstock.engine.contract import Outcome, SampledToken
from penstock.errors import AnswerInterrupted, RequestError, is_failure
from penstock.grammar.tools import CALL_CLOSE
from penstock.messages import (
    EndEvent,
    Job,
    Request,
    Sampling,
    Timings,
    TokenEvent,
    Usage,
    compute_body_hash,
    decode_message,
    extract_request_id,
    now_s,
)
from penstock.names import Pipeline, PriorityClass, Stage, WorkerKind
from penstock.telemetry import tracing
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.tracing import get_operation
from penstock.worker.failure import to_request_error
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.result import build_failed_result, build_result_of_log
from penstock.worker.task import Role, StageOutput, Task

log = logging.getLogger(__name__)


class EndpointRole(Role):
    """The role of an endpoint worker."""

    kind: WorkerKind = "endpoint"
    stage: Stage = "decode"
    max_inline_bytes = MAX_MESSAGE_BYTES
    hands_off_for = ""
    writes_pieces = True
    engine: EndpointEngine

    def __init__(self, pipeline: Pipeline, model_name: str, engine: EndpointEngine) -> None:
        """`model_name` is the name by which callers ask for the model; the endpoints may have another for it."""
        self.pipeline, self.model_name, self.engine = pipeline, model_name, engine

    # 1. Claim.

    def free_capacity(
        self, priority_class: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad
    ) -> int:
        """Return how many more requests can be asked for now."""
        return self.engine.count_free() - num_read

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a message, with an error if it is invalid; None where not even an id can be read."""
        started_s = now_s()
        request, outcome = None, None
        try:
            request = decode_message(Request, delivery.value)
            check_request(request, delivery.priority_class, self.model_name)
        except RequestError as refused:
            outcome = Outcome.of_error(refused)
        except BaseException as bug:  # this request's, not its neighbours'
            if not is_failure(bug):
                raise
            log.exception("reading a message of topic %s failed", delivery.topic)
            outcome = Outcome.of_error(to_request_error(bug), is_final=False)
        request_id = extract_request_id(delivery.value, delivery.key) if request is None else request.id
        if request_id is None:
            return None
        if request is None:
            body = hashlib.sha256(delivery.value).hexdigest()
        else:
            body = compute_body_hash(request, delivery.value, delivery.headers)
        operation, name = get_operation(request), delivery.name
        task = Task(request_id, delivery, request, operation, body, name, outcome=outcome, started_s=started_s)
        whose = tracing.with_request(self.pipeline, task.id, Context())
        task.context = task.parent_context = tracing.extract_context(delivery.headers, whose, delivery.timestamp_s)
        return task

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Do nothing: the endpoints read it. Return True."""
        return True

    # 2. Ask.

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Have the endpoints asked. Return False where the text so far is as long as the answer may be, or has calls:
        these are written when all of the answer is there.

        Raises `AnswerInterrupted` where the operator wants no request to be asked for twice.
        """
        request = _request_of(task)
        if task.claim.attempts > 1 and self.engine.settings.interrupted == "fail":
            raise AnswerInterrupted("its worker was lost, and may have asked for it")
        text = "".join(event.text for event in task.log_events)
        is_whole = ToldAnswer.parse_log(text).is_calling
        if is_whole or len(task.log_events) >= request.sampling.max_tokens:
            task.outcome = Outcome("stop" if is_whole and text.endswith(CALL_CLOSE) else "length")
            return False
        load.mean_prompt_tokens[task.priority_class].add(0.0)
        task.seq = self.engine.add_request(
            request, task.priority_class, (event.text for event in task.log_events), task
        )
        return True

    # 3. Append.

    def make_event(self, task: Task, item: SampledToken) -> TokenEvent:
        """Return the log event of a piece of text. Raises for what cannot be written, as it encodes the text."""
        assert isinstance(item, SampledPiece)
        before = task.log_events[-1] if task.is_in_flight else None
        return task.claim.next_event(item.token_id, item.text, item.logprobs, before)

    def finish_computed(self, task: Task, item: SampledToken, metrics: StageMetrics) -> bool:
        """Return False: there is no KV here."""
        return False

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Record that a piece of text is in the log."""
        gap_s = task.measure_token_gap(written_s)
        if task.first_token_s or task.claim.num_found_tokens:
            metrics.record_token(gap_s)
            return
        task.first_token_s = now_s()
        metrics.record_first_token(task.operation, task.delivery.timestamp_s)
        tracing.record_span("first_token", task.context, task.started_s, task.first_token_s)

    # 4. End.

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of the log, stamped now."""
        timings = Timings(
            published=task.delivery.timestamp_s,
            prefill_started=task.started_s,
            first_token=task.first_token_s,
            finished=now_s(),
        )
        return EndEvent(
            finish_reason=task.finish_reason,
            stop=task.find_stop(),
            usage=_count_usage(task),
            timings=timings,
            error=task.wire_error,
            pieces=task.claim.num_tokens,
        )

    # 5. Settle.

    def build_stage_output(self, task: Task) -> StageOutput | None:
        """Return the result of the log; None where Redis lost the record between the claim and the reading."""
        sampling = Sampling() if task.message is None else task.message.sampling
        job = Job(
            id=task.id, job=task.name, sampling=sampling, priority_class=task.priority_class, tenant=task.tenant
        )  # fmt: skip
        return build_result_of_log(self.pipeline, task, job, self.model_name)

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return an error result."""
        return build_failed_result(self.pipeline, task.id, task.tenant, task.delivery)

    # For the heartbeat.

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return how many pieces of answers there were."""
        return len(sampled)

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the pieces that may still come. The endpoints' prompts count as no work."""
        if task.message is None:
            return TaskLoad(task.priority_class, task.is_running, 0, 0)
        sampling, num_generated = task.message.sampling, len(task.log_events)
        left = max(0, sampling.max_tokens - num_generated)
        return TaskLoad(task.priority_class, task.is_running, 0, left, num_generated if sampling.fit_context else None)

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast answers come, for the heartbeat."""
        return {"prompt_tokens_per_s": None, "output_tokens_per_s": load.throughput.tokens_per_s}


def _count_usage(task: Task) -> Usage:
    """Return the tokens that the endpoint has counted; else each piece counts as one, and the prompt by its length."""
    if task.outcome is not None and task.outcome.usage is not None:
        return task.outcome.usage
    num_pieces = len(task.log_events)
    is_counted = isinstance(task.message, Request) and num_pieces > 0
    prompt = estimate_prompt_tokens(_request_of(task)) if is_counted else 0
    return Usage(prompt_tokens=prompt, completion_tokens=num_pieces)


def _request_of(task: Task) -> Request:
    assert isinstance(task.message, Request), "what cannot be read has ended"
    return task.message
