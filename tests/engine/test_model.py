import json
import shutil
from pathlib import Path

import pytest
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.limits import max_length
from penstock.engine.model import LoadedModel, load_model
from penstock.errors import InternalError, InvalidRequest, ModelLoadError, PromptTooLong
from tests.engine.helpers import sequence


def _settings(directory: Path, **given: object) -> EngineSettings:
    return EngineSettings.model_validate({"model": str(directory), **given})


def _copy(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def test_loading_reports_and_says_what_it_found(tiny_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, float]] = []
    model = load_model(_settings(tiny_dir), lambda what, done: seen.append((what, done)))
    assert (model.context_length, model.eos_token_ids, model.vocab_size) == (256, frozenset({1}), 1024)
    assert {("reading weights", 1.0), ("loading weights", 1.0)} <= set(seen)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no .safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_a_missing_file(tiny_dir: Path, tmp_path: Path, missing: str, message: str) -> None:
    directory = _copy(tiny_dir, tmp_path)
    (directory / missing).unlink()
    with pytest.raises(ModelLoadError, match=message):
        load_model(_settings(directory))


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no directory"):
        load_model(_settings(tmp_path / "nowhere"))


def test_an_index_that_names_a_file_that_is_not_there(tiny_dir: Path, tmp_path: Path) -> None:
    directory = _copy(tiny_dir, tmp_path)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelLoadError, match="which is not there"):
        load_model(_settings(directory))


def test_an_encoder_decoder(tiny_dir: Path, tmp_path: Path) -> None:
    directory = _copy(tiny_dir, tmp_path)
    transformers.T5Config().save_pretrained(directory)
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        load_model(_settings(directory))


def test_an_unknown_architecture(tiny_dir: Path, tmp_path: Path) -> None:
    directory = _copy(tiny_dir, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "no_such_thing"}))
    with pytest.raises(ModelLoadError, match="no_such_thing"):
        load_model(_settings(directory))


def test_an_unknown_device(tiny_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match="no device"):
        load_model(_settings(tiny_dir, device="toaster"))


def test_what_the_engine_does_not_take(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1))
    with pytest.raises(PromptTooLong, match=r"length is 1024 tokens\. However, you requested 1025 tokens"):
        engine.add_sequence(sequence([5] * 1020, 5))
    with pytest.raises(PromptTooLong, match="KV blocks") as pool:
        engine.add_sequence(sequence([5] * 500, 5))
    assert f"maximum context length is {max_length(demo, engine.pool.num_blocks)} tokens" in str(pool.value)
    engine.check_sequence(sequence([5] * (max_length(demo, engine.pool.num_blocks) - 5), 5))
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.add_sequence(sequence([5, 5000]))
    odd = sequence([5] * 20)
    odd.tail_payload = b"short"
    with pytest.raises(InternalError, match="its tail payload must have"):
        engine.add_sequence(odd)
    odd = sequence([5] * 32)
    odd.tail_payload = bytes(engine.block_bytes)
    with pytest.raises(InternalError, match="ends with a full block"):
        engine.add_sequence(odd)
    assert not engine.has_work()


def test_a_pool_smaller_than_a_block(demo: LoadedModel) -> None:
    large = load_model(EngineSettings(block_size=1024))
    with pytest.raises(ModelLoadError, match="POOL_MB"):
        Engine(large, EngineSettings(block_size=1024, pool_mb=1))
