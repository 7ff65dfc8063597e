"""How many messages each stage's group has still to settle: the log's end against what the group committed.

Of the offsets between the two those that the commit's metadata has as finished do not count (`offsets`), so one slow
request does not look like the thousands that were finished behind it. What nobody has read yet counts by offset.
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka.ask import CommittedOffsets, Partition, list_partitions, read_log_offsets, retry_during_election
from penstock.bus.kafka.offsets import decode_ranges
from penstock.names import STAGES, Pipeline


class GroupLag:
    """Asks the brokers, over connections that are kept. Thread-safe."""

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._admin = AdminClient(dict(clients))
        self._commits = {stage: CommittedOffsets(clients, pipeline.consumer_group(stage)) for stage in STAGES}

    def count_unsettled(self) -> dict[str, int]:
        """Messages of each work topic that are not settled. Raises `KafkaException` or `TimeoutError`."""
        return retry_during_election(self._count_by_topic)

    def _count_by_topic(self) -> dict[str, int]:
        topics = {topic: stage for stage in STAGES for topic in self._pipeline.input_topics(stage).values()}
        partitions = list_partitions(self._admin, topics)
        found = dict.fromkeys(topics, 0)
        for stage in STAGES:
            mine = [partition for partition in partitions if topics[partition[0]] == stage]
            for (topic, _), count in count_unsettled_messages(self._admin, self._commits[stage], mine).items():
                found[topic] += count
        return found


def count_unsettled_messages(
    admin: AdminClient, group: CommittedOffsets, partitions: list[Partition]
) -> dict[Partition, int]:
    """How many messages of each partition a group has still to settle. Raises as `GroupLag.count_unsettled`."""
    level, found = IsolationLevel.READ_COMMITTED, dict[Partition, int]()
    commits = group.read_offsets(partitions)
    fresh = [partition for partition in partitions if commits[partition][0] < 0]
    begins = read_log_offsets(admin, fresh, OffsetSpec.earliest(), level)  # type: ignore[no-untyped-call]
    ends = read_log_offsets(admin, partitions, OffsetSpec.latest(), level)  # type: ignore[no-untyped-call]
    for partition in partitions:
        committed, metadata = commits[partition]
        begin = begins.get(partition, committed)
        done = sum(high + 1 - max(low, begin) for low, high in decode_ranges(metadata, committed) if high >= begin)
        found[partition] = max(0, ends[partition] - begin - done)
    return found
