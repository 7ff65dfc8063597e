"""A running mean in which older values count less."""

import math


class RunningMean:
    """A weighted mean: each addition keeps the weight of the earlier values, or reduces it.

    One thread adds, any thread may read. The owner's attribute says the unit, such as `mean_prompt_tokens` or
    `tokens_per_s`, where seconds are the weight.
    """

    __slots__ = ("_max_weight", "total", "weight")

    def __init__(self, max_weight: float = math.inf) -> None:
        """`max_weight`: the most weight of all values; beyond it, older values lose the weight of each new one."""
        self._max_weight = max_weight
        self.total = self.weight = 0.0

    def add(self, amount: float, weight: float = 1.0, *, kept: float = 1.0) -> None:
        """Add `amount`, a value times its weight. Earlier amounts are first multiplied by `kept` (0 to 1)."""
        if self.weight and self.weight * kept + weight > self._max_weight:
            kept = max(0.0, self._max_weight - weight) / self.weight
        self.total, self.weight = self.total * kept + amount, self.weight * kept + weight

    @property
    def value(self) -> float | None:
        """The mean; None while nothing has any weight."""
        weight = self.weight
        return self.total / weight if weight else None
