"""Kill everything, over and over, and hold what everybody saw against the promises.

python -m benchmarks.chaos [--quick] [--json FILE] [--seed N] [--kills N | --flushes N]

Real worker processes on the demo model in float32, a real Valkey, a real Kafka, clients that send requests steadily and
read every stream, some of them coming back again and again with the last event id they saw. First decode workers are
killed in the middle of long answers, and prefill workers in the middle of long prompts, while nothing else is wrong,
Kafka with its timeouts at their defaults, and the time until each request goes on is taken (`sim/chaos/recovery.py`).

Then come rounds in which every worker is killed or stopped at the next of its numbered steps, or at any time, again and
again, while servers are killed and paused, connections cut, hung, slowed and refused, the disk is full, and single
workers' wall clocks are put forward and back by minutes. Now and then everything is stopped for some seconds and goes
on, a worker more comes and leaves while much is waiting, Redis stalls, and somebody sends what breaks readers: a header
whose name is no UTF-8, and on Kafka 100 MB of text in 3 kB of zstd.

What clients and topics saw is a history; the checker (`sim/chaos/checker.py`) knows the promises and nothing else.

A round's seed says what is done; with `--seed` it is done again. Histories and logs stay in the directory that is told.
"""

import argparse
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from benchmarks.chaos_flushes import flush_often
from benchmarks.common import Arguments, machine, report
from penstock.names import STAGES, Stage
from sim.chaos.checker import Finding, count_by_kind
from sim.chaos.faults import ANY_TIME, Bus, list_failpoints
from sim.chaos.fork_server import ForkServer
from sim.chaos.recovery import Recovery, RecoveryPlan, format_recovery, make_prefill_plan, measure_recovery
from sim.chaos.runner import ChaosRound, Outcome, Progress, run_round
from sim.chaos.system import FaultCounts

BUSES: tuple[Bus, ...] = ("embedded", "kafka")
KILLS_A_ROUND = 125
SECONDS_A_ROUND = {"embedded": 200.0, "kafka": 300.0}
"""A round ends then, however many kills there were."""
WHAT = {
    "cut": "connections cut",
    "hang": "connections hung",
    "slow": "connections slowed",
    "refuse": "connections refused",
    "full": "filled to the brim",
    "clock": "clock put forward or back",
    "freeze": "all workers and servers stopped for 4 to 8 s",
    "stall": "stopped for 0.3 to 2 s",
    "resize": "one more worker came and left",
    "burst": "300 requests at once",
    "header": "a header's name that is no UTF-8",
    "bomb": "100 MB in 3 kB",
    "leader": "the broker that leads most was killed",
    "failover": "the master was killed",
}
TOLD = {
    "freeze": "freezes", "stall": "stalls", "resize": "resizes", "burst": "bursts",
    "header": "poisoned_headers", "bomb": "bombs", "leader": "leaders_killed", "failover": "failovers",
}  # fmt: skip
"""Mishaps, as `--json` calls them."""
MOST_S = 52 * 60
"""No new round begins later, so that it is all over within an hour."""


@dataclass
class Sum:
    """What came of it all."""

    toll: FaultCounts = field(default_factory=FaultCounts)
    findings: list[Finding] = field(default_factory=list)
    recoveries: dict[tuple[Stage, Bus], Recovery] = field(default_factory=dict)
    requests: int = 0
    rounds: int = 0

    @property
    def kills(self) -> int:
        """Of all processes, at any step."""
        return self.toll.kills.total()

    def add(self, outcome: Outcome) -> None:
        """Another round."""
        self.toll.kills += outcome.counts.kills
        self.toll.pauses += outcome.counts.pauses
        self.toll.faults += outcome.counts.faults
        self.toll.crashes += outcome.counts.crashes
        self.findings += outcome.findings
        self.requests += outcome.requests
        self.rounds += 1

    def figures(self) -> dict[str, float]:
        """For `--json`."""
        figures: dict[str, float] = {"kills": self.kills, **count_by_kind(self.findings)}
        for (stage, bus), found in self.recoveries.items():
            # Decode's are known by the shorter names, too.
            for whose in (f"{stage}_{bus}", *([bus] if stage == "decode" else [])):
                figures[f"recovery_s_p50_{whose}"] = found.compute_quantile(0.5)
                figures[f"recovery_s_p99_{whose}"] = found.compute_quantile(0.99)
        return figures | {
            "requests": self.requests,
            "pauses": self.toll.pauses.total(),
            "clock_steps": sum(count for (_, what), count in self.toll.faults.items() if what == "clock"),
            "disks_full": self.toll.faults["disk", "full"],
            **{name: sum(n for (_, what), n in self.toll.faults.items() if what == one) for one, name in TOLD.items()},
            "fell": len(self.toll.crashes),
            "rounds": self.rounds,
        }


def chaos(directory: Path, given: "Options") -> Sum:
    """Measure recovery, then go through rounds until there were so many kills."""
    total, begun, fork_server = Sum(), time.monotonic(), ForkServer(directory)
    plans = _plans(given)
    try:
        with contextlib.ExitStack() as waiting:
            _recover(total, directory, fork_server, given, waiting)
            while total.rounds < 2:
                _round(total, next(plans), directory, fork_server, given)
        for (stage, bus), found in total.recoveries.items():
            total.findings += found.findings
            _tell(f"recovery of {stage}, {bus}", found.findings)
        while not given.quick and total.kills < given.kills and time.monotonic() - begun < MOST_S:
            _round(total, next(plans), directory, fork_server, given)
    finally:
        fork_server.close()
    return total


def flush(directory: Path, given: "Options") -> dict[str, float]:
    """Nothing but flushes of Redis."""
    fork_server = ForkServer(directory)
    try:
        with telling("flushes", Sum(), given) as tell:
            return flush_often(directory / "flushes", fork_server, given.seed, given.flushes, tell)
    finally:
        fork_server.close()


def _recover(
    total: Sum, directory: Path, fork_server: ForkServer, given: "Options", waiting: contextlib.ExitStack
) -> None:
    """Of each stage on each bus; what is not settled yet then is `waiting` for that, while other things are done."""
    plans = (RecoveryPlan(1, 4), make_prefill_plan(1)) if given.quick else (RecoveryPlan(3, 10), make_prefill_plan(8))
    for plan, bus in itertools.product(plans, reversed(BUSES)):
        what = f"recovery of {plan.stage}, {bus}"
        with telling(what, total, given) as tell:
            made = measure_recovery(bus, directory / f"recovery-{plan.stage}-{bus}", fork_server, plan, tell)
            if plan.stage == "decode":
                found = waiting.enter_context(made)
            else:  # others publish the jobs of a dead prefill worker: nothing waits for the brokers
                with made as found:
                    pass
        total.recoveries[plan.stage, bus] = found
        print(f"{what}: {format_recovery(found)}", flush=True)
        total.toll.kills[plan.stage, ANY_TIME] += found.kills


def _round(total: Sum, this: ChaosRound, directory: Path, fork_server: ForkServer, given: "Options") -> None:
    name = f"{this.bus}, seed {this.seed}"
    with telling(name, total, given) as tell:
        outcome = run_round(this, directory / f"{this.bus}-{this.seed}", fork_server, tell)
    total.add(outcome)
    _tell(f"{name}: {outcome.counts.kills.total()} kills, {outcome.requests} requests", outcome.findings)


def _tell(what: str, findings: list[Finding]) -> None:
    print(f"{what}: {len(findings)} findings", flush=True)
    for finding in findings:
        print(f"    {finding.kind}: {finding.id}: {finding.description}", flush=True)


def _plans(given: "Options") -> Iterator[ChaosRound]:
    """Round after round, on both buses in turn."""
    for number in itertools.count():
        for bus in BUSES:
            seconds = 6.0 if given.quick else SECONDS_A_ROUND[bus]
            # Every third round on Kafka has servers with copies.
            is_replicated = bus == "kafka" and number % 3 == 2
            yield ChaosRound(
                given.seed + number, bus, seconds, KILLS_A_ROUND, is_replicated=is_replicated, with_system_faults=True
            )


@contextlib.contextmanager
def telling(what: str, total: Sum, given: "Options") -> Iterator[Progress]:
    """A bar of all kills, and a line that shows how far it is."""
    before = total.kills
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.completed:.0f} kills, {task.description}"))
    with Bar(*columns, TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(what, total=None if given.quick else given.kills)
        yield lambda line, kills: bar.update(task, completed=before + kills, description=f"{what}: {line}")


def table(toll: FaultCounts) -> Table:
    """Kills and stops by process and step, those too that nobody came by."""
    made = Table("process", "step", "kills", "stops")
    steps = {(stage, step) for stage in STAGES for bus in BUSES for step in list_failpoints(stage, bus)}
    for process, step in sorted(steps | toll.kills.keys() | toll.pauses.keys(), key=_in_order):
        made.add_row(process, step, str(toll.kills[process, step]), str(toll.pauses[process, step] or ""))
    return made


def faults_table(toll: FaultCounts) -> Table:
    """What else was done."""
    made = Table("to", "what", "times")
    for (whose, what), count in sorted(toll.faults.items()):
        made.add_row(whose, WHAT[what], str(count))
    return made


def _in_order(step: tuple[str, str]) -> tuple[str, str]:
    order = {"prefill": "1", "decode": "2"}
    return order.get(step[0], step[0]), {"settle": "x", "kafka.": "y", ANY_TIME[:6]: "z"}.get(step[1][:6], "") + step[1]


@dataclass(frozen=True)
class Options(Arguments):
    """What all benchmarks take, the seed of the first rounds, how many kills it should be, or how many flushes."""

    seed: int = 1
    kills: int = 1000
    flushes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes: a short round on each bus")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=1, help="of the first round on each bus")
    parser.add_argument("--kills", type=int, default=1000, help="go on until there were so many, for an hour")
    parser.add_argument("--flushes", type=int, default=0, help="instead: Redis loses everything so often, on Kafka")
    given = Options(**vars(parser.parse_args()))
    directory = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    if given.flushes:
        report(flush(directory, given), given)
        return
    total = chaos(directory, given)
    print(f"\n{machine()}; histories and logs: {directory}")
    Console().print(table(total.toll), faults_table(total.toll))
    for last_line, count in Counter(line.partition(": ")[2][:100] for line in total.toll.crashes).most_common():
        print(f"fell {count} times: {last_line}")
    report(total.figures(), given)


if __name__ == "__main__":
    main()
