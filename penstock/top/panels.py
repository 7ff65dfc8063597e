"""What `LiveWatch` found, as tables for 80 columns and more. Nothing here asks anybody."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.names import CLASSES, STAGES
from penstock.top.figures import UNKNOWN, bar, count, seconds, share, sparkline

Look = Mapping[str, Any]
"""See `penstock.ops.live`."""

RATES = {
    "requests_per_s": "requests",
    "prefill_tokens_per_s": "prompt tokens",
    "cached_tokens_per_s": "cached tokens",
    "decode_tokens_per_s": "output tokens",
}
SPARK, BAR = 25, 8
"""Their widths."""
STYLES = {"ok": "green", "ready": "green", "degraded": "yellow", "loading": "cyan", "draining": "cyan"}
"""Of states; red is any other."""
COLUMNS = {"stage": 7, "worker": 16, "state": 13, "run": 4, "wait": 4, "tok/s": 8, "pool": 13}


def styled(state: str, text: str = "") -> Text:
    """A state in its colour."""
    return Text(text or state, STYLES.get(state, "bold red"))


def head(found: Look | None, trouble: str, *, is_paused: bool) -> Text:
    """One line: which pipeline, how it is, and what is in the way of knowing."""
    line = Text.assemble(("penstock top", "bold"), "  ")
    if found is not None:
        line.append(f"{found['pipeline']}  ", "bold cyan")
    if is_paused:
        line.append("paused  ", "reverse")
    if trouble:
        line.append(f"trying again: {trouble}", "bold red")
    elif found is None:
        line.append("looking …", "dim")
    else:
        line.append_text(styled(found["health"]["state"]))
        line.append("".join(f"  {reason}" for reason in found["health"]["reasons"]))
    return line


def rates(found: Look | None, history: Mapping[str, Sequence[float]]) -> Table:
    """What flows, each with its last looks."""
    table = _table(("per second", "left"), ("", "right"), ("", "left"))
    for name, title in RATES.items():
        now = None if found is None else found["rates"][name]
        table.add_row(title, count(now), Text(sparkline(history[name], SPARK), "cyan"))
    return table


def latencies(found: Look | None) -> Table:
    """Of the last minute."""
    table = _table(("", "left"), *((name, "right") for name in ("p50", "p90", "p99")))
    for name, title in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
        of = {} if found is None else found[name]
        table.add_row(title, *(seconds(of.get(part)) for part in ("p50", "p90", "p99")))
    return table


def lag(found: Look | None) -> Table:
    """What waits in each stage."""
    names = ("class", "stage", "waiting", "prompt", "output", "wait")
    table = _table(*((name, "left" if at < 2 else "right") for at, name in enumerate(names)))
    for klass in CLASSES:
        for stage in STAGES:
            if found is None:
                table.add_row(klass, stage, *[UNKNOWN] * 4)
                continue
            one, wait = found["lag"][klass][stage], found["lag"][klass]["estimated_wait_s"]
            tokens = (count(one[kind]) for kind in ("messages", "prompt_tokens", "output_tokens"))
            table.add_row(klass, stage, *tokens, seconds(wait) if stage == STAGES[0] else "")
    return table


def tiers(found: Look | None) -> Table:
    """Of the KV blocks wanted lately, how many each tier had."""
    table = _table(("tier", "left"), ("hit share", "left"), ("", "right"), ("hits", "right"))
    for name, of in {} if found is None else found["tiers"].items():
        table.add_row(name, Text(bar(of["share"], BAR), "green"), share(of["share"]), count(of["hits"]))
    return table


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, side in columns:
        table.add_column(name, justify=side, no_wrap=True)
    return table


SORTS: Mapping[str, Callable[[Look], Any]] = {
    "stage": lambda worker: 0,
    "state": lambda worker: worker["state"] in STYLES,
    "tok/s": lambda worker: -(worker["tokens_per_s"] or 0.0),
    "pool": lambda worker: -_pool(worker),
}
"""What workers are sorted by, in the order in which the key goes round; then by stage and name."""


def workers(found: Look | None, sort: str) -> list[tuple[Text, ...]]:
    """A row for each worker, those that were lost included, in `COLUMNS`."""
    if found is None:
        return []
    lost = [_lost(one) for one in found["lost"]]
    listed = sorted(
        [*lost, *found["workers"]], key=lambda one: (SORTS[sort](one), one["stage"] != STAGES[0], one["name"])
    )
    return [_row(worker) for worker in listed]


def _lost(one: Look) -> dict[str, Any]:
    seen = f"lost {seconds(one['seen_s_ago'])}"
    unknown = dict.fromkeys(("progress", "running", "waiting", "tokens_per_s", "blocks_used", "blocks_total"))
    return {"stage": one["stage"], "name": one["name"], "state": seen, **unknown}


def _pool(worker: Look) -> float:
    return (worker["blocks_used"] or 0) / (worker["blocks_total"] or 1)


def _row(worker: Look) -> tuple[Text, ...]:
    state, told = worker["state"], worker["state"]
    if state == "loading" and worker["progress"] is not None:
        told = f"loading {worker['progress']:.0%}"
    pool = f"{bar(_pool(worker), BAR)} {_pool(worker):4.0%}" if worker["blocks_total"] else UNKNOWN
    numbers = (count(worker[name]) for name in ("running", "waiting", "tokens_per_s"))
    return (
        Text(worker["stage"]),
        Text(worker["name"], overflow="ellipsis", no_wrap=True),
        styled(state, told),
        *(Text(number, justify="right") for number in numbers),
        Text(pool),
    )
