"""Reply topics under load: `python -m sim.replies [--requests N] [--seed S]`.

Twenty producers, each a tenant of its own, ask for their results in topics of their own. One request in ten names a bad
one. Without kills, the good ones' p99 is measured in rounds with bad ones and without, in turns. Then workers are
killed at their steps and at any time, and all topics are read with `read_committed` consumers.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing, as_text
from penstock.bus.kafka.client import parse_headers, parse_key
from penstock.config.settings import BusSettings
from penstock.local.stack import WorkerSlot
from penstock.messages import Request, Result, Sampling, decode_message
from penstock.names import (
    CORRELATION_HEADER,
    REPLY_PARTITION_HEADER,
    REPLY_REFUSED_HEADER,
    REPLY_TO_HEADER,
    REPLY_TOPIC_HEADER,
    TENANT_HEADER,
    Pipeline,
)
from sim.chaos.faults import KillPlan, plan_kill
from sim.chaos.history import History
from sim.chaos.system import PIPELINE, ChaosStack, Servers
from sim.kafka_server import SHORT_TIMEOUTS
from sim.waiting import PATIENCE_S, wait_for

Kind = Literal["good", "missing", "another's", "ours", "partition", "small", "deleted"]
BAD: tuple[Kind, ...] = ("deleted", "missing", "another's", "ours", "partition", "small")
BAD_SHARE, GROUP, NUM_PRODUCERS, NUM_WORKERS = 10, 4, 20, 3
"""One request in ten is bad; so many bad ones in turn are of one kind, and have one topic if it is deleted: the first
may have their replies, and what workers know of the topic is old when the next ones come.
"""
PARTITIONS, SMALL_BYTES = 2, 600
NUM_IN_FLIGHT = 2
"""Requests that a producer waits for."""
DELETED_S = 2.0
"""A topic is deleted at most so long after the first request names it."""
SILENCE_S = 90.0
"""After so long without any result, on a quick machine, none is awaited any more."""
PROMPTS = ("In the beginning", "And God said", "The LORD is my shepherd")
OURS = Pipeline(PIPELINE)
REQUESTS = OURS.request_topic("interactive")
TENANTS = [f"tenant{number:02}" for number in range(NUM_PRODUCERS)]


def name_topic(tenant: str, name: str = "good") -> str:
    """Return the name of a topic of a tenant."""
    return f"{tenant}.replies.{name}"


SETTINGS = {
    "PENSTOCK_BUS_REPLY_TOPICS": ",".join(f"{tenant}={name_topic(tenant, '')}" for tenant in TENANTS),
    "PENSTOCK_WORKER_DRAIN_S": "2",
}


@dataclass(frozen=True)
class Asked:
    """A request, and where its producer wants the result."""

    id: str
    tenant: str
    kind: Kind
    topic: str
    partition: int | None
    """As Spring's template names it; None where the header is Penstock's."""
    correlation: bytes
    prompt: str

    @property
    def headers(self) -> dict[str, bytes]:
        """The headers of its message."""
        told = {TENANT_HEADER: self.tenant.encode(), CORRELATION_HEADER: self.correlation}
        if self.partition is None:
            return told | {REPLY_TO_HEADER: self.topic.encode()}
        return told | {
            REPLY_TOPIC_HEADER: self.topic.encode(),
            REPLY_PARTITION_HEADER: self.partition.to_bytes(4, "big"),
        }


def draw_requests(name: str, count: int, *, with_bad: bool) -> list[Asked]:
    """Return the requests of a round, whose ids begin with its name. Those that name one deleted topic come in turn."""
    drawn, units = random.Random(name), defaultdict[str, list[Asked]](list)
    for number in range(count):
        group, is_good = number // BAD_SHARE // GROUP, number % BAD_SHARE
        kind: Kind = "good" if is_good or not with_bad else BAD[group % len(BAD)]
        # Each has as many good ones, and all of them bad ones.
        tenant = TENANTS[(group if kind == "deleted" else number + number // NUM_PRODUCERS) % NUM_PRODUCERS]
        topic, partition = name_topic(tenant, kind), None
        if kind == "good":
            partition = drawn.choice([None, *range(PARTITIONS)])
        elif kind == "another's":
            topic = name_topic(drawn.choice([one for one in TENANTS if one != tenant]))
        elif kind == "ours":
            topic = drawn.choice([REQUESTS, OURS.results_topic, OURS.dead_letter_topic])
        elif kind == "partition":
            topic, partition = name_topic(tenant), PARTITIONS
        elif kind == "deleted":
            topic = name_topic(tenant, f"deleted.{name}.{group}")
        asked = Asked(f"{name}-{number}", tenant, kind, topic, partition, drawn.randbytes(16), drawn.choice(PROMPTS))
        units[topic if kind == "deleted" else asked.id].append(asked)
    mixed = list(units.values())
    drawn.shuffle(mixed)
    return [one for unit in mixed for one in unit]


@dataclass
class Producers:
    """The producers of all tenants, and a consumer that sees when their results come."""

    bootstrap: str
    seen: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    """When each result came where it belongs, and in which partition."""
    lock: threading.Condition = field(default_factory=threading.Condition)
    asked: dict[str, Asked] = field(default_factory=dict)
    begun_s: dict[str, float] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)
    """By tenant, for all rounds: the first message of each waits for half a second."""
    is_over: threading.Event = field(default_factory=threading.Event)

    def create_topics(self, topics: Mapping[str, Mapping[str, str]], partitions: int) -> None:
        """Create topics with settings, and wait until the broker tells of them."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        made = [NewTopic(name, partitions, 1, config=dict(config)) for name, config in topics.items()]
        for future in admin.create_topics(made).values() if made else ():
            future.result(PATIENCE_S)
        wait_for(lambda: topics.keys() <= admin.list_topics(timeout=PATIENCE_S).topics.keys(), "topics are there", 0.2)

    def read_all_topics(self) -> None:
        """Note what comes in the tenants' topics, and among all results, until it is over."""
        settings = {"bootstrap.servers": self.bootstrap, "group.id": "watch", "isolation.level": "read_committed",
                    "enable.auto.commit": False, "auto.offset.reset": "earliest"}  # fmt: skip
        with closing(Consumer(settings)) as consumer:
            topics = consumer.list_topics(timeout=PATIENCE_S).topics
            watched = [OURS.results_topic, *map(name_topic, TENANTS)]
            consumer.assign([TopicPartition(one, number, 0) for one in watched for number in topics[one].partitions])
            while not self.is_over.is_set():
                messages = [one for one in consumer.consume(100, 0.01) if one.error() is None]
                with self.lock:
                    for one in messages:
                        asked = self.asked.get(parse_key(one) or "")
                        awaited = OURS.results_topic if asked is None or asked.kind != "good" else asked.topic
                        refused = REPLY_REFUSED_HEADER in parse_headers(one)
                        if asked is not None and (one.topic() == awaited or refused):
                            self.seen.setdefault(asked.id, (time.monotonic(), one.partition()))
                    self.lock.notify_all()

    def _produce(self, asked: Sequence[Asked], due: dict[str, float]) -> None:
        """Produce requests in turn, so many under way at most, and say in `due` which topics are deleted, and when."""
        settings = {"bootstrap.servers": self.bootstrap, "enable.idempotence": True, "linger.ms": 0}
        producer = self.producers.setdefault(asked[0].tenant, Producer(settings))
        drawn, waiting = random.Random(asked[0].id), list[str]()

        def has_room() -> bool:
            waiting[:] = [one for one in waiting if one not in self.seen]
            return len(waiting) < NUM_IN_FLIGHT or self.is_over.is_set()

        for one in asked:
            with self.lock:
                self.lock.wait_for(has_room)
                self.asked[one.id] = one
                waiting.append(one.id)
            if one.kind == "deleted":
                due.setdefault(one.topic, time.monotonic() + drawn.uniform(0.0, DELETED_S))
            sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
            request = Request(id=one.id, tenant=one.tenant, prompt=one.prompt, sampling=sampling)
            self.begun_s[one.id] = time.monotonic()
            headers: list[tuple[str, str | bytes | None]] = list(one.headers.items())
            producer.produce(REQUESTS, request.encode(), one.id, headers=headers)
            producer.flush(PATIENCE_S)

    def run_round(self, stack: ChaosStack, asked: Sequence[Asked]) -> list[str]:
        """Produce requests, delete topics, and keep workers alive until all results came, or none for long.

        Return a fault for each result that did not come; then no round can follow.
        """
        self.create_topics({one.topic: {} for one in asked if one.kind == "deleted"}, 1)
        due, deleted, admin = dict[str, float](), set[str](), AdminClient({"bootstrap.servers": self.bootstrap})
        threads = [
            threading.Thread(target=self._produce, args=([one for one in asked if one.tenant == tenant], due))
            for tenant in {one.tenant for one in asked}
        ]
        for thread in threads:
            thread.start()
        num_seen, moved_s = 0, time.monotonic()
        while missing := [one.id for one in asked if one.id not in self.seen]:
            stack.restart_dead()
            now_s = time.monotonic()
            if late := [topic for topic, when_s in list(due.items()) if when_s < now_s and topic not in deleted]:
                admin.delete_topics(late)
                deleted.update(late)
            if len(self.seen) > num_seen:
                num_seen, moved_s = len(self.seen), time.monotonic()
            elif time.monotonic() > moved_s + SILENCE_S * stack.machine_slowness:
                with self.lock:
                    self.is_over.set()
                    self.lock.notify_all()
                break
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        return [f"{one} has no result" for one in missing]


@dataclass(frozen=True)
class Replied:
    """The outcome."""

    requests: int
    kills: int
    p99_s: dict[str, list[float]]
    """The good requests' p99 in rounds `with` bad ones and `without`."""
    outcomes: dict[str, int]
    """How often requests of each kind ended in their topics, or in which other way."""
    faults: list[str]


def read_reason(result: Outgoing) -> str:
    """Return why a result is in the topic of all, without what is different each time."""
    return result.headers[REPLY_REFUSED_HEADER].rpartition(": ")[2].strip("0123456789,; ")


def check_request(
    asked: Asked, copies: Sequence[Outgoing], replies: Sequence[Outgoing], came_in: int | None
) -> Iterator[str]:
    """Yield what is wrong with the messages for a request: among all results, and in topics of producers.

    `came_in` is the partition in which its result was seen first where it belongs.
    """
    if len(copies) != 1:
        yield f"{asked}: {len(copies)} results"
        return
    refused, sent = REPLY_REFUSED_HEADER in copies[0].headers, copies[0].headers.get(REPLY_TO_HEADER, "")
    for one in (*copies, *replies):
        if (
            one.headers.get(CORRELATION_HEADER) != as_text(asked.correlation)
            or one.headers[TENANT_HEADER] != asked.tenant
        ):
            yield f"{asked}: {one.topic} has it with the headers {one.headers}"
    # A reply in a topic that was deleted cannot be read any more.
    wanted = [] if refused or asked.kind == "deleted" else [asked.topic]
    if [one.topic for one in replies] != wanted:
        yield f"{asked}: replies in {[one.topic for one in replies]} instead of {wanted}"
    if not refused and (asked.kind not in ("good", "deleted") or sent != asked.topic):
        yield f"{asked}: its copy says that it went to {sent!r}"
    if replies and asked.partition not in (None, came_in):
        yield f"{asked}: its reply is in partition {came_in}"


def check_topics(producers: Producers, read: Mapping[str, Sequence[Outgoing]], counts: Counter[str]) -> Iterator[str]:
    """Yield what is wrong in the topics, with all their committed messages, and count how requests ended."""
    found, texts = defaultdict[str | None, list[Outgoing]](list), defaultdict[str, set[str]](set)
    produced = Counter(one.key for one in read[REQUESTS])
    yield from (f"{key}: {count} requests" for key, count in produced.items() if count != 1)
    for one in (one for topic in read.keys() - {REQUESTS} for one in read[topic]):
        found[one.key].append(one)
    for asked in producers.asked.values():
        messages = found.pop(asked.id, [])
        copies = [one for one in messages if one.topic == OURS.results_topic]
        replies = [one for one in messages if one.topic != OURS.results_topic]
        yield from check_request(asked, copies, replies, producers.seen.get(asked.id, (0.0, None))[1])
        for one in messages:
            is_whole = one in replies or REPLY_REFUSED_HEADER in one.headers
            result = decode_message(Result, one.value)
            if result.error is not None or bool(result.text) != is_whole or bool(result.token_ids) != is_whole:
                yield f"{asked}: {one.topic} has {result}"
            if is_whole:
                texts[asked.prompt].add(result.text)
        for one in copies:
            counts[f"{asked.kind}: {read_reason(one) if REPLY_REFUSED_HEADER in one.headers else 'replied'}"] += 1
    yield from (f"{prompt!r} has several answers: {given}" for prompt, given in texts.items() if len(given) > 1)
    yield from (
        f"{one.topic} has a message that nobody asked for, {key}" for key, more in found.items() for one in more
    )


def run_replies(directory: Path, seed: int, num_requests: int, num_rounds: int = 2) -> Replied:
    """Send so many requests while workers are killed, and in each of the rounds before, two at a time, a tenth."""
    directory.mkdir(parents=True, exist_ok=True)
    p99_s, faults, counts = defaultdict[str, list[float]](list), list[str](), Counter[str]()
    with ExitStack() as exits:
        history = exits.enter_context(History(directory / "history.jsonl"))
        servers = exits.enter_context(Servers(directory, "kafka", SHORT_TIMEOUTS))

        def plan(worker: WorkerSlot, life: int) -> KillPlan:
            return plan_kill(seed, "kafka", worker.stage, worker.name, life)

        stack = ChaosStack(directory / "stack", history, servers, plan, {"auto": NUM_WORKERS}, SETTINGS)
        stack.is_killing = False
        exits.enter_context(stack)
        producers = Producers(servers.bootstrap)
        producers.create_topics({name_topic(one): {} for one in TENANTS}, PARTITIONS)
        small = {"max.message.bytes": str(SMALL_BYTES)}
        producers.create_topics({name_topic(one, "small"): small for one in TENANTS}, 1)
        watcher = threading.Thread(target=producers.read_all_topics)
        watcher.start()
        exits.callback(watcher.join)
        exits.callback(producers.is_over.set)
        wait_for(lambda: stack.restart_dead() or all(map(stack.is_ready, stack.workers)), "workers are ready", 0.05)
        faults += producers.run_round(stack, draw_requests(f"warm{seed}", NUM_PRODUCERS, with_bad=False))
        for number in range(0 if faults else 2 * num_rounds):
            kind = ("without", "with")[number % 2]
            asked = draw_requests(f"{kind}{seed}.{number}", num_requests // 10, with_bad=kind == "with")
            faults += producers.run_round(stack, asked)
            good = [one.id for one in asked if one.kind == "good" and one.id in producers.seen]
            taken_s = sorted(producers.seen[one][0] - producers.begun_s[one] for one in good)
            if faults:
                break
            p99_s[kind].append(round(taken_s[math.ceil(0.99 * len(taken_s)) - 1], 3))
        faults += [f"a worker ended by itself: {line}" for line in stack.counts.crashes]
        stack.is_killing = True
        for worker in stack.workers:
            stack.kill_worker(worker)
        if not faults:
            faults += producers.run_round(stack, draw_requests(f"kills{seed}", num_requests, with_bad=True))
        stack.is_killing = False
        stack.stop_workers()
        bus = connect_bus(stack.addresses, BusSettings())
        topics = [REQUESTS, OURS.results_topic, OURS.dead_letter_topic]
        topics += [name_topic(tenant, name) for tenant in TENANTS for name in ("good", "small")]
        read = {topic: bus.read_all(topic) for topic in topics}
        bus.close()
        faults += check_topics(producers, read, counts)
        return Replied(
            len(producers.asked), stack.counts.kills.total(), dict(p99_s), dict(sorted(counts.items())), faults
        )


def main() -> None:
    """Print the outcome as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m sim.replies")
    for name, usual in {"requests": 10_000, "rounds": 4, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="penstock-replies-"))
    replied = run_replies(directory, given.seed, given.requests, given.rounds)
    sys.stdout.write(json.dumps({**vars(replied), "directory": str(directory)}) + "\n")


if __name__ == "__main__":
    main()
