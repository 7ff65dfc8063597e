"""Everything is restarted, one after the other, while it is used: no error, and streams hardly stop.

python -m benchmarks.rolling [--quick | --smoke] [--json FILE]

On each bus, two prefill and two decode workers as `penstock up` starts them, on the demo model in float32, and clients
that always have a few streams under way, each a new one as soon as one has ended. The same load meets these phases:

    steady    nothing is done
    rolling   each worker gets SIGTERM, ends when its streams have ended, is started again, and serves before it is the
              next one's turn
    handed    the same with workers that may drain for a second only: streams take longer, and are handed back
    servers   Valkey, and Kafka where that is the bus, end in order and are started again

Gaps are the times between one token and the next, as readers see them; `…_first_…` is the time from sending to the
first token. `rolling_errors` are streams, of all phases, that ended with an error or could not be read on, and whatever
else the checker of the chaos rounds finds in the history. Quick leaves out the last two phases, restarts one worker of
each stage, and forks its workers from a process that has imported what they need: no figure has their start in it.
"""

import itertools
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks.common import Arguments, describe_machine, parse_arguments, report_figures, save_plot
from benchmarks.rolling_phases import FULL, QUICK, SMOKE, Extent, make_known_requests, run_phases
from sim.chaos.checker import Finding, check_history
from sim.chaos.history import read_history

BUSES = ("embedded", "kafka")


@dataclass(frozen=True)
class RollingResult:
    """What readers saw on one bus."""

    gaps_s: dict[str, list[float]]
    """Seconds from each token to the next one, by phase."""
    first_tokens_s: dict[str, list[float]]
    """Seconds from sending to the first token, by phase."""
    findings: list[Finding]
    num_errors: int
    drains_s: list[float]
    """Seconds from SIGTERM to the end of each worker."""

    def make_figures(self, bus: str) -> dict[str, float]:
        """Return the figures for `--json`."""
        figures: dict[str, float] = {f"rolling_errors_{bus}": self.num_errors + len(self.findings)}
        for phase in self.gaps_s:
            for what, values in (("gap", self.gaps_s[phase]), ("first", self.first_tokens_s[phase])):
                ordered = sorted(values)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                    at = min(len(ordered) - 1, int(share * len(ordered)))
                    figures[f"{phase}_{what}_ms_{name}_{bus}"] = 1000 * ordered[at]
        return figures | {f"rolling_drain_s_max_{bus}": max(self.drains_s)}


def compute_gaps(history: Iterable[dict[str, Any]], phase: str) -> list[float]:
    """Return the seconds between the tokens of each stream of a phase."""
    seen: dict[str, list[float]] = {}
    for entry in history:
        if entry["what"] == "token" and entry["id"].startswith(phase):
            seen.setdefault(entry["id"], []).append(entry["at"])
    return [later - earlier for times in seen.values() for earlier, later in itertools.pairwise(times)]


def compute_first_tokens(history: Iterable[dict[str, Any]], phase: str) -> list[float]:
    """Return the seconds to the first token of each stream of a phase."""
    sent, seen = dict[str, float](), dict[str, float]()
    for entry in history:
        if entry["what"] in ("submitted", "token") and entry["id"].startswith(phase):
            (sent if entry["what"] == "submitted" else seen).setdefault(entry["id"], entry["at"])
    return [seen[request_id] - at for request_id, at in sent.items() if request_id in seen]


def run(given: Arguments) -> dict[str, float]:
    """Run on each bus, print and draw; return the figures."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-rolling-"))
    extent = given.choose_size(FULL, QUICK, SMOKE)
    make_known_requests(extent.answer_tokens)  # takes seconds: not in the middle of it
    found = {bus: run_on_bus(bus, directory / bus, extent) for bus in given.choose_size(BUSES, BUSES, BUSES[:1])}
    figures: dict[str, float] = {}
    for bus, rolled in found.items():
        figures |= rolled.make_figures(bus)
        for phase, gaps in rolled.gaps_s.items():
            print(f"{bus:9} {phase:8} {len(gaps)} gaps, median {1000 * statistics.median(gaps):.1f} ms")
        for finding in rolled.findings:
            print(f"    {finding.kind}: {finding.id}: {finding.description}")
    print(f"\n{describe_machine()}; histories and logs: {directory}")
    if given.is_full:
        draw_plot(found)
    return {"rolling_errors": sum(figures[f"rolling_errors_{bus}"] for bus in found)} | figures


def run_on_bus(bus: str, directory: Path, extent: Extent) -> RollingResult:
    """Run all phases on a bus; return what readers saw."""
    with Progress(transient=True) as bar:
        task = bar.add_task(bus, total=None)
        path, drains = run_phases(bus, directory, lambda line: bar.update(task, description=f"{bus}: {line}"), extent)
    entries = list(read_history(path))
    gaps, firsts = (
        {phase: how(entries, phase) for phase in list_phases(entries)} for how in (compute_gaps, compute_first_tokens)
    )
    errors = sum(entry["what"] == "end" and entry["error"] is not None for entry in entries)
    return RollingResult(gaps, firsts, check_history(entries), errors, drains)


def list_phases(history: Iterable[dict[str, Any]]) -> list[str]:
    """Return the phases in their order, without the warm-up."""
    named = (entry["id"].partition("-")[0] for entry in history if entry["what"] == "submitted")
    return [phase for phase in dict.fromkeys(named) if phase != "warm"]


def draw_plot(found: dict[str, RollingResult]) -> None:
    """Draw the share of gaps above each length."""
    figure = Figure(figsize=(5.0 * len(found), 3.6))
    for axis, (bus, rolled) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for phase, gaps in rolled.gaps_s.items():
            ordered = sorted(1000 * gap for gap in gaps)
            axis.plot(ordered, [1 - at / len(ordered) for at in range(len(ordered))], label=phase)
        axis.set(
            title=bus, xlabel="ms from a token to the next", ylabel="share of longer gaps", xscale="log", yscale="log"
        )
        axis.grid(alpha=0.3)
        axis.legend()
    save_plot(figure, "rolling")


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
