"""The rules that are compared, each with its published defaults. `RULES` makes one for each placer.

Published routers count what they sent and saw no end of, so theirs do; where the source has one router for all,
heartbeats tell what the others sent. None is told what pools hold: each takes to be there what it sent there.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.bus.placement import MAX_SENT_S, Placer, WorkerBeat, choose_by_hash
from penstock.names import CLASSES, PriorityClass
from penstock.plan.placing import Beat, PlacedRequest, RoundRobin, Rule, View
from penstock.plan.simulator import SimulatedWorker

FOREVER_S = math.inf


HALF_LIFE_S = 10.0
REQUESTS_PER_WORKER = 8
"""How many recent requests with one beginning justify each of its workers."""
SHARE_TOLERANCE = 0.5
"""By what part a worker may exceed its fair share of requests before a beginning gets more of them."""


@dataclass
class _DecayingCount:
    """A count that loses half of itself every `HALF_LIFE_S`."""

    at_s: float = 0.0
    count: float = 0.0

    def add_request(self, now_s: float) -> float:
        """Count a request. Return the count."""
        self.count = self.count * 0.5 ** ((now_s - self.at_s) / HALF_LIFE_S) + 1.0
        self.at_s = now_s
        return self.count


class Hash:
    """The hash of the session, or of the prompt's beginning, and 2, 4, … workers in turn where that is hot.

    Penstock did so before it looked at the work that is left.
    """

    memory_s = 0.0

    def __init__(self) -> None:
        self._counts = defaultdict[bytes, _DecayingCount](_DecayingCount)
        self._turns = Counter[bytes]()
        self._all = _DecayingCount()

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the next one of the workers that a beginning has now."""
        chain = request.chain
        assert chain is not None
        key = chain.home if request.session or not chain.links else chain.links[0].digest
        of_key, of_all = self._counts[key].add_request(view.now_s), self._all.add_request(view.now_s)
        by_share = math.ceil(of_key / of_all * view.num_workers - SHARE_TOLERANCE)
        wanted = max(1, min(by_share, int(of_key / REQUESTS_PER_WORKER)))
        width, left = min(view.num_workers, 1 << (wanted - 1).bit_length()), list(range(view.num_workers))
        self._turns[key] += 1
        for _ in range((self._turns[key] - 1) % width):
            left.remove(choose_by_hash(key, left))
        return choose_by_hash(key, left)


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
    return (beat.waiting_tokens + count_sent_tokens(view, worker)) * step_s / num_tokens


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


class Placed:
    """What Penstock does: the class of its producers, which keeps what it knows by itself."""

    memory_s = 0.0
    HEARTBEAT_LASTS_S = 3.0

    def __init__(self) -> None:
        self._placer = Placer()
        self._noted: list[Beat] = []

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the worker that reads the partition."""
        if self._noted != view.beats:
            self._noted = list(view.beats)
            self._placer.note_beats(translate_beat(str(worker), beat) for worker, beat in enumerate(view.beats))
        assert request.chain is not None
        return self._placer.choose_partition(request.chain, range(view.num_workers), view.now_s).partition


def translate_beat(worker: str, beat: Beat) -> WorkerBeat:
    """Return a heartbeat as a placer has it; the worker's name is the number of its partition."""
    tokens: dict[PriorityClass, int] = {
        "interactive": beat.waiting_tokens - beat.batch_tokens, "batch": beat.batch_tokens,
    }  # fmt: skip
    read = {priority_class: (int(worker),) for priority_class in CLASSES}
    return WorkerBeat(worker, beat.at_s, beat.at_s + Placed.HEARTBEAT_LASTS_S, read, tokens, speed=beat.speed)


RULES: Mapping[str, Callable[[], Rule]] = {
    "round_robin": RoundRobin,
    "hash": Hash,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "cache_aware": CacheAware,
    "least_work_left": LeastWorkLeft,
    "mooncake": Mooncake,
    "ours": Placed,
}


def count_sent_tokens(view: View, worker: int) -> int:
    """Return the uncached prompt tokens that were sent to a worker since its heartbeat."""
    return sum(tokens for at_s, tokens in view.own[worker].sent if view.now_s - at_s <= MAX_SENT_S)


def compute_imbalance(workers: Sequence[SimulatedWorker]) -> float:
    """Return the busiest worker's seconds in steps, to the mean of all."""
    busy = [worker.busy_s for worker in workers]
    return max(busy) * len(busy) / max(sum(busy), 1e-9)
