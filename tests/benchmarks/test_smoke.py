"""Each benchmark runs to its end in a size of seconds, and writes its figures."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common

FOLDER = Path(common.__file__).parent
OTHER_ENVIRONMENTS = {"vllm_engine", "vllm_kills"}
"""These need vLLM, which has an environment of its own."""
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text() and path.stem not in OTHER_ENVIRONMENTS | {"gateway_readers"}
)
ARGUMENTS = {"gpu": "--part 4 --device cpu"}
RUNS = [f"{name} {ARGUMENTS.get(name, '--smoke')}" for name in NAMES] + ["chaos --smoke --one-kill"]


@pytest.mark.parametrize("run", RUNS)
def test_a_benchmark_runs_to_its_end(run: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    name, *arguments = run.split()
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(figures)]
    ran = subprocess.run(
        command,
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = list_numbers(json.loads(figures.read_text()))
    assert found
    assert all(map(math.isfinite, found)), found


def list_numbers(figures: dict[str, Any]) -> list[float]:
    """Return all numbers; the benchmark of GPUs has its figures by part."""
    inner = [list_numbers(value) for value in figures.values() if isinstance(value, dict)]
    return [value for value in figures.values() if isinstance(value, int | float)] + [*itertools.chain(*inner)]
