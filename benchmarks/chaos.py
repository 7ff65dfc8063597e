"""How soon others go on with what a killed worker had, on both buses.

python -m benchmarks.chaos [--quick | --smoke] [--json FILE] [--one-kill]

Real worker processes on the demo model in float32, a real Valkey, a real Kafka, and clients that read every stream.
Decode workers and those of both stages are killed in the middle of long answers, and prefill workers in the middle of
long prompts, while nothing else is wrong, and the time until each request goes on is taken (`benchmarks/recovery.py`).
What clients and topics saw is a history, which is checked against the promises (`sim/chaos/checker.py`). Kills among
all other faults, for as long as one likes, are part of `make campaign` (`sim/scenes.py`).

With `--one-kill` there is one stream, whose decode worker is killed, and the picture of it: `docs/plots/kill.svg`.

Histories and logs stay in the directory that is told.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.chaos_one_kill import kill_one
from benchmarks.common import Arguments, run_benchmark
from benchmarks.recovery import Recovery, RecoveryPlan, format_recovery, make_prefill_plan, measure_recovery
from penstock.names import WorkerKind
from sim.chaos.checker import Finding, count_by_kind
from sim.chaos.faults import Bus
from sim.chaos.runner import Progress
from sim.forked import preload_modules
from sim.scenes import BUSES


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and whether there is one kill alone."""

    one_kill: bool = False


def measure_recoveries(directory: Path, given: Options) -> dict[tuple[WorkerKind, Bus], Recovery]:
    """Measure recovery of each kind of worker on each bus, and print it."""
    plans = given.choose_size(
        (RecoveryPlan(3, 10), RecoveryPlan(3, 10, "auto"), make_prefill_plan(8)),
        (RecoveryPlan(1, 2, length=240), RecoveryPlan(1, 2, "auto", length=240), make_prefill_plan(1)),
        (RecoveryPlan(1, 1, length=240, min_requests=1),),
    )
    buses = given.choose_size(BUSES[::-1], BUSES[::-1], ("embedded",))
    recoveries: dict[tuple[WorkerKind, Bus], Recovery] = {}
    with contextlib.ExitStack() as waiting:
        for plan, bus in itertools.product(plans, buses):
            what = f"recovery of {plan.stage}, {bus}"
            with _show_progress(what) as tell, contextlib.ExitStack() as now:
                # Others publish the jobs of a dead prefill worker: nothing waits for the brokers.
                exits = now if plan.stage == "prefill" else waiting
                folder = directory / f"recovery-{plan.stage}-{bus}"
                found = exits.enter_context(measure_recovery(bus, folder, plan, tell))
            recoveries[plan.stage, bus] = found
            print(f"{what}: {format_recovery(found)}", flush=True)
    return recoveries


def print_findings(recoveries: dict[tuple[WorkerKind, Bus], Recovery]) -> list[Finding]:
    """Print and return what the checker found."""
    for (stage, bus), recovery in recoveries.items():
        print(f"recovery of {stage}, {bus}: {len(recovery.findings)} findings", flush=True)
        for finding in recovery.findings:
            print(f"    {finding.kind}: {finding.id}: {finding.description}", flush=True)
    return [finding for recovery in recoveries.values() for finding in recovery.findings]


@contextlib.contextmanager
def _show_progress(what: str) -> Iterator[Progress]:
    """Show a line with the current state and the kills so far."""
    with Console().status(what) as status:
        yield lambda line, kills: status.update(f"{kills} kills, {what}: {line}")


def run(given: Options) -> dict[str, float]:
    """Kill, check and print; return the figures."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    print(f"histories and logs: {directory}")
    preload_modules("benchmarks.chaos_one_kill", "sim.chaos.runner")  # each forked worker imports this module
    if given.one_kill:
        return kill_one(directory, given)
    recoveries = measure_recoveries(directory, given)
    kills = sum(recovery.kills for recovery in recoveries.values())
    figures: dict[str, float] = {"kills": kills, **count_by_kind(print_findings(recoveries))}
    for (stage, bus), found in recoveries.items():
        # Decode's are known by the shorter names, too.
        for whose in (f"{stage}_{bus}", *([bus] if stage == "decode" else [])):
            figures[f"recovery_s_p50_{whose}"] = found.compute_quantile(0.5)
            figures[f"recovery_s_p99_{whose}"] = found.compute_quantile(0.99)
    return figures


if __name__ == "__main__":
    run_benchmark(
        __doc__, run, Options, one_kill={"action": "store_true", "help": "instead: one stream, whose worker is killed"}
    )
