"""A loaded model, and the sequences that its engine does not take."""

from pathlib import Path

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.limits import max_length
from penstock.engine.loading import load_model
from penstock.engine.model import LoadedModel
from penstock.errors import InternalError, InvalidRequest, ModelLoadError, PromptTooLong
from tests.engine.helpers import sequence


def test_loading_prints_nothing(tiny_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(EngineSettings(model=str(tiny_dir)))
    assert (model.context_length, model.eos_token_ids, model.vocab_size) == (256, frozenset({1}), 1024)
    assert capfd.readouterr() == ("", "")


def test_what_the_engine_does_not_take(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1))
    with pytest.raises(PromptTooLong, match=r"length is 1024 tokens\. However, you requested 1025 tokens"):
        engine.add_sequence(sequence([5] * 1020, 5))
    with pytest.raises(PromptTooLong, match="KV blocks") as pool:
        engine.add_sequence(sequence([5] * 500, 5))
    assert f"maximum context length is {max_length(demo, demo.layout, engine.pool.num_blocks)} tokens" in str(
        pool.value
    )
    engine.check_sequence(sequence([5] * (max_length(demo, demo.layout, engine.pool.num_blocks) - 5), 5))
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
