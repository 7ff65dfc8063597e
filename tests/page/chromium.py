"""A real Chromium, driven by Playwright; whatever a page complains about on its console is kept."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize, sync_playwright

from penstock.errors import DependencyMissing
from sim.waiting import PATIENCE_S, wait_for

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
LAPTOP, PHONE = ViewportSize(width=1360, height=880), ViewportSize(width=390, height=844)
PATIENCE_MS = 1000 * PATIENCE_S
OF_THE_NETWORK = "Failed to load resource: net::ERR_"
"""How the browser itself, not the page, notes a connection that broke."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. Raises `DependencyMissing`."""
    path = shutil.which("chromium")
    if path is None:
        raise DependencyMissing("the page's tests need Chromium; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tabs:
    """Opens pages, and knows what went wrong in any of them."""

    browser: Browser
    complaints: list[str] = field(default_factory=list)
    contexts: list[BrowserContext] = field(default_factory=list)

    def open(self, url: str, viewport: ViewportSize = LAPTOP, *, scheme: str = "light", scale: float = 1.0) -> Page:
        """The page of a gateway, in a context of its own, once it has seen the pipeline or asks for a key."""
        is_phone = viewport["width"] < 600
        context = self.browser.new_context(
            viewport=viewport,
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=scale,
            is_mobile=is_phone,
            has_touch=is_phone,
        )
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.goto(url)
        page.wait_for_selector(".worker[data-state=ready], .nobody, #key-form:not([hidden])")
        return page

    def close(self) -> None:
        """All pages."""
        for context in self.contexts:
            context.close()
        self.contexts.clear()

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning", "assert"}:
            self.complaints.append(f"{message.type}: {message.text}")


def ask(page: Page, prompt: str, max_tokens: int, **parameters: str) -> None:
    """Type and send it."""
    page.fill("#max-tokens", str(max_tokens))
    for name, value in parameters.items():
        page.fill(f"#{name}", value)
    page.wait_for_selector("#send:enabled")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def number(page: Page, selector: str) -> int:
    """What a figure of the page says."""
    text = page.inner_text(selector).replace(",", "")
    return int(text) if text.isdigit() else 0


def wait_for_tokens(page: Page, least: int) -> None:
    """Until so much of the answer is there."""
    wait_for(lambda: number(page, "#tokens") >= least, f"{least} tokens are shown", every_s=0.05)
