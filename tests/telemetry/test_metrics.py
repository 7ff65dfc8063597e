"""What is counted, read back as Prometheus, OpenTelemetry and heartbeats have it."""

import math
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RegionSettings, WebhookSettings, load_settings
from penstock.errors import PenstockError
from penstock.ingest.http.metrics import REFUSAL_KEY, GatewayMetrics
from penstock.ingest.regions.choosing import RegionAsk
from penstock.ingest.regions.copies import CopyState, watch_copies
from penstock.ingest.regions.limits import SharedLimits
from penstock.ingest.regions.peers import Peers
from penstock.ingest.regions.state import StateReader
from penstock.ingest.webhooks import Webhooks
from penstock.local.processes import find_free_port
from penstock.messages import EndEvent, Timings, Usage, now_s
from penstock.names import CLASSES, OPERATION_HEADER, STAGES, WorkerKind
from penstock.ops.live import Json, LiveWatch
from penstock.redis.client import async_redis_client
from penstock.telemetry import catalog, energy, otlp
from penstock.telemetry.energy import EnergyReader
from penstock.telemetry.exposition import render_metrics, serve_metrics
from penstock.telemetry.meters import Meters
from penstock.telemetry.recent import RecentTotals, estimate_quantile, sum_buckets, summarize_percentiles
from penstock.telemetry.seconds import Work
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.tracing import Operation, format_trace_id, read_operation, with_span
from sim.waiting import wait_for
from tests.telemetry.receiver import Receiver, receiving

TRACE_ID, ACCEPTED = "0af7651916cd43dd8448eb211c80319c", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0)
VALUES = st.lists(st.floats(0, 9.99), min_size=1, max_size=200)
TIER = {
    "hits": 3, "misses": 2, "damaged": 1, "evictions": 1, "refused": 0, "errors": 1, "bytes_read": 9,
    "bytes_written": 8,
}  # fmt: skip
KV = {"pool": {"hits": 5, "misses": 7}, "shared": TIER, "recomputed_blocks": 2}
DRAFTS = {"drafted": 8, "accepted": 5}
RESTS = {"url": "http://a/v1", "cause": "403", "problem": "HTTP 403: no", "rests_s": 8.5}
VIEW = {
    "running": 2, "waiting": 1, "pool": {"used": 3, "total": 10}, "drafts": DRAFTS, "slow_products": 2, "kv": KV,
    "retention": {"bytes": {"acme": 96}, "retained": 4, "found": 2},
    "endpoints": [RESTS, {"url": "http://b/v1", "cause": "", "problem": "", "rests_s": 0.0}],
}  # fmt: skip


def counted(values: list[float]) -> list[int]:
    meters = Meters()
    histogram = meters.get_histogram(catalog.ITL, "p")
    histogram.bounds, histogram.counts = BOUNDS, [0] * (len(BOUNDS) + 1)
    for value in values:
        histogram.add(value)
    assert math.isclose(histogram.sum, sum(values))
    return histogram.counts


@given(VALUES)
def test_a_histogram_counts_each_value_where_its_bucket_ends(values: list[float]) -> None:
    counts = counted(values)
    assert list(accumulate(counts[:-1])) == [sum(value <= bound for value in values) for bound in BOUNDS]
    assert sum(counts) == len(values)


@given(VALUES, st.floats(0.001, 1))
@example([1.0, 1.0, 1.0, 0.0078125], 0.25)
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    counts = counted(values)
    found, rank = estimate_quantile(BOUNDS, counts, share), max(0, math.ceil(share * len(values)) - 1)
    true = sorted(values)[rank]
    assert found is not None
    low, high = (0.0, *BOUNDS)[bisect_left(BOUNDS, true)], BOUNDS[bisect_left(BOUNDS, true)]
    assert low <= found <= high or math.isclose(found, low)


@given(VALUES)
def test_quantiles_rise_with_the_share(values: list[float]) -> None:
    counts = counted(values)
    found = [estimate_quantile(BOUNDS, counts, share / 20) or 0.0 for share in range(21)]
    assert found == sorted(found)


def test_what_lies_beyond_the_bounds_and_what_is_not_there() -> None:
    assert estimate_quantile(BOUNDS, [0, 0, 0, 0, 0, 4], 0.5) == BOUNDS[-1]
    assert summarize_percentiles(BOUNDS, [0] * 6) == {"p50": None, "p90": None, "p99": None, "count": 0}
    assert estimate_quantile((1.0, 2.0), [10, 10, 0], 0.75) == 1.5, "half of the second bucket"


@given(st.lists(st.tuples(st.floats(0.1, 40), st.integers(0, 50)), min_size=1, max_size=60))
@settings(max_examples=60)
def test_the_last_minute_is_what_was_added_in_it(steps: list[tuple[float, int]]) -> None:
    now, total = 1000.0, 0
    totals = [(now, 0)]
    recent = RecentTotals(lambda: {"n": total, "h": [total, 2 * total]}, lambda: now)
    for passed_s, added in steps:
        now, total = now + passed_s, total + added
        found = recent.summarize_recent()
        before = [count for at, count in totals if at <= now - 60] or [0]
        assert found["minute"] == {"n": total - before[-1], "h": [total - before[-1], 2 * (total - before[-1])]}
        at, count = ([one for one in totals if one[0] <= now - 10] or totals[:1])[-1]
        assert math.isclose(found["per_s"]["n"], (total - count) / (now - at), abs_tol=0.001)
        totals.append((now, total))


def test_workers_are_summed_and_a_foreign_histogram_left_out() -> None:
    parts = [{"h": [1, 2, 3]}, {"h": [10, 20, 30]}, {"h": [5]}, {}]
    assert sum_buckets(parts, "h", (1.0, 2.0)) == [11, 22, 33]
    assert sum_buckets([], "h", (1.0, 2.0)) == [0, 0, 0]


def test_what_is_off_counts_nothing() -> None:
    meters = Meters(is_on=False)
    record_everything(meters, "prefill")
    assert meters.collect_readings().keys() <= {metric for metric in catalog.CATALOG if metric.kind != "histogram"}
    meters = Meters(is_on=False)
    meters.get_histogram(catalog.ITL, "p").add(1.0)
    meters.get_counter(catalog.TOKENS, "p", "decode").add()
    assert not meters.collect_readings()
    assert meters.get_histogram(catalog.ITL, "p").read().sum == 0


@pytest.mark.parametrize(("kind", "decodes"), [("prefill", False), ("decode", True), ("auto", True)])
def test_who_decodes_tells_of_drafts_and_of_what_it_computed_again(kind: WorkerKind, decodes: bool) -> None:
    meters = Meters()
    StageMetrics(meters, "p", kind, "w", "demo").set_view(lambda: VIEW)
    found = meters.collect_readings().keys() & {catalog.DRAFTED_TOKENS, catalog.KV_RECOMPUTED}
    assert len(found) == 2 * decodes


@pytest.mark.parametrize("operation", get_args(Operation))
def test_a_job_says_what_was_asked_for(operation: Operation) -> None:
    assert read_operation({OPERATION_HEADER: operation}) == operation


def test_a_gap_of_an_interactive_answer_that_is_too_long_is_counted() -> None:
    metrics = StageMetrics(meters := Meters(), "p", "auto", "w", "demo", longest_gap_s=0.05)
    for gap_s in (None, 0.02, 0.05, 0.2):
        metrics.record_token(gap_s, "interactive")
        metrics.record_token(gap_s, "batch")
    assert meters.get_counter(catalog.GAP_MISSED, "p", "auto").value == 1


def record_everything(meters: Meters, name: str) -> StageMetrics:
    """A worker's metrics to which all has happened that can."""
    assert name in STAGES
    metrics = StageMetrics(meters, "p", name, f"{name}-0", "demo")
    metrics.set_view(lambda: VIEW)
    metrics.record_queue_wait("interactive", now_s() - 2, now_s())
    metrics.record_preprocess(0.002)
    metrics.count_take_over()
    metrics.count_retry("model_error")
    metrics.count_dead_letters()
    metrics.count_prompt("interactive", 30, 12)
    metrics.count_texts("interactive", 2, 12)
    metrics.record_first_token("chat", now_s() - 0.3)
    metrics.record_token(None)
    metrics.record_token(0.02)
    for move in (catalog.KV_READ, catalog.KV_WRITE, catalog.HAND_OFF):
        metrics.record_move(move, 5.0, 5.02, TRACE_ID)
    metrics.count_hand_off("batch")
    times = Timings(published=now_s() - 3, first_token=now_s() - 2, finished=now_s())
    end = EndEvent(finish_reason="stop", usage=Usage(prompt_tokens=42, completion_tokens=3), timings=times)
    metrics.record_end("interactive", "chat", end)
    metrics.seconds.divide_seconds([(Work("decode", "interactive"), 0.5)])
    return metrics


class FixedWatch(LiveWatch):
    """A view that is always the same: servers have nothing to do with how it is shown."""

    def read_latest(self) -> Json:
        self.lost, self.memory_share = {"t": 2}, 0.5
        lag = {
            priority_class: {
                stage: {"messages": 4, "prompt_tokens": 50, "output_tokens": None if priority_class == "batch" else 60}
                for stage in STAGES
            }
            | {"estimated_wait_s": None if priority_class == "batch" else 1.5}
            for priority_class in CLASSES
        }
        return {
            "lag": lag, "workers": [{"stage": "decode", "name": "d-0", "state": "ready"}],
            "lost": [{"stage": "decode", "name": "d-1", "seen_s_ago": 2.0}],
            "account": {"currency": "EUR", "sold": 3.0, "cost": 1.0, "idle_cost": 0.5, "margin": 1.5},
            "scaling": {
                "workers": {"auto": 3, "prefill": 0, "decode": 0}, "reasons": {"auto": "backlog"}, "alerts": [],
                "starting": {"auto": 1}, "predicted_ttft_p99_s": 2.0, "observed_ttft_p99_s": 3.0,
            },
        }  # fmt: skip


def write_rapl(directory: Path, **microjoules: int) -> None:
    for name, value in microjoules.items():
        zone = directory / f"intel-rapl:{name.removeprefix('p').replace('_', ':')}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "name").write_text("psys\n" if name == "p9" else f"package-{name}\n")
        (zone / "energy_uj").write_text(f"{value}\n")
        (zone / "max_energy_range_uj").write_text("10000000\n")


def test_a_machine_tells_its_joules_or_nothing(tmp_path: Path) -> None:
    assert EnergyReader(tmp_path / "none").read_joules() is None
    write_rapl(tmp_path, p0=9_000_000, p1=0, p0_0=5, p9=0)
    reader = EnergyReader(tmp_path)
    assert reader.read_joules() == 0.0
    write_rapl(tmp_path, p0=1_000_000, p1=500_000, p0_0=9_000_000, p9=9_000_000)
    told = "one counter began anew at 10 J; parts of a package count in it, and the whole machine counts both"
    assert reader.read_joules() == pytest.approx(2.5), told
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert reader.read_joules() == pytest.approx(2.5)


def test_a_gpu_whose_driver_is_loaded_again_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter((0, 5_000, 1_000, 3_000))

    def tell(_: object, found: Any) -> int:
        found._obj.value = next(told)
        return 0

    library = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=tell)
    monkeypatch.setattr(energy, "_open_nvml", lambda: (library, ["gpu"]))
    reader = EnergyReader(tmp_path)
    assert [reader.read_joules() for _ in range(3)] == [5.0, 6.0, 8.0]


@pytest.fixture(scope="module")
def meters(tmp_path_factory: pytest.TempPathFactory) -> Meters:
    """Those of a process that is two workers and a gateway at once."""
    made = Meters()
    write_rapl(rapl := tmp_path_factory.mktemp("rapl"), p0=1)
    record_everything(made, "prefill")._energy = EnergyReader(rapl)
    record_everything(made, "decode")
    addresses = Addresses(pipeline="p")
    gateway = GatewayMetrics(made, addresses, BusSettings())
    gateway._watches["p"] = FixedWatch(addresses, BusSettings())
    gateway.count_answer({"type": "http"}, 404)
    gateway.count_answer({"type": "http", REFUSAL_KEY: "overloaded"}, 429)
    Webhooks(async_redis_client("redis://127.0.0.1:1/0"), None, WebhookSettings(), made)
    made.get_counter(catalog.WEBHOOK_ATTEMPTS, "delivered").add()
    regions = load_settings(RegionSettings, name="eu", peers="us=http://127.0.0.1:1", secret="x" * 16)
    peers = Peers(regions, cast(StateReader, None), cast(SharedLimits, None), made)
    peers.choose_region(RegionAsk("demo", "interactive", 10))
    watch_copies(made, {"p"}, ["eu"], lambda pipeline, region: CopyState(3, 1.5))
    return made


@pytest.mark.proof
def test_the_catalog_is_all_that_is_exposed(meters: Meters) -> None:
    families = {family.name: family for family in text_string_to_metric_families(render_metrics(meters).decode())}
    assert families.keys() == {metric.prometheus.removesuffix("_total") for metric in catalog.CATALOG}
    for metric in catalog.CATALOG:
        family = families[metric.prometheus.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.prometheus_labels)


def values(meters: Meters) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render_metrics(meters).decode())
        for sample in family.samples
    }


@pytest.mark.proof
def test_prometheus_reads_the_values(meters: Meters) -> None:
    found = values(meters)
    assert found["penstock_tokens_total", "cached", "p"] == 24
    assert found["penstock_texts_total", "interactive", "p"] == 4
    assert found["penstock_text_tokens_total", "interactive", "p"] == 24
    assert found["penstock_kv_blocks_total", "p", "hit", "decode", "shm"] == 3
    assert found["penstock_pool_blocks", "p", "prefill", "free", "prefill-0"] == 7
    assert found["penstock_slow_products", "p", "prefill", "prefill-0"] == 2
    assert found["penstock_endpoint_rest_seconds", "403", "http://a/v1", "p", "prefill-0"] == 8.5
    assert found["penstock_endpoint_rest_seconds", "", "http://b/v1", "p", "prefill-0"] == 0
    assert found["penstock_worker_state", "p", "decode", "ready", "d-0"] == 1
    assert found["penstock_worker_state", "p", "decode", "draining", "d-0"] == 0
    assert found["penstock_worker_state", "p", "decode", "lost", "d-1"] == 1
    assert found["penstock_lag_tokens", "interactive", "output", "p", "decode"] == 60
    assert ("penstock_lag_tokens", "batch", "output", "p", "decode") not in found
    assert found["penstock_itl_seconds_bucket", "0.016", "p"] == 0
    assert found["penstock_itl_seconds_bucket", "0.024", "p"] == found["penstock_itl_seconds_count", "p"] == 2
    assert found["penstock_gateway_refused_total", "overloaded"] == 1
    assert found["penstock_webhook_attempts_total", "delivered"] == 1
    assert found["penstock_webhook_waiting",] == 0
    assert found["penstock_region_open", "p", "eu"] == 3
    assert found["penstock_region_copy_age_seconds", "p", "eu"] == 1.5
    assert found["penstock_region_state", "us", "unknown"] == 1
    assert found["penstock_region_requests_total", "eu", "only"] == 1
    ttft = "gen_ai_server_time_to_first_token_seconds"
    assert found[f"{ttft}_bucket", "chat", "penstock", "demo", "0.25"] == 0
    assert found[f"{ttft}_count", "chat", "penstock", "demo"] == 2


def test_the_trace_of_a_buckets_last_value_is_its_exemplar_as_openmetrics(meters: Meters) -> None:
    port = find_free_port()
    with serve_metrics(meters, "127.0.0.1", port):
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": ACCEPTED})
        with urllib.request.urlopen(asked) as answer:
            text = answer.read().decode()
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    for name in ("penstock_kv_read_seconds", "penstock_kv_write_seconds", "penstock_hand_off_seconds"):
        found = [one for one in families[name].samples if one.exemplar]
        assert {one.labels["le"] for one in found} == {"0.032"}
        assert all(one.exemplar and one.exemplar.labels == {"trace_id": TRACE_ID} for one in found)
        assert all(one.exemplar and one.exemplar.value == pytest.approx(0.02) for one in found)
    assert TRACE_ID not in render_metrics(meters).decode(), "Prometheus' own text has none"


def test_only_a_trace_that_is_recorded_is_an_exemplar() -> None:
    for flags, expected in ((TraceFlags.SAMPLED, TRACE_ID), (TraceFlags.DEFAULT, "")):
        about = SpanContext(int(TRACE_ID, 16), 1, is_remote=False, trace_flags=TraceFlags(flags))
        assert format_trace_id(with_span(NonRecordingSpan(about), Context())) == expected
    assert format_trace_id(Context()) == ""


def test_a_worker_serves_them_and_a_taken_port_is_an_error(meters: Meters) -> None:
    port = find_free_port()
    with serve_metrics(meters, "127.0.0.1", port) as bound:
        assert bound == port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        assert {one.name for one in text_string_to_metric_families(text)} >= {"penstock_itl_seconds"}
        with pytest.raises(PenstockError, match="PENSTOCK_TELEMETRY_PORT"), serve_metrics(meters, "127.0.0.1", port):
            pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as one:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        yield one


@pytest.mark.proof
def test_otlp_sends_the_same_and_true_histograms(meters: Meters, receiver: Receiver) -> None:
    assert otlp.is_configured("metrics")
    with otlp.push_metrics(meters, Resource.create({"service.name": "penstock-test"})):
        wait_for(lambda: len(receiver.posted) > 1, "metrics come again and again")
    found = receiver.metrics("penstock-test")
    assert found.keys() == {metric.name for metric in catalog.CATALOG}
    assert {found[metric.name].unit for metric in catalog.CATALOG} == {metric.unit for metric in catalog.CATALOG}
    (point,) = found["penstock.itl"].histogram.data_points
    assert tuple(point.explicit_bounds) == catalog.ITL_BOUNDS
    assert point.bucket_counts[bisect_left(catalog.ITL_BOUNDS, 0.02)] == point.count == 2
    assert math.isclose(point.sum, 0.04)
    assert not point.HasField("min")
    (first,) = found["gen_ai.server.time_to_first_token"].histogram.data_points
    attributes = {pair.key: pair.value.string_value for pair in first.attributes}
    expected = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "penstock", "gen_ai.request.model": "demo"}
    assert attributes == expected
    assert found["penstock.tokens"].sum.is_monotonic
    assert found["penstock.running"].HasField("gauge")


def test_nothing_is_sent_where_nobody_said_whereto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert not otlp.is_configured("metrics")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    assert otlp.is_configured("traces")
    assert not otlp.is_configured("metrics")
