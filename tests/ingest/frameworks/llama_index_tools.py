# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# ///
"""An agent of LlamaIndex calls a tool and answers from its results."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
cities: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return json.dumps({"weather": "red"})


async def run_agent() -> str:
    """Return the agent's answer."""
    llm = OpenAILike(
        model=model, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True, temperature=0
    )
    tool = FunctionTool.from_defaults(get_weather, description="Get the weather of a city.")
    agent = FunctionAgent(tools=[tool], llm=llm)
    return str(await agent.run("What is the weather of Lisbon and Porto?"))


assert asyncio.run(run_agent())
assert sorted(cities) == ["Lisbon", "Porto"], cities  # they may be called at once
