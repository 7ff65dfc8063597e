"""Why a claimed request may have to end instead of being worked on."""

from penstock.errors import AttemptsExhausted, Cancelled, DeadlineExceeded, RequestError
from penstock.messages import now_s
from penstock.record.claim import Claim


def cause_to_end(claim: Claim, deadline: float | None) -> RequestError | None:
    """Cancelled, tried too often, or too late; None when there is work to do."""
    if claim.cancelled:
        return Cancelled("cancelled")
    if claim.exhausted:
        return AttemptsExhausted(f"worker lost: {claim.attempts - 1} in a row, without a new token of this request")
    return too_late(deadline)


def too_late(deadline: float | None) -> RequestError | None:
    """`DeadlineExceeded` once the deadline (seconds since the epoch) has passed."""
    if deadline is not None and now_s() > deadline:
        return DeadlineExceeded("the deadline passed before the answer was complete")
    return None
