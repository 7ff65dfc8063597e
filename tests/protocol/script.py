"""The record's scripts (`penstock/record/lua/`) in plain Python: from a record to the next one and the reply.

What the scripts read of the server's clock is `clock`, a number that grows with each claim. A lease is none, has run
out, or runs. A token is the epoch of the claim that drew it: tokens of two attempts are taken to differ.
"""

from typing import Any, NamedTuple

NONE, OUT, RUNS = 0, 1, 2
"""A lease."""
NOBODY = -1
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
    owner: int = NOBODY
    lease: int = NONE
    stage: str = "new"
    bound: int = 0
    body: int = 0
    attempts: int = 0
    cancelled: bool = False
    message: Message | None = None
    tokens: tuple[int, ...] = ()
    end: End | None = None
    num_ends: int = 0


NEW = Rec()


def put_down(rec: Rec, stage: str, message: Message, clock: int) -> tuple[Rec, Reply]:
    """`claim.lua` without an owner."""
    is_kept = rec.stage == stage and rec.message is not None
    was, reply = rec, claim(rec, stage, NOBODY, message, clock, "")
    if reply[1][0] in ("bound", "conflict"):
        return was, reply[1]
    if is_kept or was.stage == "end" or (stage == "prefill" and was.stage == "handed"):
        return was, ("down",)
    rec, found = reply
    return (rec._replace(lease=OUT, attempts=was.attempts), ("down",)) if found[0] == "claim" else (was, found)


def claim(rec: Rec, stage: str, owner: int, message: Message, clock: int, flaw: str) -> tuple[Rec, Reply]:
    """`claim.lua`."""
    prefill = stage == "prefill"
    if prefill and rec.body not in (0, message.body):
        return rec, ("conflict",)
    rebinds = flaw == "no binding" or (flaw == "binding changes" and not prefill)
    if rec.bound and rec.bound != message.job and not rebinds:
        return rec, ("bound",)
    bound = rec.bound if prefill or flaw == "no binding" else message.job
    if rec.stage == "end":
        rec = rec._replace(epoch=max(rec.epoch + 1, clock)) if prefill else rec._replace(bound=bound)
        return rec, _claimed(rec, ended=True)
    if rec.lease == RUNS and (prefill or rec.stage != "prefill"):
        return rec, ("busy",)
    rec = rec._replace(
        epoch=max(rec.epoch + 1, clock),
        owner=owner,
        lease=RUNS,
        stage=stage,
        bound=bound,
        body=message.body if prefill else rec.body,
        attempts=rec.attempts + 1,
        message=message,
    )
    return rec, _claimed(rec)


def take_over(rec: Rec, stage: str, owner: int, clock: int) -> tuple[Rec, Reply]:
    """`takeover.lua`."""
    if rec.stage != stage or rec.lease == NONE or rec.message is None:
        return rec, ("gone",)
    if rec.lease == RUNS:
        return rec, ("busy",)
    epoch = max(rec.epoch + 1, clock)
    rec = rec._replace(epoch=epoch, owner=owner, lease=RUNS, attempts=rec.attempts + 1)
    return rec, _claimed(rec)


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
    over = rec._replace(stage="end", lease=NONE, owner=NOBODY, message=None, end=end, num_ends=rec.num_ends + 1)
    return over, 1


def handed(rec: Rec, epoch: int) -> tuple[Rec, int]:
    """`handed.lua`."""
    if rec.epoch != epoch or rec.stage != "prefill":
        return rec, 0
    return rec._replace(stage="handed", lease=NONE, owner=NOBODY, attempts=0, message=None), 1


def release(rec: Rec, epoch: int, *, failed: bool, waits: bool, flaw: str = "") -> tuple[Rec, int]:
    """`release.lua`."""
    if rec.epoch != epoch or rec.stage in ("end", "handed"):
        return rec, 0
    rec = rec._replace(owner=NOBODY, attempts=rec.attempts if failed else max(0, rec.attempts - 1))
    if flaw == "forgets the message":
        return rec._replace(lease=NONE, message=None), 1
    return rec._replace(lease=RUNS if waits else OUT), 1


def renew(rec: Rec, epoch: int) -> tuple[Rec, int]:
    """`renew.lua`."""
    if rec.epoch != epoch:
        return rec, 0
    if rec.owner == NOBODY:
        return rec, 2
    return rec._replace(lease=RUNS), 3 if rec.cancelled else 1


def cancel(rec: Rec) -> tuple[Rec, int]:
    """`cancel.lua`."""
    return (rec, 0) if rec.stage == "end" else (rec._replace(cancelled=True), 1)
