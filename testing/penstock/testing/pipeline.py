"""A whole pipeline in a test's own process, without servers: real clients, real workers on threads, and kills.

    with TestPipeline() as pipeline, pipeline.client() as client:
        request_id = client.submit("Once upon a time", max_tokens=20)
        pipeline.kill_worker("decode-0", after_tokens=5)
        pipeline.start_worker("decode")
        assert len(client.result(request_id).token_ids) == 20

docs/testing.md says what may be tested by it, and what needs servers.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import redis

from penstock.config.settings import RecordSettings, StaySettings
from penstock.decode_worker.role import DecodeRole
from penstock.messages import Result, TokenEvent, decode_message
from penstock.names import Pipeline, WorkerKind
from penstock.prefill_worker.role import PrefillRole
from penstock.prefill_worker.stay import StayPolicy
from penstock.prefill_worker.staying_role import StayingRole
from penstock.record import Claim
from penstock.testing.bus import MemoryBus
from penstock.testing.client import MemoryAsyncClient, MemoryClient
from penstock.testing.engine import END_TOKEN, FormulaEngine, FormulaModel, compute_token, load_tokenizer
from penstock.testing.record import MemoryRecord, MemoryRecords
from penstock.worker.loop import StopSignal, run_until_stopped
from penstock.worker.worker import Worker

if TYPE_CHECKING:
    from penstock.testing.gateway import TestGateway

Answer = Callable[[str], str]
"""Returns the text that answers a prompt's text. The same prompt has to give the same text."""


class _Way:
    """The way of a worker to the records: their lock, which a dead worker does not get."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.is_cut = lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.is_cut:
            self._lock.release()
            raise redis.ConnectionError("this worker was killed")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def cut(self) -> None:
        """Let nothing through any more."""
        with self._lock:
            self.is_cut = True


class _WorkerRecord(MemoryRecord):
    """The record of a worker that may be killed once it has appended a number of tokens."""

    def __init__(self, records: MemoryRecords, settings: RecordSettings) -> None:
        super().__init__(records, settings)
        self.way: Any = _Way(records.lock)
        self._lock = self.way
        self.tokens_to_live: int | None = None
        self.die: Callable[[], object] = lambda: None

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Write the tokens one by one, up to the last in the worker's life."""
        for entry in entries:
            with self._lock:
                super().send_tokens([entry])
                if self.tokens_to_live is not None:
                    self.tokens_to_live -= 1
                    if self.tokens_to_live <= 0:
                        self.die()


class _Running:
    """A worker and the thread of its loop."""

    def __init__(
        self,
        kind: WorkerKind,
        name: str,
        bus: MemoryBus,
        record: _WorkerRecord,
        engine: FormulaEngine,
        stays: StayPolicy,
        read_beats: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self.name, self.record, self.engine, self._bus = name, record, engine, bus
        decode = DecodeRole(bus.pipeline, engine)
        roles: dict[WorkerKind, PrefillRole | DecodeRole] = {
            "prefill": PrefillRole(bus.pipeline, engine),
            "auto": StayingRole(bus.pipeline, engine, stays, worker=name),
        }
        role, member = roles.get(kind, decode), bus.join_group(kind, name)
        role.adapters.read_beats = read_beats
        decode.adapters = role.adapters
        self.kind = kind
        job_role = decode if kind == "auto" else None
        self._worker = Worker(role, bus.pipeline, name, record, member, job_role=job_role)
        self._stop = StopSignal()
        self.failure: Exception | None = None
        record.die = self.die
        self.thread = threading.Thread(target=self._run, name=f"penstock-{name}")
        self.thread.start()

    def _run(self) -> None:
        try:
            run_until_stopped(self._worker, self._stop, drain_s=0.0)
        except Exception as error:
            self.failure = None if self.record.way.is_cut else error
            self._worker.abandon()

    def die(self) -> None:
        """Let nothing that the worker does have an effect any more. The bus notices at once, its session runs out."""
        self.record.way.cut()
        for member in self._bus.list_members(self.name):
            member.die()

    @property
    def is_alive(self) -> bool:
        """Whether it was neither killed nor told to leave."""
        return not self.record.way.is_cut and not self._stop

    def stop(self) -> None:
        """Let the worker leave, and wait for that."""
        self._stop.set()
        self.thread.join()


class TestPipeline:
    """A pipeline in memory, with one worker of each stage to begin with. Leaving the context stops the workers.

    Without `answer` workers give tokens by a formula of the prompt, the request's seed or id, and the position.
    """

    __test__ = False  # for pytest, which takes each class for tests whose name begins so

    def __init__(
        self, answer: Answer | None = None, record: RecordSettings | None = None, stay: StaySettings | None = None
    ) -> None:
        """`stay` says which requests a worker of kind `auto` decodes itself."""
        self._stay = stay or StaySettings()
        self.bus, self.records = MemoryBus(Pipeline("test")), MemoryRecords()
        self.bus.create_topics()
        self._answer, self._settings = answer, record or RecordSettings(lease_s=1.0)
        self._workers: dict[str, _Running] = {}

    def client(self) -> MemoryClient:
        """Return a client of the pipeline."""
        return MemoryClient(self.bus, self.records)

    def async_client(self) -> MemoryAsyncClient:
        """Return a client for the event loop that runs."""
        return MemoryAsyncClient(self.bus, self.records)

    @contextmanager
    def gateway(self, **settings: Mapping[str, object]) -> "Iterator[TestGateway]":
        """Run an HTTP gateway, which serves the model `formula`; see `penstock.testing.gateway`. It needs fakeredis."""
        from penstock.testing.gateway import MemoryServers

        servers = MemoryServers(self.bus, self.records)
        servers.serve_model("formula")
        with servers.open_gateway(**settings) as gateway:
            yield gateway

    def start_worker(self, kind: WorkerKind, name: str = "", adapters: Mapping[str, str] | None = None) -> str:
        """Start a worker, and return its name. One of the same name has to be dead, or has left.

        `adapters`: the digest, 64 hex digits, of each LoRA adapter that it has, by name.
        """
        name = name or next(made for number in range(10**6) if (made := f"{kind}-{number}") not in self._workers)
        model = FormulaModel()
        model.adapters = adapters or {}
        engine = FormulaEngine(Random(name), model=model, choose_token=self._choose_token)
        record = _WorkerRecord(self.records, self._settings)
        stays = StayPolicy(self._stay, lambda: self._find_other_kinds(name))
        self._workers[name] = _Running(kind, name, self.bus, record, engine, stays, self._list_beats)
        return name

    def _list_beats(self) -> list[dict[str, Any]]:
        """Return what heartbeats of the living workers say of adapters."""
        living = [one for one in list(self._workers.values()) if one.is_alive]
        return [{"stage": one.kind, "state": "ready", "adapters": one.engine.model.adapters} for one in living]

    def _find_other_kinds(self, name: str) -> set[WorkerKind]:
        """Return the kinds of the other workers that decode."""
        others = [one for other, one in list(self._workers.items()) if other != name]
        return {one.kind for one in others if one.kind != "prefill" and one.is_alive}

    def kill_worker(self, name: str, after_tokens: int = 0) -> None:
        """Kill a worker now, or in the moment at which it has appended `after_tokens` more tokens.

        Another worker takes its requests over after a lease (`RecordSettings.lease_s`, here a second).
        """
        if after_tokens:
            with self.records.lock:
                self._workers[name].record.tokens_to_live = after_tokens
        else:
            self._workers[name].die()

    def stop_worker(self, name: str) -> None:
        """Let a worker leave: it releases its requests, and another worker may take them over at once."""
        self._workers[name].stop()

    def wait_for_results(self, count: int, timeout_s: float = 60.0) -> list[Result]:
        """Return the results in the results topic once there are `count` of them. Raise `TimeoutError`."""
        topic, end_s = self.bus.pipeline.results_topic, time.monotonic() + timeout_s
        with self.bus.changed:
            while len(found := self.bus.read_all(topic)) < count:
                if not self.bus.changed.wait(end_s - time.monotonic()):
                    raise TimeoutError(f"{len(found)} of {count} results")
        return [decode_message(Result, message.value) for message in found]

    def _choose_token(self, prompt: Sequence[int], seed: int, position: int) -> int:
        if self._answer is None:
            return compute_token(prompt, seed, position)
        tokenizer = load_tokenizer()
        tokens = tokenizer.encode(self._answer(tokenizer.decode(prompt)), add_special_tokens=False)
        return int(tokens[position]) if position < len(tokens) else END_TOKEN

    def __enter__(self) -> Self:
        self.start_worker("prefill")
        self.start_worker("decode")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all workers. Raise what ended one that was not killed."""
        for worker in self._workers.values():
            worker.stop()
        failures = [worker.failure for worker in self._workers.values() if worker.failure is not None]
        if failures and error is None:
            raise failures[0]
