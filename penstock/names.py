"""Every topic, Redis key and event id of Penstock is built here and nowhere else.

Topics (one set a pipeline, `penstock.<pipeline>.…`):

| Topic                    | Written by          | Read by         | Message      |
|--------------------------|---------------------|-----------------|--------------|
| `.requests.<class>`      | clients, gateway    | prefill workers | `Request`    |
| `.jobs.<class>`          | prefill workers     | decode workers  | `Job`        |
| `.results`               | decode workers      | backends        | `Result`     |
| `.dead`                  | both workers        | operators       | as it came   |

Redis keys (the braces are Redis Cluster hash tags: one request's keys share a slot):

| Key                                    | Type   | Lives                                     | Owner          |
|----------------------------------------|--------|-------------------------------------------|----------------|
| `penstock:<pipeline>:{<id>}:record`    | hash   | a set time after the last change          | `record`       |
| `penstock:<pipeline>:{<id>}:log`       | stream | as the record                             | `record`       |
| `penstock:<pipeline>:{<id>}:live`      | channel| pub/sub, nothing stored                   | `record`       |
| `penstock:<pipeline>:{<id>}:trace`     | list   | a set time after the last span            | `telemetry`    |
| `penstock:<pipeline>:sessions:<stage>` | zset   | while any lives: session ids, by their time | `record`     |
| `penstock:<pipeline>:held:<session>`   | set    | as its session: ids that it holds         | `record`       |
| `penstock:<pipeline>:news:<session>`   | list   | until its session hears them              | `record`       |
| `penstock:<pipeline>:free:<stage>`     | zset   | until taken: ids, by when anybody may take them | `record` |
| `penstock:<pipeline>:readers:<stage>`  | hash   | while any is read: partitions and sessions | `record`      |
| `penstock:<pipeline>:worker:<stage>:<name>` | string | a few heartbeats                     | each worker    |
| `penstock:<pipeline>:left:<stage>:<name>` | string | a minute: a worker said goodbye        | each worker    |
| `penstock:<pipeline>:requeued`         | hash   | for good: a number an id                  | `penstock dlq` |
| `penstock:<pipeline>:servers`          | string | for good: the names of all stream servers, a line each | `servers` |
| `penstock:workers`                     | set    | until one looks: the heartbeats of all workers | each worker |
| `penstock:card:<id>`                   | string | as the records of its requests            | gateway        |
| `penstock:gateway:secret`              | string | for good: gateways make ids with it       | gateway        |
| `penstock:keys`, `penstock:tenants`    | hash   | until revoked: API keys, what tenants may | `ingest/keys`  |
| `penstock:rate:<tenant>`               | hash   | until the bucket would be full again      | `ingest/admission` |
| `penstock:batch:{<id>}:lease`          | string | a few seconds: who works on a batch       | `ingest/batch` |
| `penstock:shares:{<pipeline>}:tickets` | zset   | until settled: what is admitted, by end | `ingest/tenant_shares` |
| `penstock:shares:{<pipeline>}:tokens`, `:weights` | hash | as the tickets: sums by tenant   | `ingest/tenant_shares` |
| `penstock:meter:{<pipeline>}:places`   | hash   | for good: how far each part is counted    | `ingest/metering` |
| `penstock:meter:{<pipeline>}:seen`     | zset   | the ids counted last                      | `ingest/metering` |
| `penstock:meter:{<pipeline>}:day:<day>`| hash   | for good: sums by tenant                  | `ingest/metering` |
| `penstock:meter:{<pipeline>}:reader`   | string | a few seconds: who counts now             | `ingest/metering` |
| `penstock:kv:<block key, hex>`         | string | a set time after the last use             | `kvstore`      |
| `penstock:{kv}:used`                   | zset   | as the blocks: their order of use         | `kvstore`      |
| `penstock:{kv}:held`                   | zset   | the same of those that are leased         | `kvstore`      |
| `penstock:{kv}:sizes`                  | hash   | as the blocks: the bytes of each          | `kvstore`      |
| `penstock:{kv}:leases`                 | hash   | as the leases: owners and ends, by block  | `kvstore`      |
| `penstock:{kv}:ends`                   | zset   | as the leases: the last end, by block     | `kvstore`      |
| `penstock:{kv}:state`                  | hash   | as the blocks: sums, clock, budget        | `kvstore`      |
| `penstock:bus:{<pipeline>}:<topic>`    | stream | trimmed as deliveries are settled         | `StreamsBus`   |
| `penstock:bus:{<pipeline>}:member:<group>:<name>` | string | the bus's session timeout      | `StreamsBus`   |
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InvalidName

PriorityClass = Literal["interactive", "batch"]
CLASSES: tuple[PriorityClass, ...] = ("interactive", "batch")
Stage = Literal["prefill", "decode"]
Role = Stage | Literal["client", "gateway"]
"""What a process is to the servers, and so which rights it needs there."""
STAGES: tuple[Stage, ...] = ("prefill", "decode")

MAX_ID_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WORKER_KEY = re.compile(rf"penstock:({_NAME.pattern}):worker:[^:]+:.+", re.DOTALL)
_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}")

# Message headers.
VERSION_HEADER = "penstock-version"
TENANT_HEADER = "penstock-tenant"
CLASS_HEADER = "penstock-class"
DEADLINE_HEADER = "penstock-deadline"
ATTEMPT_HEADER = "penstock-attempt"
ORIGIN_HEADER = "penstock-origin"
REASON_HEADER = "penstock-reason"
STACK_HEADER = "penstock-stack"
BURIED_HEADER = "penstock-buried"
TRUNCATED_HEADER = "penstock-truncated"
OPERATION_HEADER = "penstock-operation"


def is_request_id(text: str) -> bool:
    """Whether `text` may name a request: 1 to 128 of `A-Z a-z 0-9 . _ : -`, beginning with a letter or digit."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class Pipeline:
    """The names of one pipeline: one model served through one set of topics."""

    name: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise InvalidName(f"{self.name!r} cannot name a pipeline: letters, digits, '-' and '_', at most 64")

    def request_topic(self, klass: PriorityClass) -> str:
        """Where clients put requests of a class."""
        return f"penstock.{self.name}.requests.{klass}"

    def job_topic(self, klass: PriorityClass) -> str:
        """Where prefill leaves job references of a class."""
        return f"penstock.{self.name}.jobs.{klass}"

    @property
    def results_topic(self) -> str:
        """The one result of each request."""
        return f"penstock.{self.name}.results"

    @property
    def dead_letter_topic(self) -> str:
        """What nobody can answer."""
        return f"penstock.{self.name}.dead"

    def input_topics(self, stage: Stage) -> dict[PriorityClass, str]:
        """The topics a stage works off, by class."""
        return {klass: self.request_topic(klass) if stage == "prefill" else self.job_topic(klass) for klass in CLASSES}

    def all_topics(self) -> list[str]:
        """All topics, in the order of the diagram."""
        work = [topic for stage in STAGES for topic in self.input_topics(stage).values()]
        return [*work, self.results_topic, self.dead_letter_topic]

    def old_retry_topics(self) -> list[str]:
        """Where an older version put what was to be tried again."""
        return [f"penstock.{self.name}.retries.{klass}" for klass in CLASSES]

    def consumer_group(self, stage: Stage) -> str:
        """The consumer group of a stage's workers."""
        return f"penstock.{self.name}.{stage}"

    def record_key(self, request_id: str) -> str:
        """What is known of a request."""
        return f"penstock:{self.name}:{{{request_id}}}:record"

    def sessions_key(self, stage: Stage) -> str:
        """Which sessions of a stage's workers live, and until when."""
        return f"penstock:{self.name}:sessions:{stage}"

    def held_key(self, session: str) -> str:
        """Which requests a session holds."""
        return f"penstock:{self.name}:held:{session}"

    def news_key(self, session: str) -> str:
        """What a session's worker has to hear."""
        return f"penstock:{self.name}:news:{session}"

    def free_key(self, stage: Stage) -> str:
        """Which requests any worker of a stage may take, and from when on."""
        return f"penstock:{self.name}:free:{stage}"

    def readers_key(self, stage: Stage) -> str:
        """Which session reads each partition."""
        return f"penstock:{self.name}:readers:{stage}"

    def log_key(self, request_id: str) -> str:
        """A request's token log."""
        return f"penstock:{self.name}:{{{request_id}}}:log"

    def live_channel(self, request_id: str) -> str:
        """Where the events of the log are published as they are appended."""
        return f"penstock:{self.name}:{{{request_id}}}:live"

    def lease_owner(self, request_id: str) -> str:
        """Whose the leases on a job's KV blocks are; pipelines may share a store."""
        return f"{self.name}:{request_id}"

    def worker_key(self, stage: str, name: str) -> str:
        """A worker's heartbeat."""
        return f"{self.worker_prefix}{stage}:{name}"

    @property
    def worker_prefix(self) -> str:
        """What all its workers' heartbeats begin with."""
        return f"penstock:{self.name}:worker:"

    def left_key(self, stage: str, name: str) -> str:
        """A worker's goodbye: it was not lost."""
        return f"penstock:{self.name}:left:{stage}:{name}"

    def trace_key(self, request_id: str) -> str:
        """The spans of a request."""
        return f"penstock:{self.name}:{{{request_id}}}:trace"

    @property
    def requeued_key(self) -> str:
        """How often dead requests were put back, by id."""
        return f"penstock:{self.name}:requeued"

    @property
    def servers_key(self) -> str:
        """The names of the servers that requests are spread over, a line each; on each of them."""
        return f"penstock:{self.name}:servers"

    def meter_key(self, part: str) -> str:
        """What metering keeps: `places`, `seen`, `reader`, `day:<YYYY-MM-DD>`."""
        return f"penstock:meter:{{{self.name}}}:{part}"

    def shares_key(self, part: str) -> str:
        """What tenants hold of the pipeline: `tickets`, `tokens`, `weights`."""
        return f"penstock:shares:{{{self.name}}}:{part}"

    def stream_key(self, topic: str) -> str:
        """The Redis stream that holds a topic."""
        return f"penstock:bus:{{{self.name}}}:{topic}"

    def member_key(self, group: str, member: str) -> str:
        """Says that a member of a group lives."""
        return f"penstock:bus:{{{self.name}}}:member:{group}:{member}"


KEYS_KEY, TENANTS_KEY = "penstock:keys", "penstock:tenants"
"""API keys and tenants, where they are in Redis."""


def rate_key(tenant: str) -> str:
    """What a tenant may still ask for this minute."""
    return f"penstock:rate:{tenant}"


WORKERS_KEY = "penstock:workers"
"""The heartbeat keys of all workers of all pipelines. Each adds its own with every beat; whoever reads them takes off
those that are gone.
"""


def pipeline_of_worker(key: str) -> str:
    """The pipeline that a heartbeat key (`Pipeline.worker_key`) is of; raises `InvalidName` for any other key."""
    match = _WORKER_KEY.fullmatch(key)
    if match is None:
        raise InvalidName(f"{key!r} is not a heartbeat key (penstock:<pipeline>:worker:<stage>:<name>)")
    return match[1]


def card_key(stream_id: str) -> str:
    """What gateways know of a request that one of them took."""
    return f"penstock:card:{stream_id}"


GATEWAY_SECRET_KEY = "penstock:gateway:secret"
"""What gateways make the ids of requests with an `Idempotency-Key` of."""


def batch_lease_key(batch_id: str) -> str:
    """Who works on a batch now."""
    return f"penstock:batch:{{{batch_id}}}:lease"


def kv_key(block_key: bytes) -> str:
    """The Redis key of a stored KV block."""
    return f"penstock:kv:{block_key.hex()}"


KV_INDEX = tuple(f"penstock:{{kv}}:{part}" for part in ("used", "held", "sizes", "leases", "ends", "state"))
"""What is known of the stored blocks of one server, in the order in which scripts take it."""


# Event ids: `<position>-<rolling hash>`. The hash covers every token id up to and including the position, so a
# reader that resumes names what it has seen, and a log that says something else is noticed.

START_HASH = "0" * 16


def roll_hash(previous: str, token_id: int) -> str:
    """The rolling hash after `token_id`: 16 hex digits over the hash before it and the token (4 bytes, big endian)."""
    return hashlib.sha256(bytes.fromhex(previous) + token_id.to_bytes(4, "big")).hexdigest()[:16]


def event_id(position: int, rolling_hash: str) -> str:
    """The event id of the token at `position` (from 0)."""
    return f"{position}-{rolling_hash}"


_EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,8})-([0-9a-f]{16})")


def parse_event_id(text: str) -> tuple[int, str]:
    """Position and rolling hash of an event id; raises `InvalidName` for anything else."""
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        raise InvalidName(f"{text!r} is not an event id (<position>-<16 hex digits>)")
    return int(match[1]), match[2]
