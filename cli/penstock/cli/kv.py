"""`penstock kv stats | evict`: show what is in the tiers of the KV store, and remove blocks."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from penstock.cli import kv_show
from penstock.config.addresses import Addresses
from penstock.config.settings import KVSettings, load_settings
from penstock.errors import DependencyMissing, InvalidName, KVStoreError
from penstock.ops.status import read_worker_status
from penstock.redis.urls import split_urls

if TYPE_CHECKING:
    from penstock.kvstore.tiers.contract import TierEntry
    from penstock.kvstore.tools import TierLocation

app = typer.Typer(help="Look into the tiers of the KV store, and clear them.", no_args_is_help=True)

TierName = Literal["shared", "disk", "redis"]
OneTier = Annotated[TierName | None, typer.Option("--tier", help="This tier only.")]
DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command("stats")
def show_stats(
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: bytes, counts and shares as they are.")
    ] = False,
) -> None:
    """Show what each tier holds, and what the live workers found in them."""
    addresses = load_settings(Addresses)
    with open_tier_locations() as found:
        rows = [kv_show.build_usage_row(place) for place in found]
    stages = kv_show.sum_by_stage(read_worker_status(addresses))
    if as_json:
        print(json.dumps({"tiers": rows, "workers": stages}, indent=1))  # noqa: T201
    else:
        kv_show.print_stats(make_console(), rows, stages)
    raise typer.Exit(1 if any("error" in row for row in rows) else 0)


@app.command("evict")
def evict_blocks(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Blocks, in hex; beginnings that only one has will do.")
    ] = None,
    tier: OneTier = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks.")] = False,
    older_than: Annotated[str | None, typer.Option(help="Blocks not used for this long: 90s, 30m, 1h, 7d.")] = None,
    leased: Annotated[bool, typer.Option("--leased", help="Also what jobs in the queue wait for.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove blocks. They are computed again when they are needed."""
    if bool(keys) + everything + (older_than is not None) != 1:
        raise typer.BadParameter("give KEYs, --all or --older-than, one of them")
    is_old = make_age_filter(older_than) if older_than is not None else None
    with open_tier_locations(tier) as found:
        listed = [(place, place.list_entries()) for place in found]
        if keys:
            known = [entry for _, entries in listed for entry in entries]
            wanted = {find_single_key(check_key_prefix(key), known) for key in keys}
            listed = [(place, [entry for entry in entries if entry.key in wanted]) for place, entries in listed]
        elif is_old is not None:
            listed = [(place, [entry for entry in entries if is_old(entry)]) for place, entries in listed]
        num_kept = 0 if leased else sum(entry.leases > 0 for _, entries in listed for entry in entries)
        chosen = [(place, [entry for entry in entries if leased or not entry.leases]) for place, entries in listed]
        if everything and not yes:
            count = sum(len(entries) for _, entries in chosen)
            typer.confirm(f"Remove {count:,} blocks from {', '.join(place.name for place in found)}?", abort=True)
        num_removed = remove_blocks(chosen)
    kv_show.print_evict_summary(make_console(), num_removed, num_kept)


def remove_blocks(chosen: "list[tuple[TierLocation, list[TierEntry]]]") -> int:
    """Remove the chosen blocks of each tier and return how many there were."""
    from penstock.kvstore.tools import remove_in_batches

    num_removed = 0
    with make_progress_bar() as bar:
        for place, entries in chosen:
            task = bar.add_task(place.name, total=sum(entry.bytes for entry in entries))
            for count, num_bytes in remove_in_batches(place, entries):
                num_removed += count
                bar.advance(task, num_bytes)
    return num_removed


@contextmanager
def open_tier_locations(tier: TierName | None = None) -> "Iterator[list[TierLocation]]":
    """Open the tiers of the settings, or one of them. Raises `KVStoreError` without any, or `DependencyMissing`."""
    try:
        from penstock.kvstore.tools import open_tiers
    except ImportError as error:
        raise DependencyMissing(
            f"penstock kv needs xxhash: pip install xxhash, or 'penstock[worker]' ({error})"
        ) from None
    logging.getLogger("penstock.kvstore").setLevel(logging.ERROR)  # this command reports a tier that does not answer
    addresses = load_settings(Addresses)
    with ExitStack() as stack:
        urls = split_urls(addresses.kv_url or addresses.stream_url)
        found = open_tiers(
            load_settings(KVSettings), urls, stack, tier, Console(stderr=True, highlight=False, markup=False).print
        )
        if not found:
            raise KVStoreError(f"there is no {tier or 'KV'} tier here by these settings (PENSTOCK_KV_STORE_…)")
        yield found


def check_key_prefix(text: str) -> str:
    """Return the beginning of a block key in lower case. Raises `InvalidName` if it is not hex or too long."""
    if re.fullmatch("[0-9a-fA-F]{1,64}", text) is None:
        raise InvalidName(f"{text!r} is no key of a block: up to 64 hex digits")
    return text.lower()


def find_single_key(prefix: str, entries: "list[TierEntry]") -> bytes:
    """Return the only key with this beginning. Raises `InvalidName` if several have it, `KVStoreError` if none has."""
    found = sorted({entry.key for entry in entries if entry.key.hex().startswith(prefix)})
    if not found:
        raise KVStoreError(f"no block's key begins with {prefix}")
    if len(found) > 1:
        some = ", ".join(key.hex()[: len(prefix) + 8] + "…" for key in found[:3])
        raise InvalidName(f"{len(found):,} blocks' keys begin with {prefix}: {some}")
    return found[0]


def make_age_filter(text: str) -> "Callable[[TierEntry], bool]":
    """Return a test for blocks not used for a duration such as "90s" or "7d". Raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time: write 90s, 30m, 1h or 7d")
    before_s = time.time() - float(match[1]) * DURATION_UNITS_S[match[2]]
    return lambda entry: entry.used_s <= before_s


def make_progress_bar() -> Progress:
    """Return a progress bar that counts bytes; it is hidden where standard error is not a terminal."""
    screen = Console(stderr=True, highlight=False)
    columns: list[Any] = [
        TextColumn("{task.description:6}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]  # fmt: skip
    return Progress(*columns, console=screen, disable=not screen.is_terminal, redirect_stdout=sys.stdout.isatty())


def make_console() -> Console:
    """Return a console that prints to standard output, without highlighting."""
    return Console(highlight=False)
