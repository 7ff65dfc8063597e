"""Where settings come from: the environment, files of secrets, and a configuration file.

The first of these places that has a value for a setting is used: the environment; for secrets alone the file that the
variable with `_FILE` behind it names; the file that `PENSTOCK_CONFIG` names; the default. The configuration file is
TOML. A name in it is the variable's in lower case without `PENSTOCK_`; its beginning may be a table: `[engine]`
`model = "demo"`.

Classes of settings also hold constants, which none of these places sets. Tests make a class with another value, and
hand it to processes in `PENSTOCK_TESTING`, a JSON object with names as in the configuration file.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from penstock.errors import SettingsError

VARIABLE_PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
"""The variable that names the configuration file."""
FILE_SUFFIX = "_FILE"
TESTING_VARIABLE = "PENSTOCK_TESTING"
_CONSTANT = "constant"

T = TypeVar("T")
Constant: TypeAlias = Annotated[T, _CONSTANT]
"""The type of a constant in a class of settings."""


class Settings(BaseModel):
    """The settings of one part, and its constants. A setting's variable is `prefix` and its name, in upper case."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, validate_default=True)
    prefix: ClassVar[str] = VARIABLE_PREFIX


SettingsClass = type[Settings]


class GivenValue(NamedTuple):
    """A value that is not the default, and where it was found."""

    value: Any
    origin: str


def variable_name(kind: SettingsClass, name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{kind.prefix}{name}".upper()


def list_names(kind: SettingsClass, *, constants: bool = False) -> list[str]:
    """Return the names of a class's settings, or those of its constants."""
    return [name for name, field in kind.model_fields.items() if (_CONSTANT in field.metadata) == constants]


def is_secret(kind: SettingsClass, name: str) -> bool:
    """Return whether a setting holds, or may hold, a secret, and so may come from a file of its own."""
    return not kind.model_fields[name].repr


def list_secret_variables(kinds: Iterable[SettingsClass]) -> list[str]:
    """Return the variables of all secrets."""
    return [variable_name(kind, name) for kind in kinds for name in list_names(kind) if is_secret(kind, name)]


def describe_unknown_names(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a line for each `PENSTOCK_` name that is not known, with the nearest known one."""
    known, lines = list(known), []
    for name in sorted(names):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            lines.append(f"{name} is not a setting; the nearest is {near[0]}")
    return lines


def read_config_file(environment: Mapping[str, str]) -> dict[str, GivenValue]:
    """Return the configuration file's values, by variable; empty without a file. Raises `SettingsError`."""
    path = environment.get(CONFIG_VARIABLE, "")
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:  # the message of invalid TOML has its position and none of its text
        raise SettingsError(f"{CONFIG_VARIABLE}: {path} cannot be read: {_describe_read_error(error)}") from None
    return {name: GivenValue(value, f"file {path}") for name, value in _flatten_table(table, VARIABLE_PREFIX)}


def read_given_values(
    kind: SettingsClass, environment: Mapping[str, str], config: Mapping[str, GivenValue]
) -> dict[str, GivenValue]:
    """Return a class's values that are set, by field.

    Raises `SettingsError` where a secret is set twice, or its file cannot be read.
    """
    upper = {name.upper(): name for name in environment}
    found: dict[str, GivenValue] = {}
    for name in list_names(kind):
        variable = variable_name(kind, name)
        secret = _read_secret_file(variable, environment, config) if is_secret(kind, name) else None
        if variable in upper:
            if secret is not None and environment[upper[variable]]:
                raise SettingsError(f"set either {variable} or {variable}{FILE_SUFFIX}, not both")
            found[name] = GivenValue(environment[upper[variable]], f"environment {upper[variable]}")
        elif secret is not None:
            found[name] = secret
        elif variable in config:
            found[name] = config[variable]
    testing = read_testing_values(environment)
    for name in list_names(kind, constants=True):
        if (variable := variable_name(kind, name)) in testing:
            found[name] = testing[variable]
    return found


def read_testing_values(environment: Mapping[str, str]) -> dict[str, GivenValue]:
    """Return a test's values of constants, by name."""
    table = json.loads(environment.get(TESTING_VARIABLE, "{}"))
    return {name: GivenValue(value, TESTING_VARIABLE) for name, value in _flatten_table(table, VARIABLE_PREFIX)}


def _read_secret_file(
    variable: str, environment: Mapping[str, str], config: Mapping[str, GivenValue]
) -> GivenValue | None:
    """Return the content of a secret's file, without the line's end; None if no file is named."""
    named = f"{variable}{FILE_SUFFIX}"
    path = environment.get(named) or str(config[named].value if named in config else "")
    if not path:
        return None
    try:
        return GivenValue(Path(path).read_text("utf-8").rstrip("\r\n"), f"file {path} ({named})")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{named}: {path} cannot be read: {_describe_read_error(error)}") from None


def _flatten_table(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    """Yield the variable and the value of each entry, those of nested tables included."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten_table(value, f"{prefix}{name}_".upper())
        else:
            yield f"{prefix}{name}".upper(), value


def _describe_read_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not UTF-8"
