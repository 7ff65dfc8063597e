"""Structured output through the whole pipeline: valid answers, the same after every change of workers."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from penstock.config.addresses import Addresses
from penstock.errors import GrammarFailed
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec, Request, Sampling
from penstock.names import Pipeline
from penstock.worker.grammars import GrammarCompiler
from sim.line import InProcessPipeline
from sim.workload import compute_answers, load_demo_model, make_requests

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["king", "priest"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "years"],
    "additionalProperties": False,
}


@pytest.fixture
def line(redis_url: str, pipeline: Pipeline) -> Iterator[InProcessPipeline]:
    with InProcessPipeline(Addresses(pipeline=pipeline.name, stream_url=redis_url)) as made:
        yield made


def ask(name: str, grammar: GrammarSpec | None, **sampling: Any) -> Request:
    given = {"max_tokens": 160, "temperature": 1.0, "grammar": grammar, **sampling}
    return Request(id=name, prompt="And the king said", sampling=Sampling(**given))


def test_answers_match_their_schemas_and_others_are_as_without_them(line: InProcessPipeline) -> None:
    schema = make_schema_spec(SCHEMA, "schema")
    plain = make_requests(3, "plain", max_tokens=12)
    line.send_requests(*plain, *(ask(f"json-{seed}", schema, seed=seed) for seed in range(8)))
    results = {result.id: result for result in line.run_until_results(11)}
    for name, expected in compute_answers(plain).items():
        assert results[name].token_ids == expected.token_ids
    grammar = GrammarCompiler(load_demo_model())
    compiled = grammar.compile_grammar(grammar.check_grammar(schema))
    ends = set()
    for seed in range(8):
        result = results[f"json-{seed}"]
        ends.add(result.finish_reason)
        state = GrammarState(compiled, token_ids=result.token_ids)  # raises where a token is not allowed
        assert state.is_ended is (result.finish_reason == "stop")
        if result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), SCHEMA)
        else:
            assert result.finish_reason == "length"
            assert result.usage.completion_tokens == 160
    assert "stop" in ends


def test_an_answer_is_the_same_with_another_worker_for_each_token(line: InProcessPipeline) -> None:
    grammar = GrammarSpec(kind="regex", source=r'\{"name":"(\\["n\\]){3,5}"\}')
    line.send_requests(ask("whole", grammar, max_tokens=40, seed=4))
    (whole,) = line.run_until_results(1)
    line.send_requests(ask("cut", grammar, max_tokens=40, seed=4))
    line.run_prefill(1)
    for count in range(1, len(whole.token_ids)):
        while not (line.decode.running and line.decode.running["cut"].claim.num_tokens >= count):
            line.decode.run_once()
        line.decode.close()
        line.renew_decode()
    cut = next(result for result in line.run_until_results(2) if result.id == "cut")
    assert (cut.text, cut.token_ids, cut.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert len(whole.token_ids) > 5


def test_an_answer_that_ends_with_its_first_token_ends_in_prefill(line: InProcessPipeline) -> None:
    line.send_requests(ask("one", GrammarSpec(kind="choice", source='["a", "b"]')))
    (result,) = line.run_until_results(1)
    assert (result.text in {"a", "b"}, result.finish_reason, len(result.token_ids)) == (True, "stop", 1)


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (GrammarSpec(kind="json_schema", source='{"type":"string","format":"color"}'), "unsupported_schema"),
        (GrammarSpec(kind="regex", source="("), "invalid_request"),
    ],
)
def test_what_nobody_has_checked_is_refused_with_a_result(
    line: InProcessPipeline, grammar: GrammarSpec, code: str
) -> None:
    line.send_requests(ask("refused", grammar))
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.error.code, result.finish_reason, result.token_ids) == (code, "error", [])


def test_an_answer_of_another_version_of_the_engine_is_not_gone_on_with(line: InProcessPipeline) -> None:
    line.send_requests(ask("old", make_schema_spec(SCHEMA, "schema")))
    line.run_prefill(1)
    (topic,) = (line.pipeline.job_topic("interactive"),)
    (job,) = line.bus.read_all(topic)
    line.decode.role.grammars.compile_grammar = _refuse  # type: ignore[attr-defined]
    assert job.value.count(b'"engine":"llguidance ') == 1
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == "grammar_failed"
    assert len(result.token_ids) == 1
    compiler = GrammarCompiler(load_demo_model())
    with pytest.raises(GrammarFailed, match=r"llguidance 0\.1"):
        compiler.compile_grammar(GrammarSpec(kind="json_object", engine="llguidance 0.1"))


def _refuse(spec: GrammarSpec) -> None:
    raise GrammarFailed("another version")
