"""The state of a grammar: what may follow, when it ends, and what happens to tokens that it does not allow."""

import threading

import pytest

from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import GrammarFailed
from penstock.grammar.engine import CompiledGrammar, GrammarCache, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec
from tests.grammar.sampling import (
    compile_schema,
    compile_spec,
    draw_answer,
    encode_text,
    list_allowed,
    load_tokenizer,
    read_mask,
)

EOS = next(iter(load_tokenizer().eos_token_ids))


def test_an_answer_may_end_only_where_its_grammar_accepts() -> None:
    state = GrammarState(compile_spec(GrammarSpec(kind="regex", source="ab+")))
    assert not state.is_accepting
    assert EOS not in list_allowed(state)
    state.advance(encode_text("ab"))
    assert (state.is_accepting, state.is_ended) == (True, False)
    assert EOS in list_allowed(state)


def test_an_answer_must_end_where_nothing_may_follow() -> None:
    state = GrammarState(compile_spec(GrammarSpec(kind="choice", source='["ab"]')))
    state.advance(encode_text("ab"))
    assert state.is_accepting
    assert state.is_ended
    assert list_allowed(state) == [EOS]
    assert state.find_forced_tokens() == []


@pytest.mark.parametrize("source", ["ab", "ab*"])
def test_a_log_with_an_end_of_answer_token_is_replayed_in_one_call_or_several(source: str) -> None:
    grammar = compile_spec(GrammarSpec(kind="regex", source=source))
    tokens = [*encode_text("ab"), EOS]
    at_once, one_by_one = GrammarState(grammar, token_ids=tokens), GrammarState(grammar)
    for token in tokens:
        one_by_one.advance([token])
    for state in (at_once, one_by_one):
        assert state.is_ended
        assert list_allowed(state) == [EOS]
        with pytest.raises(GrammarFailed):
            state.advance(encode_text("b"))


def test_an_end_of_answer_token_is_refused_before_the_grammar_accepts() -> None:
    state = GrammarState(compile_schema({"type": "object"}))
    with pytest.raises(GrammarFailed, match="position 0"):
        state.advance([EOS])


def test_a_refused_token_is_named_and_leaves_the_state_where_it_was() -> None:
    state = GrammarState(compile_spec(GrammarSpec(kind="regex", source="a[bc]{9}")))
    state.advance(encode_text("ab"))
    before = read_mask(state).tobytes()
    allowed, refused = encode_text("c")[0], encode_text("x")[0]
    with pytest.raises(GrammarFailed, match=f"position {len(state.token_ids) + 1}"):
        state.advance([allowed, refused])
    assert read_mask(state).tobytes() == before
    assert state.count_allowed([allowed, refused]) == 1
    state.advance([allowed])
    assert state.token_ids == [*encode_text("ab"), allowed]


def test_forced_tokens_are_allowed_one_after_the_other() -> None:
    schema = {"type": "object", "properties": {"temperature": {"type": "null"}}, "required": ["temperature"]}
    state = GrammarState(compile_schema({**schema, "additionalProperties": False}))
    state.advance(encode_text('{"t'))
    forced = state.find_forced_tokens()
    assert load_tokenizer().engine.decode_bytes(forced).startswith(b"emperat")
    for token in forced:
        assert token in list_allowed(state)
        state.advance([token])


def test_a_copy_goes_its_own_way() -> None:
    state = GrammarState(compile_spec(GrammarSpec(kind="regex", source="a(b|c)d")))
    state.advance(encode_text("a"))
    other = state.copy()
    state.advance(encode_text("b"))
    assert list_allowed(other) != list_allowed(state)
    other.advance(encode_text("c"))
    assert other.token_ids == encode_text("a") + encode_text("c")


def test_a_matcher_that_failed_for_others_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = GrammarState(compile_spec(GrammarSpec(kind="regex", source="ab*c")))
    state.advance(encode_text("ab"))
    expected = read_mask(state).tobytes()
    state._matcher.consume_token(encode_text("x")[0])  # from now on it gives nothing but the end-of-answer token
    assert state._matcher.is_error()
    assert not state.is_ended
    assert read_mask(state).tobytes() == expected
    state.advance(encode_text("bc"))
    assert state.is_ended


def test_a_lexer_that_is_full_is_replaced_for_all_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compile_schema({"type": "string", "pattern": "^.*a.{40}$"})
    renewed: list[int] = []
    compile_again = CompiledGrammar._compile

    def count(self: CompiledGrammar) -> object:
        renewed.append(answers)
        return compile_again(self)

    monkeypatch.setattr(CompiledGrammar, "_compile", count)
    for answers in range(40):
        answer = draw_answer(grammar, answers, 250)
        assert len(answer.token_ids) == 250 or answer.is_ended
    assert 1 <= len(renewed) < 20


def test_a_mask_that_exceeds_its_limits_fails_and_does_not_end_the_answer() -> None:
    patterns = [{"pattern": f"^(.*x.{{{count}}}y.*)*$"} for count in (7, 11, 13)]
    state = GrammarState(compile_schema({"type": "string", "allOf": patterns, "maxLength": 200}))

    def go_on() -> None:
        for token in encode_text('"xxxxxxxxxyyyyyyyyxxxx'):
            read_mask(state)
            state.advance([token])

    with pytest.raises(GrammarFailed, match="too much work"):
        go_on()


def test_states_of_one_grammar_can_be_used_by_many_threads() -> None:
    grammar = compile_schema({"type": "array", "items": {"type": "integer"}})
    tokens = encode_text("[1,22,333,4444,55555]")
    seen: list[list[bytes]] = []

    def go_through() -> None:
        state = GrammarState(grammar)
        masks = []
        for token in tokens:
            masks.append(read_mask(state).tobytes())
            state.advance([token])
        seen.append(masks)

    threads = [threading.Thread(target=go_through) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert all(masks == seen[0] for masks in seen)


def test_the_cache_keeps_the_latest_used_grammars() -> None:
    cache = GrammarCache(load_tokenizer(), size=2)
    specs = [make_schema_spec({"const": number}, "schema") for number in range(3)]
    first, second = cache.get_grammar(specs[0]), cache.get_grammar(specs[1])
    assert cache.get_grammar(specs[0].model_copy(update={"engine": "llguidance 0"})) is first
    cache.get_grammar(specs[2])
    assert cache.get_grammar(specs[0]) is first
    assert cache.get_grammar(specs[1]) is not second


def test_masks_are_as_wide_as_the_logits() -> None:
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    tokenizer = GrammarTokenizer.from_json(text, vocab_size=1100, eos_token_ids=[EOS])
    grammar = CompiledGrammar(GrammarSpec(kind="json_object"), tokenizer)
    assert tokenizer.num_mask_words == 35
    assert max(list_allowed(GrammarState(grammar))) < 1024
