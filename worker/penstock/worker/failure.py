"""Requests whose work fails: they are tried again later, computed apart, and in the end given up with the error.

An exception about one request is that request's alone: it ends with a typed error, and all others go on. The loops
handle each request inside of `confine_error`. An outage, a lost delivery and a fenced member are about no request: they
are raised on, and the loop deals with them. An end, a result or a dead letter has fixed words where the request's own
words cannot be written, as these have failed.

A request is tried again in this order:

    1. the claim is released for the waiting time; the attempt counts
    2. the worker defers the delivery by that time

If the worker dies in between, the request is taken over a lease after the waiting time, and its delivery comes back by
the bus. A request that was taken over has no delivery: its claim is only released, and taken over again after the
waiting time. No message waits behind a deferred delivery, as offsets are committed out of order. A worker defers no
more deliveries than its `DeliveryQueue` allows.

A worker that dies reports no error. A request that was claimed a few times in vain therefore begins as a suspect, which
is computed alone (`penstock.engine.scheduling.quarantine`). A worker has one suspect at a time: if that is the one that
kills workers, no other request loses an attempt with it.
"""

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace

import redis

from penstock.bus.contract import Delivery, Outgoing
from penstock.bus.dead_letters import build_dead_letter
from penstock.engine.contract import Outcome
from penstock.errors import (
    POISONOUS,
    AttemptsExhausted,
    BusError,
    Cancelled,
    ContentErased,
    DeadlineExceeded,
    InternalError,
    KVStoreError,
    RequestError,
    StoreUnreachable,
    is_failure,
)
from penstock.messages import EndEvent, ErrorInfo, Timings, now_s
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.redis.client import is_outage
from penstock.worker.delivery_queue import POSTPONE_S, DeliveryQueue
from penstock.worker.task import Task

log = logging.getLogger(__name__)

MAX_ATTEMPTS_BEFORE_SUSPECT = 2
"""How many claims in vain count as bad luck. After them a request is a suspect."""
SUSPECT_DEFERRAL_S = 0.25
"""How long a suspect is deferred that has to wait for others."""
ELSEWHERE_S, MAX_ELSEWHERE_S = 0.25, 300.0
"""How long a request waits that another worker has to compute, as this one may be the next to take it over, too; and
how old it may be for that: workers that are started anew with another version are there by then."""
OUTAGE_DEFERRAL_S, MAX_OUTAGE_S = 2.0, 900.0
"""How long a request waits whose data cannot be read as a server is away, and how old it may be for that."""
UNWRITABLE = "what the request came to cannot be written; the worker's log says why"


class RetryPolicy:
    """Releases and defers requests whose work fails."""

    def __init__(self, record: Record, queue: DeliveryQueue, retried: Callable[[str], None]) -> None:
        """`retried` is called with the code of each error after which a request is tried again."""
        self._record, self._queue, self._retried = record, queue, retried

    def retry_later(self, delivery: Delivery, claim: Claim, error: RequestError) -> bool:
        """Release a request for a later attempt. Returns False if its attempts are used up, so that it must end.

        While a server is away that has its data attempts do not count, for a while; nor where another worker is to
        compute it, which may be about to start.
        """
        if error.is_for_others and now_s() < delivery.timestamp_s + MAX_ELSEWHERE_S:
            self._record.release_claim(claim, delivered=False, wait_s=ELSEWHERE_S)  # any worker may take it over then
            self._queue.defer(delivery, POSTPONE_S)
            self._retried(error.code)
            return True
        if isinstance(error, StoreUnreachable) and error.is_outage and now_s() < delivery.timestamp_s + MAX_OUTAGE_S:
            self._record.release_claim(claim, delivered=delivery.is_held, wait_s=OUTAGE_DEFERRAL_S)
            self._queue.defer(delivery, OUTAGE_DEFERRAL_S)
            self._retried(error.code)
            return True
        tries = claim.attempts_in_vain
        if tries >= self._record.settings.fail_attempts:
            return False
        delay_s = self._delay_s(tries)
        self._record.release_claim(claim, failed=True, delivered=delivery.is_held, wait_s=delay_s)  # 1
        self._queue.defer(delivery, delay_s)  # 2
        self._retried(error.code)
        return True

    def _delay_s(self, tries: int) -> float:
        settings = self._record.settings
        return min(settings.retry_cap_s, settings.retry_first_s * settings.retry_factor ** max(0, tries - 1))

    def defer_suspect(self, delivery: Delivery, claim: Claim, *, has_to_wait: bool) -> bool:
        """Release and defer a claimed request if it has to wait because of the worker's other requests.

        The attempt does not count. Returns whether the request waits.
        """
        if not has_to_wait or claim.is_exhausted or claim.is_cancelled:
            return False
        self._record.release_claim(claim, delivered=delivery.is_held, wait_s=SUSPECT_DEFERRAL_S)
        self._queue.defer(delivery, SUSPECT_DEFERRAL_S)
        return True


def reason_to_end(claim: Claim, deadline: float | None, server_now_s: float) -> RequestError | None:
    """Return the error of a request that is cancelled, tried too often or too late; None when there is work to do."""
    if claim.is_cancelled:
        return Cancelled("the request was cancelled")
    if claim.is_exhausted:
        return AttemptsExhausted(
            f"worker lost: {claim.attempts - 1} in a row, and none made more of the answer than one before"
        )
    return deadline_error(deadline, server_now_s)


def deadline_error(deadline: float | None, server_now_s: float) -> RequestError | None:
    """Return `DeadlineExceeded` once the deadline (seconds since the epoch) has passed, else None.

    `server_now_s` is the time by the clock of Redis, so that all workers go by one clock.
    """
    if deadline is not None and server_now_s > deadline:
        return DeadlineExceeded("the deadline passed before the answer was complete")
    return None


def is_suspect(claim: Claim) -> bool:
    """Return whether a request is to be computed alone, as its last attempts came to nothing."""
    return claim.attempts > MAX_ATTEMPTS_BEFORE_SUSPECT


def to_request_error(error: BaseException) -> RequestError:
    """Return the error with which a request ends whose work raised `error`.

    Raises `error` if it is an outage, and so not about the request.
    """
    if is_outage(error) or isinstance(error, BusError):
        raise error
    kind = StoreUnreachable if isinstance(error, redis.RedisError | KVStoreError) else InternalError
    cause = kind(f"{type(error).__name__}: {error}")
    cause.stack = "".join(traceback.format_exception(error))
    return cause


def make_dead_letters(
    pipeline: Pipeline, delivery: Delivery, error: RequestError | None, claim: Claim | None = None
) -> list[Outgoing]:
    """Return the dead letter of a request that ends with `error`, if that error calls for one."""
    if error is None or error.code not in POISONOUS:
        return []
    tries = 1 if claim is None else max(1, claim.attempts_in_vain - isinstance(error, AttemptsExhausted))
    return [build_dead_letter(pipeline, delivery, f"{error.code}: {error}", error.stack, tries)]


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
        is_final = not (isinstance(error, StoreUnreachable) or error.is_for_others)
        task.outcome = Outcome.of_error(error, is_final=is_final)
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
    if claim.attempts_in_vain < record.settings.fail_attempts and not isinstance(error, ContentErased):
        record.release_claim(claim, failed=True, delivered=False, wait_s=record.settings.retry_cap_s)
        return

    def build() -> EndEvent:
        wire_error = ErrorInfo.from_error(error)
        return EndEvent(finish_reason="error", timings=Timings(finished=now_s()), error=wire_error, pieces=pieces)

    record.finish_request(claim, build_writable_end(claim.id, build, pieces))


def build_writable_dead_letter(pipeline: Pipeline, delivery: Delivery, reason: str, stack: str = "") -> Outgoing:
    """Return a delivery's dead letter; one without its key and headers where they cannot be written."""
    with confine_error(f"at {delivery.position} of {delivery.topic}"):
        return build_dead_letter(pipeline, delivery, reason, stack)
    return build_dead_letter(pipeline, replace(delivery, key=None, headers={}), reason)
