"""One run of two regions: `eu` is lost, or cut off, and `us` adopts it and gives it back.

All processes run the product's code: workers that wait until their region has joined, gateways with peers and their
layer of regions, the index of the copy, and the operator's commands. Doubles are the servers, HTTP between gateways,
and MirrorMaker. What is judged stands in docs/regions.md, "The promise".
"""

import contextlib
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import redis

from penstock.bus.contract import Publisher
from penstock.client.core import StreamReader, prepare_message
from penstock.config.settings import BusSettings, RecordSettings
from penstock.errors import AdoptionRefused, BusUnavailable, PictureGone, StreamDiverged
from penstock.ingest.regions.adopting import AdoptionSettings, adopt_region, give_back, read_marks
from penstock.ingest.regions.returning import JOINED_LASTS_S, LOOK_S
from penstock.messages import (
    EndEvent,
    Request,
    Result,
    TokenEvent,
    decode_message,
    encode_request,
    extract_request_id,
)
from penstock.names import CLASSES, FINGERPRINTS_KEY, REASON_HEADER, REGION_JOINED_KEY, STAGES, WorkerKind, copy_topic
from penstock.objects import ObjectStorage
from penstock.redis.client import redis_client
from penstock.regions import add_home, find_home
from penstock.worker.joining import wait_until_joined
from sim.chaos.checker import Entry, Finding, check_history, name_vectors
from sim.world.pictures import StorageAtOnce
from sim.world.regions.gateways import RegionGateways, make_settings
from sim.world.regions.mirror import Mirror
from sim.world.regions.servers import HOME, PEER, REGIONS, RegionServers, RegionWays, find_region
from sim.world.runtime import EPOCH_S, Process
from sim.world.scene import POLL_S, STAYING, Plan, Rates, Scene
from sim.world.servers import SIMULATED
from sim.world.ways import PRODUCERS, Place

REGIONS_LEVEL = "regions"
OPERATOR = f"{PEER}-operator"
LOST_S = (15.0, 40.0)
"""How long a region is lost. What its gateways said of joining is over by then."""
NOTICED_S = (1.0, 15.0)
"""How long it takes until an operator has it adopted."""
GIVEN_BACK_S = 400.0
"""How long an operator waits until a region can be given back."""
SPAN_S = 3.0
"""The time for each client."""
LOSSES = (*["dies"] * 5, "is stopped", "is cut off", "is parted")
"""How `eu` is lost: all of it dies; it stands still; nobody connects to or from it; `us` cannot connect to it."""


def draw_plan(seed: int, requests: int, level: str) -> Plan:
    """Return the plan of a seed. Mishaps that are not about regions are rarer than at other levels."""
    plan, chance = Plan.draw(seed, requests, level), random.Random(f"{seed}/regions")

    def maybe(least_s: float, most_s: float) -> float:
        return chance.uniform(least_s, most_s) if chance.random() < 0.5 else 0.0

    drawn = plan.rates
    rates = replace(
        drawn, crash=drawn.crash / 4, stall=drawn.stall / 4, loss=drawn.loss / 4, delay_s=min(drawn.delay_s, 0.005),
        cut_s=4 * drawn.cut_s, pause_s=4 * drawn.pause_s, leave_s=4 * drawn.leave_s, rebalance_s=4 * drawn.rebalance_s,
        kill_s=10 * drawn.kill_s, freeze_s=4 * drawn.freeze_s, slow=drawn.slow / 4, autos=chance.choice([0.0, 1.0]),
        bug=0, wedge=0, hostile_s=0, full_s=0, endpoint=0, poison=0, attempts=0, away_s=0, delete_s=0, forget_s=0,
        batches=0, wipe_s=0, gateways=chance.choice([0.0, 0.5, 0.8]), stays=chance.choice([0.0, 0.2]),
        region_s=chance.uniform(5.0, 30.0), copy_s=chance.choice([0.1, 0.1, 1.0, 5.0]), task_s=maybe(20.0, 60.0),
    )  # fmt: skip
    return replace(plan, rates=rates, span_s=SPAN_S * requests)


@dataclass
class Loss:
    """A loss of the home region."""

    how: str
    begun_s: float
    over_s: float


@dataclass
class Adoption:
    """One attempt to adopt the home region."""

    marked_s: float
    looked_s: float = 0.0
    """When it began to index what had been copied; 0 where it did not."""
    done_s: float = 0.0
    """0 where it was interrupted, or refused."""
    is_same: bool = False
    """Whether `us` knew that its model is that of `eu`: else answers may end with `answer_interrupted`."""


class RegionScene(Scene):
    """Two regions of the world."""

    servers: RegionServers
    ways: RegionWays
    told = MappingProxyType({"fingerprint": "formula"})

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rates: Rates = plan.rates
        self.losses = list[Loss]()
        self.adoptions = list[Adoption]()
        self.orders = list[str]()
        """What the operator has to do, in order."""
        self.num_adopted = 0

    def _start_servers(self, stack: contextlib.ExitStack) -> None:
        self.ways = RegionWays(self.world, self.chance, self.rates.loss, self.rates.delay_s)
        self.ways.pass_point = self._pass_call
        self.servers = RegionServers(self.world, self.pipeline, self.ways)
        self.memory = None
        stack.enter_context(self.doubles.install(SIMULATED, self.servers.list_doubles()))
        stack.enter_context(self.doubles.install_server_clock("fakeredis."))
        self.servers.start()
        if self.rates.stays:
            self.servers.create_own_topics(STAYING)
        self.gateways = self.peers = RegionGateways(self.servers, self.ways, self._note_failure, self._start_again)
        stack.enter_context(self.doubles.install(SIMULATED, self.peers.list_doubles()))
        stack.enter_context(mock.patch.object(ObjectStorage, "open", self.servers.open_objects))
        chance = random.Random(f"{self.seed}/mirror")
        self.mirror = Mirror(self.world, self.servers, self.ways, chance, self.rates.copy_s)

    def _add_places(self, chance: random.Random) -> None:
        kinds: Sequence[WorkerKind] = ("auto",) if self.rates.autos else STAGES
        for region in REGIONS:
            self.places += [Place(f"{region}-{kind}-{n}", self._start_worker, kind) for kind in kinds for n in range(1)]
            gateways = chance.choice([1, 1, 2])
            self.places += [self.peers.add_place(f"{region}-gateway-{number}") for number in range(gateways)]
        self.operator = Place(OPERATOR, self._start_operator)
        self.places.append(self.operator)

    # Regions that are lost.

    def _start_mishaps(self) -> None:
        super()._start_mishaps()
        self._repeat_mishap(self.rates.region_s, self._lose_region)
        self._repeat_mishap(self.rates.task_s, self.mirror.kill_task)

    def _end_mishaps(self) -> None:
        self.ways.end_mishaps()
        for loss in self.losses:
            loss.over_s = min(loss.over_s, self.world.now_s)
        super()._end_mishaps()

    def _lose_region(self) -> None:
        """Lose `eu` for a while, and have it adopted in most cases; then give it back, in most."""
        lasts_s = self.chance.uniform(*LOST_S)
        loss = Loss(self.chance.choice(LOSSES), self.world.now_s, self.world.now_s + lasts_s)
        self.losses.append(loss)
        self._note({"what": "region lost", "how": loss.how, "until": round(loss.over_s, 1)})
        self.ways.cut_until_s[PEER, HOME] = loss.over_s
        if loss.how != "is parted":
            self.ways.cut_until_s[HOME, PEER] = loss.over_s
        if loss.how in ("dies", "is stopped"):
            self.ways.away_until_s[HOME] = loss.over_s
        for place in self.places:
            if find_region(place.name) == HOME and loss.how == "dies":
                # A gateway may be back long after the workers, which wait for it.
                self._kill(place, "region", lasts_s + self.chance.uniform(0.0, 5.0 if place.stage else 60.0))
            elif find_region(place.name) == HOME and loss.how == "is stopped" and place.process is not None:
                place.process.stands_until_s = loss.over_s
        if self.chance.random() < 0.8:
            self.world.sleep(self.chance.uniform(*NOTICED_S))
            self._order("adopt")
            if self.chance.random() < 0.8:
                self._give_back_later()
        self.world.sleep(max(0.0, loss.over_s - self.world.now_s))

    def _start_again(self, place: Place, after_s: float | None = None) -> None:
        """Start another process in a place, not before its region is there again."""
        left_s = self.ways.away_until_s[find_region(place.name)] - self.world.now_s
        if left_s > (after_s or 0.0):
            after_s = left_s + self.chance.uniform(0.0, 5.0)
        super()._start_again(place, after_s)

    def _start_worker(self, place: Place) -> None:
        if self.ways.is_away(find_region(place.name)):  # it was about to start when its region died
            self._start_again(place)
        else:
            super()._start_worker(place)

    def _run_worker(self, place: Place, process: Process) -> None:
        try:
            settings = make_settings(find_region(place.name))
            wait_until_joined(self.servers.find_addresses(place.name), settings, self.pipeline)
        except redis.RedisError:  # the process ends, and is started again
            self._start_again(place)
            self.world.kill(process)
        super()._run_worker(place, process)

    # The operator of `us`.

    def _order(self, what: str) -> None:
        self.orders.append(what)
        if self.operator.process is None or not self.operator.process.is_alive:
            self._start_operator(self.operator)

    def _start_operator(self, place: Place) -> None:
        is_running = place.process is not None and place.process.is_alive
        if self.orders and not is_running:
            place.process = process = Process(place.name, on_failure=self._note_failure)
            self.world.start_thread(process, "main", self._work_orders)

    def _work_orders(self) -> None:
        process = self.operator.process
        assert process is not None
        while self.orders:
            try:
                addresses = self.servers.find_addresses(OPERATOR)
                with redis_client(addresses.first_url) as client:
                    if self.orders[0] == "adopt":
                        self._adopt(client)
                    else:
                        give_back(client, addresses, make_settings(PEER), HOME)
            except (redis.RedisError, BusUnavailable, AdoptionRefused):  # as docs/regions.md says: start it again
                self.world.sleep(self.chance.uniform(0.5, 5.0))
                continue
            self._note({"what": "order done", "order": self.orders.pop(0)})
        self.world.kill(process)

    def _adopt(self, client: "redis.Redis") -> None:
        addresses, settings = self.servers.find_addresses(OPERATOR), make_settings(PEER)
        # The command says so where it is refused with a mark of its own: one that is not finished has begun to publish.
        found = read_marks(client).get(HOME)
        is_begun = found is not None and found.done_s is None
        group = AdoptionSettings(BusSettings(), RecordSettings(), settings)
        self.adoptions.append(Adoption(self.world.now_s))
        try:
            adopt_region(client, addresses, group, HOME, "operator", force=is_begun)
            self.adoptions[-1].done_s = self.world.now_s
            self.num_adopted += 1
        except AdoptionRefused as refusal:
            self._note({"what": "refused", "why": str(refusal)})

    def _pass_failpoint(self, point: str) -> None:
        if point == "adopt.2.looked":
            told: Any = self.servers.parts[PEER].keys.hgetall(FINGERPRINTS_KEY)
            self.adoptions[-1].looked_s = self.world.now_s
            self.adoptions[-1].is_same = told.get(HOME.encode(), 0) == told.get(PEER.encode(), 1)
        super()._pass_failpoint(point)

    def _give_back_later(self) -> None:
        """Give `eu` back when its workers may begin, and readers have their answers, as the runbook says."""

        def wait() -> None:
            until_s = self.world.now_s + GIVEN_BACK_S
            while self.world.now_s < until_s:
                self.world.sleep(1.0)
                home, peer = (self.servers.parts[region].keys for region in (HOME, PEER))
                mark = read_marks(peer).get(HOME)
                taken = {one.decode() for one in peer.hkeys(self.pipeline.region_key(HOME, "taken"))}
                # What a gateway said before the region was lost is over by then: this one has asked since.
                has_asked = self.world.now_s > self.losses[-1].over_s + JOINED_LASTS_S + LOOK_S
                is_back = has_asked and home.exists(REGION_JOINED_KEY) and not self.orders
                if mark is not None and mark.done_s is not None and is_back and taken <= self.served:
                    self._order("give back")
                    return

        self.world.start_thread(self.world.outside, "give back", wait)

    # Clients.

    def _make_request(self, number: int, chance: random.Random) -> Request:
        made = super()._make_request(number, chance)
        return made.model_copy(update={"id": add_home(made.id, HOME if chance.random() < 0.75 else PEER)})

    def _name_client(self, request: Request) -> str:
        return f"{find_home(request.id, REGIONS)}-client"

    def _find_objects(self, who: str) -> ObjectStorage:
        return StorageAtOnce(self.servers.of(who).objects)

    def _send(self, request: Request) -> None:
        home = find_home(request.id, REGIONS)
        name = f"{home}-{PRODUCERS[zlib.crc32(request.id.encode()) % len(PRODUCERS)]}"
        if stays := self._is_staying(request.id):
            request = request.model_copy(update={"tenant": STAYING})
        while True:
            if name not in self.publishers:
                self.publishers[name] = self.servers.open_publisher(name)
            publisher: Publisher = self.publishers[name]
            with contextlib.suppress(BusUnavailable):
                encoded = encode_request(request)
                publisher.publish([prepare_message(self.pipeline, encoded, own_topics=stays)[1]])
                return

    def _is_staying(self, request_id: str) -> bool:
        return zlib.crc32(f"{request_id} stays".encode()) / 2**32 < self.rates.stays

    def _read(self, request: Request, may: list[str], chance: random.Random) -> None:
        """Read an answer to its end, at its home, or where that is away or says so at the region that adopted it."""
        homes = [find_home(request.id, REGIONS) or HOME, PEER]
        records = [self.servers.open_record(f"{region}-client-{request.id}", RecordSettings()) for region in homes]
        reader, last, texts, num_empty, at, least = StreamReader(), None, "", 0, 0, 0
        cancel_after = chance.randrange(24) if "cancelled" in may else None
        while True:
            try:
                events = list(reader.feed_log(records[at].read_log(request.id, reader.log_after)))
                if reader.is_log_missing:
                    reader.check_record(records[at].read_status(request.id))
            except redis.RedisError:
                events, at = [], max(least, 1 - at)
            except StreamDiverged as error:
                if at:
                    self._note_diverged(request.id, error, texts)
                    return
                # Its home has given it away before the first token, of which this reader has seen some elsewhere.
                events, reader, at, least = [], StreamReader(last), 1, 1
            num_empty = 0 if events else num_empty + 1
            at = least if num_empty > 8 and not self.ways.is_away(homes[0]) else at
            for event in events:
                is_end, code = isinstance(event, EndEvent), getattr(getattr(event, "error", None), "code", "")
                if is_end and code == "answer_interrupted" and at == 0:
                    reader, at, least = StreamReader(last), 1, 1
                    break
                texts += event.text
                last = event.id if isinstance(event, TokenEvent) else last
                self._note_event(request.id, "first", event, texts)
                if isinstance(event, EndEvent):
                    self.served.add(request.id)
                    return
            if cancel_after is not None and reader.num_tokens >= cancel_after:
                with contextlib.suppress(redis.RedisError):
                    records[at].cancel_request(request.id)
                    cancel_after = None
            self.world.sleep(POLL_S * chance.random() * min(8, 1 + num_empty))

    def _note_diverged(self, request_id: str, error: StreamDiverged, texts: str) -> None:
        """Note that a reader cannot go on at the region that adopted its request."""
        entry: Entry = {"what": "failed", "id": request_id, "reader": "first"}
        entry |= {"error": type(error).__name__, "story": str(error)}
        if not all(one.is_same for one in self.adoptions):  # a gateway calls it so
            entry |= {"what": "end", "finish": "error", "error": "answer_interrupted"}
            entry |= {"count": None, "text": texts, "calls": []}
            self.served.add(request_id)
        self._note(entry)

    def _note(self, entry: Entry) -> None:
        if entry["what"] == "end" and entry["reader"] == "http":
            self.served.add(entry["id"])
        super()._note(entry)

    def is_injected(self, message: str) -> bool:
        """Return whether an error says that another region answers: a home tells so whoever repeats a request there."""
        return self.num_adopted > 0 and message.startswith(f"the region {PEER} answers this request")

    # The judgement.

    def _is_open(self, request_id: str) -> bool:
        return any(_is_open_in(part.record.read_status(request_id)) for part in self.servers.parts.values())

    def _is_all_settled(self) -> bool:
        return not self.orders and super()._is_all_settled()

    def _note_what_is_left(self) -> None:
        if self.num_clients_left:
            self.failures.append(f"{self.num_clients_left} clients have no answer")
        if self.orders:
            self.failures.append(f"the operator cannot {self.orders[0]}")
        for topic, count in self.servers.bus.count_unsettled().items():
            if count:
                self.failures.append(f"{count} messages of {topic} are left")
        self.failures += self.servers.list_left()

    def _record_logs(self) -> None:
        for region, part in self.servers.parts.items():
            for request_id in sorted(self.accepted):
                text = ""
                for event in part.record.read_log(request_id):
                    text += event.text
                    self._note_event(request_id, region, event, text)

    def _record_topics(self) -> None:
        self._find_strays()
        for region, part in self.servers.parts.items():
            for message in part.bus.read_all(self.pipeline.results_topic):
                result = decode_message(Result, message.value)
                error = result.error.code if result.error else None
                told = {
                    "tokens": result.token_ids,
                    "text": result.text + name_vectors(result.vectors),
                    "finish": result.finish_reason,
                    "error": error,
                }
                self._note({"what": "result", "id": result.id, "region": region, **told})
            for message in part.bus.read_all(self.pipeline.dead_letter_topic):
                self._note(
                    {
                        "what": "dead",
                        "id": message.key or "",
                        "region": region,
                        "reason": message.headers.get(REASON_HEADER, ""),
                    }
                )
        made = {one["id"] for one in self.history if one["what"] == "result"} - self.accepted
        if len(made) > sum(client.num_lost for client in self.clients):
            self.failures.append(f"gateways made requests that nobody asked for: {sorted(made)}"[:300])

    def _find_strays(self) -> None:
        """Find messages of a tenant that stays in topics that are not its own at home."""
        for region, part in self.servers.parts.items():
            for topic, number in part.broker.logs:
                for one in part.broker.logs[topic, number]:
                    key = None if one.key is None else one.key.decode()
                    name = extract_request_id(one.value, key) if one.value else None
                    if name not in self.accepted or not self._is_staying(name) or not name.startswith("r"):
                        continue
                    if find_home(name, REGIONS) != region or ".t-" not in topic:
                        self.failures.append(f"{name} stays, and is in {topic} of {region}")

    def _judge(self) -> list[Finding]:
        """Judge what each region shows, and what clients saw, and then both regions together."""
        adopted = self._find_published()
        submitted = [one for one in self.history if one["what"] == "submitted"]
        findings = list[Finding]()
        for where in (*REGIONS, ""):
            seen = [
                one
                for one in self.history
                if one["what"] not in ("submitted", "accepted") and _find_where(one) == where
            ]
            told = [self._allow(one, where, adopted) for one in submitted]
            findings += check_history([*told, *seen])
        answered = {one["id"] for one in self.history if one["what"] == "result"}
        findings += [Finding("lost", one, "it was accepted, and has no result") for one in self.accepted - answered]
        return findings + self._judge_adoptions(adopted) + self._judge_copies()

    def _allow(self, submitted: Entry, where: str, adopted: dict[str, float]) -> Entry:
        """Return what a client sent, with the errors that may end it in a region, or for its readers."""
        may_move = submitted["id"] in adopted and (where != PEER or not all(one.is_same for one in self.adoptions))
        may = [*submitted["may"], *(["answer_interrupted"] if may_move else [])]
        # Files of pictures are not copied.
        is_unseen = submitted["id"] in adopted and submitted["id"] in self.seeing and where != HOME
        return {**submitted, "may": [*may, *([PictureGone.code] if is_unseen else [])]}

    def _find_published(self) -> dict[str, float]:
        """Return the requests of `eu` that `us` has published for itself, and when it did first."""
        found, part = dict[str, float](), self.servers.parts[PEER]
        for topic in map(self.pipeline.request_topic, CLASSES):
            for number in range(part.broker.topics[topic]):
                for one in part.broker.logs[topic, number]:
                    name = extract_request_id(one.value or b"", (one.key or b"").decode()) if one.is_visible else None
                    if name is not None and find_home(name, REGIONS) == HOME:
                        found.setdefault(name, one.timestamp_ms / 1000 - EPOCH_S)
        return found

    def _judge_adoptions(self, adopted: dict[str, float]) -> list[Finding]:
        findings, copied, results = list[Finding](), self.mirror.copied, self.pipeline.results_topic
        for name, at_s in adopted.items():
            begun = max(
                (one for one in self.adoptions if 0 < one.looked_s <= at_s + 0.001), key=lambda one: one.looked_s
            )
            if copied.get((results, name), 1e9) <= begun.looked_s:
                findings.append(Finding("duplicated", name, "it was adopted, and its result had been copied"))
            findings += self._judge_returned(name, begun)
        for adoption in self.adoptions:
            for (topic, name), at_s in copied.items() if adoption.done_s else ():
                is_open = copied.get((results, name), 1e9) > adoption.done_s
                if topic != results and at_s <= adoption.looked_s and is_open and name not in adopted:
                    findings.append(Finding("lost", name, "it was copied and open, and is not adopted"))
        return findings

    def _judge_copies(self) -> list[Finding]:
        """Find copies of results that `eu` has not committed, or not as often: they look like answers, and are none."""
        results, copies = self.pipeline.results_topic, copy_topic(HOME, self.pipeline.results_topic)
        committed = Counter(one.key for one in self.servers.parts[HOME].bus.read_all(results))
        copied = Counter(one.key for one in self.servers.parts[PEER].bus.read_all(copies))
        return [Finding("wrong", key or "", "a copied result was not committed") for key in copied - committed]

    def _judge_returned(self, name: str, adoption: Adoption) -> list[Finding]:
        """Find results that `eu` has settled though it had to know that `us` has adopted a request."""
        part, findings = self.servers.parts[HOME], list[Finding]()
        times = [
            one.timestamp_ms / 1000 - EPOCH_S
            for (topic, _), log in part.broker.logs.items() if topic == self.pipeline.results_topic
            for one in log if one.is_visible and extract_request_id(one.value or b"", (one.key or b"").decode()) == name
        ]  # fmt: skip
        last = [event for event in part.record.read_log(name) if isinstance(event, EndEvent)]
        if times and last and last[0].error is not None and last[0].error.code == "answer_interrupted":
            findings.append(Finding("duplicated", name, "its home has settled it, and had given it away"))
        before = [loss for loss in self.losses if loss.begun_s <= adoption.marked_s < loss.over_s]
        if before and before[-1].how == "dies" and max(times, default=0.0) >= before[-1].over_s:
            findings.append(Finding("duplicated", name, "its home has settled it after its return"))
        return findings


def _find_where(entry: Entry) -> str:
    """Return the region that an entry is about; empty for what clients saw."""
    return str(entry.get("region", entry.get("reader", "") if entry.get("reader") in REGIONS else ""))


def _is_open_in(status: object) -> bool:
    return status is not None and (status.stage != "end" or bool(status.session))  # type: ignore[attr-defined]
