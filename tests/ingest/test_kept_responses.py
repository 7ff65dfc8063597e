"""Responses that are kept: from Redis and, after they have moved, from the object store, on any gateway."""

import contextvars
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from penstock.errors import StorageUnavailable
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway import kept_responses
from penstock.ingest.gateway import responses as routes
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.openai import RESPONSES, StreamMeta
from penstock.ingest.openai.endpoint import EarlierTurns
from penstock.messages import EndEvent
from penstock.names import stream_meta_key
from sim.events import EventSource, ServerSentEvent
from sim.waiting import wait_for
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.ingest.answers import TEMPLATE
from tests.record.play import decode, end, say

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = "a word that nobody else says"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


class Kept:
    """Two gateways over one scripted pipeline, and a tenant."""

    def __init__(self, scripted: ScriptedPipeline, apps: list[FastAPI], patch: pytest.MonkeyPatch) -> None:
        self.scripted, self.server, self.pipeline = scripted, scripted.server, scripted.pipeline
        self.record, self.finish, self.patch = scripted.record, scripted.finish, patch
        self.tenant = f"t-{uuid.uuid4().hex[:12]}"
        self.gateways: list[Gateway] = [app.state.gateway for app in apps]
        self.keepers = [gateway.responses for gateway in self.gateways]
        made: Any = {"base_url": "http://127.0.0.1", "headers": {"x-tenant": self.tenant}, "timeout": None}
        self.clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), **made) for app in apps]
        self.folder = Path(self.gateways[0].settings.batch.store) / "tenants" / self.tenant / "responses"

    async def ask(self, question: str = SECRET, **more: Any) -> dict[str, Any]:
        """Ask the first gateway in the background."""
        body = {"model": self.scripted.model, "input": question, "background": True} | more
        answer = await self.clients[0].post("/v1/responses", json=body)
        found: dict[str, Any] = answer.json()
        return found

    async def answered(self, question: str = SECRET, count: int = 3, **more: Any) -> str:
        """Ask, and answer as a worker with so many tokens; return the response's id."""
        name: str = (await self.ask(question, **more))["id"]
        self.finish(name, count)
        return name

    async def post_answered(self, **more: Any) -> httpx.Response:
        """Ask the first gateway what was answered before it was asked: the POST would wait here for its answer."""
        key = uuid.uuid4().hex
        self.finish(f"resp_{await self.gateways[0].stream_metas.derive_name(self.tenant, key)}")
        body = {"model": self.scripted.model, "input": SECRET} | more
        return await self.clients[0].post("/v1/responses", json=body, headers={"idempotency-key": key})

    async def move_ended(self, gateway: int = 1) -> None:
        """Move what has ended."""
        await self.keepers[gateway].move_ended(self.pipeline)

    async def move(self, *names: str) -> None:
        """Move what has ended, on the second gateway; then Redis forgets these responses."""
        await self.move_ended()
        for name in names:
            assert not self.server.hexists(self.pipeline.responses_key, name)
            self.scripted.forget(name)

    async def move_once(self, name: str) -> None:
        """Move one response, if none has moved yet."""
        if not self.stored():
            await self.move(name)

    async def get(self, path: str, gateway: int = 1, **params: Any) -> Any:
        return (await self.clients[gateway].get(f"/v1/responses/{path}", params=params)).json()

    async def numbers(self, name: str, **params: Any) -> list[int]:
        """Return the sequence numbers of its stream at the second gateway."""
        answer = await self.clients[1].get(f"/v1/responses/{name}", params={"stream": True, **params})
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(one)["sequence_number"] for one in data]

    async def check_nothing_left(self) -> None:
        """Check that after an hour there is no object, and no mark."""
        self.patch.setattr(kept_responses, "DELETED_S", -1.0)
        await self.move_ended(0)
        assert self.stored() == []
        assert not self.server.exists(self.pipeline.responses_key)

    def stored(self) -> list[Path]:
        """The objects of all responses."""
        return sorted(self.folder.glob("*"))


@pytest.fixture
def kept(scripted: ScriptedPipeline, gateways: list[FastAPI], monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(scripted, gateways, monkeypatch)


@pytest.mark.proof
async def test_a_background_response_is_read_while_it_is_made_and_afterwards(kept: Kept) -> None:
    posted = await kept.ask(metadata={"for": "a test"})
    assert (posted["status"], posted["background"], posted["store"], posted["output"]) == ("queued", True, True, [])
    name = posted["id"]
    assert (await kept.get(name))["status"] == "queued"
    claim = kept.scripted.write(name, 3)
    assert (await kept.get(name))["status"] == "in_progress"
    kept.record.finish_request(claim, end())
    live = await kept.get(name)
    assert (live["status"], live["metadata"]) == ("completed", {"for": "a test"})
    assert live["output"][0]["content"][0]["text"] == "<0><1><2>"
    await kept.move(name)
    assert await kept.get(name) == live, "it is the same from the object store"


@pytest.mark.proof
async def test_a_response_that_failed_says_why(kept: Kept) -> None:
    name = (await kept.ask())["id"]
    kept.finish(name, 1, EndEvent.model_validate({
        "finish_reason": "error", "error": {"code": "deadline_exceeded", "message": "too late"},
    }))  # fmt: skip
    for _ in range(2):
        found = await kept.get(name)
        assert (found["status"], found["error"]["code"], found["output"]) == ("failed", "deadline_exceeded", [])
        await kept.move_once(name)


@pytest.mark.proof
async def test_a_background_response_is_cancelled(kept: Kept) -> None:
    name = (await kept.ask())["id"]
    for gateway in kept.clients:
        assert (await gateway.post(f"/v1/responses/{name}/cancel")).json()["status"] == "cancelled"
    assert (await kept.get(name))["status"] == "cancelled"
    ended = await kept.answered()
    assert (await kept.clients[1].post(f"/v1/responses/{ended}/cancel")).json()["status"] == "completed"
    plain = (await kept.post_answered(stream=True)).headers["x-request-id"]
    assert (await kept.get(plain))["output"][0]["content"][0]["text"] == "<0><1><2>"
    refused = await kept.clients[1].post(f"/v1/responses/{plain}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_in_background")
    unknown = await kept.clients[1].post("/v1/responses/resp_none/cancel")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.proof
async def test_the_turns_before_come_before_the_input(kept: Kept) -> None:
    first = await kept.answered("one", instructions="Be short.")
    second = await kept.answered("two", previous_response_id=first)
    await kept.move(first)
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}]
    third = await kept.ask("", input=turns, previous_response_id=second)
    assert third["previous_response_id"] == second
    (asked,) = [one for one in kept.scripted.read_requests() if one.id == third["id"]]
    assert [(turn.role, turn.content) for turn in asked.messages or ()] == [
        ("user", "one"), ("assistant", "<0><1><2>"), ("user", "two"), ("assistant", "<0><1><2>"), ("user", "three"),
    ], "without the instructions"  # fmt: skip
    early = await kept.ask("four", previous_response_id=third["id"])
    assert early["error"]["code"] == "previous_response_not_completed"


@pytest.mark.proof
async def test_calls_and_reasoning_are_kept_and_come_before_the_input(kept: Kept) -> None:
    kept.scripted.report(response_template=TEMPLATE)
    name = (await kept.ask("red?", tools=[TOOL], reasoning={"effort": "low"}))["id"]
    claim = decode(kept.record, name)
    call = '<tool_call>{"name": "f !", "arguments": {"a": 1}}</tool_call>'
    for token, text in enumerate(["<think>", "Hm", "</think>", "Now", call, call]):
        kept.record.append_tokens([(claim, claim.next_event(token, text))])
    kept.record.finish_request(claim, end())
    live, numbers = await kept.get(name), await kept.numbers(name)
    thought, message, *calls = live["output"]
    assert (thought["type"], message["content"][0]["text"]) == ("reasoning", "Now")
    assert [(one["name"], one["arguments"]) for one in calls] == [("f !", '{"a": 1}')] * 2
    for _ in range(2):
        assert (await kept.get(name), await kept.numbers(name)) == (live, numbers)
        for number in numbers:
            assert await kept.numbers(name, starting_after=number) == numbers[number + 1 :]
        await kept.move_once(name)
    assert (await kept.get(name, starting_after=1))["error"]["param"] == "starting_after", "not without a stream"
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "red"} for one in calls]
    second = await kept.ask("", input=results, previous_response_id=name)
    (asked,) = [one for one in kept.scripted.read_requests() if one.id == second["id"]]
    user, answer, *told = asked.messages or []
    assert user.content == "red?"
    assert (answer.content, answer.reasoning_content) == ("Now", "Hm")
    assert [one.id for one in answer.tool_calls or ()] == [one["call_id"] for one in calls]
    assert [(one.role, one.tool_call_id) for one in told] == [("tool", one["call_id"]) for one in calls]
    listed = await kept.get(f"{second['id']}/input_items", order="asc")
    assert [one["type"] for one in listed["data"]] == ["function_call_output"] * 2
    stranger = await kept.ask("", input=[results[0] | {"call_id": "call_none"}], previous_response_id=name)
    assert (stranger["error"]["param"], stranger["error"]["code"]) == ("input", "invalid_value")


async def read_earlier(kept: Kept, name: str) -> tuple[EarlierTurns, list[Any]]:
    """Return the turns of a response and of those before it, and what was asked of Redis and of the object store."""
    body = RESPONSES.parse_body({"model": "m", "input": "x", "previous_response_id": name})
    asked = list[Any]()
    token = ASKED.set(asked)
    try:
        _, _, earlier = await routes.prepare_response(kept.gateways[0], kept.tenant, body)
    finally:
        ASKED.reset(token)
    assert earlier is not None
    return earlier, asked


ASKED = contextvars.ContextVar[list[Any] | None]("ASKED", default=None)


@pytest.fixture
def counted(kept: Kept) -> Kept:
    """The same, and what is asked of servers where `ASKED` is set is noted there."""

    def note(owner: Any, name: str) -> None:
        done = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            if (asked := ASKED.get()) is not None:
                asked.append((name, str(args[0]) if name == "execute_command" else ""))
            return done(self, *args, **options)

        kept.patch.setattr(owner, name, call)

    note(redis.asyncio.Redis, "execute_command")
    note(redis.asyncio.client.Pipeline, "execute")
    note(type(kept.keepers[0]._objects), "get")
    return kept


def forget_earlier(kept: Kept, name: str) -> None:
    """Let a kept response be as an earlier version wrote it."""
    key, stored = stream_meta_key(name), kept.folder / name
    if stored.exists():
        meta, _, log = stored.read_bytes().partition(b"\n")
        old = StreamMeta.model_validate_json(meta).model_dump_json(exclude={"earlier"})
        stored.write_bytes(old.encode() + b"\n" + log)
    else:
        now = StreamMeta.model_validate_json(cast("bytes", kept.server.get(key)))
        kept.server.set(key, now.model_dump_json(exclude={"earlier"}), keepttl=True)


@pytest.mark.proof
async def test_a_chain_of_any_length_is_read_by_its_last_response(counted: Kept) -> None:
    kept, names, found = counted, list[str](), list[Any]()
    for number in range(30):
        before: dict[str, Any] = {"previous_response_id": names[-1]} if names else {}
        names.append(await kept.answered(f"turn {number}", **before))
        earlier, asked = await read_earlier(kept, names[-1])
        assert earlier.first_id == names[0]
        assert [item["content"] for item in earlier.items[::2]] == [f"turn {n}" for n in range(number + 1)]
        assert len(earlier.items) == 2 * number + 2
        found.append(asked)
    assert 0 < len(found[0]) < 20
    assert found == [found[0]] * 30
    assert (await kept.clients[1].delete(f"/v1/responses/{names[7]}")).status_code == 200
    await kept.move(*names[:7], *names[8:])
    moved, asked = await read_earlier(kept, names[-1])
    assert (moved, sum(name == "get" for name, _ in asked)) == (earlier, 1), "a later one has a copy of the turns"
    page = await kept.get(f"{names[-1]}/input_items")
    assert [item["content"][0]["text"] for item in page["data"]] == ["turn 29"], "its own input alone"


@pytest.mark.proof
async def test_items_of_kept_responses_stand_for_themselves(counted: Kept) -> None:
    """As the AI SDK sends them: all earlier turns in each request, the model's by reference."""
    kept, sent, found, names = counted, list[Any](), list[int](), list[str]()
    for number in range(12):
        sent.append({"role": "user", "content": f"turn {number}"})
        asked = list[Any]()
        token = ASKED.set(asked)
        body = RESPONSES.parse_body({"model": "m", "input": sent})
        try:
            body, *_ = await routes.prepare_response(kept.gateways[0], kept.tenant, body)
        finally:
            ASKED.reset(token)
        found.append(len(asked))
        turns = [(turn["role"], turn["content"]) for turn in body.make_turns()]
        assert turns[::2] == [("user", f"turn {n}") for n in range(number + 1)]
        assert set(turns[1::2]) <= {("assistant", "<0><1><2>")}
        names.append(await kept.answered("", input=sent))
        (item,) = (await kept.get(names[-1]))["output"]
        sent.append({"type": "item_reference", "id": item["id"]})
    assert found == [0, *[found[1]] * 11], "the last response knows what was before it"
    first = (await kept.get(f"{names[0]}/input_items"))["data"][0]["id"]
    asked_first = await kept.ask("", input=[{"type": "item_reference", "id": first}])
    (request,) = [one for one in kept.scripted.read_requests() if one.id == asked_first["id"]]
    assert [(turn.role, turn.content) for turn in request.messages or ()] == [("user", "turn 0")]
    await kept.move(*names)
    assert (await kept.ask("", input=sent))["status"] == "queued"
    kept.patch.setattr(routes, "MAX_REQUEST_BYTES", 100)
    assert (await kept.ask("", input=sent))["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("item_id", ["msg_0123_0", "msg_none", "fc_0123_in_1", "x"])
async def test_an_item_that_nobody_kept_is_named(kept: Kept, item_id: str) -> None:
    reference = {"type": "item_reference", "id": item_id}
    refused = await kept.clients[0].post("/v1/responses", json={"model": kept.scripted.model, "input": [reference]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (404, "input", "item_not_found")
    assert error["message"].startswith(f"Item with id '{item_id}' not found. Items are kept with")


async def test_an_item_of_another_tenant_is_not_found(kept: Kept) -> None:
    (item,) = (await kept.get(await kept.answered("mine")))["output"]
    body = RESPONSES.parse_body({"model": "m", "input": [{"type": "item_reference", "id": item["id"]}]})
    with pytest.raises(ApiError, match="not found"):
        await routes.prepare_response(kept.gateways[0], "somebody", body)


async def test_a_chain_that_an_earlier_version_kept_is_gone_on_from(counted: Kept) -> None:
    kept, names = counted, list[str]()
    for number in range(4):
        before: dict[str, Any] = {"previous_response_id": names[-1]} if names else {}
        names.append(await kept.answered(f"turn {number}", **before))
    expected, few = await read_earlier(kept, names[-1])
    await kept.move(*names[:2])
    for name in names:
        forget_earlier(kept, name)
    earlier, many = await read_earlier(kept, names[-1])
    assert earlier == expected
    assert len(many) > 2 * len(few)
    last = await kept.answered("turn 4", previous_response_id=names[-1])
    earlier, asked = await read_earlier(kept, last)
    assert (earlier.first_id, earlier.items[:8]) == (expected.first_id, expected.items)
    assert asked == few


@pytest.mark.proof
async def test_what_cannot_be_gone_on_from_is_refused(kept: Kept) -> None:
    first = await kept.answered("one")
    second = await kept.answered("two", previous_response_id=first)
    deleted = await kept.answered("three", previous_response_id=first)
    assert (await kept.clients[1].delete(f"/v1/responses/{deleted}")).status_code == 200
    assert (await kept.ask(previous_response_id=deleted))["error"]["code"] == "previous_response_not_found"
    missing = (await kept.ask(previous_response_id="resp_none"))["error"]
    assert (missing["code"], missing["param"]) == ("previous_response_not_found", "previous_response_id")
    body = RESPONSES.parse_body({"model": "m", "input": "x", "previous_response_id": first})
    with pytest.raises(ApiError, match=f"Previous response with id '{first}' not found"):
        await routes.prepare_response(kept.gateways[0], "somebody", body)
    assert (await kept.ask(previous_response_id=second))["status"] == "queued"
    kept.patch.setattr(routes, "MAX_REQUEST_BYTES", 100)
    assert (await kept.ask(previous_response_id=second))["error"]["code"] == "request_too_large"
    assert (await kept.ask(conversation="conv_1"))["error"]["param"] == "conversation"


@pytest.mark.proof
async def test_input_items_come_in_pages(kept: Kept) -> None:
    turns = [{"role": "user" if n % 2 else "assistant", "content": f"turn {n}"} for n in range(5)]
    turns[3]["id"] = "msg_mine"
    name = await kept.answered("", input=turns)
    for _ in range(2):
        everything = await kept.get(f"{name}/input_items", order="asc", limit=5)
        assert [item["content"][0]["text"] for item in everything["data"]] == [f"turn {n}" for n in range(5)]
        assert [item["content"][0]["type"] for item in everything["data"][:2]] == ["output_text", "input_text"]
        assert everything["data"][3]["id"] == "msg_mine"
        first = await kept.get(f"{name}/input_items", limit=2)
        rest = await kept.get(f"{name}/input_items", after=first["last_id"])
        assert [*first["data"], *rest["data"]] == everything["data"][::-1]
        assert (first["has_more"], rest["has_more"], everything["has_more"]) == (True, False, False)
        await kept.move_once(name)
    assert (await kept.get(f"{name}/input_items", after="msg_none"))["error"]["param"] == "after"


@pytest.mark.proof
async def test_store_false_leaves_only_what_a_stream_needs(kept: Kept) -> None:
    posted = await kept.post_answered(store=False, stream=True)
    name = posted.headers["x-request-id"]
    assert json.loads(posted.text.split("data: ")[-1])["response"]["store"] is False
    stored = kept.server.get(stream_meta_key(name))
    assert stored is not None
    assert SECRET.encode() not in stored
    assert not kept.server.exists(kept.pipeline.responses_key)
    await kept.move_ended()
    assert kept.stored() == []
    for path in (name, f"{name}/input_items"):
        assert (await kept.get(path))["error"]["code"] == "response_not_found"
    assert (await kept.clients[1].get(f"/v1/streams/{name}")).text.count("data: ") == posted.text.count("data: ")
    refused = await kept.ask(store=False)
    assert "'background' needs 'store'" in refused["error"]["message"]


@pytest.mark.proof
async def test_a_response_is_its_tenants_alone(kept: Kept) -> None:
    name = await kept.answered()
    stranger = {"x-tenant": "somebody"}
    for _ in range(2):
        for method, path in (
            ("GET", name), ("DELETE", name), ("POST", f"{name}/cancel"), ("GET", f"{name}/input_items"),
            ("GET", f"{name}?stream=true"),
        ):  # fmt: skip
            answer = await kept.clients[1].request(method, f"/v1/responses/{path}", headers=stranger)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        await kept.move_once(name)
    assert (await kept.get(name))["status"] == "completed"
    completion = f"cmpl-{await kept.gateways[0].stream_metas.derive_name(kept.tenant, 'k')}"
    kept.finish(completion)
    body = {"model": kept.scripted.model, "prompt": "x"}
    posted = await kept.clients[0].post("/v1/completions", json=body, headers={"idempotency-key": "k"})
    assert (posted.json()["id"], (await kept.get(completion))["error"]["code"]) == (completion, "response_not_found")


@pytest.mark.proof
@pytest.mark.parametrize("when", ["in progress", "ended", "moved"])
async def test_a_deleted_response_is_gone(kept: Kept, when: str) -> None:
    name = (await kept.ask())["id"]
    if when != "in progress":
        kept.finish(name)
    if when == "moved":
        await kept.move(name)
    answer = await kept.clients[0].delete(f"/v1/responses/{name}")
    assert answer.json() == {"id": name, "object": "response", "deleted": True}
    for _ in range(2):
        for path in (name, f"{name}/input_items"):
            assert (await kept.get(path))["error"]["code"] == "response_not_found"
        assert (await kept.clients[1].get(f"/v1/streams/{name}")).status_code == 404
        await kept.move_ended()
    await kept.check_nothing_left()
    if when == "in progress":
        status = kept.record.read_status(name)
        assert status is not None
        assert status.cancelled


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_response_deleted_while_it_is_moved_does_not_come_back(kept: Kept, is_killed: bool) -> None:
    name = await kept.answered()
    mover = kept.keepers[1]
    put = mover._objects.put

    async def delete_then_put(path: str, value: bytes) -> None:
        assert (await kept.clients[0].delete(f"/v1/responses/{name}")).status_code == 200
        await put(path, value)
        if is_killed:
            raise ConnectionError("the gateway died here")

    with kept.patch.context() as patch:
        patch.setattr(mover._objects, "put", delete_then_put)
        if is_killed:
            with pytest.raises(ConnectionError):
                await kept.move_ended()
            assert len(kept.stored()) == 1
        else:
            await kept.move_ended()
            assert kept.stored() == []
    assert (await kept.get(name))["error"]["code"] == "response_not_found", "the mark says so"
    await kept.check_nothing_left()


async def test_a_response_deleted_just_before_its_mark_is_removed_stays_marked(kept: Kept) -> None:
    name = await kept.answered()
    mover = kept.keepers[1]
    read_mark = mover._read_mark

    async def read_then_delete(meta: StreamMeta) -> Any:
        mark = await read_mark(meta)
        await kept.keepers[0].delete_response(meta)
        return mark

    with kept.patch.context() as patch:
        patch.setattr(mover, "_read_mark", read_then_delete)
        await kept.move_ended()
    assert kept.server.hexists(kept.pipeline.responses_key, name), "for whoever may move it as well"
    assert (await kept.get(name))["error"]["code"] == "response_not_found"
    await kept.check_nothing_left()


async def test_two_gateways_that_move_the_same_response_keep_it(kept: Kept) -> None:
    name = await kept.answered()
    put = kept.keepers[0]._objects.put

    async def put_and_be_overtaken(path: str, value: bytes) -> None:
        await put(path, value)
        await kept.move_ended()

    with kept.patch.context() as patch:
        patch.setattr(kept.keepers[0]._objects, "put", put_and_be_overtaken)
        await kept.move_ended(0)
    await kept.move(name)
    assert (await kept.get(name))["status"] == "completed"


async def test_a_gateway_that_died_before_it_removed_the_mark_costs_nothing(kept: Kept) -> None:
    name = await kept.answered()
    live = await kept.get(name)

    async def die(*_: object) -> None:
        raise ConnectionError("the gateway died here")

    with kept.patch.context() as patch:
        patch.setattr(kept.keepers[0], "_remove_mark", die)
        with pytest.raises(ConnectionError):
            await kept.move_ended(0)
    assert len(kept.stored()) == 1
    assert await kept.get(name) == live
    await kept.move(name)
    assert await kept.get(name) == live


async def test_metadata_of_unended_responses_is_renewed_by_any_gateway(kept: Kept) -> None:
    name = (await kept.ask())["id"]
    kept.server.pexpire(stream_meta_key(name), 60_000)
    await kept.move_ended()
    assert kept.server.pttl(stream_meta_key(name)) > 60_000


@pytest.mark.parametrize("lost", ["metadata", "id", "time"])
async def test_what_is_lost_is_looked_for_no_more(kept: Kept, caplog: pytest.LogCaptureFixture, lost: str) -> None:
    keeper, server, pipeline = kept.keepers[1], kept.server, kept.pipeline
    name = (await kept.ask())["id"]
    if lost == "time":
        kept.patch.setattr(keeper, "_pending_s", -1.0)
    else:
        kept.finish(name)
        if lost == "metadata":
            server.delete(stream_meta_key(name))
        else:
            server.hset(pipeline.record_key(name), "body", "another producer's")
    await keeper.move_ended(pipeline)
    assert f"{name} is not kept" in caplog.text
    assert not server.exists(pipeline.responses_key)
    assert kept.stored() == []


async def test_one_that_cannot_be_moved_holds_up_no_other(kept: Kept) -> None:
    names = [await kept.answered() for _ in range(3)]
    keeper = kept.keepers[1]
    put = keeper._objects.put

    async def fail_once(path: str, value: bytes) -> None:
        if path.endswith(names[1]):
            raise StorageUnavailable("the file store cannot be used now")
        await put(path, value)

    with kept.patch.context() as patch:
        patch.setattr(keeper._objects, "put", fail_once)
        with pytest.raises(StorageUnavailable, match="file store"):
            await kept.move_ended()
    assert {one.name for one in kept.stored()} == {names[0], names[2]}
    await kept.move(*names)
    assert (await kept.get(names[1]))["status"] == "completed"


@pytest.mark.proof
async def test_only_so_many_and_not_for_longer(kept: Kept) -> None:
    keeper = kept.keepers[1]
    names = []
    for age_s in (40 * 86_400, 300, 200, 100):
        name = await kept.answered()
        await kept.move(name)
        written_s = time.time() - age_s
        os.utime(kept.folder / name, (written_s, written_s))
        names.append(name)
    await keeper.delete_expired()
    assert {one.name for one in kept.stored()} == set(names[1:])
    kept.patch.setattr(kept_responses, "MAX_PER_TENANT", 2)
    await keeper.delete_expired()
    assert {one.name for one in kept.stored()} == set(names[2:])
    kept.patch.setattr(keeper, "_keep_s", 0.0)
    assert (await kept.get(names[3]))["error"]["code"] == "response_not_found", "over, though not deleted yet"


@pytest.mark.proof
async def test_a_gateway_that_keeps_nothing_says_so(kept: Kept) -> None:
    kept.patch.setattr(kept.keepers[0], "_keep_s", 0.0)
    for param in ("background", "store"):
        body = {"model": kept.scripted.model, "input": "x", param: True}
        answer = await kept.clients[0].post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    plain = RESPONSES.parse_body({"model": "m", "input": "x"})
    assert await routes.prepare_response(kept.gateways[0], "t", plain) == (plain, None, None)


@pytest.mark.proof
async def test_a_response_is_read_on_another_gateway_after_the_first_was_killed(
    scripted: ScriptedPipeline, tmp_path: Path
) -> None:
    settings = {"BATCH_STORE": str(tmp_path / "store"), "RECORD_KEEP_S": "12"}
    with GatewayProcess(scripted.addresses, tmp_path, settings) as doomed:
        body = {"model": scripted.model, "input": "hi", "background": True, "stream": True}
        stream = EventSource(f"{doomed.url}/v1/responses").connect(body)
        name = next(stream).body["response"]["id"]
        claim = scripted.write(name, 2)
        seen = [next(stream) for _ in range(4)]
        doomed.process.kill()
    with GatewayProcess(scripted.addresses, tmp_path, settings) as other:
        url = f"{other.url}/v1/responses/{name}"
        assert httpx.get(url, timeout=None).json()["status"] == "in_progress"
        say(scripted.record, claim, [2])
        scripted.record.finish_request(claim, end())
        after = seen[-1].body["sequence_number"]
        rest = list(EventSource(f"{url}?stream=true&starting_after={after}").connect())
        assert read_text([*seen, *rest]) == "<0><1><2>"
        key = scripted.pipeline.responses_key
        wait_for(lambda: not scripted.server.exists(key), "it is in the object store")
        scripted.forget(name)
        assert httpx.get(url, timeout=None).json()["output"][0]["content"][0]["text"] == "<0><1><2>"


def read_text(events: list[ServerSentEvent]) -> str:
    return "".join(event.body["delta"] for event in events if event.event == "response.output_text.delta")
