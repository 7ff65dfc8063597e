"""Settings: one small class for each part, read once at the entry point from the places that `sources` lists.

The entry point is a command, or the constructor of a `Client` or a `Stack`, which programs of others make, too.
A bad value is an error, and so is an unknown `PENSTOCK_` variable; the error names the nearest known one.
"""

import os
from base64 import b64decode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import (
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.config.addresses import Addresses
from penstock.config.sources import (
    CONFIG_VARIABLE,
    FILE_SUFFIX,
    GivenValue,
    describe_unknown_names,
    is_secret,
    list_secret_variables,
    read_config_file,
    read_given_values,
    variable_name,
)
from penstock.cores import count_usable_cores
from penstock.errors import SettingsError, reword_validation

DEFAULT_CACHE_DIR = "~/.cache/penstock/engine"


class BusSettings(BaseSettings):
    """The bus: Kafka, or Redis Streams."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_BUS_", extra="forbid")

    partitions: int = Field(default=4, ge=1)
    """Kafka: partitions of each topic that is created. No more workers of a stage can share the topic."""
    replication: int = Field(default=1, ge=1)
    """Kafka: copies of each topic that is created; 3 where there are three brokers."""
    session_timeout_s: float = Field(default=3.0, ge=0.5)
    """Redis Streams: a worker whose session has been over for this long loses its deliveries. (Kafka: the broker's own
    setting.)"""
    transaction_timeout_s: float = Field(default=5.0, ge=1)
    """Kafka: how long a dead member's open transaction may hold up readers."""


class RecordSettings(BaseSettings):
    """Claims and token logs."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RECORD_", extra="forbid")

    lease_s: float = Field(default=1.0, ge=0.2)
    """A worker that does not renew its session for this long loses it, and with it all its claims. One value for all
    workers of a pipeline."""
    keep_s: float = Field(default=3600.0, ge=1)
    """How long an ended stream can be read and its id is remembered, in addition to the time that the request took. A
    message with the same id that arrives later is a new request."""
    pending_keep_s: float = Field(default=7 * 86400.0, ge=60)
    """How long the record of an unfinished request is kept after its last change."""
    max_attempts: int = Field(default=8, ge=1)
    """Claims in vain, after which a request ends with `attempts_exhausted`: its workers died, and none made more of the
    answer than one before."""
    fail_attempts: int = Field(default=3, ge=1)
    """Claims in vain, after which a request whose work fails ends with its error."""
    retry_first_s: float = Field(default=1.0, ge=0)
    """How long a request whose work failed waits until it is tried again."""
    retry_factor: float = Field(default=2.0, ge=1)
    """How many times longer it waits after each further failure."""
    retry_cap_s: float = Field(default=30.0, ge=0)
    """The longest that it waits."""

    @model_validator(mode="after")
    def _check_waits(self) -> Self:
        if self.retry_first_s > self.retry_cap_s:
            raise ValueError("PENSTOCK_RECORD_RETRY_FIRST_S is longer than PENSTOCK_RECORD_RETRY_CAP_S, the longest")
        return self


CodecChoice = Literal["auto", "raw", "lossless", "int8"]


class KVSettings(BaseSettings):
    """The KV store."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_KV_STORE_", extra="forbid")

    salt_secret: str = Field(default="penstock", repr=False)
    """Tenant salts are HMACs under this secret; the same on all workers of a pipeline."""
    shared_mb: int = Field(default=256, ge=0)
    """Memory for the blocks that all workers on this host share; 0: none. Allocated at once, by the first worker."""
    shared_dir: str = ""
    """The directory of the shared memory, and of the tables of the blocks on disk. Empty: `/dev/shm`, or the system's
    directory for temporary files."""
    disk_mb: int = Field(default=0, ge=0)
    """Budget of the directory of blocks on disk; 0: none."""
    disk_dir: str = ""
    """The directory of blocks on disk; it may serve several pipelines, whose workers have one `SHARED_DIR`. Empty:
    `~/.cache/penstock/kv`."""
    redis_mb: int = Field(default=1024, ge=0)
    """Budget for blocks in each KV Redis; 0: none, which is right where all workers are on one host."""
    redis_codec: CodecChoice = "auto"
    """How blocks are written to Redis. `auto`: compressed without loss where the measured speeds make that faster.
    `int8` changes tokens."""
    lease_s: float = Field(default=300.0, ge=1)
    """How long the blocks of a job that waits are kept from eviction, at most."""
    keep_s: float = Field(default=3600.0, ge=1)
    """How long a block stays in Redis after its last use."""

    @property
    def disk_path(self) -> Path:
        """The directory of blocks on disk, with the default and `~` resolved."""
        return Path(self.disk_dir or "~/.cache/penstock/kv").expanduser()


class EngineSettings(BaseSettings):
    """The model, and how it is run."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ENGINE_", extra="forbid")

    kind: Literal["own", "vllm", "openai"] = "own"
    """The source of the answers: `own`, Penstock's engine in `auto`, `prefill` and `decode` workers; `vllm`, vLLM in
    the same workers, where it is installed; `openai`, servers with OpenAI's API, which endpoint workers ask
    (`PENSTOCK_ENDPOINT_URLS`)."""
    model: str = "demo"
    """`demo`, a directory, a GGUF file, or a hub name. With `openai`: the name by which callers ask for the model; if
    it is not set, the endpoints' name."""
    served_name: str = Field(default="", max_length=256)
    """The name by which callers ask for the model; the same on all workers of a pipeline. Empty: the name of the hub,
    or a directory's own name, without the path to it. Who asks by the path is answered, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the model's own on a GPU. On a CPU bfloat16 where it is the model's own, the processor has AMX, which
    is faster in it, and the kernels compute all of the model, or where float32 does not fit the machine's memory; else,
    and always where the weights are quantised or a GGUF file, float32, whose tokens are the same on all processors, but
    for a GGUF file's own numbers."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto`: a GPU where there is one. On a GPU torch computes, rightly and slowly: there
    `kind=vllm` is the engine to choose."""
    weights: Literal["auto", "bf16", "p12", "int8", "int4"] = "auto"
    """How the weights of linear layers are kept on a CPU. `bf16`: as they are. `p12`: bfloat16 in 12 bits, without
    loss. `auto`: one of these two, whichever is faster; of a GGUF file its own numbers. `int8`: in 8 bits with a scale
    for each output. `int4`: in 4 bits with a scale for each output and 128 inputs, and the output layer in 8 bits.
    `int8`, `int4` and a GGUF file's own numbers have tokens of their own: the same on all workers of a pipeline."""
    prefill_weights: Literal["", "auto", "bf16", "p12", "int8", "int4"] = ""
    """The same for the weights that compute prompts, where those of answers are in another form: the same on all
    workers of a pipeline, too. `decode` and `auto` workers then have both in memory. Empty: as
    `PENSTOCK_ENGINE_WEIGHTS`."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """How K and V are kept on a CPU. `auto`: in the model's dtype. `int8`: in 8 bits with a scale for each token and
    head, which is room for twice the tokens of bfloat16; it has tokens of its own: the same on all workers of a
    pipeline."""
    isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "torch"] = "auto"
    """The instruction set of the native kernels on a CPU. `auto`: the best that the processor has. In 16 bits, and with
    integers, each has tokens and KV blocks of its own: where processors differ, name one that all workers have.
    `torch`: torch computes models without the kernels, and in bfloat16 some tokens depend on the batch."""
    mixed: bool = False
    """Whether a worker starts beside workers of its pipeline that compute in another way (dtype, form of weights or KV,
    instruction set), for a change of these one worker after the other, or a GPU beside CPUs: an answer's tokens then
    depend on which of them goes on with it. Workers of Penstock's own engine that all compute in float32, with weights
    and KV in no smaller form, have the same tokens, and nothing is refused."""
    packed: str = ""
    """A file of packed weights (`penstock weights pack`) in the form of `PENSTOCK_ENGINE_WEIGHTS`, which is mapped. A
    worker refuses to start where it does not fit. Empty: one is looked for beside the model and in the cache; where
    none fits, weights are packed at each start."""
    cache_dir: str = ""
    """The directory of packed weights that have no place beside their model, and of notes of a
    start: hashes of files, and proofs. Empty: `~/.cache/penstock/engine`."""
    threads: int = Field(default=0, ge=0)
    """Threads that compute on a CPU; no more than the worker has cores. 0: as many as it has."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block; the same on all workers of a pipeline."""
    pool_mb: int = Field(default=0, ge=0)
    """Memory for KV blocks, mapped in the background from the start on. 0: enough for eight sequences as long as the
    model's context, 256 at least, and at most a quarter of the memory that is available, times the worker's share of
    the machine's cores."""
    max_batch: int = Field(default=32, ge=1)
    """Sequences that run at the same time, at most; no more than a step has tokens."""
    max_step_tokens: int = Field(default=256, ge=1)
    """Token budget of one step; longer prompts are prefilled in chunks. Steps are up to four times as large while more
    prompt tokens wait than four steps compute, as far as they take no longer than `PENSTOCK_SLO_INTERACTIVE_ITL_S`."""
    speculate: bool = True
    """Whether a step may give a sequence several tokens, where its next tokens can be guessed. Its tokens are the same
    either way."""
    vllm_args: str = ""
    """With `vllm`: further arguments of `vllm serve`, as on its command line, such as `--tensor-parallel-size 2`."""
    response_template: str = ""
    """A JSON file with the model's response template, by which calls and reasoning are told from text: for a model that
    was published without one, and is of no family that is known."""

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

    def find_cache_directory(self) -> Path:
        """Return the directory of notes and packed weights, with the default and `~` resolved."""
        return Path(self.cache_dir or DEFAULT_CACHE_DIR).expanduser()


class EndpointSettings(BaseSettings):
    """Servers with OpenAI's API that are asked for the answers, where `PENSTOCK_ENGINE_KIND` is `openai`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ENDPOINT_", extra="forbid")

    urls: str = ""
    """The servers, with commas between them: `http://host:8000`, or with a path other than `/v1` behind it. `#3` at an
    address's end is its weight: it gets three times the requests of one without."""
    key: str = Field(default="", repr=False)
    """The API key that is sent to them, if they ask for one."""
    model: str = ""
    """The model's name at the servers. Empty: they are asked, and must serve one model."""
    max_requests: int = Field(default=32, ge=1)
    """Requests that one worker has under way at one server, at most."""
    silence_s: float = Field(default=120.0, gt=0)
    """A server that sends nothing for this long, also before the first piece of an answer, counts as failed."""
    interrupted: Literal["continue", "restart-if-unseen", "fail"] = "continue"
    """The fate of an answer whose worker or server was lost in the middle of it. `continue`: a server is asked to
    go on behind the text so far, where it can. `restart-if-unseen`: it begins anew, if the log has nothing of it.
    `fail`: it ends with `answer_interrupted`. Each does what the next one does where it cannot do its own."""


class WorkerSettings(BaseSettings):
    """One worker process."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WORKER_", extra="forbid")

    name: str = ""
    """Stable name of this slot (its transactional id). Empty: host, process id and a random part. A name that a living
    process has is refused."""
    next_name: bool = False
    """Take the next free name instead, `auto-1` for `auto-0`. `penstock up` sets it for its workers."""
    cores: str = ""
    """CPU cores to stay on, `0` or `0,1`. Empty: all."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """How often the worker writes its status to Redis."""
    drain_s: float = Field(default=20.0, ge=0)
    """How long a stopping worker may finish its running requests before it hands the rest back."""
    stall_limit_s: float = Field(default=60.0, gt=0)
    """A worker whose loop stands still for longer, and for longer than 20 of its longest engine steps, loses its
    requests to others, says where it stands, and ends itself with exit code 70."""


class StaySettings(BaseSettings):
    """Which requests a worker of kind `auto` decodes itself. All of them, where no other worker decodes."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WORKER_STAY_", extra="forbid")

    max_prompt_tokens: int = Field(default=512, ge=0)
    """A request of whose prompt more tokens had to be computed is handed off to another worker that decodes."""
    max_added_itl_ms: float = Field(default=50.0, ge=0)
    """So is one whose prompt takes longer, by the measured cost of steps, while other answers are decoded beside it;
    and an answer whose tokens prompts have kept for longer, on the mean."""
    max_answer_tokens: int = Field(default=2000, ge=1)
    """An answer that gets as long goes on in another worker that decodes."""
    max_s: float = Field(default=60.0, gt=0)
    """So does one that lasts for longer."""


class AdmissionSettings(BaseSettings):
    """Access to the gateway, and its refusal of requests."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_", extra="forbid")

    keys: str = ""
    """Where the API keys are: a JSON or TOML file, or `redis`. `open`: everybody may call. Empty: the same, but only
    for a gateway that listens on this machine alone."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """An interactive request that would wait for longer, by the tokens that wait before it, is refused with 429."""
    max_batch_wait_s: float = Field(default=6 * 3600.0, gt=0)
    """A request of class `batch` that would wait for longer is refused with 429."""


class GuardSettings(BaseSettings):
    """Limits of a connection to the gateway."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_", extra="forbid")

    max_body_mb: float = Field(default=8.0, gt=0)
    """The largest body of a request; 413 beyond it."""
    max_file_mb: float = Field(default=201.0, gt=0)
    """The largest body of an upload to `/v1/files`: a batch file of 200 MB, and the form around it."""
    max_header_kb: int = Field(default=32, ge=1)
    """Request line and headers together."""
    max_headers: int = Field(default=100, ge=1)
    """The most header lines."""
    headers_s: float = Field(default=10.0, gt=0)
    """The longest time from the connection, or a further request's first byte, to the end of the headers."""
    body_s: float = Field(default=20.0, gt=0)
    """The longest time from the headers to the end of the body, in addition to its length over `body_kb_per_s`."""
    body_kb_per_s: float = Field(default=64.0, gt=0)
    """The slowest rate at which a large body may arrive."""
    stalled_s: float = Field(default=60.0, gt=0)
    """How long a reader may accept no bytes before its connection is closed."""
    max_connections: int = Field(default=4000, ge=1)
    """The most connections at the same time; 503 beyond it."""


class TraceSettings(BaseSettings):
    """Where spans go."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_TRACE_", extra="forbid")

    file: str = ""
    """Append finished spans to this file, one JSON object a line. Empty: to no file."""
    keep_s: float = Field(default=600.0, ge=0)
    """How long the spans of a request are kept in Redis, for the page that shows its life; 0: not at all."""


class TelemetrySettings(BaseSettings):
    """Metrics and traces of workers and gateways. By OTLP they go where OpenTelemetry's own variables say, such as
    `OTEL_EXPORTER_OTLP_ENDPOINT`.
    """

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", extra="forbid")

    telemetry: Literal["on", "off"] = "on"
    """`off`: nothing is counted, and no span recorded."""
    telemetry_port: int = Field(default=0, ge=0, lt=65536)
    """Where a worker serves `/metrics` to Prometheus; 0: nowhere. With `penstock up` the first worker has this port,
    the second the next, and so on. (A gateway serves it on its own port.)"""
    telemetry_host: str = "127.0.0.1"
    """The address on which it serves `/metrics`. `0.0.0.0`: all of the machine's."""


class GatewaySettings(BaseSettings):
    """The gateway."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_", extra="forbid")

    host: str = "127.0.0.1"
    """The address on which it listens. `0.0.0.0`: all of the machine's."""
    port: int = Field(default=8080, ge=0, lt=65536)
    """The port on which it listens."""
    patience_s: float = Field(default=600.0, gt=0)
    """How long an answer may bring no token, also before the first one, until its reader is asked to come back."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """A stream without events for this long, or up to twice as long, is sent a comment, so that proxies keep the
    connection open."""
    stop_s: float = Field(default=10.0, ge=0)
    """How long a stopping gateway goes on with answers that are not streamed."""


class BatchSettings(BaseSettings):
    """Files and batches of the gateway."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_BATCH_", extra="forbid")

    store: str = ""
    """Where files, batches and responses are kept, the same for all gateways: a folder, or `s3://bucket/prefix` with
    its keys in the store's own variables (`AWS_…`). Empty: `files` beside the data of `penstock up`."""
    rows_in_flight: int = Field(default=256, ge=1)
    """Requests of batches that one gateway has under way, for each pipeline and for each batch."""
    max_lines: int = Field(default=50_000, ge=1)
    """The most requests in one batch."""
    max_file_bytes: int = Field(default=200_000_000, ge=1)
    """The largest batch file, in bytes."""
    lease_s: float = Field(default=10.0, ge=0.2)
    """A batch whose gateway does not renew its lease for this long is continued by another gateway."""
    look_s: float = Field(default=2.0, gt=0)
    """How often a gateway looks for batches without a gateway."""

    @property
    def store_url(self) -> str:
        """Where files and batches are kept, with the default resolved."""
        return self.store or str(Path.home() / ".local" / "share" / "penstock" / "files")


class ResponsesSettings(BaseSettings):
    """Responses that the gateway keeps."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RESPONSES_", extra="forbid")

    keep_days: float = Field(default=30.0, ge=0)
    """How long a response is kept, in `PENSTOCK_BATCH_STORE`, unless its request says `"store": false`. 0: none is
    kept; `store` is false then, and `background` is refused."""
    max_per_tenant: int = Field(default=10_000, ge=1)
    """The most responses of a tenant that are kept: its oldest are deleted, once an hour."""


class WebhookSettings(BaseSettings):
    """Webhooks: notices that a response with `background` or a batch has ended."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WEBHOOK_", extra="forbid")

    secret: str = Field(default="", repr=False)
    """The key that signs events: `whsec_` and 24 to 64 bytes in base64, the same for all gateways. Empty: there are no
    webhooks."""
    url: str = Field(default="", repr=False)
    """Where the events of tenants go that have no webhook of their own. Empty: nowhere."""
    hosts: str = ""
    """Hosts, separated by commas, whose URLs may be `http`, and whose addresses may be private ones."""
    retry_s: float = Field(default=3 * 86400.0, ge=0)
    """How long after its response or batch ended an event may be tried again: after 5 seconds at first, then after
    longer and longer waits, up to an hour."""

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


class SloSettings(BaseSettings):
    """Until when a request is in time. `penstock plan` tells the highest rate at which nine of ten of a class are, and
    the engine makes steps larger while prompts wait, as far as a step takes no longer than `interactive_itl_s`.
    """

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SLO_", extra="forbid")

    interactive_ttft_s: float = Field(default=4.0, gt=0)
    """The longest time to the first token of an interactive request."""
    interactive_itl_s: float = Field(default=0.2, gt=0)
    """The longest time between two tokens of it, on the mean of its answer."""
    batch_ttft_s: float = Field(default=600.0, gt=0)
    """The longest time to the first token of a request of the class `batch`."""
    batch_itl_s: float = Field(default=1.0, gt=0)
    """The longest time between two tokens of it, on the mean of its answer."""


class FaultSettings(BaseSettings):
    """Deliberate failures, for tests."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", extra="forbid")

    failpoints: str = ""
    """Where the worker kills or stops itself (`penstock/failpoints.py`): `decode.7.sent=kill@3`. Empty: nowhere."""


SETTINGS_CLASSES: tuple[type[BaseSettings], ...] = (
    Addresses, BusSettings, RecordSettings, KVSettings, EngineSettings, EndpointSettings, WorkerSettings, StaySettings,
    TraceSettings, TelemetrySettings,
    AdmissionSettings, GuardSettings,
    GatewaySettings, BatchSettings, ResponsesSettings, WebhookSettings, SloSettings, FaultSettings,
)  # fmt: skip

S = TypeVar("S", bound=BaseSettings)
G = TypeVar("G", bound=NamedTuple)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def list_variables(kinds: Iterable[type[BaseSettings]] = SETTINGS_CLASSES) -> list[str]:
    """Return the environment variable of every setting."""
    return [variable_name(kind, name) for kind in kinds for name in kind.model_fields]


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Raise `SettingsError` for a `PENSTOCK_` variable that nothing reads, naming the nearest that something does."""
    if lines := describe_unknown_variables(os.environ if environment is None else environment):
        raise SettingsError(lines[0])


def describe_unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a line for each `PENSTOCK_` variable that no setting reads."""
    return describe_unknown_names(environment, [*_list_readable_names(), CONFIG_VARIABLE])


def check_config(config: Mapping[str, GivenValue]) -> list[str]:
    """Return a line for each name in the configuration file that no setting reads."""
    return [
        f"{found.origin}: {line}"
        for found in list(config.values())[:1]
        for line in describe_unknown_names(config, _list_readable_names())
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
    found = {name: value for name, (value, _) in read_given_values(kind, os.environ, config).items()}
    try:
        return kind(**{**found, **given})
    except ValidationError as error:
        raise SettingsError(describe_problems(kind, error)[0]) from None


class GatewayProcessSettings(NamedTuple):
    """All settings of a gateway but the addresses."""

    gateway: GatewaySettings
    guard: GuardSettings
    admission: AdmissionSettings
    batch: BatchSettings
    responses: ResponsesSettings
    webhook: WebhookSettings
    bus: BusSettings
    record: RecordSettings
    telemetry: TelemetrySettings
    traces: TraceSettings


def load_group(group: type[G], **given: Mapping[str, object]) -> G:
    """Return a tuple of settings, each of the class that its field has. `given`: by field, values before all others.

    Raises `SettingsError` for the first error.
    """
    return group._make(load_settings(kind, **given.get(name, {})) for name, kind in get_type_hints(group).items())


def check_together(guard: GuardSettings, batch: BatchSettings) -> list[str]:
    """Return a line for each contradiction between two classes' settings, where both values were set."""
    if "max_file_bytes" in batch.model_fields_set and batch.max_file_bytes > guard.max_file_mb * 2**20:
        return ["PENSTOCK_BATCH_MAX_FILE_BYTES is more than an upload may have by PENSTOCK_GATEWAY_MAX_FILE_MB"]
    return []


def describe_problems(kind: type[BaseSettings], error: ValidationError) -> list[str]:
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
