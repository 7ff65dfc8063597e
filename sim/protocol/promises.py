"""Checks of the promises that `model` lists, for each state and each step."""

from sim.protocol.script import NOBODY
from sim.protocol.state import POISONOUS, Rules, State, Step


def is_over(state: State, rules: Rules) -> bool:
    """Return whether there is a result, everything is settled, no worker is busy, and nobody holds the request.

    Where the bus does not notice deaths, it is enough that the end is in the log.
    """
    if not rules.bus_knows:
        return state.rec.stage == "end" or state.results > 0
    is_idle = not any(worker.run or worker.out or worker.inbox for worker in state.workers)
    has_ended = state.rec.stage == "end" or state.lost or (state.results > 0 and state.rec.stage == "new")
    is_answered = state.results > 0 or state.deleted
    return is_answered and not state.bus and is_idle and has_ended and state.rec.session == NOBODY


def find_violation(before: State, step: Step, after: State) -> str:
    """Return the promise that a step broke, or an empty string."""
    if after.results > before.results:
        return _check_result(before, step, after)
    if after.rec is before.rec or step.kind in ("lose", "expire"):
        return ""
    if not step.call:
        return "a record changed by no script"
    return _check_record(before, step, after)


def _check_result(before: State, step: Step, after: State) -> str:
    out = before.workers[step.worker].out
    if after.results > 1 + after.lost:
        return "two results"
    if out is None or out.end is None or (not after.lost and out.end != after.rec.end):
        return "a result that is not the end's"
    return "poison without a dead letter" if out.end.error in POISONOUS and not after.letters else ""


def _check_record(before: State, step: Step, after: State) -> str:
    was, rec = before.rec, after.rec
    if was.end is not None and rec.end is not was.end:
        return "two ends"
    if rec.end is not was.end and rec.end is not None and rec.end.tokens != len(rec.tokens):
        return "an end that counts wrong"
    if rec.tokens != was.tokens:
        return _check_token(before, step, after)
    return "the binding changed" if was.bound not in (0, rec.bound) else ""


def _check_token(before: State, step: Step, after: State) -> str:
    was, rec = before.rec, after.rec
    run = before.workers[step.worker].run
    if was.end is not None or rec.tokens[: len(was.tokens)] != was.tokens:
        return "tokens taken back, or after the end"
    if run is None or run.diverged:
        return "a token that goes on from others"
    return "a token by somebody who does not hold the request" if run.epoch != rec.epoch else ""
