"""Processor time that a load takes, and memory, of chosen processes of this machine."""

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 0.2
"""Requests are settled a moment after their end was read: processor time counts for this much longer."""
IDLE_S, IDLE_SHARE, IDLE_GROWTH_BYTES = 1.0, 0.1, 2**20


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


def read_own_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes, files included, without what they made to share."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssFile:")))


@dataclass(frozen=True)
class Cost:
    """What one load takes: processor time in seconds, of the broker and of all other processes."""

    own_s: float
    broker_s: float = 0.0


@dataclass(frozen=True)
class Meter:
    """Measures what a load costs the processes of one side, the client's among them."""

    pids: Sequence[int]
    brokers: Sequence[int] = ()

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

    def _read_all(self) -> tuple[float, float]:
        return read_processor_s(self.pids), read_processor_s(self.brokers)
