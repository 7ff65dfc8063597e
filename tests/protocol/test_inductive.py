"""The invariants are inductive, no check can be left out of the proof, and the code takes only steps that it knows."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

z3 = pytest.importorskip("z3", reason="the proof needs z3-solver")

from sim.protocol.inductive import (  # noqa: E402
    FLAWS,
    Rec,
    count,
    epoch,
    find_gaps,
    has_delivery,
    is_job,
    make_state,
    message,
    position,
    relate_records,
)
from sim.protocol.script import NEW, RequestRecord  # noqa: E402
from tests.draws import draw_cases  # noqa: E402
from tests.protocol.test_replay import NUM_STEPS, make_call  # noqa: E402

STAGES = ("new", "prefill", "handed", "decode", "end")
KINDS = {
    "claim": ("claim", "claim what has ended"),
    "park": ("claim",),
    "take": ("take over",),
    "append": ("append",),
    "finish": ("finish", "finish again"),
    "handed": ("hand off", "pass on"),
    "cancel": ("cancel",),
}
"""By call of the model the steps of the proof that it may be, besides none."""
BEFORE, AFTER = make_state("before").rec, make_state("after").rec
STEPS = relate_records(BEFORE, AFTER)


def test_the_invariants_are_inductive() -> None:
    assert find_gaps() == []


@pytest.mark.parametrize("flaw", draw_cases(FLAWS, 3))
def test_no_check_can_be_left_out(flaw: str) -> None:
    assert find_gaps(flaw)


def pin(made: Rec, rec: RequestRecord) -> list[Any]:
    """Say that a record of the proof is this one."""
    return [
        made.epoch == rec.epoch,
        made.stage == STAGES.index(rec.stage),
        made.bound == (rec.bound or 0),
        made.num_tokens == len(rec.tokens),
        made.num_at_end == (-1 if rec.end is None else rec.end.tokens),
        made.cancelled == rec.cancelled,
        *(made.written_by(at) == token for at, token in enumerate(rec.tokens)),
    ]


def is_known(before: RequestRecord, call: tuple[Any, ...], after: RequestRecord) -> bool:
    """Return whether the proof has the step."""
    solver = z3.Solver()
    solver.add(*pin(BEFORE, before), *pin(AFTER, after))
    solver.add(z3.Or(*(STEPS[kind] for kind in ("nothing", *KINDS.get(call[0], ())))))
    match call:
        case ("claim", _, _, asked, _) | ("park", _, asked):
            solver.add(message == (asked.job or asked.name), is_job(message) == bool(asked.job))
        case ("append", asks, first, number):
            solver.add(epoch == asks, position == first, count == number)
        case ("finish", asks, end, name):
            solver.add(epoch == asks, position == end.tokens, has_delivery == bool(name))
            solver.add(z3.Implies(has_delivery, z3.And(message == name, z3.Not(is_job(message)))))
        case ("handed", asks):
            solver.add(epoch == asks)
    return bool(solver.check() == z3.sat)


def find_unknown_calls(seeds: Iterable[int], flaw: str = "") -> Iterator[str]:
    """Make random calls, and yield those that the proof does not know. Losses of the record are left out."""
    for seed in seeds:
        rng, rec, clock, epochs = random.Random(seed), NEW, 1, list[int]()
        for _ in range(NUM_STEPS):
            step, after = make_call(rng, rec, rec, clock, epochs, flaw)
            if step.kind == "lose":
                continue
            if not is_known(rec, step.call, after):
                yield f"seed {seed}: {step.call}: {rec} -> {after}"
            if isinstance(step.reply, tuple) and step.reply[0] == "claim" and step.reply[1] not in epochs:
                epochs.append(step.reply[1])
            rec, clock = after, max(clock + 1, after.epoch)


def test_the_code_takes_only_steps_that_the_proof_knows() -> None:
    assert list(find_unknown_calls(draw_cases(range(40), 8))) == []


@pytest.mark.parametrize("flaw", ["binding changes", "appends by anybody", "ends uncounted", "ends unbound"])
def test_code_with_a_flaw_takes_others(flaw: str) -> None:
    assert next(find_unknown_calls(range(20), flaw), None) is not None
