"""Short ways to play a worker."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.messages import EndEvent
from penstock.names import Stage
from penstock.record import AppendOutcome, Busy, Claim, Record

T = TypeVar("T")


def alive(record: Record, stage: Stage, owner: str) -> str:
    """The id of the session of a worker that lives, for a lease from now on."""
    session = f"{owner}/1"
    assert record.renew_session(stage, session) is not None
    return session


def die(record: Record, stage: Stage, owner: str) -> None:
    """The session of a worker is over."""
    record.end_expired_sessions(stage, 0, f"{owner}/1")


def prefill(record: Record, request_id: str = "r1", owner: str = "p1", body: str = "b") -> Claim:
    claim = record.claim_prefill(request_id, alive(record, "prefill", owner), body)
    assert isinstance(claim, Claim), claim
    return claim


def decode(record: Record, request_id: str = "r1", owner: str = "d1", job: str = "j1") -> Claim:
    claim = record.claim_decode(request_id, alive(record, "decode", owner), job)
    assert isinstance(claim, Claim), claim
    return claim


def say(record: Record, claim: Claim, tokens: Sequence[int]) -> list[AppendOutcome]:
    """Append tokens one call each, so that each builds on the one before."""
    return [record.append_tokens([(claim, claim.next_event(token, f"<{token}>"))])[0] for token in tokens]


def end(finish_reason: str = "stop") -> EndEvent:
    return EndEvent.model_validate({"finish_reason": finish_reason})


def wait_for(attempt: Callable[[], T | Busy], patience_s: float = 10.0) -> T:
    """Ask again, as soon as asked to, until the answer is not `Busy`."""
    over = time.monotonic() + patience_s
    while time.monotonic() < over:
        outcome = attempt()
        if not isinstance(outcome, Busy):
            return outcome
        assert outcome.wait_s > 0
    raise AssertionError("busy for too long")
