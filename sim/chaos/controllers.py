"""A round's stack whose number of workers follows controllers: processes of `penstock autoscale`.

Their time goes `PACE` times faster than usual, or a round would take half an hour. Steps of workers take as long as
`hazards.COST` says, so that the number which a load needs does not depend on what else the machine does.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Self

import redis

from penstock.autoscale import controller, service, windows
from penstock.local.stack import ProcessSlot
from penstock.names import Pipeline
from penstock.ops import lag, scaling
from penstock.ops.scaling import read_scaling
from sim.chaos.checker import Entry
from sim.chaos.faults import ANY_TIME
from sim.chaos.proxy import Proxy
from sim.chaos.system import PIPELINE, ChaosStack
from sim.forked import fork_process, run_penstock

PACE = 5
"""How many times faster the controllers' time goes."""
TIMES: dict[Any, Sequence[str]] = {
    controller: ("WINDOW_S", "FIRST_START_S", "MIN_PATIENCE_S", "LEAVING_S"),
    service: ("LOOK_S", "LOOK_AT_ZERO_S"),
    windows: ("SHORT_S", "LONG_S", "SHAPE_S", "MIN_KNOWN_S"),
    lag: ("MAX_AGE_S",),
    scaling: ("LEASE_MS", "TOLD_MS"),
}
SETTINGS = {"PENSTOCK_ENGINE_MAX_BATCH": "4", "PENSTOCK_SLO_INTERACTIVE_GAP_S": "0.3"}
"""A worker decodes four answers at once, with 40 tokens a second."""
CONTROLLERS = ("controller-0", "controller-1")


def run_controller(bounds: str) -> None:
    """Run `penstock autoscale`, all times of which are divided."""
    for module, names in TIMES.items():
        for name in names:
            setattr(module, name, getattr(module, name) / PACE)
    scaling.LEASE_MS, scaling.TOLD_MS = int(scaling.LEASE_MS), int(scaling.TOLD_MS)
    run_penstock("autoscale", "--workers", bounds)


class ControlledStack(ChaosStack):
    """A stack whose `auto` workers are started and stopped as controllers say, each behind a proxy to Redis."""

    follows_cost = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.controllers = [ProcessSlot(name) for name in CONTROLLERS]
        self.proxies |= {name: Proxy(self._servers.redis.port) for name in CONTROLLERS}
        self._number = 0

    def start(self) -> Self:
        """Start the stack, then the controllers."""
        super().start()
        for slot in self.controllers:
            self._start_controller(slot)
        return self

    def restart_dead(self) -> list[str]:
        """Follow what controllers say, start those again that were killed, and do all that the stack does."""
        for slot in self.controllers:
            if slot.child is None and time.monotonic() > slot.start_at:
                self._start_controller(slot)
            elif slot.child is not None and not slot.child.is_alive():
                self._bury_controller(slot, slot.child.returncode)
        with contextlib.suppress(redis.RedisError):
            told = read_scaling(self._redis, Pipeline(PIPELINE))
            if told is not None and told["workers"]["auto"] != self._number:
                self._follow(told)
        return super().restart_dead()

    def crash_controller(self, name: str) -> None:
        """Send SIGKILL to a controller, which is started again."""
        for slot in self.controllers:
            if slot.name == name and slot.child is not None:
                slot.start_at = time.monotonic() + 1.0
                slot.child.kill()

    def _start_controller(self, slot: ProcessSlot) -> None:
        url = f"redis://127.0.0.1:{self.proxies[slot.name].port}/0"
        given = {"PENSTOCK_PIPELINE": PIPELINE, "PENSTOCK_STREAM_URL": url, "PENSTOCK_KAFKA": self.addresses.kafka}
        slot.child = fork_process(
            slot.name, self._log_path(slot), run_controller, f"1..{len(self.workers)}",
            environment={**os.environ, **self._environment, **given},
        )  # fmt: skip

    def _bury_controller(self, slot: ProcessSlot, status: int | None) -> None:
        self._history.add_entry("kill", worker=slot.name, status=status)
        if status == -9:
            self.counts.kills["controller", ANY_TIME] += 1
        else:
            self.counts.crashes.append(f"{slot.name}: {self.read_log_tail(slot, 1)}")
        slot.child = None

    def _follow(self, told: dict[str, Any]) -> None:
        """Let as many workers run as a controller says, as `penstock up --auto` and KEDA do."""
        self._number = told["workers"]["auto"]
        self._history.add_entry("number", number=self._number, why=told["reasons"]["auto"])
        running = [worker.name for worker in self.workers if worker.name not in self.absent]
        running.sort(key=lambda name: name != told["leave"]["auto"])
        for name in running[: max(0, len(running) - self._number)]:
            self.remove_worker(name)
        for name in sorted(self.absent)[: max(0, self._number - len(running))]:
            self.absent.discard(name)

    def stop(self) -> None:
        """Stop the controllers, then the stack."""
        for slot in self.controllers:
            if slot.child is not None:
                slot.child.stop(timeout_s=30.0)
        super().stop()


def find_swings(history: Iterable[Entry]) -> Iterator[str]:
    """Yield what controllers should not have done in a round with a constant load, from the first fault on."""
    numbers, has_fault = [0], False
    for entry in history:
        if entry["what"] == "number":
            numbers = [*numbers, entry["number"]] if has_fault else [entry["number"]]
        has_fault = has_fault or entry["what"] == "fault"
        if entry["what"] == "calm":
            break
    told = ", ".join(map(str, numbers))
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    if sum((one > 0) != (other > 0) for one, other in pairwise(steps)) > 1:
        yield f"the number of workers swings: {told}"
    if any(step < -1 for step in steps):
        yield f"several workers go at once: {told}"
    if max(numbers) < 2:
        yield f"one worker holds the load, which says nothing: {told}"
