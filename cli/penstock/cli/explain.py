"""`penstock explain ID`: what is known of one request: its record, where it was sent and why, its time, its end."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings, load_settings
from penstock.errors import PenstockError
from penstock.messages import EndEvent
from penstock.names import Pipeline, is_request_id
from penstock.record.log import RequestStatus, TokenLog
from penstock.redis.client import redis_client
from penstock.redis.servers import Sharded
from penstock.sealing import use_tenant_keys
from penstock.telemetry.timeline import (
    HOPS_ATTRIBUTE,
    PLACEMENT_ATTRIBUTE,
    REGION_ATTRIBUTE,
    REGION_WHY_ATTRIBUTE,
    SCORES_ATTRIBUTE,
    SPAN_WORDS,
    TEXTS_ATTRIBUTE,
    Timeline,
    read_timeline,
)

Row = tuple[str, str]
STATES = {
    "new": "waits in the queue", "prefill": "in prefill", "handed": "handed off, waits for decode",
    "decode": "in decode", "end": "ended",
}  # fmt: skip
"""The words for the stages of a record."""
KV_ATTRIBUTES = ("blocks", "held", "found", "retained", "retained_blocks")
"""Attributes of spans that count KV blocks."""
REASONS = {
    "hash": "by a hash of its beginning, as no worker's load was known",
    "home": "its home, where prompts that begin alike go",
    "least work left": "which would have computed it soonest",
}
"""The words for the reasons of a placement."""
REGION_REASONS = {
    "nearest": "the nearest, where no other would have been sooner by much",
    "sooner": "which had the first token sooner",
    "prefix": "which has the KV of its beginning",
    "only": "as no other was known to be able to",
    "key": "the home of its Idempotency-Key",
    "home": "the home of what it names",
    "hops": "as it had come through two regions",
}
"""The words for the reasons of a region."""


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id, as a gateway's x-request-id.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """Explain a request: its state, its workers, why it was sent there, and where its time went."""
    if not is_request_id(request_id):
        raise PenstockError(f"{request_id[:80]!r} is no id of a request")
    addresses = load_settings(Addresses)
    use_tenant_keys(addresses.tenant_keys)
    servers, pipeline = Sharded.from_urls(addresses.stream_url, redis_client), Pipeline(addresses.pipeline)
    with closing(servers[request_id]) as client:
        log = TokenLog(client, pipeline, load_settings(RecordSettings))
        status, timeline = log.read_status(request_id), read_timeline(client, pipeline, request_id)
        events = log.read_events(request_id, status.num_tokens - 1) if status is not None else []
    if status is None and timeline is None:
        raise PenstockError(
            f"nothing is known of {request_id} in the pipeline {pipeline.name}: it has expired, or no worker has "
            "seen it and its producer keeps no spans (PENSTOCK_TRACE_KEEP_S); several answers (n) to one request, and "
            f"parts of many texts, have ids of their own: {request_id}.0, {request_id}.1, …"
        )
    end = next((event for event in events if isinstance(event, EndEvent)), None)
    texts = find_texts(timeline, end)
    if as_json:
        told = {
            "record": None if status is None else asdict(status),
            "region": find_region(timeline),
            "placement": find_placement(timeline),
            "timeline": None if timeline is None else timeline.as_json(),
            "texts": texts,
            "end": None if end is None else json.loads(end.model_copy(update={"vectors": None}).encode()),
        }
        print(json.dumps(told, indent=1))  # noqa: T201
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    placed = describe_placement(find_placement(timeline))
    region = describe_region(find_region(timeline))
    about = [*describe_state(status, end, texts), *region, *placed, *describe_kv(timeline), *describe_time(timeline)]
    for row in about:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)


def find_placement(timeline: Timeline | None) -> dict[str, Any] | None:
    """Return what the producer noted of its choice; None where it noted nothing."""
    about = _find_attributes(timeline, PLACEMENT_ATTRIBUTE)
    return about and json.loads(about[PLACEMENT_ATTRIBUTE])


def _find_attributes(timeline: Timeline | None, name: str) -> dict[str, Any] | None:
    """Return the attributes of the first span that has one of this name."""
    spans = timeline.spans if timeline is not None else ()
    return next((span["attributes"] for span in spans if name in span["attributes"]), None)


def find_region(timeline: Timeline | None) -> dict[str, str] | None:
    """Return the request's home, why it is there, and the regions that it came through; None without regions."""
    names = {REGION_ATTRIBUTE: "home", REGION_WHY_ATTRIBUTE: "why", HOPS_ATTRIBUTE: "hops"}
    about = _find_attributes(timeline, REGION_ATTRIBUTE)
    return about and {name: str(about.get(key, "")) for key, name in names.items()}


def describe_region(region: dict[str, str] | None) -> Iterator[Row]:
    """Yield a row about the request's home, where there are regions."""
    if region is not None:
        why = REGION_REASONS.get(region["why"], region["why"])
        yield "region", f"{region['home']}, {why}" + (f"; it came through {region['hops']}" if region["hops"] else "")


def find_texts(timeline: Timeline | None, end: EndEvent | None) -> dict[str, Any] | None:
    """Return how many texts a request has, whether to vectors or scores, and of how many numbers; None where it is not
    known to have any. The worker's span tells it, or the end.
    """
    vectors, about = None if end is None else end.vectors, _find_attributes(timeline, TEXTS_ATTRIBUTE)
    if vectors is None and about is None:
        return None
    found = about or {}
    size = None if vectors is None else vectors.size
    number = found[TEXTS_ATTRIBUTE] if vectors is None else len(vectors.split_floats())
    return {"number": number, "to": "scores" if found.get(SCORES_ATTRIBUTE, size == 1) else "vectors", "size": size}


def describe_state(status: RequestStatus | None, end: EndEvent | None, texts: dict[str, Any] | None) -> Iterator[Row]:
    """Yield rows about the record, and the end if there is one."""
    if texts is not None:
        size = f" of {texts['size']:,} numbers" if texts["to"] == "vectors" and texts["size"] else ""
        yield "texts", f"{texts['number']:,}, to {texts['to']}{size}"
    if status is None:
        yield "state", "no worker has seen it, or its record has expired"
        return
    holder = f", held by {status.worker_name}" if status.worker_name else ""
    told = "cancelled, " if status.cancelled else ""
    written = "" if texts is not None else f"{status.num_tokens:,} output tokens, "
    yield "state", f"{told}{STATES[status.stage]}{holder}; {written}attempt {status.attempts}"
    if end is not None:
        usage, error = end.usage, f": {end.error.code}: {end.error.message}" if end.error else ""
        yield "end", f"{end.finish_reason}{error}"
        kind, written = ("", "") if texts is not None else ("prompt ", f"; {usage.completion_tokens:,} output tokens")
        yield "tokens", f"{usage.prompt_tokens:,} {kind}tokens, {usage.cached_tokens:,} of them cached{written}"


def describe_placement(placement: dict[str, Any] | None) -> Iterator[Row]:
    """Yield rows about the choice of the worker, one for each worker that was considered."""
    if placement is None:
        yield "placed", "not known: its producer kept no span, or the bus has no partitions to choose from"
        return
    worker = f" of {placement['worker']}" if placement.get("worker") else ""
    found = f"; {placement['cached']:,} of its tokens should be cached there" if placement.get("cached") else ""
    why = REASONS.get(str(placement.get("why")), str(placement.get("why")))
    yield "placed", f"partition {placement.get('partition')}{worker}, {why}{found}"
    for name, cost in sorted(placement.get("costs", {}).items(), key=lambda one: float(one[1])):
        told = ", its home" if name == placement.get("home") else ""
        yield "", f"{name}: {cost:,} s until it would have computed this prompt{told}"


def describe_kv(timeline: Timeline | None) -> Iterator[Row]:
    """Yield rows about the KV blocks that each worker found for the prompt, and those that outlive others behind it."""
    read, retained = [], []
    for span in () if timeline is None else timeline.spans:
        about = {name: int(value) for name, value in span["attributes"].items() if name in KV_ATTRIBUTES}
        if span["name"] == "kv.read" and "blocks" in about:
            held, found, known = (about.get(name, 0) for name in ("held", "found", "retained"))
            told = f"; {known:,} of these retained since the turn before" if known else ""
            read.append(f"{about['blocks']:,} blocks of the prompt: {held:,} in the pool, {found:,} in tiers{told}")
        elif about.get("retained_blocks"):
            retained.append(f"{about['retained_blocks']:,} blocks retained for the next turn")
    yield from zip(["KV", *[""] * len(read + retained)], read + retained, strict=False)


def describe_time(timeline: Timeline | None) -> Iterator[Row]:
    """Yield a row for each stretch of the request's time."""
    if timeline is None:
        return
    label = "time"
    for share in timeline.build_account():
        where = ", ".join(
            sorted({span["instance"] for span in timeline.spans if span["name"] == share.name and span.get("instance")})
        )
        took = f"{(share.end_s - share.start_s) * 1000:10,.1f} ms  {SPAN_WORDS.get(share.name, share.name)}"
        yield label, f"{took}  {where or share.service.removeprefix('penstock-')}".rstrip()
        label = ""
