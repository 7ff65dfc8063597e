"""Fixtures every test may use."""

import logging
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from penstock.local.kafka import find_or_start_kafka
from penstock.local.valkey import find_or_start_redis
from penstock.names import Pipeline
from sim import forked
from sim.servers import serve_address
from tests.commands import Terminal

forked.preload_modules(
    "tests.bus.worker_process", "tests.ingest.meter_process", "tests.kvstore.arena_child", "tests.kvstore.disk_child"
)

# No example has a time limit of its own: on a loaded machine any may take long. All else is as Hypothesis has it here.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap address of a real Kafka."""
    yield from serve_address(find_or_start_kafka(tmp_path_factory.mktemp("kafka")))


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
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """Runs commands in this process."""
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def pipeline() -> Pipeline:
    """A pipeline no other test uses."""
    return Pipeline(f"t-{uuid.uuid4().hex[:12]}")
