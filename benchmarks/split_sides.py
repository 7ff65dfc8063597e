"""The processes of `benchmarks.split`: an undivided engine, or prefill and decode with KV blocks handed over.

Each is pinned to its cores and runs windows: in one, some sequences decode all the time, and long prompts arrive at
given times. Clocks are `time.monotonic()`, which all processes of a machine share.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.handover import import_blocks
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence, State
from penstock.messages import Sampling

STREAM_PROMPT, STREAM_NEW = 64, 1024
ANSWER_TOKENS = 16
"""Tokens of the answer to a long prompt."""
NUM_SLOTS = 4
"""The most hand-offs under way."""
_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_jobs = itertools.count()


@dataclass(frozen=True)
class Window:
    """One measurement."""

    begin_s: float
    length_s: float
    num_streams: int
    arrivals: tuple[float, ...]
    """Seconds after the beginning."""
    prompt_tokens: int
    """Tokens of each long prompt."""
    chunk_tokens: int
    """The most prompt tokens in a step."""
    vocabulary: int

    def make_prompt(self, number: int, length: int) -> list[int]:
        """Return a prompt like no other."""
        return [(number * 7919 + at * 104729 + 300) % self.vocabulary for at in range(length)]


@dataclass
class WindowResult:
    """What one process saw of a window."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of a stream."""
    num_output: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    """From each long prompt's arrival to its first token."""


class LiveSequences:
    """An engine and the sequences in it, so that all can be removed at a window's end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._seqs: dict[str, Sequence] = {}

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._seqs[seq.id] = seq
        self.engine.add_sequence(seq)

    def remove_sequence(self, seq: Sequence) -> None:
        """Remove a sequence."""
        self.engine.remove_sequence(self._seqs.pop(seq.id))

    def remove_all(self) -> None:
        """Remove all sequences."""
        for seq in list(self._seqs.values()):
            self.remove_sequence(seq)


class SteadyStreams:
    """The steady streams; one that ends is replaced by another."""

    def __init__(self, live: LiveSequences, window: Window, seen: WindowResult) -> None:
        self._live, self._window, self._seen = live, window, seen
        self._last_s: dict[str, float] = {}
        self._started = 0
        for _ in range(window.num_streams):
            self._start_stream()
        while len(self._last_s) < window.num_streams:
            for one in live.engine.step():
                self._last_s[one.seq.id] = 0.0

    def _start_stream(self) -> None:
        self._started += 1
        prompt = self._window.make_prompt(-self._started, STREAM_PROMPT)
        self._live.add_sequence(
            Sequence(f"stream-{self._started}", prompt, sampling=_GREEDY, seed=0, max_new_tokens=STREAM_NEW)
        )

    def note_token(self, seq: Sequence, now_s: float) -> None:
        """Note a token of a stream; the gap before it counts if all of it is in the window."""
        before_s = self._last_s.get(seq.id, 0.0)
        if before_s >= self._window.begin_s:
            self._seen.gaps_s.append(now_s - before_s)
        self._last_s[seq.id] = now_s
        if seq.state is State.DONE:
            self._live.remove_sequence(seq)
            self._start_stream()


def run_undivided(engine: Engine, window: Window) -> WindowResult:
    """Run streams and long prompts in one engine."""
    live, seen, due = LiveSequences(engine), WindowResult(), list(reversed(list(enumerate(window.arrivals))))

    def arrive(now_s: float) -> None:
        while due and now_s >= window.begin_s + due[-1][1]:
            live.add_sequence(_make_long_sequence(window, due.pop()[0]))

    _run_steps(live, window, seen, arrive)
    return seen


def _run_steps(live: LiveSequences, window: Window, seen: WindowResult, arrive: Callable[[float], None]) -> None:
    """Step until the window is over and has a gap, then remove all sequences."""
    live.engine.settings = live.engine.settings.model_copy(
        update={"max_step_tokens": window.chunk_tokens + window.num_streams}
    )
    streams = SteadyStreams(live, window, seen)
    end_s = window.begin_s + window.length_s
    while (now_s := time.monotonic()) < end_s or not seen.gaps_s:
        arrive(now_s)
        sampled = live.engine.step()
        now_s = time.monotonic()
        for one in sampled:
            seen.num_output += window.begin_s <= now_s
            if one.seq.id.startswith("stream"):
                streams.note_token(one.seq, now_s)
                continue
            if one.seq.num_output_tokens == 1:
                seen.first_tokens_s.append(now_s - window.begin_s - window.arrivals[int(one.seq.id)])
            if one.seq.state is State.DONE:
                live.remove_sequence(one.seq)
    live.remove_all()


def run_prefill(engine: Engine, window: Window, jobs: Connection, memory: SharedMemory) -> WindowResult:
    """Compute long prompts up to their first token; their KV goes into a free slot of the shared memory."""
    engine.settings = engine.settings.model_copy(update={"max_step_tokens": window.chunk_tokens})
    live, seen, free = LiveSequences(engine), WindowResult(), list(range(NUM_SLOTS))
    due = list(reversed(list(enumerate(window.arrivals))))
    _sleep_until(window.begin_s)
    while (now_s := time.monotonic()) < window.begin_s + window.length_s:
        while due and now_s >= window.begin_s + due[-1][1]:
            live.add_sequence(_make_long_sequence(window, due.pop()[0]))
        if not engine.has_work():
            next_s = window.begin_s + (due[-1][1] if due else window.length_s)
            _sleep_until(min(next_s, window.begin_s + window.length_s))
            continue
        for one in engine.step():
            seen.first_tokens_s.append(time.monotonic() - window.begin_s - window.arrivals[int(one.seq.id)])
            seen.num_output += 1
            while jobs.poll(0.0 if free else 1.0):
                free.append(jobs.recv())
            if free:  # else decode is a second behind: the prompt is done, its answer is not waited for
                _hand_off(engine, one.seq, free.pop(), jobs, memory)
            live.remove_sequence(one.seq)
    jobs.send(None)
    live.remove_all()
    return seen


def _hand_off(engine: Engine, seq: Sequence, slot: int, jobs: Connection, memory: SharedMemory) -> None:
    size, blocks = engine.block_bytes, -(-seq.num_prompt_tokens // engine.settings.block_size)
    room = _get_slot(memory, slot)
    for index in range(blocks):
        lent = engine.pin_block(seq, index)
        room[index * size : (index + 1) * size] = lent.payload
        engine.unpin_block(lent)
    jobs.send((seq.id, seq.token_ids, slot, blocks))


def _get_slot(memory: SharedMemory, slot: int) -> memoryview:
    assert memory.buf is not None
    size = len(memory.buf) // NUM_SLOTS
    return memory.buf[slot * size : (slot + 1) * size]


def run_decode(engine: Engine, window: Window, jobs: Connection, memory: SharedMemory) -> WindowResult:
    """Run streams, and the long prompts' other tokens; a slot is free again when its KV was copied."""
    live, seen, is_over = LiveSequences(engine), WindowResult(), False

    def arrive(now_s: float) -> None:
        nonlocal is_over
        while not is_over and jobs.poll():
            job = jobs.recv()
            is_over = job is None
            if job is not None:
                _continue_prompt(live, memory, *job)
                jobs.send(job[2])

    _run_steps(live, window, seen, arrive)
    while not is_over:
        is_over = jobs.recv() is None
    return seen


def _continue_prompt(
    live: LiveSequences, memory: SharedMemory, name: str, tokens: list[int], slot: int, blocks: int
) -> None:
    size, room, job = live.engine.block_bytes, _get_slot(memory, slot), next(_jobs)
    # Nobody has these keys: the same prompt comes again in another window, and is copied again.
    keys = [f"{job} {index}".encode() for index in range((len(tokens) - 1) // live.engine.settings.block_size)]
    seq = Sequence(
        name,
        tokens[:-1],
        sampling=_GREEDY,
        seed=0,
        max_new_tokens=ANSWER_TOKENS,
        output_token_ids=tokens[-1:],
        block_keys=keys,
    )
    import_blocks(live.engine, seq, [room[index * size : (index + 1) * size] for index in range(blocks)])
    if seq.tail_payload is not None:
        seq.tail_payload = bytes(seq.tail_payload)  # the slot is free from now on
    live.add_sequence(seq)


def _make_long_sequence(window: Window, number: int) -> Sequence:
    return Sequence(
        str(number),
        window.make_prompt(number, window.prompt_tokens),
        sampling=_GREEDY,
        seed=0,
        max_new_tokens=ANSWER_TOKENS,
    )


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def run_process(role: str, settings: dict[str, Any], cores: list[int], commands: Connection, jobs: Connection | None,
         memory_name: str | None) -> None:  # fmt: skip
    """Run a process: open the engine on its cores, then answer each window with its result. None ends it."""
    os.sched_setaffinity(0, cores)
    engine = open_engine(EngineSettings.model_validate(settings))
    engine.pool_mapping.wait_until_done()
    commands.send(engine.block_bytes)
    memory = SharedMemory(memory_name) if memory_name else None
    while (window := commands.recv()) is not None:
        if jobs is None or memory is None:
            commands.send(run_undivided(engine, window))
        elif role == "prefill":
            commands.send(run_prefill(engine, window, jobs, memory))
        else:
            commands.send(run_decode(engine, window, jobs, memory))
