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
from penstock.top.panels import Look

INTERVAL_S = 1.0
KEPT = 120
"""Looks that sparklines may go back."""


class Looked(Message):
    """What a look found, or why it found nothing."""

    def __init__(self, found: Look | None, trouble: str = "") -> None:
        super().__init__()
        self.found = found
        self.trouble = trouble


class Top(App[None]):
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

    def __init__(self, look: Callable[[], Look], interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self.found: Look | None = None
        """What is shown."""
        self.trouble = ""
        self.is_paused = False
        self.sorted_by = next(iter(panels.SORTS))
        self._look = look
        self._interval_s = interval_s
        self._history = {name: deque[float](maxlen=KEPT) for name in panels.RATES}
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
        table = self._table()
        for name, width in panels.COLUMNS.items():
            table.add_column(name, key=name, width=width)
        table.focus()
        self._draw()
        threading.Thread(target=self._watch, name="top", daemon=True).start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._ended.set()

    def on_looked(self, message: Looked) -> None:
        """Draw it, unless paused. Where a look failed the last figures stay."""
        if self.is_paused or not self.query(DataTable):  # without a table: it is leaving
            return
        self.trouble = message.trouble
        if message.found is not None:
            self.found = message.found
            for name, history in self._history.items():
                history.append(message.found["rates"][name] or 0.0)
        self._draw()

    def action_pause(self) -> None:
        """Hold what is shown, or go on."""
        self.is_paused = not self.is_paused
        self._draw()

    def action_sort(self) -> None:
        """By the next column."""
        names = list(panels.SORTS)
        self.sorted_by = names[(names.index(self.sorted_by) + 1) % len(names)]
        self._draw()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                looked = Looked(self._look())
            except redis.RedisError as error:
                looked = Looked(None, f"Redis: {error}")
            except PenstockError as error:
                looked = Looked(None, str(error))
            with suppress(RuntimeError):  # its loop has just ended
                self.post_message(looked)
            self._ended.wait(self._interval_s)

    def _draw(self) -> None:
        drawn: dict[str, RenderableType] = {
            "head": panels.head(self.found, self.trouble, is_paused=self.is_paused),
            "rates": panels.rates(self.found, self._history),
            "latencies": panels.latencies(self.found),
            "lag": panels.lag(self.found),
            "tiers": panels.tiers(self.found),
        }
        with self.batch_update():
            for name, panel in drawn.items():
                self.query_one(f"#{name}", Static).update(panel)
            self._draw_workers()

    def _draw_workers(self) -> None:
        table = self._table()
        row, scrolled = table.cursor_row, table.scroll_y
        for name, column in zip(panels.COLUMNS, table.ordered_columns, strict=True):
            column.label = Text(f"{name} ▾" if name == self.sorted_by else name)
        table.clear()
        for cells in panels.workers(self.found, self.sorted_by):
            table.add_row(*cells)
        table.move_cursor(row=row, scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _table(self) -> "DataTable[object]":
        return self.query_one("#workers", DataTable)
