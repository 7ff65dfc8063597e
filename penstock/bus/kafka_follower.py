"""Following a topic on Kafka: read_committed, from offsets that somebody else keeps, in no group."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from penstock.bus.contract import Followed, Outgoing
from penstock.bus.kafka import ANSWER_S, bus_errors, read_headers, read_key


class KafkaFollower:
    """Reads every partition that the topic has when it begins."""

    def __init__(self, clients: Mapping[str, Any], topic: str, after: Mapping[str, str]) -> None:
        self._topic = topic
        self._consumer = Consumer(
            dict(clients)
            | {
                "group.id": f"{topic}.follower",  # it must have one; nothing is committed under it
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                # An offset that is not kept any more: go on with the oldest that is.
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
                "queued.max.messages.kbytes": 16384,
            }
        )
        try:
            with bus_errors():
                known = self._consumer.list_topics(topic, ANSWER_S).topics[topic]
                if known.error is not None:
                    raise KafkaException(known.error)
                self._consumer.assign(
                    [
                        TopicPartition(
                            topic, number, int(after[str(number)]) + 1 if str(number) in after else OFFSET_BEGINNING
                        )
                        for number in known.partitions
                    ]
                )
        except BaseException:
            self._consumer.close()
            raise

    def read(self, timeout_s: float, most: int = 500) -> list[Followed]:
        """The next messages; see `contract.Follower.read`."""
        found: list[Followed] = []
        with bus_errors():
            first = self._consumer.poll(timeout_s)
            for message in () if first is None else (first, *self._consumer.consume(most - 1, 0)):
                error = message.error()
                if error is None:
                    outgoing = Outgoing(self._topic, message.value() or b"", read_key(message), read_headers(message))
                    found.append(Followed(str(message.partition()), str(message.offset()), outgoing))
                elif not error.retriable():
                    raise KafkaException(error)
        return found

    def close(self) -> None:
        """Free the connections."""
        self._consumer.close()
