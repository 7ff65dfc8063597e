"""Drafts: a step gives several tokens, and every token, log probability and KV is what it is without them."""

import random

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels import library
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence, State
from penstock.errors import SequenceFailed
from penstock.grammar.engine import ENGINE_VERSION, CompiledGrammar
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import Logprobs, Sampling
from penstock.names import CLASSES
from penstock.worker.grammars import GrammarCompiler
from tests.engine.helpers import GREEDY, GivenDrafts, sequence
from tools.handover import export_blocks
from tools.tool_corpus import TOOL_MODEL, Conversation, make_conversation, render_conversation

NUM_NEW = 40
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
    Sampling(temperature=0.9, top_p=0.95, top_k=50, logprobs=3, min_tokens=25, stop_token_ids=[30, 31, 32]),
    Sampling(temperature=0.5, top_p=0.8, frequency_penalty=0.7, presence_penalty=0.3, logprobs=0),
    Sampling(temperature=1.3, min_p=0.05, logit_bias={17: 4.0, 30: -100.0}, repetition_penalty=1.1),
)
Answer = list[tuple[int, Logprobs | None]]


@pytest.fixture(scope="module", params=[("float32", "auto"), ("bfloat16", "int8")], ids=" KV ".join)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    """The tool model on the native kernels, in a dtype and with a form of KV."""
    if library.load_library() is None:
        pytest.skip("the kernels were not built")
    dtype, kv_dtype = request.param
    return accelerate_model(load_model(EngineSettings(model=str(TOOL_MODEL), dtype=dtype, kv_dtype=kv_dtype)))


@pytest.fixture(scope="module")
def grammar(model: LoadedModel) -> CompiledGrammar:
    spec = make_schema_spec(SCHEMA, "schema").model_copy(update={"engine": ENGINE_VERSION})
    return GrammarCompiler(model).compile_grammar(spec)


def _encode(model: LoadedModel, conversation: Conversation) -> list[int]:
    text = render_conversation(model.tokenizer, conversation, whole=False)
    return list(model.tokenizer.encode(text, add_special_tokens=False))


def _make_sequences(model: LoadedModel, grammar: CompiledGrammar, seed: int) -> list[Sequence]:
    """Return sequences of all samplings, with and without a grammar, of both classes."""
    conversations = (make_conversation(f"speculation {seed} {i}", held_out=True) for i in range(60))
    prompts = [prompt for one in conversations if len(prompt := _encode(model, one)) < 160][:15]
    return [
        sequence(
            prompt, NUM_NEW, name=f"s{i}", sampling=SAMPLINGS[i % len(SAMPLINGS)], seed=seed + i,
            priority_class=CLASSES[i % 4 == 3], grammar=GrammarState(grammar) if i % 3 == 1 else None,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def _run(engine: Engine, seqs: list[Sequence]) -> list[Answer]:
    """Return the tokens of each sequence with their log probabilities. Adds a sequence now and then."""
    answers: dict[Sequence, Answer] = {seq: [] for seq in seqs}
    waiting = list(seqs)
    while waiting or engine.has_work():
        for seq in waiting[:2]:
            engine.add_sequence(seq)
        del waiting[:2]
        for item in engine.step():
            answers[item.seq].append((item.token_id, item.logprobs))
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        engine.scheduler.check_integrity()
        assert not any(seq.draft for seq in seqs)
    return [answers[seq] for seq in seqs]


def _tokens_of(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


@pytest.mark.parametrize(
    ("max_batch", "step_tokens", "num_blocks"), [(1, 256, 0), (4, 64, 0), (32, 256, 0), (8, 23, 0), (12, 256, 40)]
)
def test_drafts_change_nothing(
    model: LoadedModel, grammar: CompiledGrammar, max_batch: int, step_tokens: int, num_blocks: int
) -> None:
    """In batches of all sizes, with all ways to sample, and where sequences are preempted."""
    seed = random.randrange(2**32)
    plain = Engine(model, EngineSettings(speculate=False))
    answers = _run(plain, _make_sequences(model, grammar, seed))
    engine = Engine(model, EngineSettings(speculate=True, max_batch=max_batch, max_step_tokens=step_tokens))
    if num_blocks:
        engine.pool.allocate_blocks(engine.pool.num_blocks - num_blocks)  # these belong to no sequence
    seqs, chance = _make_sequences(model, grammar, seed), random.Random(seed)
    for seq, answer in zip(seqs, answers, strict=True):
        seq.drafter = GivenDrafts(seq.num_prompt_tokens, _tokens_of(answer), chance)
    assert _run(engine, seqs) == answers, f"seed {seed}"
    assert 0 < engine.num_accepted_tokens < engine.num_drafted_tokens
    assert plain.num_drafted_tokens == 0
    assert not num_blocks or engine.scheduler.num_preemptions > 0


def test_the_kv_is_that_of_plain_decoding(model: LoadedModel, grammar: CompiledGrammar) -> None:
    payloads = []
    answer: list[int] = []
    for speculates in (False, True):
        engine = Engine(model, EngineSettings(speculate=speculates))
        seq = _make_sequences(model, grammar, 5)[2]
        if speculates:
            seq.drafter = GivenDrafts(seq.num_prompt_tokens, answer, random.Random(4))
        engine.add_sequence(seq)
        while seq.state is not State.DONE:
            engine.step()
        answer = seq.output_token_ids
        payloads.append(export_blocks(engine, seq, seq.num_computed_tokens // 16))
        assert seq.num_computed_tokens == len(seq.token_ids) - 1
        assert (engine.num_accepted_tokens > 0) == speculates
    assert payloads[0] == payloads[1]


def test_what_is_copied_or_forced_takes_fewer_steps(model: LoadedModel, grammar: CompiledGrammar) -> None:
    conversations = (make_conversation(f"copy {i}", held_out=True, repetitions=1.0) for i in range(12))
    prompts = [_encode(model, one) for one in conversations]

    def make() -> list[Sequence]:
        copies = [sequence(prompt, NUM_NEW, name=f"copy {i}") for i, prompt in enumerate(prompts)]
        return [*copies, sequence(prompts[0], NUM_NEW, name="forced", grammar=GrammarState(grammar))]

    engine = Engine(model, EngineSettings(speculate=True))
    assert _run(engine, make()) == _run(Engine(model, EngineSettings(speculate=False)), make())
    assert engine.num_accepted_tokens > 13 * NUM_NEW / 3
    assert engine.num_accepted_tokens > engine.num_drafted_tokens / 3


def test_threads_that_share_the_masks_change_nothing(model: LoadedModel, grammar: CompiledGrammar) -> None:
    engines = [Engine(model, EngineSettings(threads=threads)) for threads in (1, 3)]
    one, three = [_run(engine, _make_sequences(model, grammar, 5)) for engine in engines]
    assert three == one


def test_a_sequence_that_cannot_go_on_in_its_grammar_is_named_whatever_thread_finds_it(
    model: LoadedModel, grammar: CompiledGrammar
) -> None:
    engine = Engine(model, EngineSettings(threads=3, speculate=False), quarantine=False)
    seqs = [seq for seq in _make_sequences(model, grammar, 5) if seq.grammar is not None]
    for seq in seqs:
        engine.add_sequence(seq)
    while not seqs[2].num_output_tokens:
        engine.step()
    seqs[2].grammar, seqs[2].token_ids[-1] = GrammarState(grammar), 2  # as if another token had been drawn
    with pytest.raises(SequenceFailed) as failed:
        engine.step()
    assert failed.value.seq is seqs[2]


def test_a_sequence_that_is_resumed_at_any_token_goes_on_as_before(
    model: LoadedModel, grammar: CompiledGrammar
) -> None:
    for index in (1, 2, 4):
        whole = _make_sequences(model, grammar, 9)[index]
        prompt, has_grammar = list(whole.token_ids), whole.grammar is not None
        (answer,) = _run(Engine(model, EngineSettings(speculate=True)), [whole])
        tokens, resumed = _tokens_of(answer), list[Sequence]()
        for number in range(NUM_NEW):
            state = GrammarState(grammar, token_ids=tokens[:number]) if has_grammar else None
            resumed.append(
                sequence(
                    prompt, NUM_NEW, name=f"after {number}", sampling=whole.sampling, seed=whole.seed,
                    grammar=state, output_token_ids=tokens[:number],
                )
            )  # fmt: skip
        found = _run(Engine(model, EngineSettings(speculate=True)), resumed)
        assert found == [answer[number:] for number in range(NUM_NEW)]


def test_a_grammar_ends_with_its_last_token_and_not_before(model: LoadedModel, grammar: CompiledGrammar) -> None:
    answer: list[int] = []
    for speculates in (False, True):
        engine = Engine(model, EngineSettings(speculate=speculates))
        seq = sequence([40, 41, 42], NUM_NEW, grammar=GrammarState(grammar))
        if speculates:
            seq.drafter = GivenDrafts(3, answer, random.Random(1))
        engine.add_sequence(seq)
        said: list[tuple[int, bool]] = []
        while not said or not said[-1][1]:
            said += [(item.token_id, item.is_grammar_ended) for item in engine.step()]
        assert sum(is_ended for _, is_ended in said) == 1
        assert not speculates or [token for token, _ in said] == answer
        answer = [token for token, _ in said]


def test_without_exact_kernels_nothing_is_drafted(demo: LoadedModel) -> None:
    """Where rows depend on the batch, drafts might change tokens."""
    assert not Engine(demo, EngineSettings(speculate=True)).speculates
