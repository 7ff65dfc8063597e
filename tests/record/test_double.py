"""The double of the record inherits from `Record` nothing that needs a server."""

import ast
import inspect
import textwrap
from typing import Any

import pytest

from penstock.config.settings import RecordSettings
from penstock.record import Record
from penstock.testing.record import MemoryRecord, MemoryRecords

pytestmark = pytest.mark.proof


class UnfinishedRecord(MemoryRecord):
    """The double as it would be before it had its own way of this method."""

    renew_session = Record.renew_session


def find_missing_attributes(double: type[MemoryRecord]) -> set[str]:
    """Return what the public methods that a double inherits need of `self` and do not find, also by way of others."""
    made, missing, seen = double(MemoryRecords(), RecordSettings()), set[str](), set[str]()
    unread = {name for name in vars(Record) if not name.startswith("_")}
    while unread:
        name = unread.pop()
        seen.add(name)
        found = inspect.getattr_static(double, name, None)
        if found is None or found is not vars(Record).get(name):
            continue
        function: Any = found.fget if isinstance(found, property) else found
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
        used = {
            node.attr
            for node in ast.walk(code)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        missing |= {attribute for attribute in used if not hasattr(made, attribute)}
        unread |= used - seen
    return missing


def test_what_the_double_inherits_does_without_a_server() -> None:
    assert find_missing_attributes(MemoryRecord) == set()


def test_a_method_that_the_double_lacks_is_found() -> None:
    assert "_client" in find_missing_attributes(UnfinishedRecord)
