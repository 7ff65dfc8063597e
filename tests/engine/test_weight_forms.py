"""The forms of weights in a whole engine: whose tokens they give, fingerprints, what is chosen, and what is refused.

`test_equality.py` holds that the tokens do not depend on batch, chunks, threads, hand-overs and preemptions.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.library import Library, load_library
from penstock.engine.kernels.packed import PackedLinears, WeightForm
from penstock.engine.loading.loading import load_model, load_stage_models
from penstock.engine.loading.proof import prove_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.steps.native_step import NativeParts
from penstock.engine.weights import forms
from penstock.engine.weights.forms import WeightPacker, read_cache_bytes
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import EngineCheckFailed, ModelLoadError
from penstock.messages import Sampling
from tests.draws import mark_some
from tests.engine.helpers import needs_kernels, run_sequences, sequence

pytestmark = needs_kernels

PROMPTS = [[5 + (17 * place + number) % 900 for place in range(7 + 23 * number)] for number in range(5)]


def make_settings(weights: str, dtype: str = "bfloat16") -> EngineSettings:
    return EngineSettings.model_validate({"weights": weights, "dtype": dtype, "device": "cpu"})


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {
        weights: accelerate_model(load_model(make_settings(weights)), weights)
        for weights in ("bf16", "p12", "int8", "int4")
    }


def answer(model: LoadedModel) -> list[list[int]]:
    """The answers to the prompts, greedy and sampled in turn."""
    seqs = [
        sequence(prompt, name=str(number), seed=number, sampling=Sampling(temperature=number % 2, ignore_eos=True))
        for number, prompt in enumerate(PROMPTS)
    ]
    return run_sequences(Engine(model, make_settings("auto")), seqs)


@pytest.mark.proof
def test_without_loss_tokens_and_fingerprint_are_those_of_stored_weights(models: dict[str, LoadedModel]) -> None:
    assert answer(models["p12"]) == answer(models["bf16"])
    assert models["p12"].fingerprint == models["bf16"].fingerprint


@pytest.mark.proof
def test_other_forms_are_other_models(models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({models[weights].fingerprint for weights in ("bf16", "int8", "int4")}) == 3
    in_float32 = replace(models["int8"], dtype=torch.float32)
    before = replace(in_float32).fingerprint
    monkeypatch.setattr(NativeParts, "name", "another instruction set")  # it may round an input to another integer
    assert replace(in_float32).fingerprint != before


@pytest.mark.proof
def test_prompts_and_answers_may_have_weights_in_two_forms(models: dict[str, LoadedModel]) -> None:
    """Prompts are computed as they are stored, and answers in 4 bits. Each stage loads what it needs."""
    settings = make_settings("int4").model_copy(update={"prefill_weights": "bf16"})
    model = load_stage_models(settings)
    split, stored, rounded = map(answer, (model, models["bf16"], models["int4"]))
    assert [tokens[0] for tokens in split] == [tokens[0] for tokens in stored]
    assert split not in (stored, rounded)
    prompts = load_stage_models(settings, only_prompts=True)
    assert (prompts.weight_form, prompts.prompt_model) == ("", None)
    assert prompts.fingerprint == model.fingerprint
    other_way = settings.model_copy(update={"weights": "bf16", "prefill_weights": "int4"})
    assert load_stage_models(other_way, only_prompts=True).fingerprint != model.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", mark_some(["int8", "int4"], pytest.mark.proof))
def test_the_proof_at_load_takes_rounded_weights(weights: str, dtype: str) -> None:
    settings = make_settings(weights, dtype)
    assert prove_model(load_model(settings), settings).weight_form == weights


def test_the_proof_at_load_finds_wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def scramble(self: PackedLinears, *given: object) -> None:
        pack(self, *given)  # type: ignore[arg-type]
        self.tensors["memory"].copy_(self.tensors["memory"].roll(64))

    pack = PackedLinears._pack_weight
    monkeypatch.setattr(PackedLinears, "_pack_weight", scramble)
    settings = make_settings("int8")
    with pytest.raises(EngineCheckFailed):
        prove_model(load_model(settings), settings)


def test_twelve_bits_of_float32_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="set PENSTOCK_ENGINE_DTYPE=bfloat16"):
        accelerate_model(load_model(make_settings("p12", "float32")), "p12")


def test_without_kernels_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.model.accelerate.load_library", lambda: None)
    with pytest.raises(ModelLoadError, match="needs the native kernels"):
        accelerate_model(load_model(make_settings("int8")), "int8")


def make_packer(native: Library, num_bytes: int) -> WeightPacker:
    """What packs a model whose weights take so many bytes."""
    stored = MappedWeights([])
    stored.num_bytes = num_bytes
    return WeightPacker(native, "auto", torch.bfloat16, 1000, stored)


@pytest.mark.parametrize(("is_faster", "form"), [(True, WeightForm.COMPRESSED), (False, WeightForm.STORED)])
def test_large_models_have_the_faster_form(monkeypatch: pytest.MonkeyPatch, is_faster: bool, form: WeightForm) -> None:
    native, probes = load_library(), []
    assert native is not None

    def probe(self: WeightPacker, one: PackedLinears, other: PackedLinears) -> bool:
        probes.append((one.form, other.form))
        return is_faster

    monkeypatch.setattr(forms.WeightPacker, "_is_faster", probe)
    packer = make_packer(native, 10 * read_cache_bytes())
    linears = [nn.Linear(64, 96, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(3)]
    packed = [packer.pack_linears([linear], lambda weight: None) for linear in linears]
    assert [one.form for one in packed] == [form] * 3
    assert probes == [(WeightForm.COMPRESSED, WeightForm.STORED)]
    small = make_packer(native, 1000)
    assert small.pack_linears(linears[:1], lambda weight: None).form == WeightForm.STORED


def test_the_probe_reads_both_forms_from_memory() -> None:
    native = load_library()
    assert native is not None
    packer = make_packer(native, 10 * read_cache_bytes())
    linear = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    form = packer.pack_linears([linear], lambda weight: None).form
    assert form in (WeightForm.COMPRESSED, WeightForm.STORED)
