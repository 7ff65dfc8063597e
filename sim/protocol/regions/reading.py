"""Where a gateway finds an accepted request by its id: at the region that took it over, else at its home.

A request that nobody can look for now is away. None that was accepted is ever said not to exist.
"""

from sim.protocol.regions.posting import Steps
from sim.protocol.regions.state import ASKED, SECRET, TAKEN, UNMARKED, UP, Rules, State, Step, can_talk


def generate_reads(state: State, rules: Rules) -> Steps:
    """Generate a reading of region 0's request at each gateway."""
    if not state.regions[0].accepted:
        return
    for here, region in enumerate(state.regions):
        if region.runs == UP and region.listens:
            yield Step(f"read: {_find_request(state, rules, here)}", here), state._replace()


def _find_request(state: State, rules: Rules, here: int) -> str:
    home = state.regions[0]
    marked = [
        region
        for index, region in enumerate(state.regions)
        if region.adoption not in (UNMARKED, SECRET, ASKED) and region.runs == UP and _reaches(state, here, index)
    ]
    if any(region.took for region in marked):
        return "adopted"
    if marked and rules.flaw == "all ids go to the adopter":
        return "not found"
    knows = home.runs == UP and home.listens and _reaches(state, here, 0) and TAKEN not in home.heard
    return "home" if knows else "away"


def _reaches(state: State, here: int, there: int) -> bool:
    return here == there or can_talk(state, here, there)
