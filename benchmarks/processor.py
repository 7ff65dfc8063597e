"""Processor time that a load takes, of chosen processes of this machine, and what the pipeline adds to the engine's."""

import mmap
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SETTLE_S = 0.2
"""Requests are settled a moment after their end was read: processor time counts for this much longer."""
IDLE_S, IDLE_SHARE, IDLE_GROWTH_BYTES = 1.0, 0.1, 2**20
BARE = "bare"


def read_processor_s(pids: Iterable[int]) -> float:
    """Return the seconds of processor time that these processes have used so far, in all their threads."""
    # A process's clock, as clock_getcpuclockid(3) names it: /proc/PID/stat has the same in steps of 10 ms.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def read_resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes; what they share counts in each."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * mmap.PAGESIZE


def find_brokers() -> list[int]:
    """Return the Kafka brokers that this process has started; one in a container or elsewhere is not among them."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "kafka.Kafka"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


@dataclass(frozen=True)
class Cost:
    """Processor time of one load, in seconds: of the broker, and of all other processes."""

    own_s: float
    broker_s: float = 0.0


@dataclass(frozen=True)
class Meter:
    """Measures what a load costs the processes of one side, the client's among them."""

    pids: Sequence[int]
    brokers: Sequence[int] = ()

    def measure_load(self, load: Callable[[], float]) -> tuple[float, Cost]:
        """Carry out a load; return what it returned, and its cost."""
        begun = self._read_times()
        returned = load()
        time.sleep(SETTLE_S)
        ended = self._read_times()
        # What an idle side takes in that time is no part of the load.
        time.sleep(SETTLE_S)
        idle = self._read_times()
        own_s, broker_s = (2 * end - begin - later for begin, end, later in zip(begun, ended, idle, strict=True))
        return returned, Cost(own_s, broker_s)

    def wait_idle(self) -> None:
        """Wait until the processes do next to nothing: ready workers still map their pools and the shared memory."""
        is_idle = False
        while not is_idle:
            (before_s, _), before_bytes = self._read_times(), read_resident_bytes(self.pids)
            time.sleep(IDLE_S)
            is_idle = (self._read_times()[0] - before_s < IDLE_SHARE * IDLE_S
                       and read_resident_bytes(self.pids) - before_bytes < IDLE_GROWTH_BYTES)  # fmt: skip

    def _read_times(self) -> tuple[float, float]:
        return read_processor_s(self.pids), read_processor_s(self.brokers)


Costs = Mapping[str, Sequence[Cost]]
"""Of each side, round by round."""


@dataclass(frozen=True)
class Loads:
    """The costs of a load of short answers and of one of long answers, with equally many and similar prompts."""

    num_requests: int
    short_tokens: int
    """Tokens of each short answer."""
    long_tokens: int
    short_costs: dict[str, list[Cost]] = field(default_factory=dict)
    long_costs: dict[str, list[Cost]] = field(default_factory=dict)

    def make_figures(self) -> dict[str, float]:
        """Return what the pipeline's sides add to the bare engine; all differences and ratios are within a round."""
        figures: dict[str, float] = {}
        for side in (side for side in self.short_costs if side != BARE):
            added_s = [cost.own_s - bare.own_s for cost, bare in self._pair_with_bare(self.short_costs, side)]
            figures[f"cpu_ms_per_request_added_{side}"] = statistics.median(added_s) / self.num_requests * 1000
            brokers_s = [cost.broker_s for cost in self.short_costs[side]]
            if any(brokers_s):
                figures["cpu_ms_per_request_broker"] = statistics.median(brokers_s) / self.num_requests * 1000
            if side == "embedded":
                ratios = [cost.own_s / bare.own_s - 1 for cost, bare in self._pair_with_bare(self.short_costs, side)]
                figures["cpu_us_per_token_added"] = self._added_us_per_token(side, added_s)
                figures["cpu_ratio_added"] = statistics.median(ratios)
        return figures

    def _added_us_per_token(self, side: str, added_short_s: list[float]) -> float:
        tokens = self.num_requests * (self.long_tokens - self.short_tokens)
        added_long_s = [cost.own_s - bare.own_s for cost, bare in self._pair_with_bare(self.long_costs, side)]
        slopes = [(long - short) / tokens for long, short in zip(added_long_s, added_short_s, strict=True)]
        return statistics.median(slopes) * 1e6

    def _pair_with_bare(self, costs: Costs, side: str) -> list[tuple[Cost, Cost]]:
        return list(zip(costs[side], costs[BARE], strict=True))
