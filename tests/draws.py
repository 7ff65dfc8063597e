"""Cases of tests. Of products each commit draws others; `TEST_WHOLE_PRODUCTS=1` runs them whole."""

import os
import random
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")
WHOLE = os.environ.get("TEST_WHOLE_PRODUCTS") == "1"


def draw_cases(cases: Iterable[T], count: int) -> list[T]:
    """Return so many of the cases in their order, or all where whole products are run."""
    listed = list(cases)
    drawn = random.Random(_read_commit()).sample(range(len(listed)), min(count, len(listed)))
    return listed if WHOLE else [listed[place] for place in sorted(drawn)]


@cache
def _read_commit() -> str:
    """Return the commit's name, or nothing where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return ""


def mark_some(cases: Iterable[Any], mark: pytest.MarkDecorator, count: int = 1) -> list[Any]:
    """Return the cases of a test, of which the first ones have a mark. A tuple has the values of several arguments."""
    made = [case if isinstance(case, ParameterSet) else pytest.param(*_list_values(case)) for case in cases]
    return [case._replace(marks=(*case.marks, mark)) if place < count else case for place, case in enumerate(made)]


def _list_values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
