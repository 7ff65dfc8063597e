"""Structured output through the whole pipeline: valid answers, the same after every change of workers."""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.bus.contract import Bus, Outgoing
from penstock.config.addresses import Addresses
from penstock.errors import GrammarFailed
from penstock.grammar.engine import ENGINE_VERSION
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec, Request, Sampling, TokenEvent
from penstock.names import Pipeline
from penstock.record import Record
from penstock.worker.grammars import GrammarCompiler
from sim.line import InProcessPipeline
from sim.waiting import wait_for
from sim.workload import compute_answers, load_demo_model, make_requests
from tests.pipeline.checks import results_of
from tests.pipeline.workers import wait_for_kill, worker_process

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
    checked = schema.model_copy(update={"engine": ENGINE_VERSION})
    compiled = GrammarCompiler(load_demo_model()).compile_grammar(checked)
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


SLOW_MASKS = make_schema_spec(
    {"type": "string", "allOf": [{"pattern": f"^(.*x.{{{count}}}y.*)*$"} for count in (7, 11, 13)], "maxLength": 200},
    "schema",
)
"""It compiles, and only the check finds out what its masks cost."""


@pytest.mark.parametrize("engine", ["", ENGINE_VERSION])
@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (GrammarSpec(kind="json_schema", source='{"type":"string","format":"color"}'), "unsupported_schema"),
        (GrammarSpec(kind="regex", source="("), "invalid_request"),
        (SLOW_MASKS, "invalid_request"),
    ],
)
def test_a_grammar_is_checked_whatever_its_producer_says(
    line: InProcessPipeline, grammar: GrammarSpec, code: str, engine: str
) -> None:
    line.send_requests(ask("refused", grammar.model_copy(update={"engine": engine})))
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.error.code, result.finish_reason, result.token_ids) == (code, "error", [])


ESCAPES = [GrammarSpec(kind="regex", source=f'"{"x" * length}' + r'(\\["n\\]){16,20}"') for length in range(6)]
"""Texts of escapes. They begin at different tokens, so that in any step some answers are inside of one."""
KILLS = ("decode.7.sent=kill@3", "decode.7.stepped=kill@2", "decode.7.confirmed=kill@9", "decode.7.sent=kill@4")
"""Where decode workers are killed, one after the other."""
TOKEN_BY_TOKEN = {"ENGINE_SPECULATE": "false"}
"""A step with drafts appends as many tokens as time allows: no answer may be inside of an escape then."""


def test_workers_that_are_killed_in_the_middle_of_answers_change_no_byte(
    addresses: Addresses, bus: Bus, record: Record, tmp_path: Path
) -> None:
    prompt = load_demo_model().tokenizer("And the king said")["input_ids"]
    # The last two end soon. A worker steps them before it has checked the others' grammars, and dies by those steps.
    lengths = [(grammar, 80) for grammar in ESCAPES] + [(make_schema_spec(SCHEMA, "schema"), 8), (None, 8)]
    work = [
        ask(f"killed-{seed}", grammar, seed=seed, max_tokens=max_tokens).model_copy(
            update={"prompt": None, "token_ids": prompt}
        )
        for seed, (grammar, max_tokens) in enumerate(lengths)
    ]
    with closing(bus.create_publisher()) as publisher:
        topic = Pipeline(addresses.pipeline).request_topic("interactive")
        publisher.publish([Outgoing(topic, one.encode(), one.id) for one in work])
    with worker_process("prefill", addresses, tmp_path, "prefill.4.appended=kill") as dying:
        wait_for_kill(dying)
    cut_inside: set[str] = set()
    with worker_process("prefill", addresses, tmp_path):
        # Each worker appends a token at least, so this ends: the test's time limit is for workers that do not.
        for order in cycle(KILLS):
            with worker_process("decode", addresses, tmp_path, order, TOKEN_BY_TOKEN) as dying:
                wait_for_kill(dying)
            cut_inside |= set(filter(is_inside_escape, (read_text(record, one) for one in work[: len(ESCAPES)])))
            if len(cut_inside) >= 3:
                break
        with worker_process("decode", addresses, tmp_path):
            wait_for(lambda: len(results_of(addresses)) == len(work), "every answer", every_s=0.1)
    expected = compute_answers(work)
    for result in results_of(addresses):
        answer = expected[result.id]
        assert (result.error, result.text, result.token_ids) == (None, answer.text, answer.token_ids)
        assert result.finish_reason == answer.finish_reason


def read_text(record: Record, request: Request) -> str:
    """Return the text of an answer's log so far, with what a stream holds back."""
    tokens = [event.token for event in record.read_log(request.id) if isinstance(event, TokenEvent)]
    text: str = load_demo_model().tokenizer.decode(tokens)
    return text


def is_inside_escape(text: str) -> bool:
    """Return whether a text ends with the backslash that begins an escape."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


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
