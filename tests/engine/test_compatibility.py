"""docs/models.md says what is so, and the proof it rests on notices what is wrong."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.masking_utils import causal_mask_function

from penstock.config.settings import EngineSettings
from penstock.engine.loading.windows import read_proved_windows
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.model import LoadedModel
from penstock.engine.steps import masks
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import EngineCheckFailed
from tests.draws import draw_cases
from tests.engine.helpers import make_tiny
from tools import compatibility, tiny
from tools.compatibility import (
    ARCHITECTURES,
    SEEING,
    WHOLE,
    Verdict,
    judge_architecture,
    judge_checkpoint,
    judge_seeing,
    make_architectures,
    update_page,
)
from tools.proof import MIN_DISTINCT_TOKENS, ReferenceAnswers, generate_references, prove_engine
from tools.published import MOST_USED, CheckpointVerdict, make_rows, read_checkpoints
from tools.tiny import CannotShrink, find_layer_kinds, shrink_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CPU = torch.device("cpu")
MEANT_TO_WORK = (
    "llama", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe", "llama4_text", "gpt_bigcode",
    "stablelm", "gemma3n_text", "bert", "lfm2", "granitemoehybrid", "bloom", "deepseek_v32", "git", "nemotron_h",
    "mellum",
)  # fmt: skip
MEANT_TO_BE_REFUSED = ("mamba", "bart", "deepseek_v4", "xlnet")


CHECKPOINTS = (
    "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-VL-2B-Instruct", "MiniMaxAI/MiniMax-M2.5", "openai/gpt-oss-20b",
    "mistralai/Ministral-3-3B-Instruct-2512", "nvidia/Qwen3-32B-NVFP4", "deepseek-ai/DeepSeek-V3.2",
    "XiaomiMiMo/MiMo-7B-RL",
)  # fmt: skip


def read_page() -> list[str]:
    return PAGE.read_text().splitlines()


@pytest.mark.parametrize("architecture", MEANT_TO_WORK)
def test_the_page_says_what_works(architecture: str) -> None:
    verdict = judge_architecture(architecture)
    assert verdict.works, verdict.reason
    assert make_architectures([verdict]).split("- ")[1].split("** ")[0] in PAGE.read_text()
    assert find_line(architecture).startswith("- **Work")
    check_proved_windows()


def check_proved_windows() -> None:
    """The file that loads read has the windows of the small models that were proved."""
    for kind, windows in compatibility.proved_windows.items():
        assert windows <= {*read_proved_windows().get(kind, ())}, kind


@pytest.mark.parametrize("architecture", MEANT_TO_BE_REFUSED)
def test_the_page_says_what_is_refused_and_why(architecture: str) -> None:
    verdict = judge_architecture(architecture)
    assert not verdict.works
    assert find_line(architecture).startswith(f"- **{verdict.reason}** ")


def find_line(architecture: str) -> str:
    """Return the page's line that lists the architecture."""
    lines = [line for line in read_page() if architecture in line.partition("** ")[2].split(", ")]
    assert len(lines) == 1
    return lines[0]


def test_the_page_has_every_architecture_once() -> None:
    for architecture in (*ARCHITECTURES, *SEEING):
        find_line(architecture)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "aria", "idefics2", "aya_vision", "blip", "chameleon"])
def test_the_page_says_what_the_kernels_compute_of_a_model_that_sees(architecture: str) -> None:
    _, group = judge_seeing(architecture)
    assert find_line(architecture).startswith(f"- **{group}** ")
    check_proved_windows()


def list_others() -> list[str]:
    """Return a published checkpoint of each type of model that `CHECKPOINTS` has none of."""
    by_type = {str(one.config["model_type"]): name for name, one in reversed(read_checkpoints().items())}
    tried = {read_checkpoints()[name].config["model_type"] for name in CHECKPOINTS}
    return [name for kind, name in by_type.items() if kind not in tried]


@pytest.mark.parametrize("name", [*CHECKPOINTS, *draw_cases(list_others(), 25)])
def test_the_page_says_what_becomes_of_a_published_checkpoint(name: str) -> None:
    verdict = judge_checkpoint(read_checkpoints()[name])
    row = next(line for line in read_page() if name in list_checkpoints(line))
    assert row.split("|")[2:] == make_rows([verdict]).splitlines()[-1].split("|")[2:]
    check_proved_windows()


def list_checkpoints(line: str) -> list[str]:
    """Return the checkpoints that a line of the page's tables of published checkpoints is about."""
    cells = line.split("|")
    return [name.strip(" *") for name in cells[1].split("<br>")] if len(cells) == 7 and "/" in cells[1] else []


def test_the_page_has_every_published_checkpoint_once() -> None:
    assert sorted(name for line in read_page() for name in list_checkpoints(line)) == sorted(read_checkpoints())


# Negative controls: each is a mistake that an engine could make

PROVED = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2")


@pytest.fixture(scope="module", params=PROVED)
def subject(request: pytest.FixtureRequest) -> tuple[LoadedModel, ReferenceAnswers]:
    reference = make_tiny(request.param)
    model = compatibility.make_loaded_model(request.param, copy.deepcopy(reference))
    answers = generate_references(reference, model.vocab_size, model.context_length, CPU)
    prove_engine(model, EngineSettings(), answers)
    compatibility.check_damage_shows(model, answers)
    return model, answers


def _fails(subject: tuple[LoadedModel, ReferenceAnswers], match: str) -> None:
    with pytest.raises(EngineCheckFailed, match=match):
        prove_engine(subject[0], EngineSettings(), subject[1])


@pytest.mark.parametrize("which", ["the first two swapped", "one late while decoding"])
def test_wrong_positions_are_noticed(
    subject: tuple[LoadedModel, ReferenceAnswers], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StepBatch.__init__

    def wrong(batch: StepBatch, *args: Any, **kwargs: Any) -> None:
        right(batch, *args, **kwargs)
        first = 0
        for _, num_tokens in batch.plan:
            positions = batch.position_ids[0, first : first + num_tokens]
            if which == "the first two swapped":
                positions[:2] = positions[:2].flip(0)
            elif num_tokens == 1:
                positions += 1
            first += num_tokens

    monkeypatch.setattr(StepBatch, "__init__", wrong)
    _fails(subject, "other tokens.*batched")


def test_a_damaged_block_is_noticed(
    subject: tuple[LoadedModel, ReferenceAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KVStorage.write_block

    def damaged(storage: KVStorage, block: int, payload: Any) -> None:
        right(storage, block, payload)
        storage.keys[0][block, 0].neg_()

    monkeypatch.setattr(KVStorage, "write_block", damaged)
    _fails(subject, "other tokens.*handed-over")


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_a_window_off_by_one_is_noticed(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = masks.MaskRule.__init__

    def wide(mask: masks.MaskRule, rule: Any) -> None:
        if rule is not causal_mask_function:
            narrow = rule
            rule = lambda sequence, head, query, key: narrow(sequence, head, query - 1, key) & (key <= query)  # noqa: E731
        right(mask, rule)

    monkeypatch.setattr(masks.MaskRule, "__init__", wide)
    assert "other tokens" in judge_architecture(architecture).reason


# The small copy


@pytest.mark.parametrize("architecture", ["gemma3_text", "deepseek_v3", "gemma3n_text", "qwen2_moe", "llama4_text"])
def test_the_small_copy_has_every_kind_of_layer(architecture: str) -> None:
    config = CONFIG_MAPPING[architecture]()
    auto: Any = AutoModelForCausalLM
    kind = auto._model_mapping[type(config)]
    with torch.device("meta"):
        large = kind(config)
        small = kind(shrink_config(config))
    assert find_layer_kinds(large) <= find_layer_kinds(small)
    assert len(small.model.layers) < len(large.model.layers)


def test_a_small_copy_that_lost_a_kind_of_layer_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter([{"one", "another"}, {"one"}, {"one"}])
    monkeypatch.setattr(tiny, "find_layer_kinds", lambda module: next(kinds))
    with pytest.raises(CannotShrink, match="1 kinds of layers were lost"):
        tiny.shrink_model(make_tiny("llama"))


def test_the_small_copy_keeps_the_structure_of_heads() -> None:
    config: Any = CONFIG_MAPPING["qwen3"]
    small = shrink_config(config(num_attention_heads=40, num_key_value_heads=8))
    assert small.num_attention_heads == 5 * small.num_key_value_heads
    assert small.num_key_value_heads == 2
    one = shrink_config(config(num_attention_heads=40, num_key_value_heads=1))
    assert (one.num_attention_heads, one.num_key_value_heads) == (8, 1)


def test_too_many_kinds_of_layers_are_not_left_out() -> None:
    config: Any = CONFIG_MAPPING["granite_swa"]
    with pytest.raises(CannotShrink, match="24 kinds"):
        shrink_config(config(layer_rope_theta=[float(theta) for theta in range(1, 25)]))


def test_the_small_copy_keeps_as_many_positions_where_they_are_as_many_as_the_width() -> None:
    config: Any = CONFIG_MAPPING["biogpt"]
    assert shrink_config(config(hidden_size=1024, max_position_embeddings=1024)).max_position_embeddings == 1024


def test_what_is_found_out_goes_into_its_sections_and_the_rest_of_the_page_stays() -> None:
    page = PAGE.read_text()
    (found,) = [one for one in read_checkpoints().values() if one.name == "Qwen/Qwen3-0.6B"]
    verdicts = [CheckpointVerdict(replace(found, name=name), "whole", "", "") for name in MOST_USED]
    made = update_page(page, verdicts, [Verdict("llama", "LlamaForCausalLM", "")], [("llava", WHOLE)])
    assert f"**{len(MOST_USED)} of {len(MOST_USED)} published checkpoints**" in made
    assert find_section(made, "## All architectures of transformers").endswith("- **Work:** llama\n\n")
    assert made.endswith(f"- **{WHOLE}** llava\n")
    for heading in re.findall(r"^##? .*$", page, re.MULTILINE):
        assert (find_section(page, heading) == find_section(made, heading)) == (heading not in MADE_SECTIONS), heading
    assert f"at least\n{MIN_DISTINCT_TOKENS} different tokens" in find_section(made, "## How they are tried")


MADE_SECTIONS = (
    "# Models", "## The most used", "## Published checkpoints", "## All architectures of transformers",
    "## Architectures that also see",
)  # fmt: skip


def find_section(page: str, heading: str) -> str:
    return re.split(r"^##? ", page.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
