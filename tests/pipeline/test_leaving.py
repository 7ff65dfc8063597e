"""A worker that reads requests and jobs hands off what it decodes for each of its causes, and no token is another."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest
from opentelemetry.trace import NonRecordingSpan, Span

from penstock.bus.joined import JoinedMember
from penstock.config.settings import StaySettings
from penstock.engine.contract import EngineEvent, Loaded
from penstock.messages import Request, Sampling
from penstock.prefill_worker.stay import StayPolicy
from penstock.telemetry import tracing
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, core_of, run_until_idle, run_until_running, serving_engine
from tests.pipeline.checks import check_tokens

pytestmark = pytest.mark.in_memory

NUM_PROMPT, NUM_NEW = 40, 60


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The causes of the hand-offs, as their spans have them."""
    found, start_span = list[str](), tracing.start_span

    class HandOff(NonRecordingSpan):
        def set_attributes(self, attributes: Mapping[str, Any]) -> None:
            found.append(attributes["cause"])

    def note_span(name: str, *given: Any, **attributes: Any) -> Span:
        span = start_span(name, *given, **attributes)
        return HandOff(span.get_span_context()) if name == "hand_off" else span

    monkeypatch.setattr(tracing, "start_span", note_span)
    return found


def ask(key: str = "r") -> Request:
    sampling = Sampling(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    return Request(id=key, token_ids=list(range(300, 300 + NUM_PROMPT)), sampling=sampling)


def turn_until_tokens(worker: Worker, key: str, count: int) -> None:
    while key not in worker.running or len(worker.running[key].log_events) < count:
        worker.run_once()


def take_blocks(worker: Worker) -> list[int]:
    """Take the blocks of the request that runs, and all others, as requests before it do that grow. Return them."""
    turn_until_tokens(worker, "r", 30)
    core = core_of(worker)
    core.scheduler.preempt_sequence(core.scheduler.running[0])
    return core.pool.allocate_blocks(core.num_free_blocks)


def without_jobs(worker: Worker) -> Any:
    """Return a context in which a worker is given no jobs: it could take its own."""
    assert isinstance(worker.member, JoinedMember)
    return patch.object(worker.member._jobs, "poll", return_value=[])


def note_loaded(worker: Worker) -> list[Loaded]:
    """Return a list to which what the worker's engine has loaded is added."""
    loaded, engine = list[Loaded](), serving_engine(worker)
    collect = engine.collect_events

    def noted() -> Iterator[EngineEvent]:
        for event in collect():
            loaded.extend([event] if isinstance(event, Loaded) else [])
            yield event

    engine.collect_events = noted  # type: ignore[method-assign]
    return loaded


@pytest.mark.proof
@pytest.mark.parametrize(
    ("cause", "settings", "act", "num_blocks"),
    [
        pytest.param("prompt", StaySettings(max_prompt_tokens=1), run_until_running, 3, id="a long prompt"),
        pytest.param("blocks", StaySettings(), take_blocks, 2, id="no blocks"),  # the last two were not stored yet
    ],
)
def test_what_leaves_goes_on_with_the_kv_that_it_has(
    line: InProcessPipeline,
    causes: list[str],
    cause: str,
    settings: StaySettings,
    act: Callable[[Worker], object],
    num_blocks: int,
) -> None:
    """Its blocks are leased until the answer is complete, those of the answer too."""
    line.send_requests(request := ask())
    stays = StayPolicy(settings, lambda: {"decode"})
    loaded, (shared,) = note_loaded(line.decode), serving_engine(line.decode).store.tiers
    with (
        closing(line.make_auto("auto", stays)) as worker,
        without_jobs(worker),
        patch.object(worker.member, "settle", wraps=worker.member.settle) as settle,
    ):
        act(worker)
        run_until_idle(worker)
    settled = [output for call in settle.call_args_list for one in call.args[0] for output in one.outputs]
    assert [one.job and one.job.sender for one in settled] == ["auto:auto"], "as its heartbeat is named"
    assert causes == [cause]
    assert shared.read_usage().leased == num_blocks
    check_tokens(line.run_until_results(1), [request])
    assert [one.num_tier_blocks for one in loaded] == [num_blocks]
    line.decode.engine.close()
    assert shared.read_usage().leased == 0


def test_an_end_behind_another_claim_is_settled_by_a_job(line: InProcessPipeline) -> None:
    """The first worker may have sent the request on, with its message: the second one does not bind that."""
    line.send_requests(request := ask())
    stays = StayPolicy(StaySettings(), lambda: ())
    with closing(line.make_auto("first", stays)) as first:
        turn_until_tokens(first, "r", 3)
    with closing(line.make_auto("second", stays)) as second, without_jobs(second):
        run_until_idle(second)
        status = second.record.read_status("r")
        assert status is not None
        assert (status.stage, status.bound, line.read_results()) == ("end", "", [])
    check_tokens(line.run_until_results(1), [request])


def test_where_no_other_decodes_what_is_preempted_waits(line: InProcessPipeline, causes: list[str]) -> None:
    line.send_requests(request := ask())
    with closing(line.make_auto("auto", StayPolicy(StaySettings(), lambda: ()))) as worker:
        taken = take_blocks(worker)
        worker.run_once()
        assert not worker.running["r"].is_running
        core_of(worker).pool.free_blocks(taken)
        run_until_idle(worker)
    check_tokens(line.read_results(), [request])
    assert causes == []


def test_where_others_have_prompts_too_a_long_one_stays(line: InProcessPipeline, causes: list[str]) -> None:
    line.send_requests(request := ask())
    stays = StayPolicy(StaySettings(max_prompt_tokens=1), lambda: {"auto"})
    with closing(line.make_auto("auto", stays)) as worker:
        run_until_idle(worker)
    check_tokens(line.read_results(), [request])
    assert causes == []
