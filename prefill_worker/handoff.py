"""The hand-off: what leaves prefill for the jobs topic."""

import hashlib
import uuid
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context

from penstock import names, tracing
from penstock.bus.contract import Delivery, Outgoing
from penstock.errors import RequestError
from penstock.messages import ErrorInfo, Job, Request, Timings, now_s
from penstock.names import Pipeline


def seed_of(request: Request) -> int:
    """The seed given, or one derived from the id: the same for every attempt."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "big") >> 1


@dataclass
class Intake:
    """A request as prefill holds it: its delivery and what is known of it so far."""

    delivery: Delivery
    id: str
    body: str
    """Hash of what was asked: an id with another one is a conflict."""
    request: Request | None = None
    """None where the message could not be read."""
    token_ids: list[int] = field(default_factory=list)
    error: RequestError | None = None
    started_s: float = field(default_factory=now_s)
    first_token_s: float = 0.0
    cached_tokens: int = 0
    last_block: str = ""
    context: Context = field(default_factory=Context)
    """Of the span that later spans are children of."""

    def job(self, fingerprint: str) -> Job:
        """The job reference, stamped now."""
        timings = Timings(
            published=self.delivery.timestamp_s,
            prefill_started=self.started_s,
            first_token=self.first_token_s,
            handed_off=now_s(),
        )
        job_id = uuid.uuid4().hex
        error = None if self.error is None else ErrorInfo.of(self.error)
        if self.request is None:
            return Job(id=self.id, job=job_id, klass=self.delivery.klass, timings=timings, error=error)
        return Job(
            id=self.id,
            job=job_id,
            token_ids=self.token_ids,
            sampling=self.request.sampling,
            seed=seed_of(self.request),
            tenant=self.request.tenant,
            klass=self.delivery.klass,
            deadline=self.request.deadline,
            fingerprint=fingerprint,
            last_block=self.last_block,
            cached_tokens=self.cached_tokens,
            timings=timings,
            error=error,
        )


def outgoing_job(pipeline: Pipeline, job: Job, context: Context) -> Outgoing:
    """The message for the jobs topic of the job's class."""
    headers = {names.VERSION: str(job.v), names.TENANT: job.tenant, names.CLASS: job.klass}
    trace_headers = tracing.headers_of(context) if trace.get_current_span(context).get_span_context().is_valid else {}
    return Outgoing(pipeline.jobs(job.klass), job.encode(), key=job.id, headers=headers | trace_headers)
