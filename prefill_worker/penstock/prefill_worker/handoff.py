"""The hand-off: the job message that prefill publishes, and the end of requests that end in prefill."""

import uuid
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.context import Context

from penstock import names
from penstock.bus.contract import Outgoing
from penstock.bus.placement import JobNeed
from penstock.bus.replies import pick_reply_headers
from penstock.errors import ContentErased
from penstock.messages import (
    EndEvent,
    ErrorInfo,
    Job,
    Request,
    Timings,
    Usage,
    decode_clear_part,
    decode_message,
    now_s,
)
from penstock.names import Pipeline
from penstock.telemetry import tracing
from penstock.worker.pictures import tell_pictures
from penstock.worker.task import Task


def prefill_timings(task: Task, *, handed_off: float = 0.0, finished: float = 0.0) -> Timings:
    """Return the timings of the stages that the request has been through in prefill."""
    return Timings(
        published=task.delivery.timestamp_s,
        prefill_started=task.started_s,
        first_token=task.first_token_s,
        handed_off=handed_off,
        finished=finished,
    )


def build_end_event(task: Task) -> EndEvent:
    """Return the end of a request that ends in prefill, stamped now."""
    num_tokens = task.claim.num_tokens
    # With a token in the log, this or an earlier attempt has computed all of the prompt.
    prompt_tokens = len(task.token_ids) if num_tokens else task.num_prefilled_tokens
    usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=task.num_cached_tokens, completion_tokens=num_tokens)
    timings = prefill_timings(task, finished=now_s())
    reason, stop, vectors = task.finish_reason, task.find_stop(), None if task.outcome is None else task.outcome.vectors
    return EndEvent(
        finish_reason=reason, stop=stop, usage=usage, timings=timings, error=task.wire_error, vectors=vectors
    )  # fmt: skip


def build_job(task: Task, fingerprint: str) -> Job:
    """Return the job reference, with a new name and stamped now."""
    request, job_id = task.message, uuid.uuid4().hex
    timings = prefill_timings(task, handed_off=now_s())
    error = task.wire_error
    if not isinstance(request, Request):
        return Job(
            id=task.id, job=job_id, tenant=task.tenant, priority_class=task.priority_class, timings=timings, error=error
        )
    return Job(
        id=task.id,
        job=job_id,
        token_ids=task.token_ids,
        texts=request.texts if error is None else None,
        embed=request.embed,
        pictures=tell_pictures(request, task.pictures) if error is None else None,
        adapter=task.adapter,
        sampling=request.sampling,
        seed=request.seed,
        tenant=request.tenant,
        weight=request.weight,
        priority_class=task.priority_class,
        retain_s=request.retain_s,
        deadline=request.deadline,
        fingerprint=fingerprint,
        last_block="" if task.blocks is None else task.blocks.last_hash,
        cached_tokens=task.num_cached_tokens,
        timings=timings,
        error=error,
    )


def build_job_message(
    pipeline: Pipeline, job: Job, task: Task, context: Context, block_size: int = 0, sender: str = ""
) -> Outgoing:
    """Return the message for the jobs topic of the job's class. Without KV, `block_size` is 0."""
    told = task.delivery.headers
    # Of a request that cannot be read the tenant is known by its header alone.
    tenant = told.get(names.TENANT_HEADER, job.tenant) if task.message is None else job.tenant
    headers = (
        task.account_headers
        | pick_reply_headers(told)
        | {
            names.VERSION_HEADER: str(job.v),
            names.TENANT_HEADER: tenant,
            names.CLASS_HEADER: job.priority_class,
            names.OPERATION_HEADER: task.operation,
        }
    )
    trace_headers = (
        tracing.inject_headers(context) if trace.get_current_span(context).get_span_context().is_valid else {}
    )
    need = JobNeed(job.priority_class, len(job.token_ids) // block_size + 1 if block_size else 0, sender)
    topic = pipeline.job_topic(job.priority_class)
    return Outgoing(topic, job.encode(), key=job.id, headers=headers | trace_headers, job=need)


def rename_job(message: Outgoing) -> Outgoing:
    """Return the message of the same job under a new name."""
    try:
        job = decode_message(Job, message.value)
    except ContentErased as error:
        job = decode_clear_part(Job, message.value).model_copy(update={"error": ErrorInfo.from_error(error)})
    return replace(message, value=job.model_copy(update={"job": uuid.uuid4().hex}).encode())
