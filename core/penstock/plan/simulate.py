"""Plays the trace against the planned workers: how long requests would wait.

There are two queues, first come first served: each prefill worker computes one prompt after the other, and an answer
takes a slot of a decode worker, each token as long as in a full batch. `NOT_SIMULATED` says what is left out.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.rates import DecodeBatch
from penstock.plan.trace import Arrival, compute_quantile

NOT_SIMULATED = (
    "prefix hits and the hand-off's time; partitions, which are no common queue; classes and tenants; prompts that "
    "share a step; preemption, failures and restarts"
)


@dataclass(frozen=True)
class Waits:
    """Quantiles of all requests of the trace, in seconds."""

    prefill_p50_s: float
    prefill_p99_s: float
    decode_p50_s: float
    decode_p99_s: float
    ttft_p50_s: float
    """The wait for a prefill worker and the time of the prompt."""
    ttft_p99_s: float


def simulate_waits(
    trace: Sequence[Arrival], tokens_per_s: float, batch: DecodeBatch, prefill: int, decode: int
) -> Waits:
    """Return the waits of a trace that is sorted by time, with these numbers of workers."""
    prompts_s = [one.prompt_tokens / tokens_per_s for one in trace]
    for_prefill = _simulate_queue([one.at_s for one in trace], prompts_s, prefill)
    done = sorted(
        (one.at_s + wait_s + prompt_s, (one.output_tokens - 1) * batch.step_s)
        for one, wait_s, prompt_s in zip(trace, for_prefill, prompts_s, strict=True)
        if one.output_tokens > 1  # its one token is prefill's
    )
    for_decode = _simulate_queue(
        [at_s for at_s, _ in done], [answer_s for _, answer_s in done], decode * batch.size
    ) or [0.0]
    firsts = [wait_s + prompt_s for wait_s, prompt_s in zip(for_prefill, prompts_s, strict=True)]
    told = [compute_quantile(waits, share) for waits in (for_prefill, for_decode, firsts) for share in (0.5, 0.99)]
    return Waits(*told)


def _simulate_queue(arrivals: Sequence[float], services: Sequence[float], servers: int) -> list[float]:
    """Return how long each arrival waits for one of the servers."""
    free = [float("-inf")] * min(servers, len(arrivals))
    waits = []
    for at_s, service_s in zip(arrivals, services, strict=True):
        begins_s = max(at_s, free[0])
        heapq.heapreplace(free, begins_s + service_s)
        waits.append(begins_s - at_s)
    return waits
