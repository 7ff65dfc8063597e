"""One pipeline for the page's tests, and a browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from sim.forked import ForkedStack
from sim.servers import start_or_skip
from sim.workload import TOOL_MODEL
from tests.gateways import open_stack
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
    with open_stack(tmp_path_factory.mktemp("page"), pipeline="page", decode=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def tool_line(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedStack]:
    """The same with a model that calls tools."""
    with open_stack(tmp_path_factory.mktemp("tools"), TOOL_MODEL, pipeline="tools") as stack:
        yield stack
