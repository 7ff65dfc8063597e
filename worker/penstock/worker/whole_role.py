"""The base of the roles that answer requests without stages: there is no job, and no worker of another kind.

In the record a request is what a job is in decode, without prefill before it: the name of its message is bound to it.
"""

import hashlib
import logging
from abc import abstractmethod

from opentelemetry.context import Context

from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.contract import Outcome, SampledToken
from penstock.errors import ContentErased, InvalidRequest, RequestError, TenantKeyMissing, UnknownModel, is_failure
from penstock.messages import (
    EndEvent,
    Job,
    Request,
    Sampling,
    Timings,
    Usage,
    compute_body_hash,
    decode_message,
    extract_request_id,
    now_s,
)
from penstock.names import Pipeline, PriorityClass, Stage
from penstock.telemetry import tracing
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.tracing import get_operation
from penstock.worker.failure import to_request_error
from penstock.worker.result import build_failed_result, build_result_of_log
from penstock.worker.task import Role, StageOutput, Task

log = logging.getLogger(__name__)


class WholeRole(Role):
    """How requests are identified, ended and settled."""

    stage: Stage = "decode"
    hands_off_for = ""
    pipeline: Pipeline

    @abstractmethod
    def check_request(self, request: Request) -> None:
        """Raise a `RequestError` for a request that no worker of this kind can answer."""

    @abstractmethod
    def count_usage(self, task: Task) -> Usage:
        """Return the tokens of a request that ends."""

    # 1. Claim.

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a message, with an error if it is invalid; None where not even an id can be read."""
        started_s = now_s()
        request, outcome = None, None
        try:
            request = decode_message(Request, delivery.value)
            check_addressee(request, delivery.priority_class, *self.model_names)
            self.check_request(request)
        except RequestError as refused:
            outcome = Outcome.of_error(refused)
        except TenantKeyMissing:  # since the worker looked for its key: the message waits
            raise
        except BaseException as bug:  # this request's, not its neighbours'
            if not is_failure(bug):
                raise
            log.exception("reading a message of topic %s failed", delivery.topic)
            outcome = Outcome.of_error(to_request_error(bug), is_final=False)
        request_id = extract_request_id(delivery.value, delivery.key) if request is None else request.id
        if request_id is None:
            return None
        if outcome is not None and isinstance(outcome.error, ContentErased):
            body = ""  # that of the claims before is not known any more
        elif request is None:
            body = hashlib.sha256(delivery.value).hexdigest()
        else:
            body = compute_body_hash(request, delivery.value, delivery.headers)
        operation, name = get_operation(request), delivery.name
        task = Task(request_id, delivery, request, operation, body, name, outcome=outcome, started_s=started_s)
        whose = tracing.with_request(self.pipeline, task.id, Context())
        task.context = task.parent_context = tracing.extract_context(delivery.headers, whose, delivery.timestamp_s)
        return task

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which callers may ask for the model."""
        return (self.model_name,)

    # 3. Append.

    def finish_computed(self, task: Task, item: SampledToken, metrics: StageMetrics) -> bool:
        """Return False: there is no KV here."""
        return False

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
            usage=self.count_usage(task),
            timings=timings,
            error=task.wire_error,
            pieces=task.claim.num_tokens if self.writes_pieces else None,
            vectors=None if task.outcome is None else task.outcome.vectors,
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


def check_addressee(request: Request, priority_class: PriorityClass, *names: str) -> None:
    """Raise `InvalidRequest` for a request in the topic of another class, and `UnknownModel` for a model that has none
    of these names.
    """
    if request.priority_class not in (None, priority_class):
        raise InvalidRequest(f"class {request.priority_class!r} in the topic of class {priority_class!r}")
    if request.model not in (None, *names):
        raise UnknownModel(f"this pipeline serves {names[0]!r}, not {request.model!r}")


def request_of(task: Task) -> Request:
    """Return the request of a task whose message could be read."""
    assert isinstance(task.message, Request), "what cannot be read has ended"
    return task.message
