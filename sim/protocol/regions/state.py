"""A state of the model of regions: the regions, one POST on its way, and the mishaps that may still happen.

Region 0 is the one that may die and be adopted. `has_request` and `has_result` of another region are its copy of what
region 0's topics say about the request; the copies of two topics lag each by itself.
"""

from typing import Any, NamedTuple

UP, PAUSED, DOWN = "up", "paused", "down"
NO, WAIT, TAKEN, LEFT = "no", "wait", "taken", "left"
"""What a peer says about region 0: not adopted; being adopted; adopted with the request; adopted without it."""
UNMARKED, MARKED, PROBED, FINISHED, SECRET, ASKED = range(6)
"""The adoption at a peer: the mark is written; nobody answered after it; the list of ids is final. The last two are
flaws: ids are published, or the home was asked, and no mark is written yet."""
DECIDE, ACCEPTED, REFUSED, UNSURE = "decide", "accepted", "refused", "unsure"
"""A POST in a gateway: it is to be decided; what the gateway knows after that."""
Link = tuple[int, int]


class Rules(NamedTuple):
    """The rules of an exploration, with one flaw or none."""

    regions: int = 2
    keyed: bool = True
    """Whether the POST has an Idempotency-Key, whose home is region 0. Else the nearest region with room takes it."""
    copies: tuple[int, ...] = (1,)
    """The regions to which the topics of region 0 are copied."""
    is_function: bool = True
    """Whether tokens are a function of the request, so that another region computes the same ones."""
    homes: tuple[int, ...] = ()
    """The key's home as each region has it, where their gateways know different peers. Else it is region 0 for all."""
    flaw: str = ""


class Budget(NamedTuple):
    """The number of times that each mishap may still happen. Stopped regions go on and cuts heal at no charge."""

    posts: int = 1
    kills: int = 0
    """Region 0 dies. Its disks stay."""
    returns: int = 0
    peer_kills: int = 0
    """Another region dies, and returns sooner or later."""
    pauses: int = 0
    """All processes of region 0 stop for a while."""
    cuts: int = 0
    """Nothing comes through from one region to another, in one direction."""
    words: int = 0
    """An operator has region 0 adopted."""
    aborts: int = 0
    """The transaction with region 0's result is aborted, and its records stay in the topic."""
    slows: int = 0
    """A gateway waits for a peer no longer, which takes the request all the same."""
    refusals: int = 0
    """A region has no room."""
    lates: int = 0
    """The deadline passes. Where a clock is off it may pass in one region alone."""
    forces: int = 0
    """An operator has a region begin that has not heard from its peers."""
    gives: int = 0
    """An operator has region 0 given back."""
    moves: int = 0
    """A gateway learns of another region before the others do, by which the key's home is another one."""


class Region(NamedTuple):
    """What one region knows and has done."""

    runs: str = UP
    accepted: int = 0
    """How many requests of the POST its topic has."""
    answers: int = 0
    aborted: bool = False
    has_request: bool = False
    has_result: bool = False
    has_skipped: bool = False
    """A flaw: the copied result was read before its request, and forgotten."""
    adoption: int = UNMARKED
    took: bool = False
    """Whether the request was published here under its own id."""
    listens: bool = True
    """Whether it answers its peers."""
    settles: bool = True
    has_ended: bool = False
    """Whether it has ended the request in its record, as another region took it."""
    has_given_back: bool = False
    """Whether it has forgotten that it took the request over."""
    is_forced: bool = False
    """Whether an operator had it begin, once."""
    heard: tuple[str, ...] = ()
    """What each region said about region 0 since its processes started; empty before it said anything."""
    late: bool = False
    home: int = 0
    """The home of the key, as its gateways know the regions."""


class Call(NamedTuple):
    """A POST on its way: the gateways that it came through, and what the last one knows."""

    path: tuple[int, ...]
    phase: str = DECIDE
    tried: frozenset[int] = frozenset()
    """Regions that certainly did not accept it, as the last gateway knows."""
    waits: bool = True
    """Whether the gateway before, or the client, waits for the answer."""


class State(NamedTuple):
    """The whole state."""

    regions: tuple[Region, ...]
    left: Budget
    calls: tuple[Call, ...] = ()
    cuts: frozenset[Link] = frozenset()
    ahead: bool = False
    """Whether the client's clock is 30 s ahead, by which the request seems to be newer than all results."""
    seen: frozenset[int] = frozenset()
    """Versions of the request's tokens that readers may have seen. 0: what every region computes."""
    lived: bool = False
    """Region 0 was adopted while it lived, cut off or stopped, or began by an operator's word, and has not learned yet
    what was adopted."""
    told: bool = False
    """A second result is one of those that docs/regions.md tells about."""


class Step(NamedTuple):
    """A transition: its kind, and its region."""

    kind: str
    region: int = 0


def make_start_state(left: Budget, rules: Rules, *, ahead: bool = False) -> State:
    """Return the first state: all regions serve, and nothing was asked."""
    count = rules.regions
    homes = rules.homes or (0,) * count
    return State(tuple([Region(heard=(NO,) * count, home=home) for home in homes]), left, ahead=ahead)


def replace_region(state: State, index: int, **fields: Any) -> State:
    """Return the state with fields of one region replaced."""
    regions = state.regions
    return state._replace(regions=(*regions[:index], regions[index]._replace(**fields), *regions[index + 1 :]))


def spend(state: State, mishap: str) -> State:
    """Return the state after one of the mishaps of this name."""
    return state._replace(left=state.left._replace(**{mishap: getattr(state.left, mishap) - 1}))


def can_talk(state: State, one: int, other: int) -> bool:
    """Return whether messages between two regions come through, in both directions."""
    return not state.cuts & {(one, other), (other, one)}


def is_open(region: Region) -> bool:
    """Return whether the copy in a region has the request and no result of it."""
    return region.has_request and not region.has_result


def find_home(state: State) -> int | None:
    """Return the region that accepted the request, or None."""
    return next((index for index, region in enumerate(state.regions) if region.accepted), None)
