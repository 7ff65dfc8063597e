"""Published quantised checkpoints: the names of their tensors, and the format that their configuration says, are read.

A small random model of a published configuration is saved as transformers saves it, with the names that the published
weights have, and again with its linear layers in the published format.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from penstock.engine.weights.files import find_weight_files
from penstock.engine.weights.module import build_skeleton, check_weight_sizes, load_module
from penstock.engine.weights.quantized import take_quantization, unpack_weights
from penstock.engine.weights.weights import MappedWeights
from tests.engine.quantized_checkpoints import Writer, save_checkpoint, write_awq, write_fp8, write_gptq, write_packed
from tools.published import make_config, read_checkpoints
from tools.tiny import build_tiny_model, shrink_config

CPU = torch.device("cpu")
CHECKPOINTS = (
    "Qwen/Qwen3-VL-8B-Instruct-FP8", "MiniMaxAI/MiniMax-M2.5",
    "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "RedHatAI/gemma-3-4b-it-FP8-dynamic", "moonshotai/Kimi-K2.5", "XiaomiMiMo/MiMo-V2-Flash", "zai-org/GLM-4.5-Air-FP8",
)  # fmt: skip
PLAIN = ("lm_head", "embed", "norm", "vision", "visual", "projector", "mlp.gate.", "block_sparse_moe.gate.", "router")
"""What is in the names of matrices that are not quantised."""


def _choose_writer(settings: dict[str, Any]) -> Writer:
    """Return what writes a matrix in the format that the settings say."""
    method = settings["quant_method"]
    if method == "fp8":
        height, width = settings["weight_block_size"]
        return write_fp8(height, width, None, "weight_scale_inv")
    if method == "gptq":
        return write_gptq(settings["bits"], settings["group_size"], symmetric=True, stored_less=True)
    if method == "awq":
        settings["group_size"] = 16
        return write_awq
    weights = settings["config_groups"]["group_0"]["weights"]
    if weights["type"] == "float":
        return write_fp8(1, None, None, "weight_scale")
    return write_packed(weights["num_bits"], weights["group_size"])


def _load(directory: Path) -> Any:
    config = AutoConfig.from_pretrained(directory)
    settings = take_quantization(config)
    weights = MappedWeights(find_weight_files(directory))
    unpack_weights(weights, settings, torch.float32)
    skeleton = build_skeleton(config, torch.float32)
    check_weight_sizes(skeleton, weights)
    return load_module(skeleton, config, weights, CPU, lambda what, done: None)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_published_checkpoint_is_the_plain_model(name: str, tmp_path: Path) -> None:
    config = make_config(read_checkpoints()[name])
    settings = take_quantization(config)
    assert settings is not None
    write = _choose_writer(settings)
    small = shrink_config(config)
    build_tiny_model(type(build_skeleton(small, torch.float32)), small, 0, CPU).save_pretrained(tmp_path)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    num_written = 0
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.ndim == 2 and key.endswith(".weight") and not re.search("|".join(map(re.escape, PLAIN)), key):
            written, plain[key] = write(tensor)
            stored |= {key.removesuffix("weight") + ending: part for ending, part in written.items()}
            num_written += 1
        else:
            stored[key] = plain[key] = tensor
    assert num_written >= 7
    tokens = torch.arange(20)[None]
    save_checkpoint(tmp_path, None, plain)
    (tmp_path / "config.json").write_text(_drop_settings(tmp_path))
    right = _load(tmp_path)(input_ids=tokens).logits
    save_checkpoint(tmp_path, settings, stored)
    assert torch.equal(_load(tmp_path)(input_ids=tokens).logits, right)


def _drop_settings(directory: Path) -> str:
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    return json.dumps(config)
