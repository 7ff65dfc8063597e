"""Quantised checkpoints are the plain models that they stand for, and what is not known of them is refused by name."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.library import load_library
from penstock.engine.kernels.packed import PackedEmbedding
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.compare import measure_error
from penstock.engine.model.experts import NativeExperts
from penstock.engine.model.layer import NativeLayer
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights import quantized
from penstock.errors import ModelLoadError
from tests.draws import draw_cases
from tests.engine.helpers import needs_kernels, run_sequences, save_model, sequence
from tests.engine.quantized_checkpoints import (
    Writer,
    Written,
    save_checkpoint,
    write_awq,
    write_blocks_of_4_bits,
    write_bytes,
    write_checkpoint,
    write_fp8,
    write_gptq,
    write_mxfp4,
    write_nvfp4,
    write_older,
    write_packed,
    write_powers,
    write_rows_of_8_bits,
)

MODULE = "model.layers.1.mlp.down_proj"  # 32 outputs, 64 inputs
PROMPT = [7, 300, 12, 45, 981, 5, 61, 400, 22, 8, 93, 17, 256, 31, 77, 140, 3, 19]


def _compressed(form: str, strategy: str, **given: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, **given}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _gptq(bits: int, size: int, form: str, *, sym: bool, **given: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": form, "sym": sym,
        "desc_act": False, "dynamic": {"-:.*lm_head.*": {}}, **given,
    }  # fmt: skip


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_INT4 = _compressed("pack-quantized", "group", num_bits=4, group_size=16)
_DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
_SEVERAL = {**_INT4, "config_groups": {
    "mlp": {**_INT4["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]},
    "queries": {"targets": ["re:.*\\.[qo]_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": _DYNAMIC, "format": "float-quantized"},
    "rest": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
}}  # fmt: skip


def _write_several(weight: Tensor) -> Written:
    """Write a weight as its group in `_SEVERAL` says."""
    if 64 in weight.shape:
        return write_packed(4, 16)(weight)
    is_square = weight.shape[0] == weight.shape[1]
    return (write_fp8(1, None, None, "weight_scale") if is_square else write_packed(8, None))(weight)


def _write_both(weight: Tensor) -> Written:
    """Write square weights in FP8, and all others in NVFP4."""
    is_square = weight.shape[0] == weight.shape[1]
    write = write_fp8(None, None, (), "weight_scale") if is_square else CASES["modelopt nvfp4"][1]
    return write(weight)


def _add_input_scale(write: Writer) -> Writer:
    def write_more(weight: Tensor) -> Written:
        stored, plain = write(weight)
        return {**stored, "input_scale": torch.ones(())}, plain

    return write_more


CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "packed 4 bits": (_INT4, write_packed(4, 16)),
    "packed 4 bits with zeros": (
        _compressed("pack-quantized", "group", num_bits=4, group_size=32, symmetric=False),
        write_packed(4, 32, symmetric=False),
    ),
    "packed 4 bits reordered": (
        _compressed("pack-quantized", "group", num_bits=4, group_size=16, actorder="group", symmetric=False),
        write_packed(4, 16, symmetric=False, shuffled=True),
    ),
    "packed as by older versions": (
        _compressed("pack-quantized", "group", group_size=16, actorder="group", symmetric=False), write_older
    ),
    "several groups": (_SEVERAL, _write_several),
    "packed 8 bits": (_compressed("pack-quantized", "channel"), write_packed(8, None)),
    "bytes": (_compressed("int-quantized", "channel"), write_bytes),
    "fp8 by row": (_compressed("float-quantized", "channel", type="float"), write_fp8(1, None, None, "weight_scale")),
    "fp8 by tensor": (
        _compressed("float-quantized", "tensor", type="float"), write_fp8(None, None, (1,), "weight_scale")
    ),
    "fp8 by block": (
        _compressed("float-quantized", "block", type="float", block_structure=[24, 24]),
        write_fp8(24, 24, None, "weight_scale"),
    ),
    "gptq": (_gptq(4, 16, "gptq", sym=False), write_gptq(4, 16, symmetric=False, stored_less=True)),
    "gptq with zeros of 0": (
        _gptq(4, 16, "gptq", sym=False),
        lambda weight: write_gptq(4, 16, symmetric=False, stored_less=True)(
            torch.where(torch.arange(len(weight))[:, None] % 3 == 0, weight.abs(), weight)
        ),
    ),
    "gptq symmetric": (_gptq(4, -1, "gptq", sym=True), write_gptq(4, -1, symmetric=True, stored_less=True)),
    "gptq symmetric, zeros as in v2": (
        _gptq(4, 16, "gptq", sym=True), write_gptq(4, 16, symmetric=True, stored_less=False)
    ),
    "gptq_v2 8 bits reordered": (
        _gptq(8, 32, "gptq_v2", sym=False, desc_act=True),
        write_gptq(8, 32, symmetric=False, stored_less=False, shuffled=True),
    ),
    "awq": (_AWQ, write_awq),
    "deepseek's fp8": ({**_FP8, "weight_block_size": [24, 24]}, write_fp8(24, 24, None, "weight_scale_inv")),
    "fp8 with one scale": (_FP8, write_fp8(None, None, (), "weight_scale_inv")),
    "fp8 with powers of two": (_FP8, write_powers),
    "fp8 with a scale for each row": (_FP8, write_fp8(1, None, (-1,), "weight_scale")),
    "fp8 with scales of activations": (
        {**_FP8, "activation_scheme": "static"}, _add_input_scale(write_fp8(None, None, (), "weight_scale_inv"))
    ),
    "nvfp4": (
        _compressed("nvfp4-pack-quantized", "tensor_group", num_bits=4, type="float", group_size=16),
        write_nvfp4("weight_packed", "weight_global_scale", is_divisor=True),
    ),
    "modelopt nvfp4": (_MODELOPT, write_nvfp4("weight", "weight_scale_2", is_divisor=False)),
    "modelopt fp8": (
        {**_MODELOPT, "quant_algo": "FP8"}, _add_input_scale(write_fp8(None, None, (), "weight_scale"))
    ),
    "modelopt, both": ({**_MODELOPT, "quant_algo": "MIXED_PRECISION"}, _write_both),
    "bitsandbytes 4 bits": (_BNB, write_blocks_of_4_bits(64, 3)),
    "bitsandbytes 4 bits, quantised once": (_BNB, write_blocks_of_4_bits(32, None)),
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, write_rows_of_8_bits),
}  # fmt: skip
"""By what is special: settings, and who writes one weight."""
WHOLE = [
    "packed 4 bits with zeros", "gptq_v2 8 bits reordered", "awq", "deepseek's fp8", "modelopt nvfp4",
    "bitsandbytes 4 bits",
]  # fmt: skip
"""The cases whose tokens are compared, too."""


def _settings(directory: Path) -> EngineSettings:
    return EngineSettings(model=str(directory), pool_mb=1, dtype="float32")


def _check_tokens(model: LoadedModel, plain: dict[str, Tensor]) -> None:
    """The engine's greedy tokens are those of a transformers model with the plain weights."""
    mine = run_sequences(Engine(model, _settings(Path())), [sequence(PROMPT, 8)])
    config: Any = transformers.AutoConfig.for_model(**model.module.config.to_dict())
    reference: Any = type(model.module)(config).eval()
    reference.load_state_dict(plain)
    with torch.inference_mode():
        output = reference.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    assert mine == [output[0, len(PROMPT) :].tolist()]


def _check_native_experts(model: LoadedModel, plain: dict[str, Tensor]) -> None:
    """With native experts, which are packed from the unpacked ones, the tokens are the same."""
    if load_library() is not None:
        model = accelerate_model(model)
        assert any(isinstance(part, NativeExperts) for part in model.module.modules())
        _check_tokens(model, plain)


@pytest.mark.proof
@pytest.mark.parametrize("case", draw_cases(CASES, 8))
def test_a_checkpoint_is_the_model_it_stands_for(
    case: str, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.weights.stored._CHUNK", 1)  # eight rows at a time
    settings, write = CASES[case]
    plain = write_checkpoint(tiny_dir, tmp_path / "model", settings, write)
    with caplog.at_level(logging.INFO, "penstock.engine.weights.quantized"):
        model = load_model(_settings(tmp_path / "model"))
    method = settings["quant_method"]
    assert caplog.messages[-1] == f"14 of 21 tensors are quantised ({method}) and unpacked to float32"
    loaded = model.module.state_dict()
    for name, tensor in plain.items():
        assert torch.equal(loaded[name], tensor), name
    if case in WHOLE:
        _check_tokens(model, plain)


def _write_gpt_oss(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write a small gpt-oss with experts in MXFP4, and return what is stored and the plain weights."""
    config = transformers.GptOssConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    stored = load_file(save_model(directory, config) / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and "experts" in name]:
        blocks, scales, plain[name] = write_mxfp4(stored.pop(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_checkpoint(directory, _MXFP4, stored)
    return stored, plain


@pytest.mark.proof
def test_experts_in_mxfp4_are_those_of_the_plain_model(tmp_path: Path) -> None:
    _, plain = _write_gpt_oss(tmp_path)
    model = load_model(_settings(tmp_path))
    loaded = model.module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.items())
    _check_tokens(model, plain)
    _check_native_experts(model, plain)


def test_experts_in_fp8_are_merged_as_plain_ones_are(tmp_path: Path) -> None:
    make: Any = transformers.Qwen3MoeConfig
    config = make(
        vocab_size=1024, hidden_size=32, intermediate_size=64, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256,
    )  # fmt: skip
    source = save_model(tmp_path / "source", config)
    write = write_fp8(16, 16, None, "weight_scale_inv")
    plain = write_checkpoint(source, tmp_path / "fp8", {**_FP8, "weight_block_size": [16, 16]}, write)
    save_file(plain, source / "model.safetensors")
    model, expected = load_model(_settings(tmp_path / "fp8")), load_model(_settings(source))
    loaded = model.module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.module.state_dict().items())
    _check_tokens(model, loaded)
    _check_native_experts(model, loaded)


def test_rounded_once_to_the_dtype_of_the_engine(tiny_dir: Path, tmp_path: Path) -> None:
    plain = write_checkpoint(tiny_dir, tmp_path / "model", *CASES["awq"])
    model = load_model(_settings(tmp_path / "model").model_copy(update={"dtype": "bfloat16"}))
    assert torch.equal(model.module.get_parameter(f"{MODULE}.weight"), plain[f"{MODULE}.weight"].bfloat16())


def test_progress_moves_with_the_stored_bytes(tiny_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tiny_dir, tmp_path / "model", *CASES["awq"])
    seen: list[float] = []
    load_model(_settings(tmp_path / "model"), lambda what, done: seen.append(done) if "loading" in what else None)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_settings_and_arithmetic_are_part_of_the_fingerprint(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same stored tensors stand for other weights when the settings say so."""
    settings, write = CASES["gptq"]
    prints = set()
    for form in ("gptq", "gptq_v2"):
        write_checkpoint(tiny_dir, tmp_path / form, {**settings, "checkpoint_format": form}, write)
        prints.add(load_model(_settings(tmp_path / form)).fingerprint)
    monkeypatch.setattr("penstock.engine.loading.description.UNPACKING_VERSION", quantized.UNPACKING_VERSION + 1)
    prints.add(load_model(_settings(tmp_path / "gptq")).fingerprint)
    assert len(prints) == 3


# Their numbers in 4 bits


def _write_in_groups(method: str, size: int, source: Path, directory: Path) -> dict[str, Tensor]:
    """Write a checkpoint with 4 bits in groups of so many inputs, and return the plain weights."""
    forms: dict[str, tuple[dict[str, Any], Writer]] = {
        "gptq": (_gptq(4, size, "gptq", sym=True), write_gptq(4, size, symmetric=True, stored_less=True)),
        "compressed-tensors": (
            _compressed("pack-quantized", "group", num_bits=4, group_size=size), write_packed(4, size)
        ),
        "awq": ({**_AWQ, "group_size": size}, partial(write_awq, size=size)),
    }  # fmt: skip
    return write_checkpoint(source, directory, *forms[method])


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with groups of several sizes, and matrices that are large enough for 4 bits."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return save_model(tmp_path_factory.mktemp("wide"), config)


@needs_kernels
@pytest.mark.parametrize(
    ("method", "size", "used"),
    [("gptq", 32, 32), ("gptq", 64, 64), ("gptq", 128, 128), ("compressed-tensors", 32, 32), ("gptq", 192, 64),
     ("compressed-tensors", 64, 64), ("gptq", -1, 128), ("awq", 32, 32), ("awq", 64, 64), ("awq", 128, 128)],
)  # fmt: skip
def test_in_4_bits_the_groups_of_a_checkpoint_stay(
    method: str, size: int, used: int, wide_dir: Path, tmp_path: Path
) -> None:
    """So do its numbers, where they have no zero points: AWQ's are rounded anew, in its groups."""
    plain = _write_in_groups(method, size, wide_dir, tmp_path / "model")
    model = accelerate_model(load_model(_settings(tmp_path / "model")), "int4")
    layer, native = model.module.model.layers[0], load_library()
    assert isinstance(layer, NativeLayer)
    assert native is not None
    for group, name in ((layer.groups[1], "self_attn.o_proj"), (layer.groups[3], "mlp.down_proj")):
        assert group.group_size == used
        found, right = PackedEmbedding(native, group)(torch.arange(128)), plain[f"model.layers.0.{name}.weight"]
        if method == "awq":
            assert measure_error(found, right) < 0.12
        else:
            assert torch.allclose(found, right, rtol=1e-6, atol=1e-9)
    assert run_sequences(Engine(model, _settings(Path())), [sequence(PROMPT, 8)])


@needs_kernels
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "awq"])
def test_in_4_bits_groups_that_the_kernels_have_not_are_refused(method: str, wide_dir: Path, tmp_path: Path) -> None:
    _write_in_groups(method, 48, wide_dir, tmp_path / "model")
    model = load_model(_settings(tmp_path / "model"))
    with pytest.raises(ModelLoadError, match="groups of 48 inputs, and PENSTOCK_ENGINE_WEIGHTS=int4 has multiples of"):
        accelerate_model(model, "int4")
    assert accelerate_model(model, "int8").weight_form == "int8"


# What is not known is refused


def _refused(directory: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(_settings(directory))
    assert str(caught.value).startswith(f"cannot load model '{directory}': ")


def _group(**given: Any) -> dict[str, Any]:
    return {**_INT4, "config_groups": {"group_0": {**_INT4["config_groups"]["group_0"], **given}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_in_8bit": True}, "quantised by an unnamed format"),
        ({"quant_method": "aqlm"}, "or by one of compressed-tensors, gptq, awq, fp8, mxfp4, modelopt, bitsandbytes"),
        ({**_MODELOPT, "quant_algo": "NVFP4_AWQ"}, "quant_algo \\('NVFP4_AWQ'\\)"),
        ({**_INT4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format \\('sparse-24-bitmask'\\)"),
        ({**_INT4, "format": "mxfp4-pack-quantized"}, "format \\('mxfp4-pack-quantized'\\)"),
        (_compressed("pack-quantized", "group", num_bits=3, group_size=16), "num_bits \\(3\\).* num_bits 4 or 8"),
        (_compressed("pack-quantized", "group", num_bits=4, group_size=0), "group_size 0, not a positive number"),
        (_group(weights=None), "has no weights in its group group_0"),
        (_compressed("int-quantized", "channel"), "model.layers.*_proj is in 0 groups of quantization_config"),
        ({**_INT4, "config_groups": {}}, "has no config_groups"),
        (_gptq(2, 16, "gptq", sym=False), "bits \\(2\\)"),
        (_gptq(4, 16, "marlin", sym=False), "checkpoint_format \\('marlin'\\)"),
        (_gptq(4, 16, "gptq", sym=False, dynamic={".*down.*": {"bits": 8}}), "dynamic '.*down.*'"),
        ({**_AWQ, "version": "gemv"}, "version \\('gemv'\\).* use a checkpoint with version gemm"),
        ({**_AWQ, "zero_point": False}, "zero_point \\(False\\)"),
        ({**_FP8, "weight_block_size": [128]}, "weight_block_size \\[128\\], not two positive numbers"),
    ],
)  # fmt: skip
def test_an_unknown_format_or_option(
    settings: dict[str, Any], message: str, tiny_dir: Path, tmp_path: Path, packed_dir: Path
) -> None:
    shutil.copytree(packed_dir, tmp_path / "model")
    save_checkpoint(tmp_path / "model", settings, load_file(packed_dir / "model.safetensors"))
    seen: list[str] = []
    with pytest.raises(ModelLoadError, match=message):
        load_model(_settings(tmp_path / "model"), lambda what, done: seen.append(what))
    assert seen == []  # nothing was read


@pytest.fixture(scope="module")
def packed_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "model"
    write_checkpoint(tiny_dir, directory, *CASES["packed 4 bits"])
    return directory


@pytest.mark.parametrize("name", ["self_attn.k_proj.input_scale", "self_attn.attn.k_scale"])
def test_scales_of_activations_and_of_a_cache_are_left_out(
    name: str, packed_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(packed_dir, tmp_path / "model")
    stored = load_file(packed_dir / "model.safetensors")
    save_checkpoint(tmp_path / "model", _INT4, {**stored, f"model.layers.0.{name}": torch.full((1,), 3.0)})
    with caplog.at_level(logging.INFO, "penstock.engine.weights.quantized"):
        loaded, plain = (load_model(_settings(path)) for path in (tmp_path / "model", packed_dir))
    assert "1 scales of activations and of a KV cache are left out" in caplog.text
    weights = plain.module.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in loaded.module.state_dict().items())


# Damaged checkpoints


EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
Damage = Callable[[dict[str, Tensor]], object]


def _drop(ending: str, name: str = f"{MODULE}.") -> Damage:
    return lambda stored: stored.pop(name + ending)


def _change(ending: str, change: Callable[[Tensor], Tensor], name: str = f"{MODULE}.") -> Damage:
    return lambda stored: stored.update({name + ending: change(stored[name + ending].clone())})


def _add(ending: str, tensor: Tensor) -> Damage:
    return lambda stored: stored.update({f"{MODULE}.{ending}": tensor})


def _set_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        ("packed 4 bits", _drop("weight_scale"), "weight_scale is missing"),
        ("packed 4 bits", _drop("weight_shape"), "weight_shape is missing"),
        ("packed 4 bits", _drop("weight_packed"), "weight_(scale|shape) is in the weights without"),
        ("packed 4 bits", _change("weight_packed", lambda part: part[:, 1:]), r"weight_packed is \[32, 7\] .*, 8\]"),
        ("packed 4 bits", _change("weight_packed", lambda part: part.long()), "weight_packed is of type I64"),
        ("packed 4 bits", _change("weight_scale", lambda part: part[:, :3]), r"weight_scale is \[32, 3\] .*\[32, 4\]"),
        ("packed 4 bits", _change("weight_scale", _set_first(float("nan"))), "weight cannot be unpacked: .*not finite"),
        ("packed 4 bits", _change("weight_shape", _set_first(-32)), "weight_shape is damaged"),
        ("packed 4 bits with zeros", _drop("weight_zero_point"), "weight_zero_point is missing"),
        ("packed 4 bits reordered", _drop("weight_g_idx"), "weight_g_idx is missing"),
        ("packed 4 bits reordered", _change("weight_g_idx", _set_first(4)), "weight cannot be unpacked: its g_idx"),
        ("bytes", _drop("weight_scale"), "weight_scale is missing"),
        ("fp8 by row", _change("weight", lambda part: part.view(torch.int8)), "weight is of type I8"),
        ("gptq", _drop("qzeros"), "qzeros is missing"),
        ("gptq", _drop("qweight"), "(scales|qzeros|g_idx) is in the weights without"),
        ("gptq", _change("g_idx", _set_first(-1)), "weight cannot be unpacked: its g_idx"),
        ("gptq", _change("scales", _set_first(float("inf"))), "weight cannot be unpacked: .*not finite"),
        ("gptq symmetric", _change("qzeros", _set_first(0)), "qzeros is not symmetric"),
        ("gptq_v2 8 bits reordered", _drop("g_idx"), "g_idx is missing"),
        ("awq", _change("qzeros", lambda part: part[:3]), r"qzeros is \[3, 4\] .*\[4, 4\]"),
        ("awq", _drop("scales"), "scales is missing"),
        ("awq", _add("weight", torch.zeros(32, 64)), "weight is in the weights twice, plain and quantised"),
        ("awq", _change("qweight", torch.flatten), "qweight is .* no matrix"),
        ("bytes", _change("weight", torch.flatten), "weight is .* no matrix"),
        ("deepseek's fp8", _change("weight", torch.flatten), "weight is .* no matrix"),
        ("deepseek's fp8", _change("weight", lambda part: part[:0]), "weight_scale_inv is|weight has no values"),
        ("deepseek's fp8", _drop("weight_scale_inv"), "weight_scale_inv is missing"),
        ("deepseek's fp8", _change("weight_scale_inv", lambda part: part[:1]), r"weight_scale_inv is \[1, 3\]"),
        ("deepseek's fp8", _drop("weight"), "weight_scale_inv is in the weights without"),
        ("nvfp4", _drop("weight_scale"), "weight_scale is missing"),
        ("nvfp4", _change("weight_packed", lambda part: part[:, :7]), r"weight_packed is \[32, 7\]"),
        ("modelopt nvfp4", _change("weight_scale", lambda part: part[:, :3]), r"weight_scale is \[32, 3\] .*\[32, 4\]"),
        ("modelopt nvfp4", _drop("weight_scale_2"), "weight_scale_2 is missing"),
        ("bitsandbytes 4 bits", _drop("weight.absmax"), "weight.absmax is missing"),
        ("bitsandbytes 4 bits", _drop("weight.nested_quant_map"), "weight.nested_quant_map is missing"),
        ("bitsandbytes 4 bits", _drop(_NF4_STATE), "weight.nested_absmax is in the weights without"),
        ("bitsandbytes 4 bits", _change(_NF4_STATE, _set_first(0)), "weight.quant_state.* is damaged"),
        ("bitsandbytes 4 bits", _change("weight", lambda part: part[1:]), r"weight is \[1023, 1\] .*\[1024, 1\]"),
        ("bitsandbytes 8 bits", _drop("SCB"), "weight is of type I8"),
        ("bitsandbytes 8 bits", _drop("weight"), "weight is missing"),
        ("fp8 with one scale", _change("weight", _set_first(float("nan"))), "weight cannot be unpacked: .*not finite"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint(case: str, damage: Damage, message: str, tiny_dir: Path, tmp_path: Path) -> None:
    settings, write = CASES[case]
    write_checkpoint(tiny_dir, tmp_path / "model", settings, write)
    _check_damage(tmp_path / "model", settings, damage, f"{MODULE}.{message}")


def _check_damage(directory: Path, settings: dict[str, Any] | None, damage: Damage, message: str) -> None:
    stored = load_file(directory / "model.safetensors")
    damage(stored)
    save_checkpoint(directory, settings, stored)
    _refused(directory, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change("_blocks", lambda part: part[..., :8], EXPERTS), "_blocks is .*, not .experts, outputs, groups, 16."),
        (_drop("_blocks", EXPERTS), "_scales is in the weights without"),
        (_drop("_scales", EXPERTS), "_scales is missing"),
        (_change("_scales", lambda part: part[:3], EXPERTS), r"_scales is \[3, 128, 1\] .*, and \[4, 128, 1\]"),
        (_change("_scales", lambda part: torch.full_like(part, 255), EXPERTS), " cannot be unpacked: .* not finite"),
    ],
)
def test_damaged_experts(damage: Damage, message: str, tmp_path: Path) -> None:
    _write_gpt_oss(tmp_path)
    _check_damage(tmp_path, _MXFP4, damage, EXPERTS + message)


@pytest.mark.parametrize(
    ("settings", "extra", "message"),
    [
        (None, {}, r"its weights are quantised \(model.layers.0.*weight_packed\), but config.json has no"),
        (_INT4, {f"{MODULE}.pre_quant_scale": torch.ones(64)}, rf"inputs that are scaled \({MODULE}.pre_quant_scale\)"),
    ],
)
def test_what_the_settings_do_not_explain(
    settings: dict[str, Any] | None, extra: dict[str, Tensor], message: str, packed_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(packed_dir, tmp_path / "model")
    _check_damage(tmp_path / "model", settings, lambda stored: stored.update(extra), message)


@pytest.mark.parametrize("settings", [_INT4, _AWQ, None])
def test_a_type_that_nothing_explains(settings: dict[str, Any] | None, tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    extra = {"model.embed_tokens.extra": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    _check_damage(tmp_path / "model", settings, lambda stored: stored.update(extra), "model.embed_tokens.extra")
