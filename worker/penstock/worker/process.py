"""The process of a worker, whatever its kind: its settings, name, heartbeat and telemetry, and the loop that it runs.

`main.py` of `prefill_worker/`, `decode_worker/`, `endpoint_worker/` and `embed_worker/` say what a worker of their kind
is made of.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock import failpoints
from penstock.bus.connect import connect_bus
from penstock.bus.contract import Member
from penstock.bytecode import keep_bytecode
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    BatchSettings,
    BusSettings,
    EmbedSettings,
    EndpointSettings,
    EngineSettings,
    FaultSettings,
    KVSettings,
    PictureSettings,
    RecordSettings,
    RegionSettings,
    SloSettings,
    StaySettings,
    TelemetrySettings,
    TraceSettings,
    WorkerSettings,
    load_group,
    load_settings,
)
from penstock.cores import list_usable_cores, run_on_cores
from penstock.engine.contract import InferenceEngine
from penstock.engine.weights.files import check_model_here
from penstock.errors import DependencyMissing, KVStoreError, ModelLoadError, SettingsError, choose_load_error
from penstock.garbage import freeze_loaded_objects
from penstock.names import WHOLE_KINDS, Pipeline, WorkerKind, describe_kind, may_serve_together
from penstock.ops.access import check_access, check_redis_access
from penstock.ops.eviction import refuse_cluster_mode, watch_eviction
from penstock.ops.status import read_worker_status
from penstock.record import check_key_types, connect_servers, open_record
from penstock.redis.client import REDIS_TIMEOUT_S, learn_pace
from penstock.redis.servers import store_server_lists
from penstock.sealing import use_tenant_keys
from penstock.telemetry.process import open_telemetry
from penstock.telemetry.stage import StageMetrics
from penstock.worker.heartbeat import Heartbeat, choose_worker_name, pin_to_cores
from penstock.worker.joining import wait_until_joined
from penstock.worker.loop import Reconnector, StopSignal
from penstock.worker.pictures import TaskPictures
from penstock.worker.task import Role
from penstock.worker.worker import Worker

if TYPE_CHECKING:  # workers without a model of their own do without its libraries
    from penstock.engine.opening import OpenCore

log = logging.getLogger(__name__)


class ProcessSettings(NamedTuple):
    """All settings of a worker but the addresses."""

    worker: WorkerSettings
    endpoint: EndpointSettings
    embed: EmbedSettings
    engine: EngineSettings
    kv: KVSettings
    bus: BusSettings
    record: RecordSettings
    telemetry: TelemetrySettings
    traces: TraceSettings
    faults: FaultSettings
    stay: StaySettings
    slo: SloSettings
    region: RegionSettings
    picture: PictureSettings
    batch: BatchSettings


class WorkerProcess:
    """The process of one worker. From `__enter__` on it has a name and a heartbeat; `serve` makes it work."""

    def __init__(self, kind: WorkerKind, *, next_name: bool = False) -> None:
        """Read all settings. Raise `SettingsError` for what is wrong. `next_name`: take the next free name, `auto-1`
        for `auto-0`, where a living worker has this one's.
        """
        self.kind, self._next_name = kind, next_name
        self.addresses, self.settings = load_settings(Addresses), load_group(ProcessSettings)
        use_tenant_keys(self.addresses.tenant_keys)  # before the KV store is opened, whose blocks are encrypted
        if self.settings.engine.kind == "openai" and kind != "endpoint":
            raise SettingsError(
                "with PENSTOCK_ENGINE_KIND=openai there is one kind of worker: penstock worker endpoint"
            )
        self._all_cores = list_usable_cores()
        """Those of all threads but the ones that compute, which have the cores of `PENSTOCK_WORKER_CORES`."""
        self.pipeline = Pipeline(self.addresses.pipeline)
        self.name = choose_worker_name(self.settings.worker.name)
        self.member: Member | None = None
        """The place in the group, once it has one."""
        self.exits = contextlib.ExitStack()
        """Closes what was opened for the process, at its end."""

    def __enter__(self) -> Self:
        """Check that host and servers allow what a worker of this kind does, take the name, and begin heartbeat and
        telemetry. Raise `KVStoreError`, `AccessRefused`, `NameTaken`, `ServerEvicts`, `ClusterMode` or `SettingsError`.
        """
        has_kv = self.kind not in WHOLE_KINDS
        if self.kind != "endpoint":
            keep_bytecode(self.settings.engine.find_cache_directory())
        if has_kv:
            self._fit_tiers()
        settings, addresses = self.settings, self.addresses
        failpoints.arm(settings.faults.failpoints)
        pin_to_cores(settings.worker.cores)
        refuse_cluster_mode(addresses)
        check_access(addresses, self.kind, kv=has_kv and settings.kv.redis_mb > 0)
        store_server_lists(addresses.stream_url, self.pipeline)
        wait_until_joined(addresses, settings.region, self.pipeline)
        worker = settings.worker
        with contextlib.ExitStack() as stack, run_on_cores(self._all_cores):
            stack.enter_context(watch_eviction(addresses, settings.record.eviction))
            self.beat = Heartbeat(
                addresses.first_url, self.pipeline, self.kind, self.name, worker.heartbeat_s, worker.stall_limit_s
            )
            self.name = self.beat.take_name(next_free=self._next_name)
            stack.enter_context(self.beat)
            check_only_kind(addresses, self.kind)
            telemetry = open_telemetry(
                f"penstock-{self.kind}",
                addresses,
                self.name,
                settings.telemetry,
                settings.traces,
                with_endpoint=True,
                is_ready=lambda: self.beat.state == "ready",
            )
            self.meters = stack.enter_context(telemetry)
            self.exits = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exits.__exit__(kind, error, trace)

    @cached_property
    def stop(self) -> StopSignal:
        """SIGTERM or SIGINT, from its first use on. Before that there is nothing to finish or hand back."""
        return StopSignal().install()

    def open_engine(self, *, only_prompts: bool = False) -> InferenceEngine:
        """Load the model, of which a stage may need the prompts' part only, and open the KV store.

        Raise `ModelLoadError`, before the libraries are imported where the model's files show it; `DependencyMissing`
        where these are not installed; `ArithmeticDiffers` beside workers that compute otherwise.
        """
        settings = self.settings
        try:
            cache = settings.engine.find_cache_directory()
            check_model_here(settings.engine.model, self.beat.report_progress, cache)
        except ModelLoadError as error:
            raise choose_load_error(error)(f"cannot load model {settings.engine.model!r}: {error}") from error
        library = "vLLM" if settings.engine.kind == "vllm" else "torch"
        self.beat.update_status(now=True, doing=f"importing {library}")
        open_core = self._find_opening(only_prompts=only_prompts)
        with require_libraries():
            from penstock.engine.opening import open_serving_engine
        self.beat.update_status(now=True, doing="loading the model")
        core = open_core(settings.engine, self.beat.report_progress)
        self.beat.declare_arithmetic(core.model.arithmetic, is_mix_accepted=settings.engine.mixed)
        told = core.model.fingerprint + ("" if core.model.is_batch_invariant else " and the batch")
        self.beat.update_status(now=True, doing="opening the KV store", fingerprint=told)
        kv_urls = self.addresses.kv_url or self.addresses.stream_url
        return self.exits.enter_context(open_serving_engine(core, settings.kv, kv_urls, self.pipeline.name))

    def open_pictures(self, engine: InferenceEngine) -> TaskPictures | None:
        """Return what reads pictures for an engine; None where its model sees none here."""
        if (reader := engine.model.picture_reader) is None:
            return None
        with require_libraries("images"):
            from penstock.engine.pictures.token_rule import find_token_rule
            from penstock.objects import ObjectStorage
            from penstock.pictures.store import PictureStore
        settings = self.settings
        try:
            objects, rule = ObjectStorage.open(settings.batch.store_url), find_token_rule(reader)
        except (ModelLoadError, OSError) as error:
            log.warning("%s reads texts alone: %s", self.name, error)
            return None
        self.exits.callback(objects.close)
        store = PictureStore(self.addresses, objects, settings.picture, settings.record)
        self.exits.callback(store.close)
        return TaskPictures(engine, reader, store, settings.picture, rule)

    def _fit_tiers(self) -> None:
        """Fit the KV store's tiers to this host. Raise `KVStoreError` for what was asked for and cannot be."""
        with require_libraries():
            from penstock.kvstore.room import fit_tiers
        kv, told, refused = fit_tiers(self.settings.kv, self.pipeline.name)
        if refused:
            raise KVStoreError("; ".join(refused))
        for line in told:
            log.warning(line)
        self.settings = self.settings._replace(kv=kv)

    def _find_opening(self, *, only_prompts: bool) -> "OpenCore":
        """Return what loads the model into the engine that the settings name."""
        with require_libraries():
            if self.settings.engine.kind == "vllm":
                from penstock.engine_vllm.opening import open_vllm_core

                return partial(open_vllm_core, gap_s=None if only_prompts else self.settings.slo.interactive_gap_s)
            from penstock.engine.opening import open_engine

            return partial(open_engine, only_prompts=only_prompts, sees=self.kind != "decode", slo=self.settings.slo)

    def find_kinds_to_hand_to(self) -> frozenset[WorkerKind]:
        """Return the kinds of the other workers that decode, as far as is known. There are none while the bus is so
        slow that an answer would rather wait for prompts that are computed here than for its job.
        """
        is_slow = self.member is not None and self.member.slowness > 1
        return frozenset() if is_slow else self.beat.kinds_decoding

    def read_beats(self) -> list[dict[str, Any]]:
        """Return the heartbeats of all workers of the pipeline. Raises `redis.RedisError`."""
        return read_worker_status(self.addresses)

    def make_metrics(self, model_name: str) -> StageMetrics:
        """Return what a worker of this kind counts and measures."""
        longest_gap_s = self.settings.slo.interactive_gap_s
        return StageMetrics(self.meters, self.pipeline.name, self.kind, self.name, model_name, longest_gap_s)

    def serve(self, role: Role, metrics: StageMetrics, job_role: Role | None = None, **card: Any) -> None:
        """Join the group, and work until told to stop. `job_role` treats jobs where the worker reads these too.

        `card` has what else the heartbeat says of the model.
        """
        settings, stop = self.settings, self.stop
        clients, bus = connect_servers(self.addresses.stream_url), connect_bus(self.addresses, settings.bus)

        @run_on_cores(self._all_cores)  # a message is not to wait for what else its threads' cores do
        def make_worker() -> Worker:
            check_key_types(clients, self.pipeline)
            member = self.member = bus.join_group(self.kind, self.name)
            try:
                record = open_record(clients, self.pipeline, settings.record)
                worker = Worker(role, self.pipeline, self.name, record, member, metrics, self.beat, job_role)
            except BaseException:
                member.close()  # otherwise it stays in the group and keeps its deliveries
                raise

            def report_engine() -> dict[str, object]:
                return {"running": len(worker.running)} | role.engine.report_state()

            def report_status() -> dict[str, object]:
                trouble = worker.settler.trouble or member.current_problem or worker.record.current_problem
                recent = {"recent": metrics.summarize_recent()} if self.meters.is_on else {}
                load = {"load": worker.report_load()}
                return report_engine() | load | recent | ({"reason": trouble} if trouble else {})

            metrics.set_view(report_engine)
            self.beat.set_load_source(report_status)
            return worker

        self.beat.update_status(
            doing="joining the group", progress=1.0, model=role.model_name, kafka=self.addresses.kafka, **card
        )
        self.beat.keep_account(self.kind, role.model_name, metrics.seconds.copy_sums)
        log.info("%s serves %s as %s", self.name, self.pipeline.name, role.model_name)
        check_bus = partial(bus.check_connection, REDIS_TIMEOUT_S)

        def ask_servers() -> None:
            learn_pace(clients.parts[0])
            check_redis_access(self.addresses, self.kind)
            check_bus()

        freeze_loaded_objects()
        Reconnector(make_worker, ask_servers, self.beat).run_until_stopped(stop, settings.worker.drain_s)
        log.info("%s has left", self.name)


def check_only_kind(addresses: Addresses, kind: WorkerKind) -> None:
    """Raise `SettingsError` while workers serve the pipeline that a worker of this kind cannot be beside: one of them
    would answer what is the other's.
    """
    others = [one for one in read_worker_status(addresses) if not may_serve_together(kind, one["stage"])]
    if others:
        names = ", ".join(f"{one['name']}, which {describe_kind(one['stage'])}" for one in others)
        raise SettingsError(
            f"the pipeline {addresses.pipeline} has other workers ({names}): stop them, or choose another "
            "PENSTOCK_PIPELINE"
        )


@contextlib.contextmanager
def require_libraries(extra: str = "worker") -> Iterator[None]:
    """A block that imports the libraries of models. Raise `DependencyMissing` where they are not installed."""
    try:
        yield
    except ImportError as error:
        raise DependencyMissing(f"a worker needs pip install 'penstock[{extra}]' ({error})") from None
