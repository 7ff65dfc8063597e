"""How fast a model whose layers keep a state answers one sequence and several.

`python -m benchmarks.hybrid_decode` compares the model of `benchmarks.hybrid` with a dense one of about as many
parameters, and with `--before FOLDER` with itself on the modules of another checkout, whose native libraries are built.
Each side is a process that reads numbers of sequences, and answers each with the seconds of a decode step.
"""

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Arguments, describe_machine, make_parser, report_figures
from benchmarks.comparison import compute_ratio, compute_ratios, measure_in_turns, print_table
from benchmarks.hybrid import SIZES, SMOKE_SIZES, build_model
from benchmarks.systems import GREEDY, time_decode_steps
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence

HYBRID, DENSE = "qwen3_5_text", "qwen3"
SEVERAL, STEPS, PROMPT_TOKENS = 16, 6, 8


@dataclass(frozen=True)
class DecodeArguments(Arguments):
    """The arguments of all benchmarks, and a checkout to compare with."""

    before: Path | None = None


class Side:
    """A process with a model, of this checkout's modules or of another's."""

    def __init__(self, kind: str, layers: int, size: str, checkout: Path | None) -> None:
        environment = dict(os.environ)
        if checkout is not None:
            parts = [str(folder.parent.resolve()) for folder in checkout.glob("*/penstock")]
            environment["PYTHONPATH"] = os.pathsep.join([*parts, str(Path(__file__).parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hybrid_decode", "--side", kind, str(layers), size],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def wait_until_ready(self) -> int:
        """Return the number of the model's parameters when it is built."""
        return int(self._read_line())

    def measure_step(self, num_sequences: int) -> float:
        """Return the seconds of a decode step over so many sequences."""
        assert self._process.stdin is not None
        print(num_sequences, file=self._process.stdin, flush=True)
        return float(self._read_line())

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side has ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def run(given: DecodeArguments) -> dict[str, float]:
    """Measure, and return the figures."""
    layers, rounds = given.choose_size((24, 5), (8, 3), (4, 1))
    # A dense layer has four fifths of the other's weights.
    forms: dict[str, tuple[str, int, Path | None]] = {
        "hybrid": (HYBRID, layers, None), "dense": (DENSE, layers * 5 // 4, None),
    }  # fmt: skip
    if given.before is not None:
        forms["before"] = (HYBRID, layers, given.before)
    with ExitStack() as exits:
        sides = {
            name: exits.enter_context(closing(Side(kind, count, given.size, checkout)))
            for name, (kind, count, checkout) in forms.items()
        }
        found = {f"{name}_parameters": float(side.wait_until_ready()) for name, side in sides.items()}
        turns = {
            (name, count): lambda _, side=side, count=count: side.measure_step(count)
            for name, side in sides.items()
            for count in (1, SEVERAL)
        }
        times = measure_in_turns(turns, rounds, "decode", num_warm=1)
    print_table({f"{name}, {count} at once": some for (name, count), some in times.items()}, "ms a step", 1e3)
    found |= {f"{name}_step_b{count}_ms": 1e3 * statistics.median(some) for (name, count), some in times.items()}
    gains = {name: compute_ratios(times, (name, 1), (name, SEVERAL)) for name in sides}
    found |= {f"{name}_batch_gain": SEVERAL * statistics.median(some) for name, some in gains.items()}
    found["hybrid_batch_gain_vs_dense"] = compute_ratio(gains, "hybrid", "dense")
    if given.before is not None:
        for count in (1, SEVERAL):
            found[f"hybrid_decode_b{count}_vs_before"] = compute_ratio(times, ("before", count), ("hybrid", count))
    return found


def measure_step(model: LoadedModel, settings: EngineSettings, num_sequences: int) -> float:
    """Return the median of the seconds of some decode steps."""
    engine = Engine(model, settings)
    prompt = list(range(PROMPT_TOKENS))
    seqs = [
        Sequence(f"seq-{n}", [n, *prompt], sampling=GREEDY, seed=0, max_new_tokens=STEPS + 9)
        for n in range(num_sequences)
    ]
    return statistics.median(time_decode_steps(engine, seqs, STEPS))


def serve_step_times(kind: str, layers: int, size: str) -> None:
    """Build a model, and answer each number of sequences with the seconds of a step."""
    pool_mb, dtype, sizes = (64, "float32", SMOKE_SIZES) if size == "smoke" else (1024, "bfloat16", SIZES)
    settings = EngineSettings(dtype=dtype, pool_mb=pool_mb, max_batch=SEVERAL)
    if kind == DENSE:
        sizes = {name: value for name, value in sizes.items() if not name.startswith("linear_")}
    model, num_parameters = build_model(sizes | {"num_hidden_layers": layers}, settings, kind)
    print(num_parameters, flush=True)
    for line in sys.stdin:
        print(measure_step(model, settings, int(line)), flush=True)


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--before", type=Path, help="compare with this checkout")
    given = DecodeArguments(**vars(parser.parse_args()))
    print(describe_machine())
    report_figures(run(given), given)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        serve_step_times(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
