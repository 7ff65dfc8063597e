"""The telemetry of a worker's or gateway's process, from its settings."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.config.addresses import Addresses
from penstock.config.settings import TelemetrySettings, TraceSettings
from penstock.errors import DependencyMissing
from penstock.telemetry import otlp
from penstock.telemetry.meters import Meters
from penstock.telemetry.otlp import FLUSH_TIMEOUT_S
from penstock.telemetry.spans import RedisSpanExporter
from penstock.telemetry.tracing import SpanRecorder

REDIS_EXPORT_DELAY_MS = 500
"""Milliseconds between two writes of spans to Redis, from where the gateway shows them."""


@contextmanager
def open_telemetry(
    service: str,
    addresses: Addresses,
    instance: str,
    settings: TelemetrySettings,
    traces: TraceSettings,
    *,
    with_endpoint: bool,
    is_ready: Callable[[], bool] = lambda: True,
) -> Iterator[Meters]:
    """Set up metrics and traces of this process. Yields its meters.

    `with_endpoint`: serve `/metrics` on its own port, where one is set, and `/readyz`, which calls `is_ready`. Raises
    `PenstockError` where the port is taken, or a package is missing that the settings need.
    """
    if settings.telemetry == "off":
        yield Meters(is_on=False)
        return
    meters = Meters()
    with ExitStack() as stack:
        stack.enter_context(record_spans(service, traces, addresses.stream_url, instance))
        if otlp.is_configured("metrics"):
            attributes = {
                "service.name": service,
                "service.instance.id": instance,
                "penstock.pipeline": addresses.pipeline,
            }
            stack.enter_context(otlp.push_metrics(meters, Resource.create(attributes)))
        if with_endpoint and settings.telemetry_port:
            try:
                from penstock.telemetry.exposition import serve_metrics
            except ImportError as error:
                raise DependencyMissing(f"/metrics needs pip install prometheus-client ({error})") from None
            stack.enter_context(serve_metrics(meters, settings.telemetry_host, settings.telemetry_port, is_ready))
        yield meters


@contextmanager
def record_spans(service: str, settings: TraceSettings, keep_in: str = "", instance: str = "") -> Iterator[None]:
    """Record this process's spans: by OTLP if configured, and in the Redis `keep_in` for as long as the settings say.
    Without either nothing is recorded, nor where OpenTelemetry is switched off.
    """
    with ExitStack() as stack:
        is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        processors = [] if is_off else list(_make_processors(settings, keep_in))
        if processors:
            about = {"service.name": service, "service.instance.id": instance, "host.name": socket.gethostname()}
            resource = Resource.create({name: value for name, value in about.items() if value})
            trace.set_tracer_provider(SpanRecorder(resource, processors))
            stack.callback(_shut_down, processors)
        yield


def _make_processors(settings: TraceSettings, keep_in: str) -> Iterator[BatchSpanProcessor]:
    if keep_in and settings.keep_s:
        yield BatchSpanProcessor(
            RedisSpanExporter(keep_in, settings.keep_s), schedule_delay_millis=REDIS_EXPORT_DELAY_MS
        )
    if otlp.is_configured("traces"):
        yield BatchSpanProcessor(otlp.make_span_exporter())


def _shut_down(processors: list[BatchSpanProcessor]) -> None:
    """Shut all processors down at once, for a limited time: the process does not wait for a server that is away."""
    threads = [threading.Thread(target=processor.shutdown, daemon=True) for processor in processors]
    until_s = time.monotonic() + FLUSH_TIMEOUT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
