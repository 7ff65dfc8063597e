"""What a worker lives with here: a wall clock that is put forward and back, a disk that can be full, a heartbeat that
is wrong, and a processor that is several times slower than those of the other workers, or as fast as a formula says.

The project reads the wall clock by `time.time` and `time.time_ns`, and these are replaced. Monotonic time goes on as it
did, as it does when somebody sets a host's clock. A disk is a folder: while it counts as full, the write of a block
fails as it does on a full disk.
"""

import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.engine.contract import SampledToken
from penstock.engine.engine import Engine
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.sequence import Plan
from penstock.engine.serving import ServingEngine
from penstock.names import CLASSES
from penstock.worker.load import WorkerLoad
from sim.forked import run_penstock

_SECONDS = struct.Struct("d")
COST = StepCost(fixed_s=0.08, row_s=0.005, context_s=0.0, chunk_s=0.0, token_s=0.0005, outside_s=0.0)
"""How long steps take where this is said, on whatever machine: much longer than they take to compute."""


def set_clock(clock: Path, by_s: float) -> None:
    """Set how many seconds the processes that follow this clock are ahead (negative: behind)."""
    clock.touch()
    with clock.open("r+b") as file:  # written in one piece, and never shorter: processes have it mapped
        file.write(_SECONDS.pack(by_s))


def follow_clock(clock: Path) -> None:
    """Replace this process's wall clock by the one in the file `clock`."""
    with clock.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), _SECONDS.size, prot=mmap.PROT_READ)
    true_ns = time.time_ns

    def time_ns() -> int:
        return true_ns() + int(_SECONDS.unpack_from(ahead)[0] * 1e9)

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def fail_where_full(mark: Path) -> None:
    """Let this process's writes of blocks to a disk fail with ENOSPC while the file `mark` exists."""

    def fail_if_full() -> None:
        if mark.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failpoints.arm_action("disk.put.2.1", fail_if_full)


def tell_wrong_load(factor: float) -> None:
    """Let this process's heartbeats tell so many times the prompt tokens that wait, by which requests are placed."""
    summarize_load = WorkerLoad.summarize_load

    def summarize_wrongly(*given: Any) -> dict[str, object]:
        told: dict[str, Any] = summarize_load(*given)
        for priority_class in CLASSES:
            told[priority_class]["waiting_tokens"] = round(factor * told[priority_class]["waiting_tokens"])
        return told

    setattr(WorkerLoad, "summarize_load", summarize_wrongly)  # noqa: B010 - a method is replaced


def slow_down_steps(factor: float) -> None:
    """Let each engine step of this process take `factor` times as long."""
    begin_step, finish_step = ServingEngine.begin_step, ServingEngine.finish_step
    begun_s = 0.0

    def begin_slow_step(engine: ServingEngine) -> bool:
        nonlocal begun_s
        begun_s = time.monotonic()
        return begin_step(engine)

    def finish_slow_step(engine: ServingEngine) -> Sequence[SampledToken]:
        sampled = finish_step(engine)
        time.sleep((factor - 1.0) * (time.monotonic() - begun_s))
        return sampled

    setattr(ServingEngine, "begin_step", begin_slow_step)  # noqa: B010 - methods are replaced
    setattr(ServingEngine, "finish_step", finish_slow_step)  # noqa: B010


def follow_cost() -> None:
    """Let each engine step of this process take as long as `COST` says, and be known to do so."""
    use_measured_speed, run_plan = Engine.use_measured_speed, Engine._run_plan  # noqa: SLF001

    def use_cost(engine: Engine, speed: dict[str, Any]) -> None:
        use_measured_speed(engine, speed)
        engine.scheduler.cost = COST

    def run_in_time(engine: Engine, plan: Plan) -> Any:
        engine.scheduler.cost = COST
        end_s = time.perf_counter() + COST.step_seconds(plan)
        drawn = run_plan(engine, plan)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return drawn

    setattr(Engine, "use_measured_speed", use_cost)  # noqa: B010 - methods are replaced
    setattr(Engine, "_run_plan", run_in_time)  # noqa: B010


def run_worker(
    kind: str, clock: Path, full_mark: Path, load_factor: float, slowness: float = 1.0, follows_cost: bool = False
) -> None:
    """Run `penstock worker` with a clock and a disk of these, whose heartbeat tells `load_factor` times its load and
    whose steps take `slowness` times as long as they do, or as long as `COST` says.
    """
    follow_clock(clock)
    fail_where_full(full_mark)
    tell_wrong_load(load_factor)
    if slowness > 1.0:
        slow_down_steps(slowness)
    if follows_cost:
        follow_cost()
    run_penstock("worker", kind, "--next-name")
