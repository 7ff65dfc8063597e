"""A snapshot of `LiveWatch` as tables for 80 columns and more. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.names import CLASSES, STAGES
from penstock.top.formats import UNKNOWN, draw_bar, draw_sparkline, format_count, format_seconds, format_share

Snapshot = Mapping[str, Any]
"""A report of `penstock.ops.live`."""

TEXTS = "texts_per_s"
"""The rate that is shown where texts were computed lately."""
RATE_TITLES = {
    "requests_per_s": "requests",
    "prefill_tokens_per_s": "prompt tokens",
    "cached_tokens_per_s": "cached tokens",
    "decode_tokens_per_s": "output tokens",
    TEXTS: "texts",
}
TIER_TITLES = {"pool": "KV pool", "shm": "shared", "disk": "disk", "redis": "Redis"}
SPARKLINE_WIDTH, BAR_WIDTH = 25, 8
"""In characters."""
STATE_STYLES = {"ok": "green", "ready": "green", "degraded": "yellow", "loading": "cyan", "draining": "cyan"}
"""Colours of states; any other state is red."""
WORKER_COLUMNS = {"kind": 8, "worker": 15, "state": 13, "run": 4, "wait": 4, "tok/s": 8, "pool": 13}


def style_state(state: str, text: str = "") -> Text:
    """Return a state in its colour, or `text` in the state's colour."""
    return Text(text or state, STATE_STYLES.get(state, "bold red"))


def build_header(snapshot: Snapshot | None, error_text: str, *, is_paused: bool) -> Text:
    """Return the first line: the pipeline, its health, and why there is no newer snapshot."""
    line = Text.assemble(("penstock top", "bold"), "  ")
    if snapshot is not None:
        line.append(f"{snapshot['pipeline']}  ", "bold cyan")
    if is_paused:
        line.append("paused  ", "reverse")
    if error_text:
        line.append(f"trying again: {error_text}", "bold red")
    elif snapshot is None:
        line.append("looking …", "dim")
    else:
        line.append_text(style_state(snapshot["health"]["state"]))
        line.append("".join(f"  {reason}" for reason in snapshot["health"]["reasons"]))
    return line


def build_rates(snapshot: Snapshot | None, history: Mapping[str, Sequence[float]]) -> Table:
    """Return the rates, each with a sparkline of the last snapshots."""
    table = _make_table(("per second", "left"), ("", "right"), ("", "left"))
    for name, title in RATE_TITLES.items():
        if name == TEXTS and not any(history[name]):
            continue
        now = None if snapshot is None else snapshot["rates"][name]
        table.add_row(title, format_count(now), Text(draw_sparkline(history[name], SPARKLINE_WIDTH), "cyan"))
    return table


def build_latencies(snapshot: Snapshot | None) -> Table:
    """Return the latencies of the last minute. Those of texts are shown where there were any."""
    table = _make_table(("", "left"), *((name, "right") for name in ("p50", "p90", "p99")))
    for name, title in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("text_s", "texts")):
        of = {} if snapshot is None else snapshot[name]
        if name == "text_s" and not of.get("count"):
            continue
        table.add_row(title, *(format_seconds(of.get(part)) for part in ("p50", "p90", "p99")))
    return table


def build_lag(snapshot: Snapshot | None) -> Table:
    """Return what waits in each stage."""
    names = ("class", "stage", "queued", "prompt", "output", "wait")
    table = _make_table(*((name, "left" if at < 2 else "right") for at, name in enumerate(names)))
    for priority_class in CLASSES:
        for stage in STAGES:
            if snapshot is None:
                table.add_row(priority_class, stage, *[UNKNOWN] * 4)
                continue
            one, wait = snapshot["lag"][priority_class][stage], snapshot["lag"][priority_class]["estimated_wait_s"]
            tokens = (format_count(one[kind]) for kind in ("messages", "prompt_tokens", "output_tokens"))
            table.add_row(priority_class, stage, *tokens, format_seconds(wait) if stage == STAGES[0] else "")
    return table


def build_tiers(snapshot: Snapshot | None) -> Table:
    """Return the share of the KV blocks read lately that each tier had."""
    table = _make_table(("tier", "left"), ("hit share", "left"), ("", "right"), ("hits", "right"))
    for name, of in {} if snapshot is None else snapshot["tiers"].items():
        table.add_row(
            TIER_TITLES[name],
            Text(draw_bar(of["share"], BAR_WIDTH), "green"),
            format_share(of["share"]),
            format_count(of["hits"]),
        )
    return table


def build_scaling(snapshot: Snapshot | None) -> Table:
    """Return the controller's decision: how many workers of each kind it wants, how many there are, and why; how late
    first tokens are to be and are; its alerts. The table is empty where no controller runs.
    """
    told = (snapshot and snapshot["scaling"]) or {"reasons": {}, "alerts": ()}
    table = _make_table(("kind", "left"), ("wanted", "right"), ("there", "right"), ("why", "left"))
    for kind, reason in told["reasons"].items():
        table.add_row(kind, str(told["workers"][kind]), str(len(told["there"][kind])), reason)
    if told["reasons"]:
        times = (format_seconds(told[f"{name}_ttft_p99_s"]) for name in ("predicted", "observed"))
        table.add_row("", "", "", "TTFT p99: {} predicted, {} observed".format(*times))
    for alert in told["alerts"]:
        table.add_row("", "", "", Text(alert, "bold red"))
    return table


def build_regions(snapshot: Snapshot | None) -> Table:
    """Return the regions as a gateway sees them, this one first. The table is empty where there are none."""
    regions = [] if snapshot is None else snapshot["regions"]
    table = _make_table(("region", "left"), ("state", "left"), ("away", "right"), ("wait", "left"))
    for region in regions:
        waits = (
            f"{name} {'is another model' if model['differs'] else format_seconds(model['wait_s']['interactive'])}"
            for name, model in region["models"].items()
        )
        told = region["reason"] or ", ".join(waits)
        table.add_row(region["name"], style_state(region["state"]), format_seconds(region["round_trip_s"]), told)
    return table


def _make_table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, side in columns:
        table.add_column(name, justify=side, no_wrap=True)
    return table


SORT_KEYS: Mapping[str, Callable[[Snapshot], Any]] = {
    "kind": lambda worker: 0,
    "state": lambda worker: worker["state"] in STATE_STYLES,
    "tok/s": lambda worker: -(worker["tokens_per_s"] or 0.0),
    "pool": lambda worker: -_used_pool_share(worker),
}
"""The columns that workers can be sorted by, before stage and name. The key `s` cycles through them in this order."""


def build_worker_rows(snapshot: Snapshot | None, sort: str) -> list[tuple[Text, ...]]:
    """Return a row for each worker, lost ones included, with the columns of `WORKER_COLUMNS`."""
    if snapshot is None:
        return []
    lost = [_make_lost_worker(one) for one in snapshot["lost"]]
    listed = sorted(
        [*lost, *snapshot["workers"]], key=lambda one: (SORT_KEYS[sort](one), one["stage"] != STAGES[0], one["name"])
    )
    return [_build_worker_row(worker) for worker in listed]


def _make_lost_worker(one: Snapshot) -> dict[str, Any]:
    seen = f"lost {format_seconds(one['seen_s_ago'])}"
    unknown = dict.fromkeys(
        ("progress", "running", "waiting", "tokens_per_s", "texts_per_s", "blocks_used", "blocks_total")
    )
    return {"stage": one["stage"], "name": one["name"], "state": seen, **unknown}


def _used_pool_share(worker: Snapshot) -> float:
    return (worker["blocks_used"] or 0) / (worker["blocks_total"] or 1)


def _build_worker_row(worker: Snapshot) -> tuple[Text, ...]:
    state, text = worker["state"], worker["state"]
    if state == "loading" and worker["progress"] is not None:
        text = f"loading {worker['progress']:.0%}"
    pool = UNKNOWN
    if worker["blocks_total"]:
        pool = f"{draw_bar(_used_pool_share(worker), BAR_WIDTH)} {_used_pool_share(worker):4.0%}"
    elif worker["stage"] == "embed":
        pool = f"{format_count(worker['texts_per_s'])} texts/s"
    numbers = (format_count(worker[name]) for name in ("running", "waiting", "tokens_per_s"))
    return (
        Text(worker["stage"]),
        Text(worker["name"], overflow="ellipsis", no_wrap=True),
        style_state(state, text),
        *(Text(number, justify="right") for number in numbers),
        Text(pool),
    )
