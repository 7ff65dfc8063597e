"""The live view as a textual app. A thread of its own looks; the app draws what it last found."""

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
"""Looks that sparklines may go back."""


class Refreshed(Message):
    """What a look found, or why it found nothing."""

    def __init__(self, found: Snapshot | None, trouble: str = "") -> None:
        super().__init__()
        self.snapshot = found
        self.error_text = trouble


class TopApp(App[None]):
    """Runs until `q`. `look` is `LiveWatch.read_latest`; servers that are away are asked again."""

    TITLE = "penstock top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    .panels { height: 5; margin-bottom: 1; }
    .left { width: 54; }
    .right { width: 1fr; }
    DataTable { height: 1fr; background: $background; scrollbar-size: 1 1; overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
    ]

    def __init__(self, look: Callable[[], Snapshot], interval_s: float = REFRESH_INTERVAL_S) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        """What is shown."""
        self.error_text = ""
        self.is_paused = False
        self.sorted_by = next(iter(panels.SORT_KEYS))
        self._take_snapshot = look
        self._interval_s = interval_s
        self._history = {name: deque[float](maxlen=HISTORY_LENGTH) for name in panels.RATE_TITLES}
        self._ended = threading.Event()

    def compose(self) -> ComposeResult:
        """From the top of the screen to its end."""
        yield Static(id="head")
        with Horizontal(classes="panels"):
            yield Static(id="rates", classes="left")
            yield Static(id="latencies", classes="right")
        with Horizontal(classes="panels"):
            yield Static(id="lag", classes="left")
            yield Static(id="tiers", classes="right")
        yield DataTable[object](id="workers", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        table = self._workers_table()
        for name, width in panels.WORKER_COLUMNS.items():
            table.add_column(name, key=name, width=width)
        table.focus()
        self._draw_panels()
        threading.Thread(target=self._refresh_forever, name="top", daemon=True).start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._ended.set()

    def on_refreshed(self, message: Refreshed) -> None:
        """Draw it, unless paused. Where a look failed the last figures stay."""
        if self.is_paused or not self.query(DataTable):  # without a table: it is leaving
            return
        self.error_text = message.error_text
        if message.snapshot is not None:
            self.snapshot = message.snapshot
            for name, history in self._history.items():
                history.append(message.snapshot["rates"][name] or 0.0)
        self._draw_panels()

    def action_pause(self) -> None:
        """Hold what is shown, or go on."""
        self.is_paused = not self.is_paused
        self._draw_panels()

    def action_sort(self) -> None:
        """By the next column."""
        names = list(panels.SORT_KEYS)
        self.sorted_by = names[(names.index(self.sorted_by) + 1) % len(names)]
        self._draw_panels()

    def _refresh_forever(self) -> None:
        while not self._ended.is_set():
            try:
                looked = Refreshed(self._take_snapshot())
            except redis.RedisError as error:
                looked = Refreshed(None, f"Redis: {error}")
            except PenstockError as error:
                looked = Refreshed(None, str(error))
            with suppress(RuntimeError):  # its loop has just ended
                self.post_message(looked)
            self._ended.wait(self._interval_s)

    def _draw_panels(self) -> None:
        drawn: dict[str, RenderableType] = {
            "head": panels.build_header(self.snapshot, self.error_text, is_paused=self.is_paused),
            "rates": panels.build_rates(self.snapshot, self._history),
            "latencies": panels.build_latencies(self.snapshot),
            "lag": panels.build_lag(self.snapshot),
            "tiers": panels.build_tiers(self.snapshot),
        }
        with self.batch_update():
            for name, panel in drawn.items():
                self.query_one(f"#{name}", Static).update(panel)
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
