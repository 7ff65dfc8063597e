"""From a trace and measured rates to numbers of workers: each calculation, and the line that shows it."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from penstock.config.settings import SloSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.errors import PlanError
from penstock.plan import coarse
from penstock.plan.coarse import CoarseLoad, CoarseSimulation
from penstock.plan.goodput import MET_SHARE, Slos, Timing, compute_met_share, find_goodput, read_slos
from penstock.plan.placing import PlacedRequest, RoundRobin, WorkerSpec
from penstock.plan.rates import CHANGES, DecodeBatch, WorkerRates
from penstock.plan.simulator import LEFT_OUT, Simulation
from penstock.plan.trace import Arrival, compute_peak, compute_quantile, has_answers

NOT_SIMULATED = f"prefix hits, and sessions, which go to one worker; the transfer of KV; {LEFT_OUT}"
GOODPUT_STEP, GOODPUT_STEPS = 1.2, 8
"""The factor between the rates at which goodput is tried, and the number of rates above and below the trace's own."""
STEPS_TO_DOUBLE = 8
"""The tried number of prefill workers doubles in about this many steps; small numbers are tried one by one."""
MAX_POOL_BLOCKS = 2**16
"""The pool of a simulated worker whose own is not known."""
MAX_SIMULATED_TOKENS = 2_000_000
"""The coarse model plays a trace with more answer tokens than this. The simulation takes some minutes for as many, and
a plan plays a trace several times."""
LOG_REQUEST_BYTES, LOG_TOKEN_BYTES = 6_000, 80
"""Bytes of an ended request in the stream Redis, and of each of its tokens: measured, and rounded up."""


@dataclass(frozen=True)
class Goals:
    """The goals of a plan."""

    ttft_s: float | None = None
    """Limit for the 99th percentile of the time to first token; None: that of `slos`, for nine of ten requests."""
    itl_s: float | None = None
    """Limit for the time between two tokens; None: that of `slos`."""
    utilisation: float = 0.7
    """The share of a worker's measured rate that is planned with: at 1, queues grow without end."""
    window_s: float = 10.0
    """The peak rate is the highest over a window of this length."""
    keep_s: float = 3600.0
    """Seconds for which ended streams can be read."""
    slos: Slos = field(default_factory=lambda: read_slos(SloSettings()))
    """The latency targets of the goodput."""
    gap_s: float = SloSettings().interactive_gap_s
    """The longest time between two tokens beside prompts."""


@dataclass(frozen=True)
class Waits:
    """Quantiles of all requests of the trace, in seconds, as simulated."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    """Median over the answers of the mean time between an answer's tokens."""
    itl_p99_s: float


@dataclass(frozen=True)
class Plan:
    """The numbers of a plan, in the order in which they follow from each other. Tokens per second are those of the
    peak.
    """

    requests: int
    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    batch: DecodeBatch
    places: float
    """Answers that are generated at once."""
    kv_blocks: float
    """KV blocks of those answers when they are complete."""
    redis_bytes: float
    prefill_by_rate: int
    decode_by_rate: int
    decode_by_blocks: int
    prefill: int
    decode: int
    waits: Waits
    auto_busy: float
    """The number of workers that prompts and answers together keep busy in the peak."""
    auto_by_rate: int
    auto: int
    """Workers of kind `auto` that do the same in place of these."""
    auto_waits: Waits
    auto_met_share: float
    mean_rate: float
    """Requests a second."""
    met_share: float
    """The share of the trace's requests that are in time; of two classes, the lower share."""
    goodput: float
    """The highest rate at which `MET_SHARE` of the requests would be in time, if they came faster or more slowly."""
    goals: Goals
    rates: WorkerRates
    is_coarse: bool
    """Whether the coarse model has played the trace."""

    @property
    def left_out(self) -> str:
        """The costs that the figures leave out."""
        return f"{NOT_SIMULATED}; {coarse.LEFT_OUT}" if self.is_coarse else NOT_SIMULATED

    def as_json(self) -> dict[str, Any]:
        """Return the plan for `--json`."""
        return asdict(self) | {"batch": self.batch._asdict(), "left_out": self.left_out}


def make_plan(trace: Sequence[Arrival], rates: WorkerRates, goals: Goals) -> Plan:
    """Return the plan. Raises `PlanError` where no number of workers would do.

    A trace of texts alone, which have no answers, needs no decode worker: its workers read requests and end them. Each
    text is a prompt of its own, so that a request's tokens need not fit the pool together.
    """
    decodes = has_answers(trace)
    rates = rates if decodes else replace(rates, pool_blocks=None)
    batch, size = choose_batch(trace, rates, goals), rates.block_size
    slo = SloSettings(interactive_ttft_s=goals.slos["interactive"].ttft_s, interactive_gap_s=goals.gap_s)

    def blocks(one: Arrival) -> int:
        return math.ceil((one.prompt_tokens + one.output_tokens) / size)

    def answer_s(one: Arrival) -> float:
        return one.output_tokens * batch.step_s

    largest = max(map(blocks, trace))
    if rates.pool_blocks is not None and largest > rates.pool_blocks:
        raise PlanError(
            f"the largest request needs {largest:,} KV blocks and the pool has {rates.pool_blocks:,}: "
            "raise PENSTOCK_ENGINE_POOL_MB"
        )
    prompts = compute_peak(trace, lambda one: one.prompt_tokens, goals.window_s)
    outputs = compute_peak(trace, lambda one: one.output_tokens, goals.window_s)
    kv_blocks = compute_peak(trace, lambda one: blocks(one) * answer_s(one), goals.window_s)
    prefill = count_workers(prompts, rates.prefill_tokens_per_s, goals.utilisation)
    decode = count_workers(outputs, batch.tokens_per_s, goals.utilisation) if decodes else 0
    by_blocks = count_workers(kv_blocks, rates.pool_blocks, goals.utilisation) if rates.pool_blocks else min(1, decode)
    num_decode = max(decode, by_blocks)

    busy = compute_peak(
        trace,
        lambda one: one.prompt_tokens / rates.prefill_tokens_per_s + one.output_tokens / batch.tokens_per_s,
        goals.window_s,
    )
    auto = count_workers(busy, 1.0, goals.utilisation)

    def find_number(first: int, play: Callable[[int], list[Timing]]) -> int:
        """Return how many workers, from `first` on, meet the goal for first tokens where one is given."""
        number = first
        while goals.ttft_s is not None and number < len(trace):
            if measure_waits(play(number)).ttft_p99_s <= goals.ttft_s:
                break
            number += 1 + number // STEPS_TO_DOUBLE
        return number

    num_prefill = find_number(prefill, lambda number: play_trace(trace, rates, batch, number, 0, slo))
    num_auto = find_number(max(auto, by_blocks), lambda number: play_auto(trace, rates, batch, number, slo))
    played = play_trace(trace, rates, batch, num_prefill, num_decode, slo)
    by_auto = play_auto(trace, rates, batch, num_auto, slo)

    seconds = trace[-1].at_s - trace[0].at_s
    mean_rate = len(trace) / (seconds or goals.window_s)

    def play_rate(number: int) -> tuple[float, float]:
        factor = GOODPUT_STEP**number
        faster = [one._replace(at_s=one.at_s / factor) for one in trace]
        outcomes = play_trace(faster, rates, batch, num_prefill, num_decode, slo) if number else played
        return mean_rate * factor, compute_met_share(outcomes, goals.slos)

    return Plan(
        requests=len(trace),
        seconds=seconds,
        prompt_tokens_per_s=prompts,
        output_tokens_per_s=outputs,
        batch=batch,
        places=compute_peak(trace, answer_s, goals.window_s),
        kv_blocks=kv_blocks,
        redis_bytes=_estimate_redis_bytes(trace, goals),
        prefill_by_rate=prefill,
        decode_by_rate=decode,
        decode_by_blocks=by_blocks,
        prefill=num_prefill,
        decode=num_decode,
        waits=measure_waits(played),
        auto_busy=busy,
        auto_by_rate=auto,
        auto=num_auto,
        auto_waits=measure_waits(by_auto),
        auto_met_share=compute_met_share(by_auto, goals.slos),
        mean_rate=mean_rate,
        met_share=compute_met_share(played, goals.slos),
        goodput=find_goodput(play_rate, -GOODPUT_STEPS, GOODPUT_STEPS),
        goals=goals,
        rates=rates,
        is_coarse=is_long(trace),
    )


def choose_batch(trace: Sequence[Arrival], rates: WorkerRates, goals: Goals) -> DecodeBatch:
    """Return the fastest batch of decode that keeps to the goals, or to the settings' limits where none are given.

    Raises `PlanError` where no number of workers would meet them.
    """
    by_class = {
        priority_class: [one for one in trace if one.priority_class == priority_class]
        for priority_class in {one.priority_class for one in trace}
    }
    limits = [(of, goals.slos[priority_class].ttft_s, MET_SHARE) for priority_class, of in by_class.items()]
    for requests, limit_s, share in limits if goals.ttft_s is None else [(trace, goals.ttft_s, 0.99)]:
        alone_s = compute_quantile([one.prompt_tokens / rates.prefill_tokens_per_s for one in requests], share)
        if alone_s > limit_s:
            raise PlanError(
                f"no number of workers gives {share:.0%} of the first tokens within {limit_s:g} s: prompts alone take "
                f"{alone_s:.3g} s; {CHANGES} (--ttft-s, PENSTOCK_SLO_…_TTFT_S)"
            )
    if not has_answers(trace):
        return rates.batches[0]
    itl_s = min(goals.slos[priority_class].itl_s for priority_class in by_class) if goals.itl_s is None else goals.itl_s
    return rates.choose_batch(itl_s)


def is_long(trace: Sequence[Arrival]) -> bool:
    """Return whether the simulation would take too long for a trace."""
    return sum(one.output_tokens for one in trace) > MAX_SIMULATED_TOKENS


def play_trace(
    trace: Sequence[Arrival],
    rates: WorkerRates,
    batch: DecodeBatch,
    num_prefill: int,
    num_decode: int,
    slo: SloSettings | None = None,
) -> list[Timing]:
    """Return the latencies of the requests with these numbers of workers, which get them in turn.

    Without decode workers all answers have one token. A long trace is played by the coarse model. Without `slo` the
    workers have its defaults.
    """
    token_s = 1 / rates.prefill_tokens_per_s
    prefill = _make_spec(rates, batch, StepCost(0.0, token_s, 0.0, 0.0, token_s), slo)
    decode = _make_spec(rates, batch, rates.fit_cost(), slo)
    if is_long(trace):
        return play_coarsely(trace, (num_prefill, prefill), (num_decode, decode))
    simulation = Simulation(
        {"prefill": (num_prefill, prefill), "decode": (max(1, num_decode), decode)},
        [RoundRobin()],
    )
    return [one.make_timing() for one in simulation.run(_make_requests(trace, None if num_decode else 1))]


def play_auto(
    trace: Sequence[Arrival], rates: WorkerRates, batch: DecodeBatch, num_auto: int, slo: SloSettings | None = None
) -> list[Timing]:
    """Return the latencies of the requests with `num_auto` workers of kind `auto`, which get them in turn."""
    spec = _make_spec(rates, batch, rates.fit_cost(), slo)
    # The rate of prompts includes the fixed cost of a step. A step with answers and prompts has that cost only once.
    token_s = max(0.0, spec.cost.token_s - spec.cost.fixed_s / spec.max_step_tokens)
    spec = replace(spec, cost=replace(spec.cost, token_s=token_s))
    if is_long(trace):
        return play_coarsely(trace, (num_auto, spec))
    return [
        one.make_timing() for one in Simulation({"auto": (num_auto, spec)}, [RoundRobin()]).run(_make_requests(trace))
    ]


def _make_requests(trace: Sequence[Arrival], num_output: int | None = None) -> list[PlacedRequest]:
    """Return the requests by seconds since the first one. `num_output` replaces the tokens of each answer if given."""
    return [
        PlacedRequest(
            str(number),
            one.at_s - trace[0].at_s,
            one.prompt_tokens,
            num_output or max(1, one.output_tokens),
            priority_class=one.priority_class,
        )
        for number, one in enumerate(trace)
    ]


def play_coarsely(
    trace: Sequence[Arrival], readers: tuple[int, WorkerSpec], decode: tuple[int, WorkerSpec] | None = None
) -> list[Timing]:
    """Return the latencies by the coarse model, for numbers of workers of each kind, or of readers that decode."""
    at_s = np.array([one.at_s for one in trace]) - trace[0].at_s
    prompt, output = np.array([(one.prompt_tokens, max(1, one.output_tokens)) for one in trace]).T
    numbers = np.arange(len(trace))
    load = CoarseLoad.without_chats(at_s, prompt, np.ones_like(output) if decode else output)
    done = CoarseSimulation(*readers, load, workers=numbers % readers[0]).run()
    first_s, itl_s, jobs = done.first_s, done.itl_s, numbers[output > 1]
    if decode and decode[0] and len(jobs):
        jobs = jobs[np.argsort(first_s[jobs], kind="stable")]
        answers = CoarseLoad.without_chats(first_s[jobs], prompt[jobs], output[jobs] - 1)
        ended = CoarseSimulation(*decode, answers, placers=jobs % readers[0], are_jobs=True).run()
        itl_s[jobs] = (ended.end_s - first_s[jobs]) / (output[jobs] - 1)
    times = zip(trace, (first_s - at_s).tolist(), itl_s.tolist(), strict=True)
    return [Timing(one.priority_class, ttft_s, each_s) for one, ttft_s, each_s in times]


def measure_waits(played: Sequence[Timing]) -> Waits:
    """Return how long these requests waited."""
    firsts, tokens = [one.ttft_s for one in played], [one.itl_s for one in played]
    return Waits(*(compute_quantile(values, share) for values in (firsts, tokens) for share in (0.5, 0.99)))


def _make_spec(rates: WorkerRates, batch: DecodeBatch, cost: StepCost, slo: SloSettings | None) -> WorkerSpec:
    num_blocks = rates.pool_blocks or MAX_POOL_BLOCKS
    return WorkerSpec(cost, num_blocks, rates.block_size, batch.size, slo=slo or SloSettings())


def count_workers(load: float, rate: float, utilisation: float) -> int:
    """Return how many workers carry a load, each at most its share of the rate; at least one."""
    return max(1, math.ceil(load / (rate * utilisation)))


def _estimate_redis_bytes(trace: Sequence[Arrival], goals: Goals) -> float:
    """Return the bytes of logs that ended within `keep_s`. A shorter trace is taken to repeat."""

    def of(one: Arrival) -> int:
        return LOG_REQUEST_BYTES + LOG_TOKEN_BYTES * one.output_tokens

    seconds = trace[-1].at_s - trace[0].at_s
    if seconds >= goals.keep_s:
        return compute_peak(trace, of, goals.keep_s) * goals.keep_s
    return sum(map(of, trace)) * max(1.0, goals.keep_s / max(seconds, goals.window_s))


def render_plan(plan: Plan, trace: Sequence[Arrival]) -> Iterator[tuple[str, str]]:
    """Yield the calculations as pairs of a name and a line."""
    rates, goals, batch = plan.rates, plan.goals, plan.batch
    prompts = [float(one.prompt_tokens) for one in trace]
    outputs = [float(one.output_tokens) for one in trace]
    window = f"over {goals.window_s:g} s"
    of_worker = f"x {goals.utilisation:g}"
    yield "trace", f"{plan.requests:,} requests in {plan.seconds:,.0f} s"
    for what, tokens in (("prompts", prompts), ("answers", outputs)) if plan.decode else (("texts", prompts),):
        yield (
            "",
            f"{what}: {compute_quantile(tokens, 0.5):,.0f} tokens (p50), {compute_quantile(tokens, 0.99):,.0f} (p99)",
        )
    if plan.seconds < goals.window_s:
        yield "", f"it is shorter than the window of {goals.window_s:g} s: rates look smaller than they were"
    yield "rates", f"of one worker, from {rates.source}"
    rate = rates.prefill_tokens_per_s
    kind, name = ("prefill", "prompt tokens") if plan.decode else ("texts", "tokens")
    yield kind, f"at most {plan.prompt_tokens_per_s:,.1f} {name}/s {window}"
    yield "", f"{plan.prompt_tokens_per_s:,.1f} / ({rate:,.1f} tokens/s {of_worker}) → {plan.prefill_by_rate}"
    if not plan.decode:
        yield "plan", f"{plan.prefill} embed or auto workers{_format_extra(plan)}"
        p50_s, p99_s = plan.waits.ttft_p50_s, plan.waits.ttft_p99_s
        yield "simulated", f"time to all numbers of a request {p50_s:,.2f} s (p50), {p99_s:,.2f} s (p99)"
        return
    goal = "" if goals.itl_s is None else f" (goal {goals.itl_s * 1e3:,.0f} ms)"
    yield (
        "decode",
        f"batch {batch.size}: {batch.tokens_per_s:,.1f} tokens/s, {batch.step_s * 1e3:,.1f} ms a token{goal}",
    )
    yield "", f"at most {plan.output_tokens_per_s:,.1f} output tokens/s {window}"
    yield (
        "",
        f"{plan.output_tokens_per_s:,.1f} / ({batch.tokens_per_s:,.1f} tokens/s {of_worker}) → {plan.decode_by_rate}",
    )
    yield "KV blocks", f"Little's law: arrivals x time to write = {plan.places:,.1f} answers at once"
    pool = "a pool's size is not known" if rates.pool_blocks is None else f"a pool has {rates.pool_blocks:,}"
    bytes_ = "" if rates.block_bytes is None else f", {plan.kv_blocks * rates.block_bytes / 2**20:,.0f} MB"
    yield "", f"and {plan.kv_blocks:,.0f} blocks of {rates.block_size} tokens{bytes_}; {pool}"
    if rates.pool_blocks is not None:
        yield (
            "",
            f"{plan.kv_blocks:,.0f} / ({rates.pool_blocks:,} {of_worker}) → {plan.decode_by_blocks} decode",
        )
    kept = f"ended streams of {goals.keep_s:,.0f} s, {LOG_REQUEST_BYTES:,} bytes each and {LOG_TOKEN_BYTES} a token"
    yield "stream Redis", f"{plan.redis_bytes / 2**20:,.0f} MB: {kept}"
    yield "auto", f"one worker for both: prompts and answers keep {plan.auto_busy:,.2f} busy {window}"
    yield "", f"{plan.auto_busy:,.2f} / (1 {of_worker}) → {plan.auto_by_rate}"
    yield "plan", f"{plan.prefill} prefill and {plan.decode} decode workers{_format_extra(plan)}"
    yield "", f"or {plan.auto} auto workers"
    yield from _render_simulation(plan, {one.priority_class for one in trace})


def _format_extra(plan: Plan) -> str:
    added = plan.prefill - plan.prefill_by_rate
    kind = "prefill " if plan.decode else ""
    return f" ({added} {kind}more than by rate, for the goal of {plan.goals.ttft_s:g} s)" if added else ""


def _format_waits(waits: Waits) -> str:
    first = f"time to first token {waits.ttft_p50_s:,.2f} s (p50), {waits.ttft_p99_s:,.2f} s (p99)"
    return f"{first}, between tokens {waits.itl_p50_s * 1e3:,.0f} ms (p50), {waits.itl_p99_s * 1e3:,.0f} ms (p99)"


def _render_simulation(plan: Plan, classes: Container[str]) -> Iterator[tuple[str, str]]:
    yield "coarse" if plan.is_coarse else "simulated", _format_waits(plan.waits)
    yield "", f"auto: {_format_waits(plan.auto_waits)}; {plan.auto_met_share:.1%} in time"
    limits = ", ".join(
        f"{priority_class} {slo.ttft_s:g} s and {slo.itl_s * 1e3:,.0f} ms"
        for priority_class, slo in plan.goals.slos.items()
        if priority_class in classes
    )
    lowest, highest = (plan.mean_rate * GOODPUT_STEP**number for number in (-GOODPUT_STEPS, GOODPUT_STEPS))
    beyond = "at most " if plan.goodput <= lowest else "at least " if plan.goodput >= highest else ""
    yield "goodput", f"{beyond}{plan.goodput:,.2f} requests/s, {MET_SHARE:.0%} of them in time"
    yield "", f"the trace has {plan.mean_rate:,.2f}, and {plan.met_share:.1%} are"
    yield "", f"in time: {limits} between tokens (PENSTOCK_SLO_…)"
    if plan.is_coarse:
        yield "", f"played by a coarse model, as the trace is long; its error: {coarse.ERROR}"
    yield "", f"leaves out: {plan.left_out}"
