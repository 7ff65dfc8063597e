"""Meters as Prometheus reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.errors import PenstockError
from penstock.telemetry import catalog
from penstock.telemetry.meters import Distribution, Meters, Reading
from penstock.telemetry.probes import with_probes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition(Collector):
    """All that the meters say, each time it is asked for."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def describe(self) -> list[Metric]:
        """Nothing is known before it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        for metric, readings in self._meters.collect().items():
            yield family(metric, readings)


def family(metric: catalog.Metric, readings: list[Reading]) -> Metric:
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


def exposition(meters: Meters) -> bytes:
    """The text format, of `CONTENT_TYPE`."""
    return generate_latest(_registry(meters))


@contextmanager
def endpoint(meters: Meters, host: str, port: int, is_ready: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """`/metrics`, `/healthz` and `/readyz` of this process, by a thread of its own; yields its port.

    Raises `PenstockError` if it is taken.
    """
    try:
        server, thread = start_http_server(port, host, _registry(meters))
    except OSError as error:
        raise PenstockError(f"no metrics on {host}:{port}: {error}; PENSTOCK_TELEMETRY_PORT") from None
    if (figures := server.get_app()) is not None:
        server.set_app(with_probes(figures, is_ready))
    try:
        yield int(server.server_port)
    finally:
        stop: Callable[[], None] = server.shutdown
        stop()
        server.server_close()
        thread.join()


def _registry(meters: Meters) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Exposition(meters))
    return registry
