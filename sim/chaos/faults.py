"""Which faults are injected, and when: all of it follows from the seed."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock import failpoints
from penstock.endpoint_worker.reply import INVALID_STATUSES
from penstock.names import STAGES, WorkerKind
from sim import endpoint

FREQUENT_POINTS = (".stepped", ".sent", ".confirmed", "endpoint.3.appended")
"""Endings of failpoints that a worker passes many times."""
RARE_POINTS = ("prefill.2.ended", "prefill.2.taken", "decode.6.taken", "endpoint.1.taken")
"""Failpoints that not every worker reaches: these workers are given more time."""
LOOP_POINTS = ("decode.6.polled", "decode.7.stepped", "decode.7.shipping", "decode.7.sent")
"""Failpoints that a worker which reads requests and jobs passes under the names of prefill alone."""
ANY_TIME = "any time"
Bus = str
"""`embedded` or `kafka`."""
SYSTEM_FAULTS = ("freeze", "stall", "resize", "header")
KAFKA_FAULTS = ("bomb",)
REPLICA_FAULTS = ("leader", "failover")
NUM_ENDPOINTS = 2
"""How many servers the endpoint workers ask."""
REPLY_FAULTS: Sequence[Literal["status", "cut", "hang", "error"]] = ("status", "cut", "hang", "error")
BROKER_REST_S = 10.0
"""How long all brokers go on before one of them stands still."""
ZONE_REST_S = 8.0
"""How long all zones live before one of them is lost, at least."""
KILLED = 0.3
"""The share of the workers that are too many which are killed. The others are told to leave."""
CONTROLLER_FAULTS = 8
"""In a round with controllers each fault of one and of all happens once: then there were so many."""
CONTROLLERS_SETTLE_S = 45.0
"""After this time of a round the number of workers has come to what the load needs."""
BACKLOG_FAULTS = ("freeze", "resize")
"""Faults that hurt most with a backlog: a burst of requests precedes the first of them."""


@dataclass(frozen=True)
class KillPlan:
    """How and when one process of a worker is killed."""

    point: str
    """A failpoint, or `ANY_TIME`."""
    passage: int
    after_s: float
    """The worker is killed this long after it is ready, if it has not reached the point by then."""
    pause_s: float = 0.0
    """How long the worker is stopped first. It then runs for a second without knowing that others have its work."""

    @property
    def failpoint_setting(self) -> str:
        """The value of `PENSTOCK_FAILPOINTS` for the worker; empty for a kill at any time."""
        what = "stop" if self.pause_s else "kill"
        return "" if self.point == ANY_TIME else f"{self.point}={what}@{self.passage}"


def list_failpoints(stage: WorkerKind, bus: Bus) -> list[str]:
    """Return the failpoints that a worker of a stage can reach."""
    own = {
        "prefill": failpoints.PREFILL, "decode": failpoints.DECODE, "endpoint": failpoints.ENDPOINT,
        "embed": [point for point in failpoints.ENDPOINT if point != "endpoint.3.appended"],  # it writes the end alone
        "auto": [point for point in (*failpoints.PREFILL, *failpoints.DECODE) if point not in LOOP_POINTS],
    }[stage]  # fmt: skip
    on_kafka = failpoints.KAFKA_PREFILL if stage == "prefill" else failpoints.KAFKA_DECODE
    return [*own, *failpoints.SETTLER, *(on_kafka if bus == "kafka" else ())]


def plan_kill(seed: int, bus: Bus, stage: WorkerKind, name: str, life: int) -> KillPlan:
    """Plan how a worker's process of the given number (from 0) is killed. The seed shuffles the failpoints."""
    order = list_failpoints(stage, bus)
    random.Random(f"{seed}/{name}").shuffle(order)
    chance = random.Random(f"{seed}/{name}/{life}")
    point = order[life % len(order)]
    after_s = 6.0 if point in RARE_POINTS else 4.0
    if chance.random() < 0.12:
        point, after_s = ANY_TIME, chance.uniform(0.0, 2.0)
    passage = chance.randint(1, 50) if point.endswith(FREQUENT_POINTS) else chance.choice([1, 1, 2, 3, 5])
    passage = 1 if point in RARE_POINTS else passage
    pause_s = chance.choice([2.0, 5.0]) if chance.random() < 0.08 else 0.0
    return KillPlan(point, passage, after_s, pause_s)


@dataclass(frozen=True)
class Fault:
    """One fault of a server, a connection, a disk, a clock or the whole system."""

    at_s: float
    what: str
    """To connections `cut`, `hang`, `slow` or `refuse`; to servers `restart` (SIGKILL first) or `pause` (SIGSTOP);
    to the disk `full`; to a `zone`, with its servers and workers, SIGKILL; to a worker's wall clock `clock`. To all
    processes `freeze` (SIGSTOP), to Redis `stall` (the same, for a moment); to a stage `resize` (one more worker comes,
    and leaves again). From a producer come a `burst` of requests, a `header` that is no text, and a `bomb`, a message
    that is small until it is unpacked. To the server that endpoint workers ask a `reply`: it fails at a question. To a
    worker `start`, `stop` (SIGTERM) or `kill`; to all controllers or one `crash` (SIGKILL).
    """
    target: str
    """A worker (its connections to Redis or its clock), `redis`, `kafka`, `kv`, `disk`, `all`, `client`, a stage, or a
    controller.
    """
    duration_s: float
    clock_shift_s: float = 0.0
    """Seconds by which a clock is put forward (negative: back)."""
    reply: endpoint.Fault | None = None
    """How a server fails at its next question."""


def generate_faults(seed: int, bus: Bus, workers: list[str]) -> Iterator[Fault]:
    """Yield faults of servers and connections without end. A server is hit about every 20 seconds."""
    chance = random.Random(f"{seed}/faults")
    servers = ["redis", "kafka"] if bus == "kafka" else ["redis"]
    ways = [*workers, *(["kafka"] * 2 if bus == "kafka" else [])]
    at_s, restart_s = 0.0, 8.0
    while True:
        at_s += chance.uniform(0.5, 3.0)
        if at_s > restart_s:
            what = chance.choice(["restart", "restart", "pause"])
            yield Fault(at_s, what, chance.choice(servers), chance.choice([0.0, 0.5, 2.0]))
            restart_s = at_s + chance.uniform(14.0, 26.0)
        else:
            what = chance.choice(["cut", "cut", "hang", "slow", "refuse", "full", "clock"])
            for_s, by_s = chance.choice([0.2, 1.0, 3.0]), 0.0
            whose = chance.choice(ways)
            if what == "full":
                whose = "disk"
            elif what == "clock":
                whose, by_s = chance.choice(workers), chance.choice([-900.0, -60.0, 60.0, 900.0])
            yield Fault(at_s, what, whose, for_s, by_s)


def generate_kv_faults(seed: int) -> Iterator[Fault]:
    """Yield faults of the Redis for KV without end: it loses all, is away, or answers late, for seconds."""
    chance, at_s = random.Random(f"{seed}/kv"), 2.0
    while True:
        what = chance.choice(["restart", "restart", "pause", "cut", "hang", "slow", "refuse"])
        fault = Fault(at_s, what, "kv", chance.choice([0.0, 0.5, 2.0] if what == "restart" else [0.5, 2.0, 6.0]))
        yield fault
        at_s += fault.duration_s + chance.uniform(0.5, 4.0)


def generate_clock_jumps(seed: int, workers: list[str]) -> Iterator[Fault]:
    """Yield jumps of the workers' wall clocks without end, one or two a second: minutes, a day, a week, either way."""
    chance = random.Random(f"{seed}/jumps")
    at_s = 0.0
    while True:
        at_s += chance.uniform(0.3, 1.5)
        by_s = chance.choice([-1.0, 1.0]) * chance.choice([2.0, 60.0, 900.0, 86_400.0, 604_800.0])
        yield Fault(at_s, "clock", chance.choice(workers), chance.choice([0.2, 1.0, 5.0]), by_s)


def generate_broker_pauses(for_s: float) -> Iterator[Fault]:
    """Yield stops of a broker without end, each `for_s` long, with `BROKER_REST_S` before it."""
    for number in itertools.count():
        yield Fault(BROKER_REST_S + number * (for_s + BROKER_REST_S), "pause", "kafka", for_s)


def generate_zone_losses(seed: int, zones: Sequence[int]) -> Iterator[Fault]:
    """Yield losses of one zone after the other without end. The next one begins when the last one is over."""
    chance, at_s = random.Random(f"{seed}/zones"), 0.0
    while True:
        for zone in chance.sample(zones, len(zones)):
            at_s += ZONE_REST_S
            yield Fault(at_s, "zone", str(zone), chance.uniform(4.0, 14.0))


def generate_system_faults(
    seed: int, bus: Bus, kinds_of_workers: Sequence[WorkerKind] = STAGES, *, is_replicated: bool = False
) -> Iterator[Fault]:
    """Yield faults of the whole system without end. Each kind comes once a round, in an order of the seed."""
    chance = random.Random(f"{seed}/mishaps")
    kinds = [*SYSTEM_FAULTS, *(KAFKA_FAULTS if bus == "kafka" else ()), *(REPLICA_FAULTS if is_replicated else ())]
    at_s, is_burst_over = 1.0, False
    while True:
        for what in chance.sample(kinds, len(kinds)):
            at_s += chance.uniform(4.0, 10.0)
            if what in BACKLOG_FAULTS and not is_burst_over:
                # Workers that are killed all the time answer few requests: those of a second burst would wait for long.
                is_burst_over = True
                yield Fault(at_s, "burst", "client", 0.0)
                at_s += chance.uniform(0.5, 2.0)
            match what:
                case "freeze":
                    fault = Fault(at_s, what, "all", chance.uniform(4.0, 8.0))
                    at_s += fault.duration_s
                case "stall":
                    fault = Fault(at_s, what, "redis", chance.uniform(0.3, 2.0))
                case "leader" | "failover":
                    whose = "kafka" if what == "leader" else "redis"
                    fault = Fault(at_s, what, whose, chance.uniform(0.0, 4.0))
                case "resize":
                    fault = Fault(at_s, what, chance.choice(kinds_of_workers), chance.uniform(2.0, 10.0))
                case _:
                    fault = Fault(at_s, what, "client", 0.0)
            yield fault


def generate_starts_and_stops(seed: int, workers: Sequence[str]) -> Iterator[Fault]:
    """Yield starts and stops of workers without end, as of a controller that goes down to none and up again.

    All of them run at first. Of those that are too many some are killed.
    """
    chance, at_s, running = random.Random(f"{seed}/numbers"), 2.0, list(workers)
    while True:
        at_s += chance.uniform(2.0, 4.0) if running else chance.uniform(0.5, 1.5)
        numbers = [len(workers), chance.randint(1, len(workers)), *([0] if running else [])]
        wanted = chance.sample(workers, chance.choice(numbers))
        for name in workers:
            if name in wanted and name not in running:
                yield Fault(at_s, "start", name, 0.0)
            elif name in running and name not in wanted:
                yield Fault(at_s, "kill" if chance.random() < KILLED else "stop", name, 0.0)
        running = wanted


def generate_controller_faults(seed: int, controllers: Sequence[str], cut_s: float) -> Iterator[Fault]:
    """Yield faults of controllers without end: all of them, or one, are killed or cut off for `cut_s`."""
    chance, at_s = random.Random(f"{seed}/controllers"), CONTROLLERS_SETTLE_S
    while True:
        faults = [(what, some) for what in ("crash", "cut") for some in (controllers, controllers[:1], controllers[1:])]
        for what, some in chance.sample(faults, len(faults)):
            for name in some:
                yield Fault(at_s, chance.choice(["hang", "refuse"]) if what == "cut" else what, name, cut_s)
            at_s += chance.uniform(3.0, 6.0) + cut_s * (what == "cut")


def generate_reply_faults(seed: int, max_pieces: int) -> Iterator[Fault]:
    """Yield failures of the servers that endpoint workers ask, without end. Answers have up to `max_pieces`."""
    chance = random.Random(f"{seed}/replies")
    at_s = 0.0
    while True:
        at_s += chance.uniform(0.1, 1.0)
        kind = chance.choice(REPLY_FAULTS)
        status = chance.choice([401, 403, 404, 429, 500, 503])
        if kind == "error" and status in INVALID_STATUSES:
            status = 500  # within an answer such a status ends the request by right
        reply = endpoint.Fault(kind, after=chance.randrange(max_pieces), status=status)
        yield Fault(at_s, "reply", f"endpoint-{chance.randrange(NUM_ENDPOINTS)}", 0.0, reply=reply)
