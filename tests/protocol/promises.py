"""What each state and each step has to keep; the numbers are those in `model`."""

from tests.protocol.script import NONE
from tests.protocol.state import GHOST, POISONOUS, Rules, State, Step


def is_over(state: State) -> bool:
    """A result, everything settled, nobody at work, no lease."""
    is_idle = not any(worker.run or worker.out or worker.inbox for worker in state.workers)
    has_ended = state.rec.stage == "end" or state.lost
    return state.results > 0 and not state.bus and is_idle and has_ended and state.rec.lease == NONE


def wrong(before: State, step: Step, after: State, rules: Rules) -> str:
    """What a step broke, or nothing."""
    if after.results > before.results:
        return _wrong_result(before, step, after)
    if after.rec is before.rec or step.kind == "lose":
        return ""
    if not step.call:
        return "a record changed by no script"
    if step.call[0] in ("release", "put down") and left_alone(after, rules):
        return "left alone"
    return _wrong_record(before, step, after)


def _wrong_result(before: State, step: Step, after: State) -> str:
    out = before.workers[step.worker].out
    if after.results > 1 + after.lost:
        return "two results"
    if out is None or out.end is None or (not after.lost and out.end != after.rec.end):
        return "a result that is not the end's"
    return "poison without a dead letter" if out.end.error in POISONOUS and not after.letters else ""


def _wrong_record(before: State, step: Step, after: State) -> str:
    was, rec = before.rec, after.rec
    if rec.num_ends > 1:
        return "two ends"
    if rec.end is not was.end and rec.end is not None and rec.end.tokens != len(rec.tokens):
        return "an end that counts wrong"
    if rec.tokens != was.tokens:
        return _wrong_token(before, step, after)
    return "the binding changed" if was.bound not in (0, rec.bound) else ""


def _wrong_token(before: State, step: Step, after: State) -> str:
    was, rec = before.rec, after.rec
    run = before.workers[step.worker].run
    if was.end is not None or rec.tokens[:-1] != was.tokens:
        return "tokens taken back, or after the end"
    if run is None or run.diverged:
        return "a token that goes on from others"
    return "a token by somebody who does not hold the request" if run.epoch != rec.epoch else ""


def left_alone(state: State, rules: Rules) -> bool:
    """A request was begun and not ended, and nobody goes on with it before the bus finds out who is dead.

    One that is handed off is not meant: its job waits as any message does that a worker died with before it claimed it.
    """
    rec = state.rec
    if rec.stage not in ("prefill", "decode") or (rec.stage == "prefill" and any(one.job for one, _ in state.bus)):
        return False
    is_found = rec.lease != NONE and rec.message is not None
    if is_found and (not rules.lists or state.listed[rec.stage == "decode"]):
        return False
    if any(worker.run or worker.out or worker.inbox for worker in state.workers):
        return False
    return bool(state.bus) and all(at == GHOST for _, at in state.bus)
