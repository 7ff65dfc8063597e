"""Replaces functions and classes while a test runs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replace_values(prefix: str | tuple[str, ...], doubles: Mapping[int, object]) -> Iterator[None]:
    """Put doubles into all loaded modules whose names begin with `prefix`, by the `id()` of what each replaces."""
    changed: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix):
            for attribute, value in list(vars(module).items()):
                if (double := doubles.get(id(value))) is not None:
                    changed.append((module, attribute, value))
                    setattr(module, attribute, double)
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
