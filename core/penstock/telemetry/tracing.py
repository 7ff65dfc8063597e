"""One trace a request: W3C context in the message headers, spans in the OpenTelemetry SDK.

    POST /v1/… (gateway, SERVER, until the last byte)
    └ request (PRODUCER) ─ queue.wait ─ preprocess ─ prefill (CONSUMER)
                                                     └ kv.read, first_token, kv.write
      └ hand_off (PRODUCER) ─ queue.wait ─ decode (CONSUMER) ─ settle, chat MODEL
                                           └ kv.read, end

Without a gateway `request` is the root: a producer's trace ends where its own does. `chat MODEL` (or `text_completion`)
is the one span with attributes of OpenTelemetry's conventions for generative AI, from publication to the end.
An answer that is decoded where its request was read has neither `hand_off` nor a second `queue.wait`.
A request that was taken over from a dead worker has a `taken_over` in the place of the `queue.wait`. Every span has the
id of its request. If traces are off, the tracer does nothing and costs next to nothing.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, cast

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach, create_key, detach, get_value, set_value
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from penstock.messages import EndEvent, Request
from penstock.names import OPERATION_HEADER, Pipeline
from penstock.telemetry.catalog import PROVIDER

tracer = trace.get_tracer("penstock")

PIPELINE_ATTRIBUTE, REQUEST_ID_ATTRIBUTE = "penstock.pipeline", "penstock.request.id"
"""Attributes of every span of a request."""
Operation = Literal["chat", "text_completion", "embeddings"]
OPERATION_ATTRIBUTE = "gen_ai.operation.name"
_REQUEST_CONTEXT_KEY = create_key("penstock")
SCOPE = InstrumentationScope("penstock")
UNSET = Status()


class SpanRecorder(TracerProvider):
    """Passes this process's spans to its processors."""

    def __init__(self, resource: Resource, processors: Sequence[BatchSpanProcessor]) -> None:
        super().__init__(resource=resource, shutdown_on_exit=False)
        self.processors = processors
        for processor in processors:
            self.add_span_processor(processor)


class _RecordedSpan(NonRecordingSpan):
    """A span that is recorded.

    A request has a dozen. The SDK's own spans take four times as long (45 us), for limits, events, links and locks that
    are not needed here.
    """

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int | None,
        attributes: dict[str, AttributeValue],
        to: SpanRecorder,
        kind: SpanKind,
    ) -> None:
        super().__init__(context)
        self._name, self._parent, self._to, self._attributes = name, parent, to, attributes
        self._kind, self._status = kind, UNSET
        self._start_ns = time.time_ns() if start_ns is None else start_ns
        self._is_over = False

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._attributes |= attributes

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = status if isinstance(status, Status) else Status(status, description)

    def end(self, end_time: int | None = None) -> None:
        if self._is_over:
            return
        self._is_over = True
        span = ReadableSpan(
            self._name,
            self.get_span_context(),
            self._parent,
            self._to.resource,
            self._attributes,
            kind=self._kind,
            status=self._status,
            start_time=self._start_ns,
            end_time=time.time_ns() if end_time is None else end_time,
            instrumentation_scope=SCOPE,
        )
        for processor in self._to.processors:
            processor.on_end(span)


def with_request(pipeline: Pipeline, request_id: str, context: Context | None = None) -> Context:
    """Return a context (based on the current one by default) in which all spans belong to a request."""
    whose = cast("dict[str, AttributeValue]", get_value(_REQUEST_CONTEXT_KEY, context) or {})
    whose = whose | {PIPELINE_ATTRIBUTE: pipeline.name, REQUEST_ID_ATTRIBUTE: request_id}
    return set_value(_REQUEST_CONTEXT_KEY, whose, context)


def extract_context(
    headers: Mapping[str, str], context: Context | None = None, published_s: float | None = None
) -> Context:
    """Return `context` with the trace context that came in a message's headers.

    Where none came, and `published_s` is given, a trace begins with the message, as its producer records none.
    """
    # The propagators encode values, and fail at bytes that are not UTF-8 (`penstock.bus.contract.as_text`).
    readable = {name: text.encode(errors="replace").decode() for name, text in headers.items()}
    context = propagate.extract(readable, Context() if context is None else context)
    if published_s is None or trace.get_current_span(context).get_span_context().is_valid:
        return context
    root = start_span("request", context, published_s)
    root.end(_to_ns(published_s))
    return with_span(root, context)


def inject_headers(context: Context | None = None) -> dict[str, str]:
    """Return headers that carry a trace context (the current one by default) to the next process."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier


def get_operation(request: Request | None) -> Operation:
    """Return `gen_ai.operation.name` of a request."""
    if request is not None and request.texts is not None:
        return "embeddings"
    return "chat" if request is not None and request.messages is not None else "text_completion"


def read_operation(headers: Mapping[str, str]) -> Operation:
    """Return `gen_ai.operation.name` of a job, from its headers."""
    named: tuple[Operation, ...] = ("chat", "embeddings")
    return next((one for one in named if one == headers.get(OPERATION_HEADER)), "text_completion")


def build_attributes(operation: Operation, model: str, end: EndEvent) -> dict[str, AttributeValue]:
    """Return the attributes of the one span that stands for a whole request, which has ended."""
    failed: dict[str, AttributeValue] = {} if end.error is None else {"error.type": end.error.code}
    return failed | {
        OPERATION_ATTRIBUTE: operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.usage.cached_tokens,
        "gen_ai.usage.output_tokens": end.usage.completion_tokens,
        "gen_ai.response.finish_reasons": (end.finish_reason,),
    }


@contextmanager
def start_server_span(
    headers: Mapping[str, str], route: str, begun_s: float, given: Mapping[str, AttributeValue] | None = None
) -> Iterator[Span]:
    """Start the span of a POST, in the trace of its `headers` if there is one. The caller ends it, with the answer.

    Spans that begin in the block are below it. All of them have the `given` attributes.
    """
    context = extract_context(headers)
    if given is not None:
        context = set_value(_REQUEST_CONTEXT_KEY, {**given}, context)
    about = {"http.request.method": "POST", "http.route": route, "url.path": route, "url.scheme": "http"}
    span = start_span(f"POST {route}", context, begun_s, SpanKind.SERVER, **about)
    token = attach(with_span(span, context))
    try:
        yield span
    finally:
        detach(token)


def format_trace_id(context: Context) -> str:
    """Return the id of the trace that a context is in, as exemplars have it; empty where it is not recorded."""
    found = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(found.trace_id) if found.is_valid and found.trace_flags.sampled else ""


def with_span(span: Span, context: Context | None = None) -> Context:
    """Return a context (based on the current one by default) in which new spans are children of `span`."""
    return trace.set_span_in_context(span, context)


def start_span(
    name: str,
    parent: Context,
    start_s: float | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    **attributes: AttributeValue,
) -> Span:
    """Start a span. `start_s` (seconds since the epoch) is given where its work began earlier."""
    whose = cast("dict[str, AttributeValue]", get_value(_REQUEST_CONTEXT_KEY, parent) or {})
    above, recorder = trace.get_current_span(parent).get_span_context(), trace.get_tracer_provider()
    if not isinstance(recorder, SpanRecorder):
        return tracer.start_span(name, parent, kind, start_time=_to_ns(start_s), attributes=whose | attributes)
    if not above.is_valid:
        return _start_root(name, parent, start_s, whose | attributes, recorder, kind)
    if not above.trace_flags.sampled:
        return NonRecordingSpan(above)
    context = SpanContext(above.trace_id, _draw_span_id(), False, above.trace_flags, above.trace_state)
    return _RecordedSpan(name, context, above, _to_ns(start_s), whose | attributes, recorder, kind)


def _start_root(
    name: str,
    parent: Context,
    start_s: float | None,
    attributes: dict[str, AttributeValue],
    recorder: SpanRecorder,
    kind: SpanKind,
) -> Span:
    """Start the first span of a trace. The sampler decides here, and all processes keep to that."""
    trace_id = random.getrandbits(128) or 1
    found = recorder.sampler.should_sample(parent, trace_id, name, kind, attributes)
    is_sampled = found.decision is Decision.RECORD_AND_SAMPLE
    flags = TraceFlags(TraceFlags.RANDOM_TRACE_ID | (TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT))
    context = SpanContext(trace_id, _draw_span_id(), False, flags, found.trace_state)
    if not is_sampled:
        return NonRecordingSpan(context)
    return _RecordedSpan(name, context, None, _to_ns(start_s), dict(found.attributes or {}), recorder, kind)


def _draw_span_id() -> int:
    return random.getrandbits(64) or 1


def record_span(name: str, parent: Context, start_s: float, end_s: float, **attributes: AttributeValue) -> None:
    """Record a span that is already over. One with `error.type` has the status of an error."""
    span = start_span(name, parent, start_s, SpanKind.INTERNAL, **attributes)
    if "error.type" in attributes:
        span.set_status(StatusCode.ERROR)
    span.end(_to_ns(end_s))


def _to_ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)
