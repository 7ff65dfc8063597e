"""What several benchmarks start: a stack, a process at a pipe, an engine of a shape, a request to an engine."""

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import TIMEOUT_S
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.write import make_model_directory
from penstock.client.core import Answer
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine import opening
from penstock.engine.engine import Engine
from penstock.engine.pictures import vision
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.engine.steps.step_batch import StepBatch
from penstock.local.processes import Child
from penstock.local.stack import ProcessSlot, Stack
from penstock.messages import Sampling
from sim.forked import ForkedStack, fork_process, run_penstock

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
DEMO_ENVIRONMENT = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu"}
"""Of workers that have the demo model."""
DEMO_TOKENS = range(3, 1000)
IDLE_TOKEN_ID = 300
"""The token that an engine without a model gives."""
IDLE_STEP_S, IDLE_ROW_S = 4e-4, 8e-5
"""How long its step takes, and each token in it: as long as with a small model, so that as many requests share it."""


@contextmanager
def open_stack(how: type[Stack], environment: Mapping[str, str], **given: Any) -> Iterator[Stack]:
    """Start a stack in a directory of its own; it is ready when this yields."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory,
        how(Path(directory), environment=environment, **given) as stack,
    ):
        stack.wait_until_ready(300)
        yield stack


def list_pids(stack: Stack) -> list[int]:
    """Return the process ids of a stack's workers."""
    return [worker.child.pid for worker in stack.workers if worker.child is not None]


def get_gateway_pid(stack: Stack) -> int:
    """Return the process id of a stack's gateway."""
    assert stack.gateway is not None
    assert stack.gateway.child is not None
    return stack.gateway.child.pid


def make_logits(engine: Engine, token_id: int) -> Tensor:
    """Return logits [1, vocabulary] by which this token follows."""
    logits = torch.zeros(1, engine.model.vocab_size)
    logits[0, token_id] = 1.0
    return logits


def open_idle_engine(open_engine: Callable[..., Engine], *given: Any, **how: Any) -> Engine:
    """Open an engine whose steps compute nothing, but take a moment: the same token follows everywhere."""
    engine = open_engine(*given, **how)
    logits = make_logits(engine, IDLE_TOKEN_ID)

    def run_step(batch: StepBatch) -> Tensor:
        time.sleep(IDLE_STEP_S + IDLE_ROW_S * batch.num_tokens)
        return logits.expand(max(1, batch.num_kept_rows), -1)

    engine.runner.run_step = run_step  # type: ignore[method-assign]
    return engine


def run_without_model(*arguments: str) -> None:
    """Run the `penstock` command with engines that compute nothing."""
    opening.open_engine = partial(open_idle_engine, opening.open_engine)
    run_penstock(*arguments)


class IdleEngineStack(ForkedStack):
    """A stack whose engines compute nothing."""

    def _start_child(self, slot: ProcessSlot, arguments: list[str], environment: Mapping[str, str]) -> Child:
        return fork_process(slot.name, self._log_path(slot), run_without_model, *arguments, environment=environment)


class CallingExecutor(Executor):
    """Calls what it is given at once, in the thread that gives it."""

    def __init__(self, *_: object) -> None:
        """Has no threads, of which an executor is told the number and the name."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """Return what the call has come to."""
        done = Future[Any]()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def run_unthreaded(*arguments: str) -> None:
    """Run the `penstock` command with models that see in the thread of the steps."""
    with mock.patch.object(vision, "ThreadPoolExecutor", CallingExecutor):
        run_penstock(*arguments)


class UnthreadedStack(ForkedStack):
    """A stack whose models see in the thread of the steps."""

    def _start_child(self, slot: ProcessSlot, arguments: list[str], environment: Mapping[str, str]) -> Child:
        return fork_process(slot.name, self._log_path(slot), run_unthreaded, *arguments, environment=environment)


def draw_tokens(chance: random.Random, count: int, vocabulary: range = DEMO_TOKENS) -> list[int]:
    """Return random tokens, by default of the demo model's."""
    return chance.choices(vocabulary, k=count)


def make_request(token_ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request, as `Client.submit` takes it, that ends by its length only; greedy, if `more` says nothing."""
    return {"token_ids": token_ids, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | more


def answer_requests(
    client: Client, requests: Iterable[Mapping[str, Any]], max_open: int, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[Mapping[str, Any], Answer]]:
    """Submit requests, `max_open` of them under way at a time; yield each with its answer, in their order."""
    under_way: deque[tuple[str, Mapping[str, Any]]] = deque()
    for request in requests:
        if len(under_way) == max_open:
            request_id, asked = under_way.popleft()
            yield asked, client.result(request_id, timeout_s)
        under_way.append((client.submit(**request), request))
    for request_id, asked in under_way:
        yield asked, client.result(request_id, timeout_s)


class PipedProcess:
    """A process that answers what it is sent through a pipe; None ends it."""

    def __init__(self, context: BaseContext, call: Callable[..., None], *given: Any, timeout_s: float = 900.0) -> None:
        """Start it with `call(pipe, *given)`, and wait for its first answer. An answer takes `timeout_s` at most."""
        self._pipe, theirs = context.Pipe()
        self._timeout_s = timeout_s
        process: Any = context.Process  # type: ignore[attr-defined]
        self._process = process(target=call, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()
        self.first_answer = self.receive()

    def send(self, what: object) -> None:
        """Send it something to answer."""
        self._pipe.send(what)

    def has_answer(self, within_s: float) -> bool:
        """Return whether an answer is there within some seconds."""
        return self._pipe.poll(within_s)

    def receive(self) -> Any:
        """Return its next answer. Raises `TimeoutError` if there is none."""
        if not self.has_answer(self._timeout_s):
            raise TimeoutError(f"{self._process.name} says nothing")
        return self._pipe.recv()

    def ask(self, what: object) -> Any:
        """Send it something, and return the answer."""
        self.send(what)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def write_shape(shape: Shape | str) -> Path:
    """Return the directory of a shape's model with random weights, which is written if it is not there."""
    return make_model_directory(SHAPES[shape] if isinstance(shape, str) else shape, DIRECTORY / "models")


def open_shape(shape: Shape | str, **settings: Any) -> Engine:
    """Open an engine on a shape's model in bfloat16."""
    given = {"model": str(write_shape(shape)), "dtype": "bfloat16", "device": "cpu"}
    return opening.open_engine(EngineSettings.model_validate(given | settings))


def run_sequences(engine: Engine, seqs: Iterable[Sequence]) -> None:
    """Add sequences and step until all have their tokens; they stay in the engine."""
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        engine.step()


def time_decode_steps(engine: Engine, seqs: list[Sequence], num_steps: int) -> list[float]:
    """Add sequences, and return the seconds of steps in which all of them decode; the first ones are not counted."""
    for seq in seqs:
        engine.add_sequence(seq)
    while min(seq.num_output_tokens for seq in seqs) < 4:
        engine.step()
    times_s = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        engine.step()
        times_s.append(time.perf_counter() - begun_s)
    return times_s


def count_same_tokens(one: list[int], other: list[int]) -> int:
    """Return how many tokens two answers have in common before the first that differs, or one of them ends."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))


def answer_prompt(
    engine: ServingEngine, prompt: list[int], name: str, *, stores: bool = True
) -> tuple[float, float, int]:
    """Return the seconds until a prompt's first token, those until its blocks are stored where they are to be, and how
    many of its tokens were found. Without `stores` nothing is stored.
    """
    begun_s = time.perf_counter()
    blocks, owner = engine.hash_prompt("bench", prompt), f"job {name}" if stores else ""
    request = Sequence(
        name, prompt, blocks=blocks, sampling=GREEDY, seed=0, max_new_tokens=1, lease_owner=owner, tenant="bench"
    )
    engine.add_request(request)
    is_sampled = False
    while not is_sampled:
        list(engine.collect_events())
        if not engine.begin_step():
            engine.wait_for_event()
            continue
        is_sampled = bool(engine.finish_step())
        if stores:
            engine.store_full_blocks()
    first_s = time.perf_counter() - begun_s
    if not stores:
        engine.remove_request(name)
        return first_s, first_s, request.num_cached_tokens
    stored = engine.finish_request(name)
    assert stored is not None
    stored.result(60)
    stored_s = time.perf_counter() - begun_s
    while engine.is_moving_blocks():
        list(engine.collect_events())
        engine.wait_for_event()
    list(engine.collect_events())
    engine.release_leases(owner, blocks)
    return first_s, stored_s, request.num_cached_tokens
