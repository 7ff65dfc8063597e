"""Checks of the promises of docs/regions.md, for each state and each step."""

from penstock.regions import MAX_HOPS
from sim.protocol.regions.state import DOWN, FINISHED, State, Step


def is_over(state: State) -> bool:
    """Return whether each POST has ended, and a request that was accepted is answered.

    A home that never returns owes no answer for what the region that adopted it has no copy of.
    """
    if state.calls:
        return False
    if not any(region.accepted for region in state.regions):
        return True
    home = state.regions[0]
    is_gone = home.runs == DOWN and not state.left.returns and home.accepted > 0
    adopters = [region for region in state.regions if region.adoption == FINISHED] or state.regions
    is_uncopied = is_gone and not any(region.has_request for region in adopters)
    return is_uncopied or any(region.answers for region in state.regions)


def find_violation(before: State, step: Step, after: State) -> str:
    """Return the promise that a step broke, or an empty string."""
    if sum(region.accepted for region in after.regions) > 1:
        return "accepted twice"
    if any(len(call.path) > 1 + MAX_HOPS for call in after.calls):
        return "three hops"
    if len(after.seen) > 1:
        return "other tokens under one id"
    if step.kind == "read: not found":
        return "an accepted request is not found"
    answers = sum(region.answers for region in after.regions)
    if answers > 1 and answers > sum(region.answers for region in before.regions):
        return "" if after.told or after.lived else "two results"
    return ""
