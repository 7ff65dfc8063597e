"""Jobs as workers read them, and those that go back to prefill.

A job goes back where KV inside a picture was lost, and its worker has no pixels. It is a message in the topic of
requests then, with a name of its own, and says which job it replaces. A worker that reads it computes the prompt again
and hands it off, or decodes it. The numbered steps:

    G1  the message goes out, and the job that it replaces is settled, together
    G2  the record says that the request is prefill's again

Its claim lets go of the job that was bound. What a crash costs: before G1 nothing. Before G2 the record is decode's
until its session ends; then a worker takes the request over and gives it back once more, or the message is claimed.
"""

import contextlib
import uuid
from dataclasses import replace

from opentelemetry.context import Context
from pydantic import ValidationError

from penstock import names
from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.contract import Outcome
from penstock.errors import InternalError, RequestError
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
        error = InternalError(f"its job cannot be read: {refused.code}: {refused}")
    if error is None and job.error is not None:
        error = job.error.to_exception()
    elif error is None and not job.token_ids and job.texts is None:
        error = InternalError("a job without a prompt")
    around = tracing.extract_context(delivery.headers, tracing.with_request(pipeline, job.id, Context()))
    operation = read_operation(delivery.headers)
    task = Task(job.id, delivery, job, operation, name=job.job, token_ids=job.token_ids)
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


def build_returned_message(pipeline: Pipeline, task: Task, job: Job, context: Context) -> Outgoing:
    """Return the message with which a request goes back to prefill."""
    back = {"job": uuid.uuid4().hex, "replaces": job.job, "num_returns": count_returns(job) + 1}
    headers = task.account_headers | {
        names.VERSION_HEADER: str(job.v),
        names.TENANT_HEADER: job.tenant,
        names.CLASS_HEADER: task.priority_class,
        names.OPERATION_HEADER: task.operation,
        names.RETURNED_HEADER: "1",
    }
    topic = pipeline.request_topic(task.priority_class)
    value = job.model_copy(update=back).encode()
    return Outgoing(topic, value, key=job.id, headers=headers | tracing.inject_headers(context))


def count_returns(job: Job) -> int:
    """Return how often a request was given back."""
    return job.num_returns or 0


def rename_job(message: Outgoing) -> Outgoing:
    """Return the message of the same job under a new name."""
    job = decode_message(Job, message.value)
    return replace(message, value=job.model_copy(update={"job": uuid.uuid4().hex}).encode())
