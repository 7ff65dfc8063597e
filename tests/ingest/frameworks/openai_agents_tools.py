# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""An agent of openai-agents calls a tool and answers from its results, whole and streamed."""

import asyncio
import sys

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

url, model = sys.argv[1:]
cities: list[str] = []


@function_tool(strict_mode=False)
def get_weather(city: str) -> dict[str, str]:
    """Get the weather of a city."""
    cities.append(city)
    return {"weather": "red"}


async def run_agent() -> None:
    """Ask the agent twice."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        agent = Agent(
            "weather", tools=[get_weather], model=OpenAIChatCompletionsModel(model, client),
            model_settings=ModelSettings(temperature=0),
        )  # fmt: skip
        question = "What is the weather of Lisbon and Porto?"
        assert (await Runner.run(agent, question)).final_output
        assert cities == ["Lisbon", "Porto"], cities
        streamed = Runner.run_streamed(agent, question)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output
        assert cities[2:] == ["Lisbon", "Porto"], cities


set_tracing_disabled(True)
asyncio.run(run_agent())
