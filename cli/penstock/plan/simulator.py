"""A pipeline in virtual time: placers, workers around the engine's own scheduler, KV tiers and heartbeats.

Each worker plans its steps with `penstock.engine.scheduling.scheduler`, and a step takes as long as `StepCost` says.
Requests come at their times, whatever the pipeline does. A request goes to the worker that the rule of its placer
chooses. The worker reads its messages between two steps, and loads cached KV of their prompts during the next step.
Such a prompt therefore begins one step later on a busy worker. The beginning of a prompt is fetched from the tier if
this is faster than to compute it, one fetch after the other. A prefill worker's job goes to the decode worker that the
product's rule chooses; an `auto` worker answers the requests that it reads. `LEFT_OUT` lists what the simulation leaves
out.
"""

import heapq
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from penstock.bus.placement import JobLoad, JobNeed, Placer, WorkerBeat
from penstock.engine.memory.pool import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Plan, State
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.errors import PlanError
from penstock.messages import Sampling
from penstock.names import CLASSES, WorkerKind
from penstock.plan.goodput import Timing
from penstock.plan.placing import Beat, PlacedRequest, Rule, Tier, View, WorkerSpec, plan_fetch

LEFT_OUT = (
    "the time of bus, records and token logs; tenants; early hand-offs of auto workers; requests that "
    "are moved from a full worker; failures and restarts"
)
GREEDY = Sampling(temperature=0.0)
JOB_BEAT_LASTS_S = 3.0
"""After this a heartbeat tells nothing any more."""
MAX_STANDSTILL_STEPS = 1000
"""A simulation fails after this many consecutive empty steps: the scheduler never needs more than a few."""


@dataclass
class Outcome:
    """The outcome of a request."""

    request: PlacedRequest
    worker: int = -1
    """The number of the worker that computed the prompt; -1 if none has."""
    first_s: float = 0.0
    """The time of its first token, in seconds."""
    end_s: float = 0.0
    pool_tokens: int = 0
    """Prompt tokens that were found in that worker's pool."""
    fetched_tokens: int = 0
    """Prompt tokens that were fetched from the tier."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.request.at_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens; 0 for a single one."""
        return (self.end_s - self.first_s) / max(1, self.request.output_tokens - 1)

    def make_timing(self) -> Timing:
        """Return the latencies that the limits of its class are about."""
        return Timing(self.request.priority_class, self.ttft_s, self.itl_s)


class SimulatedWorker:
    """A worker: the real scheduler over a pool without memory."""

    def __init__(self, kind: WorkerKind, spec: WorkerSpec, number: int) -> None:
        self.kind, self.spec, self.number = kind, spec, number
        self.scheduler = Scheduler(BlockPool(spec.num_blocks, spec.block_size))
        self.scheduler.cost, self.scheduler.slo = spec.cost, spec.slo
        self.busy_s = 0.0
        """Seconds in steps."""
        self.link_free_s = 0.0
        """The time at which its last fetch from the tiers ends, in seconds."""
        self.sequences: dict[EngineSequence, None] = {}
        """Those that are not done."""
        self.messages: list[tuple[EngineSequence, Callable[[], None]]] = []
        """Requests that arrived during the current step, each with the function to call when the step ends."""
        self.plan: Plan = []
        """The step that is under way."""

    def add_sequence(self, seq: EngineSequence) -> None:
        """Add a sequence, which the next step may have."""
        self.sequences[seq] = None
        self.scheduler.add_sequence(seq)

    def begin_step(self, now_s: float) -> float:
        """Plan a step; return its seconds, 0 without work. The plan is in `plan`."""
        spec, cost = self.spec, self.spec.cost
        for _ in range(MAX_STANDSTILL_STEPS if self.sequences else 0):
            budget = self.scheduler.choose_budget(spec.max_step_tokens, at_s=now_s)
            self.plan = self.scheduler.schedule(budget, spec.max_batch)
            if self.plan:
                seconds = cost.step_seconds(self.plan)
                self.busy_s += seconds
                return seconds
        assert not self.sequences, "the scheduler stands still"
        return 0.0

    def end_step(self) -> list[EngineSequence]:
        """Note the step's tokens; return the sequences that it gave one."""
        planned, self.plan, sampled = self.plan, [], []
        for seq, num_tokens in planned:
            is_sampled, first = num_tokens == seq.num_pending_tokens, seq.num_computed_tokens
            seq.num_computed_tokens += num_tokens
            self.scheduler.register_blocks(seq, first)
            if is_sampled:
                seq.append_token(0)
                sampled.append(seq)
        return sampled

    def stage_blocks(self, keys: Sequence[bytes]) -> bool:
        """Put fetched blocks into the pool; return whether they fitted. Leading ones that it has are left out."""
        pool = self.scheduler.pool
        had = pool.pin_cached_prefix(list(keys), counted=False)
        fits = len(keys) - len(had) <= pool.num_free_blocks
        blocks = pool.allocate_blocks(len(keys) - len(had)) if fits else []
        for block, key in zip(blocks, keys[len(had) :], strict=False):
            pool.register_block(block, key, is_staged=True)
        pool.free_blocks(had + blocks)
        return fits

    def make_beat(self, now_s: float) -> Beat:
        """Return the heartbeat of this moment."""
        decodes = [seq for seq in self.sequences if seq.num_output_tokens]
        left = dict.fromkeys(CLASSES, 0)
        for seq in (*self.sequences, *(seq for seq, _ in self.messages)):
            left[seq.priority_class] += 0 if seq.num_output_tokens else seq.num_prompt_tokens - seq.num_computed_tokens
        context = sum(seq.num_computed_tokens for seq in decodes)
        speed = self.spec.cost.describe_speed(decodes, self.spec.max_step_tokens)
        return Beat(now_s, sum(left.values()), len(decodes), context, left["batch"], speed)

    def make_job_beat(self, now_s: float, place: int) -> WorkerBeat:
        """Return what a heartbeat tells producers of jobs; `place` stands for the partition that it reads."""
        free = self.scheduler.pool.num_free_blocks
        read = JobLoad(dict.fromkeys(CLASSES, (place,)), len(self.messages), free)
        nothing, tokens = dict.fromkeys(CLASSES, ()), dict.fromkeys(CLASSES, 0)
        until_s = now_s + JOB_BEAT_LASTS_S
        return WorkerBeat(str(place), now_s, until_s, nothing, tokens, None, self.make_beat(now_s).speed, read)


class Simulation:
    """Plays requests against workers."""

    def __init__(
        self,
        fleet: Mapping[WorkerKind, tuple[int, WorkerSpec]],
        rules: Sequence[Rule],
        tiers: Sequence[Tier] = (),
        *,
        way_s: float = 0.0,
        heartbeat_s: float = 1.0,
        heartbeat_delay_s: float = 0.5,
        seed: int = 0,
    ) -> None:
        """`fleet` has how many workers of each kind there are; each of `rules` is that of a placer of its own.

        Workers look into `tiers` in their order, and write to all. Rules that count on a fetch take it to be from the
        last one. `way_s` is how long a request takes to its worker, and its first token back, together. The delay is
        from a heartbeat until placers have read it: they read once a second.
        """
        numbers = count()
        workers = {
            kind: [SimulatedWorker(kind, spec, next(numbers)) for _ in range(num)]
            for kind, (num, spec) in fleet.items()
        }
        self.readers = [*workers.get("prefill", ()), *workers.get("auto", ())]
        self._decoders = [*workers.get("decode", ()), *workers.get("auto", ())]
        assert self.readers, "nobody reads requests"
        assert self._decoders, "nobody decodes"
        spec = self.readers[0].spec
        self._rules, self._tiers = rules, tiers
        self._views = [View(len(self.readers), spec, tiers[-1] if tiers else None, rule.memory_s) for rule in rules]
        self._job_beats: dict[int, WorkerBeat] = {}
        self._job_placers = [Placer() for one in self.readers if one.kind == "prefill"]
        self._way_s, self._heartbeat_s, self._delay_s = way_s, heartbeat_s, heartbeat_delay_s
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now_s, self._num_left = 0.0, 0

    def run(self, requests: Sequence[PlacedRequest]) -> list[Outcome]:
        """Return what becomes of each request. Raises `PlanError` for one that fits no pool."""
        outcomes = [Outcome(request) for request in requests]
        self._num_left = len(outcomes)
        for outcome in outcomes:
            self._at(outcome.request.at_s, partial(self._place, outcome))
        for number in range(len(self.readers)):
            self._at(self._heartbeat_s * number / len(self.readers), partial(self._beat, number))
        for place in range(len(self._decoders) if self._job_placers else 0):
            self._at(self._heartbeat_s * place / len(self._decoders), partial(self._beat_jobs, place))
        while self._num_left:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        return outcomes

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _beat(self, number: int) -> None:
        beat = self.readers[number].make_beat(self._now_s)
        for view in self._views:
            self._at(self._now_s + self._delay_s, partial(view.record_beat, number, beat))
        self._at(self._now_s + self._heartbeat_s, partial(self._beat, number))

    def _beat_jobs(self, place: int) -> None:
        beat = self._decoders[place].make_job_beat(self._now_s, place)
        self._at(self._now_s + self._delay_s, partial(self._note_job_beat, place, beat))
        self._at(self._now_s + self._heartbeat_s, partial(self._beat_jobs, place))

    def _note_job_beat(self, place: int, beat: WorkerBeat) -> None:
        self._job_beats[place] = beat
        for placer in self._job_placers:
            placer.note_beats(self._job_beats.values())

    def _place(self, outcome: Outcome) -> None:
        """Let a placer choose the worker."""
        request, placer = outcome.request, self._random.randrange(len(self._rules))
        rule, view = self._rules[placer], self._views[placer]
        view.begin_request(request, self._now_s)
        outcome.worker = rule.choose_worker(request, view)
        view.record_sent(request, outcome.worker)
        worker = self.readers[outcome.worker]
        seq = self._make_sequence(outcome, worker, view)
        deliver = partial(self._deliver, worker, seq, partial(self._load_prompt, worker, seq))
        self._at(self._now_s + self._way_s, deliver)

    def _deliver(self, worker: SimulatedWorker, seq: EngineSequence, load: Callable[[], None]) -> None:
        """Let a worker read a message now, or when its step is over."""
        if worker.plan:
            worker.messages.append((seq, load))
        else:
            load()

    def _load_prompt(self, worker: SimulatedWorker, seq: EngineSequence) -> None:
        request = seq.context[0].request
        cached = worker.scheduler.pool.count_cached_prefix(seq.block_keys)
        # The last token is computed in any case: its logits are needed.
        size = worker.spec.block_size
        wanted = request.keys[: (request.prompt_tokens - 1) // size]
        found, fetch_s = plan_fetch(self._tiers, worker.number, wanted, cached)
        fetch_s += max(0.0, worker.link_free_s - self._now_s)
        if found <= cached or fetch_s >= worker.spec.prompt_seconds((found - cached) * size, cached * size):
            self._add_sequence(worker, seq)
            return
        worker.link_free_s = self._now_s + fetch_s
        self._at(worker.link_free_s, partial(self._end_fetch, worker, seq, cached, found))

    def _end_fetch(self, worker: SimulatedWorker, seq: EngineSequence, cached: int, found: int) -> None:
        if worker.stage_blocks(seq.block_keys[:found]):
            outcome: Outcome = seq.context[0]
            outcome.fetched_tokens = (found - cached) * worker.spec.block_size
        self._add_sequence(worker, seq)

    def _make_sequence(
        self, outcome: Outcome, worker: SimulatedWorker, view: View, *, is_job: bool = False
    ) -> EngineSequence:
        """Return the sequence of a request, or of its job, which has the first token."""
        request, size = outcome.request, worker.spec.block_size
        num_blocks = -(-(request.prompt_tokens + request.output_tokens - 1) // size)
        if num_blocks > worker.spec.num_blocks:
            raise PlanError(f"{request.id} needs {num_blocks:,} KV blocks, and the pool has {worker.spec.num_blocks:,}")
        seq = EngineSequence(
            request.id,
            [0] * request.prompt_tokens,
            sampling=GREEDY,
            seed=0,
            max_new_tokens=1 if worker.kind == "prefill" else request.output_tokens,
            output_token_ids=[0] if is_job else (),
            block_keys=request.keys[: request.prompt_tokens // size],
            priority_class=request.priority_class,
            since_s=request.at_s,
            context=(outcome, view),
        )
        if is_job:
            # Blocks that no other request shares are fetched by keys, too. The last, partial block comes with the job.
            num_full, num_rest = divmod(request.prompt_tokens, size)
            seq.block_keys = seq.block_keys or [f"{request.id} {index}".encode() for index in range(num_full)]
            seq.tail_payload = b"" if num_rest else None
        return seq

    def _add_sequence(self, worker: SimulatedWorker, seq: EngineSequence) -> None:
        worker.add_sequence(seq)
        if not worker.plan:
            self._begin_step(worker)

    def _begin_step(self, worker: SimulatedWorker) -> None:
        seconds = worker.begin_step(self._now_s)
        if worker.plan:
            self._at(self._now_s + seconds, partial(self._end_step, worker))

    def _end_step(self, worker: SimulatedWorker) -> None:
        for seq in worker.end_step():
            outcome, view = seq.context
            if seq.num_output_tokens == 1:
                self._note_first_token(worker, outcome, view, seq)
            if seq.state is State.DONE:
                self._end_sequence(worker, seq, outcome, view)
        messages, worker.messages = worker.messages, []
        loads = []
        for seq, load in messages:
            if seq.num_output_tokens or self._has_first_block(worker, seq):
                loads.append(load)
            else:  # no tier is asked
                worker.add_sequence(seq)
        self._begin_step(worker)
        for load in loads:
            load()

    def _has_first_block(self, worker: SimulatedWorker, seq: EngineSequence) -> bool:
        """Return whether the pool or a tier has a prompt's first block."""
        if worker.scheduler.pool.count_cached_prefix(seq.block_keys[:1]):
            return True
        return plan_fetch(self._tiers, worker.number, seq.block_keys[:1], 0)[0] > 0

    def _note_first_token(self, worker: SimulatedWorker, outcome: Outcome, view: View, seq: EngineSequence) -> None:
        outcome.first_s = self._now_s
        outcome.pool_tokens = max(0, seq.num_cached_tokens - outcome.fetched_tokens)
        view.record_first_token(outcome.request)
        self._store_blocks(worker, seq.block_keys)

    def _store_blocks(self, worker: SimulatedWorker, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.store_blocks(worker.number, keys)

    def _end_sequence(self, worker: SimulatedWorker, seq: EngineSequence, outcome: Outcome, view: View) -> None:
        request, num_named = outcome.request, len(seq.block_keys)
        num_full = seq.num_computed_tokens // worker.spec.block_size
        worker.scheduler.add_block_keys(seq, list(request.keys[num_named:num_full]))
        worker.scheduler.remove_sequence(seq)
        del worker.sequences[seq]
        self._store_blocks(worker, seq.block_keys[num_named:])
        if seq.num_output_tokens == request.output_tokens:
            outcome.end_s = self._now_s
            view.record_end(request)
            self._num_left -= 1
        else:
            self._hand_off(outcome, view)

    def _hand_off(self, outcome: Outcome, view: View) -> None:
        """Send the job of a request to its decode worker, which has the KV of the prompt once that is fetched."""
        request = outcome.request
        need = JobNeed(
            request.priority_class, request.prompt_tokens // self.readers[outcome.worker].spec.block_size + 1
        )
        places = range(len(self._decoders))
        place = self._job_placers[outcome.worker].choose_job_partition(need, request.id, places, self._now_s)
        worker = self._decoders[zlib.crc32(request.id.encode()) % len(places) if place is None else place]
        seq = self._make_sequence(outcome, worker, view, is_job=True)
        self._deliver(worker, seq, partial(self._load_job, worker, seq))

    def _load_job(self, worker: SimulatedWorker, seq: EngineSequence) -> None:
        keys = seq.block_keys
        cached = worker.scheduler.pool.count_cached_prefix(keys)
        worker.link_free_s = max(worker.link_free_s, self._now_s)
        # The hand-off tier, the last one, has all of a job's blocks.
        worker.link_free_s += self._tiers[-1].fetch_seconds(len(keys) - cached) if self._tiers else 0.0
        self._at(worker.link_free_s, partial(self._end_job_fetch, worker, seq))

    def _end_job_fetch(self, worker: SimulatedWorker, seq: EngineSequence) -> None:
        worker.stage_blocks(seq.block_keys)
        self._add_sequence(worker, seq)
