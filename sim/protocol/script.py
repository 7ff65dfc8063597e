"""The record of the model: its names, times and tokens, and the rules that a flaw leaves out.

`penstock.testing.transitions` has the scripts' transitions. `clock` grows with each claim, and gives the epochs; all
other time stands still. A token is the epoch of the claim that sampled it, as if tokens of two attempts always
differed. A session is the number of its worker; `GHOST` stands for all sessions that still last though their workers
are dead or have another one. A session ends by a step of its own, until then it lives.
"""

from functools import cache
from typing import Any, NamedTuple

from penstock.names import Stage
from penstock.testing import transitions
from penstock.testing.transitions import Times, cancel_request

__all__ = ["cancel_request"]
NOBODY, GHOST = None, -2
"""In place of a worker's number: nobody, or a dead worker that the others still believe to be alive."""
NEVER, DUE, LATER = 0, 1, 2
"""The time from which any worker of a stage may take the request over. The time now is `DUE`."""
LIVING = dict.fromkeys((GHOST, 0, 1, 2, 3), LATER)
MAX_ATTEMPTS = 2
MAX_RETURNS = 1
"""How often decode gives a request back. Then it ends."""
Reply = tuple[Any, ...]


class Message(NamedTuple):
    """A request or a job in a topic. `name` identifies the message, `job` is the job's id, and 0 for a request."""

    name: int
    job: int = 0
    body: int = 1
    attempt: int = 0
    error: str = ""
    """In a job: the reason why the request ended in prefill, or nothing."""
    is_answered: bool = False
    """Whether its holder found the request among the last results."""


class End(NamedTuple):
    """The end of a stream: the number of tokens before it, and the error or nothing."""

    tokens: int
    error: str


RequestRecord = transitions.RequestRecord[int, Message, int, End]
NEW: RequestRecord = RequestRecord(bound=0, body=0)


def park_message(rec: RequestRecord, stage: Stage, message: Message, clock: int) -> tuple[RequestRecord, Reply]:
    """Park a message. Return the record after that, and the script's reply."""
    asked = message.job or message.name, _get_body(stage, message), message
    rec, reply = transitions.claim_request(
        rec, stage, None, asked, LIVING, _tell_times(clock), is_answered=message.is_answered
    )
    return rec, (reply.kind,)


def claim_request(
    rec: RequestRecord, stage: Stage, session: int, message: Message, clock: int, flaw: str = "", *, lives: bool = True
) -> tuple[RequestRecord, Reply]:
    """Claim the request. `lives` says whether the calling session does."""
    rebinds = flaw == "no binding" or (flaw == "binding changes" and stage == "decode")
    before = rec._replace(bound=0) if rebinds else rec
    name = message.job if flaw == "forgets its own message" else message.job or message.name
    asked = name, _get_body(stage, message), message
    living = LIVING if lives else {name: until for name, until in LIVING.items() if name != session}
    after, reply = transitions.claim_request(
        before, stage, session, asked, living, _tell_times(clock), is_answered=message.is_answered
    )
    if flaw == "binds behind the end" and reply.kind == "claim" and after.stage == "end":
        after = after._replace(bound=name)
    if flaw == "no binding" or (rebinds and after is before):
        after = after._replace(bound=rec.bound)
    return after, _build_claim_reply(after, stage) if reply.kind == "claim" else (reply.kind,)


def take_over_request(
    rec: RequestRecord, stage: Stage, session: int, clock: int, *, lives: bool = True
) -> tuple[RequestRecord, Reply]:
    """Take the request over, if it is free."""
    if not lives or rec.free[stage == "decode"] != DUE:
        return rec, ("none",)
    rec, is_taken = transitions.take_over_request(rec, stage, session, _tell_times(clock))
    return rec, _build_claim_reply(rec, stage) if is_taken else ("gone",)


def end_sessions(rec: RequestRecord, sessions: tuple[int | None, ...], flaw: str = "") -> RequestRecord:
    """Return the record after the end of `sessions`."""
    if rec.session not in sessions:
        return rec
    after = transitions.end_session(rec, DUE)
    return after._replace(free=rec.free) if flaw == "reaps without freeing" else after


def pass_waiting_times(rec: RequestRecord) -> RequestRecord:
    """Return the record after the server's clock has passed all waiting times."""
    prefill, decode = [min(DUE, when) for when in rec.free]
    return rec._replace(not_before_ms=NEVER, free=(prefill, decode))


def append_tokens(
    rec: RequestRecord, epoch: int, position: int, count: int, flaw: str = ""
) -> tuple[RequestRecord, int]:
    """Append `count` tokens. Reply 1: written; 0: refused; 2: the request is cancelled."""
    asks = rec.epoch if flaw == "appends by anybody" else epoch
    return transitions.append_tokens(rec, asks, position, (epoch,) * count)


def finish_request(
    rec: RequestRecord, epoch: int, end: End, name: int = 0, flaw: str = ""
) -> tuple[RequestRecord, int]:
    """Write the end. `name` is bound to the request: the name of its own message, where the holder has that."""
    num_tokens = len(rec.tokens) if flaw == "ends uncounted" else end.tokens
    return transitions.finish_request(rec, epoch, num_tokens, end, 0 if flaw == "ends unbound" else name)


def note_handed_off(rec: RequestRecord, epoch: int, flaw: str = "") -> tuple[RequestRecord, int]:
    """Pass the request on: to the job, where none is bound, else to the workers of the other stage."""
    after, is_noted = transitions.hand_off_request(rec, epoch, DUE)
    return after._replace(free=rec.free) if flaw == "passed on without freeing" else after, is_noted


def release_request(
    rec: RequestRecord, epoch: int, *, failed: bool, waits: bool, delivered: bool = False
) -> tuple[RequestRecord, int]:
    """Give the request back. Where it `waits` or has a delivery it is free later."""
    alone_ms = int(delivered and not waits)
    return transitions.release_request(rec, epoch, DUE, wait_ms=int(waits), alone_ms=alone_ms, failed=failed)


def end_unread(rec: RequestRecord) -> tuple[RequestRecord, int]:
    """End a request whose message is gone, if no worker has seen it."""
    return (rec, 0) if rec.stage != "new" else (rec._replace(stage="end", end=End(0, "lost")), 1)


@cache
def _tell_times(clock: int) -> Times:
    return Times(now_ms=DUE, epoch_ms=clock, lease_ms=1, longest_ms=1)


def _get_body(stage: Stage, message: Message) -> int:
    """Return the body that a claim compares: a job has none."""
    return message.body if stage == "prefill" else 0


def _build_claim_reply(rec: RequestRecord, stage: Stage) -> Reply:
    ended = 0 if rec.stage != "end" else 2 if stage == "prefill" and not rec.bound else 1
    return (
        "claim",
        rec.epoch,
        len(rec.tokens),
        ended,
        rec.cancelled,
        rec.attempts,
        0 if ended else rec.most,
        rec.num_returns,
    )
