"""Equal fingerprints mean equal KV; and equal models have equal fingerprints, wherever they are."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.kernels import library
from penstock.engine.loading import description
from penstock.engine.loading.loading import load_model
from penstock.engine.model import accelerate
from penstock.engine.model.accelerate import accelerate_model

PRINT = """
import sys
from penstock.engine.loading.loading import load_model
from penstock.config.settings import EngineSettings
print(load_model(EngineSettings(model=sys.argv[1])).fingerprint)
"""


def _settings(directory: Path, **given: object) -> EngineSettings:
    return EngineSettings.model_validate({"model": str(directory), **given})


def _print(directory: Path, **given: object) -> str:
    return load_model(_settings(directory, **given)).fingerprint


@pytest.fixture
def copied(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def test_another_process_computes_the_same_in_another_directory(tiny_dir: Path, copied: Path) -> None:
    """Where strings have other hashes than here."""
    other = subprocess.run(
        [sys.executable, "-c", PRINT, str(copied)],
        env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == _print(tiny_dir)


def _edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def _flip_bit(directory: Path, place: int) -> None:
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[place] ^= 1
    (directory / "model.safetensors").write_bytes(weights)


def _set(**values: object) -> Callable[[Path], None]:
    return lambda directory: _edit(directory, lambda config: config.update(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: _flip_bit(directory, -1),
        lambda directory: _flip_bit(directory, -20_000),
        _set(rope_parameters={"rope_type": "default", "rope_theta": 20000.0}),
        _set(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        _set(rms_norm_eps=1e-5),
    ],
)
def test_a_changed_file_changes_it(tiny_dir: Path, copied: Path, change: Callable[[Path], None]) -> None:
    change(copied)
    assert _print(copied) != _print(tiny_dir)


@pytest.mark.parametrize("given", [{"block_size": 8}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {}])
def test_dtype_block_size_and_layout_change_it(
    tiny_dir: Path, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _print(tiny_dir)
    if not given:
        monkeypatch.setattr(description, "LAYOUT_VERSION", description.LAYOUT_VERSION + 1)
    assert _print(tiny_dir, **given) != before


def test_what_the_configuration_leaves_to_transformers(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _edit(copied, lambda config: config.pop("rope_parameters"))
    before = load_model(_settings(copied))
    monkeypatch.setattr(transformers.LlamaConfig, "default_theta", 500_000.0)
    after = load_model(_settings(copied))
    assert [model.module.config.rope_parameters["rope_theta"] for model in (before, after)] == [10_000.0, 500_000.0]
    assert before.fingerprint != after.fingerprint


# In 16 bits what computes is named too.


def _by(directory: Path, dtype: str) -> str:
    return accelerate_model(load_model(_settings(directory, dtype=dtype))).fingerprint


@pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")
def test_kernels_and_torch_in_16_bits(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {dtype: _by(tiny_dir, dtype) for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr(accelerate, "load_library", lambda: None)
    assert _by(tiny_dir, "float32") == kernels["float32"]
    assert _by(tiny_dir, "bfloat16") != kernels["bfloat16"]


def test_instruction_sets_in_16_bits(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "load_library", lambda: None)
    prints = set()
    for name in ("AVX2", "AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        prints.add((_by(tiny_dir, "float32"), _by(tiny_dir, "bfloat16")))
    assert len(prints) == 2
    assert len({whole for whole, _ in prints}) == 1


def test_the_gpu_that_computes_in_16_bits(tiny_dir: Path) -> None:
    model = load_model(_settings(tiny_dir, dtype="bfloat16"))
    names = ("", "one GPU", "another GPU")
    assert len({replace(model, device_name=name).fingerprint for name in names}) == 3


def test_what_the_store_knows_of_a_block(tiny_dir: Path) -> None:
    layout = load_model(_settings(tiny_dir, dtype="bfloat16", block_size=8)).layout
    assert layout.element_type == "bfloat16"
    assert layout.block_bytes == 8 * 16 * 4 * 2  # a head of 16 numbers and 8 tokens, for K and V of two layers
