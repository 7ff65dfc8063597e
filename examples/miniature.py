"""Penstock in miniature: one pipeline in memory, on one thread, whose workers are killed or paused at each step.

    python examples/miniature.py

A request's record changes by `penstock.testing.transitions`, which tests compare with the scripts in Redis. The numbers
of steps are those of docs/structure.md, "The life of a request". docs/tour.md names the real file of each part.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from penstock.names import STAGES, START_HASH, Stage, event_id, roll_hash
from penstock.record.claim import AppendOutcome
from penstock.testing import transitions

LEASE_MS, BUS_TIMEOUT_MS, PAUSE_MS, STEP_MS, BLOCK_SIZE, CAPACITY = 1_000, 1_500, 2_000, 25, 4, 2
Reply = TypeVar("Reply")


class Request(NamedTuple):
    """What a producer sends. Here a job is the same message, in another topic; it never carries KV."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int


REQUESTS = [Request("r1", (1, 2, 3, 4, 5), 5), Request("r2", (1, 2, 3, 4, 6, 7), 3), Request("r3", (1, 2, 3, 4), 1)]


@dataclass(eq=False)
class Delivery:
    """A message as one member holds it. The same message at another member is another delivery."""

    name: str
    """The message's name: its topic and offset. It is bound to the request if this message settles it."""
    member: str
    request: Request


class Bus:
    """Topics of durable messages, each of which one member at a time holds."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Request]] = {"prefill": [], "decode": []}  # requests, and jobs
        self.results: list[tuple[str, tuple[int, ...]]] = []
        self.held: dict[str, Delivery] = {}
        self.finished: set[str] = set()
        self.polled_ms: dict[str, int] = {}

    def poll(self, topic: str, member: str, now_ms: int, capacity: int) -> list[Delivery]:
        """Return messages that nobody holds. Those of a silent member come back after `BUS_TIMEOUT_MS`."""
        self.polled_ms[member] = now_ms
        silent = {name for name, polled_ms in self.polled_ms.items() if polled_ms + BUS_TIMEOUT_MS < now_ms}
        self.held = {name: one for name, one in self.held.items() if one.member not in silent}
        all_ = [Delivery(f"{topic}@{offset}", member, one) for offset, one in enumerate(self.topics[topic])]
        found = [one for one in all_ if one.name not in self.held and one.name not in self.finished][:capacity]
        self.held.update({one.name: one for one in found})
        return found

    def settle(self, delivery: Delivery, *results: tuple[str, tuple[int, ...]]) -> bool:
        """Publish the result and finish the delivery, both or neither. Return False where its member lost it."""
        if self.held.get(delivery.name) is not delivery:
            return False
        self.results += results
        self.finished.add(delivery.name)
        del self.held[delivery.name]
        return True


Record = transitions.RequestRecord[str, Request, int, str]


class Records:
    """The records of requests with their logs, and the sessions of workers. A log alone says which tokens there are."""

    def __init__(self) -> None:
        self.by_id: dict[str, Record] = {}
        self.sessions: dict[str, int] = {}

    def change(self, request_id: str, script: Callable[..., tuple[Record, Reply]], *args: Any) -> Reply:
        """Change a record as one script in Redis does: nothing comes between reading and writing."""
        self.by_id[request_id], reply = script(self.by_id.get(request_id, Record()), *args)
        return reply

    def end_expired_sessions(self, now_ms: int) -> None:
        """End sessions whose time is over: any worker of the stage may take their requests over."""
        for session in [name for name, until_ms in self.sessions.items() if until_ms < now_ms]:
            del self.sessions[session]
            held = {name: record for name, record in self.by_id.items() if record.session == session}
            self.by_id.update({name: transitions.end_session(record, now_ms) for name, record in held.items()})


def compute_kv(tokens: tuple[int, ...], kv: list[int], store: dict[tuple[int, ...], list[int]]) -> list[int]:
    """Return the KV of tokens, each computed from all up to it. The store may lose a block: it is computed again."""
    kv = list(kv)
    while len(kv) % BLOCK_SIZE == 0 and len(kv) < len(tokens) and (block := store.get(tokens[: len(kv) + BLOCK_SIZE])):
        kv += block
    for token in tokens[len(kv) :]:
        kv.append(((kv[-1] if kv else 7) * 31 + token) % 10_007)
    for end in range(BLOCK_SIZE, len(kv) + 1, BLOCK_SIZE):
        store[tokens[:end]] = kv[end - BLOCK_SIZE : end]
    return kv


@dataclass(eq=False)
class Task:
    """A request in a worker, from its message to its settlement."""

    request: Request
    epoch: int
    tokens: tuple[int, ...]
    is_ended: bool
    delivery: Delivery | None
    """None where the request was taken over: the bus gives its message to some worker later."""
    kv: list[int] = field(default_factory=list)


class Worker:
    """A worker of one stage. Its loop is a generator: a worker that is killed is not resumed, a paused one is late."""

    def __init__(self, pipeline: "Pipeline", stage: Stage, name: str) -> None:
        self.pipeline, self.stage, self.name = pipeline, stage, name
        self.bus, self.records, self.counts = pipeline.bus, pipeline.records, pipeline.counts
        self.session, self.num_sessions, self.loop = "", 0, self.run()
        self.waiting: list[Delivery] = []
        self.running: list[Task] = []

    def run(self) -> Iterator[str]:
        """Run the loop. Each value names the step that was done."""
        while True:
            self.keep_session()
            yield "0 session renewed"
            for task in [*self.take_over(), *self.claim_messages()]:
                self.running.append(task)
                yield "2 request claimed" if self.stage == "prefill" else "6 job claimed"
            for task in [*self.running]:
                yield from self.prefill(task) if self.stage == "prefill" else self.decode(task)

    def keep_session(self) -> None:
        """Renew the session. If it is over, the worker drops all requests and opens another one."""
        now_ms, sessions = self.pipeline.now_ms, self.records.sessions
        if self.session not in sessions:
            for task in [*self.running]:
                self.drop(task)
            self.num_sessions += 1
            self.session = f"{self.name}/{self.num_sessions}"
        sessions[self.session] = now_ms + LEASE_MS
        self.records.end_expired_sessions(now_ms)

    def read_times(self) -> transitions.Times:
        """Return the time and the lease for a script."""
        return transitions.Times(self.pipeline.now_ms, self.pipeline.now_ms, LEASE_MS, longest_ms=10 * LEASE_MS)

    def take_over(self) -> Iterator[Task]:
        """Claim free requests of the stage. The record keeps the message, so no delivery is needed."""
        for name, record in [*self.records.by_id.items()]:
            if record.free[STAGES.index(self.stage)] and record.message and len(self.running) < CAPACITY:
                args = self.stage, self.session, self.read_times()
                if self.records.change(name, transitions.take_over_request, *args):
                    self.counts["taken over"] += 1
                    yield self.open_task(record.message, None)

    def claim_messages(self) -> Iterator[Task]:
        """Poll messages and claim their requests: each claim has a higher epoch, and a job is bound by it."""
        capacity = max(0, CAPACITY - len(self.running) - len(self.waiting))
        polled = self.bus.poll(self.stage, self.name, self.pipeline.now_ms, capacity)
        waiting, self.waiting = [one for one in (*self.waiting, *polled) if self.bus.held.get(one.name) is one], []
        for one in waiting:
            asked = (one.name, str(one.request), one.request)
            args = self.stage, self.session, asked, self.records.sessions, self.read_times()
            reply = self.records.change(one.request.id, transitions.claim_request, *args)
            mine = [task for task in self.running if task.request is one.request]
            if reply.kind == "claim":
                yield self.open_task(one.request, one)
            elif reply.kind == "busy" and mine:
                mine[0].delivery = one  # this worker took the request over, and now it has the message, too
            elif reply.kind == "busy":
                self.waiting.append(one)
            else:  # another message is bound to the request, so this one is stale
                self.counts["stale messages"] += 1
                self.bus.settle(one)

    def open_task(self, request: Request, delivery: Delivery | None) -> Task:
        """Return the task of a claimed request. It goes on at the end of the log."""
        record = self.records.by_id[request.id]
        return Task(request, record.epoch, record.tokens, record.stage == "end", delivery)

    def append(self, task: Task) -> bool:
        """Compute the next token and append it to the log. Return False where the claim is another's."""
        task.kv = compute_kv(task.request.prompt + task.tokens, task.kv, self.pipeline.store)
        token = task.kv[-1] % 26
        args = task.epoch, len(task.tokens), (token,)
        if self.records.change(task.request.id, transitions.append_tokens, *args) is AppendOutcome.FENCED:
            self.counts["tokens refused"] += 1
            self.drop(task)
            return False
        task.tokens += (token,)
        return True

    def drop(self, task: Task) -> None:
        """Forget a request that this worker lost. Its message, if it is here, is claimed again later."""
        self.running.remove(task)
        self.waiting += [] if task.delivery is None else [task.delivery]

    def prefill(self, task: Task) -> Iterator[str]:
        """Compute the prompt and the first token, then hand off: job out, message finished, record changed."""
        task.kv = compute_kv(task.request.prompt, task.kv, self.pipeline.store)
        yield "3 prompt computed"
        if not task.tokens and not self.append(task):
            return
        yield "4 token 0 in the log"
        self.bus.topics["decode"].append(task.request)
        yield "5 job published"
        if task.delivery:
            self.bus.settle(task.delivery)  # where the bus refuses it, the message comes again and is stale
        yield "5 message finished"
        self.records.change(task.request.id, transitions.hand_off_request, task.epoch, self.pipeline.now_ms)
        self.running.remove(task)
        yield "5 hand-off recorded"

    def decode(self, task: Task) -> Iterator[str]:
        """Append one token, or the end behind the last one; then settle the result."""
        if not task.is_ended:
            if len(task.tokens) < task.request.max_tokens:
                if self.append(task):
                    yield "7 token appended"
                return
            args = task.epoch, len(task.tokens), "length"
            if self.records.change(task.request.id, transitions.finish_request, *args) is AppendOutcome.FENCED:
                return self.drop(task)
            yield "8 end appended"
        self.running.remove(task)
        if task.delivery and self.bus.settle(task.delivery, (task.request.id, task.tokens)):
            yield "9 result published, job finished"


class Pipeline:
    """Two workers of each stage over one bus, one set of records and one KV store; and a reader of each stream."""

    def __init__(self, seed: int = 0) -> None:
        self.bus, self.records, self.now_ms, self.order = Bus(), Records(), 1, random.Random(seed)
        self.store: dict[tuple[int, ...], list[int]] = {}
        self.seen: dict[str, list[str]] = {}
        self.steps: list[str] = []
        self.counts: Counter[str] = Counter()
        self.workers = [Worker(self, stage, f"{stage}-{number}") for number in (0, 1) for stage in STAGES]
        self.paused: dict[Worker, int] = {}
        self.bus.topics["prefill"] += REQUESTS  # 1: the requests are durable, and so accepted

    def run(self, mishaps: Mapping[int, str], *, loses_kv: bool = False) -> "Pipeline":
        """Let workers do steps, in an order that the seed draws, until all is done. `mishaps` has a mishap by step."""
        while self.is_busy():
            worker = self.order.choice([one for one in self.workers if self.paused.get(one, 0) <= self.now_ms])
            self.steps.append(f"{worker.name}: {next(worker.loop)}")
            self.now_ms += STEP_MS
            if mishap := mishaps.get(len(self.steps) - 1):
                self.store = {} if loses_kv else self.store
                self.paused[worker] = self.now_ms + PAUSE_MS
                self.workers.append(Worker(self, worker.stage, f"{worker.stage}-{len(self.steps) + 1}"))
                if mishap == "kill":
                    self.workers.remove(worker)
            for request_id, record in self.records.by_id.items():
                self.read_stream(request_id, record.tokens)
            assert len(self.steps) < 5_000, "the pipeline makes no progress"
        return self

    def is_busy(self) -> bool:
        """Return whether a message is not finished, or a worker has a request or is paused."""
        num_messages = sum(len(messages) for messages in self.bus.topics.values())
        has_work = any(one.running or self.paused.get(one, 0) > self.now_ms for one in self.workers)
        return len(self.bus.finished) < num_messages or has_work

    def read_stream(self, request_id: str, tokens: tuple[int, ...]) -> None:
        """Read a log as a client does. The rolling hash in an event id covers all tokens before it."""
        hashes = [*accumulate(tokens, roll_hash, initial=START_HASH)][1:]
        events, seen = [event_id(*one) for one in enumerate(hashes)], self.seen.get(request_id, [])
        assert events[: len(seen)] == seen, "a token that a reader has seen was changed"
        self.seen[request_id] = events


def main() -> None:
    """Print an undisturbed run, then what happens after a mishap at each of its steps."""
    undisturbed = Pipeline().run({})
    results = sorted(undisturbed.bus.results)
    print(*undisturbed.steps, *results, sep="\n")
    for number, step in enumerate(undisturbed.steps):
        for mishap in ("kill", "pause"):
            pipeline = Pipeline().run({number: mishap})
            is_same = sorted(pipeline.bus.results) == results
            counts = ", ".join(f"{what}: {count}" for what, count in sorted(pipeline.counts.items()))
            print(f"{mishap} after {step}: {'same' if is_same else 'OTHER'} results; {counts or 'nothing else'}")


if __name__ == "__main__":
    main()
