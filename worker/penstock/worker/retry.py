"""Requests whose work fails: they are tried again later, computed apart, and in the end given up with the error.

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

import traceback
from collections.abc import Callable

import redis

from penstock.bus.contract import Delivery, Outgoing
from penstock.bus.dead_letters import build_dead_letter
from penstock.errors import (
    POISONOUS,
    AttemptsExhausted,
    BusError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KVStoreError,
    RequestError,
    StoreUnreachable,
)
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.redis.client import is_outage
from penstock.worker.delivery_queue import DeliveryQueue

MAX_ATTEMPTS_BEFORE_SUSPECT = 2
"""How many claims in vain count as bad luck. After them a request is a suspect."""
SUSPECT_DEFERRAL_S = 0.25
"""How long a suspect is deferred that has to wait for others."""


class RetryPolicy:
    """Releases and defers requests whose work fails."""

    def __init__(self, record: Record, queue: DeliveryQueue, retried: Callable[[str], None]) -> None:
        """`retried` is called with the code of each error after which a request is tried again."""
        self._record, self._queue, self._retried = record, queue, retried

    def retry_later(self, delivery: Delivery, claim: Claim, error: RequestError) -> bool:
        """Release a request for a later attempt. Returns False if its attempts are used up, so that it must end."""
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


def reason_to_end(claim: Claim, deadline: float | None, now_s: float) -> RequestError | None:
    """Return the error of a request that is cancelled, tried too often or too late; None when there is work to do."""
    if claim.is_cancelled:
        return Cancelled("the request was cancelled")
    if claim.is_exhausted:
        return AttemptsExhausted(
            f"worker lost: {claim.attempts - 1} in a row, and none made more of the answer than one before"
        )
    return deadline_error(deadline, now_s)


def deadline_error(deadline: float | None, now_s: float) -> RequestError | None:
    """Return `DeadlineExceeded` once the deadline (seconds since the epoch) has passed, else None.

    `now_s` is the time by the clock of Redis, so that all workers go by one clock.
    """
    if deadline is not None and now_s > deadline:
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
