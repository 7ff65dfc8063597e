"""A placer reads in heartbeats what workers have left to do, and how old that is."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest
import redis

from penstock.bus.beats import BeatReader
from penstock.bus.placement import JobLoad
from penstock.names import CLASSES, STAGES, WORKERS_KEY, Pipeline
from penstock.redis.client import redis_client
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import TaskLoad, WorkerLoad

HELD: dict[Any, int] = dict.fromkeys(product(CLASSES, STAGES), 1)
WAITING: dict[Any, int] = {"interactive": 3, "batch": 2}
PARTITIONS: dict[Any, list[int]] = {"interactive": [0, 2], "batch": [5]}


@pytest.fixture
def reader(redis_url: str, pipeline: Pipeline) -> Iterator[BeatReader]:
    with closing(BeatReader(redis_url, pipeline)) as made:
        yield made


def write_beat(url: str, pipeline: Pipeline, stage: Any, name: str, **load: Any) -> None:
    beat = Heartbeat(url, pipeline, stage, name, 10.0)
    if load:
        beat.set_load_source(lambda: {"load": load})
    beat.take_name()


def test_what_waits_is_told_by_class_and_as_tokens(redis_url: str, pipeline: Pipeline, reader: BeatReader) -> None:
    load = WorkerLoad()
    load.mean_computed_tokens["interactive"].add(1000)
    load.chars_per_token.add(900, 300)
    running = TaskLoad("interactive", is_running=True, prompt_tokens=70, output_tokens=9)
    told = load.summarize_load([running], HELD, PARTITIONS, WAITING)
    before_s = time.monotonic()
    write_beat(redis_url, pipeline, "prefill", "a", **told)
    write_beat(redis_url, pipeline, "decode", "b", **told)
    write_beat(redis_url, pipeline, "auto", "c")  # it has not joined its group
    decoding, beat = reader.read_beats()
    assert (decoding.worker, beat.worker, beat.chars_per_token) == ("decode:b", "prefill:a", 3.0)
    assert beat.partitions == {"interactive": (0, 2), "batch": (5,)}
    assert beat.waiting_tokens == {"interactive": 3070, "batch": 2 * 256}, "no request of batch was seen yet"
    assert before_s - 0.05 <= beat.at_s <= time.monotonic()
    assert beat.stale_s == pytest.approx(beat.at_s + 30.0), "three periods"


def test_how_old_a_heartbeat_is_follows_from_its_lease(redis_url: str, pipeline: Pipeline, reader: BeatReader) -> None:
    told = WorkerLoad().summarize_load([], HELD, PARTITIONS, WAITING)
    write_beat(redis_url, pipeline, "prefill", "a", **told)
    with redis_client(redis_url) as client:
        client.pexpire(pipeline.worker_key("prefill", "a"), 25_000)  # as it would be 15 s later
    (beat,) = reader.read_beats()
    assert time.monotonic() - 16.0 < beat.at_s <= time.monotonic() - 15.0


def test_what_a_worker_tells_of_jobs(redis_url: str, pipeline: Pipeline, reader: BeatReader) -> None:
    jobs: Any = {"interactive": [1, 3], "batch": []}
    load = WorkerLoad().summarize_load([], HELD, dict.fromkeys(CLASSES, ()), WAITING, jobs, {"interactive": 4})
    beat = Heartbeat(redis_url, pipeline, "decode", "d", 10.0)
    beat.set_load_source(lambda: {"load": load, "pool": {"used": 30, "total": 100}})
    beat.take_name()
    (read,) = reader.read_beats()
    assert read.jobs == JobLoad({"interactive": (1, 3), "batch": ()}, 4, 70)
    older: Any = {"load": {name: value for name, value in load.items() if name not in CLASSES}, "pool": {}}
    for name in CLASSES:
        told: Any = load[name]
        older["load"][name] = {what: told[what] for what in ("partitions", "waiting_tokens")}
    beat.set_load_source(lambda: older)
    beat.write_beat()
    (read,) = reader.read_beats()
    assert read.jobs is None, "a version that does not tell them"


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({"prompt_token_s": 0.002, "idle_prompt_token_s": 0.001, "num_rows": 3}, True),
        ({"prompt_token_s": 0.002, "idle_prompt_token_s": 0.001, "num_rows": 0, "step_s": 0.1, "row_s": 0.01,
          "slowdown": 2, "of_a_later_version": None}, True),
        (None, False),
        ({}, False),
        ({"prompt_token_s": 0.0, "idle_prompt_token_s": 0.001, "num_rows": 3}, False),
        ({"prompt_token_s": 0.002, "idle_prompt_token_s": 0.001, "num_rows": -1}, False),
        ({"prompt_token_s": 0.002, "idle_prompt_token_s": 0.001, "num_rows": 3, "row_s": 0}, False),
        ({"prompt_token_s": float("inf"), "idle_prompt_token_s": 0.001, "num_rows": 3}, False),
        ({"prompt_token_s": "0.002", "idle_prompt_token_s": 0.001, "num_rows": 3}, False),
        ([0.002, 0.001, 3], False),
    ],
)  # fmt: skip
def test_a_speed_is_told_in_seconds_or_unknown(
    told: Any, known: bool, redis_url: str, pipeline: Pipeline, reader: BeatReader
) -> None:
    load = WorkerLoad().summarize_load([], HELD, PARTITIONS, WAITING)
    write_beat(redis_url, pipeline, "prefill", "a", **load, **({} if told is None else {"speed": told}))
    (beat,) = reader.read_beats()
    assert (beat.speed is not None) == known, "its partitions are known all the same"
    if beat.speed is not None:
        assert beat.speed.prompt_token_s == 0.002
        assert {name: told[name] for name in beat.speed.as_json()} == beat.speed.as_json()


@pytest.mark.parametrize(
    "odd", [{"load": {"interactive": {}}}, {"load": 3}, {"load": {"interactive": {"partitions": ["x"]}}}]
)
def test_beside_a_worker_that_does_not_tell_its_partitions_none_is_preferred(
    odd: dict[str, Any], redis_url: str, pipeline: Pipeline, reader: BeatReader
) -> None:
    told = WorkerLoad().summarize_load([], HELD, PARTITIONS, WAITING)
    write_beat(redis_url, pipeline, "prefill", "a", **told)
    key = pipeline.worker_key("auto", "older")
    with redis_client(redis_url) as client:
        client.set(key, json.dumps(odd), px=60_000)
        client.sadd(WORKERS_KEY, key)
        assert reader.read_beats() == []
        client.delete(key)
        assert [beat.worker for beat in reader.read_beats()] == ["prefill:a"]
        client.srem(WORKERS_KEY, key)


def test_redis_that_is_away_is_told(pipeline: Pipeline) -> None:
    with closing(BeatReader("redis://127.0.0.1:1", pipeline)) as reader, pytest.raises(redis.ConnectionError):
        reader.read_beats()
