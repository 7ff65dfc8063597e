"""Spans of requests, kept in Redis for a while, so that a gateway can show what one request went through.

A crash, or a Redis that is away, costs the spans of that time and nothing else: nobody waits for them, and they do not
pile up.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import redis
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from pydantic_core import to_json

from penstock.names import Pipeline
from penstock.reach import redis_client
from penstock.tracing import PIPELINE, REQUEST_ID

log = logging.getLogger(__name__)

MOST_SPANS = 512
"""Of one request; the first ones are kept."""
PAUSE_S = 5.0
"""A Redis that was away is left alone for so long."""


class RedisSpanExporter(SpanExporter):
    """Appends each request's spans to a list of its own, which lives `keep_s` after the last of them."""

    def __init__(self, url: str, keep_s: float) -> None:
        self._redis, self._keep_ms = redis_client(url), int(keep_s * 1000)
        self._away_until = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """In one round trip; spans of no request are passed over."""
        if time.monotonic() < self._away_until:
            return SpanExportResult.FAILURE
        lists: dict[str, list[bytes]] = {}
        for span in spans:
            about = span.attributes or {}
            if PIPELINE in about and REQUEST_ID in about:
                key = Pipeline(str(about[PIPELINE])).trace_key(str(about[REQUEST_ID]))
                lists.setdefault(key, []).append(to_json(_written(span)))
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for key, texts in lists.items():
                    pipe.rpush(key, *texts)
                    pipe.ltrim(key, 0, MOST_SPANS - 1)
                    pipe.pexpire(key, self._keep_ms)
                pipe.execute()
        except redis.RedisError as error:
            log.debug("spans are lost: %s", error)
            self._away_until = time.monotonic() + PAUSE_S
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Free the connection."""
        self._redis.close()


def _written(span: ReadableSpan) -> dict[str, Any]:
    attributes = {name: value for name, value in (span.attributes or {}).items() if name not in {PIPELINE, REQUEST_ID}}
    context = span.get_span_context()
    return {
        "name": span.name,
        "service": span.resource.attributes.get("service.name", ""),
        "start_s": (span.start_time or 0) / 1e9,
        "end_s": (span.end_time or 0) / 1e9,
        "id": "" if context is None else f"{context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "attributes": attributes,
    }
