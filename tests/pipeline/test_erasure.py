"""Tenants with keys in a whole pipeline: nothing is in clear, and a dropped key ends its tenant's requests alone."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import sealing
from penstock.bus.contract import Delivery
from penstock.client.core import make_request, prepare_message
from penstock.config.addresses import Addresses
from penstock.config.settings import KVSettings, RecordSettings
from penstock.errors import ContentErased
from penstock.kvstore.block import ReadRequest
from penstock.local.valkey import ValkeyServer
from penstock.messages import Job, Result, decode_message, encode_request
from penstock.names import Pipeline
from sim.kafka_server import KafkaServer
from sim.line import InProcessPipeline, serving_engine

MakeLine = Callable[..., InProcessPipeline]
MARK = "Sesame opens the mountain of the forty thieves, "


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a key of the tenant acme, by which this process goes; what changes in it counts at once."""
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "acme").write_text(os.urandom(32).hex())
    monkeypatch.setattr(sealing, "REFRESH_S", 0.0)
    for module in ("intake", "worker"):
        monkeypatch.setattr(f"penstock.worker.{module}.KEY_DEFERRAL_S", 0.01)
    sealing.use_tenant_keys(str(directory))
    yield directory
    sealing.forget_tenant_keys()


def send(line: InProcessPipeline, request_id: str, tenant: str = "acme", max_tokens: int = 8) -> None:
    fields = {"id": request_id, "tenant": tenant, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    request = make_request(MARK * 2 + request_id[0], fields)  # type: ignore[arg-type]
    line.publisher.publish([prepare_message(line.pipeline, encode_request(request))[1]])


def run_until_results(line: InProcessPipeline, count: int) -> dict[str, Result]:
    """Turn both workers until so many results are there; some deliveries may wait for a key."""
    while len(found := line.bus.read_all(line.pipeline.results_topic)) < count:
        line.prefill.run_once()
        line.decode.run_once()
    results = [decode_message(Result, message.value) for message in found]
    assert len(results) == count
    return {result.id: result for result in results}


def test_nothing_of_a_tenant_with_a_key_is_in_clear(keys: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    kv = KVSettings(shared_mb=0, redis_mb=64, disk_mb=32, disk_dir=str(tmp_path / "blocks"))
    with KafkaServer(tmp_path / "kafka") as kafka, ValkeyServer(tmp_path / "valkey") as valkey:

        def read_stored() -> list[bytes]:
            """Return the logs of Kafka, the append-only file and a dump of Valkey's memory, and the blocks on disk."""
            with redis.Redis.from_url(valkey.url) as server:
                server.config_set("rdbcompression", "no")
                server.save()
            folders = ("kafka/data", "valkey", "blocks")
            paths = [path for folder in folders for path in (tmp_path / folder).rglob("*") if path.is_file()]
            assert any(path.suffix == ".rdb" for path in paths)
            return [path.read_bytes() for path in paths]

        addresses = Addresses(pipeline=pipeline.name, stream_url=valkey.url, kafka=kafka.bootstrap)
        with InProcessPipeline(addresses, kv=kv) as line, line.open_client() as client:
            send(line, "a-keyed")
            line.run_prefill(1)
            (job,) = line.bus.read_all(line.pipeline.job_topic("interactive"))
            (keyed,) = line.run_until_results(1)
            assert client.result("a-keyed").token_ids == keyed.token_ids
            store = serving_engine(line.prefill).store
            blocks = store.hash_prompt("acme", decode_message(Job, job.value).token_ids)
            before = read_stored()
            send(line, "a-clear", "other")
            (clear,) = [one for one in line.run_until_results(2) if one.id == "a-clear"]
            after = read_stored()
            assert clear.token_ids == keyed.token_ids
            assert store.find_tiers([key.hash for key in blocks.prompt_keys()]) == [0] * len(blocks.prompt_keys())
            ids = ",".join(map(str, keyed.token_ids)).encode()
            for mark in (MARK.encode(), keyed.text.encode(), ids, b'"text":', b'"token":'):
                assert not any(mark in one for one in before)
                assert any(mark in one for one in after)
            payloads = []
            for tenant in ("other", "acme"):
                (first, *_) = store.hash_prompt(tenant, decode_message(Job, job.value).token_ids).prompt_keys()
                payload = memoryview(bytearray(store.layout.payload_bytes))
                assert store.load_blocks([ReadRequest(first, payload)], must_read=True) == [0]
                payloads.append(bytes(payload))
            assert payloads[0] == payloads[1]
            content = payloads[0][:64]
            assert not any(content in one for one in before)
            assert any(content in one for one in after)


@pytest.mark.parametrize("dropped", ["unread", "handed", "answering", "ended"])
def test_a_dropped_key_ends_its_tenants_requests_alone(keys: Path, make_line: MakeLine, dropped: str) -> None:
    line = make_line(record=RecordSettings(lease_s=0.5))
    with line.open_client() as client:
        send(line, "acme-1", max_tokens=40)
        if dropped != "unread":
            line.run_prefill(1)
        if dropped == "answering":
            line.silence_worker("decode", 3)
        if dropped == "ended":
            line.run_until_results(1)
        (keys / "acme.erased").touch()
        (keys / "acme").unlink()
        send(line, "other-1", "other")
        if dropped == "ended":  # its result was sealed, and is gone like its log
            while len(line.bus.read_all(line.pipeline.results_topic)) < 2:
                line.prefill.run_once()
                line.decode.run_once()
        else:
            results = run_until_results(line, 2)
            assert (found := results["acme-1"].error) is not None
            assert found.code == "content_erased"
            assert (results["acme-1"].text, results["acme-1"].token_ids) == ("", [])
            assert results["other-1"].error is None
        with pytest.raises(ContentErased):
            client.result("acme-1")
        assert len(client.result("other-1").token_ids) == 8
    assert line.read_dead_letters() == []


def test_a_key_that_is_not_mounted_ends_nothing(keys: Path, make_line: MakeLine) -> None:
    line = make_line(record=RecordSettings(lease_s=30))
    send(line, "acme-1")
    hidden = (keys / "acme").rename(keys.parent / "hidden")
    sealing.forget_tenant_keys()
    sealing.use_tenant_keys(str(keys))
    send(line, "other-1", "other")
    assert list(run_until_results(line, 1)) == ["other-1"]
    assert line.make_record().read_status("acme-1") is None
    topic = line.pipeline.request_topic("interactive")
    (waiting, *_) = line.bus.read_all(topic)  # what it cannot read it does not offer to others under a wrong hash
    delivery = Delivery(topic, "1-0", waiting.value, waiting.key, waiting.headers, "interactive", 1.0)
    assert line.prefill.intake.make_claim_request(delivery) is None
    hidden.rename(keys / "acme")
    assert run_until_results(line, 2)["acme-1"].error is None


def test_answers_that_began_in_clear_go_on_encrypted(keys: Path, make_line: MakeLine) -> None:
    hidden = (keys / "acme").rename(keys.parent / "hidden")
    line = make_line(record=RecordSettings(lease_s=0.5))
    send(line, "acme-1", max_tokens=20)
    line.run_prefill(1)
    line.silence_worker("decode", 3)
    hidden.rename(keys / "acme")
    result = run_until_results(line, 1)["acme-1"]
    entries: Any = line.client.xrange(line.pipeline.log_key("acme-1"))
    log = [fields[b"e"] for _, fields in entries]
    assert (result.error, len(result.token_ids)) == (None, 20)
    assert b'"token"' in log[0]
    assert b'"sealed"' in log[-2]
    with line.open_client() as client:
        assert client.result("acme-1").token_ids == result.token_ids
