"""The embedded stack: a Valkey server where no Redis is given, workers and a gateway, which are started again when they
die.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, GatewaySettings, load_settings
from penstock.cores import count_usable_cores, list_usable_cores
from penstock.errors import ModelLoadError, PenstockError
from penstock.local.memory import StackMemory
from penstock.local.processes import Child, start_child
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline, WorkerKind
from penstock.ops.access import check_access
from penstock.ops.status import read_heartbeats
from penstock.own_servers import ask_own, find_own_url
from penstock.redis.client import redis_client

DEFAULT_REDIS_PORT = 7379
BATCH_STORE_VARIABLE = "PENSTOCK_BATCH_STORE"
CORES_VARIABLE, THREADS_VARIABLE = "PENSTOCK_WORKER_CORES", "PENSTOCK_ENGINE_THREADS"
METRICS_PORT_VARIABLE = "PENSTOCK_TELEMETRY_PORT"
REDIS_MB_VARIABLE = "PENSTOCK_KV_STORE_REDIS_MB"
SHARED_DIR_VARIABLE = "PENSTOCK_KV_STORE_SHARED_DIR"
SECRET_FILE_VARIABLES = ("PENSTOCK_STREAM_URL_FILE", "PENSTOCK_KV_URL_FILE")
"""Files of secrets that the stack reads itself. The workers are given their content."""
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Pauses before a worker that died is started again; they grow with each death soon after a start."""
MIN_STEADY_S = 20.0
"""A worker that lived for this time counts as started: its failures are counted from 0 again."""
GATEWAY_TIMEOUT_S = 1.0
"""The longest time in seconds in which the gateway must answer that it is ready."""


@dataclass
class ProcessSlot:
    """A worker of the stack, or its gateway, and the process that runs it now."""

    name: str
    child: Child | None = None
    failures: int = 0
    num_deaths: int = 0
    last_status: int = 0
    """The exit status of the process that ended last."""
    start_at: float = 0.0
    started_at: float = 0.0
    was_ready: bool = field(default=False)
    taken_name: str = ""
    """The name that its process took: the next free one if another stack has `name`. A restart asks for it again."""


@dataclass
class WorkerSlot(ProcessSlot):
    """A worker of the stack."""

    stage: WorkerKind = field(kw_only=True)
    place: int = field(default=0, kw_only=True)
    """Its number among all of the stack, from which its cores and its port follow."""


def split_cores(num_workers: int) -> list[list[int]]:
    """Return the cores of each worker: this process's cores, divided evenly; empty lists if there are too few.

    Threads that compute on cores of their own do not wait for those of other workers. Where a quota is less than the
    cores, as many of them are divided, which lie apart: other containers have the rest.
    """
    cores, num_usable = list_usable_cores(), count_usable_cores()
    cores = cores[:: max(1, len(cores) // num_usable)][:num_usable]
    bounds = [len(cores) * i // max(1, num_workers) for i in range(num_workers + 1)]
    return [cores[low:high] if len(cores) >= num_workers else [] for low, high in pairwise(bounds)]


class Stack:
    """Everything one machine needs to serve a pipeline. Use as a context manager.

    With `kafka` the bus is that Kafka, otherwise Redis Streams; with `redis` no server is started.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pipeline: str = "demo",
        kafka: str = "",
        redis: str = "",
        port: int | None = None,
        prefill: int = 1,
        decode: int = 1,
        auto: int = 0,
        endpoint: int = 0,
        embed: int = 0,
        gateway: int | None = None,
        most: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`prefill`, `decode`, `auto`, `endpoint` and `embed` are numbers of workers; `most`: there may be so many.

        `port` is the server's, `gateway` the gateway's. Without `gateway` none is started.
        """
        self.directory = directory
        self._server = None if redis else ValkeyServer(directory / "valkey", port)
        url = redis or (self._server.url if self._server else "")
        self.addresses = load_settings(Addresses, pipeline=pipeline, kafka=kafka, stream_url=url)
        self.stop_asked: Callable[[], object] = lambda: False
        """Returns a true value to stop a start of the server while it waits, for example for its port."""
        self._bus_settings = load_settings(BusSettings)
        self._environment = dict(environment or {})
        if self._server is not None:  # all workers are on this host: they need no other tier to share blocks
            self._environment.setdefault(REDIS_MB_VARIABLE, os.environ.get(REDIS_MB_VARIABLE, "0"))
        self._environment.setdefault(
            BATCH_STORE_VARIABLE, os.environ.get(BATCH_STORE_VARIABLE) or str(directory / "files")
        )
        self._own_memory: StackMemory | None = None
        numbers: dict[WorkerKind, int] = {
            "auto": auto, "prefill": prefill, "decode": decode, "endpoint": endpoint, "embed": embed,
        }  # fmt: skip
        self.workers = list[WorkerSlot]()
        for stage, number in numbers.items():
            first = len(self.workers)
            self.workers += [WorkerSlot(f"{stage}-{n}", stage=stage, place=first + n) for n in range(number)]
        self._leaving: list[WorkerSlot] = []
        """Workers that were told to stop, and still do."""
        self._followed = dict[WorkerKind, int]()
        """The numbers of the last decision that was followed."""
        self._shares = split_cores(max(1, most, len(self.workers)))
        self.gateway = None if gateway is None else ProcessSlot("gateway")
        self._gateway_port = gateway

    @property
    def gateway_url(self) -> str:
        """The address of the gateway, if there is one, as this machine reaches it."""
        return find_own_url(load_settings(GatewaySettings).host, self._gateway_port)

    def lock_data(self) -> None:
        """Take the data of the server that will be started, if any, until `stop`. Raises `DirectoryTaken`."""
        if self._server is not None:
            self._server.lock_directory()

    def start(self) -> Self:
        """Start the server, create the topics, start the workers and the gateway, until `stop_asked()` is true."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self._environment.keys() | os.environ.keys()) & {SHARED_DIR_VARIABLE}:
            self._own_memory = StackMemory()
            self._environment[SHARED_DIR_VARIABLE] = str(self._own_memory.path)
        if self._server is not None:
            self._server.stop_asked = self.stop_asked
            self._server.start()
        if self.stop_asked():
            return self
        check_access(self.addresses)
        connect_bus(self.addresses, self._bus_settings).create_topics()
        for worker in self._all_slots():
            self._start_slot(worker)
        return self

    def stop(self) -> None:
        """Stop the gateway, the workers, then the server, and remove the stack's shared memory."""
        if self.gateway is not None and self.gateway.child is not None:
            self.gateway.child.stop(timeout_s=30.0)
            self.gateway.child = None
        self.stop_workers()
        if self._own_memory is not None:
            self._own_memory.close()
            del self._environment[SHARED_DIR_VARIABLE]
            self._own_memory = None
        if self._server is not None:
            self._server.stop()

    def follow_numbers(self, told: Mapping[str, Any]) -> list[str]:
        """Start or stop workers until the pipeline has as many as a controller wants; return a line for each.

        `told` is a decision (`penstock.autoscale.service.build_told`). Workers of others count, and are left alone.
        """
        said = []
        for stage, names in told["there"].items():
            if told["workers"][stage] == self._followed.get(stage):
                continue
            self._followed[stage] = told["workers"][stage]
            with redis_client(self.addresses.first_url) as client:
                self._describe_states(client)  # it learns the names that workers took
            own = {worker.taken_name or worker.name for worker in [*self.workers, *self._leaving]}
            number = max(0, told["workers"][stage] - len([name for name in names if name not in own]))
            said += [
                f"{line} ({told['reasons'][stage]})" for line in self.set_number(stage, number, told["leave"][stage])
            ]
        return said

    def set_number(self, stage: WorkerKind, number: int, leaver: str | None = None) -> list[str]:
        """Start workers of a kind, or tell some to stop, until there are so many. Return a line for each.

        The first one that stops is `leaver`, by the name that it took. One that stops hands its requests on.
        """
        self._leaving = [worker for worker in self._leaving if worker.child is not None and worker.child.is_alive()]
        mine = [worker for worker in self.workers if worker.stage == stage]
        mine.sort(key=lambda worker: (worker.taken_name or worker.name) == leaver)
        said = []
        for worker in mine[number:]:
            self.workers.remove(worker)
            if worker.child is not None:
                worker.child.send_signal(signal.SIGTERM)
                self._leaving.append(worker)
            said.append(f"{worker.name} is told to stop")
        for _ in range(number - len(mine)):
            taken = {worker.place for worker in [*self.workers, *self._leaving]}
            place = next(place for place in count() if place not in taken)
            worker = WorkerSlot(f"{stage}-{place}", stage=stage, place=place)
            self.workers.append(worker)
            self._start_slot(worker)
            said.append(f"{worker.name} is started")
        return said

    def stop_workers(self) -> None:
        """Stop all workers. Each finishes or hands back its requests first."""
        children = [worker.child for worker in [*self.workers, *self._leaving] if worker.child is not None]
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.stop(timeout_s=30.0)
        for worker in self.workers:
            worker.child = None

    def restart_dead(self) -> list[str]:
        """Start processes that died again, and return a line for each. Callers call it regularly."""
        died = []
        if self._server is not None:
            pid = self._server.pid
            if self._server.start().pid != pid:
                died.append("Redis had ended, and is started again")
        for worker in self._all_slots():
            if worker.child is not None and not worker.child.is_alive():
                lived_s = time.monotonic() - worker.started_at
                worker.failures = 0 if lived_s > MIN_STEADY_S else worker.failures + 1
                worker.num_deaths += 1
                status = worker.last_status = worker.child.returncode or 0
                is_final = status == ModelLoadError.exit_status
                delay_s = RESTART_DELAYS_S[-1 if is_final else min(worker.failures, len(RESTART_DELAYS_S) - 1)]
                cause = f", which ends: {self.read_log_tail(worker, 1)}" if status > 0 else ""  # not for a signal
                died.append(
                    f"{worker.name} ended with status {status} and is started again; "
                    f"its log: {self._log_path(worker)}{cause}"
                )
                worker.child, worker.was_ready, worker.start_at = None, False, time.monotonic() + delay_s
            if worker.child is None and time.monotonic() >= worker.start_at:
                self._start_slot(worker)
        return died

    def wait_until_ready(
        self,
        timeout_s: float,
        progress: Callable[[str], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until every worker serves and the gateway answers, or `stop()` is true.

        `progress` is called with a line whenever a state changes, and with one for each process that died.

        Raises `PenstockError` with the end of its log when one cannot start, `ModelLoadError` at once for a model that
        no start would load.
        """
        end, last_line = time.monotonic() + timeout_s, ""
        # Deaths, not failures in a row: on a busy machine a worker that cannot start may live for long before it ends.
        deaths_before = {worker.name: worker.num_deaths for worker in self._all_slots()}
        with redis_client(self.addresses.first_url) as client:
            while not stop() and not all(worker.was_ready for worker in self._all_slots()):
                line = self._describe_states(client)
                if "downloading" in line:  # a model may take hours
                    end = time.monotonic() + timeout_s
                if line != last_line:
                    progress(line)
                    last_line = line
                died = self.restart_dead()
                for slot in self._all_slots():
                    num_deaths = slot.num_deaths - deaths_before[slot.name]
                    if num_deaths and slot.last_status == ModelLoadError.exit_status:
                        raise ModelLoadError(self.read_log_tail(slot, 1).removeprefix("penstock: "))
                    if num_deaths >= 2:
                        raise PenstockError(f"{slot.name} does not start; its log ends:\n{self.read_log_tail(slot)}")
                for said in died:
                    progress(said)
                if time.monotonic() > end:
                    raise PenstockError(f"not ready within {timeout_s:g} s: {line}")
                time.sleep(0.02)

    def read_log_tail(self, worker: ProcessSlot, num_lines: int = 15) -> str:
        """Return the last lines of a worker's log."""
        file = self._log_path(worker)
        return "\n".join(file.read_text(errors="replace").splitlines()[-num_lines:]) if file.exists() else ""

    def _describe_states(self, client: "redis.Redis") -> str:
        """Return all states in one line, and mark the workers that are ready."""
        host, found = socket.gethostname(), read_heartbeats(client, Pipeline(self.addresses.pipeline))
        states = {int(status["pid"]): status for status in found if status.get("host") == host}
        parts = []
        for worker in self.workers:
            status = states.get(worker.child.pid, {}) if worker.child is not None else {}
            worker.taken_name = str(status.get("name", worker.taken_name))
            state = str(status.get("state", "starting"))
            worker.was_ready = worker.was_ready or state == "ready"
            if state == "loading" and "doing" in status:
                share = int(float(status["progress"]) * 10)
                state = f"{status['doing']} {share}0%" if 0 < share < 10 else str(status["doing"])
            parts.append(f"{worker.taken_name or worker.name}: {state}")
        if self.gateway is not None:
            self.gateway.was_ready = self.gateway.was_ready or self._is_gateway_answering()
            is_served = not self.workers or any(worker.was_ready for worker in self.workers)
            answering = "ready" if is_served else "waits for a worker"
            parts.append(f"gateway: {answering if self.gateway.was_ready else 'starting'}")
        return ", ".join(parts)

    def _is_gateway_answering(self) -> bool:
        """Return whether this stack's gateway answers, and not another program on its port."""
        if self.gateway is None or self.gateway.child is None:
            return False
        try:
            with ask_own(f"{self.gateway_url}/healthz", timeout_s=GATEWAY_TIMEOUT_S) as answer:
                return bool(json.load(answer)["pid"] == self.gateway.child.pid)
        except (OSError, ValueError, KeyError):
            return False

    def _all_slots(self) -> list[ProcessSlot]:
        return [*self.workers, *([] if self.gateway is None else [self.gateway])]

    def _start_slot(self, worker: ProcessSlot) -> None:
        addresses = self.addresses
        environment = {
            **{name: value for name, value in os.environ.items() if name not in SECRET_FILE_VARIABLES},
            "PENSTOCK_PIPELINE": addresses.pipeline,
            "PENSTOCK_KAFKA": addresses.kafka,
            "PENSTOCK_STREAM_URL": addresses.stream_url,
            "PENSTOCK_KV_URL": addresses.kv_url,
            "PENSTOCK_WORKER_NAME": worker.taken_name or worker.name,
            **self._environment,
        }
        if isinstance(worker, WorkerSlot) and not environment.keys() & {CORES_VARIABLE, THREADS_VARIABLE}:
            # While one that stops has its cores, a new one shares those of another.
            if share := self._shares[worker.place % len(self._shares)]:
                environment[CORES_VARIABLE] = ",".join(map(str, share))
            else:
                environment[THREADS_VARIABLE] = "1"
        if (port := int(environment.get(METRICS_PORT_VARIABLE, "0"))) and isinstance(worker, WorkerSlot):
            environment[METRICS_PORT_VARIABLE] = str(port + worker.place)
        worker.was_ready, worker.started_at = False, time.monotonic()
        if isinstance(worker, WorkerSlot):
            worker.child = self._start_worker(worker, environment)
        else:
            worker.child = self._start_child(worker, ["gateway", "--port", str(self._gateway_port)], environment)

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        return self._start_child(worker, ["worker", worker.stage, "--next-name"], environment)

    def _start_child(self, slot: ProcessSlot, arguments: list[str], environment: Mapping[str, str]) -> Child:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments]
        return start_child(command, name=slot.name, log=self._log_path(slot), environment=environment)

    def _log_path(self, worker: ProcessSlot) -> Path:
        return self.directory / f"{worker.name}.log"

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
