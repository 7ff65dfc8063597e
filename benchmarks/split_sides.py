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

from benchmarks.systems import GREEDY
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence, State
from tools.handover import import_blocks

STREAM_PROMPT, STREAM_NEW = 64, 1024
ANSWER_TOKENS = 16
"""Tokens of the answer to a long prompt."""
NUM_SLOTS = 4
"""The most hand-offs under way."""
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

    @property
    def end_s(self) -> float:
        """When the window is over."""
        return self.begin_s + self.length_s

    def make_sequence(self, number: int) -> Sequence:
        """Return the sequence of a long prompt, which is like no other."""
        return self._make(str(number), number, self.prompt_tokens, ANSWER_TOKENS)

    def make_stream(self, number: int) -> Sequence:
        """Return a sequence that decodes all the time."""
        return self._make(f"stream-{number}", -number, STREAM_PROMPT, STREAM_NEW)

    def _make(self, name: str, number: int, length: int, num_new: int) -> Sequence:
        prompt = [(number * 7919 + at * 104729 + 300) % self.vocabulary for at in range(length)]
        return Sequence(name, prompt, sampling=GREEDY, seed=0, max_new_tokens=num_new)


@dataclass
class WindowResult:
    """What one process saw of a window."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of a stream."""
    num_output: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    """From each long prompt's arrival to its first token."""


class RunningWindow:
    """A window in one process: its engine, the sequences in it, and what is seen."""

    def __init__(self, engine: Engine, window: Window, max_step_tokens: int) -> None:
        engine.settings = engine.settings.model_copy(update={"max_step_tokens": max_step_tokens})
        self.engine, self.window, self.seen = engine, window, WindowResult()
        self._seqs = set[Sequence]()
        self._due = list(reversed(list(enumerate(window.arrivals))))
        self._last_s: dict[str, float] = {}
        self._num_started = 0

    def add_sequence(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._seqs.add(seq)
        self.engine.add_sequence(seq)

    def remove_sequences(self, *seqs: Sequence) -> None:
        """Remove sequences: all of them, where none is given."""
        for seq in seqs or list(self._seqs):
            self._seqs.remove(seq)
            self.engine.remove_sequence(seq)

    def add_arrived(self, now_s: float) -> None:
        """Queue the long prompts that have arrived."""
        while self._due and now_s >= self.window.begin_s + self._due[-1][1]:
            self.add_sequence(self.window.make_sequence(self._due.pop()[0]))

    def sleep_until_arrival(self) -> None:
        """Sleep until the next long prompt arrives, or the window is over."""
        _sleep_until(min(self.window.end_s, self.window.begin_s + self._due[-1][1] if self._due else self.window.end_s))

    def note_first_token(self, seq: Sequence, now_s: float) -> None:
        """Note the first token of a long prompt."""
        self.seen.first_tokens_s.append(now_s - self.window.begin_s - self.window.arrivals[int(seq.id)])

    def run_steps(self, arrive: Callable[[float], None]) -> None:
        """Run streams, each of which is replaced where it ends, until the window is over and has a gap."""
        for _ in range(self.window.num_streams):
            self._start_stream()
        while len(self._last_s) < self.window.num_streams:
            self._last_s |= {one.seq.id: 0.0 for one in self.engine.step()}
        while (now_s := time.monotonic()) < self.window.end_s or not self.seen.gaps_s:
            arrive(now_s)
            sampled = self.engine.step()
            now_s = time.monotonic()
            for one in sampled:
                self.seen.num_output += self.window.begin_s <= now_s
                is_stream = one.seq.id.startswith("stream")
                if is_stream:
                    self._note_gap(one.seq, now_s)
                elif one.seq.num_output_tokens == 1:
                    self.note_first_token(one.seq, now_s)
                if one.seq.state is State.DONE:
                    self.remove_sequences(one.seq)
                    if is_stream:
                        self._start_stream()
        self.remove_sequences()

    def _start_stream(self) -> None:
        self._num_started += 1
        self.add_sequence(self.window.make_stream(self._num_started))

    def _note_gap(self, seq: Sequence, now_s: float) -> None:
        """Note a token of a stream; the gap before it counts if all of it is in the window."""
        before_s = self._last_s.get(seq.id, 0.0)
        if before_s >= self.window.begin_s:
            self.seen.gaps_s.append(now_s - before_s)
        self._last_s[seq.id] = now_s


def run_undivided(engine: Engine, window: Window) -> WindowResult:
    """Run streams and long prompts in one engine."""
    running = RunningWindow(engine, window, window.chunk_tokens + window.num_streams)
    running.run_steps(running.add_arrived)
    return running.seen


def run_prefill(engine: Engine, window: Window, jobs: Connection, memory: SharedMemory) -> WindowResult:
    """Compute long prompts up to their first token; their KV goes into a free slot of the shared memory."""
    running, free = RunningWindow(engine, window, window.chunk_tokens), list(range(NUM_SLOTS))
    _sleep_until(window.begin_s)
    while (now_s := time.monotonic()) < window.end_s:
        running.add_arrived(now_s)
        if not engine.has_work():
            running.sleep_until_arrival()
            continue
        for one in engine.step():
            running.note_first_token(one.seq, time.monotonic())
            running.seen.num_output += 1
            while jobs.poll(0.0 if free else 1.0):
                free.append(jobs.recv())
            if free:  # else decode is a second behind: the prompt is done, its answer is not waited for
                _hand_off(engine, one.seq, free.pop(), jobs, memory)
            running.remove_sequences(one.seq)
    jobs.send(None)
    running.remove_sequences()
    return running.seen


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
    running, is_over = RunningWindow(engine, window, window.chunk_tokens + window.num_streams), False

    def arrive(now_s: float) -> None:
        nonlocal is_over
        while not is_over and jobs.poll():
            job = jobs.recv()
            is_over = job is None
            if job is not None:
                running.add_sequence(_take_over(engine, memory, *job))
                jobs.send(job[2])

    running.run_steps(arrive)
    while not is_over:
        is_over = jobs.recv() is None
    return running.seen


def _take_over(engine: Engine, memory: SharedMemory, name: str, tokens: list[int], slot: int, blocks: int) -> Sequence:
    size, room, job = engine.block_bytes, _get_slot(memory, slot), next(_jobs)
    # Nobody has these keys: the same prompt comes again in another window, and is copied again.
    keys = [f"{job} {index}".encode() for index in range((len(tokens) - 1) // engine.settings.block_size)]
    seq = Sequence(
        name, tokens[:-1], sampling=GREEDY, seed=0, max_new_tokens=ANSWER_TOKENS, output_token_ids=tokens[-1:],
        block_keys=keys,
    )  # fmt: skip
    import_blocks(engine, seq, [room[index * size : (index + 1) * size] for index in range(blocks)])
    if seq.tail_payload is not None:
        seq.tail_payload = bytes(seq.tail_payload)  # the slot is free from now on
    return seq


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def run_process(commands: Connection, role: str, settings: dict[str, Any], cores: list[int],
                jobs: Connection | None = None, memory_name: str = "") -> None:  # fmt: skip
    """Run a process: open the engine on its cores, then answer each window with its result. None ends it."""
    os.sched_setaffinity(0, cores)
    engine = open_engine(EngineSettings.model_validate(settings))
    engine.pool_mapping.wait_until_done()
    commands.send(engine.block_bytes)
    memory = SharedMemory(memory_name) if memory_name else None
    while (window := commands.recv()) is not None:
        if jobs is None or memory is None:
            commands.send(run_undivided(engine, window))
        else:
            commands.send((run_prefill if role == "prefill" else run_decode)(engine, window, jobs, memory))
