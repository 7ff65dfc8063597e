"""Jobs as workers read them: those that decode, and prefill where it computes lost KV of a job again."""

import contextlib

from opentelemetry.context import Context
from pydantic import ValidationError

from penstock.bus.contract import Delivery
from penstock.engine.contract import Outcome
from penstock.errors import ContentErased, InternalError, RequestError
from penstock.messages import Job, decode_message, extract_job_name, extract_request_id
from penstock.names import TENANT_HEADER, Pipeline
from penstock.telemetry import tracing
from penstock.telemetry.tracing import read_operation
from penstock.worker.task import Task


def identify_job(pipeline: Pipeline, delivery: Delivery) -> Task | None:
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
        is_erased = isinstance(refused, ContentErased)
        error = refused if is_erased else InternalError(f"its job cannot be read: {refused.code}: {refused}")
    if error is None and job.error is not None:
        error = job.error.to_exception()
    elif error is None and not job.token_ids and job.texts is None:
        error = InternalError("a job without a prompt")
    around = tracing.extract_context(delivery.headers, tracing.with_request(pipeline, job.id, Context()))
    operation = read_operation(delivery.headers)
    task = Task(job.id, delivery, job, operation, name=job.job, token_ids=job.token_ids, adapter=job.adapter)
    if error is not None:
        task.outcome = Outcome.of_error(error)
    task.parent_context = task.context = around
    return task


def _readable_part(delivery: Delivery, request_id: str) -> Job:
    """Return what can be read of a job that is invalid as a whole."""
    # The job's own name, as a worker that can read the job binds the request by it. Without one, that of its place:
    # the same in every attempt, and another for the same bytes that were sent twice.
    name = extract_job_name(delivery.value) or delivery.name
    job = Job(id=request_id, job=name, priority_class=delivery.priority_class)
    with contextlib.suppress(ValidationError):
        job = Job(
            id=request_id,
            job=name,
            priority_class=delivery.priority_class,
            tenant=delivery.headers.get(TENANT_HEADER, job.tenant),
        )
    return job
