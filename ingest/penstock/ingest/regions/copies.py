"""The index of what is open in another region, whose requests and results MirrorMaker copies to this one's Kafka.

A gateway follows the copies all the time, as a `LeasedReader`: so who adopts the region has nothing to read first. The
index has the place of each request that has no result, some 150 bytes of Redis an id, and the ids of the last
`MAX_ANSWERED` results, about as much each. A request whose result was forgotten before it was copied, or that was sent
once more after that, stays open: if the region is adopted, it is computed a second time.

The newest heartbeat of MirrorMaker that was copied says how old the copy is: the region's recovery point.
"""

import itertools
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

import redis

from penstock import failpoints
from penstock.bus.contract import FollowedMessage
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError
from penstock.ingest.leased_reader import LeasedReader
from penstock.messages import extract_request_id, now_s
from penstock.names import CLASSES, HEARTBEATS_TOPIC, Pipeline, PriorityClass, copy_topic
from penstock.redis.scripts import load_script
from penstock.telemetry import catalog
from penstock.telemetry.meters import Meters, Reading

MAX_ANSWERED = 100_000
"""How many ids of results are remembered, for requests that are copied after them."""
STANDING_S = 30.0
"""A copy whose newest heartbeat is older has failed, or its region has."""
_HEARTBEAT = struct.Struct(">hq")
"""MirrorMaker's heartbeat: its version, and when it was written, in ms since the epoch."""

INDEX_COPY = load_script("penstock.ingest", "index_copy")


class CopyPlace(NamedTuple):
    """The place of a request in a copied topic."""

    priority_class: PriorityClass
    partition: int
    offset: int

    @classmethod
    def parse(cls, text: bytes) -> "CopyPlace":
        """Return the place that `str` wrote."""
        letter, partition, offset = text.decode().split(":")
        return cls(next(one for one in CLASSES if one[0] == letter), int(partition), int(offset))

    def __str__(self) -> str:
        return f"{self.priority_class[0]}:{self.partition}:{self.offset}"


class CopyIndex(LeasedReader):
    """Keeps the index of one region's pipeline. Used by one thread."""

    work = "copies"
    points = failpoints.COPY

    def __init__(self, addresses: Addresses, settings: BusSettings, region: str) -> None:
        check_bus(addresses)
        pipeline = Pipeline(addresses.pipeline)
        self.region = region
        requests = {copy_topic(region, pipeline.request_topic(one)): one for one in CLASSES}
        self._requests: dict[str, PriorityClass] = requests
        self._results, self._beats = copy_topic(region, pipeline.results_topic), copy_topic(region, HEARTBEATS_TOPIC)
        topics = (*requests, self._results, self._beats)
        places = {topic: pipeline.region_key(region, f"places:{topic}") for topic in topics}
        super().__init__(addresses, settings, pipeline.region_key(region, "reader"), places)

    def take_part(self, topic: str, part: str, before: str, messages: Sequence[FollowedMessage]) -> bool:
        """Index the messages of one part. Return False if another gateway did."""
        arguments: list[str | int] = [part, before, messages[-1].offset, MAX_ANSWERED]
        beats_ms = [0]
        for followed in messages:
            message = followed.message
            if message is None:
                continue
            if topic == self._beats:
                if len(message.value) == _HEARTBEAT.size:
                    beats_ms.append(_HEARTBEAT.unpack(message.value)[1])
            elif (request_id := extract_request_id(message.value, message.key)) is not None:
                place = ""
                if topic != self._results:
                    place = str(CopyPlace(self._requests[topic], int(part), int(followed.offset)))
                arguments += [request_id, place]
        keys = [self._places[topic], *(self.pipeline.region_key(self.region, name) for name in ("open", "answered"))]
        if not INDEX_COPY.run(self.client, keys, arguments):
            return False
        if newest_ms := max(beats_ms):
            self.client.set(self.pipeline.region_key(self.region, "copied"), newest_ms)
        return True

    def has_copy(self) -> bool:
        """Return whether any requests of this pipeline are copied: the other region may never have had it."""
        from penstock.bus.kafka.bus import KafkaBus

        assert isinstance(self.bus, KafkaBus), "a copy is on Kafka"
        return len(self.bus.find_missing(list(self._requests))) < len(self._requests)

    def take_all(self) -> None:
        """Index all that was copied, whoever has the lease. Raises as `count_once`."""
        from penstock.bus.kafka.follower import KafkaFollower

        offsets: object = None
        while True:
            self.take_new(timeout_s=1.0)
            followers = cast("list[KafkaFollower]", list(self.followers.values()))
            # Heartbeats come all the time.
            before, offsets = offsets, [dict(self._offsets[topic]) for topic in (*self._requests, self._results)]
            if before == offsets and followers and all(follower.is_at_end for follower in followers):
                return


def check_bus(addresses: Addresses) -> None:
    """Raise `SettingsError` where the bus is Redis: nothing copies its topics to another region."""
    if not addresses.kafka:
        raise SettingsError(
            "PENSTOCK_REGION_COPIES and the adoption of a region need Kafka (PENSTOCK_KAFKA), whose topics MirrorMaker "
            "copies: with Redis as the bus a region that dies cannot be adopted"
        )


class CopyState(NamedTuple):
    """What is known of the copy of one region's pipeline."""

    num_open: int
    age_s: float | None
    """How long ago the newest heartbeat was written that was copied; None: none was."""


def watch_copies(
    meters: Meters, pipelines: Collection[str], regions: Sequence[str], read_state: Callable[[Pipeline, str], CopyState]
) -> None:
    """Let the metrics tell the state of the copies of these regions, as far as it can be read."""

    def read() -> Iterator[Reading]:
        with suppress(redis.RedisError):
            for name, region in itertools.product(sorted(pipelines), regions):
                state = read_state(Pipeline(name), region)
                yield Reading(catalog.REGION_OPEN, (name, region), state.num_open)
                if state.age_s is not None:
                    yield Reading(catalog.REGION_COPY_AGE, (name, region), state.age_s)

    meters.add_source(read)


def read_copy_state(client: "redis.Redis", pipeline: Pipeline, region: str) -> CopyState:
    """Return the state of a copy, from Redis."""
    num_open = client.hlen(pipeline.region_key(region, "open"))
    copied = cast("bytes | None", client.get(pipeline.region_key(region, "copied")))
    return CopyState(num_open, None if copied is None else max(0.0, now_s() - int(copied) / 1000))
