"""`python -m tests.page.screenshots docs/screenshots`: pictures of the page with a busy pipeline behind it.

light.png and dark.png as a laptop shows it, phone.png as three screens of a phone. The answer in them was cut off by a
proxy and went on.
"""

import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, ViewportSize

from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from sim.chaos.proxy import Proxy
from sim.waiting import PATIENCE_S, wait_for
from tests.page.chromium import PHONE, Tabs, ask, chromium, wait_for_tokens

PROMPT = "Tell me of the waters above the firmament."
PSALM = "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures. "
NUM_INTERACTIVE, NUM_BATCH = 10, 14
SHEET = ViewportSize(width=1360, height=1000)
SCREENS = ("header", "#life", "#pipeline")
GAP = 24


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Readers of both classes, each with one request after the other."""
    over = threading.Event()

    def go_on(number: int, priority_class: str, max_tokens: int) -> None:
        with httpx.Client(timeout=None) as client:
            turn = 0
            while not over.is_set():
                turn += 1
                start = f"{number}, {turn}. " if number % 3 else ""
                text = start + PSALM * (3 + number % 4) + f"Psalm {turn}."
                body = {"model": "demo", "prompt": text, "max_tokens": max_tokens, "service_tier": priority_class}
                client.post(f"{url}/v1/completions", json=body)

    classes = [("default", 60)] * NUM_INTERACTIVE + [("flex", 120)] * NUM_BATCH
    threads = [threading.Thread(target=go_on, args=(number, *one)) for number, one in enumerate(classes)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def answer(page: Page, proxy: Proxy) -> None:
    """Ask, lose the connection, and wait for the end and for the timeline."""
    ask(page, PROMPT, 110, seed="7")
    wait_for_tokens(page, 40)
    proxy.cut_connections()
    page.wait_for_selector("#bars[data-whole=true]")


def seen_for(page: Page, seconds: int) -> None:
    """Until the lines are that long."""
    oldest = page.locator("[data-spark=decode] .oldest")
    wait_for(lambda: int(oldest.inner_text().partition(" ")[0] or 0) >= seconds, "lines are long", every_s=0.2)


def saved(picture: Image.Image, file: Path) -> None:
    """With as few colours as it needs: a picture in a repository is small."""
    picture.quantize(192).save(file, optimize=True)
    print(f"{file}: {picture.width} x {picture.height}, {file.stat().st_size // 1000} kB")  # noqa: T201


def shot(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def screens(page: Page) -> Image.Image:
    """What a phone shows of each part, side by side."""
    found = []
    for part in SCREENS:
        page.evaluate("(part) => document.querySelector(part).scrollIntoView({behavior: 'instant'})", part)
        found.append(shot(page))
    width, height = found[0].size
    sheet = Image.new("RGB", (len(found) * width + (len(found) - 1) * GAP, height), "#8ea0a8")
    for number, screen in enumerate(found):
        sheet.paste(screen, (number * (width + GAP), 0))
    return sheet


def main(folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    views = (("light", SHEET, "light", 1.0), ("dark", SHEET, "dark", 1.0), ("phone", PHONE, "light", 1.5))
    with (
        tempfile.TemporaryDirectory() as scratch,
        Stack(Path(scratch), pipeline="demo", decode=0, auto=1, gateway=find_free_port()) as stack,
    ):
        stack.wait_until_ready(PATIENCE_S)
        port = int(stack.gateway_url.rpartition(":")[2])
        with chromium() as browser, Proxy(port) as proxy, busy(stack.gateway_url):
            tabs = Tabs(browser)
            pages = [tabs.open(f"http://127.0.0.1:{proxy.port}/", view, scheme=scheme, scale=scale)
                     for _, view, scheme, scale in views]  # fmt: skip
            for page, (name, *_) in zip(pages, views, strict=True):
                page.set_default_timeout(600_000)
                answer(page, proxy)
                seen_for(page, 45)
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                saved(screens(page) if name == "phone" else shot(page), folder / f"{name}.png")
            tabs.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
