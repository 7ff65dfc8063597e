"""Checking grammars in a child process: what it says, and that it survives what the engine does not."""

import itertools
import json
from collections.abc import Iterator

import pytest

from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import InternalError, InvalidRequest, UnsupportedSchema
from penstock.grammar import checker as checker_module
from penstock.grammar.checker import GrammarChecker, Vocabulary
from penstock.grammar.engine import ENGINE_VERSION
from penstock.grammar.spec import make_schema_spec
from penstock.messages import GrammarSpec
from tests.draws import mark_some

GOOD = make_schema_spec({"type": "integer"}, "schema")


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    with GrammarChecker() as checker:
        yield checker


def test_a_good_grammar_comes_back_with_its_engine(checker: GrammarChecker) -> None:
    checked = checker.check_grammar(GOOD)
    assert checked == GOOD.model_copy(update={"engine": ENGINE_VERSION})
    assert checker.check_grammar(GOOD) is checked


@pytest.mark.proof
def test_a_refusal_keeps_its_keyword_and_path(checker: GrammarChecker) -> None:
    with pytest.raises(UnsupportedSchema) as raised:
        checker.check_grammar(make_schema_spec({"items": {"not": {"type": "null"}}}, "schema"))
    assert (raised.value.keyword, raised.value.path) == ("not", "#/items/not")
    for spec in (GrammarSpec(kind="regex", source="(?=a)b"), GrammarSpec(kind="lark", source="start: %json {}")):
        with pytest.raises(InvalidRequest):
            checker.check_grammar(spec)


def test_a_grammar_whose_masks_fail_soon_is_refused(checker: GrammarChecker) -> None:
    patterns = [{"pattern": f"^(.*x.{{{count}}}y.*)*$"} for count in (7, 11, 13)]
    with pytest.raises(InvalidRequest, match="too complex"):
        checker.check_grammar(make_schema_spec({"type": "string", "allOf": patterns, "maxLength": 200}, "schema"))


def test_a_grammar_whose_masks_fail_for_a_models_long_words_is_refused_with_that_model(checker: GrammarChecker) -> None:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    for letters in itertools.product("ab", repeat=12):
        words["".join(letters)] = len(words)
    spec = GrammarSpec(kind="regex", source=".*a.{30}")
    assert checker.check_grammar(spec).engine == ENGINE_VERSION
    with GrammarChecker(Vocabulary(json.dumps(tokenizer), len(words), (1,))) as with_model:
        with pytest.raises(InvalidRequest, match="too complex"):
            with_model.check_grammar(spec)
        assert with_model.check_grammar(GOOD).engine == ENGINE_VERSION


def test_a_child_that_does_not_start_is_no_fault_of_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "START_TIMEOUT_S", 0.0)
    with pytest.raises(InternalError):
        checker.check_grammar(GOOD)
    monkeypatch.undo()
    assert checker.check_grammar(GOOD).engine == ENGINE_VERSION


@pytest.mark.parametrize(
    ("limit", "limit_s"), mark_some([("CHECK_S", 1e-6), ("ANSWER_TIMEOUT_S", 0.0)], pytest.mark.proof)
)
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_checked(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, limit: str, limit_s: float
) -> None:
    monkeypatch.setattr(checker_module, limit, limit_s)
    with pytest.raises(InvalidRequest, match="could not be checked"):
        checker.check_grammar(GOOD)
    monkeypatch.undo()
    assert checker.check_grammar(GOOD).engine == ENGINE_VERSION


def test_a_child_that_died_is_started_again(checker: GrammarChecker) -> None:
    checker.check_grammar(GOOD)
    process = checker._process
    assert process is not None
    process.kill()
    process.wait()
    other = make_schema_spec({"type": "null"}, "schema")
    assert checker.check_grammar(other).engine == ENGINE_VERSION
