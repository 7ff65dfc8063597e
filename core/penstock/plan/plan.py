"""From a trace and measured rates to numbers of workers: each calculation, and the line that shows it."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.plan.rates import DecodeBatch, WorkerRates
from penstock.plan.simulate import NOT_SIMULATED, Waits, simulate_waits
from penstock.plan.trace import Arrival, compute_peak, compute_quantile

LOG_REQUEST_BYTES, LOG_TOKEN_BYTES = 6_000, 80
"""Bytes of an ended request in the stream Redis, and of each of its tokens: measured, and rounded up."""


@dataclass(frozen=True)
class Goals:
    """The goals of a plan."""

    ttft_s: float | None = None
    """Limit for the 99th percentile of the time to first token; None: no goal."""
    itl_s: float | None = None
    """Limit for the time between two tokens; None: no goal."""
    utilisation: float = 0.7
    """The share of a worker's measured rate that is planned with: at 1, queues grow without end."""
    window_s: float = 10.0
    """The peak rate is the highest over a window of this length."""
    keep_s: float = 3600.0
    """How long ended streams can be read."""


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
    goals: Goals
    rates: WorkerRates
    meets_ttft: bool
    """Whether the simulation meets the goal for the time to first token; True without a goal."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan for `--json`."""
        return asdict(self) | {"batch": self.batch._asdict(), "left_out": NOT_SIMULATED}


def make_plan(trace: Sequence[Arrival], rates: WorkerRates, goals: Goals) -> Plan:
    """Return the plan. Raises `PlanError` where no number of workers would do."""
    batch, size = rates.choose_batch(goals.itl_s), rates.block_size

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
    decode = count_workers(outputs, batch.tokens_per_s, goals.utilisation)
    by_blocks = count_workers(kv_blocks, rates.pool_blocks, goals.utilisation) if rates.pool_blocks else 1
    num_decode = max(decode, by_blocks)

    def played(workers: int) -> Waits:
        return simulate_waits(trace, rates.prefill_tokens_per_s, batch, workers, num_decode)

    def is_met(workers: int) -> bool:
        return goals.ttft_s is None or played(workers).ttft_p99_s <= goals.ttft_s

    meets = is_met(max(prefill, len(trace)))  # nobody would wait then
    num_prefill = prefill
    if meets and prefill < len(trace):
        num_prefill = bisect_left(range(len(trace) + 1), True, lo=prefill, key=is_met)
    return Plan(
        requests=len(trace),
        seconds=trace[-1].at_s - trace[0].at_s,
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
        waits=played(num_prefill),
        goals=goals,
        rates=rates,
        meets_ttft=meets,
    )


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
    for what, tokens in (("prompts", prompts), ("answers", outputs)):
        yield (
            "",
            f"{what}: {compute_quantile(tokens, 0.5):,.0f} tokens (p50), {compute_quantile(tokens, 0.99):,.0f} (p99)",
        )
    if plan.seconds < goals.window_s:
        yield "", f"it is shorter than the window of {goals.window_s:g} s: rates look smaller than they were"
    yield "rates", f"of one worker, from {rates.source}"
    rate = rates.prefill_tokens_per_s
    yield "prefill", f"at most {plan.prompt_tokens_per_s:,.1f} prompt tokens/s {window}"
    yield "", f"{plan.prompt_tokens_per_s:,.1f} / ({rate:,.1f} tokens/s {of_worker}) → {plan.prefill_by_rate}"
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
    yield "plan", f"{plan.prefill} prefill and {plan.decode} decode workers{_format_extra(plan)}"
    yield from _render_simulation(plan)


def _format_extra(plan: Plan) -> str:
    added = plan.prefill - plan.prefill_by_rate
    return f" ({added} prefill more than by rate, for the goal of {plan.goals.ttft_s:g} s)" if added else ""


def _render_simulation(plan: Plan) -> Iterator[tuple[str, str]]:
    waits = plan.waits
    yield "simulated", f"wait for prefill {waits.prefill_p50_s:,.2f} s (p50), {waits.prefill_p99_s:,.2f} s (p99)"
    yield "", f"wait for decode {waits.decode_p50_s:,.2f} s (p50), {waits.decode_p99_s:,.2f} s (p99)"
    yield "", f"time to first token {waits.ttft_p50_s:,.2f} s (p50), {waits.ttft_p99_s:,.2f} s (p99)"
    if not plan.meets_ttft:
        yield (
            "",
            f"the goal of {plan.goals.ttft_s:g} s is not met by any number of workers: prompts alone take longer",
        )
    yield "", f"leaves out: {NOT_SIMULATED}"
