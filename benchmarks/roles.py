"""Workers that follow the load: the controller of `penstock autoscale` in virtual time.

python -m benchmarks.roles [--quick | --smoke] [--json FILE] [--only NAME…]

Simulated `auto` workers, as in `benchmarks.placement`, and the product's controller, which looks every five seconds.
The load is 1 : 6 : 1 in phases of 30 minutes; one worker carries the least of it. An oracle knows the trace, decides by
the same formulas, and pays the same starts and drains. A worker is paid from the moment its start is asked for.

    slo_attainment_start_{s}            requests in time, where a start takes so many seconds
    worker_seconds_vs_oracle_start_{s}  what was paid, to what the oracle pays
    reversals_5min_constant             how often numbers turn within five minutes of a constant load, at most
    prediction_error_p99                of the time to first token at constant loads, on the mean of five minutes each
    slo_attainment_dynamo_10528         a burst that one worker cannot carry: arrivals go from 1 to 8 and back in 15
                                        minutes, and one worker is full at 4.5

`--only` names `phases`, `constant` and `dynamo`.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.common import Arguments, run_benchmark
from benchmarks.placement import SPEC
from penstock.autoscale.controller import Bounds
from penstock.autoscale.sizing import Load, Targets, count_decode, count_prefill, size_kind
from penstock.plan.placing import PlacedRequest
from penstock.plan.simulator import Outcome
from penstock.plan.trace import compute_quantile
from sim.growing import LOOK_S, GrowingSimulation, Grown, find_speed

TARGETS, ITL_S = Targets(ttft_s=4.0, gap_s=0.05), 0.2
SHAPE = (1, 6, 1)
UNIT_BUSY = 0.7
"""How busy the least load keeps one worker."""
STARTS_S = (0.5, 5.0, 30.0, 120.0, 300.0)
PROMPT, ANSWER = (1450, 0.8), (70, 0.5)
"""Median and sigma of lognormal lengths."""
WINDOW_S = 300.0


def make_trace(rate: Callable[[float], float], most: float, seconds: float, seed: int) -> list[PlacedRequest]:
    """Return requests of a Poisson process whose rate changes, and is at most `most`."""
    rng, at_s, found = random.Random(seed), 0.0, list[PlacedRequest]()
    while (at_s := at_s + rng.expovariate(most)) < seconds:
        if rng.random() < rate(at_s) / most:
            prompt, answer = (max(2, int(rng.lognormvariate(0, sigma) * median)) for median, sigma in (PROMPT, ANSWER))
            found.append(PlacedRequest(f"r{len(found)}", at_s, prompt, answer))
    return found


def describe_load(rate: float) -> Load:
    """Return the load of so many requests a second, as an oracle knows it."""
    token_s = SPEC.prompt_seconds(SPEC.max_step_tokens) / SPEC.max_step_tokens
    (prompt, prompt_sigma), (answer, answer_sigma) = PROMPT, ANSWER
    mean, mean_answer = prompt * math.exp(prompt_sigma**2 / 2), answer * math.exp(answer_sigma**2 / 2)
    squares = mean**2 * math.exp(prompt_sigma**2)
    return Load(rate, mean * token_s, squares * token_s**2, mean_answer, mean + mean_answer)


def find_unit_rate(busy: float = UNIT_BUSY) -> float:
    """Return the rate at which one worker is so busy, by the formula of `auto` workers."""
    load = describe_load(1.0)
    speed = find_speed(SPEC, TARGETS, load.context_tokens)
    return busy / (count_prefill(load, TARGETS) + count_decode(load, speed))


def measure_share(outcomes: Sequence[Outcome]) -> float:
    """Return how many requests were in time, as a share."""
    return sum(one.ttft_s <= TARGETS.ttft_s and one.itl_s <= ITL_S for one in outcomes) / len(outcomes)


def play_phases(phase_s: float, starts_s: Sequence[float]) -> dict[str, float]:
    """Play 1 : 6 : 1 with the controller and with the oracle."""
    unit, figures = find_unit_rate(), dict[str, float]()
    trace = make_trace(lambda at_s: unit * SHAPE[int(at_s / phase_s)], unit * max(SHAPE), phase_s * len(SHAPE), seed=3)
    load = describe_load(unit)
    speed = find_speed(SPEC, TARGETS, load.context_tokens)
    needed = [size_kind("auto", describe_load(unit * part), speed, TARGETS).number for part in SHAPE]
    for start_s in starts_s:

        def know(now_s: float, ahead_s: float = start_s + LOOK_S) -> int:
            now, then = (min(len(SHAPE) - 1, int(at_s / phase_s)) for at_s in (now_s, now_s + ahead_s))
            return max(needed[now], needed[then])

        bounds, until_s = Bounds(least=1, most=max(SHAPE)), phase_s * len(SHAPE)
        found = GrowingSimulation(SPEC, TARGETS, bounds, start_s=start_s).play(trace, until_s)
        best = GrowingSimulation(SPEC, TARGETS, bounds, start_s=start_s, oracle=know).play(trace, until_s)
        share, ratio = measure_share(found.outcomes), found.worker_seconds / best.worker_seconds
        figures |= {f"slo_attainment_start_{start_s:g}": share, f"worker_seconds_vs_oracle_start_{start_s:g}": ratio}
        print(
            f"start {start_s:5g} s: {share:.3f} in time, {ratio:.3f} of the oracle's seconds (the oracle: "
            f"{measure_share(best.outcomes):.3f} in time, {needed}); "
            + ", ".join(f"{number} at {at_s:.0f} s" for at_s, number in found.numbers),
            flush=True,
        )
    return figures


def play_constant(seconds: float, parts: Sequence[float]) -> dict[str, float]:
    """Play constant loads, which need no change once they are known."""
    most, errors = 0, list[float]()
    for part in parts:
        rate = find_unit_rate(part)
        trace = make_trace(lambda _, rate=rate: rate, rate, seconds, seed=5)  # type: ignore[misc]
        played = GrowingSimulation(SPEC, TARGETS, Bounds(least=1), start_s=5.0).play(trace, seconds)
        turns, found = count_turns(played), list(compare_predictions(played))
        most, errors = max(most, turns), [*errors, *found]
        error = statistics.fmean(found) if found else math.nan
        print(
            f"constant {part:g}: {turns} turns in 5 minutes at most, {len(played.numbers) - 1} changes, "
            f"{measure_share(played.outcomes):.3f} in time, prediction off by {error:.2f}",
            flush=True,
        )
    return {"reversals_5min_constant": most, "prediction_error_p99": statistics.fmean(errors)}


def count_turns(played: Grown) -> int:
    """Return how often the number turned from up to down or back within five minutes, at most."""
    steps = [(at_s, after > before) for (_, before), (at_s, after) in pairwise(played.numbers)]
    turns = [at_s for (_, before), (at_s, after) in pairwise(steps) if before != after]
    return max((sum(at_s <= other_s < at_s + WINDOW_S for other_s in turns) for at_s in turns), default=0)


def compare_predictions(played: Grown) -> list[float]:
    """Return by what share the predicted p99 was off the observed one, in each five minutes."""
    found = []
    for number in range(1, int(played.decisions[-1].at_s / WINDOW_S)):
        low_s, high_s = number * WINDOW_S, (number + 1) * WINDOW_S
        observed = [one.ttft_s for one in played.outcomes if low_s <= one.request.at_s < high_s]
        told = [one.predicted_p99_s for one in played.decisions if low_s <= one.at_s < high_s]
        predicted = [value for value in told if value is not None and math.isfinite(value)]
        if observed and predicted:
            p99_s = compute_quantile(observed, 0.99)
            found.append(abs(statistics.fmean(predicted) - p99_s) / p99_s)
    return found


def play_dynamo() -> dict[str, float]:
    """Play one cycle of a sine from 1 to 8 in 900 s, where one worker is full at 4.5."""
    full = find_unit_rate(1.0)
    trace = make_trace(
        lambda at_s: full / 4.5 * (4.5 - 3.5 * math.cos(2 * math.pi * at_s / 900)), full / 4.5 * 8, 900.0, seed=7
    )
    played = GrowingSimulation(SPEC, TARGETS, Bounds(least=1), start_s=30.0).play(trace, 900.0)
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
            given.choose_size(1800.0, 1800.0, 20.0), given.choose_size(STARTS_S, STARTS_S[1:2], STARTS_S[1:2])
        ),
        "constant": lambda: play_constant(
            given.choose_size(3600.0, 1200.0, 620.0), given.choose_size((0.7, 1.5, 2.8, 4.2), (1.5,), (0.1,))
        ),
        "dynamo": play_dynamo,
    }
    chosen = given.only or (["phases", "constant"] if given.size == "smoke" else list(parts))
    figures = dict[str, float]()
    for name in chosen:
        figures |= parts[name]()
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run, Options, only={"nargs": "*", "default": []})
