"""One trace a request: W3C context in the message headers, spans in the OpenTelemetry SDK.

    request (client) ─ queue.wait ─ prefill ─ kv.write ─ hand_off ─ queue.wait ─ kv.read ─ decode

Where nobody asked for traces the tracer does nothing and costs next to nothing.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

tracer = trace.get_tracer("penstock")


def _line(span: ReadableSpan) -> str:
    return str(span.to_json(indent=None)) + "\n"


@contextmanager
def recording(service: str, file: str) -> Iterator[None]:
    """Record this process's spans in `file`, one JSON object a line; no file, no recording."""
    if not file:
        yield
        return
    resource = Resource.create({"service.name": service, "host.name": socket.gethostname()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    with open(file, "a", encoding="utf-8") as out:
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=out, formatter=_line)))
        trace.set_tracer_provider(provider)
        try:
            yield
        finally:
            provider.shutdown()


def context_of(headers: Mapping[str, str], published_s: float | None = None) -> Context:
    """The trace context that came with a message.

    Where none did, and `published_s` is given, a trace begins with the message: the producer keeps none.
    """
    context = propagate.extract(headers, Context())
    if published_s is None or trace.get_current_span(context).get_span_context().is_valid:
        return context
    root = begin("request", context, published_s)
    root.end()
    return within(root)


def headers_of(context: Context | None = None) -> dict[str, str]:
    """The headers that carry a trace context (the current one by default) to the next process."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier


@contextmanager
def continued(headers: Mapping[str, str]) -> Iterator[None]:
    """Spans that begin in the context belong to the trace that came with `headers`, if one did."""
    token = attach(context_of(headers))
    try:
        yield
    finally:
        detach(token)


def within(span: Span) -> Context:
    """The context whose spans are children of `span`."""
    return trace.set_span_in_context(span)


def begin(name: str, parent: Context, start_s: float | None = None, **attributes: AttributeValue) -> Span:
    """Start a span; `start_s` (seconds since the epoch) for what began earlier, elsewhere."""
    return tracer.start_span(name, parent, start_time=_ns(start_s), attributes=attributes)


def note(name: str, parent: Context, start_s: float, end_s: float, **attributes: AttributeValue) -> None:
    """A span that is already over."""
    begin(name, parent, start_s, **attributes).end(_ns(end_s))


def _ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)
