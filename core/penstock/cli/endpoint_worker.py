"""`penstock worker endpoint`: the process of one worker that asks servers with OpenAI's API."""

import contextlib
import logging
from functools import partial
from typing import NamedTuple

from penstock import failpoints
from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    BusSettings,
    EndpointSettings,
    EngineSettings,
    FaultSettings,
    RecordSettings,
    TelemetrySettings,
    TraceSettings,
    WorkerSettings,
    load_group,
    load_settings,
)
from penstock.endpoint_worker.answer import list_models
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.worker import EndpointWorker
from penstock.errors import SettingsError
from penstock.names import STAGES, Pipeline
from penstock.ops.access import check_access
from penstock.ops.status import read_worker_status
from penstock.record import check_key_types, connect_servers, open_record
from penstock.redis.client import REDIS_TIMEOUT_S, backoff_pauses
from penstock.redis.servers import store_server_lists
from penstock.telemetry.meters import Meters
from penstock.telemetry.process import open_telemetry
from penstock.telemetry.stage import StageMetrics
from penstock.worker.heartbeat import Heartbeat, choose_worker_name, pin_to_cores
from penstock.worker.loop import Reconnector, StopSignal

log = logging.getLogger(__name__)


class _Settings(NamedTuple):
    """All settings of a worker that asks endpoints but the addresses."""

    worker: WorkerSettings
    endpoint: EndpointSettings
    engine: EngineSettings
    bus: BusSettings
    record: RecordSettings
    telemetry: TelemetrySettings
    traces: TraceSettings
    faults: FaultSettings


def run_endpoint_worker() -> None:
    """Read all settings, find the model, join the group, work until told to stop."""
    addresses, settings = load_settings(Addresses), load_group(_Settings)
    worker, asked = settings.worker, settings.endpoint
    endpoints = Endpoints(parse_urls(asked.urls, asked.max_requests))
    name, pipeline = choose_worker_name(worker.name), Pipeline(addresses.pipeline)
    failpoints.arm(settings.faults.failpoints)
    pin_to_cores(worker.cores)
    check_access(addresses, "endpoint")
    store_server_lists(addresses.stream_url, pipeline)
    check_only_kind(addresses)
    with contextlib.ExitStack() as stack:
        beat = Heartbeat(addresses.first_url, pipeline, "endpoint", name, worker.heartbeat_s, worker.stall_limit_s)
        name = beat.take_name(next_free=worker.next_name)
        stack.enter_context(beat)
        telemetry = open_telemetry(
            "penstock-endpoint",
            addresses,
            name,
            settings.telemetry,
            settings.traces,
            with_endpoint=True,
            is_ready=lambda: beat.state == "ready",
        )
        meters = stack.enter_context(telemetry)
        stop = StopSignal().install()
        model = asked.model or find_model(endpoints, asked.key, beat, stop)
        if model is not None:
            settings = settings._replace(endpoint=asked.model_copy(update={"model": model}))
            _run_worker(name, addresses, settings, endpoints, beat, meters, stop)


def check_only_kind(addresses: Addresses) -> None:
    """Raise `SettingsError` while prefill or decode workers serve the pipeline: one of the two kinds would answer what
    is the other's.
    """
    others = [worker["name"] for worker in read_worker_status(addresses) if worker["stage"] in STAGES]
    if others:
        raise SettingsError(
            f"the pipeline {addresses.pipeline} has workers with an engine of their own ({', '.join(others)}): "
            "stop them, or choose another PENSTOCK_PIPELINE"
        )


def find_model(endpoints: Endpoints, key: str, beat: Heartbeat, stop: StopSignal) -> str | None:
    """Return the one model that the endpoints serve, as soon as one of them answers; None where told to stop.

    Raises `SettingsError` for an endpoint with several models.
    """
    waits = backoff_pauses()
    while not stop:
        for endpoint in endpoints.all:
            try:
                names = [str(one["id"]) for one in list_models(endpoint.url, key)]
            except OSError as error:
                beat.update_status(doing=f"waiting for {endpoint.url} ({error})")
                log.warning("%s: %s", endpoint.url, error)
                continue
            if len(names) == 1:
                return names[0]
            listed = ", ".join(names) or "no model"
            raise SettingsError(f"{endpoint.url} serves {listed}: name one in PENSTOCK_ENDPOINT_MODEL")
        stop.wait(next(waits))
    return None


def _run_worker(
    name: str,
    addresses: Addresses,
    settings: _Settings,
    endpoints: Endpoints,
    beat: Heartbeat,
    meters: Meters,
    stop: StopSignal,
) -> None:
    pipeline, asked, engine = Pipeline(addresses.pipeline), settings.endpoint, settings.engine
    clients, bus = connect_servers(addresses.stream_url), connect_bus(addresses, settings.bus)
    model = engine.model if "model" in engine.model_fields_set else asked.model
    metrics = StageMetrics(meters, pipeline.name, "endpoint", name, model)

    def make_worker() -> EndpointWorker:
        check_key_types(clients, pipeline)
        member = bus.join_group("endpoint", name)
        try:
            record = open_record(clients, pipeline, settings.record)
            worker = EndpointWorker(pipeline, name, model, endpoints, asked, record, member, metrics, beat)
        except BaseException:
            member.close()  # otherwise it stays in the group and keeps its deliveries
            raise

        def report_view() -> dict[str, object]:
            waiting = sum(task.answer is None for task in list(worker.running.values()))
            pool = {"used": 0, "total": 0}
            return {"running": len(worker.running), "waiting": waiting, "pool": pool, "kv": {}}

        def report_status() -> dict[str, object]:
            trouble = worker.settler.trouble or member.current_problem or worker.record.current_problem
            trouble = trouble or endpoints.current_problem
            recent = {"recent": metrics.summarize_recent()} if meters.is_on else {}
            return report_view() | {"load": worker.report_load()} | recent | ({"reason": trouble} if trouble else {})

        metrics.set_view(report_view)
        beat.set_load_source(report_status)
        return worker

    beat.update_status(progress=1.0, model=model, kafka=addresses.kafka)
    log.info("%s serves %s as %s, from %s", name, pipeline.name, model, ", ".join(one.url for one in endpoints.all))
    check_bus = partial(bus.check_connection, REDIS_TIMEOUT_S)
    Reconnector(make_worker, check_bus, beat).run_until_stopped(stop, settings.worker.drain_s)
    log.info("%s has left", name)
