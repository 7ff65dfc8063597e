"""The engine's proof of itself: it lets good architectures through and refuses what it cannot run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import hooks
from engine.check import check
from engine.engine import Engine
from engine.model import DEMO_MODEL, LoadedModel, load
from engine.storage import KVStorage
from penstock.errors import EngineCheckFailed, ModelLoadError
from penstock.settings import EngineSettings
from tests.engine.helpers import generate, handed_over, run, sequence

BASE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gpt2": (transformers.GPT2Config, GPT2),
    "mistral, sliding window": (transformers.MistralConfig, {"sliding_window": 8}),
    "deepseek_v3": (transformers.DeepseekV3Config, MLA),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 32, "num_local_experts": 4, "sliding_window": 8}),
}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "bloom": (transformers.BloomConfig, {"n_layer": 3, "n_head": 4}),
    "mamba": (transformers.MambaConfig, {"state_size": 8}),
}


def _load(directory: Path, kind: Any, extra: dict[str, Any]) -> LoadedModel:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(kind(**{**BASE, **extra}))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return load(EngineSettings(model=str(directory)))


@pytest.mark.parametrize("name", RUNS)
def test_architectures(name: str, tmp_path: Path) -> None:
    model = _load(tmp_path, *RUNS[name])
    settings = EngineSettings(block_size=16, max_step_tokens=20, pool_mb=16)
    check(model, settings)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 1000, (n,), generator=generator).tolist() for n in (1, 16, 45, 70)]
    expected = generate(model, prompts, 10)
    engine = Engine(model, settings)
    seqs = [sequence(p, 10) for p in prompts]
    assert run(engine, seqs, remove=False) == expected
    assert run(Engine(model, settings), [handed_over(engine, seq) for seq in seqs]) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_run_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not supported|on this engine"):
        check(_load(tmp_path, *REFUSED[name]), EngineSettings())


def test_the_demo_model_passes() -> None:
    seen: list[str] = []
    engine = Engine.open(EngineSettings(pool_mb=8), lambda what, done: seen.append(what))
    assert "checking the engine" in seen
    assert run(engine, [sequence([5, 6, 7])])


def test_a_wrong_scale_is_noticed(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hooks._Scores
    monkeypatch.setattr(hooks, "_Scores", lambda scale, softcap, sinks: right(scale * 1.5, softcap, sinks))
    with pytest.raises(EngineCheckFailed, match="other tokens"):
        check(demo, EngineSettings())


def test_a_wrong_scale_is_noticed_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(EngineSettings(dtype="bfloat16"))
    right = hooks._Scores
    monkeypatch.setattr(hooks, "_Scores", lambda scale, softcap, sinks: right(scale * 3, softcap, sinks))
    with pytest.raises(EngineCheckFailed, match="other tokens"):
        check(model, EngineSettings())


def test_swapped_rows_in_a_hand_over_are_noticed(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVStorage.read

    def swapped(storage: KVStorage, block: int, num_rows: int) -> memoryview:
        content = bytes(right(storage, block, num_rows))
        half = len(content) // 2
        return memoryview(content[half:] + content[:half])

    monkeypatch.setattr(KVStorage, "read", swapped)
    with pytest.raises(EngineCheckFailed, match="handed-over"):
        check(demo, EngineSettings())


def test_blocks_in_the_wrong_order_are_noticed(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hooks._gather
    monkeypatch.setattr(hooks, "_gather", lambda pool, table: right(pool, table.flip(0)))
    with pytest.raises(EngineCheckFailed):
        check(demo, EngineSettings())
