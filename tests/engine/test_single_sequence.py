"""Models that attend by themselves: tokens and log probabilities do not depend on what else is in a step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.packed_model import write_packed_model
from penstock.engine.loading.probe import probe_layout
from penstock.engine.loading.proof import prove_model
from penstock.engine.memory.storage import number_index_keys
from penstock.engine.model.model import LoadedModel
from penstock.engine.steps.step import SingleSequenceStep
from penstock.errors import EngineCheckFailed, ModelLoadError
from penstock.messages import Sampling
from tests.engine.helpers import needs_kernels, run_sequences, save_model, sequence
from tests.engine.test_check import ALONE, BASE

SETTINGS = EngineSettings(dtype="float32", block_size=16, max_step_tokens=20, pool_mb=16)
PROMPTS = [[5 + 37 * n % 900 for n in range(length)] for length in (1, 16, 45, 70)]
NUM_NEW = 12
TOP = 2


@pytest.fixture(scope="module", params=["bloom", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp(request.param)
    kind, extra = ALONE[request.param]
    save_model(directory, kind(**{**BASE, **extra}))
    return prove_model(load_model(EngineSettings(model=str(directory), dtype="float32")), SETTINGS)


def ask(number: int, **given: Any) -> Any:
    sampling = Sampling(temperature=0.7 * (number % 2), logprobs=TOP)
    return sequence(PROMPTS[number], NUM_NEW, name=str(number), sampling=sampling, num_prompt_logprobs=TOP, **given)


def read_answers(engine: Engine, seqs: list[Any]) -> list[tuple[list[int], list[float]]]:
    run_sequences(engine, seqs)
    return [(seq.output_token_ids, [one.logprob for one in seq.prompt_logprobs]) for seq in seqs]


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[tuple[list[int], list[float]]]:
    return [read_answers(Engine(model, SETTINGS), [ask(number)])[0] for number in range(len(PROMPTS))]


@pytest.mark.proof
def test_tokens_and_log_probabilities_are_those_of_each_by_itself(
    model: LoadedModel, expected: list[tuple[list[int], list[float]]]
) -> None:
    answers = read_answers(Engine(model, SETTINGS), [ask(number) for number in range(len(PROMPTS))])
    for (tokens, logprobs), (right, right_logprobs) in zip(answers, expected, strict=True):
        assert tokens == right
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


def test_an_indexer_that_forgets_is_noticed(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if number_index_keys(0) not in model.layout.by_layer:
        pytest.skip("it has no indexer")
    right = SingleSequenceStep.write_index_keys

    def forget(step: SingleSequenceStep, layer: int, keys: Tensor) -> Tensor:
        found = right(step, layer, keys).clone()
        found[:, : step.num_cached_tokens] = 0
        return found

    monkeypatch.setattr(SingleSequenceStep, "write_index_keys", forget)
    with pytest.raises(EngineCheckFailed, match="other logits"):
        prove_model(load_model(EngineSettings(model=model.name, dtype="float32")), SETTINGS)


@needs_kernels
@pytest.mark.proof
def test_it_says_so_at_load_and_is_not_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, extra = ALONE["bloom"]
    save_model(tmp_path, kind(**{**BASE, **extra}))
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        model = load_model(EngineSettings(model=str(tmp_path)))
    assert "the sequences of a step are computed one after the other" in caplog.text
    model = prove_model(model, SETTINGS)
    with pytest.raises(ModelLoadError, match="reads one sequence at a time"):
        write_packed_model(model, "auto", {}, tmp_path / "packed")


def test_on_another_device_it_is_refused() -> None:
    kind, extra = ALONE["bloom"]
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(kind(**{**BASE, **extra}))
    with pytest.raises(ModelLoadError, match=r"inside its own modules.*on a CPU only"):
        probe_layout(module, 16, torch.float32, torch.device("meta"))
