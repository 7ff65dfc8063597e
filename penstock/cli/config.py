"""`penstock config show | check`: what the settings are and where each comes from, and whether they are right."""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.config.settings import (
    SETTINGS_CLASSES,
    BatchSettings,
    GuardSettings,
    check_config,
    check_together,
    describe_problems,
    describe_unknown_variables,
    load_settings,
)
from penstock.config.sources import SettingsClass, is_secret, read_config_file, read_given_values, variable_name
from penstock.errors import SettingsError
from penstock.redis.urls import hide_passwords

app = typer.Typer(help="What the settings are, and whether they are right.", no_args_is_help=True)


class Row(NamedTuple):
    """One setting as it may be printed."""

    variable: str
    value: object
    origin: str


@app.command()
def show(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Every setting as it is in force here, without secrets, and where it comes from."""
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows()], indent=2, ensure_ascii=False))
        return
    columns = Column("Variable", no_wrap=True), Column("Value", overflow="fold"), Column("From", overflow="fold")
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows():
        style = "dim" if row.origin == "default" else ""
        table.add_row(row.variable, escape(str(row.value)), escape(row.origin), style=style)
    Console(highlight=False, soft_wrap=True).print(table)


@app.command()
def check() -> None:
    """Everything that is wrong with the settings. Exit code 1 when something is."""
    lines = all_problems()
    for line in lines:
        typer.echo(line, err=True)
    if lines:
        raise typer.Exit(1)
    typer.echo("nothing is wrong with the settings")


def rows() -> Iterator[Row]:
    """All settings, part by part. Raises `SettingsError`."""
    config = read_config_file(os.environ)
    for part in SETTINGS_CLASSES:
        settings, given = load_settings(part), read_given_values(part, os.environ, config)
        for name in part.model_fields:
            origin = given[name].origin if name in given else "default"
            yield Row(variable_name(part, name), printable(settings, name), origin)


def printable(settings: BaseSettings, name: str) -> object:
    """A setting's value; of a secret, that there is one; a url without its password."""
    value = getattr(settings, name)
    if not is_secret(type(settings), name):
        return value
    if name.endswith("url"):
        return hide_passwords(value)
    return "***" if (value.get_secret_value() if isinstance(value, SecretStr) else value) else ""


def _problems_of(part: SettingsClass, given: dict[str, Any], parts: dict[SettingsClass, BaseSettings]) -> list[str]:
    """What is wrong with each setting, and then, with defaults in its place, with all of a part together."""
    try:
        parts[part] = part(**given)
    except ValidationError as error:
        bad = {str(line["loc"][0]) for line in error.errors() if line["loc"]} & given.keys()
        defaults = {name: part.model_fields[name].default for name in bad}
        return describe_problems(part, error) + (_problems_of(part, given | defaults, parts) if bad else [])
    return []


def all_problems() -> list[str]:
    """A line for each."""
    lines, parts = describe_unknown_variables(os.environ), dict[SettingsClass, BaseSettings]()
    try:
        config = read_config_file(os.environ)
        lines += check_config(config)
    except SettingsError as error:
        return [*lines, str(error)]
    for part in SETTINGS_CLASSES:
        try:
            given = {name: found.value for name, found in read_given_values(part, os.environ, config).items()}
            lines += _problems_of(part, given, parts)
        except SettingsError as error:
            lines.append(str(error))
    guard, batch = parts.get(GuardSettings), parts.get(BatchSettings)
    if isinstance(guard, GuardSettings) and isinstance(batch, BatchSettings):
        lines += check_together(guard, batch)
    return lines
