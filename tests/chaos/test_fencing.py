"""A worker wakes up after another has its work: the record refuses it; where it does not, the checker sees it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.engine.engine import Sampled
from penstock.messages import EndEvent
from penstock.record.append import APPEND
from penstock.redis.scripts import Script
from penstock.worker.worker import Worker
from sim.chaos.checker import check_history, count_by_kind
from sim.chaos.history import History, read_history
from sim.line import InProcessPipeline, core_of, run_until_running
from sim.waiting import PATIENCE_S
from sim.workload import compute_answers, make_requests

FENCE = "if r[1] ~= ARGV[3] then return 0 end\n"


def unfenced() -> Script:
    """`append.lua` without its look at the epoch."""
    text = APPEND.text
    assert text.count(FENCE) == 1
    return Script(text.replace(FENCE, ""))


@pytest.fixture
def line(
    request: pytest.FixtureRequest, make_line: Callable[..., InProcessPipeline], monkeypatch: pytest.MonkeyPatch
) -> InProcessPipeline:
    if getattr(request, "param", "fenced") == "unfenced":
        monkeypatch.setattr("penstock.record.append.APPEND", unfenced())
    return make_line(record=RecordSettings(lease_s=0.6))


def run_zombie(line: InProcessPipeline, history: History) -> None:
    """A decode worker falls silent, another one takes its request over, and the first appends a wrong token.

    In 16 bits it might sample another token; in float32 it would sample the same, so the wrong one is made up.
    """
    (request,) = make_requests(1, "zombie")
    answer = compute_answers([request])[request.id]
    expected = {"tokens": answer.token_ids, "text": answer.text, "calls": [], "finish": answer.finish_reason}
    history.add_entry("submitted", id=request.id, may=[], **expected)
    line.send_requests(request)
    history.add_entry("accepted", id=request.id)
    line.run_prefill(1)
    zombie = line.silence_worker("decode", num_tokens=5)
    run_until_running(line.decode)
    append_wrong_token(zombie)
    while not line.read_results():
        zombie.run_once()
        line.decode.run_once()
    write_history(line, request.id, history)
    zombie.close()


def append_wrong_token(zombie: Worker) -> None:
    """Append a wrong token as the worker's next one; it is in the log, or refused, before another worker has a turn."""
    step = core_of(zombie).step
    sampled: list[Sampled] = []
    while not sampled:
        sampled = step()
    (item,) = sampled
    wrong = Sampled(item.seq, (item.token_id + 1) % 1000, item.logprobs)
    zombie._confirm_tokens()
    zombie._append([wrong])
    zombie._confirm_tokens()


def write_history(line: InProcessPipeline, request_id: str, history: History) -> None:
    """Write what a reader and the results topic saw."""
    text = ""
    with Client(line.addresses) as client:
        for event in client.stream(request_id, timeout_s=PATIENCE_S):
            text += event.text
            if isinstance(event, EndEvent):
                end = {"finish": event.finish_reason, "count": event.usage.completion_tokens, "error": None}
                history.add_entry("end", id=request_id, reader="first", text=text, calls=[], **end)
            else:
                history.add_entry("token", id=request_id, reader="first", event=event.id, token=event.token)
    for result in line.read_results():
        content = {"tokens": result.token_ids, "text": result.text, "finish": result.finish_reason, "error": None}
        history.add_entry("result", id=result.id, **content)


def test_a_zombie_is_refused(line: InProcessPipeline, tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl") as history:
        run_zombie(line, history)
    assert check_history(read_history(history.path)) == []


@pytest.mark.parametrize("line", ["unfenced"], indirect=True)
def test_without_the_fence_the_checker_sees_the_zombie(line: InProcessPipeline, tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl") as history:
        run_zombie(line, history)
    assert count_by_kind(check_history(read_history(history.path)))["wrong"] > 0
