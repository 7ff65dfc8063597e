"""Which region a new request goes to: the least seconds until a first token from there."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.regions import SMOKE, play_overflow
from penstock.bus.placement import Link
from penstock.ingest.errors import ApiError
from penstock.ingest.regions.choosing import (
    MEMORY_S,
    MIN_COVERAGE,
    NEAR_S,
    UNSEEN_S,
    RegionAsk,
    RegionChoice,
    RegionChooser,
    RegionView,
)
from penstock.ingest.regions.state import ModelState

OWN, TOKEN_S, NUM_TOKENS = "eu", 0.001, 4000
LINKS = tuple(Link(bytes([number]) * 16, (number + 1) * 1000) for number in range(4))
ASK = RegionAsk("demo", "interactive", NUM_TOKENS, LINKS)


def view(wait_s: float | None = 0.0, round_trip_s: float = 0.0, at_s: float = 0.0, **model: Any) -> RegionView:
    fields: dict[str, Any] = {
        "fingerprint": None, "prompt_token_s": TOKEN_S, "num_workers": 1, "coverage": 1.0,
        "wait_s": {"interactive": wait_s, "batch": wait_s},
    }  # fmt: skip
    return RegionView(ModelState(**fields | model), round_trip_s, at_s)


waits = st.one_of(st.none(), st.floats(0.0, 30.0))
views = st.builds(
    view,
    waits,
    st.floats(0.0, 0.5),
    coverage=st.floats(0.0, 1.0),
    prompt_token_s=st.one_of(st.none(), st.floats(1e-5, 1e-2)),
    num_workers=st.integers(1, 50),
)
fleets = st.dictionaries(st.sampled_from([OWN, "us", "asia", "africa"]), views)


def choose(fleet: Mapping[str, RegionView], ask: RegionAsk = ASK) -> RegionChoice:
    return RegionChooser(OWN).choose_region(ask, fleet, 0.0)


def is_known(one: RegionView) -> bool:
    return one.model.wait_s["interactive"] is not None and one.model.coverage >= MIN_COVERAGE


@given(fleets)
def test_the_least_cost_is_chosen_and_nothing_unknown(fleet: dict[str, RegionView]) -> None:
    found = choose(fleet)
    assert found.costs.keys() == {name for name, one in fleet.items() if is_known(one)}
    if not found.costs.keys() - {OWN}:
        assert (found.region, found.why) == (OWN, "only")
        return
    if OWN in fleet and OWN not in found.costs and fleet[OWN].model.coverage >= MIN_COVERAGE:
        assert (found.region, found.why) == (OWN, "nearest"), "nobody has measured anything here"
        return
    least = min(cost - NEAR_S * (name == OWN) for name, cost in found.costs.items())
    assert found.costs[found.region] - NEAR_S * (found.region == OWN) == least
    assert (found.why == "only") == (found.costs.keys() <= {OWN})


@given(fleets, st.randoms(use_true_random=False))
def test_the_order_of_regions_does_not_matter(fleet: dict[str, RegionView], draws: random.Random) -> None:
    shuffled = list(fleet.items())
    draws.shuffle(shuffled)
    assert choose(dict(shuffled)) == choose(fleet)


@given(fleets, st.floats(0.0, 30.0))
def test_a_longer_wait_attracts_nothing(fleet: dict[str, RegionView], more_s: float) -> None:
    before = choose(fleet).region
    for name, one in fleet.items():
        if name != before and is_known(one):
            later = view((one.model.wait_s["interactive"] or 0.0) + more_s, one.round_trip_s)
            model = one.model.model_copy(update={"wait_s": later.model.wait_s})
            assert choose(fleet | {name: one._replace(model=model)}).region == before


@given(fleets, st.frozensets(st.sampled_from([OWN, "us", "asia", "africa"])))
def test_a_request_goes_only_where_it_may(fleet: dict[str, RegionView], allowed: frozenset[str]) -> None:
    ask = ASK._replace(allowed=allowed)
    if OWN in allowed or any(is_known(one) for name, one in fleet.items() if name in allowed):
        assert choose(fleet, ask).region in allowed
    else:
        with pytest.raises(ApiError, match="may only go to") as refused:
            choose(fleet, ask)
        assert (refused.value.status, refused.value.code) == (503, "region_away")


def test_the_nearest_has_a_request_until_another_is_sooner_by_a_margin() -> None:
    away = view(0.0, 0.08)
    assert choose({OWN: view(NEAR_S), "us": away})[:2] == (OWN, "nearest")
    assert choose({OWN: view(NEAR_S + 0.09), "us": away})[:2] == ("us", "sooner")
    assert choose({OWN: view(NEAR_S + 0.09), "us": away, "asia": view(0.0, 0.05)}).region == "asia"
    assert choose({OWN: view(None), "us": away})[:2] == (OWN, "nearest"), "its workers serve: nothing was measured yet"
    assert choose({OWN: view(None, coverage=0.0), "us": view(9.0)}).region == "us", "no worker serves here"
    assert choose({OWN: view(None), "us": away}, ASK._replace(allowed=frozenset({"us"}))).region == "us"
    assert choose({OWN: view(None)})[:2] == (OWN, "only")


def test_a_chat_keeps_its_region_until_that_costs_more_than_its_prompt() -> None:
    prompt_s = NUM_TOKENS * TOKEN_S
    for there, here_s, chosen in [(prompt_s - 0.1, 0.0, "us"), (prompt_s + 0.1, 0.0, OWN), (30.0, 30.0, "us")]:
        chooser = RegionChooser(OWN)
        first = chooser.choose_region(ASK, {OWN: view(9.0), "us": view(0.0)}, 0.0)
        assert (first.region, first.why) == ("us", "sooner")
        fleet = {OWN: view(here_s, at_s=100.0), "us": view(there, at_s=100.0)}
        assert chooser.choose_region(ASK, fleet, 100.0).region == chosen, there
        assert chooser.choose_region(ASK._replace(links=()), fleet, 100.0).region == OWN, "another chat"
    chooser = RegionChooser(OWN)
    chooser.choose_region(ASK, {OWN: view(9.0), "us": view(0.0)}, 0.0)
    fleet = {OWN: view(at_s=MEMORY_S), "us": view(0.0, 0.1, at_s=MEMORY_S)}
    longer = ASK._replace(num_tokens=8000, links=(*LINKS, Link(b"next", 8000)))
    found = chooser.choose_region(longer, fleet, MEMORY_S)
    assert found[:2] == ("us", "prefix")
    assert found.costs == pytest.approx({OWN: 8.0, "us": 0.1 + 4.0}), "half of it is there"
    assert chooser.choose_region(longer, fleet, 2 * MEMORY_S + 1).region == OWN, "it has forgotten"


def test_what_was_sent_counts_until_the_region_tells_it_and_is_worked_on_meanwhile() -> None:
    chooser, ask = RegionChooser(OWN), RegionAsk("demo", "batch", 1000)

    def cost(now_s: float, told_s: float, priority_class: Any = "batch", **fields: Any) -> float:
        fleet = {OWN: view(at_s=told_s, **fields)}
        return chooser.choose_region(ask._replace(priority_class=priority_class, num_tokens=0), fleet, now_s).costs[OWN]

    for _ in range(3):
        chooser.choose_region(ask, {OWN: view()}, 0.0)
    assert cost(0.0, 0.0) == pytest.approx(3.0)
    assert cost(0.0, 0.0, num_workers=2) == pytest.approx(1.5), "two work on it"
    assert cost(0.0, 0.0, "interactive") == 0.0, "it goes first"
    assert cost(1.0, UNSEEN_S) == pytest.approx(2.0)
    assert cost(9.0, UNSEEN_S) == 0.0, "it is done"
    chooser.choose_region(ask, {OWN: view()}, 9.0)
    assert cost(9.0, 9.0, wait_s=0.5) == pytest.approx(1.5)
    assert cost(9.0, 9.1 + UNSEEN_S, wait_s=0.5) == 0.5, "the region tells it"
    chooser.choose_region(ask, {OWN: view()}, 20.0)
    chooser.forget_sent(OWN)
    assert cost(20.0, 20.0) == 0.0


def test_in_virtual_time_a_backlog_costs_requests_a_round_trip() -> None:
    """Gateways know of each other what the wire would tell them, as late as it would."""
    found = play_overflow(SMOKE, capacity=1.0)
    assert found["overflow_left_share"] == 1.0
    assert found["overflow_ttft_added_ms"] <= found["overflow_round_trip_ms"] + 50
