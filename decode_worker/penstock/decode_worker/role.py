"""Jobs in decode: an answer goes on at the end of its log, and a result is published.

The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`):

    6  a job and its log are read; KV that is not in the store is computed again
    7  the answer is decoded, a token a step or several
    8  it ends
    9  the result is published
"""

import contextlib
import hashlib
import logging
from collections.abc import Collection

from opentelemetry.context import Context
from pydantic import ValidationError

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.engine.contract import InferenceEngine
from penstock.engine.limits import cut_max_tokens
from penstock.engine.sequence import Sequence
from penstock.engine.text import OutputText
from penstock.errors import InternalError, RequestError
from penstock.grammar.state import GrammarState
from penstock.messages import (
    EndEvent,
    ErrorInfo,
    Job,
    TokenEvent,
    Usage,
    decode_message,
    extract_job_name,
    extract_request_id,
    now_s,
)
from penstock.names import TENANT_HEADER, Pipeline, PriorityClass, Stage
from penstock.telemetry import tracing
from penstock.telemetry.genai import read_operation
from penstock.worker.confine import build_failed_result
from penstock.worker.grammars import GrammarCompiler
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.result import build_result, build_result_message
from penstock.worker.retry import is_suspect, make_dead_letters, to_request_error
from penstock.worker.task import Completion, Task

log = logging.getLogger(__name__)

MAX_BATCH_ADMISSIONS = 3
"""Batch jobs admitted at once while interactive requests run. Each admission adds 1 to 2 ms to the turn."""


class DecodeRole:
    """The role of a decode worker."""

    stage: Stage = "decode"
    max_inline_bytes = MAX_MESSAGE_BYTES
    hands_off = False
    settle_span_name = "settle"

    def __init__(self, pipeline: Pipeline, engine: InferenceEngine) -> None:
        self.pipeline, self.engine = pipeline, engine
        self.grammars = GrammarCompiler(engine.model)

    # 6. Claim.

    def read_message(self, delivery: Delivery) -> Task | None:
        """Return the request of a job with its grammar, else like `identify_request`."""
        task = self.identify_request(delivery)
        if task is None or task.error is not None or (spec := _job_of(task).sampling.grammar) is None:
            return task
        try:
            task.grammar = self.grammars.compile_grammar(spec)
        except RequestError as error:
            task.error = error
        except Exception as bug:  # this request's, not its neighbours'
            log.exception("request %s", task.id)
            task.failure = to_request_error(bug)
        return task

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a job; None where not even its id can be read.

        A job that cannot be read gives a request with its id and an error.
        """
        error: RequestError | None = None
        try:
            job = decode_message(Job, delivery.value)
        except RequestError as refused:
            request_id = extract_request_id(delivery.value, delivery.key)
            if request_id is None:
                return None
            job = _readable_part(delivery, request_id)
            error = InternalError(f"its job cannot be read: {refused.code}: {refused}")
        if error is None and job.error is not None:
            error = job.error.to_exception()
        elif error is None and not job.token_ids:
            error = InternalError("a job without a prompt")
        around = tracing.extract_context(delivery.headers, tracing.with_request(self.pipeline, job.id, Context()))
        operation = read_operation(delivery.headers)
        task = Task(job.id, delivery, job, operation, job_name=job.job, token_ids=job.token_ids, error=error)
        task.parent_context = task.context = around
        return task

    def build_request(self, task: Task) -> Sequence | None:
        """Return what goes on after all tokens so far; None where the log's last token ends the answer."""
        job, model = _job_of(task), self.engine.model
        # Prefill has cut it to its own capacity already. A smaller pool here cuts it once more.
        sampling = cut_max_tokens(job.sampling, len(job.token_ids), self.engine.limits.max_length)
        task.message = job.model_copy(update={"sampling": sampling})
        task.output = OutputText(model.tokenizer, sampling, model.eos_token_ids, sampling.max_tokens)
        logged = [event.token for event in task.log_events]
        grammar = None if task.grammar is None else GrammarState(task.grammar, token_ids=logged)
        for index, token in enumerate(logged):
            ends = grammar is not None and index == len(logged) - 1 and grammar.is_ended
            task.finish_reason = task.output.add_token(token, is_grammar_ended=ends)[1]
        if task.finish_reason is not None:
            return None
        task.blocks = self.engine.hash_prompt(job.tenant, job.token_ids)
        if task.blocks.last_hash != job.last_block:
            log.warning("%s: its KV is of another model or secret, computing it again", job.id)
        return Sequence(
            job.id,
            job.token_ids,
            blocks=task.blocks,
            sampling=sampling,
            seed=job.seed,
            max_new_tokens=sampling.max_tokens,
            output_token_ids=logged,
            klass=job.klass,
            tenant=job.tenant,
            weight=job.weight,
            is_suspect=is_suspect(task.claim),
            grammar=grammar,
            context=task,
        )

    def free_capacity(self, klass: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad) -> int:
        """Return how many more requests of a class to take.

        Few batch jobs are taken at once beside interactive requests, whose next tokens wait meanwhile.
        """
        mean_tokens, max_requests = load.estimate_admission(klass, self.engine.limits.max_batch - len(tasks) - num_read)
        if klass == "batch" and any(task.klass == "interactive" for task in tasks):
            max_requests = min(max_requests, MAX_BATCH_ADMISSIONS)
        return min(max_requests, self.engine.free_capacity(klass, mean_tokens)) if max_requests > 0 else 0

    # 8. End.

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of the log, stamped now."""
        job, num_tokens = _job_of(task), task.claim.num_tokens
        # A job with an error was given up in prefill. Its end there, which Redis lost, had the usage.
        is_prefilled = job.error is None or num_tokens > 0
        usage = Usage(
            prompt_tokens=len(job.token_ids) if is_prefilled else 0,
            cached_tokens=job.cached_tokens if is_prefilled else 0,
            completion_tokens=num_tokens,
        )
        timings = job.timings.model_copy(update={"decode_started": task.started_s, "finished": now_s()})
        error = None if task.error is None else ErrorInfo.from_error(task.error)
        return EndEvent(
            finish_reason=task.finish_reason or "error",
            stop=task.find_stop(),
            text=task.tail_text,
            usage=usage,
            timings=timings,
            error=error,
        )

    # 9. Settle.

    def build_completion(self, task: Task) -> Completion | None:
        """Return the result of the log; None where Redis lost the record between the claim and the reading."""
        job = _job_of(task)
        events: list[TokenEvent | EndEvent] = (
            [*task.log_events, task.end_event] if task.end_event is not None else task.claim.log
        )
        result = build_result(job, self.engine.model.name, events)
        if result is None:
            return None
        outputs, dead = [build_result_message(self.pipeline, result, tracing.inject_headers(task.parent_context))], []
        if result.error is not None and (job.error is None or job.error.code != result.error.code):
            error = task.error if task.end_event is not None and task.error is not None else result.error.to_exception()
            dead = make_dead_letters(self.pipeline, task.delivery, error, task.claim)
        return Completion(outputs, dead, {})

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return an error result."""
        return build_failed_result(self.pipeline, task.id, task.tenant, task.delivery)

    # For the heartbeat.

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the work that a request still needs, for the heartbeat."""
        pending = (
            task.seq.num_pending_tokens - 1 if task.seq is not None and task.is_running else 0
        )  # else it may be stored
        sampling, num_said = _job_of(task).sampling, task.claim.num_tokens
        left, open_said = sampling.max_tokens - num_said, num_said if sampling.fit_context else None
        return TaskLoad(task.klass, task.is_running, max(0, pending), left, open_said)

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast prompts are computed and answers decoded, for the heartbeat."""
        return {
            "prompt_tokens_per_s": self.engine.prefill_tokens_per_s(),
            "output_tokens_per_s": load.throughput.tokens_per_s,
        }


def _readable_part(delivery: Delivery, request_id: str) -> Job:
    """Return what can be read of a job that is invalid as a whole."""
    # The job's own name, as a worker that can read the job binds the request by it. Without one, a hash, which is
    # the same in every attempt.
    name = extract_job_name(delivery.value) or hashlib.sha256(delivery.value).hexdigest()
    job = Job(id=request_id, job=name, klass=delivery.klass)
    with contextlib.suppress(ValidationError):
        job = Job(id=request_id, job=name, klass=delivery.klass, tenant=delivery.headers.get(TENANT_HEADER, job.tenant))
    return job


def _job_of(task: Task) -> Job:
    assert isinstance(task.message, Job), "a job that cannot be read has what could be"
    return task.message
