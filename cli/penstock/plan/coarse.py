"""A coarse model of the pipeline in virtual time, for a thousand workers and an hour of requests: arrays of numpy.

All workers take their steps at once, each by its own clock. A step takes as long as `StepCost` says, and shares its
tokens between prompts as the scheduler does. The model is coarse in four ways. Requests of one `TICK_S` are placed
together, each by heartbeats and by what its placer has sent, as producers do. A pool is a number of tokens, and a
request reserves all tokens that it will need. Blocks of chats are evicted in the order in which they were written.
Equal consecutive steps are one step. `LEFT_OUT` lists what the simulation leaves out beside that.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.bus.placement import HOME_PROMPTS, MEMORY_S
from penstock.config.settings import PACED_SHARE
from penstock.engine.scheduling.cost import MIN_S
from penstock.engine.scheduling.scheduler import MAX_STEP_S, WAITING_STEPS
from penstock.errors import PlanError
from penstock.plan.placing import WorkerSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEFT_OUT = "tiers below the pool, priority classes, preemption"
ERROR = "on the mean 3% at the median and 8% at the 99th percentile, at most 12% and 23%"
"""As `benchmarks.placement` measures it."""
TICK_S, TICKS_OF_BEAT, TICKS_OF_DELAY = 0.5, 2, 1
"""The time in which requests are placed together; a heartbeat comes once a second, and is read half a second later."""
NUM_PLACERS = 2
MAX_PROMPTS = 16
"""Prompts of a worker that share its steps; the others wait in the order of their arrival."""
LATE_PART, LATE_S = 4, 1.0
"""The simulation does not wait for one worker in `LATE_PART`, if these are at most `LATE_S` seconds late."""
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CoarseLoad:
    """Requests by time. Each array has an element for each of them."""

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    chat: Ints
    """Its number, from 0 on: all turns of a chat have one."""
    earlier_tokens: Ints
    """The number of leading prompt tokens that the chat's turn before and its answer had."""
    system: Ints
    """The number of the beginning that it has in common with other chats, from 0 on."""
    system_tokens: Ints
    """The number of tokens of that beginning; 0 without one."""

    @classmethod
    def without_chats(cls, at_s: Floats, prompt_tokens: Ints, output_tokens: Ints) -> "CoarseLoad":
        """Return requests that share nothing."""
        nothing = np.zeros(len(at_s), np.int64)
        return cls(at_s, prompt_tokens, output_tokens, np.arange(len(at_s)), nothing, nothing, nothing)

    def check_values(self) -> None:
        """Raise `PlanError` if these are no requests."""
        if not len(self.at_s):
            raise PlanError("the trace has no request")
        if not np.isfinite(self.at_s).all() or (np.diff(self.at_s) < 0).any():
            raise PlanError("requests must be in the order of their times")
        if min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise PlanError("each request needs at least one prompt token and one answer token")
        if min(self.chat.min(), self.system.min()) < 0:
            raise PlanError("chats and their common prefixes must be numbered from 0")


@dataclass(frozen=True)
class CoarseOutcome:
    """The outcomes of the requests, in the order of the requests."""

    load: CoarseLoad
    worker: Ints
    first_s: Floats
    end_s: Floats
    pool_tokens: Ints
    """Prompt tokens that were found in the worker's pool."""

    @property
    def ttft_s(self) -> Floats:
        """Seconds to the first token."""
        return self.first_s - self.load.at_s

    @property
    def itl_s(self) -> Floats:
        """Mean seconds between two tokens; 0 for a single one."""
        return (self.end_s - self.first_s) / np.maximum(1, self.load.output_tokens - 1)


class CoarseSimulation:
    """Plays requests against workers of one kind, which answer the requests that they read.

    `workers` has the worker of each request; without it, the product's rules place the requests. `are_jobs` marks
    requests whose prompts were computed elsewhere: their first token here is not the first token of the answer.
    `placers` has the worker that places each job.
    """

    def __init__(
        self,
        num_workers: int,
        spec: WorkerSpec,
        load: CoarseLoad,
        *,
        workers: Ints | None = None,
        placers: Ints | None = None,
        are_jobs: bool = False,
        seed: int = 0,
    ) -> None:
        """Raise `PlanError` if no worker could answer these requests."""
        if num_workers < 1:
            raise PlanError("at least one worker is needed")
        load.check_values()
        self._spec, self._load, self._are_jobs, self._num_workers = spec, load, are_jobs, num_workers
        self._at_s = load.at_s - load.at_s[0]
        self._pool_tokens = spec.num_blocks * spec.block_size
        size, num_requests, num_chats = spec.block_size, len(load.at_s), int(load.chat.max()) + 1
        num_read = load.prompt_tokens + load.output_tokens - (0 if are_jobs else 1)  # no step reads an answer's last
        self._need = -(-num_read // size) * size
        largest = int(self._need.max()) // size
        if largest > spec.num_blocks:
            raise PlanError(f"the largest request needs {largest:,} KV blocks, and the pool has {spec.num_blocks:,}")
        rng = np.random.default_rng(seed)
        self._home = rng.integers(num_workers, size=num_chats)
        self._placer = rng.integers(NUM_PLACERS, size=num_requests) if placers is None else placers
        self._work = np.ones_like(load.prompt_tokens) if are_jobs else load.prompt_tokens
        self._workers = workers
        self._worker = np.zeros(num_requests, np.int64) if workers is None else workers
        self._first_s, self._end_s = np.zeros(num_requests), np.zeros(num_requests)
        self._hits = np.zeros(num_requests, np.int64)
        # Workers. `_steps` counts each worker's steps; an answer ends at the step that its row of `_row_end` says.
        self._clock, self._begun = np.zeros(num_workers), np.zeros(num_workers)
        self._head, self._tail, self._queued, self._num_prompts, self._num_rows, self._context, self._reserved = (
            np.zeros((7, num_workers), np.int64)
        )
        self._head -= 1
        self._next = np.full(num_requests, -1)
        self._steps, self._next_end = np.zeros(num_workers, np.int64), np.full(num_workers, NEVER)
        self._pending, self._done, self._prompt = np.zeros((3, num_workers, MAX_PROMPTS), np.int64)
        self._row_end = np.full((num_workers, spec.max_batch), NEVER)
        self._row = np.zeros((num_workers, spec.max_batch), np.int64)
        # Pools: tokens that were ever written, and their number when a chat or a common prefix was last used.
        self._written = np.zeros(num_workers, np.int64)
        self._chat_worker = np.full(num_chats, -1)
        self._chat_written, self._chat_tokens = np.zeros((2, num_chats), np.int64)
        num_systems = int(load.system.max()) + 1
        self._system_written = np.full((num_workers, num_systems), -NEVER // 2)
        # Placers: the prompt tokens, or jobs, that each believes to be left, and for jobs the tokens in pools; all that
        # it has sent of both; and each chat's last worker.
        num_placers = NUM_PLACERS if placers is None else int(placers.max()) + 1
        self._left, self._sent = np.zeros((2, 2, num_placers, num_workers), np.int64)
        self._beats: list[tuple[slice, Ints, Ints]] = []
        self._sent_worker, self._sent_tokens = np.zeros((2, NUM_PLACERS, num_chats), np.int64)
        self._sent_s = np.full((NUM_PLACERS, num_chats), -np.inf)
        self._system_s = np.full((NUM_PLACERS, num_systems, num_workers), -np.inf)
        self._turns = rng.integers(2**31, size=num_requests)
        self._chances = np.tile(rng.random(num_workers), 2)

    def run(self) -> CoarseOutcome:
        """Return the outcomes of the requests."""
        tick = first = 0
        if self._workers is not None:  # no request waits for a heartbeat: each worker runs by itself
            self._queue_requests(np.arange(len(self._at_s)))
        while self._workers is None and first < len(self._at_s):
            until_s = (tick + 1) * TICK_S
            requests = np.arange(first, first + int(np.searchsorted(self._at_s[first:], until_s)))
            if len(requests):
                if self._are_jobs:
                    self._place_jobs(requests)
                else:
                    self._place_requests(requests, tick * TICK_S)
                self._queue_requests(requests)
            self._take_steps(until_s)
            self._pass_beats(tick)
            first, tick = first + len(requests), tick + 1
        self._take_steps(math.inf)
        begun_s = self._load.at_s[0]
        return CoarseOutcome(self._load, self._worker, self._first_s + begun_s, self._end_s + begun_s, self._hits)

    # Placing

    def _place_requests(self, requests: Ints, now_s: float) -> None:
        """Choose the workers: home, unless its cost is by so much above the least one. Those that leave are few."""
        load = self._load
        for placer in range(NUM_PLACERS):
            mine = requests[self._placer[requests] == placer]
            left, chat, prompt = self._left[0, placer], load.chat[mine], load.prompt_tokens[mine]
            system, system_tokens = load.system[mine], load.system_tokens[mine]
            is_known = now_s - self._sent_s[placer, chat] <= MEMORY_S
            known, last = np.where(is_known, self._sent_tokens[placer, chat], 0), self._sent_worker[placer, chat]
            chosen = self._home[chat]
            has_system = now_s - self._system_s[placer, system, chosen] <= MEMORY_S
            hits = np.maximum(np.where(last == chosen, known, 0), np.where(has_system, system_tokens, 0))
            above = left[chosen] - hits - HOME_PROMPTS * prompt
            may_leave = np.nonzero(above > np.minimum(left.min() - system_tokens, left[last] - known))[0]
            uncached = prompt - hits
            uncached[may_leave] = 0
            np.add.at(left, chosen, uncached)
            for one in may_leave:
                costs = left - system_tokens[one] * (now_s - self._system_s[placer, system[one]] <= MEMORY_S)
                costs[last[one]] = min(costs[last[one]], left[last[one]] - known[one])
                if above[one] > costs.min():
                    best = np.nonzero(costs == costs.min())[0]
                    chosen[one] = best[self._turns[mine[one]] % len(best)]
                uncached[one] = prompt[one] + costs[chosen[one]] - left[chosen[one]]
                left[chosen[one]] += uncached[one]
            np.add.at(self._sent[0, placer], chosen, uncached)
            self._sent_worker[placer, chat], self._sent_tokens[placer, chat] = chosen, prompt
            self._sent_s[placer, chat] = now_s
            self._system_s[placer, system, chosen] = now_s
            self._worker[mine] = chosen

    def _place_jobs(self, requests: Ints) -> None:
        """Choose the workers of jobs: those with the fewest others, of those whose pools have room if there are any."""
        for one in requests:
            placer, turn = self._placer[one], self._turns[one] % self._num_workers
            (others, held), prompt = self._left[:, placer], self._load.prompt_tokens[one]
            costs = others + self._chances[turn : turn + self._num_workers]  # by chance among equal ones
            costs += len(self._at_s) * (held + prompt > self._pool_tokens)
            self._worker[one] = chosen = costs.argmin()
            for sums in (self._left, self._sent):
                sums[:, placer, chosen] += 1, prompt

    def _pass_beats(self, tick: int) -> None:
        """Write the heartbeats of this tick, and let placers read those that are old enough."""
        workers = slice(tick % TICKS_OF_BEAT, None, TICKS_OF_BEAT)
        begun = self._num_rows + self._num_prompts if self._are_jobs else self._pending.sum(axis=1)
        told = np.stack((self._queued + begun, self._context))[:, None, workers]
        self._beats.append((workers, told, self._sent[..., workers].copy()))
        if len(self._beats) > TICKS_OF_DELAY:
            workers, told, sent = self._beats.pop(0)
            self._left[..., workers] = told + self._sent[..., workers] - sent

    def _queue_requests(self, requests: Ints) -> None:
        """Append requests to the queues of their workers."""
        order = requests[np.argsort(self._worker[requests], kind="stable")]
        workers = self._worker[order]
        is_first = np.diff(workers, prepend=-1) != 0
        self._next[order[:-1][~is_first[1:]]] = order[1:][~is_first[1:]]
        first, last = order[is_first], order[np.append(is_first[1:], True)]
        found = workers[is_first]
        is_empty = self._head[found] < 0
        self._head[found[is_empty]] = first[is_empty]
        self._next[self._tail[found[~is_empty]]] = first[~is_empty]
        self._tail[found] = last
        np.add.at(self._queued, workers, self._work[order])

    # Steps

    def _take_steps(self, until_s: float) -> None:
        """Let all workers take steps, until each has passed this time or has no work.

        A few workers may be late, and continue with the steps of the next tick.
        """
        while True:
            is_busy = self._num_rows + self._num_prompts > 0
            workers = np.nonzero((self._clock < until_s) & (is_busy | (self._head >= 0)))[0]
            now_s = self._clock[workers]
            if len(workers) <= self._num_workers // LATE_PART and (now_s > until_s - LATE_S).all():
                return
            is_idle = ~is_busy[workers]
            now_s = np.where(is_idle, np.maximum(now_s, self._at_s[self._head[workers]]), now_s)
            self._admit_prompts(workers, now_s, is_idle)
            heads = self._head[workers]
            self._take_step(workers, now_s, np.where(heads < 0, until_s, np.minimum(self._at_s[heads], until_s)))

    def _count_hits(self, workers: Ints, requests: Ints) -> Ints:
        """Return how many tokens of prompts are in the pools of workers."""
        load, written = self._load, self._written[workers]
        if self._are_jobs:
            return load.prompt_tokens[requests]
        chat, system = load.chat[requests], load.system[requests]
        most = np.minimum(self._chat_tokens[chat], load.earlier_tokens[requests])
        kept = np.maximum(0, np.minimum(self._pool_tokens - written + self._chat_written[chat], most))
        is_kept = self._pool_tokens - written + self._system_written[workers, system] > 0
        hits = np.maximum(
            np.where(self._chat_worker[chat] == workers, kept, 0), np.where(is_kept, load.system_tokens[requests], 0)
        )
        size = self._spec.block_size
        return np.minimum(hits, load.prompt_tokens[requests] - 1) // size * size

    def _admit_prompts(self, workers: Ints, now_s: Floats, is_idle: NDArray[np.bool_]) -> None:
        """Admit waiting prompts in their order, while the batch and the pool have room.

        Prompt tokens found in the pool are loaded during a step, and admitted at its end.
        """
        while True:
            heads = self._head[workers]
            asked = np.nonzero((heads >= 0) & (self._at_s[heads] <= now_s))[0]
            if not len(asked):
                return
            workers, now_s, is_idle, requests = workers[asked], now_s[asked], is_idle[asked], heads[asked]
            hits, count = self._count_hits(workers, requests), self._num_prompts[workers]
            before_s = np.where((hits > 0) & ~is_idle, self._begun[workers], now_s)
            fits = (self._at_s[requests] <= before_s) & (count < MAX_PROMPTS)
            fits &= count + self._num_rows[workers] < self._spec.max_batch
            fits &= self._reserved[workers] + self._need[requests] <= self._pool_tokens
            if not fits.all():
                workers, now_s, is_idle, requests, hits, count = (
                    one[fits] for one in (workers, now_s, is_idle, requests, hits, count)
                )
            prompt, output = self._load.prompt_tokens[requests], self._load.output_tokens[requests]
            self._pending[workers, count], self._done[workers, count] = prompt - hits, hits
            self._prompt[workers, count] = requests
            self._num_prompts[workers] += 1
            self._reserved[workers] += self._need[requests]
            self._queued[workers] -= self._work[requests]
            self._written[workers] += prompt - hits + output
            self._head[workers] = self._next[requests]
            self._hits[requests] = hits

    def _take_step(self, workers: Ints, now_s: Floats, limit_s: Floats) -> None:
        """Take a step, or as many of the same until `limit_s` as none of them ends a prompt or an answer."""
        spec, cost = self._spec, self._spec.cost
        rows = self._num_rows[workers]
        seconds = cost.fixed_s + rows * (cost.row_s + cost.known_outside_s) + cost.context_s * self._context[workers]
        most = self._next_end[workers] - self._steps[workers]
        found = np.nonzero(self._num_prompts[workers])[0]
        if len(found):
            mine = workers[found]
            width = int(self._num_prompts[mine].max())
            pending, done = self._pending[mine, :width], self._done[mine, :width]
            free_s = MAX_STEP_S - seconds[found] - cost.chunk_s
            max_tokens = np.minimum(free_s / max(cost.token_s, 1e-9), WAITING_STEPS * spec.max_step_tokens)
            waiting = pending.sum(axis=1) // WAITING_STEPS
            budget = np.maximum(spec.max_step_tokens, np.minimum(waiting, max_tokens)).astype(np.int64)
            budget = self._bound_by_gap(mine, budget, seconds[found] + cost.chunk_s, now_s[found])
            given = share_tokens(pending, np.maximum(1, budget - rows[found]))
            seconds[found] += (
                cost.chunk_s
                + given.sum(axis=1) * cost.token_s
                + (given * (done + (given - 1) / 2)).sum(axis=1) * cost.known_prompt_context_s
                + self._are_jobs * self._num_prompts[mine] * cost.row_s
            )
            # 0 where a prompt ends. Jobs have no pending tokens, and end at once.
            equal = np.where(given > 0, (pending - 1) // np.maximum(given, 1), 0 if self._are_jobs else NEVER)
            most[found] = np.minimum(most[found], equal.min(axis=1))
        repeated = np.maximum(1, np.minimum(most, np.ceil((limit_s - now_s) / seconds))).astype(np.int64)
        self._begun[workers] = now_s + (repeated - 1) * seconds
        self._clock[workers] = now_s + repeated * seconds
        self._steps[workers] += repeated
        self._context[workers] += rows * repeated
        if len(found):
            given *= repeated[found, None]
            self._pending[mine, :width], self._done[mine, :width] = pending - given, done + given
            self._end_prompts(mine, width)
        ended = workers[self._next_end[workers] <= self._steps[workers]]
        if len(ended):
            self._end_answers(ended)

    def _bound_by_gap(self, workers: Ints, budget: Ints, seconds: Floats, now_s: Floats) -> Ints:
        """Return how many tokens the steps of workers with prompts have, whose other costs are `seconds`: those of the
        longest gap beside answers, or as many as first tokens need to be in time; and `budget` without answers.
        """
        spec, cost, rows = self._spec, self._spec.cost, self._num_rows[workers]
        width = int(self._num_prompts[workers].max())
        pending = self._pending[workers, :width]
        token_s = np.maximum(cost.token_s + cost.known_prompt_context_s * self._done[workers, 0], MIN_S)
        within = np.clip((spec.slo.interactive_gap_s - seconds) // token_s, 0, WAITING_STEPS * spec.max_step_tokens)
        heads, tails = self._head[workers], self._tail[workers]  # of those that wait, the first and the last one count
        num_ahead = pending.cumsum(axis=1)
        num_waiting = np.column_stack([self._load.prompt_tokens[heads], self._queued[workers]])
        num_tokens = np.column_stack([num_ahead, num_ahead[:, -1:] + num_waiting])
        came_s = self._at_s[np.column_stack([self._prompt[workers, :width], heads, tails])]
        waits = (heads[:, None] >= 0) & (came_s[:, width:] <= now_s[:, None])
        asked = np.column_stack([pending > 0, waits])
        patience_s = PACED_SHARE * spec.slo.interactive_ttft_s
        left_s = np.maximum(came_s + patience_s - now_s[:, None] - num_tokens * token_s[:, None], MIN_S)
        needed = np.where(asked, np.ceil(num_tokens * seconds[:, None] / left_s), 0).max(axis=1)
        bounded = (rows + np.maximum(within, np.minimum(needed, budget - rows))).astype(np.int64)
        least_s = cost.fixed_s + cost.chunk_s + cost.row_s + cost.known_outside_s
        return budget if least_s > spec.slo.interactive_gap_s else np.where(rows > 0, bounded, budget)

    def _end_prompts(self, workers: Ints, width: int) -> None:
        """Note the first tokens of prompts that are computed; they are rows from now on."""
        is_over = self._pending[workers, :width] == 0
        is_over &= np.arange(width) < self._num_prompts[workers, None]
        ended = np.nonzero(is_over.any(axis=1))[0]
        if not len(ended):
            return
        workers, is_over = workers[ended], is_over[ended]
        for column in np.nonzero(is_over.any(axis=0))[0]:
            mine = workers[is_over[:, column]]
            requests = self._prompt[mine, column]
            self._first_s[requests] = self._clock[mine]
            self._keep_tokens(mine, requests, self._load.prompt_tokens[requests])
            free, end = self._row_end[mine].argmax(axis=1), self._steps[mine] + self._load.output_tokens[requests] - 1
            self._row_end[mine, free], self._row[mine, free] = end, requests
            self._next_end[mine] = np.minimum(self._next_end[mine], end)
            self._num_rows[mine] += 1
            self._context[mine] += self._load.prompt_tokens[requests]
        order = np.argsort(is_over, axis=1, kind="stable")
        self._num_prompts[workers] -= is_over.sum(axis=1)
        for one in (self._pending, self._done, self._prompt):
            one[workers, :width] = one[workers[:, None], order]

    def _end_answers(self, workers: Ints) -> None:
        """Note the ends of the answers that have all their tokens."""
        number, column = np.nonzero(self._row_end[workers] <= self._steps[workers, None])
        ended = workers[number]
        requests = self._row[ended, column]
        self._end_s[requests] = self._clock[ended]
        self._row_end[ended, column] = NEVER
        self._next_end[workers] = self._row_end[workers].min(axis=1)
        tokens = self._load.prompt_tokens[requests] + self._load.output_tokens[requests]
        np.subtract.at(self._num_rows, ended, 1)
        np.subtract.at(self._context, ended, tokens - 1)
        np.subtract.at(self._reserved, ended, self._need[requests])
        self._keep_tokens(ended, requests, tokens)

    def _keep_tokens(self, workers: Ints, requests: Ints, num_tokens: Ints) -> None:
        """Note the tokens that requests leave in the pools. Later requests evict them."""
        chat, written = self._load.chat[requests], self._written[workers]
        self._chat_worker[chat], self._chat_written[chat], self._chat_tokens[chat] = workers, written, num_tokens
        self._system_written[workers, self._load.system[requests]] = written


def share_tokens(pending: Ints, budget: Ints) -> Ints:
    """Return how many of each worker's pending tokens [workers, prompts] a step computes.

    Prompts are in their order. The first prompt that does not fit shares the rest of the budget with later prompts at
    most half as long.
    """
    ends, budget = np.cumsum(pending, axis=1), budget[:, None]
    fits = ends <= budget
    given: Ints = np.where(fits, pending, 0)
    number = np.nonzero(~fits[:, -1])[0]
    if len(number):
        pending, ends, fits, budget = pending[number], ends[number], fits[number], budget[number]
        at = np.arange(len(number)), fits.argmin(axis=1)
        long_tokens = pending[at][:, None]
        left = budget - ends[at][:, None] + long_tokens
        short = np.where(~fits & (2 * pending <= long_tokens), pending, 0)
        shared = np.minimum(np.maximum(left // 2 - np.cumsum(short, axis=1) + short, 0), short)
        shared[at] = left[:, 0] - shared.sum(axis=1)
        given[number] += shared
    return given
