"""Kill everything, over and over, and hold what everybody saw against the promises.

python -m benchmarks.chaos [--quick | --smoke] [--json FILE] [--seed N] [--kills N | --one-kill]

Real worker processes on the demo model in float32, a real Valkey, a real Kafka, clients that send requests steadily and
read every stream, some of them coming back again and again with the last event id they saw. First decode workers
and those of both stages are killed in the middle of long answers, and prefill workers in the middle of long prompts,
while nothing else is wrong, and the time until each request goes on is taken (`sim/chaos/recovery.py`).

Then come rounds in which every worker is killed or stopped at the next of its numbered steps, or at any time, again and
again, among all the other faults of `sim/chaos/faults.py` and `sim/chaos/poison.py`. From round to round of a bus the
workers have another model: the demo's, the one that calls tools, one whose layers keep states, and none, where endpoint
workers ask two servers that fail, too. What clients and topics saw is a history; the checker (`sim/chaos/checker.py`)
knows the promises and nothing else.

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

from benchmarks.chaos_one_kill import kill_one
from benchmarks.common import Arguments, run_benchmark
from penstock.names import STAGES, WorkerKind
from sim.chaos.checker import Finding, count_by_kind
from sim.chaos.clients import LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS, Load
from sim.chaos.faults import ANY_TIME, Bus, list_failpoints
from sim.chaos.recovery import Recovery, RecoveryPlan, format_recovery, make_prefill_plan, measure_recovery
from sim.chaos.runner import ChaosRound, Progress, run_round
from sim.chaos.system import FaultCounts
from sim.forked import preload_modules

BUSES: tuple[Bus, ...] = ("embedded", "kafka")
LOADS: tuple[Load, ...] = ("text", "tools", "states", "endpoint")
WORKERS = ((3, 4, 0), (0, 0, 5), (2, 2, 2))
"""How many workers of prefill, of decode and of both there may be in a round."""
KILLS_PER_ROUND = 125
MAX_ROUND_S = {"embedded": 200.0, "kafka": 300.0}
"""The longest time of a round, however few kills there were."""
FAULT_FIGURES = {
    "freeze": "freezes", "stall": "stalls", "resize": "resizes", "burst": "bursts",
    "header": "poisoned_headers", "bomb": "bombs", "leader": "leaders_killed", "failover": "failovers",
    "reply": "replies_failed", "lie": "loads_told_wrong",
}  # fmt: skip
"""Names of faults in `--json`."""
MAX_START_S = 52 * 60
"""No new round begins later, so that the run ends within an hour."""


@dataclass
class ChaosRun:
    """A run: where its rounds write, and the outcome of those that are over."""

    directory: Path
    given: "Options"
    counts: FaultCounts = field(default_factory=FaultCounts)
    findings: list[Finding] = field(default_factory=list)
    recoveries: dict[tuple[WorkerKind, Bus], Recovery] = field(default_factory=dict)
    num_requests: int = 0
    num_rounds: int = 0

    def measure_recoveries(self, waiting: contextlib.ExitStack) -> None:
        """Measure recovery of each stage on each bus. What is not settled yet is left to `waiting`."""
        plans = self.given.choose_size(
            (RecoveryPlan(3, 10), RecoveryPlan(3, 10, "auto"), make_prefill_plan(8)),
            (RecoveryPlan(1, 2, length=240), RecoveryPlan(1, 2, "auto", length=240), make_prefill_plan(1)),
            (),
        )
        for plan, bus in itertools.product(plans, reversed(BUSES)):
            what = f"recovery of {plan.stage}, {bus}"
            with self._show_progress(what) as tell, contextlib.ExitStack() as now:
                # Others publish the jobs of a dead prefill worker: nothing waits for the brokers.
                exits = now if plan.stage == "prefill" else waiting
                folder = self.directory / f"recovery-{plan.stage}-{bus}"
                found = exits.enter_context(measure_recovery(bus, folder, plan, tell))
            self.recoveries[plan.stage, bus] = found
            print(f"{what}: {format_recovery(found)}", flush=True)
            self.counts.kills[plan.stage, ANY_TIME] += found.kills

    def run_round(self, this: ChaosRound) -> None:
        """Run a round, and add its outcome."""
        name = f"{this.bus}, seed {this.seed}"
        with self._show_progress(name) as tell:
            outcome = run_round(this, self.directory / f"{this.bus}-{this.seed}", tell)
        for mine, theirs in zip(vars(self.counts).values(), vars(outcome.counts).values(), strict=True):
            mine += theirs  # noqa: PLW2901 - counters and lists grow in place
        self.num_requests += outcome.requests
        self.num_rounds += 1
        self.add_findings(
            f"{name}: {outcome.counts.kills.total()} kills, {outcome.requests} requests", outcome.findings
        )

    def add_findings(self, what: str, findings: list[Finding]) -> None:
        """Add and print what the checker found."""
        self.findings += findings
        print(f"{what}: {len(findings)} findings", flush=True)
        for finding in findings:
            print(f"    {finding.kind}: {finding.id}: {finding.description}", flush=True)

    def make_figures(self) -> dict[str, float]:
        """Return the figures for `--json`."""
        counts, by_fault = self.counts, Counter[str]()
        figures: dict[str, float] = {"kills": counts.kills.total(), **count_by_kind(self.findings)}
        for (_, what), count in counts.faults.items():
            by_fault[what] += count
        for (stage, bus), found in self.recoveries.items():
            # Decode's are known by the shorter names, too.
            for whose in (f"{stage}_{bus}", *([bus] if stage == "decode" else [])):
                figures[f"recovery_s_p50_{whose}"] = found.compute_quantile(0.5)
                figures[f"recovery_s_p99_{whose}"] = found.compute_quantile(0.99)
        return figures | {
            "requests": self.num_requests,
            "pauses": counts.pauses.total(),
            "clock_steps": by_fault["clock"],
            "disks_full": counts.faults["disk", "full"],
            **{name: by_fault[fault] for fault, name in FAULT_FIGURES.items()},
            "fell": len(counts.crashes),
            "rounds": self.num_rounds,
        }

    @contextlib.contextmanager
    def _show_progress(self, what: str) -> Iterator[Progress]:
        """Show a line with the current state and the kills so far."""
        before = self.counts.kills.total()
        with Console().status(what) as status:
            yield lambda line, kills: status.update(f"{before + kills} kills, {what}: {line}")


def run_chaos(run: ChaosRun) -> None:
    """Measure recovery, then run rounds until there were enough kills."""
    given, begun_s, plans = run.given, time.monotonic(), _plan_rounds(run.given)
    with contextlib.ExitStack() as waiting:
        run.measure_recoveries(waiting)
        while run.num_rounds < given.choose_size(2, 1, 1):
            run.run_round(next(plans))
    for (stage, bus), found in run.recoveries.items():
        run.add_findings(f"recovery of {stage}, {bus}", found.findings)
    while given.is_full and run.counts.kills.total() < given.kills and time.monotonic() - begun_s < MAX_START_S:
        run.run_round(next(plans))


def _plan_rounds(given: "Options") -> Iterator[ChaosRound]:
    """Yield rounds, on both buses in turn."""
    for number, (place, bus) in ((number, each) for number in itertools.count() for each in enumerate(BUSES)):
        drawn = random.Random(f"{given.seed + number}/{bus}").choice(WORKERS)
        seconds, (prefill, decode, auto) = given.choose_size((MAX_ROUND_S[bus], drawn), (6.0, drawn), (2.0, (1, 2, 0)))
        # Every third round on Kafka has servers with copies.
        is_replicated = bus == "kafka" and number % 3 == 2
        yield ChaosRound(
            given.seed + number, bus, seconds, KILLS_PER_ROUND, prefill, decode, auto, is_replicated=is_replicated,
            with_system_faults=True, load=LOADS[(number + place) % len(LOADS)],
            answer_tokens=given.choose_size(LONG_ANSWER_TOKENS, LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS),
        )  # fmt: skip


def print_counts(toll: FaultCounts) -> None:
    """Print kills and stops by process and step, all other faults, and the steps that were never reached."""
    for what, counted in (("killed", toll.kills), ("stopped", toll.pauses), ("fault", toll.faults)):
        for (whose, step), count in sorted(counted.items()):
            print(f"{what:8} {whose:10} {step:48} {count:5}")
    kinds: tuple[WorkerKind, ...] = (*STAGES, "auto", "endpoint")
    steps = {(kind, step) for kind in kinds for bus in BUSES for step in list_failpoints(kind, bus)}
    print(
        "never reached:",
        *(f"{kind} {step}" for kind, step in sorted(steps - toll.kills.keys() - toll.pauses.keys())),
        sep="\n    ",
    )
    for last_line, count in Counter(line.partition(": ")[2][:100] for line in toll.crashes).most_common():
        print(f"fell {count} times: {last_line}")


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; the first rounds' seed, and the number of kills, or one kill."""

    seed: int = 1
    kills: int = 1000
    one_kill: bool = False


def run(given: Options) -> dict[str, float]:
    """Kill, check and print; return the figures."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    print(f"histories and logs: {directory}")
    preload_modules("benchmarks.chaos_one_kill", "sim.chaos.runner")  # each forked worker imports this module
    if given.one_kill:
        return kill_one(directory, given)
    chaos = ChaosRun(directory, given)
    run_chaos(chaos)
    print_counts(chaos.counts)
    return chaos.make_figures()


if __name__ == "__main__":
    run_benchmark(
        __doc__, run, Options,
        seed={"type": int, "default": 1, "help": "of the first round on each bus"},
        kills={"type": int, "default": 1000, "help": "go on until there were so many, for an hour"},
        one_kill={"action": "store_true", "help": "instead: one stream, whose worker is killed"},
    )  # fmt: skip
