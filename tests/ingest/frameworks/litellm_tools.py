# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM sends tools and the type of the answer, in OpenAI's form and over its bridge to Anthropic's."""

import asyncio
import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]


class Report(BaseModel):
    """What is answered at last."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


QUESTION = "What is the weather of Lisbon and Porto?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": SCHEMA, "strict": True}
SCHEMA["additionalProperties"] = False
OPTIONS = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0}

turns: list[Any] = [{"role": "user", "content": QUESTION}]
cities: list[str] = []
while True:
    message = (
        litellm.completion(
            messages=turns, tools=[{"type": "function", "function": FUNCTION}], response_format=Report, **OPTIONS
        )
        .choices[0]
        .message
    )
    turns.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        cities.append(json.loads(call.function.arguments)["city"])
        turns.append({"role": "tool", "tool_call_id": call.id, "content": '{"weather": "red"}'})
Report.model_validate_json(message.content)
assert cities

streamed = litellm.completion(
    messages=turns[:1],
    tools=[{"type": "function", "function": FUNCTION}],
    response_format=Report,
    stream=True,
    **OPTIONS,
)
chunks = list(streamed)
rebuilt = litellm.stream_chunk_builder(chunks, messages=turns[:1])
calls = [call.function for call in rebuilt.choices[0].message.tool_calls]
assert [json.loads(call.arguments)["city"] for call in calls] == cities[: len(calls)], calls


async def ask_as_anthropic() -> Any:
    """Return the answer to a request in Anthropic's form."""
    tool = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": SCHEMA}
    return await litellm.anthropic.messages.acreate(
        messages=[{"role": "user", "content": QUESTION}], tools=[tool], max_tokens=80, **OPTIONS
    )


answer = asyncio.run(ask_as_anthropic())
used = [block for block in answer["content"] if block["type"] == "tool_use"]
assert [block["input"]["city"] for block in used] == ["Lisbon", "Porto"], answer
