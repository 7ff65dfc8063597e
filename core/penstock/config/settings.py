"""Settings: one small class for each part, read once at the entry point from the places that `sources` lists.

The entry point is a command, or the constructor of a `Client` or a `Stack`, which programs of others make, too.
A bad value is an error, and so is an unknown `PENSTOCK_` variable; the error names the nearest known one.
"""

import logging
import os
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.config.addresses import Addresses
from penstock.config.sources import (
    CONFIG_VARIABLE,
    FILE_SUFFIX,
    TESTING_VARIABLE,
    VARIABLE_PREFIX,
    Constant,
    GivenValue,
    Settings,
    describe_unknown_names,
    is_secret,
    list_names,
    list_secret_variables,
    read_config_file,
    read_given_values,
    read_testing_values,
    variable_name,
)
from penstock.cores import count_usable_cores
from penstock.errors import SettingsError, reword_validation
from penstock.names import MAX_RETENTION_S, may_hold_replies
from penstock.regions import is_region_name, parse_peers

log = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = "~/.cache/penstock/engine"
_UNREPLACED = (
    "BUS_SESSION_TIMEOUT_S", "BUS_TRANSACTION_TIMEOUT_S", "RECORD_RETRY_FIRST_S", "RECORD_RETRY_FACTOR",
    "RECORD_RETRY_CAP_S", "KV_STORE_LEASE_S", "KV_STORE_KEEP_S", "KV_STORE_REDIS_CODEC", "ENGINE_SPECULATE",
    "ENDPOINT_SILENCE_S", "WORKER_HEARTBEAT_S", "WORKER_STAY_MAX_ANSWER_TOKENS", "WORKER_STAY_MAX_S",
    "GATEWAY_MAX_BATCH_WAIT_S", "GATEWAY_MAX_HEADER_KB", "GATEWAY_MAX_HEADERS", "GATEWAY_HEADERS_S", "GATEWAY_BODY_S",
    "GATEWAY_BODY_KB_PER_S", "GATEWAY_STALLED_S", "GATEWAY_KEEP_ALIVE_S", "BATCH_ROWS_IN_FLIGHT", "BATCH_MAX_LINES",
    "BATCH_LEASE_S", "BATCH_LOOK_S", "RESPONSES_MAX_PER_TENANT", "WEBHOOK_RETRY_S",
)  # fmt: skip
_REPLACED = {
    "GATEWAY_MAX_FILE_MB": "PENSTOCK_BATCH_MAX_FILE_BYTES limits uploads",
    "TRACE_FILE": "OTEL_EXPORTER_OTLP_ENDPOINT sends spans to a collector",
    "WORKER_NEXT_NAME": "use `penstock worker … --next-name`",
    "WORKER_STAY_MAX_ADDED_ITL_MS": "PENSTOCK_SLO_INTERACTIVE_GAP_S bounds what prompts add to a gap",
    "SLO_BATCH_TTFT_S": "use `penstock plan --batch-ttft-s`",
    "SLO_BATCH_ITL_S": "use `penstock plan --batch-itl-s`",
}
REMOVED = {f"{VARIABLE_PREFIX}{name}": where for name, where in (dict.fromkeys(_UNREPLACED, "") | _REPLACED).items()}
"""Settings of the version before this one, and what replaces each. A program that finds one set logs a warning."""


class BusSettings(Settings):
    """The bus: Kafka, or Redis Streams."""

    prefix = "PENSTOCK_BUS_"

    partitions: int = Field(default=4, ge=1)
    """Kafka: partitions of each new topic. No more workers of a stage than that can share the topic."""
    replication: int = Field(default=1, ge=1)
    """Kafka: copies of each new topic; 3 if there are three brokers or more."""
    rack: str = ""
    """Kafka: the zone of this process, as the brokers' `broker.rack` names it. Messages are read from the nearest copy
    where brokers have a `replica.selector.class`. Empty: from the partition's leader."""
    reply_topics: str = ""
    """Where requesters may have their results in [topics of their own](protocol.md#reply-topics): `TENANT=PREFIX`, with
    commas between them, as in `shop=shop.replies.,crm=crm.`; `*=PREFIX` holds for all tenants. On Redis Streams it is
    the beginning of a stream's key. Empty: nowhere. The same on all workers of a pipeline."""
    session_timeout_s: Constant[float] = 3.0
    """Redis Streams: a worker whose session has been over for this long loses its deliveries. (On Kafka the brokers'
    `group.consumer.session.timeout.ms` decides.)"""
    transaction_timeout_s: Constant[float] = 5.0
    """Kafka: how long the open transaction of a dead worker may hold up readers. A write in a transaction may take 0.6
    of it. Where brokers answer late, workers make it longer by themselves, up to 80 s."""

    @field_validator("reply_topics")
    @classmethod
    def _check_replies(cls, value: str) -> str:
        _parse_reply_prefixes(value)
        return value

    def find_reply_prefixes(self) -> dict[str, tuple[str, ...]]:
        """Return what the names of the topics begin with in which each tenant may have results; `*` stands for all."""
        return _parse_reply_prefixes(self.reply_topics)


_REPLY_OWNER = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _parse_reply_prefixes(value: str) -> dict[str, tuple[str, ...]]:
    """Return prefixes by tenant. Raise `ValueError`, also where a topic could belong to two tenants."""
    found = dict[str, tuple[str, ...]]()
    for one in filter(None, (part.strip() for part in value.split(","))):
        tenant, _, prefix = one.partition("=")
        if _REPLY_OWNER.fullmatch(tenant) is None or not prefix:
            raise ValueError(f"{one!r} is not TENANT=PREFIX, as in shop=shop.replies.")
        if not may_hold_replies(prefix):
            raise ValueError(f"{prefix!r} is the beginning of Penstock's or Kafka's own names, or of none")
        for other, theirs in found.items():
            if other != tenant and any(prefix.startswith(mine) or mine.startswith(prefix) for mine in theirs):
                raise ValueError(
                    f"topics that begin with {prefix!r} could be those of {tenant!r} or of {other!r}: end prefixes "
                    "with a dot, or give all tenants one with *="
                )
        found[tenant] = (*found.get(tenant, ()), prefix)
    return found


EvictionChoice = Literal["refuse", "warn"]


class RecordSettings(Settings):
    """Claims and token logs."""

    prefix = "PENSTOCK_RECORD_"

    lease_s: float = Field(default=1.0, ge=0.2)
    """A worker that does not renew its session for this long loses it, and with it all its claims. One value for all
    workers of a pipeline."""
    keep_s: float = Field(default=3600.0, ge=1)
    """How long after its end a stream can be read and its id is remembered, plus the time that the request took. A
    message with the same id that arrives later is a new request, unless `PENSTOCK_RECORD_REMEMBER_DAYS` is set."""
    remember_days: int = Field(default=0, ge=0, le=7)
    """For how many days the id of a request that has ended is remembered, beyond its stream: a message with the same id
    is settled without another answer. It takes 100 bytes an id at most. The same on all workers and gateways."""
    pending_keep_s: float = Field(default=7 * 86400.0, ge=60)
    """How long the record of an unfinished request is kept after a worker last claimed it."""
    max_attempts: int = Field(default=8, ge=1)
    """A request ends with `attempts_exhausted` when this many workers in a row died while they had it, and none made
    more of the answer than one before."""
    fail_attempts: int = Field(default=3, ge=1)
    """A request ends with its error when it failed this many times in a row."""
    retry_first_s: Constant[float] = 1.0
    """How long a failed request waits until it is tried again."""
    retry_factor: Constant[float] = 2.0
    """The factor by which that wait grows with each further failure."""
    retry_cap_s: Constant[float] = 30.0
    """The longest wait."""
    eviction: EvictionChoice = "refuse"
    """The reaction of workers and gateways to a stream server that evicts at its limit of memory (`maxmemory` with
    another policy than `noeviction`): `refuse` to start, or `warn`. A server that evicts later is named in logs and on
    the page alone."""


class KVSettings(Settings):
    """The KV store."""

    prefix = "PENSTOCK_KV_STORE_"

    salt_secret: str = Field(default="penstock", repr=False)
    """Tenant salts are HMACs under this secret; the same on all workers of a pipeline."""
    shared_mb: int = Field(default=256, ge=0)
    """Memory for the blocks that all workers on this host share; 0: none. The first worker allocates all of it. If not
    set, it is at most half of what the directory's file system has."""
    shared_dir: str = ""
    """The directory of the shared memory, and of the tables of the blocks on disk. Empty: `/dev/shm`, or the system's
    directory for temporary files."""
    disk_mb: int = Field(default=0, ge=0)
    """Space for blocks on disk; 0: none. `penstock up` sets 1024 if it is not set."""
    disk_dir: str = ""
    """The directory of blocks on disk. All workers that use it, of any pipeline, need the same
    `PENSTOCK_KV_STORE_SHARED_DIR`. Empty: `~/.cache/penstock/kv`, or with `penstock up --data DIR` `DIR/kv`,
    which then has to be set for `penstock kv`."""
    redis_mb: int = Field(default=1024, ge=0)
    """Space for blocks in each KV Redis; 0: none, which is right where all workers are on one host."""
    call_retention_s: float = Field(default=60.0, ge=0, le=MAX_RETENTION_S)
    """How long the blocks of an answer that ends in a call of a tool outlive others, as the call's result is the next
    prompt; 0: no longer. A request may ask for more (`retain_s`)."""
    retained_share: float = Field(default=0.5, ge=0, le=1)
    """How much a worker retains for each tenant, as a share of the KV pool or of the largest tier, whichever is larger;
    0: nothing."""

    @property
    def disk_path(self) -> Path:
        """The directory of blocks on disk, with the default and `~` resolved."""
        return Path(self.disk_dir or "~/.cache/penstock/kv").expanduser()


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}")


class EngineSettings(Settings):
    """The model, and how it is run."""

    prefix = "PENSTOCK_ENGINE_"

    kind: Literal["own", "vllm", "openai"] = "own"
    """The engine that computes the answers. `own`: Penstock's engine, in `auto`, `prefill` and `decode` workers.
    `vllm`: vLLM in the same workers, if it is installed. `openai`: servers with OpenAI's API, which endpoint workers
    ask (`PENSTOCK_ENDPOINT_URLS`)."""
    model: str = "demo"
    """`demo`, a directory, a GGUF file, or a hub name. With `openai`: the name by which callers ask for the model, by
    default the endpoints' name."""
    served_name: str = Field(default="", max_length=256)
    """The name by which callers ask for the model; the same on all workers of a pipeline. Empty: the hub name, or the
    last part of a directory's path. A caller may ask by the whole path, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: on a GPU the model's own. On a CPU float32, whose tokens are the same on all processors (except those of
    a GGUF file's own numbers). But a bfloat16 model that is neither quantised nor a GGUF file is computed in bfloat16
    if the processor has AMX and the kernels compute all of the model, or if float32 does not fit into memory."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto`: a GPU if there is one. On a GPU the own engine computes with torch alone, which
    is slow: use `PENSTOCK_ENGINE_KIND=vllm` there."""
    weights: Literal["auto", "bf16", "p12", "int8", "int4"] = "auto"
    """How the weights of linear layers are stored on a CPU. `bf16`: as they are. `p12`: bfloat16 in 12 bits, without
    loss. `auto`: the faster of these two; for a GGUF file its own numbers. `int8`: 8 bits with a scale
    for each output. `int4`: 4 bits with a scale for each output and 128 inputs, and the output layer in 8 bits. `int8`,
    `int4` and a GGUF file's own numbers change tokens: set them alike on all workers of a pipeline."""
    prefill_weights: Literal["", "auto", "bf16", "p12", "int8", "int4"] = ""
    """Another form of the weights for computing prompts; the same on all workers of a pipeline. `decode` and `auto`
    workers then have both forms in memory. Empty: as `PENSTOCK_ENGINE_WEIGHTS`."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """How K and V are stored on a CPU. `auto`: in the model's dtype. `int8`: 8 bits with a scale for each token and
    head, which has room for twice the tokens of bfloat16, and changes tokens: set it alike on all workers of a
    pipeline."""
    isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "torch"] = "auto"
    """The instruction set of the native kernels on a CPU. `auto`: the best that the processor has. In 16 bits and with
    integers, tokens and KV blocks depend on it: where processors differ, set one that all workers have. `torch`: torch
    computes models without the kernels, and in bfloat16 some tokens depend on the batch."""
    mixed: bool = False
    """Whether a worker starts beside workers of its pipeline that compute in another way (dtype, form of weights or KV,
    instruction set): to change these one worker after the other, or to use a GPU beside CPUs. An answer's tokens then
    depend on which worker continues it. Not needed for workers of Penstock's own engine that all compute in float32,
    with weights and KV in no smaller form: their tokens are the same."""
    packed: str = ""
    """A file of packed weights (`penstock weights pack`) in the form of `PENSTOCK_ENGINE_WEIGHTS`, which is mapped. A
    worker does not start if it does not fit. Empty: one is looked for beside the model and in the cache; if none
    fits, weights are packed at each start."""
    cache_dir: str = ""
    """The directory of packed weights that have no place beside their model, and of what a start has found out: hashes
    of files, and proofs. Empty: `~/.cache/penstock/engine`."""
    threads: int = Field(default=0, ge=0)
    """Threads that compute on a CPU; no more than the worker's cores. 0: as many as these."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block; the same on all workers of a pipeline."""
    pool_mb: int = Field(default=0, ge=0)
    """Memory for KV blocks, mapped in the background from the start on. 0: enough for eight sequences as long as the
    model's context, at least 256, but at most a quarter of the available memory, times the share of the machine's cores
    that the worker may use."""
    max_batch: int = Field(default=32, ge=1)
    """The most sequences that run at the same time; no more than `PENSTOCK_ENGINE_MAX_STEP_TOKENS`."""
    max_step_tokens: int = Field(default=256, ge=1)
    """The most tokens of one step; longer prompts are prefilled in chunks. While more prompt tokens wait than four
    steps compute, steps may be up to four times as large. Beside interactive answers
    `PENSTOCK_SLO_INTERACTIVE_GAP_S` decides how many tokens a step has, four times as many at most; with `vllm` it does
    so once, by the rate of prompts at the start."""
    speculate: Constant[bool] = True
    """Speculative decoding: whether a step may give a sequence several tokens if its next ones can be guessed. The
    tokens are the same either way."""
    vllm_args: str = ""
    """With `vllm`: further arguments of `vllm serve`, as on its command line, such as `--tensor-parallel-size 2`."""
    adapters: str = ""
    """With `vllm`: LoRA adapters of the model, `NAME=DIRECTORY` with commas between them, each with PEFT's
    `adapter_config.json` and `adapter_model.safetensors`. Callers ask for one by its name, as for a model. The files
    are read at the start alone; the same names on all workers of a pipeline."""
    response_template: str = ""
    """A JSON file with the model's response template, which tells calls and reasoning from text: for a model that was
    published without one and is of no known family."""

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        given = {self.weights, self.prefill_weights, self.kv_dtype, self.isa}
        if self.kind != "own" and given - {"auto", ""}:
            raise ValueError(
                f"PENSTOCK_ENGINE_WEIGHTS, …_PREFILL_WEIGHTS, …_KV_DTYPE and …_ISA are for Penstock's own engine, and "
                f"PENSTOCK_ENGINE_KIND is {self.kind}: leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        taken = {self.model, self.find_served_name()} & self.find_adapters().keys()
        if self.adapters and self.kind != "vllm":
            raise ValueError(
                f"PENSTOCK_ENGINE_ADAPTERS needs PENSTOCK_ENGINE_KIND=vllm, and that is {self.kind}: leave it out"
            )
        if taken:
            raise ValueError(f"PENSTOCK_ENGINE_ADAPTERS: {taken.pop()!r} is the name of the model itself")
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        # A step gives each running sequence a token, so more of them would not run at the same time.
        if self.kind == "own" and "max_batch" in self.model_fields_set and self.max_batch > self.max_step_tokens:
            raise ValueError(
                f"PENSTOCK_ENGINE_MAX_BATCH={self.max_batch} is more than PENSTOCK_ENGINE_MAX_STEP_TOKENS="
                f"{self.max_step_tokens}, the tokens of a step: raise that, or lower the batch"
            )
        return self

    @property
    def num_threads(self) -> int:
        """How many threads compute on a CPU."""
        return self.threads or count_usable_cores()

    def find_served_name(self) -> str:
        """Return the name by which callers ask for the model."""
        # Links are not followed: a name that an operator gave by a link stays.
        is_directory = self.model.startswith(("/", "./", "../", "~")) or Path(self.model).exists()
        if self.served_name or self.model == "demo" or not is_directory:
            return self.served_name or self.model
        return Path(os.path.abspath(Path(self.model).expanduser())).name or self.model

    def find_adapters(self) -> dict[str, Path]:
        """Return the directories of the LoRA adapters by name. Raises `ValueError` for what names none."""
        found = dict[str, Path]()
        for one in filter(None, (part.strip() for part in self.adapters.split(","))):
            name, _, directory = one.partition("=")
            if _ADAPTER_NAME.fullmatch(name) is None or not directory:
                raise ValueError(f"PENSTOCK_ENGINE_ADAPTERS: {one!r} is not NAME=DIRECTORY, as in sql=/models/sql-lora")
            if name in found:
                raise ValueError(f"PENSTOCK_ENGINE_ADAPTERS: the name {name!r} stands twice")
            found[name] = Path(directory).expanduser()
        return found

    def find_cache_directory(self) -> Path:
        """Return the directory of notes and packed weights, with the default and `~` resolved."""
        return Path(self.cache_dir or DEFAULT_CACHE_DIR).expanduser()


class EndpointSettings(Settings):
    """Servers with OpenAI's API that are asked for the answers, where `PENSTOCK_ENGINE_KIND` is `openai`."""

    prefix = "PENSTOCK_ENDPOINT_"

    urls: str = ""
    """The servers, with commas between them: `http://host:8000`, with a path if that is not `/v1`. `#3` at an
    address's end is its weight: it gets three times the requests of one without."""
    key: str = Field(default="", repr=False)
    """The API key that is sent to them, if they ask for one. With commas between: one for each, in the order of the
    servers, and an empty one for a server that asks for none."""
    model: str = ""
    """The model's name at the servers. Empty: the worker asks them, and they must serve one model. With commas between:
    its name at each, in the order of the servers."""
    max_requests: int = Field(default=32, ge=1)
    """The most requests that one worker has under way at one server."""
    silence_s: Constant[float] = 120.0
    """A server that sends nothing for this long, also before the first piece of an answer, counts as failed."""
    interrupted: Literal["continue", "restart-if-unseen", "fail"] = "continue"
    """The fate of an answer whose worker or server was lost in the middle. `continue`: a server is asked to go on
    behind the text so far. `restart-if-unseen`: the answer begins anew if the log has nothing of it. `fail`: it ends
    with `answer_interrupted`. Where a choice is not possible for an answer, the next one of these applies."""


class EmbedSettings(Settings):
    """Vectors of texts, where `embed` workers compute them."""

    prefix = "PENSTOCK_EMBED_"

    prompt: str = Field(default="", max_length=256)
    """The name of the checkpoint's prompt that is put before texts whose request names none. Empty: the checkpoint's
    own default, if it has one."""


class WorkerSettings(Settings):
    """One worker process."""

    prefix = "PENSTOCK_WORKER_"

    name: str = ""
    """The worker's name, from which its transactional id follows. Empty: host, process id and a random part. A worker
    does not start under the name of a living one."""
    cores: str = ""
    """CPU cores on which the worker computes, `0` or `0,1`. Its threads for bus and Redis run on all. Empty: all."""
    heartbeat_s: Constant[float] = 1.0
    """How often the worker writes its status to Redis."""
    drain_s: float = Field(default=20.0, ge=0)
    """How long a stopping worker may finish its running requests before it hands the rest back."""
    stall_limit_s: float = Field(default=60.0, gt=0)
    """If a worker's loop stands still for longer than this, and than 20 of its longest engine steps, its requests go
    to other workers, it logs where it stands, and ends itself with exit code 70."""


class StaySettings(Settings):
    """Which requests a worker of kind `auto` decodes itself. Without workers of kind `decode`, all that have blocks."""

    prefix = "PENSTOCK_WORKER_STAY_"

    max_prompt_tokens: int = Field(default=512, ge=0)
    """A request is handed off to a worker of kind `decode` if more tokens of its prompt had to be computed."""


class AdmissionSettings(Settings):
    """Access to the gateway, and its refusal of requests."""

    prefix = "PENSTOCK_GATEWAY_"

    keys: str = ""
    """Where the API keys are: a JSON or TOML file, or `redis`. `open`: everybody may call. Empty: the same, but only
    for a gateway that listens on this machine alone."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """An interactive request that would wait for longer, by the tokens that wait before it, is refused with 429."""


def _split_origins(text: str) -> list[str]:
    return [origin for one in text.lower().split(",") if (origin := one.strip().rstrip("/"))]


class GuardSettings(Settings):
    """Limits of a connection to the gateway."""

    prefix = "PENSTOCK_GATEWAY_"

    max_body_mb: float = Field(default=8.0, gt=0)
    """The largest body of a request; 413 beyond it."""
    headers_s: Constant[float] = 10.0
    """The longest time from a request's first byte to the end of its headers; 408 beyond it."""
    idle_s: float = Field(default=620.0, gt=0)
    """A connection on which no request is under way is closed after so many seconds: later than clients and proxies
    close theirs. Where connections are short, the one that is idle for the longest time is closed before."""
    body_s: Constant[float] = 20.0
    """How long a body may take after the headers, plus its length divided by `body_kb_per_s`."""
    body_kb_per_s: Constant[float] = 64.0
    """The slowest rate at which a large body may arrive."""
    stalled_s: Constant[float] = 60.0
    """How long, or up to twice as long, a reader may accept no bytes before its connection is closed."""
    max_connections: int = Field(default=4000, ge=1)
    """The most connections at the same time; 503 beyond it. Fewer where the process may not open so many files."""
    origins: str = ""
    """The origins, separated by commas, whose pages may call the gateway from a browser, such as
    `https://app.example.com`; `*`: all. Empty: no page of another origin may."""

    def list_origins(self) -> list[str]:
        """Return the origins as browsers send them."""
        return _split_origins(self.origins)

    @field_validator("origins")
    @classmethod
    def _check_origins(cls, origins: str) -> str:
        for origin in _split_origins(origins):
            if origin not in {"*", "null"} and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#]+", origin) is None:
                raise ValueError(
                    f"{origin!r} is no origin: write scheme, host and port, such as https://app.example.com or "
                    "http://localhost:3000, without a path"
                )
        return origins


class TraceSettings(Settings):
    """Where spans go."""

    prefix = "PENSTOCK_TRACE_"

    keep_s: float = Field(default=600.0, ge=0)
    """How long the spans of a request are kept in Redis, for the page that shows its life; 0: not at all."""


class TelemetrySettings(Settings):
    """Metrics and traces of workers and gateways. By OTLP they go where OpenTelemetry's own variables say, such as
    `OTEL_EXPORTER_OTLP_ENDPOINT`.
    """

    telemetry: Literal["on", "off"] = "on"
    """`off`: nothing is counted, and no span recorded."""
    telemetry_port: int = Field(default=0, ge=0, lt=65536)
    """Where a worker serves `/metrics` to Prometheus; 0: nowhere. With `penstock up` the first worker has this port,
    the second the next, and so on. (A gateway serves it on its own port.)"""
    telemetry_host: str = "127.0.0.1"
    """The address on which it serves `/metrics`. `0.0.0.0`: all of the machine's."""


class GatewaySettings(Settings):
    """The gateway."""

    prefix = "PENSTOCK_GATEWAY_"

    host: str = "127.0.0.1"
    """The address on which it listens. `0.0.0.0`: all of the machine's."""
    port: int = Field(default=8080, ge=0, lt=65536)
    """The port on which it listens."""
    patience_s: float = Field(default=600.0, gt=0)
    """After this time without a token, also before the first one, the reader of an answer is asked to come back."""
    keep_alive_s: Constant[float] = 15.0
    """After this time without an event, or up to twice as long, a stream gets a comment, so that proxies keep the
    connection open."""
    stop_s: float = Field(default=10.0, ge=0)
    """How long a stopping gateway goes on with answers that are not streamed."""
    cancel_unread_s: float = Field(default=0.0, ge=0)
    """A request whose client has closed its connection is cancelled after so many seconds without a reader, unless it
    had an `Idempotency-Key`, a session, `background` or `store`. 0: it goes on, as its client may come back."""
    embed_token_ids: Literal["refuse", "model"] = "refuse"
    """`refuse`: token ids in `/v1/embeddings` are an error, as SDKs send ids of OpenAI's tokenizers. `model`: they are
    of this model's vocabulary, and read as they are."""
    prices: str = ""
    """A TOML file with the prices of tokens and of worker-hours, for `penstock usage --cost`, the page and the metrics.
    Empty: there are none."""
    image_hosts: str = ""
    """The hosts, separated by commas, from which a gateway fetches pictures that are named by an `https` address:
    `images.example.com`, `*.example.com`, with a port where it is not 443; `*`: any public one, at 443. Empty: from
    none."""

    def allows_image_host(self, host: str, port: int) -> bool:
        """Return whether pictures are fetched from a host, at this port."""
        places = [one.strip().lower() for one in self.image_hosts.split(",")]
        pairs = [one.split(":") if one.count(":") == 1 else [one, "443"] for one in places]  # several: an IPv6 address
        return any(fnmatchcase(host, name) and str(port) == its_port for name, its_port in pairs)

    @property
    def takes_token_ids(self) -> bool:
        """Whether token ids in place of texts are the model's own."""
        return self.embed_token_ids == "model"


class BatchSettings(Settings):
    """Files and batches of the gateway."""

    prefix = "PENSTOCK_BATCH_"

    store: str = ""
    """Where files, batches and responses are kept, the same for all gateways: a folder, or `s3://bucket/prefix` with
    its keys in the store's own variables (`AWS_…`). Empty: `files` beside the data of `penstock up`."""
    rows_in_flight: Constant[int] = 256
    """The most lines that one gateway has under way of a batch, and of all batches together at a pipeline."""
    max_lines: Constant[int] = 50_000
    """The most requests in one batch."""
    max_file_bytes: int = Field(default=200_000_000, ge=1)
    """The largest batch file, in bytes."""
    lease_s: Constant[float] = 10.0
    """A batch whose gateway does not renew its lease for this long is continued by another gateway."""
    look_s: Constant[float] = 2.0
    """How often a gateway looks for batches without a gateway."""

    @property
    def store_url(self) -> str:
        """Where files and batches are kept, with the default resolved."""
        return self.store or str(Path.home() / ".local" / "share" / "penstock" / "files")


class PictureSettings(Settings):
    """Pictures in prompts, for gateways, workers and producers."""

    prefix = "PENSTOCK_PICTURE_"

    max_mb: float = Field(default=8.0, gt=0)
    """The most bytes that the files of a request's pictures may have together."""
    max_mpixels: float = Field(default=25.0, gt=0)
    """The most millions of pixels of one picture. A worker takes about ten bytes for each while it reads the file."""
    max_count: int = Field(default=16, ge=1)
    """The most pictures of one request, those of earlier turns included."""
    redis_max_kb: int = Field(default=1024, ge=0)
    """A larger file lies in the object store (`PENSTOCK_BATCH_STORE`), which workers then need too; a smaller one in
    the Redis of the token logs, while less than half of its memory is used."""

    @property
    def max_bytes(self) -> int:
        """The most bytes of a request's pictures."""
        return round(self.max_mb * 2**20)

    @property
    def max_pixels(self) -> int:
        """The most pixels of a picture."""
        return round(self.max_mpixels * 10**6)


class ResponsesSettings(Settings):
    """Responses that the gateway keeps."""

    prefix = "PENSTOCK_RESPONSES_"

    keep_days: float = Field(default=30.0, ge=0)
    """How long a response is kept, in `PENSTOCK_BATCH_STORE`, unless its request says `"store": false`. 0: none is
    kept; `store` is false then, and `background` is refused."""


class WebhookSettings(Settings):
    """Webhooks: notices that a response with `background` or a batch has ended."""

    prefix = "PENSTOCK_WEBHOOK_"

    secret: str = Field(default="", repr=False)
    """The key that signs events: `whsec_` and 24 to 64 bytes in base64. All gateways of a Redis need the same: one
    without it drops events. Empty: there are no webhooks."""
    url: str = Field(default="", repr=False)
    """Where events go if their tenant has no webhook of its own. Empty: nowhere."""
    hosts: str = ""
    """Hosts, separated by commas, whose URLs may be `http`, and whose addresses may be private ones."""

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        if self.url and not self.secret:
            raise ValueError("PENSTOCK_WEBHOOK_URL needs PENSTOCK_WEBHOOK_SECRET")
        with suppress(ValueError):
            key = b64decode(self.secret.removeprefix("whsec_"), validate=True)
            if not self.secret or (self.secret.startswith("whsec_") and 24 <= len(key) <= 64):
                return self
        raise ValueError("PENSTOCK_WEBHOOK_SECRET is not `whsec_` and 24 to 64 bytes in base64")

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The hosts of `hosts`."""
        return frozenset(name.strip().lower() for name in self.hosts.split(",") if name.strip())


PACED_SHARE = 0.35
"""Prompts that do not fit within the gaps of answers are computed within this share of the time to first token: the
rows that they become, and prompts that come later, leave less time than there seems to be.
"""


class SloSettings(Settings):
    """When a request is in time. `penstock plan` finds the highest rate at which nine of ten of a class are."""

    prefix = "PENSTOCK_SLO_"

    interactive_ttft_s: float = Field(default=4.0, gt=0)
    """The longest time to the first token of an interactive request."""
    interactive_itl_s: float = Field(default=0.2, gt=0)
    """The longest mean time between two tokens of an interactive answer."""
    interactive_gap_s: float = Field(default=0.05, gt=0)
    """The longest time between two tokens of an interactive answer: a step computes as many tokens of others' prompts
    as fit within it, by the measured cost of steps. It computes more only where a first token would be late by that, as
    many as that needs, and where one answer alone takes longer; longer gaps are counted in
    `penstock_gap_missed_total`."""


class RegionSettings(Settings):
    """A region: one place among several that help each other. Without a name there are no regions."""

    prefix = "PENSTOCK_REGION_"

    name: str = ""
    """This region's name, `a-z 0-9 -`. Ids that its gateways make end with it."""
    peers: str = ""
    """The gateways of the other regions: `us=https://gateway.us.example:8080, asia=…`. A host name may stand for
    several gateways of its region."""
    secret: str = Field(default="", repr=False)
    """By this, at least 16 characters, the gateways of all regions know each other. The same in all regions."""
    copies: str = ""
    """The regions, with commas between them, whose requests and results MirrorMaker copies to this one's Kafka. A
    gateway keeps an index of what is open there, so that they can be adopted."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.name and not is_region_name(self.name):
            raise ValueError(f"PENSTOCK_REGION_NAME={self.name!r} is not 1 to 32 of 'a-z 0-9 -', first a letter")
        try:
            peers = parse_peers(self.peers)
        except ValueError as error:
            raise ValueError(f"PENSTOCK_REGION_PEERS: {error}") from None
        if peers and (not self.name or self.name in peers):
            raise ValueError("PENSTOCK_REGION_PEERS needs PENSTOCK_REGION_NAME, which is none of the peers")
        if peers and len(self.secret) < 16:
            raise ValueError("PENSTOCK_REGION_PEERS needs PENSTOCK_REGION_SECRET of at least 16 characters")
        if strange := set(self.list_copies()) - peers.keys():
            raise ValueError(f"PENSTOCK_REGION_COPIES names {', '.join(sorted(strange))}: no peer of this region")
        return self

    def list_copies(self) -> list[str]:
        """Return the names of the regions whose topics are copied here."""
        return [name for part in self.copies.split(",") if (name := part.strip())]

    def list_peers(self) -> dict[str, str]:
        """Return the addresses of the other regions' gateways by name."""
        return parse_peers(self.peers)


class FaultSettings(Settings):
    """Deliberate failures, for tests."""

    failpoints: str = ""
    """Where the worker kills or stops itself (`penstock/failpoints.py`): `decode.7.sent=kill@3`. Empty: nowhere."""


SETTINGS_CLASSES: tuple[type[Settings], ...] = (
    Addresses, BusSettings, RecordSettings, KVSettings, EngineSettings, EndpointSettings, EmbedSettings, WorkerSettings,
    StaySettings, TraceSettings, TelemetrySettings, AdmissionSettings, GuardSettings,
    GatewaySettings, BatchSettings, PictureSettings, ResponsesSettings, WebhookSettings, SloSettings, RegionSettings,
    FaultSettings,
)  # fmt: skip

S = TypeVar("S", bound=Settings)
G = TypeVar("G", bound=NamedTuple)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def list_variables(kinds: Iterable[type[Settings]] = SETTINGS_CLASSES, *, constants: bool = False) -> list[str]:
    """Return the environment variable of every setting; or the name of every constant in `PENSTOCK_TESTING`."""
    return [variable_name(kind, name) for kind in kinds for name in list_names(kind, constants=constants)]


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Raise `SettingsError` for a `PENSTOCK_` variable that nothing reads, naming the nearest that something does."""
    environment = os.environ if environment is None else environment
    constants = list_variables(constants=True)
    lines = describe_unknown_variables(environment)
    if lines := [*lines, *describe_unknown_names(read_testing_values(environment), constants)]:
        raise SettingsError(lines[0])
    warn_of_removed_settings(environment)


def warn_of_removed_settings(names: Iterable[str]) -> None:
    """Log a warning for each name of a setting that was removed; once in a process."""
    for name in sorted(REMOVED.keys() & names):
        _warn_of_removed_setting(name)


@cache
def _warn_of_removed_setting(name: str) -> None:
    log.warning("%s has no effect any more%s", name, f"; {REMOVED[name]}" if REMOVED[name] else "")


def describe_unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a line for each `PENSTOCK_` variable that no setting reads."""
    return describe_unknown_names(
        set(environment) - REMOVED.keys(), [*_list_readable_names(), CONFIG_VARIABLE, TESTING_VARIABLE]
    )


def check_config(config: Mapping[str, GivenValue]) -> list[str]:
    """Return a line for each name in the configuration file that no setting reads."""
    return [
        f"{found.origin}: {line}"
        for found in list(config.values())[:1]
        for line in describe_unknown_names(config.keys() - REMOVED.keys(), _list_readable_names())
    ]


def _list_readable_names() -> list[str]:
    """Return all names that are read, settings before files of secrets: the first of similar names is suggested."""
    return [*list_variables(), *(f"{variable}{FILE_SUFFIX}" for variable in list_secret_variables(SETTINGS_CLASSES))]


def load_settings(kind: type[S], **given: object) -> S:
    """Return the settings of one class, with the values of `given` before all others.

    Raises `SettingsError` for the first error.
    """
    check_environment()
    config = read_config_file(os.environ)
    if lines := check_config(config):
        raise SettingsError(lines[0])
    warn_of_removed_settings(config)
    found = {name: value for name, (value, _) in read_given_values(kind, os.environ, config).items()}
    try:
        return kind.model_validate({**found, **given})
    except ValidationError as error:
        raise SettingsError(describe_problems(kind, error)[0]) from None


class GatewayProcessSettings(NamedTuple):
    """All settings of a gateway but the addresses."""

    gateway: GatewaySettings
    guard: GuardSettings
    admission: AdmissionSettings
    batch: BatchSettings
    picture: PictureSettings
    responses: ResponsesSettings
    webhook: WebhookSettings
    region: RegionSettings
    slo: SloSettings
    engine: EngineSettings
    bus: BusSettings
    record: RecordSettings
    telemetry: TelemetrySettings
    traces: TraceSettings


def load_group(group: type[G], **given: Mapping[str, object]) -> G:
    """Return a tuple of settings, each of the class that its field has. `given`: by field, values before all others.

    Raises `SettingsError` for the first error.
    """
    return group._make(load_settings(kind, **given.get(name, {})) for name, kind in get_type_hints(group).items())


def describe_problems(kind: type[Settings], error: ValidationError) -> list[str]:
    """Return a line for each problem with the settings of one class, without any secret."""
    lines = []
    for line in error.errors(include_url=False):
        message = reword_validation(line["msg"])
        if not line["loc"]:  # it concerns several settings, which the message names
            lines += message.split("; ")
            continue
        name = str(line["loc"][0])
        hidden = name in kind.model_fields and is_secret(kind, name)
        lines.append(f"{variable_name(kind, name)}: {message}" + ("" if hidden else f" (given: {line['input']!r})"))
    return lines
