"""`penstock usage`: requests and tokens of each tenant, counted from the results, and what they cost."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewaySettings, load_settings
from penstock.errors import SettingsError
from penstock.names import Pipeline
from penstock.ops.account import read_account, read_prices
from penstock.redis.client import execute_pipeline, redis_client

if TYPE_CHECKING:
    from penstock.ingest.metering import UsageSums


def usage(
    days: Annotated[int, typer.Option(min=1, max=3660, help="Today and those before it, in UTC.")] = 30,
    by_day: Annotated[bool, typer.Option("--by-day", help="One line a day.")] = False,
    cost: Annotated[bool, typer.Option("--cost", help="By tenant, key, model and class, with prices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: by day, then by tenant.")] = False,
) -> None:
    """Requests and tokens of each tenant, and what they cost. A gateway counts them as results come."""
    from penstock.ingest.metering import add_sums

    if cost:
        _show_cost(days, as_json=as_json)
        return
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


def _show_cost(days: int, *, as_json: bool) -> None:
    """Print what tokens are sold for, what the workers cost, and the margin. Raise `SettingsError` without prices."""
    from penstock.ingest.metering import list_last_days

    file, addresses = load_settings(GatewaySettings).prices, load_settings(Addresses)
    if not file:
        raise SettingsError("PENSTOCK_GATEWAY_PRICES names no file of prices: docs/gateway.md has an example")
    prices = read_prices(file)
    with redis_client(addresses.first_url) as client:
        account = read_account(client, Pipeline(addresses.pipeline), list_last_days(days), prices)
    if as_json:
        rows = [whose._asdict() | asdict(row) for whose, row in sorted(account.rows.items())]
        told = {"currency": prices.currency, "idle_s": account.idle_s, "unpriced_tokens": account.num_unpriced_tokens}
        print(json.dumps({"rows": rows, **told, **account.totals}, indent=1))  # noqa: T201
        return
    table = Table("tenant", "key", "model", "class", box=None, pad_edge=False)
    for name in ("requests", "input", "cached", "output", "prefill s", "decode s", "sold", "cost", "margin"):
        table.add_column(name, justify="right")
    for whose, row in sorted(account.rows.items()):
        counts = [row.requests, row.prefill_tokens, row.cached_tokens, row.decode_tokens]
        amounts = [row.sold, row.cost, row.sold - row.cost]
        seconds = [f"{row.prefill_s:,.1f}", f"{row.decode_s:,.1f}"]
        table.add_row(*whose, *(f"{one:,}" for one in counts), *seconds, *(f"{one:,.4f}" for one in amounts))
    console, total = Console(highlight=False), account.totals
    console.print(table if account.rows else "nothing was counted")
    console.print(
        f"sold {total['sold']:,.4f} {prices.currency}, workers {total['cost']:,.4f}, idle {total['idle_cost']:,.4f} "
        f"({account.idle_s:,.0f} s), margin {total['margin']:,.4f}"
    )
    if account.num_unpriced_tokens:
        console.print(f"{account.num_unpriced_tokens:,} tokens have no price in {file}")


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
