"""Tenants whose data stays: the topics that all tenants share, read whole, have no byte of theirs."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Outgoing
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError
from penstock.ingest.errors import ApiError
from penstock.ingest.metering import make_day_keys, parse_day_sums, utc_day
from penstock.ingest.tenants import Caller, TenantEntry, check_residency, list_allowed_regions
from penstock.messages import Result, decode_message
from penstock.names import Pipeline, add_tenant
from penstock.redis.client import redis_client
from sim.forked import ForkedStack
from sim.waiting import wait_for
from tests.commands import Terminal
from tests.gateways import ScriptedPipeline, open_stack, write_keys
from tests.ingest.batch_files import lines, row

TENANT, OTHER = "acme-stays", "guest"
SECRET = "xylophone quartz"
"""Words of the tenant's prompts. No model says them by itself."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, kafka: str) -> Iterator[tuple[ForkedStack, str, str]]:
    """Workers of both stages and a gateway in the region `eu`, and a key of the tenant and of another one."""
    folder = tmp_path_factory.mktemp("stays")
    entries = {TENANT: TenantEntry(regions=("eu",))}
    keys = write_keys(folder / "keys.json", TENANT, OTHER, **entries)
    settings = {"PENSTOCK_REGION_NAME": "eu", "PENSTOCK_GATEWAY_KEYS": str(folder / "keys.json")}
    with open_stack(folder, pipeline=f"stays-{folder.name[-1]}-{id(folder)}", kafka=kafka, settings=settings) as made:
        yield made, keys[0], keys[1]


def open_sdk(stack: ForkedStack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=key, max_retries=0, timeout=None)


def read_results(bus: Bus, topic: str) -> list[str]:
    return [decode_message(Result, message.value).id for message in bus.read_all(topic)]


def count_leaks(bus: Bus, pipeline: Pipeline, needles: list[bytes]) -> int:
    """How many messages of the shared topics, with their keys and headers, have one of the needles."""
    messages = [message for topic in pipeline.all_topics() for message in bus.read_all(topic)]
    texts = [b"\n".join((one.value, repr((one.key, dict(one.headers))).encode())) for one in messages]
    return sum(any(needle in text for needle in needles) for text in texts)


@pytest.mark.proof
def test_no_byte_of_a_tenant_that_stays_is_in_a_shared_topic(
    stack: tuple[ForkedStack, str, str], terminal: Terminal
) -> None:
    line, key, other_key = stack
    addresses, pipeline = line.addresses, Pipeline(line.addresses.pipeline)
    environment = {
        "PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": addresses.kafka,
        "PENSTOCK_STREAM_URL": addresses.stream_url,
    }  # fmt: skip
    bus = connect_bus(addresses, BusSettings())
    with open_sdk(line, key) as sdk, pytest.raises(openai.InternalServerError) as early:
        sdk.completions.create(model="demo", prompt=SECRET)
    assert (early.value.status_code, early.value.code) == (503, "topics_missing")
    assert f"penstock topics create --tenant {TENANT}" in str(early.value)
    assert read_results(bus, pipeline.results_topic) == []
    made = terminal("topics", "create", "--tenant", TENANT, **environment)
    assert sorted(made.stdout.split()[1::2]) == sorted(pipeline.list_own_topics(TENANT))

    asked: dict[str, Any] = {"model": "demo", "max_tokens": 4, "temperature": 0}
    ids = list[str]()
    with open_sdk(line, key) as sdk:
        wait_for(lambda: ask_chat(sdk, asked, ids), "the gateway sees the tenant's topics")
        pieces = list(sdk.completions.create(prompt=[SECRET, f"{SECRET}s"], stream=True, **asked))
        ids += [f"{pieces[0].id}.0", f"{pieces[0].id}.1"]
        kept = sdk.responses.create(model="demo", input=SECRET, max_output_tokens=4, store=True)
        again = sdk.responses.create(model="demo", input=SECRET, max_output_tokens=4, previous_response_id=kept.id)
        ids += [kept.id, again.id]
        file = sdk.files.create(file=("in.jsonl", lines([stays_row(number) for number in range(3)])), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        wait_for(lambda: sdk.batches.retrieve(batch.id).status == "completed", "the batch is done")
        assert SECRET in sdk.files.content(file.id).text
    with Client(addresses, tenant=TENANT, topics="own") as client:
        ids.append(client.submit(SECRET, max_tokens=4))
        client.result(ids[-1])
        ids.append(client.submit(SECRET, max_tokens=4, model="another"))  # an error
    publisher = bus.create_publisher()
    poison = add_tenant(pipeline.request_topic("interactive"), TENANT)
    publisher.publish([Outgoing(poison, f"no JSON, {SECRET}".encode(), None, {"penstock-tenant": TENANT})])
    publisher.close()

    own_results, own_dead = (
        add_tenant(topic, TENANT) for topic in (pipeline.results_topic, pipeline.dead_letter_topic)
    )
    wait_for(lambda: len(read_results(bus, own_results)) >= len(ids) + 3, "all results")
    results = read_results(bus, own_results)
    assert max(Counter(results).values()) == 1, "each request has one result"
    assert {*ids} <= {*results}
    assert len(results) == len(ids) + 3, "these and the lines of the batch"
    wait_for(lambda: bus.read_all(own_dead), "a dead letter")
    (letter,) = bus.read_all(own_dead)
    assert SECRET.encode() in letter.value
    jobs = bus.read_all(add_tenant(pipeline.job_topic("interactive"), TENANT))
    assert jobs, "its requests were handed off"
    wait_for(lambda: not any(bus.count_unsettled().values()), "all of it is settled")

    needles = [SECRET.encode(), TENANT.encode(), *(one.encode() for one in ids)]
    prompts = [tokens for job in jobs if (tokens := json.loads(job.value).get("token_ids"))]
    needles += [json.dumps(tokens, separators=(",", ":")).encode() for tokens in prompts]
    assert len(needles) > len(ids) + 2, "jobs have the tokens of prompts"
    assert count_leaks(bus, pipeline, needles) == 0

    with redis_client(addresses.stream_url) as redis:
        (day,) = make_day_keys(pipeline, [utc_day(0)])
        wait_for(lambda: count_metered(redis.hgetall(day)) == len(results), "usage is counted")
    listed = terminal("dlq", "list", "--json", **environment)
    assert add_tenant(pipeline.request_topic("interactive"), TENANT) in listed.stdout
    with open_sdk(line, other_key) as sdk:  # and the search finds what is there
        sdk.completions.create(prompt=SECRET, **asked)
    wait_for(lambda: count_leaks(bus, pipeline, needles) >= 2, "another tenant's prompt is in the shared topics")


def ask_chat(sdk: openai.OpenAI, asked: dict[str, Any], ids: list[str]) -> bool:
    """Add the id of an answer; return False while the gateway has not seen the tenant's topics."""
    with contextlib.suppress(openai.InternalServerError):
        ids.append(sdk.chat.completions.create(messages=[{"role": "user", "content": SECRET}], **asked).id)
    return bool(ids)


def count_metered(fields: Any) -> int:
    """How many requests of the tenant were counted."""
    sums = parse_day_sums(fields)
    return sums[TENANT].requests if TENANT in sums else 0


def stays_row(number: int) -> dict[str, Any]:
    return row(number, messages=[{"role": "user", "content": f"{SECRET} {number}"}])


@pytest.mark.parametrize(
    ("entry", "own", "allowed", "code"),
    [
        ({}, "us", None, None),
        ({"regions": ("eu", "ch")}, "eu", {"eu", "ch"}, None),
        ({"regions": ("eu",)}, "us", {"eu"}, "region_not_allowed"),
        ({"regions": ("eu",)}, "", {"eu"}, "region_not_allowed"),
        ({"topics": "own"}, "us", {"us"}, None),
        ({"topics": "own"}, "", {""}, None),
    ],
)
def test_where_the_data_of_a_tenant_may_be(
    entry: dict[str, Any], own: str, allowed: set[str] | None, code: str | None
) -> None:
    caller = TenantEntry.model_validate(entry).make_caller("acme")
    assert list_allowed_regions(caller, own) == allowed
    assert caller.has_own_topics == (allowed is not None)
    if code is None:
        check_residency(caller, own, has_kafka=True)
    else:
        with pytest.raises(ApiError) as refused:
            check_residency(caller, own, has_kafka=True)
        assert (refused.value.status, refused.value.code) == (403, code)


def test_without_kafka_nobody_pretends(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    """Redis Streams have no topics of a tenant's own: by HTTP, in a client, by the command."""
    with pytest.raises(SettingsError, match="PENSTOCK_KAFKA"):
        Client(scripted.addresses, tenant="acme", topics="own")
    with pytest.raises(SettingsError, match="PENSTOCK_KAFKA"):
        scripted.bus.create_topics("acme")
    (key,) = write_keys(tmp_path / "keys.json", "acme", acme=TenantEntry(topics="own"))
    gateway = scripted.open_gateway(admission={"keys": str(tmp_path / "keys.json")}, batch={"store": str(tmp_path)})
    with gateway, gateway.client() as http:
        for path, body in (
            ("/v1/files", {}),
            ("/v1/completions", {"model": scripted.model, "prompt": SECRET}),
            ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
        ):
            refused = http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "own_topics_need_kafka")
    assert scripted.read_requests() == []


def test_a_region_that_is_none_is_no_tenants() -> None:
    with pytest.raises(ValueError, match="cannot name a region"):
        TenantEntry(regions=("EU",))
    assert Caller().has_own_topics is False
