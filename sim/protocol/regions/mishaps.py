"""Everything that may go wrong with regions: they die, stand still or are cut off, and the deadline passes."""

from sim.protocol.regions.posting import Steps, end_calls
from sim.protocol.regions.state import DOWN, PAUSED, UP, Rules, State, Step, replace_region, spend


def generate_mishaps(state: State, rules: Rules) -> Steps:
    """Generate each mishap that may still happen, and its end."""
    left, last = state.left, len(state.regions) - 1
    for index, region in enumerate(state.regions):
        yield from _kill(state, index)
        if left.lates and not region.late:
            yield Step("late", index), replace_region(spend(state, "lates"), index, late=True)
        if left.moves and not region.home and rules.flaw == "a key's home moves":
            yield Step("another home", index), replace_region(spend(state, "moves"), index, home=last)
    if left.pauses and state.regions[0].runs == UP:
        yield Step("pause"), replace_region(spend(state, "pauses"), 0, runs=PAUSED)
    if state.regions[0].runs == PAUSED:
        yield Step("go on"), replace_region(state, 0, runs=UP)
    yield from _cut(state)


def _kill(state: State, index: int) -> Steps:
    region, budget = state.regions[index], "peer_kills" if index else "kills"
    if getattr(state.left, budget) and region.runs != DOWN:
        after = replace_region(end_calls(spend(state, budget), index), index, runs=DOWN)
        yield Step("kill", index), after._replace(lived=state.lived and (index > 0 or region.answers > 0))
    if index and region.runs == DOWN:
        yield Step("return", index), replace_region(state, index, runs=UP)


def _cut(state: State) -> Steps:
    """Generate cuts of one direction, and the end of those there are."""
    regions = range(len(state.regions))
    links = {(one, other) for one in regions for other in regions if one != other}
    for link in links - state.cuts if state.left.cuts else ():
        yield Step("cut", link[0]), spend(state, "cuts")._replace(cuts=state.cuts | {link})
    for link in state.cuts:
        yield Step("heal", link[0]), state._replace(cuts=state.cuts - {link})
