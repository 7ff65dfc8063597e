"""`penstock top` on a real pipeline, driven as at a terminal of 80 columns and 24 lines."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.ops.live import LiveWatch
from penstock.top.app import TopApp
from penstock.top.panels import Snapshot
from sim.servers import start_or_skip
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.top import busy
from tests.top.screenshot import without_fonts

SIZE = (80, 24)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path_factory.mktemp("server"))
    start_or_skip(made.start)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, server: ValkeyServer) -> Iterator[Stack]:
    with busy.start_pipeline(tmp_path_factory.mktemp("stack"), server) as made:
        yield made


def shown(app: TopApp) -> list[str]:
    """The lines on the screen."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def until(pilot: Pilot[None], is_so: Callable[[list[str]], bool], what: str) -> list[str]:
    """Wait until the screen is so."""
    assert isinstance(pilot.app, TopApp)
    end = time.monotonic() + PATIENCE_S
    while not is_so(lines := shown(pilot.app)):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}\n" + "\n".join(lines)
        await pilot.pause(0.05)
    return lines


def line_of(lines: list[str], *words: str) -> str:
    """The first line in which all the words are; empty if there is none."""
    return next((line for line in lines if all(word in line for word in words)), "")


def opened(stack: Stack) -> TopApp:
    return TopApp(LiveWatch(stack.addresses, BusSettings()).read_latest, interval_s=0.1)


@pytest.mark.proof
async def test_what_flows_is_shown_and_keys_do_what_they_say(stack: Stack) -> None:
    app = opened(stack)
    async with app.run_test(size=SIZE) as pilot:
        busy.submit_requests(stack, 24, 200)

        def is_busy(lines: list[str]) -> bool:
            first, between, flow = line_of(lines, "TTFT"), line_of(lines, "ITL"), line_of(lines, "output tokens")
            has_flow = " ms" in first + between and "–" not in between and any(level in flow for level in "▂▃▄▅▆▇█")
            ready = [line_of(lines, name, "ready", "%") for name in ("prefill-0", "decode-0", "decode-1")]
            return has_flow and all(ready) and bool(line_of(lines, "penstock top", "demo", "ok"))

        lines = await until(pilot, is_busy, "figures of what flows, from workers that are ready")
        assert [len(line) for line in lines] == [80] * 24
        assert line_of(lines, "interactive", "prefill")
        assert line_of(lines, "batch", "decode")
        await until(pilot, lambda lines: bool(line_of(lines, "q Quit", "p Pause", "s Sort")), "the keys")

        await pilot.press("p")
        held = app.snapshot
        assert held is not None
        newer = LiveWatch(stack.addresses, BusSettings())
        await until(pilot, lambda _: newer.read_latest()["at"] > held["at"] + 1.5, "time passes")
        assert app.snapshot is held, "paused"
        await until(pilot, lambda lines: bool(line_of(lines, "paused")), "it says so")
        await pilot.press("p")
        await until(pilot, lambda _: app.snapshot is not held, "it goes on")

        await pilot.press("s", "s")
        lines = await until(pilot, lambda lines: bool(line_of(lines, "tok/s ▾")), "sorted")
        assert app.sorted_by == "tok/s"
        await pilot.press("down", "down")
        table = app._workers_table()
        await until(pilot, lambda _: table.cursor_row == 2, "the cursor stays where it was moved while figures change")
        await pilot.press("q")
    assert app._ended.is_set()


async def test_more_workers_than_lines_are_scrolled_and_lost_ones_are_said(stack: Stack) -> None:
    found = LiveWatch(stack.addresses, BusSettings()).read_latest()
    many = [found["workers"][0] | {"name": f"prefill-{number:02}"} for number in range(30)]
    lost = [{"stage": "prefill", "name": "prefill-30", "seen_s_ago": 2.0}]
    app = TopApp(lambda: found | {"workers": many, "lost": lost})
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda lines: bool(line_of(lines, "prefill-00")), "the first")
        assert line_of(shown(app), "prefill-30", "lost 2.0 s")
        assert not line_of(shown(app), "prefill-29")
        await pilot.press("ctrl+end")
        lines = await until(pilot, lambda lines: bool(line_of(lines, "prefill-29")), "the last")
        assert [len(line) for line in lines] == [80] * 24
        picture = app.export_screenshot()
        assert "cdn" in picture, "its fonts"
        assert "cdn" not in without_fonts(picture)
        assert "prefill-29" in without_fonts(picture)


async def test_a_controller_is_shown_where_one_runs(stack: Stack) -> None:
    found, told = LiveWatch(stack.addresses, BusSettings()).read_latest(), list[dict[str, Any] | None]([None])
    decision = {
        "workers": {"auto": 3, "prefill": 0, "decode": 0}, "reasons": {"auto": "backlog: 2 to 3"},
        "there": {"auto": ["auto-0", "auto-1"]}, "alerts": ["a start of kind auto is not over"],
        "predicted_ttft_p99_s": 1.25, "observed_ttft_p99_s": None,
    }  # fmt: skip
    regions = list[dict[str, Any]]()
    app = TopApp(lambda: found | {"scaling": told[0], "regions": regions}, interval_s=0.1)
    async with app.run_test(size=SIZE) as pilot:
        lines = await until(pilot, lambda lines: bool(line_of(lines, "decode-0")), "figures")
        assert not line_of(lines, "wanted"), "none runs"
        told[0] = decision
        lines = await until(pilot, lambda lines: bool(line_of(lines, "3", "2", "backlog: 2 to 3")), "the numbers")
        assert line_of(lines, "TTFT p99: 1.2 s predicted, – observed")
        assert line_of(lines, "a start of kind auto is not over")
        assert line_of(lines, "decode-0"), "workers have the rest of the screen"
        told[0] = None
        await until(pilot, lambda lines: not line_of(lines, "wanted"), "it has ended")
        models = {"demo": {"wait_s": {"interactive": 0.25}, "differs": False}, "chat": {"differs": True}}
        regions += [
            {"name": "us", "state": "ready", "reason": "", "round_trip_s": 0.08, "models": models},
            {"name": "asia", "state": "unknown", "reason": "no connection", "round_trip_s": None, "models": {}},
        ]
        lines = await until(pilot, lambda lines: bool(line_of(lines, "asia", "unknown", "no connection")), "regions")
        assert line_of(lines, "us", "ready", "80 ms", "demo 250 ms, chat is another model")


async def test_a_redis_that_goes_and_comes_back(stack: Stack, server: ValkeyServer) -> None:
    async with opened(stack).run_test(size=SIZE) as pilot:
        await until(pilot, lambda lines: bool(line_of(lines, "decode-0", "ready")), "figures")
        server.stop()
        lines = await until(pilot, lambda lines: bool(line_of(lines, "trying again: Redis")), "it says so")
        assert line_of(lines, "decode-0"), "the last figures stay"
        server.start()
        await until(pilot, lambda lines: bool(line_of(lines, "penstock top", "demo  ok")), "all is as before")


async def test_a_bus_that_is_away_at_first(stack: Stack) -> None:
    real, is_back = LiveWatch(stack.addresses, BusSettings()), threading.Event()

    def read_snapshot() -> Snapshot:
        if not is_back.is_set():
            raise BusUnavailable("Kafka: no broker answers")
        return real.read_latest()

    async with TopApp(read_snapshot, interval_s=0.1).run_test(size=SIZE) as pilot:
        await until(pilot, lambda lines: bool(line_of(lines, "trying again: Kafka: no broker answers")), "it says so")
        is_back.set()
        await until(pilot, lambda lines: bool(line_of(lines, "decode-0")), "it goes on")


def test_plan_asks_the_workers_that_run(stack: Stack, terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at_s": 0, "prompt_tokens": 10, "output_tokens": 10}')
    url = {"PENSTOCK_STREAM_URL": stack.addresses.stream_url}
    printed: list[str] = []

    def has_plan() -> bool:
        busy.submit_requests(stack, 4, 40)  # each time: a worker that started since has measured none of those before
        done = terminal("plan", "--trace", str(tmp_path / "trace"), "--json", **url)
        # Those who were stopped and killed before may still start, or have measured nothing yet.
        assert done.returncode == 0 or "has measured its rate: send some requests" in done.stderr, done.stderr
        printed[:] = [done.stdout]
        return done.returncode == 0

    wait_for(has_plan, "both stages have measured themselves", every_s=0.1)
    made: dict[str, Any] = json.loads(printed[0])
    assert made["rates"]["pool_blocks"] == 341
    assert made["rates"]["prefill_tokens_per_s"] > 0
    assert made["waits"]["ttft_p99_s"] > 0.0


def test_the_command_says_what_it_needs(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`penstock top` draws on a terminal" in terminal("top").stderr
    monkeypatch.delitem(sys.modules, "penstock.top.app")
    monkeypatch.setitem(sys.modules, "textual.app", None)
    done = terminal("top")
    assert "pip install 'penstock[top]'" in done.stderr
    assert done.returncode == 1
