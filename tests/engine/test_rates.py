import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.opening import open_engine
from penstock.engine.scheduling.cost import HALF_LIFE_TOKENS, MEASURE_S, PrefillRate, measure_prefill_rate
from tests.engine.helpers import run_sequences, sequence


def test_unknown_until_a_prompt_was_computed() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    rate.record_step(0, 8, 1.0)
    rate.record_step(4, 8, 1.0)  # half of it decoded
    assert rate.tokens_per_s is None
    rate.record_step(100, 104, 0.5)
    assert rate.tokens_per_s == pytest.approx(200)


@pytest.mark.parametrize("rate", [PrefillRate(), measure_prefill_rate(lambda num_tokens: num_tokens / 100, 256)])
def test_it_follows_and_small_steps_weigh_little(rate: PrefillRate) -> None:
    for _ in range(20):
        rate.record_step(1024, 1024, 1.0)
    assert rate.tokens_per_s == pytest.approx(1024, rel=0.02)
    rate.record_step(3, 3, 0.01)  # 300 tokens a second, of three tokens
    assert rate.tokens_per_s == pytest.approx(1024, rel=0.02)
    for _ in range(10 * HALF_LIFE_TOKENS // 1024):
        rate.record_step(1024, 1024, 0.5)
    assert rate.tokens_per_s == pytest.approx(2048, rel=0.01)


def test_an_engine_knows_its_rate_before_its_first_prompt() -> None:
    engine = open_engine(EngineSettings(pool_mb=4))
    rate = engine.prefill_tokens_per_s()
    assert rate is not None
    assert rate > 1
    assert not engine.has_work()
    assert engine.num_free_blocks == engine.pool.num_blocks
    assert engine.pool.num_hits == engine.pool.num_misses == 0
    engine.pool.check_integrity()
    run_sequences(engine, [sequence([5], 3)])  # as a decode worker that fetched all but one token
    assert engine.prefill_tokens_per_s() == rate
    run_sequences(engine, [sequence(list(range(5, 205)), 3)])
    assert engine.prefill_tokens_per_s() != rate


def test_a_pool_of_one_block_is_enough_to_measure() -> None:
    settings = EngineSettings(pool_mb=1, block_size=160, max_step_tokens=2048)
    engine = Engine(load_model(settings), settings)
    assert engine.pool.num_blocks == 1
    engine.measure_speed()
    assert engine.prefill_tokens_per_s() is not None


@pytest.mark.parametrize(
    ("token_s", "at_least_s", "most", "expected"),
    [
        (0.0005, 0.0, 256, [16, 64, 256]),
        (0.00001, 0.01, 4096, [16, 64, 256, 1024, 4096, 4096]),  # a device that small prompts do not fill
        (1.0, 0.0, 256, [16, 64]),  # a large model
        (0.01, 0.0, 5, [5, 5, 5]),
    ],
)
def test_the_first_prompts_grow_while_that_is_quick(
    token_s: float, at_least_s: float, most: int, expected: list[int]
) -> None:
    computed: list[int] = []

    def compute(num_tokens: int) -> float:
        computed.append(num_tokens)
        return max(at_least_s, num_tokens * token_s) + (9.0 if len(computed) == 1 else 0.0)  # it warms up

    rate = measure_prefill_rate(compute, most)
    assert computed == expected
    assert rate.tokens_per_s == pytest.approx(computed[-1] / max(at_least_s, computed[-1] * token_s))
    assert sum(computed[1:-1]) * token_s < MEASURE_S
