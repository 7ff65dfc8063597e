"""Short ways to play a worker."""

from collections.abc import Sequence

from penstock.messages import EndEvent
from penstock.record import AppendOutcome, Claim, Record


def alive(record: Record, owner: str) -> str:
    """Renew the session of a worker for a lease, and return its id."""
    session = f"{owner}/1"
    assert record.renew_session(session) is not None
    return session


def die(record: Record, owner: str) -> None:
    """End the session of a worker."""
    record.end_expired_sessions(0, f"{owner}/1")


def prefill(record: Record, request_id: str = "r1", owner: str = "p1", body: str = "b") -> Claim:
    claim = record.claim_prefill(request_id, alive(record, owner), body)
    assert isinstance(claim, Claim), claim
    return claim


def decode(record: Record, request_id: str = "r1", owner: str = "d1", job: str = "j1") -> Claim:
    claim = record.claim_decode(request_id, alive(record, owner), job)
    assert isinstance(claim, Claim), claim
    return claim


def say(record: Record, claim: Claim, tokens: Sequence[int]) -> list[AppendOutcome]:
    """Append tokens with one call each, and return the outcomes."""
    return [record.append_tokens([(claim, claim.next_event(token, f"<{token}>"))])[0] for token in tokens]


def end(finish_reason: str = "stop") -> EndEvent:
    return EndEvent.model_validate({"finish_reason": finish_reason})
