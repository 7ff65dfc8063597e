"""A plugin of pytest that runs tests in reverse order: `PYTEST_ADDOPTS='-p tools.reverse_order' make test`.

A test that needs what another one left behind, or is disturbed by it, fails one way or the other.
"""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reverse the order of all collected tests."""
    items.reverse()
