"""How soon others go on with what a killed worker had: the time from SIGKILL to the next token that a reader sees.

Of a decode or auto worker these are the streams it was in the middle of. Of a prefill worker they are all requests
accepted before the kill that only it would have gone on with, in whatever state they are:

- being computed (claimed, no token yet), and waiting in it or, on Kafka, in one of its partitions: to their first token
- being handed off (their first token is in the log, their job is not settled): to their second token

What is sent to its partitions after the kill waits for less, and is not counted. The time includes what the others need
to compute the prompts, which are long, so that the worker is met while it computes some and has not begun others.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import redis
from confluent_kafka.admin import AdminClient

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.messages import Request, extract_request_id
from penstock.names import Pipeline, Stage, WorkerKind, find_stages, parse_event_id
from penstock.record.log import RequestStatus, TokenLog
from sim.chaos.checker import Finding, check_history
from sim.chaos.clients import Clients, ClientTask
from sim.chaos.faults import ANY_TIME, Bus, KillPlan
from sim.chaos.history import History, read_history
from sim.chaos.runner import Progress, record_topics, wait_until_calm
from sim.chaos.system import ChaosStack, Servers
from sim.waiting import wait_for
from sim.workload import ExpectedAnswer, compute_answers, make_requests

NUM_DISTINCT_REQUESTS = 6
HANDED_OFF_STAGES = ("handed", "decode", "end")
"""Stages of a request's record in which no prefill worker has it any more."""
MAX_WAIT_S = 120.0
MAX_ENTRIES = 10_000
READ_TIMEOUT_S = 0.3


@cache
def _make_work(prompt: int, length: int) -> list[tuple[Request, ExpectedAnswer]]:
    """A few requests with prompts of so many tokens and answers of so many, each asked for several times."""
    work = make_requests(NUM_DISTINCT_REQUESTS, "long")
    text = [token for request in work for token in request.token_ids or ()]
    for number, request in enumerate(work):
        sampling = request.sampling.model_copy(update={"max_tokens": length, "ignore_eos": True})
        tokens = text[100 * number : 100 * number + prompt]
        work[number] = request.model_copy(update={"token_ids": tokens, "sampling": sampling})
    return list(zip(work, compute_answers(work).values(), strict=True))


@dataclass
class Recovery:
    """Times in seconds from SIGKILL to the next event a reader saw, one for each request of each worker killed."""

    seconds: list[float] = field(default_factory=list)
    kills: int = 0
    findings: list[Finding] = field(default_factory=list)

    def compute_quantile(self, share: float) -> float:
        """Return a quantile of the times."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class RecoveryPlan:
    """What is to be measured."""

    waves: int
    kills: int
    """Kills in a wave, at most."""
    stage: WorkerKind = "decode"
    """Which workers are killed."""
    streams: int = 24
    prompt: int = 60
    """Tokens of each prompt."""
    length: int = 400
    """Tokens of each answer."""
    min_requests: int = 4
    """Workers with fewer requests are not killed."""
    min_tokens: int = 1
    """Decode and auto workers are killed only once each stream has so many tokens."""


def make_prefill_plan(kills: int) -> RecoveryPlan:
    """Plan kills of prefill workers, each in its own wave: a restarted worker has no partitions at first."""
    return RecoveryPlan(kills, 1, "prefill", streams=9, prompt=900, length=8, min_requests=2)


def make_single_plan(length: int) -> RecoveryPlan:
    """Plan one kill, a third of the way through the only stream."""
    return RecoveryPlan(1, 1, streams=1, length=length, min_requests=1, min_tokens=length // 3)


@contextlib.contextmanager
def measure_recovery(
    bus: Bus, directory: Path, plan: RecoveryPlan, progress: Progress = lambda line, kills: None
) -> Iterator[Recovery]:
    """Kill workers of a stage in the middle of their work, one after the other, while nothing else is wrong.

    Kafka has its timeouts at their defaults: a dead member is noticed after 45 s, and after a wave its partitions wait
    for that. So there is something to do between a last wave's streams and its results: the times are there when this
    is entered, the findings when it is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = Recovery()
    path = directory / "history.jsonl"
    _make_work(plan.prompt, plan.length)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        servers = exits.enter_context(Servers(directory, bus, {}))
        size: dict[WorkerKind, int] = {"prefill": 1, "decode": 1} if plan.stage != "auto" else {}
        size[plan.stage] = 3
        stack = ChaosStack(directory / "stack", history, servers, lambda _, __: KillPlan(ANY_TIME, 1, 0.0), size)
        stack.is_killing = False
        exits.enter_context(stack)
        client = exits.enter_context(redis.Redis.from_url(servers.redis.url))
        _tend_until(stack, lambda: all(map(stack.is_ready, stack.workers)), "all workers are ready")
        for number in range(plan.waves):
            if bus == "kafka":
                _tend_until(stack, partial(_knows_members, stack, plan.stage), "all workers have partitions", 0.5)
            make = partial(_make_task, plan, number)
            clients = exits.enter_context(Clients(history, stack.addresses, make, plan.streams, lambda: MAX_WAIT_S))
            clients.stop_sending()  # a wave sends each task once
            _Wave(number, plan, stack, client, clients, history, found).kill_workers(progress)
            _tend_until(stack, partial(_are_idle, clients), "all streams end")
            if number + 1 == plan.waves:
                history.flush()
                found.seconds = compute_recovery_times(read_history(path))
                yield found
            wait_until_calm(stack, clients, MAX_WAIT_S, lambda line: progress(line, found.kills))
        record_topics(stack, history)
    found.findings = check_history(read_history(path))


def _are_idle(clients: Clients) -> bool:
    return clients.is_idle


def _knows_members(stack: ChaosStack, stage: WorkerKind) -> bool:
    """Whether each worker of a stage has its partitions, and no dead one has any."""
    names = sorted(worker.name for worker in stack.workers if worker.stage == stage)
    return sorted(read_members(stack.addresses, Pipeline(stack.addresses.pipeline).consumer_group(stage))) == names


def _tend_until(stack: ChaosStack, condition: Callable[[], bool], what: str, every_s: float = 0.05) -> None:
    def has_recovered() -> bool:
        stack.restart_dead()
        return condition()

    wait_for(has_recovered, what, every_s=every_s)


def _make_task(plan: RecoveryPlan, wave: int, number: int) -> ClientTask:
    request, answer = _make_work(plan.prompt, plan.length)[number % NUM_DISTINCT_REQUESTS]
    # In prefill, equal prompts would be found and not computed: they are of different tenants.
    tenant = f"wave-{wave}-{number}" if plan.stage == "prefill" else f"wave-{wave}"
    named = request.model_copy(update={"id": f"w{wave}-{number}", "tenant": tenant})
    return ClientTask(named, answer, copies=1, cancel_after=None, reconnect_after=[], late_reader_s=None)


class _Wave:
    """Requests that are sent at once, and the kills of workers that hold them."""

    def __init__(
        self, number: int, plan: RecoveryPlan, stack: ChaosStack, client: "redis.Redis", clients: Clients,
        history: History, found: Recovery,
    ) -> None:  # fmt: skip
        self._number, self._plan, self._stack, self._clients = number, plan, stack, clients
        self._client, self._history, self._found = client, history, found
        self._log = TokenLog(client, Pipeline(stack.addresses.pipeline), RecordSettings())
        self._ids = [f"w{number}-{one}" for one in range(plan.streams)]
        self._is_in_prefill = plan.stage == "prefill"

    def kill_workers(self, progress: Progress) -> None:
        """Kill the worker with the most requests, wait until they all go on, and repeat."""
        if not self._is_in_prefill:
            wait_for(self._all_decoding, "all streams are decoded", every_s=0.02)
        for _ in range(self._plan.kills):
            if not (name := self._find_victim()):
                return
            before = self._kill_worker(name)
            progress(f"wave {self._number + 1}, {len(before)} requests of {name} go on", self._found.kills)
            wait_for(partial(self._have_progressed, before), f"what {name} had goes on", every_s=0.02)

    def _read_states(self) -> dict[str, RequestStatus]:
        self._stack.restart_dead()
        seen = {request_id: self._log.read_status(request_id) for request_id in self._ids}
        return {request_id: status for request_id, status in seen.items() if status is not None}

    def _all_decoding(self) -> bool:
        now = self._read_states()
        return len(now) == len(self._ids) and all(
            status.stage == "end" or (self._is_worked_on(status) and status.num_tokens >= self._plan.min_tokens)
            for status in now.values()
        )

    def _is_worked_on(self, status: RequestStatus) -> bool:
        """Return whether a worker of the kind that is killed may have a request."""
        return status.stage in find_stages(self._plan.stage)

    def _find_victim(self) -> str:
        """Return the worker that holds most requests, or an empty name where none holds enough.

        In prefill, wait for one until all requests are handed off.
        """
        while True:
            now = self._read_states()
            held = Counter(one.worker_name for one in now.values() if self._is_worked_on(one) and one.worker_name)
            name, count = max(held.items(), key=lambda item: item[1], default=("", 0))
            if count >= self._plan.min_requests:
                return name
            is_over = len(now) == len(self._ids) and all(one.stage in HANDED_OFF_STAGES for one in now.values())
            if is_over or not self._is_in_prefill:
                return ""
            time.sleep(0.002)

    def _kill_worker(self, name: str) -> dict[str, int]:
        """Kill a worker. Return its requests, with the number of tokens that each had."""
        child, accepted = self._stack.get_child(name), set(self._clients.accepted_ids)
        assert child is not None
        at = self._history.add_entry("victim", worker=name)
        child.kill()
        now = self._read_states()
        if not self._is_in_prefill:
            before = {one: status.num_tokens for one, status in now.items() if status.worker_name == name}
        else:
            # What others took over meanwhile is seen here already: the lease of a second is what this has time for.
            belongs = read_owned_requests(self._stack.addresses, self._client, "prefill", name)
            handed_off = {one for one, status in now.items() if status.stage in HANDED_OFF_STAGES}
            own = {one for one, status in now.items() if status.worker_name == name} | (belongs & accepted)
            before = {one: now[one].num_tokens if one in now else 0 for one in own - handed_off}
        self._history.add_entry("killed", at_s=at, worker=name, streams=before)
        self._found.kills += 1
        return before

    def _have_progressed(self, before: dict[str, int]) -> bool:
        now = self._read_states()
        return all(
            one in now and (now[one].num_tokens > count or now[one].stage == "end") for one, count in before.items()
        )


def compute_recovery_times(history: Iterable[dict[str, Any]]) -> list[float]:
    """Return the seconds from each kill to the next event of each request that the worker had."""
    waiting: dict[str, tuple[float, int]] = {}
    seconds: list[float] = []
    for entry in _sort_entries(history):
        if entry["what"] == "killed":
            waiting |= {request_id: (entry["at_s"], count) for request_id, count in entry["streams"].items()}
        elif entry["what"] in ("token", "end") and entry["id"] in waiting:
            at_s, count = waiting[entry["id"]]
            if entry["what"] == "end" or parse_event_id(entry["event"])[0] >= count:
                seconds.append(entry["at"] - at_s)
                del waiting[entry["id"]]
    return seconds


def _sort_entries(history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort entries by time. A kill is recorded a moment after it was done, and counts at its own time."""
    return sorted(history, key=lambda entry: entry["at_s"] if entry["what"] == "killed" else entry["at"])


def format_recovery(found: Recovery) -> str:
    """Format the recovery times as one line."""
    median = statistics.median(found.seconds)
    p99_s = found.compute_quantile(0.99)
    return f"{found.kills} kills, {len(found.seconds)} requests: p50 {median:.2f} s, p99 {p99_s:.2f} s"


# Which requests the bus has given to a worker: a dead one keeps them until the bus notices its death.


def read_owned_requests(addresses: Addresses, client: "redis.Redis", stage: Stage, name: str) -> set[str]:
    """Return the ids of the interactive requests that only this worker of a stage is given.

    On Redis Streams these are those that it fetched and did not settle; on Kafka all that are in its partitions, also
    those that were settled long ago.
    """
    pipeline = Pipeline(addresses.pipeline)
    topic, group = pipeline.input_topics(stage)["interactive"], pipeline.consumer_group(stage)
    if addresses.kafka:
        return _read_partitions(addresses, topic, _list_partitions(addresses, group, topic, name))
    return _read_pending(client, pipeline.stream_key(topic), group, name)


def read_members(addresses: Addresses, group: str) -> list[str]:
    """Return who has partitions in a Kafka group, by the brokers; who died and came again may be there twice."""
    return [member.client_id for member in _describe_members(addresses, group) if member.assignment.topic_partitions]


def _read_pending(client: "redis.Redis", key: str, group: str, name: str) -> set[str]:
    entries = cast(Any, client.xpending_range(key, group, "-", "+", MAX_ENTRIES))
    own = {entry["message_id"] for entry in entries if entry["consumer"].startswith(f"{name}/".encode())}
    kept = cast(Any, client.xrange(key, count=MAX_ENTRIES))
    return _extract_ids(fields[b"value"] for entry, fields in kept if entry in own)


def _read_partitions(addresses: Addresses, topic: str, numbers: set[int]) -> set[str]:
    follower = connect_bus(addresses, BusSettings()).follow_topic(topic, {})
    values: list[bytes] = []
    try:
        while found := follower.read_messages(READ_TIMEOUT_S):
            values += [one.message.value for one in found if one.message is not None and int(one.partition) in numbers]
    finally:
        follower.close()
    return _extract_ids(values)


def _list_partitions(addresses: Addresses, group: str, topic: str, name: str) -> set[int]:
    members = [member for member in _describe_members(addresses, group) if member.client_id == name]
    places = [place for member in members for place in member.assignment.topic_partitions]
    return {place.partition for place in places if place.topic == topic}


def _describe_members(addresses: Addresses, group: str) -> list[Any]:
    admin = AdminClient({"bootstrap.servers": addresses.kafka, "log_level": 0})
    return list(admin.describe_consumer_groups([group])[group].result().members)


def _extract_ids(values: Iterable[bytes]) -> set[str]:
    return {found for value in values if (found := extract_request_id(value, None)) is not None}
