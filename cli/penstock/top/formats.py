"""Numbers in few characters, for a narrow terminal."""

from collections.abc import Sequence

UNKNOWN = "–"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"


def format_count(number: float | None) -> str:
    """Return a count in at most seven characters: `12,345`, `1.2M`."""
    if number is None:
        return UNKNOWN
    if abs(number) < 10 and number != round(number):
        return f"{number:.1f}"
    return f"{number:,.0f}" if abs(number) < 999_999.5 else f"{number / 1e6:,.1f}M"


def format_seconds(number: float | None) -> str:
    """Return a duration: `0 s`, `4.2 ms`, `120 ms`, `3.4 s`, `12 s`, `2 min`."""
    if not number:
        return UNKNOWN if number is None else "0 s"
    if number < 0.9995:
        return f"{number * 1e3:.1f} ms" if number < 0.00995 else f"{number * 1e3:.0f} ms"
    if number < 600:
        return f"{number:.1f} s" if number < 9.95 else f"{number:.0f} s"
    return f"{number / 60:,.0f} min"


def format_share(number: float | None) -> str:
    """Return a share as a percentage: `64%`."""
    return UNKNOWN if number is None else f"{number:.0%}"


def draw_bar(number: float | None, width: int) -> str:
    """Return a bar of `width` characters of which the share `number` is filled, to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, number or 0.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "·")


def draw_sparkline(numbers: Sequence[float], width: int) -> str:
    """Return the last `width` numbers, one character each, scaled to the largest of them."""
    shown = list(numbers)[-width:]
    most = max(shown, default=0.0)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(number / most * top) if most > 0 else 0] for number in shown).rjust(width)
