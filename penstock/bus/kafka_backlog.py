"""How many messages each stage's group has still to settle: the log's end against what the group committed.

Of the offsets between the two those that the commit's metadata has as finished do not count (`offsets`), so one slow
request does not look like the thousands that were finished behind it. What nobody has read yet counts by offset: of
jobs, which are written in transactions, up to twice, as every transaction leaves a marker behind.
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka_ask import Commits, Partition, offsets_of, partitions_of, patiently
from penstock.bus.offsets import decode
from penstock.names import STAGES, Pipeline


class Backlog:
    """Asks the brokers, over connections that are kept. Thread-safe."""

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._admin = AdminClient(dict(clients))
        self._commits = {stage: Commits(clients, pipeline.group(stage)) for stage in STAGES}

    def unsettled(self) -> dict[str, int]:
        """Messages of each work topic that are not settled. Raises `KafkaException` or `TimeoutError`."""
        return patiently(self._look)

    def _look(self) -> dict[str, int]:
        topics = {topic: stage for stage in STAGES for topic in self._pipeline.inputs(stage).values()}
        partitions = partitions_of(self._admin, topics)
        ends = self._ask(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        found = dict.fromkeys(topics, 0)
        for stage in STAGES:
            mine = [partition for partition in partitions if topics[partition[0]] == stage]
            commits = self._commits[stage].of(mine)
            fresh = [partition for partition in mine if commits[partition][0] < 0]
            begins = self._ask(fresh, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
            for partition in mine:
                committed, metadata = commits[partition]
                begin = begins.get(partition, committed)
                done = sum(high + 1 - max(low, begin) for low, high in decode(metadata, committed) if high >= begin)
                found[partition[0]] += max(0, ends[partition] - begin - done)
        return found

    def _ask(self, partitions: list[Partition], what: OffsetSpec) -> dict[Partition, int]:
        """Where the logs begin or end, for readers of what is committed."""
        return offsets_of(self._admin, partitions, what, IsolationLevel.READ_COMMITTED)
