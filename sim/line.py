"""A whole pipeline in one process: one prefill and one decode worker, run until there is nothing to do."""

import contextlib
import tempfile
from dataclasses import replace
from typing import Self
from unittest import mock

import redis

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Member, Outgoing
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, EngineSettings, KVSettings, PictureSettings, RecordSettings
from penstock.decode_worker.role import DecodeRole
from penstock.engine.engine import Engine
from penstock.engine.serving import ServingEngine
from penstock.errors import BusUnavailable
from penstock.kvstore.store import KVStore, StoreLayout
from penstock.messages import Request, Result, decode_message
from penstock.names import Pipeline, Stage, WorkerKind
from penstock.objects import ObjectStorage
from penstock.pictures.store import PictureStore
from penstock.prefill_worker.role import PrefillRole
from penstock.prefill_worker.stay import StayPolicy
from penstock.prefill_worker.staying_role import StayingRole
from penstock.prefill_worker.tokenize import PromptTokenizer
from penstock.record import Record, connect_servers, open_record
from penstock.redis.servers import Sharded
from penstock.testing.bus import MemoryBus
from penstock.testing.client import MemoryClient
from penstock.testing.record import MemoryRecord, MemoryRecords
from penstock.worker.grammars import GrammarCompiler
from penstock.worker.loop import WorkerLoop
from penstock.worker.pictures import TaskPictures
from penstock.worker.task import Role
from penstock.worker.worker import Worker
from sim.waiting import wait_for
from sim.workload import ENGINE_SETTINGS, ModelLoader, load_native_demo_model

SHARED_MEMORY = "/dev/shm"
BUS_SETTINGS = BusSettings(transaction_timeout_s=60.0)
"""A worker process rejoins when its transaction timed out. The workers here do not, so the timeout is long."""


def run_until_running(worker: Worker, count: int = 1) -> None:
    """Turn a worker until it runs `count` requests. Its engine makes no step before, so that none of them ends."""
    with mock.patch.object(worker.engine, "begin_step", return_value=False):
        while len(worker.running) < count:
            worker.run_once()


def core_of(worker: Worker) -> Engine:
    """Return the core of a worker's engine: its pool, scheduler and steps."""
    core = serving_engine(worker).core
    assert isinstance(core, Engine)
    return core


def serving_engine(worker: Worker) -> ServingEngine:
    """Return a worker's engine with its KV store."""
    assert isinstance(worker.engine, ServingEngine)
    return worker.engine


class PipelineServers:
    """The bus and the records of a pipeline: those of servers, or `in_memory` doubles of them."""

    def __init__(self, addresses: Addresses, record: RecordSettings, *, in_memory: bool) -> None:
        self.addresses, self.record_settings = addresses, record
        self.pipeline = Pipeline(addresses.pipeline)
        self._records = MemoryRecords() if in_memory else None
        self.bus: Bus = MemoryBus(self.pipeline) if in_memory else connect_bus(addresses, BUS_SETTINGS)
        self.bus.create_topics()
        self.clients = Sharded([], []) if in_memory else connect_servers(addresses.stream_url)
        self.publisher = self.bus.create_publisher()

    @property
    def client(self) -> "redis.Redis":
        """The client of the first server of the records."""
        return self.clients.parts[0]

    def make_record(self) -> Record:
        """Return the record as another worker would open it."""
        if self._records is not None:
            return MemoryRecord(self._records, self.record_settings)
        return open_record(self.clients, self.pipeline, self.record_settings)

    def open_client(self) -> Client:
        """Return a client of the pipeline."""
        if self._records is None:
            return Client(self.addresses)
        assert isinstance(self.bus, MemoryBus)
        return MemoryClient(self.bus, self._records)

    def publish_bytes(self, value: bytes, key: str | None = None, topic: str | None = None) -> None:
        """Put raw bytes in the interactive requests topic, or another."""
        self.publisher.publish([Outgoing(topic or self.pipeline.request_topic("interactive"), value, key)])

    def send_requests(self, *requests: Request) -> None:
        """Publish requests."""
        for request in requests:
            self.publish_bytes(request.encode(), request.id)

    def forget_record(self, request_id: str) -> None:
        """Let the doubles of the records lose a request's record, with its log."""
        assert self._records is not None
        del self._records.records[request_id]

    def read_results(self) -> list[Result]:
        """Return all messages of the results topic."""
        return [decode_message(Result, message.value) for message in self.bus.read_all(self.pipeline.results_topic)]

    def read_dead_letters(self) -> list[Outgoing]:
        """Return all messages of the dead-letter topic."""
        return self.bus.read_all(self.pipeline.dead_letter_topic)

    def close(self) -> None:
        """Close the connections."""
        self.publisher.close()
        for client in self.clients.parts:
            client.close()


def run_until_idle(worker: WorkerLoop) -> None:
    """Run until there is nothing to do."""
    while worker.run_once() or worker.running or not worker.is_settled():
        pass


class InProcessPipeline(PipelineServers):
    """A pipeline of one prefill and one decode worker, with a call for each step."""

    def __init__(
        self,
        addresses: Addresses,
        record: RecordSettings | None = None,
        kv: KVSettings | None = None,
        engine: EngineSettings = ENGINE_SETTINGS,
        *,
        load: ModelLoader = load_native_demo_model,
        in_memory: bool = False,
    ) -> None:
        """Start the pipeline on the servers at `addresses`; with `in_memory` on doubles of them, without any server."""
        super().__init__(addresses, record or RecordSettings(), in_memory=in_memory)
        self.engine_settings, self._load_model = engine, load
        self._folder, own_kv = None, KVSettings(shared_mb=0, redis_mb=64)
        if in_memory:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-line-", dir=SHARED_MEMORY)
            own_kv = KVSettings(shared_mb=64, shared_dir=self._folder.name, redis_mb=0)
        self.kv_settings = kv or own_kv
        self._stores: list[KVStore] = []
        self._grammars: list[GrammarCompiler] = []
        self.add_prefill("prefill-0")
        self.add_decode("decode-0")

    def add_prefill(self, name: str) -> None:
        """Add a prefill worker and make it the current one. The one before keeps running."""
        self.prefill = self._make_worker("prefill", name)

    def add_decode(self, name: str) -> None:
        """Add a decode worker and make it the current one. The one before keeps running."""
        self.decode = self._make_worker("decode", name)

    def make_auto(self, name: str, stays: StayPolicy) -> Worker:
        """Return a worker of both stages. The caller closes it."""
        return self._make_worker("auto", name, stays)

    def _make_worker(self, kind: WorkerKind, name: str, stays: StayPolicy | None = None) -> Worker:
        settings = self.engine_settings.model_copy(update={"speculate": False})  # tests count on a token a step
        model = self._load_model()
        if kind == "decode" and model.picture_reader is not None:  # as a process of that kind loads it
            model = replace(model, picture_reader=None)
        core = Engine(model, settings)
        layout = StoreLayout.from_model(core.model)
        store = KVStore.open(
            layout, self.kv_settings, self.addresses.kv_url or self.addresses.stream_url, self.pipeline.name
        )
        self._stores.append(store)
        member, engine = self._join_group(kind, name), ServingEngine(core, store)
        decode = DecodeRole(self.pipeline, engine)
        prefill = StayingRole(self.pipeline, engine, stays, "", name) if stays else PrefillRole(self.pipeline, engine)
        decode.pictures = prefill.pictures = self._open_pictures(engine)
        self._grammars += [decode.grammars, prefill.grammars]
        role: Role = decode if kind == "decode" else prefill
        job_role = decode if kind == "auto" else None
        return Worker(role, self.pipeline, name, self.make_record(), member, job_role=job_role)

    def _open_pictures(self, engine: ServingEngine) -> TaskPictures | None:
        """Return what reads pictures for an engine, if its model sees them. Their store is in the pipeline's Redis."""
        if (reader := engine.model.picture_reader) is None:
            return None
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="penstock-line-", dir=SHARED_MEMORY)
        objects, settings = ObjectStorage.open(self._folder.name), PictureSettings()
        store = PictureStore(self.addresses, objects, settings, self.record_settings)
        return TaskPictures(engine, reader, store, settings)

    def _join_group(self, kind: WorkerKind, name: str) -> Member:
        """Join a group, and try again where the brokers do not answer in time, as the process of a worker does."""
        joined: list[Member] = []

        def try_to_join() -> list[Member]:
            with contextlib.suppress(BusUnavailable):
                joined.append(self.bus.join_group(kind, name))
            return joined

        wait_for(try_to_join, f"{name} joins its group")
        return joined[0]

    @property
    def prompt_tokenizer(self) -> PromptTokenizer:
        """The tokenizer of the prefill worker."""
        assert isinstance(self.prefill.role, PrefillRole)
        return self.prefill.role.prompt_reader

    def renew_decode(self) -> None:
        """Replace a decode worker that left by a new one."""
        self.add_decode("decode-0")

    def silence_worker(self, stage: Stage, num_tokens: int = 0) -> Worker:
        """Let the current worker of a stage fall silent once it runs a request, and add another one; return the former.

        Its loop stands still, and its session runs out. It stays a member of its group, which does not notice. In
        decode its request has more than `num_tokens` tokens by then.
        """
        silent = self.prefill if stage == "prefill" else self.decode
        run_until_running(silent)
        while stage == "decode" and next(iter(silent.running.values())).claim.num_tokens <= num_tokens:
            silent.run_once()
        silent.session.stop()
        (self.add_prefill if stage == "prefill" else self.add_decode)(f"{stage}-1")
        return silent

    def run_until_dead(self, count: int) -> list[Outgoing]:
        """Turn both workers until the dead-letter topic has `count` messages: partitions are read in any order."""
        while len(found := self.read_dead_letters()) < count:
            run_until_idle(self.prefill)
            run_until_idle(self.decode)
        return found

    def run_prefill(self, num_jobs: int) -> None:
        """Turn the prefill worker alone until it has handed off that many jobs."""
        while len(self.bus.read_all(self.pipeline.job_topic("interactive"))) < num_jobs:
            run_until_idle(self.prefill)

    def run_until_tokens(self, request_id: str, num_tokens: int) -> None:
        """Turn the decode worker until it has appended more than that many tokens of a request."""
        while not (request_id in self.decode.running and self.decode.running[request_id].claim.num_tokens > num_tokens):
            self.decode.run_once()

    def run_until_results(self, count: int) -> list[Result]:
        """Turn both workers until the results topic has `count` messages."""
        while len(results := self.read_results()) < count:
            run_until_idle(self.prefill)
            run_until_idle(self.decode)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefill.close()
        self.decode.close()
        for store in self._stores:
            store.close()
        for grammars in self._grammars:
            grammars.close()
        self.close()
        if self._folder is not None:
            self._folder.cleanup()
