"""Images on the page: chosen, pasted, dropped, removed and sent, in a real browser over a scripted model."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from penstock.names import Pipeline
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.page.chromium import PATIENCE_MS, PHONE, Tabs
from tests.page.test_page import SMALLER
from tests.record.play import end
from tests.test_pictures import GIF, JPEG, PNG, WEBP

expect.set_options(timeout=PATIENCE_MS)
SETTINGS = {"PICTURE_MAX_COUNT": "3", "PICTURE_MAX_MB": "0.01"}
GIVE = """([kind, files]) => {
    const held = new DataTransfer();
    for (const { name, mimeType, buffer } of files) {
        const bytes = Uint8Array.from(atob(buffer), (letter) => letter.charCodeAt(0));
        held.items.add(new File([bytes], name, { type: mimeType }));
    }
    const how = { bubbles: true, cancelable: true };
    const event = kind === "paste" ? new ClipboardEvent(kind, { ...how, clipboardData: held })
        : new DragEvent(kind, { ...how, dataTransfer: held });
    return document.querySelector("#prompt").dispatchEvent(event);
}"""
"""Dispatches what a browser does; false: the page has taken the files, and the browser does nothing with them."""


OPENS = """() => {
    const input = document.querySelector("#image-files");
    delete input.dataset.opened;
    input.addEventListener("click", (event) => {
        event.preventDefault();
        input.dataset.opened = "yes";
    }, { once: true });
}"""


def file(name: str, buffer: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": buffer}


def give(page: Page, kind: str, *files: FilePayload) -> bool:
    """Paste or drop files on the prompt."""
    told = [{**one, "buffer": base64.b64encode(one["buffer"]).decode()} for one in files]
    return bool(page.evaluate(GIVE, [kind, told]))


def choose(page: Page, *files: FilePayload) -> None:
    """Choose files by the keyboard. The browser's own dialog, which belongs to no page, is not opened."""
    page.evaluate(OPENS)
    page.focus("#add-image")
    page.keyboard.press("Enter")
    page.wait_for_selector("#image-files[data-opened]", state="attached")
    page.set_input_files("#image-files", files)


def send(page: Page, prompt: str) -> None:
    page.wait_for_selector("#send:enabled")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


@pytest.fixture
def scripted(browser: Browser, redis_url: str, pipeline: Pipeline) -> Iterator[ScriptedPipeline]:
    with ScriptedPipeline(redis_url, pipeline) as made:
        yield made


@pytest.fixture
def url(tabs: Tabs, scripted: ScriptedPipeline, tmp_path: Path) -> Iterator[str]:
    settings = {**SETTINGS, "BATCH_STORE": str(tmp_path / "store")}
    with (
        GatewayProcess(scripted.addresses, tmp_path, settings) as gateway,
        scripted.answer_texts(lambda _: end()),
    ):
        yield gateway.url
        tabs.close()


def list_digests(scripted: ScriptedPipeline) -> list[list[str]]:
    return [[picture.digest for picture in request.pictures] for request in scripted.read_requests()]


def test_images_go_with_the_prompt_in_their_order_and_with_each_later_one(
    tabs: Tabs, scripted: ScriptedPipeline, url: str
) -> None:
    scripted.report(sees=True)
    page = tabs.open(url)
    expect(page.locator("#add-image")).to_be_visible()
    choose(page, file("cat.png", PNG), file("cat.png", JPEG, "image/jpeg"))
    said, waiting = page.locator("#images-said"), page.locator("#images li")
    expect(said).to_have_text("2 images to send.")
    assert give(page, "paste", file("image.gif", GIF, "image/gif")) is False
    expect(waiting.locator("img")).to_have_count(3)
    names = [one.get_attribute("alt") for one in waiting.locator("img").all()]
    assert names == ["cat.png", "cat.png (2)", "image.gif"]
    remove = page.get_by_role("button", name="Remove cat.png (2)")
    remove.focus()
    page.keyboard.press("Enter")
    expect(said).to_have_text("cat.png (2) is removed.")
    expect(page.get_by_role("button", name="Remove image.gif")).to_be_focused()
    assert give(page, "drop", file("last.webp", WEBP, "image/webp")) is False
    send(page, "What is this?")
    expect(page.locator("#state")).to_have_attribute("data-state", "done")
    expect(waiting).to_have_count(0)
    shown = page.locator(".turn img")
    assert [one.get_attribute("alt") for one in shown.all()] == ["cat.png", "image.gif", "last.webp"]
    assert shown.evaluate_all("(all) => all.map((one) => one.naturalWidth)") == [64] * 3, "the policy lets them be seen"
    send(page, "And now?")
    expect(page.locator(".turn[data-state=done]")).to_have_count(2)
    digests = [hashlib.sha256(data).hexdigest() for data in (PNG, GIF, WEBP)]
    assert list_digests(scripted) == [digests] * 2
    first, second = scripted.read_requests()
    assert [turn.text for turn in first.messages or ()] == ["What is this?"]
    assert [turn.text for turn in second.messages or ()] == ["What is this?", "", "And now?"]
    choose(page, file("more.png", PNG))
    expect(said).to_have_text("more.png is one too many: a chat may have 3 images.")
    page.click("#clear")
    choose(page, file("more.png", PNG))
    expect(said).to_have_text("1 image to send.")


def test_what_cannot_be_sent_is_said(tabs: Tabs, scripted: ScriptedPipeline, url: str) -> None:
    scripted.report(sees=True)
    page = tabs.open(url, PHONE)
    said = page.locator("#images-said")
    expect(page.locator("#add-image")).to_be_visible()
    choose(page, file("large.png", PNG + bytes(10_486)), file("a.pdf", b"%PDF", "application/pdf"), file("b.png", PNG))
    why = "the images of a chat may have 0.0 MB together. a.pdf is no PNG, JPEG, WebP or GIF."
    expect(said).to_have_text(f"large.png is too large: it has 0.0 MB, and {why}")
    expect(page.locator("#images img")).to_have_count(1)
    assert page.evaluate(SMALLER, 43.99) == [], "fingers meet the buttons"
    choose(page, file("broken.png", b"no picture"))
    send(page, "What is this?")
    expect(page.locator(".turn[data-state=failed] .outcome")).to_contain_text("PNG, JPEG, WebP or GIF")
    expect(page.locator("#images img")).to_have_count(2)
    assert page.input_value("#prompt") == "What is this?", "both can be sent again"
    page.get_by_role("button", name="Remove broken.png").click()
    send(page, "What is this?")
    expect(page.locator(".turn[data-state=done]")).to_have_count(1)
    assert list_digests(scripted) == [[hashlib.sha256(PNG).hexdigest()]]
    complaints = [text for text in tabs.complaints if "400" in text or "ERR_" in text]
    assert complaints, "the browser notes the refusal"
    tabs.complaints[:] = [text for text in tabs.complaints if text not in complaints]


def test_a_model_that_does_not_see_is_offered_no_images(tabs: Tabs, url: str) -> None:
    page = tabs.open(url)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#add-image")).to_be_hidden()
    for kind in ("drop", "paste"):
        assert give(page, kind, file("cat.png", PNG)) is False, "the browser does not open it in place of the page"
        expect(page.locator("#images-said")).to_have_text("This model sees no images.")
        expect(page.locator("#images li")).to_have_count(0)
