"""One process's telemetry, from its settings: what a worker or a gateway begins with."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from opentelemetry.sdk.resources import Resource

from penstock import tracing
from penstock.errors import DependencyMissing
from penstock.settings import Addresses, TelemetrySettings, TraceSettings, load
from penstock.telemetry import otlp
from penstock.telemetry.meters import Meters


@contextmanager
def telemetry(
    service: str,
    addresses: Addresses,
    instance: str,
    *,
    with_endpoint: bool,
    is_ready: Callable[[], bool] = lambda: True,
) -> Iterator[Meters]:
    """Traces and figures of this process go where they are to go. Yields its meters.

    `with_endpoint`: `/metrics` on a port of its own, where one is set, and `/readyz`, which asks `is_ready`. Raises
    `PenstockError` where the port is taken, or where something is not installed that is asked for.
    """
    settings = load(TelemetrySettings)
    if settings.telemetry == "off":
        yield Meters(is_on=False)
        return
    meters = Meters()
    with ExitStack() as stack:
        stack.enter_context(tracing.recording(service, load(TraceSettings), addresses.stream_url))
        if otlp.is_wanted("metrics"):
            told = {"service.name": service, "service.instance.id": instance, "penstock.pipeline": addresses.pipeline}
            stack.enter_context(otlp.pushing(meters, Resource.create(told)))
        if with_endpoint and settings.telemetry_port:
            try:
                from penstock.telemetry.exposition import endpoint
            except ImportError as error:
                raise DependencyMissing(f"/metrics needs pip install prometheus-client ({error})") from None
            stack.enter_context(endpoint(meters, settings.telemetry_host, settings.telemetry_port, is_ready))
        yield meters
