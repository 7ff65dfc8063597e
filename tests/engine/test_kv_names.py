"""Whatever changes KV changes the names of its blocks: one difference, and nothing is found.

`tests/engine_contract/test_vllm_kv_names.py` has what vLLM computes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.loading import description
from penstock.engine.model import model
from tests.engine.helpers import needs_kernels, save_model
from tests.engine.kv_names import (
    PICTURE,
    TOKENS,
    Difference,
    Workers,
    check_difference,
    count_found,
    edit_config,
    flip_weight,
    name_blocks,
    open_workers,
    store_blocks,
)

pytestmark = needs_kernels
IN_16_BITS = {"dtype": "bfloat16"}
DIFFERENCES = {
    "weights": Difference(edit=flip_weight),
    "window": Difference(edit=edit_config(sliding_window=32)),
    "no window": Difference(edit=edit_config(sliding_window=None)),
    "rope's base": Difference(edit=edit_config(rope_parameters={"rope_type": "default", "rope_theta": 2e4})),
    "rope's kind": Difference(
        edit=edit_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ),
    "norm": Difference(edit=edit_config(rms_norm_eps=1e-5)),
    "float16": Difference(settings={"dtype": "float16"}),
    "bfloat16": Difference(settings=IN_16_BITS),
    "block size": Difference(settings={"block_size": 8}),
    "layout": Difference(patch=(description, "LAYOUT_VERSION", 99)),
    "KV in int8": Difference(both=IN_16_BITS, settings={"kv_dtype": "int8"}),
    "weights in int8": Difference(settings={"weights": "int8"}),
    "int4 for int8": Difference(both={"weights": "int8"}, settings={"weights": "int4"}),
    "prompts in int8": Difference(both=IN_16_BITS, settings={"prefill_weights": "int8"}),
    "rounding to int8": Difference(both={"weights": "int8"}, patch=(model, "QUANTIZATION_VERSION", 99)),
    "instruction set": Difference(both=IN_16_BITS, settings={"isa": "plain"}),
    "torch's kernels": Difference(both=IN_16_BITS, settings={"isa": "torch"}),
    "torch's instruction set": Difference(
        both={**IN_16_BITS, "isa": "torch"},
        patch=(torch.backends.cpu, "get_cpu_capability", lambda: "another one"),
    ),
    "secret": Difference(secret="another"),
    "tenant": Difference(asked={"tenant": "another"}),
    "no picture": Difference(asked={"spans": ()}),
    "picture": Difference(asked={"spans": (PICTURE._replace(name=b"another".ljust(32)),)}),
    "picture's rows": Difference(asked={"spans": (PICTURE._replace(row=1),)}),
}
"""One of each kind. An adapter's digest, once requests have one, is another line of what is asked."""
HARMLESS = {
    "threads": Difference(settings={"threads": 2}),
    "pool": Difference(settings={"pool_mb": 64}),
    "instruction set in float32": Difference(settings={"isa": "plain"}),
    "packed without loss": Difference(both=IN_16_BITS, settings={"weights": "p12"}),
}
"""What does not change KV: the blocks are found."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    parent = tmp_path_factory.mktemp("workers")
    config: Any = transformers.MistralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
        vocab_size=1024, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, sliding_window=64,
    )  # fmt: skip
    with open_workers(parent, save_model(parent / "model", config)) as opened:
        yield opened


@pytest.mark.parametrize("name", DIFFERENCES)
@settings(max_examples=10, deadline=None)
@given(tokens=TOKENS, writes=st.booleans())
def test_one_difference_and_nothing_is_found(workers: Workers, name: str, tokens: list[int], writes: bool) -> None:
    check_difference(workers, name, DIFFERENCES[name], tokens, writes)


@pytest.mark.parametrize("name", HARMLESS)
@settings(max_examples=5, deadline=None)
@given(tokens=TOKENS)
def test_what_does_not_change_kv_does_not_hide_it(workers: Workers, name: str, tokens: list[int]) -> None:
    writer, reader = (workers.open_store(name, HARMLESS[name], differs=differs) for differs in (False, True))
    store_blocks(writer, keys := name_blocks(writer, tokens, {}))
    assert name_blocks(reader, tokens, {}) == keys
    assert count_found(reader, keys) == len(keys)
