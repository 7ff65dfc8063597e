"""Sends metrics and traces by OTLP (HTTP, protobuf), if OpenTelemetry's own variables name an endpoint."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as MetricData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from penstock.errors import DependencyMissing, SettingsError
from penstock.telemetry.catalog import Metric
from penstock.telemetry.meters import Distribution, Meters, Reading

log = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
DEFAULT_INTERVAL_MS = 60_000
FLUSH_TIMEOUT_S = 3.0
"""Seconds that an ending process waits until everything is sent."""


def is_configured(signal: Signal) -> bool:
    """Return whether an endpoint is set for a signal."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return any(os.environ.get(name) for name in names)


def make_span_exporter() -> SpanExporter:
    """Return an exporter of spans. Raises `DependencyMissing`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _missing_dependency(error) from None
    return OTLPSpanExporter()


@contextmanager
def push_metrics(meters: Meters, resource: Resource) -> Iterator[None]:
    """Send all metrics every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (a minute by default), and once at the end.

    Raises `DependencyMissing` or `SettingsError`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as error:
        raise _missing_dependency(error) from None
    exporter, interval_s, over = OTLPMetricExporter(), _read_interval_s(), threading.Event()

    def run() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(interval_s)
            try:
                exporter.export(build_metrics_data(meters, resource))
            except Exception:  # a fault of the receiver must not end this process
                log.exception("sending metrics by OTLP failed")

    thread = threading.Thread(target=run, name="otlp-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(FLUSH_TIMEOUT_S)
        exporter.shutdown()


def _read_interval_s() -> float:
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or str(DEFAULT_INTERVAL_MS)
    with suppress(ValueError):
        if (milliseconds := float(text)) > 0:
            return milliseconds / 1000
    raise SettingsError(f"OTEL_METRIC_EXPORT_INTERVAL must be a number of milliseconds (given: {text!r})")


def _missing_dependency(error: ImportError) -> DependencyMissing:
    return DependencyMissing(f"OTLP needs pip install opentelemetry-exporter-otlp-proto-http ({error})")


def build_metrics_data(meters: Meters, resource: Resource) -> MetricsData:
    """Return all current metrics in OpenTelemetry's form: sums and histograms are cumulative."""
    now_ns = time.time_ns()
    metrics = [
        _convert_metric(metric, readings, meters.started_ns, now_ns)
        for metric, readings in meters.collect_readings().items()
    ]
    scope = ScopeMetrics(scope=InstrumentationScope("penstock"), metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _convert_metric(metric: Metric, readings: Iterable[Reading], since_ns: int, now_ns: int) -> MetricData:
    cumulative = AggregationTemporality.CUMULATIVE
    data: HistogramData | Sum | Gauge
    if metric.kind == "histogram":
        points = [_convert_histogram(metric, reading, since_ns, now_ns) for reading in readings]
        data = HistogramData(data_points=points, aggregation_temporality=cumulative)
    else:
        numbers = [_convert_number(metric, reading, since_ns, now_ns) for reading in readings]
        if metric.kind == "counter":
            data = Sum(data_points=numbers, aggregation_temporality=cumulative, is_monotonic=True)
        else:
            data = Gauge(data_points=numbers)
    return MetricData(name=metric.name, description=metric.help, unit=metric.unit, data=data)


def _convert_labels(metric: Metric, reading: Reading) -> dict[str, str]:
    """Return the labels that are not empty: `error.type` is there only where there was an error."""
    return {name: value for name, value in zip(metric.labels, reading.labels, strict=True) if value}


def _convert_number(metric: Metric, reading: Reading, since_ns: int, now_ns: int) -> NumberDataPoint:
    assert not isinstance(reading.value, Distribution)
    start_ns = since_ns if metric.kind == "counter" else now_ns
    return NumberDataPoint(_convert_labels(metric, reading), start_ns, now_ns, reading.value)


def _convert_histogram(metric: Metric, reading: Reading, since_ns: int, now_ns: int) -> HistogramDataPoint:
    assert isinstance(reading.value, Distribution)
    counts, total, _ = reading.value
    return HistogramDataPoint(
        attributes=_convert_labels(metric, reading),
        start_time_unix_nano=since_ns,
        time_unix_nano=now_ns,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
        explicit_bounds=metric.bounds,
        min=None,  # type: ignore[arg-type]  # not known, and so not sent
        max=None,  # type: ignore[arg-type]
    )
