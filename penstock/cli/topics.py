"""`penstock topics create`: create missing topics, and move messages out of topics of older versions."""

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
    """Make the topics that are missing, and move on what an older version left in topics that are no more read."""
    bus = connect_bus(load_settings(Addresses), load_settings(BusSettings))
    made = bus.create_topics()
    for topic in made:
        Console().print(f"made {topic}", highlight=False)
    if not made:
        Console().print("all topics exist")
    if num_moved := bus.move_old_retries():
        Console().print(f"moved {num_moved} messages out of retry topics of an older version", highlight=False)
