"""`python -m sim.chaos.adopted_region [--kills N] [--seed N]`: a region dies again and again, and its peer adopts it.

Two regions, `eu` and `us`, `ROUND_TRIP_S` apart, with a Kafka, a Redis, workers and a gateway each. MirrorMaker copies
`eu` to `us`. Clients stream at both gateways; others write to the Kafka of `eu`: plain requests, those of class `batch`
and those of a tenant that stays. Each turn

    0  MirrorMaker is started again if the copy stands, as the alert's runbook tells
    1  a mishap: a transaction that is aborted, a result of 2 MB, more partitions, MirrorMaker dead for a minute, or
       the regions cut off from each other for a minute, both ways or one
    2  at a random moment all of `eu` is killed, or stands still for `STOPPED_S`; `penstock regions adopt eu`
    3  what was copied without a result is looked for in the results of `us`
    4  `eu` comes back and joins, readers have their answers, and `us` gives it back

All topics are read whole at the end. What may be seen twice is what the promise of docs/regions.md says: an adopted
request may have a result of `eu` that was written before it died and not copied, or while it lived on.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.client.core import prepare_message
from penstock.config.settings import BusSettings
from penstock.errors import AnswerInterrupted, BusUnavailable, PenstockError
from penstock.ingest.regions.copies import read_copy_state
from penstock.messages import Request, Result, decode_message, encode_request, extract_request_id, now_s
from penstock.names import CLASSES, Pipeline, add_tenant, copy_topic
from penstock.redis.client import redis_client
from sim.chaos.checker import Entry, Finding, check_history
from sim.chaos.history import History, read_history
from sim.chaos.runner import record_results, record_topics
from sim.chaos.system import PIPELINE
from sim.chaos.two_regions import (
    NAMES,
    NUM_KNOWN,
    OTHER_TOKEN,
    Region,
    RegionClients,
    RegionsRound,
    find_accepted_twice,
    keep_alive,
    list_sessions,
    prepare_asked,
    restart_dead,
    wait_tending,
)
from sim.forked import pause_process, preload_modules
from sim.mirror_maker import MirroredKafkas
from sim.workload import ExpectedAnswer, compute_answers, make_requests

ROUND_TRIP_S = 0.08
STAYS = "stays"
"""The tenant whose data may not leave `eu`. It is in each of its messages, in the headers or the value."""
ANSWER_TOKENS, NUM_LAST = 64, 36
"""Tokens of an answer; how many requests are sent just before the end, so that some are open."""
ALERT_S = 30.0
"""How old the newest copied heartbeat may be: `PenstockCopyStands`."""
PAUSE_S = 0.5
"""Between two requests that are written to Kafka."""
LONG_FAULT_S, STOPPED_S = 60.0, 30.0
MAX_UNTIL_KILL_S = 8.0
LARGE_CHARS = 2_000_000
KILLS_A_STOP = 5
"""After so many kills `eu` stands still for once."""
ABORTED = "of an aborted transaction"
Mishap = Literal["aborted", "large", "partitions", "no mirror", "cut off", "cut off one way", "cut off other way"]
MISHAPS: tuple[Mishap, ...] = (
    "aborted", "no mirror", "large", "cut off", "partitions", "cut off one way", "aborted", "cut off other way",
)  # fmt: skip
"""One for each turn, in order, from the one that the seed names on."""
LONG_MISHAPS = frozenset(MISHAPS) - {"aborted", "large", "partitions"}
"""Those for which the copy waits."""


@dataclass(frozen=True)
class AdoptionRound:
    """What is to be done."""

    seed: int
    kills: int
    """How often `eu` is killed or stands still."""
    workers: int = 1
    """Workers of each region."""
    num_in_flight: int = 6
    patience_s: float = 400.0
    mishaps: tuple[Mishap, ...] = MISHAPS


@dataclass
class Adoption:
    """What was seen of one."""

    was_killed: bool
    """Whether `eu` was killed, and not stopped."""
    open_ids: set[str]
    """What was copied without a result."""
    lag_s: float
    """How old the newest copied heartbeat was when `eu` died."""
    is_after_fault: bool = False
    """Whether the copy had waited before, or MirrorMaker was dead."""
    published_s: float = 0.0
    answered_s: float = 0.0
    """From the operator's word on: until the command ended, and until the last of them had its result."""
    home_results: set[str] = field(default_factory=set)
    """Ids with a result in `eu` when it came back."""


@dataclass(frozen=True)
class AdoptionOutcome:
    """The result of a round."""

    findings: list[Finding]
    counts: Counter[str]
    adoptions: list[Adoption]
    requests: int
    history: Path

    def build_figures(self) -> dict[str, float]:
        """Return what is told of a round."""
        kinds = ("lost_after_adoption", "other_tokens_under_one_id", "residency_leaks", "computed_twice", "resumed")
        return {
            "kills": sum(one.was_killed for one in self.adoptions),
            "stops": sum(not one.was_killed for one in self.adoptions),
            "adopted": sum(len(one.open_ids) for one in self.adoptions),
            **{kind: self.counts[kind] for kind in kinds},
            "answer_interrupted": self.counts[f"stream: {AnswerInterrupted.code}"],
            "rpo_s": max((one.lag_s for one in self.adoptions if not one.is_after_fault), default=0.0),
            "rpo_after_fault_s": max((one.lag_s for one in self.adoptions if one.is_after_fault), default=0.0),
            "rto_s": max((one.answered_s for one in self.adoptions), default=0.0),
        }


class Producers:
    """Writes requests to the Kafka of `eu` until it is stopped: plain ones, batch ones, and those of `STAYS`."""

    def __init__(self, seed: int, eu: Region, history: History) -> None:
        self._eu, self._history, self._seed = eu, history, seed
        work = make_requests(NUM_KNOWN, "regions", ANSWER_TOKENS)
        self._known = list(zip(work, compute_answers(work).values(), strict=True))
        self._publisher = connect_bus(eu.stack.addresses, BusSettings()).create_publisher()
        self._over = threading.Event()
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(1, "producers")
        self._running: Future[None] | None = None

    def send(self, kind: str, number: int, known: tuple[Request, ExpectedAnswer]) -> str:
        """Send a request once, and note whether it was acknowledged. Return its id."""
        request, answer = known
        stays = kind == STAYS
        named = {"id": f"{kind}-{self._seed}-{number}", "priority_class": "batch" if kind == "batch" else "interactive"}
        named["session"] = named["id"]
        request = request.model_copy(update=named | ({"tenant": STAYS} if stays else {}))
        told = {"tokens": answer.token_ids, "text": answer.text, "finish": answer.finish_reason}
        self._history.add_entry("submitted", id=request.id, calls=[], may=[], **told)
        message = prepare_message(Pipeline(PIPELINE), encode_request(request), own_topics=stays)[1]
        with contextlib.suppress(BusUnavailable):
            self._publisher.publish([message])
            self._history.add_entry("accepted", id=request.id)
        return request.id

    def _run(self) -> None:
        chance = random.Random(f"{self._seed}/producers")
        while not self._over.wait(PAUSE_S):
            self.send(chance.choice(("plain", "batch", STAYS)), next(self._numbers), chance.choice(self._known))

    def send_some(self, count: int) -> list[str]:
        """Send so many requests of all kinds, and return their ids."""
        kinds = ("plain", "batch", STAYS)
        return [
            self.send(kinds[one % len(kinds)], next(self._numbers), self._known[one % NUM_KNOWN])
            for one in range(count)
        ]

    def stop(self) -> None:
        """Send no more. Raises what sending raised."""
        self._over.set()
        if self._running is not None:
            self._running.result()

    def __enter__(self) -> Self:
        self._running = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self._publisher.close()


class Operator:
    """Lets `eu` die, has it adopted, and brings it back."""

    def __init__(
        self, plan: AdoptionRound, kafkas: MirroredKafkas, regions: tuple[Region, Region], history: History
    ) -> None:
        self._plan, self._kafkas, self.regions, self._history = plan, kafkas, regions, history
        self.eu, self.us = regions
        self._chance = random.Random(f"{plan.seed}/operator")
        self.adoptions = list[Adoption]()
        self.counts = Counter[str]()
        self.findings = list[Finding]()
        self._pipeline = Pipeline(PIPELINE)

    def play_turn(self, number: int, clients: RegionClients, producers: Producers) -> None:
        """Play a turn: let the copy go on, then a mishap, the end of `eu`, its adoption and its return."""
        self._let_copy_go_on()
        mishaps = self._plan.mishaps
        mishap = mishaps[(self._plan.seed * self._plan.kills + number) % len(mishaps)]
        self._note(mishap)
        self._have_mishap(mishap, number, producers)
        keep_alive(self.regions, self._chance.uniform(0.5, MAX_UNTIL_KILL_S))
        producers.send_some(NUM_LAST)
        time.sleep(self._chance.uniform(0.0, 2.0))
        is_stop = number % (KILLS_A_STOP + 1) == KILLS_A_STOP
        self._note("stop" if is_stop else "kill")
        if is_stop:
            self._stop_home()
        else:
            self._kill_home()
        died_s = now_s()
        if not self._kafkas.mirror.is_running:
            self._kafkas.mirror.start()  # it finds nobody: what was not copied waits
        adopted = self._adopt(died_s, was_killed=not is_stop)
        adopted.is_after_fault = mishap in LONG_MISHAPS
        if is_stop:
            keep_alive([self.us], max(0.0, died_s + STOPPED_S - now_s()))
            self._continue_home()
        else:
            self._kafkas.eu.start()
            self.eu.return_reachable()
        adopted.home_results = {result.id for result in read_results(self.eu)}
        self._come_back(clients)

    def _let_copy_go_on(self) -> None:
        """Start MirrorMaker again if the copy stands: lost packets may have ended its heartbeats for good."""
        try:
            wait_tending(lambda: _is_copying(self.us, ALERT_S), self.regions, ALERT_S)
        except PenstockError:
            self._note("MirrorMaker is started again")
            self._kafkas.mirror.kill()
            self._kafkas.mirror.start()
            wait_tending(lambda: _is_copying(self.us, ALERT_S), self.regions, self._plan.patience_s)

    def _note(self, kind: str) -> None:
        self.counts[kind] += 1
        at_s = self._history.add_entry("fault", kind=kind)
        print(f"{at_s:.0f} s: {kind}", file=sys.stderr, flush=True)  # noqa: T201

    def _have_mishap(self, mishap: Mishap, number: int, producers: Producers) -> None:
        """Let a mishap happen, and undo it; a MirrorMaker may stay dead until `eu` is."""
        match mishap:
            case "aborted":
                self._abort(producers.send_some(NUM_LAST))
            case "large":
                value = Result(id=f"large-{number}", text="x" * LARGE_CHARS, finish_reason="stop").encode()
                self._publish(Outgoing(self._pipeline.results_topic, value, f"large-{number}"))
            case "partitions":
                self._add_partitions()
            case "no mirror":
                self._kafkas.mirror.kill()
                if self._chance.random() < 0.5:  # else `eu` dies meanwhile
                    keep_alive(self.regions, LONG_FAULT_S)
                    self._kafkas.mirror.start()
            case _:
                ways = {
                    "cut off one way": [self.eu.proxy, self._kafkas.relay], "cut off other way": [self.us.proxy],
                }.get(mishap, [self.eu.proxy, self.us.proxy, self._kafkas.relay])  # fmt: skip
                for proxy in ways:
                    proxy.stop_forwarding()
                keep_alive(self.regions, LONG_FAULT_S)
                for proxy in ways:
                    proxy.forward_normally()

    def _abort(self, ids: Iterable[str]) -> None:
        """Write results of open requests in a transaction that is aborted."""
        producer = Producer({"bootstrap.servers": self._kafkas.eu.bootstrap, "transactional.id": "aborted"})
        producer.init_transactions()
        producer.begin_transaction()
        for one in ids:
            value = Result(id=one, text=ABORTED, finish_reason="stop").encode()
            producer.produce(self._pipeline.results_topic, value, key=one)
        producer.flush()
        producer.abort_transaction()

    def _publish(self, message: Outgoing) -> None:
        bus = connect_bus(self.eu.stack.addresses, BusSettings())
        with contextlib.closing(bus.create_publisher()) as publisher:
            publisher.publish([message])

    def _add_partitions(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._kafkas.eu.bootstrap})
        known = admin.list_topics(timeout=20).topics
        shared, own = self._pipeline.all_topics(), self._pipeline.list_own_topics(STAYS)
        wanted = [topic for topic in (*shared, *own) if ".dead" not in topic]
        more = [NewPartitions(topic, len(known[topic].partitions) + 1) for topic in wanted]
        for made in admin.create_partitions(more).values():
            made.result(20)

    def _kill_home(self) -> None:
        self.eu.kill()
        self._kafkas.eu.kill()

    def _list_stopped(self) -> list[int]:
        assert self._kafkas.eu.pid is not None
        return [*self.eu.stack.list_pids(), self._kafkas.eu.pid]

    def _stop_home(self) -> None:
        self._stopped = self._list_stopped()
        for pid in self._stopped:
            pause_process(pid)

    def _continue_home(self) -> None:
        for pid in reversed(self._stopped):
            os.kill(pid, signal.SIGCONT)

    def _adopt(self, died_s: float, *, was_killed: bool) -> Adoption:
        """Have `us` adopt `eu`, and wait until all that was copied has its result."""
        begun_s = time.monotonic()
        told = self.us.command("adopt", "eu", *([] if was_killed else ["--force"]))
        if told.returncode:
            raise PenstockError(f"the adoption is refused: {told.stderr or told.stdout}")
        published_s = time.monotonic() - begun_s
        with redis_client(self.us.stack.addresses.first_url) as client:
            age_s = read_copy_state(client, self._pipeline, "eu").age_s
        requests, results = read_copied_ids(self.us)
        answered = {result.id for result in read_results(self.us)}
        left = requests - results
        opened = left - {one for before in self.adoptions for one in before.open_ids}
        adopted = Adoption(was_killed, opened, died_s - (now_s() - (age_s or 0.0)), published_s=published_s)
        self.adoptions.append(adopted)
        until_s = time.monotonic() + self._plan.patience_s
        while (missing := left - answered) and time.monotonic() < until_s:
            restart_dead([self.us])
            answered = {result.id for result in read_results(self.us)}
        adopted.answered_s = time.monotonic() - begun_s
        for one in missing:
            self.counts["lost_after_adoption"] += 1
            self.findings.append(Finding("lost", one, "it was copied and adopted, and has no result"))
        self._history.add_entry("adopted", count=len(opened), published_s=published_s, answered_s=adopted.answered_s)
        return adopted

    def _come_back(self, clients: RegionClients) -> None:
        """Let the processes of `eu` start, wait until it has joined and readers have what was adopted; give it back."""
        wait_tending(self._has_joined, self.regions, self._plan.patience_s)
        self.eu.stack.wait_until_ready(self._plan.patience_s)
        wait_tending(lambda: self.eu.sees(self.us) and self.us.sees(self.eu), self.regions, self._plan.patience_s)
        reading = clients.list_reading()
        wait_tending(lambda: not reading & clients.list_reading(), self.regions, self._plan.patience_s)
        told = self.us.command("give-back", "eu")
        if told.returncode:
            raise PenstockError(f"it is not given back: {told.stderr or told.stdout}")

    def _has_joined(self) -> bool:
        return self.eu.command("join").returncode == 0


def read_results(region: Region, topic: str = "") -> list[Result]:
    """Return all results that are visible in a region."""
    bus = connect_bus(region.stack.addresses, BusSettings())
    return [decode_message(Result, one.value) for one in bus.read_all(topic or Pipeline(PIPELINE).results_topic)]


def read_copied_ids(us: Region) -> tuple[set[str], set[str]]:
    """Return the ids of all copied requests, and of all copied results."""
    bus, pipeline = connect_bus(us.stack.addresses, BusSettings()), Pipeline(PIPELINE)

    def read_ids(*topics: str) -> set[str]:
        messages = [one for topic in topics for one in bus.read_all(copy_topic("eu", topic))]
        return {found for one in messages if (found := extract_request_id(one.value, one.key)) is not None}

    return read_ids(*map(pipeline.request_topic, CLASSES)), read_ids(pipeline.results_topic)


def run_adoptions(plan: AdoptionRound, directory: Path) -> AdoptionOutcome:
    """Run a round. The history stays in the directory. Raises `PenstockError` where something hangs."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    prepare_asked(ANSWER_TOKENS)  # takes seconds: not in the middle of it
    with ExitStack() as exits:
        history = exits.enter_context(History(path))
        way_s = ROUND_TRIP_S / 2
        kafkas = exits.enter_context(MirroredKafkas(directory / "kafka", way_s))
        eu = Region(NAMES[0], directory, plan.workers, kafka=kafkas.eu.bootstrap, delay_s=way_s)
        us = Region(NAMES[1], directory, plan.workers, kafka=kafkas.us.bootstrap, copies="eu", delay_s=way_s)
        regions = (eu, us)
        for region, peer in ((eu, us), (us, eu)):
            exits.callback(region.stop)
            region.start(peer)
        connect_bus(eu.stack.addresses, BusSettings()).create_topics(STAYS)
        for region in regions:
            region.stack.wait_until_ready(plan.patience_s)
        wait_tending(lambda: eu.sees(us) and us.sees(eu), regions, plan.patience_s)
        wait_tending(lambda: _is_copying(us), regions, plan.patience_s)
        asking = RegionsRound(
            plan.seed,
            0.0,
            num_in_flight=plan.num_in_flight,
            patience_s=plan.patience_s,
            answer_tokens=ANSWER_TOKENS,
            may=(AnswerInterrupted.code,),
        )
        operator = Operator(plan, kafkas, regions, history)
        with RegionClients(asking, regions, history) as clients, Producers(plan.seed, eu, history) as producers:
            for number in range(plan.kills):
                operator.play_turn(number, clients, producers)
            keep_alive(operator.regions, MAX_UNTIL_KILL_S)
            producers.stop()
            clients.stop_sending()
            wait_tending(lambda: clients.is_idle, regions, 2 * plan.patience_s)
        with contextlib.suppress(PenstockError):  # then it is found below what is lost
            wait_tending(lambda: _has_answered_all(path, history, regions), regions, plan.patience_s)
        try:
            wait_tending(lambda: _is_copied_whole(eu, us), regions, plan.patience_s)
        except PenstockError:
            operator.findings.append(Finding("wrong", "", "the copy of the results is not as they are at home"))
        accepted = [found for region in regions for found in list_sessions(region)]
        for region in regions:
            record_topics(region.stack, history, region=region.name)
        record_results(read_results(eu, add_tenant(Pipeline(PIPELINE).results_topic, STAYS)), history, region="eu")
        leaks = list(find_leaks(us))
    entries, found, counts = judge_history(read_history(path), operator.adoptions)
    counts["residency_leaks"] = len(leaks)
    found += [*check_history(entries), *clients.findings, *find_accepted_twice(accepted), *operator.findings, *leaks]
    return AdoptionOutcome(
        found, operator.counts + clients.counts + counts, operator.adoptions, len(clients.accepted), path
    )


def _is_copying(us: Region, max_age_s: float = math.inf) -> bool:
    with redis_client(us.stack.addresses.first_url) as client:
        age_s = read_copy_state(client, Pipeline(PIPELINE), "eu").age_s
    return age_s is not None and age_s < max_age_s


def _has_answered_all(path: Path, history: History, regions: tuple[Region, Region]) -> bool:
    """Return whether all that was accepted has a result somewhere."""
    history.flush()
    accepted = {one["id"] for one in read_history(path) if one["what"] == "accepted"}
    own = add_tenant(Pipeline(PIPELINE).results_topic, STAYS)
    results = [*(one for region in regions for one in read_results(region)), *read_results(regions[0], own)]
    return accepted <= {result.id for result in results}


def _is_copied_whole(eu: Region, us: Region) -> bool:
    """Return whether each result of `eu` is in the copy, byte for byte, and nothing else."""
    topic = Pipeline(PIPELINE).results_topic
    home = connect_bus(eu.stack.addresses, BusSettings()).read_all(topic)
    copy = connect_bus(us.stack.addresses, BusSettings()).read_all(copy_topic("eu", topic))
    return sorted((one.key or "", one.value) for one in home) == sorted((one.key or "", one.value) for one in copy)


def find_leaks(us: Region) -> Iterator[Finding]:
    """Yield a finding for each message in any topic of `us`, copied or its own, that is of the tenant that stays."""
    bus = connect_bus(us.stack.addresses, BusSettings())
    topics = AdminClient({"bootstrap.servers": us.stack.addresses.kafka}).list_topics(timeout=20).topics
    for topic in sorted(one for one in topics if PIPELINE in one):
        for message in bus.read_all(topic):
            words = (message.key or "", *message.headers.values(), message.value.decode(errors="replace"))
            if ".t-" in topic or any(STAYS in word for word in words):
                yield Finding("leaked", message.key or "", f"a message of {STAYS} is in {topic} of us")


def judge_history(
    history: Iterable[Entry], adoptions: Iterable[Adoption]
) -> tuple[list[Entry], list[Finding], Counter[str]]:
    """Return the history without what the promise allows, what it does not allow of two results, and counts.

    Taken out are readers that ended with `answer_interrupted`, and results of `eu` beside one of `us` of the same
    adopted request.
    """
    entries, adopted = list(history), list(adoptions)
    counts, findings = Counter[str](), list[Finding]()
    ended = {(one["id"], one["reader"]) for one in entries if one["what"] == AnswerInterrupted.code}
    by_us = {one["id"]: one for one in entries if one["what"] == "result" and one["region"] == "us"}
    takers = {one_id: adoption for adoption in adopted for one_id in adoption.open_ids}
    counts["resumed"] = sum(
        one["what"] == "end" and one["reader"] == "first" and one["id"] in takers for one in entries
    )
    kept = list[Entry]()
    for one in entries:
        counts["other_tokens_under_one_id"] += one["what"] == "token" and one["token"] == OTHER_TOKEN
        if one["what"] == "token" and one["token"] == OTHER_TOKEN:
            findings.append(Finding("diverged", one["id"], f"{one['reader']} saw another token at {one['event']}"))
        if (one["id"], one.get("reader")) in ended if "id" in one else False:
            continue
        if one["what"] == "result" and one["region"] == "eu" and one["id"] in takers and one["id"] in by_us:
            counts["computed_twice"] += 1
            taker, ours = takers[one["id"]], by_us[one["id"]]
            if taker.was_killed and one["id"] not in taker.home_results:
                findings.append(Finding("duplicated", one["id"], "eu answered what was adopted, after it came back"))
            if one["error"] is None and (one["tokens"], one["text"]) != (ours["tokens"], ours["text"]):
                findings.append(Finding("diverged", one["id"], "its two results differ"))
            continue
        kept.append(one)
    return kept, findings, counts


def main() -> None:
    """Run a round, and print its figures and findings as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m sim.chaos.adopted_region")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    preload_modules("sim.chaos.runner")
    directory = Path(tempfile.mkdtemp(prefix="penstock-adoptions-"))
    outcome = run_adoptions(AdoptionRound(given.seed, given.kills), directory)
    told: dict[str, Any] = {"requests": outcome.requests, **outcome.build_figures(), "counts": outcome.counts}
    told["findings"] = [f"{one.kind}: {one.id}: {one.description}" for one in outcome.findings]
    print(json.dumps(told), flush=True)  # noqa: T201
    if not outcome.findings:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
