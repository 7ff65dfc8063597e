"""One contract for all stores: a folder, memory, and S3 over HTTP.

The S3 server is moto's, in a process of its own; another one where `TEST_S3_URL=s3://bucket` (and `AWS_…`) name it.
"""

import asyncio
import json
import os
import random
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest
from obstore.store import MemoryStore

from penstock.errors import StorageUnavailable
from penstock.ingest.batch import batches as batches_module
from penstock.ingest.batch.batches import BatchStore, FinishedParts
from penstock.ingest.batch.lines import CHUNK_BYTES, MAX_LINE_BYTES, FinishedRow, InvalidLine, check_lines, split_lines
from penstock.ingest.batch.shapes import BatchState, NewBatch
from penstock.ingest.batch.store import FileStore, content_path, make_id
from penstock.ingest.errors import ApiError, to_api_error
from penstock.ingest.tenants import Caller
from penstock.local.processes import find_free_port, start_child, wait_until_serving
from penstock.objects import ObjectStorage
from sim.waiting import PATIENCE_S
from tests.draws import mark_some
from tests.ingest.batch_files import create_batch

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
NEW = NewBatch(input_file_id="", endpoint=CHAT, completion_window="24h")


ONE_BY_ONE = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

application = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), application, request_handler=MotoRequestHandler)
"""
"""moto's server with one thread: with several, two creators of an object may both succeed, as S3 lets none do."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a bucket, and the environment in which it can be reached."""
    if given := os.environ.get("TEST_S3_URL"):
        yield given
        return
    port = find_free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", ONE_BY_ONE, str(port)]
    server = start_child(command, name="S3", log=tmp_path_factory.mktemp("s3") / "log")
    try:
        wait_until_serving(server, lambda: _made(f"{endpoint}/bucket"), PATIENCE_S)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "any",
            }.items():  # fmt: skip
                patch.setenv(name, value)
            yield "s3://bucket"
    finally:
        server.stop()


def _made(url: str) -> bool:
    """Whether a new bucket is there now."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT")) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(params=["folder", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStorage]:
    if request.param == "memory":
        made = ObjectStorage(MemoryStore())
    elif request.param == "folder":
        made = ObjectStorage.open(str(tmp_path / "store"))
    else:
        made = ObjectStorage.open(f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}")
    yield made
    made.close()


async def chunks_of(*chunks: bytes, fails: bool = False) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if fails:
        raise ConnectionError("the sender left")


async def all_of(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


@pytest.mark.proof
async def test_objects_are_read_as_they_were_written(objects: ObjectStorage) -> None:
    content = random.Random(1).randbytes(3 * CHUNK_BYTES + 17)
    assert await objects.write_stream(
        "a/b", chunks_of(*(content[at : at + 70_001] for at in range(0, len(content), 70_001)))
    )
    assert await all_of(objects.read_stream("a/b")) == content
    assert (await objects.get_size("a/b"), await objects.get_size("a/c")) == (len(content), None)
    assert await objects.copy_object("a/b", "c/d")
    assert not await objects.copy_object("a/none", "c/e")
    await objects.delete("a/b")
    await objects.delete("a/b")
    assert await objects.get("c/d") == content
    assert await all_of(objects.read_stream("a/b")) == b""
    assert await objects.write_stream("a/empty", chunks_of()) == 0
    assert await objects.get("a/empty") == b""


@pytest.mark.proof
async def test_objects_are_listed_by_their_age(objects: ObjectStorage, request: pytest.FixtureRequest) -> None:
    begun_s, ticks_per_s = time.time(), 1 if "s3" in request.node.callspec.id else 20  # S3 tells whole seconds
    for name in ("b", "a", "c/d"):
        await objects.put(f"x/{name}", b"1")
        written_s = time.time()
        while int(time.time() * ticks_per_s) == int(written_s * ticks_per_s):
            await asyncio.sleep(0.01)
    found = await objects.list_by_age("x")
    assert [name for _, name in found] == ["b", "a"]
    assert all(begun_s - 2 < written_s < time.time() + 2 for written_s, _ in found)
    assert await objects.list_by_age("nothing") == []


@pytest.mark.proof
async def test_an_object_is_there_as_a_whole_or_not_at_all(objects: ObjectStorage) -> None:
    large = [b"x" * CHUNK_BYTES] * 12
    with pytest.raises(ConnectionError):
        await objects.write_stream("a/b", chunks_of(*large, fails=True))
    assert await objects.list_names("a") == []

    async def hanging() -> AsyncIterator[bytes]:
        for chunk in large:
            yield chunk
        await asyncio.Event().wait()

    writing = asyncio.create_task(objects.write_stream("a/b", hanging()))
    await asyncio.wait((writing,), timeout=0.2)
    assert await objects.list_names("a") == []
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await objects.list_names("a") == []


async def test_an_upload_that_was_given_up_leaves_nothing_at_the_server(bucket: str) -> None:
    """What is not complete is in no list of objects: it would cost room for good."""
    objects, name = ObjectStorage.open(f"{bucket}/given-up"), bucket.removeprefix("s3://")
    with pytest.raises(ConnectionError):
        await objects.write_stream("a/b", chunks_of(*[b"x" * CHUNK_BYTES] * 12, fails=True))
    with urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/{name}?uploads") as answer:
        assert b"given-up" not in answer.read()
    objects.close()


@pytest.mark.proof
async def test_a_store_that_is_away_is_an_outage(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{find_free_port()}")
    objects = ObjectStorage.open(bucket)
    with pytest.raises(StorageUnavailable, match="the file store cannot be used") as caught:
        await FileStore(objects).find_file("t", make_id("file-"))
    told = to_api_error(caught.value)
    assert (told.status, told.code, told.headers["Retry-After"]) == (503, "unavailable", "1")
    objects.close()


@pytest.mark.proof
async def test_of_several_creators_one_succeeds(objects: ObjectStorage) -> None:
    made = await asyncio.gather(*(objects.put_if_absent("end", b"%d" % number) for number in range(8)))
    assert sorted(made) == [False] * 7 + [True]
    assert await objects.get("end") == b"%d" % made.index(True)


@pytest.mark.proof
async def test_files_are_their_tenants_own(objects: ObjectStorage) -> None:
    files = FileStore(objects)
    mine = await files.save_file("mine", "in.jsonl", "batch", chunks_of(b"hello"))
    for stranger in ("yours", "Mine", "m"):
        with pytest.raises(ApiError, match="no such file") as caught:
            await files.find_file(stranger, mine.id)
        assert caught.value.status == 404
    unknown = make_id("file-")
    for name in (unknown, "../mine/" + mine.id, mine.id + "/..", "", mine.id.upper()):
        with pytest.raises(ApiError, match="no such file"):
            await files.find_file("mine", name)
    assert (await files.list_files("yours", after=None, limit=10, order="asc"))[0] == []
    assert (await files.list_files("mine", after=None, limit=10, order="asc"))[0] == [mine]


@pytest.mark.proof
async def test_a_file_too_large_leaves_nothing(objects: ObjectStorage) -> None:
    files = FileStore(objects)
    with pytest.raises(ApiError) as caught:
        await files.save_content("t", chunks_of(b"x" * 600, b"x" * 600), max_bytes=1000)
    assert caught.value.status == 413
    assert await objects.list_names("tenants/t") == []


@pytest.mark.proof
async def test_what_is_over_or_has_no_file_is_swept(objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    files, now = FileStore(objects), time.time_ns()
    monkeypatch.setattr("penstock.ingest.batch.store.time.time_ns", lambda: now - 2 * 86_400 * 10**9)
    over = await files.save_file("t", "old.jsonl", "batch", chunks_of(b"old"), life_s=-1)
    kept = await files.save_file("t", "kept.jsonl", "batch", chunks_of(b"kept"))
    orphan, _ = await files.save_content("t", chunks_of(b"nobody's"))
    monkeypatch.undo()
    under_way, _ = await files.save_content("t", chunks_of(b"not yet a file"))
    with pytest.raises(ApiError, match="no such file"):
        await files.find_file("t", over.id)
    assert await files.delete_expired() == 2
    assert await objects.list_names("tenants/t/content") == sorted([kept.id, under_way])
    assert orphan not in await objects.list_names("tenants/t/content")
    assert (await files.list_files("t", after=None, limit=10, order="asc"))[0] == [kept]


@pytest.mark.proof
async def test_a_batch_is_kept_without_its_file(objects: ObjectStorage) -> None:
    files, batches, caller = FileStore(objects), BatchStore(objects), Caller(tenant="t")
    file = await files.save_file("t", "in.jsonl", "batch", chunks_of(b"line\n"))
    made = await batches.create_batch(caller, NEW, file)
    await files.delete_file("t", file.id)
    assert await batches.list_open_ids() == [made.id]
    birth = await batches.find_open_spec(made.id)
    assert birth is not None
    assert await batches.find_spec("other", made.id) is None
    assert (await batches.cancel_batch("t", made.id)).status == "cancelling"
    ends = [BatchState(status="cancelled", cancelled_at=7), BatchState(status="completed", completed_at=8)]
    assert [await batches.end_batch(birth, end) for end in ends] == [True, False]
    assert (await batches.find_batch("t", made.id)).status == "cancelled"
    await batches.clear_batch(birth)
    assert (await batches.list_open_ids(), await objects.list_names(f"tenants/t/batches/{made.id}/parts")) == ([], [])
    assert await objects.get_size(f"tenants/t/batches/{made.id}/input") is None


@pytest.mark.proof
async def test_a_batch_that_was_never_quite_made_goes(objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    files, batches = FileStore(objects), BatchStore(objects)
    file = await files.save_file("t", "in.jsonl", "batch", chunks_of(b"line\n"))
    await objects.delete(content_path("t", file.id))
    with pytest.raises(ApiError, match="no such file"):
        await batches.create_batch(Caller(tenant="t"), NEW, file)
    (half,) = await batches.list_open_ids()
    assert await batches.find_open_spec(half) is None
    assert await batches.list_open_ids() == [half]
    monkeypatch.setattr(batches_module, "UNFINISHED_TTL_S", -1)
    assert await batches.find_open_spec(half) is None
    assert await batches.list_open_ids() == []


@pytest.mark.proof
async def test_parts_of_two_holders_give_each_line_once(objects: ObjectStorage) -> None:
    birth = await create_batch(objects, Caller(tenant="t"), b"line\n")
    first, second = FinishedParts(objects, birth), FinishedParts(objects, birth)
    await first.write_rows([FinishedRow(number, b'{"by": 1}', is_ok=number != 3) for number in range(1, 7)])
    await second.write_rows([FinishedRow(number, b'{"by": 2}', is_ok=True) for number in (6, 5, 8)])
    third = FinishedParts(objects, birth)
    await third.load_finished()
    assert (third.finished_rows, third.num_ok) == ({1, 2, 3, 4, 5, 6, 8}, 6)
    output = [json.loads(line) for line in (await all_of(third.read_file_rows(ok=True))).splitlines()]
    assert len(output) == 6
    assert sorted(one["by"] for one in output) in ([1] * 5 + [2], [1] * 3 + [2] * 3)  # whoever's name comes first
    assert len((await all_of(third.read_file_rows(ok=False))).splitlines()) == 1


@pytest.mark.parametrize("cut", mark_some([1, 7, 1000], pytest.mark.proof))
async def test_lines_do_not_depend_on_how_their_bytes_come(cut: int) -> None:
    content = '{"a": 1}\r\n\n  \n{"b": "ä"}\n{"c": 3}'.encode()
    chunks = chunks_of(*(content[at : at + cut] for at in range(0, len(content), cut)))
    found = [(number, json.loads(line)) async for number, line in split_lines(chunks)]
    assert found == [(1, {"a": 1}), (4, {"b": "ä"}), (5, {"c": 3})]


async def test_a_line_without_end_is_not_gathered() -> None:
    with pytest.raises(InvalidLine, match="line 1: A line may have"):
        async for _ in split_lines(chunks_of(*[b"x" * CHUNK_BYTES] * (MAX_LINE_BYTES // CHUNK_BYTES + 1))):
            pass


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
async def test_a_file_in_another_encoding_is_told_so_at_its_first_line(encoding: str) -> None:
    content = ('{"custom_id": "a", "method": "POST"}\n' * 3).encode(encoding)
    for text in (content, content[:30]):
        _, (error,) = await check_lines(split_lines(chunks_of(text)), (CHAT,), 100)
        assert (error.line, error.code) == (1, "invalid_json_line")
        assert "write it in UTF-8" in error.message


async def test_errors_are_told_with_their_lines_and_not_without_end() -> None:
    good = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
    bad = [b"[]\n", b'{"custom_id": 5}\n', b"{\n", good.replace(b"POST", b"GET"), good.replace(b"{}", b"[]"), good]
    total, errors = await check_lines(split_lines(chunks_of(good, *bad)), (CHAT,), 100)
    assert total == 7
    assert [(error.line, error.code) for error in errors] == [
        (2, "invalid_json_line"), (3, "invalid_custom_id"), (4, "invalid_json_line"), (5, "invalid_method"),
        (6, "missing_required_parameter"), (7, "duplicate_custom_id"),
    ]  # fmt: skip
    _, errors = await check_lines(split_lines(chunks_of(*[b"[]\n"] * 1000)), (CHAT,), 10_000)
    assert len(errors) == 100
