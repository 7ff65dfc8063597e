"""`penstock worker prefill | decode | endpoint`: one worker process."""

import contextlib
import importlib.util
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from penstock import failpoints
from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    BusSettings,
    EngineSettings,
    FaultSettings,
    KVSettings,
    RecordSettings,
    TelemetrySettings,
    TraceSettings,
    WorkerSettings,
    load_group,
    load_settings,
)
from penstock.errors import DependencyMissing, SettingsError
from penstock.names import Pipeline, Stage
from penstock.ops.access import check_access
from penstock.ops.lag import LagWatch
from penstock.redis.client import REDIS_TIMEOUT_S
from penstock.redis.servers import store_server_lists
from penstock.telemetry.meters import Meters
from penstock.telemetry.process import open_telemetry
from penstock.telemetry.stage import StageMetrics
from penstock.worker.heartbeat import Heartbeat, choose_worker_name, pin_to_cores
from penstock.worker.loop import Reconnector, StopSignal

if TYPE_CHECKING:
    from penstock.engine.serving import EngineCore

app = typer.Typer(help="Run one worker until SIGTERM.", no_args_is_help=True)
log = logging.getLogger(__name__)


@app.command("prefill")
def run_prefill() -> None:
    """Turn requests into KV blocks, first tokens and job references."""
    run_stage("prefill")


@app.command("decode")
def run_decode() -> None:
    """Turn job references into token streams and results."""
    run_stage("decode")


@app.command("endpoint")
def run_endpoint() -> None:
    """Turn requests into token streams and results, by asking servers with OpenAI's API (PENSTOCK_ENDPOINT_URLS)."""
    from penstock.cli.endpoint_worker import run_endpoint_worker

    run_endpoint_worker()


class _Settings(NamedTuple):
    """All settings of a worker but the addresses."""

    worker: WorkerSettings
    engine: EngineSettings
    kv: KVSettings
    bus: BusSettings
    record: RecordSettings
    telemetry: TelemetrySettings
    traces: TraceSettings
    faults: FaultSettings


def run_stage(stage: Stage) -> None:
    """Read all settings, load the model, join the group, work until told to stop."""
    addresses, settings = load_settings(Addresses), load_group(_Settings)
    if settings.engine.kind == "openai":
        raise SettingsError("with PENSTOCK_ENGINE_KIND=openai there is one kind of worker: penstock worker endpoint")
    _keep_bytecode(settings.engine)
    name, pipeline = choose_worker_name(settings.worker.name), Pipeline(addresses.pipeline)
    failpoints.arm(settings.faults.failpoints)
    pin_to_cores(settings.worker.cores)
    check_access(addresses, stage, kv=settings.kv.redis_mb > 0)
    store_server_lists(addresses.stream_url, pipeline)
    with contextlib.ExitStack() as stack:
        limit_s = settings.worker.stall_limit_s
        beat = Heartbeat(addresses.first_url, pipeline, stage, name, settings.worker.heartbeat_s, limit_s)
        name = beat.take_name(next_free=settings.worker.next_name)
        stack.enter_context(beat)
        telemetry = open_telemetry(
            f"penstock-{stage}",
            addresses,
            name,
            settings.telemetry,
            settings.traces,
            with_endpoint=True,
            is_ready=lambda: beat.state == "ready",
        )
        meters = stack.enter_context(telemetry)
        _run_worker(stage, name, addresses, settings, beat, meters, stack)


def _keep_bytecode(settings: EngineSettings) -> None:
    """Have what is imported from now on compiled once in the cache directory, where Python was told to keep nothing.

    Many images set PYTHONDONTWRITEBYTECODE, and torch and transformers take minutes to compile on a busy machine. What
    lies compiled beside its source is taken from there.
    """
    if not sys.dont_write_bytecode:
        return
    specs = [importlib.util.find_spec(package) for package in ("torch", "transformers")]
    if any(spec and not Path(spec.cached or "").is_file() for spec in specs):
        sys.pycache_prefix, sys.dont_write_bytecode = str(settings.find_cache_directory() / "bytecode"), False


def _run_worker(
    stage: Stage,
    name: str,
    addresses: Addresses,
    settings: _Settings,
    beat: Heartbeat,
    meters: Meters,
    stack: contextlib.ExitStack,
) -> None:
    """Load the model and work until told to stop. What is opened is closed with `stack`."""
    try:
        from penstock.decode_worker.role import DecodeRole
        from penstock.engine.serving import open_serving_engine
        from penstock.prefill_worker.backpressure import DecodeBackpressure
        from penstock.prefill_worker.role import PrefillRole
        from penstock.worker.worker import Worker
    except ImportError as error:
        raise DependencyMissing(f"a worker needs pip install 'penstock[worker]' ({error})") from None
    from penstock.record import check_key_types, connect_servers, open_record

    core = _open_core(settings.engine, beat, stage)
    stop = StopSignal().install()  # until here there is nothing to finish or hand back
    pipeline, kv_urls = Pipeline(addresses.pipeline), addresses.kv_url or addresses.stream_url
    engine = stack.enter_context(open_serving_engine(core, settings.kv, kv_urls, pipeline.name))
    model = engine.model
    clients, bus = connect_servers(addresses.stream_url), connect_bus(addresses, settings.bus)
    if stage == "prefill":
        backpressure = stack.enter_context(DecodeBackpressure(LagWatch(addresses, settings.bus).read_latest))
        role: PrefillRole | DecodeRole = PrefillRole(pipeline, engine, backpressure)
    else:
        role = DecodeRole(pipeline, engine)
    stack.callback(role.grammars.close)
    metrics = StageMetrics(meters, pipeline.name, stage, name, model.name)

    def make_worker() -> Worker:
        check_key_types(clients, pipeline)
        member = bus.join_group(stage, name)
        try:
            record = open_record(clients, pipeline, settings.record)
            worker = Worker(role, pipeline, name, record, member, metrics, beat)
        except BaseException:
            member.close()  # otherwise it stays in the group and keeps its deliveries
            raise

        def report_engine() -> dict[str, object]:
            return {"running": len(worker.running)} | engine.report_state()

        def report_status() -> dict[str, object]:
            trouble = worker.settler.trouble or member.current_problem or worker.record.current_problem
            recent = {"recent": metrics.summarize_recent()} if meters.is_on else {}
            return report_engine() | {"load": worker.report_load()} | recent | ({"reason": trouble} if trouble else {})

        metrics.set_view(report_engine)
        beat.set_load_source(report_status)
        return worker

    length = engine.limits.max_length
    beat.update_status(
        progress=1.0,
        model=model.name,
        max_model_len=length,
        kafka=addresses.kafka,
        response_template=model.response_template,
    )
    log.info("%s serves %s as %s", name, pipeline.name, model.name)
    check_bus = partial(bus.check_connection, REDIS_TIMEOUT_S)
    Reconnector(make_worker, check_bus, beat).run_until_stopped(stop, settings.worker.drain_s)
    log.info("%s has left", name)


def _open_core(settings: EngineSettings, beat: Heartbeat, stage: Stage) -> "EngineCore":
    """Load the model into the engine that the settings name, as far as the stage needs it."""
    if settings.kind == "vllm":
        from penstock.engine_vllm.opening import open_vllm_core

        return open_vllm_core(settings, beat.report_progress)
    from penstock.engine.loading import open_engine

    return open_engine(settings, beat.report_progress, only_prompts=stage == "prefill")
