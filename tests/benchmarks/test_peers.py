"""The arithmetic of the comparison with other engines: rates, ratios, and what a shape costs."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import setup
from benchmarks.peers.gguf_file import merge_experts, rename_tensor
from benchmarks.peers.rounds import OURS, Results
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workload import CELLS, DRAWN_CELLS, Cell, Request, compute_rates
from benchmarks.pipeline import make_cost_figures
from benchmarks.processor import Cost

TWO: list[Request] = [([1, 2, 3], 2), ([4, 5, 6], 3)]


def test_decode_counts_only_what_comes_after_everybodys_first_token() -> None:
    found = compute_rates([(1.0, [0]), (2.0, [0, 1]), (4.0, [1]), (6.0, [1])], TWO)
    assert found.first_s == 2.0
    assert found.decode == 2 / 4
    assert found.output == 5 / 6
    assert compute_rates([(1.0, [0, 1]), (2.0, [0, 1, 1])], TWO).decode == 3.0, "several tokens of a request in a step"


@pytest.mark.parametrize("last", [[], [1], [1, 1, 1]])
def test_other_tokens_than_asked_for_are_an_error(last: list[int]) -> None:
    with pytest.raises(ValueError, match="missing or too many"):
        compute_rates([(1.0, [0, 1]), (2.0, [0]), (3.0, last)], TWO)


def test_a_cells_lengths_are_those_of_every_round_and_its_tokens_are_not() -> None:
    mixed = next(cell for cell in CELLS if cell.is_mixed)
    one, other = mixed.make_requests(1000, 0), mixed.make_requests(1000, 1)
    assert [(len(prompt), new) for prompt, new in one] == [(len(prompt), new) for prompt, new in other]
    assert one != other
    assert one == mixed.make_requests(1000, 0)
    assert len({len(prompt) for prompt, _ in one}) > 10


def test_at_another_temperature_the_work_is_the_same() -> None:
    for greedy, drawn in zip(CELLS, DRAWN_CELLS, strict=True):
        assert (greedy.temperature, drawn.temperature, drawn.name) == (0.0, 1.0, f"{greedy.name}_t1")
        assert greedy.make_requests(1000, 3) == drawn.make_requests(1000, 3)


def test_each_kind_of_cell_has_its_own_rate() -> None:
    steps = [(2.0, [0]), (4.0, [0])]
    assert Cell("prefill", 1, (8, 8), (1, 1)).compute_value(steps[:1], [([1] * 8, 1)]) == 4.0
    assert Cell("decode", 1, (8, 8), (2, 2)).compute_value(steps, [([1] * 8, 2)]) == 0.5
    assert Cell("mixed", 1, (8, 9), (2, 3)).compute_value(steps, [([1] * 8, 2)]) == 2 / 4


def test_ratios_are_formed_within_a_round() -> None:
    results = Results(SHAPES["small"])
    results.loads = {OURS: {}, "slow": {}, "fast": {}, "failed": {}}
    # The machine is twice as fast in the second round and four times in the third: no ratio may show that.
    results.values["cell"] = {OURS: {0: 6.0, 1: 12.0, 2: 24.0}, "slow": {0: 2.0}, "fast": {0: 4.0, 1: 8.0, 2: 16.0}}
    assert results.compute_ratio("cell", "slow") == 3.0
    assert results.compute_ratio("cell", "fast") == 1.5
    assert results.compute_ratio("cell", "failed") is None
    assert results.compute_best_ratio("cell") == 1.5
    assert results.compute_best_ratio("other") is None


@pytest.mark.parametrize(("name", "millions"), [("small", 135.3), ("q06", 596.0)])
def test_a_shape_has_the_weights_it_says(name: str, millions: float) -> None:
    shape = SHAPES[name]
    weights = sum(math.prod(size) for size in shape.tensor_shapes().values())
    assert weights / 1e6 == pytest.approx(millions, abs=0.1)
    norms = sum(math.prod(size) for size in shape.tensor_shapes().values() if len(size) == 1)
    rows_only = 0 if shape.tied else shape.vocabulary * shape.hidden
    assert shape.read_bytes == 2 * (weights - norms - rows_only)


def test_a_mixture_reads_the_experts_of_a_token() -> None:
    shape = SHAPES["moe"]
    assert shape.file_bytes / 2e9 == pytest.approx(1.03, abs=0.01)
    expert = 3 * shape.intermediate * shape.hidden
    norms = sum(math.prod(size) for size in shape.tensor_shapes().values() if len(size) == 1)
    unused = 2 * shape.layers * (shape.experts - shape.experts_per_token) * expert
    assert shape.read_bytes == shape.file_bytes - 2 * norms - unused


def test_experts_are_merged_for_llama_cpp() -> None:
    bits = {number: np.full((2, 3), number, np.uint16) for number in range(12)}
    given = [(f"model.layers.0.mlp.experts.{number}.up_proj.weight", bits[number]) for number in (10, 2, *range(2))]
    given += [(f"model.layers.0.mlp.experts.{number}.up_proj.weight", bits[number]) for number in (*range(3, 10), 11)]
    given.append(("model.norm.weight", bits[0]))
    (norm, _), (name, merged) = merge_experts(given)
    assert norm == "model.norm.weight"
    assert rename_tensor(name) == "blk.0.ffn_up_exps.weight"
    assert merged[:, 0, 0].tolist() == list(range(12))


def test_attention_counts_what_a_token_sees() -> None:
    shape = SHAPES["small"]
    linear = shape.count_prefill_flops(1) - 4 * shape.layers * shape.heads * shape.head_size
    seen = sum(range(1, 11))
    output = 2 * shape.vocabulary * shape.hidden
    expected = 10 * (linear - output) + output + 4 * shape.layers * shape.heads * shape.head_size * seen
    assert shape.count_prefill_flops(10) == pytest.approx(expected)


# The installation


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environments that the program installs, of which only the names are kept: `llamacpp_avx2` is asked for."""
    names: list[str] = []
    monkeypatch.setattr(setup, "install_environment", lambda name, directory: names.append(name))
    monkeypatch.setattr(sys, "argv", ["setup", str(tmp_path), "--only", "llamacpp_avx2"])
    return names


def test_missing_programs_are_named_before_anything_starts(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_program", lambda name: None if name in ("c++", "cmake") else name)
    with pytest.raises(SystemExit) as ended:
        setup.main()
    assert ended.value.code == "missing: c++ (apt-get install g++), cmake (apt-get install cmake)"
    assert not installed


def test_what_an_environment_is_a_copy_of_is_installed_before_it(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_program", lambda name: name)
    with pytest.raises(SystemExit) as ended:
        setup.main()
    assert (ended.value.code, installed) == (0, ["llamacpp", "llamacpp_avx2"])


# Processor time: what is added within a round, and what a token adds


def test_what_is_added_is_the_median_of_differences_within_a_round() -> None:
    short = {
        "bare": [Cost(0.1), Cost(0.2), Cost(0.4)],
        "embedded": [Cost(0.3), Cost(0.6), Cost(0.9)],
        "kafka": [Cost(0.5, 0.1), Cost(1.0, 0.2), Cost(1.0, 0.3)],
    }
    long = {
        "bare": [Cost(1.0), Cost(2.0), Cost(4.0)],
        "embedded": [Cost(1.8), Cost(3.0), Cost(5.1)],
        "kafka": [Cost(9.0)] * 3,
    }
    assert make_cost_figures(short, long, 100, 60) == {
        "cpu_ms_per_request_added_embedded": pytest.approx(4.0),
        "cpu_us_per_token_added": pytest.approx(100.0),
        "cpu_ratio_added": pytest.approx(2.0),
        "cpu_ms_per_request_added_kafka": pytest.approx(6.0),
        "cpu_ms_per_request_broker": pytest.approx(2.0),
    }
