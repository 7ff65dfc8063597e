"""The hand-off: what leaves prefill for the jobs topic, and the end of what ends there."""

import uuid

from opentelemetry import trace
from opentelemetry.context import Context

from penstock import names, tracing
from penstock.bus.contract import Outgoing
from penstock.errors import Cancelled
from penstock.messages import EndEvent, ErrorInfo, FinishReason, Job, Timings, Usage, now_s
from penstock.names import Pipeline
from penstock.telemetry.genai import Operation
from prefill_worker.intake import Intake, seed_of


def timings_of(intake: Intake) -> Timings:
    """The stages the request has been through in prefill."""
    return Timings(
        published=intake.delivery.timestamp_s,
        prefill_started=intake.started_s,
        first_token=intake.first_token_s,
    )


def end_of(intake: Intake, num_tokens: int, finish: FinishReason | None = None) -> EndEvent:
    """The end of a log of so many tokens, stamped now; without `finish` it ends with the intake's error."""
    error = None if intake.error is None else ErrorInfo.of(intake.error)
    reason: FinishReason = finish or ("cancelled" if isinstance(intake.error, Cancelled) else "error")
    # With a token in the log, this or an earlier attempt has computed all of the prompt.
    prompt_tokens = len(intake.token_ids) if num_tokens else intake.prompt_tokens
    usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=intake.cached_tokens, completion_tokens=num_tokens)
    timings = timings_of(intake).model_copy(update={"finished": now_s()})
    return EndEvent(finish_reason=reason, usage=usage, timings=timings, error=error)


def job_of(intake: Intake, fingerprint: str) -> Job:
    """The job reference, named and stamped now."""
    job_id, klass = uuid.uuid4().hex, intake.delivery.klass
    timings = timings_of(intake).model_copy(update={"handed_off": now_s()})
    error = None if intake.error is None else ErrorInfo.of(intake.error)
    if intake.request is None:
        return Job(id=intake.id, job=job_id, klass=klass, timings=timings, error=error)
    return Job(
        id=intake.id,
        job=job_id,
        token_ids=intake.token_ids,
        sampling=intake.request.sampling,
        seed=seed_of(intake.request),
        tenant=intake.request.tenant,
        weight=intake.request.weight,
        klass=klass,
        deadline=intake.request.deadline,
        fingerprint=fingerprint,
        last_block=intake.last_block,
        cached_tokens=intake.cached_tokens,
        timings=timings,
        error=error,
    )


def outgoing_job(pipeline: Pipeline, job: Job, operation: Operation, context: Context) -> Outgoing:
    """The message for the jobs topic of the job's class."""
    headers = {names.VERSION: str(job.v), names.TENANT: job.tenant, names.CLASS: job.klass, names.OPERATION: operation}
    trace_headers = tracing.headers_of(context) if trace.get_current_span(context).get_span_context().is_valid else {}
    return Outgoing(pipeline.jobs(job.klass), job.encode(), key=job.id, headers=headers | trace_headers)
