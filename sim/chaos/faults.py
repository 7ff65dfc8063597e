"""What is done to the system, and when: all of it follows from the seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from penstock import failpoints
from penstock.names import STAGES, Stage

OFTEN = (".stepped", ".sent", ".confirmed")
"""Points that a worker passes many times in its short life."""
SELDOM = ("prefill.2.ended", "prefill.2.taken", "decode.6.taken")
"""Points that not every worker comes by: it is given more time."""
ANY_TIME = "any time"
Bus = str
"""`embedded` or `kafka`."""
MISHAPS = ("freeze", "stall", "resize", "header")
MISHAPS_ON_KAFKA = ("bomb",)
MISHAPS_OF_COPIES = ("leader", "failover")
BACKLOG = ("freeze", "resize")
"""Mishaps that hurt most while more waits than workers have fetched: a burst of requests comes before the first."""


@dataclass(frozen=True)
class Fate:
    """How one life of a worker ends."""

    point: str
    """A failpoint, or `ANY_TIME`."""
    passage: int
    after_s: float
    """If the point is not reached so long after the worker is ready, it is killed all the same."""
    pause_s: float = 0.0
    """First it is stopped for so long, and goes on for a second: it does not know that others have its work."""

    @property
    def order(self) -> str:
        """For the worker's environment."""
        what = "stop" if self.pause_s else "kill"
        return "" if self.point == ANY_TIME else f"{self.point}={what}@{self.passage}"


def points_of(stage: Stage, bus: Bus) -> list[str]:
    """The failpoints that a worker can come by."""
    own = failpoints.PREFILL if stage == "prefill" else failpoints.DECODE
    on_kafka = failpoints.KAFKA_PREFILL if stage == "prefill" else failpoints.KAFKA_DECODE
    return [*own, *failpoints.SETTLER, *(on_kafka if bus == "kafka" else ())]


def fate_of(seed: int, bus: Bus, stage: Stage, name: str, life: int) -> Fate:
    """The fate of a worker's life of that number (from 0): each point has its turn, in an order of the seed."""
    order = points_of(stage, bus)
    random.Random(f"{seed}/{name}").shuffle(order)
    chance = random.Random(f"{seed}/{name}/{life}")
    point = order[life % len(order)]
    after_s = 6.0 if point in SELDOM else 3.0
    if chance.random() < 0.12:
        point, after_s = ANY_TIME, chance.uniform(0.0, 2.0)
    passage = chance.randint(1, 25) if point.endswith(OFTEN) else chance.choice([1, 1, 1, 2, 3])
    passage = 1 if point in SELDOM else passage
    pause_s = chance.choice([2.0, 5.0]) if chance.random() < 0.08 else 0.0
    return Fate(point, passage, after_s, pause_s)


@dataclass(frozen=True)
class Fault:
    """Something done to a server or to a connection."""

    at_s: float
    what: str
    """To connections `cut`, `hang`, `slow` or `refuse`; to servers `restart` (SIGKILL first) or `pause` (SIGSTOP);
    to the disk `full`; to a worker's wall clock `clock`. To all processes `freeze` (SIGSTOP), to Redis `stall` (the
    same, for a moment); to a stage `resize` (one more worker comes, and leaves again). From a producer come a `burst`
    of requests, a `header` that is no text, and a `bomb`, a message that is small until it is unpacked.
    """
    whose: str
    """A worker's name (its connections to Redis, or its clock), `redis`, `kafka`, `disk`, `all`, a stage, `client`."""
    for_s: float
    by_s: float = 0.0
    """How far a clock is put forward; less than zero: back."""


def faults(seed: int, bus: Bus, workers: list[str]) -> Iterator[Fault]:
    """What happens to servers and connections, without end. A server has its turn about every 20 seconds."""
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


def mishaps(seed: int, bus: Bus, *, is_replicated: bool = False) -> Iterator[Fault]:
    """What happens to the system as a whole, without end: each kind has its turn, in an order of the seed."""
    chance = random.Random(f"{seed}/mishaps")
    kinds = [*MISHAPS, *(MISHAPS_ON_KAFKA if bus == "kafka" else ()), *(MISHAPS_OF_COPIES if is_replicated else ())]
    at_s, is_burst_over = 1.0, False
    while True:
        for what in chance.sample(kinds, len(kinds)):
            at_s += chance.uniform(4.0, 10.0)
            if what in BACKLOG and not is_burst_over:
                # Workers that are killed all the time answer few requests: those of a second burst would wait for long.
                is_burst_over = True
                yield Fault(at_s, "burst", "client", 0.0)
                at_s += chance.uniform(0.5, 2.0)
            match what:
                case "freeze":
                    fault = Fault(at_s, what, "all", chance.uniform(4.0, 8.0))
                    at_s += fault.for_s
                case "stall":
                    fault = Fault(at_s, what, "redis", chance.uniform(0.3, 2.0))
                case "leader" | "failover":
                    whose = "kafka" if what == "leader" else "redis"
                    fault = Fault(at_s, what, whose, chance.uniform(0.0, 4.0))
                case "resize":
                    fault = Fault(at_s, what, chance.choice(STAGES), chance.uniform(2.0, 10.0))
                case _:
                    fault = Fault(at_s, what, "client", 0.0)
            yield fault
