"""What all benchmarks share: their arguments, their figures, their plots; `comparison` has the rounds."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib as mpl
from matplotlib.figure import Figure

from penstock.local.stack import Stack
from sim.forked import ForkedStack

mpl.use("agg")
T = TypeVar("T")
A = TypeVar("A", bound="Arguments")
_INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""By what Linux calls them; the best one first."""
PLOTS = Path(__file__).parent.parent / "docs" / "plots"
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A directory in memory, if the system has one."""
TIMEOUT_S = 120.0
"""How long an answer may take before a benchmark gives up."""


@dataclass(frozen=True)
class Arguments:
    """The arguments that all benchmarks have."""

    size: Literal["full", "quick", "smoke"]
    """A quick run takes a minute, or two on a slow machine. A smoke run takes seconds and shows only that the benchmark
    works: its figures mean nothing, as what it starts is forked from a process that has imported all.
    """
    json: Path | None
    """Where the figures are written, as one flat object."""

    def choose_size(self, full: T, quick: T, smoke: T) -> T:
        """Return that one of the three that belongs to this run's size."""
        return {"full": full, "quick": quick, "smoke": smoke}[self.size]

    def choose_stack(self) -> type[Stack]:
        """Return the stack to start: in a smoke run one whose processes are forked, which start within moments."""
        return ForkedStack if self.size == "smoke" else Stack

    @property
    def is_full(self) -> bool:
        """Whether this is a full run; the others draw no plot."""
        return self.size == "full"


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="a minute or two; draws no plot"
    )
    size.add_argument("--smoke", dest="size", action="store_const", const="smoke", help="seconds: only to see it work")
    parser.set_defaults(size="full")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def run_benchmark(
    description: str | None,
    run: Callable[[A], Mapping[str, float]],
    kind: type[A] = Arguments,  # type: ignore[assignment]
    **options: Mapping[str, Any],
) -> Mapping[str, float]:
    """Run a benchmark as the main program, and return its figures.

    Beside the arguments that all have, `kind` has these options.
    """
    parser = make_parser(description or "")
    for name, how in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    given = kind(**vars(parser.parse_args()))
    print(describe_machine())
    report_figures(figures := run(given), given)
    return figures


def report_figures(figures: Mapping[str, float], given: Arguments) -> None:
    """Print the figures, and write them to the file of `--json`."""
    print()
    for name, value in figures.items():
        print(f"{name:52} {value:10.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(dict(figures), indent=2) + "\n")


def format_spread(values: Sequence[float]) -> str:
    """Return median, minimum and maximum as text."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def describe_machine() -> str:
    """Return a line about the machine: its processor and cores, and the best of its instruction sets."""
    try:
        lines = dict(line.split("\t", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if "\t" in line)
    except OSError:  # not Linux
        lines = {}
    about = {name: value.strip(" \t:") for name, value in lines.items()}
    best = next((name for name in _INSTRUCTION_SETS if name in about.get("flags", "").split()), "")
    words = (about.get("model name", ""), f"{os.cpu_count()} cores", best, f"Python {platform.python_version()}")
    return ", ".join(word for word in (platform.machine(), *words) if word)


def save_plot(figure: Figure, name: str, kind: Literal["png", "svg"] = "png") -> None:
    """Write the plot to docs/plots."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(PLOTS / f"{name}.{kind}", dpi=110, bbox_inches="tight", metadata=metadata)
    print(f"plot: docs/plots/{name}.{kind}")
