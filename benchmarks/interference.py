"""What long prompts do to running streams: workers of both stages, against the stages apart.

python -m benchmarks.interference [--quick | --smoke] [--json FILE]

One prefill and one decode worker, and two `auto` workers, on Redis Streams, with the demo model in float32 and a thread
a worker: eight interactive streams, and requests with long prompts that come at regular times, as many as one worker
can just compute the prompts of (full load), or half as many. Both forms get the same requests, in windows that take
turns. Reported is how near two `auto` workers come to the better form of each round: the 99th percentile of the gaps
between the streams' tokens, and all output tokens a second.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial

import numpy as np

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.comparison import measure_in_turns, print_table
from benchmarks.systems import DEMO_ENVIRONMENT, draw_tokens, make_request, open_stack
from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.messages import TokenEvent

NUM_STREAMS, PROMPT_TOKENS, STREAM_NEW = 8, 64, 256
"""Streams, the tokens of their prompts and of their answers. A stream that ends is replaced by another."""
LONG_PROMPT_TOKENS, LONG_NEW = 960, 16
FORMS = {"two_stages": {"prefill": 1, "decode": 1}, "auto": {"prefill": 0, "decode": 0, "auto": 2}}
LOADS = {"half": 0.5, "full": 1.0}
"""The share of one worker's time that the long prompts take."""
_SETTLE_S = 1.0
"""How long streams run before gaps count; no longer than the window."""
chance = random.Random(20)


def compute_percentile_ms(gaps_s: list[float], percent: float) -> float:
    """Return a percentile, in milliseconds."""
    return float(np.percentile(gaps_s, percent)) * 1000


def measure_stream_gaps(answer: Callable[[], Iterator[object]], seconds: float, streams: int) -> list[float]:
    """Return the gaps between tokens of some streams at once, at least one. Each reads one answer after the other."""
    gaps_s: list[float] = []
    begin_s = time.perf_counter() + min(_SETTLE_S, seconds)

    def read_answers() -> None:
        while time.perf_counter() < begin_s + seconds or not gaps_s:
            last_s = 0.0
            with closing(answer()) as items:  # type: ignore[type-var]
                for _ in items:
                    now_s = time.perf_counter()
                    if now_s >= begin_s + seconds and gaps_s:
                        return
                    if last_s >= begin_s:
                        gaps_s.append(now_s - last_s)
                    last_s = now_s

    with ThreadPoolExecutor(streams) as pool:
        for reader in [pool.submit(read_answers) for _ in range(streams)]:
            reader.result()
    return gaps_s


class StackSide:
    """A pipeline with streams, and long prompts at regular times."""

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

    def run_window(self, seconds: float, every_s: float, _: int) -> tuple[float, float]:
        """Return the 99th percentile of the streams' gaps in milliseconds, and the output tokens a second of a window
        in which a long prompt comes each `every_s` seconds.
        """
        ended, long = threading.Event(), list[str]()

        def send() -> None:
            begun_s = time.perf_counter()
            while not ended.wait(max(0.0, begun_s + len(long) * every_s - time.perf_counter())):
                long.append(self._submit_request(LONG_PROMPT_TOKENS, LONG_NEW))

        sender = threading.Thread(target=send)
        sender.start()
        begun_s = time.perf_counter()
        gaps_s = measure_stream_gaps(self._stream_answer, seconds, NUM_STREAMS)
        taken_s = time.perf_counter() - begun_s
        ended.set()
        sender.join()
        for request_id in long:
            self._client.cancel(request_id)
        num_long = sum(map(self._count_tokens, long))
        return compute_percentile_ms(gaps_s, 99), len(gaps_s) / seconds + num_long / taken_s

    def _submit_request(self, prompt_tokens: int, max_tokens: int) -> str:
        return self._client.submit(**make_request(draw_tokens(chance, prompt_tokens), max_tokens))

    def _stream_answer(self) -> Iterator[object]:
        request_id = self._submit_request(PROMPT_TOKENS, STREAM_NEW)
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


def run(given: Arguments) -> dict[str, float]:
    """Compare the forms, and print; return the figures."""
    rounds, seconds = given.choose_size((8, 8.0), (2, 4.0), (1, 0.2))
    figures, environment = dict[str, float](), DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_THREADS": "1"}
    with ExitStack() as exits:
        stacks = {name: open_stack(given.choose_stack(), environment, **workers) for name, workers in FORMS.items()}
        opened = {name: exits.enter_context(stack) for name, stack in stacks.items()}
        sides = {name: StackSide(exits.enter_context(Client(stack.addresses))) for name, stack in opened.items()}
        prompt_s = sides["two_stages"].measure_prompt_s(given.choose_size(9, 5, 1))
        print(f"a prompt of {LONG_PROMPT_TOKENS} tokens takes {prompt_s * 1000:.0f} ms")
        for load, share in LOADS.items():
            windows = {name: partial(side.run_window, seconds, prompt_s / share) for name, side in sides.items()}
            seen = measure_in_turns(windows, rounds, f"{load} load")
            print_table({name: [gap for gap, _ in found] for name, found in seen.items()}, f"ms, ITL p99, {load} load")
            print_table({name: [rate for _, rate in found] for name, found in seen.items()}, "tokens/s")
            pairs = list(zip(seen["auto"], seen["two_stages"], strict=True))
            gaps = [min(auto[0], other[0]) / auto[0] for auto, other in pairs]
            rates = [auto[1] / max(auto[1], other[1]) for auto, other in pairs]
            figures[f"interference_auto_itl_p99_vs_best_{load}"] = statistics.median(gaps)
            figures[f"interference_auto_tokens_vs_best_{load}"] = statistics.median(rates)
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
