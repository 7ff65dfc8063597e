"""Where requests go, with real processes: Kafka, Redis, four workers and two producers, beside the simulator's word.

python -m benchmarks.placement_run [--middle | --quick | --smoke] [--json FILE] [--slow FACTOR]

Four `auto` workers run the loop, scheduler, pool and prefix cache of every worker; the model alone is replaced: a step
sleeps what it costs (`COST`), and every token is the same. There is no KV store below the pools. Two clients with a
producer each, of which each request takes one at random, stand for two gateways, which two cores have no time for
beside all this. Requests come at the times of a trace, whatever becomes of those before them.

    one_system_prompt   4,000 chats, 400 live at a time, with one system prompt of 2,000 characters and no sessions
    skewed              chats of 20 products, of which the largest has a third

A full run takes a good hour, `--middle` a quarter of one: 1,000 chats, 200 live at a time, and few rules in two rounds
of the second trace.

    hit_share_later_turns_{rule}    tokens of earlier turns, system prompt aside, found in the worker's own pool
    load_max_over_mean_s_{rule}     seconds in steps of the busiest worker to the mean
    ttft_p99_vs_hash_{trace}        the 99th percentile of the product's times to the first token to the hash's
    plan_error_{…}                  how far the simulator is off on the skewed trace, given what steps cost in the other
                                    and what passes beside them for a request that is alone
    rank_correlation_sim_vs_run     Kendall's, over pairs of rules that differ by more than 5% in the simulator

With `--slow` one of the workers is so many times slower. The second trace alone is played, on Redis Streams too, and at
half its rate: there pools have less of the prompts, as no chat has a home, and four equal workers do not carry more.

    in_time_{rule}                  the share of requests with a first token within a second
    ttft_p99_s_{rule}               the 99th percentile of the times to the first token
    slow_share_{rule}               the share that the slow worker computed

The rule `product` is the clients' own. For the others the same clients are told each partition.
"""

import asyncio
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.placement_sides import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    COST,
    ENVIRONMENT,
    MAX_BATCH,
    MAX_STEP_TOKENS,
    NUM_WORKERS,
    STEPS_VARIABLE,
    SYSTEM_TOKENS,
    Answered,
    Ask,
    Shape,
    SleepingStack,
    list_words,
    make_trace,
)
from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.client.aio import AsyncClient
from penstock.client.core import make_request
from penstock.config.settings import BusSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.errors import PenstockError
from penstock.local.stack import Stack
from penstock.messages import encode_request
from penstock.names import Pipeline
from penstock.ops.status import read_heartbeats
from penstock.plan.placing import Beat, PlacedRequest, View, WorkerSpec
from penstock.plan.simulator import Outcome, Simulation
from penstock.plan.trace import compute_quantile
from penstock.redis.client import redis_client
from sim.kafka_server import find_or_start_kafka
from sim.placement.rules import RULES

NUM_PRODUCERS = 2
IN_TIME_S = 1.0
"""How late a first token may be beside a slow worker: a fast one takes 0.27 s for the longest prompt."""
MIN_DIFFERENCE = 0.05
"""Rules are ranked where the simulator tells them apart by more than this share."""
NOTHING: dict[str, Any] = {"interactive": {"partitions": []}}
"""What a worker tells of its load that has not joined its group."""
MAX_BESIDE_S = 0.02
"""After a longer pause a worker most likely had nothing to do."""
PLANNED = "least_work_left"
"""The rule under which the simulator is held to the run."""
ALONE = Shape(5, 10.0, 4.0)
"""Of requests nearly all of which are alone."""


@dataclass(frozen=True)
class Extent:
    """How much is played."""

    one_system_prompt: Shape
    skewed: Shape
    rules: Sequence[str]
    """Those of the skewed trace beside the product's, and how often each plays it."""
    num_rounds: int
    alone: Shape = ALONE


FEW = ("hash", PLANNED, "round_robin")
FULL = Extent(Shape(4000, 700.0, 28.0), Shape(500, 100.0, 8.0, 20), tuple(RULES), 2)
MIDDLE = Extent(Shape(1000, 175.0, 14.0), Shape(250, 50.0, 4.0, 20), FEW, 2)
QUICK = Extent(Shape(60, 10.0, 1.5), Shape(50, 8.0, 1.5, 8), FEW, 1)
SMOKE = Extent(Shape(6, 0.5, 0.2), Shape(6, 0.5, 0.2, 2), FEW[:2], 1, Shape(1, 0.1, 0.2))


class Router:
    """Tells one client the partition of each message, by a rule over what the client sees."""

    def __init__(self, rule: str, spec: WorkerSpec, partitions: Sequence[int]) -> None:
        self._rule, self._partitions, self._lock = RULES[rule](), partitions, threading.Lock()
        self.view, self.placed = View(NUM_WORKERS, spec, None, self._rule.memory_s), dict[str, PlacedRequest]()

    def choose_partition(self, message: Outgoing) -> int:
        """Return the partition of a message."""
        placed = self.placed.get(message.key or "")
        if placed is None:
            return self._partitions[0]
        with self._lock:
            self.view.begin_request(placed, time.monotonic())
            worker = self._rule.choose_worker(placed, self.view)
            self.view.record_sent(placed, worker)
        return self._partitions[worker]

    def note_event(self, record: Callable[..., None], *given: Any) -> None:
        """Let the view record something."""
        with self._lock:
            record(*given)


class Site:
    """The stack, and what the workers noted of their steps."""

    def __init__(self, stack: Stack, steps: Path) -> None:
        self.stack, self._steps, self.words = stack, steps, list_words()
        self.pipeline = Pipeline(stack.addresses.pipeline)
        self._redis = redis_client(stack.addresses.first_url)
        self.names = [worker.taken_name or worker.name for worker in stack.workers]
        self.partitions, beats = list[int](), self.read_beats()  # no partitions on Redis Streams
        self.spec = WorkerSpec(COST, beats[0]["pool"]["total"], BLOCK_TOKENS, MAX_BATCH, MAX_STEP_TOKENS)

    def read_beats(self) -> list[dict[str, Any]]:
        """Return the heartbeats of the workers, in their order."""
        beats = {one["name"]: one for one in read_heartbeats(self._redis, self.pipeline)}
        return [beats[name] for name in self.names]

    def read_steps(self, since_s: float = 0.0) -> list[list[list[float]]]:
        """Return of each worker the steps since a time."""
        files = [(self._steps / f"{worker.name}.steps").read_text() for worker in self.stack.workers]
        steps = [[[float(word) for word in line.split()] for line in file.splitlines()] for file in files]
        return [[step for step in mine if step[0] >= since_s] for mine in steps]

    async def find_partitions(self) -> None:
        """Note a partition of each worker, once each reads some that no other one does."""
        read, until_s = list[list[int]](), time.monotonic() + TIMEOUT_S
        while not read or not all(read) or len(set().union(*read)) < sum(map(len, read)):
            if time.monotonic() > until_s:
                raise PenstockError(f"the workers read {read}: each has to read a partition that no other one does")
            await asyncio.sleep(1.0)  # after a start they may still be dealt out
            read = [beat.get("load", NOTHING)["interactive"]["partitions"] for beat in self.read_beats()]
        self.partitions = [mine[0] for mine in read]

    @asynccontextmanager
    async def open_clients(self, *routers: Router | None) -> AsyncIterator[list[AsyncClient]]:
        """Open a client for each router; without one it goes by its own rule."""
        async with AsyncExitStack() as exits:
            clients = [await exits.enter_async_context(AsyncClient(self.stack.addresses)) for _ in routers]
            for client, router in zip(clients, routers, strict=True):
                if router is not None:
                    publisher: Any = connect_bus(self.stack.addresses, BusSettings()).create_publisher()
                    publisher._partitions.choose_partition = router.choose_partition  # noqa: SLF001
                    client._publisher = publisher  # noqa: SLF001
            yield clients

    async def play_trace(self, trace: Sequence[Ask], rule: str, run: str, seed: int = 0) -> "Run":
        """Send the requests of a trace at their times, by a rule; return what became of them.

        The simulator gives each request to the same producer if it has the same seed.
        """
        routers = [
            None if rule == "product" else Router(rule, self.spec, self.partitions) for _ in range(NUM_PRODUCERS)
        ]
        chance = random.Random(seed)
        async with self.open_clients(*routers) as clients:
            for client in clients:  # who sends for the first time looks up the partitions
                await client.result(await client.submit(f"{run} ?", max_tokens=2), timeout_s=TIMEOUT_S)
            self._note_beats(routers)
            begun_s, since_s = time.monotonic(), time.time()
            beating = asyncio.create_task(self._note_beats_forever(routers))
            producers = list(zip(clients, routers, strict=True))
            pairs = [producers[chance.randrange(NUM_PRODUCERS)] for _ in trace]
            answered = await asyncio.gather(*(
                self._play_one(ask, client, router, run, begun_s)
                for ask, (client, router) in zip(trace, pairs, strict=True)
            ))  # fmt: skip
            beating.cancel()
        made = Run(rule, list(zip(trace, answered, strict=True)), self.read_steps(since_s))
        print(f"{run}: {made}", flush=True)
        return made

    async def _play_one(
        self, ask: Ask, client: AsyncClient, router: Router | None, run: str, begun_s: float
    ) -> Answered:
        due_s, request_id = begun_s + ask.placed.at_s, f"{run}-{ask.placed.id}"
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if router is not None:
            router.placed[request_id] = ask.placed
        messages, answered = ask.write_messages(run, self.words), Answered(ask.placed, ask.placed.at_s)
        encoded = encode_request(make_request(None, {
            "messages": messages, "id": request_id, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True,
        }))  # fmt: skip
        await client.send(encoded)
        if router is None:
            await answered.read_answer(client, request_id, begun_s)
        else:
            note_first = partial(router.note_event, router.view.record_first_token, ask.placed)
            await answered.read_answer(client, request_id, begun_s, note_first)
            router.note_event(router.view.record_end, ask.placed)
        return answered

    async def _note_beats_forever(self, routers: Sequence[Router | None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._note_beats(routers)

    def _note_beats(self, routers: Sequence[Router | None]) -> None:
        for worker, beat in enumerate(self.read_beats() if any(routers) else ()):
            load = beat["load"]["interactive"]
            for router in filter(None, routers):
                router.note_event(
                    router.view.record_beat, worker, Beat(time.monotonic(), load["waiting_tokens"], load["in_place"])
                )


@dataclass(frozen=True)
class Run:
    """A trace as it was played."""

    rule: str
    asked: list[tuple[Ask, Answered]]
    steps: list[list[list[float]]]

    @property
    def answered(self) -> list[Answered]:
        """The outcomes of its requests."""
        return [one for _, one in self.asked]

    @property
    def hit_share(self) -> float:
        """How many tokens of earlier turns were found."""
        later = [(ask.num_earlier_tokens, one) for ask, one in self.asked if ask.num_earlier_tokens]
        found = sum(max(0, one.cached_tokens - SYSTEM_TOKENS) for _, one in later)
        return found / max(1, sum(num for num, _ in later))

    @property
    def load_max_over_mean(self) -> float:
        """Seconds in steps of the busiest worker to the mean."""
        busy = [sum(step[1] for step in steps) for steps in self.steps]
        return max(busy) * len(busy) / sum(busy)

    def measure_cost(self) -> StepCost:
        """Return the cost of steps with what else passes between two that follow each other at once."""
        pairs = [pair for steps in self.steps for pair in pairwise(steps)]
        beside = [end_s - before_s - seconds for (before_s, _), (end_s, seconds) in pairs]
        extra_s = statistics.fmean(one for one in beside if one < MAX_BESIDE_S)
        print(f"{extra_s * 1000:.1f} ms pass beside each step")
        return replace(COST, fixed_s=COST.fixed_s + extra_s, outside_s=0.0)

    @property
    def slow_share(self) -> float:
        """How many of all steps the last worker made."""
        return len(self.steps[-1]) / sum(map(len, self.steps))

    @property
    def in_time(self) -> float:
        """How many requests had their first token in time."""
        return statistics.fmean(one.ttft_s <= IN_TIME_S for one in self.answered)

    def compute_ttft(self, q: float) -> float:
        """Return a quantile of the seconds to the first token."""
        return compute_quantile([one.ttft_s for one in self.answered], q)

    def __str__(self) -> str:
        ttft = f"first token p50 {self.compute_ttft(0.5):.3f}, p99 {self.compute_ttft(0.99):.3f} s"
        return f"{len(self.asked)} requests, {ttft}, hits {self.hit_share:.3f}, load {self.load_max_over_mean:.2f}"


def merge_rounds(rounds: Sequence[Run]) -> Run:
    """Return the requests of all rounds of a rule: where a hash sends a product's chats is chance in each of them."""
    steps = [[step for run in rounds for step in run.steps[worker]] for worker in range(NUM_WORKERS)]
    return Run(rounds[0].rule, [one for run in rounds for one in run.asked], steps)


def simulate_trace(
    trace: Sequence[Ask], rule: str, spec: WorkerSpec, way_s: float = 0.0, rounds: Sequence[int] = (0,)
) -> list[Outcome]:
    """Return what the simulator makes of a trace under a rule, in all rounds."""
    outcomes = list[Outcome]()
    for seed in rounds:
        rules = [RULES[rule]() for _ in range(NUM_PRODUCERS)]
        simulation = Simulation({"auto": (NUM_WORKERS, spec)}, rules, way_s=way_s, seed=seed)
        outcomes += simulation.run([ask.placed for ask in trace])
    return outcomes


def compare_plan(run: Run, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return how far the simulator was off, as a share of what was measured."""
    pairs = {
        "ttft": ([one.ttft_s for one in outcomes], [one.ttft_s for one in run.answered]),
        "itl": ([one.itl_s for one in outcomes], [one.itl_s for one in run.answered]),
    }
    planned = {f"{name}_p{q}": compute_quantile(one, q / 100) for name, (one, _) in pairs.items() for q in (50, 99)}
    measured = {f"{name}_p{q}": compute_quantile(one, q / 100) for name, (_, one) in pairs.items() for q in (50, 99)}
    planned["tokens_s"] = 1 / max(one.end_s for one in outcomes)
    measured["tokens_s"] = 1 / max(one.token_s[-1] for one in run.answered)
    for name, value in planned.items():
        print(f"{name}: planned {value:.4f}, measured {measured[name]:.4f}")
    return {f"plan_error_{name}": abs(value / measured[name] - 1) for name, value in planned.items()}


def correlate_ranks(planned: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return Kendall's correlation over the pairs of rules that the plan tells apart; nothing where there are none."""
    agreed = [
        math.copysign(1.0, (planned[one] - planned[other]) * (measured[one] - measured[other]))
        for one, other in combinations(planned, 2)
        if abs(planned[one] / planned[other] - 1) > MIN_DIFFERENCE
    ]
    return {"rank_correlation_sim_vs_run": statistics.fmean(agreed)} if agreed else {}


async def measure_way_s(site: Site, trace: Sequence[Ask], spec: WorkerSpec) -> float:
    """Return how long a request that is alone takes beside its steps: to its worker, and its first token back."""
    run, planned = await site.play_trace(trace, PLANNED, "alone"), simulate_trace(trace, PLANNED, spec)
    way_s = statistics.median(one.ttft_s - outcome.ttft_s for one, outcome in zip(run.answered, planned, strict=True))
    print(f"{way_s * 1000:.1f} ms pass beside the steps of a request")
    return way_s


async def play_all(site: Site, extent: Extent) -> dict[str, float]:
    """Play all traces by all rules; return the figures."""
    await site.find_partitions()
    figures = dict[str, float]()
    trace = make_trace(extent.one_system_prompt)
    runs = {rule: await site.play_trace(trace, rule, f"one-{rule}") for rule in ("hash", "product")}
    for rule, run in runs.items():
        figures[f"hit_share_later_turns_{rule}"] = run.hit_share
        figures[f"load_max_over_mean_s_{rule}"] = run.load_max_over_mean
    spec = replace(site.spec, cost=runs["hash"].measure_cost())
    figures["ttft_p99_vs_hash_one_system_prompt"] = runs["product"].compute_ttft(0.99) / runs["hash"].compute_ttft(0.99)
    way_s = await measure_way_s(site, make_trace(extent.alone), spec)
    trace, names, rounds = make_trace(extent.skewed), ["product", *extent.rules], range(extent.num_rounds)
    played = [
        await site.play_trace(trace, rule, f"skewed-{rule}-{number}", number) for number in rounds for rule in names
    ]
    runs = {rule: merge_rounds([run for run in played if run.rule == rule]) for rule in names}
    figures["ttft_p99_vs_hash_skewed"] = runs["product"].compute_ttft(0.99) / runs["hash"].compute_ttft(0.99)
    outcomes = {rule: simulate_trace(trace, rule, spec, way_s, rounds) for rule in names[1:]}
    figures |= compare_plan(runs[PLANNED], outcomes[PLANNED])
    planned = {rule: statistics.fmean(one.ttft_s for one in outcomes[rule]) for rule in outcomes}
    measured = {rule: statistics.fmean(one.ttft_s for one in runs[rule].answered) for rule in outcomes}
    return figures | correlate_ranks(planned, measured)


async def play_beside_slow(site: Site, extent: Extent) -> dict[str, float]:
    """Play the second trace where one worker is slower, by the product's rule and, on Kafka, by others."""
    on_kafka = bool(site.stack.addresses.kafka)
    if on_kafka:
        await site.find_partitions()
    figures, shape = dict[str, float](), extent.skewed
    trace = make_trace(replace(shape, length_s=2 * shape.length_s, gap_s=2 * shape.gap_s))
    for rule in ("product", PLANNED, "round_robin") if on_kafka else ("product",):
        run = await site.play_trace(trace, rule, f"slow-{rule}")
        name = rule if on_kafka else f"{rule}_streams"
        figures |= {f"in_time_{name}": run.in_time, f"slow_share_{name}": run.slow_share}
        figures[f"ttft_p99_s_{name}"] = run.compute_ttft(0.99)
    return figures


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, a size between a full run and a quick one, and how slow one worker is."""

    middle: bool = False
    slow: float = 1.0


@contextmanager
def start_site(kafka: str, slowness: float) -> Iterator[Site]:
    """Start the workers, and yield the site; on Redis Streams without Kafka's address."""
    with tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory:
        stack = SleepingStack(
            Path(directory, "stack"), pipeline="placement", kafka=kafka, prefill=0, decode=0, auto=NUM_WORKERS,
            environment=ENVIRONMENT | {STEPS_VARIABLE: directory},
        )  # fmt: skip
        stack.slowness = slowness
        with stack:
            stack.wait_until_ready(TIMEOUT_S)
            yield Site(stack, Path(directory))


def run(given: Options) -> dict[str, float]:
    """Start everything, and play."""
    extent = given.choose_size(MIDDLE if given.middle else FULL, QUICK, SMOKE)
    figures = dict[str, float]()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory,
        find_or_start_kafka(Path(directory)) as kafka,
        start_site(kafka, given.slow) as site,
    ):
        figures |= asyncio.run((play_all if given.slow == 1.0 else play_beside_slow)(site, extent))
    if given.slow != 1.0:
        with start_site("", given.slow) as site:
            figures |= asyncio.run(play_beside_slow(site, extent))
    return figures


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        run,
        Options,
        middle={"action": "store_true", "help": "a quarter of an hour"},
        slow={"type": float, "default": 1.0, "metavar": "FACTOR", "help": "by what one of the workers is slower"},
    )
