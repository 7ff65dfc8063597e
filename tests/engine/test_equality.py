"""The engine's tokens are the model's own, however they come about: on transformers' layers, on the native kernels, and
with weights and KV in every form. The oracle is what each sequence says alone."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_stage_models
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence, State
from penstock.engine.weights.files import DEMO_MODEL
from penstock.messages import Sampling
from penstock.names import CLASSES
from tests.draws import draw_cases, mark_some
from tests.engine.gguf_files import convert_model
from tests.engine.helpers import (
    drain,
    generate_with_transformers,
    hand_over,
    make_block_keys,
    needs_kernels,
    run_sequences,
    sequence,
    use_instruction_set,
)
from tools.handover import export_blocks, import_blocks

NUM_NEW = 24
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50)
NUM_BLOCKS = 8
"""Of a pool that is too small for all sequences."""
GGUF = "blocks of a GGUF file"
"""With other weights than the demo model's."""
NATIVE: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8 KV": {"kv_dtype": "int8"},
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    GGUF: {"dtype": "float32"},
    "prompts with stored weights, answers in int4": {"weights": "int4", "prefill_weights": "bf16"},
}
FORMS = [pytest.param(name, marks=[needs_kernels, *[pytest.mark.proof] * (name == "float32")]) for name in NATIVE]


@pytest.fixture(scope="module", params=["plain", *FORMS])
def model(
    request: pytest.FixtureRequest, demo: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    """The demo model as transformers runs it in float32, and on the native kernels in all forms, after their proof."""
    if request.param == "plain":
        yield demo
        return
    given = {"dtype": "bfloat16", "device": "cpu", "pool_mb": 2, **NATIVE[request.param]}
    if request.param == GGUF:
        directory = Path(shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("gguf") / "demo"))
        file = convert_model(directory, ["Q8_0", "Q5_0", "Q4_0"]).save(directory.parent / "demo.gguf")
        given |= {"model": str(file), "cache_dir": str(directory.parent / "cache")}
    with use_instruction_set(""):
        yield load_stage_models(EngineSettings.model_validate(given))


@pytest.fixture(scope="module")
def prompts(demo: LoadedModel) -> list[list[int]]:
    """20 prompts of 1 to 600 tokens; every third begins with one of two long common prefixes."""
    rng = random.Random(5)
    words = ["And", "the", "LORD", "said", "unto", "them", "go", "forth", "Egypt", "behold", "wine", "7", "kings;"]

    def make_text(length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids += demo.tokenizer.encode(" " + rng.choice(words), add_special_tokens=False)
        return ids[:length]

    common = [make_text(200), make_text(33)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 600, *(rng.randrange(1, 100) for _ in range(10))]
    prompts = [make_text(length) for length in lengths]
    return [common[i % 2] + p if i % 3 == 2 and len(p) < 400 else p for i, p in enumerate(prompts)]


def _make_engine(model: LoadedModel, num_blocks: int = 0, **settings: Any) -> Engine:
    """An engine; with `num_blocks` all others belong to no sequence, so the pool is that much smaller."""
    engine = Engine(model, EngineSettings.model_validate({"pool_mb": 64, **settings}))
    if num_blocks:
        engine.pool.allocate_blocks(engine.pool.num_blocks - num_blocks)
    return engine


def _make_sequences(
    prompts: list[list[int]], outputs: list[list[int]] | None = None, *, is_mixed: bool = False
) -> list[Sequence]:
    """Greedy and sampled sequences in turns, with the given outputs. Mixed ones have two classes and two tenants."""
    return [
        sequence(prompt, NUM_NEW, name=f"s{i}", output_token_ids=outputs[i] if outputs else [],
                 priority_class=CLASSES[is_mixed * i % 4 // 2], tenant="ab"[i % 2] * is_mixed,
                 **({"sampling": SAMPLED, "seed": i} if i % 2 else {}))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


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
    if model.dtype == demo.dtype and not model.weight_form:
        assert alone[::2] == generate_with_transformers(demo, prompts[::2], NUM_NEW)


def test_tokens_do_not_depend_on_the_form_of_the_sampler(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sampler", "logprobs"):
        monkeypatch.setattr(f"penstock.engine.sampling.{module}.find_library", lambda logits: None)
    assert run_sequences(_make_engine(model), _make_sequences(prompts[:8])) == alone[:8]


@pytest.mark.parametrize(
    ("threads", "step_tokens", "max_batch"),
    draw_cases([(1, 256, 32), (2, 1024, 64), (1, 23, 5), (2, 64, 12), (3, 1, 1)], 2),
)
def test_tokens_do_not_depend_on_batch_chunks_or_threads(
    demo: LoadedModel, model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], threads: int,
    step_tokens: int, max_batch: int,
) -> None:  # fmt: skip
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
        assert engine.pool.count_cached_prefix(keys) == seq.num_prompt_tokens // 16
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


@pytest.mark.parametrize("num_given", draw_cases([1, 5, NUM_NEW - 1], 1))
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], num_given: int
) -> None:
    outputs = [output[:num_given] for output in alone[:16]]
    assert run_sequences(_make_engine(model, max_step_tokens=33), _make_sequences(prompts[:16], outputs)) == alone[:16]


# What a prefill finds of its own prompt


@pytest.mark.parametrize(
    ("length", "num_cached_tokens"), mark_some([(64, 48), (33, 32), (31, 30), (5, 4), (1, 0)], pytest.mark.proof)
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


# In a pool that is too small for all sequences, which are preempted

preempts = pytest.mark.usefixtures("unknown_growth")


def _make_short(
    prompts: list[list[int]], said: list[list[int]], *, is_resumed: bool
) -> list[tuple[Sequence, list[int]]]:
    """Mixed sequences of the prompts that fit into the small pool, with what each says alone. Some are resumed."""
    outputs = [answer[:3] if is_resumed or i % 5 == 4 else [] for i, answer in enumerate(said)]
    pairs = zip(_make_sequences(prompts, outputs, is_mixed=True), said, strict=True)
    return [(seq, answer) for seq, answer in pairs if seq.num_prompt_tokens + NUM_NEW <= 16 * NUM_BLOCKS]


@preempts
@pytest.mark.parametrize("settings", draw_cases([{"max_batch": 12}, {"max_batch": 6, "max_step_tokens": 19}], 1))
def test_preempted_sequences_say_what_they_say_alone(
    demo: LoadedModel, model: LoadedModel, prompts: list[list[int]], alone: list[list[int]], settings: dict[str, int]
) -> None:
    engine = _make_engine(model, NUM_BLOCKS, **settings)
    seqs, answers = zip(*_make_short(prompts, alone, is_resumed=False), strict=True)
    assert run_sequences(engine, seqs) == list(answers)
    assert engine.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs) > 3
    if model is demo:  # with drafts an interactive one may be done in time
        assert {seq.priority_class for seq in seqs if seq.num_preemptions} == set(CLASSES)
    engine.scheduler.check_integrity()
    assert engine.num_free_blocks == NUM_BLOCKS


@preempts
def test_they_arrive_and_are_cancelled_meanwhile(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine, rng = _make_engine(model, NUM_BLOCKS, max_batch=8, max_step_tokens=32), random.Random(1)
    short = dict(_make_short(prompts, alone, is_resumed=False))
    todo, cancelled = list(short), set()
    while todo or engine.has_work():
        if todo and rng.random() < 0.4:
            engine.add_sequence(todo.pop(0))
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        engine.scheduler.check_integrity()
        held = [seq for seq in short if seq.block_table or seq.num_preemptions]
        if rng.random() < 0.03 and held:
            seq = rng.choice(held)
            cancelled.add(seq)
            engine.remove_sequence(seq)
            assert seq.block_table == []
    assert cancelled
    assert engine.scheduler.num_preemptions > 0
    for seq, answer in short.items():
        assert seq in cancelled or seq.num_output_tokens == NUM_NEW
        assert seq.output_token_ids == answer[: seq.num_output_tokens]
    assert engine.num_free_blocks == NUM_BLOCKS


@preempts
def test_imported_blocks_and_tails_are_as_good_as_computed_ones(
    model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """As many are imported as there is capacity for; they evict earlier ones."""
    first, engine = _make_engine(model), _make_engine(model, NUM_BLOCKS, max_batch=12)
    done = [seq for seq, _ in _make_short(prompts, alone, is_resumed=False)]
    run_sequences(first, done, remove=False)
    handed = dict(_make_short(prompts, alone, is_resumed=True))
    for seq, copy in zip(done, handed, strict=True):
        import_blocks(engine, copy, export_blocks(first, seq))
        engine.add_sequence(copy)
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
    drain(engine)
    assert [seq.output_token_ids for seq in handed] == list(handed.values())
    assert engine.scheduler.num_preemptions > 0
    assert all(seq.tail_payload is None for seq in handed)
    assert sum(seq.num_cached_tokens == seq.num_prompt_tokens for seq in handed) > 2
    assert engine.num_free_blocks == NUM_BLOCKS


@preempts
def test_a_preempted_prompt_offers_no_blocks_until_they_are_there_again(demo: LoadedModel) -> None:
    engine = _make_engine(demo, 9, max_batch=4, max_step_tokens=16)
    batch = sequence([5 + i for i in range(120)], 1, priority_class="batch")
    engine.add_sequence(batch)
    for _ in range(4):
        engine.step()
    assert engine.count_completed_blocks(batch) == 4
    first = export_blocks(engine, batch, 4)
    engine.add_sequence(sequence([500 + i for i in range(100)], 1))
    engine.step()
    assert batch.num_preemptions == 1
    assert engine.count_completed_blocks(batch) == 0
    while batch.num_output_tokens == 0:
        for item in engine.step():
            if item.seq is not batch:
                engine.remove_sequence(item.seq)
    assert engine.count_completed_blocks(batch) == 7
    assert export_blocks(engine, batch, 4) == first
    assert engine.pool.count_cached_prefix(make_block_keys(batch.token_ids[:120])) == 7
