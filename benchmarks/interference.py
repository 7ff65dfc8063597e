"""The gaps of running streams beside long prompts, and whether they stay within the bound that is set for them.

python -m benchmarks.interference [--quick | --smoke] [--json FILE]

Two `auto` workers on Redis Streams, with the demo model in float32 and a thread a worker: eight interactive streams,
and requests with long prompts that come at regular times, as many as one worker can just compute the prompts of (full
load), or half as many. First they run without a bound, with at most 256 prompt tokens a step, in turns with one prefill
and one decode worker. From what both have as the 99th percentile of the gaps between the streams' tokens follow three
bounds (`PENSTOCK_SLO_INTERACTIVE_GAP_S`): that of the unbounded workers, two thirds of it, and 1.25 times that of the
stages apart. Two `auto` workers with each bound then take turns with the unbounded ones. Reported are the percentile
over the bound, and all output tokens a second, to those without a bound.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial

import numpy as np

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.comparison import measure_in_turns
from benchmarks.systems import DEMO_ENVIRONMENT, draw_tokens, make_request, open_stack
from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.messages import TokenEvent

NUM_STREAMS, PROMPT_TOKENS, STREAM_NEW = 8, 64, 256
"""Streams, the tokens of their prompts and of their answers. A stream that ends is replaced by another."""
LONG_PROMPT_TOKENS, LONG_NEW = 960, 16
APART, AUTO = {"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "auto": 2}
BOUND_VARIABLE = "PENSTOCK_SLO_INTERACTIVE_GAP_S"
UNBOUNDED = {BOUND_VARIABLE: "1000", "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "64"}
"""A step has at most four times as many tokens, whatever the bound."""
LOADS = {"half": 0.5, "full": 1.0}
"""The share of one worker's time that the long prompts take."""
_SETTLE_S = 1.0
"""How long streams run before gaps count; no longer than the window."""
chance = random.Random(20)


def compute_percentile_ms(gaps_s: list[float], percent: float) -> float:
    """Return a percentile, in milliseconds."""
    return float(np.percentile(gaps_s, percent)) * 1000


def measure_stream_gaps(answer: Callable[[], Iterator[object]], seconds: float, streams: int) -> list[float]:
    """Return the gaps between tokens of some streams at once in so many seconds, after they have settled."""
    begin_s = time.perf_counter() + min(_SETTLE_S, seconds)
    return collect_stream_gaps(answer, streams, lambda: begin_s, lambda: time.perf_counter() >= begin_s + seconds)


def collect_stream_gaps(
    answer: Callable[[], Iterator[object]], streams: int, find_begin_s: Callable[[], float], is_over: Callable[[], bool]
) -> list[float]:
    """Return the gaps between tokens of some streams at once, at least one. Each reads one answer after the other.

    Those count that begin after a time of the performance counter, and end before all is over.
    """
    gaps_s: list[float] = []

    def read_answers() -> None:
        while not (is_over() and gaps_s):
            last_s = 0.0
            with closing(answer()) as items:  # type: ignore[type-var]
                for _ in items:
                    now_s = time.perf_counter()
                    if is_over() and gaps_s:
                        return
                    if last_s >= find_begin_s():
                        gaps_s.append(now_s - last_s)
                    last_s = now_s

    with ThreadPoolExecutor(streams) as pool:
        for reader in [pool.submit(read_answers) for _ in range(streams)]:
            reader.result()
    return gaps_s


class StackSide:
    """A pipeline with streams, and long prompts at regular times."""

    stream_tokens = STREAM_NEW
    """The tokens of a stream's answer."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def measure_prompt_s(self, rounds: int) -> float:
        """Return the median of the seconds to the first token of a long prompt, with nothing else to do."""
        taken_s = []
        for _ in range(rounds):
            begun_s = time.perf_counter()
            next(self._client.stream(self._submit_request(LONG_PROMPT_TOKENS, LONG_NEW), timeout_s=TIMEOUT_S))
            taken_s.append(time.perf_counter() - begun_s)
        return statistics.median(taken_s)

    def run_window(self, seconds: float, every_s: float, _: int) -> tuple[list[float], float]:
        """Return the streams' gaps, and the output tokens a second of a window in which a long prompt comes each
        `every_s` seconds.
        """
        ended, long = threading.Event(), list[str]()

        def send() -> None:
            begun_s = time.perf_counter()
            while not ended.wait(max(0.0, begun_s + len(long) * every_s - time.perf_counter())):
                long.append(self._submit_request(LONG_PROMPT_TOKENS, LONG_NEW))

        sender = threading.Thread(target=send)
        sender.start()
        begun_s = time.perf_counter()
        gaps_s = measure_stream_gaps(self.stream_answer, seconds, NUM_STREAMS)
        taken_s = time.perf_counter() - begun_s
        ended.set()
        sender.join()
        for request_id in long:
            self._client.cancel(request_id)
        num_long = sum(map(self._count_tokens, long))
        return gaps_s, len(gaps_s) / seconds + num_long / taken_s

    def _submit_request(self, prompt_tokens: int, max_tokens: int) -> str:
        return self._client.submit(**make_request(draw_tokens(chance, prompt_tokens), max_tokens))

    def stream_answer(self) -> Iterator[object]:
        """Yield the tokens of an answer to a short prompt, which is cancelled if it is not read to its end."""
        request_id = self._submit_request(PROMPT_TOKENS, self.stream_tokens)
        try:
            for event in self._client.stream(request_id, timeout_s=TIMEOUT_S):
                if isinstance(event, TokenEvent):
                    yield event
        finally:
            self._client.cancel(request_id)

    def _count_tokens(self, request_id: str) -> int:
        """Return how many tokens an answer has that has ended, or was cancelled."""
        count = 0
        with suppress(PenstockError):
            for _ in self._client.stream(request_id, timeout_s=TIMEOUT_S):
                count += 1
        return count


Windows = list[tuple[list[float], float]]
"""The gaps and the tokens a second of each window of a side."""


def run_sides(sides: Mapping[str, StackSide], rounds: int, seconds: float, every_s: float) -> dict[str, Windows]:
    """Let the sides take turns; return their windows."""
    return measure_in_turns({name: partial(side.run_window, seconds, every_s) for name, side in sides.items()}, rounds)


def compute_gap_ms(windows: Windows) -> float:
    """Return the 99th percentile of the gaps of all windows."""
    return compute_percentile_ms([gap_s for gaps_s, _ in windows for gap_s in gaps_s], 99)


def run(given: Arguments) -> dict[str, float]:
    """Compare what each bound gives with what it asks for, and print; return the figures."""
    rounds, seconds = given.choose_size((8, 8.0), (2, 4.0), (1, 0.2))
    figures = dict[str, float]()

    def open_side(exits: ExitStack, workers: Mapping[str, int], **settings: str) -> StackSide:
        environment = DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_THREADS": "1"} | settings
        stack = exits.enter_context(open_stack(given.choose_stack(), environment, **workers))
        return StackSide(exits.enter_context(Client(stack.addresses)))

    with ExitStack() as exits:
        unbounded = open_side(exits, AUTO, **UNBOUNDED)
        with ExitStack() as others:
            apart = open_side(others, APART)
            prompt_s = apart.measure_prompt_s(given.choose_size(9, 5, 1))
            print(f"a prompt of {LONG_PROMPT_TOKENS} tokens takes {prompt_s * 1000:.0f} ms")
            sides = {"unbounded": unbounded, "apart": apart}
            before = {load: run_sides(sides, rounds, seconds, prompt_s / share) for load, share in LOADS.items()}
        for load, share in LOADS.items():
            today_ms, apart_ms = (compute_gap_ms(before[load][name]) for name in ("unbounded", "apart"))
            bounds_ms = {"today": today_ms, "two_thirds": today_ms / 1.5, "apart": apart_ms * 1.25}
            with ExitStack() as others:
                sides = {"unbounded": unbounded} | {
                    name: open_side(others, AUTO, **{BOUND_VARIABLE: str(bound_ms / 1000)})
                    for name, bound_ms in bounds_ms.items()
                }
                seen = run_sides(sides, rounds, seconds, prompt_s / share)
            print(f"{load} load; the stages apart had gaps of {apart_ms:.1f} ms (p99)")
            for name, windows in seen.items():
                gap_ms, rate = compute_gap_ms(windows), statistics.median(rate for _, rate in windows)
                bound = f"bound {bounds_ms[name]:6.1f} ms" if name in bounds_ms else ""
                print(f"{name:12} {bound:16} gaps of {gap_ms:6.1f} ms (p99), {rate:6.0f} tokens/s")
            for name, bound_ms in bounds_ms.items():
                pairs = zip(seen[name], seen["unbounded"], strict=True)
                figures[f"gap_p99_over_bound_{name}_{load}"] = compute_gap_ms(seen[name]) / bound_ms
                figures[f"tokens_vs_unbounded_{name}_{load}"] = statistics.median(
                    mine / theirs for (_, mine), (_, theirs) in pairs
                )
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
