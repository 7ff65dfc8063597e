"""Tokens over HTTP with every promise on, beside other servers.

python -m benchmarks.serve [--quick | --smoke] [--json FILE] [--shapes small q06]

`penstock up`, one `auto` worker and its gateway, on Redis Streams and on Kafka, llama.cpp's own `llama-server`,
`vllm serve` and `transformers serve` answer the same requests from the same bf16 weights on two threads, at temperature
0 and to equal lengths, and none guesses tokens. guidellm sends them at the lowest priority; a run in which it takes a
tenth of a core does not count. In its turn a server is started, warmed up, measured in all cells and stopped; ratios
are formed within a round, to the best of the others. Cells:

    1, 8, 32     clients with a request under way each; prompts and answers of log-normal lengths, with medians of 1,020
                 and 129 tokens, means of 1,155 and 211
    short_32     32 clients, prompts of 32 and answers of 16 tokens. guidellm takes 6 ms for a request and 0.2 ms for a
                 token, more than a tenth of a core here: its runs count up to 0.3, which is the faster server's loss

Joules are those of the whole machine, where it tells them.

A server that takes four times as long as the embedded pipeline did is left out of the rest of the round; one that is
far behind the best of the others in all cells is not asked in later rounds. `--quick` compares one pipeline with
`llama-server` in a part of the short cell. `--smoke` only starts a pipeline; its figures are of a stored report.
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import draw_bars, take_turns
from benchmarks.peers.rounds import HOPELESS_SHARE, Results
from benchmarks.peers.servers import (
    LONGEST_S,
    OURS,
    POOL_MB,
    SERVERS,
    is_answering,
    open_server,
    read_report,
    run_load,
)
from benchmarks.peers.setup import is_installed
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.words import make_prompt
from benchmarks.pipeline import MIXED_ANSWER_TOKENS, MIXED_PROMPT_TOKENS, draw_length
from benchmarks.systems import DEMO_ENVIRONMENT, open_stack
from penstock.errors import PenstockError
from penstock.local.processes import find_free_port

PATIENCE = 4
"""After a run of ours, another server's with the same load may take so many times as long."""
MAX_LOAD_SHARE, MAX_SHORT_LOAD_SHARE = 0.1, 0.3
STORED_REPORT = Path(__file__).parent / "peers" / "report.json"
COMPARED = ("tokens_s", "ttft_ms_p99", "itl_ms_p99", "cpu_s_per_1000_tokens")
"""Compared with the best of the others: with the most of the first, the least of the rest."""
TOLD = ("tokens_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "cpu_s_per_1000_tokens", "resident_mib",
        "joules_per_1000_tokens")  # fmt: skip


@dataclass(frozen=True)
class ServedCell:
    """A load that is measured."""

    name: str
    clients: int
    num_requests: int
    is_short: bool = False

    def make_requests(self, number: int) -> list[tuple[str, int]]:
        """Return prompts and numbers of new tokens: the same lengths in each round, and other words."""
        lengths, chance = random.Random(self.name), random.Random(f"{self.name} {number}")
        sizes = [(32, 16) if self.is_short else
                 (draw_length(lengths, *MIXED_PROMPT_TOKENS), draw_length(lengths, *MIXED_ANSWER_TOKENS))
                 for _ in range(self.num_requests)]  # fmt: skip
        return [(make_prompt(chance, prompt), new) for prompt, new in sizes]


CELLS = (ServedCell("short_32", 32, 256, True), ServedCell("1", 1, 6), ServedCell("8", 8, 24), ServedCell("32", 32, 64))
WARM = ServedCell("warm", 8, 16, is_short=True)


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and the shapes."""

    shapes: Sequence[str] = ()


def run(given: Options) -> dict[str, float]:
    """Measure and print; return the figures."""
    if not is_installed("guidellm") and given.size != "smoke":
        raise SystemExit("guidellm is not installed; `python -m benchmarks.peers.setup` installs it")
    shapes, cells, sides, rounds = given.choose_size(
        (given.shapes, CELLS, SERVERS, 3),
        (("small",), (replace(CELLS[0], num_requests=64),), ("embedded", "llama-server"), 1),
        ((), (), (), 0),
    )
    found = [run_smoke(given)] if given.size == "smoke" else [run_rounds(one, cells, sides, rounds) for one in shapes]
    figures: dict[str, float] = {}
    for results in found:
        print_table(results)
        figures |= make_figures(results)
    if given.is_full:
        draw_served(found)
    return figures


def run_rounds(shape: str, cells: Sequence[ServedCell], sides: Sequence[str], rounds: int) -> Results:
    """Let the servers take turns; return what came of it."""
    results, there = Results(SHAPES[shape]), [side for side in sides if side in OURS or is_installed(side)]
    print(f"{shape}: not installed are {set(sides) - set(there) or 'none'}", flush=True)
    for number, side in take_turns(there, rounds):
        if is_hopeless(results, side):
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as scratch:
            directory = Path(scratch)
            try:
                with open_server(side, shape, directory) as server:
                    for cell in (WARM, *cells):
                        requests = cell.make_requests(number)
                        limit_s = choose_limit(results, cell)
                        values = run_load(server, requests, cell.clients, limit_s, directory)
                        note_values(results, cell, side, number, values)
            except (PenstockError, OSError, ValueError) as error:
                print(f"{shape} round {number + 1} {side}: {error}", flush=True)
    return results


def is_hopeless(results: Results, side: str) -> bool:
    """Return whether one of the others was far behind the best of them in every load so far."""
    shares = []
    for name, by_side in results.values.items():
        if name.startswith(COMPARED[0]) and side in by_side and side not in OURS:
            best = max(max(values.values()) for other, values in by_side.items() if other not in OURS)
            shares.append(max(by_side[side].values()) / best)
    return max(shares, default=1.0) < HOPELESS_SHARE


def choose_limit(results: Results, cell: ServedCell) -> float:
    """Return how many seconds a run of this load may take."""
    ours_s = results.values.get(f"seconds_{cell.name}", {}).get(OURS[0], {}).values()
    return min(LONGEST_S, PATIENCE * max(ours_s, default=LONGEST_S))


def note_values(results: Results, cell: ServedCell, side: str, number: int, values: Mapping[str, float]) -> None:
    """Print what a run gave, and keep it if it counts."""
    counts = values["load_share"] < (MAX_SHORT_LOAD_SHARE if cell.is_short else MAX_LOAD_SHARE)
    told = ", ".join(f"{name} {value:.4g}" for name, value in values.items()) + ("" if counts else ": does not count")
    print(f"{results.shape.name} round {number + 1} {cell.name} {side}: {told}", flush=True)
    if counts and cell is not WARM:
        for name, value in values.items():
            results.values.setdefault(f"{name}_{cell.name}", {}).setdefault(side, {})[number] = value


def make_figures(results: Results) -> dict[str, float]:
    """Return ratios to the best of the others, and the medians of all sides.

    Names end with the shape's where it is not the small one, and ratios on Kafka with the bus.
    """
    end = "" if results.shape.name == "small" else f"_{results.shape.name}"
    figures = {}
    for cell in CELLS:
        for name in COMPARED:
            for side, bus in zip(OURS, ("", "_kafka"), strict=True):
                others = (results.compare_sides(f"{name}_{cell.name}", side, other) for other in SERVERS[len(OURS) :])
                if ratios := [ratio for ratio in others if ratio is not None]:
                    key = f"{name.replace('_ms', '')}_vs_best_{cell.name}{end}{bus}"
                    figures[key if name.startswith("cpu") else f"served_{key}"] = (
                        min(ratios) if name == COMPARED[0] else max(ratios)
                    )
    for name, by_side in results.values.items():
        for side in by_side:
            median = results.compute_median(name, side)
            figures[f"served_{name}_{side.replace('-', '_')}{end}"] = 0.0 if median is None else median
    return figures


def print_table(results: Results) -> None:
    """Print the medians of all sides as a table of Markdown."""
    print(f"\n| {results.shape.name} | clients | {' | '.join(TOLD)} |\n|---{'|---' * (len(TOLD) + 1)}|")
    for cell in CELLS:
        for side in results.values.get(f"{TOLD[0]}_{cell.name}", {}):
            medians = (results.compute_median(f"{name}_{cell.name}", side) for name in TOLD)
            told = ("" if median is None else f"{median:.4g}" for median in medians)
            print(f"| {side} | {cell.name} | {' | '.join(told)} |")


def draw_served(found: Sequence[Results]) -> None:
    """Draw the tokens a second of all servers to those of the embedded pipeline, a chart for each load."""
    charts: dict[str, dict[str, float]] = {}
    for results, cell in product(found, CELLS):
        ratios = {one: results.compare_sides(f"{COMPARED[0]}_{cell.name}", one, OURS[0]) for one in SERVERS}
        if known := {one: ratio for one, ratio in ratios.items() if ratio is not None}:
            load = f"{cell.clients} at once{', short' if cell.is_short else ''}"
            charts[f"{results.shape.name}, {load}"] = known
    draw_bars("serve", charts, "tokens/s to embedded")


def run_smoke(given: Arguments) -> Results:
    """Start a pipeline, and let it answer; return what a stored report says, as if of two sides."""
    port = find_free_port()
    with open_stack(given.choose_stack(), DEMO_ENVIRONMENT, prefill=0, decode=0, auto=1, gateway=port) as stack:
        assert is_answering(stack.gateway_url, "demo")
    report, results = json.loads(STORED_REPORT.read_text()), Results(SHAPES["smoke"])
    ends_s = [report["benchmarks"][0][name] for name in ("start_time", "end_time")]
    values = read_report(report, [(ends_s[0], 0.0, 0.0), (ends_s[1], 0.1, 1.0)]) | {"resident_mib": 1.0}
    for side in SERVERS:
        note_values(results, CELLS[0], side, 0, values)
    return results


if __name__ == "__main__":
    which = {"nargs": "+", "choices": tuple(POOL_MB), "default": tuple(POOL_MB), "help": "only these"}
    run_benchmark(__doc__, run, Options, shapes=which)
