"""The metrics of a process in Prometheus' text format, and the HTTP endpoint that serves them.

A worker's endpoint answers as OpenMetrics to those who accept that, as Prometheus does, and then has exemplars: the
ids of traces, on the buckets of histograms.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from penstock.errors import PenstockError
from penstock.own_servers import format_place, wait_until_free
from penstock.telemetry import catalog
from penstock.telemetry.meters import Distribution, Meters, Reading

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusCollector(Collector):
    """Gives Prometheus' registry all readings of the meters."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def describe(self) -> list[Metric]:
        """Return nothing: metrics are known only when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        for metric, readings in self._meters.collect_readings().items():
            yield build_family(metric, readings)


def build_family(metric: catalog.Metric, readings: list[Reading]) -> Metric:
    """Return a metric and its series as Prometheus' client has them."""
    name, labels = metric.prometheus, metric.prometheus_labels
    made: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if metric.kind == "histogram":
        made = HistogramMetricFamily(name, metric.help, labels=labels)
        for reading in readings:
            assert isinstance(reading.value, Distribution)
            bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
            totals = map(float, accumulate(reading.value.counts))
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*zip(bounds, totals, strict=True)]
            for bucket, one in reading.value.exemplars.items():
                buckets[bucket] = (*buckets[bucket][:2], Exemplar({"trace_id": one.trace_id}, one.value, one.at_s))
            made.add_metric(reading.labels, buckets=buckets, sum_value=reading.value.sum)
        return made
    made = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(name, metric.help, labels=labels)
    for reading in readings:
        assert not isinstance(reading.value, Distribution)
        made.add_metric(reading.labels, reading.value)
    return made


def render_metrics(meters: Meters) -> bytes:
    """Return all metrics in the text format (`CONTENT_TYPE`)."""
    return generate_latest(_make_registry(meters))


@contextmanager
def serve_metrics(meters: Meters, host: str, port: int, is_ready: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Serve `/metrics`, `/healthz` and `/readyz` of this process on a thread. Yields the port.

    Raises `PenstockError` if the port is taken.
    """
    wait_until_free(host, port)
    try:
        server, thread = start_http_server(port, host, _make_registry(meters))
    except OSError as error:
        raise PenstockError(
            f"metrics cannot be served on {format_place(host, port)}: {error}; set PENSTOCK_TELEMETRY_PORT"
        ) from None
    if (metrics_app := server.get_app()) is not None:
        server.set_app(_add_probes(metrics_app, is_ready))
    try:
        yield int(server.server_port)
    finally:
        stop: Callable[[], None] = server.shutdown
        stop()
        server.server_close()
        thread.join()


def _make_registry(meters: Meters) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(meters))
    return registry


def _add_probes(metrics_app: "WSGIApplication", is_ready: Callable[[], bool]) -> "WSGIApplication":
    """Return an application that answers `/healthz` (always 200) and `/readyz` (503 while `is_ready()` is false).

    `metrics_app` answers all other paths.
    """
    probes: dict[str, Callable[[], bool]] = {"/healthz": lambda: True, "/readyz": is_ready}

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if (probe := probes.get(environ["PATH_INFO"])) is None:
            return metrics_app(environ, start_response)
        is_well = probe()
        start_response("200 OK" if is_well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if is_well else b"not ready\n"]

    return app
