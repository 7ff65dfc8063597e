"""`python -m tools.kv_distance docs/regions.md`: what KV costs, sent to another region or computed there.

The table of docs/regions.md is written between two comments. The bytes are those of the engine's own layout for a
published configuration. The seconds of a prompt follow from its operations: twice the parameters that a token uses, and
the attention to the tokens before it.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.engine.memory.storage import BlockLayout, LayerShape
from tools.published import make_config, read_checkpoints
from tools.settings_doc import format_table

BLOCK_SIZE = 16
GPU_FLOPS = 989e12 * 0.4
"""What a GPU computes of prompts: two fifths of an H100's or H200's dense bfloat16, as its data sheet has it."""
LINK_BYTES_PER_S = 10e9 / 8
ROUND_TRIPS_S = (0.020, 0.080, 0.200)
PROMPT_TOKENS = (1_024, 8_192, 65_536)
_PLACE = re.compile(r"(?<=<!-- tools.kv_distance -->\n).*?(?=<!-- / -->)", re.DOTALL)


@dataclass(frozen=True)
class Model:
    """A model as it is served somewhere."""

    name: str
    checkpoint: str
    parameters: float
    """Those that one token uses, as its authors tell them."""
    num_gpus: int


MODELS = (
    Model("Llama 3.1 8B", "meta-llama/Llama-3.1-8B-Instruct", 8.0e9, 1),
    Model("Llama 3.1 70B", "meta-llama/Llama-3.1-70B-Instruct", 70.6e9, 4),
    Model("DeepSeek-V3", "deepseek-ai/DeepSeek-V3", 37e9, 8),
)


def make_layout(config: Any) -> BlockLayout:
    """Return the engine's layout of the KV of a model in bfloat16, from its configuration alone."""
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:
        shapes = (1, rank), (1, config.qk_rope_head_dim)
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shapes = (config.num_key_value_heads, size), (config.num_key_value_heads, size)
    layers = tuple(LayerShape(layer, *shapes) for layer in range(config.num_hidden_layers))
    return BlockLayout(layers, BLOCK_SIZE, torch.bfloat16)


@dataclass(frozen=True)
class Costs:
    """What the KV of one prompt costs."""

    num_bytes: int
    computed_s: float
    link_bytes_per_s: float = LINK_BYTES_PER_S

    def move_s(self, round_trip_s: float) -> float:
        """Return the seconds until it has all come, if the whole link is its own."""
        return round_trip_s + self.num_bytes / self.link_bytes_per_s

    @property
    def least_rate(self) -> float:
        """The bytes a second from which on moving it is as fast as computing it, even without any distance."""
        return self.num_bytes / self.computed_s


def compute_costs(model: Model, num_tokens: int) -> Costs:
    """Return what the KV of a prompt costs, moved and computed again."""
    config = make_config(read_checkpoints()[model.checkpoint])
    num_bytes = make_layout(config).block_bytes // BLOCK_SIZE * num_tokens
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = 2 * size
    if getattr(config, "kv_lora_rank", None) is not None:
        sizes = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    attention = config.num_hidden_layers * config.num_attention_heads * sizes * num_tokens**2
    operations = 2 * model.parameters * num_tokens + attention
    return Costs(num_bytes, operations / (model.num_gpus * GPU_FLOPS))


def make_table() -> str:
    """Return the table: a row for each model and length of a prompt."""
    away = [f"moved, {round_trip_s * 1000:.0f} ms away" for round_trip_s in ROUND_TRIPS_S]
    rows = [("Model", "KV a token", "Prompt", "KV", "computed again", *away, "moving is sooner from")]
    for model in MODELS:
        for num_tokens in PROMPT_TOKENS:
            costs = compute_costs(model, num_tokens)
            moved = [f"{costs.move_s(round_trip_s):.2f} s" for round_trip_s in ROUND_TRIPS_S]
            kib, mb = costs.num_bytes / num_tokens / 1024, costs.num_bytes / 1e6
            name = f"{model.name}, {model.num_gpus} GPU{'s' if model.num_gpus > 1 else ''}"
            least = f"{costs.least_rate * 8 / 1e9:,.0f} Gbit/s"
            sizes = (f"{kib:.0f} KiB", f"{num_tokens:,}", f"{mb:,.0f} MB", f"{costs.computed_s:.2f} s")
            rows.append((name, *sizes, *moved, least))
    return format_table(rows)


def write_table(page: str) -> str:
    """Return a page with the table in its place. Raises `ValueError` for one without that place."""
    if len(_PLACE.findall(page)) != 1:
        raise ValueError("the page needs one <!-- tools.kv_distance --> with <!-- / --> after it")
    return _PLACE.sub(lambda _: f"\n{make_table()}\n", page)


def main(arguments: Sequence[str]) -> None:
    """Write the table into the page that the first argument names."""
    file = Path(arguments[0])
    file.write_text(write_table(file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
