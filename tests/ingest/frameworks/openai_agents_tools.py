# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""An agent of openai-agents calls a tool and answers from its results: whole and streamed, chats and responses."""

import asyncio
import sys

import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
cities: list[str] = []


@function_tool
def get_weather(city: str) -> dict[str, str]:
    """Get the weather of a city."""
    cities.append(city)
    return {"weather": "red"}


async def run_agent(model: Model) -> None:
    """Ask the agent twice."""
    agent = Agent("weather", tools=[get_weather], model=model, model_settings=ModelSettings(temperature=0))
    question = "What is the weather of Lisbon and Porto?"
    cities.clear()
    assert (await Runner.run(agent, question)).final_output
    assert (len(cities), "Lisbon" in cities) == (2, True), cities  # small as it is, the model misspells the other
    streamed = Runner.run_streamed(agent, question)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output
    assert sorted(cities[2:]) == sorted(cities[:2]), cities  # they are called at once


class Report(BaseModel):
    """What is answered at last."""

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


async def run_typed_agent(model: Model) -> None:
    """Ask an agent whose answer is an object, whole and streamed."""
    agent = Agent(
        "weather", tools=[get_weather], model=model, output_type=Report, model_settings=ModelSettings(temperature=0)
    )
    question = "What is the weather of Lisbon?"
    assert isinstance((await Runner.run(agent, question)).final_output, Report)
    streamed = Runner.run_streamed(agent, question)
    async for _ in streamed.stream_events():
        pass
    assert isinstance(streamed.final_output, Report)


async def run_agents() -> None:
    """Ask an agent at each endpoint."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            await run_agent(kind(model, client))
            await run_typed_agent(kind(model, client))


set_tracing_disabled(True)
asyncio.run(run_agents())
