"""`penstock topics create`: create missing topics."""

import typer
from rich.console import Console

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings

app = typer.Typer(help="The pipeline's topics.", no_args_is_help=True)


@app.callback()
def add_group() -> None:
    """The pipeline's topics."""


@app.command("create")
def create_topics() -> None:
    """Make the topics that are missing."""
    made = connect_bus(load_settings(Addresses), load_settings(BusSettings)).create_topics()
    for topic in made:
        Console().print(f"made {topic}", highlight=False)
    if not made:
        Console().print("all topics exist")
