"""One of several servers is killed for good while real worker processes answer: another one takes its place."""

from collections.abc import Iterator

import pytest

from tests.pipeline.site import ReplicatedSite, site_on, streaming


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedSite]:
    yield from site_on("embedded", tmp_path_factory, ReplicatedSite)


def test_the_master_of_redis_is_killed_while_streams_run(embedded: ReplicatedSite) -> None:
    """Redis is the bus too. No worker ends, all is answered, nothing doubled."""
    with streaming(embedded):
        embedded.group.master.kill()
    embedded.wait_ready()
