"""Two regions that help each other, under faults: each has a Redis, workers and a gateway of its own.

Clients ask either gateway, and read on at either one. What they and the topics saw is checked as that of any round is,
and beside it: no POST, and no key, was accepted twice; no gateway said of an accepted request that there is none; no
region gave tokens under other ids.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings
from penstock.errors import PenstockError
from penstock.local.processes import Child, find_free_port
from penstock.messages import Request, decode_message
from penstock.names import CLASSES, START_HASH, Pipeline, parse_event_id, roll_hash
from penstock.regions import find_home
from sim.chaos.checker import Finding, check_history
from sim.chaos.history import History, read_history
from sim.chaos.proxy import Proxy
from sim.chaos.runner import record_topics
from sim.chaos.system import ENVIRONMENT, PIPELINE
from sim.events import EventSource, ServerSentEvent
from sim.forked import ForkedStack, pause_process
from sim.workload import ExpectedAnswer, compute_answers, make_requests

NAMES = ("eu", "us")
MODEL = "demo"
SECRET = "of both regions, and long enough"
SETTINGS = {"PENSTOCK_KV_STORE_SHARED_MB": "16", "PENSTOCK_KV_STORE_DISK_MB": "0", "PENSTOCK_WORKER_DRAIN_S": "2"}
NUM_KNOWN, ANSWER_TOKENS = 4, 24
FAULT_S, QUIET_S = 8.0, 2.0
"""How long a fault lasts, which is longer than a region's state is believed, and how long there is none after it."""
LATE_S = 1.5
"""How much later the replies of a slow gateway reach its peer."""
ASK_AGAIN_S = 0.2
SILENCE_S = 20.0
"""How long a client waits for a byte before it asks again."""
OTHER_TOKEN = 2**32 - 1
"""Stands for a token that is not the answer's: event ids tell tokens by hashes alone."""
REFUSED = frozenset({429, 503, 504})
Fault = Literal["kill worker", "kill gateway", "stop gateway", "slow peer", "cut off", "refuse"]
FAULTS: tuple[Fault, ...] = ("kill worker", "kill gateway", "stop gateway", "slow peer", "cut off", "refuse")


@dataclass(frozen=True)
class RegionsRound:
    """What is to be done."""

    seed: int
    seconds: float
    """How long faults are injected."""
    workers: int = 2
    """Workers of each region."""
    num_in_flight: int = 6
    patience_s: float = 180.0
    """How long a client waits for the next token."""
    faults: tuple[Fault, ...] = FAULTS
    """Kinds of faults that are injected."""
    answer_tokens: int = ANSWER_TOKENS
    may: tuple[str, ...] = ()
    """Codes of errors that may end a stream; the history has such an end as an entry of that name."""


@dataclass(frozen=True)
class RegionsOutcome:
    """The result of a round."""

    findings: list[Finding]
    counts: Counter[str]
    """How often each fault was injected, and what clients met."""
    requests: int
    history: Path


@cache
def prepare_asked(max_tokens: int = ANSWER_TOKENS) -> list[tuple[dict[str, Any], ExpectedAnswer]]:
    """Return bodies for `/v1/completions`, and their answers."""
    work = make_requests(NUM_KNOWN, "regions", max_tokens)
    return [(_make_body(request), answer) for request, answer in zip(work, compute_answers(work).values(), strict=True)]


def _make_body(request: Request) -> dict[str, Any]:
    given = request.sampling.model_dump(include={"max_tokens", "temperature", "top_k", "top_p", "seed"})
    named = {name: value for name, value in given.items() if value is not None}
    return {"model": MODEL, "prompt": request.token_ids, "stream": True, **named}


class Region:
    """A stack with a gateway, which the other region reaches through a proxy."""

    def __init__(
        self,
        name: str,
        directory: Path,
        workers: int,
        *,
        kafka: str = "",
        pipeline: str = PIPELINE,
        copies: str = "",
        delay_s: float = 0.0,
    ) -> None:
        """`copies`: the region that is copied to this one; `delay_s`: how long all is under way from the other one."""
        self.name, self._port, self._copies = name, find_free_port(), copies
        self._delay_s = delay_s
        self.proxy = self._make_proxy(find_free_port())
        self._directory, self._workers, self._kafka, self._pipeline = directory / name, workers, kafka, pipeline

    def _make_proxy(self, port: int) -> Proxy:
        made = Proxy(self._port, port)
        made.delay_both_ways(self._delay_s)
        return made

    def kill(self) -> None:
        """Kill all of it but Kafka, as a fire would: nothing takes connections."""
        self.stack.kill_all()
        self.proxy.__exit__()

    def return_reachable(self) -> None:
        """Let the other region reach it again; what died starts with the next `restart_dead`."""
        self.proxy = self._make_proxy(self.proxy.port)
        self.proxy.__enter__()

    def start(self, peer: "Region") -> None:
        """Start servers and processes."""
        self.proxy.__enter__()
        self.settings = {
            "PENSTOCK_REGION_NAME": self.name, "PENSTOCK_REGION_SECRET": SECRET,
            "PENSTOCK_REGION_PEERS": f"{peer.name}=http://127.0.0.1:{peer.proxy.port}",
            **({"PENSTOCK_REGION_COPIES": self._copies} if self._copies else {}),
        }  # fmt: skip
        testing = {"worker_heartbeat_s": 0.5, "gateway": {"keep_alive_s": 1.0}}
        self.stack = ForkedStack(
            self._directory, pipeline=self._pipeline, kafka=self._kafka, prefill=0, decode=0, auto=self._workers,
            gateway=self._port,
            environment={**ENVIRONMENT, **SETTINGS, **self.settings, "PENSTOCK_TESTING": json.dumps(testing)},
        ).start()  # fmt: skip

    @property
    def url(self) -> str:
        """The address of its gateway, for clients."""
        return self.stack.gateway_url

    @property
    def gateway(self) -> Child | None:
        """Its gateway's process, if it lives."""
        assert self.stack.gateway is not None
        child = self.stack.gateway.child
        return child if child is not None and child.is_alive() else None

    def list_settings(self) -> dict[str, str]:
        """Return the settings of an operator's commands."""
        found = self.stack.addresses
        named = {"KAFKA": found.kafka, "STREAM_URL": found.stream_url, "PIPELINE": found.pipeline}
        return {f"PENSTOCK_{name}": value for name, value in named.items()} | self.settings

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `penstock regions` with these words, as an operator does."""
        command = [sys.executable, "-m", "penstock.cli.main", "regions", *words]
        return subprocess.run(
            command, env={**os.environ, **self.list_settings()}, capture_output=True, text=True, check=False
        )

    def sees(self, peer: "Region") -> bool:
        """Return whether its gateway says that the other region is ready."""
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            told = httpx.get(f"{self.url}/v1/penstock/regions", timeout=SILENCE_S).json()["regions"]
            return any(one["name"] == peer.name and one["state"] == "ready" for one in told)
        return False

    def stop(self) -> None:
        """Stop all of it."""
        if hasattr(self, "stack"):
            self.stack.stop()
        self.proxy.__exit__()


@dataclass
class Reading:
    """One reader of a request, over all its connections."""

    name: str
    answer: ExpectedAnswer
    chance: random.Random = field(default_factory=random.Random)
    texts: list[str] = field(default_factory=list)
    since_s: float = field(default_factory=time.monotonic)
    finish: str = "nothing"
    is_over: bool = False


class RegionClients:
    """Keeps requests under way at both gateways until it is stopped."""

    def __init__(self, plan: RegionsRound, regions: tuple[Region, Region], history: History) -> None:
        self._plan, self._regions, self._history = plan, regions, history
        self._over, self._lock = threading.Event(), threading.Lock()
        self.counts = Counter[str]()
        self.findings = list[Finding]()
        self.accepted = dict[str, int]()
        """Numbers of accepted requests by their ids."""
        self._reading = set[str]()
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(plan.num_in_flight, "client")
        self._futures: list[Future[None]] = [self._pool.submit(self._run) for _ in range(plan.num_in_flight)]

    @property
    def is_idle(self) -> bool:
        """Whether all requests that were begun have ended. Raises the exception of a client that failed."""
        return all(future.done() and future.result() is None for future in self._futures)

    def list_reading(self) -> set[str]:
        """Return the ids of accepted requests that clients have not read to the end."""
        with self._lock:
            return set(self._reading)

    def stop_sending(self) -> None:
        """Begin no more requests."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                number = next(self._numbers)
            self._ask(number, random.Random(f"{self._plan.seed}/ask/{number}"))

    def _ask(self, number: int, chance: random.Random) -> None:
        """Send a request, read all of its stream, and perhaps all of it once more at the other gateway."""
        body, answer = chance.choice(prepare_asked(self._plan.answer_tokens))
        body = {**body, "prompt_cache_key": name_session(self._plan.seed, number)}
        headers = {"idempotency-key": f"{self._plan.seed}-{number}"} if chance.random() < 0.5 else {}
        reading = Reading("first", answer, chance)
        source = EventSource("", headers=headers, silence_s=SILENCE_S)
        if (request_id := self._post(source, number, body, reading)) is None:
            return
        self._read_on(source, request_id, reading)
        if chance.random() < 0.3:
            self._read_on(EventSource("", silence_s=SILENCE_S), request_id, Reading("second", answer, chance))
        with self._lock:
            self._reading.discard(request_id)

    def _post(self, source: EventSource, number: int, body: dict[str, Any], reading: Reading) -> str | None:
        """Send a request until it is accepted, and read what comes; return its id.

        Without a key it is sent once: what became of it is not known after an error.
        """
        while True:
            asked = reading.chance.choice(self._regions)
            source.url, source.status = f"{asked.url}/v1/completions", 0
            accepted = partial(self._note_accepted, source, asked, number, reading.answer)
            with contextlib.suppress(httpx.TransportError):
                self._read(source.connect(body), reading, accepted)
            if source.status == 200:
                return accepted()
            if source.status not in {0, *REFUSED}:
                self._find("wrong", str(number), f"{asked.name} answers a POST with {source.status}")
                return None
            self.counts[f"POST: {source.status or 'broken'}"] += 1
            if not source.headers or time.monotonic() > reading.since_s + self._plan.patience_s:
                if source.headers:
                    self._find("stuck", str(number), "its key was refused all the time")
                return None
            time.sleep(ASK_AGAIN_S)

    def _note_accepted(self, source: EventSource, asked: Region, number: int, answer: ExpectedAnswer) -> str:
        request_id = source.answer_headers["x-request-id"]
        with self._lock:
            if request_id in self.accepted:
                return request_id
            self.accepted[request_id] = number
            self._reading.add(request_id)
        home = find_home(request_id, NAMES)
        self.counts["accepted at home" if home == asked.name else "sent on"] += 1
        expected = {"tokens": answer.token_ids, "text": answer.text, "finish": answer.finish_reason}
        self._history.add_entry("submitted", id=request_id, calls=[], may=[], asked=asked.name, **expected)
        self._history.add_entry("accepted", id=request_id)
        return request_id

    def _read_on(self, source: EventSource, request_id: str, reading: Reading) -> None:
        """Read the rest of a stream, at either gateway in turn."""
        while not reading.is_over:
            asked = reading.chance.choice(self._regions)
            source.url, source.status = f"{asked.url}/v1/streams/{request_id}", 0
            with contextlib.suppress(httpx.TransportError):
                self._read(source.connect(), reading, lambda: request_id)
            if source.status == 404:
                self._find("lost", request_id, f"{asked.name} says that there is no such request")
                return
            if source.status not in {0, 200, 404, *REFUSED}:
                self._find("wrong", request_id, f"{asked.name} answers a reader with {source.status}")
            if not reading.is_over:
                self.counts[f"read on: {source.status or 'broken'}"] += 1
                if time.monotonic() > reading.since_s + self._plan.patience_s:
                    fields = {"error": "StreamTimeout", "story": f"no event for {self._plan.patience_s:g} s"}
                    self._history.add_entry("failed", id=request_id, reader=reading.name, **fields)
                    return
                time.sleep(ASK_AGAIN_S)

    def _read(self, events: Iterator[ServerSentEvent], reading: Reading, accepted: Callable[[], str]) -> None:
        """Read one connection's events: all of them, or only some."""
        most = reading.chance.choice([3, 10, 1000])
        with contextlib.closing(events):  # type: ignore[type-var]
            for event in itertools.islice(events, most):
                request_id = accepted()
                reading.since_s = time.monotonic()
                if event.event == "error":
                    code = event.body["error"]["code"]
                    self.counts[f"stream: {code}"] += 1
                    if code in self._plan.may:
                        reading.is_over = True
                        self._history.add_entry(code, id=request_id, reader=reading.name)
                    return
                if event.data == "[DONE]":
                    reading.is_over = True
                    self._history.add_entry(
                        "end", id=request_id, reader=reading.name, finish=reading.finish, count=None, error=None,
                        text="".join(reading.texts), calls=[],
                    )  # fmt: skip
                    return
                note_event(self._history, request_id, event, reading)

    def _find(self, kind: str, request_id: str, story: str) -> None:
        with self._lock:
            self.findings.append(Finding(kind, request_id, story))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if error is not None:
            self._plan = replace(self._plan, patience_s=0.0)
        self._pool.shutdown(wait=error is None, cancel_futures=True)


def note_event(history: History, request_id: str, event: ServerSentEvent, reading: Reading) -> None:
    """Note in the history which tokens a reader saw with an event: those of the answer, if its id is theirs."""
    reading.texts.append(event.text)
    for choice in event.body["choices"]:
        reading.finish = choice.get("finish_reason") or reading.finish
    if "-" not in event.id:  # a chunk without tokens
        return
    position, _ = parse_event_id(event.id)
    tokens, told = reading.answer.token_ids, name_events(tuple(reading.answer.token_ids))
    is_right = position < len(told) and told[position] == event.id
    history.add_entry(
        "token", id=request_id, reader=reading.name, event=event.id, token=tokens[position] if is_right else OTHER_TOKEN
    )


@cache
def name_events(tokens: tuple[int, ...]) -> list[str]:
    """Return the event id of each token of an answer."""
    rolled = itertools.accumulate(tokens, roll_hash, initial=START_HASH)
    return [f"{position}-{one}" for position, one in enumerate(itertools.islice(rolled, 1, None))]


def name_session(seed: int, number: int) -> str:
    """Return the session of a request, by which it is found in the topics."""
    return f"{seed}/{number}"


class RegionFaults:
    """Injects one fault after the other into one of the regions, each kind once before any comes again."""

    def __init__(self, plan: RegionsRound, regions: tuple[Region, Region], history: History) -> None:
        self._chance, self._regions, self._history = random.Random(f"{plan.seed}/faults"), regions, history
        self.counts, self._kinds = Counter[str](), plan.faults

    def inject(self, until_s: float) -> None:
        """Inject faults until `time.monotonic()` says so, and each kind at least once."""
        for kinds in iter(lambda: self._chance.sample(self._kinds, len(self._kinds)), []):
            for kind in kinds:
                if time.monotonic() > until_s and len(self.counts) == len(self._kinds):
                    return
                region = self._chance.choice(self._regions)
                self._history.add_entry("fault", kind=kind, region=region.name)
                with self._injected(kind, region):
                    self.counts[kind] += 1
                    keep_alive(self._regions, FAULT_S)
                keep_alive(self._regions, QUIET_S)

    @contextlib.contextmanager
    def _injected(self, kind: Fault, region: Region) -> Iterator[None]:
        gateway = region.gateway
        match kind:
            case "kill worker":
                living = [one.child for one in region.stack.workers if one.child is not None and one.child.is_alive()]
                for child in living[: self._chance.randint(1, len(living) or 1)]:
                    child.kill()
            case "kill gateway" if gateway is not None:
                gateway.kill()
            case "stop gateway" if gateway is not None:
                pause_process(gateway.pid)
            case "slow peer":
                region.proxy.delay_replies(LATE_S)
            case "cut off":
                region.proxy.stop_forwarding()
            case "refuse":
                region.proxy.refuse_connections()
        yield
        if kind == "stop gateway" and gateway is not None:
            gateway.send_signal(signal.SIGCONT)
        region.proxy.delay_replies(0.0)
        region.proxy.forward_normally()


def keep_alive(regions: Sequence[Region], for_s: float) -> None:
    """Start again what dies of some regions, for some time."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        restart_dead(regions)


def restart_dead(regions: Sequence[Region]) -> None:
    """Start again what died, and wait for a moment."""
    for region in regions:
        region.stack.restart_dead()
    time.sleep(ASK_AGAIN_S)


def run_regions(plan: RegionsRound, directory: Path) -> RegionsOutcome:
    """Run a round. The history stays in the directory. Raises `PenstockError` where the regions do not start."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    prepare_asked(plan.answer_tokens)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        eu, us = regions = (Region(NAMES[0], directory, plan.workers), Region(NAMES[1], directory, plan.workers))
        for region, peer in ((eu, us), (us, eu)):
            exits.callback(region.stop)
            region.start(peer)
        for region in regions:
            region.stack.wait_until_ready(plan.patience_s)
        wait_tending(lambda: eu.sees(us) and us.sees(eu), regions, plan.patience_s)
        with RegionClients(plan, regions, history) as clients:
            faults = RegionFaults(plan, regions, history)
            faults.inject(time.monotonic() + plan.seconds)
            clients.stop_sending()
            wait_tending(lambda: clients.is_idle, regions, 2 * plan.patience_s)
        accepted = [found for region in regions for found in list_sessions(region)]
        for region in regions:
            record_topics(region.stack, history)
    found = [*check_history(read_history(path)), *clients.findings, *find_accepted_twice(accepted)]
    return RegionsOutcome(found, faults.counts + clients.counts, len(clients.accepted), path)


def find_accepted_twice(accepted: Iterable[tuple[str, str]]) -> list[Finding]:
    """Return a finding for each session, of one POST or one key, that more than one id has."""
    ids = defaultdict[str, set[str]](set)
    for session, request_id in accepted:
        ids[session].add(request_id)
    return [
        Finding("duplicated", min(found), f"one POST was accepted as {sorted(found)}")
        for found in ids.values()
        if len(found) > 1
    ]


def wait_tending(condition: Callable[[], bool], regions: Sequence[Region], patience_s: float) -> None:
    """Wait for a condition, and start again what dies meanwhile. Raises `PenstockError`."""
    until_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until_s:
            raise PenstockError(f"two regions do not get ready, or their clients are not done, in {patience_s:g} s")
        restart_dead(regions)


def list_sessions(region: Region) -> list[tuple[str, str]]:
    """Return the session and the id of each request that a region accepted."""
    bus, pipeline = connect_bus(region.stack.addresses, BusSettings()), Pipeline(PIPELINE)
    read = [
        decode_message(Request, one.value) for name in CLASSES for one in bus.read_all(pipeline.request_topic(name))
    ]
    return [(request.session or "", request.id) for request in read]
