"""The output of `penstock kv`, for 80 columns."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.errors import KVStoreError
from penstock.names import STAGES

if TYPE_CHECKING:
    from penstock.kvstore.tiers.contract import TierEntry
    from penstock.kvstore.tools import BlockReport, TierLocation

SUMMED_COUNTERS = ("hits", "misses", "damaged", "evictions", "refused", "errors", "bytes_read", "bytes_written")
TIER_ORDER = ("pool", "shared", "disk", "redis")
StatsRow = dict[str, Any]


def format_bytes(count: int) -> str:
    """Return a size in bytes, KiB, MiB or GiB."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= length:
            return f"{count / length:,.1f} {unit}"
    return f"{count} bytes"


def format_age(seconds: float) -> str:
    """Return an age in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


# stats


def build_usage_row(place: "TierLocation") -> StatsRow:
    """Return one tier's row for `stats`, with `error` if the tier does not answer."""
    row: StatsRow = {"tier": place.name, "where": place.location}
    try:
        usage = place.read_usage()
    except KVStoreError as error:
        return row | {"error": str(error)}
    return row | {"blocks": usage.blocks, "bytes": usage.bytes, "budget": usage.budget, "leased": usage.leased}


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
    table = _make_table("tier", "blocks", "bytes", "budget", "leased")
    table.add_column("where", overflow="fold")
    for row in rows:
        if "error" in row:
            table.add_row(row["tier"], *["?"] * 4, f"{escape(row['where'])} [red]does not answer[/]")
            continue
        full = f" ({row['bytes'] / row['budget']:.0%})" if row["budget"] else ""
        cells = (
            f"{row['blocks']:,}",
            format_bytes(row["bytes"]) + full,
            format_bytes(row["budget"]),
            f"{row['leased']:,}",
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


# inspect


def print_block(console: Console, place: "TierLocation", entry: "TierEntry") -> bool:
    """Print one block of one tier, and return whether it is damaged."""
    from penstock.kvstore.tools import codec_name, inspect_block

    finding = inspect_block(place, entry.key)
    if finding is None:
        console.print(f"{entry.key.hex()}: gone from {place.name} while it was looked for")
        return False
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.used_s))
    lines = {
        "tier": f"{place.name}, {place.location}",
        "bytes": f"{finding.bytes:,}, counted as {entry.bytes:,}",
        "last used": f"{used}, {format_age(time.time() - entry.used_s)}",
        "leases": str(entry.leases),
        "header": finding.header_problem or "right",
    }
    if finding.header is not None:
        header = finding.header
        lines |= {
            "content": finding.content_problem or "right",
            "tokens": str(header.key.num_tokens),
            "codec": f"{codec_name(header.codec)}, {header.content_bytes:,} bytes for {header.payload_bytes:,}",
            "model": header.fingerprint.hex(),
            "layout": header.layout.hex(),
            "tenant tag": header.key.tenant_tag.hex(),
        }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, width=10)
    table.add_column(overflow="fold")
    table.add_row("block", f"[bold]{entry.key.hex()}[/]")
    for name, text in lines.items():
        wrong = text in (finding.header_problem, finding.content_problem)
        table.add_row(name, f"[red]{escape(text)}[/]" if wrong else escape(text))
    console.print(table)
    console.print()
    return bool(finding.problem)


# verify and evict


def print_damage(console: Console, place: "TierLocation", finding: "BlockReport") -> None:
    """Print one damaged block."""
    console.print(f"{place.name:6} {finding.key.hex()}\n       [red]{escape(finding.problem)}[/]", soft_wrap=True)


def print_verify_summary(
    console: Console, num_checked: int, num_bytes: int, num_damaged: int, num_removed: int | None
) -> None:
    """Print what `verify` found. `num_removed` is None unless removal was asked for."""
    if not num_damaged:
        console.print(f"checked {num_checked:,} blocks, {format_bytes(num_bytes)}: all whole")
        return
    removed = "" if num_removed is None else f", {num_removed:,} removed"
    console.print(f"checked {num_checked:,} blocks, {format_bytes(num_bytes)}: {num_damaged:,} damaged{removed}")


def print_evict_summary(console: Console, num_removed: int, num_kept: int) -> None:
    """Print how many blocks `evict` removed, and how many leased ones it left."""
    kept = f"; {num_kept:,} are leased to jobs and stay (--leased takes them too)" if num_kept else ""
    console.print(f"removed {num_removed:,} blocks{kept}")
