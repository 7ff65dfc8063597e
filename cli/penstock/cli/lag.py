"""`penstock lag`: how much work waits, in tokens, and how long a new request would wait."""

import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.names import CLASSES, STAGES
from penstock.ops.lag import LagWatch, PipelineLag

WATCH_INTERVAL_S = 1.0


def lag(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with --watch one a line.")] = False,
    watch: Annotated[bool, typer.Option(help="Look again every second, until Ctrl-C.")] = False,
) -> None:
    """Show what waits in each stage, in messages and tokens, and the estimated wait of a new request."""
    source = LagWatch(load_settings(Addresses), load_settings(BusSettings))
    try:
        if as_json:
            _print_json(source, watch=watch)
        else:
            _print_table(source, watch=watch)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_json(source: LagWatch, *, watch: bool) -> None:
    while True:
        sys.stdout.write(json.dumps(source.read_latest().as_json()) + "\n")
        sys.stdout.flush()
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)


def _print_table(source: LagWatch, *, watch: bool) -> None:
    console = Console()
    if not watch:
        console.print(build_table(source.read_latest()))
        return
    with Live(build_table(source.read_latest()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            live.update(build_table(source.read_latest()), refresh=True)


def build_table(lag: PipelineLag) -> Table:
    """Return a table with one line for each class and stage."""
    table = Table("class", "stage", box=None, pad_edge=False)
    for name in ("messages", "prompt tokens", "output tokens", "estimated wait"):
        table.add_column(name, justify="right")
    for priority_class in CLASSES:
        for stage in STAGES:
            waiting = lag.stages[stage][priority_class]
            wait_s = lag.estimated_wait_s(priority_class)
            wait = "" if stage != STAGES[0] else "not known" if wait_s is None else f"{wait_s:,.1f} s"
            table.add_row(
                priority_class,
                stage,
                *map(_format_count, (waiting.messages, waiting.prompt_tokens, waiting.output_tokens)),
                wait,
            )
    return table


def _format_count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
