"""Requests whose work fails: tried again later, set apart, and in the end given up with what failed.

A request is tried again in this order:

    1. the claim is given back, to be left alone for the waiting time; the attempt counts
    2. the worker keeps the delivery, and looks at it again after that time

If the worker dies in between, the request is taken over a lease after the waiting time, and its delivery comes back by
the bus. What was taken over has no delivery of its own: it is only given back, and taken over again after the waiting
time. Nothing waits behind a delivery that is kept: what is done out of order is committed so. A worker keeps no more
than its inbox lets wait.

A worker that dies says nothing. So who was claimed a few times without a new token begins as a suspect, computed alone
(`penstock.engine.quarantine`), and a worker has one such request at a time: if that is the one that kills workers, it
takes no other's attempts with it.
"""

import traceback
from collections.abc import Callable

import redis

from penstock.bus.contract import Delivery, Outgoing
from penstock.bus.letters import dead_message
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
from penstock.messages import now_s
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.redis.client import is_outage
from penstock.worker.delivery_queue import DeliveryQueue

TRUSTED_ATTEMPTS = 2
"""Claims without a new token that may be bad luck: a request has company in them."""
SUSPECT_DEFERRAL_S = 0.25
"""How long a request that is set aside is left alone."""


class RetryPolicy:
    """What one worker does with requests whose work fails."""

    def __init__(self, record: Record, inbox: DeliveryQueue, retried: Callable[[str], None]) -> None:
        """`retried` is told the code of each error after which something is tried again."""
        self._record, self._inbox, self._retried = record, inbox, retried

    def retry_later(self, delivery: Delivery, claim: Claim, error: RequestError) -> bool:
        """Give a request up for now; False if it was tried often enough: it is to end with its error."""
        tries = claim.tries
        if tries >= self._record.settings.fail_attempts:
            return False
        delay_s = self._delay_s(tries)
        self._record.release(claim, failed=True, delivered=delivery.is_held, wait_s=delay_s)  # 1
        self._inbox.defer(delivery, delay_s)  # 2
        self._retried(error.code)
        return True

    def _delay_s(self, tries: int) -> float:
        settings = self._record.settings
        return min(settings.retry_cap_s, settings.retry_first_s * settings.retry_factor ** max(0, tries - 1))

    def defer_suspect(self, delivery: Delivery, claim: Claim, *, has_to_wait: bool) -> bool:
        """Whether a claimed request waits, because of who else is here (`has_to_wait`). Then it is given back, and the
        attempt does not count.
        """
        if not has_to_wait or claim.exhausted or claim.cancelled:
            return False
        self._record.release(claim, delivered=delivery.is_held, wait_s=SUSPECT_DEFERRAL_S)
        self._inbox.defer(delivery, SUSPECT_DEFERRAL_S)
        return True


def reason_to_end(claim: Claim, deadline: float | None) -> RequestError | None:
    """Cancelled, tried too often, or too late; None when there is work to do."""
    if claim.cancelled:
        return Cancelled("cancelled")
    if claim.exhausted:
        return AttemptsExhausted(f"worker lost: {claim.attempts - 1} in a row, without a new token of this request")
    return deadline_error(deadline)


def deadline_error(deadline: float | None) -> RequestError | None:
    """`DeadlineExceeded` once the deadline (seconds since the epoch) has passed."""
    if deadline is not None and now_s() > deadline:
        return DeadlineExceeded("the deadline passed before the answer was complete")
    return None


def is_suspect(claim: Claim) -> bool:
    """Whether a request is to be computed alone: its last attempts came to nothing."""
    return claim.attempts > TRUSTED_ATTEMPTS


def to_request_error(error: Exception) -> RequestError:
    """What to tell of an error that came up in the work on one request. Raises it if it says nothing about that one."""
    if is_outage(error) or isinstance(error, BusError):
        raise error
    kind = StoreUnreachable if isinstance(error, redis.RedisError | KVStoreError) else InternalError
    cause = kind(f"{type(error).__name__}: {error}")
    cause.stack = "".join(traceback.format_exception(error))
    return cause


def make_dead_letters(
    pipeline: Pipeline, delivery: Delivery, error: RequestError | None, claim: Claim | None = None
) -> list[Outgoing]:
    """The dead letter of a request that ends so, if somebody should look at it."""
    if error is None or error.code not in POISONOUS:
        return []
    tries = 1 if claim is None else max(1, claim.tries - isinstance(error, AttemptsExhausted))
    return [dead_message(pipeline, delivery, f"{error.code}: {error}", error.stack, tries)]
