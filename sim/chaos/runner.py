"""One round: a system under faults that follow from a seed, and clients; then what the clients saw is checked."""

import contextlib
import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.bus.connect import connect_bus
from penstock.cli.up import build_endpoint_environment
from penstock.config.settings import BusSettings
from penstock.local.kafka import SHORT_TIMEOUTS
from penstock.local.stack import Stack, WorkerSlot
from penstock.messages import Result, decode_message, extract_request_id
from penstock.names import REASON_HEADER, Pipeline, WorkerKind
from sim.chaos import hazards
from sim.chaos.checker import Finding, check_history
from sim.chaos.clients import LONG_ANSWER_TOKENS, Clients, Load, make_client_task, prepare_known_requests
from sim.chaos.faults import (
    ANY_TIME,
    NUM_ENDPOINTS,
    Bus,
    Fault,
    KillPlan,
    generate_faults,
    generate_reply_faults,
    plan_kill,
)
from sim.chaos.history import History, read_history
from sim.chaos.system import ChaosStack, FaultCounts, Servers
from sim.endpoint import CountingEndpoint
from sim.workload import SPLIT_FORMS, TOOL_MODEL, make_state_model

POLL_S = 0.05
SETTINGS = {"PENSTOCK_KV_STORE_SHARED_MB": "16"}
"""The shared memory is small so that blocks are read from disk, too."""
ENDPOINT_SETTINGS = {"PENSTOCK_ENDPOINT_SILENCE_S": "2", "PENSTOCK_RECORD_FAIL_ATTEMPTS": "1000"}
"""Servers that hang are left soon, and fail more often than requests make progress."""
PIECE_PAUSE_S = 0.02
"""The time that a server takes for each piece of an answer."""
WriteLine = Callable[[str], None]
Progress = Callable[[str, int], None]
"""Receives a line about the progress, and the number of kills so far."""


@dataclass(frozen=True)
class ChaosRound:
    """What is to be done."""

    seed: int
    bus: Bus
    seconds: float
    """How long faults are injected at most. The requests under way then end undisturbed."""
    kills: int = 10**9
    """After how many kills, of workers of each kind, no more faults are injected."""
    prefill: int = 3
    decode: int = 4
    auto: int = 0
    """Workers of each kind. Where endpoints are asked, as many ask them as are `decode` and `auto`."""
    num_in_flight: int = 16
    patience_s: float = 90.0
    """How long a client waits for a token or a result. Time in which a server is away does not count."""
    load: Load = "text"
    """What clients ask; it says which model the workers have."""
    answer_tokens: int = LONG_ANSWER_TOKENS
    """Tokens of the long answers."""


@dataclass(frozen=True)
class Outcome:
    """The result of a round."""

    findings: list[Finding]
    counts: FaultCounts
    requests: int
    history: Path


def run_round(plan: ChaosRound, directory: Path, progress: Progress = lambda line, kills: None) -> Outcome:
    """Run a round. The history stays in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    prepare_known_requests(plan.answer_tokens, plan.load)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        history.add_entry("round", seed=plan.seed, bus=plan.bus, load=plan.load)
        servers = exits.enter_context(Servers(directory, plan.bus, SHORT_TIMEOUTS))
        asked = NUM_ENDPOINTS if plan.load == "endpoint" else 0
        endpoints = [exits.enter_context(CountingEndpoint(pause_s=PIECE_PAUSE_S)) for _ in range(asked)]
        stack = exits.enter_context(make_stack(plan, directory, history, servers, endpoints))
        make = partial(make_client_task, plan.seed, load=plan.load, max_tokens=plan.answer_tokens)
        clients = Clients(history, stack.addresses, make, plan.num_in_flight, plan.patience_s)
        with clients:
            _inject_faults(plan, stack, servers, clients, history, endpoints, progress)
            clients.stop_sending()
            wait_until_calm(
                stack, clients, plan.patience_s + 30.0, lambda line: progress(line, stack.counts.kills.total())
            )
        record_topics(stack, history)
    return Outcome(check_history(read_history(path)), stack.counts, len(clients.accepted_ids), path)


def make_stack(
    plan: ChaosRound, directory: Path, history: History, servers: Servers, endpoints: Sequence[CountingEndpoint] = ()
) -> ChaosStack:
    """The stack of a round, whose workers ask the `endpoints` if there are any."""

    def plan_of(worker: WorkerSlot, life: int) -> KillPlan:
        return plan_kill(plan.seed, plan.bus, worker.stage, worker.name, life)

    settings = SETTINGS | {"PENSTOCK_KV_STORE_DISK_MB": "64", "PENSTOCK_KV_STORE_DISK_DIR": str(directory / "blocks")}
    if plan.load == "tools":
        settings["PENSTOCK_ENGINE_MODEL"] = str(TOOL_MODEL)
    if plan.load == "states":
        settings["PENSTOCK_ENGINE_MODEL"] = str(make_state_model())
    if plan.load == "forms":
        settings |= SPLIT_FORMS
    # Of the answers that an auto worker begins, all that are whole, or the short ones alone, end there.
    settings["PENSTOCK_WORKER_STAY_MAX_ANSWER_TOKENS"] = random.Random(f"{plan.seed}/stay").choice(["6", "24", "2000"])
    size: dict[WorkerKind, int] = {"prefill": plan.prefill, "decode": plan.decode, "auto": plan.auto}
    if endpoints:
        settings |= build_endpoint_environment([one.url for one in endpoints]) | ENDPOINT_SETTINGS
        size = {"endpoint": plan.decode + plan.auto}
    size = {kind: count for kind, count in size.items() if count}
    return ChaosStack(directory / "stack", history, servers, plan_of, size, settings)


def _inject_faults(
    plan: ChaosRound,
    stack: ChaosStack,
    servers: Servers,
    clients: Clients,
    history: History,
    endpoints: Sequence[CountingEndpoint],
    progress: Progress,
) -> None:
    """Inject faults until there were enough kills, or the time is over."""
    begun = time.monotonic()
    plans = [generate_faults(plan.seed, plan.bus, [worker.name for worker in stack.workers])]
    if endpoints:
        plans.append(generate_reply_faults(plan.seed, plan.answer_tokens))
    coming = heapq.merge(*plans, key=lambda fault: fault.at_s)
    with FaultInjector(stack, servers, clients, history, endpoints) as injector:
        fault = next(coming)
        while (at_s := time.monotonic() - begun) < plan.seconds and not _has_killed_enough(stack, plan.kills):
            stack.restart_dead()
            clients.raise_failure()
            injector.raise_failure()
            while fault.at_s <= at_s:
                injector.inject_fault(fault)
                fault = next(coming)
            progress(f"{at_s:4.0f} s, {clients.num_done} of {clients.num_begun} answered", stack.counts.kills.total())
            time.sleep(POLL_S)
    stack.is_killing = False


def _has_killed_enough(stack: ChaosStack, num_kills: int) -> bool:
    """Return whether there were as many kills, and workers of each kind were killed, at their steps too."""
    at_steps = {kind for kind, step in stack.counts.kills if step != ANY_TIME}
    return stack.counts.kills.total() >= num_kills and at_steps >= {worker.stage for worker in stack.workers}


def wait_until_calm(stack: Stack, clients: Clients, patience_s: float, progress: WriteLine) -> None:
    """Wait until all accepted requests have results and all clients are idle, or `patience_s` is over."""
    bus, results = connect_bus(stack.addresses, BusSettings()), Pipeline(stack.addresses.pipeline).results_topic
    until, look_at, answered = time.monotonic() + patience_s, 0.0, False
    while time.monotonic() < until and not (answered and clients.is_idle):
        stack.restart_dead()
        if clients.is_idle and time.monotonic() > look_at:
            answered = clients.accepted_ids <= {
                extract_request_id(message.value, None) for message in bus.read_all(results)
            }
            look_at = time.monotonic() + 1.0
        progress(f"no more kills, {clients.num_done} of {clients.num_begun} answered")
        time.sleep(POLL_S)
    clients.raise_failure()


def record_topics(stack: Stack, history: History) -> None:
    """Stop the workers and record what the results and dead-letter topics hold."""
    stack.stop_workers()
    pipeline = Pipeline(stack.addresses.pipeline)
    bus = connect_bus(stack.addresses, BusSettings())
    for message in bus.read_all(pipeline.results_topic):
        result = decode_message(Result, message.value)
        error = result.error.code if result.error else None
        fields = {"tokens": result.token_ids, "text": result.text, "finish": result.finish_reason, "error": error}
        # Results of endpoints name no tokens.
        count = len(result.token_ids) or result.usage.completion_tokens
        history.add_entry("result", id=result.id, count=count, **fields)
    for message in bus.read_all(pipeline.dead_letter_topic):
        request_id = extract_request_id(message.value, message.key)
        history.add_entry("dead", id=request_id or "", reason=message.headers.get(REASON_HEADER, ""))


class FaultInjector:
    """Injects faults on its own threads, and undoes each after its time."""

    def __init__(
        self,
        stack: ChaosStack,
        servers: Servers,
        clients: Clients,
        history: History,
        endpoints: Sequence[CountingEndpoint],
    ) -> None:
        self._endpoints = endpoints
        self._stack, self._servers, self._clients, self._history = stack, servers, clients, history
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(8, "faults")
        self._at_servers = threading.Lock()
        self._futures: list[Future[None]] = []

    def inject_fault(self, fault: Fault) -> None:
        """Inject a fault on a thread of the pool."""
        if fault.what not in ("restart", "pause"):  # those are kills and stops
            self._stack.counts.faults[fault.target.partition("-")[0], fault.what] += 1
        self._futures.append(self._pool.submit(self._apply_fault, fault))

    def raise_failure(self) -> None:
        """Raise the exception of a fault that failed, if any did."""
        for future in self._futures:
            if future.done():
                future.result()

    def _apply_fault(self, fault: Fault) -> None:
        self._history.add_entry(
            "fault", fault=fault.what, whose=fault.target, for_s=fault.duration_s, by_s=fault.clock_shift_s
        )
        match fault.what:
            case "restart" | "pause":
                with self._at_servers, self._clients.count_outage():
                    self._disturb_server(fault)
            case "full":
                self._stack.full_mark.touch()
                self._over.wait(fault.duration_s)
                self._stack.full_mark.unlink(missing_ok=True)
            case "reply" if fault.reply is not None:
                self._endpoints[int(fault.target.partition("-")[2])].faults.append(fault.reply)
            case "clock":
                hazards.set_clock(self._stack.clocks[fault.target], fault.clock_shift_s)
                self._over.wait(fault.duration_s)
                hazards.set_clock(self._stack.clocks[fault.target], 0.0)
            case _:
                self._disturb_connections(fault)

    def _disturb_connections(self, fault: Fault) -> None:
        proxy = self._servers.kafka_proxy if fault.target == "kafka" else self._stack.proxies[fault.target]
        assert proxy is not None
        match fault.what:
            case "cut":
                proxy.cut_connections()
            case "hang":
                proxy.stop_forwarding()
            case "slow":
                proxy.delay_forwarding(0.02)
            case "refuse":
                proxy.refuse_connections()
        self._over.wait(fault.duration_s)
        proxy.forward_normally()

    def _disturb_server(self, fault: Fault) -> None:
        kind = "valkey" if fault.target == "redis" else "kafka"
        if fault.what == "pause":
            self._servers.pause_server(fault.target, fault.duration_s)
            self._stack.counts.pauses[kind, ANY_TIME] += 1
        else:
            self._servers.restart_server(fault.target, fault.duration_s)
            self._stack.counts.kills[kind, ANY_TIME] += 1
            self._history.add_entry("kill", worker=kind, step=ANY_TIME)

    def __enter__(self) -> "FaultInjector":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self.raise_failure()
