"""What all benchmarks share: their arguments, their figures, their plots."""

import argparse
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("agg")
PLOTS = Path(__file__).parent.parent / "docs" / "plots"
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A directory in memory, if the system has one."""
TIMEOUT_S = 120.0
"""How long an answer may take before a benchmark gives up."""


@dataclass(frozen=True)
class Arguments:
    """`--quick` takes two minutes at most; `--json FILE` writes the figures as one flat object."""

    quick: bool
    json: Path | None
    device: str = "cpu"


def parse_arguments(description: str, *, with_device: bool = False) -> Arguments:
    """Parse the command line that all benchmarks have; some also run on a GPU."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="two minutes at most; draws no plot")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    if with_device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engines compute")
    return Arguments(**vars(parser.parse_args()))


def report_figures(figures: Mapping[str, float], given: Arguments) -> None:
    """Print the figures, and write them to the file of `--json`."""
    print()
    for name, value in figures.items():
        print(f"{name:40} {value:10.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(dict(figures), indent=2) + "\n")


def format_spread(values: Sequence[float]) -> str:
    """Return median, minimum and maximum as text."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def describe_machine() -> str:
    """Return a line about the machine."""
    return f"{platform.machine()}, Python {platform.python_version()}"


def save_plot(figure: Figure, name: str) -> None:
    """Write the plot to docs/plots."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOTS / f"{name}.png", dpi=110, bbox_inches="tight")
    print(f"plot: docs/plots/{name}.png")
