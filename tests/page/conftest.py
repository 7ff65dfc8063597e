"""One pipeline for the page's tests, and a browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from penstock.local.processes import find_free_port
from sim.forked import ForkedStack
from sim.servers import start_or_skip
from sim.waiting import PATIENCE_S
from sim.workload import TOOL_MODEL
from tests.ingest.conftest import ENVIRONMENT
from tests.page.chromium import Tabs, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium. Without one the test is skipped; in CI it fails."""
    context = chromium()
    found = start_or_skip(context.__enter__)
    try:
        yield found
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def tabs(browser: Browser) -> Iterator[Tabs]:
    """Opens pages; after the test none of them may have complained."""
    tabs = Tabs(browser)
    yield tabs
    tabs.close()
    assert not tabs.complaints


@pytest.fixture(scope="module")
def line(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedStack]:
    """One prefill and two decode workers, and a gateway; not started where there is no browser to look at it."""
    directory = tmp_path_factory.mktemp("page")
    with ForkedStack(directory, pipeline="page", decode=2, gateway=find_free_port(), environment=ENVIRONMENT) as stack:
        stack.wait_until_ready(PATIENCE_S)
        yield stack


@pytest.fixture(scope="module")
def tool_line(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedStack]:
    """The same with a model that calls tools."""
    directory, environment = tmp_path_factory.mktemp("tools"), {**ENVIRONMENT, "PENSTOCK_ENGINE_MODEL": str(TOOL_MODEL)}
    with ForkedStack(directory, pipeline="tools", gateway=find_free_port(), environment=environment) as stack:
        stack.wait_until_ready(PATIENCE_S)
        yield stack
