"""Lag in tokens: what topics and workers say together, and what a worker takes in."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.bus.contract import Delivery
from penstock.client import AsyncClient, Client
from penstock.config.addresses import Addresses
from penstock.config.settings import EngineSettings, RecordSettings
from penstock.engine.engine import Sampled
from penstock.messages import Request, Sampling, extract_request_id
from penstock.names import CLASSES, STAGES, Pipeline, PriorityClass
from penstock.ops.lag import Lag, PipelineLag, compute_lag
from penstock.ops.live import estimate_prompts_s
from penstock.prefill_worker.role import MAX_WAITING_STEPS
from penstock.running_mean import RunningMean
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import MEAN_MESSAGES, Throughput
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, core_of, serving_engine
from sim.waiting import wait_for
from sim.workload import make_requests
from tests.commands import Terminal
from tests.pipeline.checks import check_tokens

DEMO = Pipeline("demo")
NOTHING = {
    **dict.fromkeys(("requests", "jobs", "in_place", "running", "capacity", "prompt_tokens", "output_tokens"), 0),
    **dict.fromkeys(("mean_prompt_tokens", "mean_output_tokens")),
}


def heartbeat(stage: str, rate: float | None, state: str = "ready", **classes: Mapping[str, object]) -> dict[str, Any]:
    """A heartbeat: `rate` of the stage's work, and what it says of a class."""
    load: dict[str, object] = {
        priority_class: NOTHING | dict(classes.get(priority_class, {})) for priority_class in CLASSES
    }
    load |= {"prompt_tokens_per_s": rate, "output_tokens_per_s": rate}
    return {"stage": stage, "state": state, "load": load}


def lag_of(workers: list[dict[str, Any]], **unsettled: int) -> PipelineLag:
    """`requests_batch=3`: three messages in that topic."""
    counts = {topic: 0 for stage in STAGES for topic in DEMO.input_topics(stage).values()}
    for name, count in unsettled.items():
        counts[f"penstock.demo.{name.replace('_', '.')}"] = count
    return compute_lag(DEMO, counts, workers)


IDLE = [heartbeat("prefill", None), heartbeat("decode", None)]


def test_what_workers_hold_is_told_exactly_and_the_rest_by_recent_means() -> None:
    held = {"requests": 3, "prompt_tokens": 250, "output_tokens": 90}
    held |= {"mean_prompt_tokens": 100, "mean_output_tokens": 40}
    found = lag_of([heartbeat("prefill", 500.0, interactive=held), heartbeat("decode", None)], requests_interactive=10)
    assert found.stages["prefill"]["interactive"] == Lag(10, 250 + 7 * 100, 90 + 7 * 40)
    assert found.stages["prefill"]["batch"] == found.stages["decode"]["interactive"] == Lag(0, 0, 0)


@pytest.mark.proof
def test_the_prompts_that_wait_for_a_worker_are_told_in_seconds() -> None:
    def estimate_by_rate(stage: str, rate: float | None) -> float | None:
        some, more = {"waiting_tokens": 900}, {"waiting_tokens": 100}
        return estimate_prompts_s(heartbeat(stage, rate, interactive=some, batch=more))

    assert estimate_by_rate("auto", 500.0) == 2.0
    assert estimate_prompts_s(heartbeat("prefill", 500.0)) == 0.0
    assert estimate_by_rate("prefill", None) is None, "its rate is not known"
    assert estimate_by_rate("decode", 500.0) is None, "it reads no requests"
    assert estimate_prompts_s({"stage": "prefill", "state": "loading"}) is None


def test_where_nothing_was_measured_nothing_is_made_up() -> None:
    assert lag_of(IDLE).estimated_wait_s() == 0.0
    found = lag_of(IDLE, requests_interactive=1)
    assert found.stages["prefill"]["interactive"] == Lag(1, None, None)
    assert found.estimated_wait_s("interactive") is found.estimated_wait_s("batch") is None
    known = {"mean_prompt_tokens": 100.0, "mean_output_tokens": 40.0}
    without_rate = [
        heartbeat("prefill", None, interactive=known),
        heartbeat("decode", 5.0, interactive={"capacity": 8}),
    ]
    assert lag_of(without_rate, requests_interactive=1).estimated_wait_s() is None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("state", ["loading", "draining", None])
def test_without_a_worker_in_each_stage_no_wait_is_known(stage: str, state: str | None) -> None:
    workers = [worker for worker in IDLE if worker["stage"] != stage]
    if state is not None:
        workers.append(heartbeat(stage, 100.0, state))
    assert lag_of(workers).estimated_wait_s() is None


def test_a_loading_worker_without_a_load_is_no_obstacle() -> None:
    assert lag_of([*IDLE, {"stage": "decode", "state": "loading"}]).estimated_wait_s() == 0.0


def test_batch_lag_does_not_count_for_interactive_and_the_other_way_round_it_does() -> None:
    means = {"mean_prompt_tokens": 100.0, "mean_output_tokens": 10.0}
    prefill = heartbeat("prefill", 1000.0, interactive=means, batch=means)
    decode = heartbeat("decode", 50.0, interactive={"capacity": 100}, batch={"capacity": 100})
    found = lag_of([prefill, decode], requests_interactive=20, requests_batch=60)
    assert found.estimated_wait_s("interactive") == pytest.approx(20 * 100 / 1000)
    assert found.estimated_wait_s("batch") == pytest.approx(80 * 100 / 1000)


def test_workers_add_up_and_one_that_measured_nothing_yet_counts_as_the_others() -> None:
    means = {"mean_prompt_tokens": 100.0, "mean_output_tokens": 10.0}
    decode = heartbeat("decode", None, interactive={"capacity": 100})
    two = [heartbeat("prefill", 500.0, interactive=means), heartbeat("prefill", 1500.0, interactive=means), decode]
    assert lag_of(two, requests_interactive=40).estimated_wait_s() == pytest.approx(2.0)
    third = [*two, heartbeat("prefill", None)]
    assert lag_of(third, requests_interactive=45).estimated_wait_s() == pytest.approx(1.5)


def test_answers_are_waited_for_only_where_there_is_no_place_beside_them() -> None:
    """Ten run, four places are free; 3 requests in prefill and 5 jobs come before the next one."""
    decode = heartbeat(
        "decode", 80.0, interactive={"jobs": 12, "running": 10, "capacity": 4, "mean_output_tokens": 40.0}
    )
    prefill = heartbeat("prefill", 1e9, interactive={"mean_prompt_tokens": 1.0})
    found = lag_of([prefill, decode], requests_interactive=3, jobs_interactive=15)
    assert found.estimated_wait_s() == pytest.approx((3 + 5 - 4) * 40 / 80)
    assert lag_of([prefill, decode], requests_interactive=1, jobs_interactive=12).estimated_wait_s() < 0.001  # type: ignore[operator]


def test_a_request_that_is_decoded_where_it_was_read_is_no_lag_of_prefill() -> None:
    """200 of them run, all in their answers: the next one waits as for a prefill that is idle."""
    held = {"requests": 200, "in_place": 200, "running": 200, "output_tokens": 9000, "capacity": 50}
    means: dict[str, object] = {"mean_prompt_tokens": 100.0, "mean_output_tokens": 90.0}
    auto = heartbeat("auto", 500.0, interactive=held | means, batch=held | means)
    found = lag_of([auto], requests_interactive=200, requests_batch=200)
    assert found.estimated_wait_s() == 0.0
    assert found.queued_batch_s == 0.0
    for priority_class in CLASSES:
        assert found.stages["prefill"][priority_class] == Lag(0, 0, 0)
        assert found.stages["decode"][priority_class].messages == 200


def test_a_mean_forgets() -> None:
    mean = RunningMean(MEAN_MESSAGES)
    assert mean.value is None
    for number in [*[1000.0] * 200, *[10.0] * 400]:
        mean.add(number)
    assert mean.value == pytest.approx(10.0, abs=5.0)


def test_idle_time_does_not_count_for_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("penstock.worker.load.time.monotonic", lambda: clock[0])
    throughput = Throughput()

    def turn(passed_s: float, num_tokens: int, *, is_busy: bool) -> None:
        clock[0] += passed_s
        throughput.record_step(num_tokens, is_busy=is_busy)

    assert throughput.tokens_per_s is None
    turn(0.0, 0, is_busy=True)
    for _ in range(10):
        turn(0.1, 20, is_busy=True)
    assert throughput.tokens_per_s == pytest.approx(200)
    turn(0.1, 20, is_busy=False)
    turn(1000.0, 0, is_busy=True)
    assert throughput.tokens_per_s == pytest.approx(200)
    for _ in range(600):
        turn(0.1, 5, is_busy=True)
    assert throughput.tokens_per_s == pytest.approx(50, rel=0.02)


# On real servers.


@pytest.fixture(params=["embedded", "kafka"])
def addresses(request: pytest.FixtureRequest, redis_url: str, pipeline: Pipeline) -> Addresses:
    kafka = request.getfixturevalue("kafka") if request.param == "kafka" else ""
    return Addresses(pipeline=pipeline.name, stream_url=redis_url, kafka=kafka)


@pytest.fixture
def report(addresses: Addresses) -> Iterator[Callable[[InProcessPipeline], None]]:
    """Has both workers of a pipeline write a heartbeat with what they hold."""
    with ExitStack() as stack:
        beats: dict[str, Heartbeat] = {}

        def now(line: InProcessPipeline) -> None:
            workers: list[tuple[str, Worker]] = [("prefill", line.prefill), ("decode", line.decode)]
            for stage, worker in workers:
                if stage not in beats:
                    beats[stage] = Heartbeat(addresses.stream_url, line.pipeline, stage, f"{stage}-0", 60.0)
                    stack.callback(beats[stage]._redis.close)
                beat = beats[stage]
                beat.set_load_source(lambda report=worker.report_load: {"load": report()})  # type: ignore[misc]
                beat.update_status(state="ready")
                beat.write_beat()

        yield now


def ask(name: str, length: int, max_tokens: int, priority_class: PriorityClass = "interactive") -> Request:
    token_ids = [5 + (len(name) * 31 + int(name[1:]) * 7 + n) % 200 for n in range(length)]
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(id=name, token_ids=token_ids, sampling=sampling, priority_class=priority_class)


def send(line: InProcessPipeline, work: list[Request]) -> None:
    for request in work:
        line.publish_bytes(
            request.encode(), request.id, line.pipeline.request_topic(request.priority_class or "interactive")
        )


def run_until(worker: Worker, until: Callable[[], object], what: str) -> None:
    """Turn a worker until something is so."""

    def now() -> object:
        worker.run_once()
        return until()

    wait_for(now, what, every_s=0)


def test_tokens_and_waits_of_a_pipeline_from_the_first_request_to_the_last(
    addresses: Addresses, report: Callable[[InProcessPipeline], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.lag.MAX_AGE_S", 0.0)
    settings = EngineSettings(dtype="float32", device="cpu", pool_mb=64, max_batch=4)
    with InProcessPipeline(addresses, engine=settings) as line, Client(addresses) as client:
        assert client.estimated_wait() is None  # nobody is there
        send(line, [ask(f"a{n}", 50, 8, "batch") for n in range(6)])
        report(line)
        assert client.lag().stages["prefill"]["batch"] == Lag(6, None, None)
        assert client.estimated_wait() == 0.0
        assert client.estimated_wait("batch") is None
        line.run_until_results(6)
        report(line)
        wait_for(lambda: client.lag().stages["decode"]["batch"] == Lag(0, 0, 0), "nothing lags")
        assert client.estimated_wait("batch") == 0.0

        send(line, [ask(f"b{n}", 50, 8, "batch") for n in range(40)])
        first = client.lag()
        assert first.stages["prefill"]["batch"] == Lag(40, 40 * 50, 40 * 8)
        wait_s = first.estimated_wait_s("batch")
        assert wait_s is not None
        assert wait_s > 0
        assert first.estimated_wait_s("interactive") == 0.0

        # Half of the prompts are handed off. What a Kafka transaction has committed is seen by all a moment later.
        run_until(line.prefill, lambda: client.lag().stages["prefill"]["batch"].messages <= 20, "half of the prompts")
        report(line)
        prefill, decode = (client.lag().stages[stage]["batch"] for stage in STAGES)
        assert prefill.messages * 50 >= (prefill.prompt_tokens or 0)
        assert decode.messages >= 20
        assert (decode.output_tokens or 0) >= 20 * 8
        line.run_until_results(46)
        report(line)
        wait_for(lambda: client.estimated_wait("batch") == 0.0, "nothing lags")

        async def awaited() -> tuple[PipelineLag, float | None]:
            async with AsyncClient(addresses) as other:
                return await other.lag(), await other.estimated_wait("batch")

        assert asyncio.run(awaited()) == (client.lag(), 0.0)


@pytest.mark.proof
def test_the_command_shows_what_waits(terminal: Terminal, redis_url: str, pipeline: Pipeline) -> None:
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url)
    with InProcessPipeline(addresses) as line:
        send(line, [ask(f"a{n}", 50, 8) for n in range(3)])
    environment = {"PENSTOCK_STREAM_URL": redis_url, "PENSTOCK_PIPELINE": pipeline.name}
    done = terminal("lag", "--json", **environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["interactive"]["prefill"] == {"messages": 3, "prompt_tokens": None, "output_tokens": None}
    assert found["interactive"]["estimated_wait_s"] is None
    shown = terminal("lag", **environment)
    assert "interactive" in shown.stdout
    assert "not known" in shown.stdout
    assert terminal("lag").returncode == 1


# What a worker takes in.


@pytest.fixture
def line_of(make_line: Callable[..., InProcessPipeline]) -> Callable[..., InProcessPipeline]:
    """Makes pipelines with settings of their engines.

    No message waits for two leases here: after that it is parked for other workers, and taken back beyond the capacity.
    """

    def make(**engine: Any) -> InProcessPipeline:
        settings = EngineSettings(**{"dtype": "float32", "device": "cpu", "pool_mb": 64, **engine})
        return make_line(record=RecordSettings(lease_s=600), engine=settings)

    return make


LineOf = Callable[..., InProcessPipeline]


def num_jobs(line: InProcessPipeline, priority_class: PriorityClass = "interactive") -> int:
    return len(line.bus.read_all(line.pipeline.job_topic(priority_class)))


@pytest.mark.in_memory
def test_prefill_takes_some_steps_ahead_and_leaves_the_rest_to_others(line_of: LineOf) -> None:
    """Long prompts: places for 32, but what waits beyond those that run is bounded in tokens. All are answered."""
    line, held = line_of(max_step_tokens=64), list[int]()
    send(line, [ask(f"a{n}", 200, 1) for n in range(14)])

    def done() -> bool:
        held.append(serving_engine(line.prefill).count_waiting_tokens("interactive", 200))
        return num_jobs(line) == 14

    run_until(line.prefill, done, "all prompts are handed off")
    assert 200 <= max(held) <= MAX_WAITING_STEPS * 64 + 200
    assert {result.error for result in line.run_until_results(14)} == {None}


@pytest.mark.in_memory
def test_no_more_is_taken_over_than_has_capacity(line_of: LineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    line, taken_ahead = line_of(max_step_tokens=64), list[int]()
    worker = line.prefill

    def note_asked(stage: str, session: str, max_requests: int) -> list[object]:
        num_waiting = serving_engine(worker).count_waiting_tokens("interactive", 200) // 200
        taken_ahead.append(num_waiting + max_requests)
        return []

    monkeypatch.setattr(worker.record, "take_over_free", note_asked)
    send(line, [ask(f"a{n}", 200, 1) for n in range(14)])

    def done() -> bool:
        worker.session._sessions.parts[0].num_free["prefill"] = 9
        worker.run_once()
        return num_jobs(line) == 14

    wait_for(done, "all prompts are handed off", every_s=0)
    assert max(taken_ahead) == 2, "a waiting prompt counts for half of the four steps"
    taken_ahead.clear()
    for count, accept in ((9, False), (0, True)):
        worker.session._sessions.parts[0].num_free["prefill"] = count
        worker.run_once(accept=accept)
    assert not taken_ahead, "neither by a worker that leaves, nor where none is free"


@pytest.mark.in_memory
def test_short_prompts_are_taken_while_a_long_one_waits_behind_another(line_of: LineOf) -> None:
    line = line_of(max_step_tokens=64)
    send(line, [ask(f"a{n}", 960, 1) for n in range(2)])
    run_until(line.prefill, lambda: len(line.prefill.running) == 2, "both long prompts are taken")
    send(line, [ask(f"b{n}", 20, 1) for n in range(3)])
    line.run_prefill(5)
    jobs = [extract_request_id(job.value, None) for job in line.bus.read_all(line.pipeline.job_topic("interactive"))]
    assert jobs == ["b0", "b1", "b2", "a0", "a1"]


@pytest.mark.in_memory
def test_a_prompt_that_no_store_has_is_computed_in_the_turn_that_reads_it(line_of: LineOf) -> None:
    line = line_of(max_step_tokens=64)
    send(line, [ask("a0", 960, 1)])
    run_until(line.prefill, lambda: "a0" in line.prefill.running, "the long prompt is taken")
    send(line, [ask("b1", 20, 1)])
    assert line.prefill.run_once(), "the short prompt is read"
    assert "a0" in line.prefill.running
    task = line.prefill.running.get("b1")  # None once it is handed off
    assert task is None or (task.seq is not None and task.seq.num_computed_tokens == 20)


@pytest.mark.in_memory
def test_decode_takes_no_more_jobs_than_it_has_blocks_for(line_of: LineOf) -> None:
    """A pool for five such jobs and places for 32: the others wait in the topic. All are answered."""
    line, work = line_of(), [ask(f"a{n}", 200, 12) for n in range(14)]
    core = core_of(line.decode)
    core.settings.max_batch = 32
    hold = core.pool.allocate_blocks(core.pool.num_blocks - 5 * 14)
    send(line, work)
    line.run_prefill(14)
    line.decode.load.mean_prompt_tokens["interactive"].add(200)
    most_held = most_waiting = 0

    def done() -> bool:
        nonlocal most_held, most_waiting
        most_held = max(most_held, line.decode.member.count_held())
        most_waiting = max(most_waiting, core.num_waiting)
        return len(line.read_results()) == 14

    run_until(line.decode, done, "all are answered")
    assert most_held <= 12
    assert most_waiting <= 6
    assert core.scheduler.num_preemptions <= 3
    core.pool.free_blocks(hold)
    check_tokens(line.read_results(), work)


def defer_deliveries(line: InProcessPipeline, count: int, wait_s: float) -> None:
    """Let the decode worker get batch jobs, and put them back for a while."""
    deliveries: list[Delivery] = []
    while len(deliveries) < count:  # the first would be answered before a bus brings the second
        deliveries += line.decode.member.poll(1.0, {"batch": count - len(deliveries)})
    for delivery in deliveries:
        line.decode.intake.queue.defer(delivery, wait_s)


@pytest.mark.in_memory
def test_no_more_is_taken_while_fetches_wait_for_room(line_of: LineOf) -> None:
    """Two of three jobs have to be fetched one after the other: the third stays in the topic, interactive passes."""
    line = line_of()
    worker, pool = line.decode, core_of(line.decode).pool
    for priority_class in CLASSES:
        worker.load.mean_prompt_tokens[priority_class].add(16)  # so it believes that there is room for many
    send(line, [ask(f"b{n}", 200, 6, "batch") for n in range(3)])
    run_until(line.prefill, lambda: num_jobs(line, "batch") == 3, "handed off")
    hold = pool.allocate_blocks(pool.num_blocks - 20)  # 13 blocks for one of them
    transfers = serving_engine(worker)._transfers
    defer_deliveries(line, 2, 0.0)
    run_until(worker, lambda: transfers.has_waiting_loads("batch"), "a fetch waits for room")
    assert worker.intake.free_capacity("batch") == 0
    assert worker.intake.free_capacity("interactive") > 0
    assert not transfers.has_waiting_loads("interactive")
    run_until(worker, lambda: len(line.read_results()) == 3, "all are answered")
    pool.free_blocks(hold)


@pytest.mark.in_memory
def test_interactive_overtakes_batch_that_was_put_back_or_is_on_its_way(line_of: LineOf) -> None:
    """Deliveries of batch that wait for a lease or for their KV take no place of what is interactive."""
    line = line_of(max_batch=2)
    send(line, [ask(f"a{n}", 20, 400, "batch") for n in range(2)])
    run_until(line.prefill, lambda: num_jobs(line, "batch") == 2, "handed off")
    defer_deliveries(line, 2, 60.0)
    send(line, [ask("i0", 20, 4)])
    line.run_prefill(1)
    run_until(line.decode, line.read_results, "interactive is answered")
    assert line.read_results()[0].id == "i0"
    assert len(line.decode.intake.queue) == 2


@pytest.mark.in_memory
def test_batch_gives_its_places_up_and_goes_on_without_generating_again(
    line_of: LineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode is full of batch; interactive comes and runs at once. No token is sampled twice, and all are right."""
    batch = [
        request.model_copy(update={"priority_class": "batch"})
        for request in make_requests(4, "batch", max_tokens=400)[2:]
    ]
    quick = [request.model_copy(update={"priority_class": "interactive"}) for request in make_requests(4, "quick")[2:]]
    line, sampled = line_of(max_batch=2, max_step_tokens=128), list[tuple[str, int]]()
    step = core_of(line.decode).finish_step

    def watched() -> list[Sampled]:
        found = step()
        sampled.extend((item.seq.id, item.seq.num_output_tokens) for item in found)
        return found

    monkeypatch.setattr(core_of(line.decode), "finish_step", watched)
    send(line, batch)
    run_until(line.prefill, lambda: num_jobs(line, "batch") == 2, "handed off")
    run_until(line.decode, lambda: len(sampled) > 10, "batch is decoded")
    send(line, quick)
    line.run_prefill(2)
    line.run_until_results(4)
    assert core_of(line.decode).scheduler.num_preemptions >= 1
    assert len(set(sampled)) == len(sampled), "a token was sampled twice"
    for one in quick:
        places = [place for place, (name, _) in enumerate(sampled) if name == one.id]
        beside = [name for name, _ in sampled[places[0] : places[-1]] if name.startswith("batch")]
        assert len(beside) <= len(places), "batch held interactive up"
    check_tokens(line.read_results(), [*batch, *quick])
