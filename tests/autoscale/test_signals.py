"""What the controller makes of topics and heartbeats."""

from typing import Any

import pytest

from penstock.autoscale.signals import Look, choose_leaver, find_signals, find_speed
from penstock.autoscale.sizing import Targets
from penstock.names import STAGES, Pipeline
from tests.test_lag import heartbeat

DEMO, TARGETS = Pipeline("demo"), Targets(4.0, 0.05)
SPEED = {"prompt_token_s": 0.002, "idle_prompt_token_s": 0.001, "num_rows": 4, "step_s": 0.02, "row_s": 0.002}


def beat(name: str, state: str = "ready", since: float = 0.0, running: int = 0, **totals: float) -> dict[str, Any]:
    """The heartbeat of an `auto` worker."""
    held = {"capacity": 30 - running, "mean_prompt_tokens": 100.0, "mean_output_tokens": 50.0}
    made = heartbeat("auto", 1000.0, state, interactive=held)
    made["load"]["speed"] = SPEED
    recent = {"interactive": totals, "minute": {"pool_hits": 3, "shm_hits": 1}, "per_s": {}}
    return made | {"name": name, "token": name, "since": since, "running": running, "recent": recent}


def look(at_s: float, *beats: dict[str, Any], requests: int = 0, batch: int = 0, jobs: int = 0) -> Look:
    """A look at these workers, and at topics with so many messages."""
    counts = {topic: 0 for stage in STAGES for topic in DEMO.input_topics(stage).values()}
    counts[DEMO.request_topic("interactive")], counts[DEMO.request_topic("batch")] = requests, batch
    counts[DEMO.job_topic("interactive")] = jobs
    return Look(at_s, counts, beats)


def find(now: Look, before: Look | None = None) -> Any:
    return find_signals(now, before, DEMO, TARGETS, 16)


def test_what_arrived_is_what_ended_and_what_waits_more() -> None:
    before = look(
        100.0, beat("a", ended=7, prompts=9, prompt_tokens=900, squared_prompt_tokens=1e5), requests=3, jobs=2
    )
    now = look(
        105.0,
        beat("a", ended=9, prompts=12, prompt_tokens=1500, squared_prompt_tokens=3e5, cached_tokens=400),
        beat("new", since=102.0, ended=1, prompts=1, prompt_tokens=100, squared_prompt_tokens=1e4),
        beat("seen late", since=50.0, ended=1000, prompts=1000),
        requests=8,
        jobs=1,
    )
    passed = find(now, before).passed
    assert passed[:4] == (105.0, 5.0, 3 + 8 + 1 - 3 - 2, 4)
    assert passed.prompt_s == pytest.approx(0.7)
    assert passed.prompt_s2 == pytest.approx(0.21)
    assert passed.hit_s == pytest.approx(0.3), "three of four blocks were found in pools"
    assert find(now).passed is None


def test_what_waits_counts_in_seconds_of_one_worker() -> None:
    load = find(look(0.0, beat("a"), requests=20, batch=5)).load
    assert load.backlog_s == pytest.approx(20 * 100 * 0.001)
    assert load.waiting_answers_s == pytest.approx(20 * 50 / (15 / 0.05))
    assert (load.output_tokens, load.context_tokens) == (50.0, 150.0)


def test_workers_are_counted_by_their_state() -> None:
    seen = find(look(100.0, beat("a"), beat("b", "degraded"), beat("c", "loading", 90.0), beat("d", "draining")))
    assert seen.workers["auto"].ready == ("a", "b")
    assert seen.workers["auto"].loading_s == (10.0,)


def test_rows_are_those_whose_step_keeps_to_the_gap() -> None:
    speed = find_speed([beat("a", running=3)], TARGETS, 16)
    assert speed is not None
    assert speed.rows == 15
    assert speed.step_s == pytest.approx(0.05)
    unknown = beat("a")
    unknown["load"]["speed"] = None
    measured = find_speed([unknown], TARGETS, 16)
    assert measured is not None
    assert measured.tokens_per_s == 1000.0, "the measured rate"
    assert find_speed([], TARGETS, 16) is None


def test_without_workers_or_totals_the_load_is_not_known() -> None:
    assert find(look(0.0, requests=3)).load is None
    silent = beat("a")
    del silent["recent"]
    assert find(look(0.0, silent)).missing == ("a tells no totals (its telemetry is off)",)


def test_the_worker_with_the_least_to_lose_goes() -> None:
    beats = [beat("a", running=3), beat("b", running=1), beat("c", "draining"), beat("d", running=2)]
    assert choose_leaver(beats, "auto") == "b"
    assert choose_leaver([*beats, beat("e", "loading")], "auto") == "e"
    assert choose_leaver(beats, "prefill") is None
