"""What the tests of chaos share."""

from collections.abc import Iterator

import pytest

from sim.chaos.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Where workers are forked."""
    made = ForkServer(tmp_path_factory.mktemp("fork-server"))
    yield made
    made.close()
