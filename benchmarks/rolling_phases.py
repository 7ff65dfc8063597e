"""The phases of `benchmarks.rolling` on one bus."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
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
DISTINCT = 6
LENGTH = 160
"""Tokens of an answer."""
UNDER_WAY = 4
PATIENCE_S = 120.0
DRAIN_S, SHORT_DRAIN_S = 20.0, 1.0
GRACE_S = 60.0
"""A worker that has not ended so long after SIGTERM is killed."""
Server = ValkeyServer | KafkaServer


@cache
def work() -> list[tuple[Request, ExpectedAnswer]]:
    """The requests that come again and again, and their answers."""
    made = []
    for request in make_requests(DISTINCT, "rolling"):
        sampling = request.sampling.model_copy(update={"max_tokens": LENGTH, "ignore_eos": True})
        made.append(request.model_copy(update={"token_ids": (request.token_ids or [])[:200], "sampling": sampling}))
    return list(zip(made, compute_answers(made).values(), strict=True))


def errand(phase: str, number: int) -> ClientTask:
    """Read from the first token to the last, by one reader who does not leave."""
    request, answer = work()[number % DISTINCT]
    named = request.model_copy(update={"id": f"{phase}-{number}", "tenant": f"tenant-{number % 5}"})
    return ClientTask(named, answer, copies=1, cancel_after=None, reconnect_after=[], late_reader_s=None)


class RollingStack(Stack):
    """A stack whose next workers may drain for so long."""

    drain_s = DRAIN_S

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        return super()._start_worker(worker, {**environment, "PENSTOCK_WORKER_DRAIN_S": str(self.drain_s)})


class QuickStack(RollingStack, ForkedStack):
    """One whose workers start at once."""


class Roll:
    """The phases on one bus, and their load."""

    def __init__(self, stack: Stack, servers: list[Server], history: History, progress: WriteLine) -> None:
        self._stack, self._servers, self._history, self._progress = stack, servers, history, progress
        self.drains: list[float] = []

    def steady(self, phase: str, seconds: float) -> None:
        """Nothing is done."""
        with self._load(phase) as clients:
            until = time.monotonic() + seconds
            self._while(clients, lambda: time.monotonic() < until)

    def workers(self, phase: str, most: int | None = None) -> None:
        """Each worker is restarted, or so many of each stage."""
        with self._load(phase) as clients:
            for worker in self._of_each_stage(most):
                self._progress(f"{phase}, {worker.name}")
                self._restart(worker)
                self._some_more(clients)

    def servers(self, phase: str) -> None:
        """Each server is restarted."""
        with self._load(phase) as clients:
            for server in self._servers:
                self._progress(f"{phase}, {type(server).__name__}")
                server.stop()
                server.start()
                self._some_more(clients)

    def _of_each_stage(self, most: int | None) -> list[WorkerSlot]:
        workers = self._stack.workers
        return [one for stage in STAGES for one in [each for each in workers if each.stage == stage][:most]]

    @contextlib.contextmanager
    def _load(self, phase: str) -> Iterator[Clients]:
        """It goes on from here to there; then all streams come to their end."""
        self._progress(phase)
        with Clients(self._history, self._stack.addresses, partial(errand, phase), UNDER_WAY, PATIENCE_S) as clients:
            self._some_more(clients)
            yield clients
            clients.stop_sending()
            wait_until_calm(self._stack, clients, PATIENCE_S, lambda line: self._progress(f"{phase}, {line}"))

    def _some_more(self, clients: Clients) -> None:
        """Until as many have ended as are under way at a time."""
        enough = clients.num_done + UNDER_WAY
        self._while(clients, lambda: clients.num_done < enough)

    def _while(self, clients: Clients, condition: Callable[[], bool]) -> None:
        while condition():
            self._stack.restart_dead()
            clients.raise_failure()
            time.sleep(0.05)

    def _restart(self, worker: WorkerSlot) -> None:
        """SIGTERM, its end, and its successor."""
        assert worker.child is not None
        begun = time.monotonic()
        status = worker.child.stop(GRACE_S)
        self.drains.append(time.monotonic() - begun)
        if status != 0:
            raise RuntimeError(f"{worker.name} ended with status {status}:\n{self._stack.read_log_tail(worker)}")
        worker.was_ready = False
        self._stack.wait_until_ready(300)


def go_through(bus: str, directory: Path, progress: WriteLine, *, quick: bool) -> tuple[Path, list[float]]:
    """All phases; the history, and how many seconds each worker took to end after SIGTERM."""
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
        made = (QuickStack if quick else RollingStack)(
            directory / "stack", kafka=bootstrap, redis=valkey.url, prefill=2, decode=2, environment=ENVIRONMENT
        )
        stack = exits.enter_context(made)
        stack.wait_until_ready(300)
        history = exits.enter_context(History(path))
        roll = Roll(stack, servers, history, progress)
        roll.steady("warm", 0.0)
        roll.steady("steady", 5.0 if quick else 120.0)
        stack.drain_s = SHORT_DRAIN_S  # of those that come now
        roll.workers("rolling", 1 if quick else None)
        if not quick:
            roll.workers("handed")
            roll.servers("servers")
        record_topics(stack, history)
    return path, roll.drains
