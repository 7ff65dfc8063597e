# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""An agent of smolagents calls tools, the last of which has its answer. It always sends stop strings."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

url, model = sys.argv[1:]
cities: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The city.
    """
    cities.append(city)
    return "red"


asked = OpenAIModel(model_id=model, api_base=url, api_key="none", temperature=0, max_tokens=300)
agent = ToolCallingAgent(tools=[get_weather], model=asked, max_steps=2, instructions="")
assert agent.run("What is the weather of Lisbon and Porto?") is not None
assert any(step.tool_calls for step in agent.memory.steps if hasattr(step, "tool_calls")), agent.memory.steps
