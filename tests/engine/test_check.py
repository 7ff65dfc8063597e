"""The engine's proof of itself: it lets good architectures through and refuses what it cannot run."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import causal_mask_function

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.packed import PackedLinear
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.proof import prove_model
from penstock.engine.memory.states import StateStorage
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.model import LoadedModel
from penstock.engine.opening import open_engine
from penstock.engine.steps.latent import LatentHeads
from penstock.engine.steps.masks import MaskRule
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import EngineCheckFailed, ModelLoadError
from tests.draws import mark_some
from tests.engine.helpers import (
    copy_tokenizer,
    generate_with_transformers,
    hand_over,
    make_tiny,
    needs_kernels,
    run_sequences,
    save_model,
    sequence,
)
from tools.compatibility import make_loaded_model

BASE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
ALONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "bloom": (transformers.BloomConfig, {"n_layer": 3, "n_head": 4}),
    "falcon": (transformers.FalconConfig, {"new_decoder_architecture": False}),
    "gptj": (
        transformers.GPTJConfig, {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}
    ),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, {**MLA, "index_topk": 8, "index_n_heads": 8, "index_head_dim": 32}),
    # With three heads an indexer gives many tokens the same score.
    "deepseek_v32": (
        transformers.DeepseekV32Config, {**MLA, "index_topk": 24, "index_n_heads": 3, "index_head_dim": 32}
    ),
    "minimax_m3_vl_text": (
        transformers.MiniMaxM3VLTextConfig,
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "index_topk_blocks": 2,
         "index_block_size": 4, "index_n_heads": 2, "index_head_dim": 16, "dense_intermediate_size": 96,
         "shared_intermediate_size": 32, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    ),
}  # fmt: skip
"""Models that attend by themselves."""
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "mistral, sliding window": (transformers.MistralConfig, {"sliding_window": 8}),
    "deepseek_v2": (transformers.DeepseekV2Config, {**MLA, "topk_method": "greedy"}),
    "deepseek_v3": (transformers.DeepseekV3Config, MLA),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, MLA),
    **ALONE,
}
"""The proof is held against transformers itself. `test_compatibility.py` proves more architectures."""
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "openai-gpt": (transformers.OpenAIGPTConfig, {}, "it caches no keys and values"),
    "mamba": (transformers.MambaConfig, {"state_size": 8}, "its layers keep no keys and values"),
    "bert": (transformers.BertConfig, {}, "is an encoder"),
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # fmt: skip


def _load(directory: Path, kind: Any, extra: dict[str, Any]) -> LoadedModel:
    return load_model(EngineSettings(model=str(save_model(directory, kind(**{**BASE, **extra})))))


@needs_kernels
@pytest.mark.proof
def test_latent_attention_makes_no_keys_and_values_for_an_answer(tmp_path: Path) -> None:
    model = prove_model(_load(tmp_path, *RUNS["deepseek_v3"]), EngineSettings(block_size=16, pool_mb=16))
    rows: list[int] = []
    assert any(isinstance(part, LatentHeads) for part in model.module.modules())
    for name, part in model.module.named_modules():
        if name.endswith("kv_b_proj"):
            assert isinstance(part, PackedLinear)
            part.register_forward_hook(lambda part, args, output: rows.append(output.shape[-2]))
    engine = Engine(model, EngineSettings(block_size=16, max_step_tokens=20, pool_mb=16))
    run_sequences(engine, [sequence(list(range(2, 47)), 5)])
    assert len(rows) == 3 * 3, "in three layers, in the prompt's three chunks, and in no step of the answer"


def test_projections_stay_where_latents_give_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LatentHeads, "project", lambda heads, sums: torch.stack([f(sums[:, :, 0]) for f in heads.sums], 2)
    )
    model = prove_model(_load(tmp_path, *RUNS["deepseek_v3"]), EngineSettings(block_size=16, pool_mb=16))
    assert not any(isinstance(part, LatentHeads) for part in model.module.modules())
    assert "latents" not in model.backend_name


UNEVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "jamba": (
        transformers.JambaConfig,
        {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5,
         "num_experts_per_tok": 2, "mamba_d_state": 8},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {"num_hidden_layers": 6, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "layer_types": ["linear_attention", "full_attention", "full_attention"] * 2},
    ),
}  # fmt: skip
"""Models whose layers keep states, and whose kinds of layers are at places that the first of each do not show."""


@pytest.mark.parametrize("name", [*RUNS, *UNEVEN])
def test_architectures(name: str, tmp_path: Path) -> None:
    model = _load(tmp_path, *(RUNS | UNEVEN)[name])
    settings = EngineSettings(block_size=16, max_step_tokens=20, pool_mb=16)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, 1000, (n,), generator=generator).tolist()
        for n in (1, 16, 45, 70, 130 if name in UNEVEN else 71)
    ]
    expected = generate_with_transformers(model, prompts, 10)
    model = prove_model(model, settings)
    engine = Engine(model, settings)
    seqs = [sequence(p, 10) for p in prompts]
    assert run_sequences(engine, seqs, remove=False) == expected
    if name in UNEVEN:
        return  # their blocks alone are no hand-over
    second = Engine(model, settings)
    assert run_sequences(second, [hand_over(engine, second, seq) for seq in seqs]) == expected


SEEING: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        {"head_dim": 16, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
         "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {"model_type": "mistral", "head_dim": 16},
        {"model_type": "pixtral", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32,
         "num_attention_heads": 2, "image_size": 28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_models_that_also_see_are_served_for_texts(name: str, tmp_path: Path) -> None:
    kind, text, vision = SEEING[name]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(kind(text_config={**BASE, **text}, vision_config=vision)).save_pretrained(tmp_path)
    copy_tokenizer(tmp_path)
    model = load_model(EngineSettings(model=str(tmp_path)))
    prompts = [[5, 6, 7], list(range(2, 40))]
    expected = generate_with_transformers(model, prompts, 10)
    settings = EngineSettings(block_size=16, max_step_tokens=20, pool_mb=16)
    assert run_sequences(Engine(prove_model(model, settings), settings), [sequence(p, 10) for p in prompts]) == expected


def test_the_proof_reads_past_a_short_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in a window of 40 tokens shows at none of the 25 tokens that are read of other models."""
    model = _load(tmp_path, transformers.MistralConfig, {"sliding_window": 40})
    right = MaskRule.__init__
    monkeypatch.setattr(MaskRule, "__init__", lambda mask, rule: right(mask, causal_mask_function))
    with pytest.raises(EngineCheckFailed, match="other logits"):
        prove_model(model, EngineSettings())


def test_a_longer_window_is_told_and_ends_the_context_of_a_class_it_was_not_proved_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"sliding_window": 1024, "max_position_embeddings": 2048}
    with caplog.at_level(logging.INFO, "penstock.engine"):
        proved = _load(tmp_path / "proved", transformers.MistralConfig, long)
        unproved = {**long, "use_sliding_window": True, "max_window_layers": 1}
        other = _load(tmp_path / "other", transformers.Qwen2Config, unproved)
    assert (proved.context_length, other.context_length) == (2048, 1024)
    assert f"{proved.name}: the proof at load does not cover its sliding_window 1024" in caplog.text
    assert f"{other.name} is served with 1024 of its 2048 tokens: for longer sequences of models of type qwen2" in (
        caplog.text
    )


@pytest.mark.parametrize("name", mark_some(REFUSED, pytest.mark.proof))
def test_architectures_that_cannot_run_are_refused(name: str, tmp_path: Path) -> None:
    kind, extra, reason = REFUSED[name]
    with pytest.raises(ModelLoadError, match=reason):
        prove_model(_load(tmp_path, kind, extra), EngineSettings())


@pytest.mark.proof
def test_rope_that_changes_with_the_longest_sequence_is_not_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _load(
        tmp_path, transformers.Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    )
    assert model.context_length == 64
    (line,) = [record.getMessage() for record in caplog.records if "is served with" in record.getMessage()]
    assert line.startswith(
        f"{tmp_path} is served with 64 of its 256 tokens: its rotary embedding has other frequencies"
    )
    prove_model(model, EngineSettings())


@pytest.mark.proof
def test_the_demo_model_passes(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    engine = open_engine(EngineSettings(pool_mb=8), lambda what, done: seen.append(what))
    assert "checking the engine" in seen
    assert "is served with" not in caplog.text
    assert run_sequences(engine, [sequence([5, 6, 7])])


@pytest.fixture
def wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are told that they are twice as far from each other."""
    right = StepBatch.__init__

    def wrong(batch: StepBatch, *args: Any, **kwargs: Any) -> None:
        right(batch, *args, **kwargs)
        batch.position_ids.mul_(2)  # of `row_values`, which the kernels read

    monkeypatch.setattr(StepBatch, "__init__", wrong)


@pytest.mark.parametrize("dtype", mark_some(["float32", "bfloat16"], pytest.mark.proof))
def test_wrong_positions_are_noticed(dtype: str, wrong_positions: None) -> None:
    with pytest.raises(EngineCheckFailed, match=r"other logits.* than in transformers"):
        prove_model(load_model(EngineSettings(dtype=dtype)), EngineSettings())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["handed over", "beside another"])
def test_a_sequence_that_is_not_what_it_is_alone_is_noticed(
    how: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "handed over":
        monkeypatch.setattr(KVStorage, "write_block", lambda storage, block, payload: storage.keys[0][block].fill_(1))
    else:
        monkeypatch.setattr(StepBatch, "__init__", exchange_blocks)
    with pytest.raises(EngineCheckFailed, match=r"other logits.* handed over and beside another sequence"):
        prove_model(load_model(EngineSettings(dtype=dtype)), EngineSettings())


right_init = StepBatch.__init__


def exchange_blocks(batch: StepBatch, plan: Any, *rest: Any) -> None:
    """Let each sequence of a batch have the first block of another."""
    tables = [seq.block_table for seq, _ in plan]
    for table, first in zip(tables, [table[0] for table in tables[1:] + tables[:1]], strict=True):
        table[0] = first
    right_init(batch, plan, *rest)


def test_a_state_that_is_not_handed_over_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateStorage, "write_row", lambda *given: None)
    with pytest.raises(EngineCheckFailed, match=r"other logits.* handed over and beside another sequence"):
        prove_model(_load(tmp_path, *UNEVEN["jamba"]), EngineSettings())


def test_a_state_that_a_module_keeps_to_itself_is_noticed() -> None:
    model = make_loaded_model("recurrent_gemma", make_tiny("recurrent_gemma"))
    with pytest.raises(EngineCheckFailed, match="other logits"):
        prove_model(model, EngineSettings())
