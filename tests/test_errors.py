"""The tree of errors is the one that is drawn."""

import inspect
import re
import textwrap

import pytest

from penstock import errors
from penstock.errors import REQUEST_ERRORS, DeliveryLost, PenstockError, RequestError


def subclasses(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in subclasses(child))]


OURS = [cls for cls in subclasses(PenstockError) if cls.__module__ == errors.__name__]


def drawn() -> list[tuple[str, str]]:
    """Each class of the docstring's tree with its parent."""
    found, path = [], dict[int, str]()
    _, _, tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")
    for line in textwrap.dedent(tree).splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z]\w+)", line)
        if match:
            depth = len(match[1])
            parent = path[max((d for d in path if d < depth), default=-1)] if depth else ""
            path = {d: name for d, name in path.items() if d < depth} | {depth: match[2]}
            found.append((match[2], parent))
    return found


def test_the_tree_is_drawn_as_it_is() -> None:
    real = {cls.__name__: cls.__base__.__name__ for cls in OURS if cls is not PenstockError and cls.__base__}
    tree = dict(drawn())
    assert tree.pop("PenstockError") == ""
    assert tree == real
    assert len(drawn()) == len(OURS)


def test_every_request_error_has_a_code_of_its_own() -> None:
    kinds = subclasses(RequestError)
    codes = [vars(kind)["code"] for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", code) for code in codes)
    assert {kind.code: kind for kind in kinds if kind is not RequestError and issubclass(kind, RequestError)} == (
        REQUEST_ERRORS
    )


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_every_error_says_what_it_is(cls: type[Exception]) -> None:
    assert cls.__doc__
    assert issubclass(cls, PenstockError)


def test_a_lost_delivery_says_which() -> None:
    error = DeliveryLost(("a", "b"))
    assert error.deliveries == ["a", "b"]
    assert "2 deliveries" in str(error)
