"""The forms of weights in a whole engine: tokens, fingerprints, what is chosen, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.kernels import forms
from penstock.engine.kernels.backend import NativeBackend
from penstock.engine.kernels.forms import WeightPacker, read_cache_bytes
from penstock.engine.kernels.library import load_library
from penstock.engine.kernels.packed import PackedLinears, WeightForm
from penstock.engine.loading import load_model, load_stage_models
from penstock.engine.model import LoadedModel
from penstock.engine.proof import prove_model
from penstock.engine.sequence import Sequence
from penstock.errors import EngineCheckFailed, ModelLoadError
from penstock.messages import Sampling
from penstock.names import PriorityClass

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler, so no kernels")

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + (17 * place + number) % 900 for place in range(7 + 23 * number)] for number in range(5)]


def make_settings(weights: str, dtype: str = "bfloat16") -> EngineSettings:
    return EngineSettings.model_validate({"weights": weights, "dtype": dtype, "device": "cpu"})


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {
        weights: accelerate_model(load_model(make_settings(weights)), weights)
        for weights in ("bf16", "p12", "int8", "int4")
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    native = load_library()
    assert native is not None
    native.set_threads(1)


def answer(model: LoadedModel, prompts: list[list[int]], **given: int) -> list[list[int]]:
    engine = Engine(model, make_settings("auto").model_copy(update=given))
    seqs = []
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=float(number % 2), ignore_eos=True)
        seqs.append(Sequence(str(number), prompt, sampling=sampling, seed=number, max_new_tokens=12))
        engine.add_sequence(seqs[-1])
    while engine.has_work():
        for sampled in engine.step():
            if sampled.seq.num_output_tokens == 12:
                engine.remove_sequence(sampled.seq)
    return [list(seq.output_token_ids) for seq in seqs]


def test_without_loss_tokens_and_fingerprint_are_those_of_stored_weights(models: dict[str, LoadedModel]) -> None:
    assert answer(models["p12"], PROMPTS) == answer(models["bf16"], PROMPTS)
    assert models["p12"].fingerprint == models["bf16"].fingerprint


def test_other_forms_are_other_models(models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({models[weights].fingerprint for weights in ("bf16", "int8", "int4")}) == 3
    in_float32 = replace(models["int8"], dtype=torch.float32)
    before = replace(in_float32).fingerprint
    monkeypatch.setattr(NativeBackend, "name", "another instruction set")  # it may round an input to another integer
    assert replace(in_float32).fingerprint != before


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_tokens_depend_neither_on_batch_nor_chunks_nor_threads(models: dict[str, LoadedModel], weights: str) -> None:
    model = models[weights]
    together = answer(model, PROMPTS)
    alone = [
        answer(model, [prompt] if not number % 2 else [PROMPTS[0], prompt])[-1] for number, prompt in enumerate(PROMPTS)
    ]
    assert [together[number] for number in (0, 2, 4)] == [alone[number] for number in (0, 2, 4)]
    assert answer(model, PROMPTS, max_step_tokens=32) == together
    assert answer(model, PROMPTS, threads=2) == together


@pytest.fixture(scope="module")
def split_model() -> LoadedModel:
    """The model whose prompts are computed with weights as they are stored, and whose answers with those in 4 bits."""
    return load_stage_models(make_settings("int4").model_copy(update={"prefill_weights": "bf16"}))


def test_prompts_and_answers_may_have_weights_in_two_forms(
    models: dict[str, LoadedModel], split_model: LoadedModel
) -> None:
    split, stored, rounded = (answer(model, PROMPTS) for model in (split_model, models["bf16"], models["int4"]))
    assert [tokens[0] for tokens in split] == [tokens[0] for tokens in stored]
    assert split not in (stored, rounded)
    assert answer(split_model, PROMPTS, max_step_tokens=32) == split


def test_a_preempted_answer_is_computed_anew_with_the_weights_of_each_part(split_model: LoadedModel) -> None:
    prompts = [[5 + (13 * place + number) % 900 for place in range(118)] for number in range(3)]
    expected = [answer(split_model, [prompt])[0] for prompt in prompts]
    engine = Engine(split_model, make_settings("auto").model_copy(update={"pool_mb": 1}))  # 21 blocks, of 9 for each
    classes: tuple[PriorityClass, ...] = ("batch", "batch", "interactive")
    seqs = [
        Sequence(klass, prompt, sampling=GREEDY, seed=0, max_new_tokens=12, klass=klass)
        for prompt, klass in zip(prompts, classes, strict=True)
    ]
    for seq in seqs[:2]:
        engine.add_sequence(seq)
    while any(seq.num_output_tokens < 5 for seq in seqs[:2]):
        engine.step()
    engine.add_sequence(seqs[2])
    while engine.has_work():
        for sampled in engine.step():
            if sampled.seq.num_output_tokens == 12:
                engine.remove_sequence(sampled.seq)
    assert engine.scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in seqs] == expected


def test_each_stage_loads_the_weights_that_it_needs_and_both_have_one_fingerprint(split_model: LoadedModel) -> None:
    settings = make_settings("int4").model_copy(update={"prefill_weights": "bf16"})
    prompts = load_stage_models(settings, only_prompts=True)
    assert (prompts.weight_form, prompts.prompt_model) == ("", None)
    assert prompts.fingerprint == split_model.fingerprint
    other_way = settings.model_copy(update={"weights": "bf16", "prefill_weights": "int4"})
    assert load_stage_models(other_way, only_prompts=True).fingerprint != split_model.fingerprint


def test_an_answer_goes_on_from_any_token_and_from_blocks_of_either_form(split_model: LoadedModel) -> None:
    settings, prompt = make_settings("auto"), PROMPTS[4]
    (whole,) = answer(split_model, [prompt])
    for num_generated in range(len(whole)):
        engine = Engine(split_model, settings)
        seq = Sequence(
            "x", prompt, sampling=GREEDY, seed=0, max_new_tokens=12,
            output_token_ids=whole[:num_generated],
        )  # fmt: skip
        engine.add_sequence(seq)
        while seq.num_output_tokens < 12:
            engine.step()
        assert seq.output_token_ids == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_proof_at_load_takes_rounded_weights(weights: str, dtype: str) -> None:
    settings = make_settings(weights, dtype)
    assert prove_model(load_model(settings), settings).weight_form == weights


def test_the_proof_at_load_finds_wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def scramble(self: PackedLinears, *given: object) -> None:
        pack(self, *given)  # type: ignore[arg-type]
        self._memory.copy_(self._memory.roll(64))

    pack = PackedLinears._pack_weight
    monkeypatch.setattr(PackedLinears, "_pack_weight", scramble)
    settings = make_settings("int8")
    with pytest.raises(EngineCheckFailed):
        prove_model(load_model(settings), settings)


def test_twelve_bits_of_float32_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="set PENSTOCK_ENGINE_DTYPE=bfloat16"):
        accelerate_model(load_model(make_settings("p12", "float32")), "p12")


def test_without_kernels_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.accelerate.load_library", lambda: None)
    with pytest.raises(ModelLoadError, match="needs the native kernels"):
        accelerate_model(load_model(make_settings("int8")), "int8")


@pytest.mark.parametrize(("is_faster", "form"), [(True, WeightForm.COMPRESSED), (False, WeightForm.STORED)])
def test_large_models_have_the_faster_form(monkeypatch: pytest.MonkeyPatch, is_faster: bool, form: WeightForm) -> None:
    native, probes = load_library(), []
    assert native is not None

    def probe(self: WeightPacker, one: PackedLinears, other: PackedLinears) -> bool:
        probes.append((one.form, other.form))
        return is_faster

    monkeypatch.setattr(forms.WeightPacker, "_is_faster", probe)
    packer = WeightPacker(native, "auto", torch.bfloat16, 10 * read_cache_bytes(), 1000)
    linears = [nn.Linear(64, 96, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(3)]
    packed = [packer.pack_linears([linear], lambda weight: None) for linear in linears]
    assert [one.form for one in packed] == [form] * 3
    assert probes == [(WeightForm.COMPRESSED, WeightForm.STORED)]
    small = WeightPacker(native, "auto", torch.bfloat16, 1000, 1000)
    assert small.pack_linears(linears[:1], lambda weight: None).form == WeightForm.STORED


def test_the_probe_reads_both_forms_from_memory() -> None:
    native = load_library()
    assert native is not None
    packer = WeightPacker(native, "auto", torch.bfloat16, 10 * read_cache_bytes(), 1000)
    linear = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    form = packer.pack_linears([linear], lambda weight: None).form
    assert form in (WeightForm.COMPRESSED, WeightForm.STORED)
