"""A trace: when requests came, and how long their prompts and answers were."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PlanError
from penstock.names import CLASSES, PriorityClass

TIME_FIELDS = {"at_s": 1.0, "timestamp": 1e-3}
"""Fields for the time of arrival, and their units in seconds: `timestamp` is in milliseconds, as in public traces."""
PROMPT_FIELDS, OUTPUT_FIELDS = ("prompt_tokens", "input_length"), ("output_tokens", "output_length")
HASH_BLOCK_TOKENS = 512
"""Tokens of a block in traces that name the blocks of prompts."""


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    """0 for texts, of which vectors or scores are computed."""
    hash_ids: tuple[int, ...] = ()
    """The prompt's blocks, where the trace names them: equal numbers are equal beginnings."""
    priority_class: PriorityClass = "interactive"
    chat: str = ""
    """The id that all turns of one chat share; empty if the trace has none."""


def has_answers(trace: Sequence[Arrival]) -> bool:
    """Return whether any request has an answer of tokens: those of texts alone have none."""
    return any(one.output_tokens for one in trace)


def read_trace(file: Path) -> list[Arrival]:
    """Return the requests of a JSONL file, by time. Raises `PlanError` with the line at fault."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{file}: {error}") from None
    found = sorted(_parse_lines(file, lines))
    if not found:
        raise PlanError(f"{file} has no request")
    return found


def _parse_lines(file: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            unit = next(TIME_FIELDS[name] for name in TIME_FIELDS if name in row)
            at_s = unit * float(_get_field(row, tuple(TIME_FIELDS)))
            lengths = (int(_get_field(row, PROMPT_FIELDS)), int(_get_field(row, OUTPUT_FIELDS)))
            if (priority_class := row.get("class", "interactive")) not in CLASSES:
                raise ValueError(f"its class is not one of {', '.join(CLASSES)}")
            arrival = Arrival(
                at_s, *lengths, tuple(map(int, row.get("hash_ids", ()))), priority_class, str(row.get("chat", ""))
            )
        except (ValueError, TypeError, StopIteration) as error:
            why = "no at_s or timestamp" if isinstance(error, StopIteration) else error
            raise PlanError(f"{file}, line {number}: {why}") from None
        if not math.isfinite(arrival.at_s) or arrival.prompt_tokens < 1 or arrival.output_tokens < 0:
            raise PlanError(f"{file}, line {number}: it needs a time, a prompt token and no negative answer")
        yield arrival


def _get_field(row: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"no {' or '.join(names)}")


def compute_peak(trace: Sequence[Arrival], what: Callable[[Arrival], float], window_s: float) -> float:
    """Return the highest rate of `what` per second, over windows of `window_s`."""
    most = inside = 0.0
    first = 0
    for arrival in trace:
        inside += what(arrival)
        while arrival.at_s - trace[first].at_s >= window_s:
            inside -= what(trace[first])
            first += 1
        most = max(most, inside)
    return most / window_s


def compute_quantile(numbers: Sequence[float], share: float) -> float:
    """Return the smallest number that at least `share` of the numbers do not exceed."""
    return sorted(numbers)[max(0, math.ceil(share * len(numbers)) - 1)]
