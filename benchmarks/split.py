"""What splitting buys: the steadiness of running streams while long prompts keep arriving.

python -m benchmarks.split [--quick | --smoke] [--json FILE]

The same engine twice, at equal offered load, by turns: undivided with chunked prefill on both cores, and split into a
prefill and a decode process on a core each, with the KV blocks handed over through shared memory. Eight streams decode
all the time; measured are the gaps between two tokens of a stream (ITL). Saturation is the rate of prompts that the
split system's prefill process can just take, measured first; half load is half of that. The undivided engine has the
chunk size that gives it the lowest p99 among those that keep up with saturation; if none does, the one that takes most
prompts.
"""

import multiprocessing as mp
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import Arguments, run_benchmark, save_plot
from benchmarks.comparison import compute_ratio, draw_tails, measure_in_turns, print_table
from benchmarks.interference import compute_percentile_ms
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.split_sides import NUM_SLOTS, Window, WindowResult, run_process
from benchmarks.systems import PipedProcess, write_shape

SPLIT_CHUNK = 512
NUM_STREAMS = 8
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 16
Context = SpawnContext | ForkServerContext
_SPAWN = mp.get_context("spawn")
LOAD_SHARES = {"saturation": 1.0, "half": 0.5}
_MIN_TAKEN_SHARE = 0.9


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    shape: str
    pool_mb: int
    window_s: float
    search_s: float
    rounds: int
    chunk_sizes: tuple[int, ...] = (64, 128, 256, 512)
    """What the undivided engine may take as chunk."""
    context: Context = _SPAWN
    """How processes start."""
    lead_s: float = 1.5
    """Streams have their first tokens before a window begins."""


FULL = Extent("q06", 3072, window_s=20.0, search_s=10.0, rounds=3)
QUICK = Extent("small", 768, window_s=4.0, search_s=2.0, rounds=2)
SMOKE = Extent("smoke", 64, 0.3, 0.2, 1, chunk_sizes=(512,), context=mp.get_context("forkserver"), lead_s=0.3)


class BothSystems:
    """Both systems, loaded; they run windows in turn."""

    def __init__(self, shape: Shape, extent: Extent) -> None:
        self.shape, self._lead_s = shape, extent.lead_s
        model = str(write_shape(shape))
        # Without drafts a step has one token of each stream: its length is the gap between two tokens.
        given = {"model": model, "dtype": "bfloat16", "device": "cpu", "pool_mb": extent.pool_mb, "max_batch": 64,
                 "block_size": BLOCK_TOKENS, "speculate": False}  # fmt: skip

        def start(role: str, threads: int, cores: list[int], *handing: Any) -> PipedProcess:
            return PipedProcess(extent.context, run_process, role, {**given, "threads": threads}, cores, *handing)

        self._undivided_worker = start("undivided", 2, [0, 1])
        slot_bytes = -(-PROMPT_TOKENS // BLOCK_TOKENS) * self._undivided_worker.first_answer
        self._memory = SharedMemory(create=True, size=NUM_SLOTS * slot_bytes)
        ours, theirs = _SPAWN.Pipe()
        self._prefill = start("prefill", 1, [0], ours, self._memory.name)
        self._decode = start("decode", 1, [1], theirs, self._memory.name)

    def make_window(self, arrivals: tuple[float, ...], length_s: float, chunk: int) -> Window:
        """Return a window that begins as soon as the streams run."""
        begin_s = time.monotonic() + self._lead_s
        return Window(begin_s, length_s, NUM_STREAMS, arrivals, PROMPT_TOKENS, chunk, self.shape.vocabulary)

    def run_undivided(self, window: Window) -> WindowResult:
        """Run a window undivided."""
        seen: WindowResult = self._undivided_worker.ask(window)
        return seen

    def run_split(self, window: Window) -> WindowResult:
        """Run a window split: gaps are decode's, first tokens prefill's, output is both's."""
        window = replace(window, chunk_tokens=SPLIT_CHUNK)
        self._prefill.send(window)
        self._decode.send(window)
        first, then = self._prefill.receive(), self._decode.receive()
        return WindowResult(then.gaps_s, first.num_output + then.num_output, first.first_tokens_s)

    def close(self) -> None:
        """End the processes and free the memory."""
        for worker in (self._undivided_worker, self._prefill, self._decode):
            worker.close()
        self._memory.close()
        self._memory.unlink()


def space_evenly(rate: float, length_s: float) -> tuple[float, ...]:
    """Return evenly spaced arrivals of a window."""
    return tuple(number / rate for number in range(int(rate * length_s)))


def measure_saturation(systems: BothSystems, length_s: float) -> float:
    """Return how many prompts a second the split system's prefill takes if one always waits."""
    flood, rate = (0.0,) * int(200 * length_s), 0.0
    for _ in range(2):  # the first one warms up
        firsts_s = systems.run_split(systems.make_window(flood, length_s, SPLIT_CHUNK)).first_tokens_s
        rate = len(firsts_s) / firsts_s[-1] if firsts_s else 1 / length_s
    return rate


def find_best_chunk(systems: BothSystems, rate: float, length_s: float, chunk_sizes: tuple[int, ...]) -> int:
    """Return the undivided engine's best chunk size for this rate, as the module's docstring defines it."""
    arrivals, taken, p99_ms = space_evenly(rate, length_s), dict[int, int](), dict[int, float]()
    for chunk in chunk_sizes:
        seen = systems.run_undivided(systems.make_window(arrivals, length_s, chunk))
        taken[chunk], p99_ms[chunk] = len(seen.first_tokens_s), compute_percentile_ms(seen.gaps_s, 99)
        print(f"undivided, chunks of {chunk}: {taken[chunk]} of {len(arrivals)} prompts, p99 {p99_ms[chunk]:.1f} ms")
    keeping = [chunk for chunk in chunk_sizes if taken[chunk] >= _MIN_TAKEN_SHARE * len(arrivals)]
    return (
        min(keeping, key=lambda chunk: p99_ms[chunk]) if keeping else max(chunk_sizes, key=lambda chunk: taken[chunk])
    )


Measured = dict[str, dict[str, list[WindowResult]]]
"""By load and system, a `WindowResult` for each round."""


def measure_systems(systems: BothSystems, extent: Extent) -> Measured:
    """Measure both systems in turn, at each load."""
    capacity = measure_saturation(systems, extent.search_s)
    print(f"saturation: {capacity:.2f} prompts of {PROMPT_TOKENS} tokens a second")
    chunk = find_best_chunk(systems, capacity, extent.search_s, extent.chunk_sizes)
    print(f"the undivided engine takes chunks of {chunk}", flush=True)

    def measure(load: str, run: Any, _: int) -> WindowResult:
        arrivals = space_evenly(capacity * LOAD_SHARES[load], extent.window_s)
        seen: WindowResult = run(systems.make_window(arrivals, extent.window_s, chunk))
        return seen

    systems_by_name = {"undivided": systems.run_undivided, "split": systems.run_split}
    sides = {(load, name): partial(measure, load, run) for load in LOAD_SHARES for name, run in systems_by_name.items()}
    found = measure_in_turns(sides, extent.rounds, "windows")
    return {load: {name: found[load, name] for name in systems_by_name} for load in LOAD_SHARES}


def compare_systems(measured: Measured, window_s: float) -> dict[str, float]:
    """Print the rounds, and return undivided to split for gaps, split to undivided for output."""
    figures = {}
    for load, sides in measured.items():
        suffix = "" if load == "saturation" else f"_{load}"
        gaps = {p: {side: [compute_percentile_ms(one.gaps_s, p) for one in seen] for side, seen in sides.items()}
                for p in (99, 50)}  # fmt: skip
        output = {side: [one.num_output / window_s for one in seen] for side, seen in sides.items()}
        firsts = {side: [compute_percentile_ms(one.first_tokens_s or [0.0], 50) for one in seen]
                  for side, seen in sides.items()}  # fmt: skip
        print(f"\n{load}")
        for values, unit in ((gaps[50], "ms, ITL p50"), (gaps[99], "ms, p99"), (output, "output tokens/s"),
                             (firsts, "ms, first token p50")):  # fmt: skip
            print_table(values, unit)
        for percent, values in gaps.items():
            figures[f"itl_p{percent}_ratio{suffix}"] = compute_ratio(values, "undivided", "split")
        figures[f"output_throughput_ratio{suffix}"] = compute_ratio(output, "split", "undivided")
    return figures


def draw_plot(measured: Measured) -> None:
    """Draw the share of gaps above each length, for both systems at each load."""
    figure = Figure(figsize=(9, 3.6))
    for axis, (load, sides) in zip(figure.subplots(1, len(measured), sharey=True), measured.items(), strict=True):
        gaps_ms = {side: [gap * 1000 for one in seen for gap in one.gaps_s] for side, seen in sides.items()}
        draw_tails(axis, gaps_ms, load, "inter-token latency, ms")
    figure.axes[0].set_ylabel("share of tokens that took longer")
    save_plot(figure, "split")


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    with ExitStack() as exits:
        systems = BothSystems(SHAPES[extent.shape], extent)
        exits.callback(systems.close)
        measured = measure_systems(systems, extent)
    print(f"{extent.shape}, bf16, {NUM_STREAMS} streams, prompts of {PROMPT_TOKENS} tokens")
    if given.is_full:
        draw_plot(measured)
    return compare_systems(measured, extent.window_s)


if __name__ == "__main__":
    run_benchmark(__doc__, run)
