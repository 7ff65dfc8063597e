"""`penstock topics create | rights | record`: topics; rights on those of one tenant; a trace of what was served."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import PlanError
from penstock.names import Pipeline

app = typer.Typer(help="Create the pipeline's topics, or record their load.", no_args_is_help=True)


@app.command("create")
def create_topics(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Its own topics, for a tenant whose data stays.")] = "",
) -> None:
    """Make the topics that are missing."""
    made = connect_bus(load_settings(Addresses), load_settings(BusSettings)).create_topics(tenant)
    for topic in made:
        Console().print(f"made {topic}", highlight=False)
    if not made:
        Console().print("all topics exist")


@app.command("rights")
def print_rights(
    tenant: Annotated[str, typer.Argument(help="A tenant with own topics.")],
    user: Annotated[str, typer.Argument(help="The user of its backend at the brokers, without `User:`.")],
) -> None:
    """Print the commands of Kafka's own tools that let a backend use the topics of one tenant alone."""
    from penstock.ops.kafka_access import list_tenant_rights  # confluent_kafka is loaded only where it is used

    addresses = load_settings(Addresses)
    for right in list_tenant_rights(Pipeline(addresses.pipeline), tenant):
        Console(soft_wrap=True).print(
            f"kafka-acls.sh --bootstrap-server {addresses.kafka or 'HOST:9092'} --add "
            f"--allow-principal {shlex.quote(f'User:{user}')} --operation {right.operation.title()} "
            f"--{right.kind.lower()} {right.name} --resource-pattern-type {right.pattern.lower()}",
            highlight=False, markup=False,
        )  # fmt: skip


@app.command("record")
def record_requests(file: Annotated[Path, typer.Argument(help="JSONL, for `penstock plan --trace`.")]) -> None:
    """Write when the requests came whose results are kept, their tokens, and which prompts begin alike. No text.

    Shared beginnings of prompts are known of requests that are still on the bus: on Redis Streams an ended request has
    left it.
    """
    from penstock.plan.recording import record_trace

    addresses = load_settings(Addresses)
    try:
        with file.open("a"):  # before all topics are read
            pass
        rows = record_trace(connect_bus(addresses, load_settings(BusSettings)), Pipeline(addresses.pipeline))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise PlanError(f"{file} cannot be written: {error.strerror}") from None
    shared = sum("hash_ids" in row for row in rows)
    Console().print(f"{len(rows):,} requests in {file}, of {shared:,} what their prompts share", highlight=False)
