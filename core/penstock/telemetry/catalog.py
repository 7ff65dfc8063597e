"""Every metric of Penstock, in one table: no other metric is measured, and each one here is exposed.

A metric has its OpenTelemetry name. Prometheus has it with underscores, its unit and, for a counter, `_total`.
Metrics of OpenTelemetry's conventions for generative AI have the names, attributes and bucket bounds given there.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["worker", "gateway"]

PROVIDER = "penstock"
"""`gen_ai.provider.name`."""
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
ITL_BOUNDS = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5,
)  # fmt: skip
PREPROCESS_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MOVE_BOUNDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192)
WAIT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 10800.0)


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are OpenTelemetry's attributes, with dots."""

    name: str
    kind: Kind
    unit: str
    """The unit in UCUM's notation: `s`, `By`, or `{token}` for things that are counted."""
    labels: tuple[str, ...]
    help: str
    source: Source
    """The process that has the metric."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; one more bucket is for all that is larger."""

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus (a histogram's series add `_bucket`, `_sum` and `_count`)."""
        name = self.name.replace(".", "_") + {"s": "_seconds", "By": "_bytes", "J": "_joules"}.get(self.unit, "")
        return f"{name}_total" if self.kind == "counter" else name

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """Its labels in Prometheus."""
        return tuple(label.replace(".", "_") for label in self.labels)


# Workers.

TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token", "histogram", "s", _GEN_AI,
    "From a request's submission until its first token was written.", "worker", FIRST_TOKEN_BOUNDS,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token", "histogram", "s", _GEN_AI,
    "Of each answer: from its first token to its last, for each token after the first.", "worker", PER_TOKEN_BOUNDS,
)  # fmt: skip
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration", "histogram", "s", (*_GEN_AI, "error.type"),
    "From a request's submission to its end; error.type is empty where it ended well.", "worker", DURATION_BOUNDS,
)  # fmt: skip
ITL = Metric(
    "penstock.itl", "histogram", "s", ("pipeline",),
    "Time between two tokens of one stream.", "worker", ITL_BOUNDS,
)  # fmt: skip
GAP_MISSED = Metric(
    "penstock.gap.missed", "counter", "{token}", ("pipeline", "stage"),
    "Tokens of interactive answers that came longer after the one before than PENSTOCK_SLO_INTERACTIVE_GAP_S.",
    "worker",
)  # fmt: skip
QUEUE_WAIT = Metric(
    "penstock.queue.wait", "histogram", "s", ("pipeline", "stage", "class"),
    "From a message's publication until a worker of the stage began with it.", "worker", WAIT_BOUNDS,
)  # fmt: skip
PREPROCESS = Metric(
    "penstock.preprocess", "histogram", "s", ("pipeline",),
    "How long a prefill worker reads a request: it is decoded, claimed, put into the chat template, tokenized.",
    "worker", PREPROCESS_BOUNDS,
)  # fmt: skip
REQUESTS = Metric(
    "penstock.requests", "counter", "{request}", ("pipeline", "stage", "class", "outcome"),
    "Requests that a stage is done with. outcome: handed_off (prefill left a job), or how the request ended there: "
    "stop, length, cancelled, error.", "worker",
)  # fmt: skip
TOKENS = Metric(
    "penstock.tokens", "counter", "{token}", ("pipeline", "kind"),
    "Tokens. kind: prefill (of prompts, computed), cached (of prompts, their KV was found), decode (of answers).",
    "worker",
)  # fmt: skip
TEXTS = Metric(
    "penstock.texts", "counter", "{text}", ("pipeline", "class"),
    "Texts of which vectors or scores were computed.", "worker",
)  # fmt: skip
TEXT_TOKENS = Metric(
    "penstock.text_tokens", "counter", "{token}", ("pipeline", "class"),
    "Tokens of these texts. They also count in penstock.tokens, as prefill or cached.", "worker",
)  # fmt: skip
DRAFTED_TOKENS = Metric(
    "penstock.drafted_tokens", "counter", "{token}", ("pipeline", "result"),
    "Tokens that decode guessed and computed in the step of the token before them. result: accepted (what was drawn; a "
    "token of the answer, too), rejected.", "worker",
)  # fmt: skip
WORKER_SECONDS = Metric(
    "penstock.worker.busy", "counter", "s", ("pipeline", "stage", "phase", "class"),
    "A worker's seconds by what it computed. phase: prefill, decode, idle (without a class). Together they are its "
    "time.", "worker",
)  # fmt: skip
RUNNING = Metric(
    "penstock.running", "gauge", "{request}", ("pipeline", "stage", "worker"),
    "Requests that a worker holds.", "worker",
)  # fmt: skip
WAITING = Metric(
    "penstock.waiting", "gauge", "{request}", ("pipeline", "stage", "worker"),
    "Requests of those that wait for their place in the engine.", "worker",
)  # fmt: skip
POOL_BLOCKS = Metric(
    "penstock.pool.blocks", "gauge", "{block}", ("pipeline", "stage", "worker", "state"),
    "KV blocks of a worker's pool. state: used (a request holds it), free (cached ones too).", "worker",
)  # fmt: skip
ENERGY = Metric(
    "penstock.machine.energy", "gauge", "J", ("pipeline", "worker"),
    "What the machine has used since the worker's start, in processors and GPUs, whoever used it; absent where it does "
    "not tell.", "worker",
)  # fmt: skip
SLOW_PRODUCTS = Metric(
    "penstock.slow_products", "gauge", "{product}", ("pipeline", "stage", "worker"),
    "Shapes and forms of weights whose products take the native kernels longer than torch on this processor, found at "
    "the worker's start.", "worker",
)  # fmt: skip
KV_BLOCKS = Metric(
    "penstock.kv.blocks", "counter", "{block}", ("pipeline", "stage", "tier", "result"),
    "KV blocks asked for. tier: pool, shm, disk, redis. result: hit, miss; of tiers below the pool also damaged (of "
    "the misses), evicted, refused (not taken for want of room).", "worker",
)  # fmt: skip
KV_BYTES = Metric(
    "penstock.kv.transferred", "counter", "By", ("pipeline", "stage", "tier", "direction"),
    "Bytes of KV. direction: read, written.", "worker",
)  # fmt: skip
KV_READ = Metric(
    "penstock.kv.read", "histogram", "s", ("pipeline", "stage"),
    "How long the KV of a request takes from the tiers below the pool into it, where some of it was found there.",
    "worker", MOVE_BOUNDS,
)  # fmt: skip
KV_WRITE = Metric(
    "penstock.kv.write", "histogram", "s", ("pipeline", "stage"),
    "How long it takes until the KV that a job waits for can be read by other workers.", "worker", MOVE_BOUNDS,
)  # fmt: skip
HAND_OFF = Metric(
    "penstock.hand_off", "histogram", "s", ("pipeline",),
    "From a request's last token in prefill until the bus has its job and its message is settled.", "worker",
    MOVE_BOUNDS,
)  # fmt: skip
KV_ERRORS = Metric(
    "penstock.kv.errors", "counter", "{batch}", ("pipeline", "stage", "tier"),
    "Batches of blocks that a tier could not be asked for, or did not take.", "worker",
)  # fmt: skip
KV_RECOMPUTED = Metric(
    "penstock.kv.recomputed", "counter", "{block}", ("pipeline",),
    "Blocks of jobs that were not found when decode came for them, and were computed again.", "worker",
)  # fmt: skip
KV_RETAINED = Metric(
    "penstock.kv.retained", "gauge", "By", ("pipeline", "stage", "worker", "tenant"),
    "KV that a worker retains for a tenant: it outlives other KV in the pool and the tiers, as an agent's next prompt "
    "goes on with it.", "worker",
)  # fmt: skip
KV_RETENTION = Metric(
    "penstock.kv.retention", "counter", "{block}", ("pipeline", "stage", "result"),
    "KV blocks. result: retained (a retention was given to it, at each turn), found (a later prompt found it while it "
    "was retained).", "worker",
)  # fmt: skip
TAKE_OVERS = Metric(
    "penstock.take_overs", "counter", "{request}", ("pipeline", "stage"),
    "Requests that were gone on with after another worker let go of them or died.", "worker",
)  # fmt: skip
RETRIES = Metric(
    "penstock.retries", "counter", "{request}", ("pipeline", "stage", "cause"),
    "Requests whose work failed and that are tried again later. cause: the error's code.", "worker",
)  # fmt: skip
DEAD_LETTERS = Metric(
    "penstock.dead_letters", "counter", "{message}", ("pipeline", "stage"),
    "Messages that were put into the dead-letter topic.", "worker",
)  # fmt: skip
ENDPOINT_REST = Metric(
    "penstock.endpoint.rest", "gauge", "s", ("pipeline", "worker", "endpoint", "cause"),
    "How much longer an endpoint is left alone. cause: why it rests (an HTTP status, unreachable, lost, ...), also "
    "while it is tried with one request; empty where it does not.", "worker",
)  # fmt: skip

# The gateway: of the pipelines that it serves.

LAG_MESSAGES = Metric(
    "penstock.lag.messages", "gauge", "{message}", ("pipeline", "stage", "class"),
    "Messages that are not settled: in the topic, or in a worker.", "gateway",
)  # fmt: skip
LAG_TOKENS = Metric(
    "penstock.lag.tokens", "gauge", "{token}", ("pipeline", "stage", "class", "kind"),
    "The work that they stand for; absent where it is not known yet. kind: prompt, output.", "gateway",
)  # fmt: skip
ESTIMATED_WAIT = Metric(
    "penstock.estimated_wait", "gauge", "s", ("pipeline", "class"),
    "How long a request submitted now would wait; absent where it is not known.", "gateway",
)  # fmt: skip
WORKER_STATE = Metric(
    "penstock.worker.state", "gauge", "1", ("pipeline", "stage", "worker", "state"),
    "1 for the state that a worker is in, 0 for the others: loading, ready, degraded, draining. Absent once it is "
    "gone; lost: 1 for a minute after its heartbeat ran out without a goodbye.",
    "gateway",
)  # fmt: skip
AUTOSCALE_WORKERS = Metric(
    "penstock.autoscale.workers", "gauge", "{worker}", ("pipeline", "stage"),
    "How many workers of a kind there should be, by `penstock autoscale`; absent where no controller runs.", "gateway",
)  # fmt: skip
AUTOSCALE_STARTING = Metric(
    "penstock.autoscale.starting", "gauge", "{worker}", ("pipeline", "stage"),
    "Those of them whose start was asked for and is not over.", "gateway",
)  # fmt: skip
AUTOSCALE_ALERTS = Metric(
    "penstock.autoscale.alerts", "gauge", "{alert}", ("pipeline",),
    "What the controller complains of: a signal that is missing, a start that does not end, prompts that alone take "
    "longer than the limit.", "gateway",
)  # fmt: skip
AUTOSCALE_FIRST_TOKEN = Metric(
    "penstock.autoscale.first_token.p99", "gauge", "s", ("pipeline", "source"),
    "The 99th percentile of the time to first token. source: predicted (simulated by the controller, for the workers "
    "that serve), observed (of the last minute).", "gateway",
)  # fmt: skip
PIPELINE_UP = Metric(
    "penstock.pipeline.up", "gauge", "1", ("pipeline",),
    "Whether bus and Redis answered the gateway at the last look: where 0, the pipeline's other gauges are absent.",
    "gateway",
)  # fmt: skip
REDIS_EVICTS = Metric(
    "penstock.redis.evicts", "gauge", "1", ("pipeline",),
    "Whether a stream server evicts at its limit of memory, as of the last minute: it may delete records and logs.",
    "gateway",
)  # fmt: skip
REDIS_MEMORY = Metric(
    "penstock.redis.memory.share", "gauge", "1", ("pipeline",),
    "How much of its limit of memory the fullest stream server uses, as of the last minute; of its machine's memory "
    "where it has no limit.",
    "gateway",
)  # fmt: skip
MESSAGES_LOST = Metric(
    "penstock.messages.lost", "counter", "{message}", ("pipeline", "topic"),
    "Messages of a topic that workers read which were deleted before they were answered, as far as workers found out.",
    "gateway",
)  # fmt: skip

ACCOUNT = Metric(
    "penstock.account", "gauge", "{currency}", ("pipeline", "part"),
    "Amounts of today (UTC), where PENSTOCK_GATEWAY_PRICES is set. part: sold (tokens), cost (workers while they "
    "computed), idle_cost, margin (what is left).", "gateway",
)  # fmt: skip

# The gateway itself.

GATEWAY_REQUESTS = Metric(
    "penstock.gateway.requests", "counter", "{request}", ("route", "status"),
    "HTTP requests answered, by the route's pattern.", "gateway",
)  # fmt: skip
GATEWAY_REFUSED = Metric(
    "penstock.gateway.refused", "counter", "{request}", ("reason",),
    "HTTP requests that were not let in. reason: the error's code, such as overloaded or rate_limit_exceeded.",
    "gateway",
)  # fmt: skip
GATEWAY_STREAMS = Metric(
    "penstock.gateway.streams", "gauge", "{stream}", (),
    "Streams that are being read now.", "gateway",
)  # fmt: skip
GATEWAY_UNREAD = Metric(
    "penstock.gateway.unread_streams", "gauge", "{stream}", (),
    "Unfinished requests whose client left here, and to which nobody has come back.", "gateway",
)  # fmt: skip

REGION_STATE = Metric(
    "penstock.region.state", "gauge", "{region}", ("region", "state"),
    "1 for the state that a region has, as this gateway sees it: ready, unavailable or unknown; else 0.", "gateway",
)  # fmt: skip
REGION_ROUND_TRIP = Metric(
    "penstock.region.round_trip", "gauge", "s", ("region",),
    "Time to a region's gateway and back, the least of the last ten.", "gateway",
)  # fmt: skip
REGION_REQUESTS = Metric(
    "penstock.region.requests", "counter", "{request}", ("region", "why"),
    "New requests for which this gateway chose a region. why: nearest, sooner, prefix, only, idle.", "gateway",
)  # fmt: skip
REGION_COPY_AGE = Metric(
    "penstock.region.copy.age", "gauge", "s", ("pipeline", "region"),
    "Age of the newest heartbeat that MirrorMaker copied from a region: what its death would lose for now.", "gateway",
)  # fmt: skip
REGION_OPEN = Metric(
    "penstock.region.open", "gauge", "{request}", ("pipeline", "region"),
    "Requests of a copied region that have no result in the copy.", "gateway",
)  # fmt: skip
REGION_MODELS_DIFFER = Metric(
    "penstock.region.models.differ", "gauge", "{model}", ("region",),
    "Models of a region that are others than those of their names in this one, by their fingerprints.", "gateway",
)  # fmt: skip

WEBHOOK_ATTEMPTS = Metric(
    "penstock.webhook.attempts", "counter", "{attempt}", ("outcome",),
    "Attempts to deliver an event to a webhook. outcome: delivered; failed, which is tried again; given_up.", "gateway",
)  # fmt: skip
WEBHOOK_WAITING = Metric(
    "penstock.webhook.waiting", "gauge", "{event}", (),
    "Events of all tenants that no webhook has accepted yet.", "gateway",
)  # fmt: skip

CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""
