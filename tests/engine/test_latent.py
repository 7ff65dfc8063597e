"""Latent attention across turns: an answer that becomes the next prompt gives the same tokens, stored or computed."""

from pathlib import Path

import pytest
import torch
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.probe import probe_layout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.messages import Sampling
from tests.engine.helpers import needs_kernels
from tests.engine_contract.engines import Caller, serve
from tools.tiny import build_tiny_model

pytestmark = needs_kernels

NUM_TOKENS = 1037
NUM_CONVERSATIONS = 3
CONFIG = transformers.DeepseekV3Config(
    vocab_size=NUM_TOKENS, hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=512, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=14, n_routed_experts=6, n_group=2, topk_group=1, num_experts_per_tok=2,
    moe_intermediate_size=32, first_k_dense_replace=2, n_shared_experts=1,
)  # fmt: skip


def make_model(dtype: torch.dtype) -> LoadedModel:
    """Return a random model with latent attention on the native kernels."""
    cpu = torch.device("cpu")
    module = build_tiny_model(transformers.DeepseekV3ForCausalLM, CONFIG, 1, cpu).to(dtype)
    return accelerate_model(
        LoadedModel(
            name="latents", config=CONFIG, tokenizer=None, response_template=None, context_length=512,
            eos_token_ids=frozenset(), dtype=dtype, device=cpu, content_fingerprint="5a" * 32, module=module,
            layout=probe_layout(module, 16, dtype, cpu), vocab_size=NUM_TOKENS, stock_attention="sdpa",
        ),
        "bf16",
    )  # fmt: skip


def answer(model: LoadedModel, folder: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Return a new worker's answer over the store in a folder, and how many blocks it read from there."""
    settings = EngineSettings(pool_mb=16, max_step_tokens=64, speculate=False)
    with serve(Engine(model, settings), folder) as engine:
        caller = Caller(engine)
        caller.add("turn", prompt, Sampling(temperature=0, ignore_eos=True, max_tokens=num_tokens))
        return caller.run_to_end()["turn"], sum(tier.counters.hits for tier in engine.store.tiers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_next_turn_is_the_same_with_and_without_the_stored_answer(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(dtype)
    assert model.has_separate_answer_keys == (dtype != torch.float32)
    for number in range(NUM_CONVERSATIONS):
        # The prompt is shorter than a block, so that all blocks that a next turn could find have tokens of the answer.
        prompt = torch.randint(NUM_TOKENS, (10,), generator=torch.Generator().manual_seed(number)).tolist()
        stored, empty = tmp_path / f"stored {number}", tmp_path / f"empty {number}"
        first, _ = answer(model, stored, prompt, 118)
        turn = [*prompt, *first, 5, 6, 7]
        found, num_read = answer(model, stored, turn, 40)
        computed, num_read_of_nothing = answer(model, empty, turn, 40)
        assert found == computed
        assert (num_read > 0, num_read_of_nothing) == (not model.has_separate_answer_keys, 0)
