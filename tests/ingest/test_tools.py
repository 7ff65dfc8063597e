"""Tools and reasoning with a model that calls tools: whole, streamed, and resumed at any event on another gateway."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from penstock.local.stack import Stack
from sim.events import EventSource
from sim.waiting import wait_for
from sim.workload import TOOL_MODEL
from tests.draws import mark_some
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.ingest.batch_files import lines, read

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY},
}
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather of Lisbon and Porto?"}]
ASKED: dict[str, Any] = {"messages": TURNS, "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
ASKED_FLAT: dict[str, Any] = {
    "input": TURNS, "tools": [{"type": "function", **WEATHER["function"]}], "temperature": 0, "max_output_tokens": 80,
}  # fmt: skip
ASKED_OF_MESSAGES = ASKED | {"tools": [{"name": "get_weather", "input_schema": CITY}]}


def make_strict(parameters: dict[str, Any], name: str = "get_weather") -> dict[str, Any]:
    """Return a tool whose arguments follow their schema."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


NAME = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}, "required": ["name"]}
AGE = make_strict(NAME | {"additionalProperties": False}, "get_age")
NAMED_AGE = {"type": "function", "function": {"name": "get_age"}}
BOTH = {"get_weather", "get_age"}
CALLS = [("get_weather", {"city": "Lisbon"}), ("get_weather", {"city": "Porto"})]


@pytest.fixture(scope="module")
def urls(tool_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Two gateways before a pipeline that serves the tool model."""
    with GatewayProcess(tool_stack.addresses, tmp_path_factory.mktemp("gateway")) as other:
        yield tool_stack.gateway_url, other.url


@pytest.fixture(scope="module")
def sdk(urls: tuple[str, str]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, timeout=None) as client:
        yield client


@pytest.fixture(scope="module")
def model(sdk: Any) -> str:
    assert [found.id for found in sdk.models.list()] == [TOOL_MODEL.name]
    return TOOL_MODEL.name


def list_calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def list_written(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.proof
def test_calls_are_told_from_text_and_their_results_go_back(sdk: Any, model: str) -> None:
    whole = sdk.chat.completions.create(model=model, **ASKED).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert list_calls(whole.message) == CALLS
    with sdk.chat.completions.stream(model=model, **ASKED) as stream:
        streamed = stream.until_done().get_final_completion().choices[0]
    assert (streamed.finish_reason, list_written(streamed.message)) == ("tool_calls", list_written(whole.message))
    calls: Any = whole.message.tool_calls
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"weather": "red"}'} for call in calls]
    turns: Any = [*TURNS, whole.message.model_dump(exclude_none=True), *results]
    answer = sdk.chat.completions.create(model=model, **(ASKED | {"messages": turns})).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_no_call_is_whole_before_the_answer_ends(sdk: Any, model: str) -> None:
    """An agent that runs a call as soon as it is whole, and asks again after a broken stream, runs it once."""
    told: dict[int, str] = {}
    num_whole: list[int] = []
    for (choice,) in (chunk.choices for chunk in sdk.chat.completions.create(model=model, stream=True, **ASKED)):
        assert len(choice.delta.tool_calls or ()) < 2, "some frameworks read one"
        for call in choice.delta.tool_calls or ():
            told[call.index] = told.get(call.index, "") + call.function.arguments
        num_whole.append(sum(text.endswith("}") for text in told.values()))
        assert choice.finish_reason is None or not choice.delta.tool_calls, "some look for none there"
    assert num_whole == [0] * (len(num_whole) - 3) + [1, 2, 2], "three events of the end"
    assert [sorted(json.loads(text)) for text in told.values()] == [["city"]] * 2


def test_a_stream_that_is_resumed_at_any_event_has_the_same_calls(urls: tuple[str, str], model: str) -> None:
    """In each form by the id of an event, and a response by its number, while its log is in Redis."""
    thinking = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "thinking": {"type": "enabled"}}
    for form, more in (
        ("chat/completions", ASKED), ("messages", ASKED_OF_MESSAGES), ("messages", thinking | {"max_tokens": 40}),
        ("responses", ASKED_FLAT | {"reasoning": {"effort": "low"}}),
    ):  # fmt: skip
        first = EventSource(f"{urls[0]}/v1/{form}")
        whole = [(event.id, event.data) for event in first.connect(more | {"model": model, "stream": True})]
        assert len(whole) > 10 or form != "responses"
        location = first.answer_headers["location"]
        url, name = f"{urls[1]}{location}", location.rpartition("/")[2]
        for place, (position, data) in enumerate(whole[:-1]):
            readers = [EventSource(url, last_event_id=position)]
            if form == "responses":
                after = f"starting_after={json.loads(data)['sequence_number']}"
                readers.append(EventSource(f"{urls[1]}/v1/responses/{name}?stream=true&{after}"))
            for again in readers:
                assert [(event.id, event.data) for event in again.connect()] == whole[place + 1 :]
        over = EventSource(url, last_event_id=whole[-1][0])
        assert (list(over.connect()), over.status) == ([], 204)
        assert form != "messages" or first.answer_headers["request-id"] == first.answer_headers["x-request-id"]
    found = httpx.get(f"{urls[1]}/v1/responses/{name}", timeout=None).json()
    assert found == json.loads(whole[-1][1])["response"]
    assert found["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.proof
def test_reasoning_is_apart_from_the_answer(sdk: Any, model: str) -> None:
    asked: dict[str, Any] = ASKED | {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "tools": []}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    whole: Any = sdk.chat.completions.create(model=model, extra_body=extra, **asked).choices[0].message
    assert whole.reasoning_content
    assert "<think>" not in whole.reasoning_content + (whole.content or "")
    effort: Any = sdk.chat.completions.create(model=model, reasoning_effort="low", **asked).choices[0].message
    assert (effort.reasoning_content, effort.content) == (whole.reasoning_content, whole.content)
    chunks = sdk.chat.completions.create(model=model, stream=True, extra_body=extra, **asked)
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thoughts) == whole.reasoning_content


def test_an_answer_with_a_grammar_is_content_though_the_model_would_think(sdk: Any, model: str) -> None:
    """Where the template begins the answer with reasoning, the grammar's text follows at once."""
    asked: dict[str, Any] = {"messages": TURNS, "temperature": 0, "max_tokens": 40}
    extra = {"guided_choice": ["Lisbon", "Porto"], "chat_template_kwargs": {"enable_thinking": True}}
    message: Any = sdk.chat.completions.create(model=model, extra_body=extra, **asked).choices[0].message
    assert message.content in {"Lisbon", "Porto"}
    assert not getattr(message, "reasoning_content", None)


@pytest.mark.parametrize(
    ("given", "names"),
    mark_some([
        ({"tool_choice": "required"}, BOTH), ({"tool_choice": NAMED_AGE}, {"get_age"}),
        ({"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}, BOTH),
    ], pytest.mark.proof),
)  # fmt: skip
def test_a_model_that_has_to_call_does(sdk: Any, model: str, given: dict[str, Any], names: set[str]) -> None:
    for content in ("Say hello.", "Repeat: red, blue."):
        asked = ASKED | given | {"messages": [{"role": "user", "content": content}], "max_tokens": 200}
        asked["tools"] = [make_strict(CITY), AGE]
        whole = sdk.chat.completions.create(model=model, **make_extra(asked)).choices[0]
        calls = list_calls(whole.message)
        assert (whole.finish_reason, bool(calls)) == ("tool_calls", True)
        assert {name for name, _ in calls} <= names
        assert all(arguments["name"] in {"Ada", "Bo"} for name, arguments in calls if name == "get_age")
        with sdk.chat.completions.stream(model=model, **make_extra(asked)) as stream:
            streamed = stream.until_done().get_final_completion().choices[0]
        assert list_written(streamed.message) == list_written(whole.message)
        assert streamed.finish_reason == "tool_calls"


LOOSE = NAME | {"additionalProperties": False, "not": {"required": ["years"]}}


@pytest.mark.proof
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_tool_that_must_be_called_is_held_to_what_can_be_enforced_of_its_schema(
    urls: tuple[str, str], model: str, path: str
) -> None:
    function = {"name": "get_age", "parameters": LOOSE}
    given: dict[str, dict[str, Any]] = {
        "chat/completions": {"tools": [{"type": "function", "function": function}], "tool_choice": NAMED_AGE},
        "responses": {"tools": [{"type": "function", **function}], "tool_choice": "required"},
        "messages": {"tools": [{"name": "get_age", "input_schema": LOOSE}], "tool_choice": {"type": "any"}},
    }
    place = {"chat/completions": "function.parameters", "responses": "parameters", "messages": "input_schema"}[path]
    asked = (ASKED_FLAT if path == "responses" else ASKED) | given[path] | {"model": model}
    answers = [
        httpx.post(f"{url}/v1/{path}", json=asked, headers={"Idempotency-Key": path}, timeout=None) for url in urls
    ]
    for answer in answers:
        assert (answer.status_code, answer.headers["penstock-ignored"]) == (200, f"tools.*.{place}.not")
        assert find_arguments(answer.json())["name"] in {"Ada", "Bo"}
    assert answers[0].json() == answers[1].json()
    free = asked | {"tool_choice": {"type": "auto"} if path == "messages" else "auto"}
    assert "penstock-ignored" not in httpx.post(f"{urls[0]}/v1/{path}", json=free, timeout=None).headers


def find_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first call in the body of an answer of any of the three APIs."""
    if "choices" in body:
        arguments = body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    elif "output" in body:
        arguments = next(item["arguments"] for item in body["output"] if item["type"] == "function_call")
    else:
        return next(block["input"] for block in body["content"] if block["type"] == "tool_use")
    found: dict[str, Any] = json.loads(arguments)
    return found


def make_extra(asked: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the SDK, which does not know all fields."""
    own = {"chat_template_kwargs", "tool_choice", "seed"} & asked.keys()
    return {name: value for name, value in asked.items() if name not in own} | {
        "extra_body": {name: asked[name] for name in own}
    }


NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 50, "maxLength": 60}, "red": {"type": "boolean"}},
    "required": ["text", "red"],
    "additionalProperties": False,
}
Told = tuple[str, str, str]
"""Name and arguments of an answer's only call, and why the answer ended."""


def ask_long_call(sdk: Any, model: str, limit: int, *, is_streamed: bool) -> Told:
    """Have the model call a tool with long arguments; stop strings within them do nothing."""
    asked = ASKED | {"tools": [make_strict(NOTE, "note")], "temperature": 1, "seed": 3, "max_tokens": limit}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "note"}}, "stop": ["e", "t", ","]}
    answer = sdk.chat.completions.create(model=model, stream=is_streamed, **make_extra(asked))
    name = arguments = reason = ""
    for (choice,) in (chunk.choices for chunk in (answer if is_streamed else [answer])):
        reason = choice.finish_reason or reason
        for call in (choice.delta if is_streamed else choice.message).tool_calls or ():
            assert not is_streamed or call.index == 0
            name, arguments = name + (call.function.name or ""), arguments + call.function.arguments
    return name, arguments, reason


def test_a_long_call_that_is_cut_anywhere_says_the_same_streamed_and_whole(sdk: Any, model: str) -> None:
    seen = set[str]()
    limit, told = 0, ("", "", "")
    while told[2] != "tool_calls":
        limit += 3
        before, told = told, ask_long_call(sdk, model, limit, is_streamed=True)
        assert told == ask_long_call(sdk, model, limit, is_streamed=False)
        assert told[2] in ("length", "tool_calls")
        assert told[0] in ({"note"} if before[0] else {"", "note"}), "what was a call stays one"
        assert told[1].startswith(before[1])
        seen.add(told[1])
    jsonschema.validate(json.loads(told[1]), NOTE)
    assert len(seen) > 2


def test_a_model_that_may_call_once_does_not_call_twice(sdk: Any, model: str) -> None:
    whole = sdk.chat.completions.create(model=model, parallel_tool_calls=False, **ASKED).choices[0]
    assert (whole.finish_reason, list_calls(whole.message)) == ("tool_calls", CALLS[:1])


def allow_tools(mode: str, *names: str) -> dict[str, Any]:
    """Return the `tool_choice` of a chat that allows only these tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"mark": {"enum": ["<tool_call>", "red"]}, "years": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["mark", "years"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("choice", "names", "must_call"),
    [
        (None, BOTH, False), ("auto", BOTH, False), ("none", set(), False),
        pytest.param("required", BOTH, True, marks=pytest.mark.proof),
        (NAMED_AGE, {"get_age"}, True), (allow_tools("auto", "get_age"), {"get_age"}, False),
        (allow_tools("required", "get_age"), {"get_age"}, True),
    ],
)  # fmt: skip
def test_an_answer_calls_or_else_follows_its_schema(
    sdk: Any, model: str, choice: Any, names: set[str], must_call: bool
) -> None:
    """With several calls or one, with reasoning before and without: the answer has the calls, or else the schema."""
    options = itertools.product(
        [{}, {"parallel_tool_calls": False}],
        [{}, {"chat_template_kwargs": {"enable_thinking": True}}],
        ["Say hello.", "What is the weather of Lisbon and Porto?"],
    )
    for number, (parallel, thinking, question) in enumerate(options):
        turns = [{"role": "user", "content": question}]
        asked = ASKED | {"messages": turns, "tools": [WEATHER, AGE], "max_tokens": 500}
        asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}
        asked |= {"temperature": 1, "seed": number, **parallel, **thinking}
        asked |= {} if choice is None else {"tool_choice": choice}
        (answer,) = sdk.chat.completions.create(model=model, **make_extra(asked)).choices
        content, calls = answer.message.content or "", list_written(answer.message)
        assert {name for name, _ in calls} <= names
        if answer.finish_reason == "length":
            continue
        assert all(json.loads(arguments)["name"] in {"Ada", "Bo"} for name, arguments in calls if name == "get_age")
        assert len(calls) <= 1 or (not parallel and choice != NAMED_AGE)
        assert calls or not must_call
        if calls:
            assert not content.strip()
        else:
            jsonschema.validate(json.loads(content), ANSWER)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": "required", "tools": []}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, None),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "tools": [WEATHER, WEATHER]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"), ({"guided_regex": "a+", "tool_choice": "required"}, "guided_regex"),
        ({"tool_choice": "always"}, "tool_choice"), ({"tool_choice": allow_tools("auto", "other")}, None),
        ({"tool_choice": allow_tools("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [make_strict({"type": "object", "not": {}})]}, "tools"),
        ({"chat_template_kwargs": {"no_such_variable": 1}}, None), ({"chat_template_kwargs": {"messages": []}}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(sdk: Any, model: str, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=model, extra_body=given, **ASKED)
    assert param is None or refused.value.param == param


def test_a_model_without_a_response_template_is_offered_no_tools(scripted: ScriptedPipeline) -> None:
    with scripted.open_gateway() as gateway, gateway.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": scripted.model, **ASKED})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert scripted.read_requests() == []


def list_called(response: Any) -> list[tuple[str, Any]]:
    return [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]


@pytest.mark.proof
def test_a_response_calls_and_goes_on_with_the_results(sdk: Any, model: str) -> None:
    """With the whole history sent again, or with `previous_response_id`: the prompts are the same."""
    first = sdk.responses.create(model=model, **ASKED_FLAT)
    assert (first.status, list_called(first)) == ("completed", CALLS)
    assert [tool.model_dump(exclude_none=True) for tool in first.tools] == ASKED_FLAT["tools"]
    told = {"type": "function_call_output", "output": '{"weather": "red"}'}
    results: Any = [told | {"call_id": item.call_id} for item in first.output if item.type == "function_call"]
    history: Any = [*TURNS, *(item.model_dump(exclude_none=True) for item in first.output), *results]
    sent = sdk.responses.create(model=model, **(ASKED_FLAT | {"input": history, "store": False}))
    kept = sdk.responses.create(model=model, previous_response_id=first.id, **(ASKED_FLAT | {"input": results}))
    assert sent.output_text or list_called(sent)
    used = [(one.usage.input_tokens, one.usage.output_tokens) for one in (kept, sent)]
    assert used[0] == used[1], "how much of the prompt was cached may differ"
    assert describe_output(kept) == describe_output(sent)
    asked: Any = {"input": results, "tools": ASKED_FLAT["tools"], "previous_response_id": first.id}
    counted = sdk.responses.input_tokens.count(model=model, **asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", kept.usage.input_tokens)
    calls: Any = [
        {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        for item in first.output
        if item.type == "function_call"
    ]
    turns = [
        *TURNS, {"role": "assistant", "content": first.output_text, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one["call_id"], "content": one["output"]} for one in results),
    ]  # fmt: skip
    chat = sdk.chat.completions.create(model=model, **(ASKED | {"messages": turns}))
    assert chat.usage.prompt_tokens == kept.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="No tool call found for function call output") as refused:
        sdk.responses.create(model=model, **(ASKED_FLAT | {"input": results}))
    assert refused.value.param == "input"


def describe_output(response: Any) -> list[Any]:
    """Return the items of a response without their ids."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


def test_the_reasoning_of_a_response_is_an_item_of_its_own(sdk: Any, model: str) -> None:
    asked: dict[str, Any] = {"input": "What is 7 plus 5?", "temperature": 0, "max_output_tokens": 80, "model": model}
    given = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    whole = sdk.responses.create(**asked, **given)
    thought, *rest = whole.output
    assert (thought.type, thought.summary) == ("reasoning", [])
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= whole.usage.output_tokens
    turns = [{"role": "user", "content": asked["input"]}]
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    chat = sdk.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=80, extra_body=extra)
    message = chat.choices[0].message
    assert (thought.content[0].text, whole.output_text) == (message.reasoning_content, message.content or "")
    with sdk.responses.stream(**asked, **given) as stream:
        deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    following = sdk.responses.create(**(asked | {"input": "And 1 more?"}), previous_response_id=whole.id)
    assert following.status in ("completed", "incomplete")
    assert rest or whole.status == "incomplete"


def test_lines_of_a_batch_are_answered_as_requests_are(sdk: Any, model: str) -> None:
    asked = ASKED_FLAT | {"model": model}
    schema = {"text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}}
    bodies = [
        asked, asked | {"tool_choice": "none"}, asked | {"tool_choice": "required", "parallel_tool_calls": False},
        asked | schema, asked | {"ignore_eos": True, "tool_choice": "required"},
    ]  # fmt: skip
    bodies.insert(
        4, asked | {"tool_choice": "required", "tools": [{"type": "function", "name": "f", "parameters": LOOSE}]}
    )
    endpoint: Any = "/v1/responses"
    rows = [{"custom_id": str(n), "method": "POST", "url": endpoint, "body": body} for n, body in enumerate(bodies)]
    file = sdk.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    made = sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    wait_for(lambda: sdk.batches.retrieve(made.id).status == "completed", "the batch is done")
    ended = sdk.batches.retrieve(made.id)
    found = {one["custom_id"]: one["response"]["body"] for one in read(sdk.files.content(ended.output_file_id).content)}
    assert found.keys() == {"0", "1", "2", "3", "4"}
    for number, body in found.items():
        told = openai.types.responses.Response.model_validate(body)
        assert describe_output(told) == describe_output(sdk.responses.create(**bodies[int(number)]))
    (refused,) = read(sdk.files.content(ended.error_file_id).content)
    assert refused["response"]["status_code"] == 400
    assert "ignore_eos" in refused["response"]["body"]["error"]["message"]
