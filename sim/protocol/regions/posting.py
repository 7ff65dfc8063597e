"""The steps of a POST: it is accepted where it is, sent on, or refused, and the answer goes back along its way.

1. A gateway decides before anything is written. A key goes to its home, whichever region that is; a request without one
   goes to any region, the gateway's own at last.
2. It sends the request on. Where no connection came about the request was certainly not accepted: the next region is
   tried. Where the connection broke, or no answer came in time, nobody is tried, and the client gets an error.
3. The region that takes the request writes it, and the answer goes back.
"""

from collections.abc import Iterator
from typing import Any

from penstock.regions import MAX_HOPS
from sim.protocol.regions.state import (
    ACCEPTED,
    DECIDE,
    DOWN,
    FINISHED,
    REFUSED,
    UNSURE,
    UP,
    Call,
    Rules,
    State,
    Step,
    can_talk,
    replace_region,
    spend,
)

Steps = Iterator[tuple[Step, State]]


def generate_posting_steps(state: State, rules: Rules) -> Steps:
    """Generate every step of a POST that may come next."""
    left = state.left
    # A client without a key that asks again has asked for two answers.
    if left.posts and (rules.keyed or not state.calls):
        for index, region in enumerate(state.regions):
            if region.runs == UP and region.listens:
                call = Call((index,))
                yield Step("post", index), spend(state, "posts")._replace(calls=_sort([*state.calls, call]))
    for call in state.calls:
        here = call.path[-1]
        if state.regions[here].runs != UP or not state.regions[here].listens:
            continue
        if call.phase == DECIDE:
            yield from (_decide_keyed if rules.keyed else _decide)(state, rules, call)
        elif len(call.path) == 1:
            yield Step(f"told: {call.phase}", here), _replace_call(state, call, None)
    for call in state.calls:
        if len(call.path) > 1 and call.waits:
            yield from _answer(state, rules, call)


def end_calls(state: State, index: int) -> State:
    """Return the state after the death of a region's gateways: what came after them goes on, nobody waits for it, and
    the gateway before them sees a broken connection.
    """
    calls = list[Call]()
    for call in state.calls:
        if index not in call.path:
            calls.append(call)
            continue
        last = len(call.path) - 1 - call.path[::-1].index(index)
        first = call.path.index(index)
        if last < len(call.path) - 1 and call.phase == DECIDE:
            calls.append(call._replace(waits=False))
        if first and call.waits:
            calls.append(Call(call.path[:first], UNSURE))
    return state._replace(calls=_sort(calls))


def _decide_keyed(state: State, rules: Rules, call: Call) -> Steps:
    here, regions = call.path[-1], state.regions
    region, home = regions[here], regions[here].home
    if region.adoption == FINISHED and region.took:
        yield Step("join adopted", here), _replace_call(state, call, call._replace(phase=ACCEPTED))
        return
    is_used_up = len(call.path) > MAX_HOPS
    if home == here or (is_used_up and rules.flaw == "a key is taken where its hops end"):
        yield _accept(state, rules, call)
    elif is_used_up or home in call.tried:
        if rules.flaw == "a key goes elsewhere" or (
            rules.flaw == "an adopted home's keys are taken" and region.adoption == FINISHED
        ):
            yield _accept(state, rules, call)
        yield Step("refuse: region_away", here), _replace_call(state, call, call._replace(phase=REFUSED))
    else:
        yield from _send_on(state, call, home)


def _decide(state: State, rules: Rules, call: Call) -> Steps:
    here = call.path[-1]
    yield _accept(state, rules, call)
    if state.left.refusals:
        yield Step("refuse: no room", here), _replace_call(spend(state, "refusals"), call, call._replace(phase=REFUSED))
    if len(call.path) <= MAX_HOPS or rules.flaw == "hops are not counted":
        for target in range(len(state.regions)):
            if target != here and target not in call.tried:
                yield from _send_on(state, call, target)


def _accept(state: State, rules: Rules, call: Call) -> tuple[Step, State]:
    here = call.path[-1]
    accepted = state.regions[here].accepted
    joins = rules.keyed and accepted
    after = _replace_call(state, call, call._replace(phase=ACCEPTED))
    return Step("join" if joins else "accept", here), replace_region(after, here, accepted=accepted + (not joins))


def _send_on(state: State, call: Call, target: int) -> Steps:
    here, region = call.path[-1], state.regions[target]
    if not can_talk(state, here, target) or region.runs == DOWN or not region.listens:
        after = call._replace(tried=call.tried | {target})
        yield Step("no connection", here), _replace_call(state, call, after)
    if region.runs != DOWN and region.listens and (here, target) not in state.cuts:
        after = Call((*call.path, target), waits=call.waits)
        yield Step("send on", here), _replace_call(state, call, after)


def _answer(state: State, rules: Rules, call: Call) -> Steps:
    """Generate the answer of the last gateway to the one before it, and the end of that one's patience."""
    before, here = call.path[-2], call.path[-1]
    region, waiting = state.regions[here], state.regions[before]
    if waiting.runs != UP:
        return
    back = Call(call.path[:-1])
    can_answer = region.runs == UP and (here, before) not in state.cuts
    if can_answer and call.phase != DECIDE:
        answered = back._replace(phase=call.phase)
        if call.phase == REFUSED and not rules.keyed:
            answered = back._replace(tried=frozenset([here]))
        yield Step(f"answer: {call.phase}", here), _replace_call(state, call, answered)
    if not can_answer or state.left.slows:
        after = state if not can_answer else spend(state, "slows")
        unsure = back._replace(phase=UNSURE)
        if rules.flaw == "tries again after a possible acceptance":
            unsure = back._replace(tried=frozenset([here]))
        after = _replace_call(after, call, unsure)
        if call.phase == DECIDE:
            after = after._replace(calls=_sort([*after.calls, call._replace(waits=False)]))
        yield Step("wait no longer", before), after


def _replace_call(state: State, call: Call, after: Call | None) -> State:
    calls = list(state.calls)
    calls.remove(call)
    # Nobody waits for what such a gateway knows: the request is where it is.
    if after is not None and (after.waits or after.phase == DECIDE):
        calls.append(after)
    return state._replace(calls=_sort(calls))


def _sort(calls: list[Call]) -> tuple[Call, ...]:
    def key(call: Call) -> tuple[Any, ...]:
        return call.path, call.phase, sorted(call.tried), call.waits

    return tuple(sorted(calls, key=key))
