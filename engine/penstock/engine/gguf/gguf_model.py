"""A GGUF file as a model: a directory in the cache that says in Hugging Face's files what its header says.

    header ─▶ can it be served? ─▶ config.json, tokenizer.json, tokenizer_config.json, a link to the file

From there on it is a model like any other, whose weights are in a quantised format (`quantized.py`). The tokenizer is
the one that transformers makes of the header. Not so the configuration: transformers leaves out the size of heads and
the factors of a rotary embedding, and a model that is nearly the right one says plausible nonsense. A key that is not
translated here is refused by name.
"""

import hashlib
import importlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.engine.gguf.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from penstock.errors import ModelLoadError, build_damage_error, is_failure

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_DESCRIPTION_VERSION = 1
"""Counts the changes of what is written for a header."""

_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}  # fmt: skip
_IN_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}  # fmt: skip
_OF_ARCHITECTURE = {
    "qwen2": {f"attn_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"},
    "qwen3": {f"attn_{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"},
}
_ROPE_FACTORS = "rope_freqs.weight"
_UNKNOWN_KEYS = ("rope.scaling.factor", "rope.scale_linear", "attention.sliding_window", "expert_count")
"""Keys that change what a model computes, and are not translated."""
_PLAIN_SPLITS = ("default", "gpt-2")
"""Values of `tokenizer.ggml.pre` with which texts are split as for GPT-2."""
_BEGIN_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Those with which llama.cpp begins a text with the token for that, unless the file says otherwise."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of frequencies in Llama 3.1, which all published models of that kind have; a file has the factors
alone."""


def describe_gguf(path: Path, cache: Path) -> Path:
    """Return a directory with the model's configuration, its tokenizer and a link to the file, written where needed.

    Raises `ModelLoadError` if the file is damaged, or is of a model that cannot be served.
    """
    path = path.absolute()
    directory, header, config = find_description(path, cache)
    if directory.is_dir():
        return directory
    scratch = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="unfinished-", dir=directory.parent))
        (scratch / "config.json").write_text(json.dumps(config, indent=1))
        (scratch / path.name).symlink_to(path)
        make_tokenizer(path, header).save_pretrained(scratch)
        scratch.replace(directory)
    except OSError as error:
        if not directory.is_dir():  # else another process wrote it
            raise ModelLoadError(f"{directory} for {path.name} cannot be written: {error.strerror or error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def find_description(path: Path, cache: Path) -> tuple[Path, GgufHeader, dict[str, Any]]:
    """Return the directory that `describe_gguf` writes, and of what. Raises `ModelLoadError` where it cannot be."""
    header = read_gguf_header(path)
    config = make_config(path, header)
    about = f"{_DESCRIPTION_VERSION} {version('transformers')} {path.absolute()} {json.dumps(config)}"
    digest = hashlib.sha256(about.encode() + b"\0" + header.content).hexdigest()
    directory = cache / "gguf" / digest[:32]
    nearest = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if nearest != directory and not os.access(nearest, os.W_OK | os.X_OK):
        raise ModelLoadError(
            f"{nearest} cannot be written to, where a description of {path.name} is to be kept: "
            "PENSTOCK_ENGINE_CACHE_DIR names another place"
        )
    return directory, header, config


def make_config(path: Path, header: GgufHeader) -> dict[str, Any]:
    """Return what config.json says. Raises `ModelLoadError` for a model that cannot be served."""
    architecture = check_gguf(path, header)
    heads = _read_size(header, "attention.head_count")
    kv_heads = _read_size(header, "attention.head_count_kv", heads)
    head_dim = _read_size(header, "attention.key_length", _read_size(header, "embedding_length") // heads)
    if head_dim % 2:
        raise build_damage_error(f"{path.name} has heads of {head_dim}, which rotary positions cannot halve")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := _read_size(header, key, head_dim)) != head_dim:
            raise _refuse(path, f"{architecture}.{key} {size} beside heads of {head_dim}", "equal ones")
    types = {tensor.kind for tensor in header.tensors.values()}
    tokens = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "model_type": architecture,
        "num_hidden_layers": _read_size(header, "block_count"),
        "intermediate_size": _read_size(header, "feed_forward_length"),
        "max_position_embeddings": _read_size(header, "context_length"),
        "hidden_size": _read_size(header, "embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _read_float(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _find_rope(path, header, head_dim),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32" if types == {"F32"} else "float16" if types <= {"F32", "F16"} else "bfloat16",
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [one for one in tokens if type(one) is int] or None,
        "quantization_config": {
            "quant_method": "gguf",
            "architecture": architecture,
            # For Llama the two halves that rotary positions turn lie side by side in the file, pair by pair.
            "rotary_heads": {"attn_q": heads, "attn_k": kv_heads} if architecture == "llama" else {},
        },
    }


def check_gguf(path: Path, header: GgufHeader | None = None) -> str:
    """Return the architecture. Raises `ModelLoadError` if the header shows that the file cannot be served."""
    header = header or read_gguf_header(path)
    architecture: str = header.read_value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise _refuse(path, f"the architecture {architecture[:60]!r}", f"one of {', '.join(ARCHITECTURES)}")
    if header.read_value("split.count", int, 1) > 1:
        raise _refuse(path, "a part of the tensors", "all of them (`llama-gguf-split --merge`)")
    if (scaling := header.read_value(f"{architecture}.rope.scaling.type", str, "none")) != "none":
        raise _refuse(path, f"rope.scaling.type {scaling[:60]!r}", "no scaled positions")
    for key in _UNKNOWN_KEYS:
        if value := header.metadata.get(f"{architecture}.{key}"):
            raise _refuse(path, f"{architecture}.{key} {str(value)[:60]}", "none")
    _check_tensors(path, header, architecture)
    if header.metadata.get("tokenizer.ggml.model") in (None, "none") or "tokenizer.ggml.tokens" not in header.metadata:
        raise _refuse(path, "no tokenizer", "one")
    return architecture


def _check_tensors(path: Path, header: GgufHeader, architecture: str) -> None:
    """Raise `ModelLoadError` for a tensor that the architecture has not, and for another number of layers."""
    for name in header.tensors:
        if rename_tensor(name, architecture) is None and name != _ROPE_FACTORS:
            raise _refuse(path, f"the tensor {name[:60]!r}", f"the tensors of {architecture} alone")
    if len(header.tensors.get("token_embd.weight", GgufTensor("", [], 0, 0)).shape) != 2:
        raise build_damage_error(f"{path.name} has no matrix token_embd.weight")
    num_layers = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if num_layers != _read_size(header, "block_count"):
        raise build_damage_error(
            f"{path.name} has tensors of {num_layers} layers, and another {architecture}.block_count"
        )


def rename_tensor(name: str, architecture: str) -> str | None:
    """Return the name that a tensor has in transformers, or None for one that the architecture has not."""
    if found := re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name):
        inside = (_IN_LAYERS | _OF_ARCHITECTURE.get(architecture, {})).get(found[2])
        return None if inside is None else f"model.layers.{found[1]}.{inside}"
    return _WHOLE.get(name)


def _read_size(header: GgufHeader, key: str, default: int | None = None) -> int:
    """Return a number of the architecture. Raises `ModelLoadError` if it is missing, or is no size of a model."""
    key = f"{header.metadata['general.architecture']}.{key}"
    size: int = header.read_value(key, int, default)
    if not 0 < size < 2**31:
        raise build_damage_error(f"the GGUF file has {key} {size}")
    return size


def _read_float(header: GgufHeader, key: str, default: float | None = None) -> float:
    """Return a positive number of the architecture: the shortest that is the stored one in float32, such as 1e-06."""
    import numpy as np

    number = header.read_value(f"{header.metadata['general.architecture']}.{key}", float, default)
    if not 0 < np.float32(number) < 3e38:
        raise build_damage_error(f"the GGUF file has {key} {number}")
    return float(str(np.float32(number)))


def _find_rope(path: Path, header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding. Raises `ModelLoadError` for frequencies of another scaling."""
    base = _read_float(header, "rope.freq_base", 10000.0)
    tensor = header.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return {"rope_type": "default", "rope_theta": base}
    if tensor.kind != "F32" or tensor.shape != [head_dim // 2]:
        raise build_damage_error(
            f"{_ROPE_FACTORS} is {tensor.shape} of {tensor.kind} in {path.name}, not {head_dim // 2}"
        )
    with path.open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    if not all(map(math.isfinite, factors)):
        raise build_damage_error(f"{_ROPE_FACTORS} in {path.name} has a factor that is no number")
    right = _list_llama3_factors(base, head_dim, max(1.0, *factors))
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, right, strict=True)):
        raise _refuse(path, f"{_ROPE_FACTORS} that are not those of Llama 3.1", "those, or none")
    return {"rope_type": "llama3", "rope_theta": base, "factor": max(factors), **_LLAMA3_ROPE}


def _list_llama3_factors(base: float, head_dim: int, factor: float) -> list[float]:
    """Return by what the frequency of each pair is divided in Llama 3.1, by the factor of the longest waves."""
    low, high, context = _LLAMA3_ROPE.values()
    waves = (context / (2 * math.pi * base ** (first / head_dim)) for first in range(0, head_dim, 2))
    kept = (min(1.0, max(0.0, (number - low) / (high - low))) for number in waves)
    return [1 / ((1 - one) / factor + one) for one in kept]


def make_tokenizer(path: Path, header: GgufHeader) -> Any:
    """Return the tokenizer as transformers makes it. Raises `ModelLoadError` if there is none that can be made."""
    try:
        from transformers import PreTrainedTokenizerFast

        tables: Any = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
        # Not its function for a file, which imports torch: a gateway has none.
        mapping, convert = tables.GGUF_TOKENIZER_MAPPING, tables.convert_gguf_tokenizer
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"a GGUF file's tokenizer needs transformers 5.23 or a later 5: {error}") from None
    keys = {key.removeprefix("tokenizer."): value for key, value in header.metadata.items()}
    found, given = (
        {name: keys[key] for key, name in mapping[part].items() if key in keys}
        for part in ("tokenizer", "tokenizer_config")
    )
    splits = found.get("pre_tokenizer_type", _PLAIN_SPLITS[0])
    if found["tokenizer_type"] == "gpt2" and splits not in {*tables.GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN_SPLITS}:
        raise _refuse(path, f"tokenizer.ggml.pre {str(splits)[:60]!r}", "a known way of splitting texts")
    if found["tokenizer_type"] == "llama" or splits in _BEGIN_WITH_BOS:
        # Older files do not say it, and llama.cpp begins with this token where such a file is silent.
        given.setdefault("add_bos_token", True)
    try:
        for name in ("bos", "eos", "unk", "pad"):
            number = found.get(f"{name}_token_id")
            given[f"{name}_token"] = None if number is None else found["tokens"][number]
        backend, more = convert(header.metadata["general.architecture"], found)
        make: Any = PreTrainedTokenizerFast
        return make(tokenizer_object=backend, **given, **more)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelLoadError(f"{path.name} has no usable tokenizer ({type(error).__name__}: {error})") from error


def _refuse(path: Path, what: str, wanted: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path.name} has {what}, which cannot be served: use a GGUF file with {wanted}, or the model in safetensors"
    )
