"""The official Python SDK, as it comes, against a running gateway with the whole pipeline behind it."""

import json
import uuid
from typing import Any

import openai
import pytest

from penstock.local.stack import Stack
from penstock.messages import Request, Sampling
from sim.waiting import wait_for
from sim.workload import compute_answers, load_demo_model
from tests.draws import mark_some
from tests.gateways import ScriptedPipeline
from tests.ingest.batch_files import result_ids

MODEL = "demo"
TURNS = [{"role": "user", "content": "In the beginning God created"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.mark.parametrize(
    "sampling",
    mark_some([{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}], pytest.mark.proof),
    ids=["greedy", "drawn"],
)
def test_completions_are_what_the_model_says_alone(sdk: Any, sampling: dict[str, Any]) -> None:
    prompt = load_demo_model().tokenizer("In the beginning")["input_ids"]
    wanted = Sampling(max_tokens=24, ignore_eos=True, **sampling)
    expected = compute_answers([Request(id="alone", token_ids=prompt, sampling=wanted)])["alone"].text
    asked = {"model": MODEL, "prompt": "In the beginning", "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole = sdk.completions.create(**asked | sampling)
    pieces = [piece.choices[0] for piece in sdk.completions.create(**asked | sampling, stream=True)]
    assert whole.choices[0].text == "".join(piece.text for piece in pieces) == expected
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)


@pytest.mark.proof
def test_a_chat_streamed_and_not_says_the_same(sdk: Any) -> None:
    whole = sdk.chat.completions.create(messages=TURNS, **GREEDY)
    told = sdk.chat.completions.create(messages=TURNS, stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, end, last = told
    first, message = chunks[0], whole.choices[0].message
    assert message.role == first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in (*chunks, end)) == message.content
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (last.choices, first.usage) == ([], None)
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert {chunk.id for chunk in (*chunks, end, last)} == {first.id}
    assert whole.id.startswith("chatcmpl-")


@pytest.mark.proof
def test_cached_tokens_are_told(sdk: Any) -> None:
    asked = {"model": MODEL, "prompt": "And the king said unto his people " * 12, "max_tokens": 2}
    usage = [sdk.completions.create(**asked).usage for _ in range(2)][1]
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.proof
def test_n_choices_draw_by_seeds_of_their_own(sdk: Any) -> None:
    asked = {"model": MODEL, "messages": TURNS, "seed": 5, "max_tokens": 12, "temperature": 1.0}
    three = sdk.chat.completions.create(n=3, **asked)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == sdk.chat.completions.create(**asked).choices[0].message.content
    assert three.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in sdk.chat.completions.create(n=3, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.proof
def test_prompts_in_a_list_are_answered_one_by_one(sdk: Any) -> None:
    texts = [sdk.completions.create(prompt=one, **GREEDY).choices[0].text for one in ("In the", "And he")]
    together = sdk.completions.create(prompt=["In the", "And he"], **GREEDY)
    assert [choice.text for choice in together.choices] == texts
    tokens = load_demo_model().tokenizer("In the")["input_ids"]
    assert sdk.completions.create(prompt=tokens, **GREEDY).choices[0].text == texts[0]


@pytest.mark.proof
def test_stop_ends_the_answer_before_it(sdk: Any) -> None:
    text = sdk.completions.create(prompt="In the beginning", **GREEDY).choices[0].text
    word = text.split()[2]
    cut = sdk.completions.create(prompt="In the beginning", stop=[word, "never said"], **GREEDY).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(word)], "stop")


@pytest.mark.proof
def test_logprobs_tell_tokens_texts_and_bytes(sdk: Any) -> None:
    asked = {"messages": TURNS, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = sdk.chat.completions.create(**asked).choices[0]
    entries = whole.logprobs.content
    assert len(entries) == 24
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries), "greedy takes the likeliest"
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    chunks = [chunk.choices[0].logprobs for chunk in sdk.chat.completions.create(**asked, stream=True)]
    assert [one for told in chunks if told is not None for one in told.content or ()] == entries
    plain = sdk.completions.create(prompt="In the beginning", logprobs=2, **GREEDY).choices[0]
    places = zip(plain.logprobs.tokens, plain.logprobs.text_offset, strict=True)
    assert [plain.text.startswith(token, offset) for token, offset in places] == [True] * 24


@pytest.mark.proof
def test_responses_streamed_and_not_say_the_same(sdk: Any) -> None:
    asked = {
        "model": MODEL, "input": "In the beginning", "instructions": "Go on.", "max_output_tokens": 12,
        "temperature": 0, "metadata": {"for": "a test"},
    }  # fmt: skip
    whole = sdk.responses.create(**asked)
    assert (whole.status, whole.metadata) == ("incomplete", {"for": "a test"})
    assert (whole.incomplete_details.reason, whole.usage.output_tokens) == ("max_output_tokens", 12)
    events = list(sdk.responses.create(stream=True, **asked))
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "In the beginning"}]}]
    assert sdk.responses.create(**(asked | {"input": turns})).output_text == whole.output_text


@pytest.mark.proof
def test_a_response_in_the_background_is_fetched_and_gone_on_from(sdk: Any) -> None:
    asked = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    posted = sdk.responses.create(input="In the beginning", background=True, **asked)
    assert posted.status in ("queued", "in_progress", "incomplete")
    wait_for(lambda: sdk.responses.retrieve(posted.id).status == "incomplete", "it has ended")
    first = sdk.responses.retrieve(posted.id)
    assert (first.background, len(first.output)) == (True, 1)
    events = list(sdk.responses.retrieve(posted.id, stream=True))
    assert events[-1].type == "response.incomplete"
    assert list(sdk.responses.retrieve(posted.id, stream=True, starting_after=events[5].sequence_number)) == events[6:]
    (item,) = sdk.responses.input_items.list(posted.id)
    assert [(part.type, part.text) for part in item.content] == [("input_text", "In the beginning")]
    assert sdk.responses.cancel(posted.id).status == "incomplete", "it had ended"
    second = sdk.responses.create(input="Go on.", previous_response_id=first.id, **asked)
    said = [("user", "In the beginning"), ("assistant", first.output_text), ("user", "Go on.")]
    turns = [{"role": role, "content": content} for role, content in said]
    assert second.output_text == sdk.responses.create(input=turns, **asked).output_text
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="Previous response"):
        sdk.responses.create(input="Go on.", previous_response_id=first.id, **asked)


@pytest.mark.proof
def test_models_are_listed(sdk: Any) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    found = sdk.models.retrieve(MODEL).to_dict()
    assert (found["owned_by"], found["max_model_len"]) == ("penstock", load_demo_model().context_length)
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nobody/has-it")


LONG = {"model": MODEL, "prompt": "x", "max_tokens": 10**6}
SOON = {"x-penstock-deadline-s": "soon"}


@pytest.mark.parametrize(
    ("asked", "error", "code", "param", "message"),
    mark_some([
        (GREEDY | {"prompt": "x", "model": "gpt-none"}, openai.NotFoundError, "model_not_found", "model", "gpt-none"),
        (LONG, openai.BadRequestError, "context_length_exceeded", "prompt",
         "This model's maximum context length is 1024 tokens. However, you requested 1000001 tokens"),
        (LONG | {"stream": True}, openai.APIError, "context_length_exceeded", "prompt", ""),  # the stream had begun
        (GREEDY | {"prompt": "x", "extra_headers": SOON}, openai.BadRequestError, None, *SOON, ""),
    ], pytest.mark.proof),
)  # fmt: skip
def test_errors_are_the_sdks_own(
    sdk: Any, asked: dict[str, Any], error: type[openai.APIError], code: str | None, param: str, message: str
) -> None:
    with pytest.raises(error) as raised:
        list(sdk.completions.create(**asked))
    assert (code in (None, raised.value.code), raised.value.param, message in str(raised.value)) == (True, param, True)


@pytest.mark.proof
def test_what_came_too_late_is_not_asked_again(line: Stack, sdk: Any) -> None:
    """Nobody wants it any more, and it would come too late again."""
    before = len(result_ids(line, "cmpl-"))
    with pytest.raises(openai.InternalServerError) as late:
        sdk.with_options(max_retries=2).completions.create(
            model="demo", prompt="And the king", max_tokens=900,
            extra_body={"ignore_eos": True}, extra_headers={"x-penstock-deadline-s": "0.05"},
        )  # fmt: skip
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    wait_for(lambda: len(result_ids(line, "cmpl-")) > before, "its result")
    assert len(result_ids(line, "cmpl-")) == before + 1


@pytest.mark.proof
def test_a_post_after_a_timeout_joins_the_request(sdk: Any) -> None:
    asked = {
        "model": MODEL, "prompt": "And it came to pass", "max_tokens": 200, "extra_body": {"ignore_eos": True},
        "extra_headers": {"Idempotency-Key": str(uuid.uuid4())},
    }  # fmt: skip
    with pytest.raises(openai.APITimeoutError):
        sdk.completions.create(**asked, timeout=0.01)
    first, again = (sdk.completions.create(**asked) for _ in range(2))
    assert first == again
    streamed = sdk.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == first.choices[0].text
    with pytest.raises(openai.ConflictError) as other:
        sdk.completions.create(**(asked | {"prompt": "And"}))
    assert other.value.code == "idempotency_conflict"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["king", "priest"]}, "years": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "years"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "man", "schema": SCHEMA, "strict": True}}
ASKED: Any = {"model": MODEL, "messages": TURNS, "temperature": 1.0, "seed": 3, "max_tokens": 300}


@pytest.mark.proof
def test_a_chat_follows_its_schema_streamed_and_not(sdk: Any) -> None:
    whole = sdk.chat.completions.create(response_format=FORMAT, n=2, **ASKED)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content or "")
        assert found["kind"] in {"king", "priest"}
        assert 0 <= found["years"] <= 99
    chunks = list(sdk.chat.completions.create(response_format=FORMAT, stream=True, **ASKED))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


@pytest.mark.proof
def test_an_object_a_choice_and_a_response(sdk: Any) -> None:
    cut = sdk.chat.completions.create(response_format={"type": "json_object"}, **(ASKED | {"max_tokens": 20}))
    assert (cut.choices[0].message.content or "").startswith("{")
    choice = sdk.completions.create(model=MODEL, prompt="Who?", extra_body={"guided_choice": ["Abel", "Cain"]})
    assert (choice.choices[0].text in {"Abel", "Cain"}, choice.choices[0].finish_reason) == (True, "stop")
    text: Any = {"format": {"type": "json_schema", "name": "man", "schema": SCHEMA}}
    answer = sdk.responses.create(model=MODEL, input="Who?", text=text, max_output_tokens=300)
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["kind"] in {"king", "priest"}
    assert answer.text.format.type == "json_schema"


RESPONSE_FORMAT = FORMAT["json_schema"] | {"type": "json_schema"}


@pytest.mark.proof
def test_a_schema_that_cannot_be_enforced_is_refused_before_publishing(scripted: ScriptedPipeline) -> None:
    cases = (
        ("chat/completions", {"messages": TURNS, "response_format": FORMAT}, "response_format"),
        ("responses", {"input": "x", "text": {"format": RESPONSE_FORMAT}}, "text.format"),
        ("completions", {"prompt": "x", "guided_json": SCHEMA}, "guided_json"),
    )
    with scripted.open_gateway() as gateway, gateway.client() as http:
        for path, given, param in cases:
            body = json.dumps({"model": scripted.model, **given})
            body = body.replace('"type": "integer"', '"type": "string", "format": "color"')
            answer = http.post(f"/v1/{path}", content=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_schema", param)
            assert "format" in error["message"]
    assert scripted.read_requests() == []
