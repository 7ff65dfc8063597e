"""The system under chaos: real servers behind proxies, and workers each of which is killed by its kill plan."""

import contextlib
import json
import math
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import redis

from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings, KVSettings
from penstock.kvstore.tools import open_tiers
from penstock.local.processes import Child, find_free_port
from penstock.local.stack import SHARED_DIR_VARIABLE, ProcessSlot, Stack, WorkerSlot
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline, WorkerKind
from penstock.redis.client import redis_client
from sim.chaos import hazards
from sim.chaos.faults import ANY_TIME, Bus, KillPlan
from sim.chaos.history import History
from sim.chaos.proxy import Proxy
from sim.forked import fork_process, is_stopped
from sim.kafka_server import KafkaServer

PIPELINE = "chaos"
TESTING = {"worker_heartbeat_s": 0.5}
ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "128",
    "PENSTOCK_ENGINE_MAX_BATCH": "16",
    "PENSTOCK_ENGINE_POOL_MB": "64",
    "PENSTOCK_KV_STORE_SHARED_MB": "64",
    "PENSTOCK_KV_STORE_REDIS_MB": "0",
    "PENSTOCK_KV_STORE_CALL_RETENTION_S": "6",
    "PENSTOCK_RECORD_MAX_ATTEMPTS": "1000",
    "PENSTOCK_TESTING": json.dumps(TESTING),
}
"""The limit of attempts is high because workers die far more often here than requests make progress."""
RESTART_DELAY_S = 0.3
"""Wait before a worker that crashed by itself is started again. Killed workers are restarted at once."""
USUAL_START_S = 2.0
"""How long a worker takes to get ready where nothing else runs. Where it takes several times as long, it is killed that
much later: otherwise no worker of a busy machine would live for long enough to check its first grammar, say.
"""
LOAD_FACTORS = (1.0, 1.0, 0.01, 100.0)
"""How many times its load a worker may tell in its heartbeat."""
RETENTION_S = 6.0
"""For how long KV is retained, at most."""
PlanKill = Callable[[WorkerSlot, int], KillPlan | None]
"""Returns how a worker's process of a number is killed; None if it is not."""


@dataclass
class _WorkerLife:
    number: int
    kill_plan: KillPlan | None
    started_at: float
    slowness: float = 1.0
    """How many times longer than `USUAL_START_S` it took to get ready; at least 1."""
    ready_at: float = 0.0
    stopped_at: float = 0.0
    was_paused: bool = False
    killed: bool = False
    """Whether this process killed it. If not, it killed itself at a failpoint."""
    is_leaving: bool = False
    """Whether it was sent SIGTERM."""


@dataclass
class FaultCounts:
    """How often each fault was injected."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (kind of process, failpoint)."""
    pauses: Counter[tuple[str, str]] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    """For each worker that ended by itself, its name and the last line of its log."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """All other faults, by (target, fault)."""
    starts_and_stops: int = 0
    """How many workers were started, or told to leave or killed, because there were to be other ones."""


def ignore_line(line: str) -> None:
    """Do nothing with a line that tells why a tier is left out."""


class Servers:
    """Redis and, where it is the bus, Kafka behind a proxy. Each can be killed and started again. There may be a Redis
    for KV, which forgets all then.
    """

    is_replicated = False
    kv: ValkeyServer | None = None
    kv_proxy: Proxy | None = None

    def __init__(self, directory: Path, bus: Bus, timeouts: Mapping[str, str], *, has_kv: bool = False) -> None:
        self.redis = ValkeyServer(directory / "redis")
        if has_kv:
            self.kv = ValkeyServer(directory / "kv", appendonly=False)
            self.kv_proxy = Proxy(self.kv.port)
        self.kafka: KafkaServer | None = None
        self.kafka_proxy: Proxy | None = None
        self.bootstrap = ""
        if bus == "kafka":
            self.kafka_proxy = Proxy(find_free_port())
            port, advertised = self.kafka_proxy.target_port, self.kafka_proxy.port
            self.kafka = KafkaServer(directory / "kafka", port, advertised=advertised, timeouts=timeouts)
            self.bootstrap = f"127.0.0.1:{advertised}"

    @property
    def stream_url(self) -> str:
        """The URL of the stream Redis."""
        return self.redis.url

    def build_environment(self, worker: str) -> dict[str, str]:
        """Return the settings of a worker that follow from where it is."""
        return {} if self.kv_proxy is None else {"PENSTOCK_KV_URL": f"redis://127.0.0.1:{self.kv_proxy.port}/0"}

    def _find_server(self, whose: str) -> ValkeyServer | KafkaServer:
        server = {"redis": self.redis, "kafka": self.kafka, "kv": self.kv}[whose]
        assert server is not None
        return server

    def fail_over(self, whose: str, down_s: float) -> None:
        """Kill the leading server. Raises `NotImplementedError`: these servers have no replicas."""
        raise NotImplementedError

    def restart_server(self, whose: str, down_s: float) -> None:
        """Kill a server, wait for `down_s`, and start it again; with its data, if that is not KV."""
        server = self._find_server(whose)
        server.kill()
        time.sleep(down_s)
        server.start()

    def pause_server(self, whose: str, for_s: float) -> None:
        """Stop a server with SIGSTOP for `for_s`, then continue it."""
        server = self._find_server(whose)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(server.pid, signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all servers."""
        for server in (self.redis, self.kafka, self.kv):
            if server is not None and server.pid is not None:
                os.kill(server.pid, number)

    def __enter__(self) -> Self:
        self.redis.start()
        if self.kv is not None and self.kv_proxy is not None:
            self.kv_proxy.__enter__()
            self.kv.start()
        if self.kafka is not None and self.kafka_proxy is not None:
            self.kafka_proxy.__enter__()
            self.kafka.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.kafka is not None and self.kafka_proxy is not None:
            self.kafka.stop()
            self.kafka_proxy.__exit__(None, None, None)
        if self.kv is not None and self.kv_proxy is not None:
            self.kv.stop()
            self.kv_proxy.__exit__(None, None, None)
        self.redis.stop()


class ChaosStack(Stack):
    """A stack of forked workers, each with its own proxy to Redis, its own wall clock and its own kill plan.

    Call `restart_dead` often: it carries out the kill plans.
    """

    follows_cost = False
    """Whether steps of workers take as long as `hazards.COST` says."""

    def __init__(
        self,
        directory: Path,
        history: History,
        servers: "Servers",
        plan_of: PlanKill,
        size: Mapping[WorkerKind, int],
        more: Mapping[str, str] | None = None,
        away: Collection[str] = (),
        slowness: Mapping[str, float] | None = None,
    ) -> None:
        """`size`: how many workers of each kind; `more`: their settings; `away`: workers that are not started yet;
        `slowness`: how many times as long the steps of a worker take, by its name.
        """
        super().__init__(
            directory, pipeline=PIPELINE, kafka=servers.bootstrap, redis=servers.stream_url,
            prefill=size.get("prefill", 0), decode=size.get("decode", 0), auto=size.get("auto", 0),
            endpoint=size.get("endpoint", 0), embed=size.get("embed", 0), environment={**ENVIRONMENT, **(more or {})},
        )  # fmt: skip
        self._plan_kill, self._slowness = plan_of, slowness or {}
        self.counts = FaultCounts()
        self.absent = set(away)
        """Names of workers that must not run. Those that do are sent SIGTERM and are not replaced."""
        self._killed_if_absent, self._waiting = set[str](), set[str]()
        """Names of those that are sent SIGKILL, and of those that would run now."""
        self._worker_lock = threading.Lock()
        """Held while workers are started, stopped or signalled."""
        self.is_killing = True
        """Whether kill plans are carried out. If not, new workers get none."""
        self.proxies = {worker.name: Proxy(servers.redis.port) for worker in self.workers}
        self.clocks = {worker.name: directory / f"{worker.name}.clock" for worker in self.workers}
        self._history, self.full_mark = history, directory / "full"
        """A file: while it exists, the disk of all workers is full."""
        self._servers = servers
        self._lives: dict[str, _WorkerLife] = {}
        self._num_starts: dict[str, int] = defaultdict(int)
        self._quickest_start_s = math.inf
        self._redis = redis_client(servers.stream_url)

    @property
    def machine_slowness(self) -> float:
        """How many times longer than `USUAL_START_S` the quickest start of a worker took so far; at least 1."""
        waited_s = max((time.monotonic() - life.started_at for life in self._lives.values()), default=0.0)
        return max(1.0, min(self._quickest_start_s, waited_s) / USUAL_START_S)

    def get_child(self, name: str) -> Child | None:
        """Return the process of a worker, or None if it does not live."""
        child = next(worker.child for worker in self.workers if worker.name == name)
        return child if child is not None and child.is_alive() else None

    def kill_worker(self, worker: WorkerSlot) -> None:
        """Send SIGKILL to a worker."""
        if worker.child is not None and worker.child.is_alive():
            self._lives[worker.name].killed = True
            worker.child.kill()

    def remove_worker(self, name: str, *, by_kill: bool = False) -> None:
        """Let a worker leave, or kill it, and start none in its place until its name is taken out of `absent`."""
        (self._killed_if_absent.add if by_kill else self._killed_if_absent.discard)(name)
        self.absent.add(name)

    def is_ready(self, worker: WorkerSlot) -> bool:
        """Return whether the worker's current process has reported the state `ready`."""
        return worker.name in self._lives and self._lives[worker.name].ready_at > 0

    def list_retained(self) -> list[str]:
        """Return what the living workers say that they retain, and what each tier does, in words; empty if nothing."""
        living = [worker for worker in self.workers if worker.child is not None and worker.child.is_alive()]
        keys = [Pipeline(PIPELINE).worker_key(worker.stage, worker.name) for worker in living]
        statuses = [json.loads(text) if text else {} for text in (self._redis.mget(keys) if keys else [])]
        told = [
            f"{worker.name} retains {retained}"
            for worker, status in zip(living, statuses, strict=True)
            if (retained := status.get("retention", {}).get("bytes"))
        ]
        given = self._environment
        settings = KVSettings(
            shared_dir=given.get(SHARED_DIR_VARIABLE, ""), disk_mb=int(given["PENSTOCK_KV_STORE_DISK_MB"]),
            disk_dir=given["PENSTOCK_KV_STORE_DISK_DIR"], redis_mb=int(given["PENSTOCK_KV_STORE_REDIS_MB"]),
        )  # fmt: skip
        with contextlib.ExitStack() as exits:
            kv = self._servers.kv
            tiers = open_tiers(settings, [kv.url if kv else self._servers.stream_url], exits, None, ignore_line)
            counts = [(tier.name, tier.read_usage().retained) for tier in tiers]
        return [*told, *(f"the tier {name} retains {count} blocks" for name, count in counts if count)]

    def freeze_all(self, wait: Callable[[], object]) -> None:
        """Stop all workers and servers at once, call `wait`, and continue them. Kill plans are put off by that time."""
        with self._worker_lock:
            begun = time.monotonic()
            children = [worker.child for worker in self.workers if worker.child is not None and worker.child.is_alive()]
            for child in children:
                child.send_signal(signal.SIGSTOP)
            self._servers.send_signal(signal.SIGSTOP)
            wait()
            self._servers.send_signal(signal.SIGCONT)
            for child in children:
                child.send_signal(signal.SIGCONT)
            for life in self._lives.values():
                life.started_at += time.monotonic() - begun
                life.ready_at += time.monotonic() - begun if life.ready_at else 0.0

    def restart_dead(self) -> list[str]:
        """See who is ready, stop, continue and kill, bury the dead, and start others in their places."""
        if self._worker_lock.acquire(blocking=False):
            try:
                self._update_workers()
            finally:
                self._worker_lock.release()
        return []

    def _update_workers(self) -> None:
        self._update_readiness()
        for worker in self.workers:
            if worker.child is not None and worker.child.is_alive():
                self._apply_kill_plan(worker, worker.child, self._lives[worker.name])
            if worker.child is not None and not worker.child.is_alive():
                self._record_exit(worker, worker.child, self._lives[worker.name])
                worker.child = None
            if worker.child is None and time.monotonic() > worker.start_at:
                self._start_slot(worker)

    def start(self) -> Self:
        """Start the proxies and clocks, then the stack."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._servers.is_replicated:
            connect_bus(self.addresses, BusSettings(replication=3)).create_topics()
        for path in self.clocks.values():
            hazards.set_clock(path, 0.0)
        for proxy in self.proxies.values():
            proxy.__enter__()
        super().start()
        return self

    def stop(self) -> None:
        """Stop the stack, then the proxies."""
        super().stop()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        self._redis.close()

    def stop_workers(self) -> None:
        """Continue workers that are stopped by SIGSTOP, then stop all workers."""
        for worker in self.workers:
            if worker.child is not None:
                worker.child.send_signal(signal.SIGCONT)
        super().stop_workers()

    def _start_slot(self, worker: ProcessSlot) -> None:
        if worker.name in self.absent:
            self._waiting.add(worker.name)
            return
        self.counts.starts_and_stops += worker.name in self._waiting
        self._waiting.discard(worker.name)
        super()._start_slot(worker)

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        number = self._num_starts[worker.name]
        self._num_starts[worker.name] += 1
        kill_plan = self._plan_kill(worker, number) if self.is_killing else None
        self._lives[worker.name] = _WorkerLife(number, kill_plan, time.monotonic())
        own = self._servers.build_environment(worker.name)
        if not self._servers.is_replicated:
            own["PENSTOCK_STREAM_URL"] = f"redis://127.0.0.1:{self.proxies[worker.name].port}/0"
        if kill_plan is not None and kill_plan.failpoint_setting:
            own["PENSTOCK_FAILPOINTS"] = kill_plan.failpoint_setting
        # Some lie about their load, each life of a worker as it likes.
        load_factor = random.Random(f"{worker.name} {number}").choice(LOAD_FACTORS)
        self.counts.faults[worker.stage, "lie"] += load_factor != 1.0
        child = fork_process(
            worker.name, self._log_path(worker), hazards.run_worker, worker.stage, self.clocks[worker.name],
            self.full_mark, load_factor, self._slowness.get(worker.name, 1.0), self.follows_cost,
            environment={**environment, **own},
        )  # fmt: skip
        self._history.add_entry(
            "start",
            worker=worker.name,
            life=number,
            pid=child.pid,
            order=kill_plan.failpoint_setting if kill_plan else "",
        )
        return child

    def _update_readiness(self) -> None:
        waiting = [worker for worker in self.workers if worker.child is not None and not self.is_ready(worker)]
        keys = [Pipeline(PIPELINE).worker_key(worker.stage, worker.name) for worker in waiting]
        with contextlib.suppress(redis.RedisError):
            for worker, text in zip(waiting, self._redis.mget(keys) if keys else [], strict=True):
                status = json.loads(text) if text else {}
                child = worker.child
                if child is not None and (status.get("state"), status.get("pid")) == ("ready", child.pid):
                    life = self._lives[worker.name]
                    life.ready_at = time.monotonic()
                    start_s = life.ready_at - life.started_at
                    life.slowness = max(1.0, start_s / USUAL_START_S)
                    self._quickest_start_s = min(self._quickest_start_s, start_s)

    def _apply_kill_plan(self, worker: WorkerSlot, child: Child, life: _WorkerLife) -> None:
        now, kill_plan = time.monotonic(), life.kill_plan
        if worker.name in self.absent and not life.is_leaving:
            life.is_leaving = True
            self.counts.starts_and_stops += 1
            if worker.name in self._killed_if_absent:
                self.kill_worker(worker)
            else:
                child.send_signal(signal.SIGTERM)
        if is_stopped(child.pid):
            pause_s = kill_plan.pause_s if kill_plan else 0.0
            if not life.stopped_at:
                life.stopped_at = now
                self.counts.pauses[worker.stage, kill_plan.point if kill_plan else ANY_TIME] += 1
                self._history.add_entry("stopped", worker=worker.name, life=life.number)
            elif now > life.stopped_at + pause_s:
                self._history.add_entry("continued", worker=worker.name, life=life.number)
                child.send_signal(signal.SIGCONT)
                life.was_paused, life.ready_at = True, now
        elif kill_plan is not None and life.ready_at and self.is_killing:
            due = life.ready_at + (1.0 if life.was_paused else kill_plan.after_s * life.slowness)
            if now > due and kill_plan.pause_s and not life.was_paused:
                child.send_signal(signal.SIGSTOP)
            elif now > due:
                self.kill_worker(worker)

    def _record_exit(self, worker: WorkerSlot, child: Child, life: _WorkerLife) -> None:
        step = ANY_TIME if life.killed or life.kill_plan is None else life.kill_plan.point
        if child.returncode == -9:
            self.counts.kills[worker.stage, step] += 1
            self._history.add_entry("kill", worker=worker.name, life=life.number, step=step)
        elif life.is_leaving and child.returncode in (0, -signal.SIGTERM):  # or before it could hear of it
            self._history.add_entry("left", worker=worker.name, life=life.number)
        else:
            worker.start_at = time.monotonic() + RESTART_DELAY_S
            last = self.read_log_tail(worker, 1)
            self.counts.crashes.append(f"{worker.name}: {last}")
            self._history.add_entry("fell", worker=worker.name, life=life.number, status=child.returncode, story=last)
