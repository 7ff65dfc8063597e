"""A pipeline of endpoint workers in this process, and scripted endpoints."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import pytest

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Outgoing
from penstock.client.core import RequestFields, make_request
from penstock.config.addresses import Addresses
from penstock.config.settings import EndpointSettings, RecordSettings
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.role import EndpointRole
from penstock.messages import EndEvent, Request, Result, TokenEvent, decode_message
from penstock.names import Pipeline
from penstock.record import connect_servers, open_record
from penstock.testing.bus import MemoryBus
from penstock.testing.record import MemoryRecord, MemoryRecords
from penstock.worker.worker import Worker
from sim.endpoint import MODEL, CountingEndpoint
from sim.line import BUS_SETTINGS


class EndpointPipeline:
    """A pipeline whose endpoint workers a test turns, on servers at `addresses`; without them on doubles."""

    def __init__(self, pipeline: Pipeline, addresses: Addresses | None = None) -> None:
        self.pipeline = pipeline
        self.record_settings = RecordSettings(lease_s=0.3, retry_first_s=0.05)
        self._records = MemoryRecords() if addresses is None else None
        self.bus: Bus = MemoryBus(pipeline) if addresses is None else connect_bus(addresses, BUS_SETTINGS)
        self.bus.create_topics()
        self._clients = None if addresses is None else connect_servers(addresses.stream_url)
        self.publisher = self.bus.create_publisher()
        self.workers: list[Worker] = []

    def open_record(self) -> Any:
        if self._records is not None:
            return MemoryRecord(self._records, self.record_settings)
        assert self._clients is not None
        return open_record(self._clients, self.pipeline, self.record_settings)

    def add_worker(self, *endpoints: CountingEndpoint, **settings: Any) -> Worker:
        urls = ",".join(endpoint.url for endpoint in endpoints)
        given = EndpointSettings(model=MODEL, **{"urls": urls, **settings})
        member = self.bus.join_group("endpoint", f"endpoint-{len(self.workers)}")
        pool = Endpoints(parse_urls(given.urls, given.max_requests))
        role = EndpointRole(self.pipeline, MODEL, EndpointEngine(pool, given, self.record_settings))
        worker = Worker(role, self.pipeline, f"endpoint-{len(self.workers)}", self.open_record(), member)
        self.workers.append(worker)
        return worker

    def send(self, prompt: str | None = "count|", topic: str | None = None, **fields: Any) -> Request:
        request = make_request(prompt, cast("RequestFields", fields))
        self.publish(request.encode(), request.id, topic)
        return request

    def publish(self, value: bytes, key: str | None = None, topic: str | None = None) -> None:
        self.publisher.publish([Outgoing(topic or self.pipeline.request_topic("interactive"), value, key)])

    def read_results(self) -> list[Result]:
        return [decode_message(Result, message.value) for message in self.bus.read_all(self.pipeline.results_topic)]

    def run_until(self, condition: Callable[[], object]) -> None:
        """Turn all workers until the condition holds."""
        while not condition():
            for worker in self.workers:
                worker.run_once()

    def run_until_results(self, count: int) -> list[Result]:
        self.run_until(lambda: len(self.read_results()) >= count)
        return self.read_results()

    def read_log(self, request_id: str) -> list[TokenEvent | EndEvent]:
        with closing(self.open_record()) as record:
            return list(record.read_log(request_id))

    def kill(self, worker: Worker) -> None:
        """Let a worker end as by SIGKILL: its session runs out, its deliveries come back, its connections close."""
        worker.session.stop()
        worker.settler.abandon()
        worker.rescuer.close()
        worker.engine.close()
        worker.member.close()
        worker.record.close()
        self.workers.remove(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.publisher.close()
        for client in () if self._clients is None else self._clients.parts:
            client.close()


def engine_of(worker: Worker) -> EndpointEngine:
    """Return the engine of an endpoint worker."""
    assert isinstance(worker.engine, EndpointEngine)
    return worker.engine


MakeEndpointPipeline = Callable[..., EndpointPipeline]


@pytest.fixture
def make_pipeline(request: pytest.FixtureRequest, pipeline: Pipeline) -> Iterator[MakeEndpointPipeline]:
    """Makes the pipeline on `embedded`, `kafka`, or `memory`."""
    with ExitStack() as stack:

        def make(bus: str) -> EndpointPipeline:
            addresses = None
            if bus != "memory":
                url, kafka = request.getfixturevalue("redis_url"), ""
                kafka = request.getfixturevalue("kafka") if bus == "kafka" else ""
                addresses = Addresses(pipeline=pipeline.name, stream_url=url, kafka=kafka)
            made = EndpointPipeline(pipeline, addresses)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def line(make_pipeline: MakeEndpointPipeline) -> EndpointPipeline:
    """The pipeline on doubles of the servers."""
    return make_pipeline("memory")


@pytest.fixture
def endpoint() -> Iterator[CountingEndpoint]:
    """A scripted endpoint."""
    with CountingEndpoint() as started:
        yield started


@pytest.fixture
def other() -> Iterator[CountingEndpoint]:
    """A second one."""
    with CountingEndpoint() as started:
        yield started
