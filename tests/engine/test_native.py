"""What of a model runs on the native kernels, and what does not. `test_equality` compares the tokens."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.config.settings import EngineSettings
from penstock.engine.kernels import build, library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import PackedEmbedding, PackedLinear
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.layer import MAX_TABLE_POSITIONS, NativeLayer, NativeModel, RotaryTable
from penstock.engine.model.model import LoadedModel
from penstock.engine.steps.masks import sees_interval
from penstock.engine.steps.step_batch import StepBatch
from tests.engine.helpers import needs_kernels, sequence

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_runs_on_kernels_alone(dtype: str) -> None:
    model = accelerate_model(load_model(EngineSettings(dtype=dtype)))  # type: ignore[arg-type, unused-ignore]
    kinds = {type(part) for part in model.module.modules()}
    assert {NativeLayer, NativeNorm, PackedLinear, PackedEmbedding} <= kinds
    assert not kinds & {torch.nn.Linear, torch.nn.Embedding}
    assert model.native is not None
    assert len(model.native.layers) == model.config.num_hidden_layers


def load_native(**given: Any) -> tuple[LoadedModel, NativeModel]:
    model = accelerate_model(load_model(EngineSettings(**given)))
    assert model.native is not None
    assert isinstance(model.native.body, NativeModel)
    return model, model.native.body


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_the_bits_of_embedding_layers_and_head(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, body = load_native(dtype=dtype)
    lengths = (1, 40, 17, 1)
    found: list[Tensor] = []
    for is_one_call in (True, False):
        if not is_one_call:
            monkeypatch.setattr(body, "_args", None)
        seqs = [sequence([5 + (37 * n + at) % 900 for n in range(length + 30)], 9) for at, length in enumerate(lengths)]
        runner = model.create_runner(EngineSettings(), 32)
        for at, seq in enumerate(seqs):
            seq.block_table = list(range(8 * at, 8 * at + 8))
        for plan in ([(seq, 30) for seq in seqs], list(zip(seqs, lengths, strict=True))):
            with torch.inference_mode():
                batch = StepBatch(plan, model.layout.block_size, model.device)
                logits = runner.run_step(batch).clone()
            for seq, num_tokens in plan:
                seq.num_computed_tokens += num_tokens
        assert batch.num_sampled_rows == len(seqs)
        found.append(logits)
    assert torch.equal(*found)


def test_positions_beyond_the_table_are_computed_in_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those with a table, for prompts and for single tokens."""
    model, body = load_native(dtype="bfloat16")
    found: list[list[Tensor]] = []
    for most in (MAX_TABLE_POSITIONS, 35):
        monkeypatch.setattr("penstock.engine.model.layer.MAX_TABLE_POSITIONS", most)
        seqs = [sequence([5 + (37 * n + at) % 900 for n in range(60)], 9) for at in range(2)]
        runner, logits = model.create_runner(EngineSettings(), 8), []
        for at, seq in enumerate(seqs):
            seq.block_table = list(range(4 * at, 4 * at + 4))
        for num_tokens in (30, 20, 1):
            batch = StepBatch([(seq, num_tokens) for seq in seqs], model.layout.block_size, model.device)
            with torch.inference_mode():
                logits.append(runner.run_step(batch).clone())
            for seq in seqs:
                seq.num_computed_tokens += num_tokens
        found.append(logits)
        monkeypatch.setattr(body, "_compute_stages", None)  # another way would take a call for each part
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["ids", "positions", "kept"])
@pytest.mark.parametrize("value", [-1, 2**40])
def test_a_row_that_there_is_not_is_refused_before_it_is_read(name: str, value: int) -> None:
    model, _ = load_native()
    seq = sequence([5, 6, 7], 1)
    seq.block_table = [0]
    batch = StepBatch([(seq, 3)], model.layout.block_size, model.device)
    assert batch.last_position == 2
    values, at = (batch.kept_values, 0) if name == "kept" else (batch.row_values, 3 * (name == "positions"))
    values[at] = value
    with pytest.raises(IndexError, match="no such"), torch.inference_mode():
        model.create_runner(EngineSettings(), 1).run_step(batch)


@pytest.mark.parametrize("rope", ["default", "yarn", "dynamic"])
def test_a_table_has_the_bits_of_the_rotary_embedding_itself(rope: str) -> None:
    scaled = {"factor": 4.0, "original_max_position_embeddings": 2048} if rope != "default" else {}
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **scaled}
    config = LlamaConfig(max_position_embeddings=32768, head_dim=64, rope_parameters=parameters)
    rotary: Any = LlamaRotaryEmbedding(config)
    table, x = RotaryTable(rotary), torch.empty(1, dtype=torch.bfloat16)
    for positions in ([[3]], [[0, 1023, 5]], [[1024, 2]], [[4000, 4001, 9]], [[MAX_TABLE_POSITIONS, 7]]):
        ids = torch.tensor(positions)
        for found, right in zip(table.find_rows(x, ids), rotary(x, ids), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("broken", ["norm", "scale"])
def test_a_layer_that_only_looks_like_the_common_one_stays_as_it_is(broken: str) -> None:
    model = load_model(EngineSettings(dtype="float32"))
    layer = model.module.model.layers[2]
    if broken == "norm":
        layer.input_layernorm.forward = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])
    else:
        layer.register_forward_hook(lambda module, args, output: output * 1.01)
    accelerate_model(model)
    kinds = [isinstance(part, NativeLayer) for part in model.module.model.layers]
    assert kinds == [True, True, False, True, True, True]


def test_a_layer_that_scales_by_position_is_not_taken_for_the_common_one() -> None:
    model = load_model(EngineSettings(dtype="float32"))
    attention = model.module.model.layers[1].self_attn

    def scaled(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        late = (kwargs["position_ids"] > 500)[..., None]  # in the first part of the context nothing is to be seen
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * torch.where(late, 1.1, 1.0)}

    attention.register_forward_pre_hook(scaled, with_kwargs=True)
    model = accelerate_model(model)
    kinds = [isinstance(part, NativeLayer) for part in model.module.model.layers]
    assert kinds == [True, False, True, True, True, True]
    assert model.native is not None
    assert model.native.body is None


def test_the_original_weights_are_gone() -> None:
    model = load_model(EngineSettings(dtype="float32"))
    originals = [weakref.ref(part) for part in model.module.modules() if isinstance(part, torch.nn.Linear)]
    accelerate_model(model)
    gc.collect()
    assert originals
    assert not [part for part in originals if part() is not None]


def test_a_library_for_another_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "libpenstock.so"
    foreign.write_bytes(b"\x7fELF of some other kind, " + build.interface_mark())
    monkeypatch.setattr(library, "LIBRARY", foreign)
    assert library.load_library.__wrapped__() is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (lambda query, key: key > query - 5, True),
        (lambda query, key: key // 8 == query // 8, True),
        (lambda query, key: (key > query - 3) | (key == 0), False),
        (lambda query, key: (query - key) % 2 == 0, False),
    ],
)
def test_only_masks_without_gaps_go_to_the_kernel(visible: Any, expected: bool) -> None:
    assert sees_interval(visible) is expected
