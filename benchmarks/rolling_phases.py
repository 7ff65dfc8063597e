"""The phases of `benchmarks.rolling` on one bus."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from penstock.local.kafka import KafkaServer
from penstock.local.processes import Child
from penstock.local.stack import Stack, WorkerSlot
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request
from penstock.names import STAGES
from sim.chaos.clients import Clients, ClientTask
from sim.chaos.history import History
from sim.chaos.runner import WriteLine, record_topics, wait_until_calm
from sim.forked import ForkedStack
from sim.workload import ExpectedAnswer, compute_answers, make_requests

ENVIRONMENT = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu"}
NUM_DISTINCT_REQUESTS = 6
MAX_OPEN_REQUESTS = 4
ANSWER_TIMEOUT_S = 120.0
DRAIN_S, SHORT_DRAIN_S = 20.0, 1.0
KILL_AFTER_S = 60.0
"""A worker that has not ended this long after SIGTERM is killed."""
Server = ValkeyServer | KafkaServer


@dataclass(frozen=True)
class Extent:
    """How much is done."""

    steady_s: float
    answer_tokens: int = 160
    """Tokens of an answer."""
    is_full: bool = False
    """Whether there are all phases, with all workers."""


FULL, QUICK, SMOKE = Extent(120.0, is_full=True), Extent(3.0), Extent(0.0, answer_tokens=24)


@cache
def make_known_requests(answer_tokens: int) -> list[tuple[Request, ExpectedAnswer]]:
    """Return the requests that are sent repeatedly, and their answers."""
    made = []
    for request in make_requests(NUM_DISTINCT_REQUESTS, "rolling"):
        sampling = request.sampling.model_copy(update={"max_tokens": answer_tokens, "ignore_eos": True})
        made.append(request.model_copy(update={"token_ids": (request.token_ids or [])[:200], "sampling": sampling}))
    return list(zip(made, compute_answers(made).values(), strict=True))


def make_task(answer_tokens: int, phase: str, number: int) -> ClientTask:
    """Return a task: one reader reads from the first token to the last."""
    request, answer = make_known_requests(answer_tokens)[number % NUM_DISTINCT_REQUESTS]
    named = request.model_copy(update={"id": f"{phase}-{number}", "tenant": f"tenant-{number % 5}"})
    return ClientTask(named, answer, copies=1, cancel_after=None, reconnect_after=[], late_reader_s=None)


class RollingStack(Stack):
    """A stack whose next workers may drain for `drain_s`."""

    drain_s = DRAIN_S

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        return super()._start_worker(worker, {**environment, "PENSTOCK_WORKER_DRAIN_S": str(self.drain_s)})


class QuickStack(RollingStack, ForkedStack):
    """A stack whose workers start at once."""


class RollingPhases:
    """The phases on one bus, and their load."""

    def __init__(
        self, stack: Stack, servers: list[Server], history: History, progress: WriteLine, answer_tokens: int
    ) -> None:
        self._stack, self._servers, self._history, self._progress = stack, servers, history, progress
        self._make_task = partial(make_task, answer_tokens)
        self.drains_s: list[float] = []

    def run_steady(self, phase: str, seconds: float) -> None:
        """Run the load without any restart."""
        with self._run_clients(phase) as clients:
            until = time.monotonic() + seconds
            self._keep_up_while(clients, lambda: time.monotonic() < until)

    def restart_workers(self, phase: str, most: int | None = None) -> None:
        """Restart each worker, or at most `most` of each stage."""
        with self._run_clients(phase) as clients:
            for worker in self._pick_workers(most):
                self._progress(f"{phase}, {worker.name}")
                self._restart_worker(worker)
                self._wait_for_answers(clients)

    def restart_servers(self, phase: str) -> None:
        """Restart each server."""
        with self._run_clients(phase) as clients:
            for server in self._servers:
                self._progress(f"{phase}, {type(server).__name__}")
                server.stop()
                server.start()
                self._wait_for_answers(clients)

    def _pick_workers(self, most: int | None) -> list[WorkerSlot]:
        workers = self._stack.workers
        return [one for stage in STAGES for one in [each for each in workers if each.stage == stage][:most]]

    @contextlib.contextmanager
    def _run_clients(self, phase: str) -> Iterator[Clients]:
        """Run clients within the block; then wait until all streams have ended."""
        self._progress(phase)
        with Clients(
            self._history, self._stack.addresses, partial(self._make_task, phase), MAX_OPEN_REQUESTS, ANSWER_TIMEOUT_S
        ) as clients:
            self._wait_for_answers(clients)
            yield clients
            clients.stop_sending()
            wait_until_calm(self._stack, clients, ANSWER_TIMEOUT_S, lambda line: self._progress(f"{phase}, {line}"))

    def _wait_for_answers(self, clients: Clients) -> None:
        """Wait until as many streams have ended as are open at a time."""
        enough = clients.num_done + MAX_OPEN_REQUESTS
        self._keep_up_while(clients, lambda: clients.num_done < enough)

    def _keep_up_while(self, clients: Clients, condition: Callable[[], bool]) -> None:
        while condition():
            self._stack.restart_dead()
            clients.raise_failure()
            time.sleep(0.05)

    def _restart_worker(self, worker: WorkerSlot) -> None:
        """Send SIGTERM, wait for the end, and start a successor."""
        assert worker.child is not None
        begun = time.monotonic()
        status = worker.child.stop(KILL_AFTER_S)
        self.drains_s.append(time.monotonic() - begun)
        if status != 0:
            raise RuntimeError(f"{worker.name} ended with status {status}:\n{self._stack.read_log_tail(worker)}")
        worker.was_ready = False
        self._stack.wait_until_ready(300)


def run_phases(bus: str, directory: Path, progress: WriteLine, extent: Extent) -> tuple[Path, list[float]]:
    """Run all phases; return the history, and the seconds that each worker took to end after SIGTERM."""
    directory.mkdir()
    path = directory / "history.jsonl"
    with contextlib.ExitStack() as exits:
        valkey = exits.enter_context(ValkeyServer(directory / "valkey"))
        servers: list[Server] = [valkey]
        bootstrap = ""
        if bus == "kafka":
            kafka = exits.enter_context(KafkaServer(directory / "kafka"))
            servers.append(kafka)
            bootstrap = kafka.bootstrap
        made = (RollingStack if extent.is_full else QuickStack)(
            directory / "stack", kafka=bootstrap, redis=valkey.url, prefill=2, decode=2, environment=ENVIRONMENT
        )
        stack = exits.enter_context(made)
        stack.wait_until_ready(300)
        history = exits.enter_context(History(path))
        roll = RollingPhases(stack, servers, history, progress, extent.answer_tokens)
        roll.run_steady("warm", 0.0)
        roll.run_steady("steady", extent.steady_s)
        stack.drain_s = SHORT_DRAIN_S  # of those that come now
        roll.restart_workers("rolling", None if extent.is_full else 1)
        if extent.is_full:
            roll.restart_workers("handed")
            roll.restart_servers("servers")
        record_topics(stack, history)
    return path, roll.drains_s
