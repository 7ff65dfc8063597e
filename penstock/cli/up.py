"""`penstock up`: the whole pipeline on this machine."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.local.stack import DEFAULT_PORT, Stack
from penstock.settings import Addresses, load
from penstock.worker import StopSignal

READY_WITHIN_S = 600.0


def data_directory() -> Path:
    """Where the embedded stack keeps its data and logs by default."""
    return Path.home() / ".local" / "share" / "penstock"


def up(
    kafka: Annotated[str, typer.Option(help="Kafka bootstrap servers; without them the bus is Redis Streams.")] = "",
    redis: Annotated[str, typer.Option(help="A Redis url; without one a server is started.")] = "",
    port: Annotated[int, typer.Option(help="Port of the server that is started.")] = DEFAULT_PORT,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Directory for data and logs.")] = None,
) -> None:
    """Start Redis (where none is given), a prefill and a decode worker, and keep them running until Ctrl-C."""
    console = Console(stderr=True)
    given = load(Addresses)
    redis = redis or (given.stream_url if "stream_url" in given.model_fields_set else "")
    directory = data or data_directory()
    stack = Stack(
        directory,
        pipeline=given.pipeline,
        kafka=kafka or given.kafka,
        redis=redis,
        port=port,
        prefill=prefill,
        decode=decode,
    )
    with stack:
        with console.status("starting") as status:
            stack.wait_ready(READY_WITHIN_S, status.update)
        stop = StopSignal().install()
        console.print(
            f"Penstock is up: pipeline [b]{stack.addresses.pipeline}[/b], logs in {directory}",
            highlight=False,
        )
        console.print("Try: penstock generate 'In the beginning'    (Ctrl-C stops)", highlight=False)
        while not stop:
            stack.tend()
            time.sleep(0.2)
        console.print("stopping")
