"""Which chat a request belongs to: what each API says of it, what comes before what, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.bus.contract import Outgoing
from penstock.ingest.batch.answer import BatchJob, BatchRun, ModelPipeline, Pipelines
from penstock.ingest.batch.lines import FinishedRow
from penstock.ingest.gateway.state import find_caller
from penstock.ingest.openai.body import hash_session
from penstock.messages import Request, decode_message
from penstock.testing.gateway import TestGateway
from penstock.testing.pipeline import TestPipeline
from tests.ingest.conftest import call_as_tenant

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "?", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}], "max_completion_tokens": 2},
    "/v1/responses": {"input": "?", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2},
}
OPENAI, MESSAGES = list(ASKED)[:3], "/v1/messages"
HEADER, KEY = {"x-session-affinity": "chat-7"}, {"prompt_cache_key": "a\n\u2028\x00 key"}
USER = {"metadata": {"user_id": "user_1f_account_2e_session_3d"}}
JSON_USER = {"metadata": {"user_id": json.dumps({"account_uuid": "2e", "session_id": "3d"})}}
LONG, TOO_LONG = "x" * 7_000_000, "x" * 10_000_000
"""What a body has room for, and what it has not."""


class Site:
    """A gateway that believes who a caller says to be, over a pipeline with workers."""

    def __init__(self, pipeline: TestPipeline, gateway: TestGateway, http: httpx2.Client) -> None:
        self.pipeline, self.gateway, self.http = pipeline, gateway, http
        self.sent: list[Outgoing] = []

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        """Ask for an answer."""
        return self.http.post(path, json={"model": "formula", **ASKED[path], **body}, headers=headers)

    def read_requests(self) -> list[Request]:
        """Return all requests that were sent, in their order."""
        topics = self.pipeline.bus.pipeline.input_topics("prefill").values()
        return [decode_message(Request, one.value) for one in self.sent if one.topic in topics]

    def find_session(self, path: str, body: dict[str, Any], **headers: str) -> str | None:
        """Ask, and return the session of the request that comes of it."""
        answer = self.post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        request_id = answer.headers["x-request-id"]
        return next(one.session for one in self.read_requests() if one.id == request_id)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("files")
    with TestPipeline(lambda _: "No.") as pipeline, pipeline.gateway(batch={"store": str(folder)}) as gateway:
        gateway.app.dependency_overrides[find_caller] = call_as_tenant
        with gateway.client() as http, pytest.MonkeyPatch.context() as patch:
            made, append = Site(pipeline, gateway, http), pipeline.bus.append

            def note_and_append(messages: Sequence[Outgoing]) -> list[str]:
                made.sent += messages
                return append(messages)

            patch.setattr(pipeline.bus, "append", note_and_append)
            yield made


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("openai_body", "anthropic_body", "headers", "name"),
    [
        ({}, {}, {}, None),
        ({"user": "u"}, {"metadata": {"user_id": "user_1f"}}, {}, None),
        ({"prompt_cache_key": ""}, {"metadata": {"user_id": "user_1f_session_"}}, {}, None),
        ({"prompt_cache_key": None}, {"metadata": {"user_id": None}}, {}, None),
        ({"prompt_cache_key": "3d"}, USER, {}, "3d"),
        ({"prompt_cache_key": 'id": "3d"}'}, JSON_USER, {}, 'id": "3d"}'),
        (KEY, {"metadata": {"user_id": f"session_{KEY['prompt_cache_key']}"}}, {}, KEY["prompt_cache_key"]),
        (KEY, USER, HEADER, "header"),
    ],
    ids=["nothing", "user", "empty", "null", "key", "json", "odd", "header"],
)  # fmt: skip
def test_what_a_request_says_of_its_chat(
    site: Site, path: str, openai_body: dict[str, Any], anthropic_body: dict[str, Any], headers: dict[str, str],
    name: str | None,
) -> None:  # fmt: skip
    expected = None if name is None else HEADER["x-session-affinity"] if name == "header" else hash_session(name)
    body = anthropic_body if path == MESSAGES else openai_body
    assert site.find_session(path, body, **headers) == expected


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "param"),
    [
        *((path, {"prompt_cache_key": key}, {}, 400, "prompt_cache_key") for path in OPENAI
          for key in (LONG, "x" * 257, 3)),
        *((path, {"prompt_cache_key": TOO_LONG}, {}, 413, None) for path in OPENAI),
        (MESSAGES, {"metadata": {"user_id": TOO_LONG}}, {}, 413, None),
        (MESSAGES, {"metadata": {"user_id": 3}}, {}, 400, "metadata.user_id"),
        (MESSAGES, {"metadata": {"session": "3d"}}, {}, 400, "metadata.session"),
        *((path, {}, {"x-session-affinity": name}, 400, "x-session-affinity") for path in ASKED
          for name in ("", "a b", "x" * 129, TOO_LONG)),
    ],
)  # fmt: skip
def test_what_is_refused(
    site: Site, path: str, body: dict[str, Any], headers: dict[str, str], status: int, param: str | None
) -> None:  # fmt: skip
    answer = site.post(path, body, **headers)
    error = answer.json()["error"]
    kind = "request_too_large" if status == 413 and path == MESSAGES else "invalid_request_error"
    assert (answer.status_code, error["type"]) == (status, kind)
    assert (param or "") in (error["message"] if path == MESSAGES else error["param"] or "")
    assert len(answer.content) < 1000


def test_a_long_user_id_is_hashed(site: Site) -> None:
    body = {"metadata": {"user_id": f"user_session_{LONG}"}}
    assert site.find_session(MESSAGES, body) == hash_session(LONG)


@pytest.mark.proof
def test_a_chain_of_responses_is_one_chat_from_its_first_one_on(site: Site) -> None:
    def ask(previous: str | None, **more: Any) -> tuple[str, str | None]:
        answer = site.post("/v1/responses", {"previous_response_id": previous, "store": True, **more})
        request_id: str = answer.json()["id"]
        return request_id, next(one.session for one in site.read_requests() if one.id == request_id)

    first, session = ask(None)
    assert session == first
    last = first
    for _ in range(5):
        last, session = ask(last)
        assert session == first
    branch, session = ask(first)
    assert (session, ask(branch, store=False)[1]) == (first, first)
    other, session = ask(last, **KEY)
    assert session == hash_session(KEY["prompt_cache_key"]), "what a client says itself comes first"
    assert ask(other)[1] == first
    assert ask(None)[1] != first
    stranger = site.post("/v1/responses", {"previous_response_id": last}, **{"x-tenant": "stranger"})
    assert stranger.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.proof
def test_tenants_share_no_chat(site: Site) -> None:
    for tenant in ("one", "other"):
        site.post("/v1/chat/completions", KEY, **{"x-tenant": tenant})
    one, other = site.read_requests()[-2:]
    assert one.session == other.session == hash_session(KEY["prompt_cache_key"])
    assert (one.tenant, other.tenant) == ("one", "other"), "by which placement tells them apart"


@pytest.mark.parametrize("path", ASKED)
def test_the_chat_is_no_part_of_the_body(site: Site, path: str) -> None:
    """A POST that is sent again joins its request, whatever it says of its chat by then."""
    key = {"idempotency-key": f"again {path}"}
    first = site.post(path, {}, **key)
    own = {} if path == "/v1/responses" else USER if path == MESSAGES else KEY
    again = site.post(path, own, **key, **HEADER)
    assert (again.status_code, again.headers["x-request-id"]) == (200, first.headers["x-request-id"])
    if path == "/v1/responses":  # whose answer has the key again
        assert site.post(path, KEY, **key).json()["error"]["code"] == "idempotency_conflict"


@pytest.mark.proof
def test_lines_of_batches_say_it_as_well(site: Site) -> None:
    path, written = "/v1/chat/completions", list[FinishedRow]()
    bodies = {"kept": KEY, "refused": {"prompt_cache_key": "x" * 300}}
    rows = [
        {"custom_id": name, "method": "POST", "url": path, "body": {"model": "formula", **ASKED[path], **body}}
        for name, body in bodies.items()
    ]

    async def read_input() -> AsyncIterator[bytes]:
        yield "\n".join(map(json.dumps, rows)).encode()

    async def write_rows(rows: Sequence[FinishedRow]) -> None:
        written.extend(rows)

    async def run() -> None:
        async with site.pipeline.async_client() as client:

            async def find_pipeline(_: str) -> ModelPipeline:
                return ModelPipeline(client)

            job = BatchJob((path,), read_input, flush_interval_s=1.0, name="b")
            await BatchRun(job, Pipelines(find_pipeline, 2), write_rows, lambda _: None).answer_rows(frozenset())

    asyncio.run(run())
    assert site.read_requests()[-1].session == hash_session(KEY["prompt_cache_key"])
    refused = next(json.loads(one.line) for one in written if not one.is_ok)
    assert refused["response"]["body"]["error"]["param"] == "prompt_cache_key"
