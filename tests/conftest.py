"""Fixtures every test may use."""

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import settings

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Member
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, EngineSettings, RecordSettings
from penstock.names import MODELS_KEY, Pipeline
from penstock.record import Record
from sim import forked
from sim.kafka_server import find_or_start_kafka
from sim.redis_servers import find_or_start_redis
from sim.servers import serve_address, share_server
from tests.commands import Terminal

if TYPE_CHECKING:  # it needs torch, which most tests do without
    from sim.line import InProcessPipeline

    MakeLine = Callable[..., InProcessPipeline]

forked.preload_modules("tests.bus.worker_process", "tests.ingest.meter_process", "tests.kvstore.host_child")

# Processes that run tests beside each other have less than a core each: torch's threads would spin for one. Nor has one
# of them a quarter of the memory for the KV pool of each engine. Tokens are compared with those of `generate()`,
# whatever dtype the processor would choose.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_ENGINE = {"threads": 1, "pool_mb": 256, "dtype": "float32"}


def _set_engine_defaults() -> None:
    """Give these settings to engines of this process and of those that it starts. Pages show the product's defaults."""
    fields = EngineSettings.model_fields
    usual = {name: fields[name].default for name in _ENGINE}
    for name, value in _ENGINE.items():
        os.environ.setdefault(f"{EngineSettings.prefix}{name.upper()}", str(value))
        fields[name].default = value
    EngineSettings.model_rebuild(force=True)
    for name, value in usual.items():
        fields[name].default = value


_set_engine_defaults()

# No example has a time limit of its own: on a loaded machine any may take long. All else is as Hypothesis has it here.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

CLIENTS, PROOF = "pytestmark = pytest.mark.clients", "mark.proof"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that cannot be imported without the extra `clients`, and in `make test` those without a proof."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    is_without_proof = config.option.markexpr.startswith("proof") and PROOF not in text
    return is_without_proof or (CLIENTS in text and find_spec("anthropic") is None) or None


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap address of a real Kafka, the same in all processes of this run: each broker is a Java machine."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "TEST_WORKER" in os.environ else base) / "shared-kafka"
    yield from serve_address(share_server(shared, find_or_start_kafka(tmp_path_factory.mktemp("kafka"))))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a real Redis. It is shared: tests keep apart by their pipeline's name."""
    yield from serve_address(find_or_start_redis(tmp_path_factory.mktemp("redis")))


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Commands say themselves what is wrong, and silence what they are made of: not beyond the test that runs them."""
    loggers = logging.getLogger(), logging.getLogger("penstock.kvstore")
    levels, silenced = [logger.level for logger in loggers], logging.root.manager.disable
    yield
    logging.disable(silenced)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    """Leaves after the test what the test or its fixtures have entered."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """Runs commands in this process."""
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def pipeline() -> Pipeline:
    """A pipeline no other test uses."""
    return Pipeline(f"t-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def addresses(redis_url: str, pipeline: Pipeline) -> Addresses:
    """Where the pipeline is, on Redis alone. No model of another test's pipeline is known there."""
    with redis.Redis.from_url(redis_url) as client:
        client.delete(MODELS_KEY)
    return Addresses(pipeline=pipeline.name, stream_url=redis_url)


@pytest.fixture
def make_line(
    request: pytest.FixtureRequest, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, exits: ExitStack
) -> "MakeLine":
    """Makes pipelines in this process: `make_line(bus, record=…, kv=…)`. They are closed after the test.

    In a test with the mark `in_memory` there are no servers, but doubles of them.
    """
    from sim.line import InProcessPipeline

    in_memory = request.node.get_closest_marker("in_memory") is not None

    def make(bus: str = "embedded", kv_url: str = "", **settings: Any) -> "InProcessPipeline":
        if bus != "kafka":  # only Kafka delivers late: an idle worker may ask often
            monkeypatch.setattr("penstock.worker.worker.IDLE_POLL_S", 0.01)
        if in_memory:
            made = InProcessPipeline(Addresses(pipeline=pipeline.name), in_memory=True, **settings)
        else:
            kafka = request.getfixturevalue("kafka") if bus == "kafka" else ""
            redis_url = request.getfixturevalue("redis_url")
            addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kafka=kafka, kv_url=kv_url)
            made = InProcessPipeline(addresses, **settings)
        return exits.enter_context(made)

    return make


@pytest.fixture
def line(make_line: "MakeLine") -> "InProcessPipeline":
    """A pipeline of one prefill and one decode worker in this process, with Redis as the bus."""
    return make_line()


@pytest.fixture
def server(redis_url: str) -> "Iterator[redis.Redis]":
    """A connection to the shared Redis."""
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


@pytest.fixture
def record(server: "redis.Redis", pipeline: Pipeline) -> Iterator[Record]:
    """The record, for a test that plays the workers."""
    with closing(Record(server, pipeline, RecordSettings(lease_s=30))) as made:
        yield made


@pytest.fixture
def bus(addresses: Addresses) -> Bus:
    """Redis Streams with the pipeline's topics."""
    made = connect_bus(addresses, BusSettings())
    made.create_topics()
    return made


@pytest.fixture
def member(bus: Bus) -> Iterator[Member]:
    """A member of the prefill group."""
    with bus.join_group("prefill", "a") as joined:
        yield joined
