"""Each benchmark runs to its end in a size of seconds, and writes its figures.

It is forked from a process that has imported torch and transformers, which take longer than most runs.
"""

import json
import math
import os
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import common
from sim.forked import fork_process, fork_server
from sim.waiting import PATIENCE_S

FOLDER = Path(common.__file__).parent
OTHER_ENVIRONMENTS = {"vllm_engine"}
"""It needs vLLM, which has an environment of its own."""
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text() and path.stem not in OTHER_ENVIRONMENTS
)
RUNS = [f"{name} --smoke" for name in NAMES] + [
    *(
        f"engine --smoke --row {rows}"
        for rows in ("moe", "avx2", "forms gguf loads", "linears kv_int8", "hybrid", "drafts")
    ),
    "chaos --smoke --one-kill",
    "pipeline --smoke --mixed",
    "pipeline --smoke --late",
]
FIGURES = json.loads((Path(__file__).parent / "figures.json").read_text())
"""By run, the names of its figures that do not need what may be missing: a broker, and the engines of others."""


def test_each_run_has_its_figures() -> None:
    assert FIGURES.keys() == set(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_a_benchmark_runs_to_its_end(run: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    name, *arguments = run.split()
    ran = fork_process(name, tmp_path / "log", run_benchmark, name, *arguments, "--json", str(figures))
    status = ran.wait(PATIENCE_S)
    assert status == 0, ran.read_log_tail(200)
    found = json.loads(figures.read_text())
    assert not set(FIGURES[run].split()) - found.keys()
    numbers = [value for value in found.values() if isinstance(value, int | float)]
    assert numbers
    assert all(map(math.isfinite, numbers)), found


def run_benchmark(name: str, *arguments: str) -> None:
    """Run a benchmark as the main program of this process."""
    fork_server()
    sys.modules.pop(f"benchmarks.{name}", None)
    os.chdir(FOLDER.parent)
    sys.argv = [name, *arguments]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
