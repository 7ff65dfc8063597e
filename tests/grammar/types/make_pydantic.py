"""The types of pydantic's pages "Standard library types" and "Pydantic types", and the JSON schema that each gives.

python -m tests.grammar.types.make_pydantic

writes `pydantic.json` beside it, with the installed pydantic. Each type is the one field of a model, as people write
it; null stands for a type that pydantic has no JSON schema of.
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

STANDARD: dict[str, Any] = {
    "bool": bool,
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "int": int,
    "float": float,
    "enum.IntEnum": Tool,
    "decimal.Decimal": decimal.Decimal,
    "complex": complex,
    "fractions.Fraction": fractions.Fraction,
    "enum.Enum": Plain,
    "str and enum.Enum": Fruit,
    "list": list,
    "typing.List[int]": typing.List[int],  # noqa: UP006
    "tuple": tuple,
    "typing.Tuple[int, float, bool]": typing.Tuple[int, float, bool],  # noqa: UP006
    "tuple[int, ...]": tuple[int, ...],
    "typing.NamedTuple": Point,
    "collections.namedtuple": collections.namedtuple("Pair", "left right"),
    "collections.deque": collections.deque,
    "typing.Deque[int]": typing.Deque[int],  # noqa: UP006
    "set": set,
    "typing.Set[int]": typing.Set[int],  # noqa: UP006
    "set[Enum]": set[Fruit],
    "set[bool]": set[bool],
    "set[Literal]": set[Literal["a", "b", "c", "d"]],
    "frozenset": frozenset,
    "typing.FrozenSet[int]": typing.FrozenSet[int],  # noqa: UP006
    "frozenset[Enum]": frozenset[Tool],
    "typing.Sequence[int]": typing.Sequence[int],
    "typing.Sequence[bytes]": typing.Sequence[bytes],
    "typing.Iterable[int]": typing.Iterable[int],
    "dict": dict,
    "typing.Dict[str, int]": typing.Dict[str, int],  # noqa: UP006
    "dict[int, str]": dict[int, str],
    "dict[Enum, int]": dict[Fruit, int],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict[UUID, int]": dict[uuid.UUID, int],
    "dict[date, int]": dict[datetime.date, int],
    "typing.TypedDict": User,
    "typing.TypedDict, total=False": Identity,
    "typing.Callable": typing.Callable[[int], int],
    "ipaddress.IPv4Address": ipaddress.IPv4Address,
    "ipaddress.IPv4Interface": ipaddress.IPv4Interface,
    "ipaddress.IPv4Network": ipaddress.IPv4Network,
    "ipaddress.IPv6Address": ipaddress.IPv6Address,
    "ipaddress.IPv6Interface": ipaddress.IPv6Interface,
    "ipaddress.IPv6Network": ipaddress.IPv6Network,
    "uuid.UUID": uuid.UUID,
    "typing.Union": int | str,
    "typing.Union of models": Cat | Dog,
    "typing.Union with discriminator": Annotated[Cat | Dog, Field(discriminator="kind")],
    "typing.Optional": str | None,
    "type": type,
    "typing.Type[T]": typing.Type[int],  # noqa: UP006
    "typing.TypeVar": Free,
    "typing.TypeVar with bound": Bound,
    "typing.TypeVar with constraints": Constrained,
    "None": None,
    "str": str,
    "bytes": bytes,
    "bytearray": bytearray,
    "typing.Literal": Literal["apple", "pumpkin"],
    "typing.Any": Any,
    "typing.Hashable": typing.Hashable,
    "typing.Annotated": Annotated[str, Field(min_length=2, max_length=8)],
    "typing.Pattern": typing.Pattern,
    "pathlib.Path": pathlib.Path,
}
PYDANTIC: dict[str, Any] = {
    "Strict": Annotated[int, pydantic.Strict()],
    "StrictStr": pydantic.StrictStr,
    "SocketPath": pydantic.types.SocketPath,
    "conbytes": pydantic.conbytes(min_length=2, max_length=9),
    "conlist": pydantic.conlist(int, min_length=1, max_length=4),
    "conset": pydantic.conset(int, min_length=1, max_length=4),
    "conset of Enum": pydantic.conset(Fruit, min_length=1, max_length=2),
    "confrozenset": pydantic.confrozenset(int, min_length=1, max_length=4),
    "constr": pydantic.constr(pattern=r"^[a-z]+\d{2}$"),
    "constr with lengths": pydantic.constr(to_lower=True, min_length=2, max_length=5),
    "ImportString": pydantic.ImportString,
    "conint": pydantic.conint(gt=0, le=100, multiple_of=5),
    "PositiveInt": pydantic.PositiveInt,
    "NegativeInt": pydantic.NegativeInt,
    "NonNegativeInt": pydantic.NonNegativeInt,
    "NonPositiveInt": pydantic.NonPositiveInt,
    "confloat": pydantic.confloat(gt=0.5, lt=9, allow_inf_nan=False),
    "PositiveFloat": pydantic.PositiveFloat,
    "NegativeFloat": pydantic.NegativeFloat,
    "NonNegativeFloat": pydantic.NonNegativeFloat,
    "NonPositiveFloat": pydantic.NonPositiveFloat,
    "FiniteFloat": pydantic.FiniteFloat,
    "condecimal": pydantic.condecimal(ge=0, max_digits=6, decimal_places=2),
    "UUID1": pydantic.UUID1,
    "UUID3": pydantic.UUID3,
    "UUID4": pydantic.UUID4,
    "UUID5": pydantic.UUID5,
    "UUID6": pydantic.types.UUID6,
    "UUID7": pydantic.types.UUID7,
    "UUID8": pydantic.types.UUID8,
    "FilePath": pydantic.FilePath,
    "DirectoryPath": pydantic.DirectoryPath,
    "NewPath": pydantic.NewPath,
    "Json": pydantic.Json,
    "Json[list[int]]": pydantic.Json[list[int]],
    "Secret[int]": pydantic.types.Secret[int],
    "Secret[date]": pydantic.types.Secret[datetime.date],
    "SecretStr": pydantic.SecretStr,
    "SecretBytes": pydantic.SecretBytes,
    "StrictBool": pydantic.StrictBool,
    "StrictBytes": pydantic.StrictBytes,
    "StrictInt": pydantic.StrictInt,
    "StrictFloat": pydantic.StrictFloat,
    "ByteSize": pydantic.ByteSize,
    "PastDate": pydantic.PastDate,
    "FutureDate": pydantic.FutureDate,
    "PastDatetime": pydantic.PastDatetime,
    "FutureDatetime": pydantic.FutureDatetime,
    "condate": pydantic.condate(gt=datetime.date(2020, 1, 1)),
    "AwareDatetime": pydantic.AwareDatetime,
    "NaiveDatetime": pydantic.NaiveDatetime,
    "AllowInfNan": Annotated[float, pydantic.AllowInfNan(False)],
    "EncodedBytes": Annotated[bytes, pydantic.EncodedBytes(encoder=pydantic.Base64Encoder)],
    "EncodedStr": Annotated[str, pydantic.EncodedStr(encoder=pydantic.types.Base64UrlEncoder)],
    "Base64Bytes": pydantic.Base64Bytes,
    "Base64Str": pydantic.Base64Str,
    "Base64UrlBytes": pydantic.Base64UrlBytes,
    "Base64UrlStr": pydantic.Base64UrlStr,
    "GetPydanticSchema": Annotated[str, pydantic.GetPydanticSchema(lambda _type, handler: handler(int))],
    "StringConstraints": Annotated[str, pydantic.StringConstraints(pattern="^[A-Z]{3}$", strip_whitespace=True)],
    "Tag and Discriminator": Annotated[
        Annotated[Cat, pydantic.Tag("cat")] | Annotated[Dog, pydantic.Tag("dog")],
        pydantic.Discriminator(lambda value: value["kind"]),
    ],
    "JsonValue": pydantic.JsonValue,
    "OnErrorOmit": list[pydantic.OnErrorOmit[int]],
    "FailFast": Annotated[list[bool], pydantic.FailFast()],
}


def make_schema(kind: Any) -> Any:
    """Return the JSON schema of a model whose one field has this type; None if it has none."""
    try:
        return create_model("Model", value=(kind, ...)).model_json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return None


def main() -> None:
    """Write the list, a type in each line."""
    schemas = {name: make_schema(kind) for name, kind in (STANDARD | PYDANTIC).items()}
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in schemas.items())
    PATH.write_text(f'{{"made_with": "pydantic {pydantic.VERSION}", "schemas": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
