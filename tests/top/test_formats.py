"""What stands in the cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.top.formats import draw_bar, draw_sparkline, format_count, format_seconds, format_share


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "–"), (0, "0"), (3, "3"), (3.14, "3.1"), (12.6, "13"), (12345, "12,345"), (999_999.7, "1.0M"),
        (2.5e6, "2.5M"),
    ],
)  # fmt: skip
def test_counts(number: float | None, shown: str) -> None:
    assert format_count(number) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "–"), (0.0, "0 s"), (0.0042, "4.2 ms"), (0.0099999, "10 ms"), (0.12, "120 ms"), (0.9999, "1.0 s"),
        (3.44, "3.4 s"), (9.99, "10 s"), (12.3, "12 s"), (700, "12 min"),
    ],
)  # fmt: skip
def test_times(number: float | None, shown: str) -> None:
    assert format_seconds(number) == shown


def test_bars_and_shares() -> None:
    assert [draw_bar(number, 4) for number in (None, 0.0, 0.125, 0.5, 1.0, 7.0)] == [
        "····", "····", "▌···", "██··", "████", "████",
    ]  # fmt: skip
    assert [format_share(number) for number in (None, 0.0, 0.636, 1.0)] == ["–", "0%", "64%", "100%"]


def test_a_sparkline_ends_with_the_last_number() -> None:
    assert draw_sparkline([], 3) == "   "
    assert draw_sparkline([0, 0], 3) == " ▁▁"
    assert draw_sparkline([9, 0, 1, 4, 8], 4) == "▁▂▅█"


@given(numbers=st.lists(st.floats(0, 1e12)), width=st.integers(1, 40), number=st.floats(0, 1e9) | st.none())
def test_nothing_is_wider_than_its_place(numbers: list[float], width: int, number: float | None) -> None:
    assert len(draw_sparkline(numbers, width)) == width
    assert len(draw_bar(number, width)) == width
    assert len(format_count(number)) <= 8
