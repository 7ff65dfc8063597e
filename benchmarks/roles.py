"""Workers that follow the load: the balance of `auto` workers, and the controller of `penstock autoscale`.

python -m benchmarks.roles [--quick | --smoke] [--json FILE] [--only NAME…]

Real ones: processes on Redis Streams, whose engine sleeps what a step costs (`benchmarks.roles_run`). A full run takes
an hour; a quick one leaves out `turning`, `growing` and `constant`.

    turning   the demand turns from 1 : 4 to 4 : 1 (a worker's time for prompts to that for answers) and back. Four
              `auto` workers against one, two and three prefill workers with as many decode workers as are left
    growing   1 : 6 : 1 in phases of 30 minutes, ten times faster with all times of the controller divided by ten:
              `penstock up --auto 1..6` follows it
    fewer     8 workers become one under load
    zero      the first token of a pipeline without workers, beside the start of one with packed weights: the demo model

    tokens_s_vs_best_split_{1_4,4_1}    tokens a second at full load to those of the best split of that phase
    tokens_s_vs_best_split_full_load    the same over 1 : 4, 4 : 1 and 1 : 4, with one split for all
    tokens_s_vs_best_split_whole        over a trace with these phases, at the load at which in the simulator the best
                                        split loses a fifth of its SLO; `…_in_time_tokens`: those of requests in time
    in_time_{auto,1_3,2_2,3_1}          requests in time of that trace
    slo_attainment, worker_seconds_vs_oracle, prediction_error_p99_run, reversals_5min
    broken_8_to_1, begun_again_8_to_1
    zero_to_first_token_s, packed_start_s

Simulated ones: workers as in `benchmarks.placement`, and the product's controller, which looks every five seconds. One
worker carries the least of the load. An oracle knows the trace, decides by the same formulas, and pays the same starts
and drains. A worker is paid from the moment its start is asked for.

    phases    1 : 6 : 1 in phases of 30 minutes, where a start takes 0.5 to 300 s; 30 s with other seeds and loads too
    constant  constant loads, without and with 5% of noise
    dynamo    a burst that one worker cannot carry (dynamo#10528): arrivals go from 1 to 8 and back in 15 minutes, and
              one worker is full at 4.5

    slo_attainment_start_{s}, worker_seconds_vs_oracle_start_{s}   requests in time, and what was paid to the oracle's
    slo_attainment_{load}, worker_seconds_vs_oracle_{load}         the same of other seeds and loads
    reversals_5min_constant, reversals_5min_noise                  how often numbers turn within five minutes, at most
    prediction_error_p99                of the time to first token at constant loads, on the mean of five minutes each
    slo_attainment_dynamo_10528
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks import roles_run
from benchmarks.common import Arguments, run_benchmark
from benchmarks.placement import SPEC
from penstock.autoscale.controller import Bounds
from penstock.autoscale.sizing import Targets
from penstock.plan.simulator import Outcome
from sim.growing import (
    GrowingSimulation,
    Lengths,
    PhasedLoad,
    compare_predictions,
    count_turns,
    find_unit_rate,
)

TARGETS, ITL_S = Targets(ttft_s=4.0, gap_s=0.05), 0.2
SHAPE = (1, 6, 1)
UNIT_BUSY = 0.7
"""How busy the least load keeps one worker."""
STARTS_S = (0.5, 5.0, 30.0, 120.0, 300.0)
LENGTHS = Lengths(prompt=(1450, 0.8), answer=(70, 0.5))
LOAD = PhasedLoad(SPEC, TARGETS, LENGTHS, find_unit_rate(SPEC, TARGETS, LENGTHS, UNIT_BUSY), SHAPE, 1800.0)
OTHERS = {
    "seed_11": (LOAD, 11),
    "seed_12": (LOAD, 12),
    "shape_2_5_3_6_1": (replace(LOAD, parts=(2, 5, 3, 6, 1), phase_s=900.0), 13),
    "long_answers": (replace(LOAD, lengths=(lengths := Lengths(prompt=(300, 0.8), answer=(500, 0.5))),
                             unit_rate=find_unit_rate(SPEC, TARGETS, lengths, UNIT_BUSY)), 14),
}  # fmt: skip
"""Loads on which the controller was not tuned, and their seeds."""
OTHERS_START_S = 30.0
WINDOW_S = 300.0
NOISE, NOISE_S = 0.05, 30.0
"""By how much a rate differs at most, and for how long by the same."""


def measure_share(outcomes: Sequence[Outcome]) -> float:
    """Return how many requests were in time, as a share."""
    return sum(one.ttft_s <= TARGETS.ttft_s and one.itl_s <= ITL_S for one in outcomes) / len(outcomes)


def play_load(name: str, load: PhasedLoad, start_s: float, seed: int) -> dict[str, float]:
    """Play a load with the controller and with the oracle."""
    bounds, trace = Bounds(least=1, most=6), load.make_trace(seed)
    found = GrowingSimulation(load.spec, TARGETS, bounds, start_s=start_s).play_requests(trace, load.seconds)
    oracle = load.make_oracle(start_s)
    best = GrowingSimulation(load.spec, TARGETS, bounds, start_s=start_s, oracle=oracle).play_requests(
        trace, load.seconds
    )
    share, ratio = measure_share(found.outcomes), found.worker_seconds / best.worker_seconds
    print(
        f"{name}: {share:.3f} in time, {ratio:.3f} of the oracle's seconds (the oracle: "
        f"{measure_share(best.outcomes):.3f} in time, {load.count_needed()}); "
        + ", ".join(f"{number} at {at_s:.0f} s" for at_s, number in found.numbers),
        flush=True,
    )
    return {f"slo_attainment_{name}": share, f"worker_seconds_vs_oracle_{name}": ratio}


def play_phases(load: PhasedLoad, starts_s: Sequence[float], others: Iterable[str]) -> dict[str, float]:
    """Play 1 : 6 : 1 with each start, and other loads with one of them."""
    figures = dict[str, float]()
    for start_s in starts_s:
        figures |= play_load(f"start_{start_s:g}", load, start_s, seed=3)
    for name in others:
        figures |= play_load(name, OTHERS[name][0], OTHERS_START_S, OTHERS[name][1])
    return figures


def play_constant(seconds: float, parts: Sequence[float]) -> dict[str, float]:
    """Play constant loads, which need no change once they are known."""
    most, errors = {0.0: 0, NOISE: 0}, list[float]()
    for part in parts:
        rate = find_unit_rate(SPEC, TARGETS, LENGTHS, part)
        for noise in (0.0, NOISE):
            draws = random.Random(part)
            rates = [rate * (1 + draws.uniform(-noise, noise)) for _ in range(math.ceil(seconds / NOISE_S))]
            trace = LENGTHS.make_trace(
                lambda at_s, rates=rates: rates[int(at_s / NOISE_S)],  # type: ignore[misc]
                rate * (1 + noise), seconds, seed=5,
            )  # fmt: skip
            played = GrowingSimulation(SPEC, TARGETS, Bounds(least=1), start_s=5.0).play_requests(trace, seconds)
            seen = [(one.request.at_s, one.ttft_s) for one in played.outcomes]
            told = [(one.at_s, one.predicted_p99_s) for one in played.decisions]
            turns, found = count_turns(played.numbers, WINDOW_S), compare_predictions(seen, told, WINDOW_S)
            most[noise], errors = max(most[noise], turns), [*errors, *found]
            error = statistics.fmean(found) if found else math.nan
            print(
                f"constant {part:g}, noise {noise:g}: {turns} turns in 5 minutes at most, {len(played.numbers) - 1} "
                f"changes, {measure_share(played.outcomes):.3f} in time, prediction off by {error:.2f}",
                flush=True,
            )
    return {
        "reversals_5min_constant": most[0.0],
        "reversals_5min_noise": most[NOISE],
        "prediction_error_p99": statistics.fmean(errors),
    }


def play_dynamo() -> dict[str, float]:
    """Play one cycle of a sine from 1 to 8 in 900 s, where one worker is full at 4.5."""
    full = find_unit_rate(SPEC, TARGETS, LENGTHS, 1.0)
    trace = LENGTHS.make_trace(
        lambda at_s: full / 4.5 * (4.5 - 3.5 * math.cos(2 * math.pi * at_s / 900)), full / 4.5 * 8, 900.0, seed=7
    )
    played = GrowingSimulation(SPEC, TARGETS, Bounds(least=1), start_s=30.0).play_requests(trace, 900.0)
    share = measure_share(played.outcomes)
    print(f"dynamo#10528: {share:.3f} in time; " + ", ".join(f"{num} at {at_s:.0f} s" for at_s, num in played.numbers))
    return {"slo_attainment_dynamo_10528": share}


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of this benchmark."""

    only: list[str]


def run(given: Options) -> dict[str, float]:
    """Play what is asked for."""
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "phases": lambda: play_phases(
            given.choose_size(LOAD, LOAD, replace(LOAD, phase_s=20.0)),
            given.choose_size(STARTS_S, STARTS_S[1:2], STARTS_S[1:2]),
            given.choose_size(list(OTHERS), [], []),
        ),
        "constant": lambda: play_constant(
            given.choose_size(3600.0, 1200.0, 620.0), given.choose_size((0.7, 1.5, 2.8, 4.2), (1.5,), (0.1,))
        ),
        "dynamo": play_dynamo,
        "turning": lambda: roles_run.play_turning(given),
        "growing": lambda: roles_run.play_growing(given),
        "fewer": lambda: roles_run.play_fewer(given),
        "zero": lambda: roles_run.measure_zero(given),
    }
    left_out = {"full": [], "quick": ["constant", "turning", "growing"], "smoke": ["dynamo"]}[given.size]
    chosen = given.only or [name for name in parts if name not in left_out]
    figures = dict[str, float]()
    for name in chosen:
        figures |= parts[name]()
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run, Options, only={"nargs": "*", "default": []})
