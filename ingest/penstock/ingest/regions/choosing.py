"""Chooses the region of a new request: the rule of placement, one level up. No I/O and no clock.

A region costs the seconds until a first token from there: the way there and back, what waits there, what this gateway
has sent there since the region told it, and the tokens of this prompt that the region does not have. The least is
chosen. So a chat stays where its beginning was computed, until that costs more than to compute it again elsewhere.

What is not known is not zero, so a peer that does not know how long a request waits there is never chosen. The own
region is, while its workers serve and have not measured anything: what is known of a peer says nothing about here.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from penstock.bus.placement import TOKEN_S, Link, PrefixMemory
from penstock.ingest.admission import FULL_WAIT_S
from penstock.ingest.errors import ApiError
from penstock.ingest.regions.state import BatchOffer, ModelState
from penstock.names import CLASSES, PriorityClass

Why = Literal["nearest", "sooner", "prefix", "only", "idle"]
"""Why a region was chosen: it is this one, and another saves too little; it has the first token sooner; it has the
beginning of the prompt; no other is known to be able to; it is idle, and a line of a batch may go anywhere."""
MEMORY_S = 600.0
"""For how long a region is taken to have what was sent to it: in pools, and in the tiers below."""
UNSEEN_S = 0.5
"""How old the count of messages may be in what a region tells: its gateway keeps the lag for so long."""
MAX_SENT = 10_000
"""Requests for one model that count as sent to one region; they are those of a few seconds."""
NEAR_S = 2.5
"""How much sooner another region must be than this one, unless it has more of the prompt: a queue is known from a
second or two ago, and counted as if nothing of its prompts was cached. In `benchmarks.regions`, at 80% and 90% of a
region's capacity, 1% of its requests leave with this margin, and 5% and 10% with 1.5 s."""
MIN_COVERAGE = 0.5
"""A model's figures that are about fewer of its workers count as unknown."""


class RegionAsk(NamedTuple):
    """What the choice of a region needs to know of a request."""

    model: str
    priority_class: PriorityClass
    num_tokens: int
    """Of its prompt, about."""
    links: tuple[Link, ...] = ()
    """The beginnings of its prompt, as `bus.placement.PromptChain` has them."""
    allowed: frozenset[str] | None = None
    """The regions that it may go to; None: all."""


class RegionChoice(NamedTuple):
    """The region that was chosen, and why."""

    region: str
    why: Why
    costs: Mapping[str, float]
    """By region that was considered: the seconds until a first token from there."""


class RegionView(NamedTuple):
    """What is known of one model in a region that is ready."""

    model: ModelState
    round_trip_s: float
    """0 of this gateway's own."""
    at_s: float
    """When the region told it, by the caller's clock."""
    batch: BatchOffer = BatchOffer()


class RegionChooser:
    """Chooses for one gateway, and remembers what it sent where. The caller gives the time of any steady clock."""

    def __init__(self, own: str) -> None:
        self._own, self._memory = own, PrefixMemory(MEMORY_S)
        self._sent = dict[str, dict[str, deque[tuple[float, PriorityClass, int]]]]()
        """By region, then by model: when what was sent, in tokens that the region has to compute."""

    def forget_sent(self, region: str) -> None:
        """Count nothing as sent to a region any more: another process answers there. It keeps its KV."""
        self._sent.pop(region, None)

    def choose_region(self, ask: RegionAsk, views: Mapping[str, RegionView], now_s: float) -> RegionChoice:
        """Choose one of `views`, and count the request as sent there. They are the regions that are ready and have the
        same model, the own one included.

        The own region is the last resort, if it is allowed. Raises `ApiError` 503 if it is not.
        """
        known, usual_s = _find_known(ask, views)
        if not known and ask.allowed is not None and self._own not in ask.allowed:
            names = ", ".join(sorted(ask.allowed))
            message = f"this request may only go to {names or 'no region'}, of which none is known to take requests now"
            raise ApiError(503, message, code="region_away", headers={"Retry-After": "1"})
        hits, length = self._memory.find_hits(ask.links, known, now_s), ask.links[-1].length if ask.links else 1
        uncached = {region: round(ask.num_tokens * (1 - hits.get(region, 0) / length)) for region in known}
        costs, costs_without = dict[str, float](), dict[str, float]()
        for region, view in known.items():
            token_s = view.model.prompt_token_s or usual_s
            before_s = view.round_trip_s + self._estimate_wait_s(region, view, ask, token_s, now_s)
            costs[region] = before_s + uncached[region] * token_s
            costs_without[region] = before_s + ask.num_tokens * token_s
        margin_s = 0.0 if hits.get(self._own, 0) < max(hits.values(), default=0) else NEAR_S
        is_measured = self._own in known or not _may_serve(self._own, ask, views)
        chosen = self._find_least(costs, margin_s) if is_measured else self._own
        if not costs.keys() - {self._own}:
            why: Why = "only"
        elif is_measured and chosen != self._find_least(costs_without, NEAR_S):
            why = "prefix"
        else:
            why = "nearest" if chosen == self._own else "sooner"
        self._note_sent(chosen, ask, uncached.get(chosen, ask.num_tokens), now_s)
        self._memory.note_sent(ask.links, chosen, {*views, chosen}, now_s)
        return RegionChoice(chosen, why, costs)

    def choose_idle(self, ask: RegionAsk, views: Mapping[str, RegionView], now_s: float) -> str | None:
        """Choose the cheapest of `views` that are idle and have room for batch work at this hour, and count the request
        as sent there. Return None if none is idle now, and the own region if no other comes into question.

        A token costs its seconds at the price of a worker's hour. Regions without a price come last. Of those that cost
        the same the nearest is chosen.
        """
        welcome = {region: view for region, view in views.items() if view.batch.is_welcome}
        if not (welcome.keys() if ask.allowed is None else welcome.keys() & ask.allowed) - {self._own}:
            return self._own
        known, usual_s = _find_known(ask, welcome)
        prices = dict[str, tuple[float, float]]()
        for region, view in known.items():
            token_s, price = view.model.prompt_token_s or usual_s, view.batch.worker_hour
            if self._estimate_wait_s(region, view, ask, token_s, now_s) < FULL_WAIT_S:
                prices[region] = math.inf if price is None else price * token_s, view.round_trip_s
        chosen = min(prices, key=prices.__getitem__, default=None)
        if chosen is not None:
            self._note_sent(chosen, ask, ask.num_tokens, now_s)
        return chosen

    def _note_sent(self, region: str, ask: RegionAsk, num_tokens: int, now_s: float) -> None:
        sent = self._sent.setdefault(region, {}).setdefault(ask.model, deque(maxlen=MAX_SENT))
        sent.append((now_s, ask.priority_class, num_tokens))

    def _estimate_wait_s(self, region: str, view: RegionView, ask: RegionAsk, token_s: float, now_s: float) -> float:
        """Return how long the request waits there, behind what the region has told and what was sent there since.

        What was sent is worked on meanwhile. What the region told stays, as others send as well.
        """
        told_s, sent = view.model.wait_s[ask.priority_class], self._sent.get(region, {}).get(ask.model, deque())
        assert told_s is not None
        while sent and sent[0][0] < view.at_s - UNSEEN_S:
            sent.popleft()
        ahead, behind_s, last_s = CLASSES[: CLASSES.index(ask.priority_class) + 1], 0.0, -math.inf
        for at_s, priority_class, num_tokens in sent:
            if priority_class in ahead:
                behind_s = max(0.0, behind_s - (at_s - last_s)) + num_tokens * token_s / max(1, view.model.num_workers)
                last_s = at_s
        return told_s + max(0.0, behind_s - (now_s - last_s))

    def _find_least(self, costs: Mapping[str, float], margin_s: float) -> str:
        """Return the region of least cost, the own one if others save no more than a margin; it is the last resort."""

        def rank(region: str) -> tuple[float, bool, str]:
            return costs[region] - (margin_s if region == self._own else 0.0), region != self._own, region

        return min(costs, key=rank, default=self._own)


def _find_known(ask: RegionAsk, views: Mapping[str, RegionView]) -> tuple[dict[str, RegionView], float]:
    """Return the regions that a request may go to and whose figures are known, and their usual seconds a token."""
    known = {
        region: view
        for region, view in views.items()
        if view.model.wait_s.get(ask.priority_class) is not None and _may_serve(region, ask, views)
    }
    told = [one.model.prompt_token_s for one in known.values() if one.model.prompt_token_s is not None]
    return known, sum(told) / len(told) if told else TOKEN_S


def _may_serve(region: str, ask: RegionAsk, views: Mapping[str, RegionView]) -> bool:
    """Return whether a request may go to a region, and enough of the workers there are known to serve."""
    is_allowed = ask.allowed is None or region in ask.allowed
    return is_allowed and region in views and views[region].model.coverage >= MIN_COVERAGE
