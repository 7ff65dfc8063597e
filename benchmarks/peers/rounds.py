"""Measure several engines by turns: every cell in every round by every engine, one right after the other.

A machine's speed drifts by more than engines differ. Ratios are therefore formed within a round, between neighbours,
and the median over the rounds is what counts.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.process import Side, SideFailed, is_available
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import Shape
from benchmarks.peers.workload import CHECK_CELL, Cell, Request
from benchmarks.peers.write import make_model_directory

OURS = "penstock"
STATIC = ("generate",)
"""These cannot do mixed work."""
LIMITS = {"decode_b1": "bandwidth", "prefill_2048": "gemm"}
"""What of the machine's limits is measured beside a cell."""
_WARM_NEW = 8
HOPELESS_SHARE = 0.4
_LOAD_TIMEOUT_S = 900.0


@dataclass
class Results:
    """All that was measured of one shape."""

    shape: Shape
    loads: dict[str, dict[str, float]] = field(default_factory=dict)
    """By side: seconds, see `serve`."""
    values: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    """By cell, side and round: tokens a second; the limits' are bytes and operations a second."""

    def list_sides(self) -> list[str]:
        """Ours first."""
        return list(self.loads)

    def compute_median(self, cell: str, side: str) -> float | None:
        """Of all rounds; None where nothing was measured."""
        values = self.values.get(cell, {}).get(side)
        return statistics.median(values.values()) if values else None

    def compute_ratio(self, cell: str, side: str) -> float | None:
        """Ours to a side, the median over the rounds that both have."""
        return self.compare_sides(cell, OURS, side)

    def compare_sides(self, cell: str, one: str, other: str) -> float | None:
        """One side to another, the median over the rounds that both have."""
        mine, theirs = (self.values.get(cell, {}).get(name, {}) for name in (one, other))
        ratios = [mine[number] / theirs[number] for number in sorted(mine.keys() & theirs.keys())]
        return statistics.median(ratios) if ratios else None

    def compute_best_ratio(self, cell: str, one: str = OURS, others: Sequence[str] | None = None) -> float | None:
        """One side to the best of others, which are by default all that are there."""
        if others is None:
            others = [side for side in self.list_sides() if side not in {one, *LIMITS.values()}]
        ratios = [ratio for side in others if (ratio := self.compare_sides(cell, one, side)) is not None]
        return min(ratios, default=None)


class Rounds:
    """The sides of one shape, loaded, and their results so far. Use as a context manager, which ends all processes."""

    def __init__(self, shape: Shape, cells: tuple[Cell, ...], pool_mb: int, *, is_forked: bool = False) -> None:
        """`is_forked`: whether ours are forked, as `Side` has it."""
        self.shape, self.cells, self._is_forked = shape, cells, is_forked
        self.say = partial(print, shape.name, flush=True)
        self.results = Results(shape)
        self._model = make_model_directory(shape, DIRECTORY / "models")
        self._logs = DIRECTORY / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._how: dict[str, Any] = {"threads": 2, "pool_mb": pool_mb}
        self._sides: dict[str, Side] = {}
        self._limits: Side | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for side in [*self._sides.values(), *([self._limits] if self._limits else [])]:
            side.close()

    def load_side(self, name: str, engine: str = "", **form: str) -> None:
        """Start a side and load the model in it; one that fails is left out, and why is said.

        `engine` is named where it has several sides; `form` says how this one has its weights.
        """
        engine, pool_mb = engine or name, self._how["pool_mb"]
        missing_mb = _estimate_needed_mb(self.shape, pool_mb) - _read_free_mb()
        if not is_available(engine):
            self.say(f"{name}: left out, not installed; python -m benchmarks.peers.setup installs it")
            return
        if missing_mb > 0:
            self.say(f"{name}: left out, {missing_mb:,} MB of memory are missing")
            return
        try:
            side, answer = self.start_side(name, engine, **form)
        except SideFailed as error:
            self.say(f"{name}: left out, {error}")
            return
        if name == "limits":
            self._limits = side
            return
        self._sides[name], self.results.loads[name] = side, answer
        self.say(f"{name}: loaded in {answer['load_s']:.1f} s")

    def start_side(self, name: str, engine: str, **given: Any) -> tuple[Side, dict[str, float]]:
        """Start an engine's process and load the model in it; return it with what that cost. Raises `SideFailed`."""
        how = self._how | given
        log = self._logs / f"{self.shape.name}-{name.replace(' ', '-')}.log"
        side = Side(engine, log, how["threads"], how["pool_mb"], is_forked=self._is_forked)
        try:
            return side, side.ask("load", _LOAD_TIMEOUT_S, model=str(self._model), **how)
        except SideFailed:
            side.close()
            raise

    def run_rounds(self, count: int, max_s: float = math.inf) -> None:
        """Warm up, and run rounds; after the first one none begins later than `max_s`."""
        self._warm_up()
        begun_s = time.monotonic()
        for number in range(count):
            if number == 0 or time.monotonic() - begun_s < max_s:
                self._run_round(number)

    def check_tokens(self) -> None:
        """Say whose tokens are not those of the first side: then a conversion may be wrong, or rounding decided."""
        requests = CHECK_CELL.make_requests(self.shape.vocabulary, 0)
        tokens = {name: self._ask_side(name, "run", requests=requests) for name in list(self._sides)}
        said = {name: answer["tokens"][0] for name, answer in tokens.items() if answer is not None}
        first: list[int] = next(iter(said.values()), [])
        for name, own in said.items():
            same = next((at for at, pair in enumerate(zip(own, first, strict=True)) if pair[0] != pair[1]), len(first))
            if same < len(first):
                self.say(f"{name}: after {same} tokens it says something else than {next(iter(said))}")

    def _warm_up(self) -> None:
        """A short run of each cell's kind by each side."""
        for cell in self.cells:
            for name in list(self._sides):
                if not cell.is_mixed:
                    requests = cell.make_requests(self.shape.vocabulary, -1)
                    few = [(prompt, min(new, _WARM_NEW)) for prompt, new in requests]
                    self._ask_side(name, "run", requests=few, temperature=cell.temperature)

    def _run_round(self, number: int) -> None:
        """One round: every cell by every side that has a chance in it, the order reversed every other round."""
        for cell in self.cells:
            requests = cell.make_requests(self.shape.vocabulary, number)
            values = self.results.values.setdefault(cell.name, {})
            names = [name for name in self._sides if self._is_worth_asking(cell, name, values)]
            for name in names if number % 2 == 0 else reversed(names):
                self._measure_cell(cell, name, number, requests)
            if cell.name in LIMITS and self._limits is not None:
                limit = LIMITS[cell.name]
                with contextlib.suppress(SideFailed):
                    values.setdefault(limit, {})[number] = self._limits.ask(limit)
            self.say(f"round {number + 1} {cell.name}: " + ", ".join(
                f"{name} {found[number]:.4g}" for name, found in values.items() if number in found
            ))  # fmt: skip

    def ask_ours(self, do: str, **given: Any) -> Any:
        """What only our engine can be asked; None if it is not there."""
        return self._ask_side(OURS, do, **given) if OURS in self._sides else None

    def _is_worth_asking(self, cell: Cell, name: str, values: dict[str, dict[int, float]]) -> bool:
        """Not what it cannot do; nor again where it was far behind the best of the others, at any temperature."""
        if cell.is_mixed and name in STATIC:
            return False
        if name not in values:
            values = self.results.values.get(cell.greedy_name, {})
        if name == OURS or name not in values:
            return True
        best = max(max(found.values()) for side, found in values.items() if side not in {OURS, *LIMITS.values()})
        return max(values[name].values()) >= HOPELESS_SHARE * best

    def _measure_cell(self, cell: Cell, name: str, number: int, requests: list[Request]) -> None:
        answer = self._ask_side(name, "run", requests=requests, temperature=cell.temperature)
        if answer is not None:
            values = self.results.values[cell.name].setdefault(name, {})
            values[number] = cell.compute_value(answer["timeline"], requests)

    def _ask_side(self, name: str, do: str, **given: Any) -> Any:
        """The answer; a side that fails is closed, and takes no part in what follows."""
        try:
            return self._sides[name].ask(do, _LOAD_TIMEOUT_S, **given)
        except SideFailed as error:
            self.say(f"{name}: out from here on, {error}")
            self._sides.pop(name).close()
            return None


def _estimate_needed_mb(shape: Shape, pool_mb: int) -> int:
    """Memory for an engine: weights in the form they come and in its own, activations, libraries."""
    return round(2.5 * shape.file_bytes / 2**20) + pool_mb + 1500


def _read_free_mb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))
