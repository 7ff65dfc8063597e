"""What docs/regions.md says of KV that is sent to another region."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.loading.probe import probe_layout
from tools.kv_distance import (
    BLOCK_SIZE,
    LINK_BYTES_PER_S,
    MODELS,
    PROMPT_TOKENS,
    ROUND_TRIPS_S,
    compute_costs,
    make_layout,
    write_table,
)
from tools.published import make_config, read_checkpoints
from tools.tiny import build_tiny_model, shrink_config

PAGE = Path(__file__).parents[1] / "docs" / "regions.md"


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert write_table(page) == page, "run: python -m tools.kv_distance docs/regions.md"
    with pytest.raises(ValueError, match="needs one"):
        write_table("a page without its place")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", transformers.LlamaForCausalLM),
        ("deepseek-ai/DeepSeek-V3", transformers.DeepseekV3ForCausalLM),
    ],
)
def test_the_layout_is_the_one_that_the_engine_finds(name: str, kind: type[Any]) -> None:
    cpu = torch.device("cpu")
    small = build_tiny_model(kind, shrink_config(make_config(read_checkpoints()[name])), 1, cpu)
    assert probe_layout(small, BLOCK_SIZE, torch.float32, cpu).layers == make_layout(small.config).layers


def test_what_the_page_says_of_the_table() -> None:
    costs = {(model.name, num): compute_costs(model, num) for model in MODELS for num in PROMPT_TOKENS}
    sooner = {of for of, one in costs.items() if one.move_s(ROUND_TRIPS_S[0]) < one.computed_s}
    assert sooner == {("DeepSeek-V3", 65_536)}
    assert min(one.least_rate for one in costs.values()) * 8 > 7e9
    assert all(one.move_s(0.2) - one.move_s(0.0) == pytest.approx(0.2) for one in costs.values())
    # A dollar's cents: 0.02 a GB between regions of the large clouds, 3 an hour of a GPU.
    for model in MODELS:
        one = costs[model.name, 8_192]
        assert one.num_bytes / 1e9 * 0.02 > 2.5 * one.computed_s / 3600 * 3 * model.num_gpus
    assert costs["Llama 3.1 8B", 1_024].num_bytes / LINK_BYTES_PER_S > ROUND_TRIPS_S[1]
