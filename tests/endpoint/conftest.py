"""A pipeline of endpoint workers in this process, and scripted endpoints."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar, cast

import pytest

from penstock.client.core import RequestFields, make_request
from penstock.config.addresses import Addresses
from penstock.config.settings import EndpointSettings, RecordSettings
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.role import EndpointRole
from penstock.messages import EndEvent, Request, Result, TokenEvent
from penstock.names import Pipeline
from penstock.worker.worker import Worker
from sim.endpoint import MODEL, CountingEndpoint
from sim.line import PipelineServers


class EndpointPipeline(PipelineServers):
    """A pipeline whose endpoint workers a test turns, on servers at `addresses`; without them on doubles."""

    def __init__(self, pipeline: Pipeline, addresses: Addresses | None = None) -> None:
        settings = RecordSettings(lease_s=0.3, retry_first_s=0.05)
        super().__init__(addresses or Addresses(pipeline=pipeline.name), settings, in_memory=addresses is None)
        self.workers: list[Worker] = []

    def add_worker(self, *endpoints: CountingEndpoint, **settings: Any) -> Worker:
        urls = ",".join(endpoint.url for endpoint in endpoints)
        given = EndpointSettings(model=MODEL, **{"urls": urls, **settings})
        member = self.bus.join_group("endpoint", f"endpoint-{len(self.workers)}")
        pool = Endpoints(parse_urls(given.urls, given.max_requests, given.key, given.model))
        role = EndpointRole(self.pipeline, MODEL, EndpointEngine(pool, given, self.record_settings))
        worker = Worker(role, self.pipeline, f"endpoint-{len(self.workers)}", self.make_record(), member)
        self.workers.append(worker)
        return worker

    def send(self, prompt: str | None = "count|", topic: str | None = None, **fields: Any) -> Request:
        request = make_request(prompt, cast("RequestFields", fields))
        self.publish_bytes(request.encode(), request.id, topic)
        return request

    def run_until(self, condition: Callable[[], object]) -> None:
        """Turn all workers until the condition holds."""
        while not condition():
            for worker in self.workers:
                worker.run_once()

    def run_until_results(self, count: int) -> list[Result]:
        self.run_until(lambda: len(self.read_results()) >= count)
        return self.read_results()

    def read_log(self, request_id: str) -> list[TokenEvent | EndEvent]:
        with closing(self.make_record()) as record:
            return list(record.read_log(request_id))

    def kill(self, worker: Worker) -> None:
        """Let a worker end as by SIGKILL: its session runs out, its deliveries come back, its connections close."""
        worker.session.stop()
        worker.settler.abandon()
        worker.intake.rescuer.close()
        worker.engine.close()
        worker.member.close()
        worker.record.close()
        self.workers.remove(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        super().close()


def engine_of(worker: Worker) -> EndpointEngine:
    """Return the engine of an endpoint worker."""
    assert isinstance(worker.engine, EndpointEngine)
    return worker.engine


MakeEndpointPipeline = Callable[..., EndpointPipeline]
P = TypeVar("P", bound=EndpointPipeline)


@pytest.fixture
def open_pipeline(
    request: pytest.FixtureRequest, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, exits: ExitStack
) -> Callable[[type[P], str], P]:
    """Opens a kind of pipeline on `embedded`, `kafka`, or `memory`."""

    def open_kind(kind: type[P], bus: str) -> P:
        addresses = None
        if bus != "kafka":  # only Kafka delivers late: an idle worker may ask often
            monkeypatch.setattr("penstock.worker.worker.IDLE_POLL_S", 0.01)
        if bus != "memory":
            kafka = request.getfixturevalue("kafka") if bus == "kafka" else ""
            addresses = Addresses(pipeline=pipeline.name, stream_url=request.getfixturevalue("redis_url"), kafka=kafka)
        return exits.enter_context(closing(kind(pipeline, addresses)))

    return open_kind


@pytest.fixture
def make_pipeline(open_pipeline: Callable[[type[EndpointPipeline], str], EndpointPipeline]) -> MakeEndpointPipeline:
    """Makes the pipeline on `embedded`, `kafka`, or `memory`."""
    return partial(open_pipeline, EndpointPipeline)


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
