"""A step that fails: the sequence at fault is named, the others are not affected, and suspects are computed alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine import sampler
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.sampler import find_broken_rows
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.errors import ModelError, OutOfMemory, SequenceFailed
from penstock.messages import Sampling
from tests.engine.helpers import make_block_keys, run_sequences, sequence
from tests.engine.schedules import SIZE, ScheduledEngine, seq_of

SETTINGS = EngineSettings(dtype="float32", pool_mb=16, max_step_tokens=32, max_batch=8)


def prompts(count: int = 6) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(5, 500) for _ in range(chance.randrange(4, 70))] for _ in range(count)]


def seqs_of(given: list[list[int]], max_new_tokens: int = 8) -> list[Sequence]:
    return [sequence(prompt, max_new_tokens, name=str(number)) for number, prompt in enumerate(given)]


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
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str, output: int
) -> None:
    expected = run_sequences(Engine(demo, SETTINGS), seqs_of(prompts()))
    engine = Engine(demo, SETTINGS)
    seqs = seqs_of(prompts())

    def poison(batch: StepBatch) -> Exception | None:
        found = [seq for seq, _ in batch.plan if seq.id == "2" and seq.num_output_tokens == output]
        return ZeroDivisionError("a bug") if found else None

    breaks(engine, monkeypatch, where, poison)
    failed = run_all(engine, seqs)
    assert list(failed) == ["2"]
    error = failed["2"].error
    assert isinstance(error, ModelError)
    assert str(error) == "ZeroDivisionError: a bug"
    assert "in broken" in error.stack
    expected[2] = expected[2][:output]
    assert [seq.output_token_ids for seq in seqs] == expected


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_sequence_alone(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, number: float, temperature: float
) -> None:
    settings = SETTINGS.model_copy(update={"speculate": False})
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    given = [
        Sequence(str(place), prompt, sampling=sampling, seed=3, max_new_tokens=8)
        for place, prompt in enumerate(prompts())
    ]
    expected = run_sequences(Engine(demo, settings), given)
    engine = Engine(demo, settings)
    right = engine.runner.run_step

    def run_broken_step(batch: StepBatch, *rest: Any) -> torch.Tensor:
        logits: torch.Tensor = right(batch, *rest)
        for row, seq in enumerate(batch.sampled_sequences):
            if seq.id == "2" and seq.num_output_tokens == 3:
                logits[row, 700] = number
        return logits

    monkeypatch.setattr(engine.runner, "run_step", run_broken_step)
    seqs = [
        Sequence(str(place), prompt, sampling=sampling, seed=3, max_new_tokens=8)
        for place, prompt in enumerate(prompts())
    ]
    failed = run_all(engine, seqs)
    assert [(name, str(one.error)) for name, one in failed.items()] == [
        ("2", "the model computed logits that are not finite")
    ]
    assert isinstance(failed["2"].error, ModelError)
    expected[2] = expected[2][:3]
    assert [seq.output_token_ids for seq in seqs] == expected


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


def test_a_step_that_failed_has_not_been(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(demo, SETTINGS)
    (seq,) = seqs_of([[5] * 20])
    engine.add_sequence(seq)
    engine.step()
    before = (list(seq.token_ids), seq.num_computed_tokens, seq.state)
    with monkeypatch.context() as patched:
        breaks(engine, patched, "_sample", lambda batch: KeyError("x"))
        for _ in range(2):
            with pytest.raises(SequenceFailed, match="KeyError"):
                engine.step()
            assert (list(seq.token_ids), seq.num_computed_tokens, seq.state) == before
    engine.step()
    assert not seq.is_suspect
    assert len(seq.output_token_ids) == 2


def test_what_fails_only_in_company_goes_on_alone(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_sequences(Engine(demo, SETTINGS), seqs_of(prompts()))
    engine = Engine(demo, SETTINGS)
    seqs = seqs_of(prompts())
    breaks(engine, monkeypatch, "run_step", lambda batch: ValueError("too many") if len(batch.plan) > 1 else None)
    assert run_all(engine, seqs) == {}
    assert [seq.output_token_ids for seq in seqs] == expected


def test_memory_that_runs_out_makes_steps_smaller_for_a_while(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_sequences(Engine(demo, SETTINGS), seqs_of(prompts()))
    engine = Engine(demo, SETTINGS)
    seqs = seqs_of(prompts())
    sizes: list[int] = []

    def short(batch: StepBatch) -> Exception | None:
        sizes.append(sum(num for _, num in batch.plan))
        return torch.OutOfMemoryError("no memory") if sizes[-1] > 12 and len(sizes) < 30 else None

    breaks(engine, monkeypatch, "run_step", short)
    assert run_all(engine, seqs) == {}
    assert [seq.output_token_ids for seq in seqs] == expected
    assert max(sizes[:8]) == 32
    assert not any(seq.is_suspect for seq in seqs)
    late = seqs_of([[9] * 90])
    del sizes[:]
    monkeypatch.undo()
    breaks(engine, monkeypatch, "run_step", short)
    run_all(engine, late)
    assert 32 >= max(sizes) > 12


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("std::bad_alloc")], ids=str
)
def test_what_never_fits_ends_with_its_own_code(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = Engine(demo, SETTINGS)
    seqs = seqs_of(prompts(3))
    breaks(
        engine, monkeypatch, "run_step", lambda batch: error if any(seq.id == "1" for seq, _ in batch.plan) else None
    )
    failed = run_all(engine, seqs)
    assert isinstance(failed["1"].error, OutOfMemory)
    assert [len(seq.output_token_ids) for seq in seqs] == [8, 0, 8]


def test_a_broken_device_is_nobodys_fault(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(demo, SETTINGS)
    for seq in seqs_of(prompts(2)):
        engine.add_sequence(seq)
    breaks(engine, monkeypatch, "run_step", lambda batch: torch.AcceleratorError("illegal address", 700))
    with pytest.raises(torch.AcceleratorError, match="illegal address"):
        engine.step()


# Suspects in the scheduler


def suspect(length: int, max_new_tokens: int = 3, *, first: int = 0) -> Sequence:
    prompt = list(range(first, first + length))
    return sequence(prompt, max_new_tokens, block_keys=make_block_keys(prompt, SIZE), is_suspect=True)


def test_a_suspect_is_alone_until_its_first_token_and_the_others_take_turns_with_it() -> None:
    dummy = ScheduledEngine(budget=10)
    others = [seq_of(3, 9, first=100 * n) for n in (1, 2)]
    dark = suspect(25, first=500)
    dummy.add(*others, dark)
    plans = [dummy.step() for _ in range(8)]
    alone = [plan for plan in plans if dark in dict(plan) and len(plan) == 1]
    assert alone == [[(dark, 10)], [(dark, 10)], [(dark, 5)]]
    assert [set(dict(plan)) for plan in plans[:6:2]] == [set(others)] * 3
    assert set(dict(plans[7])) == {*others, dark}


def test_several_suspects_come_one_after_the_other() -> None:
    dummy = ScheduledEngine(budget=100)
    dark = [suspect(4, first=10 * n) for n in range(3)]
    dummy.add(*dark)
    plans = [list(dict(dummy.step())) for _ in range(5)]
    assert plans == [dark[:1], dark[1:2], dark[:2], dark[2:], dark]
