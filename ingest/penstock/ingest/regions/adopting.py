"""A region that died is adopted by this one: what is open there, as far as it was copied, is answered here.

    1  mark     the region is adopted, since when and by whom: in Redis, so that its gateways find it when they are back
    2  look     whether its gateways answer, another peer has adopted it, or its models are others than here: then the
                mark is taken away
    3  index    what was copied and is not in the index yet
    4  card     for each open request, what gateways need to stream its answer, if its message has it; and its end,
                `answer_interrupted`, unless its tokens follow from the request and are the same here: readers may have
                seen others. So have those of its choices that were answered at home
    5  publish  the message, to this region's own topic of its class, under the same id
    6  note     that the id is taken, and no longer open, in one step
    7  done     the mark gets what was found, and when: the list of ids is whole

4 to 6 are done for `MAX_TAKEN` requests at a time, in the order of the copy, for one pipeline after the other. A region
that comes back between 1 and 7 waits (`returning.py`). It listens before it asks, and 1 comes before 2: so either the
region learns of its adoption, or 2 finds it. Whoever adopts may be killed anywhere and be started again. A crash

- after 1 or 2 leaves a region that is marked and has no answers yet, and that waits if it comes back
- after 3 or 4 costs nothing: the index knows its places, a card without its request expires, and so does an end. A
  worker that gets the message of a request that has its end here publishes this as the result
- after 5 publishes those requests once more. They are answered once, as their ids are remembered (`docs/protocol.md`);
  only if nobody goes on for longer than `PENSTOCK_RECORD_KEEP_S` they are computed a second time
- after 6 or 7 costs nothing.

After 7 nothing more is published: what is copied later is the region's own again. If it dies once more, it is adopted
once more, from 1 on, and the list of ids has both.

No offset of the dead region's groups is used: what is open follows from requests and results alone.
"""

import json
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import httpx2
import redis
from pydantic import ValidationError

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.follower import PlacedMessage, read_places
from penstock.bus.placement import chain_prompt
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings, RegionSettings
from penstock.errors import AdoptionRefused, AnswerInterrupted, RequestError, TenantKeyMissing
from penstock.failpoints import failpoint
from penstock.ingest.openai.endpoint import StreamMeta, decode_meta
from penstock.ingest.regions.copies import CopyIndex, CopyPlace, check_bus
from penstock.ingest.regions.peers import STATE_PATH
from penstock.ingest.regions.returning import ADOPTED_PATH, AdoptedIds
from penstock.ingest.regions.state import RegionState
from penstock.messages import Request, decode_message, now_s
from penstock.names import (
    ADOPTED_REGIONS_KEY,
    CARD_HEADER,
    CLASSES,
    FINGERPRINTS_KEY,
    MODELS_KEY,
    Pipeline,
    copy_topic,
    stream_meta_key,
)
from penstock.record.log import TokenLog
from penstock.redis.client import redis_client
from penstock.redis.servers import Sharded
from penstock.regions import PEER_HEADER

LOOK_TIMEOUT_S = 5.0
INTERRUPTED_WORDS = (
    "the region that began this answer has died, and other tokens than it sent would follow here: ask again"
)
MAX_TAKEN, MAX_TAKEN_BYTES = 200, 32 * 2**20
"""The most requests, and their bytes, that are published before they are noted."""


class AdoptionSettings(NamedTuple):
    """The settings of who adopts a region."""

    bus: BusSettings
    record: RecordSettings
    region: RegionSettings


@dataclass
class AdoptedCounts:
    """What was found in one pipeline of an adopted region."""

    taken: int = 0
    """Requests that are answered here."""
    late: int = 0
    """Those whose deadline had passed: they end with `deadline_exceeded`, if not as the next ones."""
    interrupted: int = 0
    """Those that end with `answer_interrupted`, as other tokens of them may have been seen."""
    newer: int = 0
    """Those that were accepted after the newest heartbeat in the copy. They may have been answered at home, too, like
    others whose results were not copied: then they are computed twice."""
    without_card: int = 0
    """Those of which no gateway knows how to stream them: made by other producers, or with too large a body."""
    gone: int = 0
    """Those whose message the copy does not have any more. They stay open."""

    def add(self, one: "OpenRequest", newest_s: float, *, has_card: bool) -> None:
        """Count a request; the newest heartbeat in the copy was written at `newest_s`."""
        deadline = None if one.request is None else one.request.deadline
        self.late += deadline is not None and deadline < now_s()
        self.newer += one.accepted_s > newest_s
        self.without_card += not has_card


class OpenRequest(NamedTuple):
    """A request that is open in the dead region."""

    id: str
    place: str
    """Its place in the copy."""
    message: Outgoing
    """As it is published here."""
    request: Request | None
    """None: the message is no valid request. A worker answers it all the same."""
    accepted_s: float
    """When its home's broker wrote it: MirrorMaker copies a record with its time."""

    @classmethod
    def from_copy(cls, request_id: str, place: str, topic: str, copied: PlacedMessage) -> "OpenRequest":
        """Return the request that a copied message has."""
        request: Request | None = None
        with suppress(RequestError):
            request = decode_message(Request, copied.message.value)
        chain = None if request is None else chain_prompt(request)
        return cls(request_id, place, replace(copied.message, topic=topic, chain=chain), request, copied.timestamp_s)

    def goes_on(self, same: AbstractSet[str]) -> bool:
        """Return whether this region computes the tokens that its home did, or none as it is no valid request. `same`
        has the models of which it does, and an empty name if it does of all of the pipeline.
        """
        return self.request is None or (self.request.model or "") in same

    def find_card(self, pipeline: Pipeline) -> StreamMeta | None:
        """Return what gateways need to stream the answer, if the message has it, about this request and its tenant."""
        with suppress(ValidationError, RequestError, TenantKeyMissing):
            card = decode_meta(None, self.message.headers.get(CARD_HEADER, "").encode())
            tenant = None if self.request is None else self.request.tenant
            if (card.pipeline, card.tenant) == (pipeline.name, tenant) and self.id in card.request_ids:
                return card.model_copy(update={"is_adopted": True})
        return None


class AdoptionMark(NamedTuple):
    """What is known of an adopted region."""

    since_s: float
    by: str
    done_s: float | None
    """When all that was open had been published; None: not yet."""
    pipelines: dict[str, dict[str, int]]
    """The counts of each."""

    @classmethod
    def parse(cls, text: bytes) -> "AdoptionMark":
        """Return the mark from its JSON."""
        return cls(**json.loads(text))

    def encode(self) -> str:
        """Return its JSON."""
        return json.dumps(self._asdict())


def read_marks(client: "redis.Redis") -> dict[str, AdoptionMark]:
    """Return the regions that this one has adopted."""
    found = cast("dict[bytes, bytes]", client.hgetall(ADOPTED_REGIONS_KEY))
    return {name.decode(): AdoptionMark.parse(mark) for name, mark in found.items()}


def list_pipelines(client: "redis.Redis", addresses: Addresses) -> dict[str, set[str]]:
    """Return the pipelines of this region, each with its models, those that were served before among them."""
    found: dict[str, set[str]] = {addresses.pipeline: set()}
    for field, note in sorted(cast("dict[bytes, bytes]", client.hgetall(MODELS_KEY)).items()):
        name, _, model = field.decode().partition(":")
        found.setdefault(name, set()).update([model] if note else [])
    return found


def adopt_region(
    client: "redis.Redis",
    addresses: Addresses,
    settings: AdoptionSettings,
    region: str,
    by: str,
    *,
    force: bool = False,
) -> AdoptionMark:
    """Adopt a region, or go on where that was interrupted. With `force` step 2 is left out.

    Raises `AdoptionRefused`, `BusUnavailable`, `redis.RedisError`, or `SettingsError` where the bus is Redis.
    """
    check_bus(addresses)
    earlier = read_marks(client).get(region)
    mark = AdoptionMark(now_s(), by, None, {}) if earlier is None else earlier._replace(done_s=None)
    client.hset(ADOPTED_REGIONS_KEY, region, mark.encode())  # 1
    failpoint("adopt.1.marked")
    same, others = compare_models(client, settings.region.name, region)
    told = f"{', '.join(others)} of {region} is another model than here, by its fingerprint" if others else ""
    objection = find_objection(settings.region, region) or told  # 2
    if objection and not force:
        if earlier is None:
            client.hdel(ADOPTED_REGIONS_KEY, region)
        else:
            client.hset(ADOPTED_REGIONS_KEY, region, earlier.encode())
        raise AdoptionRefused(f"{objection}; if that cannot be, --force leaves this check out")
    failpoint("adopt.2.looked")
    for name, served in list_pipelines(client, addresses).items():
        own = addresses.model_copy(update={"pipeline": name})
        with closing(CopyIndex(own, settings.bus, region)) as index, ExitStack() as exits:
            if index.has_copy():
                clients = Sharded.from_urls(own.stream_url, lambda url: exits.enter_context(redis_client(url)))
                logs = clients.map_parts(partial(TokenLog, pipeline=index.pipeline, settings=settings.record))
                answered = same | ({""} if served and served <= same else set())
                mark.pipelines[name] = asdict(_adopt_pipeline(index, logs, answered, settings.record.keep_s))
    mark = mark._replace(done_s=now_s())
    client.hset(ADOPTED_REGIONS_KEY, region, mark.encode())  # 7
    failpoint("adopt.7.done")
    return mark


def find_objection(settings: RegionSettings, region: str) -> str:
    """Return why a region must not be adopted; empty where it is away and no peer has adopted it."""
    for name, url in settings.list_peers().items():
        path = STATE_PATH if name == region else ADOPTED_PATH.format(name=region)
        try:
            answer = httpx2.get(url + path, headers={PEER_HEADER: settings.secret}, timeout=LOOK_TIMEOUT_S)
            state = "" if name == region else AdoptedIds.model_validate_json(answer.content).state
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            if name != region:
                return f"{name} does not answer: it may have adopted {region}"
            continue
        except (httpx2.HTTPError, ValidationError):  # something takes connections there
            state = ""
        if name == region:
            return f"a gateway of {region} takes connections at {url}"
        if state != "none":
            return f"{name} has adopted {region}, or does not say whether it has"
    return ""


def compare_models(client: "redis.Redis", own: str, region: str) -> tuple[set[str], list[str]]:
    """Return the models whose tokens follow from the request, and are the same here as in a region; and those that are
    known to be others than those of their names here.
    """
    found = cast("list[bytes | None]", client.hmget(FINGERPRINTS_KEY, [own, region]))
    here, there = (json.loads(text or b"{}") for text in found)
    equal = {name for name in here.keys() & there.keys() if here[name] == there[name]}
    # One of several words is of several models, or of one whose tokens depend on what is computed beside them.
    return {name for name in equal if " " not in here[name]}, sorted((here.keys() & there.keys()) - equal)


def _adopt_pipeline(
    index: CopyIndex, logs: "Sharded[TokenLog]", same: AbstractSet[str], keep_s: float
) -> AdoptedCounts:
    """Do steps 3 to 6 for one pipeline."""
    index.take_all()  # 3
    failpoint("adopt.3.indexed")
    client, pipeline, counts = index.client, index.pipeline, AdoptedCounts()
    open_key, taken_key, copied_key = (pipeline.region_key(index.region, part) for part in ("open", "taken", "copied"))
    newest_s = int(cast("bytes | None", client.get(copied_key)) or 0) / 1000
    own_ids = {one.decode() for key in (open_key, taken_key) for one in cast("list[bytes]", client.hkeys(key))}
    with closing(index.bus.create_publisher()) as publisher:
        for batch in _gather(_read_open(index, counts)):
            with client.pipeline(transaction=False) as cards:  # 4
                for one in batch:
                    ended = set[str]() if one.goes_on(same) else {one.id}
                    counts.interrupted += len(ended)
                    if (card := one.find_card(pipeline)) is not None:
                        cards.set(stream_meta_key(card.id), card.model_dump_json(), nx=True, px=round(keep_s * 1000))
                        ended |= {*card.request_ids} - own_ids
                    for request_id in ended:
                        logs[request_id].end_unread(request_id, AnswerInterrupted(INTERRUPTED_WORDS))
                    counts.add(one, newest_s, has_card=card is not None)
                cards.execute()
            failpoint("adopt.4.carded")
            publisher.publish([one.message for one in batch])  # 5
            failpoint("adopt.5.published")
            with client.pipeline(transaction=True) as noted:  # 6
                noted.hset(taken_key, mapping={one.id: one.place for one in batch})
                noted.hdel(open_key, *(one.id for one in batch))
                noted.execute()
            failpoint("adopt.6.noted")
    counts.taken = client.hlen(taken_key)  # those before an interruption, too
    return counts


def _read_open(index: CopyIndex, counts: AdoptedCounts) -> Iterator[OpenRequest]:
    """Yield the open requests of a pipeline, in the order of the copy, and count those whose message is gone."""
    assert isinstance(index.bus, KafkaBus), "a copy is on Kafka"
    pipeline = index.pipeline
    found = cast("dict[bytes, bytes]", index.client.hgetall(pipeline.region_key(index.region, "open")))
    places = {request_id.decode(): CopyPlace.parse(place) for request_id, place in found.items()}
    for priority_class in CLASSES:
        own = sorted((place, one) for one, place in places.items() if place.priority_class == priority_class)
        topic = pipeline.request_topic(priority_class)
        wanted = [(place.partition, place.offset) for place, _ in own]
        copies = read_places(index.bus.clients, copy_topic(index.region, topic), wanted)
        for (place, request_id), copied in zip(own, copies, strict=True):
            if copied is None:
                counts.gone += 1
            else:
                yield OpenRequest.from_copy(request_id, str(place), topic, copied)


def _gather(found: Iterable[OpenRequest]) -> Iterator[list[OpenRequest]]:
    """Yield requests in lists that are not too large."""
    batch, num_bytes = list[OpenRequest](), 0
    for one in found:
        batch.append(one)
        num_bytes += one.message.num_bytes
        if len(batch) >= MAX_TAKEN or num_bytes >= MAX_TAKEN_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def give_back(
    client: "redis.Redis", addresses: Addresses, settings: RegionSettings, region: str, *, force: bool = False
) -> None:
    """Forget that a region was adopted, and which of its requests were. One of its gateways must have ended these, or
    its workers would answer them once more: else it raises `AdoptionRefused`, unless `force` is given.
    """
    mark, ended = read_marks(client)[region], dict[str, float]()
    with suppress(httpx2.HTTPError, ValidationError):
        url = settings.list_peers().get(region, "") + STATE_PATH
        answer = httpx2.get(url, headers={PEER_HEADER: settings.secret}, timeout=LOOK_TIMEOUT_S)
        ended = RegionState.model_validate_json(answer.content).ended
    if not force and (mark.done_s is None or ended.get(settings.name) != mark.done_s):
        raise AdoptionRefused(
            f"no gateway of {region} says that it has ended what was adopted, so its workers could answer that once "
            "more: wait until `penstock regions join` there says that they may begin; --force leaves this check out"
        )
    for name in list_pipelines(client, addresses):
        client.delete(Pipeline(name).region_key(region, "taken"))
    client.hdel(ADOPTED_REGIONS_KEY, region)
