"""One run: real workers under mishaps that follow from a seed, clients, and the judgement of what was seen."""

import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from penstock import failpoints
from penstock.client.core import prepare_message
from penstock.config.settings import RecordSettings
from penstock.decode_worker.role import DecodeRole
from penstock.errors import BusUnavailable
from penstock.messages import EndEvent, Request, Result, Sampling, decode_message, encode_request, extract_request_id
from penstock.names import REASON_HEADER, STAGES, Pipeline, Stage
from penstock.prefill_worker.handoff import sampling_seed
from penstock.prefill_worker.role import PrefillRole
from penstock.worker.loop import Reconnector, StopSignal
from penstock.worker.worker import Worker
from sim.chaos.checker import Entry, Finding, check_history
from sim.world.engine import FormulaEngine, list_tokens, load_tokenizer
from sim.world.network import Link, make_bus_error, make_redis_error
from sim.world.runtime import Doubles, Process, World
from sim.world.servers import JUDGE, LEVELS, Servers

SIMULATED = ("penstock.", "fakeredis.", "redis.")
"""Modules that run by the world's clock and threads."""
NOTICE_S = (1.0, 12.0)
"""How long a bus takes to notice that a member is dead."""
CALM_S = 150.0
"""How long after the last mishap all requests must be answered."""
CUT_S = (1.0, 8.0, 40.0)
"""How long a cut lasts at most. The longest outlasts all time limits of Kafka's clients."""
MAX_TOKENS = 24
POLL_S = 0.5


@dataclass(frozen=True)
class Rates:
    """How often mishaps happen in a run. Each run draws its own."""

    crash: float
    """The chance of a crash at a failpoint."""
    stall: float
    """The chance that a process stands still at a failpoint."""
    loss: float
    """The share of calls that are lost."""
    delay_s: float
    cut_s: float
    """The mean time between cuts of a process from a server; 0 for none."""
    pause_s: float
    """The mean time between pauses of a server; 0 for none."""
    clocks_s: float
    """How far wall clocks differ."""
    double: float
    """The chance that a client sends a request twice."""
    cancel: float
    leave_s: float
    """The mean time until a worker is told to leave; 0 if none is."""
    rebalance_s: float
    """The mean time until the bus gives what a living member holds to others; 0 if it never does."""
    kill_s: float
    """The mean time until a process is killed wherever it is, between any two calls to a server; 0 if none is."""
    freeze_s: float
    """The mean time until a process is stopped for longer than its lease, wherever it is; 0 if none is."""

    @classmethod
    def draw(cls, chance: random.Random) -> "Rates":
        """Draw the rates of a run: each mishap is left out in some."""

        def maybe(most: float) -> float:
            return 0.0 if chance.random() < 0.4 else most * chance.random() ** 2

        return cls(
            crash=maybe(0.01), stall=maybe(0.003), loss=maybe(0.1), delay_s=0.0005 + maybe(0.05),
            cut_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0, clocks_s=maybe(600.0),
            pause_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0,
            double=maybe(0.4), cancel=maybe(0.3), leave_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0,
            rebalance_s=chance.uniform(1.0, 30.0) if chance.random() < 0.4 else 0.0,
            kill_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0,
            freeze_s=chance.uniform(2.0, 20.0) if chance.random() < 0.4 else 0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a run is made of. Equal plans give equal histories."""

    seed: int
    clients: tuple[int, ...]
    """Their numbers; each sends a request that follows from seed and number."""
    rates: Rates
    span_s: float
    """The time in which clients begin."""
    level: str = "fast"
    """Which of `LEVELS` it runs at."""

    @classmethod
    def draw(cls, seed: int, requests: int, level: str = "") -> "Plan":
        """Return the plan of a seed. One in ten runs is at a level other than `fast`, if none is given."""
        chance = random.Random(f"{seed}/level")
        drawn = "fast" if chance.random() < 0.9 else chance.choice([name for name in LEVELS if name != "fast"])
        rates = Rates.draw(random.Random(f"{seed}/rates"))
        return cls(seed, tuple(range(requests)), rates, 0.2 * requests, level or drawn)


class QuietBeat:
    """What the frame of a worker tells its heartbeat, which is not there."""

    def update_status(self, **_: object) -> None:
        """Do nothing."""

    def write_beat(self) -> None:
        """Do nothing."""

    def raise_failure(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Place:
    """A worker's name, and the process that has it."""

    stage: Stage
    name: str
    process: Process | None = None
    stop: StopSignal | None = None
    cuts: dict[str, float] = field(default_factory=dict)
    """Until when the way to a server is cut."""


@dataclass(frozen=True)
class Verdict:
    """What a run came to."""

    findings: list[Finding]
    requests: int
    kills: int
    virtual_s: float
    history: list[Entry]


class Scene:
    """A pipeline of the world."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.seed, self.rates = plan, plan.seed, plan.rates
        self.world = World(plan.seed)
        self.doubles = Doubles(self.world)
        self.chance = random.Random(f"{plan.seed}/mishaps")
        self.pipeline = Pipeline("world")
        self.history: list[Entry] = []
        self.num_kills = 0
        self.is_calm = False
        self.accepted: set[str] = set()
        self.failures: list[str] = []
        self.num_clients_left = 0
        self.pauses = {"redis": 0.0, "bus": 0.0}
        """Until when a server stands still."""

    def run(self) -> Verdict:
        """Run the scene to its end, and judge it."""
        load_tokenizer()
        self.servers: Servers = LEVELS[self.plan.level](self.world, self.pipeline, self._find_link)
        for original, double in self.servers.list_doubles():
            self.doubles.replace(original, double)
        with self.doubles.install(lambda name: name.startswith(SIMULATED)), _quiet_logs():
            try:
                return self._run()
            finally:
                failpoints.disarm()

    def _run(self) -> Verdict:
        self.servers.start()
        for point in failpoints.POINTS:
            failpoints.arm_action(point, partial(self._pass_failpoint, point))
        chance = random.Random(f"{self.seed}/size")
        self.places = [Place(stage, f"{stage}-{number}") for stage in STAGES for number in range(chance.randint(1, 3))]
        self.num_clients_left = len(self.plan.clients)
        for number in self.plan.clients:
            self.world.start_thread(self.world.outside, f"client-{number}", partial(self._run_client, number))
        for place in self.places:
            self._start_worker(place)
            self._repeat_mishap(self.rates.leave_s, partial(self._stop_worker, place))
            self._repeat_mishap(self.rates.rebalance_s, partial(self.servers.rebalance, place.stage, place.name))
            self._repeat_mishap(self.rates.cut_s, partial(self._cut_way, place))
            self._repeat_mishap(self.rates.kill_s, partial(self._kill_anywhere, place))
            self._repeat_mishap(self.rates.freeze_s, partial(self._freeze, place))
        self._repeat_mishap(self.rates.pause_s, self._pause_server)
        end_of_mishaps_s = 5.0 + self.plan.span_s
        self.world.run(lambda: self.num_clients_left == 0, end_of_mishaps_s)
        self.is_calm = True
        is_over = self.world.run(self._is_all_answered, CALM_S)
        if is_over:
            is_over = self.world.run(self._is_all_settled, CALM_S)
        if not is_over:
            self._note_what_is_left()
        self._record_topics()
        failures = self.failures + self.servers.list_breaches()
        findings = check_history(self.history) + [Finding("failed", "", text) for text in failures]
        return Verdict(findings, len(self.accepted), self.num_kills, self.world.now_s, self.history)

    def _note(self, entry: Entry) -> None:
        """Add to the history what happens now."""
        self.history.append({"at": round(self.world.now_s, 4), **entry})

    # Workers.

    def _start_worker(self, place: Place) -> None:
        ahead_s = self.chance.uniform(-1, 1) * self.rates.clocks_s
        process = Process(place.name, clock_ahead_s=ahead_s, on_failure=self._note_failure)
        place.process = process
        self.world.start_thread(process, "main", lambda: self._run_worker(place))

    def _run_worker(self, place: Place) -> None:
        chance = random.Random(self.chance.random())
        engine: Any = FormulaEngine(self.world, chance)
        role: Any = (PrefillRole if place.stage == "prefill" else DecodeRole)(self.pipeline, engine)
        settings = RecordSettings(max_attempts=1000)

        def make_worker() -> Worker:
            member = self.servers.join_group(place.stage, place.name)
            try:
                record = self.servers.open_record(place.name, settings)
                return Worker(role, self.pipeline, place.name, record, member)
            except BaseException:
                member.close()
                raise

        beat: Any = QuietBeat()
        place.stop = StopSignal()
        Reconnector(make_worker, lambda: self.servers.ask(place.name), beat).run_until_stopped(place.stop, 2.0)
        self._note({"what": "left", "worker": place.name})
        self._start_again(place)
        if place.process is not None:
            self.world.kill(place.process)

    def _find_link(self, who: str, server: str) -> Link | None:
        """Return the way of a process or client to a server; None for the judge, who asks from outside."""
        if who == JUDGE:
            return None
        make_error = make_redis_error if server == "redis" else make_bus_error
        place = next((place for place in self.places if place.name == who), None)
        loss = 0.0 if self.is_calm or (place is None and server == "redis") else self.rates.loss
        chance = random.Random(self.chance.random())
        if place is None:
            return Link(self.world, chance, make_error, loss, self.rates.delay_s)
        return Link(
            self.world,
            chance,
            make_error,
            loss,
            self.rates.delay_s,
            lambda: place.cuts.get(server, 0.0) > self.world.now_s,
            lambda: self.pauses[server],
        )

    def _note_failure(self, process: Process, error: BaseException) -> None:
        """A process ends by an exception of a thread: that of the loop is a defect."""
        self.failures.append(f"{process.name}: {type(error).__name__}: {error}")

    def _pass_failpoint(self, point: str) -> None:
        thread = self.world.current
        if thread is None or thread.process is self.world.outside:
            return
        if not self.is_calm:
            drawn = self.chance.random()
            if drawn < self.rates.crash:
                self._kill(thread.process, point)
            elif drawn < self.rates.crash + self.rates.stall:
                self._stall(thread.process, point)
        self.world.yield_turn()

    def _stall(self, process: Process, point: str) -> None:
        """Let one thread stand still, or all of a process."""
        seconds, is_whole = self.chance.uniform(0.1, 20.0), self.chance.random() < 0.5
        self._note({"what": "stalled", "worker": process.name, "point": point, "whole": is_whole})
        if is_whole:
            process.stands_until_s = self.world.now_s + seconds
        self.world.sleep(seconds)

    def _kill(self, process: Process, point: str) -> None:
        """Kill a process; another one takes its place, and the bus notices later that it is dead."""
        self.num_kills += 1
        place = next(place for place in self.places if place.process is process)
        self._note({"what": "kill", "worker": place.name, "point": point})
        act = self.servers.note_death(place.stage, place.name)

        def notice() -> None:
            self.world.sleep(self.chance.uniform(*NOTICE_S))
            act()

        self.world.start_thread(self.world.outside, "notice", notice)
        self._start_again(place)
        self.world.kill(process)

    def _kill_anywhere(self, place: Place) -> None:
        if place.process is not None and place.process.is_alive:
            self._kill(place.process, "anywhere")

    def _freeze(self, place: Place) -> None:
        if place.process is not None:
            place.process.stands_until_s = self.world.now_s + self.chance.uniform(0.5, 6.0)

    def _start_again(self, place: Place) -> None:
        """Start another process in the place of one that has ended, after a while."""

        def restart() -> None:
            self.world.sleep(self.chance.choice([0.1, 1.0, 15.0]))
            self._start_worker(place)

        self.world.start_thread(self.world.outside, "restart", restart)

    def _repeat_mishap(self, mean_s: float, do_mishap: Callable[[], object]) -> None:
        """Let a mishap happen again and again until there are to be none, `mean_s` apart; never where that is 0."""

        def repeat() -> None:
            while True:
                self.world.sleep(self.chance.expovariate(1 / mean_s))
                if self.is_calm:
                    return
                do_mishap()

        if mean_s:
            self.world.start_thread(self.world.outside, "mishaps", repeat)

    def _stop_worker(self, place: Place) -> None:
        if place.stop is not None:
            place.stop.set()

    def _pause_server(self) -> None:
        self.pauses[self.chance.choice(["redis", "bus"])] = self.world.now_s + self.chance.uniform(0.1, 15.0)

    def _cut_way(self, place: Place) -> None:
        most_s = self.chance.choice(CUT_S)
        place.cuts[self.chance.choice(["redis", "bus"])] = self.world.now_s + self.chance.uniform(0.1, most_s)

    # Clients.

    def _make_request(self, number: int, chance: random.Random) -> Request:
        prompt = [300 + chance.randrange(600) for _ in range(chance.choice([1, 5, 16, 40, 200, 2500]))]
        sampling = Sampling(max_tokens=chance.choice([1, 2, 8, MAX_TOKENS]), temperature=0.0, ignore_eos=True)
        klass: Any = chance.choice(["interactive", "interactive", "batch"])
        return Request(id=f"r{number}", token_ids=prompt, sampling=sampling, klass=klass)

    def _run_client(self, number: int) -> None:
        chance, who = random.Random(f"{self.seed}/client/{number}"), f"client-{number}"
        self.world.sleep(chance.uniform(0.0, self.plan.span_s))
        request = self._make_request(number, chance)
        may = ["cancelled"] if chance.random() < self.rates.cancel else []
        tokens = list_tokens(request.token_ids or [], sampling_seed(request), request.sampling.max_tokens)
        text = load_tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._note(
            {"what": "submitted", "id": request.id, "tokens": tokens, "text": text, "calls": [], "finish": "length",
             "may": may}
        )  # fmt: skip
        for _ in range(2 if chance.random() < self.rates.double else 1):
            self._send(request, who)
        self.accepted.add(request.id)
        self._note({"what": "accepted", "id": request.id})
        self._read(request, may, chance, who)
        self.num_clients_left -= 1

    def _send(self, request: Request, who: str) -> None:
        while True:
            publisher = self.servers.open_publisher(who)
            with contextlib.suppress(BusUnavailable), contextlib.closing(publisher):
                publisher.publish([prepare_message(self.pipeline, encode_request(request))[1]])
                return

    def _read(self, request: Request, may: list[str], chance: random.Random, who: str) -> None:
        record = self.servers.open_record(who, RecordSettings())
        seen, texts = 0, ""
        cancel_after = chance.randrange(MAX_TOKENS) if may else None
        while True:
            for event in record.read_log(request.id, seen - 1):
                texts += event.text
                if isinstance(event, EndEvent):
                    error = None if event.error is None else event.error.code
                    end = {"finish": event.finish_reason, "count": event.usage.completion_tokens, "error": error}
                    self._note({"what": "end", "id": request.id, "reader": "first", **end, "text": texts, "calls": []})
                    return
                entry = {"reader": "first", "event": event.id, "token": event.token}
                self._note({"what": "token", "id": request.id, **entry})
                seen += 1
            if cancel_after is not None and seen >= cancel_after:
                record.cancel_request(request.id)
                cancel_after = None
            self.world.sleep(POLL_S * chance.random())

    # The judgement.

    def _is_all_answered(self) -> bool:
        if self.failures:
            return True
        if self.num_clients_left or self.world.num_turns % 64:
            return False
        results = {
            extract_request_id(message.value, None)
            for message in self.servers.bus.read_all(self.pipeline.results_topic)
        }
        return self.accepted <= results

    def _is_all_settled(self) -> bool:
        """Return whether nothing is left of the requests but their records."""
        if self.failures:
            return True
        if self.world.num_turns % 64:
            return False
        return not any(self.servers.bus.count_unsettled().values()) and not any(map(self._is_open, self.accepted))

    def _is_open(self, request_id: str) -> bool:
        """Return whether a session has a request, or it waits for one."""
        status = self.servers.record.read_status(request_id)
        return status is not None and (status.stage != "end" or bool(status.session))

    def _note_what_is_left(self) -> None:
        for topic, count in self.servers.bus.count_unsettled().items():
            if count:
                self.failures.append(f"{count} messages of {topic} are left")
        for request_id in sorted(filter(self._is_open, self.accepted)):
            self.failures.append(f"{request_id} is open: {self.servers.record.read_status(request_id)!r}"[:300])

    def _record_topics(self) -> None:
        for message in self.servers.bus.read_all(self.pipeline.results_topic):
            result = decode_message(Result, message.value)
            error = result.error.code if result.error else None
            fields = {"tokens": result.token_ids, "text": result.text, "finish": result.finish_reason, "error": error}
            self._note({"what": "result", "id": result.id, **fields})
        for message in self.servers.bus.read_all(self.pipeline.dead_letter_topic):
            name = extract_request_id(message.value, message.key)
            self._note({"what": "dead", "id": name or "", "reason": message.headers.get(REASON_HEADER, "")})


@contextlib.contextmanager
def _quiet_logs() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def shorten_plan(plan: Plan, tell: Callable[[str], object]) -> Plan:
    """Return a plan that finds something as well, with as few mishaps and clients as can be left out one by one."""
    best = plan

    def try_plan(tried: Plan, what: str) -> bool:
        nonlocal best
        if not Scene(tried).run().findings:
            return False
        best = tried
        tell(what)
        return True

    for mishap in fields(Rates):
        if getattr(best.rates, mishap.name):
            try_plan(replace(best, rates=replace(best.rates, **{mishap.name: 0.0})), f"without {mishap.name}")
    size = len(best.clients) // 2
    while size:
        for start in range(0, len(best.clients), size):
            left = best.clients[:start] + best.clients[start + size :]
            if left and try_plan(replace(best, clients=left), f"{len(left)} requests"):
                break
        else:
            size //= 2
    return best
