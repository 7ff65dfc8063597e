# /// script
# requires-python = ">=3.11"
# dependencies = ["dspy==3.4.1", "litellm==1.110.2"]
# ///
"""A program of DSPy gets an object of its type, and calls a tool: what its adapter demands as JSON, and natively."""

import sys

import dspy
import litellm
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
can = {
    "supports_response_schema": True,
    "supports_function_calling": True,
    "litellm_provider": "openai",
    "mode": "chat",
}
litellm.register_model({f"openai/{model}": can, model: can})


class Report(BaseModel):
    """What is answered at last."""

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


class Answer(dspy.Signature):
    """Say what the weather is."""

    question: str = dspy.InputField()
    report: Report = dspy.OutputField()


class Calls(dspy.Signature):
    """Say which tools to call."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    outputs: dspy.ToolCalls = dspy.OutputField()


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"{city}: red"


lm = dspy.LM(
    f"openai/{model}", api_base=url, api_key="none", temperature=0, max_tokens=300, cache=False, engine="litellm"
)
question = "What is the weather of Lisbon?"
with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    found = dspy.Predict(Answer)(question=question)
assert isinstance(found.report, Report), found
with dspy.context(lm=lm, adapter=dspy.JSONAdapter(use_native_function_calling=True)):
    called = dspy.Predict(Calls)(question=question, tools=[dspy.Tool(get_weather)])
assert {call.name for call in called.outputs.tool_calls} == {"get_weather"}, called
