"""The model shapes that are measured, and what one token of them costs: bytes to read, operations to do."""

import math
from dataclasses import dataclass

MAX_LENGTH = 4096
BOS, EOS = 256, 257
"""The tokenizer has one token a byte, and these."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only model with grouped-query attention and a gated MLP, or a mixture of such experts."""

    name: str
    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the embedding is the output matrix too."""
    normed_heads: bool
    """Whether queries and keys are normalised, head by head."""
    experts: int = 0
    """In each layer; 0 without mixtures. `intermediate` is that of one expert."""
    experts_per_token: int = 0
    max_length: int = MAX_LENGTH
    """Tokens of the context."""

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Matrices of one layer, [outputs, inputs], by their name in it."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        found = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
        }
        if self.experts:
            found["mlp.gate"] = (self.experts, self.hidden)
        for mlp in [f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"]:
            found |= {
                f"{mlp}.gate_proj": (self.intermediate, self.hidden),
                f"{mlp}.up_proj": (self.intermediate, self.hidden),
                f"{mlp}.down_proj": (self.hidden, self.intermediate),
            }
        return found

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the weight file, by its name there."""
        norms = {"input_layernorm": (self.hidden,), "post_attention_layernorm": (self.hidden,)}
        if self.normed_heads:
            norms |= {"self_attn.q_norm": (self.head_size,), "self_attn.k_norm": (self.head_size,)}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            for name, size in (self.linear_shapes() | norms).items():
                found[f"model.layers.{layer}.{name}.weight"] = size
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    @property
    def _layer_weights(self) -> int:
        """Numbers that a token is multiplied by: of a mixture those of its experts."""
        unused = 3 * (self.experts - self.experts_per_token) * self.intermediate * self.hidden
        return self.layers * (sum(rows * columns for rows, columns in self.linear_shapes().values()) - unused)

    @property
    def file_bytes(self) -> int:
        """Bytes of all weights in bf16."""
        return 2 * sum(math.prod(size) for size in self.tensor_shapes().values())

    @property
    def read_bytes(self) -> int:
        """Bytes of bf16 weights that a decode step of one sequence has to read: of the embedding only rows."""
        return 2 * (self._layer_weights + self.vocabulary * self.hidden)

    def count_prefill_flops(self, length: int) -> float:
        """Operations for a prompt: its matrices, causal attention, and the logits of its last token."""
        attention = self.layers * self.heads * self.head_size * length * (length + 1)  # scores and values, half of them
        return 2.0 * (self._layer_weights * length + attention + self.vocabulary * self.hidden)

    def make_config(self) -> dict[str, object]:
        """The model's config.json."""
        mixture = {
            "num_experts": self.experts, "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate, "norm_topk_prob": True, "decoder_sparse_step": 1,
        }  # fmt: skip
        return {
            **(mixture if self.experts else {}),
            "architectures": [self.architecture], "model_type": self.model_type, "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size, "intermediate_size": self.intermediate, "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied, "max_position_embeddings": self.max_length, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "torch_dtype": "bfloat16",
            "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS,
        }  # fmt: skip


SHAPES = {
    "smoke": Shape(
        "smoke", "LlamaForCausalLM", "llama",
        layers=2, hidden=128, heads=2, kv_heads=1, head_size=64, intermediate=256, vocabulary=32000,
        tied=False, normed_heads=False,
    ),
    "small": Shape(
        "small", "LlamaForCausalLM", "llama",
        layers=12, hidden=768, heads=12, kv_heads=4, head_size=64, intermediate=2432, vocabulary=32000,
        tied=False, normed_heads=False,
    ),
    "q06": Shape(
        "q06", "Qwen3ForCausalLM", "qwen3",
        layers=28, hidden=1024, heads=16, kv_heads=8, head_size=128, intermediate=3072, vocabulary=151936,
        tied=True, normed_heads=True,
    ),
    "moe": Shape(
        "moe", "Qwen3MoeForCausalLM", "qwen3_moe",
        layers=18, hidden=1024, heads=16, kv_heads=4, head_size=128, intermediate=256, vocabulary=32000,
        tied=True, normed_heads=True, experts=64, experts_per_token=8,
    ),
}  # fmt: skip
"""A tiny one, 135 million weights in the form of Llama, Qwen3-0.6B, and a billion in the form of Qwen3-MoE."""
