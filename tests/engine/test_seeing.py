"""Models that also see are served for texts, and the native kernels compute the whole decoder of most of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading import dtype as dtypes
from penstock.engine.loading.dtype import choose_dtype
from penstock.engine.loading.loading import load_model, open_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.loading.probe import check_config
from penstock.engine.loading.proof import prove_model
from penstock.engine.model.layer import NativeModel, RotaryTable
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import compute_tokens, make_trial_sequence
from penstock.engine.sequence import Sequence
from penstock.errors import ModelLoadError
from tests.engine.helpers import (
    copy_tokenizer,
    generate_with_transformers,
    hand_over,
    needs_kernels,
    run_sequences,
    sequence,
)
from tools.tiny import build_tiny_model

IMAGE_TOKEN = 1000
TEXT: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 14, "out_hidden_size": 96}
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": 1001, "vision_start_token_id": 1002, "vision_end_token_id": 1003,
}  # fmt: skip
IMAGE: dict[str, Any] = {"image_token_id": IMAGE_TOKEN}
ANY_RESOLUTION: dict[str, Any] = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}


def make_axes(*sections: int) -> dict[str, Any]:
    """Return the parameters of a rotary embedding of three axes."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


SEEING: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        {"text_config": TEXT | make_axes(2, 3, 3), "vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 96},
         **QWEN_TOKENS},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        {"text_config": TEXT | make_axes(2, 3, 3), **QWEN_TOKENS,
         "vision_config": QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        {"text_config": TEXT | make_axes(4, 4, 4) | {"head_dim": 24}, **QWEN_TOKENS,
         "vision_config": QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 64,
                                         "deepstack_visual_indexes": [0]}},
    ),
    "llava": (
        transformers.LlavaConfig,
        {"text_config": {"model_type": "llama", **TEXT}, **IMAGE,
         "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}},
    ),
    "idefics3": (
        transformers.Idefics3Config,
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": 2, **IMAGE},
    ),
    "smolvlm": (
        transformers.SmolVLMConfig,
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": 2, **IMAGE},
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {"text_config": {"model_type": "mistral", "head_dim": 24, "sliding_window": None, **TEXT}, **IMAGE,
         "vision_config": {"model_type": "pixtral", **VISION}},
    ),
    "internvl": (
        transformers.InternVLConfig,
        {"text_config": {"model_type": "qwen3", "head_dim": 20, **TEXT}, **IMAGE, "downsample_ratio": 0.5,
         "vision_config": VISION | {"image_size": [56, 56], "patch_size": [14, 14]}},
    ),
    "llava_next": (
        transformers.LlavaNextConfig,
        {"text_config": {"model_type": "llama", **TEXT}, **ANY_RESOLUTION, **IMAGE,
         "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}},
    ),
    "llava_onevision": (
        transformers.LlavaOnevisionConfig,
        {"text_config": {"model_type": "qwen2", **TEXT}, **ANY_RESOLUTION, **IMAGE,
         "vision_feature_select_strategy": "full",
         "vision_config": {"model_type": "siglip_vision_model", **VISION}},
    ),
    "vipllava": (
        transformers.VipLlavaConfig,
        {"text_config": {"model_type": "llama", **TEXT}, **IMAGE, "vision_feature_layers": [-1, -2],
         "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}},
    ),
    "pixtral": (
        transformers.LlavaConfig,
        {"text_config": {"model_type": "mistral", "head_dim": 24, "sliding_window": None, **TEXT}, **IMAGE,
         "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION}, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full"},
    ),
    "lighton_ocr": (
        transformers.LightOnOcrConfig,
        {"text_config": {"model_type": "qwen3", "head_dim": 20, **TEXT}, **IMAGE,
         "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION}},
    ),
    "deepseek_vl": (
        transformers.DeepseekVLConfig,
        {"text_config": {"model_type": "llama", **TEXT}, **IMAGE,
         "vision_config": {"model_type": "siglip_vision_model", **VISION}},
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        {"text_config": TEXT | make_axes(4, 4, 4) | {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2,
                                                     "moe_intermediate_size": 48, "decoder_sparse_step": 1},
         "vision_config": QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 64,
                                         "deepstack_visual_indexes": [0]}, **QWEN_TOKENS},
    ),
    "paddleocr_vl": (
        transformers.PaddleOCRVLConfig,
        {"text_config": TEXT | make_axes(2, 3, 3) | {"head_dim": 16}, **QWEN_TOKENS, "vision_config": VISION},
    ),
}  # fmt: skip
PROMPTS = [[5], [7, 8, IMAGE_TOKEN, 9, 1002, 3], list(range(2, 40)), list(range(300, 371))]
"""Two have the tokens that stand for pictures: as the parts of a text they are like any others."""
pytestmark = needs_kernels


def save_seeing(name: str, directory: Path) -> Path:
    """Write a random model that also sees, with the demo model's tokenizer."""
    make_config, given = SEEING[name]
    config = make_config(**given)
    auto: Any = transformers.AutoModelForImageTextToText
    build_tiny_model(auto._model_mapping[type(config)], config, 0, torch.device("cpu")).save_pretrained(directory)
    copy_tokenizer(directory)
    return directory


def make_settings(directory: Path, **given: Any) -> EngineSettings:
    cache = str(directory / "cache")
    return EngineSettings(model=str(directory), max_step_tokens=20, pool_mb=16, threads=1, cache_dir=cache, **given)


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_gives_the_tokens_of_generate_from_one_call(name: str, tmp_path: Path) -> None:
    settings = make_settings(save_seeing(name, tmp_path), dtype="float32")
    model = load_model(settings)
    expected = generate_with_transformers(model, PROMPTS, 10)
    assert len({token for answer in expected for token in answer}) > 12
    model = prove_model(model, settings)
    engine, second = Engine(model, settings), Engine(model, settings)
    assert engine.runner.is_row_exact
    assert engine.speculates
    seqs = [sequence(prompt, 10) for prompt in PROMPTS]
    assert run_sequences(engine, seqs, remove=False) == expected
    assert run_sequences(second, [hand_over(engine, second, seq) for seq in seqs]) == expected


@pytest.mark.parametrize("name", SEEING)
def test_in_bfloat16_a_token_has_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    settings = make_settings(save_seeing(name, tmp_path), dtype="bfloat16")
    model = open_model(settings)
    assert model.is_batch_invariant
    alone = [compute_in_steps(model, [prompt], [len(prompt), 1, 1])[0] for prompt in PROMPTS]
    together = compute_in_steps(model, PROMPTS, [17, 30, 30, 1, 1])
    assert all(map(torch.equal, alone, together))


def compute_in_steps(model: LoadedModel, prompts: list[list[int]], steps: list[int]) -> list[torch.Tensor]:
    """Return the last logits of prompts and two tokens of answers, of which a step computes so many at most."""
    runner = model.create_runner(EngineSettings(threads=1), 8 * len(prompts))
    seqs = [
        make_trial_sequence(prompt, [11, 12], blocks=range(8 * at, 8 * at + 8)) for at, prompt in enumerate(prompts)
    ]
    last: dict[int, torch.Tensor] = {}

    def count_left(seq: Sequence, step: int) -> int:
        end = len(seq.token_ids) - sum(1 for later in steps[step + 1 :] if later == 1)
        return min(steps[step], end - seq.num_computed_tokens)

    for step in range(len(steps)):
        plan = [(at, count_left(seq, step)) for at, seq in enumerate(seqs)]
        plan = sorted(((at, num) for at, num in plan if num > 0), key=lambda item: item[1] > 1)
        done = [at for at, num in plan if seqs[at].num_computed_tokens + num == len(seqs[at].token_ids)]
        with torch.inference_mode():
            logits = compute_tokens(runner, [(seqs[at], num) for at, num in plan])
        last.update(zip(done, logits, strict=True))
    return [last[at] for at in range(len(prompts))]


@pytest.mark.parametrize("name", SEEING)
def test_its_dtype_is_that_of_a_model_which_only_reads(name: str, tmp_path: Path) -> None:
    """It is not loaded in bfloat16 first and again in float32, or in float32 where bfloat16 would be as fast."""
    make_config, given = SEEING[name]
    text = {**given["text_config"], "dtype": torch.bfloat16}
    config = make_config(**{**given, "text_config": text, "dtype": torch.bfloat16})
    chosen = choose_dtype("auto", config, torch.device("cpu"), next(iter(dtypes.BFLOAT16_ISAS)))
    assert (chosen.dtype, chosen.is_open) == (torch.bfloat16, True)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rows_of_a_text_are_those_of_three_equal_axes(name: str, tmp_path: Path) -> None:
    module = load_model(make_settings(save_seeing(name, tmp_path))).module
    rotary, x, ids = module.get_decoder().rotary_emb, torch.empty(1), torch.tensor([[0, 1, 5, 130, 511]])
    of_axes = rotary(x, ids.expand(3, 1, -1))
    assert all(map(torch.equal, RotaryTable(rotary).find_rows(x, ids), of_axes))
    other = rotary(x, torch.stack((ids, ids + 1, ids)))
    assert not torch.equal(other[0], of_axes[0]), "the axes matter"


def test_a_packed_file_of_a_model_that_sees_has_all_of_it_in_one_call(tmp_path: Path) -> None:
    settings = make_settings(save_seeing("qwen3_vl", tmp_path), dtype="bfloat16", weights="bf16")
    expected = run_sequences(Engine(open_model(settings), settings), [sequence(prompt, 10) for prompt in PROMPTS])
    pack_model(settings)
    model = open_model(settings)
    assert model.native is not None
    assert isinstance(model.native.body, NativeModel)
    assert run_sequences(Engine(model, settings), [sequence(prompt, 10) for prompt in PROMPTS]) == expected


def test_layers_that_see_the_prompt_and_a_window_of_the_answer_are_refused() -> None:
    """Their window is in the cache of `generate()`, which the engine does not use."""
    with pytest.raises(ModelLoadError, match="see the whole prompt"):
        check_config(transformers.AutoConfig.for_model("unlimited_ocr"))
