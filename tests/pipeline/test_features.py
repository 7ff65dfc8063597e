"""What an answer may be asked for: what each does, and that neither mishaps nor ways of computing steps change it."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from penstock.config.settings import EngineSettings, RecordSettings
from penstock.engine.drafts import Drafter
from penstock.errors import GrammarFailed
from penstock.grammar.engine import ENGINE_VERSION
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.ingest.openai.completions import join_prompt_text
from penstock.messages import (
    DEFAULT_MAX_TOKENS,
    EndEvent,
    GrammarSpec,
    Logprobs,
    Request,
    Result,
    Sampling,
    TokenEvent,
    now_s,
)
from penstock.names import CLASSES
from penstock.worker.grammars import GrammarCompiler
from penstock.worker.load import UNKNOWN_PROMPT_TOKENS
from penstock.worker.worker import Worker
from penstock.worker_speed import WorkerSpeed
from sim.line import InProcessPipeline, core_of, run_until_running
from sim.workload import compute_answers, load_demo_model, make_requests

pytestmark = pytest.mark.in_memory

NUM_TOKENS, NO_LIMIT = 30, 2**31 - 1
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
BY_SCHEMA = make_schema_spec(SCHEMA, "schema")
SAMPLED: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": 5}
PENALTIES: dict[str, Any] = {
    "temperature": 0.4, "top_p": 0.9, "min_p": 0.02, "seed": 11, "repetition_penalty": 1.2, "presence_penalty": 0.8,
    "frequency_penalty": 0.6, "logit_bias": {13: -100.0}, "logprobs": 3,
}  # fmt: skip
OPEN_END: dict[str, Any] = {"temperature": 0.0, "ignore_eos": False, "logit_bias": {1: 100.0}}
"""The end of the answer is what the model says at once."""


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(record=RecordSettings(lease_s=0.4))


def ask(name: str, token_ids: list[int] | None = None, **sampling: Any) -> Request:
    prompt, fields = "And the king said" if token_ids is None else None, SAMPLED | sampling
    fields["ignore_eos"] = sampling.get("ignore_eos", "grammar" not in sampling)
    return Request(id=name, prompt=prompt, token_ids=token_ids, sampling=Sampling(**fields))


def ask_long(name: str, length: int, max_tokens: int, *, fits: bool = True) -> Request:
    """Return a greedy request with a prompt of so many tokens; where it `fits`, its answer may end with the context."""
    limit = {"max_tokens": max_tokens, "fit_context": True if fits else None}
    return ask(name, [5 + n % 200 for n in range(length)], temperature=0, seed=None, **limit)


def answer(line: InProcessPipeline, *work: Request) -> dict[str, Result]:
    """Send requests, turn the workers until all have their results, and return these."""
    line.send_requests(*work)
    return read_results(line, *(one.id for one in work))


def read_results(line: InProcessPipeline, *names: str) -> dict[str, Result]:
    """Return the results of these requests, once they are there."""
    count = len(line.read_results())
    while not set(names) <= (found := {one.id: one for one in line.run_until_results(count)}).keys():
        count += 1
    return {name: found[name] for name in names}


# The ways in which steps are computed.

Prepare = Callable[[Worker], None]
Way = Callable[[pytest.MonkeyPatch, list[Result]], Prepare]


def compute_one_by_one(monkeypatch: pytest.MonkeyPatch, known: list[Result]) -> Prepare:
    return lambda worker: None


def compute_drafts(monkeypatch: pytest.MonkeyPatch, known: list[Result]) -> Prepare:
    """Let steps of decode draft what one of the known answers says next, whatever comes."""

    def propose(
        self: Drafter, token_ids: list[int], grammar: GrammarState | None, max_tokens: int
    ) -> tuple[list[int], list[float]]:
        rests = [
            one.token_ids[len(token_ids) - start :] + [7] * 9
            for one in known
            for start in range(max(1, len(token_ids) - len(one.token_ids)), len(token_ids))
            if token_ids[start:] == one.token_ids[: len(token_ids) - start]
        ]
        draft = max(rests, key=len, default=[])[:max_tokens]
        return draft, [1.0] * len(draft)

    def prepare(worker: Worker) -> None:
        core_of(worker).speculates = worker.stage == "decode"

    monkeypatch.setattr(Drafter, "propose_tokens", propose)
    return prepare


# The mishaps: each is played when the requests are sent.

Mishap = Callable[[InProcessPipeline, Prepare, list[str]], None]


def nothing(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Let nothing happen."""


def leave_at_every_token(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Let a decode worker leave whenever each of its requests has a token more."""
    line.run_prefill(len(names))
    while len(line.read_results()) < 2 * len(names):
        started: dict[str, int] = {}
        while len(line.read_results()) < 2 * len(names):
            line.decode.run_once()
            counts = {name: task.claim.num_tokens for name, task in line.decode.running.items()}
            started = counts | started
            if counts and all(count > started[name] for name, count in counts.items()):
                break
        line.decode.close()
        line.renew_decode()
        prepare(line.decode)


def fall_silent_in_prefill(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Let the prefill worker stand still with the requests that it runs. Its group does not notice for a while."""
    silent = line.silence_worker("prefill")
    prepare(line.prefill)
    line.run_prefill(1)
    silent.member.close()
    silent.abandon()


def fall_silent_in_decode(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Let the decode worker stand still in the middle of the answers, and of a step; then its group notices."""
    line.run_prefill(len(names))
    silent = line.silence_worker("decode", num_tokens=5)
    prepare(line.decode)
    run_until_running(line.decode)
    silent.member.close()
    silent.abandon()
    assert not silent.engine.has_work()
    assert core_of(silent).num_free_blocks == core_of(silent).pool.num_blocks


def cancel_one(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Cancel one of them in the middle of its answer."""
    line.run_prefill(len(names))
    line.run_until_tokens("plain-again", 5)
    assert line.decode.record.cancel_request("plain-again")


def let_one_be_late(line: InProcessPipeline, prepare: Prepare, names: list[str]) -> None:
    """Let the deadline of one of them pass in the middle of its answer."""
    line.run_prefill(len(names))
    line.run_until_tokens("plain-again", 5)
    task = line.decode.running["plain-again"]
    assert task.message is not None
    task.message = task.message.model_copy(update={"deadline": now_s()})


MISHAPS = [
    nothing, leave_at_every_token, fall_silent_in_prefill, fall_silent_in_decode, cancel_one, let_one_be_late,
]  # fmt: skip
ENDED_BY: dict[Mishap, str] = {cancel_one: "cancelled", let_one_be_late: "deadline_exceeded"}
"""By mishap the error that one of the answers ends with."""


def list_features(plain: Result) -> list[Request]:
    """Return requests for what an answer may have. Some answers end in the middle of the plain one."""
    context = load_demo_model().context_length
    return [
        ask("penalties", **PENALTIES),
        ask("prompt-logprobs", prompt_logprobs=2),
        ask("stop-string", stop=[plain.text[len(plain.text) // 2 :][:3]]),
        ask("stop-token", stop_token_ids=[plain.token_ids[17]]),
        ask("length", max_tokens=9),
        ask("min-tokens", **OPEN_END, min_tokens=7),
        ask("schema", grammar=BY_SCHEMA, max_tokens=60),
        ask("escapes", grammar=GrammarSpec(kind="regex", source=r'\{"name":"(\\["n\\]){3,5}"\}'), seed=4),
        ask_long("context", context - 20, NO_LIMIT),
        *make_requests(2, "work", max_tokens=24),
    ]


PROOFS = {(compute_drafts, nothing)}
PAIRS = [(way, happen) for way in (compute_one_by_one, compute_drafts) for happen in MISHAPS]


@pytest.mark.parametrize(
    ("way", "happen"), [pytest.param(*pair, marks=[pytest.mark.proof] if pair in PROOFS else []) for pair in PAIRS]
)
def test_an_answer_is_the_same_in_every_way_and_after_every_mishap(
    line: InProcessPipeline, way: Way, happen: Mishap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An undisturbed answer, token by token, is compared with one that was computed so, and disturbed."""
    plain = answer(line, ask("plain"))["plain"]
    work = list_features(plain)
    expected = {"plain": plain} | answer(line, *work)
    prepare, decode = way(monkeypatch, list(expected.values())), line.decode
    for worker in (line.prefill, decode):
        prepare(worker)
    again = [one.model_copy(update={"id": f"{one.id}-again"}) for one in (ask("plain"), *work)]
    line.send_requests(*again)
    happen(line, prepare, [one.id for one in again])
    results = read_results(line, *(one.id for one in again))
    for request in again:
        error = ENDED_BY.get(happen, "") if request.id == "plain-again" else ""
        check_same(results[request.id], expected[request.id.removesuffix("-again")], line, error)
    if way is compute_drafts:
        assert core_of(decode).num_accepted_tokens > (NUM_TOKENS if happen is nothing else 0)
    for worker in (line.prefill, line.decode):
        assert core_of(worker).num_free_blocks == core_of(worker).pool.num_blocks
        assert not core_of(worker).num_running


def check_same(result: Result, expected: Result, line: InProcessPipeline, error: str) -> None:
    """Check an answer and its log against another answer, of which it is the beginning where it ended with an error."""
    *tokens, end = line.decode.record.read_log(result.id)
    assert isinstance(end, EndEvent)
    count = len(result.token_ids)
    assert [event.token for event in tokens if isinstance(event, TokenEvent)] == result.token_ids
    assert [int(event.id.partition("-")[0]) for event in tokens if isinstance(event, TokenEvent)] == list(range(count))
    assert end.usage.completion_tokens == result.usage.completion_tokens == count
    if error:
        assert result.error is not None
        assert (result.error.code, result.finish_reason) == (error, "cancelled" if error == "cancelled" else "error")
        assert 5 < count < len(expected.token_ids)
        assert result.usage.prompt_tokens > 0
        assert result.token_ids == expected.token_ids[:count]
        return
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
    assert (result.finish_reason, result.error) == (expected.finish_reason, expected.error)
    for ours, theirs in zip(result.logprobs or (), expected.logprobs or (), strict=True):
        # A new worker computes the KV of the earlier tokens at once: the model's own sums may round differently.
        assert [entry.token for entry in ours.top] == [entry.token for entry in theirs.top]
        assert list_values(ours) == pytest.approx(list_values(theirs), abs=1e-4)
    assert [event.logprobs for event in tokens if isinstance(event, TokenEvent) and event.logprobs] == (
        result.logprobs or []
    )
    assert bool(result.prompt_tokens) == bool(expected.prompt_tokens)
    for one, other in zip(result.prompt_tokens or (), expected.prompt_tokens or (), strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [entry.token for entry in one.top] == [entry.token for entry in other.top]


def list_values(logprobs: Logprobs) -> list[float]:
    return [logprobs.logprob, *(entry.logprob for entry in logprobs.top)]


# What each does.


@pytest.mark.proof
def test_an_answer_does_not_end_before_min_tokens(line: InProcessPipeline) -> None:
    """Neither by itself, nor by a stop token, nor by a stop string."""
    (eos,) = load_demo_model().eos_token_ids
    letters = GrammarSpec(kind="regex", source="[a-z]{2,90}")
    one_letter = GrammarSpec(kind="choice", source='["x"]')
    results = answer(
        line,
        ask("at-once", **OPEN_END),
        ask("later", **OPEN_END, min_tokens=7),
        ask("stop-token", **OPEN_END | {"logit_bias": {302: 100.0}}, stop_token_ids=[302], min_tokens=7),
        ask("open", **OPEN_END, min_tokens=7, grammar=letters),
        ask("short", **OPEN_END, min_tokens=7, grammar=one_letter),
    )
    assert {result.finish_reason for result in results.values()} == {"stop"}
    lengths = {name: len(result.token_ids) for name, result in results.items()}
    assert lengths["at-once"] == 1
    assert lengths["later"] == lengths["stop-token"] == lengths["open"] == 8
    assert results["later"].token_ids[-1] == results["open"].token_ids[-1] == eos
    assert results["short"].text == "x"


def test_a_prompts_log_probabilities_come_with_the_first_token(line: InProcessPipeline) -> None:
    """Also where its KV is cached."""
    answer(line, plain := ask("plain"))
    asked = answer(line, ask("asked", prompt_logprobs=2))["asked"]
    assert asked.prompt_tokens is not None
    assert [one.token for one in asked.prompt_tokens] == load_demo_model().tokenizer(plain.prompt)["input_ids"]
    assert join_prompt_text(asked.prompt_tokens) == plain.prompt
    count = len(asked.prompt_tokens)
    assert [one.logprob is None for one in asked.prompt_tokens] == [True] + [False] * (count - 1)
    assert [len(one.top) for one in asked.prompt_tokens[1:]] == [2] * (count - 1)
    assert asked.usage.cached_tokens == 0
    first, second, *_ = line.decode.record.read_log("asked")
    assert isinstance(first, TokenEvent)
    assert isinstance(second, TokenEvent)
    assert (first.prompt_tokens, second.prompt_tokens) == (asked.prompt_tokens, None)


def test_only_who_asks_gets_logprobs_and_penalties(line: InProcessPipeline) -> None:
    """Other requests get neither, and log probabilities do not change the tokens."""
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
    work = {"penalised": PENALTIES, "plain": PENALTIES | plain, "silent": PENALTIES | {"logprobs": None}}
    results = answer(line, *(ask(name, **fields) for name, fields in work.items()))
    assert results["silent"].token_ids == results["penalised"].token_ids != results["plain"].token_ids
    assert results["silent"].logprobs is None
    assert [len(one.top) for one in results["penalised"].logprobs or ()] == [3] * NUM_TOKENS
    assert 13 not in results["penalised"].token_ids
    with line.open_client() as client:
        streamed = [event for event in client.stream("penalised") if isinstance(event, TokenEvent)]
        late = [event for event in client.stream("penalised", streamed[9].id) if isinstance(event, TokenEvent)]
        assert client.result("penalised").logprobs == results["penalised"].logprobs
    assert [event.logprobs for event in streamed] == results["penalised"].logprobs
    assert late == streamed[10:]
    events = line.decode.record.read_log("silent")
    assert all(event.logprobs is None for event in events if isinstance(event, TokenEvent))


def test_a_bias_for_a_token_beyond_the_vocabulary_is_refused(line: InProcessPipeline) -> None:
    results = answer(line, ask("beyond", logit_bias={1024: 1.0}), ask("last", logit_bias={1023: -1.0}))
    error = results["beyond"].error
    assert error is not None
    assert error.code == "invalid_request"
    assert "logit_bias" in error.message
    assert results["last"].error is None


# The length.


@pytest.mark.proof
def test_an_answer_ends_with_the_context_or_with_its_limit_whichever_is_first(line: InProcessPipeline) -> None:
    context = load_demo_model().context_length
    results = answer(
        line,
        ask_long("open", context - 20, NO_LIMIT),
        ask_long("limited", context - 20, 7),
        ask_long("last", context - 1, NO_LIMIT),
        ask_long("full", context, NO_LIMIT),
        ask_long("explicit", context - 20, 21, fits=False),
    )
    ends = {name: (result.finish_reason, len(result.token_ids)) for name, result in results.items()}
    lengths = {"open": 20, "limited": 7, "last": 1}
    refused = dict.fromkeys(("full", "explicit"), ("error", 0))
    assert ends == {name: ("length", count) for name, count in lengths.items()} | refused
    assert {results[name].error.code for name in refused} == {"prompt_too_long"}  # type: ignore[union-attr]
    assert results["open"].token_ids[:7] == results["limited"].token_ids


def test_a_pool_that_is_smaller_than_the_context_ends_answers_too(line: InProcessPipeline) -> None:
    """First the pool of decode alone is smaller, then both are."""
    left = 8 * EngineSettings().block_size + 1 - 100
    line.send_requests(ask_long("decode", 100, NO_LIMIT))
    line.run_prefill(1)
    for worker in (line.decode, line.prefill):
        core_of(worker).pool.num_blocks = 8
    decode = read_results(line, "decode")["decode"]
    assert (decode.finish_reason, len(decode.token_ids)) == ("length", left)
    explicit = ask_long("explicit", 100, left + 1, fits=False)
    results = answer(line, ask_long("both", 100, NO_LIMIT), explicit)
    assert (results["both"].finish_reason, results["both"].token_ids) == ("length", decode.token_ids)
    assert results["explicit"].error is not None
    assert results["explicit"].error.code == "prompt_too_long"


def test_the_reported_load_says_what_waits_for_a_worker_in_tokens(
    line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers place requests by it: messages count by the mean of what is computed, not of what is found."""

    def list_reported() -> list[object]:
        load: dict[str, Any] = line.prefill.report_load()
        found = [load[priority_class][what] for priority_class in CLASSES for what in ("partitions", "waiting_tokens")]
        return [*found, load["chars_per_token"]]

    text = "To be or not to be, that is the question. " * 20
    for count in (1, 2):
        line.send_requests(Request(id=f"r{count}", prompt=text, sampling=Sampling(max_tokens=1)))
        line.run_prefill(count)
    mean = line.prefill.load.mean_computed_tokens["interactive"].value
    num_tokens = line.prefill.load.mean_prompt_tokens["interactive"].value
    assert mean is not None
    assert num_tokens is not None
    assert num_tokens / 2 <= mean < 0.7 * num_tokens, "the second found the first one's blocks"
    topics = [line.pipeline.request_topic(priority_class) for priority_class in CLASSES]
    waiting = {(topics[0], 0): 2, (topics[0], 3): 1, (topics[1], 5): 4}
    monkeypatch.setattr(line.prefill.member, "count_waiting", lambda: waiting)
    speed = WorkerSpeed.parse(line.prefill.report_load()["speed"])
    assert speed is not None
    assert 0 < speed.idle_prompt_token_s < 1
    ratio = round(len(text) / num_tokens, 1)
    assert list_reported() == [[0, 3], round(3 * mean), [5], 4 * UNKNOWN_PROMPT_TOKENS, ratio]


def test_the_reported_load_does_not_grow_with_the_context(line: InProcessPipeline) -> None:
    """Workers expect as many tokens as recent answers had, and the default limit before the first answer."""

    def list_reported(worker: Worker, what: str) -> object:
        load = worker.report_load()["interactive"]
        assert isinstance(load, dict)
        return load[what]

    line.send_requests(ask_long("first", 20, NO_LIMIT))
    line.run_prefill(1)
    assert list_reported(line.prefill, "mean_output_tokens") == DEFAULT_MAX_TOKENS
    line.run_until_tokens("first", 5)
    task = line.decode.running["first"]
    assert list_reported(line.decode, "output_tokens") == DEFAULT_MAX_TOKENS - task.claim.num_tokens
    line.decode.load.mean_output_tokens["interactive"].add(40)
    assert list_reported(line.decode, "output_tokens") == 40 - task.claim.num_tokens
    line.run_until_tokens("first", 44)
    assert list_reported(line.decode, "output_tokens") == 1
    assert line.decode.load.mean_output_tokens["interactive"].value == 40


# Grammars.


@pytest.mark.proof
def test_answers_match_their_schemas_and_others_are_as_without_them(line: InProcessPipeline) -> None:
    plain, structured = make_requests(3, "plain", max_tokens=12), [
        ask(f"json-{seed}", grammar=BY_SCHEMA, seed=seed, temperature=1.0, max_tokens=160)
        for seed in range(8)
    ]  # fmt: skip
    results = answer(line, *plain, *structured)
    for name, expected in compute_answers(plain).items():
        assert results[name].token_ids == expected.token_ids
    compiled = GrammarCompiler(load_demo_model()).compile_grammar(
        BY_SCHEMA.model_copy(update={"engine": ENGINE_VERSION})
    )
    found = [results[one.id] for one in structured]
    for result in found:
        state = GrammarState(compiled, token_ids=result.token_ids)  # raises where a token is not allowed
        assert state.is_ended is (result.finish_reason == "stop")
        if result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), SCHEMA)
        else:
            assert (result.finish_reason, result.usage.completion_tokens) == ("length", 160)
    assert "stop" in {result.finish_reason for result in found}


def test_an_answer_that_ends_with_its_first_token_ends_in_prefill(line: InProcessPipeline) -> None:
    for request in (ask("one", grammar=GrammarSpec(kind="choice", source='["a", "b"]')), ask("short", max_tokens=1)):
        result = answer(line, request)[request.id]
        assert (result.error, len(result.token_ids), result.usage.completion_tokens) == (None, 1, 1)
        assert result.finish_reason == ("stop" if result.text in {"a", "b"} else "length")


SLOW_MASKS = make_schema_spec(
    {"type": "string", "allOf": [{"pattern": f"^(.*x.{{{count}}}y.*)*$"} for count in (7, 11, 13)], "maxLength": 200},
    "schema",
)
"""It compiles, and only the check finds out what its masks cost."""


def test_a_grammar_is_checked_whatever_its_producer_says(line: InProcessPipeline) -> None:
    refused = {
        "format": (GrammarSpec(kind="json_schema", source='{"type":"string","format":"color"}'), "unsupported_schema"),
        "regex": (GrammarSpec(kind="regex", source="("), "invalid_request"),
        "slow": (SLOW_MASKS, "invalid_request"),
    }
    work = [
        ask(f"{name}{engine[:1]}", grammar=grammar.model_copy(update={"engine": engine}))
        for name, (grammar, _) in refused.items()
        for engine in ("", ENGINE_VERSION)
    ]
    for name, result in answer(line, *work).items():
        assert result.error is not None
        expected = next(code for begins, (_, code) in refused.items() if name.startswith(begins))
        assert (result.error.code, result.finish_reason, result.token_ids) == (expected, "error", [])


def test_an_answer_of_another_version_of_the_engine_is_not_gone_on_with(
    line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.send_requests(ask("old", grammar=BY_SCHEMA))
    line.run_prefill(1)
    (job,) = line.bus.read_all(line.pipeline.job_topic("interactive"))
    assert job.value.count(b'"engine":"llguidance ') == 1

    def refuse(spec: GrammarSpec) -> None:
        raise GrammarFailed("another version")

    monkeypatch.setattr(line.decode.role.grammars, "compile_grammar", refuse)  # type: ignore[attr-defined]
    result = read_results(line, "old")["old"]
    assert result.error is not None
    assert (result.error.code, len(result.token_ids)) == ("grammar_failed", 1)
    compiler = GrammarCompiler(load_demo_model())
    with pytest.raises(GrammarFailed, match=r"llguidance 0\.1"):
        compiler.compile_grammar(GrammarSpec(kind="json_object", engine="llguidance 0.1"))
