"""Spans of requests, kept in Redis for a while, so that a gateway can show what a request went through.

A crash, or a Redis that is away, costs the spans of that time and nothing else: no request waits for them, and they do
not pile up.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from pydantic_core import to_json

from penstock.names import Pipeline
from penstock.redis.client import execute_all, raise_first_error, redis_client
from penstock.redis.servers import Sharded
from penstock.telemetry.tracing import OPERATION_ATTRIBUTE, PIPELINE_ATTRIBUTE, REQUEST_ID_ATTRIBUTE

log = logging.getLogger(__name__)

MAX_SPANS_PER_REQUEST = 512
"""The most spans of a request that are kept: the first ones."""
_WHOSE = (PIPELINE_ATTRIBUTE, REQUEST_ID_ATTRIBUTE)
OUTAGE_PAUSE_S = 5.0
"""Seconds for which no spans are written to a Redis that was away."""


class RedisSpanExporter(SpanExporter):
    """Appends each request's spans to its own list, which expires `keep_s` after the last of them."""

    def __init__(self, urls: str, keep_s: float) -> None:
        """`urls`: of all stream servers. A request's spans are on its server."""
        self._servers = Sharded.from_urls(urls, _SpanWriter)
        self._keep_ms = int(keep_s * 1000)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write spans, in one round trip for each server, and a second one where a list has grown too long.

        Spans that belong to no request are ignored, and the one that stands for a whole request.
        """
        by_request: dict[tuple[Any, Any], list[bytes]] = {}
        resource, process = None, dict[str, Any]()
        for span in spans:
            about = span.attributes or {}
            whose = about.get(PIPELINE_ATTRIBUTE), about.get(REQUEST_ID_ATTRIBUTE)
            if None not in whose and OPERATION_ATTRIBUTE not in about:
                if span.resource is not resource:  # all spans of a process have one
                    resource, process = span.resource, _describe_process(span.resource)
                by_request.setdefault(whose, []).append(to_json(_encode_span(span, about, process)))
        lists: dict[_SpanWriter, dict[str, list[bytes]]] = {server: {} for server in self._servers.parts}
        for (pipeline, request_id), texts in by_request.items():
            lists[self._servers[request_id]][Pipeline(pipeline).trace_key(request_id)] = texts
        are_kept = [server.append_spans(found, self._keep_ms) for server, found in lists.items()]
        return SpanExportResult.SUCCESS if all(are_kept) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the connections."""
        for server in self._servers.parts:
            server.close()


class _SpanWriter:
    """Writes the lists of one server."""

    def __init__(self, url: str) -> None:
        self._redis = redis_client(url)
        self._away_until = 0.0

    def append_spans(self, lists: Mapping[str, Sequence[bytes]], keep_ms: int) -> bool:
        """Append encoded spans to their lists. Returns whether they were written."""
        if time.monotonic() < self._away_until:
            return False
        commands = list[list[str | int | bytes]]()
        for key, texts in lists.items():
            commands += ["RPUSH", key, *texts], ["PEXPIRE", key, keep_ms]
        try:
            lengths = raise_first_error(execute_all(self._redis, commands))[::2]
            too_long = [key for key, length in zip(lists, lengths, strict=True) if length > MAX_SPANS_PER_REQUEST]
            trims = [["LTRIM", key, 0, MAX_SPANS_PER_REQUEST - 1] for key in too_long]
            raise_first_error(execute_all(self._redis, trims))
        except redis.RedisError as error:
            log.debug("sending spans failed, they are dropped: %s", error)
            self._away_until = time.monotonic() + OUTAGE_PAUSE_S
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


def _describe_process(resource: Resource) -> dict[str, Any]:
    return {
        "service": resource.attributes.get("service.name", ""),
        "instance": resource.attributes.get("service.instance.id", ""),
    }


def _encode_span(span: ReadableSpan, about: Mapping[str, Any], process: dict[str, Any]) -> dict[str, Any]:
    context = span.get_span_context()
    return {
        "name": span.name,
        **process,
        "start_s": (span.start_time or 0) / 1e9,
        "end_s": (span.end_time or 0) / 1e9,
        "id": "" if context is None else f"{context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "attributes": {name: about[name] for name in about if name not in _WHOSE},
    }
