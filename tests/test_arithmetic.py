"""Workers of one pipeline compute by one arithmetic: a worker that has another one does not start beside them."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from penstock.cli import doctor
from penstock.config.addresses import Addresses
from penstock.errors import ArithmeticDiffers, NameTaken
from penstock.names import Pipeline
from penstock.ops.status import read_heartbeats
from penstock.redis.client import redis_client
from penstock.worker.heartbeat import Heartbeat
from sim.waiting import wait_for

Start = Callable[..., Heartbeat]
FLOAT, HALF = "float32", "bfloat16 on avx2"
INTERVAL_S = 60.0  # so a worker that lives keeps its lease, however slow the machine is


@pytest.fixture(params=["real", "double"])
def client(
    request: pytest.FixtureRequest, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> "Iterator[redis.Redis]":
    """A connection to the server that the heartbeats are on."""
    if request.param == "double":
        fakeredis = pytest.importorskip("fakeredis")
        server = fakeredis.FakeServer(server_type="valkey")
        monkeypatch.setattr("penstock.worker.heartbeat.redis_client", lambda _: fakeredis.FakeRedis(server=server))
        monkeypatch.setattr("penstock.worker.heartbeat.learn_pace", lambda client: client.ping())
        yield fakeredis.FakeRedis(server=server)
        return
    url = request.getfixturevalue("redis_url")
    monkeypatch.setattr("penstock.worker.heartbeat.redis_client", lambda _: redis_client(url))
    with redis_client(url) as made:
        yield made


@pytest.fixture
def start(client: "redis.Redis", pipeline: Pipeline, exits: ExitStack) -> Start:
    """Starts heartbeats: `start(name)`. They end after the test."""

    def make(name: str, stage: str = "decode", is_alive: bool = True, interval_s: float = INTERVAL_S) -> Heartbeat:
        beat = Heartbeat("", pipeline, stage, name, interval_s)
        beat.take_name()
        return exits.enter_context(beat) if is_alive else beat

    return make


def read_words(client: "redis.Redis", pipeline: Pipeline) -> dict[str, Any]:
    return {beat["name"]: beat.get("arithmetic") for beat in read_heartbeats(client, pipeline)}


def renew_until_done(living: list[Heartbeat], *declared: "Future[Any]") -> None:
    """Let workers that live renew their leases until others have heard whether they may start."""
    while wait(declared, timeout=0.3).not_done:
        for beat in living:
            beat.update_status(now=True)


def declare_beside(living: list[Heartbeat], beat: Heartbeat, words: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        declared = pool.submit(beat.declare_arithmetic, words)
        renew_until_done(living, declared)
    declared.result()


@pytest.mark.proof
def test_one_that_computes_otherwise_is_refused_by_name(
    start: Start, client: "redis.Redis", pipeline: Pipeline
) -> None:
    living = [start("first", "prefill"), start("same")]
    for beat in living:
        beat.declare_arithmetic(HALF)
    other = start("other")
    with pytest.raises(
        ArithmeticDiffers, match=rf"other computes in {FLOAT}, and (first|same) of .* in {HALF}: .*MIXED"
    ):
        declare_beside(living, other, FLOAT)
    wait_for(lambda: read_words(client, pipeline) == {"first": HALF, "same": HALF, "other": None}, "it still beats")
    start("elsewhere").declare_arithmetic(HALF)


def test_of_two_that_start_at_once_one_is_refused(start: Start, client: "redis.Redis", pipeline: Pipeline) -> None:
    beats = [start("one"), start("two")]
    barrier = threading.Barrier(2)

    def declare(beat: Heartbeat, words: str) -> str:
        barrier.wait()
        try:
            beat.declare_arithmetic(words)
        except ArithmeticDiffers:
            return ""
        return words

    with ThreadPoolExecutor(2) as pool:
        declared = [pool.submit(declare, beat, words) for beat, words in zip(beats, (FLOAT, HALF), strict=True)]
        renew_until_done(beats, *declared)
    found = [future.result() for future in declared]
    assert sorted(map(bool, found)) == [False, True]
    assert [words for words in read_words(client, pipeline).values() if words] == [words for words in found if words]


def test_one_that_died_is_waited_for_no_longer_than_its_lease(start: Start, client: "redis.Redis") -> None:
    killed = start("killed", is_alive=False, interval_s=0.05)  # its thread is not started: nothing renews it
    killed._status["arithmetic"] = FLOAT
    killed.write_beat()
    start("next").declare_arithmetic(HALF)


def test_one_whose_name_was_taken_while_it_loaded_is_told(
    start: Start, client: "redis.Redis", pipeline: Pipeline
) -> None:
    late, key = start("name", is_alive=False), pipeline.worker_key("decode", "name")
    with late:
        client.set(key, json.dumps({"token": "another", "host": "h", "pid": 1}), px=60_000)
        late.update_status(now=True)
        wait_for(lambda: late._failure is not None, "it hears that its name is taken")
        client.delete(key)  # others read heartbeats, and want more of one
        with pytest.raises(NameTaken):
            late.declare_arithmetic(FLOAT)


def test_a_server_that_forgot_all_is_told_again(start: Start, client: "redis.Redis", pipeline: Pipeline) -> None:
    first = start("first")
    first.declare_arithmetic(HALF)
    client.delete(*client.keys(f"{pipeline.worker_prefix}*"))
    first.update_status(now=True)
    wait_for(lambda: read_words(client, pipeline) == {"first": HALF}, "the next beat says it")
    with pytest.raises(ArithmeticDiffers):
        declare_beside([first], start("other"), FLOAT)


def test_heartbeats_without_words_and_of_other_pipelines_differ_from_none(
    start: Start, client: "redis.Redis", pipeline: Pipeline
) -> None:
    start("an older version")
    beat = Heartbeat("", Pipeline(f"{pipeline.name}-2"), "decode", "elsewhere", INTERVAL_S)
    with beat:
        beat.declare_arithmetic(FLOAT)
        start("new").declare_arithmetic(HALF)
        assert read_words(client, pipeline) == {"an older version": None, "new": HALF}


def test_a_mix_is_accepted_where_that_is_set_and_those_that_are_there_may_start_again(
    start: Start, client: "redis.Redis", pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    start("old").declare_arithmetic(FLOAT)
    with caplog.at_level(logging.WARNING):
        start("new").declare_arithmetic(HALF, is_mix_accepted=True)
    (said,) = (line for line in caplog.messages if "MIXED" in line)
    assert f"new computes in {HALF}, and old in {FLOAT}" in said
    assert read_words(client, pipeline) == {"old": FLOAT, "new": HALF}
    for words in (FLOAT, HALF):
        start(f"another in {words}").declare_arithmetic(words)


def test_the_doctor_says_that_workers_compute_otherwise(addresses: Addresses, pipeline: Pipeline) -> None:
    for name, words in {"one": FLOAT, "two": FLOAT, "three": HALF}.items():
        assert not [finding for finding in doctor._check_workers(addresses) if finding.subject == "arithmetic"]
        beat = Heartbeat(addresses.stream_url, pipeline, "decode", name, 60.0)
        beat.update_status(arithmetic=words)
        beat._declared = True
        beat.write_beat()
    (finding,) = [finding for finding in doctor._check_workers(addresses) if finding.subject == "arithmetic"]
    assert finding.detail == f"workers compute in {HALF}; in {FLOAT}"


@pytest.mark.parametrize("accepted", [False, True])
def test_a_real_worker_refuses_to_start(addresses: Addresses, pipeline: Pipeline, *, accepted: bool) -> None:
    """A worker in float32 is asked for beside one in bfloat16."""
    with Heartbeat(addresses.stream_url, pipeline, "decode", "first", 1.0) as beat:
        beat.declare_arithmetic("bfloat16 on another")
        environment = os.environ | {
            "PENSTOCK_PIPELINE": addresses.pipeline, "PENSTOCK_STREAM_URL": addresses.stream_url,
            "PENSTOCK_KV_STORE_REDIS_MB": "0", "PENSTOCK_WORKER_NAME": "second", "PENSTOCK_ENGINE_DTYPE": "float32",
            "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_MIXED": str(int(accepted)),
        }  # fmt: skip
        command = [sys.executable, "-m", "penstock.cli.main", "worker", "decode"]
        worker = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            if accepted:
                with redis_client(addresses.stream_url) as client:
                    key = pipeline.worker_key("decode", "second")
                    wait_for(lambda: json.loads(client.get(key) or b"{}").get("state") == "ready", "it serves")
                worker.terminate()
            said = worker.communicate()[1]
        finally:
            worker.kill()
    assert ("second computes in float32, and first in bfloat16 on another" in said) == accepted
    assert ("second computes in float32, and first of pipeline" in said) != accepted
    assert worker.returncode == (0 if accepted else 1)
