"""One run: real workers under mishaps that follow from a seed, clients, and the judgement of what was seen."""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import re
import types
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import redis
from obstore.store import MemoryStore

from penstock import failpoints
from penstock.bus.contract import Outgoing, Publisher, as_text
from penstock.client.core import StreamReader, prepare_message
from penstock.config.settings import BusSettings, EndpointSettings, PictureSettings, RecordSettings, StaySettings
from penstock.decode_worker.role import DecodeRole
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.reply import open_connection
from penstock.endpoint_worker.role import EndpointRole
from penstock.errors import BusUnavailable, NameTaken, RequestTooLarge
from penstock.ingest.metering import add_sums, parse_day_sums
from penstock.ingest.openai.tokens import sum_usage
from penstock.messages import (
    MAX_TEXTS,
    ChatMessage,
    EndEvent,
    Request,
    Result,
    Sampling,
    TokenEvent,
    decode_message,
    encode_request,
    extract_request_id,
)
from penstock.names import (
    CANONICAL_FORM,
    CORRELATION_HEADER,
    DEADLINE_HEADER,
    FORM_HEADER,
    REASON_HEADER,
    REPLY_REFUSED_HEADER,
    REPLY_TO_HEADER,
    REPLY_TOPIC_HEADER,
    STAGES,
    VERSION_HEADER,
    Pipeline,
    WorkerKind,
    add_tenant,
    picture_key,
)
from penstock.objects import ObjectStorage
from penstock.ops.lag import LagWatch, PipelineLag
from penstock.pictures.store import FOLDER, PictureStore
from penstock.prefill_worker import backpressure
from penstock.prefill_worker.backpressure import DecodeBackpressure
from penstock.prefill_worker.role import PrefillRole
from penstock.prefill_worker.stay import StayPolicy
from penstock.prefill_worker.staying_role import StayingRole
from penstock.record import Claim
from penstock.testing.engine import (
    FormulaEngine,
    FormulaModel,
    SeeingModel,
    compute_vectors,
    list_tokens,
    load_tokenizer,
)
from penstock.testing.record import NEW
from penstock.worker import watch
from penstock.worker.failure import UNWRITABLE
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.loop import Reconnector, StopSignal
from penstock.worker.pictures import TaskPictures
from penstock.worker.task import Role
from penstock.worker.worker import Worker
from penstock.worker_speed import WorkerSpeed
from sim.chaos.checker import Entry, Finding, check_history, name_vectors
from sim.world.batches import BatchClient
from sim.world.endpoint import REFUSALS, REFUSED, SILENCE_S, EndpointServers, make_text
from sim.world.gateways import Gateways
from sim.world.http import HttpClient
from sim.world.kafka_client import LIBRARY
from sim.world.pictures import LossyBlocks, StorageAtOnce, draw_chat, draw_files, list_seen
from sim.world.runtime import EPOCH_S, Doubles, Process, World
from sim.world.servers import LEVELS, SIMULATED, KafkaServers, MemoryServers, Servers
from sim.world.ways import PRODUCERS, Place, Ways

REPLY_PREFIX = "replies."
REPLY_TOPICS = tuple(f"{REPLY_PREFIX}{number}" for number in range(4))
"""The topics that hold replies."""
OTHERS_TOPIC = "others.replies"
BAD_TOPICS = (f"{REPLY_PREFIX}missing", OTHERS_TOPIC, "penstock.world.requests.interactive", "__consumer_offsets")
"""Topics to which no reply may go."""
STAYING = "stays"
"""The tenant that has topics of its own."""
NOTICE_S = (1.0, 12.0)
"""How long a bus takes to notice that a member is dead."""
HEARTBEAT_S = 1.0
CALM_S = 1500.0
"""How long after the last mishap all requests must be answered."""
CUT_S = (1.0, 8.0, 40.0)
"""How long a cut lasts at most. The longest outlasts all time limits of Kafka's clients."""
PATIENCE_S = (5.0, 5.0, 60.0)
"""How long mishaps go on at most behind the last request: cuts last to their end in the longest, and take-overs have
mishaps too.
"""
IDLE_S = 5.0
"""How long an idle pipeline is watched."""
MAX_IDLE_TURNS_PER_S = 400.0
"""Of the threads of a process that waits for messages and renews what it holds; twice what was ever seen."""
DEADLINE_S = 1000.0
MISSED_S = (0.5, 20.0)
"""Between them are deadlines that may be missed."""
SMALL_LIMITS = {"MAX_QUEUED_S": 0.05, "MAX_QUEUED_MESSAGES": 1}
"""Limits of backpressure that so few requests reach."""
TOKEN_SECONDS = (None, 0.0005, 0.0005, 0.002, 0.1)
"""What a prompt token takes, as workers tell: slow ones leave requests on Redis Streams to faster ones for a while."""
LIES: Sequence[dict[str, Any]] = (
    {}, {}, {}, {"waiting_tokens": 0}, {"waiting_tokens": 10**9}, {"partitions": [0]}, {"partitions": [99]},
)  # fmt: skip
"""What heartbeats may tell in place of the truth about interactive requests, by which producers place them."""
LEAST_DELAY_S = 0.0005
"""What each call to a server takes on average, at least."""
NUM_SESSIONS = 3
MAX_TOKENS = 24
GATEWAY_ID = re.compile(r"cmpl-[0-9a-f]{32}")
HOSTILE = (
    b"", b"\x00", b"\xff\xfe{}", b"{", b"[]", b"5", b"null", b'{"id": 5}', b'{"v": 99, "id": "hostile"}',
    b"[" * 100_000,
    b'{"id": "hostile", "prompt": 5}', b'{"id": "hostile", "prompt": "\\ud800"}', b'{"id": "\\ud800", "prompt": "x"}',
    b'{"id": "hostile", "prompt": "x", "weight": 1e999}', b'{"id": "hostile", "token_ids": [1' + b"0" * 5000 + b"]}",
    b'{"id": "hostile", "token_ids": [-1]}', b'{"id": "hostile", "token_ids": [99999999]}',
    b'{"id": "hostile", "prompt": "x", "sampling": {"max_tokens": -1, "logit_bias": {"x": []}}}',
    b'{"id": "hostile", "job": "j", "request": null}', b'{"id": "hostile", "job": 5, "request": {}}',
)  # fmt: skip
POLL_S = 0.5
KILLED = 0.3
"""The share of the workers that are too many which are killed. The others are told to leave."""


POISON_ATTEMPTS = 12
"""After how many attempts a request is given up where some are poison: more than mishaps take from one that is not."""
POISON_S = 1000.0
"""How long those attempts may take, each ended by the watch, and the worker started again."""
HANGING = 0.3
"""The share of poison whose reading never ends."""


class InjectedError(Exception):
    """What no code expects."""


class CheckedWorker(Worker):
    """A worker that is checked after each turn of its loop."""

    _unwatched: Set[Claim] = frozenset()
    _begun: Mapping[Claim, str] = MappingProxyType({})
    """The claims of running requests, with the session that this worker had when they were seen first."""
    _over: Set[Claim] = frozenset()

    def run_once(self, *, accept: bool = True) -> bool:
        """Run a turn. Raise `AssertionError` for a claim without a request, a request without its claim, and one whose
        claim is of a session that is over.
        """
        has_done, before, over = super().run_once(accept=accept), self._unwatched, self._over
        self.check_integrity()
        # Of claims that were lost since this turn began the next one hears.
        running = {one.claim for one in self.running.values()}
        self._unwatched = running - self.session.claims
        assert not before & self._unwatched, "requests run on whose claims were lost"
        session = self.session.id
        self._begun = {claim: self._begun.get(claim, session) for claim in running}
        self._over = {claim for claim, begun in self._begun.items() if begun != session}
        assert not over & self._over, "requests run on whose session is over"
        return has_done


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
    gateways: float
    """The share of clients that ask gateways; the others are producers, and read the logs."""
    kill_s: float
    """The mean time until a process is killed wherever it is, between any two calls to a server; 0 if none is."""
    batches: float
    """The share of these clients that have a batch."""
    endpoint: float
    """The share of answers with which something is wrong, where endpoints answer; 0 where prefill and decode do."""
    bug: float
    """The chance that a call to a server raises what no code expects, on whichever thread it is made."""
    slow: float
    """The share of an engine's steps, and of prompts' readings, that take seconds."""
    wedge: float
    """The share of those that never end."""
    hostile_s: float
    """The mean time between messages that are no requests; 0 if there are none."""
    full_s: float
    """The mean time until Redis and Kafka are full for a while; 0 if they never are."""
    deadlines: float
    """The share of requests with a deadline. By the clock of Redis half of them cannot be missed."""
    away_s: float
    """The mean time until all workers die, and are away for minutes; 0 if they never do."""
    freeze_s: float
    """The mean time until a process is stopped for longer than its lease, wherever it is; 0 if none is."""
    autos: float
    """Who reads requests: 0 prefill workers, 1 workers that decode them too, between them both kinds."""
    poison: float
    """The share of requests whose reading kills their worker, or never ends, each time."""
    delete_s: float = 0.0
    """The mean time between deletions of messages, which may be unread, at levels that can; 0 if there are none."""
    forget_s: float = 0.0
    """The mean time until Redis forgets a request, or its last tokens; 0 if it forgets nothing."""
    attempts: float = 0.0
    """After how many attempts a request is given up; 0 where it never is."""
    gone_s: float = 0.0
    """The mean time until all decode workers die, and are away for minutes; 0 if they never do."""
    stays: float = 0.0
    """The share of requests on Kafka whose tenant has topics of its own."""
    resize_s: float = 0.0
    """The mean time until there are to be other workers, perhaps none; 0 if the same ones stay."""
    texts: float = 0.0
    """The share of producers' requests of which vectors are computed, where workers have a model."""
    pictures: float = 0.0
    """The share of producers' requests with pictures, where workers have a model."""
    kv_loss: float = 0.0
    """The chance that a block of such a prompt is gone when it is asked for."""
    wipe_s: float = 0.0
    """The mean time until all of these blocks are gone, or the files of pictures; 0 if they never are."""
    region_s: float = 0.0
    """The mean time until a region dies, is stopped or cut off."""
    copy_s: float = 0.0
    """The mean time by which copies of a region are late."""
    task_s: float = 0.0
    """The mean time until the copying task dies, and is away for a while; 0 if it never does."""
    replies: float = 0.0
    """The share of producers' requests whose results are wanted in reply topics, good ones and bad ones."""
    closing_s: float = 0.0
    """The mean time until a reply topic takes no more, or takes replies again; 0 if nothing changes."""

    @classmethod
    def draw(cls, chance: random.Random) -> "Rates":
        """Draw the rates of a run: each mishap is left out in some."""

        def maybe(most: float) -> float:
            return 0.0 if chance.random() < 0.4 else most * chance.random() ** 2

        return cls(
            crash=maybe(0.01), stall=maybe(0.01), loss=maybe(0.1), delay_s=LEAST_DELAY_S + maybe(0.05),
            cut_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0, clocks_s=maybe(2 * DEADLINE_S),
            pause_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0,
            double=maybe(0.4), cancel=maybe(0.3), leave_s=chance.uniform(3.0, 30.0) if chance.random() < 0.4 else 0.0,
            rebalance_s=chance.uniform(1.0, 30.0) if chance.random() < 0.4 else 0.0,
            gateways=chance.random() if chance.random() < 0.4 else 0.0, kill_s=chance.choice([0.0, 2.0, 10.0]),
            batches=maybe(0.6), away_s=chance.uniform(2.0, 10.0) if chance.random() < 0.35 else 0.0,
            bug=maybe(0.01), slow=maybe(0.2), wedge=0.01 if chance.random() < 0.2 else 0.0,
            hostile_s=chance.uniform(0.2, 5.0) if chance.random() < 0.3 else 0.0, deadlines=maybe(0.5),
            full_s=chance.uniform(3.0, 30.0) if chance.random() < 0.2 else 0.0,
            endpoint=chance.uniform(0.05, 0.7) if chance.random() < 0.2 else 0.0,
            freeze_s=chance.uniform(2.0, 20.0) if chance.random() < 0.4 else 0.0,
            autos=chance.choice([0.0, 0.0, 0.5, 0.5, 1.0]),
            delete_s=chance.uniform(1.0, 10.0) if chance.random() < 0.3 else 0.0,
            forget_s=chance.uniform(0.2, 5.0) if chance.random() < 0.3 else 0.0,
            poison=(poison := 0.05 if chance.random() < 0.2 else 0.0), attempts=POISON_ATTEMPTS if poison else 0,
            texts=maybe(0.6), pictures=maybe(0.6), kv_loss=maybe(0.03),
            wipe_s=chance.uniform(1.0, 20.0) if chance.random() < 0.4 else 0.0,
            replies=maybe(0.8), closing_s=chance.uniform(0.5, 10.0) if chance.random() < 0.4 else 0.0,
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


@dataclass(frozen=True)
class Verdict:
    """What a run came to."""

    findings: list[Finding]
    requests: int
    kills: int
    starts_and_stops: int
    """How many workers were started, or told to leave or killed, because there were to be other ones."""
    virtual_s: float
    history: list[Entry]


class Scene:
    """A pipeline of the world."""

    told: Mapping[str, Any] = MappingProxyType({})
    """What all workers' heartbeats tell beside the model."""
    has_reply_topics = False

    def __init__(self, plan: Plan) -> None:
        self.plan, self.seed, self.rates = plan, plan.seed, plan.rates
        if plan.level != "fast":  # gateways and endpoints are at no other level
            self.rates = replace(self.rates, gateways=0.0, endpoint=0.0)
        self.world = World(plan.seed)
        self.doubles = Doubles(self.world)
        self.chance = random.Random(f"{plan.seed}/mishaps")
        self.pipeline = Pipeline("world")
        self.history: list[Entry] = []
        self.num_kills = self.num_starts_and_stops = 0
        self.absent: set[Place] = set()
        """Places of workers in which none is to run."""
        self.restarting: set[Place] = set()
        """Places in which a process will be started."""
        self.numbers = itertools.count()
        self.clients: list[HttpClient] = []
        self.publishers: dict[str, Publisher] = {}
        self.accepted: set[str] = set()
        self.failures: list[str] = []
        self.hurt: set[str] = set()
        """The requests that ended with an error which an injected exception explains."""
        self.poison: set[str] = set()
        """The requests whose reading kills their worker, or never ends."""
        self.num_clients_left = 0
        self.deleted: set[str] = set()
        """The requests whose messages were deleted: those that no worker has are lost."""
        self.served: set[str] = set()
        """The requests whose clients have all that they want."""
        self.blocks = LossyBlocks(random.Random(f"{plan.seed}/kv"), self.rates.kv_loss)
        """KV of prompts with pictures."""
        self.picture_settings = PictureSettings(redis_max_kb=random.Random(f"{plan.seed}/files").choice([0, 64, 64]))
        """With 0 their files are in the object store."""
        self.files = StorageAtOnce(MemoryStore())
        self.replies: dict[str, dict[str, str]] = {}
        """The headers by which requests want their results elsewhere."""
        self.seeing: set[str] = set()
        """The requests with pictures, whose files may be lost."""

    def run(self) -> Verdict:
        """Run the scene to its end, and judge it."""
        load_tokenizer()
        with contextlib.ExitStack() as stack:
            self._start_servers(stack)
            stack.enter_context(mock.patch.object(watch, "os", types.SimpleNamespace(_exit=self._exit_process)))
            for limit, value in SMALL_LIMITS.items():
                stack.enter_context(mock.patch.object(backpressure, limit, value))
            stack.enter_context(_quiet_logs())
            stack.callback(failpoints.disarm)
            return self._run()

    def _start_servers(self, stack: contextlib.ExitStack) -> None:
        """Start the servers, and let the product use them until the stack is closed."""
        self.ways = Ways(self.world, self.chance, self.rates.loss, self.rates.delay_s)
        self.ways.pass_point = self._pass_call
        servers = LEVELS[self.plan.level](self.world, self.pipeline, self.ways)
        self.servers: Servers = servers
        self.memory: MemoryServers | None = servers if self.plan.level == "fast" else None
        stack.enter_context(self.doubles.install(SIMULATED, self.servers.list_doubles()))
        stack.enter_context(self.doubles.install_server_clock("fakeredis."))
        self.servers.start()
        if self.rates.stays and isinstance(servers, KafkaServers):
            servers.create_own_topics(STAYING)
        self.has_reply_topics = bool(self.rates.replies)
        if self.has_reply_topics:
            self.servers.create_reply_topics([*REPLY_TOPICS, OTHERS_TOPIC])
        self.gateways: Gateways | None = None
        if self.memory is not None:
            self.gateways = Gateways(self.memory, self._note_failure, self._start_again)
            self.endpoints = EndpointServers(self.world, self.chance, self.rates.endpoint)
            others = [*self.gateways.list_doubles(), (open_connection, self.endpoints.open_connection)]
            stack.enter_context(self.doubles.install(SIMULATED, others))
            stack.enter_context(mock.patch.object(ObjectStorage, "open", self.memory.open_objects))

    def _add_places(self, chance: random.Random) -> None:
        """Add the processes to `places`."""
        readers: dict[float, Sequence[WorkerKind]] = {0.0: STAGES, 1.0: ("auto",)}
        kinds = ("endpoint",) if self.rates.endpoint else readers.get(self.rates.autos, ("auto", *STAGES))
        self.places += [
            Place(f"{stage}-{number}", self._start_worker, stage)
            for stage in kinds
            for number in range(chance.randint(1, 3))
        ]
        if self.gateways is not None and self.rates.gateways and not self.rates.endpoint:
            self.places += [self.gateways.add_place(f"gateway-{number}") for number in range(chance.randint(1, 2))]

    def _run(self) -> Verdict:
        for point in failpoints.POINTS:
            failpoints.arm_action(point, partial(self._pass_failpoint, point))
        chance = random.Random(f"{self.seed}/size")
        self.places = self.ways.places
        self._add_places(chance)
        self.num_clients_left = len(self.plan.clients)
        for number in self.plan.clients:
            self.world.start_thread(self.world.outside, f"client-{number}", partial(self._run_client, number))
        for place in self.places:
            place.start(place)
            self._repeat_mishap(self.rates.leave_s, partial(self._stop, place))
            self._repeat_mishap(self.rates.cut_s, partial(self._cut_way, place))
            self._repeat_mishap(self.rates.kill_s, partial(self._kill, place, "anywhere"))
            self._repeat_mishap(self.rates.freeze_s, partial(self._freeze, place))
            if place.stage is not None:
                self._repeat_mishap(self.rates.rebalance_s, partial(self.servers.rebalance, place.stage, place.name))
        self._start_mishaps()
        end_of_mishaps_s = self.plan.span_s + chance.choice(PATIENCE_S)
        self.world.run(lambda: self.num_clients_left == 0, end_of_mishaps_s)
        self._end_mishaps()
        is_over = self.world.run(self._is_all_answered, CALM_S + POISON_S * len(self.poison))
        if is_over:
            is_over = self.world.run(self._is_all_settled, CALM_S)
        if not is_over:
            self._note_what_is_left()
        elif not self.failures:
            self._watch_idle()
        self._record_topics()
        self._record_logs()
        findings = self._judge()
        failures = self.failures + self.servers.list_breaches()
        findings += [Finding("failed", "", text) for text in failures]
        counts = (len(self.accepted), self.num_kills, self.num_starts_and_stops)
        return Verdict(findings, *counts, self.world.now_s, self.history)

    def _start_mishaps(self) -> None:
        """Let all that happens to the servers, and to many processes at once, happen again and again."""
        self._repeat_mishap(self.rates.pause_s, self._pause_server)
        self._repeat_mishap(self.rates.hostile_s, self._publish_hostile)
        self._repeat_mishap(self.rates.full_s, self._fill_redis)
        self._repeat_mishap(self.rates.forget_s, self._forget_request)
        self._repeat_mishap(self.rates.wipe_s, self._wipe)
        if self.has_reply_topics:
            self._repeat_mishap(
                self.rates.closing_s, lambda: self.servers.close_or_open(self.chance.choice(REPLY_TOPICS))
            )
        self._repeat_mishap(self.rates.away_s, partial(self._kill_workers, {*STAGES, "auto", "endpoint"}))
        self._repeat_mishap(self.rates.gone_s, partial(self._kill_workers, {"decode"}))
        self._repeat_mishap(self.rates.delete_s, self._delete_messages)
        self._repeat_mishap(self.rates.resize_s, self._resize)

    def _end_mishaps(self) -> None:
        self.ways.is_calm = True
        self._let_run(self.places)

    def _judge(self) -> list[Finding]:
        """Return which promises the history breaks."""
        findings = check_history(self.history)
        # A message that is no job has no name but its text: written twice, it is answered twice.
        findings = [one for one in findings if not (one.kind == "duplicated" and one.id.startswith("hostile"))]
        # What no code expects may end the request that it is about, also when its end is in the log already.
        findings = [one for one in findings if one.id not in self.hurt or "internal_error" not in one.description]
        gone = self._find_gone_pictures()
        findings = [one for one in findings if one.id not in gone or "picture_gone" not in one.description]
        lost = {one.id for one in findings if one.kind == "lost" and one.id in self.deleted}
        findings = [one for one in findings if one.id not in lost]
        # Who is killed in the moment after they were told in its log counts them nowhere.
        if not self.num_kills and len(lost) > self.servers.count_lost():
            self.failures.append(f"deleted, and not told: {sorted(lost)}")
        return findings

    def _find_gone_pictures(self) -> set[str]:
        """Return the requests that ended with `picture_gone` behind a loss of files that they needed."""
        sent, gone, last = dict[str, float](), set[str](), -1.0
        for one in self.history:
            if one["what"] == "submitted":
                sent[one["id"]] = one["at"]
            elif one["what"] == "wiped" and "files" in one["lost"]:
                last = one["at"]
            elif one["what"] == "end" and one["error"] == "picture_gone" and last >= sent.get(one["id"], math.inf):
                gone.add(one["id"])
        return gone

    def _note(self, entry: Entry) -> None:
        """Add to the history what happens now."""
        self.history.append({"at": round(self.world.now_s, 4), **entry})

    # Workers.

    def _start_worker(self, place: Place) -> None:
        ahead_s = self.chance.uniform(-1, 1) * self.rates.clocks_s
        process = Process(place.name, clock_ahead_s=ahead_s, on_failure=self._note_failure)
        place.process = process
        self.world.start_thread(process, "main", lambda: self._run_worker(place, process))

    def _run_worker(self, place: Place, process: Process) -> None:
        assert place.stage is not None
        kind, chance = place.stage, random.Random(self.chance.random())
        settings, name = RecordSettings(max_attempts=int(self.rates.attempts) or 1000), place.name
        beat = Heartbeat(self.servers.find_addresses(name).stream_url, self.pipeline, kind, name, HEARTBEAT_S)
        role, job_role = self._make_roles(kind, name, settings, chance, beat)
        if isinstance(role, PrefillRole):
            role.prompt_reader.tokenize_prompt = partial(  # type: ignore[method-assign]
                self._tokenize, place, role.prompt_reader.tokenize_prompt
            )
        lie: dict[str, Any] = random.Random(f"{self.seed}/{name}/lie").choice(LIES)
        stop = StopSignal()
        place.stop = stop.set
        if place in self.absent:
            stop.set()

        def make_worker() -> Worker:
            member = self.servers.join_group(kind, name)
            try:
                record = self.servers.open_record(name, settings)
                worker = CheckedWorker(role, self.pipeline, name, record, member, beat=beat, job_role=job_role)
            except BaseException:
                member.close()
                raise

            def report_status() -> dict[str, object]:
                self._raise_sometimes()
                load: dict[str, Any] = worker.report_load()
                load["interactive"] |= lie
                return {"load": load}

            beat.set_load_source(report_status)
            return worker

        # The process ends where the name is taken, or Redis goes away meanwhile, and is started again.
        with contextlib.suppress(NameTaken, redis.RedisError):
            beat.take_name()
            with beat:
                beat.update_status(model=role.model_name, **self.told)
                Reconnector(make_worker, lambda: self.servers.ask(name), beat).run_until_stopped(stop, 2.0)
        self._note({"what": "left", "worker": name})
        self._start_again(place)
        self.world.kill(process)

    def _make_roles(
        self, kind: WorkerKind, name: str, settings: RecordSettings, chance: random.Random, beat: Heartbeat
    ) -> tuple[Any, Role | None]:
        """Return a worker's role, and that for jobs where it reads both."""
        if kind == "endpoint":
            endpoints = Endpoints(parse_urls("http://one:1,http://other:1", 8))
            asked = EndpointSettings(model="formula", silence_s=SILENCE_S)
            return EndpointRole(self.pipeline, "formula", EndpointEngine(endpoints, asked, settings)), None
        model = FormulaModel() if kind == "decode" else SeeingModel()
        engine: Any = FormulaEngine(
            chance, self._delay_step, model, num_blocks=chance.choice([2, 1000]), blocks=self.blocks
        )
        token_s = random.Random(f"{self.seed}/{name}/speed").choice(TOKEN_SECONDS)
        engine.speed = None if token_s is None else WorkerSpeed(token_s, token_s, 0)
        if kind == "decode":
            return DecodeRole(self.pipeline, engine), None
        if kind == "auto":
            limits = StaySettings(max_prompt_tokens=chance.choice([20, 512]))
            stays = StayPolicy(limits, lambda: beat.kinds_decoding)
            staying = StayingRole(self.pipeline, engine, stays, worker=name)
            job_role = DecodeRole(self.pipeline, engine)
            staying.pictures = job_role.pictures = self._open_pictures(name, engine, settings)
            return staying, job_role
        role = PrefillRole(self.pipeline, engine)
        role.pictures = self._open_pictures(name, engine, settings)
        if self.memory is None:
            return role, None
        watch = LagWatch(self.servers.find_addresses(name), BusSettings())

        def read_lag() -> PipelineLag:
            self._raise_sometimes()
            return watch.read_latest()

        role.backpressure = DecodeBackpressure(read_lag).__enter__()
        return role, None

    def _open_pictures(self, name: str, engine: FormulaEngine, settings: RecordSettings) -> TaskPictures:
        """Return what reads pictures for a worker."""
        reader = engine.model.picture_reader
        assert reader is not None, "only who sees reads pictures"
        return TaskPictures(engine, reader, self._open_files(name, settings), self.picture_settings)

    def _open_files(self, who: str, settings: RecordSettings) -> PictureStore:
        """Return somebody's way to the files of pictures."""
        return PictureStore(self.servers.find_addresses(who), self._find_objects(who), self.picture_settings, settings)

    def _find_objects(self, who: str) -> ObjectStorage:
        """Return the object store that somebody uses."""
        return self.files

    def _tokenize(self, place: Place, read: Callable[..., list[int]], request: Request, **how: Any) -> list[int]:
        """Tokenize a prompt, which may take long, and kills the worker or never ends where it is poison."""
        drawn = self._draw_poison(request.id)
        if request.id in self.poison:
            self._note({"what": "poison", "id": request.id, "worker": place.name})
            if drawn < self.rates.poison * HANGING:
                self.world.sleep(1e9)
            self._kill(place, "poison")
            self.world.yield_turn()
        self._delay_step()
        return read(request, **how)

    def _draw_poison(self, request_id: str) -> float:
        return random.Random(f"{self.seed}/poison/{request_id}").random()

    def _raise_sometimes(self) -> None:
        """Raise what no code expects, where threads of their own collect figures."""
        if not self.ways.is_calm and self.chance.random() < 20 * self.rates.bug:
            raise InjectedError

    def is_injected(self, message: str) -> bool:
        """Return whether the message of an error says what an injected exception came to."""
        is_unwritable = message.startswith(UNWRITABLE) and any(one["what"] == "bug" for one in self.history)
        return is_unwritable or message.startswith(f"{InjectedError.__name__}: ")

    def _note_error(self, request_id: str, message: str) -> None:
        if self.is_injected(message):
            self.hurt.add(request_id)

    def _note_failure(self, process: Process, error: BaseException) -> None:
        """A thread ends by an exception, which is a defect unless it was injected; with its main thread a process."""
        if not isinstance(error, InjectedError):
            self.failures.append(f"{process.name}: {type(error).__name__}: {error}")
        if self.world.current is not None and self.world.current.name == "main":
            self._kill(self._find_place(process), repr(error))

    def _pass_failpoint(self, point: str) -> None:
        thread = self.world.current
        if thread is None or thread.process is self.world.outside:
            return
        if not self.ways.is_calm:
            drawn = self.chance.random()
            if drawn < self.rates.crash:
                self._kill(self._find_place(thread.process), point)
            elif drawn < self.rates.crash + self.rates.stall:
                self._stall(thread.process, point)
        self.world.yield_turn()

    def _pass_call(self) -> None:
        thread = self.world.current
        assert thread is not None
        if self.ways.is_calm or not thread.process.is_alive:
            return
        drawn, place = self.chance.random(), self._find_place(thread.process)
        may_raise = place.stage is not None and not thread.name.startswith(LIBRARY)
        if drawn < self.rates.crash / 4:
            self._kill(place, "a call")
        elif drawn < self.rates.crash / 4 + self.rates.bug and may_raise:
            self._note({"what": "bug", "worker": place.name, "thread": thread.name})
            raise InjectedError

    def _delay_step(self) -> None:
        """Let a step of an engine, or the reading of a prompt, take long."""
        drawn = 1.0 if self.ways.is_calm else self.chance.random()
        if drawn < self.rates.wedge:
            self._note({"what": "a step or a reading that never ends"})
            self.world.sleep(1e9)
        elif drawn < self.rates.wedge + self.rates.slow:
            self.world.sleep(self.chance.uniform(1.0, 10.0))

    def _stall(self, process: Process, point: str) -> None:
        """Let one thread stand still, or all of a process."""
        seconds, is_whole = self.chance.uniform(0.1, 20.0), self.chance.random() < 0.5
        self._note({"what": "stalled", "worker": process.name, "point": point, "whole": is_whole})
        if is_whole:
            process.stands_until_s = self.world.now_s + seconds
        self.world.sleep(seconds)

    def _find_place(self, process: Process) -> Place:
        return next(place for place in self.places if place.process is process)

    def _exit_process(self, code: int) -> None:
        """What `os._exit` does."""
        assert self.world.current is not None
        self._kill(self._find_place(self.world.current.process), f"exit {code}")

    def _kill(self, place: Place, point: str, after_s: float | None = None) -> None:
        """Kill a process; another one takes its place, and the bus notices later that it is dead."""
        process = place.process
        if process is None or not process.is_alive:
            return
        self.num_kills += 1
        self._note({"what": "kill", "worker": place.name, "point": point})
        if place.stage is not None:
            self._let_bus_notice(self.servers.note_death(place.stage, place.name))
        if self.gateways is not None:
            self.gateways.note_killed(place)
        self._start_again(place, after_s)
        self.world.kill(process)

    def _let_bus_notice(self, act: Callable[[], None]) -> None:
        def notice() -> None:
            self.world.sleep(self.chance.uniform(*NOTICE_S))
            act()

        self.world.start_thread(self.world.outside, "notice", notice)

    def _freeze(self, place: Place) -> None:
        if place.process is not None:
            place.process.stands_until_s = self.world.now_s + self.chance.uniform(0.5, 6.0)

    def _start_again(self, place: Place, after_s: float | None = None) -> None:
        """Start another process in the place of one that has ended, after a while, if there is to be one then."""
        self.restarting.add(place)

        def restart() -> None:
            self.world.sleep(self.chance.choice([0.1, 1.0, 15.0]) if after_s is None else after_s)
            self.restarting.discard(place)
            if place not in self.absent:
                place.start(place)

        self.world.start_thread(self.world.outside, "restart", restart)

    def _repeat_mishap(self, mean_s: float, do_mishap: Callable[[], object]) -> None:
        """Let a mishap happen again and again until there are to be none, `mean_s` apart; never where that is 0."""

        def repeat() -> None:
            while True:
                self.world.sleep(self.chance.expovariate(1 / mean_s))
                if self.ways.is_calm:
                    return
                do_mishap()

        if mean_s:
            self.world.start_thread(self.world.outside, "mishaps", repeat)

    def _stop(self, place: Place) -> None:
        place.stop()

    def _resize(self) -> None:
        """Let some workers run that are drawn, perhaps none or all, and no others."""
        workers = [place for place in self.places if place.stage]
        number = self.chance.choice([0, len(workers), self.chance.randint(0, len(workers))])
        self._let_run(self.chance.sample(workers, number))

    def _let_run(self, wanted: Sequence[Place]) -> None:
        """Start those of these workers that do not run, and let all others leave, or kill them."""
        for place in self.places:
            if place.stage is None or (place in wanted) != (place in self.absent):
                continue
            self.num_starts_and_stops += 1
            self._note({"what": "resized", "worker": place.name, "runs": place in wanted})
            if place in wanted:
                self.absent.discard(place)
                is_alive = place.process is not None and place.process.is_alive
                if not is_alive and place not in self.restarting:  # one that still leaves is followed by another
                    self._start_again(place, 0.1)
                continue
            self.absent.add(place)
            if self.chance.random() < KILLED:
                self._kill(place, "too many")
            else:
                self._stop(place)

    def _kill_workers(self, kinds: Set[WorkerKind]) -> None:
        """Kill all workers of some kinds, as a power cut does: it takes minutes until they have their model again."""
        after_s = self.chance.uniform(60.0, 200.0)
        for place in self.places:
            if place.stage in kinds:
                self._kill(place, "all workers", after_s)
        self.world.start_thread(self.world.outside, "forget", partial(self._forget_later, after_s - 10.0))

    def _forget_later(self, after_s: float) -> None:
        """Let servers forget what they do not keep for long, while no worker is there."""
        self.world.sleep(after_s)
        if not any(place.process is not None and place.process.is_alive for place in self.places if place.stage):
            results = self.servers.bus.read_all(self.pipeline.results_topic)
            self.servers.forget(self.served & {extract_request_id(one.value, None) or "" for one in results})

    def _delete_messages(self) -> None:
        self.deleted |= set(self.servers.delete_messages(self.chance))

    def _publish_hostile(self) -> None:
        kinds = {place.stage for place in self.places} - {None}
        topics = sorted(topic for kind in kinds if kind for topic in self.pipeline.input_topics(kind).values())
        name = f"hostile-{next(self.numbers)}"
        value = self.chance.choice(HOSTILE).replace(b"hostile", name.encode())
        topic, key = self.chance.choice(topics), self.chance.choice([None, name])
        headers = self.chance.choice(
            [{}, {VERSION_HEADER: "99"}, {FORM_HEADER: CANONICAL_FORM, DEADLINE_HEADER: "nan"}]
        )
        publisher = self.servers.open_publisher("hostile")
        with contextlib.suppress(BusUnavailable, RequestTooLarge), contextlib.closing(publisher):
            publisher.publish([Outgoing(topic, value, key, dict(headers))])

    def _wipe(self) -> None:
        """Let a server lose the KV of prompts with pictures, or the files of these, or both."""
        lost = self.chance.choice([{"kv"}, {"files"}, {"kv", "files"}])
        if "kv" in lost:
            self.blocks.clear()
        if "files" in lost:
            for digest in draw_files():
                self.servers.delete_keys(picture_key(digest))
                asyncio.run(self.files.delete(f"{FOLDER}/{digest}"))
        self._note({"what": "wiped", "lost": sorted(lost)})

    def _fill_redis(self) -> None:
        self.ways.full_until_s = self.world.now_s + self.chance.uniform(0.1, self.chance.choice(CUT_S))

    def _forget_request(self) -> None:
        """Let Redis forget a request, or its last tokens, as after a failover. Its readers see the same again."""
        # So it cannot end with an error, and no endpoint answers it, in other pieces.
        if self.memory is None or self.rates.endpoint or self.rates.bug:
            return
        told = [one for one in self.history if one["what"] == "submitted" and not one["may"]]
        sure = [one["id"] for one in told if not (self.rates.wipe_s and one["id"] in self.seeing)]
        found = [(name, rec) for name in sure if (rec := self.memory.records.find(name)) and rec.tokens and not rec.end]
        for name, rec in self.chance.sample(found, min(1, len(found))):
            left = rec._replace(tokens=rec.tokens[: self.chance.randrange(len(rec.tokens))])
            self.memory.records.put(name, self.chance.choice([left, NEW]))
            self._note({"what": "forgotten", "id": name})

    def _pause_server(self) -> None:
        self.ways.pauses[self.chance.choice(list(self.ways.pauses))] = self.world.now_s + self.chance.uniform(0.1, 15.0)

    def _cut_way(self, place: Place) -> None:
        most_s = self.chance.choice(CUT_S)
        place.cuts[self.chance.choice(["redis", "bus"])] = self.world.now_s + self.chance.uniform(0.1, most_s)

    # Clients.

    def _make_request(self, number: int, chance: random.Random) -> Request:
        prompt = [300 + chance.randrange(600) for _ in range(chance.choice([1, 5, 16, 40, 200, 2500]))]
        sampling = Sampling(max_tokens=chance.choice([1, 2, 8, MAX_TOKENS]), temperature=0.0, ignore_eos=True)
        priority_class: Any = chance.choice(["interactive", "interactive", "batch"])
        is_urgent = chance.random() < self.rates.deadlines and not self.rates.away_s
        limit_s = chance.choice([DEADLINE_S, chance.uniform(*MISSED_S)])
        deadline = EPOCH_S + self.world.now_s + limit_s if is_urgent else None
        session = f"session-{number % NUM_SESSIONS}" if number % 2 else None
        return Request(
            id=f"r{number}",
            token_ids=prompt,
            sampling=sampling,
            priority_class=priority_class,
            deadline=deadline,
            session=session,
        )

    def _run_client(self, number: int) -> None:
        chance = random.Random(f"{self.seed}/client/{number}")
        self.world.sleep(chance.uniform(0.0, self.plan.span_s))
        request = self._make_request(number, chance)
        may = ["cancelled"] if chance.random() < self.rates.cancel else []
        is_late = request.deadline is not None and request.deadline < EPOCH_S + self.world.now_s + DEADLINE_S
        late = ["deadline_exceeded"] if is_late else []
        if self.rates.endpoint:
            self._produce(*self._make_question(number, request, may + late, chance), chance)
        elif self.gateways is not None and chance.random() < self.rates.gateways:
            http = HttpClient(
                self.world, self.gateways, chance, self._note, self._note_submitted, self._note_accepted,
                self.failures.append, self.is_injected,
            )  # fmt: skip
            self.clients.append(http)
            if chance.random() < self.rates.batches:
                BatchClient(http, request).run()
            else:
                http.ask(request, may, request.id if chance.random() < 0.8 else None)
        else:
            self._produce(self._show_pictures(self._ask_for_vectors(request)), may + late, chance)
        self.num_clients_left -= 1

    def _ask_for_vectors(self, request: Request) -> Request:
        """Return a request as it is, or one that has texts of as many tokens in place of its prompt."""
        chance, ids = random.Random(f"{self.seed}/texts/{request.id}"), list(request.token_ids or [])
        if chance.random() >= self.rates.texts:
            return request
        size = chance.choice([1, 7, 100, len(ids)])
        texts = [load_tokenizer().decode(ids[start : start + size]) for start in range(0, len(ids), size)][:MAX_TEXTS]
        texts = [f"a{text}".replace("\0", "") for text in texts]  # no text is empty
        return request.model_copy(update={"token_ids": None, "texts": texts, "sampling": Sampling()})

    def _show_pictures(self, request: Request) -> Request:
        """Return a request as it is, or one with pictures in place of its prompt."""
        chance = random.Random(f"{self.seed}/pictures/{request.id}")
        if request.texts is not None or chance.random() >= self.rates.pictures:
            return request
        self.seeing.add(request.id)
        return request.model_copy(update={"token_ids": None, "messages": draw_chat(chance)})

    def _name_client(self, request: Request) -> str:
        """Return the name by which the client of a request asks servers."""
        return "client"

    def _store_pictures(self, request: Request) -> None:
        """Store the pictures of a request that are not in its message."""
        who = self._name_client(request)
        digests = {one.digest for one in request.pictures if one.data is None}
        while digests:
            store = self._open_files(who, RecordSettings())
            with contextlib.suppress(BusUnavailable), contextlib.closing(store):
                for digest in sorted(digests):
                    store.put(draw_files()[digest])
                return
            self.world.sleep(POLL_S)

    def _make_question(
        self, number: int, request: Request, may: list[str], chance: random.Random
    ) -> tuple[Request, list[str]]:
        """Return a request for endpoints, and the errors that may end it."""
        kind = chance.choice([*REFUSED, *["count"] * 8, *["call"] * 4])
        word = f"refuse {REFUSALS[number % len(REFUSALS)]}" if kind == "refuse" else kind
        prompt = f"{word} {1000 if kind == 'break' else chance.choice([1, 5, 30])}|"
        sampling = request.sampling.model_copy(update={"max_tokens": 200, "tell_stop": True})
        asked: dict[str, Any] = {"token_ids": None, "prompt": prompt, "sampling": sampling}
        if kind == "call":
            asked |= {"prompt": None, "messages": [ChatMessage(role="user", content=prompt)]}
            asked["chat_template_kwargs"] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
            asked["sampling"] = sampling.model_copy(update={"special_text": True})
        made = request.model_copy(update=asked)
        return made, [*may, REFUSED.get(kind, "model_error"), *(["model_error"] if kind == "refuse" else [])]

    def _note_submitted(self, request: Request, may: list[str]) -> None:
        prompt = request.messages[0].text if request.messages else request.prompt
        if prompt is not None and not request.pictures:
            text = "" if prompt.split()[0] in REFUSED else make_text(prompt)
            self._note(
                {"what": "submitted", "id": request.id, "tokens": [], "text": text, "calls": [], "finish": "stop",
                 "may": may}
            )  # fmt: skip
            return
        if request.texts is not None:
            text = name_vectors(compute_vectors(request.texts))
            self._note(
                {"what": "submitted", "id": request.id, "tokens": [], "text": text, "calls": [], "finish": "stop",
                 "may": may}
            )  # fmt: skip
            return
        seen = list_seen(request) if request.pictures else request.token_ids or []
        tokens = list_tokens(seen, request.seed, request.sampling.max_tokens)
        text = load_tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._note(
            {"what": "submitted", "id": request.id, "tokens": tokens, "text": text, "calls": [], "finish": "length",
             "may": may}
        )  # fmt: skip

    def _note_accepted(self, request_id: str) -> None:
        self.accepted.add(request_id)
        self._note({"what": "accepted", "id": request_id})

    def _produce(self, request: Request, may: list[str], chance: random.Random) -> None:
        if self._draw_poison(request.id) < self.rates.poison:
            self.poison.add(request.id)
            may = [*may, "attempts_exhausted"]
        self._note_submitted(request, may)
        self._store_pictures(request)
        for _ in range(2 if chance.random() < self.rates.double else 1):
            self._send(request)
        self._note_accepted(request.id)
        self._read(request, may, chance)

    def _send(self, request: Request) -> None:
        name = PRODUCERS[zlib.crc32(request.id.encode()) % len(PRODUCERS)]
        if stays := self._is_staying(request.id):
            request = request.model_copy(update={"tenant": STAYING})
        while True:
            publisher = self.publishers.get(name) or self.servers.open_publisher(name)
            self.publishers[name] = publisher
            with contextlib.suppress(BusUnavailable):
                encoded = encode_request(request)
                _, message = prepare_message(self.pipeline, encoded, own_topics=stays)
                headers = {**message.headers, **self._draw_reply(request.id)}
                publisher.publish([replace(message, headers=headers)])
                return

    def _draw_reply(self, request_id: str) -> dict[str, str]:
        """Return the headers by which a request wants its result elsewhere; none of most requests."""
        chance = random.Random(f"{self.seed}/reply/{request_id}")
        if not self.has_reply_topics or chance.random() >= self.rates.replies:
            return {}
        topic = chance.choice([*REPLY_TOPICS, *REPLY_TOPICS, *BAD_TOPICS])
        correlation = as_text(chance.randbytes(16))
        name = chance.choice([REPLY_TO_HEADER, REPLY_TOPIC_HEADER])
        self.replies[request_id] = {name: topic, CORRELATION_HEADER: correlation}
        return self.replies[request_id]

    def _is_staying(self, request_id: str) -> bool:
        draw = zlib.crc32(f"{request_id} stays".encode()) / 2**32
        return isinstance(self.servers, KafkaServers) and draw < self.rates.stays

    def _read(self, request: Request, may: list[str], chance: random.Random) -> None:
        record = self.servers.open_record(f"client-{request.id}", RecordSettings())
        reader, texts, num_empty = StreamReader(), "", 0
        cancel_after = chance.randrange(MAX_TOKENS) if "cancelled" in may else None
        while True:
            events = list(reader.feed_log(record.read_log(request.id, reader.log_after)))
            num_empty = 0 if events else num_empty + 1
            for event in events:
                texts += event.text
                self._note_event(request.id, "first", event, texts)
                if isinstance(event, EndEvent):
                    self.served.add(request.id)
                    return
            if request.id in self.deleted and num_empty > 50 and self._may_be_lost(request.id):
                return
            if cancel_after is not None and reader.num_tokens >= cancel_after:
                record.cancel_request(request.id)
                cancel_after = None
            self.world.sleep(POLL_S * chance.random() * min(8, 1 + num_empty))

    def _note_event(self, request_id: str, reader: str, event: TokenEvent | EndEvent, text: str) -> None:
        """Note what a reader saw, and the text up to there."""
        if isinstance(event, EndEvent):
            if event.error is not None:
                self._note_error(request_id, event.error.message)
            error, count = event.error and event.error.code, event.usage.completion_tokens
            end = {"finish": event.finish_reason, "count": None if event.pieces is not None else count}
            entry: Entry = {**end, "error": error, "text": text + name_vectors(event.vectors), "calls": []}
            self._note({"what": "end", "id": request_id, "reader": reader, **entry})
        elif not self.rates.endpoint:
            told = {"reader": reader, "event": event.id, "token": event.token}
            self._note({"what": "token", "id": request_id, **told})

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
        return self.accepted - {one for one in self.deleted if self._may_be_lost(one)} <= results

    def _is_all_settled(self) -> bool:
        """Return whether nothing is left of the requests but their records."""
        if self.failures:
            return True
        if self.world.num_turns % 64:
            return False
        if any(self.servers.bus.count_unsettled().values()) or any(map(self._is_open, self.accepted)):
            return False
        return not self.servers.list_left() and not self._find_wrong_usage()

    def _find_wrong_usage(self) -> str:
        """Return how the meters differ from the results; empty where they do not, and where no gateway counts."""
        if self.memory is None or self.gateways is None or not self.gateways.places:
            return ""
        days = self.memory.keys.keys(self.pipeline.meter_key("day:*").replace("{", "\\{"))
        counted = add_sums(sums for day in days for sums in parse_day_sums(self.memory.keys.hgetall(day)).values())
        results = [decode_message(Result, one.value) for one in self.servers.bus.read_all(self.pipeline.results_topic)]
        usages = {one.id: one.usage for one in results}.values()
        used = sum_usage(usages)
        told = (counted.requests, counted.prefill_tokens + counted.cached_tokens, counted.decode_tokens)
        wanted = (len(usages), used.prompt_tokens, used.completion_tokens)
        return "" if told == wanted else f"the meters have {told}, the results {wanted}"

    def _is_open(self, request_id: str) -> bool:
        """Return whether a session has a request, or it waits for one."""
        status = self.servers.record.read_status(request_id)
        if status is None or (request_id in self.deleted and status.stage == "new"):
            return False
        return status.stage != "end" or bool(status.session)

    def _may_be_lost(self, request_id: str) -> bool:
        """Return whether nobody goes on with a request whose message was deleted: no worker has seen it, or the one
        that ended it died, and nobody has the message with which its result would go out.
        """
        status = self.servers.record.read_status(request_id)
        return status is None or status.stage in ("new", "end")

    def _note_what_is_left(self) -> None:
        if self.num_clients_left:
            self.failures.append(f"{self.num_clients_left} clients have no answer")
        for topic, count in self.servers.bus.count_unsettled().items():
            if count:
                self.failures.append(f"{count} messages of {topic} are left")
        if wrong := self._find_wrong_usage():
            self.failures.append(wrong)
        self.failures += self.servers.list_left()
        for request_id in sorted(filter(self._is_open, self.accepted)):
            self.failures.append(f"{request_id} is open: {self.servers.record.read_status(request_id)!r}"[:300])

    def _watch_idle(self) -> None:
        """Let an idle pipeline run on: what comes late is judged too, and nothing asks again and again."""
        begun = self.world.num_turns
        self.world.run(lambda: self.failures, IDLE_S)
        turns_per_s = (self.world.num_turns - begun) / IDLE_S / len(self.places)
        if turns_per_s > MAX_IDLE_TURNS_PER_S:
            self.failures.append(f"an idle process takes {turns_per_s:.0f} turns a second")

    def _record_logs(self) -> None:
        """Note what is in the logs in the end, as a reader saw it that reads all of it."""
        for request_id in sorted(self.accepted):
            text = ""
            for event in self.servers.record.read_log(request_id):
                text += event.text
                self._note_event(request_id, "log", event, text)

    def _find_strays(self) -> None:
        """Find messages of a request in topics that are not its tenant's."""
        for topic in self.pipeline.all_topics():
            for message in self.servers.bus.read_all(topic):
                request_id = extract_request_id(message.value, message.key) or ""
                stays = message.topic == add_tenant(topic, STAYING)
                if request_id in self.accepted and stays != self._is_staying(request_id):
                    self.failures.append(f"{request_id} is in {message.topic}")

    def _read_results(self) -> list[Outgoing]:
        """Return the results of all requests, those with replies from the topics of these. Find what is in two topics,
        or in a wrong one.
        """
        replies = {topic: self.servers.read_replies(topic) for topic in REPLY_TOPICS if self.has_reply_topics}
        found = list[Outgoing]()
        for message in self.servers.bus.read_all(self.pipeline.results_topic):
            wanted, sent = self.replies.get(message.key or "", {}), message.headers.get(REPLY_TO_HEADER)
            topic = wanted.get(REPLY_TO_HEADER) or wanted.get(REPLY_TOPIC_HEADER)
            if message.headers.get(CORRELATION_HEADER) != wanted.get(CORRELATION_HEADER):
                self.failures.append(f"the result of {message.key} has another correlation id")
            if sent is None:
                if topic is not None and REPLY_REFUSED_HEADER not in message.headers:
                    self.failures.append(f"{message.key} has no reply, and no reason")
                found.append(message)
                continue
            mine = [one for one in replies.get(sent, []) if one.key == message.key]
            if sent != topic or sent in BAD_TOPICS or len(mine) != 1 or decode_message(Result, message.value).text:
                self.failures.append(f"{message.key}: {len(mine)} replies in {sent}, which is to be {topic}")
            for one in mine:
                replies[sent].remove(one)
                if one.headers.get(CORRELATION_HEADER) != wanted.get(CORRELATION_HEADER):
                    self.failures.append(f"the reply of {message.key} has another correlation id")
            found += mine
        self.failures += [f"{one.key} has a reply too many in {topic}" for topic in replies for one in replies[topic]]
        return found

    def _record_topics(self) -> None:
        self._find_strays()
        for message in self._read_results():
            result = decode_message(Result, message.value)
            if result.error is not None:
                self._note_error(result.id, result.error.message)
            error = result.error.code if result.error else None
            text = result.text + name_vectors(result.vectors)
            fields = {"tokens": result.token_ids, "text": text, "finish": result.finish_reason, "error": error}
            if self.rates.endpoint:
                fields |= {"tokens": [], "count": None}
            self._note({"what": "result", "id": result.id, **fields})
        unknown = {one["id"] for one in self.history if one["what"] == "result"} - self.accepted
        made = [one for one in unknown if GATEWAY_ID.fullmatch(one)]
        if len(made) > sum(client.num_lost for client in self.clients):
            self.failures.append(f"gateways made requests that nobody asked for: {sorted(made)}"[:300])
        for message in self.servers.bus.read_all(self.pipeline.dead_letter_topic):
            name, reason = extract_request_id(message.value, message.key) or "", message.headers.get(REASON_HEADER, "")
            self._note_error(name, reason.partition(": ")[2])
            self._note({"what": "dead", "id": name, "reason": reason})


@contextlib.contextmanager
def _quiet_logs() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def shorten_plan(plan: Plan, make_scene: Callable[[Plan], Scene], tell: Callable[[str], object]) -> Plan:
    """Return a plan that finds something as well, with as few mishaps and clients as can be left out one by one."""
    best = plan

    def try_plan(tried: Plan, what: str) -> bool:
        nonlocal best
        if not make_scene(tried).run().findings:
            return False
        best = tried
        tell(what)
        return True

    for mishap in fields(Rates):
        least = LEAST_DELAY_S if mishap.name == "delay_s" else 0.0
        if getattr(best.rates, mishap.name) > least:
            try_plan(replace(best, rates=replace(best.rates, **{mishap.name: least})), f"without {mishap.name}")
    size = len(best.clients) // 2
    while size:
        for start in range(0, len(best.clients), size):
            left = best.clients[:start] + best.clients[start + size :]
            if left and try_plan(replace(best, clients=left), f"{len(left)} requests"):
                break
        else:
            size //= 2
    return best
