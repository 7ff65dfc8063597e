"""The tree of errors is the one that is drawn."""

import re

from penstock import errors
from penstock.errors import REQUEST_ERRORS, DeliveryLost, PenstockError, RequestError


def subclasses(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in subclasses(child))]


OURS = [cls for cls in subclasses(PenstockError) if cls.__module__ == errors.__name__]


def test_every_request_error_has_a_code_of_its_own() -> None:
    kinds = subclasses(RequestError)
    codes = [vars(kind)["code"] for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", code) for code in codes)
    assert {kind.code: kind for kind in kinds if kind is not RequestError and issubclass(kind, RequestError)} == (
        REQUEST_ERRORS
    )


def test_a_lost_delivery_says_which() -> None:
    error = DeliveryLost(("a", "b"))
    assert error.deliveries == ["a", "b"]
    assert "2 deliveries" in str(error)
