"""Frameworks as their users call them, unchanged, against a gateway with the model that calls tools."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from penstock.errors import DependencyMissing
from penstock.local.stack import Stack
from sim.workload import TOOL_MODEL

MODEL = str(TOOL_MODEL)
"""A model in a directory is served under its path."""


class Person(BaseModel):
    """A person of whom a text tells. Without other properties an answer ends before any limit."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    city: str | None = Field(max_length=30)


SCHEMA = json.dumps(Person.model_json_schema())
PROMPT = f"Answer in JSON by this schema: {SCHEMA}\nMaria is 34 years old and lives in Lisbon."


@pytest.fixture
def tool_url(tool_stack: Stack) -> str:
    """Where the API of a pipeline with the tool model is."""
    return f"{tool_stack.gateway_url}/v1"


def ask_openai_chat(url: str, answer_type: type[BaseModel]) -> Any:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        answer = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": PROMPT}], response_format=answer_type, temperature=0
        )
    return answer.choices[0].message.parsed


def ask_openai_responses(url: str, answer_type: type[BaseModel]) -> Any:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return client.responses.parse(model=MODEL, input=PROMPT, text_format=answer_type, temperature=0).output_parsed


def ask_pydantic_ai(url: str, answer_type: type[BaseModel]) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run_agent() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:  # its own is never closed
            model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(
                model, output_type=pydantic_ai.NativeOutput(answer_type), model_settings={"temperature": 0}
            )
            return await agent.run(PROMPT)

    return asyncio.run(run_agent()).output


def ask_langchain(url: str, answer_type: type[BaseModel]) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0)
    return model.with_structured_output(answer_type, method="json_schema").invoke(PROMPT)


@pytest.mark.parametrize("ask", [ask_openai_chat, ask_openai_responses, ask_pydantic_ai, ask_langchain])
def test_a_framework_gets_an_object_of_its_type(tool_url: str, ask: Callable[[str, type[BaseModel]], Any]) -> None:
    found = ask(tool_url, Person)
    assert isinstance(found, Person)
    assert Person.model_validate_json(found.model_dump_json()).model_dump() == found.model_dump()


QUESTION = "What is the weather of Lisbon and Porto?"
PLACES = ["Lisbon", "Porto"]


class Weather:
    """A tool that remembers for which cities it was called."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the weather of a city."""
        self.cities.append(city)
        return json.dumps({"weather": "red"})


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY},
}


def call_openai(url: str, weather: Weather) -> str:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            made = client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], temperature=0)
            message = made.choices[0].message
            turns.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                assert call.type == "function"
                result = weather.get_weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "content": result})


def call_openai_stream(url: str, weather: Weather) -> str:
    """The SDK's own reader of a stream puts the calls together."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            with client.chat.completions.stream(model=MODEL, messages=turns, tools=[WEATHER], temperature=0) as stream:
                done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
                message = stream.get_final_completion().choices[0].message
            turns.append(message)
            assert [event.arguments for event in done] == [one.function.arguments for one in message.tool_calls or ()]
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = weather.get_weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "content": result})


def call_openai_responses(url: str, weather: Weather) -> str:
    """The SDK's own reader of a stream puts the items together, and their results follow on the response."""
    tool: Any = {"type": "function", **WEATHER["function"]}
    given: Any = QUESTION
    previous: str | None = None
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            with client.responses.stream(
                model=MODEL, input=given, tools=[tool], temperature=0, previous_response_id=previous
            ) as stream:
                stream.until_done()
                made = stream.get_final_response()
            calls = [item for item in made.output if item.type == "function_call"]
            if not calls:
                return made.output_text
            given, previous = answer_calls(calls, weather), made.id


def answer_calls(calls: list[Any], weather: Weather) -> list[dict[str, Any]]:
    """Return the input of a response that goes on with the results of calls."""
    results = [weather.get_weather(**json.loads(call.arguments)) for call in calls]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, results, strict=True)
    ]


def call_langchain_responses(url: str, weather: Weather) -> str:
    return call_langchain(url, weather, use_responses_api=True)


def call_pydantic_ai_responses(url: str, weather: Weather) -> str:
    return call_pydantic_ai(url, weather, "OpenAIResponsesModel")


def call_langchain(url: str, weather: Weather, **options: Any) -> str:
    langchain = pytest.importorskip("langchain_openai")
    tools, messages = pytest.importorskip("langchain_core.tools"), pytest.importorskip("langchain_core.messages")
    tool = tools.tool(weather.get_weather)
    chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, **options)
    model = chat.bind_tools([tool])
    turns = [messages.HumanMessage(QUESTION)]
    while (answer := model.invoke(turns)).tool_calls:
        turns += [answer, *(tool.invoke(call) for call in answer.tool_calls)]
    return str(answer.content)


def call_langchain_stream(url: str, weather: Weather) -> str:
    langchain = pytest.importorskip("langchain_openai")
    tools, messages = pytest.importorskip("langchain_core.tools"), pytest.importorskip("langchain_core.messages")
    tool = tools.tool(weather.get_weather)
    model = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0).bind_tools([tool])
    turns = [messages.HumanMessage(QUESTION)]
    while True:
        first, *rest = model.stream(turns)
        answer = sum(rest, first)
        if not answer.tool_calls:
            return str(answer.content)
        turns += [answer, *(tool.invoke(call) for call in answer.tool_calls)]


def call_pydantic_ai(url: str, weather: Weather, kind: str = "OpenAIChatModel") -> str:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run_agent() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:  # its own is never closed
            model = getattr(models, kind)(MODEL, provider=providers.OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, tools=[weather.get_weather], model_settings={"temperature": 0})
            return (await agent.run(QUESTION)).output

    return str(asyncio.run(run_agent()))


@pytest.mark.parametrize(
    "call",
    [
        call_openai, call_openai_stream, call_openai_responses, call_langchain, call_langchain_stream,
        call_langchain_responses, call_pydantic_ai, call_pydantic_ai_responses,
    ],
)  # fmt: skip
def test_a_framework_calls_tools_and_gets_an_answer_from_their_results(
    tool_url: str, call: Callable[[str, Weather], str]
) -> None:
    weather = Weather()
    answer = call(tool_url, weather)
    assert sorted(weather.cities) == PLACES  # some call at once
    assert answer


class Report(BaseModel):
    """What is answered at last."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


class City(BaseModel):
    """Get the weather of a city."""

    city: str = Field(max_length=20)


def report_openai_chat(url: str, weather: Weather) -> Any:
    """The SDK sends strict tools and the schema, and parses both."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = openai.pydantic_function_tool(City, name="get_weather", description=City.__doc__)
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            message = client.chat.completions.parse(
                model=MODEL, messages=turns, tools=[tool], response_format=Report, temperature=0
            ).choices[0].message  # fmt: skip
            turns.append(message)
            if not message.tool_calls:
                return message.parsed
            for call in message.tool_calls:
                city: Any = call.function.parsed_arguments
                turns.append({"role": "tool", "tool_call_id": call.id, "content": weather.get_weather(city.city)})


def report_openai_chat_stream(url: str, weather: Weather) -> Any:
    """The SDK's reader of a stream puts arguments together from their pieces, and parses them as they come."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = openai.pydantic_function_tool(City, name="get_weather", description=City.__doc__)
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            with client.chat.completions.stream(
                model=MODEL, messages=turns, tools=[tool], response_format=Report, temperature=0
            ) as stream:
                deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
                message = stream.get_final_completion().choices[0].message
            turns.append(message)
            if not message.tool_calls:
                return message.parsed
            assert len(deltas) > len(message.tool_calls), "they come in pieces"
            for call in message.tool_calls:
                city: Any = call.function.parsed_arguments
                turns.append({"role": "tool", "tool_call_id": call.id, "content": weather.get_weather(city.city)})


def report_openai_responses(url: str, weather: Weather) -> Any:
    given: Any = QUESTION
    previous: str | None = None
    function: Any = openai.pydantic_function_tool(City, name="get_weather", description=City.__doc__)["function"]
    tool: Any = {"type": "function", **function}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            made = client.responses.parse(
                model=MODEL, input=given, tools=[tool], text_format=Report, temperature=0,
                previous_response_id=previous,
            )  # fmt: skip
            calls = [item for item in made.output if item.type == "function_call"]
            if not calls:
                return made.output_parsed
            given, previous = answer_calls(calls, weather), made.id


def report_langchain(url: str, weather: Weather, **options: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    tools, messages = pytest.importorskip("langchain_core.tools"), pytest.importorskip("langchain_core.messages")
    tool = tools.tool(weather.get_weather)
    chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, **options)
    model = chat.bind_tools([tool], response_format=Report, strict=True)
    turns = [messages.HumanMessage(QUESTION)]
    while (answer := model.invoke(turns)).tool_calls:
        turns += [answer, *(tool.invoke(call) for call in answer.tool_calls)]
    return answer.additional_kwargs["parsed"]


def report_langchain_responses(url: str, weather: Weather) -> Any:
    return report_langchain(url, weather, use_responses_api=True)


def report_pydantic_ai(url: str, weather: Weather, output: str, kind: str = "OpenAIChatModel") -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run_agent() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:  # its own is never closed
            model = getattr(models, kind)(MODEL, provider=providers.OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(
                model, tools=[weather.get_weather], output_type=getattr(pydantic_ai, output)(Report),
                model_settings={"temperature": 0},
            )  # fmt: skip
            return (await agent.run(QUESTION)).output

    return asyncio.run(run_agent())


def report_pydantic_ai_native(url: str, weather: Weather) -> Any:
    return report_pydantic_ai(url, weather, "NativeOutput")


def report_pydantic_ai_responses(url: str, weather: Weather) -> Any:
    return report_pydantic_ai(url, weather, "NativeOutput", "OpenAIResponsesModel")


@pytest.mark.parametrize(
    "report",
    [
        report_openai_chat, report_openai_chat_stream, report_openai_responses, report_langchain,
        report_langchain_responses, report_pydantic_ai_native, report_pydantic_ai_responses,
    ],
)  # fmt: skip
def test_a_framework_calls_tools_and_gets_an_object_of_its_type_at_last(
    tool_url: str, report: Callable[[str, Weather], Any]
) -> None:
    weather = Weather()
    found = report(tool_url, weather)
    assert isinstance(found, Report)
    assert weather.cities


def test_a_framework_may_demand_any_object_beside_tools(tool_url: str) -> None:
    """The schema is in the prompt. Small as it is, the model may break it, but no request is refused."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    with contextlib.suppress(pydantic_ai.exceptions.UnexpectedModelBehavior):
        assert isinstance(report_pydantic_ai(tool_url, Weather(), "PromptedOutput"), Report)


SCRIPTS = Path(__file__).parent / "frameworks"
UV = [str(Path(sys.executable).parent / "uv")]


def run_uv(*arguments: str) -> str:
    """Run uv for this Python, away from this project's environment. Raises `DependencyMissing` where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*UV, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DependencyMissing(f"uv {arguments[0]}: {done.stderr[-4000:]}")
    return done.stdout


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_framework_that_needs_other_packages_does_what_its_script_demands(tool_url: str, script: Path) -> None:
    """Each script names its packages, which `make test-clients` installs for it alone."""
    run_uv("run", "--offline", "--quiet", "--python", sys.executable, "--script", str(script), tool_url, MODEL)
