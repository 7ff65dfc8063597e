"""`penstock usage`: requests and tokens of each tenant, counted from the results."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import load_settings
from penstock.names import Pipeline
from penstock.redis.client import execute_pipeline, redis_client

if TYPE_CHECKING:
    from penstock.ingest.metering import UsageSums


def usage(
    days: Annotated[int, typer.Option(min=1, max=3660, help="Today and those before it, in UTC.")] = 30,
    by_day: Annotated[bool, typer.Option("--by-day", help="One line a day.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: by day, then by tenant.")] = False,
) -> None:
    """Requests and tokens of each tenant. A gateway counts them as results come."""
    from penstock.ingest.metering import add_sums

    found = _read_usage(days)
    if as_json:
        body = {day: {name: asdict(sums) for name, sums in tenants.items()} for day, tenants in found.items()}
        print(json.dumps(body, indent=1))  # noqa: T201
        return
    rows = [(day, name, sums) for day, tenants in found.items() for name, sums in sorted(tenants.items())]
    if not by_day:
        names = sorted({name for _, name, _ in rows})
        rows = [("", name, add_sums(sums for _, other, sums in rows if other == name)) for name in names]
    console = Console(highlight=False)
    console.print(_build_table(rows, by_day=by_day) if rows else "nothing was counted")


def _read_usage(days: int) -> "dict[str, dict[str, UsageSums]]":
    """Return the sums by day, then by tenant. Days without results are left out."""
    from penstock.ingest.metering import list_last_days, make_day_keys, parse_day_sums

    addresses, wanted = load_settings(Addresses), list_last_days(days)
    with redis_client(addresses.first_url) as client, client.pipeline(transaction=False) as batch:
        for key in make_day_keys(Pipeline(addresses.pipeline), wanted):
            batch.hgetall(key)
        return {day: parse_day_sums(reply) for day, reply in zip(wanted, execute_pipeline(batch), strict=True) if reply}


def _build_table(rows: "list[tuple[str, str, UsageSums]]", *, by_day: bool) -> Table:
    from penstock.ingest.metering import USAGE_COUNTERS

    table = Table(*(["day"] if by_day else []), "tenant", box=None, pad_edge=False)
    for name in USAGE_COUNTERS:
        table.add_column(name.replace("_", " "), justify="right")
    for day, name, sums in rows:
        counts: list[Any] = [f"{getattr(sums, counter):,}" for counter in USAGE_COUNTERS]
        table.add_row(*([day] if by_day else []), name, *counts)
    return table
