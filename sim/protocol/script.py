"""The record's scripts (`penstock/record/lua/`) in plain Python: from a record to the next one and the reply.

What the scripts read of the server's clock is `clock`, a number that grows with each claim. A token is the epoch of the
claim that drew it: tokens of two attempts are taken to differ. A session is the number of its worker; `GHOST` stands
for all those that are still in `sessions` and whose workers are dead, or have another one. The stage's `free` set is
kept with the record, as there is one request only.
"""

from typing import Any, NamedTuple

NOBODY, GHOST = -1, -2
"""Instead of a worker: nobody, or a dead one as far as the others know."""
NEVER, LATER, DUE = 0, 1, 2
"""When anybody of a stage may take the request."""
PLACES = {"prefill": 0, "decode": 1}
MAX_ATTEMPTS = 2
Reply = tuple[Any, ...]


class Message(NamedTuple):
    """A request or a job in a topic. `name` is its place there, `job` the job's id; 0 for a request."""

    name: int
    job: int = 0
    body: int = 1
    attempt: int = 0
    error: str = ""
    """Why the request ended in prefill, if it did: a job carries that."""


class End(NamedTuple):
    """What the end of a stream says: how many tokens there were, and the error or nothing."""

    tokens: int
    error: str


class Rec(NamedTuple):
    """A request's record, and its log: `tokens`, then `end`."""

    epoch: int = 0
    session: int = NOBODY
    stage: str = "new"
    bound: int = 0
    body: int = 0
    attempts: int = 0
    cancelled: bool = False
    message: Message | None = None
    waits: bool = False
    """It is to be left alone for a while, also by who has the delivery."""
    free: tuple[int, int] = (NEVER, NEVER)
    """For each stage."""
    tokens: tuple[int, ...] = ()
    end: End | None = None
    num_ends: int = 0


NEW = Rec()


def freed(rec: Rec, stage: str, when: int) -> Rec:
    """The record with its place in a stage's `free` set."""
    return rec._replace(free=(when, rec.free[1]) if stage == "prefill" else (rec.free[0], when))


def put_down(rec: Rec, stage: str, message: Message, clock: int) -> tuple[Rec, Reply]:
    """`claim.lua` without a session."""
    is_kept = rec.stage == stage and rec.message is not None
    after, reply = claim(rec, stage, NOBODY, message, clock)
    if reply[0] in ("bound", "conflict"):
        return rec, reply
    if is_kept or rec.stage == "end":
        return rec, ("down",)
    if reply[0] != "claim":
        return rec, reply
    return freed(after._replace(attempts=after.attempts - 1), stage, DUE), ("down",)


def claim(
    rec: Rec, stage: str, session: int, message: Message, clock: int, flaw: str = "", *, lives: bool = True
) -> tuple[Rec, Reply]:
    """`claim.lua`; `lives`: whether the session that asks is in `sessions`."""
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
        return rec, _claimed(rec, ended=True)
    is_taken = rec.session != NOBODY or rec.waits
    if not lives or (is_taken and (prefill or rec.stage != "prefill")):
        return rec, ("busy",)
    attempts = 0 if not prefill and rec.stage == "prefill" else rec.attempts
    rec = freed(rec, stage, NEVER)._replace(
        epoch=max(rec.epoch + 1, clock),
        session=session,
        stage=stage,
        bound=bound,
        body=message.body if prefill else rec.body,
        attempts=attempts + 1,
        message=message,
        waits=False,
    )
    return rec, _claimed(rec)


def take(rec: Rec, stage: str, session: int, clock: int, *, lives: bool = True) -> tuple[Rec, Reply]:
    """`take.lua`, as far as it concerns this request."""
    if not lives or rec.free[PLACES[stage]] != DUE:
        return rec, ("none",)
    rec = freed(rec, stage, NEVER)
    if rec.stage != stage or rec.session != NOBODY or rec.message is None:
        return rec, ("gone",)
    epoch = max(rec.epoch + 1, clock)
    rec = rec._replace(epoch=epoch, session=session, attempts=rec.attempts + 1, waits=False)
    return rec, _claimed(rec)


def reap(rec: Rec, sessions: tuple[int, ...], flaw: str = "") -> Rec:
    """`reap.lua` with the sessions that it finds over."""
    if rec.session not in sessions:
        return rec
    after = rec._replace(session=NOBODY)
    return after if flaw == "reaps without freeing" else freed(after, rec.stage, DUE)


def due(rec: Rec) -> Rec:
    """The server's clock goes on, past all that anybody waits for."""
    prefill, decode = [min(DUE, when * 2) for when in rec.free]
    return rec._replace(waits=False, free=(prefill, decode))


def _claimed(rec: Rec, *, ended: bool = False) -> Reply:
    return "claim", rec.epoch, len(rec.tokens), ended, rec.cancelled, rec.attempts


def append(rec: Rec, epoch: int, position: int, flaw: str = "") -> tuple[Rec, int]:
    """`append.lua`."""
    if rec.epoch != epoch and flaw != "appends by anybody":
        return rec, 0
    if position < len(rec.tokens):
        return rec, int(rec.tokens[position] == epoch)
    if rec.stage == "end":
        return rec, 0
    if rec.cancelled:
        return rec, 2
    if position > len(rec.tokens):
        return rec, 0
    return rec._replace(tokens=(*rec.tokens, epoch), attempts=0), 1


def finish(rec: Rec, epoch: int, end: End, flaw: str = "") -> tuple[Rec, int]:
    """`finish.lua`."""
    if rec.epoch != epoch or (len(rec.tokens) != end.tokens and flaw != "ends uncounted"):
        return rec, 0
    if rec.stage == "end":
        return rec, 1
    return rec._replace(stage="end", session=NOBODY, message=None, end=end, num_ends=rec.num_ends + 1), 1


def handed(rec: Rec, epoch: int) -> tuple[Rec, int]:
    """`handed.lua`."""
    if rec.epoch != epoch or rec.stage != "prefill":
        return rec, 0
    return rec._replace(stage="handed", session=NOBODY, attempts=0, message=None), 1


def release(rec: Rec, epoch: int, *, failed: bool, waits: bool, delivered: bool = False) -> tuple[Rec, int]:
    """`release.lua`."""
    if rec.epoch != epoch or rec.stage in ("end", "handed") or rec.session == NOBODY:
        return rec, 0
    attempts = rec.attempts if failed else max(0, rec.attempts - 1)
    rec = rec._replace(session=NOBODY, attempts=attempts, waits=waits)
    return freed(rec, rec.stage, LATER if waits or delivered else DUE), 1


def cancel(rec: Rec) -> tuple[Rec, int]:
    """`cancel.lua`."""
    return (rec, 0) if rec.stage == "end" else (rec._replace(cancelled=True), 1)
