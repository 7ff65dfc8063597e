"""Workers that pull from one stream, as on Redis Streams, in virtual time. In `Simulation` producers place."""

from collections import deque
from collections.abc import Sequence
from functools import partial

from penstock.bus.placement import WorkerBeat
from penstock.bus.streams.pull import find_share
from penstock.engine.sequence import State
from penstock.names import CLASSES
from penstock.plan.placing import RoundRobin, WorkerSpec
from penstock.plan.simulator import Outcome, SimulatedWorker, Simulation
from penstock.running_mean import RunningMean

MAX_WAITING_STEPS = 4
"""As in the role of prefill workers: prompt tokens for so many steps wait in a worker."""
BEAT_LASTS_S, LOOK_S = 3.0, 0.05


class PullSimulation(Simulation):
    """Plays requests against `auto` workers that take from one stream between their steps, when they have capacity."""

    def __init__(self, specs: Sequence[WorkerSpec], *, leaves: bool = True, way_s: float = 0.0, seed: int = 0) -> None:
        """`leaves`: slow workers leave requests to faster ones."""
        super().__init__({"auto": (len(specs), specs[0])}, [RoundRobin()], way_s=way_s, seed=seed)
        for worker, spec in zip(self.readers, specs, strict=True):
            worker.spec, worker.scheduler.cost = spec, spec.cost
        self._leaves, self._stream = leaves, deque[Outcome]()
        self._told, self._taken_s = dict[str, WorkerBeat](), [list[float]() for _ in specs]
        self._mean_tokens = RunningMean(64)

    def _place(self, outcome: Outcome) -> None:
        """Let a request wait in the stream, and the idle workers look, by chance one after the other."""
        self._views[0].begin_request(outcome.request, self._now_s)
        self._stream.append(outcome)
        for worker in self._random.sample(self.readers, len(self.readers)):
            self._look(worker)

    def _look(self, worker: SimulatedWorker) -> None:
        if not worker.plan and not worker.sequences and self._stream:
            self._begin_step(worker)
            if not worker.plan:
                self._at(self._now_s + LOOK_S, partial(self._look, worker))

    def _begin_step(self, worker: SimulatedWorker) -> None:
        for _ in range(self._count_taken(worker)):
            outcome, view = self._stream.popleft(), self._views[0]
            outcome.worker = worker.number
            view.record_sent(outcome.request, worker.number)
            self._taken_s[worker.number].append(self._now_s)
            self._mean_tokens.add(outcome.request.prompt_tokens)
            worker.add_sequence(self._make_sequence(outcome, worker, view))
        super()._begin_step(worker)

    def _count_taken(self, worker: SimulatedWorker) -> int:
        """Return how many messages a worker takes now: those it has capacity for, less those that it leaves."""
        most_tokens, expected = MAX_WAITING_STEPS * worker.spec.max_step_tokens, round(self._mean_tokens.value or 1)
        counted = min(expected, most_tokens // 2)
        waiting = [seq for seq in worker.sequences if seq.state is State.WAITING]
        left = most_tokens - sum(min(seq.num_prompt_tokens, most_tokens // 2) for seq in waiting)
        num_rows = worker.spec.max_batch - len(worker.sequences)
        count = max(0, min(len(self._stream), left // counted, num_rows if self._mean_tokens.value else 1))
        if not self._leaves or not count:
            return count
        told, name = list(self._told.values()), f"auto:{worker.number}"
        since_s = next((beat.at_s for beat in told if beat.worker == name), 0.0)
        taken_s = [at_s for at_s in self._taken_s[worker.number] if at_s >= since_s]
        if (share := find_share(name, told, taken_s, self._now_s)) is None:
            return count
        is_overdue = self._now_s - self._stream[0].request.at_s >= share.max_wait_s
        return max(min(count, int((len(self._stream) + share.ahead) * share.part)), is_overdue)

    def _beat(self, number: int) -> None:
        worker, nothing = self.readers[number], dict.fromkeys(CLASSES, ())
        beat, name = worker.make_beat(self._now_s), f"auto:{worker.number}"
        tokens = {"interactive": beat.waiting_tokens - beat.batch_tokens, "batch": beat.batch_tokens}
        told = WorkerBeat(
            name, self._now_s, self._now_s + BEAT_LASTS_S, nothing, tokens, speed=beat.speed,  # type: ignore[arg-type]
            mean_prompt_tokens=self._mean_tokens.value, takes_requests=True,
        )  # fmt: skip
        self._at(self._now_s + self._delay_s, partial(self._told.__setitem__, name, told))
        self._at(self._now_s + self._heartbeat_s, partial(self._beat, number))
