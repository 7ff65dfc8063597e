"""The page, as a person sees it, in a real browser on a real pipeline."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect

from penstock.bus.kafka.client import BROKER_TIMEOUT_S
from penstock.cli.up import build_endpoint_environment
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.messages import EndEvent, Timings
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from penstock.telemetry.meters import Meters
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.timeline import PLACEMENT_ATTRIBUTE
from penstock.worker.heartbeat import Heartbeat
from sim.chaos.proxy import Proxy
from sim.endpoint import MODEL, CountingEndpoint
from sim.events import EventSource
from sim.waiting import wait_for
from tests.gateways import GatewayProcess, open_stack, write_keys
from tests.page.chromium import OF_THE_NETWORK, PATIENCE_MS, PHONE, Tabs, ask, number, wait_for_tokens
from tests.pipeline.site import hanging

PIECES = "[...document.querySelectorAll('.turn:last-child .piece')].map((piece) => piece.textContent)"
POLICY = "content-security-policy"
MARKUP = "<img src=x onerror=alert(1)> & the <b>deep</b>"
SMALLER = """(least) => [...document.querySelectorAll("a, button, input, select, textarea")]
    .filter((one) => one.getClientRects().length && one.getBoundingClientRect().height < least)
    .map((one) => one.id || one.textContent)"""
CUT = """() => [...document.querySelectorAll(".what > *, .shares > *, .worker > *, .spark > span, thead th")]
    .filter((one) => one.getBoundingClientRect().right > one.parentElement.getBoundingClientRect().right + 0.5
        || one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflow !== "visible")
    .map((one) => one.textContent)"""
SIZES = "[...document.querySelectorAll('body *')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
PAINT = """() => ["#health::before", ".worker .is::before", "tbody .swatch", "#bars .fill", ".shares .swatch"]
    .map((name) => name.split("::"))
    .map(([one, part]) => getComputedStyle(document.querySelector(one), part && "::" + part).backgroundColor)"""
expect.set_options(timeout=PATIENCE_MS)


def box(locator: Locator) -> FloatRect:
    """Return where something is drawn."""
    found = locator.bounding_box()
    assert found is not None
    return found


def wait_for_state(page: Page, state: str) -> None:
    page.wait_for_selector(f"#state[data-state={state}]")


def whole_answer(base_url: str, stream_id: str) -> str:
    """The text of a chat, read in one go."""
    source = EventSource(f"{base_url}/v1/streams/{stream_id}")
    chunks = [sent.body for sent in source.connect() if sent.data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.fixture
def proxy(line: Stack) -> Iterator[Proxy]:
    """Between the browser and the gateway."""
    with Proxy(int(line.gateway_url.rpartition(":")[2])) as proxy:
        yield proxy


def test_a_stream_goes_on_where_its_connection_broke(proxy: Proxy, tabs: Tabs, line: Stack) -> None:
    page = tabs.open(f"http://127.0.0.1:{proxy.port}/")
    ask(page, MARKUP, 600, seed="7")
    wait_for_tokens(page, 20)
    proxy.refuse_connections()
    wait_for_state(page, "broken")
    broken_at = page.inner_text("#state")
    proxy.forward_normally()
    page.wait_for_selector(".seam")
    seam = page.inner_text(".seam")
    page.wait_for_selector("#state[data-state=done]")
    seen = number(page, "#tokens")
    pieces = page.evaluate(PIECES)
    assert [bool(piece) for piece in pieces] == [True, True], "one break, and text before and after it"
    place = seam.partition(",")[0].removeprefix("resumed ")
    assert place in broken_at, "it goes on where it said that it broke"
    assert 20 <= int(place.rpartition(" ")[2]) < seen
    assert "".join(pieces) == whole_answer(line.gateway_url, page.inner_text(".turn .id")).lstrip()
    assert page.inner_text(".turn .prompt") == MARKUP, "text, never markup"
    assert page.locator(".turn img").count() == 0
    expect(page.locator("#health")).to_have_text("ok")
    broken = [text for text in tabs.complaints if OF_THE_NETWORK in text]
    assert broken, "the browser saw it break"
    tabs.complaints[:] = [text for text in tabs.complaints if text not in broken]


@pytest.mark.proof
def test_a_request_is_drawn_with_parts_that_add_up(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    ask(page, "Tell me of the beginning.", 250, temperature="0")
    wait_for_state(page, "done")
    page.wait_for_selector(f"#bars[data-whole=true][data-id='{page.inner_text('.turn .id')}']")
    total_s = float(page.evaluate("document.querySelector('#bars').dataset.totalS"))
    parts = page.evaluate("[...document.querySelectorAll('.whole .fill')].map((fill) => Number(fill.dataset.s))")
    assert sum(parts) == pytest.approx(total_s, abs=1e-4)
    names = page.evaluate("[...document.querySelectorAll('.bar[data-name]')].map((bar) => bar.dataset.name)")
    assert {"request", "queue.wait", "prefill", "hand_off", "decode", "end"} <= set(names)
    told = page.locator(".shares").inner_text()
    assert "first token" in told
    assert not re.search("[a-z][._][a-z]", told), "no name of the program"
    assert page.locator(".shares .swatch").count() == page.locator(".shares > span").count() > 4
    page.route("**/timeline", lambda route: None)
    page.fill("#life-id", "chatcmpl-another")
    page.press("#life-id", "Enter")
    expect(page.locator("#life-state")).to_have_text("Loading the timeline.")
    assert page.locator("#bars > *").count() == 0, "no bars of one request under the id of another"


def test_a_worker_of_both_stages_is_one_worker_and_its_request_is_drawn_whole(tabs: Tabs, tmp_path: Path) -> None:
    with open_stack(tmp_path, pipeline="both", prefill=0, decode=0, auto=1) as stack:
        page = tabs.open(stack.gateway_url)
        expect(page.locator(".worker")).to_have_attribute("data-worker", "auto-0")
        expect(page.locator("[data-workers=decode] .worker .name")).to_have_text("auto-0 prefill and decode")
        expect(page.locator("[data-workers=prefill]")).to_have_text("1 worker under Decode")
        for max_tokens in (1, 20):
            ask(page, "Tell me of the beginning.", max_tokens, temperature="0")
            wait_for_state(page, "done")
            page.wait_for_selector(f"#bars[data-whole=true][data-id='{page.inner_text('.turn:last-child .id')}']")
        names = page.evaluate("[...document.querySelectorAll('.bar[data-name]')].map((bar) => bar.dataset.name)")
        assert {"prefill", "decode"} <= set(names)
        assert "hand_off" not in names
        tabs.close()


def test_an_endpoint_that_rests_is_shown_with_the_time_and_its_words(tabs: Tabs, tmp_path: Path) -> None:
    with CountingEndpoint() as endpoint:
        endpoint.write_reply = lambda _: b"HTTP/1.1 401 No\r\nConnection: close\r\n\r\nthe key was rotated"
        settings = build_endpoint_environment([endpoint.url])
        with open_stack(tmp_path, pipeline="rests", prefill=0, decode=0, endpoint=1, settings=settings) as stack:
            row = tabs.open(stack.gateway_url).locator("[data-workers=decode] .worker .rests")
            for number in range(3):
                body = {"model": MODEL, "input": str(number), "background": True}
                assert httpx.post(f"{stack.gateway_url}/v1/responses", json=body, timeout=None).status_code == 200
            where = re.escape(endpoint.url)
            expect(row).to_have_text(
                re.compile(rf"^{where}/v1 (rests until \d\d:\d\d:\d\d|is tried .*): HTTP 401: the key was rotated$")
            )
            tabs.close()


def test_stop_ends_the_request(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    with ExitStack() as paused:  # the answer would be whole before a busy browser has clicked
        for worker in line.workers:
            if worker.child is not None and worker.name.startswith("decode"):
                paused.enter_context(hanging(worker.child.pid))
        ask(page, "Tell me of the beginning.", 900, temperature="0")
        wait_for_tokens(page, 1)
        page.click("#stop")
    wait_for_state(page, "stopped")
    stream = f"{line.gateway_url}/v1/streams/{page.inner_text('.turn .id')}"
    answer = httpx.get(stream, timeout=None)
    assert '"finish_reason":"stop"' in answer.text.replace(" ", "") or "cancelled" in answer.text
    expect(page.locator("#send")).to_be_enabled()


def open_with_still_clock(tabs: Tabs, url: str) -> tuple[Page, int]:
    """Return a page whose clock only the test moves, and after what silence, in milliseconds, it believes nobody."""
    page = tabs.open(url)
    page.clock.install(time=0)
    page.clock.pause_at(10**12)
    page.reload()
    expect(page.locator("#health")).to_have_text("ok")
    return page, int(page.evaluate("import('/page/api.js').then((api) => api.SILENCE_MS)"))


def test_a_gateway_that_sends_nothing_more_is_told_from_one_that_is_well(tabs: Tabs, line: Stack) -> None:
    page, silence_ms = open_with_still_clock(tabs, line.gateway_url)
    ask(page, "Tell me of the beginning.", 900, seed="7")
    wait_for_tokens(page, 20)
    assert line.gateway is not None
    assert line.gateway.child is not None
    with hanging(line.gateway.child.pid):
        page.clock.run_for(look_ms := int(1000 * BROKER_TIMEOUT_S))
        expect(page.locator("#health")).to_have_text("ok")  # the gateway may wait so long for its brokers
        page.clock.run_for(silence_ms - look_ms)
        expect(page.locator("#health")).to_have_text("unreachable")
        expect(page.locator("#notice")).to_have_text(
            re.compile(r"^No news of the pipeline has come for 20 s: what is shown is of \d\d:\d\d:\d\d\.$")
        )
        wait_for_state(page, "broken")
    page.clock.resume()
    expect(page.locator("#health")).to_have_text("ok")
    expect(page.locator("#notice")).to_be_empty()
    wait_for_state(page, "done")
    text = "".join(page.evaluate(PIECES))
    assert text == whole_answer(line.gateway_url, page.inner_text(".turn .id")).lstrip()


def test_a_stream_that_flows_is_not_broken_where_only_the_pipelines_state_is_late(
    tabs: Tabs, line: Stack, tmp_path: Path
) -> None:
    with GatewayProcess(line.addresses, tmp_path) as looker:
        page, silence_ms = open_with_still_clock(tabs, line.gateway_url)
        page.route("**/v1/live", lambda route: route.continue_(url=f"{looker.url}/v1/live"))
        page.reload()
        expect(page.locator("#health")).to_have_text("ok")
        ask(page, "Tell me of the beginning.", 900, seed="7")
        with ExitStack() as paused, hanging(looker.process.pid):
            for worker in line.workers:  # the answer would be whole before a busy browser has shown it
                if worker.child is not None and worker.name.startswith("decode"):
                    paused.enter_context(hanging(worker.child.pid))
            page.clock.run_for(silence_ms * 3 // 5)
            paused.close()
            before = number(page, "#tokens")
            wait_for_tokens(page, before + 1)
            page.clock.run_for(silence_ms * 2 // 5)
            expect(page.locator("#health")).to_have_text("unreachable")
        page.clock.resume()
        wait_for_state(page, "done")
        assert page.locator(".seam").count() == 0
        tabs.close()


def test_the_pages_own_models_are_offered_first(tabs: Tabs, line: Stack, tmp_path: Path) -> None:
    beat = Heartbeat(line.addresses.stream_url, Pipeline("another"), "decode", "nobody", 600)
    beat.update_status(model="aaa", state="ready")
    beat.write_beat()
    page = tabs.open(line.gateway_url)
    expect(page.locator("#model optgroup[label='other pipelines']")).to_have_text("aaa")
    expect(page.locator("#model")).to_have_value("demo")
    expect(page.locator("#send")).to_be_enabled()
    with GatewayProcess(line.addresses.model_copy(update={"pipeline": "lonely"}), tmp_path) as gateway:
        page = tabs.open(gateway.url)
        expect(page.locator("#no-model")).to_contain_text("one of another pipeline may be chosen")
        expect(page.locator("#model")).to_have_value("")
        expect(page.locator("#send")).to_be_disabled()
        listed = page.locator("#model option").first.element_handle()
        page.wait_for_event("requestfinished", lambda asked: asked.url.endswith("/v1/models"))
        page.wait_for_event("request", lambda asked: asked.url.endswith("/v1/models"))
        assert listed.evaluate("(option) => option.isConnected"), "a list that is the same is left as it is"
        own = Heartbeat(line.addresses.stream_url, Pipeline("lonely"), "decode", "nobody", 600)
        own.update_status(model="zzz", state="ready")
        own.write_beat()
        expect(page.locator("#model")).to_have_value("zzz")
        tabs.close()


def test_texts_are_shown_where_they_are_computed(tabs: Tabs, line: Stack, tmp_path: Path) -> None:
    page = tabs.open(line.gateway_url)
    expect(page.locator("#health")).to_have_text("ok")
    expect(page.locator("#text-latency")).to_be_hidden()
    expect(page.locator("#texts")).to_be_hidden()
    metrics = StageMetrics(Meters(), "texts", "embed", "embed-0", "tiny")
    timings = Timings(published=1.0, finished=1.5)
    with (
        GatewayProcess(line.addresses.model_copy(update={"pipeline": "texts"}), tmp_path) as gateway,
        Heartbeat(line.addresses.stream_url, Pipeline("texts"), "embed", "embed-0", 600) as beat,
    ):
        metrics.count_texts("interactive", 64, 8192)
        metrics.record_end("interactive", "embeddings", EndEvent(finish_reason="stop", timings=timings))
        recent = metrics.summarize_recent()
        beat.set_load_source(lambda: {"recent": recent})
        beat.update_status(model="tiny", state="ready")
        beat.write_beat()
        page = tabs.open(gateway.url)
        worker = page.locator("[data-worker=embed-0]")
        expect(worker).to_contain_text("vectors or scores")
        expect(worker.locator(".speed")).to_have_text(re.compile(r"[1-9].* texts/s, [1-9].* tok/s"))
        expect(page.locator("#texts")).to_have_text(re.compile(r"[1-9].* texts/s"))
        expect(page.locator("#text-latency [data-at='text.p50']")).to_have_text(re.compile(r"\d+ ms"))
        tabs.close()


def test_sizes_follow_the_readers_font_and_marks_his_colours(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    ask(page, "Tell me of the beginning.", 60)
    page.wait_for_selector("#bars[data-whole=true]")
    before = page.evaluate(SIZES)
    assert min(before) >= 12
    page.emulate_media(forced_colors="active")
    canvas = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert not {canvas, "rgba(0, 0, 0, 0)"} & {*page.evaluate(PAINT)}, "they do not vanish"
    page.evaluate("document.documentElement.style.fontSize = '32px'")
    assert page.evaluate(SIZES) == pytest.approx([2 * size for size in before])


@pytest.mark.parametrize("width", [320, PHONE["width"]])
def test_a_phone_needs_no_sideways_scroll(tabs: Tabs, line: Stack, width: int) -> None:
    page = tabs.open(line.gateway_url, {"width": width, "height": PHONE["height"]})
    assert box(page.locator("#prompt-form"))["y"] < 2 * PHONE["height"], "within the first two screens"
    page.fill("#prompt", "Lead me beside the still waters, " + "o" * 60)
    page.fill("#max-tokens", "300")
    page.fill("#temperature", "0")
    page.tap("#send")
    page.wait_for_selector("#bars[data-whole=true]")
    prompt, answer, chat = (box(page.locator(one)) for one in (".turn .prompt", ".turn .answer", "#chat"))
    assert chat["height"] < answer["height"], "it is longer than what is seen"
    assert max(0, chat["y"], prompt["y"] + prompt["height"] - 1) <= answer["y"], "its first lines are seen"
    assert page.evaluate(SMALLER, 43.99) == []
    assert page.evaluate(CUT) == []
    wide, there = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= there == width
    for station in page.locator(".station").all():
        drawn, words = box(station.locator(".glyph")), box(station.locator("h3"))
        assert drawn["x"] + drawn["width"] <= words["x"], "the drawing is beside the words"


@pytest.mark.parametrize("width", [820, 1360, 2560])
def test_stations_begin_where_their_column_does_and_the_pipe_reaches_the_end(
    tabs: Tabs, line: Stack, width: int
) -> None:
    page = tabs.open(line.gateway_url, {"width": width, "height": 1200})
    left = "(station) => station.querySelector('h3').getBoundingClientRect().left"
    starts = [station.evaluate(left) for station in page.locator(".station").all()]
    if width == 820:  # two rows of three
        assert starts[3:] == pytest.approx(starts[:3], abs=0.5)
    title, desk = box(page.locator("#pipeline-title")), box(page.locator(".desk"))
    assert starts[0] == pytest.approx(title["x"], abs=0.5)
    jets = page.evaluate("document.querySelector('.jets').getBoundingClientRect().right")
    assert jets == pytest.approx(desk["width"] - title["x"], abs=10), "the nozzle is at the end of the sheet"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    grown = page.evaluate("document.querySelector('.glyph').getBoundingClientRect().width") / 96
    assert grown == pytest.approx(1.45 if width == 2560 else 1.0, abs=0.01), "on a large screen all is larger"


def test_a_chat_reads_downwards_and_keeps_why_a_question_failed(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    ask(page, "Tell me of the beginning.", 240, temperature="0")
    wait_for_state(page, "done")
    too_long = "word " * 3000
    ask(page, too_long, 60)
    wait_for_state(page, "failed")
    failed = page.locator(".turn[data-state=failed]")
    why = failed.locator(".outcome").inner_text()
    assert "1,024" in why or "1024" in why, why
    seen = " ".join(page.locator("header, #notice, #ask > :not(#spoken), #life").all_inner_texts())
    assert re.findall("Not answered|exceed|maximum context", seen) == ["Not answered", "maximum context"], "said once"
    assert page.input_value("#prompt") == too_long, "it can be sent again"
    places = ("#chat", ".turn .prompt", ".turn[data-state=failed]")
    whole, answered, after = (box(page.locator(one).first) for one in places)
    assert whole["y"] - 1 <= answered["y"] < after["y"], "the question before it, which was answered, is still seen"
    ask(page, "And what came then?", 60, temperature="0")
    wait_for_state(page, "done")
    expect(page.locator(".turn .prompt")).to_have_text(["Tell me of the beginning.", too_long, "And what came then?"])
    expect(failed.locator(".outcome")).to_have_text(why)
    newest, chat, form = (box(page.locator(one)) for one in (".turn:last-child", "#chat", "#prompt-form"))
    assert newest["y"] + newest["height"] <= chat["y"] + chat["height"] + 1, "the end of the newest turn is seen"
    assert form["y"] + form["height"] <= page.evaluate("innerHeight"), "and the form below it"

    prompt, more = failed.locator(".prompt"), failed.locator(".more")
    short = prompt.evaluate("(prompt) => prompt.clientHeight")
    assert short < 100, "four lines"
    more.click()
    expect(more).to_have_text("Show less")
    assert prompt.evaluate("(prompt) => prompt.clientHeight") > 4 * short
    more.click()
    assert prompt.evaluate("(prompt) => prompt.clientHeight") == short
    expect(page.locator(".turn:last-child .more")).to_be_hidden()

    failed.get_by_role("button", name="Start a new chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_a_call_is_shown_with_its_result_and_then_answered(tabs: Tabs, tool_line: Stack) -> None:
    page = tabs.open(tool_line.gateway_url)
    expect(page.locator("#model")).to_have_value("tool_model")
    page.fill("#temperature", "0")
    page.focus("#model")
    offers = page.locator("#tools")
    for _ in range(5):
        page.keyboard.press("Tab")
    expect(offers).to_be_focused()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.input_value("#prompt") == "What is the temperature of Lisbon?"
    page.keyboard.press("Enter")
    wait_for_state(page, "done")
    shown, returned = page.locator(".call code").all()
    expect(shown).to_have_text('get_temperature({"city": "Lisbon"})')
    assert str(json.loads(returned.inner_text())["temperature"]) in page.locator(".turn .piece").last.inner_text()
    expect(page.locator(".turn .outcome")).to_have_text(re.compile(r"^Complete after 1 call: \d+ tokens in "))
    ask(page, "What is 12 times 7?", 60)
    wait_for_state(page, "done")
    assert '{"result": 84}' in page.locator(".turn:last-child .call .result").all_inner_texts()


def test_tools_are_offered_to_models_that_can_call_them_alone(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#tools")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 820, 1360, 2560])
def test_a_long_name_and_the_offered_tools_fit_any_screen(
    tabs: Tabs, tool_line: Stack, width: int, scheme: str
) -> None:
    page = tabs.open(tool_line.gateway_url, {"width": width, "height": 1000}, scheme=scheme)
    name = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    models = {"object": "list", "data": [{"id": name, "supports_tools": True}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    page.check("#tools")
    expect(page.locator("#model")).to_have_value(name)
    given, needed = page.locator("#model").evaluate(
        """(list) => [list, Object.assign(list.cloneNode(true), { style: "width: max-content" })].map((one) => {
            list.parentElement.append(one);
            return one.getBoundingClientRect().width;
        })"""
    )
    assert given >= needed - 1, "the name is not cut"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_line_tells_its_scale_and_its_time(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    ask(page, "Tell me of the beginning.", 60)
    wait_for_state(page, "done")
    spark = page.locator("[data-spark=decode]")
    expect(spark.locator(".largest")).to_have_text(re.compile(r"^\d"))
    expect(spark.locator(".least")).to_have_text("0")
    expect(spark.locator(".oldest")).to_have_text(re.compile(r"^\d+ s ago$"))
    plot, drawn = (box(spark.locator(one)) for one in ("svg", ".line"))
    assert drawn["width"] == pytest.approx(plot["width"], rel=0.05), "it takes the whole width from the beginning"


def test_without_a_worker_nothing_can_be_sent(tabs: Tabs, tmp_path: Path) -> None:
    with open_stack(tmp_path, pipeline="empty", prefill=0, decode=0) as stack:
        page = tabs.open(stack.gateway_url)
        expect(page.locator("#no-model")).to_contain_text("No worker serves a model yet")
        expect(page.locator("#send")).to_be_disabled()
        page.fill("#prompt", "Is anybody there?")
        page.press("#prompt", "Enter")
        expect(page.locator(".turn")).to_have_count(0)
        assert page.input_value("#prompt") == "Is anybody there?"
        tabs.close()


def test_with_prices_the_margin_of_today_is_shown(tabs: Tabs, line: Stack, tmp_path: Path) -> None:
    (prices := tmp_path / "prices.toml").write_text('currency = "EUR"\n[worker_hour]\nprefill = 1.0\ndecode = 1.0\n')
    expect(tabs.open(line.gateway_url).locator("#account")).to_be_hidden()
    with GatewayProcess(line.addresses, tmp_path, {"GATEWAY_PRICES": str(prices)}) as gateway:
        shown = re.compile(r"^Today: tokens \d+\.\d\d EUR, workers .* and idle .*, margin -?\d+\.\d\d EUR$")
        expect(tabs.open(gateway.url).locator("#account")).to_have_text(shown)
        tabs.close()


def test_with_keys_the_page_asks_for_one(tabs: Tabs, line: Stack, tmp_path: Path) -> None:
    book = tmp_path / "keys.json"
    mine, other = write_keys(book, "acme", "other")
    with GatewayProcess(line.addresses, tmp_path, {"GATEWAY_KEYS": str(book)}) as gateway:
        url = gateway.url
        for path in ("/v1/live", "/v1/requests/chatcmpl-1/timeline"):
            assert httpx.get(url + path, timeout=None).status_code == 401
        page = tabs.open(url)
        assert page.locator(".worker").count() == 0
        page.fill("#key", mine)
        page.press("#key", "Enter")
        page.wait_for_selector("#health[data-state=ok]")
        assert page.locator(".worker").count() == 0, "a tenant sees how the pipeline is, not its workers"
        ask(page, "Who art thou?", 8)
        page.wait_for_selector("#bars[data-whole=true]")
        life = f"{url}/v1/requests/{page.inner_text('.turn .id')}/timeline"
        assert page.url == f"{url}/", "no key in an address"
        times: dict[str, Any] = {"start_s": 1.0, "end_s": 2.0, "id": "x", "parent": None, "instance": "auto-0"}
        placed = {
            "name": "request",
            "service": "penstock",
            **times,
            "attributes": {PLACEMENT_ATTRIBUTE: "{}", "n": "1"},
        }
        with redis_client(line.addresses.stream_url) as client:
            client.rpush(Pipeline(line.addresses.pipeline).trace_key(page.inner_text(".turn .id")), json.dumps(placed))
        answers = {
            key: httpx.get(life, headers={"Authorization": f"Bearer {key}"}, timeout=None) for key in (mine, other)
        }
        told = [span["attributes"] for span in answers[mine].json()["choices"][0]["spans"]]
        assert {"n": "1"} in told, "a tenant does not see where its requests were sent, and what waits there"
        unknown = httpx.get(
            f"{url}/v1/requests/chatcmpl-0/timeline", headers={"Authorization": f"Bearer {other}"}, timeout=None
        )
        assert answers[other].status_code == unknown.status_code == 404
        assert answers[other].json()["error"]["code"] == unknown.json()["error"]["code"]
        page.click("#forget")
        page.wait_for_selector("#key-form:not([hidden])")
        tabs.close()


ASK_FROM_ELSEWHERE = """async ([url, body]) => {
    const headers = {"content-type": "application/json", authorization: "Bearer none", "x-own": "1"};
    try {
        const answer = await fetch(url, {method: "POST", headers, body});
        return [answer.headers.get("x-request-id"), await answer.text()];
    } catch (error) { return [null, String(error)]; }
}"""


@pytest.mark.proof
def test_a_page_of_another_origin_reads_a_stream_if_its_origin_is_allowed(
    browser: Browser, line: Stack, tmp_path: Path
) -> None:
    allowed, other = line.gateway_url, line.gateway_url.replace("127.0.0.1", "localhost")
    body = json.dumps({"model": "demo", "prompt": "In the", "max_tokens": 4, "stream": True})
    with GatewayProcess(line.addresses, tmp_path, {"GATEWAY_ORIGINS": allowed}) as gateway:
        for origin in (allowed, other):
            page = browser.new_page()
            page.goto(f"{origin}/healthz")
            name, text = page.evaluate(ASK_FROM_ELSEWHERE, [f"{gateway.url}/v1/completions", body])
            page.close()
            assert (name is not None, text.endswith("data: [DONE]\n\n")) == (origin == allowed,) * 2, text


@pytest.mark.proof
def test_files_come_under_a_strict_policy_and_once(line: Stack) -> None:
    with httpx.Client(base_url=line.gateway_url, timeout=None) as client:
        page = client.get("/")
        assert re.search(r"default-src 'none'; script-src 'self'; style-src 'self';", page.headers[POLICY])
        assert "unsafe" not in page.headers[POLICY]
        for name in re.findall(r'(?:src|href)="(/page/[^"]*)"', page.text):
            first = client.get(name)
            assert (first.status_code, first.headers[POLICY]) == (200, page.headers[POLICY])
            assert client.get(name, headers={"If-None-Match": first.headers["etag"]}).status_code == 304
        assert client.get("/page/nothing.js").json()["error"]["code"] == "unknown_url"


def test_an_alerts_link_leads_to_its_section(browser: Browser, line: Stack) -> None:
    page = browser.new_page()
    page.goto(f"{line.gateway_url}/page/operations.md#:~:text=%23%23%23%20PenstockRedisFull")
    page.wait_for_function("scrollY > 0")
    page.close()


@pytest.mark.proof
def test_all_who_watch_see_the_same_states(line: Stack) -> None:
    sources = [EventSource(f"{line.gateway_url}/v1/live?looks=3") for _ in range(4)]
    streams = [source.connect() for source in sources]
    seen: list[list[float]] = [[json.loads(next(stream).data)["at"]] for stream in streams]
    for times, stream in zip(seen, streams, strict=True):
        times += [json.loads(sent.data)["at"] for sent in stream]
    assert all(len(times) == 3 for times in seen)
    assert len({at for times in seen for at in times}) <= 5, "one read a second, not one a reader"


def test_a_killed_worker_is_shown_as_lost(tabs: Tabs, line: Stack) -> None:
    page = tabs.open(line.gateway_url)
    victim = next(worker for worker in line.workers if worker.name == "decode-1")
    row = page.locator("[data-worker='decode-1']")
    expect(row).to_have_attribute("data-state", "ready")
    assert victim.child is not None
    victim.child.kill()
    expect(row).to_have_attribute("data-state", "lost")
    assert "lost" in row.inner_text()
    expect(page.locator("[data-worker='decode-0']")).to_have_attribute("data-state", "ready")
    ask(page, "Art thou still there?", 8)
    wait_for_state(page, "done")

    def is_started_again() -> bool:
        line.restart_dead()  # one that lived only for a short time is started by a later call
        return victim.child is not None and victim.child.is_alive()

    wait_for(is_started_again, "it is started again", 0.2)
    expect(row).to_have_attribute("data-state", "ready")


def test_regions_are_shown_where_there_are_peers(tabs: Tabs, line: Stack, tmp_path: Path) -> None:
    peers = f"moon=http://127.0.0.1:{find_free_port()}"
    settings = {"REGION_NAME": "eu", "REGION_PEERS": peers, "REGION_SECRET": "a secret of all regions"}
    with GatewayProcess(line.addresses, tmp_path, settings) as gateway:
        shown = tabs.open(gateway.url).locator("#regions")
        expect(shown).to_have_text(re.compile(r"eu here, .* waits .* · moon unavailable, no connection"))
        tabs.close()
    expect(tabs.open(line.gateway_url).locator("#regions")).to_be_empty()
