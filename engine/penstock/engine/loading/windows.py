"""From how many tokens on a model computes otherwise than before: its windows, chunks, sparse indexers and scales.

The proof at load reads a prompt that is longer than those of them that are short. Longer ones are proved with small
models, for the classes that `proved.json` names (`tools/compatibility.py` writes it); of any other class only as many
tokens are served as were proved.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

MAX_READ_AT_LOAD = 512
"""The longest window that the proof at load reads past. Its passes over so many tokens take seconds."""
PROVED = Path(__file__).parent / "proved.json"
_KINDS = {"sliding_window": "sliding", "attention_chunk_size": "chunked"}
"""By setting: what the names of the layers that heed it have in them, where a configuration names its layers."""
_NAMES = ("sliding_window", "attention_chunk_size", "index_topk", "sliding_window_size", "window_size",
          "attention_window_size", "local_attention", "keep_window_size", "floor_scale",
          "log_scaling_n_floor")  # fmt: skip


def find_windows(config: Any) -> dict[str, int]:
    """Return by setting the number of tokens up to which its layers compute as if there was no such setting."""
    text = config.get_text_config(decoder=True)
    layers = " ".join(map(str, getattr(text, "layer_types", None) or ()))
    found = {name: getattr(text, name, None) for name in _NAMES if not layers or _KINDS.get(name, "") in layers}
    blocks, size = getattr(text, "index_topk_blocks", None), getattr(text, "index_block_size", None)
    if type(blocks) is int and type(size) is int:
        found["index_topk_blocks"] = blocks * size
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("llama_4_scaling_beta"):
        found["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    return {name: value for name, value in found.items() if type(value) is int and value > 0}


def list_unread_windows(config: Any, context_length: int) -> dict[str, int]:
    """Return those windows that sequences may be longer than, and that the proof at load does not reach."""
    return {name: size for name, size in find_windows(config).items() if MAX_READ_AT_LOAD < size < context_length}


def list_unproved_windows(config: Any, context_length: int) -> dict[str, int]:
    """Return those of them that no small model of the class was longer than when it was proved, either."""
    proved = read_proved_windows().get(config.get_text_config(decoder=True).model_type, [])
    unread = list_unread_windows(config, context_length)
    return {name: size for name, size in unread.items() if name not in proved}


@cache
def read_proved_windows() -> dict[str, list[str]]:
    """Return by type of model which of its windows were proved with small models."""
    found: dict[str, list[str]] = json.loads(PROVED.read_bytes())
    return found
