# ruff: noqa: F401, the names of types need all imports
"""The types of pydantic's pages "Standard library types" and "Pydantic types", and the JSON schema that each gives.

python -m tests.grammar.types.make_pydantic

writes `pydantic.json` beside it anew, with the installed pydantic. Its names are the types as expressions, with the
names of this module. Each is the one field of a model, as people write it; null stands for a type that pydantic has no
JSON schema of.
"""

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import typing
import uuid
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from typing_extensions import TypedDict

PATH = pathlib.Path(__file__).parent / "pydantic.json"


class Plain(enum.Enum):
    pear = "pear"
    two = 2


class Fruit(str, enum.Enum):  # noqa: UP042
    pear = "pear"
    banana = "banana"
    fig = "fig"


class Tool(enum.IntEnum):
    spanner = 1
    wrench = 2


class Point(typing.NamedTuple):
    x: int
    y: int


class Identity(TypedDict, total=False):
    name: str | None
    surname: str


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class User(TypedDict):
    identity: Identity
    age: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


Free = typing.TypeVar("Free")
Bound = typing.TypeVar("Bound", bound=float)
Constrained = typing.TypeVar("Constrained", int, str)


def make_schema(kind: Any) -> Any:
    """Return the JSON schema of a model whose one field has this type; None if it has none."""
    try:
        return create_model("Model", value=(kind, ...)).model_json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return None


def main() -> None:
    """Write the list, a type in each line."""
    names = json.loads(PATH.read_text())["schemas"]
    schemas = {name: make_schema(eval(name)) for name in names}
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in schemas.items())
    PATH.write_text(f'{{"made_with": "pydantic {pydantic.VERSION}", "schemas": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
