"""The system under chaos: real servers, proxies before them, and workers each of which meets its fate."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import redis

from penstock.bus.connect import connect
from penstock.config.settings import BusSettings
from penstock.local.kafka import KafkaServer
from penstock.local.processes import Child, find_free_port
from penstock.local.stack import ProcessSlot, Stack, WorkerSlot
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.chaos import clock
from sim.chaos.faults import ANY_TIME, Bus, Fate
from sim.chaos.history import History
from sim.chaos.nursery import Nursery
from sim.chaos.proxy import Proxy

PIPELINE = "chaos"
ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "128",
    "PENSTOCK_ENGINE_MAX_BATCH": "16",
    "PENSTOCK_ENGINE_POOL_MB": "64",
    "PENSTOCK_KV_STORE_SHARED_MB": "64",
    "PENSTOCK_KV_STORE_REDIS_MB": "0",
    "PENSTOCK_RECORD_MAX_ATTEMPTS": "1000",
    "PENSTOCK_WORKER_HEARTBEAT_S": "0.5",
}
"""So many attempts, as here workers die far more often than requests make a step forward."""
AGAIN_S = 0.3
"""Before a worker that fell is started again; those that were killed are at once."""
FateOf = Callable[[WorkerSlot, int], Fate]


@dataclass
class _Life:
    number: int
    fate: Fate | None
    ready_at: float = 0.0
    stopped_at: float = 0.0
    was_paused: bool = False
    killed: bool = False
    """By us, and not by its own hand at a failpoint."""
    leaves: bool = False
    """It was told to."""


@dataclass
class Toll:
    """What was done, in numbers."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind of process and step."""
    pauses: Counter[tuple[str, str]] = field(default_factory=Counter)
    fell: list[str] = field(default_factory=list)
    """Workers that ended by themselves, and the last line they wrote."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What else was done, by what it was done to."""


class Servers:
    """Redis, and Kafka where that is the bus, each to be killed and started again. Kafka is reached by a proxy."""

    is_replicated = False

    def __init__(self, directory: Path, bus: Bus, timeouts: Mapping[str, str]) -> None:
        self.redis = ValkeyServer(directory / "redis")
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
        """Where Redis is asked for."""
        return self.redis.url

    def fail_over(self, whose: str, down_s: float) -> None:
        """Kill the server that leads; here there is no other."""
        raise NotImplementedError

    def restart(self, whose: str, down_s: float) -> None:
        """Kill one, wait, and start it again, with the data it had."""
        server = self.redis if whose == "redis" else self.kafka
        assert server is not None
        server.kill()
        time.sleep(down_s)
        server.start()

    def pause(self, whose: str, for_s: float) -> None:
        """Stop one, and let it go on as if nothing had been."""
        server = self.redis if whose == "redis" else self.kafka
        assert server is not None
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(server.pid, signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for server in (self.redis, self.kafka):
            if server is not None and server.pid is not None:
                os.kill(server.pid, number)

    def __enter__(self) -> Self:
        self.redis.start()
        if self.kafka is not None and self.kafka_proxy is not None:
            self.kafka_proxy.__enter__()
            self.kafka.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.kafka is not None and self.kafka_proxy is not None:
            self.kafka.stop()
            self.kafka_proxy.__exit__(None, None, None)
        self.redis.stop()


class DoomedStack(Stack):
    """A stack whose workers are forked in a nursery, reach Redis each through a proxy of its own, and meet their fates.

    `restart_dead` is the hand of fate: to be called often.
    """

    def __init__(
        self,
        directory: Path,
        nursery: Nursery,
        history: History,
        servers: "Servers",
        fate_of: FateOf,
        size: tuple[int, int],
        more: Mapping[str, str] | None = None,
        away: Collection[str] = (),
    ) -> None:
        """`size`: workers of each stage; `more`: settings of theirs; `away`: those that are not there at first."""
        super().__init__(
            directory, pipeline=PIPELINE, kafka=servers.bootstrap, redis=servers.stream_url, prefill=size[0],
            decode=size[1], environment={**ENVIRONMENT, **(more or {})},
        )  # fmt: skip
        self._fate_of = fate_of
        self.toll = Toll()
        self.away = set(away)
        """Workers by name that shall not be there: those that are leave in order, and nobody takes their place."""
        self._hand = threading.Lock()
        """Whoever has it may do something to workers."""
        self.is_doomed = True
        """Whether workers meet their fates. If not, those that come are not told any."""
        self.proxies = {worker.name: Proxy(servers.redis.port) for worker in self.workers}
        self.clocks = {worker.name: directory / f"{worker.name}.clock" for worker in self.workers}
        self._nursery, self._history, self.disk = nursery, history, nursery.disk
        self._servers = servers
        self._lives: dict[str, _Life] = {}
        self._births: dict[str, int] = defaultdict(int)
        self._redis = redis_client(servers.stream_url)

    def child_of(self, name: str) -> Child | None:
        """The process in a slot, if it lives."""
        child = next(worker.child for worker in self.workers if worker.name == name)
        return child if child is not None and child.is_alive() else None

    def kill(self, worker: WorkerSlot) -> None:
        """At once."""
        if worker.child is not None and worker.child.is_alive():
            self._lives[worker.name].killed = True
            worker.child.kill()

    def is_ready(self, worker: WorkerSlot) -> bool:
        """Whether the process in the slot now has said that it serves."""
        return worker.name in self._lives and self._lives[worker.name].ready_at > 0

    def freeze(self, wait: Callable[[], object]) -> None:
        """Stop all workers and servers at once, `wait`, and let them go on. Workers' fates wait, too."""
        with self._hand:
            begun = time.monotonic()
            children = [worker.child for worker in self.workers if worker.child is not None and worker.child.is_alive()]
            for child in children:
                child.send_signal(signal.SIGSTOP)
            self._servers.send(signal.SIGSTOP)
            wait()
            self._servers.send(signal.SIGCONT)
            for child in children:
                child.send_signal(signal.SIGCONT)
            for life in self._lives.values():
                life.ready_at += time.monotonic() - begun if life.ready_at else 0.0

    def restart_dead(self) -> list[str]:
        """See who is ready, stop, continue and kill, bury the dead, and start others in their places."""
        if self._hand.acquire(blocking=False):
            try:
                self._tend()
            finally:
                self._hand.release()
        return []

    def _tend(self) -> None:
        self._look_who_is_ready()
        for worker in self.workers:
            if worker.child is not None and worker.child.is_alive():
                self._see_to(worker, worker.child, self._lives[worker.name])
            if worker.child is not None and not worker.child.is_alive():
                self._bury(worker, worker.child, self._lives[worker.name])
                worker.child = None
            if worker.child is None and time.monotonic() > worker.start_at:
                self._start_slot(worker)

    def start(self) -> Self:
        """Start the proxies and clocks, and then as every stack."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._servers.is_replicated:
            connect(self.addresses, BusSettings(replication=3)).create_topics()
        for path in self.clocks.values():
            clock.put(path, 0.0)
        for proxy in self.proxies.values():
            proxy.__enter__()
        super().start()
        return self

    def stop(self) -> None:
        """As every stack, and the proxies with it."""
        super().stop()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        self._redis.close()

    def stop_workers(self) -> None:
        """Let go whoever is stopped, and then as every stack."""
        for worker in self.workers:
            if worker.child is not None:
                worker.child.send_signal(signal.SIGCONT)
        super().stop_workers()

    def _start_slot(self, worker: ProcessSlot) -> None:
        if worker.name not in self.away:
            super()._start_slot(worker)

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        number = self._births[worker.name]
        self._births[worker.name] += 1
        fate = self._fate_of(worker, number) if self.is_doomed else None
        self._lives[worker.name] = _Life(number, fate)
        own: dict[str, str] = {}
        if not self._servers.is_replicated:
            own["PENSTOCK_STREAM_URL"] = f"redis://127.0.0.1:{self.proxies[worker.name].port}/0"
        if fate is not None and fate.order:
            own["PENSTOCK_FAILPOINTS"] = fate.order
        own_log, own_clock = self._log_path(worker), self.clocks[worker.name]
        child = self._nursery.fork(worker.name, worker.stage, {**environment, **own}, own_log, own_clock)
        self._history.note("start", worker=worker.name, life=number, pid=child.pid, order=fate.order if fate else "")
        return child

    def _look_who_is_ready(self) -> None:
        waiting = [worker for worker in self.workers if worker.child is not None and not self.is_ready(worker)]
        keys = [Pipeline(PIPELINE).worker_key(worker.stage, worker.name) for worker in waiting]
        with contextlib.suppress(redis.RedisError):
            for worker, told in zip(waiting, self._redis.mget(keys) if keys else [], strict=True):
                status = json.loads(told) if told else {}
                child = worker.child
                if child is not None and (status.get("state"), status.get("pid")) == ("ready", child.pid):
                    self._lives[worker.name].ready_at = time.monotonic()

    def _see_to(self, worker: WorkerSlot, child: Child, life: _Life) -> None:
        now, fate = time.monotonic(), life.fate
        if worker.name in self.away and not life.leaves:
            life.leaves = True
            child.send_signal(signal.SIGTERM)
        if self._nursery.is_stopped(child.pid):
            pause_s = fate.pause_s if fate else 0.0
            if not life.stopped_at:
                life.stopped_at = now
                self.toll.pauses[worker.stage, fate.point if fate else ANY_TIME] += 1
                self._history.note("stopped", worker=worker.name, life=life.number)
            elif now > life.stopped_at + pause_s:
                self._history.note("continued", worker=worker.name, life=life.number)
                child.send_signal(signal.SIGCONT)
                life.was_paused, life.ready_at = True, now
        elif fate is not None and life.ready_at and self.is_doomed:
            due = life.ready_at + (1.0 if life.was_paused else fate.after_s)
            if now > due and fate.pause_s and not life.was_paused:
                child.send_signal(signal.SIGSTOP)
            elif now > due:
                self.kill(worker)

    def _bury(self, worker: WorkerSlot, child: Child, life: _Life) -> None:
        step = ANY_TIME if life.killed or life.fate is None else life.fate.point
        if child.returncode == -9:
            self.toll.kills[worker.stage, step] += 1
            self._history.note("kill", worker=worker.name, life=life.number, step=step)
        elif life.leaves and child.returncode in (0, -signal.SIGTERM):  # or before it could hear of it
            self._history.note("left", worker=worker.name, life=life.number)
        else:
            worker.start_at = time.monotonic() + AGAIN_S
            last = self.read_log_tail(worker, 1)
            self.toll.fell.append(f"{worker.name}: {last}")
            self._history.note("fell", worker=worker.name, life=life.number, status=child.returncode, story=last)
