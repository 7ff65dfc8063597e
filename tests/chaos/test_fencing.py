"""A worker wakes up after another has its work: the record refuses it; where it does not, the checker sees it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.engine.engine import Sampled
from penstock.messages import EndEvent
from penstock.names import Pipeline
from penstock.record import scripts
from penstock.redis.scripts import Script
from penstock.worker.worker import Worker
from sim.chaos.checker import check_history, count_by_kind
from sim.chaos.history import History, read_history
from sim.line import InProcessPipeline
from sim.workload import compute_answers, make_requests

FENCE = "if r[1] ~= ARGV[3] then return 0 end\n"


def unfenced() -> Script:
    """`append.lua` without its look at the epoch."""
    text = scripts.APPEND.text
    assert text.count(FENCE) == 1
    return Script(text.replace(FENCE, ""))


@pytest.fixture
def line(redis_url: str, pipeline: Pipeline, request: pytest.FixtureRequest) -> Iterator[InProcessPipeline]:
    if getattr(request, "param", "fenced") == "unfenced":
        request.getfixturevalue("monkeypatch").setattr(scripts, "APPEND", unfenced())
    with InProcessPipeline(
        Addresses(pipeline=pipeline.name, stream_url=redis_url), RecordSettings(lease_s=0.6)
    ) as made:
        yield made


def live(line: InProcessPipeline, history: History) -> None:
    """A decode worker falls silent, another takes its request over, and the first wakes up and says something else.

    In floating point numbers of 16 bits that may be; here a zombie would say the same, so it is made to err.
    """
    (request,) = make_requests(1, "zombie")
    answer = compute_answers([request])[request.id]
    expected = {"tokens": answer.token_ids, "text": answer.text, "finish": answer.finish_reason, "may": []}
    history.add_entry("submitted", id=request.id, **expected)
    line.send_requests(request)
    history.add_entry("accepted", id=request.id)
    line.run_prefill(1)
    zombie = line.decode
    while not (zombie.running and zombie.running[request.id].claim.num_tokens > 5):
        zombie.run_once()
    zombie.session.stop()
    line.add_decode("decode-1")
    while request.id not in line.decode.running:
        line.decode.run_once()
    err(zombie)
    while not line.read_results():
        zombie.run_once()
        line.decode.run_once()
    write_down(line, request.id, history)
    zombie.close()


def err(zombie: Worker) -> None:
    """Its next token is another one; that is in its log, or refused, before anybody else has a turn."""
    step = zombie.engine.step
    sampled: list[Sampled] = []
    while not sampled:
        sampled = step()
    (item,) = sampled
    wrong = Sampled(item.seq, (item.token_id + 1) % 1000, item.logprobs)
    zombie._confirm_tokens()
    zombie._append_tokens([wrong])
    zombie._confirm_tokens()


def write_down(line: InProcessPipeline, request_id: str, history: History) -> None:
    """What a reader and the results topic saw."""
    with Client(line.addresses) as client:
        for event in client.stream(request_id, timeout_s=20.0):
            if isinstance(event, EndEvent):
                told = {"finish": event.finish_reason, "count": event.usage.completion_tokens, "error": None}
                history.add_entry("end", id=request_id, reader="first", **told)
            else:
                history.add_entry("token", id=request_id, reader="first", event=event.id, token=event.token)
    for result in line.read_results():
        said = {"tokens": result.token_ids, "text": result.text, "finish": result.finish_reason, "error": None}
        history.add_entry("result", id=result.id, **said)


def test_a_zombie_is_refused(line: InProcessPipeline, tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl") as history:
        live(line, history)
    assert check_history(read_history(history.path)) == []


@pytest.mark.parametrize("line", ["unfenced"], indirect=True)
def test_without_the_fence_the_checker_sees_the_zombie(line: InProcessPipeline, tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl") as history:
        live(line, history)
    assert count_by_kind(check_history(read_history(history.path)))["wrong"] > 0
