"""One round: a system, clients, and a seed that says what is done to it; then what everybody saw is checked."""

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.bus.connect import connect
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.local.kafka import SHORT_TIMEOUTS
from penstock.local.stack import Stack, WorkerSlot
from penstock.messages import Result, decode_message, extract_request_id
from penstock.names import REASON_HEADER, Pipeline
from sim.chaos import clock
from sim.chaos.checker import Finding, check
from sim.chaos.clients import BRIEF, LONG, Clients, errand, known, plain
from sim.chaos.faults import ANY_TIME, Bus, Fate, Fault, fate_of, faults, mishaps
from sim.chaos.history import History, read
from sim.chaos.nursery import Nursery
from sim.chaos.poison import send_bomb, send_poisoned
from sim.chaos.replicated import ReplicatedServers
from sim.chaos.system import DoomedStack, Servers, Toll

TEND_S = 0.05
SETTINGS = {"PENSTOCK_KV_STORE_SHARED_MB": "16", "PENSTOCK_WORKER_DRAIN_S": "2"}
"""So little that blocks are read from the disk, too; so short that workers which leave have something to hand back."""
BURST = 300
"""Requests of a burst: more than the prefill workers fetch."""
Told = Callable[[str], None]
Progress = Callable[[str, int], None]
"""A line that says how far it is, and how many kills there were."""


@dataclass(frozen=True)
class Round:
    """What is to be done."""

    seed: int
    bus: Bus
    seconds: float
    """At most so long; then what is under way comes to its end undisturbed."""
    kills: int = 10**9
    """Or until so many processes were killed."""
    prefill: int = 3
    decode: int = 4
    under_way: int = 16
    patience_s: float = 90.0
    """Nobody would wait longer, for a token or for a result."""
    is_replicated: bool = False
    """Three brokers and a Redis with a copy; then nothing is done to connections, and no server is restarted."""
    with_mishaps: bool = False
    """Whether there are also those of `sim.chaos.faults.mishaps`."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    findings: list[Finding]
    toll: Toll
    requests: int
    history: Path


def run(plan: Round, directory: Path, nursery: Nursery, progress: Progress = lambda line, kills: None) -> Outcome:
    """Do it; the history stays in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    for max_tokens in (LONG, BRIEF) if plan.with_mishaps else (LONG,):
        known(max_tokens)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        history.note("round", seed=plan.seed, bus=plan.bus)
        servers = exits.enter_context(
            ReplicatedServers(directory, SHORT_TIMEOUTS)
            if plan.is_replicated
            else Servers(directory, plan.bus, SHORT_TIMEOUTS)
        )
        nursery.disk.clear()
        stack = exits.enter_context(doomed(plan, directory, nursery, history, servers))
        make = partial(errand, plan.seed)
        clients = Clients(history, stack.addresses, make, plan.under_way, plan.patience_s)
        with clients:
            _rage(plan, stack, servers, clients, history, progress)
            clients.stop()
            calm(stack, clients, plan.patience_s + 30.0, lambda line: progress(line, stack.toll.kills.total()))
        write_down(stack, history)
    return Outcome(check(read(path)), stack.toll, len(clients.accepted), path)


def doomed(plan: Round, directory: Path, nursery: Nursery, history: History, servers: Servers) -> DoomedStack:
    """The stack of a round."""

    def fate(worker: WorkerSlot, life: int) -> Fate:
        return fate_of(plan.seed, plan.bus, worker.stage, worker.name, life)

    more, settings = int(plan.with_mishaps), SETTINGS | nursery.disk.settings()
    size, away = (plan.prefill + more, plan.decode + more), set[str]()
    if plan.with_mishaps:
        away = {f"prefill-{plan.prefill}", f"decode-{plan.decode}"}
    return DoomedStack(directory / "stack", nursery, history, servers, fate, size, settings, away)


def _rage(
    plan: Round, stack: DoomedStack, servers: Servers, clients: Clients, history: History, progress: Progress
) -> None:
    """Until there were enough kills, or the time is over."""
    begun = time.monotonic()
    coming = faults(plan.seed, plan.bus, [worker.name for worker in stack.workers])
    if plan.is_replicated:
        coming = mishaps(plan.seed, plan.bus, is_replicated=True)
    elif plan.with_mishaps:
        coming = heapq.merge(coming, mishaps(plan.seed, plan.bus), key=lambda fault: fault.at_s)
    with Mischief(stack, servers, clients, history) as mischief:
        fault = next(coming)
        while (at_s := time.monotonic() - begun) < plan.seconds and stack.toll.kills.total() < plan.kills:
            stack.restart_dead()
            clients.check()
            mischief.check()
            while fault.at_s <= at_s:
                mischief.do(fault)
                fault = next(coming)
            progress(f"{at_s:4.0f} s, {clients.done} of {clients.count} answered", stack.toll.kills.total())
            time.sleep(TEND_S)
    stack.is_doomed = False


def calm(stack: Stack, clients: Clients, patience_s: float, progress: Told) -> None:
    """Until everybody has what they wait for, or has lost patience."""
    bus, results = connect(stack.addresses, BusSettings()), Pipeline(stack.addresses.pipeline).results_topic
    until, look_at, answered = time.monotonic() + patience_s, 0.0, False
    while time.monotonic() < until and not (answered and clients.is_idle):
        stack.restart_dead()
        if clients.is_idle and time.monotonic() > look_at:
            answered = clients.accepted <= {
                extract_request_id(message.value, None) for message in bus.read_all(results)
            }
            look_at = time.monotonic() + 1.0
        progress(f"no more kills, {clients.done} of {clients.count} answered")
        time.sleep(TEND_S)
    clients.check()


def write_down(stack: Stack, history: History) -> None:
    """What the topics hold in the end."""
    stack.stop_workers()
    pipeline = Pipeline(stack.addresses.pipeline)
    bus = connect(stack.addresses, BusSettings())
    for message in bus.read_all(pipeline.results_topic):
        result = decode_message(Result, message.value)
        error = result.error.code if result.error else None
        told = {"tokens": result.token_ids, "text": result.text, "finish": result.finish_reason, "error": error}
        history.note("result", id=result.id, **told)
    for message in bus.read_all(pipeline.dead_letter_topic):
        request_id = extract_request_id(message.value, message.key)
        history.note("dead", id=request_id or "", reason=message.headers.get(REASON_HEADER, ""))


class Mischief:
    """Carries out faults, each undone after its time, on threads of its own."""

    def __init__(self, stack: DoomedStack, servers: Servers, clients: Clients, history: History) -> None:
        self._stack, self._servers, self._clients, self._history = stack, servers, clients, history
        self._disk = stack.disk
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(8, "mischief")
        self._spare = frozenset(stack.away)
        self._numbers = itertools.count()
        """Of faults, in their order: the ids of their requests have them."""
        self._at_servers = threading.Lock()
        self._futures: list[Future[None]] = []

    def do(self, fault: Fault) -> None:
        """Soon."""
        if fault.what not in ("restart", "pause"):  # those are kills and stops
            self._stack.toll.faults[fault.whose.partition("-")[0], fault.what] += 1
        self._futures.append(self._pool.submit(self._do, fault, next(self._numbers)))

    def check(self) -> None:
        """Raise what went wrong with one."""
        for future in self._futures:
            if future.done():
                future.result()

    def _do(self, fault: Fault, number: int) -> None:
        self._history.note("fault", fault=fault.what, whose=fault.whose, for_s=fault.for_s, by_s=fault.by_s)
        match fault.what:
            case "restart" | "pause" | "stall":
                with self._at_servers:
                    self._to_server(fault)
            case "leader" | "failover":
                with self._at_servers:
                    self._servers.fail_over(fault.whose, fault.for_s)
            case "freeze":
                with self._at_servers:
                    self._stack.freeze(lambda: self._over.wait(fault.for_s))
            case "resize":
                self._resize(fault)
            case "burst" | "header" | "bomb":
                self._send(fault.what, number)
            case "full":
                self._to_disk(fault)
            case "clock":
                clock.put(self._stack.clocks[fault.whose], fault.by_s)
                self._over.wait(fault.for_s)
                clock.put(self._stack.clocks[fault.whose], 0.0)
            case _:
                self._to_connections(fault)

    def _resize(self, fault: Fault) -> None:
        """The worker that is `away` comes, and leaves again while others go on with what it had."""
        (name,) = (name for name in self._spare if name.startswith(fault.whose))
        self._stack.away.discard(name)
        self._over.wait(fault.for_s)
        self._stack.away.add(name)

    def _send(self, what: str, number: int) -> None:
        addresses = self._stack.addresses
        match what:
            case "burst":
                self._clients.send_unread([plain(f"burst{number}-{one}", one) for one in range(BURST)])
            case "header":
                self._clients.send_unread([plain(f"header{number}", number)], partial(send_poisoned, addresses))
            case "bomb":  # nobody can read it, and so there is nothing to wait for
                with contextlib.suppress(BusUnavailable):
                    send_bomb(addresses, f"bomb{number}")

    def _to_disk(self, fault: Fault) -> None:
        """Whatever becomes free meanwhile is taken, too."""
        until = time.monotonic() + fault.for_s
        while time.monotonic() < until and not self._over.wait(TEND_S):
            self._disk.fill()
        self._disk.free()

    def _to_connections(self, fault: Fault) -> None:
        proxy = self._servers.kafka_proxy if fault.whose == "kafka" else self._stack.proxies[fault.whose]
        assert proxy is not None
        match fault.what:
            case "cut":
                proxy.cut()
            case "hang":
                proxy.hang()
            case "slow":
                proxy.slow(0.02)
            case "refuse":
                proxy.refuse()
        self._over.wait(fault.for_s)
        proxy.heal()

    def _to_server(self, fault: Fault) -> None:
        kind = "valkey" if fault.whose == "redis" else "kafka"
        if fault.what == "stall":
            self._servers.pause(fault.whose, fault.for_s)
        elif fault.what == "pause":
            self._servers.pause(fault.whose, fault.for_s)
            self._stack.toll.pauses[kind, ANY_TIME] += 1
        else:
            self._servers.restart(fault.whose, fault.for_s)
            self._stack.toll.kills[kind, ANY_TIME] += 1
            self._history.note("kill", worker=kind, step=ANY_TIME)

    def __enter__(self) -> "Mischief":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self.check()
