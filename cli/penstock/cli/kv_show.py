"""The output of `penstock kv`, for 80 columns."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.errors import KVStoreError
from penstock.names import STAGES

if TYPE_CHECKING:
    from penstock.kvstore.tools import TierLocation

SUMMED_COUNTERS = ("hits", "misses", "damaged", "evictions", "refused", "errors", "bytes_read", "bytes_written")
TIER_ORDER = ("pool", "shared", "disk", "redis")
StatsRow = dict[str, Any]


def format_bytes(count: int) -> str:
    """Return a size in bytes, KiB, MiB or GiB."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= length:
            return f"{count / length:,.1f} {unit}"
    return f"{count} bytes"


def build_usage_row(place: "TierLocation") -> StatsRow:
    """Return one tier's row for `stats`, with `error` if the tier does not answer."""
    row: StatsRow = {"tier": place.name, "where": place.location}
    try:
        usage = place.read_usage()
    except KVStoreError as error:
        return row | {"error": str(error)}
    return row | asdict(usage)


def sum_by_stage(workers: Iterable[StatsRow]) -> dict[str, StatsRow]:
    """Return the live workers' KV store counters, summed by stage. Workers that report none are left out."""
    stages: dict[str, StatsRow] = {}
    for worker in workers:
        report = worker.get("kv")
        if not isinstance(report, dict):
            continue
        stage = stages.setdefault(str(worker.get("stage")), {"workers": 0, "recomputed_jobs": 0, "tiers": {}})
        stage["workers"] += 1
        stage["recomputed_jobs"] += read_counter(report.get("recomputed_jobs"))
        for tier, counters in report.items():
            if isinstance(counters, dict):
                sums = stage["tiers"].setdefault(tier, dict.fromkeys(SUMMED_COUNTERS, 0))
                for name in SUMMED_COUNTERS:
                    sums[name] += read_counter(counters.get(name))
    for stage in stages.values():
        for sums in stage["tiers"].values():
            num_lookups = sums["hits"] + sums["misses"]
            sums["hit_rate"] = sums["hits"] / num_lookups if num_lookups else None
    order = {name: index for index, name in enumerate(STAGES)}
    return dict(sorted(stages.items(), key=lambda item: order.get(item[0], len(order))))  # type: ignore[call-overload]


def read_counter(value: object) -> int:
    """Return a counter of a worker's report; 0 if it is not a number."""
    return value if isinstance(value, int) else 0


def print_stats(console: Console, rows: list[StatsRow], stages: dict[str, StatsRow]) -> None:
    """Print the table of tiers, and one of counters for each stage."""
    table = _make_table("tier", "blocks", "bytes", "budget", "leased", "retained")
    table.add_column("where", overflow="fold")
    for row in rows:
        if "error" in row:
            table.add_row(row["tier"], *["?"] * 5, f"{escape(row['where'])} [red]does not answer[/]")
            continue
        full = f" ({row['bytes'] / row['budget']:.0%})" if row["budget"] else ""
        cells = (
            f"{row['blocks']:,}",
            format_bytes(row["bytes"]) + full,
            format_bytes(row["budget"]),
            f"{row['leased']:,}",
            f"{row['retained']:,}",
        )
        table.add_row(row["tier"], *cells, escape(row["where"]))
    console.print(table)
    if not stages:
        console.print("\nno live worker says what it found")
    for stage, totals in stages.items():
        console.print(
            f"\n{escape(stage)}, live workers: {totals['workers']}, jobs computed again: {totals['recomputed_jobs']:,}"
        )
        table = _make_table("tier", "hits", "misses", "hit rate", "damaged", "read", "written")
        for tier, sums in sorted(totals["tiers"].items(), key=lambda item: (*TIER_ORDER, item[0]).index(item[0])):
            rate = "" if sums["hit_rate"] is None else f"{sums['hit_rate']:.1%}"
            counts = (f"{sums['hits']:,}", f"{sums['misses']:,}", rate, f"{sums['damaged']:,}")
            table.add_row(escape(tier), *counts, format_bytes(sums["bytes_read"]), format_bytes(sums["bytes_written"]))
        console.print(table)


def _make_table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_evict_summary(console: Console, num_removed: int, num_kept: int) -> None:
    """Print how many blocks `evict` removed, and how many leased ones it left."""
    kept = f"; {num_kept:,} are leased to jobs and stay (--leased takes them too)" if num_kept else ""
    console.print(f"removed {num_removed:,} blocks{kept}")
