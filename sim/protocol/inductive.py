"""`python -m sim.protocol.inductive`: claim, append, finish and settle keep their promises for any number of workers.

An invariant is inductive if it holds at first, and after each step from any state in which it holds. A solver shows
both, for states of any size. Needs the package `z3-solver`; `docs/decisions.md` says what this proves and what not.

The model leaves out limits of a real step that safety does not need. Any worker may claim at any time, as if all
sessions could end at any moment and clocks could show any time. Any worker may call with any claim that it ever had,
and receive any message. Crashed workers are among those that may still call. A record and its server's writes are not
lost.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import z3
from z3 import And, ForAll, If, Implies, Not, Or

NEW, PREFILL, HANDED, DECODE, END = map(z3.IntVal, range(5))
WORKER = z3.DeclareSort("Worker")
FLAWS = ("appends by anybody", "writes after the end", "an epoch is given twice", "binding changes", "ends uncounted",
         "settles what it does not hold", "settles before the end", "ends unbound")  # fmt: skip
"""Checks that can be left out. Each is needed for the proof."""


class Rec(NamedTuple):
    """The record, and its log: by position the epoch that a token was written by, and what the end counts, or -1."""

    epoch: Any
    stage: Any
    bound: Any
    num_tokens: Any
    written_by: Any
    num_at_end: Any
    cancelled: Any


class State(NamedTuple):
    """The record. By worker and epoch: whether it got that claim, and with which message. By position: the writer of
    the token. By worker and message: whether it may publish the result once it holds the delivery. By message: whether
    it is settled, and the number of results published with it.
    """

    rec: Rec
    claimed: Any
    by: Any
    author: Any
    may_settle: Any
    settled: Any
    results: Any


def make_state(name: str) -> State:
    """Return any state."""
    flag, number, worker = z3.BoolSort(), z3.IntSort(), WORKER
    epoch, stage, bound, num_tokens, num_at_end = z3.Ints([f"{name}_{at}" for at in range(5)])

    def make(field: str, *sorts: Any) -> Any:
        return z3.Function(f"{name}_{field}", *sorts)

    written_by, cancelled = make("written_by", number, number), z3.Bool(f"{name}_cancelled")
    return State(
        Rec(epoch, stage, bound, num_tokens, written_by, num_at_end, cancelled),
        claimed=make("claimed", worker, number, flag), by=make("by", worker, number, number),
        author=make("author", number, worker), may_settle=make("may_settle", worker, number, flag),
        settled=make("settled", number, flag), results=make("results", number, number),
    )  # fmt: skip


u, v = z3.Consts("u v", WORKER)
e, m, k, p, q = z3.Ints("e m k p q")
"""Bound by quantifiers, as are `u` and `v`."""
actor, (epoch, message, position, count) = z3.Const("actor", WORKER), z3.Ints("epoch message position count")
"""The worker that takes a step, and the step's values. Messages have names above 0: a job's id, a request's place."""
is_job, has_delivery = z3.Function("is_job", z3.IntSort(), z3.BoolSort()), z3.Bool("has_delivery")
"""Whether a name is a job's; and whether the worker that ends a request has its own message's delivery."""


def list_invariants(s: State) -> dict[str, Any]:
    """Return the invariants of every reachable state. The promises are among them."""
    r, both = s.rec, And(s.claimed(u, e), s.claimed(v, e))
    p_in_log, has_job = And(p >= 0, p < r.num_tokens), And(s.claimed(u, e), is_job(s.by(u, e)))
    is_settled = And(s.settled(m), m == r.bound, m > 0, r.stage == END)
    ends = And((r.stage == END) == (r.num_at_end >= 0), Implies(r.stage == END, r.num_at_end == r.num_tokens))
    return {
        "no claim is newer than the record": ForAll([u, e], Implies(s.claimed(u, e), e <= r.epoch)),
        "one holder for each epoch": ForAll([u, v, e], Implies(both, u == v)),
        "a token is its holder's": ForAll([p], Implies(p_in_log, s.claimed(s.author(p), r.written_by(p)))),
        "later tokens are of later epochs": ForAll([p, q], Implies(And(p_in_log, p < q, q < r.num_tokens),
            r.written_by(p) <= r.written_by(q))),
        "all claims are by messages": ForAll([u, e], Implies(s.claimed(u, e), s.by(u, e) > 0)),
        "a request's own message is bound at its end": Implies(And(r.bound != 0, Not(is_job(r.bound))), r.stage == END),
        "an end counts all tokens": And(r.num_tokens >= 0, ends),
        "decode's claims have the bound job": ForAll([u, e], Implies(has_job, s.by(u, e) == r.bound)),
        "who may settle has the bound job and an end": ForAll([u, m], Implies(s.may_settle(u, m),
            And(m == r.bound, m > 0, r.stage == END))),
        "a result settles its message": ForAll([m], And(s.results(m) >= 0, s.results(m) <= 1,
            Implies(s.results(m) > 0, is_settled))),
        "one visible result": ForAll([m, k], Implies(And(s.results(m) > 0, s.results(k) > 0),
            And(m == k, s.results(m) == 1))),
    }  # fmt: skip


def list_step_promises(s: State, t: State) -> dict[str, Any]:
    """Return the promises about each step from `s` to `t`."""
    a, b = s.rec, t.rec
    kept = ForAll([p], Implies(And(p >= 0, p < a.num_tokens), b.written_by(p) == a.written_by(p)))
    by_holder = And(a.stage != END, s.claimed(actor, a.epoch), b.written_by(a.num_tokens) == a.epoch)
    return {
        "no token is changed or taken back": And(b.num_tokens >= a.num_tokens, kept),
        "a token is written by the newest holder": Implies(b.num_tokens > a.num_tokens, by_holder),
        "an end stays": Implies(a.num_at_end >= 0, And(b.num_at_end == a.num_at_end, b.num_tokens == a.num_tokens)),
        "a binding stays": Implies(a.bound != 0, b.bound == a.bound),
        "a result is published once": ForAll([m], And(t.results(m) >= s.results(m), t.results(m) <= 1)),
    }


def relate_records(a: Rec, b: Rec, flaw: str = "") -> dict[str, Any]:
    """Return for each change of a record how the one after it follows from the one before: a claim's epoch is its."""
    fresh = b.epoch >= a.epoch + (0 if flaw == "an epoch is given twice" else 1)
    binds = Or(a.bound == 0, a.bound == message, flaw == "binding changes")
    prefill, decode = And(Not(is_job(message)), binds, a.stage != HANDED), And(is_job(message), binds)
    same_tokens = And(b.num_tokens == a.num_tokens, ForAll([p], b.written_by(p) == a.written_by(p)))
    log_stays = And(same_tokens, b.num_at_end == a.num_at_end)
    same = And(log_stays, b.epoch == a.epoch, b.bound == a.bound, b.cancelled == a.cancelled)
    is_holder = Or(a.epoch == epoch, flaw == "appends by anybody")
    claims = And(log_stays, fresh, b.cancelled == a.cancelled)
    kept = And(b.epoch == a.epoch, b.bound == a.bound)
    names = And(has_delivery, Not(is_job(message)))
    is_unbound = flaw == "ends unbound"
    ends = And(
        b.epoch == a.epoch,
        Implies(names, Or(a.bound == 0, a.bound == message)),
        b.bound == If(And(names, Not(is_unbound)), message, a.bound),
    )
    by_prefill = And(prefill, b.stage == PREFILL, b.bound == a.bound)
    by_decode = And(decode, b.stage == DECODE, b.bound == message)
    of_prefill, of_decode = (
        And(a.stage == PREFILL, Not(is_job(message))),
        And(Or(a.stage == DECODE, a.stage == PREFILL), message == a.bound, is_job(message)),
    )
    is_written = And(p >= position, p < position + count)
    return {
        "claim": And(claims, a.stage != END, Or(by_prefill, by_decode)),
        "take over": And(claims, Or(of_prefill, of_decode), b.stage == a.stage, b.bound == a.bound),
        "claim what has ended": And(log_stays, Or(prefill, decode), a.stage == END, b.stage == END,
            b.bound == If(is_job(message), message, a.bound), b.epoch == a.epoch, b.cancelled == a.cancelled),
        "append": And(is_holder, Or(a.stage != END, flaw == "writes after the end"), Not(a.cancelled), kept,
            count > 0, position == a.num_tokens, b.num_tokens == a.num_tokens + count, b.stage == a.stage,
            b.cancelled == a.cancelled, b.num_at_end == a.num_at_end,
            ForAll([p], b.written_by(p) == If(is_written, epoch, a.written_by(p)))),
        "finish": And(a.epoch == epoch, a.stage != END, Or(position == a.num_tokens, flaw == "ends uncounted"), ends,
            position >= 0, b.stage == END, b.num_at_end == position, same_tokens, b.cancelled == a.cancelled),
        "finish again": And(log_stays, ends, a.epoch == epoch, a.stage == END, b.stage == END,
            position == a.num_tokens, b.cancelled == a.cancelled),
        "hand off": And(same, a.epoch == epoch, a.stage == PREFILL, b.stage == HANDED),
        "pass on": And(same, a.epoch == epoch, a.bound != 0, Or(And(a.stage == DECODE, b.stage == PREFILL),
            And(a.stage == PREFILL, b.stage == DECODE))),
        "cancel": And(log_stays, kept, a.stage != END, b.stage == a.stage, b.cancelled),
        "nothing": And(same, b.stage == a.stage),
    }  # fmt: skip


def list_steps(s: State, t: State, flaw: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each kind of step from `s` to `t`, with the condition under which there is one."""
    steps = relate_records(s.rec, t.rec, flaw)
    for kind in (*steps, "settle", "settle without output"):
        claims = kind in ("claim", "take over")
        told: Any = kind == "claim what has ended" or flaw == "settles before the end"
        if kind == "claim what has ended":
            told = t.rec.bound == message
        if kind in ("finish", "finish again"):
            told = Or(is_job(message), has_delivery)
        settles, is_asked = kind not in steps, True
        asks = kind in ("append", "finish", "finish again", "hand off", "pass on")
        if asks:  # with a claim
            is_asked = And(s.claimed(actor, epoch), s.by(actor, epoch) == message)
        elif settles:  # the bus settles the message and publishes a result, or none, in one step
            is_there = Or(Not(s.settled(message)), flaw == "settles what it does not hold")
            is_asked = And(is_there, Or(s.may_settle(actor, message), kind != "settle"))
        mine, is_this = And(u == actor, e == t.rec.epoch, claims), m == message
        yield kind, And(
            message > 0, is_asked, steps["nothing" if settles else kind],
            ForAll([u, e], t.claimed(u, e) == Or(s.claimed(u, e), mine)),
            ForAll([u, e], t.by(u, e) == If(mine, message, s.by(u, e))),
            ForAll([p], t.author(p) == If(And(kind == "append", p >= position), actor, s.author(p))),
            ForAll([u, m], t.may_settle(u, m) == Or(s.may_settle(u, m), And(told, u == actor, is_this, m > 0))),
            ForAll([m], t.settled(m) == Or(s.settled(m), And(settles, is_this))),
            ForAll([m], t.results(m) == s.results(m) + If(And(kind == "settle", is_this), 1, 0)),
        )  # fmt: skip


def find_gaps(flaw: str = "") -> list[str]:
    """Return the proof's gaps: what does not hold at first or after a step, and steps that never come."""
    s, t = make_state("before"), make_state("after")
    first = And(
        s.rec.epoch == 0, s.rec.stage == NEW, s.rec.bound == 0, s.rec.num_tokens == 0, s.rec.num_at_end == -1,
        ForAll([u, e], Not(s.claimed(u, e))), ForAll([u, m], Not(s.may_settle(u, m))),
        ForAll([m], And(s.results(m) == 0, Not(s.settled(m)))),
    )  # fmt: skip
    holds = list_invariants(s)
    gaps = [f"at first: {name}" for name, fact in holds.items() if not _is_proved(first, fact)]
    for kind, step in list_steps(s, t, flaw):
        known = And(*holds.values(), step)
        if _is_proved(known, z3.BoolVal(False)):
            gaps.append(f"{kind}: never comes")
        facts = list_invariants(t) | list_step_promises(s, t)
        gaps += [f"{kind}: {name}" for name, fact in facts.items() if not _is_proved(known, fact)]
    return gaps


def _is_proved(known: Any, fact: Any) -> bool:
    (solver := z3.Solver()).set("timeout", 20_000)
    solver.add(known, Not(fact))
    return bool(solver.check() == z3.unsat)


if __name__ == "__main__":
    for left_out in ("", *FLAWS):
        sys.stdout.write(f"{left_out or 'all rules'}: {find_gaps(left_out) or 'proved'}\n")
