"""From a request's log to its one result."""

from collections.abc import Iterable
from dataclasses import replace

from penstock import names
from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.errors import ContentErased, InternalError
from penstock.messages import EndEvent, ErrorInfo, Job, Result, Timings, TokenEvent, now_s
from penstock.names import Pipeline
from penstock.sealing import has_tenant_keys
from penstock.telemetry import tracing
from penstock.worker.failure import UNWRITABLE, make_dead_letters
from penstock.worker.task import StageOutput, Task

MAX_HEADER_BYTES = 65536
"""More than the key and the headers of a result take."""


def build_result_of_log(pipeline: Pipeline, task: Task, job: Job, model: str) -> StageOutput | None:
    """Return the result of a request that has ended, and its dead letter if its error calls for one.

    The log is the task's where this worker wrote the end, else the one that the claim found. Return None where Redis
    lost the record between the claim and the reading.
    """
    end = None if task.outcome is None else task.outcome.end_event
    if end is None and not task.claim.log and isinstance(task.error, ContentErased):
        end = EndEvent(finish_reason="error", timings=Timings(finished=now_s()), error=task.wire_error)
    events: Iterable[TokenEvent | EndEvent] = task.claim.log if end is None else [*task.log_events, end]
    options = None if task.message is None else task.message.embed
    model = model if task.adapter is None else task.adapter.name
    result = build_result(job, model, events, with_vectors=options is None or options.in_result is None)
    if result is None:
        return None
    headers = task.account_headers | tracing.inject_headers(task.parent_context)
    outputs, dead = [build_result_message(pipeline, result, headers)], []
    if result.error is not None and job.error is None:  # what ended in prefill has its dead letter
        error = task.error if end is not None and task.error is not None else result.error.to_exception()
        dead = make_dead_letters(pipeline, task.delivery, error, task.claim)
    return StageOutput(outputs, dead, {})


def build_result(
    job: Job, model: str, log: Iterable[TokenEvent | EndEvent], *, with_vectors: bool = True
) -> Result | None:
    """Return the result of a finished log; None when the log has no end."""
    token_ids, texts, logprobs, prompt_tokens = [], [], [], None
    for event in log:
        texts.append(event.text)
        if isinstance(event, TokenEvent):
            token_ids.append(event.token)
            prompt_tokens = prompt_tokens or event.prompt_tokens
            if event.logprobs is not None:
                logprobs.append(event.logprobs)
        else:
            return Result(
                id=job.id,
                tenant=job.tenant,
                priority_class=job.priority_class,
                model=model,
                finish_reason=event.finish_reason,
                text="".join(texts),
                token_ids=token_ids if event.pieces is None else [],
                logprobs=None if job.sampling.logprobs is None else logprobs,
                prompt_tokens=prompt_tokens,
                vectors=event.vectors if with_vectors else None,
                usage=event.usage,
                timings=event.timings,
                error=event.error,
            )
    return None


def build_result_message(pipeline: Pipeline, result: Result, more_headers: dict[str, str]) -> Outgoing:
    """Return the message for the results topic. A result that is too large is truncated."""
    headers = {
        names.VERSION_HEADER: str(result.v),
        names.TENANT_HEADER: result.tenant,
        names.CLASS_HEADER: result.priority_class,
    }
    message = Outgoing(pipeline.results_topic, result.encode(), key=result.id, headers=headers | more_headers)
    if message.num_bytes <= MAX_MESSAGE_BYTES:
        return message
    return replace(message, value=_truncate_result(result).encode())


def _truncate_result(result: Result) -> Result:
    """Return a result that fits into a topic with its headers. A character is at most six bytes of JSON, and eight
    where that is sealed.
    """
    bare = result.model_copy(update={"text": "", "logprobs": None, "prompt_tokens": None, "truncated": True})
    num_left = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - len(bare.encode())
    return bare.model_copy(update={"text": result.text[: max(0, num_left // (8 if has_tenant_keys() else 6))]})


def build_failed_result(pipeline: Pipeline, request_id: str, tenant: str, delivery: Delivery) -> Outgoing:
    """Return an error result, in fixed words, for a log of which no result can be built."""
    error = ErrorInfo.from_error(InternalError(UNWRITABLE))
    result = Result(
        id=request_id, tenant=tenant, priority_class=delivery.priority_class, finish_reason="error", error=error
    )
    return build_result_message(pipeline, result, {})
