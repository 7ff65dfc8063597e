"""Placement of requests: a placer's knowledge of the workers, and the rule by which it chooses one.

A placer is a gateway, or another producer. It sees heartbeats, which are late, and its own requests: when it sent them,
their first tokens and their ends. It does not see what other placers send. A worker stands for the partition it reads.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.bus.placement import PromptChain
from penstock.config.settings import SloSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.names import PriorityClass
from penstock.worker_speed import WorkerSpeed

MAX_REMEMBERED_BLOCKS = 2**17
"""The most blocks that a placer remembers; beyond that it forgets the blocks that were not sent for longest."""


@dataclass(frozen=True, eq=False)
class PlacedRequest:
    """A request as far as a placer and a simulated worker look at it."""

    id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...] = ()
    """Hashes of the full blocks of prompt and answer, each over all tokens up to the block's end. Empty: the request
    shares no block with another request."""
    session: str = ""
    chain: PromptChain | None = None
    """The prompt as a producer sees it; None if the rule that places the request ignores prompts."""
    priority_class: PriorityClass = "interactive"


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's speed and limits."""

    cost: StepCost
    num_blocks: int
    """KV blocks of its pool."""
    block_size: int = 16
    max_batch: int = 32
    max_step_tokens: int = 256
    slo: SloSettings = field(default_factory=SloSettings)
    """The longest gap beside prompts, and the time in which first tokens are to come."""

    def prompt_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        """Return the seconds that an idle worker takes for `num_tokens` prompt tokens after `num_before` others."""
        num_steps = -(-num_tokens // self.max_step_tokens)
        return num_steps * (self.cost.fixed_s + self.cost.chunk_s) + self.cost.chunk_seconds(num_tokens, num_before)


@dataclass
class Tier:
    """Stores of KV blocks, one for each host or one for all, which each worker reads at this rate."""

    bytes_per_s: float
    fixed_s: float
    block_bytes: int
    num_blocks: int
    """Blocks of a store."""
    workers_of_host: int = 0
    """The number of consecutive workers that share a store; 0: all workers share one."""
    _stores: defaultdict[int, OrderedDict[bytes, None]] = field(default_factory=lambda: defaultdict(OrderedDict))

    def fetch_seconds(self, num_blocks: int) -> float:
        """Return how many seconds a worker takes to fetch `num_blocks` blocks."""
        return self.fixed_s + num_blocks * self.block_bytes / self.bytes_per_s if num_blocks > 0 else 0.0

    def store_blocks(self, worker: int, keys: Sequence[bytes]) -> None:
        """Store blocks of a worker, in the place of those that were not used for longest."""
        blocks = self._find_store(worker)
        for key in reversed(keys):  # the first blocks are evicted last: later ones are useless without them
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self.num_blocks:
            blocks.popitem(last=False)

    def count_prefix(self, worker: int, keys: Sequence[bytes], start: int = 0) -> int:
        """Return how many of the leading blocks a worker has with those that it finds here from `start` on."""
        blocks = self._find_store(worker)
        return next((count for count in range(start, len(keys)) if keys[count] not in blocks), max(start, len(keys)))

    def _find_store(self, worker: int) -> OrderedDict[bytes, None]:
        return self._stores[worker // self.workers_of_host if self.workers_of_host else 0]


def plan_fetch(tiers: Sequence[Tier], worker: int, keys: Sequence[bytes], num_cached: int) -> tuple[int, float]:
    """Return how many leading blocks a worker has once it has fetched what its tiers have, and how long that takes.

    It has `num_cached` by itself. A block is read from the first tier that has it.
    """
    found, seconds = num_cached, 0.0
    for tier in tiers:
        before, found = found, tier.count_prefix(worker, keys, found)
        seconds += tier.fetch_seconds(found - before)
    return found, seconds


@dataclass(frozen=True)
class Beat:
    """A heartbeat."""

    at_s: float = 0.0
    waiting_tokens: int = 0
    """Prompt tokens left to compute, of requests that wait or run."""
    num_decodes: int = 0
    context_tokens: int = 0
    """Tokens before those that decode, of all of them together."""
    batch_tokens: int = 0
    """Those of the waiting tokens that belong to batch work."""
    speed: WorkerSpeed | None = None
    """None before the first heartbeat."""


@dataclass
class OwnLoad:
    """Requests that a placer has sent to a worker and whose end it has not seen."""

    num_requests: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts without first token yet, less those that the placer took to be cached there."""
    num_blocks: int = 0
    """Blocks of all prompts."""
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """The requests sent since the last heartbeat: the time of each, and its uncached prompt tokens."""


class View:
    """One placer's knowledge of the workers that read requests. Workers are numbered."""

    def __init__(self, num_workers: int, spec: WorkerSpec, tier: Tier | None, memory_s: float) -> None:
        self.num_workers, self.spec, self.tier = num_workers, spec, tier
        self.now_s = 0.0
        self.beats = [Beat()] * num_workers
        self.own = [OwnLoad() for _ in range(num_workers)]
        self.hits = [0] * num_workers
        """By worker: how many leading tokens of the request that is placed now it should have, as the placer sent it
        requests that begin so within `memory_s`."""
        self._memory_s = memory_s
        self._memory: OrderedDict[bytes, dict[int, float]] = OrderedDict()
        self._open: dict[PlacedRequest, tuple[int, int]] = {}

    def begin_request(self, request: PlacedRequest, now_s: float) -> None:
        """Set the time, and look up where the request's beginning is."""
        self.now_s = now_s
        if not self._memory_s:
            return
        self.hits, num_left, size = [0] * self.num_workers, self.num_workers, self.spec.block_size
        for index in reversed(range((request.prompt_tokens - 1) // size if request.keys else 0)):
            for worker, sent_s in self._memory.get(request.keys[index], {}).items():
                if not self.hits[worker] and now_s - sent_s <= self._memory_s:
                    self.hits[worker] = (index + 1) * size
                    num_left -= 1
            if not num_left:
                return

    def record_sent(self, request: PlacedRequest, worker: int) -> None:
        """Count a request that was sent to a worker."""
        uncached, own = request.prompt_tokens - self.hits[worker], self.own[worker]
        self._open[request] = worker, uncached
        own.num_requests += 1
        own.prompt_tokens += uncached
        own.num_blocks += -(-request.prompt_tokens // self.spec.block_size)
        own.sent.append((self.now_s, uncached))
        if self._memory_s:
            for key in reversed(request.keys[: request.prompt_tokens // self.spec.block_size]):
                self._memory.setdefault(key, {})[worker] = self.now_s
                self._memory.move_to_end(key)
            while len(self._memory) > MAX_REMEMBERED_BLOCKS:
                self._memory.popitem(last=False)

    def record_first_token(self, request: PlacedRequest) -> None:
        """Count the prompt as computed."""
        worker, uncached = self._open[request]
        self.own[worker].prompt_tokens -= uncached

    def record_end(self, request: PlacedRequest) -> None:
        """Count the request as done."""
        worker, _ = self._open.pop(request)
        self.own[worker].num_requests -= 1
        self.own[worker].num_blocks -= -(-request.prompt_tokens // self.spec.block_size)

    def record_beat(self, worker: int, beat: Beat) -> None:
        """Note a heartbeat. It counts the requests that were sent before it."""
        self.beats[worker] = beat
        sent = self.own[worker].sent
        while sent and sent[0][0] <= beat.at_s:
            sent.popleft()


class Rule(Protocol):
    """A rule of one placer. It may remember what it chose."""

    memory_s: float
    """Seconds for which the rule remembers a request that it sent to a worker; 0 if it does not use these requests."""

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the number of the worker for a request."""


class RoundRobin:
    """Each worker in turn."""

    memory_s = 0.0

    def __init__(self) -> None:
        self._turn = -1

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        """Return the number of the next worker."""
        self._turn += 1
        return self._turn % view.num_workers
