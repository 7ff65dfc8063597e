# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor has the model call a function whose arguments are the object, and sends its schema beside it."""

import sys

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person of whom a text tells. Its function is not strict, so that the model may leave something out."""

    name: str = ""
    age: int | None = None


with openai.OpenAI(base_url=url, api_key="none") as client:
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    found = patched.responses.create(
        model=model,
        input="Maria is 34 years old and lives in Lisbon.",
        response_model=Person,
        max_retries=0,
        temperature=0,
    )
assert isinstance(found, Person), found
assert found.name or found.age, found
