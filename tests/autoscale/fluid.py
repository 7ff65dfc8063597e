"""A pipeline as a fluid: work flows in at a rate, and workers, which take a time to start, carry it away."""

import random
from dataclasses import dataclass, field
from itertools import count, pairwise

from penstock.autoscale.controller import Bounds, Controller, Decision, Seen, Workers
from penstock.autoscale.sizing import Load, Speed, Targets
from penstock.autoscale.windows import Passed
from penstock.names import WorkerKind

LOOK_S = 5.0
TARGETS = Targets(ttft_s=4.0, gap_s=0.05)
SPEED = Speed(rows=16, step_s=0.05)


@dataclass
class FluidPipeline:
    """Requests of one length: 0.2 s of a prompt, and 0.2 s of a worker's time for the answer."""

    bounds: Bounds = field(default_factory=lambda: Bounds(least=1))
    start_s: float = 10.0
    noise: float = 0.0
    kinds: tuple[WorkerKind, ...] = ("auto",)
    prompt_s: float = 0.2
    never_ready: bool = False
    """Whether workers that are started from now on never serve."""
    seed: int = 1

    def __post_init__(self) -> None:
        self.now_s, self.backlog_s, self.batch_s = 0.0, 0.0, 0.0
        self.names = count()
        self.ready: dict[WorkerKind, list[str]] = {kind: [f"{kind}-first"] for kind in self.kinds}
        self.starting: dict[WorkerKind, list[float]] = {kind: [] for kind in self.kinds}
        self.controller = Controller(TARGETS, self.bounds)
        self.decisions: list[Decision] = []
        self.missing: tuple[str, ...] = ()
        self.lost: dict[WorkerKind, int] = {}
        self._random = random.Random(self.seed)

    def run(self, rate: float, seconds: float, *, acts: bool = True) -> list[Decision]:
        """Let time pass, and return the decisions. With `acts` the numbers are followed at once."""
        before = len(self.decisions)
        for _ in range(round(seconds / LOOK_S)):
            self._flow(rate)
            self.look(rate)
            if acts:
                self.follow_decision(self.decisions[-1])
        return self.decisions[before:]

    def _flow(self, rate: float) -> None:
        self.now_s += LOOK_S
        for kind, starts in self.starting.items():
            over = [] if self.never_ready else [at_s for at_s in starts if at_s <= self.now_s]
            self.ready[kind] += [f"{kind}-{next(self.names)}" for _ in over]
            self.starting[kind] = [at_s for at_s in starts if at_s not in over]
        readers = sum(len(names) for kind, names in self.ready.items() if kind != "decode")
        decoding = rate * 0.2 if "auto" in self.kinds else 0.0
        self.backlog_s += (rate * self.prompt_s - max(0.0, readers - decoding)) * LOOK_S
        self.backlog_s = max(0.0, self.backlog_s)

    def look(self, rate: float) -> Decision:
        """Let the controller decide."""
        arrived = rate * LOOK_S * (1 + self._random.uniform(-self.noise, self.noise))
        passed = Passed(
            self.now_s, LOOK_S, arrived, arrived, arrived * self.prompt_s, arrived * self.prompt_s**2 * 1.5, 0.0
        )
        workers: dict[WorkerKind, Workers] = {
            kind: Workers(tuple(self.ready[kind]), tuple(LOOK_S for _ in self.starting[kind]), self.lost.pop(kind, 0))
            for kind in self.kinds
        }
        load = Load(0.0, 0.0, 0.0, output_tokens=64.0, backlog_s=self.backlog_s, batch_s=self.batch_s)
        num_open = round(rate > 0) + round(self.backlog_s > 0) + round(self.batch_s > 0)
        seen = Seen(self.now_s, workers, passed, num_open, load, SPEED, self.missing)
        self.decisions.append(self.controller.decide_numbers(seen))
        return self.decisions[-1]

    def follow_decision(self, decision: Decision) -> None:
        """Start and stop workers."""
        for kind, number in decision.numbers.items():
            ready, starting = self.ready[kind], self.starting[kind]
            while len(ready) + len(starting) < number:
                starting.append(self.now_s + self.start_s)
            while len(ready) + len(starting) > number:
                (starting or ready).pop()

    def count(self, kind: WorkerKind = "auto") -> int:
        """Return how many workers serve."""
        return len(self.ready[kind])


def count_reversals(numbers: list[int]) -> int:
    """Return how often numbers turn from up to down or back."""
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))
