"""An exception about one request is that request's alone: it ends with a typed error, and all others go on.

The loops handle each request inside of `confine_error`. An outage, a lost delivery and a fenced member are about no
request: they are raised on, and the loop deals with them. An end, a result or a dead letter has fixed words where the
request's own words cannot be written, as these have failed.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from penstock.bus.contract import Delivery, Outgoing
from penstock.bus.dead_letters import build_dead_letter
from penstock.engine.contract import Outcome
from penstock.errors import InternalError, RequestError, is_failure
from penstock.messages import EndEvent, ErrorInfo, Result, Timings, now_s
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.worker.result import build_result_message
from penstock.worker.retry import to_request_error
from penstock.worker.task import Task

log = logging.getLogger(__name__)

UNWRITABLE = "what the request came to cannot be written; the worker's log says why"


class confine_error:  # noqa: N801, as it reads like a call
    """A block whose exception is logged, and given to `end` as the error that the request ends with.

    Without `end` the request goes on. Errors that are not about this request are raised on (`to_request_error`).
    """

    __slots__ = ("end", "request_id")

    def __init__(self, request_id: str, end: Callable[[RequestError], object] | None = None) -> None:
        self.request_id, self.end = request_id, end

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Return whether there was an exception, which is dealt with then."""
        if error is None or not is_failure(error):
            return False
        if isinstance(error, RequestError):  # a sender's mistake, or what was logged where it was found
            cause = error
            log.warning("request %s: %s: %s", self.request_id, error.code, error)
        else:
            cause = to_request_error(error)
            log.error("request %s", self.request_id, exc_info=error)
        if self.end is not None:
            self.end(cause)
        return True


def try_for_request(task: Task, work: Callable[[], bool]) -> bool:
    """Do something for a request, and return what it returns; True where it fails, and the task has its outcome."""
    try:
        return work()
    except RequestError as error:
        task.outcome = Outcome.of_error(error)
    except BaseException as error:  # a bug, or a library's panic, is this request's, not its neighbours'
        if not is_failure(error):
            raise
        log.exception("request %s", task.id)
        task.outcome = Outcome.of_error(to_request_error(error), is_final=False)
    return True


def build_writable_end(request_id: str, build: Callable[[], EndEvent], pieces: int | None = None) -> EndEvent:
    """Return the end event that `build` returns; one in fixed words where that cannot be built or written.

    It is encoded here, so that a batch of ends does not fail by one of them.
    """
    with confine_error(request_id):
        end = build()
        end.encode()
        return end
    return build_fixed_end(pieces)


def build_fixed_end(pieces: int | None = None) -> EndEvent:
    """Return the end of a request whose own end cannot be written."""
    error = ErrorInfo.from_error(InternalError(UNWRITABLE))
    return EndEvent(finish_reason="error", timings=Timings(finished=now_s()), error=error, pieces=pieces)


def give_up_claim(record: Record, claim: Claim, error: RequestError, pieces: int | None = None) -> None:
    """Release a claim whose message cannot be read here, so that another worker takes it later.

    Where that failed as often as a request may fail, its log ends with the error. The worker that has the delivery
    settles it.
    """
    if claim.attempts_in_vain < record.settings.fail_attempts:
        record.release_claim(claim, failed=True, delivered=False, wait_s=record.settings.retry_cap_s)
        return

    def build() -> EndEvent:
        wire_error = ErrorInfo.from_error(error)
        return EndEvent(finish_reason="error", timings=Timings(finished=now_s()), error=wire_error, pieces=pieces)

    record.finish_request(claim, build_writable_end(claim.id, build, pieces))


def build_failed_result(pipeline: Pipeline, request_id: str, tenant: str, delivery: Delivery) -> Outgoing:
    """Return an error result, in fixed words, for a log of which no result can be built."""
    error = ErrorInfo.from_error(InternalError(UNWRITABLE))
    result = Result(
        id=request_id, tenant=tenant, priority_class=delivery.priority_class, finish_reason="error", error=error
    )
    return build_result_message(pipeline, result, {})


def build_writable_dead_letter(pipeline: Pipeline, delivery: Delivery, reason: str, stack: str = "") -> Outgoing:
    """Return a delivery's dead letter; one without its key and headers where they cannot be written."""
    with confine_error(f"at {delivery.position} of {delivery.topic}"):
        return build_dead_letter(pipeline, delivery, reason, stack)
    return build_dead_letter(pipeline, replace(delivery, key=None, headers={}), reason)
