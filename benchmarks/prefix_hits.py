"""How many tokens of many tenants' requests are found, against an infinite cache: `benchmarks.prefix`."""

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.progress import track

from benchmarks.systems import DEMO_ENVIRONMENT, answer_requests, open_stack
from penstock.client.sync import Client
from penstock.local.stack import Stack
from penstock.messages import Timings

BLOCK_TOKENS = 16
NUM_TENANTS = 8
NUM_PREFIXES = 40
PREFIX_BLOCKS = (3, 12)
OWN_TOKENS = (8, 40)
"""Tokens that a request does not share."""
MAX_OPEN_REQUESTS = 8
"""The most requests that are sent and not answered."""
ANSWER_TOKENS = 2


@dataclass(frozen=True)
class SentPrompt:
    """The prompt of one request."""

    tenant: str
    prefix: int
    token_ids: list[int]


@dataclass(frozen=True)
class AnsweredPrompt:
    """A request and what was found for it."""

    asked: SentPrompt
    cached_tokens: int
    timings: Timings


@dataclass(frozen=True)
class Hits:
    """Tokens found, in the run and by simulated caches."""

    seen: Sequence[AnsweredPrompt]
    """In the order in which prefill took them."""
    requested_hits: Sequence[int]
    """For each request, the tokens that an infinite cache has that learns a prompt when prefill takes it."""
    computed_hits: Sequence[int]
    """For each request, the tokens that an infinite cache has that learns a prompt when its first token is out."""

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that was found."""
        return self._compute_share([one.cached_tokens for one in self.seen])

    @property
    def infinite_hit_rate(self) -> float:
        """The share that a cache would have found that knows all that was requested."""
        return self._compute_share(self.requested_hits)

    @property
    def known_hit_rate(self) -> float:
        """The share that a cache would have found that knows all that was computed."""
        return self._compute_share(self.computed_hits)

    @property
    def num_foreign_hits(self) -> int:
        """Requests that found something although no other request of their tenant had begun with that prefix."""
        groups: dict[tuple[str, int], list[AnsweredPrompt]] = {}
        for one in self.seen:
            groups.setdefault((one.asked.tenant, one.asked.prefix), []).append(one)
        return sum(
            one.cached_tokens > 0
            and not any(other.timings.prefill_started < one.timings.first_token for other in group if other is not one)
            for group in groups.values()
            for one in group
        )

    def compute_over_time(self, window: int = 100) -> dict[str, list[float]]:
        """Return the shares over the last `window` requests, in their order."""
        columns = {"found": [one.cached_tokens for one in self.seen], "infinite cache": list(self.requested_hits)}
        lengths = [len(one.asked.token_ids) for one in self.seen]
        ends = range(1, len(lengths) + 1)
        return {
            name: [sum(column[max(0, end - window) : end]) / sum(lengths[max(0, end - window) : end]) for end in ends]
            for name, column in columns.items()
        }

    def _compute_share(self, tokens: Sequence[int]) -> float:
        return sum(tokens) / sum(len(one.asked.token_ids) for one in self.seen)


class InfiniteCache:
    """Every block that every tenant ever had, by all tokens up to its end."""

    def __init__(self) -> None:
        self._blocks: set[tuple[str, tuple[int, ...]]] = set()

    def count_cached_tokens(self, asked: SentPrompt) -> int:
        """Return how many tokens of the prompt it has; the last one is never among them."""
        keys = itertools.takewhile(self._blocks.__contains__, self._make_keys(asked, len(asked.token_ids) - 1))
        return sum(1 for _ in keys) * BLOCK_TOKENS

    def add_prompt(self, asked: SentPrompt) -> None:
        """Add the prompt's full blocks."""
        self._blocks |= {*self._make_keys(asked, len(asked.token_ids))}

    @staticmethod
    def _make_keys(asked: SentPrompt, length: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield what names each full block of so many tokens."""
        for end in range(BLOCK_TOKENS, length + 1, BLOCK_TOKENS):
            yield asked.tenant, tuple(asked.token_ids[:end])


def simulate_caches(seen: Sequence[AnsweredPrompt]) -> Hits:
    """Return what infinite caches would have found."""
    taken = sorted(seen, key=lambda one: one.timings.prefill_started)
    asked, computed = InfiniteCache(), InfiniteCache()
    best, possible = [], []
    unknown = deque(sorted(seen, key=lambda one: one.timings.first_token))
    for one in taken:
        while unknown and unknown[0].timings.first_token <= one.timings.prefill_started:
            computed.add_prompt(unknown.popleft().asked)
        best.append(asked.count_cached_tokens(one.asked))
        possible.append(computed.count_cached_tokens(one.asked))
        asked.add_prompt(one.asked)
    return Hits(taken, best, possible)


def generate_prompts(count: int, vocabulary: int = 1000) -> Iterator[SentPrompt]:
    """Yield prompts of random tenants, with prefixes by zipf: the second is half as frequent as the first."""
    chance = random.Random(7)

    def tokens(low: int, high: int) -> list[int]:
        return [chance.randrange(3, vocabulary) for _ in range(chance.randint(low, high))]

    lengths = chance.choices(range(*PREFIX_BLOCKS), k=NUM_PREFIXES)
    prefixes = [tokens(blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS) for blocks in lengths]
    weights = [1 / rank for rank in range(1, NUM_PREFIXES + 1)]
    for _ in range(count):
        (prefix,) = chance.choices(range(NUM_PREFIXES), weights)
        yield SentPrompt(f"tenant-{chance.randrange(NUM_TENANTS)}", prefix, prefixes[prefix] + tokens(*OWN_TOKENS))


def send_prompts(client: Client, work: Sequence[SentPrompt]) -> list[AnsweredPrompt]:
    """Send all prompts, a few at a time; return them answered, in order."""
    requests = [
        {"token_ids": one.token_ids, "tenant": one.tenant, "max_tokens": ANSWER_TOKENS, "temperature": 0.0,
         "ignore_eos": True} for one in work
    ]  # fmt: skip
    answers = track(answer_requests(client, requests, MAX_OPEN_REQUESTS), "hit rate", len(work), transient=True)
    return [
        AnsweredPrompt(asked, answer.usage.cached_tokens, answer.timings)
        for asked, (_, answer) in zip(work, answers, strict=True)
    ]


def measure_hits(how: type[Stack], count: int) -> Hits:
    """Measure with two workers a stage, as processes."""
    environment = DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK_TOKENS)}
    with (
        open_stack(how, environment, pipeline="hits", prefill=2, decode=2) as stack,
        Client(stack.addresses) as client,
    ):
        return simulate_caches(send_prompts(client, list(generate_prompts(count))))
