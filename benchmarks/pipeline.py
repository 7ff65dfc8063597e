"""What the pipeline costs: time to first token, throughput and processor time, against the same engine in process.

python -m benchmarks.pipeline [--quick | --smoke] [--json FILE] [--mixed | --late]

The sides take turns: the bare engine with a worker's settings (one thread), and on Redis Streams and on Kafka each of
these pipelines: a prefill and a decode worker; one `auto` worker (one hop, one thread); two of these. Time to first
token is of one request at a time; throughput is output tokens a second of many requests sent at once, until the last
one's end was read. The bare engine on two threads runs before the pipelines are started and after they have ended: its
spinning threads lose most of their speed beside anything else.

Processor time is that of all processes of a side, the broker apart, of as many requests with 4 tokens each, and of
those that throughput is measured with: the difference of the two loads tells what a token costs. Memory is the workers'
once they have answered all that.

With `--mixed` random weights of 134 million parameters in bfloat16 are taken in place of all that, and requests with
log-normal lengths of prompts and answers: two `auto` workers with a thread each, against the bare engine on two threads
with a pool and a batch as large as those of both.

With `--late` two `auto` workers (on Kafka if there is one), and their client, reach the stream's Redis through a relay
that hands each reply on at once, 1 ms late and 5 ms late in turn.
"""

import contextlib
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Arguments,
    format_spread,
    run_benchmark,
)
from benchmarks.comparison import Rounds, compute_ratio, draw_boxes, measure_in_turns, print_table
from benchmarks.peers.shapes import SHAPES
from benchmarks.processor import Cost, Meter, find_brokers, read_proportional_bytes
from benchmarks.systems import (
    DEMO_ENVIRONMENT,
    DEMO_TOKENS,
    GREEDY,
    answer_requests,
    draw_tokens,
    list_pids,
    make_request,
    open_stack,
    write_shape,
)
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine.opening import open_engine
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.text.detokenizer import Detokenizer
from penstock.errors import DependencyMissing
from penstock.local.stack import REDIS_MB_VARIABLE, Stack
from penstock.local.valkey import ValkeyServer
from sim.chaos.proxy import Proxy
from sim.kafka_server import find_or_start_kafka

BARE, TWO_THREADS = "bare", "bare, two threads"
# All workers are on this host: they share blocks in memory, as where `Stack` starts the Valkey server.
ENVIRONMENT = DEMO_ENVIRONMENT | {REDIS_MB_VARIABLE: "0"}
SETTINGS = EngineSettings(dtype="float32", device="cpu")
FORMS = {
    "": {"prefill": 1, "decode": 1}, "one_hop_": {"prefill": 0, "decode": 0, "auto": 1},
    "two_one_hop_": {"prefill": 0, "decode": 0, "auto": 2},
}  # fmt: skip
"""Workers of each pipeline, by how the names of its sides begin, which end with the name of the bus."""
SHORT_ANSWER_TOKENS = 4
"""Tokens of an answer whose cost is that of the request, not that of its tokens."""
MIXED_PROMPT_TOKENS, MIXED_ANSWER_TOKENS = (1020, 1155), (129, 211)
"""Median and mean of the lengths in the mixed load."""
MIXED_MAX_TOKENS = 2000
"""Neither a prompt nor an answer of it is longer."""
MIXED_POOL_MB, MIXED_BATCH = 512, 32
"""Of each of the two workers."""
MIXED_TIMEOUT_S = 1800.0
LATE_MS = (0, 1, 5)
"""How much later replies of the stream's Redis come in each side with `--late`."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and whether the mixed load or a late Redis is measured."""

    mixed: bool = False
    late: bool = False


class EngineSide:
    """The engine in this process, with nothing around it but tokens and text."""

    def __init__(self, threads: int, settings: EngineSettings = SETTINGS) -> None:
        self._engine = open_engine(settings.model_copy(update={"threads": threads}))
        self._engine.pool_mapping.wait_until_done()
        self._threads = threads

    def measure_first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds from the prompt to its first token's text."""
        return 1 / self.measure_tokens_per_s([prompt], 1)

    def measure_tokens_per_s(self, prompts: Prompts, max_new: int | list[int]) -> float:
        """Return the output tokens per second over all prompts at once."""
        import torch

        torch.set_num_threads(self._threads)
        begun_s, num_new = time.perf_counter(), count_new_tokens(prompts, max_new)
        model, states = self._engine.model, {}
        for number, (prompt, count) in enumerate(zip(prompts, num_new, strict=True)):
            sampling = GREEDY.model_copy(update={"max_tokens": count})
            seq = EngineSequence(str(number), prompt, sampling=sampling, seed=0, max_new_tokens=count)
            self._engine.add_sequence(seq)
            states[seq.id] = Detokenizer(model.tokenizer, sampling, model.eos_token_ids, count)
        while self._engine.has_work():
            for seq, token_id, *_ in self._engine.step():
                if states[seq.id].add_token(token_id)[1] is not None:
                    self._engine.remove_sequence(seq)
        return sum(num_new) / (time.perf_counter() - begun_s)


class PipelineSide:
    """The pipeline, as a client sees it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def measure_first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds from the prompt to its first token's text, at the client."""
        begun_s = time.perf_counter()
        events = self._client.generate(**make_request(prompt, 2))
        next(events)
        taken_s = time.perf_counter() - begun_s
        for _ in events:
            pass
        return taken_s

    def measure_tokens_per_s(self, prompts: Prompts, max_new: int | list[int]) -> float:
        """Return the output tokens per second over all prompts at once, until every end was read."""
        begun_s, num_new = time.perf_counter(), count_new_tokens(prompts, max_new)
        requests = map(make_request, prompts, num_new)
        answers = answer_requests(self._client, requests, len(prompts), MIXED_TIMEOUT_S)
        assert [len(answer.token_ids) for _, answer in answers] == num_new
        return sum(num_new) / (time.perf_counter() - begun_s)


def count_new_tokens(prompts: Prompts, max_new: int | list[int]) -> list[int]:
    """Return how many tokens each answer has: all equally many, or each its own number."""
    return max_new if isinstance(max_new, list) else [max_new] * len(prompts)


def make_prompts(chance: random.Random, count: int, low: int, high: int, vocabulary: range = DEMO_TOKENS) -> Prompts:
    """Return prompts of random tokens, all different."""
    return [draw_tokens(chance, chance.randint(low, high), vocabulary) for _ in range(count)]


@dataclass(frozen=True)
class Side:
    """A system to measure, what it costs, and its pipeline if it has one."""

    engine: EngineSide | PipelineSide
    meter: Meter
    stack: Stack | None = None


def start_kafka(exits: contextlib.ExitStack, directory: Path) -> str:
    """Return the address of a broker, which `exits` stops; empty where none can be started, and say why."""
    try:
        return exits.enter_context(find_or_start_kafka(directory / "kafka"))
    except DependencyMissing as missing:
        print(f"without Kafka: {missing}")
        return ""


@contextlib.contextmanager
def open_sides(given: Options) -> Iterator[dict[str, Side]]:
    """Start all sides."""
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        buses, started = {"embedded": ""}, dict[str, tuple[ValkeyServer, Stack]]()
        if kafka := start_kafka(exits, directory):
            buses["kafka"] = kafka
        for (bus, kafka), (way, workers) in itertools.product(buses.items(), FORMS.items()):
            # In a smoke run the other forms say nothing more.
            if given.size == "smoke" and (way.startswith("two") or (kafka and not way)):
                continue
            name, num_workers = way + bus, sum(workers.values())
            server = exits.enter_context(ValkeyServer(directory / f"{name}-valkey"))
            # Two workers have a core and a thread each; one has as many threads as the bare engine.
            environment = ENVIRONMENT | ({"PENSTOCK_ENGINE_THREADS": "1"} if num_workers == 1 else {})
            stack = given.choose_stack()(
                directory / name, pipeline=name.replace("_", "-"), kafka=kafka, redis=server.url,
                environment=environment, **workers,
            )  # fmt: skip
            started[name] = server, exits.enter_context(stack)
        made = {BARE: Side(EngineSide(1), Meter([os.getpid()]))}
        for name, (server, stack) in started.items():
            stack.wait_until_ready(300)
            piped = PipelineSide(exits.enter_context(Client(stack.addresses)))
            assert server.pid is not None
            pids = [os.getpid(), server.pid, *list_pids(stack)]
            made[name] = Side(piped, Meter(pids, find_brokers() if stack.addresses.kafka else ()), stack)
        yield made


def measure_two_threads(rounds: int, load: int, max_new: int) -> list[float]:
    """Return the throughput of the bare engine on two threads, with nothing else running; the first round warms up."""
    engine = EngineSide(2)
    prompts = (make_prompts(random.Random(number), load, 32, 160) for number in range(rounds + 1))
    return [engine.measure_tokens_per_s(one, max_new) for one in prompts][1:]


def draw_length(chance: random.Random, median: float, mean: float) -> int:
    """Return a length of a log-normal distribution, or the longest one of the mixed load."""
    drawn = chance.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))
    return min(MIXED_MAX_TOKENS, max(1, round(drawn)))


def run_mixed(given: Options) -> dict[str, float]:
    """Measure the mixed load and print; return its figure."""
    rounds, load, pool_mb, shorter = given.choose_size(
        (3, 48, MIXED_POOL_MB, 1), (1, 8, MIXED_POOL_MB, 1), (1, 2, 32, 16)
    )
    shape = SHAPES[given.choose_size("small", "small", "smoke")]
    how = {"model": str(write_shape(shape)), "dtype": "bfloat16", "device": "cpu"}

    def make_settings(num_workers: int) -> dict[str, Any]:
        return how | {"pool_mb": num_workers * pool_mb, "max_batch": num_workers * MIXED_BATCH}

    settings = EngineSettings.model_validate(make_settings(2))
    environment = {f"PENSTOCK_ENGINE_{name.upper()}": str(value) for name, value in make_settings(1).items()}

    def measure(side: EngineSide | PipelineSide, first: int) -> list[float]:
        """Return the rates of the rounds from a first one on, each with prompts of its own."""
        rates = []
        for number in range(first, first + rounds):
            chance = random.Random(f"{number} mixed")
            lengths = [1 + draw_length(chance, *MIXED_PROMPT_TOKENS) // shorter for _ in range(load)]
            prompts = [draw_tokens(chance, length) for length in lengths]
            num_new = [1 + draw_length(chance, *MIXED_ANSWER_TOKENS) // shorter for _ in prompts]
            rates.append(side.measure_tokens_per_s(prompts, num_new))
        return rates

    rates = {TWO_THREADS: measure(EngineSide(2, settings), 0)}
    with (
        open_stack(
            given.choose_stack(), ENVIRONMENT | environment | {"PENSTOCK_ENGINE_THREADS": "1"}, **FORMS["two_one_hop_"]
        ) as stack,
        Client(stack.addresses) as client,
    ):
        rates["two auto workers"] = measure(PipelineSide(client), 0) + measure(PipelineSide(client), rounds)
    rates[TWO_THREADS] += measure(EngineSide(2, settings), rounds)
    print_table(rates, f"output tokens/s; {shape.name} shape, bfloat16, {load} requests at once")
    return {"throughput_ratio_mixed": compute_ratio(rates, "two auto workers", TWO_THREADS)}


def run_late(given: Options) -> dict[str, float]:
    """Measure with a stream's Redis that answers late, and print; return the ratios to one that does not."""
    rounds, load, max_new = given.choose_size((8, 160, 64), (3, 96, 64), (1, 4, 8))
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        kafka = start_kafka(exits, directory)
        server = exits.enter_context(ValkeyServer(directory / "valkey"))
        relay = exits.enter_context(Proxy(server.port))
        how = {"kafka": kafka, "redis": f"redis://127.0.0.1:{relay.port}/0", **FORMS["two_one_hop_"]}
        stack = exits.enter_context(open_stack(given.choose_stack(), ENVIRONMENT, **how))
        side = PipelineSide(exits.enter_context(Client(stack.addresses)))

        def measure_late_replies(late_ms: int, number: int) -> tuple[float, float]:
            """Return the seconds to the first token, and the tokens per second of many requests at once."""
            relay.delay_replies(late_ms / 1000)
            chance = random.Random(f"{late_ms} ms late, {number}")
            firsts_s = [side.measure_first_token_s(prompt) for prompt in make_prompts(chance, 5, 64, 64)]
            return statistics.median(firsts_s), side.measure_tokens_per_s(make_prompts(chance, load, 32, 160), max_new)

        sides = {f"{late} ms late": partial(measure_late_replies, late) for late in LATE_MS}
        found = measure_in_turns(sides, rounds, num_warm=1)
    firsts, rates = ({name: [one[index] for one in both] for name, both in found.items()} for index in (0, 1))
    print(f"demo model, float32, two auto workers{' on Kafka' * bool(kafka)}; the stream's Redis is behind a relay")
    print_table(firsts, "ms to the first token", 1000)
    print_table(rates, f"output tokens/s, {load} requests at once")
    return {
        f"{what}_ratio_{late}_ms_late": compute_ratio(values, f"{late} ms late", "0 ms late")
        for what, values in (("throughput", rates), ("ttft", firsts))
        for late in LATE_MS[1:]
    }


def run(given: Options) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    rounds, each, load, max_new = given.choose_size((8, 10, 160, 64), (2, 5, 96, 64), (1, 1, 4, 8))
    wide = measure_two_threads(max(1, rounds // 3), load, max_new)
    with open_sides(given) as all_sides:
        for side in all_sides.values():
            side.engine.measure_tokens_per_s(make_prompts(random.Random(1), 8, 16, 64), 8)
        for side in () if given.size == "smoke" else all_sides.values():
            side.meter.wait_idle()

        def measure_firsts(name: str, number: int) -> list[float]:
            work = make_prompts(random.Random(f"{name} first {number}"), each, 64, 64)
            return [all_sides[name].engine.measure_first_token_s(prompt) for prompt in work]

        def measure_load(new: int, name: str, number: int) -> tuple[float, Cost]:
            side, work = all_sides[name], make_prompts(random.Random(f"{number} of {new}"), load, 32, 160)
            return side.meter.measure_load(lambda: side.engine.measure_tokens_per_s(work, new))

        def measure_loads(name: str, number: int) -> tuple[Cost, float, Cost]:
            _, short = measure_load(SHORT_ANSWER_TOKENS, name, number)
            return short, *measure_load(max_new, name, number)

        by_round = measure_in_turns({name: partial(measure_firsts, name) for name in all_sides}, rounds, "first token")
        firsts = {name: list(itertools.chain(*found)) for name, found in by_round.items()}
        sides = {name: partial(measure_loads, name) for name in all_sides}
        loads = measure_in_turns(sides, max(1, rounds * 3 // 4), "throughput")
        pids = {name: list_pids(side.stack) for name, side in all_sides.items() if side.stack is not None}
        memory = {name: read_proportional_bytes(own) for name, own in pids.items()}
    wide += measure_two_threads(max(1, rounds // 3), load, max_new)
    rates = {name: [rate for _, rate, _ in found] for name, found in loads.items()} | {TWO_THREADS: wide}
    short = {name: [cost for cost, _, _ in found] for name, found in loads.items()}
    long = {name: [cost for _, _, cost in found] for name, found in loads.items()}
    print("demo model, float32")
    print_table(firsts, "ms to the first token", 1000)
    print_table(rates, "output tokens/s")
    for name, costs in short.items():
        told = format_spread([cost.own_s / load * 1000 for cost in costs])
        print(f"{name:32} {told:28} ms of processor time for {SHORT_ANSWER_TOKENS} tokens")
    if given.is_full:
        firsts_ms = {name: [value * 1000 for value in values] for name, values in firsts.items()}
        charts: dict[str, Rounds] = {
            "ms to the first token, one request at a time": firsts_ms,
            "output tokens/s, all at once": rates,
        }
        draw_boxes("pipeline", charts, xlim=(0, None))
    figures = compare_sides(firsts, rates) | make_cost_figures(short, long, load, max_new - SHORT_ANSWER_TOKENS)
    return figures | {"memory_vs_two_workers": memory["one_hop_embedded"] / memory["embedded"]}


def compare_sides(firsts: Mapping[str, list[float]], rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the pipeline's sides relative to the bare engine."""
    figures = {}
    first, rate = ({name: statistics.median(found) for name, found in given.items()} for given in (firsts, rates))
    for name in (name for name in firsts if name != BARE):
        figures[f"ttft_added_ms_p50_{name}"] = (first[name] - first[BARE]) * 1000
        figures[f"throughput_ratio_{name}"] = rate[name] / rate[BARE]
        figures[f"throughput_ratio_{name}_to_two_threads"] = rate[name] / rate[TWO_THREADS]
    return dict(sorted(figures.items(), reverse=True))


Costs = Mapping[str, Sequence[Cost]]
"""Of each side, round by round."""


def make_cost_figures(short: Costs, long: Costs, num_requests: int, num_more_tokens: int) -> dict[str, float]:
    """Return what the pipeline's sides add to the bare engine, within a round. Each of so many requests has so many
    more tokens in the long load than in the short one.
    """

    def list_added_s(costs: Costs, side: str) -> list[float]:
        return [cost.own_s - bare.own_s for cost, bare in zip(costs[side], costs[BARE], strict=True)]

    figures: dict[str, float] = {}
    for side in (side for side in short if side != BARE):
        added_s = list_added_s(short, side)
        figures[f"cpu_ms_per_request_added_{side}"] = statistics.median(added_s) / num_requests * 1000
        brokers_s = [cost.broker_s for cost in short[side]]
        if any(brokers_s):
            name = f"cpu_ms_per_request_{side.removesuffix('kafka')}broker"
            figures[name] = statistics.median(brokers_s) / num_requests * 1000
        if side == "embedded":
            slopes = [more - less for more, less in zip(list_added_s(long, side), added_s, strict=True)]
            figures["cpu_us_per_token_added"] = statistics.median(slopes) / (num_requests * num_more_tokens) * 1e6
            ratios = (added / bare.own_s for added, bare in zip(added_s, short[BARE], strict=True))
            figures["cpu_ratio_added"] = statistics.median(ratios)
    return figures


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda given: (run_mixed if given.mixed else run_late if given.late else run)(given),
        Options,
        mixed={"action": "store_true", "help": "measure the mixed load in place of all else"},
        late={"action": "store_true", "help": "measure a stream's Redis that answers late in place of all else"},
    )
