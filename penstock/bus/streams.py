"""The bus on Redis Streams: one stream a topic, one consumer group a stage. The embedded default.

A message stays in its stream until it is settled, and is then deleted; results and dead letters are kept,
trimmed to about `KEPT_ENTRIES`. What is published is as durable as the server's `appendfsync` makes it.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.bus.contract import Outgoing, check_size
from penstock.errors import BusUnavailable
from penstock.names import CLASSES, STAGES, Pipeline, Stage
from penstock.reach import ANSWER_S, replies_to
from penstock.settings import BusSettings, shown

if TYPE_CHECKING:
    from penstock.bus.streams_member import StreamsMember

KEPT_ENTRIES = 50_000
"""About how many results and dead letters are kept."""

READ_ALL_PAGE = 1000
PUBLISH_S = 5.0
"""How long a large message may take."""


class StreamsBus:
    """Redis Streams as the bus of one pipeline."""

    def __init__(self, pipeline: Pipeline, url: str, settings: BusSettings) -> None:
        self.pipeline = pipeline
        self.url = url
        self.settings = settings

    def create_topics(self) -> list[str]:
        """Make the streams and both stages' groups; a group sees what was published before it was made."""
        missing = self.missing_topics()
        with contextlib.closing(connect(self.url)) as client, bus_errors():
            for stage in STAGES:
                create_groups(client, self.pipeline, stage)
            for topic in {self.pipeline.results, self.pipeline.dead}.intersection(missing):
                client.xgroup_create(self._key(topic), "maker", id="0", mkstream=True)  # how to make an empty one
                client.xgroup_destroy(self._key(topic), "maker")
        return missing

    def missing_topics(self) -> list[str]:
        """Those of the pipeline's topics that have no stream."""
        with contextlib.closing(connect(self.url)) as client, bus_errors():
            return [topic for topic in self.pipeline.topics() if not client.exists(self._key(topic))]

    def publisher(self) -> "StreamsPublisher":
        """A producing side of its own."""
        return StreamsPublisher(self)

    def member(self, stage: Stage, name: str) -> "StreamsMember":
        """Join a stage's group; an older member of the same name is fenced."""
        from penstock.bus.streams_member import StreamsMember

        return StreamsMember(self, stage, name)

    def unsettled(self) -> dict[str, int]:
        """The length of each work stream: what is settled is deleted, and one group reads it."""
        topics = [topic for stage in STAGES for topic in self.pipeline.inputs(stage).values()]
        with contextlib.closing(connect(self.url)) as client, bus_errors(), client.pipeline(transaction=False) as batch:
            for topic in topics:
                batch.xlen(self._key(topic))
            return dict(zip(topics, replies_to(batch), strict=True))

    def read_all(self, topic: str) -> list[Outgoing]:
        """Every message now in a topic; work that is settled is not there any more."""
        found: list[Outgoing] = []
        start = "-"
        with contextlib.closing(connect(self.url)) as client, bus_errors():
            while True:
                page: Any = client.xrange(self._key(topic), start, "+", count=READ_ALL_PAGE)
                if not page:
                    return found
                found += [Outgoing(topic, *decode(fields)) for _, fields in page]
                start = f"({page[-1][0].decode()}"

    def check(self, timeout_s: float = 5.0) -> str:
        """One line about the server reached; raises `BusUnavailable`."""
        with contextlib.closing(connect(self.url, timeout_s)) as client, bus_errors():
            info = client.info("server")
        name = info.get("server_name", "redis")
        return f"Redis Streams on {name} {info.get('valkey_version') or info.get('redis_version')} at {shown(self.url)}"

    def _key(self, topic: str) -> str:
        return self.pipeline.stream_key(topic)


class StreamsPublisher:
    """Adds messages to streams."""

    def __init__(self, bus: StreamsBus) -> None:
        self._bus = bus
        self._client = connect(bus.url, PUBLISH_S)

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Add the messages, all or none; raises `BusUnavailable`, or `RequestTooLarge`."""
        check_size(messages)
        with bus_errors(), self._client.pipeline(transaction=len(messages) > 1) as batch:
            for message in messages:
                fields: dict[Any, Any] = encode(message)
                keep = kept(self._bus.pipeline, message.topic) or None
                batch.xadd(self._bus.pipeline.stream_key(message.topic), fields, maxlen=keep)
            replies_to(batch)

    def close(self) -> None:
        """Free the connection."""
        self._client.close()


def connect(url: str, timeout_s: float = ANSWER_S) -> "redis.Redis":
    """A client that never repeats a command by itself: whoever calls knows what a repetition means."""
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits)


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Turn what the client raises into `BusUnavailable`."""
    try:
        yield
    except redis.RedisError as error:
        raise BusUnavailable(f"Redis: {error}") from error


def create_groups(client: "redis.Redis", pipeline: Pipeline, stage: Stage) -> None:
    """Make a stage's group on its streams and on the retry topics where it is missing, from the beginning."""
    for topic in (*pipeline.inputs(stage).values(), *map(pipeline.retries, CLASSES)):
        try:
            client.xgroup_create(pipeline.stream_key(topic), pipeline.group(stage), id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def kept(pipeline: Pipeline, topic: str) -> int:
    """To how many entries a topic is trimmed; 0 for work, which is never trimmed."""
    return KEPT_ENTRIES if topic in {pipeline.results, pipeline.dead} else 0


def encode(message: Outgoing) -> dict[str, str | bytes]:
    """A stream entry: `value`, and where there are any `key` and `headers` (a JSON object)."""
    fields: dict[str, str | bytes] = {"value": message.value}
    if message.key is not None:
        fields["key"] = message.key
    if message.headers:
        fields["headers"] = json.dumps(dict(message.headers))
    return fields


def _utf8(text: str) -> str:
    """Text that can be sent on: JSON may hold half a character."""
    return text.encode(errors="replace").decode()


def decode(fields: dict[bytes, bytes]) -> tuple[bytes, str | None, dict[str, str]]:
    """Value, key and headers of a stream entry. Headers that are no JSON object of strings are left out."""
    key = fields.get(b"key")
    headers: dict[str, str] = {}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(fields.get(b"headers", b"{}"))
        if isinstance(found, dict):
            headers = {_utf8(name): _utf8(text) for name, text in found.items() if isinstance(text, str)}
    return fields.get(b"value", b""), None if key is None else key.decode(errors="replace"), headers
