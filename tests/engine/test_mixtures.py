"""Mixtures of experts on the native kernels: what of them is native, and that tokens depend on their own row alone."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.packed import PackedWeight, WeightForm
from penstock.engine.loading.probe import probe_layout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.experts import NativeExperts, find_mixtures, is_experts
from penstock.engine.model.layer import NativeLayer
from penstock.engine.model.model import LoadedModel
from penstock.engine.steps.step_batch import StepBatch
from tests.engine.helpers import make_tiny, needs_kernels, run_sequences, sequence
from tools.compatibility import make_loaded_model

CPU = torch.device("cpu")
SETTINGS = EngineSettings(pool_mb=8, block_size=16, max_step_tokens=64)
LENGTHS = (21, 1, 34, 9, 40, 17, 5, 28, 33, 12, 50, 3)
ARCHITECTURES = (
    "qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe",
    "phimoe", "minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe",
)  # fmt: skip

pytestmark = needs_kernels


def make_model(architecture: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> LoadedModel:
    """Return a tiny random model as transformers runs it."""
    module = make_tiny(architecture, **sizes).to(dtype)
    layout = probe_layout(module, SETTINGS.block_size, dtype, CPU)
    return replace(make_loaded_model(architecture, module), dtype=dtype, layout=layout)


def make_prompts(model: LoadedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def answer(model: LoadedModel, prompts: list[list[int]], **settings: int) -> list[list[int]]:
    engine = Engine(model, SETTINGS.model_copy(update=settings), quarantine=False)
    return run_sequences(engine, [sequence(prompt, 16, name=f"s{i}") for i, prompt in enumerate(prompts)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_tokens_do_not_depend_on_batch_chunks_or_threads(architecture: str) -> None:
    model = accelerate_model(make_model(architecture))
    parts = list(model.module.modules())
    num_experts = sum(isinstance(part, NativeExperts) for part in parts)
    assert num_experts > 0
    assert not any(map(is_experts, parts))
    assert not any(isinstance(part, nn.Linear) and not isinstance(part.weight, PackedWeight) for part in parts)
    prompts = make_prompts(model)
    alone = [answer(model, [prompt])[0] for prompt in prompts]
    assert answer(model, prompts) == alone
    assert answer(model, prompts, max_step_tokens=13, threads=2) == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_a_row_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    model = accelerate_model(make_model("qwen3_moe", dtype, num_experts=60, num_experts_per_tok=4))
    assert model.native is not None
    assert model.native.body is not None
    assert all(isinstance(layer, NativeLayer) for layer in model.module.model.layers)
    prompts = make_prompts(model)

    def compute(chosen: list[int]) -> dict[str, Tensor]:
        seqs = [sequence(prompts[i], 1, name=str(i)) for i in chosen]
        for place, seq in enumerate(seqs):
            seq.block_table = list(range(4 * place, 4 * place + 4))
        runner = model.create_runner(SETTINGS, 4 * len(seqs))
        with torch.inference_mode():
            batch = StepBatch([(seq, seq.num_pending_tokens) for seq in seqs], model.layout.block_size, CPU)
            return dict(zip((seq.id for seq in batch.sampled_sequences), runner.run_step(batch), strict=True))

    alone: dict[str, Tensor] = {}
    for i in range(len(prompts)):
        alone |= compute([i])
    for chosen in (list(range(12)), list(range(12))[::-1], [7, 2, 3]):
        assert not [name for name, logits in compute(chosen).items() if not torch.equal(logits, alone[name])]


def test_a_model_that_leaves_activations_to_torch_is_no_native_body() -> None:
    model = accelerate_model(make_model("qwen2_moe"))  # its shared expert has a sigmoid
    assert all(isinstance(layer, NativeLayer) for layer in model.module.model.layers)
    assert model.native is not None
    assert model.native.body is None


@pytest.mark.proof
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_float32_logits_are_those_of_transformers(architecture: str) -> None:
    model = make_model(architecture, torch.float32)
    prompt = make_prompts(model)[2]
    model.module.set_attn_implementation(model.stock_attention)
    with torch.inference_mode():
        right = model.module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    model.module.set_attn_implementation("penstock")
    model = accelerate_model(model)
    assert any(isinstance(part, NativeExperts) for part in model.module.modules())
    seq = sequence(prompt, 1)
    seq.block_table = list(range(4))
    with torch.inference_mode():
        batch = StepBatch([(seq, len(prompt))], model.layout.block_size, CPU)
        mine = model.create_runner(SETTINGS, 4).run_step(batch)[0]
    assert (mine - right).abs().max() <= 2e-5 * right.abs().max()


def test_the_fingerprint_says_who_computes_experts_in_bfloat16() -> None:
    model, changed = make_model("qwen3_moe"), make_model("qwen3_moe")
    for layer in changed.module.model.layers:
        layer.mlp.experts.act_fn = nn.ReLU()  # so that torch computes them
    assert accelerate_model(model).fingerprint != accelerate_model(changed).fingerprint


@pytest.mark.parametrize("broken", ["gate", "result"])
def test_experts_that_only_look_like_the_common_ones_stay_as_they_are(broken: str) -> None:
    model = make_model("qwen3_moe", torch.float32)
    experts = model.module.model.layers[1].mlp.experts
    if broken == "gate":
        experts.act_fn = nn.ReLU()
    else:
        experts.register_forward_hook(lambda module, args, output: output * 1.01)
    accelerate_model(model)
    kinds = [isinstance(layer.mlp.experts, NativeExperts) for layer in model.module.model.layers]
    assert kinds == [True, False, True]


def test_a_router_that_uses_its_weight_in_another_way_stays_as_it_is() -> None:
    model = make_model("mixtral", torch.float32)
    router = model.module.model.layers[0].mlp.gate
    forward = type(router).forward
    router.forward = lambda x: forward(router, x * router.weight.norm())
    model = accelerate_model(model)
    kinds = [isinstance(layer.mlp.gate.weight, PackedWeight) for layer in model.module.model.layers]
    assert kinds == [False, True, True]
    assert model.native is not None
    assert model.native.body is None


@pytest.mark.parametrize(
    ("weights", "form"), [("int8", WeightForm.INT8), ("int4", WeightForm.INT4), ("p12", WeightForm.COMPRESSED)]
)
def test_experts_have_the_form_of_the_setting(weights: str, form: WeightForm) -> None:
    model = accelerate_model(make_model("qwen3_moe", hidden_size=256, moe_intermediate_size=256), weights)
    experts = [part for part in model.module.modules() if isinstance(part, NativeExperts)]
    assert experts
    assert {group.form for part in experts for group in part.groups} == {form}
    prompts = make_prompts(model)[:6]
    alone = [answer(model, [prompt])[0] for prompt in prompts]
    assert answer(model, prompts, max_step_tokens=13) == alone


def test_the_original_experts_are_gone() -> None:
    model = make_model("qwen3_moe")
    names = [name for name, _ in find_mixtures(model.module)]
    originals = [weakref.ref(model.module.get_parameter(f"{name}.gate_up_proj")) for name in names]
    accelerate_model(model)
    gc.collect()
    assert originals
    assert not [one for one in originals if one() is not None]
