"""The real runs of `benchmarks.roles`: processes on Redis Streams, whose engine sleeps what a step costs.

Loop, scheduler, pool, prefix cache and hand-off are those of every worker; the model alone is replaced. Steps are so
long that two cores have time for all workers beside the reader of all answers, which is this process.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import TIMEOUT_S, Arguments
from benchmarks.placement import SPEC as H200
from benchmarks.placement_sides import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    COST,
    COST_VARIABLE,
    ENVIRONMENT,
    MAX_BATCH,
    MAX_STEP_TOKENS,
    STEPS_VARIABLE,
    Answered,
    SleepingStack,
    encode_cost,
    stretch_cost,
)
from benchmarks.systems import DEMO_ENVIRONMENT, DEMO_TOKENS, draw_tokens, make_request
from penstock.autoscale import controller, service, windows
from penstock.autoscale.controller import Bounds, KindState
from penstock.autoscale.sizing import Targets
from penstock.cli.up import follow_load
from penstock.client.aio import AsyncClient
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings, SloSettings
from penstock.config.sources import variable_name
from penstock.engine.loading.packed import pack_model
from penstock.errors import PenstockError
from penstock.local.stack import Stack
from penstock.names import Pipeline, WorkerKind
from penstock.ops.scaling import read_scaling
from penstock.plan.placing import PlacedRequest, WorkerSpec
from penstock.redis.client import redis_client
from sim import growing
from sim.growing import GrowingSimulation, Lengths, PhasedLoad, compare_predictions, count_turns, find_unit_rate
from sim.waiting import wait_for

SLO = SloSettings()
TARGETS = Targets(SLO.interactive_ttft_s, SLO.interactive_gap_s)
SPEC = WorkerSpec(COST, 2000, BLOCK_TOKENS, MAX_BATCH, MAX_STEP_TOKENS)
STRETCH = 2.0
LONGER = SloSettings(
    interactive_ttft_s=STRETCH * SLO.interactive_ttft_s,
    interactive_itl_s=STRETCH * SLO.interactive_itl_s,
    interactive_gap_s=STRETCH * SLO.interactive_gap_s,
)
TURNING_SPEC = WorkerSpec(
    stretch_cost(H200.cost, STRETCH), 2600, BLOCK_TOKENS, H200.max_batch, H200.max_step_tokens, LONGER
)
"""Steps of `benchmarks.placement`, and limits, all longer by one factor, as two cores have no time for more."""
FLEETS: dict[str, dict[WorkerKind, int]] = {
    "auto": {"auto": 4}, "1_3": {"prefill": 1, "decode": 3}, "2_2": {"prefill": 2, "decode": 2},
    "3_1": {"prefill": 3, "decode": 1},
}  # fmt: skip
NO_WORKERS: dict[WorkerKind, int] = {"prefill": 0, "decode": 0, "auto": 0}
SIGMA, LONGEST = 0.4, CONTEXT_TOKENS - 500
DEMANDS = {
    "1_4": Lengths(prompt=(400, SIGMA), answer=(125, SIGMA), longest=LONGEST),
    "4_1": Lengths(prompt=(1600, SIGMA), answer=(31, SIGMA), longest=LONGEST),
}
"""Half a second of a worker for each request: a prompt token takes 0.24 ms, a token of 48 answers 3 ms."""
TURNS = ("1_4", "4_1", "1_4")
TURNING_RATE = 5.7
"""Requests a second at which in the simulator the best split loses a fifth of its SLO."""
NUM_UNDER_WAY = 192
"""Requests under way at full load: more than any of the fleets answers in time."""
FASTER = 10
SHORT = Lengths(prompt=(230, 0.8), answer=(18, 0.5), longest=LONGEST)
PARTS, PHASE_S, WINDOW_S, UNIT_BUSY = (1, 6, 1), 1800.0, 300.0, 0.7
TIMES = {
    controller: ("WINDOW_S", "FIRST_START_S", "MIN_PATIENCE_S", "LEAVING_S"),
    windows: ("SHORT_S", "LONG_S", "MIN_KNOWN_S"),
    service: ("LOOK_S", "LOOK_AT_ZERO_S"),
    growing: ("LOOK_S",),
}
"""The times of the controller, by module."""


def is_in_time(answered: Answered, slo: SloSettings = SLO) -> bool:
    """Return whether first token and gaps were in time."""
    if answered.is_broken:
        return False
    return answered.ttft_s <= slo.interactive_ttft_s and answered.itl_s <= slo.interactive_itl_s


class Player:
    """Sends requests, and reads their answers."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._name, self._chance = client, name, random.Random(name)
        self.answered = list[Answered]()
        self.begun_s = time.monotonic()

    async def play_request(self, request: PlacedRequest) -> None:
        """Send a request, and read its answer."""
        fields = make_request(draw_tokens(self._chance, request.prompt_tokens), request.output_tokens)
        self.answered.append(answered := Answered(request, time.monotonic() - self.begun_s))
        request_id = await self._client.submit(**fields, id=f"{self._name}-{request.id}")
        await answered.read_answer(self._client, request_id, self.begun_s)

    async def play_trace(self, trace: Sequence[PlacedRequest]) -> None:
        """Send the requests of a trace at their times, whatever becomes of those before them."""

        async def play_at_its_time(request: PlacedRequest) -> None:
            await asyncio.sleep(max(0.0, self.begun_s + request.at_s - time.monotonic()))
            try:
                await self.play_request(request)
            except PenstockError as error:  # it counts as broken
                print(f"{request.id}: {error}", flush=True)

        await asyncio.gather(*map(play_at_its_time, trace))

    async def keep_busy(self, lengths: Lengths, num_under_way: int, seconds: float) -> None:
        """Keep so many requests under way for some seconds, then drop them.

        Of the first ones a random part of the answer is left, as of those that are met in the middle of a run.
        """
        drawn = iter(
            replace(one, output_tokens=max(2, round(one.output_tokens * self._chance.random())))
            if number < num_under_way
            else one
            for number, one in enumerate(lengths.make_trace(lambda _: 100.0, 100.0, 60.0, seed=1))
        )

        async def play_one_after_the_other() -> None:
            while True:
                await self.play_request(next(drawn))

        tasks = [asyncio.create_task(play_one_after_the_other()) for _ in range(num_under_way)]
        done, _ = await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        for one in self.answered:
            if one.is_broken:
                await self._client.cancel(f"{self._name}-{one.request.id}")

    def count_tokens(self, since_s: float, until_s: float) -> int:
        """Return the tokens of a window: an answer's count as they come, a prompt's with the first of them."""
        return sum(
            (one.request.prompt_tokens if index == 0 else 0) + 1
            for one in self.answered
            for index, at_s in enumerate(one.token_s)
            if since_s <= at_s < until_s
        )


@contextmanager
def start_stack(spec: WorkerSpec, fleet: dict[WorkerKind, int], most: int = 0, **more: str) -> Iterator[SleepingStack]:
    """Start workers whose engine sleeps; yield their stack when it is ready. Its notes lie in its directory."""
    with tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory:
        environment = ENVIRONMENT | {
            STEPS_VARIABLE: directory, COST_VARIABLE: encode_cost(spec.cost), "PENSTOCK_KV_STORE_SHARED_MB": "512",
            "PENSTOCK_ENGINE_POOL_MB": str(spec.num_blocks // 10), "PENSTOCK_ENGINE_MAX_BATCH": str(spec.max_batch),
            "PENSTOCK_ENGINE_MAX_STEP_TOKENS": str(spec.max_step_tokens),
            **{variable_name(SloSettings, name): str(getattr(spec.slo, name)) for name in SloSettings.model_fields},
        }  # fmt: skip
        numbers: Any = NO_WORKERS | fleet
        with SleepingStack(
            Path(directory), pipeline="roles", most=most, environment=environment | more, **numbers
        ) as stack:
            stack.wait_until_ready(TIMEOUT_S)
            yield stack


# A demand that turns.


def make_turning_trace(rate: float, phase_s: float) -> list[PlacedRequest]:
    """Return requests of all phases at one rate."""
    found = list[PlacedRequest]()
    for number, name in enumerate(TURNS):
        for one in DEMANDS[name].make_trace(lambda _: rate, rate, phase_s, seed=number):
            at_s = one.at_s + number * phase_s
            found.append(PlacedRequest(f"t{number}{one.id}", at_s, one.prompt_tokens, one.output_tokens))
    return found


async def play_fleet(name: str, given: Arguments) -> dict[str, float]:
    """Return a fleet's tokens a second at full load and, but for a quick run, what became of the trace."""
    warm_s, window_s, phase_s = given.choose_size((60.0, 60.0, 60.0), (12.0, 6.0, 0.0), (0.5, 1.0, 0.5))
    found, spec = dict[str, float](), replace(TURNING_SPEC, cost=H200.cost) if given.size == "smoke" else TURNING_SPEC
    with start_stack(spec, FLEETS[name]) as stack:
        async with AsyncClient(stack.addresses) as client:
            await Player(client, "first").play_request(PlacedRequest("r", 0.0, 16, 4))
            for demand, lengths in DEMANDS.items():
                player = Player(client, f"full-{demand}")
                await player.keep_busy(lengths, NUM_UNDER_WAY, warm_s + window_s)
                found[demand] = player.count_tokens(warm_s, warm_s + window_s) / window_s
                await asyncio.sleep(0.5)  # workers drop what was cancelled
            player = Player(client, "trace")
            await player.play_trace(make_turning_trace(TURNING_RATE, phase_s))
    # As long as equally many requests of each phase take at full load.
    taken = [DEMANDS[one].mean_tokens / max(found[one], 1e-9) for one in TURNS]
    found["full_load"] = sum(DEMANDS[one].mean_tokens for one in TURNS) / sum(taken)
    if answered := player.answered:
        taken_s = max(one.token_s[-1] for one in answered if one.token_s)
        found["whole"] = sum(one.num_tokens for one in answered if not one.is_broken) / taken_s
        found["in_time_tokens"] = sum(one.num_tokens for one in answered if is_in_time(one, LONGER)) / taken_s
        found["in_time"] = statistics.fmean(is_in_time(one, LONGER) for one in answered)
    print(f"{name:5}" + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    return found


def play_turning(given: Arguments) -> dict[str, float]:
    """Compare four `auto` workers with each fixed split."""
    names = given.choose_size(list(FLEETS), list(FLEETS), ["auto", "2_2"])
    found = {name: asyncio.run(play_fleet(name, given)) for name in names}
    ours, splits = found["auto"], [one for name, one in found.items() if name != "auto"]
    figures = {
        f"tokens_s_vs_best_split_{key}": value / max(1e-9, *(one[key] for one in splits))
        for key, value in ours.items()
        if key != "in_time"
    }
    return figures | {f"in_time_{name}": one["in_time"] for name, one in found.items() if "in_time" in one}


# Numbers that follow the load.


@contextmanager
def divide_times(factor: float) -> Iterator[None]:
    """Let all times of the controller be shorter by a factor."""
    with ExitStack() as exits:
        for module, names in TIMES.items():
            for name in names:
                exits.enter_context(mock.patch.object(module, name, getattr(module, name) / factor))
        first = partial(KindState, start_s=controller.FIRST_START_S)
        exits.enter_context(mock.patch.object(controller, "KindState", first))
        yield


@dataclass
class Followed:
    """The numbers of a run, and what was paid."""

    numbers: list[tuple[float, int]] = field(default_factory=list)
    predictions: list[tuple[float, float | None]] = field(default_factory=list)
    worker_seconds: float = 0.0
    starts_s: list[float] = field(default_factory=list)

    async def follow_decisions(self, stack: Stack, keep_numbers: Callable[[], list[str]], begun_s: float) -> None:
        """Do as the controller says, and note it, until cancelled."""
        before_s, waiting = begun_s, dict[str, float]()
        with redis_client(stack.addresses.first_url) as client:
            for turn in itertools.count():
                for line in keep_numbers():
                    print(f"{time.monotonic() - begun_s:6.1f} s: {line}", flush=True)
                now_s = time.monotonic()
                running = [one for one in (*stack.workers, *stack._leaving) if one.child and one.child.is_alive()]  # noqa: SLF001
                self.worker_seconds += len(running) * (now_s - before_s)
                before_s, at_s = now_s, now_s - begun_s
                if not self.numbers or self.numbers[-1][1] != len(stack.workers):
                    self.numbers.append((at_s, len(stack.workers)))
                if turn % 5 == 0:
                    told = read_scaling(client, Pipeline(stack.addresses.pipeline))
                    self.predictions.append((at_s, (told or {}).get("predicted_ttft_p99_s")))
                    stack._describe_states(client)  # noqa: SLF001 - it marks who is ready
                for worker in stack.workers:
                    if not worker.was_ready:
                        waiting[worker.name] = worker.started_at
                    elif worker.name in waiting:
                        self.starts_s.append(now_s - waiting.pop(worker.name))
                await asyncio.sleep(0.1)


def play_growing(given: Arguments) -> dict[str, float]:
    """Let a controller follow 1 : 6 : 1, and compare it with an oracle that knows the trace."""
    phase_s = given.choose_size(PHASE_S / FASTER, 20.0, 1.0)
    load = PhasedLoad(SPEC, TARGETS, SHORT, find_unit_rate(SPEC, TARGETS, SHORT, UNIT_BUSY), PARTS, phase_s)
    trace, bounds, followed = load.make_trace(seed=3), Bounds(least=1, most=6), Followed()
    print(f"{len(trace)} requests, {load.unit_rate:.2f} to {6 * load.unit_rate:.2f} a second")

    async def play_trace(stack: Stack, keep_numbers: Callable[[], list[str]]) -> list[Answered]:
        async with AsyncClient(stack.addresses) as client:
            await Player(client, "first").play_request(PlacedRequest("r", 0.0, 16, 4))
            player = Player(client, "grow")
            following = asyncio.create_task(followed.follow_decisions(stack, keep_numbers, player.begun_s))
            await player.play_trace(trace)
            await asyncio.sleep(max(0.0, player.begun_s + load.seconds - time.monotonic()))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            return player.answered

    with divide_times(FASTER):
        beats = {"PENSTOCK_TESTING": '{"worker_heartbeat_s": 0.2}'}
        with start_stack(SPEC, {"auto": 1}, 6, **beats) as stack, follow_load(stack, bounds) as keep_numbers:
            answered = asyncio.run(play_trace(stack, keep_numbers))
        start_s = statistics.fmean(followed.starts_s) if followed.starts_s else 1.0
        simulation = partial(GrowingSimulation, SPEC, TARGETS, bounds, start_s=start_s)
        best = simulation(oracle=load.make_oracle(start_s)).play_requests(trace, load.seconds)
        planned = simulation().play_requests(trace, load.seconds)
    errors = compare_predictions(
        [(one.at_s, one.ttft_s) for one in answered if one.token_s], followed.predictions, WINDOW_S / FASTER
    )
    figures = {
        "slo_attainment": statistics.fmean(map(is_in_time, answered)),
        "worker_seconds_vs_oracle": followed.worker_seconds / best.worker_seconds,
        "reversals_5min": count_turns(followed.numbers, WINDOW_S / FASTER),
        "start_s": start_s,
    }
    print(
        f"starts of {start_s:.1f} s; worker seconds: the oracle {best.worker_seconds:.0f}, the simulated controller "
        f"{planned.worker_seconds:.0f}, this one {followed.worker_seconds:.0f}: "
        + ", ".join(f"{number} at {at_s:.0f} s" for at_s, number in followed.numbers)
    )
    return figures | ({"prediction_error_p99_run": statistics.fmean(errors)} if errors else {})


# From 8 to 1.


def play_fewer(given: Arguments) -> dict[str, float]:
    """Stop seven of eight workers at once under load, and look for answers that are broken or were begun again."""
    num, length_s = given.choose_size((8, 40.0), (8, 12.0), (2, 1.5))
    lengths = Lengths(prompt=(120, SIGMA), answer=(120, SIGMA))
    rate = find_unit_rate(SPEC, TARGETS, lengths, UNIT_BUSY)
    trace = lengths.make_trace(lambda _: rate, rate, length_s, seed=8)
    burst = [PlacedRequest(f"burst{number}", 0.0, 120, 400) for number in range(num * 3)]

    async def play_trace(stack: Stack) -> list[Answered]:
        async with AsyncClient(stack.addresses) as client:
            player = Player(client, "fewer")
            playing = asyncio.create_task(player.play_trace([*burst, *trace]))
            await asyncio.sleep(length_s / 4)
            print(f"{sum(one.is_broken for one in player.answered)} answers are under way")
            stack.set_number("auto", 1)
            await playing
            return player.answered

    # Who leaves hands on most of what it decodes.
    with start_stack(SPEC, {"auto": num}, PENSTOCK_WORKER_DRAIN_S="0.5") as stack:
        answered = asyncio.run(play_trace(stack))
        again = {one for path in stack.directory.glob("*.again") for one in path.read_text().split()}
    print(f"{len(answered)} requests, {statistics.fmean(map(is_in_time, answered)):.3f} in time")
    return {
        "broken_8_to_1": sum(one.is_broken for one in answered),
        "begun_again_8_to_1": len(again),
    }


# From zero.


def measure_zero(given: Arguments) -> dict[str, float]:
    """Measure the first token of a pipeline at zero, and the start of a worker with packed weights: the demo model."""
    rounds, firsts, starts = given.choose_size(5, 1, 1), list[float](), list[float]()
    with ExitStack() as exits:
        if given.size == "smoke":
            exits.enter_context(divide_times(FASTER))
        directory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-"))
        packed = Path(directory, "demo.packed")
        pack_model(EngineSettings(model="demo", dtype="float32", device="cpu"), packed)
        environment = DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_PACKED": str(packed)}
        how = given.choose_stack()
        with how(Path(directory), pipeline="zero", environment=environment, prefill=0, decode=0, auto=1) as stack:
            for _ in range(given.choose_size(rounds + 1, 2, 1)):  # the first one is left out, if there are more
                (worker,) = stack.workers
                stack.wait_until_ready(TIMEOUT_S)
                starts.append(time.monotonic() - worker.started_at)
                stack.set_number("auto", 0)
                _wait_until_gone(stack)
                stack.set_number("auto", 1)
            stack.wait_until_ready(TIMEOUT_S)
            with Client(stack.addresses) as client, follow_load(stack, Bounds(0, 1, zero_after_s=1.0)) as keep_numbers:
                for _ in range(rounds):
                    wait_for(lambda: keep_numbers() is not None and not stack.workers, "the controller goes to zero")
                    _wait_until_gone(stack)
                    firsts.append(_time_first_token(client, keep_numbers))
    first_s, start_s = statistics.median(firsts), statistics.median(starts[1:] or starts)
    return {"zero_to_first_token_s": first_s, "packed_start_s": start_s, "zero_minus_packed_start_s": first_s - start_s}


def _wait_until_gone(stack: Stack) -> None:
    leaving = [one.child for one in stack._leaving if one.child is not None]  # noqa: SLF001
    wait_for(lambda: not any(child.is_alive() for child in leaving), "all workers have gone")


def _time_first_token(client: Client, keep_numbers: Callable[[], list[str]]) -> float:
    """Return the seconds from a request to its first token, while numbers are kept to as `penstock up` does."""
    begun_s = time.monotonic()
    request_id = client.submit(**make_request(list(DEMO_TOKENS[:64]), 4))

    def wait_for_token() -> float:
        next(client.stream(request_id, timeout_s=TIMEOUT_S))
        return time.monotonic() - begun_s

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(wait_for_token)
        while not first.done():
            for line in keep_numbers():
                print(f"{time.monotonic() - begun_s:.1f} s after the request: {line}", flush=True)
            time.sleep(0.2)
        return first.result()
