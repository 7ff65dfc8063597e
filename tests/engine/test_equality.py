"""The engine's tokens are the model's own, however they come about."""

import random

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.model import LoadedModel
from penstock.engine.opening import open_engine
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tests.engine.helpers import generate, handed_over, keys_of, run, sequence

NUM_NEW = 12
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50)


def _text_tokens(model: LoadedModel, rng: random.Random, length: int) -> list[int]:
    words = ["And", "the", "LORD", "said", "unto", "them", "go", "forth", "Egypt", "behold", "wine", "7", "kings;"]
    ids: list[int] = []
    while len(ids) < length:
        ids += model.tokenizer.encode(" " + rng.choice(words), add_special_tokens=False)
    return ids[:length]


@pytest.fixture(scope="module")
def prompts(demo: LoadedModel) -> list[list[int]]:
    """64 prompts of 1 to 600 tokens; every third begins with one of two long common prefixes."""
    rng = random.Random(5)
    common = [_text_tokens(demo, rng, 200), _text_tokens(demo, rng, 33)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 600, *(rng.randrange(1, 240) for _ in range(54))]
    prompts = [_text_tokens(demo, rng, length) for length in lengths]
    return [common[i % 2] + p if i % 3 == 2 and len(p) < 400 else p for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(demo: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return generate(demo, prompts, NUM_NEW)


@pytest.mark.parametrize(("max_batch", "step_tokens"), [(32, 256), (5, 23), (64, 1024)])
def test_greedy_equals_generate(
    demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]], max_batch: int, step_tokens: int
) -> None:
    engine = Engine(demo, EngineSettings(max_batch=max_batch, max_step_tokens=step_tokens, pool_mb=48))
    assert run(engine, [sequence(p, NUM_NEW) for p in prompts]) == expected
    assert engine.num_free_blocks == engine.pool.num_blocks
    assert engine.pool.num_hits > 0  # those with a common prefix that came later


def test_one_token_a_step(demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(demo, EngineSettings(max_step_tokens=1))
    assert run(engine, [sequence(p, NUM_NEW) for p in prompts[:5]]) == expected[:5]


def test_a_prefix_hit_changes_nothing(demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(demo, EngineSettings())
    long = [i for i, p in enumerate(prompts) if len(p) >= 32][:10]
    for _ in range(2):
        seqs = [sequence(prompts[i], NUM_NEW) for i in long]
        assert run(engine, seqs) == [expected[i] for i in long]
    for seq in seqs:
        assert (
            engine.count_cached_blocks(keys_of(seq.token_ids[: seq.num_prompt_tokens])) == seq.num_prompt_tokens // 16
        )
        assert seq.num_cached_tokens == (seq.num_prompt_tokens - 1) // 16 * 16  # never the block of the last token


def test_hand_off(demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    first = Engine(demo, EngineSettings())
    second = Engine(demo, EngineSettings())  # with room for all that lands
    prefilled = [sequence(p, 1) for p in prompts]
    run(first, prefilled, remove=False)
    for seq in prefilled:
        seq.max_new_tokens = NUM_NEW
        assert first.count_completed_blocks(seq) == seq.num_prompt_tokens // 16
    copies = [handed_over(first, second, seq) for seq in prefilled]
    assert run(second, copies) == expected
    assert all(copy.num_cached_tokens == copy.num_prompt_tokens for copy in copies)


def test_a_prefill_that_finds_its_whole_prompt_computes_the_last_block(
    demo: LoadedModel, prompts: list[list[int]]
) -> None:
    prompt = next(p for p in prompts if len(p) == 64)
    first, second = (Engine(demo, EngineSettings()) for _ in range(2))
    done, again = sequence(prompt), sequence(prompt)
    (output,) = run(first, [done], remove=False)
    assert import_blocks(second, again, export_blocks(first, done)) == 4
    assert run(second, [again]) == [output]
    assert again.num_cached_tokens == 48


def test_a_tail_for_a_prefill_leaves_the_last_token(demo: LoadedModel, prompts: list[list[int]]) -> None:
    prompt = next(p for p in prompts if len(p) == 33)
    for length, num_cached_tokens in ((33, 32), (31, 30), (5, 4), (1, 0)):
        first, second = (Engine(demo, EngineSettings()) for _ in range(2))
        done, again = sequence(prompt[:length]), sequence(prompt[:length])
        (output,) = run(first, [done], remove=False)
        import_blocks(second, again, export_blocks(first, done))
        assert run(second, [again]) == [output]
        assert again.num_cached_tokens == num_cached_tokens


@pytest.mark.parametrize("num_landed", [0, 1])
def test_a_tail_behind_a_gap_is_not_used(demo: LoadedModel, prompts: list[list[int]], num_landed: int) -> None:
    prompt = next(p for p in prompts if len(p) > 64)[:41]
    first, second = (Engine(demo, EngineSettings()) for _ in range(2))
    done, again = sequence(prompt), sequence(prompt)
    (output,) = run(first, [done], remove=False)
    payloads = export_blocks(first, done)
    import_blocks(second, again, payloads[:num_landed])
    again.tail_payload = payloads[-1]
    assert run(second, [again]) == [output]
    assert again.num_cached_tokens == 16 * num_landed


@pytest.mark.parametrize("num_given", [1, 5, 11])
def test_resumed(demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]], num_given: int) -> None:
    engine = Engine(demo, EngineSettings(max_step_tokens=64))
    pairs = list(zip(prompts, expected, strict=True))[:16]
    resumed = [sequence(p, NUM_NEW, output_token_ids=said[:num_given]) for p, said in pairs]
    assert run(engine, resumed) == [said for _, said in pairs]


def test_sampled_alone_batched_chunked_resumed(demo: LoadedModel, prompts: list[list[int]]) -> None:
    def seqs() -> list[Sequence]:
        return [sequence(p, NUM_NEW, sampling=SAMPLED, seed=i) for i, p in enumerate(prompts[:8])]

    alone = run(Engine(demo, EngineSettings(max_batch=1)), seqs())
    assert run(Engine(demo, EngineSettings(max_batch=16)), seqs()) == alone
    assert run(Engine(demo, EngineSettings(max_step_tokens=9)), seqs()) == alone
    resumed = [
        sequence(p, NUM_NEW, sampling=SAMPLED, seed=i, output_token_ids=alone[i][:4]) for i, p in enumerate(prompts[:8])
    ]
    assert run(Engine(demo, EngineSettings()), resumed) == alone
    assert len({tuple(answer) for answer in alone}) == 8


def test_bfloat16_passes_its_check(demo: LoadedModel) -> None:
    open_engine(EngineSettings(dtype="bfloat16", pool_mb=4))
