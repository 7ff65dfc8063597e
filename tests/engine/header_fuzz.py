"""Headers of GGUF and safetensors files with random damage: each is read, or refused by a typed error.

`python -m tests.engine.header_fuzz 10000` runs as many of either form as it is told, from the seed 0 on.
"""

import random
import struct
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.engine.gguf.gguf_file import read_gguf_header
from penstock.engine.gguf.gguf_model import describe_gguf
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError
from tests.engine.gguf_files import GgufContent

EXTREMES = (0, 1, 2, 8, 9, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
MAX_PYTHON_BYTES = 2**22
"""What a header of some kilobytes may take while it is read."""


def make_small_gguf(path: Path) -> Path:
    """Write a file with a header of every kind of value, of a model without layers that matter."""
    shape = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 32,
             "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
             "rope.freq_base": 1e4}  # fmt: skip
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in shape.items()}
    tokens = [chr(number) for number in range(33, 127)] + ["ab", "<|end|>"]
    metadata |= {"general.architecture": "llama", "general.alignment": 32, "tokenizer.ggml.model": "gpt2",
                 "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [float(i) for i in range(len(tokens))],
                 "tokenizer.ggml.token_type": [1] * 95 + [3], "tokenizer.ggml.merges": ["a b"],
                 "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False}  # fmt: skip
    tensors = {"token_embd.weight": ("Q8_0", [96, 64], bytes(96 * 68)), "output_norm.weight": ("F32", [64], bytes(256)),
               "rope_freqs.weight": ("F32", [16], struct.pack("<16f", *[1.0] * 16)),
               "blk.0.attn_q.weight": ("F16", [64, 64], bytes(8192))}  # fmt: skip
    return GgufContent(metadata, tensors).save(path)


def make_small_safetensors(path: Path) -> Path:
    """Write a file with tensors of several types and shapes."""
    tensors = {f"model.layers.{i}.weight": torch.zeros(4, 2 + i) for i in range(6)}
    save_file(
        {**tensors, "scale": torch.zeros(()), "half": torch.zeros(3, dtype=torch.bfloat16)}, path, {"format": "pt"}
    )
    return path


def damage_header(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """Return the content with one to three changes in its header, or cut off."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(max(1, min(header_bytes, len(changed) - 8)))
        match rng.randrange(6):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place] = rng.randrange(256)
            case 2:
                struct.pack_into("<Q", changed, place, rng.choice(EXTREMES))
            case 3:
                struct.pack_into("<I", changed, place, rng.choice(EXTREMES) & 0xFFFFFFFF)
            case 4:
                length = rng.randint(1, 40)
                changed[place : place + length] = rng.choice(
                    [b"", changed[place : place + length] * 2, b"\xff" * length]
                )
            case _:
                del changed[rng.randrange(len(changed)) :]
        changed += bytes(max(0, 16 - len(changed)))
    return bytes(changed)


def read_gguf(path: Path) -> None:
    """Read all that a load reads before it builds a model. Raises `ModelLoadError`."""
    tracemalloc.start()
    try:
        read_gguf_header(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_PYTHON_BYTES, f"a header of a small file took {peak:,} bytes"
    describe_gguf(path, path.parent / "cache")
    read_weights(path)


def read_weights(path: Path) -> None:
    """Map all tensors of a file. Raises `ModelLoadError`."""
    for part in MappedWeights([path]).tensors.values():
        assert part[...].nbytes <= path.stat().st_size


FORMS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "gguf": (make_small_gguf, read_gguf),
    "safetensors": (make_small_safetensors, read_weights),
}


def fuzz_headers(directory: Path, form: str, num: int, seed: int) -> Counter[str]:
    """Read `num` damaged files of a form, and return how many there were by what came of them.

    Raises whatever else than `ModelLoadError` a read raises, with the file left in the directory.
    """
    make, read = FORMS[form]
    path = make(directory / f"model.{form}")
    read(path)
    content, rng, seen = path.read_bytes(), random.Random(seed), Counter[str]()
    header_bytes = len(read_gguf_header(path).content) if form == "gguf" else 8 + int.from_bytes(content[:8], "little")
    for _ in range(num):
        path.unlink()  # a mapping of the file before keeps its content
        path.write_bytes(damage_header(content, header_bytes, rng))
        try:
            read(path)
            seen["read"] += 1
        except ModelLoadError:
            seen["refused"] += 1
    return seen


if __name__ == "__main__":
    for kind in FORMS:
        with tempfile.TemporaryDirectory() as scratch:
            print(kind, dict(fuzz_headers(Path(scratch), kind, int(sys.argv[1]), 0)))  # noqa: T201
