"""How many tokens of many tenants' requests are found, against an infinite cache: `benchmarks.prefix`."""

import itertools
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from benchmarks.common import SHM, TIMEOUT_S
from penstock.client.sync import Client
from penstock.local.stack import Stack
from penstock.messages import Timings

BLOCK = 16
TENANTS = 8
PREFIXES = 40
PREFIX_BLOCKS = (3, 12)
OWN = (8, 40)
"""Tokens of each request's own."""
UNDER_WAY = 8
"""Requests sent and not answered, at most."""
NEW = 2


@dataclass(frozen=True)
class Asked:
    """One request."""

    tenant: str
    prefix: int
    token_ids: list[int]


@dataclass(frozen=True)
class Seen:
    """What became of it."""

    asked: Asked
    cached_tokens: int
    timings: Timings


@dataclass(frozen=True)
class Hits:
    """Tokens found: in the run, and offline."""

    seen: Sequence[Seen]
    """In the order in which prefill took them."""
    best: Sequence[int]
    """For each, what an infinite cache has that learns a prompt when prefill takes it."""
    possible: Sequence[int]
    """The same of a cache that learns a prompt when its first token is out."""

    @property
    def rate(self) -> float:
        """Share of all prompt tokens that was found."""
        return self._share([one.cached_tokens for one in self.seen])

    @property
    def infinite(self) -> float:
        """What would have been found by a cache that knows what was asked for."""
        return self._share(self.best)

    @property
    def known(self) -> float:
        """What would have been found by a cache that knows what was computed."""
        return self._share(self.possible)

    @property
    def foreign(self) -> int:
        """Requests that found something though nobody else of their tenant had begun with that prefix by then."""
        groups: dict[tuple[str, int], list[Seen]] = {}
        for one in self.seen:
            groups.setdefault((one.asked.tenant, one.asked.prefix), []).append(one)
        return sum(
            one.cached_tokens > 0
            and not any(other.timings.prefill_started < one.timings.first_token for other in group if other is not one)
            for group in groups.values()
            for one in group
        )

    def over_time(self, window: int = 100) -> dict[str, list[float]]:
        """Shares of the last `window` requests, as they came."""
        columns = {"found": [one.cached_tokens for one in self.seen], "infinite cache": list(self.best)}
        lengths = [len(one.asked.token_ids) for one in self.seen]
        ends = range(1, len(lengths) + 1)
        return {
            name: [sum(column[max(0, end - window) : end]) / sum(lengths[max(0, end - window) : end]) for end in ends]
            for name, column in columns.items()
        }

    def _share(self, tokens: Sequence[int]) -> float:
        return sum(tokens) / sum(len(one.asked.token_ids) for one in self.seen)


class Infinite:
    """Every block that every tenant ever had, by all tokens up to its end."""

    def __init__(self) -> None:
        self._blocks: set[tuple[str, int, tuple[int, ...]]] = set()

    def finds(self, asked: Asked) -> int:
        """How many tokens of the prompt it has; the last one is never among them."""
        ends = range(BLOCK, len(asked.token_ids), BLOCK)
        return sum(1 for _ in itertools.takewhile(lambda end: self._key(asked, end) in self._blocks, ends)) * BLOCK

    def learns(self, asked: Asked) -> None:
        """The prompt's full blocks."""
        self._blocks |= {self._key(asked, end) for end in range(BLOCK, len(asked.token_ids) + 1, BLOCK)}

    @staticmethod
    def _key(asked: Asked, end: int) -> tuple[str, int, tuple[int, ...]]:
        return asked.tenant, end, tuple(asked.token_ids[:end])


def offline(seen: Sequence[Seen]) -> Hits:
    """What infinite caches would have found."""
    taken = sorted(seen, key=lambda one: one.timings.prefill_started)
    asked, computed = Infinite(), Infinite()
    best, possible = [], []
    unknown = deque(sorted(seen, key=lambda one: one.timings.first_token))
    for one in taken:
        while unknown and unknown[0].timings.first_token <= one.timings.prefill_started:
            computed.learns(unknown.popleft().asked)
        best.append(asked.finds(one.asked))
        possible.append(computed.finds(one.asked))
        asked.learns(one.asked)
    return Hits(taken, best, possible)


def workload(count: int, vocabulary: int = 1000) -> Iterator[Asked]:
    """Tenants in random order, prefixes by zipf: the second is drawn half as often as the first, and so on."""
    chance = random.Random(7)

    def tokens(low: int, high: int) -> list[int]:
        return [chance.randrange(3, vocabulary) for _ in range(chance.randint(low, high))]

    prefixes = [tokens(low * BLOCK, low * BLOCK) for low in chance.choices(range(*PREFIX_BLOCKS), k=PREFIXES)]
    weights = [1 / rank for rank in range(1, PREFIXES + 1)]
    for _ in range(count):
        (prefix,) = chance.choices(range(PREFIXES), weights)
        yield Asked(f"tenant-{chance.randrange(TENANTS)}", prefix, prefixes[prefix] + tokens(*OWN))


def send(client: Client, work: Sequence[Asked]) -> list[Seen]:
    """All requests, a few at a time; in the order of the list."""
    seen: list[Seen] = []
    under_way: deque[tuple[str, Asked]] = deque()

    def take() -> None:
        request_id, asked = under_way.popleft()
        answer = client.result(request_id, timeout_s=TIMEOUT_S)
        seen.append(Seen(asked, answer.usage.cached_tokens, answer.timings))

    with Progress(transient=True) as progress:
        task = progress.add_task("hit rate", total=len(work))
        for asked in work:
            if len(under_way) == UNDER_WAY:
                take()
                progress.advance(task)
            request_id = client.submit(
                token_ids=asked.token_ids, tenant=asked.tenant, max_tokens=NEW, temperature=0.0, ignore_eos=True
            )
            under_way.append((request_id, asked))
        while under_way:
            take()
            progress.advance(task)
    return seen


def measure_hits(count: int) -> Hits:
    """Through two workers a stage, as processes."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-hits-", dir=SHM) as memory,
        tempfile.TemporaryDirectory(prefix="penstock-hits-") as directory,
    ):
        environment = {
            "PENSTOCK_ENGINE_DTYPE": "float32",
            "PENSTOCK_ENGINE_DEVICE": "cpu",
            "PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK),
            "PENSTOCK_KV_STORE_SHARED_DIR": memory,
        }
        with Stack(Path(directory), pipeline="hits", prefill=2, decode=2, environment=environment) as stack:
            stack.wait_until_ready(300)
            with Client(stack.addresses) as client:
                return offline(send(client, list(workload(count))))
