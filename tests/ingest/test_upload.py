"""Forms that are none: always `ApiError` 400, never a crash; and good ones, however their bytes come."""

import random
from contextlib import suppress
from typing import Any

import pytest
from fastapi import Request

from penstock.ingest.errors import ApiError
from penstock.ingest.http.upload import Upload

KIND = "multipart/form-data; boundary=cut"
FIELD = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
CONTENT = b"one\r\n--cu\ntwo\r\n-cut --cut\r\n\r"
END = b"\r\n--cut--\r\n"


async def received(body: bytes, kind: str = KIND, cut: int = 1000) -> tuple[Upload, bytes]:
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)]

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0) if pieces else b""
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", kind.encode())]}
    form, content = Upload(Request(scope, receive)), b""
    while await form.next_file():
        content += b"".join([piece async for piece in form.read_file()])
    return form, content


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
@pytest.mark.parametrize("parts", [FIELD + FILE + CONTENT, FILE + CONTENT + b"\r\n" + FIELD.removesuffix(b"\r\n")])
async def test_a_form_is_read_in_any_order(parts: bytes, cut: int) -> None:
    form, content = await received(parts + END, cut=cut)
    assert (content, form.filename, form.fields) == (CONTENT, "in.jsonl", {"purpose": "batch"})


async def test_an_empty_file_is_one() -> None:
    assert (await received(FILE + END))[1] == b""


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "application/json"), (FILE + CONTENT + END, "multipart/form-data"),
        (FILE + CONTENT + END, "multipart/form-data; boundary="),
        (FILE + CONTENT + END, f"multipart/form-data; boundary={'x' * 300}"), (b"", KIND), (b"no form at all", KIND),
        (FIELD + FILE + CONTENT, KIND), (FILE.replace(b'"file"', b'"other"') + CONTENT + END, KIND),
        (FIELD.replace(b"batch", b"x" * 5000) + END[2:], KIND), (FIELD * 17 + END[2:], KIND),
        (b"--cut\r\nX: " + b"x" * 5000 + b"\r\n\r\n" + END, KIND), (b"--cut\r\n: x\r\n\r\nx" + END, KIND),
    ],
)  # fmt: skip
async def test_what_is_no_form_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        await received(body, kind)
    assert caught.value.status == 400


async def test_damaged_forms_are_refused_or_read() -> None:
    chance, whole = random.Random(3), FIELD + FILE + CONTENT + END
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with suppress(ApiError):
            await received(bytes(damaged), cut=chance.randint(1, 60))
