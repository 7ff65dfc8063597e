"""Spans below a recorded one, as OpenTelemetry's own exporters see them; each case in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from penstock.telemetry import otlp, tracing
from penstock.telemetry.process import record_spans
from penstock.names import Pipeline
from penstock.config.settings import TraceSettings
out = open(sys.argv[1], "w")
otlp.is_configured = lambda kind: kind == "traces"
otlp.make_span_exporter = lambda: ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")
with record_spans("somebody", TraceSettings()):
    context = tracing.with_request(Pipeline("p"), "request-1")
    root = tracing.start_span("request", context, 100.0)
    within = tracing.with_span(root, context)
    child = tracing.start_span("decode", within, 101.0, attempt=1)
    child.set_attributes({"model": "demo"})
    below = tracing.with_span(child, within)
    received = tracing.extract_context(tracing.inject_headers(below), context)
    tracing.record_span("kv.read", received, 102.0, 103.5, blocks=3)
    tracing.record_span("kv.write", received, 103.5, 104.0, **{"error.type": "full"})
    child.end()
    child.end()
    root.set_attribute("placed", "prefill-0")
    root.end()
"""


def recorded(file: Path, monkeypatch: pytest.MonkeyPatch, sampler: str) -> dict[str, dict[str, Any]]:
    """The spans that the script leaves, by name; each one once."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    subprocess.run([sys.executable, "-c", SCRIPT, str(file)], check=True)
    spans = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert len({span["name"] for span in spans}) == len(spans)
    return {span["name"]: span for span in spans}


def test_children_belong_to_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = recorded(tmp_path / "spans", monkeypatch, "parentbased_always_on")
    assert {name: span["status"]["status_code"] for name, span in spans.items()} == {
        "request": "UNSET", "decode": "UNSET", "kv.read": "UNSET", "kv.write": "ERROR",
    }  # fmt: skip
    assert len({span["context"]["trace_id"] for span in spans.values()}) == 1
    assert len({span["context"]["span_id"] for span in spans.values()}) == 4
    assert spans["request"]["parent_id"] is None
    assert spans["decode"]["parent_id"] == spans["request"]["context"]["span_id"]
    assert spans["kv.read"]["parent_id"] == spans["decode"]["context"]["span_id"]
    assert spans["kv.read"]["start_time"] < spans["kv.read"]["end_time"]
    about = {"penstock.pipeline": "p", "penstock.request.id": "request-1"}
    assert spans["kv.read"]["attributes"] == about | {"blocks": 3}
    assert spans["request"]["attributes"] == about | {"placed": "prefill-0"}
    assert spans["decode"]["attributes"] == about | {"attempt": 1, "model": "demo"}
    assert {span["resource"]["attributes"]["service.name"] for span in spans.values()} == {"somebody"}


def test_what_the_root_leaves_out_its_children_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded(tmp_path / "spans", monkeypatch, "parentbased_always_off") == {}


def test_nothing_is_recorded_where_opentelemetry_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert recorded(tmp_path / "spans", monkeypatch, "parentbased_always_on") == {}
