"""K and V in 8 bits in a whole engine: memory, fingerprints, and what is refused. `test_equality.py` has the tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.library import load_library
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.proof import prove_model
from penstock.engine.memory.storage import BlockLayout, LayerShape
from penstock.engine.model.model import LoadedModel
from penstock.errors import ModelLoadError
from penstock.messages import Sampling
from tests.engine.helpers import needs_kernels, run_sequences, sequence, use_instruction_set
from tests.engine_contract.engines import Caller, serve

pytestmark = needs_kernels

SETTINGS = EngineSettings(kv_dtype="int8", dtype="bfloat16", device="cpu", pool_mb=2)
PROMPTS = [[5 + (17 * place + number) % 900 for place in range(7 + 41 * number)] for number in range(5)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return prove_model(load_model(SETTINGS), SETTINGS)


def answer(model: LoadedModel, *numbers: int) -> list[list[int]]:
    """The answers to the prompts of these numbers, greedy and sampled in turn."""
    seqs = [
        sequence(PROMPTS[number], 20, name=str(number), sampling=Sampling(temperature=number % 2, ignore_eos=True))
        for number in numbers
    ]
    return run_sequences(Engine(model, SETTINGS), seqs)


@pytest.mark.proof
def test_they_stay_close_to_those_of_the_model_itself(model: LoadedModel) -> None:
    settings = SETTINGS.model_copy(update={"kv_dtype": "auto"})
    stored = prove_model(load_model(settings), settings)
    pairs = zip(answer(stored, *range(5)), answer(model, *range(5)), strict=True)
    assert sum(one[0] == other[0] for one, other in pairs) >= 4
    assert stored.fingerprint != model.fingerprint


def test_a_block_has_room_for_twice_the_tokens() -> None:
    layout = BlockLayout(tuple(LayerShape(number, (8, 128), (8, 128)) for number in range(28)), 16, torch.bfloat16)
    assert layout.block_bytes / replace(layout, is_int8=True).block_bytes == 256 / 132
    odd = BlockLayout((LayerShape(0, (3, 5), (3, 5)),), 1, torch.bfloat16, is_int8=True)
    assert all(offset % 4 == 0 for offset, _, width in odd.parts if width == 4)
    assert odd.block_bytes == 2 * (16 + 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_instruction_sets_that_round_otherwise_exchange_no_blocks(model: LoadedModel, dtype: torch.dtype) -> None:
    native, prints = load_library(), set()
    assert native is not None
    names = {native.isa, "plain"}
    for name in names:
        with use_instruction_set(name):
            prints.add(replace(model, dtype=dtype).fingerprint)
    assert len(prints) == len(names)


@pytest.mark.proof
def test_a_worker_goes_on_from_the_blocks_that_another_one_stored(model: LoadedModel, tmp_path: Path) -> None:
    (expected,) = answer(model, 3)
    num_read = []
    for _ in range(2):
        with serve(Engine(model, SETTINGS), tmp_path) as engine:
            caller = Caller(engine)
            caller.add("3", PROMPTS[3], Sampling(temperature=1, ignore_eos=True, max_tokens=20), seed=7)
            assert caller.run_to_end() == {"3": expected}
            num_read.append(sum(tier.counters.hits for tier in engine.store.tiers))
    assert num_read[0] == 0
    assert num_read[1] >= len(PROMPTS[3]) // SETTINGS.block_size


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("accelerate.load_library", None, r"KV_DTYPE=int8 needs the native kernels.*set `auto`"),
        ("recording.sees_interval", False, r"in all layers, and this is none: set `auto`"),
    ],
)
def test_without_kernels_for_all_layers_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, value: object, message: str
) -> None:
    monkeypatch.setattr(f"penstock.engine.model.{place}", lambda *given: value)
    with pytest.raises(ModelLoadError, match=message):
        prove_model(load_model(SETTINGS), SETTINGS)
