"""`penstock worker prefill | decode`: one worker process."""

import contextlib
import logging
from functools import partial

import typer

from penstock import failpoints
from penstock.bus.connect import connect
from penstock.bus.upgrade import check_upgraded
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    BusSettings,
    EngineSettings,
    FaultSettings,
    KVSettings,
    RecordSettings,
    WorkerSettings,
    load_settings,
)
from penstock.errors import DependencyMissing
from penstock.names import Pipeline, Stage
from penstock.ops.access import check_access
from penstock.ops.lag import LagWatch
from penstock.redis.client import REDIS_TIMEOUT_S
from penstock.redis.servers import store_server_lists
from penstock.telemetry.meters import Meters
from penstock.telemetry.process import open_telemetry
from penstock.telemetry.stage import StageMetrics
from penstock.worker.heartbeat import Heartbeat, choose_worker_name, pin_to_cores
from penstock.worker.loop import StopSignal
from penstock.worker.reconnect import Reconnector

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


def run_stage(stage: Stage) -> None:
    """Read the settings, load the model, join the group, work until told to stop."""
    addresses, settings = load_settings(Addresses), load_settings(WorkerSettings)
    name, pipeline = choose_worker_name(settings.name), Pipeline(addresses.pipeline)
    failpoints.arm(load_settings(FaultSettings).failpoints)
    pin_to_cores(settings.cores)
    check_access(addresses, stage, kv=load_settings(KVSettings).redis_mb > 0)
    store_server_lists(addresses.stream_url, pipeline)
    with contextlib.ExitStack() as stack:
        beat = Heartbeat(addresses.first_url, pipeline, stage, name, settings.heartbeat_s)
        told = open_telemetry(
            f"penstock-{stage}", addresses, name, with_endpoint=True, is_ready=lambda: beat.state == "ready"
        )
        meters = stack.enter_context(told)
        stack.enter_context(beat)
        _serve(stage, name, addresses, beat, meters, settings.drain_s, stack)


def _serve(
    stage: Stage,
    name: str,
    addresses: Addresses,
    beat: Heartbeat,
    meters: Meters,
    drain_s: float,
    stack: contextlib.ExitStack,
) -> None:
    try:
        from penstock.decode_worker.role import DecodeRole
        from penstock.engine.limits import max_length
        from penstock.engine.opening import open_engine
        from penstock.kvstore.store import KVLayout, KVStore
        from penstock.prefill_worker.backpressure import DecodeBackpressure
        from penstock.prefill_worker.role import PrefillRole
        from penstock.worker.worker import Worker
    except ImportError as error:
        raise DependencyMissing(f"a worker needs pip install 'penstock[worker]' ({error})") from None
    from penstock.record import connect_servers, record_on

    engine = open_engine(load_settings(EngineSettings), beat.report_progress)
    stop = StopSignal().install()  # until here there is nothing to finish or hand back
    model, pipeline = engine.model, Pipeline(addresses.pipeline)
    layout = KVLayout.from_pool(model.fingerprint, model.layout)
    store = KVStore.open(layout, load_settings(KVSettings), addresses.kv_url or addresses.stream_url, pipeline.name)
    stack.callback(store.close)
    store.set_compute_speed(engine.prefill_tokens_per_s)
    bus_settings, records = load_settings(BusSettings), load_settings(RecordSettings)
    clients, bus = connect_servers(addresses.stream_url), connect(addresses, bus_settings)
    if stage == "prefill":
        ahead = stack.enter_context(DecodeBackpressure(LagWatch(addresses, bus_settings).read_latest))
        role: PrefillRole | DecodeRole = PrefillRole(pipeline, engine, ahead)
    else:
        role = DecodeRole(pipeline, engine)
    metrics = StageMetrics(meters, pipeline.name, stage, name, model.name)

    def make() -> Worker:
        check_upgraded(bus)
        member = bus.member(stage, name)
        try:
            worker = Worker(role, pipeline, name, store, record_on(clients, pipeline, records), member, metrics)
        except BaseException:
            member.close()  # else it stays in the group, and keeps what it is given
            raise

        def view() -> dict[str, object]:
            pool = {"used": engine.pool.num_blocks - engine.pool.num_free_blocks, "total": engine.pool.num_blocks}
            return {
                "running": len(worker.running),
                "waiting": engine.num_waiting,
                "pool": pool,
                "kv": store.collect_stats(),
            }

        def now() -> dict[str, object]:
            trouble = worker.settler.trouble or member.trouble or worker.record.trouble
            lately = {"recent": metrics.summarize_recent()} if meters.is_on else {}
            return view() | {"load": worker.report_load()} | lately | ({"reason": trouble} if trouble else {})

        metrics.set_view(view)
        beat.set_load_source(now)
        return worker

    length = max_length(model, engine.pool.num_blocks)
    beat.update_status(progress=1.0, model=model.name, max_model_len=length, kafka=addresses.kafka)
    log.info("%s serves %s as %s", name, pipeline.name, model.name)
    Reconnector(make, partial(bus.check, REDIS_TIMEOUT_S), beat).run_until_stopped(stop, drain_s)
    log.info("%s has left", name)
