"""What the tests of chaos share."""

from collections.abc import Iterator

import pytest

from sim.chaos.nursery import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where workers are forked."""
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()
