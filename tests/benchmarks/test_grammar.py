"""The checks of the structured output's benchmark find what is wrong."""

import pytest

from benchmarks.grammar_answers import AnswerChecker, ConstrainedAnswer
from penstock.messages import FinishReason
from tests.grammar.sampling import compile_schema, encode_text

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 500}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "finish_reason", "broken"),
    [
        ('{"n": 7}', "stop", None),
        ('{"n": 2}', "stop", "num_violations"),
        ('{"n": 4', "stop", "num_violations"),
        ('{"n": 4', "length", None),
        ('{"n"', "length", None),
        ('{"n": x', "length", "num_not_prefixes"),
    ],
)
def test_an_answer_that_breaks_a_promise_is_counted(text: str, finish_reason: FinishReason, broken: str | None) -> None:
    checker = AnswerChecker()
    checker.check_answer(ConstrainedAnswer(SCHEMA, compile_schema(SCHEMA), encode_text(text), text, finish_reason))
    counts = {"num_violations": checker.num_violations, "num_not_prefixes": checker.num_not_prefixes}
    assert counts == {name: int(name == broken) for name in counts}


def test_a_text_that_its_tokens_do_not_say_is_found() -> None:
    checker = AnswerChecker()
    tokens = encode_text('{"n": 4')
    checker.check_answer(ConstrainedAnswer(SCHEMA, compile_schema(SCHEMA), tokens, '{"n": 5', "length"))
    assert checker.num_not_prefixes == 1
