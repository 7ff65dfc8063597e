"""Kill everything, over and over, and hold what everybody saw against the promises.

python -m benchmarks.chaos [--quick | --smoke] [--json FILE] [--seed N] [--kills N | --one-kill]

Real worker processes on the demo model in float32, a real Valkey, a real Kafka, clients that send requests steadily and
read every stream, some of them coming back again and again with the last event id they saw. First decode workers
and those of both stages are killed in the middle of long answers, and prefill workers in the middle of long prompts,
while nothing else is wrong, Kafka with its timeouts at their defaults, and the time until each request goes on is taken
(`sim/chaos/recovery.py`).

Then come rounds in which every worker is killed or stopped at the next of its numbered steps, or at any time, again and
again, while servers are killed and paused, connections cut, hung, slowed and refused, the disk is full, and single
workers' wall clocks are put forward and back by minutes. Now and then everything is stopped for some seconds and goes
on, a worker more comes and leaves while much is waiting, Redis stalls, and somebody sends what breaks readers: a header
whose name is no UTF-8, and on Kafka 100 MB of text in 3 kB of zstd.

From round to round of a bus the workers have another model: the demo's, the one that calls tools, whose readers parse
its calls as they come, one whose layers keep states, and none, where endpoint workers ask two servers that fail, too.
What clients and topics saw is a history; the checker (`sim/chaos/checker.py`) knows the promises and nothing else.

With `--one-kill` there is one stream, whose decode worker is killed, and the picture of it: `docs/plots/kill.svg`.

A round's seed says what is done; with `--seed` it is done again. Histories and logs stay in the directory that is told.
"""

import contextlib
import itertools
import random
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

from benchmarks.chaos_one_kill import kill_one
from benchmarks.common import Arguments, describe_machine, make_parser, report_figures
from penstock.names import STAGES, WorkerKind
from sim.chaos.checker import Finding, count_by_kind
from sim.chaos.clients import LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS, Load
from sim.chaos.faults import ANY_TIME, Bus, list_failpoints
from sim.chaos.fork_server import ForkServer
from sim.chaos.recovery import Recovery, RecoveryPlan, format_recovery, make_prefill_plan, measure_recovery
from sim.chaos.runner import ChaosRound, Outcome, Progress, run_round
from sim.chaos.system import FaultCounts

BUSES: tuple[Bus, ...] = ("embedded", "kafka")
LOADS: tuple[Load, ...] = ("text", "tools", "states", "endpoint")
WORKERS = ((3, 4, 0), (0, 0, 5), (2, 2, 2))
"""How many workers of prefill, of decode and of both there may be in a round."""
KILLS_PER_ROUND = 125
MAX_ROUND_S = {"embedded": 200.0, "kafka": 300.0}
"""The longest time of a round, however few kills there were."""
FAULT_NAMES = {
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
    "reply": "failed at a question",
}
FAULT_FIGURES = {
    "freeze": "freezes", "stall": "stalls", "resize": "resizes", "burst": "bursts",
    "header": "poisoned_headers", "bomb": "bombs", "leader": "leaders_killed", "failover": "failovers",
    "reply": "replies_failed",
}  # fmt: skip
"""Names of faults in `--json`."""
MAX_START_S = 52 * 60
"""No new round begins later, so that the run ends within an hour."""


@dataclass
class ChaosTotal:
    """The outcome of all rounds."""

    counts: FaultCounts = field(default_factory=FaultCounts)
    findings: list[Finding] = field(default_factory=list)
    recoveries: dict[tuple[WorkerKind, Bus], Recovery] = field(default_factory=dict)
    num_requests: int = 0
    num_rounds: int = 0

    @property
    def num_kills(self) -> int:
        """Kills of all processes, at any step."""
        return self.counts.kills.total()

    def add_round(self, outcome: Outcome) -> None:
        """Add the outcome of a round."""
        self.counts.kills += outcome.counts.kills
        self.counts.pauses += outcome.counts.pauses
        self.counts.faults += outcome.counts.faults
        self.counts.crashes += outcome.counts.crashes
        self.findings += outcome.findings
        self.num_requests += outcome.requests
        self.num_rounds += 1

    def make_figures(self) -> dict[str, float]:
        """Return the figures for `--json`."""
        figures: dict[str, float] = {"kills": self.num_kills, **count_by_kind(self.findings)}
        for (stage, bus), found in self.recoveries.items():
            # Decode's are known by the shorter names, too.
            for whose in (f"{stage}_{bus}", *([bus] if stage == "decode" else [])):
                figures[f"recovery_s_p50_{whose}"] = found.compute_quantile(0.5)
                figures[f"recovery_s_p99_{whose}"] = found.compute_quantile(0.99)
        return figures | {
            "requests": self.num_requests,
            "pauses": self.counts.pauses.total(),
            "clock_steps": sum(count for (_, what), count in self.counts.faults.items() if what == "clock"),
            "disks_full": self.counts.faults["disk", "full"],
            **{
                name: sum(n for (_, what), n in self.counts.faults.items() if what == one)
                for one, name in FAULT_FIGURES.items()
            },
            "fell": len(self.counts.crashes),
            "rounds": self.num_rounds,
        }


def run_chaos(directory: Path, given: "Options") -> ChaosTotal:
    """Measure recovery, then run rounds until there were enough kills."""
    total, begun, fork_server = ChaosTotal(), time.monotonic(), ForkServer(directory)
    plans = _plan_rounds(given)
    try:
        with contextlib.ExitStack() as waiting:
            _measure_recoveries(total, directory, fork_server, given, waiting)
            while total.num_rounds < given.choose_size(2, 1, 1):
                _run_one_round(total, next(plans), directory, fork_server, given)
        for (stage, bus), found in total.recoveries.items():
            total.findings += found.findings
            _print_findings(f"recovery of {stage}, {bus}", found.findings)
        while given.is_full and total.num_kills < given.kills and time.monotonic() - begun < MAX_START_S:
            _run_one_round(total, next(plans), directory, fork_server, given)
    finally:
        fork_server.close()
    return total


def _measure_recoveries(
    total: ChaosTotal, directory: Path, fork_server: ForkServer, given: "Options", waiting: contextlib.ExitStack
) -> None:
    """Measure recovery of each stage on each bus. What is not settled yet is left to `waiting`."""
    plans = given.choose_size(
        (RecoveryPlan(3, 10), RecoveryPlan(3, 10, "auto"), make_prefill_plan(8)),
        (RecoveryPlan(1, 2, length=240), RecoveryPlan(1, 2, "auto", length=240), make_prefill_plan(1)),
        (),
    )
    for plan, bus in itertools.product(plans, reversed(BUSES)):
        what = f"recovery of {plan.stage}, {bus}"
        with show_progress(what, total, given) as tell:
            made = measure_recovery(bus, directory / f"recovery-{plan.stage}-{bus}", fork_server, plan, tell)
            if plan.stage != "prefill":
                found = waiting.enter_context(made)
            else:  # others publish the jobs of a dead prefill worker: nothing waits for the brokers
                with made as found:
                    pass
        total.recoveries[plan.stage, bus] = found
        print(f"{what}: {format_recovery(found)}", flush=True)
        total.counts.kills[plan.stage, ANY_TIME] += found.kills


def _run_one_round(
    total: ChaosTotal, this: ChaosRound, directory: Path, fork_server: ForkServer, given: "Options"
) -> None:
    name = f"{this.bus}, seed {this.seed}"
    with show_progress(name, total, given) as tell:
        outcome = run_round(this, directory / f"{this.bus}-{this.seed}", fork_server, tell)
    total.add_round(outcome)
    _print_findings(f"{name}: {outcome.counts.kills.total()} kills, {outcome.requests} requests", outcome.findings)


def _print_findings(what: str, findings: list[Finding]) -> None:
    print(f"{what}: {len(findings)} findings", flush=True)
    for finding in findings:
        print(f"    {finding.kind}: {finding.id}: {finding.description}", flush=True)


def _plan_rounds(given: "Options") -> Iterator[ChaosRound]:
    """Yield rounds, on both buses in turn."""
    for number in itertools.count():
        for place, bus in enumerate(BUSES):
            drawn = random.Random(f"{given.seed + number}/{bus}").choice(WORKERS)
            seconds, workers = given.choose_size((MAX_ROUND_S[bus], drawn), (6.0, drawn), (2.0, (1, 2, 0)))
            # Every third round on Kafka has servers with copies.
            is_replicated = bus == "kafka" and number % 3 == 2
            yield ChaosRound(
                given.seed + number, bus, seconds, KILLS_PER_ROUND, *workers, is_replicated=is_replicated,
                with_system_faults=True, load=LOADS[(number + place) % len(LOADS)],
                answer_tokens=given.choose_size(LONG_ANSWER_TOKENS, LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS),
            )  # fmt: skip


@contextlib.contextmanager
def show_progress(what: str, total: ChaosTotal, given: "Options") -> Iterator[Progress]:
    """Show a bar of all kills, and a line with the current state."""
    before = total.num_kills
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.completed:.0f} kills, {task.description}"))
    with Bar(*columns, TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(what, total=given.kills if given.is_full else None)
        yield lambda line, kills: bar.update(task, completed=before + kills, description=f"{what}: {line}")


def make_kills_table(toll: FaultCounts) -> Table:
    """Return kills and stops by process and step, including steps that were never reached."""
    made = Table("process", "step", "kills", "stops")
    kinds: tuple[WorkerKind, ...] = (*STAGES, "auto", "endpoint")
    steps = {(kind, step) for kind in kinds for bus in BUSES for step in list_failpoints(kind, bus)}
    for process, step in sorted(steps | toll.kills.keys() | toll.pauses.keys(), key=_sort_key):
        made.add_row(process, step, str(toll.kills[process, step]), str(toll.pauses[process, step] or ""))
    return made


def make_faults_table(toll: FaultCounts) -> Table:
    """Return how often each other fault was injected."""
    made = Table("to", "what", "times")
    for (whose, what), count in sorted(toll.faults.items()):
        made.add_row(whose, FAULT_NAMES[what], str(count))
    return made


def _sort_key(step: tuple[str, str]) -> tuple[str, str]:
    order = {"prefill": "1", "decode": "2"}
    return order.get(step[0], step[0]), {"settle": "x", "kafka.": "y", ANY_TIME[:6]: "z"}.get(step[1][:6], "") + step[1]


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; the first rounds' seed, and the number of kills, or one kill."""

    seed: int = 1
    kills: int = 1000
    one_kill: bool = False


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first round on each bus")
    parser.add_argument("--kills", type=int, default=1000, help="go on until there were so many, for an hour")
    parser.add_argument("--one-kill", action="store_true", help="instead: one stream, whose worker is killed")
    given = Options(**vars(parser.parse_args()))
    directory = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    if given.one_kill:
        report_figures(kill_one(directory, given), given)
        return
    total = run_chaos(directory, given)
    print(f"\n{describe_machine()}; histories and logs: {directory}")
    Console().print(make_kills_table(total.counts), make_faults_table(total.counts))
    for last_line, count in Counter(line.partition(": ")[2][:100] for line in total.counts.crashes).most_common():
        print(f"fell {count} times: {last_line}")
    report_figures(total.make_figures(), given)


if __name__ == "__main__":
    main()
