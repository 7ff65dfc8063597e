"""Every topic, Redis key and event id of Penstock is built here and nowhere else.

Topics (one set a pipeline, `penstock.<pipeline>.…`):

| Topic                    | Written by          | Read by         | Message      |
|--------------------------|---------------------|-----------------|--------------|
| `.requests.<class>`      | clients, gateway    | prefill, auto, endpoint or embed workers | `Request` |
| `.jobs.<class>`          | prefill and auto workers | decode and auto workers | `Job` |
| `.results`               | all workers         | backends        | `Result`     |
| `.dead`                  | all workers         | operators       | as it came   |

A tenant whose data stays has topics of its own: each of these names with `.t-<16 hex of SHA-256 of the tenant>` behind
it. They are read and written as those of all tenants; what follows from a message of one goes to the same tenant's.

Redis keys (the braces are Redis Cluster hash tags: one request's keys share a slot):

| Key                                    | Type   | Lives                                     | Owner          |
|----------------------------------------|--------|-------------------------------------------|----------------|
| `penstock:<pipeline>:{<id>}:record`    | hash   | a set time after the last change          | `record`       |
| `penstock:<pipeline>:{<id>}:log`       | stream | as the record                             | `record`       |
| `penstock:<pipeline>:ended:<day>:<byte>` | hash | days: digests of ids that ended then      | `record`       |
| `penstock:<pipeline>:{<id>}:live`      | channel| pub/sub, nothing stored                   | `record`       |
| `penstock:<pipeline>:{<id>}:trace`     | list   | a set time after the last span            | `telemetry`    |
| `penstock:<pipeline>:sessions`         | zset   | while any lives: session ids, by their time | `record`     |
| `penstock:<pipeline>:held:<session>`   | set    | as its session: ids that it holds         | `record`       |
| `penstock:<pipeline>:news:<session>`   | list   | until its session reads them              | `record`       |
| `penstock:<pipeline>:free:<stage>`     | zset   | until taken: ids, by when anybody may take them | `record` |
| `penstock:<pipeline>:partition_readers` | hash  | while any is read: partitions and sessions | `record`      |
| `penstock:<pipeline>:worker:<stage>:<name>` | string | a few heartbeats                     | each worker    |
| `penstock:<pipeline>:left:<stage>:<name>` | string | a minute: a worker shut down normally  | each worker    |
| `penstock:<pipeline>:requeued`         | hash   | for good: a number an id                  | `penstock dlq` |
| `penstock:<pipeline>:servers`          | string | for good: the names of all stream servers, a line each | `servers` |
| `penstock:workers`                     | set    | while they last: the keys of all heartbeats | each worker |
| `penstock:<pipeline>:responses`        | hash   | until in the object store: kept responses | gateway        |
| `penstock:<pipeline>:responses:lease`  | string | three rounds: the gateway that moves them | gateway        |
| `penstock:<pipeline>:autoscale`        | string | a minute: the controller's last decision  | `penstock autoscale` |
| `penstock:<pipeline>:autoscale:lease`  | string | three looks: the controller that decides  | `penstock autoscale` |
| `penstock:<pipeline>:regions`          | string | seconds: how its gateway sees all regions | gateway        |
| `penstock:regions:adopted`             | hash   | until given back: regions adopted here    | `penstock regions` |
| `penstock:regions:joined`              | string | seconds: peers said what they adopted     | gateway        |
| `penstock:regions:fingerprints`        | hash   | for good: the models of each region       | gateway        |
| `penstock:regions:used`                | hash   | for good: what tenants with limits used here | `ingest/admission` |
| `penstock:regions:settled:<region>`    | hash   | for good: what of its use is settled here | `ingest/regions` |
| `penstock:webhooks`                    | set    | for good: tenants that have had events    | `ingest/webhooks` |
| `penstock:webhooks:<tenant>`           | zset   | until delivered or given up: events       | `ingest/webhooks` |
| `penstock:webhooks-secret`, `-url`     | string | days: gateways have these settings        | `ingest/webhooks` |
| `penstock:card:<id>`                   | string | as the records of its requests            | gateway        |
| `penstock:card:<id>:readers`           | hash   | as the card, once a reader has left       | gateway        |
| `penstock:picture:<digest>`            | string | as a record that waits, since it was read last | `pictures` |
| `penstock:gateway:secret`              | string | for good: gateways make ids with it       | gateway        |
| `penstock:keys`, `penstock:tenants`    | hash   | until revoked: API keys, what tenants may | `ingest/keys`  |
| `penstock:rate:<tenant>`               | hash   | until the bucket would be full again      | `ingest/admission` |
| `penstock:batch:{<id>}:lease`          | string | a few seconds: the gateway that runs it   | `ingest/batch` |
| `penstock:shares:{<pipeline>}:tickets` | zset   | until settled: what is admitted, by end | `ingest/admission` |
| `penstock:shares:{<pipeline>}:tokens`, `:weights` | hash | as the tickets: sums by tenant   | `ingest/admission` |
| `penstock:meter:{<pipeline>}:places`   | hash   | for good: how far each part is counted    | `ingest/metering` |
| `penstock:meter:{<pipeline>}:seen`     | zset   | the ids counted last                      | `ingest/metering` |
| `penstock:meter:{<pipeline>}:day:<day>`| hash   | for good: sums by tenant                  | `ingest/metering` |
| `penstock:meter:{<pipeline>}:reader`   | string | a few seconds: the gateway that counts    | `ingest/metering` |
| `penstock:<pipeline>:region:<name>:open`, `:taken` | hash | until answered; until given back: ids | `ingest/regions` |
| `penstock:<pipeline>:region:<name>:answered` | zset | the ids of the results copied last   | `ingest/regions` |
| `penstock:<pipeline>:region:<name>:places:<topic>` | hash | for good: how far it is indexed | `ingest/regions` |
| `penstock:<pipeline>:region:<name>:copied`, `:reader` | string | its newest heartbeat; a lease | `ingest/regions` |
| `penstock:kv:<block key, hex>`         | string | a set time after the last use             | `kvstore`      |
| `penstock:{kv}:used`                   | zset   | as the blocks: their order of use         | `kvstore`      |
| `penstock:{kv}:held`                   | zset   | the same for leased blocks                | `kvstore`      |
| `penstock:{kv}:sizes`                  | hash   | as the blocks: the bytes of each          | `kvstore`      |
| `penstock:{kv}:leases`                 | hash   | as the leases: owners and ends, by block  | `kvstore`      |
| `penstock:{kv}:ends`                   | zset   | as the leases: the last end, by block     | `kvstore`      |
| `penstock:{kv}:state`                  | hash   | as the blocks: sums, clock, budget        | `kvstore`      |
| `penstock:bus:{<pipeline>}:<topic>`    | stream | trimmed as deliveries are settled         | `StreamsBus`   |
| `penstock:bus:{<pipeline>}:finished`   | hash   | for good: how far partitions, or streams, are finished | `bus` |
| `penstock:bus:{<pipeline>}:lost`       | hash   | a week after the last loss: counts by topic | `bus`         |
| `penstock:bus:{<pipeline>}:member:<group>:<name>` | string | the bus's session timeout      | `StreamsBus`   |
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from penstock.errors import InvalidName

PriorityClass = Literal["interactive", "batch"]
CLASSES: tuple[PriorityClass, ...] = ("interactive", "batch")
Stage = Literal["prefill", "decode"]
WorkerKind = Stage | Literal["auto", "endpoint", "embed"]
"""A worker's part of a request: one of the two stages, both (`auto`), or all of it: by asking an endpoint, or as it
computes vectors (`embed`), for which there is no decode.
"""
WHOLE_KINDS: tuple[WorkerKind, ...] = ("endpoint", "embed")
"""The kinds that answer requests without stages: nothing is handed off, and no other kind serves their pipeline."""
Role = WorkerKind | Literal["client", "gateway"]
"""The role of a process, which decides which rights it needs on the servers."""
STAGES: tuple[Stage, ...] = ("prefill", "decode")
"""The stages of a pipeline that computes its answers itself. Where endpoints are asked there is one kind of worker."""


def find_key(headers: Mapping[str, str]) -> str:
    """Return the id of the API key that a message's headers name; empty where there is none, or it can be no id."""
    key = headers.get(KEY_HEADER, "")
    return key if len(key) <= MAX_ID_CHARS else ""


def add_tenant(topic: str, tenant: str) -> str:
    """Return the name of a tenant's own topic beside one of all tenants. None of these names begins with another."""
    return f"{topic}.t-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"


@lru_cache(4096)
def split_topic(topic: str) -> tuple[str, str]:
    """Return the topic of all tenants that a topic stands beside, and what a tenant's own one has behind that name.

    The second text is empty where the topic is that of all tenants itself.
    """
    found = _OWN_TOPIC.fullmatch(topic)
    return (found[1], found[2] or "") if found else (topic, "")


def find_shared_topic(topic: str) -> str:
    """Return the topic of all tenants that a topic stands beside, or is."""
    return split_topic(topic)[0]


def find_stages(kind: WorkerKind) -> tuple[Stage, ...]:
    """Return the stages whose work a kind of worker does."""
    return (kind,) if kind in STAGES else STAGES


def may_serve_together(kind: WorkerKind, other: WorkerKind) -> bool:
    """Return whether workers of two kinds may serve one pipeline: else one would answer what is the other's."""
    return kind == other or not {kind, other} & {*WHOLE_KINDS}


def describe_kind(kind: WorkerKind) -> str:
    """Return what a kind of worker does, where workers of another kind cannot serve its pipeline too."""
    does: dict[WorkerKind, str] = {"endpoint": "asks servers for the answers", "embed": "computes vectors or scores"}
    return does.get(kind, "has an engine of its own for text")


MAX_ID_CHARS = 128
MAX_RETENTION_S = 3600
"""For how long the KV of an answer may outlive other KV at most."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WORKER_KEY = re.compile(rf"penstock:({_NAME.pattern}):worker:[^:]+:.+", re.DOTALL)
_OWN_PART = r"\.t-[0-9a-f]{16}"
_OWN_TOPIC = re.compile(f"(.+?)({_OWN_PART})?")
_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}")

# Message headers.
VERSION_HEADER = "penstock-version"
TENANT_HEADER = "penstock-tenant"
KEY_HEADER = "penstock-key"
"""The id of the API key that a request came with, for accounts. No process needs it."""
CLASS_HEADER = "penstock-class"
DEADLINE_HEADER = "penstock-deadline"
ATTEMPT_HEADER = "penstock-attempt"
ORIGIN_HEADER = "penstock-origin"
REASON_HEADER = "penstock-reason"
STACK_HEADER = "penstock-stack"
BURIED_HEADER = "penstock-buried"
TRUNCATED_HEADER = "penstock-truncated"
CONNECT_PREFIX = "__connect.errors."
"""Kafka Connect names the headers of its dead letters with this prefix."""
OPERATION_HEADER = "penstock-operation"
FORM_HEADER, CANONICAL_FORM = "penstock-form", "canonical"
REPLY_TO_HEADER = "penstock-reply-to"
"""The topic in which a requester wants its result; on results without text, the one that the text went to."""
REPLY_REFUSED_HEADER = "penstock-reply-refused"
"""On results: why they are not in the topic that their requester wanted."""
REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER = "kafka_replyTopic", "kafka_replyPartition"
"""The same as Spring for Apache Kafka writes it: a topic, and a partition as four bytes, big-endian."""
CORRELATION_HEADER = "kafka_correlationId"
"""What a requester knows its reply by. Results have the bytes that the request came with."""
CARD_HEADER = "penstock-card"
"""What gateways know of a stream, as JSON, where there are regions: the region that adopts its request reads it."""


_OUR_NAME = re.compile(r"__|(.*\.)?penstock[.:]")
_REPLY_NAME = re.compile(r"[A-Za-z0-9._:{}/-]{1,249}")


def may_hold_replies(name: str) -> bool:
    """Return whether a name can be that of a topic, or of a stream in Redis, in which requesters have replies: no
    topic or key of any pipeline, no copy of one in another region, and none of Kafka's own topics.
    """
    return _REPLY_NAME.fullmatch(name) is not None and _OUR_NAME.match(name) is None


def is_request_id(text: str) -> bool:
    """Return whether `text` is a valid request id: 1 to 128 of `A-Z a-z 0-9 . _ : -`, first a letter or digit."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class Pipeline:
    """The names of one pipeline: one model served through one set of topics."""

    name: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise InvalidName(f"{self.name!r} cannot name a pipeline: letters, digits, '-' and '_', at most 64")

    def request_topic(self, priority_class: PriorityClass) -> str:
        """Return the topic to which clients publish requests of a class."""
        return f"penstock.{self.name}.requests.{priority_class}"

    def job_topic(self, priority_class: PriorityClass) -> str:
        """Return the topic to which prefill publishes job references of a class."""
        return f"penstock.{self.name}.jobs.{priority_class}"

    @property
    def results_topic(self) -> str:
        """The topic with the one result of each request."""
        return f"penstock.{self.name}.results"

    @property
    def dead_letter_topic(self) -> str:
        """The topic with messages that cannot be answered, and those whose work failed too often."""
        return f"penstock.{self.name}.dead"

    def input_topics(self, kind: WorkerKind) -> dict[PriorityClass, str]:
        """Return the topics that workers of a kind read, by class. An `auto` worker also reads those of `decode`."""
        return {
            priority_class: self.job_topic(priority_class) if kind == "decode" else self.request_topic(priority_class)
            for priority_class in CLASSES
        }

    def find_stage(self, topic: str) -> Stage:
        """Return the stage whose workers read a topic: prefill that of requests, decode that of jobs."""
        return "decode" if find_shared_topic(topic) in self.input_topics("decode").values() else "prefill"

    def find_class(self, topic: str) -> PriorityClass:
        """Return the class of the messages in a topic that workers read."""
        return _find_class(self, find_shared_topic(topic))

    def all_topics(self) -> list[str]:
        """Return all topics, in the order of the diagram in docs/structure.md."""
        work = [topic for stage in STAGES for topic in self.input_topics(stage).values()]
        return [*work, self.results_topic, self.dead_letter_topic]

    def list_own_topics(self, tenant: str) -> list[str]:
        """Return the topics that a tenant has of its own, those last that clients write to: see `create_topics`."""
        return [add_tenant(topic, tenant) for topic in reversed(self.all_topics())]

    def find_own_topics(self, known: Iterable[str]) -> list[str]:
        """Return those of some topics that tenants of this pipeline have of their own."""
        shared = set(self.all_topics())
        return sorted(topic for topic in known if topic not in shared and find_shared_topic(topic) in shared)

    def own_inputs_pattern(self, kind: WorkerKind) -> str:
        """Return the expression by which workers of a kind subscribe to tenants' own topics, also to later ones."""
        topics = "|".join(map(re.escape, self.input_topics(kind).values()))
        return f"^({topics}){_OWN_PART}$"

    def consumer_group(self, kind: WorkerKind) -> str:
        """Return the name of the consumer group of workers of a kind.

        All kinds that read requests share one group, so a pipeline that changes its kind of workers continues where it
        was. An `auto` worker is in the group of `decode` as well.
        """
        return f"penstock.{self.name}.{'decode' if kind == 'decode' else 'prefill'}"

    def record_key(self, request_id: str) -> str:
        """Return the key of a request's record."""
        return f"penstock:{self.name}:{{{request_id}}}:record"

    def ended_key(self, day: str, byte: str) -> str:
        """Return the key of the ids that ended on a day, and whose digests begin with a byte."""
        return f"penstock:{self.name}:ended:{day}:{byte}"

    @property
    def sessions_key(self) -> str:
        """The key of the sessions of all workers, with the time at which each expires."""
        return f"penstock:{self.name}:sessions"

    def held_key(self, session: str) -> str:
        """Return the key of the ids of the requests that a session holds."""
        return f"penstock:{self.name}:held:{session}"

    def news_key(self, session: str) -> str:
        """Return the key of the news for a session's worker, such as cancelled requests."""
        return f"penstock:{self.name}:news:{session}"

    def free_key(self, stage: Stage) -> str:
        """Return the key of the requests that any worker of a stage may take over, with the time from which it may."""
        return f"penstock:{self.name}:free:{stage}"

    @property
    def readers_key(self) -> str:
        """The key of the partitions of the topics that workers read, with the session that reads each."""
        return f"penstock:{self.name}:partition_readers"

    def list_key_types(self) -> dict[str, str]:
        """Return the types of the keys that all workers share: what Redis' TYPE says. A key's name changes with it."""
        return {
            self.sessions_key: "zset",
            **{self.free_key(stage): "zset" for stage in STAGES},
            self.readers_key: "hash",
            self.requeued_key: "hash",
            self.servers_key: "string",
        }

    @property
    def lost_key(self) -> str:
        """The key of how many messages of each topic were deleted before they were read."""
        return f"penstock:bus:{{{self.name}}}:lost"

    def log_key(self, request_id: str) -> str:
        """Return the key of a request's token log."""
        return f"penstock:{self.name}:{{{request_id}}}:log"

    def live_channel(self, request_id: str) -> str:
        """Return the channel to which the events of a token log are published as they are appended."""
        return f"penstock:{self.name}:{{{request_id}}}:live"

    def lease_owner(self, request_id: str) -> str:
        """Return the owner of the leases on a job's KV blocks. It names the pipeline: pipelines may share a store."""
        return f"{self.name}:{request_id}"

    def worker_key(self, stage: str, name: str) -> str:
        """Return the key of a worker's heartbeat."""
        return f"{self.worker_prefix}{stage}:{name}"

    @property
    def worker_prefix(self) -> str:
        """The beginning of the heartbeat keys of all workers of the pipeline."""
        return f"penstock:{self.name}:worker:"

    def left_key(self, stage: str, name: str) -> str:
        """Return the key that a worker sets when it leaves, so that it does not count as lost."""
        return f"penstock:{self.name}:left:{stage}:{name}"

    def trace_key(self, request_id: str) -> str:
        """Return the key of a request's spans."""
        return f"penstock:{self.name}:{{{request_id}}}:trace"

    @property
    def requeued_key(self) -> str:
        """The key of how often each dead request was put back, by id."""
        return f"penstock:{self.name}:requeued"

    @property
    def servers_key(self) -> str:
        """The key of the list of servers over which requests are spread. Each of these servers stores it."""
        return f"penstock:{self.name}:servers"

    @property
    def responses_key(self) -> str:
        """The key of the kept responses that are not yet in the object store, or were deleted before they were."""
        return f"penstock:{self.name}:responses"

    @property
    def responses_lease_key(self) -> str:
        """The key of the lease of the gateway that moves ended responses to the object store."""
        return f"penstock:{self.name}:responses:lease"

    def seconds_key(self, part: str) -> str:
        """Return the key of what workers' seconds were spent on, on one day; or of what one worker wrote of it last."""
        return f"penstock:{self.name}:seconds:{part}"

    @property
    def autoscale_key(self) -> str:
        """The key of the last decision on numbers of workers, with what its controller remembers."""
        return f"penstock:{self.name}:autoscale"

    @property
    def autoscale_lease_key(self) -> str:
        """The key of the lease of the controller that decides on numbers of workers."""
        return f"{self.autoscale_key}:lease"

    @property
    def regions_key(self) -> str:
        """The key of how a gateway sees all regions, for `penstock top` and the page. There is none without peers."""
        return f"penstock:{self.name}:regions"

    def meter_key(self, part: str) -> str:
        """Return a key of the usage meter.

        `part` is `places`, `seen`, `reader`, `day:<YYYY-MM-DD>`, or `detail:<YYYY-MM-DD>`.
        """
        return f"penstock:meter:{{{self.name}}}:{part}"

    def region_key(self, region: str, part: str) -> str:
        """Return a key of what is known of a region whose topics are copied here.

        `part` is `open`, `answered`, `taken`, `copied`, `reader`, or `places:<topic>`.
        """
        return f"penstock:{self.name}:region:{region}:{part}"

    def shares_key(self, part: str) -> str:
        """Return a key of the tenants' shares of the pipeline; `part` is `tickets`, `tokens` or `weights`."""
        return f"penstock:shares:{{{self.name}}}:{part}"

    def stream_key(self, topic: str) -> str:
        """Return the key of the Redis stream that holds a topic."""
        return f"penstock:bus:{{{self.name}}}:{topic}"

    @property
    def finished_key(self) -> str:
        """The key of how far each partition, or each topic's stream, is finished."""
        return f"penstock:bus:{{{self.name}}}:finished"

    def member_key(self, group: str, member: str) -> str:
        """Return the key that exists while a member of a group lives."""
        return f"penstock:bus:{{{self.name}}}:member:{group}:{member}"


@lru_cache(4096)  # it is asked for each message
def _find_class(pipeline: Pipeline, shared: str) -> PriorityClass:
    return next(one for one in CLASSES if shared in {pipeline.request_topic(one), pipeline.job_topic(one)})


HEARTBEATS_TOPIC = "heartbeats"
"""The topic into which MirrorMaker writes its heartbeats."""


def copy_topic(region: str, topic: str) -> str:
    """Return the topic into which MirrorMaker copies a topic of another region (its DefaultReplicationPolicy)."""
    return f"{region}.{topic}"


KEYS_KEY, TENANTS_KEY = "penstock:keys", "penstock:tenants"
"""API keys and tenants, where they are in Redis."""


def rate_key(tenant: str) -> str:
    """Return the key of a tenant's rate limits: how much it may still send this minute."""
    return f"penstock:rate:{tenant}"


WORKERS_KEY = "penstock:workers"
"""The key of the heartbeat keys of all workers of all pipelines. A worker adds its own with each beat; readers remove
those that do not exist any more.
"""


MODELS_KEY = "penstock:models"
"""The key of the models that were served: a hash of `PIPELINE:NAME` to what gateways need to accept requests for them,
as JSON; empty for a model that was forgotten.
"""


ADOPTED_REGIONS_KEY = "penstock:regions:adopted"
"""The key of the regions that this one has adopted: by name, when, by whom and how far, as JSON."""
FINGERPRINTS_KEY = "penstock:regions:fingerprints"
"""The key of the fingerprints of each region's models, by the region's name, as JSON, as a gateway saw them last."""
REGION_JOINED_KEY = "penstock:regions:joined"
"""The key of the permission by which workers begin. A gateway that knows what peers have adopted of this region, and
has ended that here, gives another one each second."""


REGION_USED_KEY = "penstock:regions:used"
"""The key of how many requests and tokens each tenant with limits has used in this region. There is none without
peers."""


def region_settled_key(region: str) -> str:
    """Return the key of what another region's tenants had used there when that was settled last."""
    return f"penstock:regions:settled:{region}"


def pipeline_of_worker(key: str) -> str:
    """Return the pipeline of a heartbeat key (`Pipeline.worker_key`). Raise `InvalidName` for any other key."""
    match = _WORKER_KEY.fullmatch(key)
    if match is None:
        raise InvalidName(f"{key!r} is not a heartbeat key (penstock:<pipeline>:worker:<stage>:<name>)")
    return match[1]


def stream_meta_key(stream_id: str) -> str:
    """Return the key of what gateways know of a stream that one of them started."""
    return f"penstock:card:{stream_id}"


def stream_readers_key(stream_id: str) -> str:
    """Return the key of how many readers of a stream have come, after the first, and left."""
    return f"{stream_meta_key(stream_id)}:readers"


GATEWAY_SECRET_KEY = "penstock:gateway:secret"
"""The key of the secret with which gateways derive the ids of requests that have an `Idempotency-Key`."""


WEBHOOKS_KEY = "penstock:webhooks"
"""The key of the tenants that have had events for a webhook."""
WEBHOOK_MARK_KEYS = (f"{WEBHOOKS_KEY}-secret", f"{WEBHOOKS_KEY}-url")
"""The keys by which gateways say that they have a secret (its fingerprint), and a receiver of all tenants."""


def picture_key(digest: str) -> str:
    """Return the key of a picture's file. It is of no pipeline: the same file is the same picture for all."""
    return f"penstock:picture:{digest}"


def webhook_events_key(tenant: str) -> str:
    """Return the key of a tenant's events that are not delivered."""
    return f"{WEBHOOKS_KEY}:{tenant}"


def batch_lease_key(batch_id: str) -> str:
    """Return the key of a batch's lease, which names the gateway that works on it."""
    return f"penstock:batch:{{{batch_id}}}:lease"


def kv_key(block_key: bytes) -> str:
    """Return the Redis key of a stored KV block."""
    return f"penstock:kv:{block_key.hex()}"


KV_INDEX = tuple(f"penstock:{{kv}}:{part}" for part in ("used", "held", "sizes", "leases", "ends", "state"))
"""The keys of the index of stored blocks on one server, in the order in which scripts take them."""


# Event ids: `<position>-<rolling hash>`. The hash covers every token id up to and including the position. A reader that
# resumes names the last id that it saw, so a log with other tokens is detected.

START_HASH = "0" * 16


def roll_hash(previous: str, token_id: int) -> str:
    """Return the rolling hash after `token_id`: 16 hex digits of SHA-256.

    It is computed over the hash before it and the token id (4 bytes, big endian).
    """
    return hashlib.sha256(bytes.fromhex(previous) + token_id.to_bytes(4, "big")).hexdigest()[:16]


def piece_token(text: str) -> int:
    """Return what stands for a token id where the log has a piece of an endpoint's text: 31 bits of its SHA-256.

    So the rolling hash covers the text, and a log with another text is noticed like one with other tokens.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def event_id(position: int, rolling_hash: str) -> str:
    """Return the event id of the token at `position` (from 0)."""
    return f"{position}-{rolling_hash}"


_EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,8})-([0-9a-f]{16})")


def parse_event_id(text: str) -> tuple[int, str]:
    """Return position and rolling hash of an event id. Raise `InvalidName` for anything else."""
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        raise InvalidName(f"{text!r} is not an event id (<position>-<16 hex digits>)")
    return int(match[1]), match[2]
