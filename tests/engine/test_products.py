"""Products of the kernels that are slower than torch's: they are found and said, and torch's own are a setting."""

import logging
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.diagnosis import check_kernels
from penstock.engine.engine import Engine
from penstock.engine.kernels import products
from penstock.engine.kernels.library import TORCH, Library
from penstock.engine.kernels.packed import WeightForm
from penstock.engine.kernels.products import NUM_ROWS, Product, find_slow_products, list_products
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.opening import open_engine
from penstock.errors import ModelLoadError
from tests.engine.helpers import needs_kernels, run_sequences, sequence, use_instruction_set
from tests.engine_contract.engines import serve

pytestmark = needs_kernels
PRODUCT = Product(96, 128, torch.float32, WeightForm.INT8)


@pytest.fixture
def native() -> Iterator[Library]:
    with use_instruction_set("") as found:
        yield found


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    return EngineSettings.model_validate({"device": "cpu", "dtype": "float32", "cache_dir": str(tmp_path)})


def set_ratio(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    monkeypatch.setattr(products, "compare_times", lambda one, other: ratio)


def test_products_are_compared_by_shape_and_form(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.compare_times(lambda: None, lambda: torch.empty(0)) > 0
    set_ratio(monkeypatch, 2.0)
    ratios = ", ".join(f"{rows} rows 2.0" for rows in NUM_ROWS)
    assert find_slow_products(native, [PRODUCT]) == [f"96 x 128 in int8 ({ratios})"]
    set_ratio(monkeypatch, 1.0)
    assert find_slow_products(native, [PRODUCT]) == []


def test_an_engine_says_once_which_are_slower_and_keeps_them(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_ratio(monkeypatch, 3.0)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        engine = open_engine(settings)
    assert engine.model.native is not None
    shapes = list_products(engine.model.module)
    assert len(engine.slow_products) == len(shapes) > 1
    assert sum("slower than torch" in line for line in caplog.messages) == 1
    with serve(engine, tmp_path / "kv") as serving:
        assert serving.report_state()["slow_products"] == len(shapes)


def test_torch_alone_is_a_setting(settings: EngineSettings, native: Library) -> None:
    prompt, with_kernels = [5, 6, 7, 8], open_engine(settings)
    alone = settings.model_copy(update={"isa": TORCH})
    engine = open_engine(alone)
    assert engine.model.native is None
    assert engine.slow_products == []
    answers = [run_sequences(one, [sequence(prompt)]) for one in (engine, with_kernels)]
    assert answers[0] == answers[1]
    with pytest.raises(ModelLoadError, match="needs the native kernels"):
        accelerate_model(load_model(alone), "int8")


@pytest.mark.parametrize(("ratio", "is_native"), [(2.0, False), (1.0, True)])
def test_where_the_kernels_have_no_vectors_the_faster_ones_are_taken(
    settings: EngineSettings, native: Library, monkeypatch: pytest.MonkeyPatch, ratio: float, is_native: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    set_ratio(monkeypatch, ratio)
    model = accelerate_model(load_model(settings), settings.weights)
    assert (model.native is not None) == is_native
    assert isinstance(Engine(model, settings), Engine)


@pytest.mark.proof
def test_the_doctor_says_which_are_slower(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ratio(monkeypatch, 1.0)
    assert [one.state for one in check_kernels(EngineSettings())] == ["ok"]
    set_ratio(monkeypatch, 2.0)
    first, second = check_kernels(EngineSettings())
    assert (first.state, second.state) == ("ok", "note")
    assert "1024 x 1024 in int4" in second.detail
    (found,) = check_kernels(EngineSettings(isa=TORCH))
    assert found.state == "note"
    assert "depend on the batch" in found.detail
