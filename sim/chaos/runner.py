"""One round: a system under faults that follow from a seed, and clients; then what the clients saw is checked."""

import contextlib
import heapq
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.bus.connect import connect_bus
from penstock.cli.up import build_endpoint_environment
from penstock.config.settings import BusSettings, PictureSettings, RecordSettings
from penstock.errors import BusUnavailable
from penstock.local.stack import Stack, WorkerSlot
from penstock.messages import Result, decode_message, extract_request_id
from penstock.names import REASON_HEADER, Pipeline, WorkerKind
from penstock.objects import ObjectStorage
from penstock.pictures.store import PictureStore
from sim.chaos import hazards
from sim.chaos.checker import Finding, check_history, name_vectors
from sim.chaos.clients import (
    LONG_ANSWER_TOKENS,
    SHORT_ANSWER_TOKENS,
    Clients,
    Load,
    make_client_task,
    make_plain_task,
    prepare_known_requests,
)
from sim.chaos.controllers import CONTROLLERS, PACE, ControlledStack
from sim.chaos.controllers import SETTINGS as CONTROLLED
from sim.chaos.faults import (
    ANY_TIME,
    CONTROLLER_FAULTS,
    NUM_ENDPOINTS,
    Bus,
    Fault,
    KillPlan,
    generate_broker_pauses,
    generate_clock_jumps,
    generate_controller_faults,
    generate_faults,
    generate_kv_faults,
    generate_reply_faults,
    generate_starts_and_stops,
    generate_system_faults,
    generate_zone_losses,
    plan_kill,
)
from sim.chaos.history import History, read_history
from sim.chaos.poison import make_poisoned_model, send_bomb, send_poisoned
from sim.chaos.replicated import ReplicatedServers
from sim.chaos.system import RETENTION_S, TESTING, ChaosStack, FaultCounts, Servers
from sim.endpoint import CountingEndpoint
from sim.kafka_server import SHORT_TIMEOUTS
from sim.workload import (
    SPLIT_FORMS,
    TOOL_MODEL,
    draw_pictures,
    make_encoder,
    make_seeing_model,
    make_state_model,
    make_vector_model,
)
from sim.zones import ZONES, ZonedServers

POLL_S = 0.05
SETTINGS = {"PENSTOCK_KV_STORE_SHARED_MB": "16", "PENSTOCK_WORKER_DRAIN_S": "2"}
"""The shared memory is small so that blocks are read from disk, too. The drain is short so that workers that leave
have requests to hand back."""
ENDPOINT_SETTINGS = {"PENSTOCK_RECORD_FAIL_ATTEMPTS": "1000"}
"""Servers fail more often than requests make progress."""
SILENCE_S = 2.0
"""After this time a server that hangs is left."""
PIECE_PAUSE_S = 0.02
"""The time that a server takes for each piece of an answer."""
LEAK_PATIENCE_S = 10.0
"""How much longer than a retention workers and tiers may say that there is one."""
SMALL_TIERS = {
    "PENSTOCK_ENGINE_POOL_MB": "16", "PENSTOCK_KV_STORE_SHARED_MB": "8", "PENSTOCK_KV_STORE_DISK_MB": "16",
    "PENSTOCK_KV_STORE_REDIS_MB": "16",
}  # fmt: skip
"""The blocks of all agents do not fit into the first tier, and those of bursts into none."""
LOST_KV = {
    "PENSTOCK_KV_STORE_SHARED_MB": "0", "PENSTOCK_KV_STORE_DISK_MB": "0", "PENSTOCK_KV_STORE_REDIS_MB": "16",
    "PENSTOCK_ENGINE_POOL_MB": "4",
}  # fmt: skip
"""All KV that workers share is in a Redis of its own, which loses it, and pools are small."""
BURST_REQUESTS = 300
"""Requests in a burst: more than the prefill workers fetch."""
BURST_PATIENCE_S = 150.0
"""How much longer clients wait in a round with a burst. Batch work, and what is sent later, comes after its requests,
of which workers that are killed all the time answer two a second on a busy machine.
"""
_MODELS: Mapping[Load, Callable[[], Path]] = {
    "tools": lambda: TOOL_MODEL, "agents": lambda: TOOL_MODEL, "states": make_state_model, "vectors": make_vector_model,
    "encoder": make_encoder, "pictures": make_seeing_model, "poison": make_poisoned_model,
}  # fmt: skip
"""What returns the directory of the workers' model, where that is not the demo model."""
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
    """After how many kills, of workers of each kind, no more faults are injected. With 0 nothing is killed, and only
    the faults are injected that the round names.
    """
    prefill: int = 3
    decode: int = 4
    auto: int = 0
    """Workers of each kind. Where endpoints are asked, as many ask them as are `decode` and `auto`; so are `embed`
    workers where there is an encoder."""
    num_in_flight: int = 16
    patience_s: float = 90.0
    """How long a client waits for a token or a result. Time in which a server is away does not count; bursts, and a
    machine on which workers start slowly, make it longer."""
    zone_delay_s: float = 0.0
    """How far three zones are apart, each of which has a broker, a Redis and workers, and is lost and comes back; 0:
    all is in one zone."""
    is_replicated: bool = False
    """Three brokers and a Redis with a copy; then nothing is done to connections, and no server is restarted."""
    with_system_faults: bool = False
    """Whether faults of the whole system are injected, too."""
    load: Load = "text"
    """What clients ask; it says which model the workers have."""
    answer_tokens: int = LONG_ANSWER_TOKENS
    """Tokens of the long answers."""
    slowness: Mapping[str, float] = field(default_factory=dict)
    """How many times as long the steps of a worker take, by its name."""
    delays_s: Mapping[str, float] = field(default_factory=dict)
    """How much later the replies of a server (`redis`, `kafka`) come, until the end of the round."""
    with_clock_jumps: bool = False
    """Whether the wall clocks of workers jump all the time."""
    broker_pauses_s: float = 0.0
    """For how long the broker that leads most partitions stands still, again and again; 0 for never."""
    starts_and_stops: int = 0
    """After how many starts and stops of workers no more faults are injected; with 0 the same ones stay. With kills
    every third worker has a kill plan.
    """
    with_controllers: bool = False
    """Whether the number of workers is what controllers say, which are killed and cut off. It begins with one."""


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
    for max_tokens in (plan.answer_tokens, SHORT_ANSWER_TOKENS) if plan.with_system_faults else (plan.answer_tokens,):
        prepare_known_requests(max_tokens, plan.load)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        history.add_entry("round", seed=plan.seed, bus=plan.bus, load=plan.load)
        # A group loses a member whose heartbeats are answered later than they are sent: after 0.3 s here, else after 5.
        timeouts = {} if plan.delays_s or plan.broker_pauses_s else SHORT_TIMEOUTS
        servers = exits.enter_context(_make_servers(plan, directory, timeouts))
        asked = NUM_ENDPOINTS if plan.load == "endpoint" else 0
        endpoints = [exits.enter_context(CountingEndpoint(pause_s=PIECE_PAUSE_S)) for _ in range(asked)]
        stack = exits.enter_context(make_stack(plan, directory, history, servers, endpoints))
        for proxy in stack.proxies.values():
            proxy.delay_replies(plan.delays_s.get("redis", 0.0))
        if servers.kafka_proxy is not None:
            servers.kafka_proxy.delay_replies(plan.delays_s.get("kafka", 0.0))
        if plan.load == "pictures":
            _store_pictures(stack)
        make = partial(make_client_task, plan.seed, load=plan.load, max_tokens=plan.answer_tokens)
        has_bursts = plan.with_system_faults or (plan.is_replicated and plan.kills > 0)
        patience_s = plan.patience_s + BURST_PATIENCE_S * has_bursts
        clients = Clients(
            history, stack.addresses, make, plan.num_in_flight, lambda: patience_s * stack.machine_slowness
        )
        with clients:
            _inject_faults(plan, stack, servers, clients, history, endpoints, progress)
            history.add_entry("calm")
            clients.stop_sending()
            wait_until_calm(
                stack,
                clients,
                plan.patience_s * stack.machine_slowness + 30.0,
                lambda line: progress(line, stack.counts.kills.total()),
            )
        leaks = find_leaks(stack, RETENTION_S + LEAK_PATIENCE_S * stack.machine_slowness)
        record_topics(stack, history, is_rounded=plan.load == "encoder")
    found = [*check_history(read_history(path)), *leaks]
    return Outcome(found, stack.counts, len(clients.accepted_ids), path)


def _store_pictures(stack: Stack) -> None:
    """Store the files of pictures, as gateways do. Redis keeps them when it is killed."""
    objects = ObjectStorage.open(str(stack.directory / "pictures"))
    store = PictureStore(stack.addresses, objects, PictureSettings(), RecordSettings())
    with contextlib.closing(store), contextlib.closing(objects):
        for file in draw_pictures():
            store.put(file)


def _make_servers(plan: ChaosRound, directory: Path, timeouts: Mapping[str, str]) -> Servers:
    if plan.zone_delay_s:
        return ZonedServers(directory, timeouts, plan.zone_delay_s)
    if plan.is_replicated:
        return ReplicatedServers(directory, timeouts)
    return Servers(directory, plan.bus, timeouts, has_kv=plan.load == "pictures")


def make_stack(
    plan: ChaosRound, directory: Path, history: History, servers: Servers, endpoints: Sequence[CountingEndpoint] = ()
) -> ChaosStack:
    """The stack of a round, whose workers ask the `endpoints` if there are any."""

    def plan_of(worker: WorkerSlot, life: int) -> KillPlan | None:
        if plan.starts_and_stops and random.Random(f"{plan.seed}/{worker.name}/{life}/lives").random() < 2 / 3:
            return None
        return plan_kill(plan.seed, plan.bus, worker.stage, worker.name, life)

    more = int(plan.with_system_faults)
    settings = SETTINGS | {"PENSTOCK_KV_STORE_DISK_MB": "64", "PENSTOCK_KV_STORE_DISK_DIR": str(directory / "blocks")}
    if plan.load == "agents":
        settings |= SMALL_TIERS
    if plan.load == "pictures":
        settings |= LOST_KV
    if plan.load in _MODELS:
        settings["PENSTOCK_ENGINE_MODEL"] = str(_MODELS[plan.load]())
    if plan.load == "forms":
        settings |= SPLIT_FORMS
    # Beside a decode worker an auto worker hands off all that it begins, or what has a long prompt.
    longest = random.Random(f"{plan.seed}/stay").choice([0, 512])
    settings["PENSTOCK_WORKER_STAY_MAX_PROMPT_TOKENS"] = str(longest)
    settings["PENSTOCK_TESTING"] = json.dumps(TESTING | {"endpoint_silence_s": SILENCE_S})
    size: dict[WorkerKind, int] = {"prefill": plan.prefill, "decode": plan.decode, "auto": plan.auto}
    if endpoints:
        settings |= build_endpoint_environment([one.url for one in endpoints]) | ENDPOINT_SETTINGS
        size = {"endpoint": plan.decode + plan.auto}
    elif plan.load == "encoder":
        size = {"embed": plan.decode + plan.auto}
    size = {kind: count for kind, count in size.items() if count}
    away = {f"{kind}-{count}" for kind, count in size.items()} if plan.with_system_faults else set[str]()
    size = {kind: count + more for kind, count in size.items()}
    if plan.with_controllers:
        settings |= CONTROLLED
        away = {f"{kind}-{number}" for kind, count in size.items() for number in range(1, count)}
    make = ControlledStack if plan.with_controllers else ChaosStack
    stack = make(directory / "stack", history, servers, plan_of, size, settings, away, plan.slowness)
    stack.is_killing = plan.kills > 0
    return stack


def _inject_faults(
    plan: ChaosRound,
    stack: ChaosStack,
    servers: Servers,
    clients: Clients,
    history: History,
    endpoints: Sequence[CountingEndpoint],
    progress: Progress,
) -> None:
    """Inject faults until there were enough kills, or the time is over.

    On a slow machine they come as much later as workers start later: else connections are cut again before workers
    have done anything with them.
    """
    begun = looked_at = time.monotonic()
    at_s = 0.0
    coming = _plan_faults(plan, stack, len(endpoints))
    with FaultInjector(stack, servers, clients, history, endpoints, plan.load) as injector:
        fault = next(coming)
        while looked_at < begun + plan.seconds and not _is_enough(plan, stack):
            stack.restart_dead()
            clients.raise_failure()
            injector.raise_failure()
            while fault.at_s <= at_s:
                injector.inject_fault(fault)
                fault = next(coming)
            progress(
                f"{looked_at - begun:4.0f} s, {clients.num_done} of {clients.num_begun} answered",
                stack.counts.kills.total(),
            )
            time.sleep(POLL_S)
            before, looked_at = looked_at, time.monotonic()
            at_s += (looked_at - before) / stack.machine_slowness
    stack.is_killing = False
    if plan.starts_and_stops:
        stack.absent.clear()


def _plan_faults(plan: ChaosRound, stack: ChaosStack, num_endpoints: int) -> Iterator[Fault]:
    """Return the faults of a round by their times, without end."""
    names = [worker.name for worker in stack.workers]
    kinds = sorted({worker.stage for worker in stack.workers})
    plans = [iter([Fault(math.inf, "", "", 0.0)])]
    if plan.load == "pictures":
        plans.append(generate_kv_faults(plan.seed))
    if plan.with_clock_jumps:
        plans.append(generate_clock_jumps(plan.seed, names))
    if plan.kills and not plan.is_replicated:
        plans.append(generate_faults(plan.seed, plan.bus, names))
    if plan.zone_delay_s:
        plans.append(generate_zone_losses(plan.seed, ZONES))
    if plan.broker_pauses_s:
        plans.append(generate_broker_pauses(plan.broker_pauses_s))
    if plan.with_system_faults or (plan.is_replicated and plan.kills):
        plans.append(generate_system_faults(plan.seed, plan.bus, kinds, is_replicated=plan.is_replicated))
    if plan.starts_and_stops:
        plans.append(generate_starts_and_stops(plan.seed, names))
    if plan.with_controllers:
        plans.append(generate_controller_faults(plan.seed, CONTROLLERS, 60.0 / PACE))
    if num_endpoints:
        plans.append(generate_reply_faults(plan.seed, plan.answer_tokens))
    return heapq.merge(*plans, key=lambda fault: fault.at_s)


def _is_enough(plan: ChaosRound, stack: ChaosStack) -> bool:
    """Return whether there were as many starts and stops, or faults of controllers, or as many kills, of workers of
    each kind at their steps; or whether each zone was lost.
    """
    if plan.with_controllers:  # the next one comes when the last one is over
        return sum(num for (whose, _), num in stack.counts.faults.items() if whose == "controller") > CONTROLLER_FAULTS
    if plan.zone_delay_s:
        return stack.counts.kills["zone", ANY_TIME] >= len(ZONES)
    if plan.starts_and_stops or not plan.kills:
        return 0 < plan.starts_and_stops <= stack.counts.starts_and_stops
    at_steps = {kind for kind, step in stack.counts.kills if step != ANY_TIME}
    return stack.counts.kills.total() >= plan.kills and at_steps >= {worker.stage for worker in stack.workers}


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


def find_leaks(stack: ChaosStack, patience_s: float) -> list[Finding]:
    """Return a finding for each worker and each tier that retains KV after `patience_s`. Nobody sends requests then."""
    until = time.monotonic() + patience_s
    while told := stack.list_retained():
        if time.monotonic() > until:
            break
        stack.restart_dead()
        time.sleep(POLL_S)
    return [Finding("leaked", "", line) for line in told]


def record_topics(stack: Stack, history: History, *, is_rounded: bool = False, **more: str) -> None:
    """Stop the workers and record what the results and dead-letter topics hold, each with `more` fields."""
    stack.stop_workers()
    pipeline = Pipeline(stack.addresses.pipeline)
    bus = connect_bus(stack.addresses, BusSettings())
    results = (decode_message(Result, one.value) for one in bus.read_all(pipeline.results_topic))
    record_results(results, history, is_rounded=is_rounded, **more)
    for message in bus.read_all(pipeline.dead_letter_topic):
        request_id = extract_request_id(message.value, message.key)
        history.add_entry("dead", id=request_id or "", reason=message.headers.get(REASON_HEADER, ""), **more)


def record_results(results: Iterable[Result], history: History, *, is_rounded: bool = False, **more: str) -> None:
    """Record results, each with `more` fields."""
    for result in results:
        error = result.error.code if result.error else None
        text = result.text + name_vectors(result.vectors, is_rounded=is_rounded)
        fields = {"tokens": result.token_ids, "text": text, "finish": result.finish_reason, "error": error}
        # Results of endpoints name no tokens, and count those of the server: their text is compared.
        count = len(result.token_ids) if result.token_ids or not result.usage.completion_tokens else None
        history.add_entry("result", id=result.id, count=count, **fields, **more)


class FaultInjector:
    """Injects faults on its own threads, and undoes each after its time."""

    def __init__(
        self,
        stack: ChaosStack,
        servers: Servers,
        clients: Clients,
        history: History,
        endpoints: Sequence[CountingEndpoint],
        load: Load,
    ) -> None:
        self._endpoints = endpoints
        self._stack, self._servers, self._clients, self._history = stack, servers, clients, history
        self._make_task = partial(make_plain_task, load=load)
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(8, "faults")
        self._spare = frozenset(stack.absent)
        self._numbers = itertools.count()
        """Numbers of the faults, used in the ids of their requests."""
        self._at_servers = threading.Lock()
        self._futures: list[Future[None]] = []

    def inject_fault(self, fault: Fault) -> None:
        """Inject a fault on a thread of the pool; what is done to workers and controllers, at once and in order."""
        if fault.what not in ("restart", "pause"):  # those are kills and stops
            self._stack.counts.faults[fault.target.partition("-")[0], fault.what] += 1
        if fault.what in ("start", "stop", "kill", "crash"):
            self._change_workers(fault)
            return
        self._futures.append(self._pool.submit(self._apply_fault, fault, next(self._numbers)))

    def raise_failure(self) -> None:
        """Raise the exception of a fault that failed, if any did."""
        for future in self._futures:
            if future.done():
                future.result()

    def _apply_fault(self, fault: Fault, number: int) -> None:
        self._history.add_entry(
            "fault", fault=fault.what, whose=fault.target, for_s=fault.duration_s, by_s=fault.clock_shift_s
        )
        match fault.what:
            case "restart" | "pause" | "stall":
                with self._at_servers, self._clients.count_outage():
                    self._disturb_server(fault)
            case "leader" | "failover":
                with self._at_servers, self._clients.count_outage():
                    self._servers.fail_over(fault.target, fault.duration_s)
            case "zone":
                with self._at_servers, self._clients.count_outage():
                    self._lose_zone(int(fault.target), fault.duration_s)
            case "freeze":
                with self._at_servers, self._clients.count_outage():
                    self._stack.freeze_all(lambda: self._over.wait(fault.duration_s))
            case "resize":
                self._resize_stage(fault)
            case "burst" | "header" | "bomb":
                self._send_messages(fault.what, number)
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

    def _change_workers(self, fault: Fault) -> None:
        """Start a worker, let it leave, or kill it, or kill a controller."""
        self._history.add_entry("fault", fault=fault.what, whose=fault.target)
        if fault.what == "start":
            self._stack.absent.discard(fault.target)
        elif isinstance(self._stack, ControlledStack):
            self._stack.crash_controller(fault.target)
        else:
            self._stack.remove_worker(fault.target, by_kill=fault.what == "kill")

    def _resize_stage(self, fault: Fault) -> None:
        """Start the absent worker of a stage, then let it leave; others go on with its requests."""
        (name,) = (name for name in self._spare if name.startswith(fault.target))
        self._stack.absent.discard(name)
        self._over.wait(fault.duration_s)
        self._stack.absent.add(name)

    def _send_messages(self, what: str, number: int) -> None:
        addresses = self._stack.addresses
        match what:
            case "burst":
                self._clients.send_unread(
                    [self._make_task(f"burst{number}-{one}", one) for one in range(BURST_REQUESTS)]
                )
            case "header":
                self._clients.send_unread(
                    [self._make_task(f"header{number}", number)], partial(send_poisoned, addresses)
                )
            case "bomb":  # no worker can read it, so there is no result to wait for
                with contextlib.suppress(BusUnavailable):
                    send_bomb(addresses, f"bomb{number}")

    def _lose_zone(self, zone: int, for_s: float) -> None:
        """Kill a zone's workers and servers. Its workers come back when its servers are back."""
        assert isinstance(self._servers, ZonedServers)
        if self._over.is_set():
            return
        names = [worker.name for worker in self._stack.workers if self._servers.find_zone(worker.name) == zone]
        for name in names:
            self._stack.remove_worker(name, by_kill=True)
        self._servers.lose_zone(zone, for_s)
        self._stack.absent.difference_update(names)
        self._stack.counts.kills["zone", ANY_TIME] += 1
        self._history.add_entry("kill", worker=f"zone-{zone}", step=ANY_TIME)

    def _disturb_connections(self, fault: Fault) -> None:
        own = {"kafka": self._servers.kafka_proxy, "kv": self._servers.kv_proxy}
        proxy = own[fault.target] if fault.target in own else self._stack.proxies[fault.target]
        assert proxy is not None
        match fault.what:
            case "cut":
                proxy.cut_connections()
            case "hang":
                proxy.stop_forwarding()
            case "slow":
                proxy.delay_forwarding(0.5 if fault.target == "kv" else 0.02)
            case "refuse":
                proxy.refuse_connections()
        self._over.wait(fault.duration_s)
        proxy.forward_normally()

    def _disturb_server(self, fault: Fault) -> None:
        kind = "valkey" if fault.target == "redis" else fault.target
        if fault.what == "stall":
            self._servers.pause_server(fault.target, fault.duration_s)
        elif fault.what == "pause":
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
