"""How soon the streams of a killed decode worker go on, on another one."""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import redis

from penstock.local.processes import wait_until
from penstock.messages import Request
from penstock.names import Pipeline, parse_event_id
from penstock.record.log import Log, Status
from penstock.settings import RecordSettings
from tests.chaos.checker import Finding, check
from tests.chaos.clients import Clients, Errand
from tests.chaos.faults import ANY_TIME, Bus, Fate
from tests.chaos.history import History, read
from tests.chaos.nursery import Nursery
from tests.chaos.runner import Progress, calm, write_down
from tests.chaos.system import DoomedStack, Servers
from tests.pipeline.workload import Answer, alone, requests

NUM_DISTINCT = 6
WORTH = 4
"""A worker with fewer streams is not worth a kill."""
PATIENCE_S = 120.0


@cache
def _long(length: int) -> list[tuple[Request, Answer]]:
    """A few long answers, each asked for several times at once."""
    work = []
    for request in requests(NUM_DISTINCT, "long"):
        sampling = request.sampling.model_copy(update={"max_tokens": length, "ignore_eos": True})
        tokens = list(request.token_ids or ())[:60]
        work.append(request.model_copy(update={"token_ids": tokens, "sampling": sampling}))
    return list(zip(work, alone(work).values(), strict=True))


@dataclass
class Recovery:
    """Times in seconds from SIGKILL to the next event a reader saw, one for each stream of each worker killed."""

    seconds: list[float] = field(default_factory=list)
    kills: int = 0
    findings: list[Finding] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """That of the times."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Plan:
    """How much is to be measured."""

    waves: int
    kills: int
    """At most so many in a wave."""
    streams: int = 24
    length: int = 400
    """Tokens of each stream."""


@contextlib.contextmanager
def measured(
    bus: Bus, directory: Path, nursery: Nursery, plan: Plan, progress: Progress = lambda line, kills: None
) -> Iterator[Recovery]:
    """Kill decode workers in the middle of long answers, one after the other, while nothing else is wrong.

    Kafka has its timeouts at their defaults: a dead member is noticed after 45 s, and after a wave its partitions wait
    for that. So there is something to do between a last wave's streams and its results: the times are there when this
    is entered, the findings when it is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = Recovery()
    path = directory / "history.jsonl"
    _long(plan.length)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        servers = exits.enter_context(Servers(directory, bus, {}))
        stack = DoomedStack(
            directory / "stack", nursery, history, servers, lambda _, __: Fate(ANY_TIME, 1, 0.0), (1, 3)
        )
        stack.is_doomed = False
        exits.enter_context(stack)
        client = exits.enter_context(redis.Redis.from_url(servers.redis.url))
        log = Log(client, Pipeline(stack.addresses.pipeline), RecordSettings())
        _tend_until(stack, lambda: all(map(stack.is_ready, stack.workers)), "all workers are ready")
        for wave in range(plan.waves):
            make = partial(_errand, plan, wave)
            clients = exits.enter_context(Clients(history, stack.addresses, make, plan.streams, PATIENCE_S))
            clients.stop()  # a wave is one errand each
            _wave(wave, plan, stack, log, history, found, progress)
            _tend_until(stack, partial(_is_idle, clients), "all streams end")
            if wave + 1 == plan.waves:
                history.flush()
                found.seconds = times(read(path))
                yield found
            calm(stack, clients, PATIENCE_S, lambda line: progress(line, found.kills))
        write_down(stack, history)
    found.findings = check(read(path))


def _is_idle(clients: Clients) -> bool:
    return clients.is_idle


def _tend_until(stack: DoomedStack, condition: Callable[[], bool], what: str) -> None:
    def look() -> bool:
        stack.tend()
        return condition()

    wait_until(look, PATIENCE_S, what, every_s=0.05)


def _errand(plan: Plan, wave: int, number: int) -> Errand:
    request, answer = _long(plan.length)[number % NUM_DISTINCT]
    named = request.model_copy(update={"id": f"w{wave}-{number}", "tenant": f"wave-{wave}"})
    return Errand(named, answer, copies=1, cancel_after=None, leaves_after=[], late_s=None)


def _wave(
    wave: int, plan: Plan, stack: DoomedStack, log: Log, history: History, found: Recovery, progress: Progress
) -> None:
    """Kill the worker with the most streams, see them all go on, and again, while it is worth it."""
    ids = [f"w{wave}-{number}" for number in range(plan.streams)]

    def states() -> dict[str, Status]:
        stack.tend()
        seen = {request_id: log.status(request_id) for request_id in ids}
        return {request_id: status for request_id, status in seen.items() if status is not None}

    def all_decoding() -> bool:
        now = states()
        return len(now) == len(ids) and all(status.stage in ("decode", "end") for status in now.values())

    wait_until(all_decoding, PATIENCE_S, "all streams are in decode", every_s=0.02)
    for _ in range(plan.kills):
        by_owner: dict[str, list[str]] = defaultdict(list)
        for request_id, status in states().items():
            if status.stage == "decode" and status.owner:
                by_owner[status.owner].append(request_id)
        name, streams = max(by_owner.items(), key=lambda item: len(item[1]), default=("", []))
        child = stack.child_of(name) if name else None
        if len(streams) < WORTH or child is None:
            return
        at = history.note("victim", worker=name)
        child.kill()
        before = {request_id: status.num_tokens for request_id, status in states().items() if status.owner == name}
        history.note("killed", at_s=at, worker=name, streams=before)
        found.kills += 1
        progress(f"wave {wave + 1}, {len(before)} streams of {name} go on", found.kills)

        def all_on(before: dict[str, int] = before) -> bool:
            now = states()
            return all(now[one].num_tokens > count or now[one].stage == "end" for one, count in before.items())

        wait_until(all_on, PATIENCE_S, f"the streams of {name} go on", every_s=0.02)


def times(history: Iterable[dict[str, Any]]) -> list[float]:
    """From each kill to the next event of each stream that the worker had."""
    waiting: dict[str, tuple[float, int]] = {}
    seconds: list[float] = []
    for entry in _in_order(history):
        if entry["what"] == "killed":
            waiting |= {request_id: (entry["at_s"], count) for request_id, count in entry["streams"].items()}
        elif entry["what"] in ("token", "end") and entry["id"] in waiting:
            at_s, count = waiting[entry["id"]]
            if entry["what"] == "end" or parse_event_id(entry["event"])[0] >= count:
                seconds.append(entry["at"] - at_s)
                del waiting[entry["id"]]
    return seconds


def _in_order(history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A kill is told a moment after it was done: before what was seen in that moment."""
    return sorted(history, key=lambda entry: entry["at_s"] if entry["what"] == "killed" else entry["at"])


def told(found: Recovery) -> str:
    """In words."""
    median = statistics.median(found.seconds)
    return f"{found.kills} kills, {len(found.seconds)} streams: p50 {median:.2f} s, p99 {found.quantile(0.99):.2f} s"
