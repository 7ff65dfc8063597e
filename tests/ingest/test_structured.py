"""Structured output through the gateway: the official SDK, and refusals before anything is published."""

import json
from typing import Any

from tests.gateways import ScriptedPipeline

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["king", "priest"]}, "years": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "years"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "man", "schema": SCHEMA, "strict": True}}
TURNS: Any = [{"role": "user", "content": "Who said so?"}]
ASKED: Any = {"model": "demo", "messages": TURNS, "temperature": 1.0, "seed": 3, "max_tokens": 300}


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


def test_an_object_a_choice_and_a_response(sdk: Any) -> None:
    cut = sdk.chat.completions.create(response_format={"type": "json_object"}, **(ASKED | {"max_tokens": 20}))
    assert (cut.choices[0].message.content or "").startswith("{")
    choice = sdk.completions.create(model="demo", prompt="Who?", extra_body={"guided_choice": ["Abel", "Cain"]})
    assert (choice.choices[0].text in {"Abel", "Cain"}, choice.choices[0].finish_reason) == (True, "stop")
    text: Any = {"format": {"type": "json_schema", "name": "man", "schema": SCHEMA}}
    answer = sdk.responses.create(model="demo", input="Who?", text=text, max_output_tokens=300)
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["kind"] in {"king", "priest"}
    assert answer.text.format.type == "json_schema"


RESPONSE_FORMAT = FORMAT["json_schema"] | {"type": "json_schema"}


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
