"""Images in requests: which addresses are fetched, and what a request of the pipeline has of each way to give one."""

import base64
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock import objects
from penstock.config.settings import GatewaySettings
from penstock.engine.pictures.reader import PictureReader
from penstock.engine.text.chat_template import ChatTokenizer
from penstock.ingest import fetching
from penstock.ingest.batch.lines import estimate_row_tokens, parse_row
from penstock.ingest.fetching import PictureFetcher
from penstock.ingest.gateway import pictures
from penstock.ingest.hosts import is_public_address
from penstock.messages import ChatMessage, Picture, Request
from penstock.names import picture_key, stream_meta_key
from penstock.pictures import store
from penstock.pictures.decoding import decode_picture
from penstock.pictures.tokens import FixedTokens, GridTokens, PictureTokens, TileTokens
from tests.engine.test_picture_reader import save_processor
from tests.gateways import ScriptedPipeline
from tests.ingest.batch_files import lines, read
from tests.ingest.picture_host import NAME, PictureHost, serve_picture
from tests.record.play import end
from tests.silent_store import serve_silence
from tests.test_pictures import GIF, HOSTILE, JPEG, PICTURE, PNG, WEBP, save

RULE = GridTokens(square=28, min_pixels=3136, max_pixels=1_000_000)
HERE = "127.0.0.1"
"""Stands for a public address, as the host of pictures is there."""
ADDRESSES: dict[str, list[str]] = {
    NAME: [HERE], "two.pictures.test": [HERE], "other.test": [HERE],
    "mixed.pictures.test": [HERE, "10.0.0.1"], "none.pictures.test": [],
    **{f"private{n}.pictures.test": [address] for n, address in enumerate((
        "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "127.0.0.2", "0.0.0.0", "224.0.0.1",
        "::1", "fd00::1", "fe80::1", "::ffff:10.0.0.1", "2002:a00:1::",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "::127.0.0.1", "fec0::1", "2002:7f00:1::", "2001:0:4136:e378::1",
    ))},
}  # fmt: skip
PRIVATE = [name for name in ADDRESSES if name.startswith("private")]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PictureHost]:
    with serve_picture(PNG, tmp_path) as made:
        yield made


@pytest.fixture
def fetcher(host: PictureHost, monkeypatch: pytest.MonkeyPatch) -> PictureFetcher:
    async def find_addresses(name: str) -> list[str]:
        if name not in ADDRESSES:
            raise OSError(f"{name} has no address")
        return ADDRESSES[name]

    monkeypatch.setattr(fetching, "is_public_address", lambda text: text == HERE or is_public_address(text))
    made = PictureFetcher(
        GatewaySettings(image_hosts=f"*.pictures.test, *.pictures.test:{host.server_port}"), find_addresses
    )
    made.tls = host.trust
    return made


async def test_a_picture_is_fetched_from_the_address_that_was_checked(
    host: PictureHost, fetcher: PictureFetcher
) -> None:
    assert await fetcher.fetch_picture(f"{host.url}/a.png?size=1", len(PNG)) == PNG
    beyond = f"{host.url}/a?to={host.url.replace(NAME, 'two.pictures.test')}/b.png"
    assert await fetcher.fetch_picture(beyond, len(PNG)) == PNG
    assert await fetcher.fetch_picture(f"{host.url}/a?to=/c.png", len(PNG)) == PNG
    places = [(NAME, "/a.png"), (NAME, "/a"), ("two.pictures.test", "/b.png"), (NAME, "/a"), (NAME, "/c.png")]
    assert host.asked == [(f"{name}:{host.server_port}", path) for name, path in places]


async def test_a_name_that_changes_is_looked_up_once_for_each_question(
    host: PictureHost, fetcher: PictureFetcher
) -> None:
    told = iter([[HERE], ["10.0.0.1"]])

    async def find_addresses(_: str) -> list[str]:
        return next(told)

    fetcher._find_addresses = find_addresses
    assert await fetcher.fetch_picture(f"{host.url}/a.png", len(PNG)) == PNG
    with pytest.raises(ValueError, match="not public"):
        await fetcher.fetch_picture(f"{host.url}/a.png", len(PNG))
    assert len(host.asked) == 1


REFUSED: dict[str, tuple[str, str]] = {
    "no address": ("picture.png", "does not begin with https"),
    "http": ("http://one.pictures.test/a.png", "does not begin with https"),
    "a file": ("file:///etc/passwd", "does not begin with https"),
    "gopher": ("gopher://one.pictures.test/_x", "does not begin with https"),
    "no host": ("https:///a.png", "does not begin with https"),
    "a user": ("https://a:b@one.pictures.test/a.png", "a user or a password"),
    "a host behind a user": ("https://one.pictures.test@other.test/", "a user or a password"),
    "another host": ("https://other.test/a.png", "fetches nothing from other.test"),
    "a name that ends as an allowed one": ("https://evilpictures.test/", "fetches nothing from evilpictures.test"),
    "an allowed name in front": ("https://one.pictures.test.other.test/", "fetches nothing from"),
    "another port": ("https://one.pictures.test:22/", "fetches nothing from one.pictures.test:22"),
    "an address for a name": ("https://127.0.0.1/", "fetches nothing from 127.0.0.1"),
    "a number for an address": ("https://2130706433/", "fetches nothing from 2130706433"),
    "an address of version 6": ("https://[::1]/", "fetches nothing from"),
    **{f"{ADDRESSES[name][0]}": (f"https://{name}/", "not public") for name in PRIVATE},
    "a public address and another one": ("https://mixed.pictures.test/", "not public"),
    "no address of the name": ("https://none.pictures.test/", "not public"),
    "an unknown name": ("https://unknown.pictures.test/", "cannot be fetched"),
    "a redirect to http": ("{url}/a?to=http://one.pictures.test/", "does not begin with https"),
    "a redirect to another host": ("{url}/a?to=https://other.test/", "fetches nothing from other.test"),
    "a redirect inwards": ("{url}/a?to=https://private0.pictures.test:{port}/", "not public"),
    "a redirect to another port": ("{url}/a?to=https://one.pictures.test/", "another port"),
    "a redirect in a circle": ("{url}/circle", "more than 3 redirects"),
    "a redirect to nowhere": ("{url}/nowhere", "more than 3 redirects"),
    "no file": ("{url}/gone", "status 404"),
    "too large": ("{url}/large", "more than"),
    "endless": ("{url}/endless", "more than"),
    "compressed": ("{url}/packed", "compressed"),
    "a certificate of another name": ("https://deep.one.pictures.test:{port}/", "cannot be fetched"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_address_is_refused(host: PictureHost, fetcher: PictureFetcher, name: str) -> None:
    address, why = REFUSED[name]
    ADDRESSES["deep.one.pictures.test"] = [HERE]
    with pytest.raises(ValueError, match=why):
        await fetcher.fetch_picture(address.format(url=host.url, port=host.server_port), len(PNG) - 1)


@pytest.mark.parametrize("place", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]"])
async def test_this_machine_is_not_public_by_any_name(place: str) -> None:
    settings = GatewaySettings(image_hosts="*")
    with closing(PictureFetcher(settings)) as fetcher, pytest.raises(ValueError, match="not public"):
        await fetcher.fetch_picture(f"https://{place}/a.png", 9)


async def test_a_host_that_hangs_is_left(
    host: PictureHost, fetcher: PictureFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.2)
    with pytest.raises(ValueError, match=r"was not there within 0\.2 seconds"):
        await fetcher.fetch_picture(f"{host.url}/hangs", len(PNG))


def test_any_host_is_one_at_the_usual_port() -> None:
    allowed = GatewaySettings(image_hosts="*, a.test:8443").allows_image_host
    assert (allowed("b.test", 443), allowed("a.test", 8443), allowed("2606:4700::1111", 443)) == (True, True, True)
    assert (allowed("b.test", 22), allowed("b.test", 8443), allowed("2606:4700::1111", 22)) == (False, False, False)


# A gateway's requests.


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def told(data: bytes, **more: Any) -> Picture:
    size = {"width": 64, "height": 32}
    return Picture(digest=hashlib.sha256(data).hexdigest(), num_bytes=len(data), **(size | more))


LARGE = save(PICTURE.resize((1024, 600)), "WEBP")


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def list_ways(file_id: str) -> dict[str, tuple[str, dict[str, Any], list[Any]]]:
    """Return path, body, and the contents of the request's turns."""
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/gif", "data": base64.b64encode(GIF).decode()},
    }
    return {
        "a chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": "one "}, {"type": "text", "text": "image: "},
                {"type": "image_url", "image_url": {"url": data_url(LARGE), "detail": "low"}},
                {"type": "image_url", "image_url": {"url": data_url(JPEG), "detail": "auto"}},
                {"type": "text", "text": "?"},
            ]}]},
            [["one image: ", told(LARGE, width=512, height=300, detail="low"), told(JPEG), "?"]],
        ),
        "a response": (
            "/v1/responses",
            {"store": False, "input": [
                {"role": "user", "content": [
                    {"type": "input_image", "image_url": data_url(WEBP)}, {"type": "input_text", "text": "?"},
                    {"type": "input_image", "file_id": file_id, "detail": "high"},
                ]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [
                    {"type": "input_image", "image_url": data_url(PNG)},
                ]},
            ]},
            [[told(WEBP), "?", told(JPEG, detail="high")], "", [told(PNG)]],
        ),
        "messages": (
            "/v1/messages",
            {"max_tokens": 9, "messages": [
                {"role": "user", "content": [{"type": "text", "text": "see "}, image]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "it: "}, image]},
                    {"type": "image", "source": {"type": "file", "file_id": file_id}},
                    {"type": "text", "text": "and?"},
                ]},
            ]},
            [["see ", told(GIF)], "", ["it: ", told(GIF)], [told(JPEG), "and?"]],
        ),
    }  # fmt: skip


@pytest.fixture
def gateway(scripted: ScriptedPipeline, tmp_path: Path) -> Iterator[httpx2.Client]:
    """A client of a gateway whose model sees."""
    scripted.report(sees=True, picture_tokens=RULE.model_dump())
    settings: dict[str, Any] = {
        "batch": {"store": str(tmp_path / "store")},
        "picture": {"max_count": 3, "max_mb": 0.01},
    }
    with scripted.open_gateway(**settings) as opened, opened.client() as client:
        yield client


def post(client: httpx2.Client, scripted: ScriptedPipeline, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Ask for a stream, and leave once it has begun: the request is published by then."""
    asked = {"model": scripted.model, "stream": True, **body}
    with client.stream("POST", path, json=asked) as answer:
        if answer.status_code != 200:
            answer.read()
    return answer


@pytest.mark.parametrize("way", ["a chat", "a response", "messages"])
def test_images_are_stored_and_named_by_their_digest(
    gateway: httpx2.Client, scripted: ScriptedPipeline, way: str
) -> None:
    uploaded = gateway.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.jpg", JPEG)})
    assert uploaded.json()["purpose"] == "vision"
    path, body, contents = list_ways(uploaded.json()["id"])[way]
    answer = post(gateway, scripted, path, body)
    assert answer.status_code == 200, answer.text
    (request,) = scripted.read_requests()
    assert [turn.content for turn in request.messages or ()] == contents
    for picture in request.pictures:
        data = scripted.server.get(picture_key(picture.digest))
        assert isinstance(data, bytes)
        assert hashlib.sha256(data).hexdigest() == picture.digest
    listed = gateway.get("/v1/models").json()["data"]
    assert [one["sees"] for one in listed if one["id"] == scripted.model] == [True]


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no picture": (chat(data_url(PNG), data_url(b"hello")), "messages.0.content.1.image_url", "PNG, JPEG, WebP or GIF"),
    "a bomb": (chat(data_url(HOSTILE["a bomb of WebP"])), "messages.0.content.0.image_url", "decompression bomb"),
    "an SVG": (chat(data_url(HOSTILE["SVG"])), "messages.0.content.0.image_url", "PNG, JPEG, WebP or GIF"),
    "no base64": (chat("data:image/png;base64,***"), "messages.0.content.0.image_url", "not base64"),
    "text in a data URL": (chat("data:image/svg+xml,<svg/>"), "messages.0.content.0.image_url", "has the form"),
    "an address": (chat("https://example.com/a.png"), "messages.0.content.0.image_url", "nothing from example.com"),
    "too many": (chat(*[data_url(PNG)] * 4), "messages.0.content.3.image_url", "may have 3 images, here are 4"),
    "too large": (chat(data_url(PNG + bytes(10_486))), "messages.0.content.0.image_url", "10,486 bytes together"),
    "no address at all": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0", "is given by",
    ),
    "another detail": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "best"}}]}]},
        "messages.0.content.0.image_url.detail", "'low' or 'high'",
    ),
    "the model's own": (
        {"messages": [{"role": "assistant", "content": chat(data_url(PNG))["messages"][0]["content"]}]},
        "messages.0.content.0", "only text",
    ),
    "a PDF": (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}]},
        "messages.0.content.0", "only text and images",
    ),
}  # fmt: skip


def test_what_is_no_image_is_named_and_nothing_is_published(gateway: httpx2.Client, scripted: ScriptedPipeline) -> None:
    for name, (body, param, words) in WRONG.items():
        answer = post(gateway, scripted, "/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), name
        assert words in error["message"], name
    unknown = {"store": False, "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-x"}]}]}
    assert post(gateway, scripted, "/v1/responses", unknown).status_code == 404
    assert scripted.read_requests() == []


def test_a_model_that_does_not_see_refuses_images_as_ever(gateway: httpx2.Client, scripted: ScriptedPipeline) -> None:
    scripted.report(sees=False)
    answers = list[Any]()
    while not answers or answers[-1].status_code == 200:  # until the gateway has read the heartbeat
        answers.append(post(gateway, scripted, "/v1/chat/completions", chat(data_url(PNG))))
    error = answers[-1].json()["error"]
    assert (answers[-1].status_code, error["param"]) == (400, "messages.0.content.0")
    assert error["message"].endswith("content of type 'image_url' is not supported, only text.")
    assert error["code"] == "unsupported_parameter"


def test_a_prompts_images_count_as_tokens(
    gateway: httpx2.Client, scripted: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 by 32 pixels are 2 by 1 squares of 28, made larger until they have the fewest pixels that are allowed."""
    from penstock.ingest.admission import Admission

    admitted, admit = list[int](), Admission.admit

    async def note(self: Admission, caller: Any, pipeline: Any, priority: Any, num_tokens: int, **how: Any) -> Any:
        admitted.append(num_tokens)
        return await admit(self, caller, pipeline, priority, num_tokens, **how)

    monkeypatch.setattr(Admission, "admit", note)
    for body in (chat(), chat(data_url(PNG)), chat(data_url(PNG), data_url(GIF))):
        assert post(gateway, scripted, "/v1/chat/completions", {"max_tokens": 5, **body}).status_code == 200
    assert admitted == [admitted[0], admitted[0] + 6, admitted[0] + 12]


def test_a_picture_that_is_gone_comes_back_with_the_same_post(
    gateway: httpx2.Client, scripted: ScriptedPipeline
) -> None:
    key = picture_key(hashlib.sha256(PNG).hexdigest())
    for _ in range(2):
        scripted.server.delete(key)
        assert post(gateway, scripted, "/v1/chat/completions", chat(data_url(PNG))).status_code == 200
        assert scripted.server.get(key) == PNG


def test_a_store_that_is_silent_holds_up_requests_with_pictures_alone(
    scripted: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them wait than the loop's own executor has threads."""
    scripted.report(sees=True)
    monkeypatch.setattr(objects, "NUM_STORE_THREADS", 32)  # the gateway's searches have some
    for module, name in ((store, "MAX_OBJECT_S"), (pictures, "MAX_STORE_S")):
        monkeypatch.setattr(module, name, 60.0)
    body = {"model": scripted.model, **chat(data_url(PNG))}
    with (
        serve_silence(monkeypatch) as (asked, is_over),
        scripted.open_gateway(batch={"store": "s3://bucket"}, picture={"redis_max_kb": 0}) as opened,
        opened.client() as client,
        ThreadPoolExecutor(12) as clients,
    ):
        waiting = [clients.submit(client.post, "/v1/chat/completions", json=body) for _ in range(12)]
        try:
            for _ in range(min(12, (os.cpu_count() or 1) + 4)):
                assert asked.acquire(timeout=60)
            assert client.get("/metrics").status_code == 200
            monkeypatch.setattr(pictures, "MAX_STORE_S", 0.1)
            answer = client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        finally:
            is_over.set()
        assert {one.result().status_code for one in waiting} == {503}


# Batches.


def run_batch(
    client: httpx2.Client, scripted: ScriptedPipeline, url: str, *bodies: dict[str, Any]
) -> tuple[list[Request], dict[str, dict[str, Any]]]:
    """Have a batch answered; return its requests, and the response of each row. Its input stays as it was."""
    bodies = tuple({"model": scripted.model, **body} for body in bodies)
    rows = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    content = lines(rows)
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    with scripted.answer_texts(lambda _: end()) as answered:
        made = client.post(
            "/v1/batches", json={"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        )
        batch = made.json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert client.get(f"/v1/files/{file['id']}/content").content == content
    found = list[dict[str, Any]]()
    for name in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        found += read(client.get(f"/v1/files/{name}/content").content)
    return list(answered), {one["custom_id"]: one["response"] for one in found}


def test_rows_of_batches_have_images_and_one_that_cannot_be_read_fails_alone(
    gateway: httpx2.Client, scripted: ScriptedPipeline
) -> None:
    bodies = [chat(data_url(PNG), data_url(GIF)), chat(data_url(HOSTILE["SVG"])), chat(*[data_url(PNG)] * 4)]
    requests, found = run_batch(gateway, scripted, "/v1/chat/completions", *bodies, {"n": 2, **chat(data_url(WEBP))})
    contents = [request.messages[0].content for request in requests if request.messages]
    assert sorted(contents, key=len) == [[told(WEBP), "?"]] * 2 + [[told(PNG), told(GIF), "?"]]
    assert [found[name]["status_code"] for name in "0123"] == [200, 400, 400, 200]
    errors = [found[name]["body"]["error"] for name in "12"]
    assert [error["param"] for error in errors] == [f"messages.0.content.{n}.image_url" for n in (0, 3)]
    assert "PNG, JPEG, WebP or GIF" in errors[0]["message"]
    for data in (PNG, GIF, WEBP):
        assert scripted.server.get(picture_key(hashlib.sha256(data).hexdigest())) == data


def test_rows_of_batches_name_files_and_a_model_that_does_not_see_refuses_them(
    gateway: httpx2.Client, scripted: ScriptedPipeline
) -> None:
    uploaded = gateway.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.jpg", JPEG)}).json()
    image = {"type": "input_image", "file_id": uploaded["id"]}
    bodies = [{"input": [{"role": "user", "content": [part]}]} for part in (image, image | {"file_id": "file-x"})]
    requests, found = run_batch(gateway, scripted, "/v1/responses", *bodies)
    assert [turn.content for request in requests for turn in request.messages or ()] == [[told(JPEG)]]
    assert [found[name]["status_code"] for name in "01"] == [200, 404]
    scripted.report(sees=False)
    while gateway.get(f"/v1/models/{scripted.model}").json()["sees"]:
        pass
    requests, found = run_batch(gateway, scripted, "/v1/responses", bodies[0])
    assert (len(requests), found["0"]["status_code"]) == (1, 400)
    assert found["0"]["body"]["error"]["code"] == "unsupported_parameter"


def test_a_tenants_limit_of_tokens_leaves_the_files_of_images_out() -> None:
    body = {"max_tokens": 5, **chat(data_url(PNG * 999), data_url(PNG))}
    line = lines([{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}])
    row = parse_row(1, line, ("/v1/chat/completions",))
    assert 2005 < estimate_row_tokens(row, line) < 2200
    body = {"max_tokens": 5, **chat('"url":"' + data_url(PNG * 999))}  # a text alone
    line = lines([{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}])
    assert estimate_row_tokens(parse_row(1, line, ("/v1/chat/completions",)), line) > len(PNG) * 999 // 4


def test_a_file_for_batches_is_no_image(gateway: httpx2.Client, scripted: ScriptedPipeline) -> None:
    uploaded = gateway.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jpg", JPEG)}).json()
    said = [{"role": "user", "content": [{"type": "input_image", "file_id": uploaded["id"]}]}]
    answer = gateway.post("/v1/chat/completions", json={"model": scripted.model, "messages": said})
    assert (answer.status_code, "purpose 'batch'" in answer.text) == (400, True)


# Responses that are kept.


def test_a_second_turn_asks_about_the_picture_of_the_first_one(
    gateway: httpx2.Client, scripted: ScriptedPipeline
) -> None:
    """Of data URLs the digest is kept, and the file is read from the store of pictures."""
    uploaded = gateway.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.jpg", JPEG)}).json()
    parts = [
        {"type": "input_image", "image_url": data_url(PNG), "detail": "low"},
        {"type": "input_image", "file_id": uploaded["id"]},
        {"type": "input_text", "text": "?"},
    ]
    seen = [told(PNG, detail="low"), told(JPEG), "?"]

    def ask(given: Any, **more: Any) -> str:
        body = {"model": scripted.model, "background": True, "input": given, **more}
        answer = gateway.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        scripted.finish(answer.json()["id"])
        return str(answer.json()["id"])

    first = ask([{"role": "user", "content": parts}])
    kept = scripted.server.get(stream_meta_key(first)) or b""
    assert base64.b64encode(PNG) not in kept
    assert hashlib.sha256(PNG).hexdigest().encode() in kept
    second = ask("and now?", previous_response_id=first)
    (item,) = gateway.get(f"/v1/responses/{first}/input_items").json()["data"]
    assert item["content"] == parts
    third = ask([{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "again"}])
    ask("more", previous_response_id=third)
    contents = [request.messages[0].content for request in scripted.read_requests() if request.messages]
    assert contents == [seen] * 4
    scripted.server.delete(picture_key(hashlib.sha256(PNG).hexdigest()))
    answer = post(gateway, scripted, "/v1/responses", {"input": "x", "previous_response_id": second})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "picture_gone", "input.0.content.0")
    (item,) = gateway.get(f"/v1/responses/{first}/input_items").json()["data"]
    named = item["content"][0]["image_url"]
    assert named == f"data:image/png;digest,{hashlib.sha256(PNG).hexdigest()}"
    answer = post(gateway, scripted, "/v1/responses", {"input": [{"role": "user", "content": item["content"]}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")


def test_nobody_asks_for_a_picture_by_its_digest(gateway: httpx2.Client, scripted: ScriptedPipeline) -> None:
    assert post(gateway, scripted, "/v1/chat/completions", chat(data_url(PNG))).status_code == 200
    named = f"data:image/png;digest,{hashlib.sha256(PNG).hexdigest()}"
    for path, body in (
        ("/v1/chat/completions", chat(named)),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": named}]}]}),
    ):
        assert "has the form" in post(gateway, scripted, path, body).json()["error"]["message"]
    parts = [
        {"type": kind, "text": "hi", "image_url": address}
        for kind in ("input_text", "input_image")
        for address in (named, {"url": named})
    ]
    call = {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}}
    for items in (
        [{"role": "user", "content": parts[:1]}],
        [{"role": "user", "content": parts[1:2]}],
        *([call, {"type": "shell_call_output", "call_id": "c1", "output": [part]}] for part in parts),
        [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": parts}],
    ):
        answer = gateway.post("/v1/responses", json={"model": scripted.model, "background": True, "input": items})
        if answer.status_code == 200:  # what is no picture is kept, and shown, as it was given
            shown = gateway.get(f"/v1/responses/{answer.json()['id']}/input_items").text
            assert named in shown
            assert base64.b64encode(PNG).decode() not in shown


# The number of a prompt's tokens.

RULES: dict[str, PictureTokens] = {
    "qwen2_vl": GridTokens(square=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    "llava": FixedTokens(num_tokens=16),
    "internvl": TileTokens(tile_width=56, tile_height=56, min_tiles=1, max_tiles=6, tokens_per_tile=4),
}
TEMPLATE = """{% for turn in messages %}{{ turn.role }}: {% if turn.content is string %}{{ turn.content }}{% else %}
{%- for part in turn.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{% endfor %}"""


@pytest.mark.parametrize("kind", RULES)
def test_the_tokens_of_images_are_counted_as_prefill_reads_them(
    scripted: ScriptedPipeline, tmp_path: Path, kind: str
) -> None:
    config = save_processor(kind, tmp_path)
    config.save_pretrained(tmp_path)
    reader = PictureReader(tmp_path, config)
    tokenizer = reader.processor.tokenizer
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", reader.processor.image_token)
    tokenizer.save_pretrained(tmp_path)
    scripted.report(sees=True, picture_tokens=RULES[kind].model_dump(), model_source=str(tmp_path))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    say: Any = [
        {"type": "image", "source": source},
        {"type": "text", "text": "a "},
        {"type": "image", "source": source},
    ]
    said = [{"type": "input_image", "image_url": data_url(PNG)}, {"type": "input_text", "text": "a "}]
    asked = {"model": scripted.model, "messages": [{"role": "user", "content": say}]}
    with scripted.open_gateway(batch={"store": str(tmp_path / "store")}) as opened, opened.client() as client:
        answer = client.post("/v1/messages/count_tokens", json=asked)
        assert answer.status_code == 200, answer.text
        counted = answer.json()["input_tokens"]
        body = {"model": scripted.model, "input": [{"role": "user", "content": [*said, said[0]]}]}
        assert client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"] == counted
        scripted.report(picture_tokens=None)
        while client.post("/v1/messages/count_tokens", json=asked).status_code == 200:
            pass  # until the gateway has read the heartbeat
        answer = client.post("/v1/messages/count_tokens", json=asked)
        assert (answer.status_code, "do not say how many" in answer.text) == (501, True)
    chats = ChatTokenizer(tokenizer, "model", is_in_child=True)
    chat = chats.render_chat([ChatMessage(role="user", content=[told(PNG), "a ", told(PNG)])], {})
    picture = decode_picture(PNG, 10**6, None)
    prompt = reader.read_chat(chats.tokenize_chat(chat), [(b"1" * 32, picture)] * 2)
    assert counted == len(prompt.token_ids)
