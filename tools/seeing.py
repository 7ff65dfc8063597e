"""Random models that see pictures, with all files of a published one: weights, tokenizer, chat template, processor."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.weights.files import DEMO_MODEL
from tools.tiny import build_tiny_model

TEMPLATE = """{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"""
TEXT: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
CLIP = {
    "model_type": "clip_vision_model", "projection_dim": 32, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
}  # fmt: skip
QWEN = {"depth": 1, "num_heads": 2, "patch_size": 14, "out_hidden_size": 96, "embed_dim": 32, "hidden_size": 96}
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "image": "<image>", "config": transformers.LlavaConfig,
        "module": transformers.LlavaForConditionalGeneration, "text": {"model_type": "llama", **TEXT},
        "vision": CLIP, "pixels": transformers.CLIPImageProcessorPil,
        "sizes": {"size": {"shortest_edge": 56}, "crop_size": 56},
        "processor": {
            "processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    },
    "qwen2_vl": {
        "image": "<|image_pad|>", "around": "<|vision_start|>{}<|vision_end|>", "config": transformers.Qwen2VLConfig,
        "module": transformers.Qwen2VLForConditionalGeneration, "text": TEXT | AXES, "vision": QWEN,
        "pixels": transformers.Qwen2VLImageProcessorPil, "sizes": {"min_pixels": 784, "max_pixels": 200_704},
        "processor": {"processor_class": "Qwen2VLProcessor"},
        "tokens": ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    },
}  # fmt: skip


def write_files(directory: Path, about: dict[str, Any], tokenizer: Any) -> Any:
    """Write all files of a model but its weights: with this tokenizer, which is given the tokens for pictures that it
    lacks. Return its configuration.
    """
    tokenizer.add_tokens(about.get("tokens", []), special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", about.get("around", "{}").format(about["image"]))
    tokenizer.save_pretrained(directory)
    about["pixels"](**about["sizes"]).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(about["processor"]))
    text = {**about["text"], "vocab_size": len(tokenizer)}
    rows = tokenizer.convert_tokens_to_ids(about["image"])
    return about["config"](
        text_config=text, vision_config=about["vision"], image_token_id=rows, **about.get("joined", {})
    )


def save_seeing_model(directory: Path, kind: str = "llava") -> Path:
    """Write a small random model of a kind into a directory; return that."""
    about = KINDS[kind]
    special = {"image_token": about["image"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(DEMO_MODEL), extra_special_tokens=special)
    config = write_files(directory, about, tokenizer)
    build_tiny_model(about["module"], config, 0, torch.device("cpu")).save_pretrained(directory)
    return directory
