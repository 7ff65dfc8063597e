"""The record's scripts (`core/penstock/record/lua/`) in plain Python: from a record to the next one and a reply.

`clock` stands for the server's clock and grows with each claim. A token is the epoch of the claim that sampled it, as
if tokens of two attempts always differed. A session is the number of its worker; `GHOST` stands for all sessions
that are still in `sessions` though their workers are dead or have another one. The stage's `free` set is kept in
the record, as there is only one request.
"""

from typing import Any, NamedTuple

NOBODY, GHOST = -1, -2
"""In place of a worker's number: nobody, or a dead worker that the others still believe to be alive."""
NEVER, LATER, DUE = 0, 1, 2
"""When any worker of a stage may take the request over."""
PLACES = {"prefill": 0, "decode": 1}
MAX_ATTEMPTS = 2
Reply = tuple[Any, ...]


class Message(NamedTuple):
    """A request or a job in a topic. `name` identifies the message, `job` is the job's id, and 0 for a request."""

    name: int
    job: int = 0
    body: int = 1
    attempt: int = 0
    error: str = ""
    """In a job: the reason why the request ended in prefill, or nothing."""


class End(NamedTuple):
    """The end of a stream: the number of tokens before it, and the error or nothing."""

    tokens: int
    error: str


class RequestRecord(NamedTuple):
    """A request's record, and its log: `tokens`, then `end`."""

    epoch: int = 0
    session: int = NOBODY
    stage: str = "new"
    bound: int = 0
    body: int = 0
    attempts: int = 0
    found: int = 0
    """The number of tokens when it was claimed: in Redis a holder says it with its tokens."""
    most: int = 0
    """The most tokens that a claim in this stage made."""
    cancelled: bool = False
    message: Message | None = None
    waits: bool = False
    """Nobody may claim the request for a while, not even the holder of its delivery."""
    free: tuple[int, int] = (NEVER, NEVER)
    """When the request may be taken over, for each stage."""
    tokens: tuple[int, ...] = ()
    end: End | None = None
    num_ends: int = 0


NEW = RequestRecord()


def set_free_time(rec: RequestRecord, stage: str, when: int) -> RequestRecord:
    """Return the record with another entry in a stage's `free` set."""
    return rec._replace(free=(when, rec.free[1]) if stage == "prefill" else (rec.free[0], when))


def park_message(rec: RequestRecord, stage: str, message: Message, clock: int) -> tuple[RequestRecord, Reply]:
    """Do what `claim.lua` does without a session."""
    is_kept = rec.stage == stage and rec.message is not None
    after, reply = claim_request(rec, stage, NOBODY, message, clock)
    if reply[0] in ("bound", "conflict"):
        return rec, reply
    if is_kept or rec.stage == "end":
        return rec, ("down",)
    if reply[0] != "claim":
        return rec, reply
    return set_free_time(after._replace(attempts=after.attempts - 1), stage, DUE), ("down",)


def claim_request(
    rec: RequestRecord, stage: str, session: int, message: Message, clock: int, flaw: str = "", *, lives: bool = True
) -> tuple[RequestRecord, Reply]:
    """Do what `claim.lua` does. `lives` says whether the calling session is in `sessions`."""
    prefill = stage == "prefill"
    if prefill and rec.body not in (0, message.body):
        return rec, ("conflict",)
    if prefill and rec.stage == "handed":
        return rec, ("bound",)
    rebinds = flaw == "no binding" or (flaw == "binding changes" and not prefill)
    if rec.bound and rec.bound != message.job and not rebinds:
        return rec, ("bound",)
    bound = rec.bound if prefill or flaw == "no binding" else message.job
    if rec.stage == "end":
        rec = rec._replace(epoch=max(rec.epoch + 1, clock)) if prefill else rec._replace(bound=bound)
        return rec, _build_claim_reply(rec, ended=True)
    is_taken = rec.session != NOBODY or rec.waits
    if not lives or (is_taken and (prefill or rec.stage != "prefill")):
        return rec, ("busy",)
    attempts = 0 if not prefill and rec.stage == "prefill" else rec.attempts
    rec = set_free_time(rec, stage, NEVER)._replace(
        epoch=max(rec.epoch + 1, clock),
        session=session,
        stage=stage,
        bound=bound,
        body=message.body if prefill else rec.body,
        attempts=attempts + 1,
        found=len(rec.tokens),
        most=rec.most if rec.stage == stage else 0,
        message=message,
        waits=False,
    )
    return rec, _build_claim_reply(rec)


def take_over_request(
    rec: RequestRecord, stage: str, session: int, clock: int, *, lives: bool = True
) -> tuple[RequestRecord, Reply]:
    """Do what `take.lua` does to this request."""
    if not lives or rec.free[PLACES[stage]] != DUE:
        return rec, ("none",)
    rec = set_free_time(rec, stage, NEVER)
    if rec.stage != stage or rec.session != NOBODY or rec.message is None:
        return rec, ("gone",)
    epoch = max(rec.epoch + 1, clock)
    rec = rec._replace(epoch=epoch, session=session, attempts=rec.attempts + 1, found=len(rec.tokens), waits=False)
    return rec, _build_claim_reply(rec)


def end_sessions(rec: RequestRecord, sessions: tuple[int, ...], flaw: str = "") -> RequestRecord:
    """Do what `reap.lua` does when the time of `sessions` is over."""
    if rec.session not in sessions:
        return rec
    after = rec._replace(session=NOBODY)
    return after if flaw == "reaps without freeing" else set_free_time(after, rec.stage, DUE)


def pass_waiting_times(rec: RequestRecord) -> RequestRecord:
    """Return the record after the server's clock has passed all waiting times."""
    prefill, decode = [min(DUE, when * 2) for when in rec.free]
    return rec._replace(waits=False, free=(prefill, decode))


def _build_claim_reply(rec: RequestRecord, *, ended: bool = False) -> Reply:
    return "claim", rec.epoch, len(rec.tokens), ended, rec.cancelled, rec.attempts, 0 if ended else rec.most


def append_tokens(
    rec: RequestRecord, epoch: int, position: int, count: int, flaw: str = ""
) -> tuple[RequestRecord, int]:
    """Do what `append.lua` does with `count` tokens. Reply 1: written; 0: refused; 2: the request is cancelled."""
    if rec.epoch != epoch and flaw != "appends by anybody":
        return rec, 0
    if position < len(rec.tokens):
        return rec, int(rec.tokens[position : position + count] == (epoch,) * count)
    if rec.stage == "end":
        return rec, 0
    if rec.cancelled:
        return rec, 2
    if position > len(rec.tokens):
        return rec, 0
    rec = rec._replace(tokens=rec.tokens + (epoch,) * count)
    made = len(rec.tokens) - rec.found
    return rec._replace(attempts=0, most=made) if made > rec.most else rec, 1


def finish_request(rec: RequestRecord, epoch: int, end: End, flaw: str = "") -> tuple[RequestRecord, int]:
    """Do what `finish.lua` does."""
    if rec.epoch != epoch or (len(rec.tokens) != end.tokens and flaw != "ends uncounted"):
        return rec, 0
    if rec.stage == "end":
        return rec, 1
    return rec._replace(stage="end", session=NOBODY, message=None, end=end, num_ends=rec.num_ends + 1), 1


def note_handed_off(rec: RequestRecord, epoch: int) -> tuple[RequestRecord, int]:
    """Do what `handed.lua` does."""
    if rec.epoch != epoch or rec.stage != "prefill":
        return rec, 0
    return rec._replace(stage="handed", session=NOBODY, attempts=0, message=None), 1


def release_request(
    rec: RequestRecord, epoch: int, *, failed: bool, waits: bool, delivered: bool = False
) -> tuple[RequestRecord, int]:
    """Do what `release.lua` does."""
    if rec.epoch != epoch or rec.stage in ("end", "handed") or rec.session == NOBODY:
        return rec, 0
    attempts = rec.attempts if failed else max(0, rec.attempts - 1)
    rec = rec._replace(session=NOBODY, attempts=attempts, waits=waits)
    return set_free_time(rec, rec.stage, LATER if waits or delivered else DUE), 1


def cancel_request(rec: RequestRecord) -> tuple[RequestRecord, int]:
    """Do what `cancel.lua` does."""
    return (rec, 0) if rec.stage == "end" else (rec._replace(cancelled=True), 1)
