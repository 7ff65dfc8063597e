"""Where a worker's seconds go: each is a request's, or idle."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock.client.core import prepare_message
from penstock.messages import Request, Sampling, encode_request
from penstock.names import KEY_HEADER, Pipeline, PriorityClass
from penstock.ops.account import Account, Prices, Whose
from penstock.redis.client import redis_client
from penstock.telemetry.seconds import IDLE, Work, WorkSeconds
from penstock.worker.account import COUNT_SECONDS, SecondsAccount
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, run_until_idle


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 50.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


def send(line: InProcessPipeline, name: str, tenant: str, max_tokens: int, priority_class: PriorityClass) -> None:
    """Send a request as a gateway does, under a key that has its tenant's name."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompt = "In the beginning " * 8
    request = Request(id=name, prompt=prompt, sampling=sampling, tenant=tenant, priority_class=priority_class)
    line.publisher.publish([prepare_message(line.pipeline, encode_request(request), key=f"key-{tenant}")[1]])


@pytest.mark.in_memory
@pytest.mark.proof
def test_each_second_of_a_worker_is_a_requests_or_idle(make_line: Callable[..., InProcessPipeline]) -> None:
    """By tenant, key, class and stage, in the worker that read the request and in the one that got the job."""
    line = make_line()
    begun_s = {worker.stage: worker.metrics.seconds._noted_s for worker in (line.prefill, line.decode)}
    send(line, "short", "acme", 4, "interactive")
    send(line, "long", "acme", 40, "batch")
    send(line, "other", "umbra", 40, "interactive")
    line.run_until_results(3)
    results = line.bus.read_all(line.pipeline.results_topic)
    for worker in (line.prefill, line.decode):
        run_until_idle(worker)
        check_sums(worker, time.monotonic() - begun_s[worker.stage])
    assert {message.headers[KEY_HEADER] for message in results} == {"key-acme", "key-umbra"}
    decoded = line.decode.metrics.seconds.copy_sums()
    assert {Work("decode", one, "acme", "key-acme") for one in ("interactive", "batch")} <= decoded.keys()


def check_sums(worker: Worker, lived_s: float) -> None:
    sums = worker.metrics.seconds.copy_sums()
    assert sum(sums.values()) == pytest.approx(lived_s, rel=0.01)
    assert {work.stage for work in sums} == {worker.stage, None}
    owners = {(work.priority_class, work.tenant, work.key) for work in sums if work != IDLE}
    assert owners == {
        ("interactive", "acme", "key-acme"), ("batch", "acme", "key-acme"), ("interactive", "umbra", "key-umbra"),
    }  # fmt: skip
    assert min(sums.values()) > 0


def test_what_the_shares_leave_of_a_turn_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mine = Clock(monkeypatch), Work("prefill", "batch", "acme", "k")
    spent = WorkSeconds()
    clock.now_s += 2.0
    spent.divide_seconds([(mine, 0.75)])
    clock.now_s += 3.0
    spent.divide_seconds()
    assert spent.copy_sums() == {mine: 1.5, IDLE: 3.5}


def test_seconds_whose_reply_was_lost_count_once(
    redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, sums = Work("decode", "interactive", "acme", "k"), dict[Work, float]()
    count = COUNT_SECONDS.run

    def lose_reply(*words: Any) -> None:
        count(*words)
        raise redis.ConnectionError("the reply is lost")

    account = SecondsAccount(pipeline, "auto", "m", "token", lambda: dict(sums))
    with redis_client(redis_url) as client:
        account.write(client, is_last=True)
        sums |= {mine: 1.5, IDLE: 2.0}
        with monkeypatch.context() as lost:
            lost.setattr(COUNT_SECONDS, "run", lose_reply)
            with pytest.raises(redis.ConnectionError):
                account.write(client, is_last=True)
        sums[mine] = 1.75
        account.write(client, is_last=True)  # the same again
        account.write(client, is_last=True)  # what came since
        found: Any = client.hgetall(pipeline.seconds_key(time.strftime("%Y-%m-%d", time.gmtime())))
    told = Account()
    told.add_day({}, found, Prices(worker_hour={"auto": 3600.0}))
    assert told.idle_s == 2.0
    assert told.rows.keys() == {Whose("acme", "k", "m", "interactive")}
    assert told.totals == {"sold": 0, "cost": 1.75, "idle_cost": 2.0, "margin": -3.75}
