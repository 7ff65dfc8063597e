"""The scenarios of regions to explore: which mishaps happen, and how often. All of `QUICK` take seconds, each of `DEEP`
a minute.
"""

from typing import NamedTuple

from sim.protocol.regions.state import Budget, Rules, State, make_start_state


class Scenario(NamedTuple):
    """A start state, the mishaps that may happen, and the rules."""

    left: Budget
    rules: Rules = Rules()
    ahead: bool = False

    def make_start_state(self) -> State:
        """Return the state in which the scenario starts."""
        return make_start_state(self.left, self.rules, ahead=self.ahead)


NEAREST, THREE = Rules(keyed=False), Rules(regions=3)
FORCED = Budget(kills=2, returns=2, words=1, peer_kills=1, forces=1)
GIVEN = Budget(kills=2, returns=2, words=2, gives=1)
TWO_COPIES, OTHER_TOKENS = Rules(regions=3, copies=(1, 2)), Rules(is_function=False)
QUICK = {
    "nothing happens": Scenario(Budget()),
    "a key twice": Scenario(Budget(posts=2)),
    "a key twice, with a slow peer": Scenario(Budget(posts=2, slows=1)),
    "a key twice, a home that dies": Scenario(Budget(posts=2, kills=1, returns=1, words=1)),
    "a key twice, three regions, a cut": Scenario(Budget(posts=2, cuts=1, slows=1), THREE),
    "a key twice, unlike peers": Scenario(Budget(posts=2), Rules(homes=(1, 0))),
    "the nearest": Scenario(Budget(refusals=1), NEAREST),
    "the nearest of three, without room": Scenario(Budget(refusals=2), NEAREST._replace(regions=3)),
    "the nearest of three, with a slow peer": Scenario(Budget(refusals=1, slows=1), NEAREST._replace(regions=3)),
    "the nearest of three, cut off": Scenario(Budget(cuts=1, refusals=1), NEAREST._replace(regions=3)),
    "the nearest dies": Scenario(Budget(kills=1, returns=1, peer_kills=1), NEAREST),
    "a home that does not return": Scenario(Budget(kills=1, words=1)),
    "a home that does not return, with an aborted result": Scenario(Budget(kills=1, words=1, aborts=1)),
    "a home that does not return, and a peer that dies": Scenario(Budget(kills=1, words=1, peer_kills=1)),
    "a home that does not return, a client's clock ahead": Scenario(Budget(kills=1, words=1), ahead=True),
    "a home that returns": Scenario(Budget(kills=1, returns=1, words=1)),
    "a home that returns, with an aborted result": Scenario(Budget(kills=1, returns=1, words=1, aborts=1)),
    "a home that returns, cut off": Scenario(Budget(kills=1, returns=1, words=1, cuts=1)),
    "a home that returns, and a peer that dies": Scenario(Budget(kills=1, returns=1, words=1, peer_kills=1)),
    "a home that returns by force": Scenario(Budget(kills=1, returns=1, words=1, cuts=1, forces=1)),
    "a home that returns by force and dies again": Scenario(FORCED),
    "a home that is given back": Scenario(GIVEN),
    "a home that dies twice": Scenario(Budget(kills=2, returns=1, words=2)),
    "a home that dies twice and returns": Scenario(Budget(kills=2, returns=2, words=2)),
    "a home that is stopped for a while": Scenario(Budget(pauses=1, words=1)),
    "a home that is stopped and dies": Scenario(Budget(pauses=1, kills=1, returns=1, words=1)),
    "a home that is cut off": Scenario(Budget(cuts=1, words=1)),
    "a home that is cut off and dies": Scenario(Budget(cuts=1, kills=1, returns=1, words=1)),
    "a home that is cut off from both sides": Scenario(Budget(cuts=2, words=1)),
    "a home that returns, one of three cut off": Scenario(Budget(kills=1, returns=1, words=1, cuts=1), THREE),
    "two peers that adopt": Scenario(Budget(kills=1, words=2), TWO_COPIES),
    "the deadline passes": Scenario(Budget(kills=1, returns=1, words=1, lates=1)),
    "other tokens": Scenario(Budget(kills=1, returns=1, words=1), OTHER_TOKENS),
    "other tokens, cut off": Scenario(Budget(cuts=1, words=1, lates=1), OTHER_TOKENS),
}
DEEP = {
    "a home that returns, among three": Scenario(Budget(kills=1, returns=1, words=1, cuts=2), THREE),
    "two peers that adopt, cut off": Scenario(Budget(kills=1, returns=1, words=2, cuts=1), TWO_COPIES),
}

DEAD, DIES = Budget(kills=1, words=1), Budget(kills=1, returns=1, words=1)
FLAWS = {
    ("tries again after a possible acceptance", "accepted twice"): Scenario(Budget(slows=1), NEAREST),
    ("hops are not counted", "three hops"): Scenario(Budget(), NEAREST),
    ("a key goes elsewhere", "accepted twice"): Scenario(Budget(posts=2, cuts=1)),
    ("a key is taken where its hops end", "accepted twice"): Scenario(Budget(posts=2), Rules(homes=(1, 0))),
    ("an adopted home's keys are taken", "accepted twice"): Scenario(DIES._replace(posts=2)),
    ("a key's home moves", "accepted twice"): Scenario(Budget(posts=2, moves=1), THREE),
    ("aborted results are copied", "stuck"): Scenario(DEAD._replace(aborts=1)),
    ("open by times", "stuck"): Scenario(DEAD, ahead=True),
    ("a result before its request is forgotten", "two results"): Scenario(DEAD),
    ("adopted once for all", "stuck"): Scenario(Budget(kills=2, returns=1, words=2)),
    ("the mark comes last", "two results"): Scenario(DIES),
    ("asks before the mark", "two results"): Scenario(DIES),
    ("tells an unfinished list", "two results"): Scenario(DIES),
    ("what is copied later is published", "two results"): Scenario(DIES),
    ("adopts without asking the others", "two results"): Scenario(Budget(kills=1, words=2), TWO_COPIES),
    ("does not ask", "two results"): Scenario(DIES),
    ("asks before it listens", "two results"): Scenario(DIES),
    ("an old permission stays", "two results"): Scenario(DIES),
    ("given back unasked", "two results"): Scenario(GIVEN),
    ("an operator's permission stays", "two results"): Scenario(FORCED),
    ("one answer is enough", "two results"): Scenario(DIES._replace(cuts=1), THREE),
    ("all ids go to the adopter", "an accepted request is not found"): Scenario(DIES),
    ("other tokens are computed", "other tokens under one id"): Scenario(DEAD, OTHER_TOKENS),
}
"""Rules that can be left out, each with a fault that is found then, and the scenario that shows it."""
