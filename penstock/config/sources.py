"""Where settings come from: the environment, files of secrets, a configuration file.

Of `PENSTOCK_X` in the environment, in the file that `PENSTOCK_X_FILE` names (secrets alone), in the file that
`PENSTOCK_CONFIG` names, and the default, the first that is there holds. `PENSTOCK_CONFIG` is TOML: a variable's name in
small letters without `PENSTOCK_`, at the top or in a table named as its beginning: `[engine]` `model = "demo"`.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_settings import BaseSettings

from penstock.errors import SettingsError

VARIABLE_PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
"""Names the configuration file."""
FILE_SUFFIX = "_FILE"

SettingsClass = type[BaseSettings]


class GivenValue(NamedTuple):
    """A value that somebody gave, and where it was."""

    value: Any
    origin: str


def variable_name(part: SettingsClass, name: str) -> str:
    """The environment variable of a setting."""
    return f"{part.model_config['env_prefix']}{name}".upper()


def is_secret(part: SettingsClass, name: str) -> bool:
    """Whether a setting holds, or may hold, a secret: those may come from a file of their own."""
    return not part.model_fields[name].repr


def list_secret_variables(parts: Iterable[SettingsClass]) -> list[str]:
    """The variables of all secrets."""
    return [variable_name(part, name) for part in parts for name in part.model_fields if is_secret(part, name)]


def describe_unknown_names(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """A line for each `PENSTOCK_` name that nothing reads, with the nearest that something does."""
    known, lines = list(known), []
    for name in sorted(names):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            lines.append(f"{name} is not a setting; the nearest is {near[0]}")
    return lines


def read_config_file(environment: Mapping[str, str]) -> dict[str, GivenValue]:
    """What the configuration file says, by variable; empty without one. Raises `SettingsError`."""
    path = environment.get(CONFIG_VARIABLE, "")
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:  # of TOML that is none, the place and not the text
        raise SettingsError(f"{CONFIG_VARIABLE}: {path} cannot be read: {_describe_read_error(error)}") from None
    return {name: GivenValue(value, f"file {path}") for name, value in _flatten_table(table, VARIABLE_PREFIX)}


def read_given_values(
    part: SettingsClass, environment: Mapping[str, str], config: Mapping[str, GivenValue]
) -> dict[str, GivenValue]:
    """What was given of a part's settings, by field. Raises `SettingsError` where a secret has two sources, or none."""
    upper = {name.upper(): name for name in environment}
    found: dict[str, GivenValue] = {}
    for name in part.model_fields:
        variable = variable_name(part, name)
        secret = _read_secret_file(variable, environment, config) if is_secret(part, name) else None
        if variable in upper:
            if secret is not None and environment[upper[variable]]:
                raise SettingsError(f"set either {variable} or {variable}{FILE_SUFFIX}, not both")
            found[name] = GivenValue(environment[upper[variable]], f"environment {upper[variable]}")
        elif secret is not None:
            found[name] = secret
        elif variable in config:
            found[name] = config[variable]
    return found


def _read_secret_file(
    variable: str, environment: Mapping[str, str], config: Mapping[str, GivenValue]
) -> GivenValue | None:
    """What the file of a secret holds; the line's end does not belong to it."""
    named = f"{variable}{FILE_SUFFIX}"
    path = environment.get(named) or str(config[named].value if named in config else "")
    if not path:
        return None
    try:
        return GivenValue(Path(path).read_text("utf-8").rstrip("\r\n"), f"file {path} ({named})")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{named}: {path} cannot be read: {_describe_read_error(error)}") from None


def _flatten_table(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten_table(value, f"{prefix}{name}_".upper())
        else:
            yield f"{prefix}{name}".upper(), value


def _describe_read_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not UTF-8"
