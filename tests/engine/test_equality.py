"""The engine's tokens are the model's own, however they come about: with transformers' layers and with the kernels."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.kernels import library
from penstock.engine.loading import load_model, open_engine
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tests.engine.helpers import generate_with_transformers, hand_over, make_block_keys, run_sequences, sequence

NUM_NEW = 24
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50)
KERNELS = pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")


NATIVE = {
    "float32": EngineSettings(dtype="float32"),
    "bfloat16": EngineSettings(dtype="bfloat16"),
    "int8 KV": EngineSettings(dtype="bfloat16", kv_dtype="int8"),
}


@pytest.fixture(scope="module", params=["plain", *(pytest.param(name, marks=KERNELS) for name in NATIVE)])
def model(request: pytest.FixtureRequest, demo: LoadedModel) -> Iterator[LoadedModel]:
    """The demo model as transformers runs it in float32, and on the native kernels in two dtypes and with int8 KV."""
    if request.param == "plain":
        yield demo
        return
    yield accelerate_model(load_model(NATIVE[request.param]))
    native = library.load_library()
    assert native is not None
    native.set_threads(1)


@pytest.fixture(scope="module")
def prompts(demo: LoadedModel) -> list[list[int]]:
    """32 prompts of 1 to 600 tokens; every third begins with one of two long common prefixes."""
    rng = random.Random(5)
    words = ["And", "the", "LORD", "said", "unto", "them", "go", "forth", "Egypt", "behold", "wine", "7", "kings;"]

    def make_text(length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids += demo.tokenizer.encode(" " + rng.choice(words), add_special_tokens=False)
        return ids[:length]

    common = [make_text(200), make_text(33)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 600, *(rng.randrange(1, 240) for _ in range(22))]
    prompts = [make_text(length) for length in lengths]
    return [common[i % 2] + p if i % 3 == 2 and len(p) < 400 else p for i, p in enumerate(prompts)]


def _make_engine(model: LoadedModel, **settings: Any) -> Engine:
    return Engine(model, EngineSettings.model_validate({"pool_mb": 64, **settings}))


def _make_sequences(prompts: list[list[int]], outputs: list[list[int]] | None = None) -> list[Sequence]:
    """Greedy and sampled sequences in turns, with the given outputs."""
    return [
        sequence(
            prompt,
            NUM_NEW,
            name=f"s{i}",
            output_token_ids=outputs[i] if outputs else [],
            **({"sampling": SAMPLED, "seed": i} if i % 2 else {}),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each sequence when it runs alone."""
    outputs = [run_sequences(_make_engine(model), [seq])[0] for seq in _make_sequences(prompts)]
    assert sum(map(len, outputs)) == NUM_NEW * len(prompts)
    return outputs


def test_greedy_tokens_are_those_of_transformers(
    demo: LoadedModel, model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """In float32. In bfloat16 the kernels round differently, and the proof at load compares the logits."""
    if model.dtype == demo.dtype:
        assert alone[::2] == generate_with_transformers(demo, prompts[::2], NUM_NEW)


def test_tokens_do_not_depend_on_the_form_of_the_sampler(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sampler", "sampling.logprobs"):
        monkeypatch.setattr(f"penstock.engine.{module}.find_library", lambda logits: None)
    assert run_sequences(_make_engine(model), _make_sequences(prompts[:8])) == alone[:8]


@pytest.mark.parametrize(
    ("threads", "step_tokens", "max_batch"), [(1, 256, 32), (2, 1024, 64), (1, 23, 5), (2, 64, 12), (3, 1, 1)]
)
def test_tokens_do_not_depend_on_batch_chunks_or_threads(
    demo: LoadedModel,
    model: LoadedModel,
    prompts: list[list[int]],
    alone: list[list[int]],
    threads: int,
    step_tokens: int,
    max_batch: int,
) -> None:
    threads = 1 if model is demo else threads  # torch's own threads are not what is tested
    engine = _make_engine(model, threads=threads, max_step_tokens=step_tokens, max_batch=max_batch)
    count = 8 if step_tokens == 1 else len(prompts)
    assert run_sequences(engine, _make_sequences(prompts[:count])) == alone[:count]
    assert engine.num_free_blocks == engine.pool.num_blocks
    assert engine.pool.num_hits > 0 or count < len(prompts)  # of those with a common prefix that came later


def test_a_prefix_hit_changes_nothing(model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine = _make_engine(model)
    for _ in range(2):
        seqs = _make_sequences(prompts)
        assert run_sequences(engine, seqs) == alone
    for seq in seqs:
        keys = make_block_keys(seq.token_ids[: seq.num_prompt_tokens])
        assert engine.count_cached_blocks(keys) == seq.num_prompt_tokens // 16
        assert seq.num_cached_tokens == (seq.num_prompt_tokens - 1) // 16 * 16  # never the block of the last token


def test_a_hand_off_changes_nothing(model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]) -> None:
    first, second = _make_engine(model, max_step_tokens=50), _make_engine(model)
    prefilled = _make_sequences(prompts)
    for seq in prefilled:
        seq.max_new_tokens = 1
    run_sequences(first, prefilled, remove=False)
    for seq in prefilled:
        seq.max_new_tokens = NUM_NEW
        assert first.count_completed_blocks(seq) == seq.num_prompt_tokens // 16
    copies = [hand_over(first, second, seq) for seq in prefilled]
    assert run_sequences(second, copies) == alone
    assert all(copy.num_cached_tokens == copy.num_prompt_tokens for copy in copies)


@pytest.mark.parametrize("num_given", [1, 5, NUM_NEW - 1])
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], num_given: int
) -> None:
    outputs = [output[:num_given] for output in alone[:16]]
    assert run_sequences(_make_engine(model, max_step_tokens=33), _make_sequences(prompts[:16], outputs)) == alone[:16]


# What a prefill finds of its own prompt


@pytest.mark.parametrize(
    ("length", "num_cached_tokens"), [(64, 48), (33, 32), (31, 30), (5, 4), (1, 0)]
)  # never all: the last token's logits are needed
def test_a_prefill_that_finds_its_whole_prompt_computes_the_rest(
    demo: LoadedModel, prompts: list[list[int]], length: int, num_cached_tokens: int
) -> None:
    prompt = next(p for p in prompts if len(p) == 64)[:length]
    first, second, done, again = _make_engine(demo), _make_engine(demo), sequence(prompt), sequence(prompt)
    (output,) = run_sequences(first, [done], remove=False)
    import_blocks(second, again, export_blocks(first, done))
    assert run_sequences(second, [again]) == [output]
    assert again.num_cached_tokens == num_cached_tokens


@pytest.mark.parametrize("num_imported", [0, 1])
def test_a_tail_behind_a_gap_is_not_used(demo: LoadedModel, prompts: list[list[int]], num_imported: int) -> None:
    prompt = next(p for p in prompts if len(p) > 64)[:41]
    first, second, done, again = _make_engine(demo), _make_engine(demo), sequence(prompt), sequence(prompt)
    (output,) = run_sequences(first, [done], remove=False)
    payloads = export_blocks(first, done)
    import_blocks(second, again, payloads[:num_imported])
    again.tail_payload = payloads[-1]
    assert run_sequences(second, [again]) == [output]
    assert again.num_cached_tokens == 16 * num_imported


def test_bfloat16_passes_its_check() -> None:
    open_engine(EngineSettings(dtype="bfloat16", pool_mb=4))
