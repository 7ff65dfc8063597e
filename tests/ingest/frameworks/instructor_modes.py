# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor gets an object of a schema, and one by a call of a function whose arguments the object is."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person of whom a text tells. Without other properties an answer ends before any limit."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)


SCHEMA = json.dumps(Person.model_json_schema())
PROMPT = f"Answer in JSON by this schema: {SCHEMA}\nMaria is 34 years old and lives in Lisbon."

with openai.OpenAI(base_url=url, api_key="none") as client:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    found = patched.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROMPT}], response_model=Person, max_retries=0, temperature=0
    )
assert isinstance(found, Person), found
assert Person.model_validate_json(found.model_dump_json()).model_dump() == found.model_dump()


class Told(BaseModel):
    """A person. The function is not strict, so that the model may leave something out."""

    name: str = ""
    age: int | None = None


with openai.OpenAI(base_url=url, api_key="none") as client:
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    told = patched.responses.create(
        model=model,
        input="Maria is 34 years old and lives in Lisbon.",
        response_model=Told,
        max_retries=0,
        temperature=0,
    )
assert isinstance(told, Told), told
assert told.name or told.age, told
