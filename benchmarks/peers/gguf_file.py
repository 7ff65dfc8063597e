"""From a safetensors directory to a GGUF file: bf16 matrices, float32 norms, the tokenizer of bytes."""

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

_PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_ROUTER = "mlp.gate.weight"
"""In float32, as llama.cpp's own conversion has it."""


def write_gguf(model: Path, target: Path, form: str = "BF16") -> None:
    """Convert a model of the Llama, Qwen3 or Qwen3-MoE architecture.

    `form` is that of the matrices. The embedding, which is the output layer too, has 8 bits where the others have 4.
    """
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, config["model_type"].replace("_", ""))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokenizer(gguf, writer, json.loads((model / "tokenizer.json").read_text()), config["vocab_size"])
    for name, bits in merge_experts(_read_tensors(model / "model.safetensors")):
        if bits.ndim == 1 or name.endswith(_ROUTER):
            writer.add_tensor(rename_tensor(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            bits = np.ascontiguousarray(_arrange_rotary(name, bits, config))  # noqa: PLW2901
            own = "Q8_0" if "embed" in name and form == "Q4_0" else form
            kind = gguf.GGMLQuantizationType[own]
            floats = (bits.astype(np.uint32) << 16).view(np.float32)
            raw = bits.view(np.uint8) if own == "BF16" else gguf.quants.quantize(floats, kind)
            writer.add_tensor(rename_tensor(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(gguf: Any, writer: Any, tokenizer: dict[str, Any], vocabulary: int) -> None:
    """Add byte-level BPE. Where it has fewer tokens than the model, others follow; llama.cpp wants a merge."""
    added = tokenizer["added_tokens"]
    by_number = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    by_number |= {one["id"]: one["content"] for one in added}
    tokens, merges = [by_number[number] for number in sorted(by_number)], tokenizer["model"]["merges"]
    normal = set(tokens) - {one["content"] for one in added}
    if len(tokens) < vocabulary:
        merges = merges or [tokens[:2]]
        tokens += ["".join(tokens[:2]), *(f"<unused {number}>" for number in range(len(tokens) + 1, vocabulary))]
    kinds = {True: gguf.TokenType.NORMAL, False: gguf.TokenType.CONTROL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token in normal] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(added[0]["id"])
    writer.add_eos_token_id(added[1]["id"])
    writer.add_add_bos_token(False)


def _read_tensors(file: Path) -> Iterator[tuple[str, Bits]]:
    """Names and bits of the tensors; the file is read by its own header, since numpy knows no bf16."""
    with file.open("rb") as content:
        header_size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(header_size))
    everything = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + header_size)
    for name, about in header.items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            yield name, everything[first:last].view(np.uint16).reshape(about["shape"])


def merge_experts(tensors: Iterable[tuple[str, Bits]]) -> Iterator[tuple[str, Bits]]:
    """Yield the tensors, those of all experts of a layer as one: [experts, rows, columns]."""
    by_name: dict[str, dict[int, Bits]] = {}
    for name, bits in tensors:
        before, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            yield name, bits
            continue
        number, _, inside = rest.partition(".")
        by_name.setdefault(f"{before}.experts.{inside}", {})[int(number)] = bits
    for name, experts in by_name.items():
        yield name, np.stack([experts[number] for number in range(len(experts))])


def rename_tensor(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    part = name.removesuffix(".weight")
    if part in _PARTS:
        return f"{_PARTS[part]}.weight"
    layer, _, inside = part.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_PARTS[inside]}.weight"


def _arrange_rotary(name: str, bits: Bits, config: dict[str, Any]) -> Bits:
    """For Llama the two halves that rotary positions turn lie side by side, pair by pair."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    which = name.split(".")[-2]
    if config["model_type"] != "llama" or which not in heads:
        return bits
    halves = bits.reshape(heads[which], 2, -1, bits.shape[-1])
    return halves.transpose(0, 2, 1, 3).reshape(bits.shape)
