"""`penstock config show | check`: every setting with its origin, and everything that is wrong with them."""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.config.settings import (
    SETTINGS_CLASSES,
    check_config,
    describe_problems,
    describe_unknown_variables,
    load_settings,
    warn_of_removed_settings,
)
from penstock.config.sources import (
    Settings,
    SettingsClass,
    is_secret,
    list_names,
    read_config_file,
    read_given_values,
    variable_name,
)
from penstock.errors import SettingsError
from penstock.redis.urls import hide_passwords

app = typer.Typer(help="Show the settings and where they come from, or check them.", no_args_is_help=True)


class SettingRow(NamedTuple):
    """One setting as it may be printed."""

    variable: str
    value: object
    origin: str


@app.command("show")
def show_settings(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Show every setting as it is in force here, without secrets, and where it comes from."""
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in list_settings()], indent=2, ensure_ascii=False))
        return
    columns = Column("Variable", no_wrap=True), Column("Value", overflow="fold"), Column("From", overflow="fold")
    table = Table(*columns, box=None, pad_edge=False)
    for row in list_settings():
        style = "dim" if row.origin == "default" else ""
        table.add_row(row.variable, escape(str(row.value)), escape(row.origin), style=style)
    Console(highlight=False, soft_wrap=True).print(table)


@app.command("check")
def check_settings() -> None:
    """Report everything that is wrong with the settings. Exit code 1 when something is."""
    lines = find_problems()
    for line in lines:
        typer.echo(line, err=True)
    if lines:
        raise typer.Exit(1)
    typer.echo("nothing is wrong with the settings")


def list_settings() -> Iterator[SettingRow]:
    """Yield all settings, one class after the other. Raises `SettingsError`."""
    config = read_config_file(os.environ)
    for kind in SETTINGS_CLASSES:
        settings, given = load_settings(kind), read_given_values(kind, os.environ, config)
        for name in list_names(kind):
            origin = given[name].origin if name in given else "default"
            yield SettingRow(variable_name(kind, name), format_value(settings, name), origin)


def format_value(settings: Settings, name: str) -> object:
    """Return a setting's value as it may be printed: *** for a secret, a url without its password."""
    value = getattr(settings, name)
    if not is_secret(type(settings), name):
        return value
    if name.endswith("url"):
        return hide_passwords(value)
    return "***" if (value.get_secret_value() if isinstance(value, SecretStr) else value) else ""


def _validate_settings(kind: SettingsClass, given: dict[str, Any]) -> list[str]:
    """Return a line for each problem of one settings class. Bad values are replaced by defaults, to find what does not
    go together.
    """
    try:
        kind.model_validate(given)
    except ValidationError as error:
        bad = {str(line["loc"][0]) for line in error.errors() if line["loc"]} & given.keys()
        defaults = {name: kind.model_fields[name].default for name in bad}
        return describe_problems(kind, error) + (_validate_settings(kind, given | defaults) if bad else [])
    return []


def find_problems() -> list[str]:
    """Return a line for each problem with the settings."""
    lines = describe_unknown_variables(os.environ)
    try:
        config = read_config_file(os.environ)
        lines += check_config(config)
        warn_of_removed_settings([*os.environ, *config])
    except SettingsError as error:
        return [*lines, str(error)]
    for kind in SETTINGS_CLASSES:
        try:
            given = {name: found.value for name, found in read_given_values(kind, os.environ, config).items()}
            lines += _validate_settings(kind, given)
        except SettingsError as error:
            lines.append(str(error))
    return lines
