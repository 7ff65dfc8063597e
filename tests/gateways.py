"""Gateways as processes, pipelines whose workers a test plays, and a reader of server-sent events."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx
import redis

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.ingest.keys import KeyBook, write_book_file
from penstock.ingest.tenants import TenantEntry, make_key
from penstock.local.processes import find_free_port
from penstock.messages import EndEvent, Request, decode_message
from penstock.names import Pipeline, PriorityClass, WorkerKind, stream_meta_key
from penstock.record import Claim, Record
from penstock.telemetry.meters import Meters
from penstock.testing.gateway import TestGateway
from penstock.worker.heartbeat import Heartbeat
from sim.forked import ForkedStack, fork_process, run_penstock
from sim.waiting import PATIENCE_S, wait_for
from tests.record.play import decode, end, say

ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "64",
    "PENSTOCK_BATCH_MAX_FILE_BYTES": "600000",
    "PENSTOCK_TESTING": '{"batch": {"look_s": 0.2, "lease_s": 0.6, "max_lines": 2000}}',
}  # fmt: skip


@contextmanager
def open_stack(
    folder: Path, model: Path | None = None, settings: Mapping[str, str] = MappingProxyType({}), **numbers: Any
) -> Iterator[ForkedStack]:
    """Run workers with a gateway, and wait until they are ready. `numbers` are `Stack`'s, with its pipeline."""
    environment = {**ENVIRONMENT, **settings} | ({} if model is None else {"PENSTOCK_ENGINE_MODEL": str(model)})
    with ForkedStack(folder, gateway=find_free_port(), environment=environment, **numbers) as stack:
        stack.wait_until_ready(PATIENCE_S)
        yield stack


def write_keys(file: Path, *tenants: str, **entries: TenantEntry) -> list[str]:
    """Write a file of keys, and what tenants may do if it is not the default, and return a key of each tenant."""
    made = [make_key(tenant) for tenant in tenants]
    write_book_file(file, KeyBook(tenants=entries, keys={key_id: entry for _, key_id, entry in made}))
    return [key for key, _, _ in made]


class GatewayProcess:
    """A gateway that answers; ended by `with`, unless it was killed."""

    def __init__(
        self,
        addresses: Addresses,
        folder: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
        main: Callable[..., None] = run_penstock,
    ) -> None:
        """Start it. Settings are named without `PENSTOCK_`; its log lies in the folder."""
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = {"STREAM_URL": addresses.stream_url, "PIPELINE": addresses.pipeline, **settings}
        environment = os.environ | {f"PENSTOCK_{name}": value for name, value in own.items()}
        arguments = ("gateway", "--port", str(self.port))
        self.log = folder / f"gateway-{self.port}.log"
        self.process = fork_process("gateway", self.log, main, *arguments, environment=environment)
        wait_for(lambda: not self.process.is_alive() or self.is_ready(), "the gateway is ready", every_s=0.05)
        assert self.process.is_alive(), self.process.read_log_tail()

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=None).status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop(PATIENCE_S)


class ScriptedPipeline:
    """A pipeline without workers: a test reads what gateways publish, and writes the answers itself."""

    def __init__(
        self, redis_url: str, pipeline: Pipeline, model: str = "", kafka: str = "", kind: WorkerKind = "prefill"
    ) -> None:
        self.pipeline, self.model = pipeline, model or pipeline.name
        self.addresses = Addresses(stream_url=redis_url, pipeline=pipeline.name, kafka=kafka)
        self.server = redis.Redis.from_url(redis_url)
        self.record = Record(self.server, pipeline, RecordSettings(lease_s=600))
        self.bus = connect_bus(self.addresses, BusSettings())
        self.bus.create_topics()
        self._kind: WorkerKind = kind
        self._heartbeat = Heartbeat(redis_url, pipeline, kind, "nobody", 60.0)

    def __enter__(self) -> Self:
        """Say that a worker named `nobody` serves the model."""
        self._heartbeat.update_status(state="ready", model=self.model)
        self._heartbeat.write_beat()
        self._heartbeat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.__exit__(None, None, None)
        self.record.close()
        self.server.close()

    def report(self, **status: Any) -> None:
        """Have the worker report this as well."""
        told = json.loads(json.dumps(status)).items()
        self._heartbeat.update_status(now=True, **status)  # its thread alone writes, so none that is older comes later
        wait_for(lambda: told <= self._read_beat().items(), "the heartbeat says so", every_s=0.01)

    def _read_beat(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.server.get(self.pipeline.worker_key(self._kind, "nobody")) or b"{}")
        return found

    def open_gateway(self, **settings: Mapping[str, object]) -> TestGateway:
        """Return a gateway in this process."""
        return TestGateway(self.addresses, Meters(), **settings)

    def write(self, request_id: str, count: int) -> Claim:
        """Take the request as a worker and write so many tokens."""
        claim = decode(self.record, request_id)
        say(self.record, claim, range(count))
        return claim

    def finish(self, request_id: str, count: int = 3, ending: EndEvent | None = None) -> None:
        """Answer the request with so many tokens."""
        self.record.finish_request(self.write(request_id, count), ending or end())

    @contextmanager
    def answer_texts(self, compute: Callable[[Request], EndEvent]) -> Iterator[list[Request]]:
        """Answer requests of both classes as they come, on a thread; yield those that were answered."""
        answered, leaving = list[Request](), threading.Event()

        def answer() -> None:
            while not leaving.wait(0.01):
                for request in [*self.read_requests(), *self.read_requests("batch")][len(answered) :]:
                    self.record.finish_request(decode(self.record, request.id), compute(request))
                    answered.append(request)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield answered
        finally:
            leaving.set()
            thread.join()

    def forget(self, request_id: str) -> None:
        """Let Redis lose all that it has of a request that has ended."""
        keys = stream_meta_key(request_id), self.pipeline.record_key(request_id), self.pipeline.log_key(request_id)
        assert self.server.delete(*keys) == 3

    def read_requests(self, priority_class: PriorityClass = "interactive") -> list[Request]:
        """Return everything that was published."""
        messages = self.bus.read_all(self.pipeline.request_topic(priority_class))
        return [decode_message(Request, message.value) for message in messages]
