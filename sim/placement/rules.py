"""The rules that are compared, each with its published defaults. `RULES` makes one for each placer.

Published routers count what they sent and saw no end of, so theirs do; where the source has one router for all,
heartbeats tell what the others sent. None is told what pools hold: each takes to be there what it sent there.
"""

import math
import random
from collections.abc import Callable, Mapping

from penstock.bus.affinity import AffinityPartitioner, rank_partitions
from penstock.plan.placing import PlacedRequest, RoundRobin, Rule, View
from penstock.running_mean import RunningMean

FOREVER_S = math.inf


class Hash:
    """What Penstock does: the hash of the session, or of the prompt's beginning, and more workers for a hot one."""

    memory_s = 0.0

    def __init__(self) -> None:
        self._partitioner = AffinityPartitioner()

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the number of the worker that reads the partition."""
        return self._partitioner.choose_partition(request.affinity, view.num_workers, view.now_s)


class Dynamo:
    """NVIDIA Dynamo's cost in blocks: prompts that wait and this one, less what is cached, and blocks of all requests.

    docs.nvidia.com/dynamo, Routing Concepts; the scale and the credit of a block in the pool are 1, and its approximate
    mode forgets after 120 s.
    """

    memory_s = 120.0

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker of the least cost, the first one of several."""
        size = view.spec.block_size

        def compute_cost(worker: int) -> float:
            own = view.own[worker]
            prompt_blocks = (own.prompt_tokens + request.prompt_tokens - view.hits[worker]) / size
            return max(0.0, prompt_blocks) + own.num_blocks

        return min(range(view.num_workers), key=compute_cost)


class LlmD:
    """llm-d: of the workers that have most of the prompt, or of all if there are none, the one with the fewest tokens.

    llm-d.ai, prefix-cache-affinity-filter with its threshold of 0.8, left where the first token would be more than 18 s
    later than elsewhere; then token-load-scorer, whose order is that of prompt tokens under way. Its exploration at
    random is left out.
    """

    memory_s = FOREVER_S
    MATCHED_SHARE, MAX_PENALTY_S = 0.8, 18.0

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker with the fewest tokens under way among those that the filter leaves."""
        tokens_per_s = view.spec.max_step_tokens / view.spec.prompt_seconds(view.spec.max_step_tokens)

        def count_tokens(worker: int) -> int:
            return view.own[worker].prompt_tokens

        workers = range(view.num_workers)
        sticky = [one for one in workers if view.hits[one] >= self.MATCHED_SHARE * request.prompt_tokens]
        best = min(workers, key=count_tokens)
        if sticky:
            kept = min(sticky, key=count_tokens)
            if (count_tokens(kept) - count_tokens(best)) / tokens_per_s <= self.MAX_PENALTY_S:
                return kept
        return best


class CacheAware:
    """sgl-router's cache_aware: the worker with the longest match, if it is long and loads are not far apart.

    lightseekorg/smg, docs/concepts/routing/cache-aware.md: threshold 0.3; far apart is by more than 64 requests and by
    more than 1.5 times; else, and without a match, the fewest requests.
    """

    memory_s = FOREVER_S
    MATCHED_SHARE, MAX_DIFFERENCE, MAX_RATIO = 0.3, 64, 1.5

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker of the longest match or of the fewest requests, one at random of several."""
        loads = [own.num_requests for own in view.own]
        is_apart = max(loads) - min(loads) > self.MAX_DIFFERENCE and max(loads) > self.MAX_RATIO * min(loads)
        if not is_apart and max(view.hits) > self.MATCHED_SHARE * request.prompt_tokens:
            return view.hits.index(max(view.hits))
        return self._random.choice([worker for worker, load in enumerate(loads) if load == min(loads)])


class LeastWorkLeft:
    """Least prefill work left: uncached tokens under way, and those of this prompt.

    gahow/agentic-kvc, `lpwl`: no parameter; of several the one with the fewest requests.
    """

    memory_s = FOREVER_S

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker with the least work left."""

        def count_work(worker: int) -> tuple[int, int]:
            own = view.own[worker]
            return own.prompt_tokens + max(0, request.prompt_tokens - view.hits[worker]), own.num_requests

        return min(range(view.num_workers), key=count_work)


def estimate_queue_s(view: View, worker: int) -> float:
    """Return how long a worker needs for the prompts that wait for it, beside the answers that it gives now."""
    spec, beat = view.spec, view.beats[worker]
    cost, num_tokens = spec.cost, max(1, spec.max_step_tokens - beat.num_decodes)
    rows_s = beat.num_decodes * (cost.row_s + cost.known_outside_s) + cost.context_s * beat.context_tokens
    step_s = cost.fixed_s + cost.chunk_s + num_tokens * cost.token_s + rows_s
    return (beat.waiting_tokens + view.count_sent_tokens(worker)) * step_s / num_tokens


def estimate_work_s(request: PlacedRequest, view: View, num_cached: int) -> float:
    """Return how long a prompt takes of which so many tokens are in the pool."""
    return view.spec.prompt_seconds(request.prompt_tokens - num_cached, num_cached)


def estimate_fetch_s(view: View, num_tokens: int) -> float:
    """Return how long a worker fetches so many tokens from the tier; infinite without one."""
    return view.tier.fetch_seconds(num_tokens // view.spec.block_size) if view.tier else math.inf


class Mooncake:
    """Mooncake's algorithm 1 (FAST'25): the least time to the first token, as estimated, with or without a transfer.

    A worker whose match is more than `BALANCE` times shorter than the best one gets the rest by transfer. The paper
    gives no number for it. Its refusals are left out: nothing is refused here.
    """

    memory_s = FOREVER_S
    BALANCE = 2.0

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker with the least time."""
        best = max(view.hits)

        def ttft_s(worker: int) -> float:
            hit, queue_s = view.hits[worker], estimate_queue_s(view, worker)
            if best < self.BALANCE * hit or best == 0:
                return queue_s + estimate_work_s(request, view, hit)
            return queue_s + estimate_fetch_s(view, best - hit) + estimate_work_s(request, view, best)

        return min(range(view.num_workers), key=ttft_s)


class Soonest:
    """The candidate: where the first token is soonest, by seconds of queue, fetch and computation.

    A request stays at home, with the longest match, unless that costs more than it saves; without a match home follows
    from its chat. Of workers that are about as good, the better one of two is taken at random, so that placers that do
    not talk do not all choose the same.
    """

    memory_s = 120.0
    MIN_GAIN_S, NEAR, STALE_S = 0.02, 1.1, 3.0

    def __init__(self) -> None:
        self._random, self._hash = random.Random(0), Hash()
        self._error_s = RunningMean(64)
        """How far the estimates of queues were off, as the next heartbeats showed."""
        self._estimates: dict[int, tuple[float, float, float]] = {}
        """By worker: the time of a heartbeat, the queue estimated last under it, and when that was."""

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return home, or the worker with the least cost."""
        workers = range(view.num_workers)
        if any(view.now_s - view.beats[worker].at_s > self.STALE_S for worker in workers):
            return self._hash.choose_worker(request, view)
        best_hit = max(view.hits)
        fetched_s = estimate_fetch_s(view, best_hit) + estimate_work_s(request, view, best_hit)
        work = [estimate_work_s(request, view, hit) for hit in view.hits]
        work = [min(here_s, fetched_s) for here_s in work]
        cost = [self._estimate_queue_s(view, worker) + work[worker] for worker in workers]
        home = view.hits.index(best_hit) if best_hit else rank_partitions(request.home, view.num_workers)[0]
        best = min(workers, key=cost.__getitem__)
        gain_s = max(self.MIN_GAIN_S, self._error_s.value or 0.0)
        if cost[home] - cost[best] <= max(work[best] - work[home], 0.0) + gain_s:
            return home
        near = [worker for worker in workers if cost[worker] <= self.NEAR * cost[best]]
        return min(self._random.sample(near, min(2, len(near))), key=cost.__getitem__)

    def _estimate_queue_s(self, view: View, worker: int) -> float:
        beat, queue_s = view.beats[worker], estimate_queue_s(view, worker)
        at_s, last_s, then_s = self._estimates.get(worker, (beat.at_s, 0.0, 0.0))
        if at_s < beat.at_s:
            self._error_s.add(abs(max(0.0, last_s - (view.now_s - then_s)) - queue_s))
        self._estimates[worker] = beat.at_s, queue_s, view.now_s
        return queue_s


RULES: Mapping[str, Callable[[], Rule]] = {
    "round_robin": RoundRobin,
    "hash": Hash,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "cache_aware": CacheAware,
    "least_work_left": LeastWorkLeft,
    "mooncake": Mooncake,
    "ours": Soonest,
}
