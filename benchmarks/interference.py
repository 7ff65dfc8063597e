"""What a saturating batch job does to interactive streams: gaps between their tokens with it, and without.

python -m benchmarks.interference [--stack] [--quick | --smoke] [--json FILE]

Four interactive streams run all the time; in every second window a batch job of more requests than can be done waits
beside them. Two sides: the bare engine in this process, and the pipeline on Redis Streams with a prefill and a decode
worker, as a client sees it. The model is the demo model in float32, one thread a worker. A ratio is formed of two
windows that follow each other, the gaps of the one with the job to those of the one without; medians over the rounds
are reported, and the least, which is what other work on the machine disturbs least.

With `--stack` two forms of a pipeline are compared in place of that, one prefill and one decode worker, and two `auto`
workers: eight interactive streams, and requests with long prompts that come at regular times, as many as one worker can
just compute the prompts of (full load), or half as many. Both forms get the same requests, in windows that take turns.
Reported is how near two `auto` workers come to the better form of each round: the 99th percentile of the gaps between
the streams' tokens, and all output tokens a second.
"""

import contextlib
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.common import (
    Arguments,
    count_hand_offs,
    describe_machine,
    format_shares,
    format_spread,
    make_parser,
    report_figures,
)
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence, State
from penstock.errors import PenstockError
from penstock.local.stack import Stack
from penstock.messages import Sampling, TokenEvent
from penstock.names import PriorityClass

NUM_STREAMS = 4
PROMPT_TOKENS, STREAM_NEW = 64, 256
"""Tokens of a prompt, and of an interactive answer. A stream that ends is replaced by another."""
BATCH_ANSWER_TOKENS = (16, 96)
"""Tokens of a batch answer: minimum and maximum."""
PERCENTILES = (50, 99)
STACK_STREAMS, LONG_PROMPT_TOKENS, LONG_NEW = 8, 960, 16
"""With `--stack`: interactive streams, and the tokens of a long prompt and of the answer to it."""
FORMS = {"two_stages": (1, 1, 0), "auto": (0, 0, 2)}
"""With `--stack`: how many prefill, decode and auto workers each form has."""
LOADS = {"half": 0.5, "full": 1.0}
"""The share of one worker's time that the long prompts take."""
_TIMEOUT_S = 120.0
_SETTLE_S = 1.0
"""How long streams and job run before gaps count; no longer than the window."""
_SETTINGS = EngineSettings(dtype="float32", device="cpu", threads=1)
_ENVIRONMENT = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu"}
_chance = random.Random(20)


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and whether whole stacks are compared."""

    stack: bool = False


@dataclass
class WindowResult:
    """The outcome of one window."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of an interactive stream."""
    batch_tokens_per_s: float = 0.0


@dataclass
class SideResult:
    """The windows of one side, in pairs."""

    idle: list[WindowResult] = field(default_factory=list)
    busy: list[WindowResult] = field(default_factory=list)

    def compute_ratios(self, percent: float) -> list[float]:
        """Return for each round a percentile of the gaps with the batch job to that without."""
        pairs = zip(self.idle, self.busy, strict=True)
        return [
            compute_percentile_ms(busy.gaps_s, percent) / compute_percentile_ms(idle.gaps_s, percent)
            for idle, busy in pairs
        ]


class Side(Protocol):
    """A system to measure."""

    def run_window(self, seconds: float, *, busy: bool) -> WindowResult:
        """Run interactive streams for some seconds, beside a batch job if `busy`; stop both afterwards."""


def compute_percentile_ms(gaps_s: list[float], percent: float) -> float:
    """Return a percentile, in milliseconds."""
    return float(np.percentile(gaps_s, percent)) * 1000


def alternate_windows(name: str, side: Side, rounds: int, seconds: float) -> SideResult:
    """Alternate windows with and without the batch job; each goes first equally often."""
    measured = SideResult()
    for number in range(rounds):
        for busy in (False, True) if number % 2 == 0 else (True, False):
            seen = side.run_window(seconds, busy=busy)
            (measured.busy if busy else measured.idle).append(seen)
            gaps = ", ".join(f"p{percent} {compute_percentile_ms(seen.gaps_s, percent):.2f}" for percent in PERCENTILES)
            job = f"; batch {seen.batch_tokens_per_s:.0f} tokens/s" if busy else ""
            print(f"{name} round {number + 1} {'busy' if busy else 'idle'}: ITL {gaps} ms{job}", flush=True)
    return measured


def make_figures(name: str, measured: SideResult) -> dict[str, float]:
    """Return the ratios of one side: the median over the rounds, and the smallest."""
    figures = {}
    for percent in PERCENTILES:
        ratios = measured.compute_ratios(percent)
        figures[f"{name}_itl_p{percent}_ratio"] = statistics.median(ratios)
        figures[f"{name}_itl_p{percent}_ratio_least"] = min(ratios)
    return figures


def make_prompt(length: int = PROMPT_TOKENS) -> list[int]:
    """Return random tokens, unlike any other prompt's."""
    return [_chance.randrange(3, 1000) for _ in range(length)]


def draw_batch_tokens() -> int:
    """Return how many tokens the next batch answer has."""
    return _chance.randint(*BATCH_ANSWER_TOKENS)


class EngineSide:
    """The engine alone: it computes prompts and answers of both classes."""

    def __init__(self, settings: EngineSettings = _SETTINGS, waiting: int = 64) -> None:
        self._engine, self._waiting = open_engine(settings), waiting
        self._engine.pool_mapping.wait_until_done()
        self._names = itertools.count()

    def run_window(self, seconds: float, *, busy: bool) -> WindowResult:
        """Measure a window, as `Side` says."""
        engine, seen, alive = self._engine, WindowResult(), set[Sequence]()
        last_s: dict[Sequence, float] = {}
        begin_s = time.perf_counter() + min(_SETTLE_S, seconds)
        while (now_s := time.perf_counter()) < begin_s + seconds or not seen.gaps_s:
            streams = sum(seq.klass == "interactive" for seq in alive)
            job = len(alive) - streams
            for _ in range(NUM_STREAMS - streams):
                alive.add(self._add_sequence(STREAM_NEW, busy=False))
            for _ in range(self._waiting - job if busy else 0):
                alive.add(self._add_sequence(draw_batch_tokens(), busy=True))
            for seq, *_ in engine.step():
                now_s = time.perf_counter()
                seen.batch_tokens_per_s += (seq.klass == "batch" and now_s >= begin_s) / seconds
                if seq.klass == "interactive":
                    if last_s.get(seq, 0.0) >= begin_s:
                        seen.gaps_s.append(now_s - last_s[seq])
                    last_s[seq] = now_s
            # A step may bring several tokens of a sequence, the last ones behind its end.
            for seq in [one for one in alive if one.state is State.DONE]:
                engine.remove_sequence(seq)
                alive.remove(seq)
        for seq in alive:
            engine.remove_sequence(seq)
        return seen

    def _add_sequence(self, max_new: int, *, busy: bool) -> Sequence:
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        seq = Sequence(str(next(self._names)), make_prompt(), sampling=sampling, seed=0, max_new_tokens=max_new,
                       klass="batch" if busy else "interactive")  # fmt: skip
        self._engine.add_sequence(seq)
        return seq


class PipelineSide:
    """The pipeline as a client sees it. The job is submitted before its window, and cancelled after it."""

    def __init__(self, client: Client, job: int) -> None:
        """Measure with a client; `job` is the number of requests, more than a window can answer."""
        self._client, self._job, self.num_sent = client, job, 0

    def run_window(self, seconds: float, *, busy: bool) -> WindowResult:
        """Measure a window, as `Side` says."""
        job = [self._submit_request(draw_batch_tokens(), busy=True) for _ in range(self._job if busy else 0)]
        begun_s = time.perf_counter()
        seen = WindowResult(measure_stream_gaps(self._stream_answer, seconds))
        taken_s = time.perf_counter() - begun_s
        for request_id in job:
            self._client.cancel(request_id)
        seen.batch_tokens_per_s = sum(map(self._count_tokens, job)) / taken_s
        return seen

    def _submit_request(self, max_tokens: int, *, busy: bool) -> str:
        klass: PriorityClass = "batch" if busy else "interactive"
        self.num_sent += 1
        return self._client.submit(
            token_ids=make_prompt(), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, klass=klass
        )

    def _stream_answer(self) -> Iterator[object]:
        request_id = self._submit_request(STREAM_NEW, busy=False)
        try:
            for event in self._client.stream(request_id, timeout_s=_TIMEOUT_S):
                if isinstance(event, TokenEvent):
                    yield event
        finally:
            self._client.cancel(request_id)

    def _count_tokens(self, request_id: str) -> int:
        """Return how many tokens an answer has that has ended, or was cancelled."""
        count = 0
        with contextlib.suppress(PenstockError):
            for _ in self._client.stream(request_id, timeout_s=_TIMEOUT_S):
                count += 1
        return count


class StackSide(PipelineSide):
    """A pipeline with eight streams, and long prompts at regular times."""

    def measure_prompt_s(self, rounds: int) -> float:
        """Return the median of the seconds to the first token of a long prompt, with nothing else to do."""
        taken_s = []
        for _ in range(rounds):
            begun_s = time.perf_counter()
            next(self._client.stream(self._submit_long(), timeout_s=_TIMEOUT_S))
            taken_s.append(time.perf_counter() - begun_s)
        return statistics.median(taken_s)

    def run_loaded_window(self, seconds: float, every_s: float) -> tuple[float, float]:
        """Return the 99th percentile of the streams' gaps in milliseconds, and the output tokens a second of a window
        in which a long prompt comes each `every_s` seconds.
        """
        ended, long = threading.Event(), list[str]()

        def send() -> None:
            begun_s = time.perf_counter()
            while not ended.wait(max(0.0, begun_s + len(long) * every_s - time.perf_counter())):
                long.append(self._submit_long())

        sender = threading.Thread(target=send)
        sender.start()
        begun_s = time.perf_counter()
        gaps_s = measure_stream_gaps(self._stream_answer, seconds, STACK_STREAMS)
        taken_s = time.perf_counter() - begun_s
        ended.set()
        sender.join()
        for request_id in long:
            self._client.cancel(request_id)
        num_long = sum(map(self._count_tokens, long))
        return compute_percentile_ms(gaps_s, 99), len(gaps_s) / seconds + num_long / taken_s

    def _submit_long(self) -> str:
        self.num_sent += 1
        return self._client.submit(
            token_ids=make_prompt(LONG_PROMPT_TOKENS), max_tokens=LONG_NEW, temperature=0.0, ignore_eos=True
        )


def measure_stream_gaps(
    answer: Callable[[], Iterator[object]], seconds: float, streams: int = NUM_STREAMS
) -> list[float]:
    """Return the gaps between tokens of some streams at once, at least one. Each reads one answer after the other."""
    gaps_s: list[float] = []
    begin_s = time.perf_counter() + min(_SETTLE_S, seconds)

    def read() -> None:
        while time.perf_counter() < begin_s + seconds or not gaps_s:
            last_s = 0.0
            with contextlib.closing(answer()) as items:  # type: ignore[type-var]
                for _ in items:
                    now_s = time.perf_counter()
                    if now_s >= begin_s + seconds and gaps_s:
                        return
                    if last_s >= begin_s:
                        gaps_s.append(now_s - last_s)
                    last_s = now_s

    with ThreadPoolExecutor(streams) as pool:
        for reader in [pool.submit(read) for _ in range(streams)]:
            reader.result()
    return gaps_s


def run_stacks(given: Options) -> dict[str, float]:
    """Compare the forms of a pipeline, and print; return the figures."""
    rounds, seconds = given.choose_size((8, 8.0), (2, 4.0), (1, 0.2))
    figures, causes = dict[str, float](), Counter[str]()
    with contextlib.ExitStack() as exits:
        stacks, sides = dict[str, Stack](), dict[str, StackSide]()
        environment = _ENVIRONMENT | {"PENSTOCK_ENGINE_THREADS": "1"}
        for name, (prefill, decode, auto) in FORMS.items():
            directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
            stack = given.choose_stack()(directory, prefill=prefill, decode=decode, auto=auto, environment=environment)
            stacks[name] = exits.enter_context(stack)
        for name, stack in stacks.items():
            stack.wait_until_ready(300)
            sides[name] = StackSide(exits.enter_context(Client(stack.addresses)), 0)
        prompt_s = sides["two_stages"].measure_prompt_s(given.choose_size(9, 5, 1))
        print(f"a prompt of {LONG_PROMPT_TOKENS} tokens takes {prompt_s * 1000:.0f} ms")
        for load, share in LOADS.items():
            seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            num_sent = sides["auto"].num_sent
            for number in range(rounds):
                for name in sides if number % 2 == 0 else reversed(sides):
                    seen[name].append(sides[name].run_loaded_window(seconds, prompt_s / share))
                    itl_ms, rate = seen[name][-1]
                    print(f"{load} load, {name}: ITL p99 {itl_ms:.2f} ms, {rate:.0f} tokens/s", flush=True)
            pairs = list(zip(seen["auto"], seen["two_stages"], strict=True))
            gaps = [min(auto[0], other[0]) / auto[0] for auto, other in pairs]
            rates = [auto[1] / max(auto[1], other[1]) for auto, other in pairs]
            figures[f"interference_auto_itl_p99_vs_best_{load}"] = statistics.median(gaps)
            figures[f"interference_auto_tokens_vs_best_{load}"] = statistics.median(rates)
            causes, before = count_hand_offs(stacks["auto"]), causes
            print(f"{load} load, auto: {format_shares(causes - before, sides['auto'].num_sent - num_sent)}")
    return figures


def run(given: Options) -> dict[str, float]:
    """Measure and print; return the figures."""
    if given.stack:
        return run_stacks(given)
    rounds, seconds = given.choose_size((8, 8.0), (2, 2.0), (1, 0.2))
    engine = alternate_windows("engine", EngineSide(), rounds, seconds)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory,
        given.choose_stack()(Path(directory), environment=_ENVIRONMENT) as stack,
    ):
        stack.wait_until_ready(300)
        with Client(stack.addresses) as client:
            side = PipelineSide(client, given.choose_size(400, 400, 20))
            side.run_window(min(1.0, seconds), busy=True)
            pipeline = alternate_windows("pipeline", side, rounds, seconds)
    print(f"\n{describe_machine()}; demo model, float32, {NUM_STREAMS} streams")
    for name, measured in (("engine", engine), ("pipeline", pipeline)):
        for percent in PERCENTILES:
            print(
                f"{name:9} ITL p{percent} with a batch job to without: "
                f"{format_spread(measured.compute_ratios(percent))}"
            )
    return make_figures("engine", engine) | make_figures("pipeline", pipeline)


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--stack", action="store_true", help="compare pipelines with and without auto workers")
    given = Options(**vars(parser.parse_args()))
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
