"""An exception about one request, at any place of the loop of prefill and decode, ends that request alone."""

from typing import Any

import pytest

from penstock.messages import Request, Sampling
from penstock.names import Stage
from penstock.record import Claim
from penstock.worker.task import Task
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline

pytestmark = pytest.mark.in_memory

WORDS = "half a pair: \ud800"
TOLD_ONLY = ("_record_load", "record_token", "record_end")
"""What only tells of a request: it is answered all the same."""
PLACES = [
    (Task, "to_claim_request"),
    (Worker, "_record_queue_wait"),
    (Worker, "_replace_older_task"),
    (Task, "start_span"),
    (Worker, "_record_load"),
    ("role", "make_event"),
    (Claim, "next_event"),
    ("role", "record_token"),
    ("role", "build_end_event"),
    ("role", "build_stage_output"),
    ("role", "read_message"),
    ("metrics", "record_end"),
]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize(("owner", "method"), PLACES, ids=[method for _, method in PLACES])
def test_an_exception_about_a_request_ends_that_request_alone(
    stage: Stage, owner: type | str, method: str, line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = line.prefill if stage == "prefill" else line.decode
    target = getattr(worker, owner) if isinstance(owner, str) else owner
    original = getattr(target, method)

    def fail_for_one(*args: Any, **kwargs: Any) -> Any:
        is_bad = any("bad" in (getattr(one, "id", ""), getattr(one, "key", "")) for one in args)
        if (is_bad or method == "record_end") and fail_for_one.is_armed:  # type: ignore[attr-defined]
            raise ValueError(WORDS)
        return original(*args, **kwargs)

    fail_for_one.is_armed = stage == "prefill"  # type: ignore[attr-defined]
    monkeypatch.setattr(target, method, fail_for_one)
    sampling = Sampling(max_tokens=3, temperature=0, ignore_eos=True)
    line.send_requests(*(Request(id=name, prompt="In the beginning", sampling=sampling) for name in ("a", "bad", "z")))
    is_never_claimed = method in ("to_claim_request", "read_message")
    line.run_prefill(2 if is_never_claimed and stage == "prefill" else 3)
    fail_for_one.is_armed = stage == "decode"  # type: ignore[attr-defined]
    results = line.run_until_results(2 if is_never_claimed else 3)
    assert all(len(result.token_ids) == 3 for result in results if result.id != "bad")
    bad = [result for result in results if result.id == "bad"]
    ended_so = stage == "prefill" and method == "build_end_event"  # prefill ends no request that goes on
    if is_never_claimed:
        assert not bad
        assert [letter.key for letter in line.run_until_dead(1)] == ["bad"]
    elif method in TOLD_ONLY or ended_so:
        assert len(bad[0].token_ids) == 3
    else:
        assert bad[0].error is not None
        assert bad[0].error.code == "internal_error"
    assert {len(line.prefill.running), len(line.decode.running)} == {0}
