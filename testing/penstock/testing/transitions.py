"""The transitions of the scripts of `penstock.record` on one request, in Python: a record to the next one, and a reply.

Functions here read no clock and no store, and do not change their arguments. A function that changes nothing returns
the same record object. The scripts of the same names give the reasons. A test compares both step by step.
"""

from collections.abc import Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from penstock.names import Stage
from penstock.record.claim import GOOD_PROGRESS, AppendOutcome
from penstock.record.log import RecordStage

Name = TypeVar("Name")
"""The type of the names of sessions, jobs and bodies."""
Message = TypeVar("Message")
Token = TypeVar("Token")
End = TypeVar("End")


class RequestRecord(NamedTuple, Generic[Name, Message, Token, End]):
    """A request's record and its log: `tokens`, then `end`. None stands for a session, job, body or message not there,
    as does any value that counts as false, but for sessions. Times are in ms by the server's clock, 0 for none.
    """

    epoch: int = 0
    session: Name | None = None
    stage: RecordStage = "new"
    bound: Name | None = None
    body: Name | None = None
    attempts: int = 0
    num_found: int = 0
    """The number of tokens when the request was claimed. In Redis the holder passes it with its tokens."""
    most: int = 0
    """The most tokens that a claim in this stage made."""
    num_returns: int = 0
    """How often decode gave the request back to prefill."""
    cancelled: bool = False
    message: Message | None = None
    not_before_ms: int = 0
    """The time before which nobody may claim the request, not even the holder of its delivery."""
    free: tuple[int, int] = (0, 0)
    """The times from which any worker of prefill, and of decode, may take the request over: the stages' `free` sets."""
    tokens: tuple[Token, ...] = ()
    end: End | None = None


class Times(NamedTuple):
    """The time now, and spans that the settings name, in ms."""

    now_ms: int
    epoch_ms: int
    """The clock that a new epoch is taken from: a server's is the time now."""
    lease_ms: int
    longest_ms: int
    """No request has to wait for longer than this."""


class ClaimReply(NamedTuple):
    """The reply of `claim_request`: the request is claimed or parked, or why it is neither, and how long to wait."""

    kind: Literal["claim", "parked", "busy", "bound", "conflict"]
    wait_ms: float = 0.0


Rec = TypeVar("Rec", bound=RequestRecord[Any, Any, Any, Any])


def claim_request(
    rec: Rec,
    stage: Stage,
    session: Any,
    asked: tuple[Any, Any, Any],
    living: Mapping[Any, int],
    times: Times,
    *,
    is_answered: bool = False,
) -> tuple[Rec, ClaimReply]:
    """Claim a request for a session, or with None park its message, so that any worker may take it over.

    `asked` are the name that would be bound to it (a job's, in prefill the request's own message's), the body's hash
    and the message. `living` has the sessions and until when each lasts. `is_answered` says that the id had a
    result already, and was not forgotten again, when the message was sent.
    """
    (name, body, message), prefill = asked, stage == "prefill"
    epoch = max(rec.epoch + 1, times.epoch_ms)
    if (refusal := _find_other_message(rec, stage, name, body)) is not None:
        return rec, refusal
    if is_answered:
        return rec, ClaimReply("bound")
    if session is None and (rec.stage == "end" or (rec.stage == stage and rec.message)):
        return rec, ClaimReply("parked")
    if rec.stage == "end":
        return rec if prefill else rec._replace(bound=name), ClaimReply("claim")
    if (wait_ms := _find_wait(rec, stage, session, living, times)) > 0:
        return rec, ClaimReply("busy", wait_ms)
    attempts = 0 if not prefill and rec.stage == "prefill" else rec.attempts
    rec = rec._replace(
        epoch=epoch,
        session=session,
        stage=stage,
        bound=rec.bound if prefill else name,
        body=body or rec.body,
        attempts=attempts + (session is not None),
        num_found=len(rec.tokens),
        most=rec.most if rec.stage == stage else 0,
        message=message,
        not_before_ms=0,
        free=_set_free(rec.free, stage, times.now_ms if session is None else 0),
    )
    return rec, ClaimReply("parked" if session is None else "claim")


def _find_other_message(rec: Rec, stage: Stage, name: Any, body: Any) -> ClaimReply | None:
    """Return why the message is not the one that settles the request; None if it may be."""
    if body and rec.body and rec.body != body:
        return ClaimReply("conflict")
    if (stage == "prefill" and rec.stage == "handed") or (rec.bound and rec.bound != name):
        return ClaimReply("bound")
    return None


def _find_wait(rec: Rec, stage: Stage, session: Any, living: Mapping[Any, int], times: Times) -> float:
    """Return for how many ms the session must wait before it claims the request; 0 if it may claim it now."""
    if session is not None and session not in living:
        return times.lease_ms / 3
    is_passed_on = stage == "decode" and rec.stage == "prefill"
    if is_passed_on and not rec.bound:
        return 0
    if rec.session is not None and rec.session in living:
        return max(times.lease_ms / 4, min(living[rec.session] - times.now_ms, times.lease_ms))
    if is_passed_on:
        return times.lease_ms / 4
    wait_ms = rec.not_before_ms - times.now_ms
    return max(0, wait_ms) if wait_ms <= times.longest_ms else 0


def take_over_request(rec: Rec, stage: Stage, session: Any, times: Times) -> tuple[Rec, bool]:
    """Take a request out of a stage's free ones. The reply is whether the session, which must live, holds it now."""
    rec = rec._replace(free=_set_free(rec.free, stage, 0))
    if rec.stage != stage or rec.session is not None or not rec.message:
        return rec, False
    epoch, attempts = max(rec.epoch + 1, times.epoch_ms), rec.attempts + 1
    rec = rec._replace(epoch=epoch, session=session, attempts=attempts, num_found=len(rec.tokens), not_before_ms=0)
    return rec, True


def end_session(rec: Rec, now_ms: int) -> Rec:
    """Return the record after the end of the session that holds the request: any worker of the stage may have it."""
    stage: Stage = "prefill" if rec.stage == "prefill" else "decode"
    return rec._replace(session=None, free=_set_free(rec.free, stage, now_ms))


def append_tokens(rec: Rec, epoch: int, position: int, tokens: tuple[Any, ...]) -> tuple[Rec, AppendOutcome]:
    """Append tokens at a position of the log. Appending the same tokens a second time succeeds and changes nothing."""
    if rec.epoch != epoch:
        return rec, AppendOutcome.FENCED
    if position < len(rec.tokens):
        is_same = rec.tokens[position : position + len(tokens)] == tokens
        return rec, AppendOutcome.OK if is_same else AppendOutcome.FENCED
    if rec.stage == "end" or (position > len(rec.tokens) and not rec.cancelled):
        return rec, AppendOutcome.FENCED
    if rec.cancelled:
        return rec, AppendOutcome.CANCELLED
    written = rec.tokens + tokens
    made = len(written) - rec.num_found
    if made > rec.most:
        return rec._replace(tokens=written, attempts=0, most=min(made, GOOD_PROGRESS)), AppendOutcome.OK
    return rec._replace(tokens=written), AppendOutcome.OK


def finish_request(rec: Rec, epoch: int, num_tokens: int, end: Any, name: Any = None) -> tuple[Rec, AppendOutcome]:
    """Append the end after as many tokens as the holder knows of. An end that is there already stays.

    `name` is the name of the request's own message if the worker holds its delivery: that message settles the result.
    """
    if rec.epoch != epoch or len(rec.tokens) != num_tokens or (name and rec.bound and rec.bound != name):
        return rec, AppendOutcome.FENCED
    rec = rec._replace(bound=rec.bound or name) if name else rec
    if rec.stage == "end":
        return rec, AppendOutcome.OK
    return rec._replace(stage="end", session=None, message=None, end=end), AppendOutcome.OK


def hand_off_request(rec: Rec, epoch: int, now_ms: int) -> tuple[Rec, bool]:
    """Pass a request on to the other stage. The reply is whether it was the holder's.

    Without a bound job prefill's is durable, and the request waits for it. Otherwise the job stays bound, and any
    worker of the other stage may take the request over.
    """
    if rec.epoch != epoch or rec.stage not in ("prefill", "decode"):
        return rec, False
    if not rec.bound:
        return rec._replace(stage="handed", session=None, attempts=0, most=0, message=None), True
    if rec.session is None:
        return rec, False
    stage: Stage = "prefill" if rec.stage == "decode" else "decode"
    num_returns, free = rec.num_returns + (stage == "prefill"), _set_free(rec.free, stage, now_ms)
    return rec._replace(stage=stage, session=None, attempts=0, most=0, num_returns=num_returns, free=free), True


def release_request(
    rec: Rec, epoch: int, now_ms: int, *, wait_ms: int, alone_ms: int, failed: bool
) -> tuple[Rec, bool]:
    """Release a request. For `wait_ms` nobody may claim it, then for `alone_ms` only the holder of its delivery.

    The attempt counts if it `failed`. The reply is whether it was the holder's.
    """
    if rec.epoch != epoch or rec.stage in ("end", "handed") or rec.session is None:
        return rec, False
    from_ms = now_ms + wait_ms
    rec = end_session(rec, from_ms + alone_ms)
    attempts = rec.attempts if failed else max(0, rec.attempts - 1)
    return rec._replace(not_before_ms=from_ms if wait_ms else 0, attempts=attempts), True


def cancel_request(rec: Rec) -> tuple[Rec, bool]:
    """Note that a request is cancelled. The reply is False where it has ended already."""
    return (rec, False) if rec.stage == "end" else (rec._replace(cancelled=True), True)


def _set_free(free: tuple[int, int], stage: Stage, from_ms: int) -> tuple[int, int]:
    """Return when a request is free in each stage, with another time for one of them."""
    return (from_ms, free[1]) if stage == "prefill" else (free[0], from_ms)
