import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.files import DEMO_MODEL
from penstock.engine.kernels import library
from penstock.engine.loading import load_model
from penstock.engine.model import LoadedModel

if "TEST_KERNEL_LIBRARY" in os.environ:  # one with checks (tools/sanitize.py)
    pytest.MonkeyPatch().setattr(library, "LIBRARY", Path(os.environ["TEST_KERNEL_LIBRARY"]))


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model(EngineSettings())


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model on disk, with the demo model's tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def save_tiny(directory: Path) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=1024, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory


@pytest.fixture
def unknown_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers expect answers to end at once until they have seen some tokens, so that small pools run short."""
    monkeypatch.setattr("penstock.engine.growth.FIRST_TOKENS", 1e-9)
