"""`penstock plan` as a user runs it: rates of running workers, rates measured here, and errors."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.names import STAGES, Pipeline
from penstock.plan.trace import Arrival, read_trace
from penstock.worker.heartbeat import Heartbeat
from tests.commands import Terminal

TRACE = [
    {"at_s": 0.0, "prompt_tokens": 200, "output_tokens": 100},
    {"timestamp": 500, "input_length": 800, "output_length": 100, "hash_ids": [1, 2]},
    {"at_s": 20, "prompt_tokens": 1, "output_tokens": 1},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, TRACE)) + "\n\n")
    return str(file)


@pytest.fixture
def beating(redis_url: str, pipeline: Pipeline) -> Iterator[dict[str, str]]:
    """A worker of each stage that says how fast it is."""
    loads: dict[str, dict[str, Any]] = {
        "prefill": {"running": 1, "load": {"prompt_tokens_per_s": 200.0}},
        "decode": {"running": 4, "pool": {"used": 1, "total": 500}, "load": {"output_tokens_per_s": 10.0}},
    }
    with ExitStack() as stack:
        for stage in STAGES:
            beat = stack.enter_context(Heartbeat(redis_url, pipeline, stage, f"{stage}-0", 30.0))
            beat.set_load_source(lambda stage=stage: loads[stage])  # type: ignore[misc]
            beat.update_status(state="ready", model="demo")
            beat.write_beat()
        yield {"PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_STREAM_URL": redis_url}


@pytest.mark.proof
def test_running_workers_say_how_fast_they_are(beating: dict[str, str], trace: str, terminal: Terminal) -> None:
    asked = ("plan", "--model", "demo", "--trace", trace, "--utilisation", "0.8")
    slow = terminal(*asked, **beating)
    assert (slow.returncode, slow.stdout) == (1, "")
    assert "no measured batch keeps to 0.2 s between tokens, the fastest takes 0.4 s" in slow.stderr, "by default"
    limits = {"PENSTOCK_SLO_INTERACTIVE_TTFT_S": "4.2", "PENSTOCK_SLO_INTERACTIVE_ITL_S": "9"}
    done = terminal(*asked, **beating, **limits)
    assert done.returncode == 0, done.stderr
    for line in (
        "rates        of one worker, from 2 running workers",
        "             100.0 / (200.0 tokens/s x 0.8) → 1",
        "decode       batch 4: 10.0 tokens/s, 400.0 ms a token",
        "             20.0 / (10.0 tokens/s x 0.8) → 3",
        "plan         1 prefill and 3 decode workers",
        "             or 4 auto workers",
        "             leaves out: prefix hits",
    ):
        assert line in done.stdout
    assert "interactive 4.2 s and 9,000 ms between tokens" in done.stdout
    made = json.loads(terminal(*asked, "--json", **beating, **limits).stdout)
    assert made["met_share"] == pytest.approx(2 / 3), "4.5 s are too long for the second"
    assert (made["prefill"], made["decode"], made["batch"]["size"]) == (1, 3, 4)
    assert made["waits"]["ttft_p99_s"] == pytest.approx(4.5), "the second waits for half a second, and takes four"


def test_errors_say_what_to_do(beating: dict[str, str], trace: str, terminal: Terminal, pipeline: Pipeline) -> None:
    other = terminal("plan", "--model", "other", "--trace", trace, **beating)
    assert (other.returncode, other.stdout) == (1, "")
    assert "serve demo, not other: measure it with --measure" in other.stderr
    itl = terminal("plan", "--trace", trace, "--itl-s", "0.1", **beating)
    assert "the fastest takes 0.4 s" in itl.stderr
    idle = terminal("plan", "--trace", trace, **beating | {"PENSTOCK_PIPELINE": f"{pipeline.name}-idle"})
    assert "no running prefill worker has measured its rate: send some requests, or use --measure" in idle.stderr
    assert "Redis" in terminal("plan", "--trace", trace).stderr, "there is none"
    assert terminal("plan", "--trace", trace, "--utilisation", "2", **beating).returncode == 2
    negative = terminal("plan", "--trace", trace, **beating, PENSTOCK_SLO_INTERACTIVE_ITL_S="-1")
    assert (negative.returncode, negative.stdout) == (1, "")
    assert "PENSTOCK_SLO_INTERACTIVE_ITL_S" in negative.stderr
    assert terminal("plan", "--trace", trace, "--batch-itl-s", "-1", **beating).returncode == 2
    unanswered = terminal("topics", "record", f"{trace}.recorded", **beating)
    assert f"the pipeline {pipeline.name} has no answered request to plan from" in unanswered.stderr


@pytest.mark.proof
def test_measured_rates_are_of_the_engine_here(trace: str, terminal: Terminal) -> None:
    done = terminal("plan", "--trace", trace, "--measure", "--json", PENSTOCK_ENGINE_MAX_BATCH="4")
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["rates"]
    assert [size for size, _ in rates["batches"]] == [1, 2, 4]
    assert all(tokens_per_s > 0 for _, tokens_per_s in rates["batches"])
    assert rates["prefill_tokens_per_s"] > 0
    assert rates["block_bytes"] * rates["pool_blocks"] <= 256 * 2**20


@pytest.mark.proof
def test_both_forms_of_a_line_are_read_in_order(tmp_path: Path, trace: str) -> None:
    assert read_trace(Path(trace)) == [
        Arrival(0.0, 200, 100),
        Arrival(0.5, 800, 100, (1, 2)),
        Arrival(20.0, 1, 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        (
            '{"at_s": 1, "prompt_tokens": 2, "output_tokens": 3}\n{"at_s": 1}',
            "line 2: no prompt_tokens or input_length",
        ),
        ('{"prompt_tokens": 2, "output_tokens": 3}', "line 1: no at_s or timestamp"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 3}', "line 1: it needs a time, a prompt token and"),
        ('{"at_s": 1, "prompt_tokens": 2, "output_tokens": 3, "class": "high"}', "line 1: "),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 3}', "line 1: it needs a time, a prompt token and"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": -1}', "line 1: it needs a time, a prompt token and"),
        ('{"at_s": 1e400, "prompt_tokens": 1, "output_tokens": 3}', "line 1: it needs a time, a prompt token and"),
        ('{"at_s": [], "prompt_tokens": 1, "output_tokens": 3}', "line 1: "),
        ("[1]", "line 1: "),
        ("7", "line 1: "),
        ("{", "line 1: "),
    ],
)
def test_a_bad_trace_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(PlanError) as raised:
        read_trace(file)
    assert message in str(raised.value)


def test_no_trace_is_one_error(tmp_path: Path, terminal: Terminal) -> None:
    with pytest.raises(PlanError) as none:
        read_trace(tmp_path / "none.jsonl")
    assert str(none.value) == f"{tmp_path / 'none.jsonl'} cannot be read: No such file or directory"
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(PlanError):
        read_trace(tmp_path / "binary")
