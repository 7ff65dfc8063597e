"""A hand-off that may have been published goes out under a new job name, made of the message alone."""

import threading
from collections.abc import Callable, Sequence

import pytest

from penstock.bus.contract import Settlement
from penstock.errors import BusUnavailable
from penstock.messages import Job, decode_message
from penstock.worker.loop import run_until_idle
from sim.line import InProcessPipeline
from sim.workload import compute_answers, make_requests


@pytest.mark.in_memory
def test_a_job_whose_publication_is_not_known_goes_out_renamed(
    make_line: Callable[..., InProcessPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, tried, builders = make_line(), list[Job](), list[threading.Thread]()
    member, role = line.prefill.member, line.prefill.role
    settle, build_stage_output = member.settle, role.build_stage_output

    def settle_second_time(settlements: Sequence[Settlement]) -> None:
        tried.extend(decode_message(Job, output.value) for one in settlements for output in one.outputs)
        if len(tried) == 1:
            raise BusUnavailable("the reply is lost")
        settle(settlements)

    def note_thread(task: object) -> object:
        builders.append(threading.current_thread())
        return build_stage_output(task)  # type: ignore[arg-type]

    monkeypatch.setattr(member, "settle", settle_second_time)
    monkeypatch.setattr(role, "build_stage_output", note_thread)
    (request,) = make_requests(1, line.pipeline.name, max_tokens=4)
    line.send_requests(request)
    line.run_prefill(1)
    first, second = tried
    assert first.job != second.job
    assert first.model_copy(update={"job": ""}) == second.model_copy(update={"job": ""})
    assert builders == [threading.current_thread()], "the task is the loop's alone"
    run_until_idle(line.prefill)
    (result,) = line.run_until_results(1)
    assert result.token_ids == compute_answers([request])[request.id].token_ids
