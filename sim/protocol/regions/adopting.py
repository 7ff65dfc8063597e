"""The steps of regions: they compute, copy, die, return and are adopted.

A peer adopts region 0 by an operator's word, in this order:

1. It writes the mark.
2. It asks region 0, and all other peers. If region 0 answers, or another peer has a mark, it takes its own away.
3. It publishes the open request under its id.
4. It writes that the list of adopted ids is final.

It gives region 0 back, by an operator's word, once region 0 has ended what was taken: mark and list are forgotten.

Region 0 returns in this order: its gateways answer peers; it asks each peer for the mark, until one has a final list,
or all have none; its workers settle, except what was adopted. It asks its peers while it lives, too.
"""

from sim.protocol.regions.posting import Steps
from sim.protocol.regions.state import (
    ASKED,
    DOWN,
    FINISHED,
    LEFT,
    MARKED,
    NO,
    PAUSED,
    PROBED,
    SECRET,
    TAKEN,
    UNMARKED,
    UP,
    WAIT,
    Rules,
    State,
    Step,
    can_talk,
    is_open,
    replace_region,
    spend,
)


def generate_region_steps(state: State, rules: Rules) -> Steps:
    """Generate every step of a region that may come next."""
    for index, region in enumerate(state.regions):
        yield from _compute(state, rules, index)
        if index in rules.copies:
            yield from _copy(state, rules, index)
            if region.runs == UP:
                yield from _adopt(state, rules, index)
    yield from _return(state, rules)


def _compute(state: State, rules: Rules, index: int) -> Steps:
    """Generate tokens that readers see, and the result. A late answer is an error without tokens."""
    region = state.regions[index]
    holds = TAKEN in region.heard or region.has_ended
    is_mine = (region.accepted and region.settles and not holds) or region.took
    if region.runs != UP or not is_mine or region.answers:
        return
    version = 0 if rules.is_function else index + 1
    goes_on = rules.is_function or not region.took or rules.flaw == "other tokens are computed"
    has_tokens = goes_on and not region.late
    seen = state.seen | {version} if has_tokens else state.seen
    if has_tokens and version not in state.seen:
        yield Step("token", index), state._replace(seen=seen)
    yield Step("result", index), replace_region(state._replace(seen=seen), index, answers=1)
    if state.left.aborts and not index and not region.aborted:
        yield Step("abort", index), replace_region(spend(state, "aborts"), index, aborted=True)


def _copy(state: State, rules: Rules, index: int) -> Steps:
    home, region = state.regions[0], state.regions[index]
    # The servers of a region serve copies while its own processes stand still.
    if DOWN in (region.runs, home.runs) or not can_talk(state, 0, index):
        return
    if home.accepted and not region.has_request:
        after = replace_region(state, index, has_request=True)
        if rules.flaw == "what is copied later is published" and region.adoption == FINISHED:
            after = replace_region(after, index, took=is_open(after.regions[index]))
        yield Step("copy request", index), after
    is_there = home.answers or (home.aborted and rules.flaw == "aborted results are copied")
    if is_there and not (region.has_result or region.has_skipped):
        forgets = rules.flaw == "a result before its request is forgotten" and not region.has_request
        yield Step("copy result", index), replace_region(state, index, has_result=not forgets, has_skipped=forgets)


def _adopt(state: State, rules: Rules, index: int) -> Steps:
    region, flaw = state.regions[index], rules.flaw
    answers = _answers_probe(state, index)
    is_new = region.adoption == UNMARKED or (
        region.adoption == FINISHED and is_open(region) and not region.took and flaw != "adopted once for all"
    )
    if is_new and state.left.words and not answers:
        adoption = {"the mark comes last": SECRET, "asks before the mark": ASKED}.get(flaw, MARKED)
        took = region.took or (adoption == SECRET and is_open(region))
        yield (
            Step("adopt", index),
            _note_lived(replace_region(spend(state, "words"), index, adoption=adoption, took=took), index, took=took),
        )
    elif (
        region.adoption == FINISHED and state.left.gives and (_has_ended(state, index) or flaw == "given back unasked")
    ):
        after = spend(state, "gives")
        yield Step("give back", index), replace_region(after, index, adoption=UNMARKED, has_given_back=region.took)
    elif region.adoption == SECRET:
        yield Step("mark at last", index), replace_region(state, index, adoption=FINISHED)
    elif region.adoption == ASKED:
        yield Step("mark", index), replace_region(state, index, adoption=PROBED)
    elif region.adoption == MARKED:
        yield from _probe(state, rules, index, answers=answers)
    elif region.adoption == PROBED:
        takes = is_open(region) and not (flaw == "open by times" and state.ahead)
        if takes and not region.took:
            yield Step("publish", index), _note_lived(replace_region(state, index, took=True), index, took=True)
        if not takes or region.took:
            yield Step("finish list", index), replace_region(state, index, adoption=FINISHED)


def _probe(state: State, rules: Rules, index: int, *, answers: bool) -> Steps:
    others = [other for other in range(1, len(state.regions)) if other != index]
    reached = [other for other in others if can_talk(state, index, other) and state.regions[other].runs == UP]
    if rules.flaw == "adopts without asking the others":
        others = reached = []
    marked = [other for other in reached if state.regions[other].adoption]
    if answers or marked:
        left = state.left._replace(words=state.left.words + 1)
        yield Step("withdraw", index), replace_region(state._replace(left=left), index, adoption=UNMARKED)
    elif reached == others:
        yield Step("probe", index), _note_lived(replace_region(state, index, adoption=PROBED), index)


def _answers_probe(state: State, index: int) -> bool:
    home = state.regions[0]
    return home.runs == UP and home.listens and can_talk(state, 0, index)


def _has_ended(state: State, index: int) -> bool:
    """Return whether region 0 says that it has ended what a region took over."""
    return _answers_probe(state, index) and state.regions[0].heard[index] in (TAKEN, LEFT)


def _note_lived(state: State, index: int, *, took: bool = False) -> State:
    """Note what docs/regions.md tells: the home lives, cut off or stopped; or it had answered, and that was not copied
    yet.
    """
    home, region = state.regions[0], state.regions[index]
    lives = home.runs == PAUSED or (home.runs == UP and not can_talk(state, 0, index))
    told = took and home.answers > 0 and not region.has_result and not region.has_skipped
    return state._replace(lived=state.lived or (lives and not home.answers), told=state.told or told)


def _return(state: State, rules: Rules) -> Steps:
    """Generate the steps of region 0 after it started, and its questions while it lives."""
    home, flaw = state.regions[0], rules.flaw
    if home.runs == DOWN and state.left.returns:
        kept = home.settles and flaw == "an old permission stays"
        kept = kept or (home.is_forced and flaw == "an operator's permission stays")
        after = replace_region(
            spend(state, "returns"), 0, runs=UP, listens=False, settles=kept, heard=("",) * rules.regions
        )
        yield Step("return"), after
    if home.runs != UP:
        return
    if not home.listens and (home.settles or flaw != "asks before it listens"):
        yield Step("listen"), replace_region(state, 0, listens=True)
    for peer in range(1, rules.regions):
        says = _say_adopted(state, rules, peer)
        can_ask = home.listens or flaw == "asks before it listens"
        if can_ask and state.regions[peer].runs == UP and can_talk(state, 0, peer) and says != home.heard[peer]:
            heard = (*home.heard[:peer], says, *home.heard[peer + 1 :])
            learns = says == TAKEN and not home.answers
            yield (
                Step(f"hear: {says}", peer),
                replace_region(state, 0, heard=heard, has_ended=home.has_ended or says == TAKEN)._replace(
                    lived=state.lived and not learns
                ),
            )
    if not home.settles and (home.listens or flaw == "asks before it listens"):
        heard = home.heard[1:]
        may = flaw == "does not ask" or (WAIT not in heard and (TAKEN in heard or LEFT in heard or "" not in heard))
        may = may or (flaw == "one answer is enough" and any(one not in ("", WAIT) for one in heard))
        if may:
            yield Step("settle again"), replace_region(state, 0, settles=True)
        elif state.left.forces:
            yield (
                Step("force"),
                replace_region(spend(state, "forces")._replace(lived=True), 0, settles=True, is_forced=True),
            )


def _say_adopted(state: State, rules: Rules, peer: int) -> str:
    region = state.regions[peer]
    if region.adoption in (UNMARKED, SECRET, ASKED):
        return NO
    if region.adoption != FINISHED and rules.flaw != "tells an unfinished list":
        return WAIT
    return TAKEN if region.took and not region.has_given_back else LEFT
