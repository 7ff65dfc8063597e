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
from pydantic import BaseModel, ConfigDict, Field

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


class Report(BaseModel):
    """What is answered at last."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


async def run_typed_agent() -> Report | None:
    """Return the agent's answer as an object."""
    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        should_use_structured_outputs=True,
    )
    tool = FunctionTool.from_defaults(get_weather, description="Get the weather of a city.")
    agent = FunctionAgent(tools=[tool], llm=llm, output_cls=Report)
    answer = await agent.run("What is the weather of Lisbon and Porto?")
    return answer.get_pydantic_model(Report)


assert asyncio.run(run_agent())
assert sorted(cities) == ["Lisbon", "Porto"], cities  # they may be called at once
assert isinstance(asyncio.run(run_typed_agent()), Report)
