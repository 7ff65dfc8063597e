"""Two regions' brokers, `eu` and `us`, with MirrorMaker between them: three Java machines, started once."""

from collections.abc import Iterator

import pytest

from penstock import failpoints
from penstock.names import Pipeline
from sim.mirror_maker import MirroredKafkas
from sim.servers import start_or_skip
from tests.regions.copied import CopiedRegion


@pytest.fixture(scope="package")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MirroredKafkas]:
    """Brokers with a MirrorMaker between them. A test that stops one starts it again."""
    made = MirroredKafkas(tmp_path_factory.mktemp("regions"))
    start_or_skip(made.__enter__)
    yield made
    made.__exit__()


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
