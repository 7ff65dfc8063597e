"""The bus on Redis Streams: one stream for each topic, one consumer group for each stage. It is the embedded default.

A message stays in its stream until it is settled, and is then deleted. Results and dead letters are kept: their streams
are trimmed to about `MAX_KEPT_ENTRIES`, but results that the usage meter has still to count are never trimmed. The
server's `appendfsync` decides how durable messages are.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import redis

from penstock.bus.contract import (
    MAX_FOLLOWED_MESSAGES,
    FollowedMessage,
    Member,
    Outgoing,
    check_size,
    create_started_future,
    find_size_error,
)
from penstock.bus.joined import join_both
from penstock.bus.streams.client import (
    bus_errors,
    connect_client,
    create_groups,
    decode_entry,
    encode_entry,
    to_bus_unavailable,
)
from penstock.bus.streams.joined import JoinedStreams
from penstock.bus.streams.member import StreamsMember
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError
from penstock.names import STAGES, Pipeline, WorkerKind
from penstock.redis.client import REDIS_TIMEOUT_S, execute_all, execute_pipeline, raise_first_error
from penstock.redis.urls import hide_password

STREAM_PARTITION = "all"
"""The name of a stream's only partition."""
MAX_PAGE_ENTRIES = 1000
PUBLISH_TIMEOUT_S = 5.0
"""How long a large message may take."""


class StreamsBus:
    """Redis Streams as the bus of one pipeline."""

    def __init__(self, pipeline: Pipeline, url: str, settings: BusSettings) -> None:
        self.pipeline = pipeline
        self.url = url
        self.settings = settings

    def create_topics(self, tenant: str = "") -> list[str]:
        """Create the streams and both stages' groups. A group reads what was published before it was created, too.

        Raise `SettingsError` for a tenant's own.
        """
        if tenant:
            raise SettingsError("topics of a tenant's own need Kafka as the bus: set PENSTOCK_KAFKA")
        missing = self.find_missing_topics()
        with contextlib.closing(connect_client(self.url)) as client, bus_errors():
            for stage in STAGES:
                create_groups(client, self.pipeline, stage)
            for topic in {self.pipeline.results_topic, self.pipeline.dead_letter_topic}.intersection(missing):
                # This is how to create an empty stream.
                client.xgroup_create(self._stream_key(topic), "maker", id="0", mkstream=True)
                client.xgroup_destroy(self._stream_key(topic), "maker")
        return missing

    def find_missing_topics(self) -> list[str]:
        """Return the pipeline's topics that have no stream."""
        with contextlib.closing(connect_client(self.url)) as client, bus_errors():
            return [topic for topic in self.pipeline.all_topics() if not client.exists(self._stream_key(topic))]

    def find_own_topics(self) -> list[str]:
        """Return none: only Kafka has them."""
        return []

    def create_publisher(self) -> "StreamsPublisher":
        """Return a publisher with a connection of its own."""
        return StreamsPublisher(self)

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group, and return the member. An older member of the same name is fenced."""
        join = partial(StreamsMember, self.pipeline, self.url, self.settings, name=name)
        if stage == "auto":
            return JoinedStreams(self.pipeline, *join_both(join), self.url)
        return join(stage)

    def count_unsettled(self) -> dict[str, int]:
        """Return the length of each input topic's stream: settled messages are deleted, and only one group reads it."""
        topics = [topic for stage in STAGES for topic in self.pipeline.input_topics(stage).values()]
        with (
            contextlib.closing(connect_client(self.url)) as client,
            bus_errors(),
            client.pipeline(transaction=False) as batch,
        ):
            for topic in topics:
                batch.xlen(self._stream_key(topic))
            return dict(zip(topics, execute_pipeline(batch), strict=True))

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places at which no entry is; see `contract.Bus.find_gone`."""
        with (
            contextlib.closing(connect_client(self.url)) as client,
            bus_errors(),
            client.pipeline(transaction=False) as batch,
        ):
            for place in places:
                topic, _, entry_id = place.rpartition("@")
                batch.xrange(self._stream_key(topic), entry_id, entry_id)
            return {place for place, found in zip(places, execute_pipeline(batch), strict=True) if not found}

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> "StreamsFollower":
        """Return a follower of a topic's stream. Its only partition is `STREAM_PARTITION`; offsets are entries' ids."""
        return StreamsFollower(self, topic, after.get(STREAM_PARTITION, "0"))

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now in a topic. Settled messages are not there any more."""
        found: list[Outgoing] = []
        start = "-"
        with contextlib.closing(connect_client(self.url)) as client, bus_errors():
            while True:
                page: Any = client.xrange(self._stream_key(topic), start, "+", count=MAX_PAGE_ENTRIES)
                if not page:
                    return found
                found += [Outgoing(topic, *decode_entry(fields)) for _, fields in page]
                start = f"({page[-1][0].decode()}"

    def check_connection(self, timeout_s: float = 5.0) -> str:
        """Return one line about the server. Raise `BusUnavailable`."""
        with contextlib.closing(connect_client(self.url, timeout_s)) as client, bus_errors():
            info = client.info("server")
        name = info.get("server_name", "redis")
        version = info.get("valkey_version") or info.get("redis_version")
        return f"Redis Streams on {name} {version} at {hide_password(self.url)}"

    def close(self) -> None:
        """Do nothing: each call opens a connection of its own."""

    def _stream_key(self, topic: str) -> str:
        return self.pipeline.stream_key(topic)


class StreamsFollower:
    """Reads a stream from an entry on."""

    def __init__(self, bus: StreamsBus, topic: str, after: str) -> None:
        self._topic, self._after = topic, after
        self._key = bus.pipeline.stream_key(topic)
        self._client = connect_client(bus.url)

    def read_messages(self, timeout_s: float, max_messages: int = MAX_FOLLOWED_MESSAGES) -> list[FollowedMessage]:
        """Return the next messages; see `contract.Follower.read_messages`."""
        found: list[FollowedMessage] = []
        end = time.monotonic() + timeout_s
        while not found:
            left_s = min(end - time.monotonic(), REDIS_TIMEOUT_S / 2)
            with bus_errors():
                block = max(1, int(left_s * 1000))
                reply: Any = self._client.xread(
                    {self._key: self._after}, count=max_messages, block=block if left_s > 0 else None
                )
            for _, entries in reply or ():
                found += [
                    FollowedMessage(STREAM_PARTITION, id_.decode(), Outgoing(self._topic, *decode_entry(raw)))
                    for id_, raw in entries
                ]
            if left_s <= 0:
                break
        if found:
            self._after = found[-1].offset
        return found

    def close(self) -> None:
        """Free the connection."""
        self._client.close()


class StreamsPublisher:
    """Adds messages to streams."""

    def __init__(self, bus: StreamsBus) -> None:
        self._bus = bus
        self._client = connect_client(bus.url, PUBLISH_TIMEOUT_S)

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[str]]:
        """Add the messages in one round trip, and return a future for each; see `contract.Publisher.send_messages`."""
        sent = [create_started_future() for _ in messages]
        replies: Iterator[Any]
        try:
            fitting = [message for message in messages if find_size_error(message) is None]
            replies = iter(execute_all(self._client, [self._make_command(message) for message in fitting]))
        except redis.RedisError as error:
            replies = itertools.repeat(error)
        for message, future in zip(messages, sent, strict=True):
            found = find_size_error(message) or next(replies)
            if isinstance(found, Exception):
                future.set_exception(to_bus_unavailable(found) if isinstance(found, redis.RedisError) else found)
            else:
                future.set_result(_name_place(message, found))
        return sent

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """Add the messages, all or none. Return their places. Raise `BusUnavailable` or `RequestTooLarge`."""
        check_size(messages)
        commands = [self._make_command(message) for message in messages]
        if len(messages) > 1:
            commands = [["MULTI"], *commands, ["EXEC"]]
        with bus_errors():
            replies = raise_first_error(execute_all(self._client, commands))
            if len(messages) > 1:
                replies = raise_first_error(replies[-1])
        return [_name_place(message, entry_id) for message, entry_id in zip(messages, replies, strict=True)]

    def close(self) -> None:
        """Free the connection."""
        self._client.close()

    def _make_command(self, message: Outgoing) -> list[str | bytes]:
        words = [word for pair in encode_entry(message).items() for word in pair]
        return ["XADD", self._bus.pipeline.stream_key(message.topic), "*", *words]


def _name_place(message: Outgoing, entry_id: bytes) -> str:
    return f"{message.topic}@{entry_id.decode()}"
