"""Two regions' brokers, `eu` and `us`, with MirrorMaker between them: three Java machines, started once."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock import failpoints
from penstock.names import Pipeline
from sim.kafka_server import KafkaServer
from sim.mirror_maker import MirrorMaker
from sim.servers import start_or_skip
from tests.regions.copied import CopiedRegion

SMALL_HEAP = ("-Xmx256m",)


@dataclass(frozen=True)
class CopiedRegions:
    """The servers of `eu` and `us`, and what copies from one to the other."""

    eu: KafkaServer
    us: KafkaServer
    mirror: MirrorMaker


@pytest.fixture(scope="package")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CopiedRegions]:
    """Brokers with a MirrorMaker between them. A test that stops one starts it again."""
    base = tmp_path_factory.mktemp("regions")
    eu, us = (KafkaServer(base / name, jvm_options=SMALL_HEAP) for name in ("eu", "us"))
    start_or_skip(eu.start)
    with eu, us, MirrorMaker(base / "mirror", eu.bootstrap, us.bootstrap) as mirror:
        yield CopiedRegions(eu, us, mirror)


@pytest.fixture
def copied_region(pipeline: Pipeline, kafka: str, redis_url: str) -> Iterator[CopiedRegion]:
    """The copy of a region, on the Kafka of all tests."""
    made = CopiedRegion(pipeline, kafka, redis_url)
    yield made
    made.close()


@pytest.fixture
def armed() -> Iterator[None]:
    """The test arms failpoints of this process."""
    yield
    failpoints.disarm()
