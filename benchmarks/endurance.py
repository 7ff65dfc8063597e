"""Twenty minutes of all that happens to a pipeline, at once: nothing is lost, and nothing piles up.

python -m benchmarks.endurance [--quick | --smoke] [--json FILE] [--bus embedded|kafka]

On each bus, two prefill and two decode workers as processes on the demo model in float32. Requests of both classes are
always under way, from several tenants, some with deadlines, some cancelled, some sent twice, read by clients that leave
and come back. One worker of each stage lives from the beginning to the end; the other is killed every few seconds, or
stopped for longer than its leases and continued. What everybody saw is a history, and the checker of the chaos rounds
(`sim/chaos/checker.py`) holds it against the promises.

Every second: resident memory and open files of the workers that live on, keys in Redis, messages that are not settled.
Each `…_growth` is the mean of the last quarter less that of the second one, of the worker that grew most; the first
quarter is left out as a warm-up. `…_left` is what is there in the end, when all is answered and what was kept for late
readers has run out.
"""

import contextlib
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis
from rich.progress import Progress

from benchmarks.common import Arguments, describe_machine, make_parser, report_figures, save_plot
from benchmarks.watch import Sample, Watch, compute_growth, count_open_files, read_resident_mb
from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings
from penstock.local.kafka import SHORT_TIMEOUTS
from penstock.local.stack import WorkerSlot
from penstock.names import WorkerKind
from penstock.waiting import wait_until
from sim.chaos.checker import Finding, check_history, count_by_kind
from sim.chaos.clients import LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS, Clients, make_client_task, prepare_known_requests
from sim.chaos.faults import ANY_TIME, Bus, KillPlan
from sim.chaos.fork_server import ForkServer
from sim.chaos.history import History, read_history
from sim.chaos.runner import record_topics, wait_until_calm
from sim.chaos.system import ChaosStack, Servers

BUSES: tuple[Bus, ...] = ("embedded", "kafka")
SEED = 20261121
MAX_OPEN_REQUESTS = 12
WORKER_LIFE_S = (2.0, 16.0)
ANSWER_TIMEOUT_S = 90.0
PANEL_TITLES = {
    "memory": "resident memory, MB",
    "files": "open files",
    "keys": "keys in Redis",
    "lag": "messages not settled",
}


@dataclass(frozen=True)
class EnduranceResult:
    """The outcome on one bus."""

    findings: list[Finding]
    num_requests: int
    num_kills: int
    crashes: list[str]
    watch: Watch
    keys_left: float
    lag_left: float

    def make_figures(self, bus: Bus) -> dict[str, float]:
        """Return the figures for `--json`."""
        grown = {
            "rss_growth_mb": max(self.watch.compute_growth("memory").values()),
            "files_growth": max(self.watch.compute_growth("files").values(), default=0.0),
            "keys_growth": compute_growth(self.watch.series["keys"]["Redis"]),
            "keys_left": self.keys_left,
            "lag_growth": compute_growth(self.watch.series["lag"]["all topics"]),
            "lag_left": self.lag_left,
        }
        told = {"requests": self.num_requests, "kills": self.num_kills, "fell": len(self.crashes)}
        return {
            f"endurance_{name}_{bus}": value for name, value in (told | count_by_kind(self.findings) | grown).items()
        }


@dataclass(frozen=True)
class Extent:
    """How much is done."""

    minutes: float
    answer_tokens: int = LONG_ANSWER_TOKENS
    keep_s: int = 10
    """How long an ended request can be read: much less than a full run, so that its keys are seen to go."""
    num_workers: int = 2
    """Workers of each stage."""


FULL, QUICK, SMOKE = Extent(20.0), Extent(0.1), Extent(0.03, SHORT_ANSWER_TOKENS, keep_s=1, num_workers=1)


def plan_kill(worker: WorkerSlot, life: int) -> KillPlan:
    """Return when to kill a worker. The first worker of each stage is never killed; some others are paused instead."""
    chance = random.Random(f"{SEED}/{worker.name}/{life}")
    if worker.name.endswith("-0"):
        return KillPlan(ANY_TIME, 1, math.inf)
    return KillPlan(
        ANY_TIME, 1, chance.uniform(*WORKER_LIFE_S), chance.choice([2.0, 5.0]) if chance.random() < 0.2 else 0.0
    )


def make_sampler(stack: ChaosStack, servers: Servers, client: "redis.Redis") -> Callable[[], Sample]:
    """Return a function that samples the workers that live on, and what all workers share."""
    bus = connect_bus(stack.addresses, BusSettings())
    pids = {w.name: w.child.pid for w in stack.workers if w.name.endswith("-0") and w.child is not None}

    def sample() -> Sample:
        return {
            "memory": read_resident_mb(pids),
            "files": count_open_files(pids),
            "keys": {"Redis": float(client.dbsize())},
            "lag": {"all topics": float(sum(bus.count_unsettled().values()))},
        }

    return sample


def run_on_bus(
    bus: Bus, extent: Extent, directory: Path, fork_server: ForkServer, progress: Progress
) -> EnduranceResult:
    """Run the load on a bus, and check its history."""
    directory.mkdir(parents=True)
    prepare_known_requests(extent.answer_tokens, "text")  # takes seconds: not in the middle of it
    task = progress.add_task(bus, total=60 * extent.minutes)
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(directory / "history.jsonl"))
        servers = exits.enter_context(Servers(directory, bus, SHORT_TIMEOUTS))
        settings = dict.fromkeys(("PENSTOCK_RECORD_KEEP_S", "PENSTOCK_TRACE_KEEP_S"), str(extent.keep_s))
        size: dict[WorkerKind, int] = {"prefill": extent.num_workers, "decode": extent.num_workers}
        stack = ChaosStack(directory / "stack", fork_server, history, servers, plan_kill, size, settings)
        exits.enter_context(stack)
        client = exits.enter_context(redis.Redis.from_url(servers.redis.url))
        stack.wait_until_ready(120)
        sample = make_sampler(stack, servers, client)
        before = sample()
        make_task = partial(make_client_task, SEED, max_tokens=extent.answer_tokens)
        with Clients(history, stack.addresses, make_task, MAX_OPEN_REQUESTS, ANSWER_TIMEOUT_S) as clients:
            with Watch(sample) as watch:
                _run_load(60 * extent.minutes, stack, clients, lambda s: progress.update(task, completed=s))
            clients.stop_sending()
            stack.is_killing = False
            wait_until_calm(
                stack,
                clients,
                ANSWER_TIMEOUT_S + 30.0,
                lambda line: progress.update(task, description=f"{bus}: {line}"),
            )
        keys_left, lag_left = _wait_until_empty(stack, sample, before, 2 * extent.keep_s + 10)
        record_topics(stack, history)
    kills = sum(stack.counts.kills.values())
    findings = check_history(read_history(history.path))
    return EnduranceResult(findings, clients.num_begun, kills, stack.counts.crashes, watch, keys_left, lag_left)


def _run_load(seconds: float, stack: ChaosStack, clients: Clients, passed: Callable[[float], None]) -> None:
    """Keep the load running for some seconds."""
    begun = time.monotonic()
    while (at_s := time.monotonic() - begun) < seconds:
        stack.restart_dead()
        clients.raise_failure()
        passed(at_s)
        time.sleep(0.05)


def _wait_until_empty(
    stack: ChaosStack, sample: Callable[[], Sample], before: Sample, within_s: float
) -> tuple[float, float]:
    """Wait until no new keys and no messages are left, or the time is over; return how many are left of each."""

    def left() -> tuple[float, float]:
        stack.restart_dead()
        now = sample()
        return now["keys"]["Redis"] - before["keys"]["Redis"], now["lag"]["all topics"]

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: left() <= (0.0, 0.0), within_s, "all keys go", every_s=0.5)
    return left()


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; one bus instead of both."""

    bus: Bus = ""


def run(given: Options) -> dict[str, float]:
    """Run on each bus, print and draw; return the figures."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    directory = Path(tempfile.mkdtemp(prefix="penstock-endurance-"))
    figures: dict[str, float] = {"endurance_minutes": extent.minutes}
    fork_server = ForkServer(directory)
    try:
        for bus in [given.bus] if given.bus else given.choose_size(BUSES, BUSES, BUSES[:1]):
            with Progress(transient=True) as progress:
                endured = run_on_bus(bus, extent, directory / bus, fork_server, progress)
            print(
                f"{bus}: {endured.num_requests} requests, {endured.num_kills} kills, {len(endured.findings)} findings"
            )
            for finding in endured.findings:
                print(f"    {finding.kind}: {finding.id}: {finding.description}")
            for line in endured.crashes:
                print(f"    fell: {line[:150]}")
            figures |= endured.make_figures(bus)
            if given.is_full:
                save_plot(endured.watch.draw_plot(PANEL_TITLES), f"endurance-{bus}")
    finally:
        fork_server.close()
    print(f"\n{describe_machine()}; histories and logs: {directory}")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bus", choices=BUSES, default="", help="on this one alone")
    given = Options(**vars(parser.parse_args()))
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
