import pytest

from engine.engine import Engine
from engine.model import LoadedModel
from engine.rates import HALF_LIFE_TOKENS, PrefillRate
from penstock.settings import EngineSettings
from tests.engine.helpers import run, sequence


def test_unknown_until_a_prompt_was_computed() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    rate.note(0, 8, 1.0, is_done=True)
    rate.note(4, 8, 1.0, is_done=True)  # half of it decoded
    assert rate.tokens_per_s is None
    rate.note(100, 104, 0.5, is_done=True)
    assert rate.tokens_per_s == pytest.approx(200)


def test_it_follows_and_small_steps_weigh_little() -> None:
    rate = PrefillRate()
    for _ in range(20):
        rate.note(1024, 1024, 1.0, is_done=True)
    assert rate.tokens_per_s == pytest.approx(1024)
    rate.note(3, 3, 0.01, is_done=True)  # 300 tokens a second, of three tokens
    assert rate.tokens_per_s == pytest.approx(1024, rel=0.01)
    for _ in range(10 * HALF_LIFE_TOKENS // 1024):
        rate.note(1024, 1024, 0.5, is_done=True)
    assert rate.tokens_per_s == pytest.approx(2048, rel=0.01)


def test_what_the_device_has_not_done_yet_counts_with_the_step_that_waits_for_it() -> None:
    rate = PrefillRate()
    rate.note(1000, 1000, 0.001, is_done=False)  # only launched
    assert rate.tokens_per_s is None
    rate.note(1000, 1000, 1.999, is_done=True)
    assert rate.tokens_per_s == pytest.approx(1000)
    rate.note(1000, 1000, 0.001, is_done=False)
    rate.note(0, 8, 1.0, is_done=True)  # who knows when it was done
    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_engine_measures_its_prompts(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(max_step_tokens=64, pool_mb=16))
    assert engine.rates() is None
    run(engine, [sequence(list(range(5, 205)), 3)])
    rate = engine.rates()
    assert rate is not None
    assert rate > 1
