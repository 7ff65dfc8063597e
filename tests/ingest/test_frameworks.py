"""SDKs and frameworks as their users call them, and a suite of what an API must answer, against real gateways."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from penstock.local.stack import Stack
from sim.workload import TOOL_MODEL
from tests.ingest import clients, nodejs
from tests.ingest.test_tools import WEATHER

pytestmark = pytest.mark.clients
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


def test_langchain_gets_an_object_of_its_type(tool_url: str) -> None:
    """It sends the schema alone, without tools."""
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model=MODEL, base_url=tool_url, api_key="none", temperature=0)
    found = model.with_structured_output(Person, method="json_schema").invoke(PROMPT)
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


class Report(BaseModel):
    """What is answered at last."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


class City(BaseModel):
    """Get the weather of a city."""

    city: str = Field(max_length=20)


STRICT: Any = openai.pydantic_function_tool(City, name="get_weather", description=City.__doc__)
Run = Callable[[str, Weather, Any], Any]
"""Lets a framework call the tool and returns its last answer: a text, or an object of a type that is given."""


def answer_chat(message: Any, weather: Weather, kind: Any) -> list[Any]:
    """Return the turns of the results of calls. The SDK has parsed their arguments where a type is given."""
    found = [
        (call.id, call.function.parsed_arguments.city if kind else json.loads(call.function.arguments)["city"])
        for call in message.tool_calls or ()
    ]
    return [{"role": "tool", "tool_call_id": name, "content": weather.get_weather(city)} for name, city in found]


def run_openai(url: str, weather: Weather, kind: Any = None) -> Any:
    """With a type the SDK sends a strict tool and the schema, and parses both."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": MODEL, "messages": turns, "temperature": 0, "tools": [STRICT if kind else WEATHER]}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            chats: Any = client.chat.completions
            made = chats.parse(**asked, response_format=kind) if kind else chats.create(**asked)
            message = made.choices[0].message
            turns.append(message)
            if not message.tool_calls:
                return message.parsed if kind else message.content
            turns += answer_chat(message, weather, kind)


def run_openai_stream(url: str, weather: Weather, kind: Any = None) -> Any:
    """The SDK's own reader of a stream puts the calls together; with a type it parses the arguments as they come."""
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": MODEL, "messages": turns, "temperature": 0, "tools": [STRICT if kind else WEATHER]}
    asked |= {"response_format": kind} if kind else {}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            with client.chat.completions.stream(**asked) as stream:
                events = list(stream)
                message: Any = stream.get_final_completion().choices[0].message
            turns.append(message)
            calls = message.tool_calls or ()
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
            assert [event.arguments for event in done] == [one.function.arguments for one in calls]
            if not calls:
                return message.parsed if kind else message.content
            deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
            assert kind is None or len(deltas) > len(calls), "they come in pieces"
            turns += answer_chat(message, weather, kind)


def run_openai_responses(url: str, weather: Weather, kind: Any = None) -> Any:
    """The results follow on the response; without a type the SDK's own reader of a stream puts the items together."""
    given: Any = QUESTION
    previous: str | None = None
    tool: Any = {"type": "function", **(STRICT if kind else WEATHER)["function"]}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        while True:
            asked: Any = {"model": MODEL, "input": given, "tools": [tool], "temperature": 0}
            asked["previous_response_id"] = previous
            made: Any
            if kind:
                made = client.responses.parse(**asked, text_format=kind)
            else:
                with client.responses.stream(**asked) as stream:
                    made = stream.until_done().get_final_response()
            calls = [item for item in made.output if item.type == "function_call"]
            if not calls:
                return made.output_parsed if kind else made.output_text
            told, previous = {"type": "function_call_output"}, made.id
            given = [
                told | {"call_id": call.call_id, "output": weather.get_weather(**json.loads(call.arguments))}
                for call in calls
            ]


def run_langchain(url: str, weather: Weather, kind: Any = None, *, is_streamed: bool = False, **options: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    tools, messages = pytest.importorskip("langchain_core.tools"), pytest.importorskip("langchain_core.messages")
    tool = tools.tool(weather.get_weather)
    chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, **options)
    model = chat.bind_tools([tool], **({"response_format": kind, "strict": True} if kind else {}))
    turns = [messages.HumanMessage(QUESTION)]
    while True:
        if is_streamed:
            first, *rest = model.stream(turns)
            answer = sum(rest, first)
        else:
            answer = model.invoke(turns)
        if not answer.tool_calls:
            return answer.additional_kwargs["parsed"] if kind else str(answer.content)
        turns += [answer, *(tool.invoke(call) for call in answer.tool_calls)]


def run_pydantic_ai(
    url: str, weather: Weather, kind: Any = None, output: str = "NativeOutput", model_kind: str = "OpenAIChatModel"
) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run_agent() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:  # its own is never closed
            model = getattr(models, model_kind)(MODEL, provider=providers.OpenAIProvider(openai_client=client))
            typed = {"output_type": getattr(pydantic_ai, output)(kind)} if kind else {}
            agent = pydantic_ai.Agent(
                model, tools=[weather.get_weather], model_settings={"temperature": 0}, **typed
            )  # fmt: skip
            return (await agent.run(QUESTION)).output

    return asyncio.run(run_agent())


TYPED: list[Run] = [
    run_openai, run_openai_stream, run_openai_responses, run_langchain, partial(run_langchain, use_responses_api=True),
    run_pydantic_ai, partial(run_pydantic_ai, model_kind="OpenAIResponsesModel"),
]  # fmt: skip


@pytest.mark.parametrize("run", [*TYPED, partial(run_langchain, is_streamed=True)])
def test_a_framework_calls_tools_and_gets_an_answer_from_their_results(tool_url: str, run: Run) -> None:
    weather = Weather()
    answer = run(tool_url, weather, None)
    assert sorted(weather.cities) == PLACES  # some call at once
    assert answer


@pytest.mark.parametrize("run", TYPED)
def test_a_framework_calls_tools_and_gets_an_object_of_its_type_at_last(tool_url: str, run: Run) -> None:
    weather = Weather()
    assert isinstance(run(tool_url, weather, Report), Report)
    assert weather.cities


def test_a_framework_may_demand_any_object_beside_tools(tool_url: str) -> None:
    """The schema is in the prompt. Small as it is, the model may break it, but no request is refused."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    with contextlib.suppress(pydantic_ai.exceptions.UnexpectedModelBehavior):
        assert isinstance(run_pydantic_ai(tool_url, Weather(), Report, "PromptedOutput"), Report)


SCRIPTS = Path(__file__).parent / "frameworks"


AGENTS = sorted(path for path in SCRIPTS.glob("*.py") if not path.stem.endswith("_embeddings"))


@pytest.mark.parametrize("script", AGENTS, ids=lambda path: path.stem)
def test_a_framework_that_needs_other_packages_does_what_its_script_demands(tool_url: str, script: Path) -> None:
    """Each script names its packages, which `make test-clients` installs for it alone: not into this environment."""
    clients.run_script(script, tool_url, MODEL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nodejs.project(clients.find_place(Path(__file__).parent / "node"), tmp_path_factory.mktemp("sdk"))


@pytest.mark.parametrize(
    ("file", "stack"), [("answers.test.mjs", "line"), ("tools.test.mjs", "tool_stack")], ids=["answers", "tools"]
)
def test_the_node_sdk(file: str, stack: str, project: Path, request: pytest.FixtureRequest) -> None:
    base_url = request.getfixturevalue(stack).gateway_url
    done = subprocess.run(
        [nodejs.NODE, "--experimental-eventsource", "--test", "--test-reporter=spec", file],
        cwd=project, env=os.environ | {"GATEWAY": base_url}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "ℹ pass 0" not in done.stdout
    assert "ℹ fail 0" in done.stdout


IMAGES = {"chat-image-input", "image-input", "anth-image-input"}
"""The tool model reads text."""
COMPACTING = {"compact-response"}
"""The suite warns of servers that do not compact."""


def build_greedy(build_request: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    """Build a test's request so that the model, small as it is, answers it each time alike."""
    return build_request(config) | {"temperature": 0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the suite's use of jsonschema
@pytest.mark.parametrize(("form", "num_tests"), [("openai-chat", 9), ("open-responses", 13), ("anthropic", 9)])
def test_llm_comply_finds_nothing_missing_but_images(tool_stack: Stack, form: str, num_tests: int) -> None:
    """Its one test of reasoning's summaries it leaves out itself: that is for models of OpenAI's names."""
    cli, llm_comply = pytest.importorskip("llm_comply.cli"), pytest.importorskip("llm_comply")
    tests = [
        dataclasses.replace(one, build_request=partial(build_greedy, one.build_request)) for one in cli._get_tests(form)
    ]
    specification = Path(cli.__file__).parent / "specs" / cli._SPEC_FILES[form]
    config = llm_comply.ComplianceConfig(f"{tool_stack.gateway_url}/v1", "none", MODEL, timeout=3600)
    suite = llm_comply.TestRunner(config, tests, llm_comply.SpecLoader(str(specification))).run_all()
    results = {one["id"]: one for one in suite.to_dict()["results"]}
    assert (len(results), suite.skipped) == (num_tests, 1), results
    assert {name for name, one in results.items() if one["status"] == "failed"} == results.keys() & IMAGES, results
    assert {name for name, one in results.items() if one.get("warnings")} <= COMPACTING, results
