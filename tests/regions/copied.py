"""A region's copy as MirrorMaker leaves it, written here: topics with the region's name before them."""

import struct
from collections.abc import Sequence
from contextlib import closing
from typing import cast

import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.ingest.regions.copies import CopyIndex
from penstock.messages import Request, Result, Sampling, now_s
from penstock.names import CLASSES, HEARTBEATS_TOPIC, Pipeline, copy_topic
from penstock.redis.client import redis_client

BUS = BusSettings(partitions=2, replication=1)


class CopiedRegion:
    """The copy of one region that no other test uses, beside the own topics of its pipeline."""

    def __init__(self, pipeline: Pipeline, kafka: str, redis_url: str) -> None:
        self.pipeline, self.name = pipeline, f"r{pipeline.name}"
        self.addresses = Addresses(kafka=kafka, stream_url=redis_url, pipeline=pipeline.name)
        self.client: redis.Redis = redis_client(redis_url)
        self.bus = connect_bus(self.addresses, BUS)
        self.bus.create_topics()
        topics = [*map(pipeline.request_topic, CLASSES), pipeline.results_topic, HEARTBEATS_TOPIC]
        copies = [NewTopic(copy_topic(self.name, topic), 2, 1) for topic in topics]
        admin = AdminClient({"bootstrap.servers": kafka})
        for made in admin.create_topics(copies).values():
            made.result(20)
        self._producer = Producer({"bootstrap.servers": kafka})

    def write(self, topic: str, value: bytes, key: str, headers: dict[str, str] | None = None) -> None:
        """Write a message into the copy of a topic."""
        pairs: dict[str, str | bytes | None] = {**(headers or {})}
        self._producer.produce(copy_topic(self.name, topic), value, key=key, headers=pairs)
        self._producer.flush()

    def request(self, *ids: str, headers: dict[str, str] | None = None, deadline: float | None = None) -> None:
        """Copy requests."""
        for one in ids:
            value = Request(id=one, prompt="In the beginning", sampling=Sampling(max_tokens=8), deadline=deadline)
            self.write(self.pipeline.request_topic("interactive"), value.encode(), one, headers)

    def answer(self, *ids: str) -> None:
        """Copy results."""
        for one in ids:
            self.write(self.pipeline.results_topic, Result(id=one, finish_reason="stop").encode(), one)

    def beat(self, age_s: float = 0.0) -> None:
        """Copy a heartbeat that was written so long ago."""
        self.write(HEARTBEATS_TOPIC, struct.pack(">hq", 0, int((now_s() - age_s) * 1000)), "eu")

    def open_index(self) -> CopyIndex:
        """Return an index of this region, as a gateway has it."""
        return CopyIndex(self.addresses, BUS, self.name)

    def index_all(self) -> None:
        """Index all that was copied."""
        with closing(self.open_index()) as index:
            index.take_all()

    def list_ids(self, part: str) -> list[str]:
        """Return the ids that are open, or taken, in order."""
        found = cast("list[bytes]", self.client.hkeys(self.pipeline.region_key(self.name, part)))
        return sorted(one.decode() for one in found)

    def read_published(self) -> Sequence[Outgoing]:
        """Return what is in the own topic of requests."""
        return self.bus.read_all(self.pipeline.request_topic("interactive"))

    def close(self) -> None:
        self.client.close()
