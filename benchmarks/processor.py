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


def read_proportional_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes; of what processes share, each has its part."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True)
class Cost:
    """What one load takes: processor time in seconds, of the broker and of all other processes, and what the server of
    Redis reads: how often it has received something.
    """

    own_s: float
    broker_s: float = 0.0
    num_reads: float = 0.0


@dataclass(frozen=True)
class Meter:
    """Measures what a load costs the processes of one side, the client's among them."""

    pids: Sequence[int]
    brokers: Sequence[int] = ()
    count_reads: Callable[[], float] = float
    """Returns how often the server of Redis has received something so far."""

    def measure_load(self, load: Callable[[], float]) -> tuple[float, Cost]:
        """Carry out a load; return what it returned, and its cost."""
        begun = self._read_all()
        returned = load()
        time.sleep(SETTLE_S)
        ended = self._read_all()
        # What an idle side takes in that time is no part of the load.
        time.sleep(SETTLE_S)
        idle = self._read_all()
        return returned, Cost(*(2 * end - begin - later for begin, end, later in zip(begun, ended, idle, strict=True)))

    def wait_idle(self) -> None:
        """Wait until the processes do next to nothing: ready workers still map their pools and the shared memory."""
        is_idle = False
        while not is_idle:
            before_s, before_bytes = read_processor_s(self.pids), read_resident_bytes(self.pids)
            time.sleep(IDLE_S)
            is_idle = (read_processor_s(self.pids) - before_s < IDLE_SHARE * IDLE_S
                       and read_resident_bytes(self.pids) - before_bytes < IDLE_GROWTH_BYTES)  # fmt: skip

    def _read_all(self) -> tuple[float, float, float]:
        return read_processor_s(self.pids), read_processor_s(self.brokers), self.count_reads()


Costs = Mapping[str, Sequence[Cost]]
"""Of each side, round by round."""


@dataclass(frozen=True)
class Loads:
    """The costs of a load of short answers and of one of long answers, with equally many and similar prompts, and those
    of requests that are sent one at a time, and of some at once.

    The name of a side ends with that of its bus. What comes before that names its workers: nothing, where there is one
    of each stage.
    """

    num_requests: int
    short_tokens: int
    """Tokens of each short answer."""
    long_tokens: int
    short_costs: dict[str, list[Cost]] = field(default_factory=dict)
    long_costs: dict[str, list[Cost]] = field(default_factory=dict)
    alone_costs: dict[str, list[Cost]] = field(default_factory=dict)
    at_once_costs: dict[str, list[Cost]] = field(default_factory=dict)

    def make_figures(self) -> dict[str, float]:
        """Return what the pipeline's sides add to the bare engine; all differences and ratios are within a round."""
        figures: dict[str, float] = {}
        for side in (side for side in self.short_costs if side != BARE):
            added_s = self._list_added_s(self.short_costs, side)
            figures[f"cpu_ms_per_request_added_{side}"] = statistics.median(added_s) / self.num_requests * 1000
            brokers_s = [cost.broker_s for cost in self.short_costs[side]]
            if any(brokers_s):
                name = f"cpu_ms_per_request_{side.removesuffix('kafka')}broker"
                figures[name] = statistics.median(brokers_s) / self.num_requests * 1000
            if side == "embedded":
                ratios = [cost.own_s / bare.own_s - 1 for cost, bare in self._pair_with_bare(self.short_costs, side)]
                figures["cpu_us_per_token_added"] = self._added_us_per_token(side, added_s)
                figures["cpu_ratio_added"] = statistics.median(ratios)
        return figures | self._compare_with_before()

    def _compare_with_before(self) -> dict[str, float]:
        """Return what sides take relative to the workers of another checkout, where these are measured."""
        figures: dict[str, float] = {}
        for bus in (bus for bus in ("embedded", "kafka") if f"before_{bus}" in self.short_costs):
            before_s, two_hops_s, one_hop_s = (
                statistics.median(self._list_added_s(self.short_costs, f"{workers}{bus}"))
                for workers in ("before_", "", "one_hop_")
            )
            figures[f"cpu_added_one_hop_vs_before_{bus}"] = one_hop_s / before_s
            if bus == "embedded":
                figures["cpu_added_two_hops_vs_before"] = two_hops_s / before_s
            for suffix, costs in (("_alone", self.alone_costs), ("", self.at_once_costs)):
                before, one_hop = costs[f"before_{bus}"], costs[f"one_hop_{bus}"]
                if bus == "embedded":
                    reads = [sum(cost.num_reads for cost in found) for found in (one_hop, before)]
                    figures[f"redis_reads_one_hop_vs_before{suffix}"] = reads[0] / reads[1]
                elif any(cost.broker_s for cost in before):
                    brokers_s = [sum(cost.broker_s for cost in found) for found in (one_hop, before)]
                    figures[f"cpu_broker_one_hop_vs_before{suffix}"] = brokers_s[0] / brokers_s[1]
        return figures

    def _added_us_per_token(self, side: str, added_short_s: list[float]) -> float:
        tokens = self.num_requests * (self.long_tokens - self.short_tokens)
        added_long_s = self._list_added_s(self.long_costs, side)
        slopes = [(long - short) / tokens for long, short in zip(added_long_s, added_short_s, strict=True)]
        return statistics.median(slopes) * 1e6

    def _list_added_s(self, costs: Costs, side: str) -> list[float]:
        return [cost.own_s - bare.own_s for cost, bare in self._pair_with_bare(costs, side)]

    def _pair_with_bare(self, costs: Costs, side: str) -> list[tuple[Cost, Cost]]:
        return list(zip(costs[side], costs[BARE], strict=True))
