"""A step that fails: the sequence at fault is named, the others are not affected, and suspects are computed alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.config.settings import EngineSettings, SloSettings
from penstock.engine.engine import Engine
from penstock.engine.model.model import LoadedModel
from penstock.engine.sampling import sampler
from penstock.engine.sampling.sampler import find_broken_rows
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.sequence import Sequence
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import ModelError, OutOfMemory, SequenceFailed
from penstock.messages import Sampling
from tests.engine.helpers import run_sequences, sequence

SETTINGS = EngineSettings(dtype="float32", pool_mb=16, max_step_tokens=32, max_batch=8)


def make_sequences(count: int = 6, **given: Any) -> list[Sequence]:
    chance = random.Random(7)
    prompts = [[chance.randrange(5, 500) for _ in range(chance.randrange(4, 70))] for _ in range(count)]
    return [sequence(prompt, 8, name=str(number), **given) for number, prompt in enumerate(prompts)]


@pytest.fixture
def engine(demo: LoadedModel) -> Engine:
    return Engine(demo, SETTINGS)


@pytest.fixture(scope="module")
def expected(demo: LoadedModel) -> list[list[int]]:
    """What the sequences say when nothing fails."""
    return run_sequences(Engine(demo, SETTINGS), make_sequences())


def breaks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str, when: Callable[[StepBatch], Exception | None]
) -> None:
    """Let the runner's `run_step` or the engine's `_sample` raise what `when` says about the batch."""
    owner = engine.runner if where == "run_step" else engine
    right = getattr(owner, where)

    def broken(batch: StepBatch, *rest: Any) -> Any:
        done = right(batch, *rest)
        error = when(batch)
        if error is not None:
            raise error
        return done

    monkeypatch.setattr(owner, where, broken)


def run_all(engine: Engine, seqs: list[Sequence]) -> dict[str, SequenceFailed]:
    """Run as a worker does; what failed, by name."""
    failed: dict[str, SequenceFailed] = {}
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        try:
            engine.step()
        except SequenceFailed as error:
            failed[error.seq.id] = error
            engine.remove_sequence(error.seq)
        engine.scheduler.check_integrity()
        assert len(failed) < 10
    for seq in seqs:
        engine.remove_sequence(seq)
    engine.pool.check_integrity()
    assert engine.num_free_blocks == engine.pool.num_blocks
    return failed


@pytest.mark.parametrize("where", ["run_step", "_sample"])
@pytest.mark.parametrize("output", [0, 3])
def test_the_culprit_is_named_and_the_others_say_what_they_would_have(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: str, output: int
) -> None:
    def poison(batch: StepBatch) -> Exception | None:
        found = [seq for seq, _ in batch.plan if seq.id == "2" and seq.num_output_tokens == output]
        return ZeroDivisionError("a bug") if found else None

    breaks(engine, monkeypatch, where, poison)
    failed = run_all(engine, seqs := make_sequences())
    assert list(failed) == ["2"]
    error = failed["2"].error
    assert isinstance(error, ModelError)
    assert str(error) == "ZeroDivisionError: a bug"
    assert "in broken" in error.stack
    check_others(seqs, expected, output)


def check_others(seqs: list[Sequence], expected: list[list[int]], num_said: int) -> None:
    """All have said what they would have, but the third one, which came so far."""
    assert [seq.output_token_ids for seq in seqs] == [*expected[:2], expected[2][:num_said], *expected[3:]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_sequence_alone(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, number: float, temperature: float
) -> None:
    settings = SETTINGS.model_copy(update={"speculate": False})
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    expected = run_sequences(Engine(demo, settings), make_sequences(sampling=sampling))
    engine, seqs = Engine(demo, settings), make_sequences(sampling=sampling)
    right = engine.runner.run_step

    def run_broken_step(batch: StepBatch, *rest: Any) -> torch.Tensor:
        logits: torch.Tensor = right(batch, *rest)
        for row, seq in enumerate(batch.sampled_sequences):
            if seq.id == "2" and seq.num_output_tokens == 3:
                logits[row, 700] = number
        return logits

    monkeypatch.setattr(engine.runner, "run_step", run_broken_step)
    failed = run_all(engine, seqs)
    assert [(name, str(one.error)) for name, one in failed.items()] == [
        ("2", "the model computed logits that are not finite")
    ]
    assert isinstance(failed["2"].error, ModelError)
    check_others(seqs, expected, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_native", [True, False])
def test_rows_that_no_token_can_be_drawn_from(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, is_native: bool
) -> None:
    """Those with a number that is none, and those whose highest is infinite. What a model forbids is no fault."""
    if not is_native:
        monkeypatch.setattr(sampler, "find_library", lambda logits: None)
    logits = torch.zeros(7, 103, dtype=dtype)
    logits[0, 1:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, :2] = 3e38
    logits[3, 101] = torch.nan
    logits[4, 5] = -torch.nan
    logits[5, 102] = torch.inf
    assert find_broken_rows(logits) == {1, 3, 4, 5}


@pytest.mark.proof
def test_what_fails_only_in_company_goes_on_alone(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(engine, monkeypatch, "run_step", lambda batch: ValueError("too many") if len(batch.plan) > 1 else None)
    assert run_all(engine, seqs := make_sequences()) == {}
    assert [seq.output_token_ids for seq in seqs] == expected


def test_memory_that_runs_out_makes_steps_smaller_for_a_while(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs, sizes = make_sequences(), list[int]()

    def short(batch: StepBatch) -> Exception | None:
        sizes.append(sum(num for _, num in batch.plan))
        return torch.OutOfMemoryError("no memory") if sizes[-1] > 12 and len(sizes) < 30 else None

    breaks(engine, monkeypatch, "run_step", short)
    assert run_all(engine, seqs) == {}
    assert [seq.output_token_ids for seq in seqs] == expected
    assert max(sizes[:8]) == 32
    assert not any(seq.is_suspect for seq in seqs)
    del sizes[:]
    monkeypatch.undo()
    breaks(engine, monkeypatch, "run_step", short)
    run_all(engine, [sequence([9] * 90, 8)])
    assert 32 >= max(sizes) > 12


def _let_steps_grow(engine: Engine) -> None:
    """Have the engine believe that a step of any size is in time."""
    engine.scheduler.cost = StepCost(fixed_s=0.0, row_s=0.0, context_s=0.0, chunk_s=0.0, token_s=1e-9)
    engine.scheduler.slo = SloSettings(interactive_gap_s=1e9)


@pytest.mark.parametrize("limit", [1000, 60])
def test_steps_that_are_larger_while_prompts_wait_change_no_token_and_become_smaller_without_memory(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    run_all(engine, make_sequences(1))  # so the speed of prompts is known
    _let_steps_grow(engine)
    seqs, sizes = make_sequences(), list[int]()

    def exceed(batch: StepBatch) -> Exception | None:
        sizes.append(sum(num for _, num in batch.plan))
        return torch.OutOfMemoryError("no memory") if sizes[-1] > limit else None

    breaks(engine, monkeypatch, "run_step", exceed)
    assert sum(seq.num_pending_tokens for seq in seqs) > 4 * 32
    assert run_all(engine, seqs) == {}
    assert [seq.output_token_ids for seq in seqs] == expected
    assert any(32 < size <= limit for size in sizes), "a larger step was computed"
    assert (max(sizes) > limit) == (limit == 60)
    assert not any(seq.is_suspect for seq in seqs)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("std::bad_alloc")], ids=str
)
def test_what_never_fits_ends_with_its_own_code(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaks(
        engine, monkeypatch, "run_step", lambda batch: error if any(seq.id == "1" for seq, _ in batch.plan) else None
    )
    failed = run_all(engine, seqs := make_sequences(3))
    assert isinstance(failed["1"].error, OutOfMemory)
    assert [len(seq.output_token_ids) for seq in seqs] == [8, 0, 8]


def test_a_broken_device_is_nobodys_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq in make_sequences(2):
        engine.add_sequence(seq)
    breaks(engine, monkeypatch, "run_step", lambda batch: torch.AcceleratorError("illegal address", 700))
    with pytest.raises(torch.AcceleratorError, match="illegal address"):
        engine.step()
