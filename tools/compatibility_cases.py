"""What the default configuration of an architecture lacks before a model can be made of it."""

from typing import Any

AS_DECODER = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Encoders, unless their configuration says `is_decoder`."""

KEYWORDS: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in AS_DECODER},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8, "kv_n_heads": 4}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}  # fmt: skip

_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
KEYWORDS |= {
    name: {"text_config": {"rope_parameters": _AXES}}
    for name in ("glm46v", "glm4v", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
}
KEYWORDS["glm_ocr"] = {"text_config": {"rope_parameters": {**_AXES, "mrope_section": [8, 12, 12]}}}
KEYWORDS["glm4v_moe"] = {"text_config": {"rope_parameters": {**_AXES, "mrope_section": [3, 4, 4]}}}

SIZES: dict[str, dict[str, Any]] = {"reformer": {"axial_pos_embds_dim": [32, 32]}}
"""Sizes of the shrunken configuration that depend on each other in a way of their own."""

REASONS: dict[str, str] = {
    "blt": "It is several byte-level models with a cache each.",
    "gemma3n": "Its vision tower needs the package timm; gemma3n_text works.",
    "gemma4_assistant": "It drafts for another model and cannot run alone.",
    "gemma4_unified_assistant": "It drafts for another model and cannot run alone.",
    "cpmant": "It puts tokens of its own before every prompt.",
    "idefics": "It reads no text without a picture.",
    "kosmos-2": "It reads no text without a picture.",
    "mamba2": "It caches no keys and values.",
    "minimax": "Its linear attention has a cache of its own.",
    "moshi": "`generate()` gives other tokens than the model's own forward pass, which the engine equals.",
    "pi0": "It reads the state of a robot, too.",
    "qwen4_exp": "Its default configuration is of no whole model.",
    "qwen4_exp_text": "Its default configuration is of no whole model.",
    "recurrent_gemma": "It keeps its recurrent state in its modules, not in a cache.",
    "roc_bert": "Its random model says too few different tokens to prove anything.",
    "step3p7": "Its default configuration is of no whole model.",
}
"""Better words for what was found."""

CHECKPOINT_REASONS: dict[str, str] = {
    "gemma3n": "Its vision tower needs the package timm; a checkpoint of its text part alone is served.",
}
"""Better words for why checkpoints of a model type are refused."""
