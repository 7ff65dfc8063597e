"""Frameworks as their users call them, unchanged, against a gateway with the model that calls tools."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

import penstock
from penstock.local.processes import find_free_port
from sim.forked import ForkedStack
from tests.ingest.conftest import ENVIRONMENT

pytestmark = pytest.mark.server
TOOL_MODEL = Path(penstock.__file__).parent / "engine" / "demo" / "tool_model"
MODEL = str(TOOL_MODEL)
"""A model in a directory is served under its path."""


class Person(BaseModel):
    """A person of whom a text tells."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    city: str | None = Field(max_length=30)


SCHEMA = json.dumps(Person.model_json_schema())
PROMPT = f"Answer in JSON by this schema: {SCHEMA}\nMaria is 34 years old and lives in Lisbon."


@pytest.fixture(scope="module")
def tool_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the API of a pipeline with the tool model is."""
    environment = {**ENVIRONMENT, "PENSTOCK_ENGINE_MODEL": str(TOOL_MODEL)}
    directory = tmp_path_factory.mktemp("tools")
    with ForkedStack(directory, pipeline="tools", gateway=find_free_port(), environment=environment) as stack:
        stack.wait_until_ready(150)
        yield f"{stack.gateway_url}/v1"


def ask_openai_chat(url: str, answer_type: type[BaseModel]) -> Any:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        answer = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": PROMPT}], response_format=answer_type
        )
    return answer.choices[0].message.parsed


def ask_openai_responses(url: str, answer_type: type[BaseModel]) -> Any:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return client.responses.parse(model=MODEL, input=PROMPT, text_format=answer_type).output_parsed


def ask_instructor(url: str, answer_type: type[BaseModel]) -> Any:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=url, api_key="none") as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        return patched.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PROMPT}], response_model=answer_type
        )


def ask_pydantic_ai(url: str, answer_type: type[BaseModel]) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run_agent() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:  # its own is never closed
            model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(openai_client=client))
            return await pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(answer_type)).run(PROMPT)

    return asyncio.run(run_agent()).output


def ask_langchain(url: str, answer_type: type[BaseModel]) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none")
    return model.with_structured_output(answer_type, method="json_schema").invoke(PROMPT)


@pytest.mark.parametrize("ask", [ask_openai_chat, ask_openai_responses, ask_instructor, ask_pydantic_ai, ask_langchain])
def test_a_framework_gets_an_object_of_its_type(tool_url: str, ask: Callable[[str, type[BaseModel]], Any]) -> None:
    found = ask(tool_url, Person)
    assert isinstance(found, Person)
    assert Person.model_validate_json(found.model_dump_json()).model_dump() == found.model_dump()
