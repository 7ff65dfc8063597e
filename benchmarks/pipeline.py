"""What the pipeline costs: time to first token, throughput and processor time, against the same engine in process.

python -m benchmarks.pipeline [--quick | --smoke] [--json FILE] [--before FOLDER | --mixed]

The sides take turns in one run: the bare engine with a worker's settings (one thread), and on Redis Streams and on
Kafka each of these pipelines: one prefill and one decode worker; one worker that serves both stages (one hop, with one
thread as the bare engine has); two of these. With `--before`, also one prefill and one decode worker with the modules
of another checkout, whose native libraries are built. Time to first token is of one request at a time; throughput is
output tokens per second of many requests sent at once, until the last one's end was read.

Processor time is that of all processes of a side: workers, Valkey and the client, the broker apart; the bare engine is
one process. It is taken of as many requests with 4 tokens each, and of those that throughput is measured with: the
difference of the two loads tells what a token costs. What a side adds is formed within a round, in which all sides
have the same prompts. Nothing is measured before all engines have mapped their pools. What Redis reads and what the
broker takes are also measured of requests of 16 tokens, one at a time and 64 at once. Memory is compared of the workers
alone, once they have answered all that.

The pipeline of two stages has two workers, so its throughput is also compared with one engine on two threads. That
engine runs before the pipelines are started and after they have ended: its spinning threads lose most of their speed
beside anything else.

With `--mixed` a mixed load is measured in place of all that, with random weights of 134 million parameters in bfloat16:
requests sent at once whose prompts and answers have log-normal lengths, answered by two `auto` workers with a thread
each, on Redis Streams, and by the bare engine on two threads with a pool and a batch as large as those of both.
"""

import contextlib
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis
from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks.common import (
    Arguments,
    count_hand_offs,
    describe_machine,
    format_shares,
    format_spread,
    make_parser,
    report_figures,
    save_plot,
)
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.write import make_model_directory
from benchmarks.processor import BARE, Cost, Loads, Meter, find_brokers, read_proportional_bytes
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine.detokenizer import Detokenizer
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence
from penstock.errors import DependencyMissing
from penstock.local.kafka import find_or_start_kafka
from penstock.local.stack import REDIS_MB_VARIABLE, Stack
from penstock.local.valkey import ValkeyServer
from penstock.messages import Sampling
from penstock.redis.client import redis_client

# All workers are on this host: they share blocks in memory, as where `Stack` starts the Valkey server.
ENVIRONMENT = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu", REDIS_MB_VARIABLE: "0"}
SETTINGS = EngineSettings(dtype="float32", device="cpu")
TWO_THREADS = "bare, two threads"
SHORT_ANSWER_TOKENS = 4
"""Tokens of an answer whose cost is that of the request, not that of its tokens."""
FEW_ANSWER_TOKENS = 16
"""Tokens of an answer where what Redis and the broker do for a request is measured."""
MIXED_PROMPT_TOKENS, MIXED_ANSWER_TOKENS = (1020, 1155), (129, 211)
"""Median and mean of the lengths in the mixed load."""
MIXED_MAX_TOKENS = 2000
"""Neither a prompt nor an answer of it is longer."""
MIXED_POOL_MB, MIXED_BATCH = 512, 32
"""Of each of the two workers."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and a checkout to compare with, or whether the mixed load is measured."""

    before: Path | None = None
    mixed: bool = False


@dataclass(frozen=True)
class Form:
    """How many workers of each kind a pipeline has, and their modules where they are another checkout's."""

    prefill: int = 0
    decode: int = 0
    auto: int = 0
    checkout: Path | None = None

    def make_environment(self) -> dict[str, str]:
        """Return the environment of its workers. Two of them have a core and a thread each; one has as many threads as
        the bare engine.
        """
        environment = dict(ENVIRONMENT)
        if self.checkout is not None:
            environment["PYTHONPATH"] = os.pathsep.join(
                str(folder.parent.resolve()) for folder in self.checkout.glob("*/penstock")
            )
        if self.prefill + self.decode + self.auto == 1:
            environment["PENSTOCK_ENGINE_THREADS"] = "1"
        return environment


FORMS = {"": Form(prefill=1, decode=1), "one_hop_": Form(auto=1), "two_one_hop_": Form(auto=2)}
"""By how the names of their sides begin, which end with the name of the bus."""


class EngineSide:
    """The engine in this process, with nothing around it but tokens and text."""

    def __init__(self, threads: int, settings: EngineSettings = SETTINGS) -> None:
        self._engine = open_engine(settings.model_copy(update={"threads": threads}))
        self._engine.pool_mapping.wait_until_done()
        self._threads = threads

    def measure_first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds from the prompt to its first token's text."""
        begun_s = time.perf_counter()
        self._run_prompts([prompt], [1])
        return time.perf_counter() - begun_s

    def measure_tokens_per_s(self, prompts: Prompts, max_new: int | list[int]) -> float:
        """Return the output tokens per second over all prompts at once."""
        begun_s, num_new = time.perf_counter(), count_new_tokens(prompts, max_new)
        self._run_prompts(prompts, num_new)
        return sum(num_new) / (time.perf_counter() - begun_s)

    def _run_prompts(self, prompts: Prompts, num_new: list[int]) -> None:
        import torch

        torch.set_num_threads(self._threads)
        model, engine = self._engine.model, self._engine
        states = {}
        for number, (prompt, max_new) in enumerate(zip(prompts, num_new, strict=True)):
            sampling = Sampling(temperature=0, max_tokens=max_new, ignore_eos=True)
            seq = Sequence(str(number), prompt, sampling=sampling, seed=0, max_new_tokens=max_new)
            engine.add_sequence(seq)
            states[seq.id] = Detokenizer(model.tokenizer, sampling, model.eos_token_ids, max_new)
        while engine.has_work():
            for seq, token_id, *_ in engine.step():
                if states[seq.id].add_token(token_id)[1] is not None:
                    engine.remove_sequence(seq)


class PipelineSide:
    """The pipeline, as a client sees it."""

    def __init__(self, client: Client) -> None:
        self._client, self.num_requests = client, 0

    def measure_first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds from the prompt to its first token's text, at the client."""
        self.num_requests += 1
        begun_s = time.perf_counter()
        events = self._client.generate(token_ids=prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
        next(events)
        taken_s = time.perf_counter() - begun_s
        for _ in events:
            pass
        return taken_s

    def measure_tokens_per_s(self, prompts: Prompts, max_new: int | list[int]) -> float:
        """Return the output tokens per second over all prompts at once, until every end was read."""
        self.num_requests += len(prompts)
        begun_s, num_new = time.perf_counter(), count_new_tokens(prompts, max_new)
        ids = [
            self._client.submit(token_ids=prompt, max_tokens=num, temperature=0.0, ignore_eos=True)
            for prompt, num in zip(prompts, num_new, strict=True)
        ]
        tokens = sum(len(self._client.result(request_id, timeout_s=1800).token_ids) for request_id in ids)
        assert tokens == sum(num_new)
        return tokens / (time.perf_counter() - begun_s)


def count_new_tokens(prompts: Prompts, max_new: int | list[int]) -> list[int]:
    """Return how many tokens each answer has: all equally many, or each its own number."""
    return max_new if isinstance(max_new, list) else [max_new] * len(prompts)


def make_prompts(chance: random.Random, count: int, low: int, high: int) -> Prompts:
    """Return prompts of random tokens, all different."""
    return [[chance.randrange(3, 1000) for _ in range(chance.randint(low, high))] for _ in range(count)]


@dataclass(frozen=True)
class Side:
    """A system to measure, and its processes."""

    engine: EngineSide | PipelineSide
    meter: Meter
    workers: list[int]
    """The pids of its workers."""
    stack: Stack | None = None


@contextlib.contextmanager
def open_sides(given: Options) -> Iterator[dict[str, Side]]:
    """Start all sides and warm them up."""
    forms = {} if given.before is None else {"before_": Form(prefill=1, decode=1, checkout=given.before)}
    forms |= given.choose_size(FORMS, FORMS, {name: FORMS[name] for name in ("", "one_hop_")})
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        buses, servers, stacks = {"embedded": ""}, dict[str, ValkeyServer](), dict[str, Stack]()
        try:
            buses["kafka"] = exits.enter_context(find_or_start_kafka(directory / "kafka"))
        except DependencyMissing as missing:
            print(f"without Kafka: {missing}")
        for name, form, kafka in ((way + bus, form, at) for bus, at in buses.items() for way, form in forms.items()):
            servers[name] = exits.enter_context(ValkeyServer(directory / f"{name}-valkey"))
            how = given.choose_stack() if form.checkout is None else Stack
            stacks[name] = how(
                directory / name, pipeline=name.replace("_", "-"), kafka=kafka, redis=servers[name].url,
                prefill=form.prefill, decode=form.decode, auto=form.auto, environment=form.make_environment(),
            )  # fmt: skip
            exits.enter_context(stacks[name])
        made = {BARE: Side(EngineSide(1), Meter([os.getpid()]), [])}
        for name, stack in stacks.items():
            stack.wait_until_ready(300)
            piped = PipelineSide(exits.enter_context(Client(stack.addresses)))
            workers = [worker.child.pid for worker in stack.workers if worker.child is not None]
            pid = servers[name].pid
            assert pid is not None
            reader = exits.enter_context(redis_client(servers[name].url))
            brokers = find_brokers() if stack.addresses.kafka else ()
            made[name] = Side(
                piped, Meter([os.getpid(), pid, *workers], brokers, partial(_count_reads, reader)), workers, stack
            )
        yield made


def _count_reads(server: "redis.Redis") -> float:
    return float(server.info("stats")["total_reads_processed"])


def run_in_turns(
    rounds: int, names: list[str], what: str, once: Callable[[str, int], list[float]]
) -> dict[str, list[float]]:
    """Run `once` for each side in turn, repeatedly; return its values by side."""
    found: dict[str, list[float]] = {name: [] for name in names}
    # A bar that draws itself again and again takes processor time from whoever is measured.
    with Progress(transient=True, auto_refresh=False) as progress:
        task = progress.add_task(what, total=rounds * len(names))
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                found[name] += once(name, number)
                progress.advance(task)
                progress.refresh()
    return found


def measure_two_threads(rounds: int, load: int, max_new: int) -> list[float]:
    """Return the throughput of the bare engine on two threads, with nothing else running."""
    engine = EngineSide(2)
    return [
        engine.measure_tokens_per_s(make_prompts(random.Random(number), load, 32, 160), max_new)
        for number in range(rounds + 1)
    ][1:]


def draw_length(chance: random.Random, median: float, mean: float) -> int:
    """Return a length of a log-normal distribution, or the longest one of the mixed load."""
    drawn = chance.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))
    return min(MIXED_MAX_TOKENS, max(1, round(drawn)))


def run_mixed(given: Options) -> dict[str, float]:
    """Measure the mixed load and print; return its figure."""
    rounds, load = given.choose_size((3, 48), (1, 8), (1, 2))
    shape = SHAPES[given.choose_size("small", "small", "smoke")]
    model = str(make_model_directory(shape, DIRECTORY / "models"))
    settings = EngineSettings.model_validate(
        {
            "model": model,
            "dtype": "bfloat16",
            "device": "cpu",
            "pool_mb": 2 * MIXED_POOL_MB,
            "max_batch": 2 * MIXED_BATCH,
        }
    )
    environment = Form(auto=2).make_environment() | {
        "PENSTOCK_ENGINE_MODEL": model, "PENSTOCK_ENGINE_DTYPE": "bfloat16", "PENSTOCK_ENGINE_THREADS": "1",
        "PENSTOCK_ENGINE_POOL_MB": str(MIXED_POOL_MB), "PENSTOCK_ENGINE_MAX_BATCH": str(MIXED_BATCH),
    }  # fmt: skip

    def measure(side: EngineSide | PipelineSide, first: int) -> list[float]:
        """Return the rates of the rounds from a first one on, each with prompts of its own."""
        rates = []
        for number in range(first, first + rounds):
            chance = random.Random(f"{number} mixed")
            lengths = [draw_length(chance, *MIXED_PROMPT_TOKENS) for _ in range(load)]
            prompts = [make_prompts(chance, 1, length, length)[0] for length in lengths]
            num_new = [draw_length(chance, *MIXED_ANSWER_TOKENS) for _ in prompts]
            rates.append(side.measure_tokens_per_s(prompts, num_new))
        return rates

    bare = measure(EngineSide(2, settings), 0)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory,
        given.choose_stack()(Path(directory), prefill=0, decode=0, auto=2, environment=environment) as stack,
    ):
        stack.wait_until_ready(300)
        with Client(stack.addresses) as client:
            piped = measure(PipelineSide(client), 0) + measure(PipelineSide(client), rounds)
        causes = count_hand_offs(stack)
    bare += measure(EngineSide(2, settings), rounds)
    print(f"{describe_machine()}; {shape.name} shape, bfloat16, {load} requests at once")
    for name, rates in ((TWO_THREADS, bare), ("two auto workers", piped)):
        print(f"{name:20} throughput {format_spread(rates):28} tokens/s")
    print(format_shares(causes, 2 * rounds * load))
    return {"throughput_ratio_mixed": statistics.median(own / other for own, other in zip(piped, bare, strict=True))}


def run(given: Options) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    if given.mixed:
        return run_mixed(given)
    rounds, each, load, max_new = given.choose_size((8, 10, 160, 64), (2, 5, 96, 64), (1, 1, 4, 8))
    wide = measure_two_threads(max(1, rounds // 3), load, max_new)
    with open_sides(given) as all_sides:
        names = list(all_sides)
        for side in all_sides.values():
            side.engine.measure_tokens_per_s(make_prompts(random.Random(1), 8, 16, 64), 8)
        for side in all_sides.values():
            side.meter.wait_idle()

        def first(name: str, number: int) -> list[float]:
            work = make_prompts(random.Random(f"{name} first {number}"), each, 64, 64)
            return [all_sides[name].engine.measure_first_token_s(prompt) for prompt in work]

        firsts = run_in_turns(rounds, names, "time to first token", first)
        rates, loads = measure_throughput(all_sides, max(1, rounds * 3 // 4), load, max_new)
        measure_few(all_sides, max(1, rounds // 3), given.choose_size((16, 64), (8, 64), (1, 2)), loads)
        for name, side in all_sides.items():
            if side.stack is not None and isinstance(side.engine, PipelineSide):
                print(f"{name:20} {format_shares(count_hand_offs(side.stack), side.engine.num_requests)}")
        memory = {name: read_proportional_bytes(all_sides[name].workers) for name in names if all_sides[name].workers}
    wide += measure_two_threads(max(1, rounds // 3), load, max_new)
    print(f"{describe_machine()}; demo model, float32")
    for name in names:
        milliseconds = [value * 1000 for value in firsts[name]]
        print(
            f"{name:20} first token {format_spread(milliseconds):28} ms   "
            f"throughput {format_spread(rates[name]):28} tokens/s"
        )
    print(f"{TWO_THREADS:20} {'':43} throughput {format_spread(wide):28} tokens/s")
    for name in names:
        costs_ms = [cost.own_s / load * 1000 for cost in loads.short_costs[name]]
        print(
            f"{name:20} processor time of a request with {SHORT_ANSWER_TOKENS} tokens {format_spread(costs_ms):28} ms"
        )
    if given.is_full:
        draw_plot(firsts, rates | {TWO_THREADS: wide})
    memory_ratio = memory["one_hop_embedded"] / memory["embedded"]
    return compare_sides(firsts, rates, wide) | loads.make_figures() | {"memory_vs_two_workers": memory_ratio}


def measure_throughput(
    all_sides: dict[str, Side], rounds: int, load: int, max_new: int
) -> tuple[dict[str, list[float]], Loads]:
    """Return the throughput of each side, and the processor time of its long and its short answers."""
    loads = Loads(load, SHORT_ANSWER_TOKENS, max_new)

    def measured(name: str, number: int, new: int, costs: dict[str, list[Cost]]) -> float:
        work = make_prompts(random.Random(f"{number} of {new}"), load, 32, 160)
        rate, cost = all_sides[name].meter.measure_load(lambda: all_sides[name].engine.measure_tokens_per_s(work, new))
        costs.setdefault(name, []).append(cost)
        return rate

    def once(name: str, number: int) -> list[float]:
        measured(name, number, SHORT_ANSWER_TOKENS, loads.short_costs)
        return [measured(name, number, max_new, loads.long_costs)]

    return run_in_turns(rounds, list(all_sides), "throughput", once), loads


def measure_few(all_sides: dict[str, Side], rounds: int, num: tuple[int, int], loads: Loads) -> None:
    """Measure what requests of some tokens cost: so many one at a time, and so many at once."""

    def once(name: str, number: int) -> list[float]:
        engine, meter = all_sides[name].engine, all_sides[name].meter
        alone, at_once = (make_prompts(random.Random(f"{number} few"), count, 32, 32) for count in num)

        def run_alone() -> float:
            return sum(engine.measure_tokens_per_s([prompt], FEW_ANSWER_TOKENS) for prompt in alone)

        loads.alone_costs.setdefault(name, []).append(meter.measure_load(run_alone)[1])
        _, cost = meter.measure_load(lambda: engine.measure_tokens_per_s(at_once, FEW_ANSWER_TOKENS))
        loads.at_once_costs.setdefault(name, []).append(cost)
        return []

    run_in_turns(rounds, list(all_sides), "reads", once)


def compare_sides(firsts: dict[str, list[float]], rates: dict[str, list[float]], wide: list[float]) -> dict[str, float]:
    """Return the pipeline's sides relative to the bare engine."""
    figures = {}
    for name in (name for name in firsts if name != "bare"):
        added_s = statistics.median(firsts[name]) - statistics.median(firsts["bare"])
        figures[f"ttft_added_ms_p50_{name}"] = added_s * 1000
        rate = statistics.median(rates[name])
        figures[f"throughput_ratio_{name}"] = rate / statistics.median(rates["bare"])
        figures[f"throughput_ratio_{name}_to_two_threads"] = rate / statistics.median(wide)
    return dict(sorted(figures.items(), reverse=True))


def draw_plot(firsts: dict[str, list[float]], rates: dict[str, list[float]]) -> None:
    """Draw both measurements, every side, every sample's spread."""
    figure = Figure(figsize=(14, 3.6))
    left, right = figure.subplots(1, 2)
    labels = [name.replace("_", "\n") for name in firsts]
    left.boxplot([[value * 1000 for value in values] for values in firsts.values()], tick_labels=labels)
    left.set_title("time to first token, one request at a time")
    left.set_ylabel("ms")
    right.boxplot(list(rates.values()), tick_labels=[*labels, TWO_THREADS.replace(" ", "\n")])
    right.set_title("output tokens/s, all requests at once")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    save_plot(figure, "pipeline")


def main() -> None:
    parser = make_parser(__doc__ or "")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--before", type=Path, help="compare with the workers of this checkout")
    what.add_argument("--mixed", action="store_true", help="measure the mixed load in place of all else")
    given = Options(**vars(parser.parse_args()))
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
