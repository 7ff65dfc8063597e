import time

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import SLOW_HALF_LIFE_S, Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.opening import open_engine
from penstock.engine.scheduling.cost import (
    HALF_LIFE_TOKENS,
    MEASURE_S,
    PrefillRate,
    StepCost,
    StepPace,
    measure_prefill_rate,
)
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


def test_the_speed_of_a_worker_shares_a_step_among_its_prompt_tokens() -> None:
    cost = StepCost(fixed_s=0.02, row_s=0.001, context_s=1e-6, chunk_s=0.01, token_s=0.0005, outside_s=0.001)
    idle = cost.describe_speed([], 100)
    assert idle.prompt_token_s == idle.idle_prompt_token_s == pytest.approx(0.0005 + 0.03 / 100)
    assert (idle.num_rows, idle.step_s, idle.slowdown) == (0, 0.02, 1.0)
    assert idle.row_s == pytest.approx(0.002)
    rows = [sequence([5], 3), sequence([5], 3)]
    rows[0].num_computed_tokens, rows[1].num_computed_tokens = 1000, 3000
    now = cost.describe_speed(rows, 100, slowdown=4.0)
    assert now.row_s == pytest.approx(4 * (0.002 + 2000e-6))
    assert now.prompt_token_s == pytest.approx(4 * (0.0005 + (0.03 + 2 * 0.004) / 98))
    assert now.idle_prompt_token_s == idle.prompt_token_s, "what slows it now is no property of the machine"
    assert (now.num_rows, now.slowdown) == (2, 4.0)
    assert now.step_s == pytest.approx(0.08)
    nothing = StepCost(0.0, 0.0, 0.0, 0.0, 0.0).describe_speed([], 100)
    assert min(value for name, value in nothing.as_json().items() if name != "num_rows") > 0, "none is told as no time"


def test_how_slow_steps_are_is_known_soon() -> None:
    pace = StepPace()
    assert pace.slowdown == pace.high_slowdown == 1.0
    for _ in range(200):
        pace.record_step(0.04, 0.01)
    assert pace.slowdown == pytest.approx(4.0, rel=0.1)
    for _ in range(1000):
        pace.record_step(0.01, 0.01)
    assert pace.slowdown == pytest.approx(1.0, rel=0.01)
    for seconds in (0.008, 0.012) * 500:
        pace.record_step(seconds, 0.01)
    assert pace.slowdown == pytest.approx(1.0, rel=0.01)
    assert pace.high_slowdown == pytest.approx(1.6, rel=0.02), "three times their mean distance above the mean"


def test_an_engine_tells_what_its_steps_take_now_and_forgets_it_without_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(EngineSettings(pool_mb=4))
    idle = engine.report_speed()
    assert idle is not None
    assert idle.num_rows == 0
    assert engine.scheduler.cost is not None
    engine.scheduler.cost.token_s = engine.scheduler.cost.fixed_s = 1e-9  # the machine is much slower than measured
    engine.scheduler.cost.chunk_s = engine.scheduler.cost.row_s = engine.scheduler.cost.context_s = 0.0
    seqs = [sequence(list(range(5, 105)), 9), sequence(list(range(6, 106)), 9)]
    for seq in seqs:
        engine.add_sequence(seq)
    while any(seq.num_output_tokens < 2 for seq in seqs):
        engine.step()
    now = engine.report_speed()
    assert now is not None
    assert now.num_rows == 2
    assert now.slowdown is not None
    assert now.slowdown > 1.0
    assert now.prompt_token_s > now.idle_prompt_token_s
    engine._pace.slowdown = 4.0
    for half_lives, slowdown in ((0, 4.0), (1, 2.5), (20, 1.0)):
        at_s = engine._last_step_ended_s + half_lives * SLOW_HALF_LIFE_S
        monkeypatch.setattr(time, "perf_counter", lambda at_s=at_s: at_s)
        speed = engine.report_speed()
        assert speed is not None
        assert speed.slowdown == pytest.approx(slowdown, rel=0.01), "without steps the next request tries it"


def test_without_a_cost_of_steps_the_rate_of_prompts_is_told() -> None:
    rate = PrefillRate()
    assert rate.describe_speed(0) is None
    rate.record_step(1000, 1000, 1.0)
    for _ in range(20):
        rate.record_step(1000, 1000, 2.0)
    speed = rate.describe_speed(3)
    assert speed is not None
    assert speed.prompt_token_s == pytest.approx(0.002, rel=0.1)
    assert speed.idle_prompt_token_s == 0.001, "the best so far"
    assert speed.as_json().keys() == {"prompt_token_s", "idle_prompt_token_s", "num_rows"}
