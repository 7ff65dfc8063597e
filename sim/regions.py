"""Regions in virtual time: workers around the engine's scheduler, gateways that tell each other, the product's rules.

Each region has workers and one gateway. A gateway looks at its own region and asks each peer once a second; what a peer
tells is as old as its heartbeats, its lag and its last look, and half a round trip on its way. `RegionChooser` chooses
the region and `Placer` the worker there. A request that goes to another region takes the round trip, there and back.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from penstock.bus.placement import Placer, average_token_s
from penstock.ingest.regions.choosing import UNSEEN_S, RegionAsk, RegionChoice, RegionChooser, RegionView
from penstock.ingest.regions.peers import LOOK_S
from penstock.ingest.regions.state import ModelState
from penstock.names import CLASSES, STAGES, Pipeline
from penstock.ops.lag import compute_lag
from penstock.plan.placing import Beat, RoundRobin, WorkerSpec
from penstock.plan.simulator import Outcome, SimulatedWorker, Simulation
from sim.placement.rules import translate_beat

MODEL, DEMO = "demo", Pipeline("demo")
NO_LOAD: dict[str, float | None] = {
    **dict.fromkeys(("requests", "jobs", "in_place", "running", "capacity", "prompt_tokens", "output_tokens"), 0),
    **dict.fromkeys(("mean_prompt_tokens", "mean_output_tokens")),
}


class _Known(NamedTuple):
    """A worker's last heartbeat."""

    beat: Beat
    status: Mapping[str, Any]
    """As the lag needs it."""


class RegionsSimulation(Simulation):
    """Plays requests against regions of equal workers. An id begins with the region whose gateway it came to."""

    def __init__(
        self, regions: Mapping[str, int], spec: WorkerSpec, round_trip_s: float, mean_tokens: tuple[float, float]
    ) -> None:
        """`regions` has how many workers each has; `mean_tokens` the tokens of prompts and of answers, on the mean."""
        super().__init__({"auto": (sum(regions.values()), spec)}, [RoundRobin()])
        self._round_trip_s, self._mean_tokens = round_trip_s, mean_tokens
        workers = iter(self.readers)
        self._workers = {region: [next(workers) for _ in range(num)] for region, num in regions.items()}
        self._placers = {region: Placer() for region in regions}
        self._choosers = {region: RegionChooser(region) for region in regions}
        self._known = dict[int, _Known]()
        """By worker, as gateways of its region have read it."""
        self._seen = {region: dict[str, RegionView]() for region in regions}
        """By region: how its gateway sees all regions."""
        self._told = dict[str, ModelState]()
        """What each region tells since its last look."""
        for number, region in enumerate(regions):
            self._at(LOOK_S * number / len(regions), partial(self._look, region))
        self.choices = dict[str, RegionChoice]()
        """By request."""

    def _beat(self, number: int) -> None:
        worker = self.readers[number]
        known = _Known(worker.make_beat(self._now_s), self._describe_worker(worker))
        self._at(self._now_s + self._delay_s, partial(self._note_beat, number, known))
        self._at(self._now_s + self._heartbeat_s, partial(self._beat, number))

    def _note_beat(self, number: int, known: _Known) -> None:
        self._known[number] = known
        for region, workers in self._workers.items():
            found = {one.number: self._known[one.number].beat for one in workers if one.number in self._known}
            self._placers[region].note_beats(translate_beat(str(one), beat) for one, beat in found.items())

    def _describe_worker(self, worker: SimulatedWorker) -> Mapping[str, Any]:
        """Return a heartbeat as `penstock.worker.load` makes it."""
        sequences, prompt_mean, answer_mean = list(worker.sequences), *self._mean_tokens
        decoding = [seq for seq in sequences if seq.num_output_tokens]
        num_running = min(len(sequences), worker.spec.max_batch)
        left = [seq.num_prompt_tokens - seq.num_computed_tokens for seq in sequences if not seq.num_output_tokens]
        load: dict[str, float | None] = NO_LOAD | {
            "requests": len(sequences), "in_place": len(decoding), "running": num_running,
            "capacity": worker.spec.max_batch - num_running, "prompt_tokens": sum(left),
            "output_tokens": sum(seq.max_new_tokens - seq.num_output_tokens for seq in sequences),
            "mean_prompt_tokens": prompt_mean, "mean_output_tokens": answer_mean,
        }  # fmt: skip
        speed = worker.make_beat(self._now_s).speed
        assert speed is not None
        step_s = speed.estimate_step_s() or speed.prompt_token_s
        rates = {
            "prompt_tokens_per_s": 1 / speed.prompt_token_s,
            "output_tokens_per_s": max(1, len(decoding)) / step_s,
        }
        return {"stage": "auto", "state": "ready", "load": {"interactive": load, "batch": NO_LOAD, **rates}}

    def _look(self, region: str) -> None:
        """Have a region's gateway look at its own region, and ask the others."""
        workers = self._workers[region]
        known = [self._known[one.number] for one in workers if one.number in self._known]
        unsettled = {topic: 0 for stage in STAGES for topic in DEMO.input_topics(stage).values()}
        unsettled[DEMO.request_topic("interactive")] = sum(len(one.sequences) + len(one.messages) for one in workers)
        lag = compute_lag(DEMO, unsettled, [one.status for one in known])
        self._told[region] = ModelState(
            fingerprint=None,
            prompt_token_s=average_token_s({str(number): one.beat.speed for number, one in enumerate(known)}),
            num_workers=len(known),
            wait_s={one: lag.waits[one] for one in CLASSES},
            coverage=len(known) / len(workers),
        )
        for other, told in self._told.items():
            way_s = 0.0 if other == region else self._round_trip_s
            at_s = self._now_s + UNSEEN_S + way_s / 2
            self._at(at_s, partial(self._seen[region].update, {other: RegionView(told, way_s, at_s)}))
        self._at(self._now_s + LOOK_S, partial(self._look, region))

    def _place(self, outcome: Outcome) -> None:
        """Let the gateway choose the region, and then the worker."""
        request, region = outcome.request, outcome.request.id.partition("/")[0]
        assert request.chain is not None
        ask = RegionAsk(MODEL, request.priority_class, request.prompt_tokens, request.chain.links)
        choice = self._choosers[region].choose_region(ask, self._seen[region], self._now_s)
        self.choices[request.id] = choice
        way_s = 0.0 if choice.region == region else self._round_trip_s
        numbers = [worker.number for worker in self._workers[choice.region]]
        outcome.worker = self._placers[choice.region].choose_partition(request.chain, numbers, self._now_s).partition
        view, worker = self._views[0], self.readers[outcome.worker]
        view.record_sent(request, outcome.worker)
        seq = self._make_sequence(outcome, worker, view)
        deliver = partial(self._deliver, worker, seq, partial(self._load_prompt, worker, seq))
        self._at(self._now_s + way_s, deliver)
