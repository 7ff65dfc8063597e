"""Meters as Prometheus reads them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.errors import PenstockError
from penstock.telemetry import catalog
from penstock.telemetry.meters import Distribution, Meters, Reading

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusCollector(Collector):
    """All that the meters say, each time it is asked for."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def describe(self) -> list[Metric]:
        """Nothing is known before it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        for metric, readings in self._meters.collect_readings().items():
            yield build_family(metric, readings)


def build_family(metric: catalog.Metric, readings: list[Reading]) -> Metric:
    """A metric and its series."""
    name, labels = metric.prometheus, metric.prometheus_labels
    made: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if metric.kind == "histogram":
        made = HistogramMetricFamily(name, metric.help, labels=labels)
        for reading in readings:
            assert isinstance(reading.value, Distribution)
            bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(reading.value.counts)), strict=True))
            made.add_metric(reading.labels, buckets=buckets, sum_value=reading.value.sum)
        return made
    made = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(name, metric.help, labels=labels)
    for reading in readings:
        assert not isinstance(reading.value, Distribution)
        made.add_metric(reading.labels, reading.value)
    return made


def render_metrics(meters: Meters) -> bytes:
    """The text format, of `CONTENT_TYPE`."""
    return generate_latest(_make_registry(meters))


@contextmanager
def serve_metrics(meters: Meters, host: str, port: int, is_ready: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """`/metrics`, `/healthz` and `/readyz` of this process, by a thread of its own; yields its port.

    Raises `PenstockError` if it is taken.
    """
    try:
        server, thread = start_http_server(port, host, _make_registry(meters))
    except OSError as error:
        raise PenstockError(f"no metrics on {host}:{port}: {error}; PENSTOCK_TELEMETRY_PORT") from None
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
