"""How many messages each stage's group has still to settle: the log's end against what the group committed.

Of the offsets between the two those that the commit's metadata has as finished do not count (`offsets`), so one slow
request does not look like the thousands that were finished behind it. What nobody has read yet counts by offset: of
jobs, which are written in transactions, up to twice, as every transaction leaves a marker behind.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka import ANSWER_S
from penstock.bus.offsets import decode
from penstock.names import STAGES, Pipeline, Stage

PATIENCE_S = 3.0
"""How long brokers may need to agree who leads a partition."""
PASSING = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)

Partition = tuple[str, int]


class Backlog:
    """Asks the brokers, over one connection that is kept. Thread-safe."""

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._admin = AdminClient(dict(clients))

    def unsettled(self) -> dict[str, int]:
        """Messages of each work topic that are not settled. Raises `KafkaException` or `TimeoutError`."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._look()
            except KafkaException as raised:
                if raised.args[0].code() not in PASSING or time.monotonic() > until:
                    raise
            time.sleep(0.05)

    def _look(self) -> dict[str, int]:
        topics = {topic: stage for stage in STAGES for topic in self._pipeline.inputs(stage).values()}
        partitions = self._partitions(list(topics))
        ends = self._ask(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        found = dict.fromkeys(topics, 0)
        for stage in STAGES:
            mine = [partition for partition in partitions if topics[partition[0]] == stage]
            commits = self._commits(stage, mine)
            fresh = [partition for partition in mine if commits[partition][0] < 0]
            begins = self._ask(fresh, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
            for partition in mine:
                committed, metadata = commits[partition]
                begin = begins.get(partition, committed)
                done = sum(high + 1 - max(low, begin) for low, high in decode(metadata, committed) if high >= begin)
                found[partition[0]] += max(0, ends[partition] - begin - done)
        return found

    def _partitions(self, topics: list[str]) -> list[Partition]:
        known = self._admin.list_topics(timeout=ANSWER_S).topics
        return [(topic, number) for topic in topics if topic in known for number in known[topic].partitions]

    def _ask(self, partitions: list[Partition], what: OffsetSpec) -> dict[Partition, int]:
        """Where the logs begin or end, for readers of what is committed."""
        if not partitions:
            return {}
        asked: dict[TopicPartition, Future[Any]] = self._admin.list_offsets(
            {TopicPartition(*partition): what for partition in partitions},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ANSWER_S,
        )
        return {(place.topic, place.partition): future.result(ANSWER_S).offset for place, future in asked.items()}

    def _commits(self, stage: Stage, partitions: list[Partition]) -> dict[Partition, tuple[int, str | None]]:
        """Offset and metadata that the stage's group committed last; the offset is negative where there is none."""
        if not partitions:
            return {}
        group = self._pipeline.group(stage)
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(*partition) for partition in partitions])
        reply = self._admin.list_consumer_group_offsets([wanted], request_timeout=ANSWER_S)[group].result(ANSWER_S)
        for place in reply.topic_partitions:
            if place.error:
                raise KafkaException(place.error)
        return {(place.topic, place.partition): (place.offset, place.metadata) for place in reply.topic_partitions}
