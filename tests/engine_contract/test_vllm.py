"""vLLM with several ranks, models with several kinds of layers, and what is refused when a model is loaded."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine_vllm.blocks import RankKV, combine_ranks
from penstock.errors import ModelLoadError
from penstock.messages import Request
from sim.workload import ENGINE_SETTINGS
from tests.engine_contract.engines import BLOCK, Caller, EngineUnderTest, open_vllm
from tests.engine_contract.test_engine_contract import add_all, expect, make_work, prefill_all

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"
)
RANKS = {"one rank": "", "two parts": "--tensor-parallel-size 2", "two stages": "--pipeline-parallel-size 2"}


@contextmanager
def opened(directory: Path, ranks: str, **settings: Any) -> Iterator[EngineUnderTest]:
    under_test = open_vllm(directory, vllm_args=RANKS[ranks], **settings)
    try:
        yield under_test
    finally:
        under_test.engine.close()
        under_test.store.close()


@needs_vllm
@pytest.mark.parametrize(
    ("before", "after"), [("two parts", "one rank"), ("one rank", "two parts"), ("two stages", "one rank")]
)
def test_blocks_are_read_by_another_number_of_ranks(tmp_path: Path, before: str, after: str) -> None:
    """All full blocks of a prompt are found, and the tokens are those of one rank undivided."""
    work = make_work()
    with opened(tmp_path, before) as prefill:
        prefill_all(caller := Caller(prefill.engine), work)
        fingerprint, first = prefill.engine.model.fingerprint, dict(caller.tokens)
    with opened(tmp_path, after) as decode:
        decode.empty_memory()
        caller = Caller(decode.engine, tokens=first)
        add_all(caller, work, 1)
        assert caller.run_to_end() == expect(work)
        assert decode.engine.model.fingerprint == fingerprint
        found = {name: progress.num_cached_tokens for name, progress in caller.progress.items()}
        assert found == {one.id: count_full(one) for one in work}


def count_full(request: Request) -> int:
    assert request.token_ids is not None
    return len(request.token_ids) // BLOCK * BLOCK


def make_rank(stage: int = 0, part: int = 0, num_layers: int = 3, **given: Any) -> RankKV:
    shape, dtype = given.get("shape", (1, BLOCK, 128)), given.get("dtype", "bfloat16")
    return RankKV(stage, part, num_layers, frozenset([shape]), frozenset([dtype]))


def test_a_whole_block_has_what_all_ranks_have() -> None:
    ranks = [make_rank(stage, part, 4 - stage) for stage in (0, 1) for part in (0, 1)]
    layout, slices = combine_ranks(ranks, BLOCK, 2)
    assert (layout.num_layers, layout.num_heads, layout.byte_shape) == (7, 2, (7, 2, BLOCK, 256))
    covered = np.zeros(layout.byte_shape[:2], int)
    for at in slices:
        covered[at.layers, at.heads] += 1
    assert (covered == 1).all()


def test_ranks_may_have_the_same_head() -> None:
    _, slices = combine_ranks([make_rank(part=part) for part in range(4)], BLOCK, 2)
    assert [at.heads.start for at in slices] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "ranks",
    [
        [make_rank(shape=(BLOCK, 576))],
        [make_rank(shape=(1, 2 * BLOCK, 128))],
        [make_rank(dtype="uint8")],
        [make_rank(0), make_rank(1, shape=(1, BLOCK, 64))],
        [make_rank(part=0), make_rank(part=1), make_rank(part=2)],
    ],
    ids=["latents", "other blocks", "fp8", "layers that differ", "heads that nobody has"],
)
def test_a_form_that_is_not_known_is_refused(ranks: list[RankKV]) -> None:
    num_heads = 5 if len(ranks) == 3 else 1
    with pytest.raises(ModelLoadError):
        combine_ranks(ranks, BLOCK, num_heads)


@needs_vllm
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--nonsense 3", "unrecognized arguments: --nonsense 3"),
        ("--tensor-parallel-size two", "invalid int value: 'two'"),
        ("--enable-lora", "--enable-lora: requests have no field for adapters"),
        ("--max-num-seqs 4", "--max-num-seqs: set PENSTOCK_ENGINE_MAX_BATCH"),
    ],
)
def test_arguments_that_cannot_be_given_are_refused_by_name(given: str, told: str) -> None:
    from penstock.engine_vllm.opening import open_vllm_core

    settings = ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, "vllm_args": given})
    with pytest.raises(ModelLoadError, match=told.replace("'", ".")):
        open_vllm_core(settings)
