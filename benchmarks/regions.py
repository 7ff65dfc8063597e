"""Regions that help each other: which region requests go to, and what that brings.

python -m benchmarks.regions [--quick | --smoke] [--json FILE] [--only NAME…]

All but `run` is simulated: three regions of workers as in `benchmarks.placement`, without tiers, `ROUND_TRIP_S` apart
(`sim.regions`). The product's own rules choose region and worker, and see what gateways tell each other: once a second,
half a round trip late, from heartbeats that are up to a second old. Requests are chats of one product, with turns.

    near      one region has so much of the load that it carries alone (its goodput); its peers have half of that
    overflow  one region has a backlog of more than 5 s, so requests leave it: the time to their first tokens, beside
              that of the same requests where they came to the gateway of the region that computes them
    hours     the days of three regions of one worker begin 8 h apart: sines with 1 : 3 between trough and peak. That
              ratio is an assumption. In the week that Azure has published (AzureLLMInferenceDataset2024, of DynamoLLM,
              arXiv:2408.00741) the busiest hour of a weekday has twice the requests of the quietest in conversations,
              and ten times in coding, as read from the notebook's plots. A day is shortened: in a real one a peak, and
              so its queue, lasts longer, which is worse for a region alone
    run       two embedded regions of real processes (`benchmarks.regions_run`)
    adoption  a region dies, and its peer answers what is open: real servers (`benchmarks.regions_adoption`); not in a
              smoke run

    capacity                     requests a second that a region carries alone, at a constant rate
    near_share_{percent}         requests that stay, at so much of the capacity
    near_share                   the least of these
    overflow_ttft_added_ms       the 99th percentile of first tokens of requests that left, less that of the same
                                 requests at the other region's own gateway; `…_p50_ms` is that of medians
    overflow_round_trip_ms, overflow_left_share
    goodput_alone, goodput_together, goodput_together_vs_alone      requests a second of all three, on a day's mean, and
                                 the median of the seeds' ratios; `…_least` is the least of these
    run_near_share, run_overflow_ttft_added_ms      the same of the run, at medians; others with `run_` are beside them
"""

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from benchmarks.common import Arguments, run_benchmark
from benchmarks.placement import BLOCK_TOKENS, ITL_S, RATE_STEP, SPEC, estimate_rate, open_map
from benchmarks.regions_adoption import FULL as ADOPTION_FULL
from benchmarks.regions_adoption import QUICK as ADOPTION_QUICK
from benchmarks.regions_adoption import measure_adoption
from benchmarks.regions_run import play_run
from penstock.config.settings import SloSettings
from penstock.plan.goodput import MET_SHARE, Slo, Slos, compute_met_share, find_goodput
from penstock.plan.placing import PlacedRequest
from penstock.plan.simulator import Outcome
from penstock.plan.trace import compute_quantile
from sim.placement.traces import SHAPES, make_placed_request, make_requests
from sim.regions import RegionsSimulation

SHAPE = SHAPES["one_system_prompt"]
REGIONS = ("eu", "us", "asia")
ROUND_TRIP_S = 0.08
SWING = 0.5
"""A day's rate is its mean times 1 - SWING to 1 + SWING."""
SLOS: Slos = {"interactive": Slo(SHAPE.ttft_s, ITL_S)}
OWN_SPEC = replace(SPEC, slo=SloSettings(interactive_ttft_s=SHAPE.ttft_s))
LOADS, PEERS_LOAD = (0.5, 0.8, 0.9), 0.5
BACKLOG_TOKENS = 30_000
"""Tokens of a prompt of the backlog."""
WAIT_S = 5.0
Requests = Mapping[str, Sequence[PlacedRequest]]
"""By the region whose gateway they come to."""


@dataclass(frozen=True)
class Extent:
    """How much is played."""

    num_workers: int
    """Of each region."""
    length_s: float
    warm_s: float
    """Requests of so long do not count: the caches fill."""
    day_s: float
    day_workers: int
    """How many workers each region has in the days."""
    num_seeds: int
    num_processes: int
    loads: Sequence[float] = LOADS


CORES = len(os.sched_getaffinity(0))
FULL, QUICK = Extent(4, 300.0, 60.0, 1800.0, 1, 3, CORES), Extent(4, 100.0, 30.0, 300.0, 1, 1, CORES, LOADS[1:2])
SMOKE = Extent(1, 16.0, 4.0, 6.0, 1, 1, 1, LOADS[:1])


def draw_requests(region: str, rate: float, length_s: float, seed: int) -> list[PlacedRequest]:
    """Return a region's requests, whose chats are its own."""
    found = make_requests(SHAPE, rate, length_s, BLOCK_TOKENS, seed * len(REGIONS) + REGIONS.index(region))
    return [replace(one, id=f"{region}/{one.id}") for one in found]


def draw_day(region: str, rate: float, day_s: float, seed: int) -> list[PlacedRequest]:
    """Return the requests of a region's day whose mean rate this is: an even one whose hours are stretched."""
    hours_s = np.linspace(0.0, day_s, 1000)
    phase = 2 * np.pi * REGIONS.index(region) / len(REGIONS)
    gone = day_s / (2 * np.pi) * (np.cos(phase) - np.cos(2 * np.pi * hours_s / day_s + phase))
    even = draw_requests(region, rate, day_s, seed)
    at_s = np.interp([one.at_s for one in even], hours_s + SWING * gone, hours_s)
    return [replace(one, at_s=float(at)) for one, at in zip(even, at_s, strict=True)]


def play(requests: Requests, extent: Extent) -> tuple[list[Outcome], RegionsSimulation]:
    """Play the requests of all regions there are."""
    whole = sorted((one for mine in requests.values() for one in mine), key=lambda one: one.at_s)
    means = (statistics.fmean(one.prompt_tokens for one in whole), statistics.fmean(one.output_tokens for one in whole))
    workers = dict.fromkeys(requests, extent.num_workers)
    simulation = RegionsSimulation(workers, OWN_SPEC, ROUND_TRIP_S, means)
    return simulation.run(whole), simulation


def measure_met(requests: Requests, extent: Extent) -> float:
    """Return how many requests are in time, as a share. The round trip of those that leave is in their first token."""
    outcomes, _ = play(requests, extent)
    return compute_met_share((one.make_timing() for one in outcomes if one.request.at_s >= extent.warm_s), SLOS)


def search_goodput(make: Callable[[float], Requests], first: float, length_s: float, extent: Extent) -> float:
    """Return how many requests a second regions carry together, of what `make` draws at a rate for each.

    The search begins about `first`, and goes as far from it as needed.
    """

    @cache
    def play_rate(number: int) -> tuple[float, float]:
        requests = make(first * RATE_STEP**number)
        rate, share = sum(map(len, requests.values())) / length_s, measure_met(requests, extent)
        print(f"{len(requests)} regions, {rate:.2f} requests/s: {share:.3f} in time", flush=True)
        return rate, share

    low, high = -2, 2
    while play_rate(low)[1] < MET_SHARE:
        low, high = low - 4, low
    while play_rate(high)[1] >= MET_SHARE:
        low, high = high, high + 4
    return find_goodput(play_rate, low, high)


def find_capacity(extent: Extent) -> float:
    """Return the goodput of one region at a constant rate, the least of all seeds."""

    def make(rate: float, seed: int) -> Requests:
        return {REGIONS[0]: draw_requests(REGIONS[0], rate, extent.length_s, seed)}

    first = extent.num_workers * estimate_rate(SHAPE)
    seeds = range(extent.num_seeds)
    return min(search_goodput(partial(make, seed=one), first, extent.length_s, extent) for one in seeds)


def play_near(extent: Extent, capacity: float) -> dict[str, float]:
    """Play one region below its capacity, beside two that are half full."""
    figures = {"capacity": capacity}
    for load in extent.loads:
        chosen = Counter[tuple[str, str]]()
        for seed in range(extent.num_seeds):
            shares = dict.fromkeys(REGIONS, PEERS_LOAD) | {REGIONS[0]: load}
            made = {
                region: draw_requests(region, share * capacity, extent.length_s, seed)
                for region, share in shares.items()
            }
            _, played = play(made, extent)
            chosen.update(played.choices[one.id][:2] for one in made[REGIONS[0]] if one.at_s >= extent.warm_s)
        near = sum(count for (region, _), count in chosen.items() if region == REGIONS[0]) / chosen.total()
        print(f"near, {load:.0%} of {capacity:.2f} requests/s: {near:.3f} stay; {dict(chosen)}", flush=True)
        figures[f"near_share_{load * 100:.0f}"] = near
    return figures | {"near_share": min(value for name, value in figures.items() if name.startswith("near_share_"))}


def play_overflow(extent: Extent, capacity: float) -> dict[str, float]:
    """Play requests that come to a region with a backlog, and the same ones where they are computed."""
    spread = {"eu": draw_requests("eu", PEERS_LOAD * capacity, extent.length_s, seed=0), "us": [], "asia": []}
    num_long = extent.num_workers * math.ceil(extent.length_s / SPEC.prompt_seconds(BACKLOG_TOKENS)) * 2
    backlog = [_make_backlog(number) for number in range(num_long)]
    outcomes, played = play(spread | {"eu": [*backlog, *spread["eu"]]}, extent)
    left = {
        one.request.id: one
        for one in outcomes
        if one.request.at_s >= extent.warm_s
        and (choice := played.choices[one.request.id]).region != "eu"
        and choice.costs.get("eu", 0.0) >= WAIT_S
    }
    homes = dict[str, list[PlacedRequest]](eu=backlog, us=[], asia=[])
    for one in spread["eu"]:
        region = played.choices[one.id].region
        homes[region].append(replace(one, id=f"{region}/{one.id}"))
    direct = {one.request.id.partition("/")[2]: one for one in play(homes, extent)[0] if one.request.id.count("/") > 1}
    added = {
        share: 1000
        * (
            compute_quantile([one.ttft_s for one in left.values()], share)
            - compute_quantile([direct[name].ttft_s for name in left], share)
        )
        for share in (0.5, 0.99)
    }
    num_counted = sum(one.at_s >= extent.warm_s for one in spread["eu"])
    return {
        "overflow_left_share": len(left) / num_counted,
        "overflow_round_trip_ms": 1000 * ROUND_TRIP_S,
        "overflow_ttft_added_ms": added[0.99],
        "overflow_ttft_added_p50_ms": added[0.5],
    }


def _make_backlog(number: int) -> PlacedRequest:
    segments = [(f"backlog {number}", BACKLOG_TOKENS)]
    return make_placed_request(f"eu/b{number}", 0.0, segments, ("answer", 1), None, f"b{number}", BLOCK_TOKENS)


def search_day(regions: Sequence[str], seed: int, first: float, extent: Extent) -> float:
    """Return the goodput of regions that help each other, over a day."""

    def make(rate: float) -> Requests:
        return {region: draw_day(region, rate, extent.day_s, seed) for region in regions}

    return search_goodput(make, first, extent.day_s, replace(extent, num_workers=extent.day_workers, warm_s=0.0))


def play_hours(extent: Extent, capacity: float) -> dict[str, float]:
    """Search the goodput of three regions together, and of each alone."""
    carried = capacity * extent.day_workers / extent.num_workers
    sides = [(REGIONS, carried), *(((region,), carried / (1 + SWING / 2)) for region in REGIONS)]
    jobs = [(side, seed, first, extent) for seed in range(extent.num_seeds) for side, first in sides]
    with open_map(extent.num_processes) as run_jobs:
        found = list(run_jobs(search_day, *zip(*jobs, strict=True)))
    togethers, ratios = found[:: len(sides)], list[float]()
    for number, together in enumerate(togethers):
        begin = number * len(sides) + 1
        ratios.append(together / sum(found[begin : begin + len(REGIONS)]))
    return {
        "goodput_alone": (sum(found) - sum(togethers)) / extent.num_seeds,
        "goodput_together": statistics.fmean(togethers),
        "goodput_together_vs_alone": statistics.median(ratios),
        "goodput_together_vs_alone_least": min(ratios),
    }


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of this benchmark."""

    only: list[str]


def run(given: Options) -> dict[str, float]:
    """Play what is asked for."""
    extent, figures = given.choose_size(FULL, QUICK, SMOKE), dict[str, float]()
    find_once = cache(partial(find_capacity, extent))
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "near": lambda: play_near(extent, find_once()),
        "overflow": lambda: play_overflow(extent, find_once()),
        "hours": lambda: play_hours(extent, find_once()),
        "run": lambda: play_run(given, ROUND_TRIP_S),
    }
    if given.size != "smoke":
        parts["adoption"] = lambda: measure_adoption(given.choose_size(ADOPTION_FULL, ADOPTION_QUICK, ADOPTION_QUICK))
    for name, play_part in parts.items():
        if not given.only or name in given.only:
            figures |= play_part()
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run, Options, only={"nargs": "*", "default": []})
