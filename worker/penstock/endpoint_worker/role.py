"""Requests that endpoints answer: their text goes to the logs, and results go out. There is one stage.

The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`, the engine `engine.py`):

    1  a message is read and claimed. A request that cannot be answered ends here, and continues at 5
    2  the request goes to the endpoint with the least load. Text that the log already has is part of the question
    3  pieces of text that arrived go to their logs
    4  finish reason, usage and timings are appended
    5  the result is published

A crash before 2 costs nothing. A crash after 2 costs the endpoint's work since the last piece in the log: the
connection is closed, and the next holder finds in the log the text that readers have seen.
"""

from collections.abc import Collection

from penstock.bus.contract import MAX_MESSAGE_BYTES
from penstock.endpoint_worker.answer import ToldAnswer
from penstock.endpoint_worker.engine import EndpointEngine, SampledPiece
from penstock.endpoint_worker.question import check_request, estimate_prompt_tokens
from penstock.engine.contract import Outcome, SampledToken
from penstock.errors import AnswerInterrupted
from penstock.grammar.tools import CALL_CLOSE
from penstock.messages import Request, TokenEvent, Usage, now_s
from penstock.names import Pipeline, PriorityClass, WorkerKind
from penstock.telemetry import tracing
from penstock.telemetry.stage import StageMetrics
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.task import Task
from penstock.worker.whole_role import WholeRole, request_of


class EndpointRole(WholeRole):
    """The role of an endpoint worker."""

    kind: WorkerKind = "endpoint"
    max_inline_bytes = MAX_MESSAGE_BYTES
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

    def check_request(self, request: Request) -> None:
        """Raise `InvalidRequest` for a request that no endpoint could answer."""
        check_request(request)

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Do nothing: the endpoints read it. Return True."""
        return True

    # 2. Ask.

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Have the endpoints asked. Return False where the text so far is as long as the answer may be, or has calls:
        these are written when all of the answer is there.

        Raises `AnswerInterrupted` where the operator wants no request to be asked for twice.
        """
        request = request_of(task)
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

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Record that a piece of text is in the log."""
        gap_s = task.measure_token_gap(written_s)
        if task.first_token_s or task.claim.num_found_tokens:
            metrics.record_token(gap_s)
            return
        task.first_token_s = now_s()
        metrics.record_first_token(task.operation, task.delivery.timestamp_s, task.trace_id)
        tracing.record_span("first_token", task.context, task.started_s, task.first_token_s)

    # 4. End.

    def count_usage(self, task: Task) -> Usage:
        """Return the tokens that the endpoint has counted; else each piece counts as one, and the prompt by its
        length.
        """
        if task.outcome is not None and task.outcome.usage is not None:
            return task.outcome.usage
        num_pieces = len(task.log_events)
        is_counted = isinstance(task.message, Request) and num_pieces > 0
        prompt = estimate_prompt_tokens(request_of(task)) if is_counted else 0
        return Usage(prompt_tokens=prompt, completion_tokens=num_pieces)

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
