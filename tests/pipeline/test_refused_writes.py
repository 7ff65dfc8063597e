"""A record or a log of one request that Redis refuses to change ends that request alone."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.client import Client
from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable, StateMismatch
from penstock.local.valkey import ValkeyServer
from penstock.messages import EndEvent, Request, Sampling
from penstock.names import Pipeline
from penstock.record import AppendOutcome, Record
from penstock.record.log import AsyncTokenLog
from penstock.redis.client import is_outage, redis_client
from sim.line import InProcessPipeline, run_until_idle, run_until_running
from sim.servers import start_or_skip
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import ENGINE_SETTINGS, compute_answers
from tests.gateways import ScriptedPipeline
from tests.record.play import alive, claim_prefill, end, prefill, say

SAMPLING = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = "In the beginning was the word, and it was long enough for several steps of prefill. " * 2
WORK = [Request(id=name, prompt=PROMPT, sampling=SAMPLING) for name in ("a", "bad", "z")]


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(
        record=RecordSettings(lease_s=0.4), engine=ENGINE_SETTINGS.model_copy(update={"max_step_tokens": 16})
    )


def spoil(line: InProcessPipeline, what: str) -> None:
    """Let the record or the log of one request be a string."""
    line.client.set(getattr(line.pipeline, f"{what}_key")("bad"), "no record and no log")


def check(line: InProcessPipeline) -> None:
    """Check that the bad request has one result, an error, and the others have their answers."""
    results = {result.id: result for result in line.run_until_results(3)}
    run_until_idle(line.prefill)
    run_until_idle(line.decode)
    assert len(results) == len(line.read_results()) == 3
    error = results.pop("bad").error
    assert error is not None
    assert error.code == "internal_error"
    expected = compute_answers(WORK)
    assert {name: result.token_ids for name, result in results.items()} == {
        name: expected[name].token_ids for name in ("a", "z")
    }
    assert {len(line.prefill.running), len(line.decode.running)} == {0}
    assert "bad" in [letter.key for letter in line.run_until_dead(1)]


@pytest.mark.parametrize("what", ["record", "log"])
@pytest.mark.parametrize("moment", ["before prefill", "in prefill", "before decode", "in decode"])
def test_it_ends_alone(line: InProcessPipeline, what: str, moment: str) -> None:
    if moment == "before prefill":
        spoil(line, what)
    line.send_requests(*WORK)
    if moment == "in prefill":
        wait_for(lambda: line.prefill.run_once() and "bad" in line.prefill.running, "it runs", 0)
        spoil(line, what)
    if moment in ("before decode", "in decode"):
        line.run_prefill(3)
    if moment == "in decode":
        line.run_until_tokens("bad", 2)
    if "decode" in moment:
        spoil(line, what)
    check(line)


@pytest.mark.parametrize("what", ["record", "log"])
def test_those_that_a_dead_worker_held_with_it_are_taken_over(line: InProcessPipeline, what: str) -> None:
    line.send_requests(*WORK)
    line.run_prefill(3)
    run_until_running(line.decode, 3)
    silent = line.silence_worker("decode", 1)
    spoil(line, what)

    def others_have_ended() -> bool:
        line.decode.run_once()
        found = [line.decode.record.read_status(name) for name in ("a", "z")]
        return all(status is not None and status.stage == "end" for status in found)

    wait_for(others_have_ended, "the others have their answers", 0)
    silent.member.close()  # now the bus gives its deliveries to another
    check(line)


def test_a_wrong_type_of_a_shared_key_is_no_requests_fault(
    record: Record, pipeline: Pipeline, server: "redis.Redis"
) -> None:
    """No request ends by it: the worker does, and says what to do."""
    session = alive(record, "w1")
    server.set(pipeline.free_key("prefill"), "no set")
    with pytest.raises(StateMismatch, match="redis-cli DEL"):
        claim_prefill(record, "r1", session, "b", b"message")


def deny(admin: Any, *rights: str) -> None:
    admin.execute_command("ACL", "SETUSER", "default", *rights)


def close_others(admin: Any) -> None:
    """End all connections but this one: those that are open stay logged in."""
    for kind in ("normal", "pubsub"):
        admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


@pytest.mark.parametrize("what", ["memory", "right"])
def test_a_server_that_takes_no_end_is_an_outage_and_no_requests_fault(
    pipeline: Pipeline, tmp_path: Path, what: str
) -> None:
    """It has no memory, or the right is missing. Nothing is written then, and the end is what it was once it can be."""
    with (
        start_or_skip(ValkeyServer(tmp_path).start) as server,
        redis_client(server.url) as client,
        closing(Record(client, pipeline, RecordSettings(lease_s=600))) as record,
    ):
        claim = prefill(record)
        say(record, claim, [7])
        client.config_set("maxmemory", 1) if what == "memory" else deny(client, "-xadd")
        with pytest.raises(redis.ResponseError) as raised:
            record.finish_request(claim, end())
        assert is_outage(raised.value)
        client.config_set("maxmemory", 0) if what == "memory" else deny(client, "+xadd")
        assert record.finish_request(claim, end()) is AppendOutcome.OK
        assert isinstance(record.read_log(claim.id)[-1], EndEvent)


@pytest.mark.parametrize("how", ["a right", "scripts", "the login"])
def test_a_gateway_that_is_refused_for_a_while_says_503_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is refused before it has read anything of the stream that it accepted."""
    is_denied, has_looked = threading.Event(), threading.Event()
    read = AsyncTokenLog.read_events

    async def read_once_denied(*given: Any) -> Any:
        assert is_denied.wait(PATIENCE_S)
        try:
            return await read(*given)
        finally:
            has_looked.set()

    monkeypatch.setattr(AsyncTokenLog, "read_events", read_once_denied)
    with (
        start_or_skip(ValkeyServer(tmp_path).start) as server,
        redis_client(server.url) as admin,
        ScriptedPipeline(server.url, Pipeline("refused")) as scripted,
        scripted.open_gateway() as gateway,
        gateway.client() as http,
    ):
        body = {"model": scripted.model, "prompt": "x", "max_tokens": 9, "stream": True}
        before = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
        deny(admin, *{"a right": ["-@write"], "scripts": ["-@scripting"], "the login": ["resetpass", ">new"]}[how])
        close_others(admin)
        is_denied.set()
        assert has_looked.wait(PATIENCE_S)
        for path in ("completions", "chat/completions"):
            asked = body | {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else body
            if "chat" in path:
                del asked["prompt"]
            refused = http.post(f"/v1/{path}", json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        deny(admin, "nopass", "+@all")
        with http.stream("POST", "/v1/completions", json=body) as after:
            assert after.status_code == 200
        scripted.finish(before.headers["x-request-id"], 3)
        assert b"[DONE]" in before.read(), "who was reading waits, and has all of it"
    assert "Traceback" not in caplog.text
    told = [line for line in caplog.messages if line.startswith("metering: ")]
    assert len(told) == len(set(told)), "a line is not repeated within a minute"


def test_a_client_that_was_never_let_in_is_told_at_once(tmp_path: Path) -> None:
    with start_or_skip(ValkeyServer(tmp_path).start) as server, redis_client(server.url) as admin:
        deny(admin, "resetpass", ">new")
        with Client(redis=server.url, pipeline="refused") as client, pytest.raises(BusUnavailable, match="Redis: "):
            client.result("r1")
        deny(admin, "nopass")
