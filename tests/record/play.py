"""Short ways to play a worker."""

from collections.abc import Iterable, Sequence

from penstock.messages import EndEvent, TokenEvent
from penstock.record import AppendOutcome, Bound, Busy, Claim, Conflict, Record, UnclaimedMessage


def alive(record: Record, owner: str) -> str:
    """Renew the session of a worker for a lease, and return its id."""
    session = f"{owner}/1"
    assert record.renew_session(session) is not None
    return session


def die(record: Record, owner: str) -> None:
    """End the session of a worker."""
    record.end_expired_sessions(0, f"{owner}/1")


def claim_prefill(
    record: Record, request_id: str, session: str, body: str, message: bytes = b"", name: str = ""
) -> Claim | Busy | Bound | Conflict:
    """Claim a request by its own message. `body` is its `compute_body_hash`, and `name` the message's own name."""
    return record.claim_all("prefill", session, [UnclaimedMessage(request_id, body, name, message)])[0]


def claim_decode(
    record: Record, request_id: str, session: str, job: str, message: bytes = b""
) -> Claim | Busy | Bound | Conflict:
    """Claim a request for decode with its job, and bind the job to the request if none is bound."""
    return record.claim_all("decode", session, [UnclaimedMessage(request_id, "", job, message)])[0]


def prefill(record: Record, request_id: str = "r1", owner: str = "p1", body: str = "b") -> Claim:
    claim = claim_prefill(record, request_id, alive(record, owner), body)
    assert isinstance(claim, Claim), claim
    return claim


def decode(record: Record, request_id: str = "r1", owner: str = "d1", job: str = "j1") -> Claim:
    claim = claim_decode(record, request_id, alive(record, owner), job)
    assert isinstance(claim, Claim), claim
    return claim


def say(record: Record, claim: Claim, tokens: Sequence[int]) -> list[AppendOutcome]:
    """Append tokens with one call each, and return the outcomes."""
    return [record.append_tokens([(claim, claim.next_event(token, f"<{token}>"))])[0] for token in tokens]


def end(finish_reason: str = "stop") -> EndEvent:
    return EndEvent.model_validate({"finish_reason": finish_reason})


def tokens_of(events: Iterable[TokenEvent | EndEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def id_of(event: TokenEvent | EndEvent) -> str:
    assert isinstance(event, TokenEvent)
    return event.id
