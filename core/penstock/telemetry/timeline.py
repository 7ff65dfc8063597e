"""A request's timeline, from the spans that its processes left in Redis."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio

from penstock.names import Pipeline

PLACEMENT_ATTRIBUTE = "penstock.placement"
"""In the producer's span: which worker a request was sent to and why, as JSON. It names workers and their backlog."""
REGION_ATTRIBUTE, REGION_WHY_ATTRIBUTE, HOPS_ATTRIBUTE = "penstock.region", "penstock.region.why", "penstock.hops"
"""In the spans of a request's gateway, where there are regions: its home, why there, and through which ones it came."""
TEXTS_ATTRIBUTE, SCORES_ATTRIBUTE = "texts", "scores"
"""In the span of a worker that computes texts: how many, and whether to scores in place of vectors."""
UNKNOWN_SPAN = "unknown"
"""The name of time for which there is no span."""
SPAN_WORDS = {
    "request": "accept", "queue.wait": "wait in queue", "taken_over": "take over", "preprocess": "read prompt",
    "prefill": "prefill", "kv.read": "fetch KV", "first_token": "first token", "kv.write": "store KV",
    "hand_off": "hand off", "decode": "decode", "end": "write end", "settle": "publish result", "endpoint": "endpoint",
    "embed": "compute texts", UNKNOWN_SPAN: "not known",
}  # fmt: skip
"""The words for spans that people read. `timeline.js` of the page has the same ones."""


@dataclass(frozen=True)
class TimelineShare:
    """A stretch of a request's time, and the span that it belongs to."""

    name: str
    service: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a request, by their start."""

    spans: list[dict[str, Any]]
    """Each has `name`, `service`, `instance` (its process's name), `start_s` and `end_s` (seconds since the epoch),
    `id`, `parent` (the id of its parent span, or None) and `attributes`.
    """

    @property
    def start_s(self) -> float:
        """The beginning of the request: that of the producer's span, or the message's publication."""
        return min(float(span["start_s"]) for span in self.spans)

    @property
    def answered_s(self) -> float | None:
        """The time at which the end could be read; None while the answer goes on, or if no span has it."""
        return max((float(span["end_s"]) for span in self.spans if span["name"] == "end"), default=None)

    @property
    def latency_s(self) -> float | None:
        """The latency that the client sees, from the beginning to the end; None while it goes on."""
        return None if self.answered_s is None else max(0.0, self.answered_s - self.start_s)

    def build_account(self) -> list[TimelineShare]:
        """Return where the time went until the answer's end, as stretches without gap or overlap.

        Where spans overlap, the time belongs to the span that began last: storing KV goes on beside the answer, and the
        second `queue.wait` begins while the first worker still settles.
        """
        end_s = self.answered_s or max(float(span["end_s"]) for span in self.spans)
        edges = sorted({min(edge, end_s) for span in self.spans for edge in (span["start_s"], span["end_s"])})
        found: list[TimelineShare] = []
        for start_s, until_s in itertools.pairwise(edges):
            share = _find_owner(self.spans, start_s, until_s)
            if found and (found[-1].name, found[-1].service) == (share.name, share.service):
                share = TimelineShare(share.name, share.service, found.pop().start_s, until_s)
            found.append(share)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the spans, the account and the request's times, for the page."""
        return {
            "start_s": self.start_s,
            "answered_s": self.answered_s,
            "latency_s": self.latency_s,
            "spans": self.spans,
            "account": [vars(share) for share in self.build_account()],
        }


def _find_owner(spans: Sequence[dict[str, Any]], start_s: float, end_s: float) -> TimelineShare:
    there = [span for span in spans if span["start_s"] <= start_s and span["end_s"] >= end_s]
    if not there:
        return TimelineShare(UNKNOWN_SPAN, "", start_s, end_s)
    span = max(there, key=lambda one: (one["start_s"], -one["end_s"]))
    return TimelineShare(span["name"], span["service"], start_s, end_s)


def read_timeline(client: "redis.Redis", pipeline: Pipeline, request_id: str) -> Timeline | None:
    """Return a request's timeline so far; None where no spans are kept. Raises `redis.RedisError`."""
    return _parse_spans(cast("list[bytes]", client.lrange(pipeline.trace_key(request_id), 0, -1)))


async def read_timeline_async(client: "redis.asyncio.Redis", pipeline: Pipeline, request_id: str) -> Timeline | None:
    """Return a request's timeline so far; None where no spans are kept. Raises `redis.RedisError`."""
    return _parse_spans(await cast(Any, client.lrange(pipeline.trace_key(request_id), 0, -1)))


def _parse_spans(texts: Iterable[bytes]) -> Timeline | None:
    spans = sorted((json.loads(text) for text in texts), key=lambda span: (span["start_s"], -span["end_s"]))
    return Timeline(spans) if spans else None
