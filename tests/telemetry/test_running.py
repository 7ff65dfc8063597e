"""Telemetry of real worker processes: scraped, received, looked at, and a request's life that adds up."""

import itertools
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
import redis
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext
from prometheus_client.parser import text_string_to_metric_families

from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.ops.live import Json, LiveWatch
from penstock.redis.client import redis_client
from penstock.telemetry import catalog, tracing
from penstock.telemetry.spans import MAX_SPANS_PER_REQUEST, RedisSpanExporter
from penstock.telemetry.timeline import SPAN_WORDS, UNKNOWN_SPAN, Timeline, read_timeline, read_timeline_async
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for
from tests.telemetry.receiver import Receiver, receiving

PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void;"
ID = tracing.REQUEST_ID_ATTRIBUTE


@dataclass
class ObservedStack:
    """A stack, where it sends its telemetry, and where each worker is scraped."""

    stack: Stack
    receiver: Receiver
    ports: list[int]
    pipeline: Pipeline

    def generate(self, max_tokens: int = 24) -> str:
        """Return a request's id, after its end."""
        with Client(self.stack.addresses) as client:
            request_id = client.submit(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            assert client.result(request_id).finish_reason == "length"
        return request_id

    def scrape(self, number: int) -> dict[str, float]:
        """The sum of each series' samples, of one worker."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[number]}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        known = {metric.prometheus.removesuffix("_total") for metric in catalog.CATALOG}
        assert {family.name for family in families} <= known
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples if "le" not in sample.labels):
            found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def read_timeline(self, request_id: str) -> Timeline:
        """Of a request, once all its spans are kept."""
        with redis_client(self.stack.addresses.stream_url) as client:

            def read_whole() -> Timeline | None:
                found = read_timeline(client, self.pipeline, request_id)
                names = {span["name"] for span in found.spans} if found else set()
                return found if names >= {"settle", "hand_off", "prefill"} else None

            wait_for(lambda: read_whole() is not None, "its spans are kept")
            found = read_whole()
        assert found is not None
        return found


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedStack]:
    """One worker of each stage, with everything on."""
    first = next(port for port in iter(find_free_port, None) if port % 2 == 0)
    ports = [first, first + 1]
    with receiving() as receiver:
        environment = {
            "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_POOL_MB": "64",
            "PENSTOCK_TELEMETRY_PORT": str(ports[0]),
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_METRIC_EXPORT_INTERVAL": "300",
            "OTEL_BSP_SCHEDULE_DELAY": "300",
        }  # fmt: skip
        directory = tmp_path_factory.mktemp("telemetry")
        gateway, settings = find_free_port(), os.environ | environment
        with ForkedStack(directory, pipeline="telemetry", gateway=gateway, environment=settings) as stack:
            stack.wait_until_ready(PATIENCE_S)
            yield ObservedStack(stack, receiver, ports, Pipeline("telemetry"))


@pytest.mark.proof
def test_both_workers_are_scraped(observed: ObservedStack) -> None:
    before = [observed.scrape(0), observed.scrape(1)]
    observed.generate(24)
    wait_for(lambda: observed.scrape(1).get("penstock_requests_total", 0) > 0, "the end was counted")
    prefill, decode = observed.scrape(0), observed.scrape(1)
    assert prefill["gen_ai_server_time_to_first_token_seconds_count"] == 1 + before[0].get(
        "gen_ai_server_time_to_first_token_seconds_count", 0
    )
    assert decode["penstock_itl_seconds_count"] == 22 + before[1]["penstock_itl_seconds_count"], "between its own 23"
    assert prefill["penstock_tokens_total"] > before[0]["penstock_tokens_total"] + 10
    assert decode["penstock_tokens_total"] == 23 + before[1]["penstock_tokens_total"], "the first one is of prefill"
    assert (
        decode["gen_ai_server_request_duration_seconds_sum"] > prefill["gen_ai_server_time_to_first_token_seconds_sum"]
    )
    assert prefill["penstock_kv_blocks_total"] > 0
    assert prefill["penstock_pool_blocks"] == decode["penstock_pool_blocks"] > 0


@pytest.mark.proof
def test_both_send_otlp(observed: ObservedStack) -> None:
    name = observed.generate(4)
    wait_for(lambda: {"penstock-prefill", "penstock-decode"} <= services(observed.receiver, name), "spans")
    wait_for(lambda: "penstock.itl" in observed.receiver.metrics("penstock-decode"), "figures")
    first_token = "gen_ai.server.time_to_first_token"
    wait_for(lambda: first_token in observed.receiver.metrics("penstock-prefill"), "figures of prefill")


def services(receiver: Receiver, request_id: str) -> set[str]:
    """Which processes told of a request."""
    return {service for service, span in receiver.spans_of_services() if read_attribute(span, ID) == request_id}


def read_attribute(span: Span, name: str) -> str:
    return next((pair.value.string_value for pair in span.attributes if pair.key == name), "")


@pytest.mark.proof
@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_begins_at_the_caller_lasts_as_long_as_the_answer_and_draws_a_service_graph(
    observed: ObservedStack, stream: bool
) -> None:
    trace_id, caller = (7 + stream).to_bytes(16), (9).to_bytes(8)
    headers = {"traceparent": f"00-{trace_id.hex()}-{caller.hex()}-01"}
    chat = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "ignore_eos": True}
    begun_ns = time.time_ns()
    url = f"{observed.stack.gateway_url}/v1/chat/completions"
    assert httpx.post(url, json=chat | {"stream": stream}, headers=headers, timeout=None).status_code == 200

    def list_spans() -> list[tuple[str, Span]]:
        return [one for one in observed.receiver.spans_of_services() if one[1].trace_id == trace_id]

    awaited = {"POST /v1/chat/completions", "request", "prefill", "hand_off", "decode", "end", "chat demo"}
    wait_for(lambda: awaited <= {span.name for _, span in list_spans()}, "all spans came")
    by_name = {span.name: span for _, span in list_spans()}
    services = {span.span_id: service for service, span in list_spans()}
    root, end = by_name["POST /v1/chat/completions"], by_name["end"]
    assert (root.kind, root.parent_span_id) == (Span.SPAN_KIND_SERVER, caller)
    assert begun_ns <= root.start_time_unix_nano <= by_name["request"].start_time_unix_nano
    assert end.start_time_unix_nano <= root.end_time_unix_nano
    assert {pair.key: pair.value.int_value for pair in root.attributes}["http.response.status_code"] == 200
    # What a service graph is drawn from: a consumer whose parent is a producer.
    producers = {span.span_id for _, span in list_spans() if span.kind == Span.SPAN_KIND_PRODUCER}
    consumers = [span for _, span in list_spans() if span.kind == Span.SPAN_KIND_CONSUMER]
    edges = sorted((services[one.parent_span_id], services[one.span_id]) for one in consumers)
    assert edges == [("penstock-gateway", "penstock-prefill"), ("penstock-prefill", "penstock-decode")]
    assert producers == {one.parent_span_id for one in consumers}
    assert by_name["request"].parent_span_id == root.span_id
    # One span stands for the whole request.
    told = [span for _, span in list_spans() if any(pair.key.startswith("gen_ai.") for pair in span.attributes)]
    assert [span.name for span in told] == ["chat demo"]
    about = {pair.key: pair.value for pair in told[0].attributes}
    words = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
    assert [about[name].string_value for name in words] == ["chat", "penstock", "demo"]
    assert about["gen_ai.usage.output_tokens"].int_value == 8
    assert about["gen_ai.usage.input_tokens"].int_value > 10
    assert 0 <= about["gen_ai.usage.cache_read.input_tokens"].int_value <= about["gen_ai.usage.input_tokens"].int_value
    assert [one.string_value for one in about["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    assert told[0].start_time_unix_nano <= by_name["prefill"].start_time_unix_nano
    assert told[0].end_time_unix_nano == end.end_time_unix_nano


@pytest.mark.proof
def test_the_parts_of_a_timeline_add_up_to_its_latency(observed: ObservedStack) -> None:
    timeline = observed.read_timeline(observed.generate(64))
    account = timeline.build_account()
    assert timeline.latency_s is not None
    assert sum(part.end_s - part.start_s for part in account) == pytest.approx(timeline.latency_s)
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(account))
    assert UNKNOWN_SPAN not in {part.name for part in account}, account


async def test_a_timeline_has_all_spans_in_order(observed: ObservedStack) -> None:
    begun_s, name = time.time(), observed.generate(4)
    timeline = observed.read_timeline(name)
    assert timeline.spans[0]["start_s"] > begun_s - 1.0, "none begins before the request"
    names = [span["name"] for span in timeline.spans]
    assert set(names) == {
        "request", "queue.wait", "preprocess", "prefill", "kv.read", "first_token", "kv.write", "hand_off", "decode",
        "end", "settle",
    }  # fmt: skip
    assert names.count("queue.wait") == 2
    assert set(names) <= SPAN_WORDS.keys(), "people are told what each one is"
    ids = {span["id"] for span in timeline.spans}
    assert all(span["parent"] is None or span["parent"] in ids for span in timeline.spans)
    assert [span["start_s"] for span in timeline.spans] == sorted(span["start_s"] for span in timeline.spans)
    url = observed.stack.addresses.stream_url
    async with redis.asyncio.Redis.from_url(url) as client:
        assert await read_timeline_async(client, observed.pipeline, name) == timeline
        assert await read_timeline_async(client, observed.pipeline, "nobody") is None
        assert 0 < await client.pttl(observed.pipeline.trace_key(name)) <= 600_000


def states(found: Json) -> list[str]:
    return [worker["state"] for worker in found["workers"]]


def test_the_live_view_shows_work_and_a_killed_worker(observed: ObservedStack) -> None:
    watch = LiveWatch(observed.stack.addresses, BusSettings())

    def until(what: str, is_so: Callable[[Json], object]) -> Json:
        found: list[Json] = []

        def has_come() -> object:
            found[:] = [watch.read_latest()]
            return is_so(found[0])

        wait_for(has_come, what)
        return found[0]

    def is_told(one: Json) -> object:
        return one["ttft_s"]["count"] and one["itl_s"]["count"] and one["health"]["state"] == "ok"

    observed.generate(24)
    found = until("latencies are told", is_told)
    assert found["health"] == {"state": "ok", "reasons": []}
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p90"] <= found["ttft_s"]["p99"]
    assert 0 < found["itl_s"]["p50"] <= found["itl_s"]["p99"]
    assert found["lag"]["interactive"]["prefill"]["messages"] == 0
    assert {worker["name"]: worker["state"] for worker in found["workers"]} == {
        "prefill-0": "ready", "decode-0": "ready",
    }  # fmt: skip
    assert all(worker["blocks_total"] > 0 and worker["age_s"] > 0 for worker in found["workers"])
    shares = [tier["share"] for tier in found["tiers"].values()]
    assert 0 <= sum(shares) <= 1
    observed.generate(4)  # the same prompt again: the pool has it
    until("a hit", lambda one: one["tiers"]["pool"]["hits"] > 0)

    decode = observed.stack.workers[1]
    assert decode.child is not None
    decode.child.kill()
    found = until("it is missed", lambda one: one["lost"])
    assert [(one["stage"], one["name"]) for one in found["lost"]] == [("decode", "decode-0")]
    assert found["health"] == {"state": "degraded", "reasons": ["no decode worker is ready"]}

    def is_back(one: Json) -> bool:
        observed.stack.restart_dead()
        return states(one) == ["ready", "ready"] and not one["lost"]

    until("it is back", is_back)

    assert decode.child is not None
    decode.child.stop(PATIENCE_S)
    decode.child = None
    decode.start_at = time.monotonic() + 3600
    found = until("it has left", lambda one: len(one["workers"]) == 1)
    assert found["lost"] == [], "it said goodbye"
    decode.start_at = 0.0
    observed.stack.restart_dead()
    until("a worker for the other tests", lambda one: states(one) == ["ready", "ready"])


def spans(pipeline: Pipeline, count: int) -> list[ReadableSpan]:
    """Of one request."""
    attributes = {tracing.PIPELINE_ATTRIBUTE: pipeline.name, tracing.REQUEST_ID_ATTRIBUTE: "r-1"}
    whose = SpanContext(1, 2, is_remote=False)
    return [ReadableSpan(f"span-{n}", whose, attributes=attributes, start_time=n, end_time=n + 1) for n in range(count)]


def test_spans_of_a_redis_that_is_away_are_lost_and_nothing_else(pipeline: Pipeline) -> None:
    exporter = RedisSpanExporter(f"redis://127.0.0.1:{find_free_port()}/0", 60)
    assert [exporter.export(spans(pipeline, 3)) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
    exporter.shutdown()


def test_of_one_request_only_so_many_spans_are_kept(pipeline: Pipeline, redis_url: str) -> None:
    exporter = RedisSpanExporter(redis_url, 60)
    for _ in range(2):
        assert exporter.export(spans(pipeline, MAX_SPANS_PER_REQUEST)) is SpanExportResult.SUCCESS
    exporter.shutdown()
    with redis_client(redis_url) as client:
        timeline = read_timeline(client, pipeline, "r-1")
    assert timeline is not None
    assert len(timeline.spans) == MAX_SPANS_PER_REQUEST
    assert timeline.answered_s is None
    first = {name: value for name, value in timeline.spans[0].items() if name not in ("service", "instance")}
    assert first == {
        "name": "span-0", "start_s": 0.0, "end_s": 1e-9, "id": f"{2:016x}", "parent": None, "attributes": {},
    }  # fmt: skip
