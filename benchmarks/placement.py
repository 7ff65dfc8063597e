"""Rules of placement against each other: which worker a request should go to.

python -m benchmarks.placement [--quick | --smoke] [--json FILE] [--only NAME…] [--file TRACE] [--workers N]

Workers around the engine's real scheduler in virtual time, of kind `auto`, and two placers that do not talk. Steps cost
what an H200 was measured to take for 0.6B weights in bfloat16 (docs/figures/gpu.json); the pool has room for 500,000
tokens; below it are memory and a disk that the two workers of a host share, and a Redis for all. Goodput is
DistServe's: the highest rate at which 90% of the requests have their first token in time, and their tokens in time on
the mean.

    goodput_{trace}_{rule}          requests a second
    goodput_vs_hash_{trace}_{rule}  that to the hash's; without a rule it is the product's
    goodput_vs_best_{trace}_{rule}  that to the best of all rules
    hit_share_…                     prompt tokens found in the worker's own pool; this and the rest at hash's goodput
    load_max_over_mean_…            seconds in steps of the busiest worker to the mean
    ttft_p50_s_…, ttft_p99_s_…      time to the first token
    coarse_error_…                  by what share the coarse model is off the simulation of 16 workers without tiers, on
                                    the mean over traces and loads (of the hit share: the difference)
    coarse_error_max_…              the largest of these
    coarse_1000_workers_hour_s      seconds of one core in which it plays an hour of 1,000 workers with a request a
                                    second for each; smaller runs play less of it, and the figure is scaled

`--only` names traces and rules, or `coarse`. `--file` plays a recorded trace at the rate that it has: no goodput then,
but the share that is in time by the settings `PENSTOCK_SLO_…`. `penstock topics record` makes one of a pipeline's
topics.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import Arguments, run_benchmark, save_plot
from penstock.config.settings import SloSettings, load_settings
from penstock.engine.scheduling.cost import StepCost
from penstock.plan.coarse import CoarseSimulation
from penstock.plan.goodput import Slo, Slos, compute_met_share, find_goodput, read_slos
from penstock.plan.placing import PlacedRequest, Tier, WorkerSpec
from penstock.plan.simulator import Simulation
from penstock.plan.trace import compute_quantile
from sim.placement.rules import RULES, compute_imbalance
from sim.placement.traces import SHAPES, Shape, draw_load, list_requests, make_requests, read_requests

BLOCK_TOKENS, POOL_TOKENS = 128, 500_000
TOKEN_BYTES = 114_688
"""KV of a token of Qwen3-0.6B in bfloat16."""
WORKERS_OF_HOST = 2
TIERS = (("shared", 5e9, 0.001, 600_000), ("disk", 2e9, 0.002, 8_000_000), ("redis", 1e9, 0.005, 20_000_000))
"""The tiers below a pool as a worker has them: bytes a second, seconds of a look-up, and tokens. Workers of one host
share the first two, all the last."""
COST = StepCost(fixed_s=0.0267, row_s=0.00094, context_s=2.35e-9, chunk_s=0.0, token_s=9.6e-5)
SPEC = WorkerSpec(COST, POOL_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS, max_batch=64, max_step_tokens=1024)
ITL_S = 0.2
"""How long a token may take, on the mean of an answer."""
NUM_PLACERS = 2
OURS = "ours"
RATE_STEP = 1.08
"""Goodput is looked for between rates that differ by this factor, and interpolated there."""
COARSE = "coarse"
COARSE_LOADS = (0.7, 1.1)
"""Requests a second of the traces on which the coarse model is compared, to those that the workers carry about."""
COARSE_TRACE, COARSE_RATE = "one_system_prompt", 1.0
"""What many workers play, and how many requests a second for each."""
DETAILS = ("hit_share", "load_max_over_mean", "ttft_p50_s", "ttft_p99_s")


@dataclass(frozen=True)
class Extent:
    """How much is played."""

    num_workers: int
    length_s: float
    warm_s: float
    """Requests of so long do not count: the caches fill."""
    num_rates: int
    """How many rates goodput may lie between, half of them above what is estimated."""
    coarse_s: float
    """Of the traces on which the coarse model is compared."""
    coarse_traces: Sequence[str]
    coarse_workers: int
    many_workers: int
    many_workers_s: float
    num_processes: int = len(os.sched_getaffinity(0))


FULL = Extent(4, 300.0, 100.0, 32, 300.0, [name for name in SHAPES if name != "adversary"], 16, 1000, 3600.0)
QUICK = Extent(4, 90.0, 30.0, 16, 10.0, ["skewed", "mooncake_conversation"], 16, 1000, 60.0)
SMOKE = Extent(2, 6.0, 2.0, 2, 2.0, ["skewed"], 2, 20, 4.0, 1)


@dataclass(frozen=True)
class Played:
    """What became of one trace at one rate under one rule."""

    rate: float
    met_share: float
    hit_share: float
    load_max_over_mean: float
    ttft_p50_s: float
    ttft_p99_s: float


def make_tiers() -> list[Tier]:
    """Return empty tiers."""
    return [
        Tier(
            bytes_per_s, fixed_s, TOKEN_BYTES * BLOCK_TOKENS, tokens // BLOCK_TOKENS,
            0 if name == "redis" else WORKERS_OF_HOST,
        )
        for name, bytes_per_s, fixed_s, tokens in TIERS
    ]  # fmt: skip


def play_requests(rule: str, requests: Sequence[PlacedRequest], num_workers: int, slos: Slos, warm_s: float) -> Played:
    """Play requests under a rule, with schedulers that know how long a first token may take."""
    spec = replace(SPEC, slo=SloSettings(interactive_ttft_s=slos["interactive"].ttft_s))
    simulation = Simulation({"auto": (num_workers, spec)}, [RULES[rule]() for _ in range(NUM_PLACERS)], make_tiers())
    counted = [one for one in simulation.run(requests) if one.request.at_s >= warm_s]
    firsts = [one.ttft_s for one in counted]
    num_tokens = sum(one.request.prompt_tokens for one in counted)
    return Played(
        rate=len(counted) / (requests[-1].at_s - warm_s),
        met_share=compute_met_share((one.make_timing() for one in counted), slos),
        hit_share=sum(one.pool_tokens for one in counted) / num_tokens,
        load_max_over_mean=compute_imbalance(simulation.readers),
        ttft_p50_s=compute_quantile(firsts, 0.5),
        ttft_p99_s=compute_quantile(firsts, 0.99),
    )


def estimate_rate(shape: Shape) -> float:
    """Return how many requests a second a worker carries about, if it finds nothing."""
    sample = make_requests(shape, 1.0, 300.0, BLOCK_TOKENS, seed=1)
    seconds = [SPEC.prompt_seconds(one.prompt_tokens) + one.output_tokens * 2 * COST.row_s for one in sample]
    return len(seconds) / sum(seconds)


class Search:
    """The rates at which one trace was played under one rule. Rate number 0 is what the workers carry about."""

    def __init__(self, trace: str, rule: str, extent: Extent) -> None:
        self.trace, self.rule, self._extent = trace, rule, extent
        self.played: dict[int, Played] = {}
        self.goodput = 0.0
        self._first_rate = extent.num_workers * estimate_rate(SHAPES[trace])

    def play_rate(self, number: int) -> Played:
        """Play the trace at the rate of that number, once."""
        if number not in self.played:
            shape, extent, rate = SHAPES[self.trace], self._extent, self._first_rate * RATE_STEP**number
            requests = make_requests(shape, rate, extent.length_s, BLOCK_TOKENS)
            slos: Slos = {"interactive": Slo(shape.ttft_s, ITL_S)}
            self.played[number] = play_requests(self.rule, requests, extent.num_workers, slos, extent.warm_s)
        return self.played[number]

    def find_goodput(self) -> "Search":
        """Find the goodput, and return the search itself."""

        def play_number(number: int) -> tuple[float, float]:
            played = self.play_rate(number)
            return played.rate, played.met_share

        high = self._extent.num_rates // 2
        self.goodput = find_goodput(play_number, -high, high)
        return self

    def play_near(self, rate: float) -> Played:
        """Play the trace at the rate that is nearest to this one."""
        return self.play_rate(round(math.log(rate / self._first_rate, RATE_STEP)))


@contextmanager
def open_map(num_processes: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield what calls a function for each job, in so many processes."""
    if num_processes == 1:
        yield map
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield pool.map


def compare_rules(traces: Sequence[str], rules: Sequence[str], extent: Extent) -> tuple[list[Search], dict[str, float]]:
    """Return the searches, and the figures."""
    jobs = [Search(trace, rule, extent) for trace in traces for rule in rules]
    with open_map(extent.num_processes) as run:
        found: list[Search] = list(run(Search.find_goodput, jobs))
        hash_goodput = {one.trace: one.goodput for one in found if one.rule == "hash"}
        details: list[Played] = list(run(Search.play_near, found, [hash_goodput[one.trace] for one in found]))
    best = {trace: max(one.goodput for one in found if one.trace == trace) for trace in traces}
    figures = {}
    for one, played in zip(found, details, strict=True):
        name = f"{one.trace}_{one.rule}"
        figures[f"goodput_{name}"] = one.goodput
        for told in [name, one.trace] if one.rule == OURS else [name]:
            figures[f"goodput_vs_hash_{told}"] = one.goodput / hash_goodput[one.trace]
            figures[f"goodput_vs_best_{told}"] = one.goodput / best[one.trace]
        figures |= {f"{detail}_{name}": getattr(played, detail) for detail in DETAILS}
    return found, figures


def draw_plot(found: Sequence[Search]) -> None:
    """Draw the 99th percentile of the time to the first token by load, a line for each rule."""
    traces = list(dict.fromkeys(one.trace for one in found))
    figure = Figure(figsize=(11, 2.6 * -(-len(traces) // 2)))
    axes = figure.subplots(-(-len(traces) // 2), 2, squeeze=False).flat
    for axis, trace in zip(axes, traces, strict=False):
        for one in (one for one in found if one.trace == trace):
            points = [one.played[number] for number in sorted(one.played)]
            axis.plot([at.rate for at in points], [at.ttft_p99_s for at in points], marker=".", label=one.rule)
        axis.set(title=trace, yscale="log", xlabel="requests/s", ylabel="first token, p99, s")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    save_plot(figure, "placement", "svg")


def play_file(file: Path, rules: Sequence[str], extent: Extent) -> dict[str, float]:
    """Play a recorded trace under each rule; return the figures."""
    requests, slos = read_requests(file, BLOCK_TOKENS), read_slos(load_settings(SloSettings))
    figures = dict[str, float]()
    for rule in rules:
        played = play_requests(rule, requests, extent.num_workers, slos, extent.warm_s)
        figures |= {f"{detail}_recorded_{rule}": getattr(played, detail) for detail in ("met_share", *DETAILS)}
    return figures


def compare_coarse(extent: Extent, trace: str, load: float) -> dict[str, float]:
    """Return by what share the coarse model differs from the simulation, on the same requests."""
    requests = draw_load(
        SHAPES[trace], load * extent.coarse_workers * estimate_rate(SHAPES[trace]), extent.coarse_s, seed=1
    )
    coarse = CoarseSimulation(extent.coarse_workers, SPEC, requests).run()
    rules = [RULES[OURS]() for _ in range(NUM_PLACERS)]
    real = Simulation({"auto": (extent.coarse_workers, SPEC)}, rules).run(list_requests(requests, BLOCK_TOKENS))
    pairs = {
        "ttft": (coarse.ttft_s.tolist(), [one.ttft_s for one in real]),
        "itl": (coarse.itl_s.tolist(), [one.itl_s for one in real]),
    }
    found = {
        f"{name}_p{q}": (compute_quantile(one, q / 100), compute_quantile(other, q / 100))
        for name, (one, other) in pairs.items()
        for q in (50, 99)
    }
    found["tokens_s"] = (1 / float(coarse.end_s.max()), 1 / max(one.end_s for one in real))
    num_tokens = int(requests.prompt_tokens.sum())
    hits = int(coarse.pool_tokens.sum()) / num_tokens, sum(one.pool_tokens for one in real) / num_tokens
    shown = (found | {"hit_share": hits}).items()
    told = ", ".join(f"{name} {one:.4g} ({other:.4g})" for name, (one, other) in shown)
    print(f"coarse (simulated), {trace} at {load:g}, {len(real):,} requests: {told}", flush=True)
    return {name: abs(one / other - 1) for name, (one, other) in found.items()} | {"hit_share": abs(hits[0] - hits[1])}


def measure_coarse(extent: Extent) -> dict[str, float]:
    """Return how far the coarse model is off, and how long it plays many workers."""
    jobs = [(extent, trace, load) for trace in extent.coarse_traces for load in COARSE_LOADS]
    with open_map(extent.num_processes) as run:
        errors: list[dict[str, float]] = list(run(compare_coarse, *zip(*jobs, strict=True)))
    figures = {f"coarse_error_{name}": statistics.fmean(one[name] for one in errors) for name in errors[0]}
    figures |= {f"coarse_error_max_{name}": max(one[name] for one in errors) for name in errors[0]}
    num_workers, length_s = extent.many_workers, extent.many_workers_s
    requests = draw_load(SHAPES[COARSE_TRACE], num_workers * COARSE_RATE, length_s)
    begun_s = time.process_time()
    coarse = CoarseSimulation(num_workers, SPEC, requests).run()
    taken_s = time.process_time() - begun_s
    ttft, itl = (compute_quantile(one.tolist(), 0.99) for one in (coarse.ttft_s, coarse.itl_s))
    hits, tokens = coarse.pool_tokens.sum() / requests.prompt_tokens.sum(), requests.output_tokens.sum()
    print(
        f"{num_workers:,} workers, {len(requests.at_s):,} requests in {length_s:g} s: played in {taken_s:.1f} s of one "
        f"core; p99 {ttft:.2f} s to the first token, {itl:.3f} s between tokens; {hits:.0%} of the prompts found, "
        f"{tokens / coarse.end_s.max():,.0f} tokens/s"
    )
    return figures | {"coarse_1000_workers_hour_s": taken_s * 3600.0 / length_s}


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; the traces and rules to play, a trace in a file, and the number of workers."""

    only: Sequence[str] = ()
    file: Path | None = None
    workers: int | None = None


def run(given: Options) -> dict[str, float]:
    """Play and draw; return the figures."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    extent = replace(extent, num_workers=given.workers or extent.num_workers)
    rules = [rule for rule in RULES if rule in {"hash", *given.only} or not set(given.only) & set(RULES)]
    if given.file is not None:
        return play_file(given.file, rules, extent)
    if COARSE in given.only:
        return measure_coarse(extent)
    found, figures = compare_rules([trace for trace in SHAPES if trace in given.only] or list(SHAPES), rules, extent)
    if given.is_full:
        draw_plot(found)
    return figures | (measure_coarse(extent) if not given.only else {})


if __name__ == "__main__":
    run_benchmark(
        __doc__, run, Options,
        only={"nargs": "+", "default": [], "choices": [*SHAPES, *RULES, COARSE], "help": "these traces and rules"},
        file={"type": Path, "help": "play this recorded trace instead"},
        workers={"type": int, "help": "how many workers there are"},
    )  # fmt: skip
