"""The live view as a textual app. A thread takes a snapshot every second, and the app draws the last one."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import redis
from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import DataTable, Footer, Static

from penstock.errors import PenstockError
from penstock.top import panels
from penstock.top.panels import Snapshot

REFRESH_INTERVAL_S = 1.0
HISTORY_LENGTH = 120
"""The number of snapshots that sparklines show."""


class Refreshed(Message):
    """A new snapshot, or the error that prevented one."""

    def __init__(self, snapshot: Snapshot | None, error_text: str = "") -> None:
        super().__init__()
        self.snapshot = snapshot
        self.error_text = error_text


class TopApp(App[None]):
    """Runs until `q`. `take_snapshot` is `LiveWatch.read_latest`; servers that are away are asked again."""

    TITLE = "penstock top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    .panels { height: auto; margin-bottom: 1; }
    .left { width: 54; }
    .right { width: 1fr; }
    #scaling, #regions { height: auto; margin-bottom: 1; }
    DataTable { height: 1fr; background: $background; scrollbar-size: 1 1; overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
    ]

    def __init__(self, take_snapshot: Callable[[], Snapshot], interval_s: float = REFRESH_INTERVAL_S) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        """The snapshot that is shown."""
        self.error_text = ""
        self.is_paused = False
        self.sorted_by = next(iter(panels.SORT_KEYS))
        self._take_snapshot = take_snapshot
        self._interval_s = interval_s
        self._history = {name: deque[float](maxlen=HISTORY_LENGTH) for name in panels.RATE_TITLES}
        self._ended = threading.Event()

    def compose(self) -> ComposeResult:
        """Yield the widgets, from top to bottom."""
        yield Static(id="head")
        with Horizontal(classes="panels"):
            yield Static(id="rates", classes="left")
            yield Static(id="latencies", classes="right")
        with Horizontal(classes="panels"):
            yield Static(id="lag", classes="left")
            yield Static(id="tiers", classes="right")
        yield Static(id="scaling")
        yield Static(id="regions")
        yield DataTable[object](id="workers", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill in the table's columns and start the thread."""
        table = self._workers_table()
        for name, width in panels.WORKER_COLUMNS.items():
            table.add_column(name, key=name, width=width)
        table.focus()
        self._draw_panels()
        threading.Thread(target=self._refresh_forever, name="top", daemon=True).start()

    def on_unmount(self) -> None:
        """Stop the thread."""
        self._ended.set()

    def on_refreshed(self, message: Refreshed) -> None:
        """Draw the new snapshot unless paused. After an error the last snapshot stays."""
        if self.is_paused or not self.query(DataTable):  # without a table the app is closing
            return
        self.error_text = message.error_text
        if message.snapshot is not None:
            self.snapshot = message.snapshot
            for name, history in self._history.items():
                history.append(message.snapshot["rates"][name] or 0.0)
        self._draw_panels()

    def action_pause(self) -> None:
        """Pause the view, or resume it."""
        self.is_paused = not self.is_paused
        self._draw_panels()

    def action_sort(self) -> None:
        """Sort the workers by the next column."""
        names = list(panels.SORT_KEYS)
        self.sorted_by = names[(names.index(self.sorted_by) + 1) % len(names)]
        self._draw_panels()

    def _refresh_forever(self) -> None:
        while not self._ended.is_set():
            try:
                message = Refreshed(self._take_snapshot())
            except redis.RedisError as error:
                message = Refreshed(None, f"Redis: {error}")
            except PenstockError as error:
                message = Refreshed(None, str(error))
            with suppress(RuntimeError):  # the app's loop has just ended
                self.post_message(message)
            self._ended.wait(self._interval_s)

    def _draw_panels(self) -> None:
        drawn: dict[str, RenderableType] = {
            "head": panels.build_header(self.snapshot, self.error_text, is_paused=self.is_paused),
            "rates": panels.build_rates(self.snapshot, self._history),
            "latencies": panels.build_latencies(self.snapshot),
            "lag": panels.build_lag(self.snapshot),
            "tiers": panels.build_tiers(self.snapshot),
            "scaling": panels.build_scaling(self.snapshot),
            "regions": panels.build_regions(self.snapshot),
        }
        with self.batch_update():
            for name, panel in drawn.items():
                self.query_one(f"#{name}", Static).update(panel)
            for name in ("scaling", "regions"):
                self.query_one(f"#{name}").display = bool(self.snapshot and self.snapshot[name])
            self._draw_workers()

    def _draw_workers(self) -> None:
        table = self._workers_table()
        row, scrolled = table.cursor_row, table.scroll_y
        for name, column in zip(panels.WORKER_COLUMNS, table.ordered_columns, strict=True):
            column.label = Text(f"{name} ▾" if name == self.sorted_by else name)
        table.clear()
        for cells in panels.build_worker_rows(self.snapshot, self.sorted_by):
            table.add_row(*cells)
        table.move_cursor(row=row, scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _workers_table(self) -> "DataTable[object]":
        return self.query_one("#workers", DataTable)
