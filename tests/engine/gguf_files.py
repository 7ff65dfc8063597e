"""GGUF files for tests: a writer of the format, blocks with random numbers, and what they stand for, number by number.

`read_block` is written from the description of the format alone: plain numbers, no vectors.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.gguf.gguf_file import BLOCKS
from penstock.engine.weights.files import DEMO_MODEL

NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "BF16": 30,
}  # fmt: skip
"""By the name of a type: its number in a file."""
NUM_DIFFERENT = 64
"""How many blocks of a tensor differ: to read one takes milliseconds."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass
class GgufContent:
    """What a test writes into a file."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], bytes]] = field(default_factory=dict)
    """By name: type, shape and bytes."""

    def save(self, path: Path, version: int = 3) -> Path:
        """Write the file, and return its path."""
        head = struct.pack("<4sIQQ", b"GGUF", version, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            head += _string(key) + _value(value)
        data = b""
        for name, (kind, shape, content) in self.tensors.items():
            head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            head += struct.pack("<IQ", NUMBERS.get(kind, 99), len(data))
            data += content + bytes(-len(content) % 32)
        path.write_bytes(head + bytes(-len(head) % 32) + data)
        return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _value(value[0])[:4]
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(_value(one)[4:] for one in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<I", 8) + _string(value)


# Blocks


def make_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> bytes:
    """Return blocks of random numbers, with scales such as weights have."""
    blocks = rng.integers(0, 256, (num_blocks, BLOCKS[kind][1]), np.uint8)
    num_halves = 1 + (kind.endswith("_1") or kind in ("Q4_K", "Q5_K"))
    first = 208 if kind == "Q6_K" else 0
    most = 3e-5 if kind == "Q6_K" else 2e-4 if kind.endswith("_K") else 2e-3 if kind == "Q8_0" else 0.02
    halves = rng.uniform(-most, most, (num_blocks, num_halves)).astype(np.float16)
    blocks[:, first : first + 2 * num_halves] = halves.view(np.uint8)
    return blocks.tobytes()


def read_block(kind: str, block: bytes) -> list[np.float32]:
    """Return the values of one block, one after the other, as the format describes them."""
    return _READERS[kind](block)


def _half(block: bytes, place: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, place)[0])


def _read_q8_0(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * np.float32(number) for number in struct.unpack_from("<32b", block, 2)]


def _read_small(block: bytes) -> list[np.float32]:
    """Q4_0 (18 bytes), Q4_1 (20), Q5_0 (22) and Q5_1 (24)."""
    has_minimum, is_five = len(block) in (20, 24), len(block) >= 22
    place = 4 if has_minimum else 2
    bits = struct.unpack_from("<I", block, place)[0] if is_five else 0
    values = []
    for i in range(32):
        byte = block[len(block) - 16 + i % 16]
        number = (byte & 15 if i < 16 else byte >> 4) + 16 * (bits >> i & 1)
        if has_minimum:
            values.append(_half(block, 0) * np.float32(number) + _half(block, 2))
        else:
            values.append(_half(block, 0) * np.float32(number - (16 if is_five else 8)))
    return values


def _read_k(block: bytes) -> list[np.float32]:
    """Q4_K (144 bytes) and Q5_K (176)."""
    scales, is_five = block[4:16], len(block) == 176
    values = []
    for i in range(256):
        group = i // 32
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
            minimum = scales[group + 4] >> 4 | scales[group] >> 6 << 4
        byte = block[len(block) - 128 + group // 2 * 32 + i % 32]
        number = byte >> 4 if group % 2 else byte & 15
        if is_five:
            number += 16 * (block[16 + i % 32] >> group & 1)
        product = _half(block, 0) * np.float32(scale) * np.float32(number)
        values.append(product - _half(block, 2) * np.float32(minimum))
    return values


def _read_q6_k(block: bytes) -> list[np.float32]:
    scales = struct.unpack_from("<16b", block, 192)
    values = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = block[half * 64 + quarter % 2 * 32 + place]
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = block[128 + half * 32 + place] >> (2 * quarter) & 3
        values.append(_half(block, 208) * np.float32(scales[i // 16]) * np.float32((low | high << 4) - 32))
    return values


_READERS: dict[str, Callable[[bytes], list[np.float32]]] = {
    "Q4_0": _read_small, "Q4_1": _read_small, "Q5_0": _read_small, "Q5_1": _read_small, "Q8_0": _read_q8_0,
    "Q4_K": _read_k, "Q5_K": _read_k, "Q6_K": _read_q6_k,
}  # fmt: skip


def read_blocks(kind: str, content: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of all blocks."""
    size = BLOCKS[kind][1]
    return np.array([read_block(kind, content[i : i + size]) for i in range(0, len(content), size)], np.float32).ravel()


# Models


def make_tokenizer_keys() -> dict[str, Any]:
    """Return the demo model's tokenizer as keys of a file."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    by_number = sorted(tokenizer["model"]["vocab"].items(), key=lambda one: one[1])
    tokens, special = [token for token, _ in by_number], {one["id"]: one for one in tokenizer["added_tokens"]}
    for number in sorted(special):
        if number >= len(tokens):
            tokens.append(special[number]["content"])
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    named = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    numbers = {f"tokenizer.ggml.{name}_token_id": tokens.index(named[f"{name}_token"]) for name in ("bos", "eos")
               if named.get(f"{name}_token") in tokens}  # fmt: skip
    return numbers | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def convert_model(directory: Path, kinds: list[str], seed: int = 0) -> GgufContent:
    """Return a saved model as GGUF content, its matrices in blocks of random numbers, in the types in turn.

    Gate and up are of one type, as llama.cpp has them.

    The directory's safetensors become the same model: what the blocks stand for, by `read_block`.
    """
    rng, config = np.random.default_rng(seed), json.loads((directory / "config.json").read_text())
    arch, heads = config["model_type"], config["num_attention_heads"]
    sizes = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }  # fmt: skip
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        **{f"{arch}.{key}": config[name] for key, name in sizes.items()},
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    metadata[f"{arch}.attention.key_length"] = metadata[f"{arch}.attention.value_length"] = head_dim
    metadata[f"{arch}.rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    content = GgufContent(metadata | make_tokenizer_keys())
    plain: dict[str, Tensor] = {}
    kind = ""
    for number, (name, tensor) in enumerate(sorted(load_file(directory / "model.safetensors").items())):
        if "up_proj" not in name:  # the one before is gate
            kind = kinds[number % len(kinds)] if tensor.ndim == 2 else "F32"
        if kind in DTYPES:
            stored = tensor.to(DTYPES[kind])
            raw = stored.reshape(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[arg-type, unused-ignore]
        else:
            values_each, size = BLOCKS[kind]
            different = make_blocks(kind, NUM_DIFFERENT, rng)
            chosen = rng.integers(0, NUM_DIFFERENT, tensor.numel() // values_each)
            raw = np.frombuffer(different, np.uint8).reshape(-1, size)[chosen].tobytes()
            values = read_blocks(kind, different).reshape(-1, values_each)[chosen]
            stored = torch.from_numpy(values).view(tensor.shape)
        head_counts = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}
        which = name.split(".")[-2]
        if arch == "llama" and which in head_counts:
            # What lies in the file pair by pair is two halves in transformers.
            parts = stored.view(head_counts[which], -1, 2, stored.shape[-1])
            plain[name] = parts.transpose(1, 2).reshape(tensor.shape).contiguous()
        else:
            plain[name] = stored
        content.tensors[rename(name)] = (kind, list(tensor.shape), raw)
    save_file(plain, directory / "model.safetensors", {"format": "pt"})
    return content


def rename(name: str) -> str:
    """Return the name that a tensor of transformers has in a file."""
    module, _, ending = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{ending}"
    _, _, layer, inside = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inside]}.{ending}"
