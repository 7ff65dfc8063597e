"""The load of the last ten minutes: what differs by chance alone is no change of it."""

import pytest

from penstock.autoscale.windows import LoadWindows, Passed

LOOK_S = 5.0


def make_windows(rates: list[float], prompt_s: list[float]) -> LoadWindows:
    """Return windows of minutes with these arrivals a second, all of them prompts of so many seconds."""
    windows = LoadWindows()
    for minute, (rate, seconds) in enumerate(zip(rates, prompt_s, strict=True)):
        for look in range(12):
            num, at_s = rate * LOOK_S, minute * 60 + (look + 1) * LOOK_S
            windows.add_passed(Passed(at_s, LOOK_S, num, num, num * seconds, num * seconds**2 * 2, 0.0))
    return windows


def test_a_minute_of_more_arrivals_by_chance_changes_no_rate() -> None:
    windows = make_windows([1.0] * 9 + [1.3], [0.1] * 10)  # two standard deviations of 60
    assert windows.rate_up == windows.rate_down == windows.rate_steady == pytest.approx(1.03)


def test_the_rate_after_a_change_is_that_of_the_whole_time_since() -> None:
    """Not that of the last minute, which chance makes larger."""
    windows = make_windows([1.0] * 5 + [5.0, 6.5, 5.0, 5.0, 6.5], [0.1] * 10)
    assert windows.rate_up == windows.rate_down == pytest.approx(5.6)


def test_a_change_is_seen_within_a_minute() -> None:
    assert make_windows([1.0] * 9 + [2.0], [0.1] * 10).rate_up == pytest.approx(2.0)
    fallen = make_windows([4.0] * 9 + [1.0], [0.1] * 10)
    assert fallen.rate_up == pytest.approx(1.0)
    assert fallen.rate_down == pytest.approx(3.7)


def test_prompts_count_since_their_mean_changed() -> None:
    """A minute of longer prompts by chance counts as much as the others; three times as long ones are a change."""
    by_chance = make_windows([1.0] * 10, [0.1] * 9 + [0.13]).shape
    assert by_chance is not None
    assert by_chance.prompt_s == pytest.approx(0.103)
    changed = make_windows([1.0] * 10, [0.1] * 8 + [0.3] * 2).shape
    assert changed is not None
    assert changed.prompt_s == pytest.approx(0.3)
    assert changed.prompt_s2 == pytest.approx(0.18)


def test_nothing_is_known_of_nothing() -> None:
    windows = LoadWindows()
    assert (windows.rate_up, windows.rate_down, windows.shape) == (None, None, None)
