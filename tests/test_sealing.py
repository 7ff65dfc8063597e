"""Content of tenants with a key: nobody reads it without that, and it belongs to one id."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import sealing
from penstock.bus.contract import Delivery
from penstock.bus.dead_letters import build_dead_letter
from penstock.bus.replies import drop_text
from penstock.client.core import make_request, prepare_message
from penstock.errors import ContentErased, InvalidRequest, SettingsError, StreamError, TenantKeyMissing
from penstock.ingest.batch.batches import BatchSpec, FinishedParts
from penstock.ingest.batch.lines import FinishedRow
from penstock.ingest.batch.store import FileStore
from penstock.ingest.openai.endpoint import StreamMeta, decode_meta, encode_meta
from penstock.messages import (
    EndEvent,
    Job,
    Request,
    Result,
    TokenEvent,
    Usage,
    compute_body_hash,
    decode_clear_part,
    decode_message,
    encode_request,
)
from penstock.names import Pipeline
from penstock.objects import ObjectStorage
from penstock.ops.dead_letters import DeadLetter
from penstock.record import parse_event
from penstock.worker.delivery_queue import deserialize_delivery, serialize_delivery

PIPELINE = Pipeline("p")
MARK = "the-secret-recipe"


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a key of the tenant acme, by which this process goes; what changes in it counts at once."""
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "acme").write_text(os.urandom(32).hex() + "\n")
    monkeypatch.setattr(sealing, "REFRESH_S", 0.0)
    sealing.use_tenant_keys(str(directory))
    yield directory
    sealing.forget_tenant_keys()


def erase(keys: Path) -> None:
    (keys / "acme.erased").touch()
    (keys / "acme").unlink()


def publish(**fields: str) -> bytes:
    return prepare_message(PIPELINE, encode_request(make_request(MARK, {"id": "r", **fields})))[1].value  # type: ignore[typeddict-item]


def test_messages_and_events_are_sealed_for_a_tenant_with_a_key_alone(keys: Path) -> None:
    job = Job(id="r", job="j", token_ids=[5, 6], tenant="acme")
    result = Result(id="r", tenant="acme", finish_reason="stop", text=MARK, model="m")
    for sealed, message in ((job.encode(), job), (result.encode(), result)):
        assert sealing.is_sealed(sealed)
        assert decode_message(type(message), sealed) == message
    told = decode_clear_part(Result, result.encode())
    assert (told.model, told.finish_reason, told.text) == ("m", "stop", "")
    sealed = publish(tenant="acme")
    assert MARK.encode() not in sealed
    assert decode_message(Request, sealed).prompt == MARK
    assert MARK.encode() in publish(tenant="other")
    sealer = sealing.find_sealer("event", "acme", "r")
    assert sealer is not None
    assert sealing.find_sealer("event", "other", "r") is None
    event, end = TokenEvent(id="7-0123456789abcdef", token=3, text=MARK), EndEvent(finish_reason="stop", text=MARK)
    entry, last = sealing.seal_event(sealer, 7, event.encode()), sealing.seal_end(sealer, end.encode())
    assert not any(one in entry + last for one in (MARK.encode(), b"0123456789abcdef", b'"token"'))
    assert (parse_event(entry, "r"), parse_event(last, "r")) == (event, end)
    for moved in (entry.replace(b'"7-0"', b'"8-0"'), entry.replace(b"7-0", b"end")):
        with pytest.raises(StreamError):
            parse_event(moved, "r")
    with pytest.raises(StreamError):
        parse_event(entry, "another")


@given(share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_what_was_changed_or_moved_is_refused(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("keys")
    for tenant in ("acme", "other"):
        (directory / tenant).write_text(os.urandom(32).hex())
    sealing.use_tenant_keys(str(directory))
    try:
        sealed = publish(tenant="acme")
        for old, new in ((b'"id":"r"', b'"id":"s"'), (b"acme", b"other"), (b'"request"', b'"job"')):
            with pytest.raises((InvalidRequest, TenantKeyMissing)):
                decode_message(Request, sealed.replace(old, new))
        start = sealed.index(b'"data":"') + 8
        place, changed = (
            start + int(share * (len(sealed) - 10 - start)),
            bytearray(sealed),
        )  # the last bits may be unused
        changed[place] = ord("B") if changed[place] == ord("A") else ord("A")
        with pytest.raises(InvalidRequest):
            decode_message(Request, bytes(changed))
    finally:
        sealing.forget_tenant_keys()


def test_keys_are_rotated_missed_and_dropped(keys: Path) -> None:
    first = publish(tenant="acme")
    body = encode_request(make_request(MARK, {"id": "r", "tenant": "acme"})).body_hash
    old = (keys / "acme").read_text()
    (keys / "acme").write_text(old + os.urandom(32).hex())
    second = publish(tenant="acme")
    assert sealing.read_envelope(first)["sealed"] != sealing.read_envelope(second)["sealed"]
    for value in (first, second):
        request = decode_message(Request, value)
        assert compute_body_hash(request, value) == body != compute_body_hash(request, request.encode())
    (keys / "acme").unlink()  # not mounted: who had the keys goes on, and others wait
    assert decode_message(Request, second).prompt == MARK
    sealing.forget_tenant_keys()
    for directory in ("", str(keys)):
        sealing.use_tenant_keys(directory)
        assert not sealing.has_key_of(first)
        with pytest.raises(TenantKeyMissing, match="PENSTOCK_TENANT_KEYS"):
            decode_message(Request, first)
    (keys / "acme.erased").touch()
    assert sealing.has_key_of(first)
    with pytest.raises(ContentErased):
        decode_message(Request, first)
    with pytest.raises(ContentErased):
        publish(tenant="acme")
    (keys / "acme").write_text(os.urandom(32).hex())  # it begins anew; what it had stays erased
    assert decode_message(Request, publish(tenant="acme")).prompt == MARK
    with pytest.raises(ContentErased):
        decode_message(Request, first)


def test_settlements_after_a_dropped_key_have_the_error_alone(keys: Path) -> None:
    erase(keys)
    result = decode_message(Result, Result(id="r", tenant="acme", finish_reason="stop", text=MARK).encode())
    job = decode_message(Job, Job(id="r", job="j", tenant="acme", token_ids=[1]).encode())
    for message in (result, job):
        assert message.error is not None
        assert message.error.code == "content_erased"
    assert (result.text, job.token_ids, job.job) == ("", [], "j")


def test_who_used_how_much_is_told_of_a_sealed_result_whose_key_was_dropped(keys: Path) -> None:
    result = Result(id="r", tenant="acme", finish_reason="stop", text=MARK, model="m", usage=Usage(completion_tokens=7))
    sealed = result.encode()
    (keys / "acme").write_text(os.urandom(32).hex())  # replaced, without a word of what became of the old one
    told = decode_message(Result, drop_text(sealed))
    assert (told.id, told.usage.completion_tokens, told.text) == ("r", 7, "")
    sealed = result.encode()
    erase(keys)
    assert decode_message(Result, drop_text(sealed)).usage.completion_tokens == 7


def test_a_directory_that_is_not_mounted_stops_no_tenant_that_was_known(keys: Path) -> None:
    """What is damaged may be the first key of a tenant in clear, and is waited for."""
    assert MARK.encode() in publish(tenant="other")
    (keys / "other").write_text("xyz")
    with pytest.raises(TenantKeyMissing, match="other"):
        publish(tenant="other")
    (keys / "other").unlink()
    publish(tenant="other")
    publish(tenant="acme")
    keys.rename(keys.with_name("away"))
    assert MARK.encode() in publish(tenant="other")
    assert MARK.encode() not in publish(tenant="acme")
    with pytest.raises(TenantKeyMissing, match="mount it again"):
        publish(tenant="third")


@pytest.mark.parametrize("content", ["xyz", "00" * 31, ""])
def test_a_damaged_file_of_keys_is_never_taken_for_none(keys: Path, content: str) -> None:
    (keys / "bad").write_text(content)
    with pytest.raises(TenantKeyMissing, match="bad"):
        publish(tenant="bad")


def test_a_name_that_is_no_tenants_reads_no_file(keys: Path) -> None:
    value = publish(tenant="acme").replace(b'"acme"', b'"../keys/acme"')
    with pytest.raises(InvalidRequest, match="names no tenant"):
        decode_message(Request, value)
    with pytest.raises(InvalidRequest, match=r"must not end in \.erased"):
        publish(tenant="acme.erased")
    sealing.forget_tenant_keys()
    with pytest.raises(SettingsError, match="not a directory"):
        sealing.use_tenant_keys(str(keys / "acme"))


def test_the_copy_of_a_message_in_a_record_is_sealed(keys: Path) -> None:
    taken = Delivery("t", "0:1", MARK.encode(), "r", {}, "interactive", 1.0, is_held=False)
    kept = serialize_delivery(taken, "acme", "r")
    assert MARK.encode() not in kept
    assert deserialize_delivery(kept) == taken
    assert MARK.encode() in serialize_delivery(taken, "other", "r")
    erase(keys)
    assert serialize_delivery(taken, "acme", "r") == b""


def test_dead_letters_stay_sealed_and_are_sent_again(keys: Path) -> None:
    topic, value = PIPELINE.request_topic("interactive"), publish(tenant="acme")
    delivery = Delivery(topic, "0:1", value, "r", {}, "interactive", 1.0)
    letter = build_dead_letter(PIPELINE, delivery, f"model_error: {MARK}", MARK)
    assert MARK not in str(letter)
    again = DeadLetter.from_message(letter).build_retry(PIPELINE, 1)
    assert MARK.encode() not in again.value
    assert decode_message(Request, again.value).id == "r.retry-1"


async def test_files_parts_and_cards_are_sealed(keys: Path, tmp_path: Path) -> None:
    async def upload(size: int) -> AsyncIterator[bytes]:
        for start in range(0, size, 70_000):
            yield (MARK * 200_000)[start : min(size, start + 70_000)].encode()
        yield b""

    objects = ObjectStorage.open(str(tmp_path / "objects"))
    files = FileStore(objects)
    for tenant, size in (("acme", 2_500_000), ("acme", 0), ("other", 3)):
        made = await files.save_file(tenant, "f", "batch", upload(size))
        assert made.bytes == size
        assert b"".join([one async for one in files.read_content(tenant, made)]) == (MARK * 200_000)[:size].encode()
    spec = BatchSpec(id="batch_1", tenant="acme", endpoint="", input_file_id="", created_at=0, expires_at=0)
    await FinishedParts(objects, spec).write_rows([FinishedRow(1, MARK.encode(), is_ok=True)])
    assert [row async for row in FinishedParts(objects, spec).read_file_rows(ok=True)] == [MARK.encode() + b"\n"]
    meta = StreamMeta(
        id="s", tenant="acme", pipeline="p", path="/v1/responses", model="m", created=1, request_ids=["s"]
    )
    meta = meta.model_copy(update={"input_items": [{"text": MARK}]})
    stored = [path.read_bytes() for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert not any(MARK.encode() in one for one in [*stored, encode_meta(meta)])
    assert decode_meta("s", encode_meta(meta)) == meta
    cut = next(path for path in (tmp_path / "objects").rglob("content/*") if path.stat().st_size > 1e6)
    cut.write_bytes(cut.read_bytes()[:-33])
    whole = FileStore(objects).read_content("acme", made.model_copy(update={"id": cut.name}))
    with pytest.raises(InvalidRequest, match="ends too early"):
        [one async for one in whole]
    erase(keys)
    with pytest.raises(ContentErased):
        await files.save_file("acme", "f", "batch", upload(5))
    with pytest.raises(ContentErased):
        decode_meta("s", encode_meta(meta))
    await asyncio.to_thread(objects.close)
