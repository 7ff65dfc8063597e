"""How fast a worker's engine is, in seconds. Heartbeats tell it; placers and the controller reckon with it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self


class WorkerSpeed(NamedTuple):
    """The measured speed of one worker: the object `load.speed` of its heartbeat, with these names.

    What is not known is None, or left out. It is never 0, which would be infinitely fast.
    """

    # prompt_token_s       a prompt token now: its part of a full step beside the rows of this moment
    # idle_prompt_token_s  the same without rows, and with nothing else on the machine: it differs with hardware alone
    # num_rows             answers that are decoded now
    # step_s               a step now, before its first row and prompt token
    # row_s                what one more answer adds to each step now, at the context that answers have now
    # slowdown             how much longer steps take lately than on the idle machine: step_s / slowdown is the idle one

    prompt_token_s: float
    idle_prompt_token_s: float
    num_rows: int
    step_s: float | None = None
    row_s: float | None = None
    slowdown: float | None = None

    @classmethod
    def parse(cls, told: Any) -> Self | None:
        """Return what a heartbeat tells; None where it tells nothing, or something that cannot be a speed."""
        if not isinstance(told, Mapping) or not all(map(_is_possible, told.items())):
            return None
        try:
            return cls(**{name: told[name] for name in cls._fields if name in told})
        except TypeError:
            return None

    def as_json(self) -> dict[str, float]:
        """Return the object of the heartbeat, to four digits."""
        return {name: float(f"{value:.4g}") for name, value in self._asdict().items() if value is not None}


def _is_possible(told: tuple[str, Any]) -> bool:
    """Return whether a field has a value that it can have. Fields of later versions may have any."""
    name, value = told
    if name not in WorkerSpeed._fields:
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and (value >= 0 if name == "num_rows" else value > 0)
