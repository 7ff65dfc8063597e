"""`penstock models`: the models that gateways accept requests for while no worker serves them."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import load_settings
from penstock.errors import SettingsError
from penstock.names import MODELS_KEY
from penstock.redis.client import redis_client

app = typer.Typer(help="List or forget the models that were served.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """Each model that was served, with its pipeline. Requests for it wait while it has no worker."""
    table = Table("model", "pipeline", "context", "source", box=None, pad_edge=False)
    for field, note in sorted(_read_notes().items()):
        length = "" if note["max_model_len"] is None else f"{note['max_model_len']:,}"
        table.add_row(note["model"], field.partition(":")[0], length, note["model_source"])
    Console(highlight=False).print(table if table.rows else "no model was served yet")


@app.command("forget")
def forget_model(model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, in all pipelines.")]) -> None:
    """Refuse requests for a model, on every gateway within a second, unless a worker serves it then."""
    notes = _read_notes()
    fields = [field for field, note in notes.items() if note["model"] == model]
    if not fields:
        known = ", ".join(sorted({note["model"] for note in notes.values()})) or "none"
        raise SettingsError(f"no model {model!r} was served; known: {known}")
    with redis_client(load_settings(Addresses).first_url) as client:
        client.hset(MODELS_KEY, mapping=dict.fromkeys(fields, ""))


def _read_notes() -> dict[str, dict[str, Any]]:
    """Return the notes of models that are not forgotten, by their fields in Redis."""
    with redis_client(load_settings(Addresses).first_url) as client:
        told: Any = client.hgetall(MODELS_KEY)
    return {field.decode(): json.loads(note) for field, note in told.items() if note}
