"""Whatever changes KV in vLLM changes the names of its blocks: one difference, and nothing is found."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kv_names import (
    TOKENS,
    Difference,
    Workers,
    check_difference,
    edit_config,
    flip_weight,
    open_workers,
)
from tests.engine_contract.test_vllm import make_model, needs_vllm

VLLM = {"kind": "vllm", "block_size": 32, "pool_mb": 64, "threads": 1, "device": "cpu"}
KINDS = ("sliding_attention", "full_attention")
ROPE = {"rope_type": "default", "rope_theta": 2e4}
CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
DIFFERENCES = {
    "engine": Difference(VLLM, {"kind": "own"}),
    "weights": Difference(VLLM, edit=flip_weight),
    "window": Difference(VLLM, edit=edit_config(sliding_window=32)),
    "rope": Difference(VLLM, edit=edit_config(rope_parameters=dict.fromkeys(KINDS, ROPE))),
    "dtype": Difference(VLLM, {"dtype": "bfloat16"}),
    "block size": Difference(VLLM, {"block_size": 64}),
    "version": Difference(VLLM, patch=("vllm.__version__", "another")),
    "device": Difference(VLLM, patch=(f"{CPU_PLATFORM}.get_device_name", classmethod(lambda *_: "another"))),
    "arguments": Difference(VLLM, {"vllm_args": "--attention-backend CPU_ATTN"}),
    "tenant": Difference(VLLM, asked={"tenant": "another"}),
}
"""One of each kind, where the versions of an adapter will be another line of what is asked."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    parent = tmp_path_factory.mktemp("workers")
    model = make_model(parent / "model", "gemma3_text", sliding_window=64, layer_types=[*KINDS, *KINDS])
    with open_workers(parent, model) as opened:
        yield opened


@needs_vllm
@pytest.mark.parametrize("name", DIFFERENCES)
@settings(max_examples=10, deadline=None)
@given(tokens=TOKENS, writes=st.booleans())
def test_one_difference_and_nothing_is_found(workers: Workers, name: str, tokens: list[int], writes: bool) -> None:
    check_difference(workers, name, DIFFERENCES[name], tokens, writes)
