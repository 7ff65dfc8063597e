"""Vectors and scores over HTTP: OpenAI's SDK and plain bodies, before a pipeline whose worker a test plays."""

import base64
import hashlib
import inspect
import json
import random
import re
import struct
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from penstock.client.core import MAX_PART_BYTES
from penstock.ingest.cohere.embed import COHERE_EMBED
from penstock.ingest.cohere.rerank import RERANKS
from penstock.ingest.endpoints import ENDPOINTS
from penstock.ingest.gateway.elsewhere import _describe_request
from penstock.ingest.ignored import IGNORED_FIELDS, IGNORED_HEADER
from penstock.ingest.openai.completions import CompletionBody
from penstock.ingest.openai.embeddings import EmbeddingsBody
from penstock.ingest.tenants import Caller
from penstock.messages import EndEvent, ErrorInfo, Request, Text, Usage, Vectors
from penstock.testing.gateway import TestGateway
from sim.waiting import wait_for
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.ingest.batch_files import lines, read
from tests.record.play import decode

SIZE = 12
"""Of the vectors: no multiple of eight, as bits are packed."""
PROMPTS = {"query": "query: ", "passage": "passage: ", "clustering": "clustering: "}


def compute_vector(text: Text, size: int = SIZE) -> list[float]:
    """Numbers that only this text has, or these token ids, which float32 has exactly."""
    digest = hashlib.sha256((text if isinstance(text, str) else repr(text)).encode()).digest()
    return [(byte - 127.5) / 128 for byte in digest[:size]]


def compute_score(query: str, text: Text) -> float:
    return compute_vector(f"{query}\n{text}", 1)[0]


def end(numbers: list[list[float]], num_tokens: int) -> EndEvent:
    packed = b"".join(struct.pack(f"<{len(one)}f", *one) for one in numbers)
    usage = Usage(prompt_tokens=num_tokens)
    return EndEvent(finish_reason="stop", usage=usage, vectors=Vectors.pack_floats(packed, len(numbers[0])))


def compute(request: Request) -> EndEvent:
    """The answer of a worker. A text's tokens are its characters; of a text "bad" it computes nothing."""
    assert request.texts is not None
    assert request.embed is not None
    assert request.embed.in_result is False
    if "bad" in request.texts:
        return EndEvent(finish_reason="error", error=ErrorInfo(code="invalid_request", message="text 3 is bad"))
    query, size = request.embed.query, request.embed.dimensions or SIZE
    prompt = f"{request.embed.prompt}: " if request.embed.prompt else ""
    numbers = [
        compute_vector(prompt + text if isinstance(text, str) else text, size)
        if query is None
        else [compute_score(query, text)]
        for text in request.texts
    ]
    return end(numbers, sum(map(len, request.texts)))


@pytest.fixture
def gateway(scripted: ScriptedPipeline) -> Iterator[TestGateway]:
    """A gateway whose one model computes vectors."""
    scripted.report(task="embed", dimensions=SIZE, pooling="mean", prompts=PROMPTS, matryoshka=[4, 8])
    with scripted.open_gateway() as made:
        wait_for(partial(has_task, made, scripted.model, "embed"), "the gateway knows", every_s=0.1)
        yield made


@pytest.fixture
def scorer(scripted: ScriptedPipeline) -> Iterator[TestGateway]:
    """A gateway whose one model scores."""
    scripted.report(task="score")
    with scripted.open_gateway() as made:
        wait_for(partial(has_task, made, scripted.model, "score"), "the gateway knows", every_s=0.1)
        yield made


@pytest.mark.proof
def test_a_model_may_do_both(scripted: ScriptedPipeline) -> None:
    scripted.report(dimensions=SIZE, pooling="lasttoken", prompts=PROMPTS)
    with scripted.open_gateway() as gateway, scripted.answer_texts(compute):
        found = post(gateway, "/v1/embeddings", {"model": scripted.model, "input": "one"})
        assert (found.status_code, len(found.json()["data"])) == (200, 1)
        refused = post(gateway, "/v1/rerank", {"model": scripted.model, "query": "a", "documents": ["b"]})
        assert (refused.status_code, "generates text" in refused.text) == (400, True)
        (told,) = (one for one in gateway.client().get("/v1/models").json()["data"] if one["id"] == scripted.model)
        assert (told.get("task", "generate"), told["dimensions"]) == ("generate", SIZE)


def open_sdk(gateway: TestGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=gateway.client(), max_retries=0)


def post(gateway: TestGateway, path: str, body: Any, **headers: str) -> Any:
    return gateway.client().post(path, content=json.dumps(body), headers=headers)


def test_the_sdk_gets_vectors_in_the_order_of_its_texts(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    """It asks for base64 where it is not told otherwise."""
    with scripted.answer_texts(compute) as answered, open_sdk(gateway) as sdk:
        for given in ("one", ["a", "three words here", "bb", "a"]):
            texts = [given] if isinstance(given, str) else given
            forms: tuple[Any, ...] = (openai.NOT_GIVEN, "float", "base64")
            for form in forms:
                found = sdk.embeddings.create(model=scripted.model, input=given, encoding_format=form, user="u")
                if form == "base64":
                    vectors = [
                        [*struct.unpack(f"<{SIZE}f", base64.b64decode(str(one.embedding)))] for one in found.data
                    ]
                else:
                    vectors = [one.embedding for one in found.data]
                assert vectors == [compute_vector(text) for text in texts]
                assert [one.index for one in found.data] == [*range(len(texts))]
                assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, texts))
        short = sdk.embeddings.create(
            model=scripted.model, input="one", dimensions=5, extra_body={"prompt_name": "query"}
        )
    assert short.data[0].embedding == compute_vector("query: one", 5)
    assert {request.priority_class for request in answered} == {"interactive"}


def test_many_texts_are_parts_of_like_length(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    draw = random.Random(5)
    texts = [f"{number} " + "x" * draw.randrange(1, 900) for number in range(2047)] + ["y" * 1_500_000]
    with scripted.answer_texts(compute) as answered, open_sdk(gateway) as sdk:
        found = sdk.embeddings.create(model=scripted.model, input=texts, extra_body={"service_tier": "flex"})
    assert [one.embedding for one in found.data] == [compute_vector(text) for text in texts]
    parts = sorted((request.texts or [] for request in answered), key=lambda part: -len(part[0]))
    assert [len(part) for part in parts] == [1] + [64] * 31 + [63]
    lengths = [len(text) for part in parts for text in part]
    assert lengths == sorted(lengths, reverse=True)
    assert {request.priority_class for request in answered} == {"batch"}
    base = answered[0].id.rpartition(".")[0]
    assert {request.id for request in answered} == {f"{base}.{number}" for number in range(33)}


def test_the_first_error_is_the_answer_and_cancels_the_rest(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    """A POST that repeats it by its key gets the same error, not that of the cancelled parts."""
    body, key = {"model": scripted.model, "input": ["good"] * 64 + ["bad"]}, {"idempotency-key": uuid.uuid4().hex}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, gateway, "/v1/embeddings", body, **key)
        wait_for(lambda: len(scripted.read_requests()) == 2, "both parts are published")
        goods, bad = sorted(scripted.read_requests(), key=lambda request: request.id)
        assert (goods.texts, bad.texts) == (["good"] * 64, ["bad"])
        scripted.record.finish_request(decode(scripted.record, bad.id), compute(bad))
        answer = asked.result()
    error = {"message": "text 3 is bad", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    assert (answer.status_code, answer.json()) == (400, {"error": error})
    status = scripted.record.read_status(goods.id)
    assert status is not None
    assert status.cancelled
    cancelled = EndEvent(finish_reason="cancelled", error=ErrorInfo(code="cancelled", message="cancelled"))
    scripted.record.finish_request(decode(scripted.record, goods.id), cancelled)
    again = post(gateway, "/v1/embeddings", body, **key)
    assert (again.status_code, again.json()) == (400, {"error": error})
    assert len(scripted.read_requests()) == 2


def test_a_key_joins_and_a_stream_has_the_answer(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    body, key = (
        {"model": scripted.model, "input": [f"text {number}" for number in range(70)]},
        {"idempotency-key": uuid.uuid4().hex},
    )
    with scripted.answer_texts(compute) as answered:
        first, second = (post(gateway, "/v1/embeddings", body, **key) for _ in range(2))
    assert first.json() == second.json()
    assert len(answered) == 2
    events = gateway.client().get(first.headers["location"]).text
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    assert [json.loads(data[0]), *data[1:]] == [first.json(), "[DONE]"]
    other = post(gateway, "/v1/embeddings", body | {"input": "other"}, **key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_answers_without_vectors_are_an_error(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    """As of a worker that knows nothing of texts."""
    for wrong in (
        EndEvent(finish_reason="stop"),
        EndEvent(finish_reason="stop", vectors=Vectors(size=1, data="no base64!")),
        end([[1.0], [2.0], [3.0]], 1),
    ):
        with scripted.answer_texts(lambda _, wrong=wrong: wrong):  # type: ignore[misc]
            answer = post(gateway, "/v1/embeddings", {"model": scripted.model, "input": ["a", "b"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_error")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [1, 2, 3]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [[1], [2]]}, "input", "PENSTOCK_GATEWAY_EMBED_TOKEN_IDS=model"),
        ({"input": ""}, "input", "at least 1 character"), ({"input": ["a", ""]}, "input.1", "at least 1 character"),
        ({"input": []}, "input", "at least 1 item"), ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": {"a": 1}}, "input", "string or a valid list"), ({"input": [None]}, "input.0", "valid string"),
        ({"input": True}, "input", "string or a valid list"), ({}, "input", "Missing"),
        ({"input": "a", "stream": True}, "stream", "Unrecognized"),
        ({"input": "a", "temperature": 1}, "temperature", "Unr"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater"),
        ({"input": "a", "dimensions": "9"}, "dimensions", "int"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a\ud800"}, None, "hex escape"),
    ],
)  # fmt: skip
def test_what_is_no_input_is_refused(
    scripted: ScriptedPipeline, gateway: TestGateway, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = post(gateway, "/v1/embeddings", {"model": scripted.model, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]
    assert scripted.read_requests() == []


@pytest.fixture
def lenient(scripted: ScriptedPipeline) -> Iterator[TestGateway]:
    """A gateway whose callers mean the model's own token ids."""
    scripted.report(task="embed", dimensions=SIZE, pooling="mean", prompts=PROMPTS)
    with scripted.open_gateway(gateway={"embed_token_ids": "model"}) as made:
        wait_for(partial(has_task, made, scripted.model, "embed"), "the gateway knows", every_s=0.1)
        yield made


def test_token_ids_of_the_model_are_carried_and_split_by_their_number(
    scripted: ScriptedPipeline, lenient: TestGateway
) -> None:
    draw = random.Random(3)
    inputs = [[draw.randrange(30_000) for _ in range(draw.randrange(1, 90))] for _ in range(130)]
    inputs.append([7] * (MAX_PART_BYTES // 4))
    with scripted.answer_texts(compute) as answered, open_sdk(lenient) as sdk:
        found = sdk.embeddings.create(model=scripted.model, input=inputs)
        assert [one.embedding for one in found.data] == [compute_vector(ids) for ids in inputs]
        assert found.usage.prompt_tokens == sum(map(len, inputs))
        one = sdk.embeddings.create(model=scripted.model, input=inputs[0])
        assert [one.embedding for one in one.data] == [compute_vector(inputs[0])]
        text = sdk.embeddings.create(model=scripted.model, input="one")
        assert text.data[0].embedding == compute_vector("one")
    lengths = [len(ids) for request in answered[:4] for ids in request.texts or ()]
    assert sorted(len(request.texts or ()) for request in answered[:4]) == [1, 2, 64, 64]
    assert sorted(lengths) == sorted(map(len, inputs))
    ask = _describe_request("/v1/embeddings", {"model": "m", "input": inputs}, Caller())
    assert ask.num_tokens == sum(map(len, inputs))


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ([[]], "input.0", "at least 1 item"), ([[1], []], "input.1", "at least 1 item"), ([], "input", "at least 1"),
        ([1, True], "input.1", "valid integer"), ([[1, True]], "input.0.1", "valid integer"),
        ([1, -1], "input.1", "greater than or equal to 0"), ([[1, -1]], "input.0.1", "greater than or equal to 0"),
        ([1, 2.5], "input.1", "valid integer"), ([[1]] * 2049, "input", "at most 2048"),
        ([[1], "a"], "input", ""), ([2**31], "input.0", "less than"),
    ],
)  # fmt: skip
def test_what_is_no_token_id_is_refused(
    scripted: ScriptedPipeline, lenient: TestGateway, given: Any, param: str, words: str
) -> None:
    answer = post(lenient, "/v1/embeddings", {"model": scripted.model, "input": given})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert scripted.read_requests() == []


@pytest.mark.parametrize("bad", [-1, None, [], [-1]])
@pytest.mark.parametrize(("body", "field"), [(EmbeddingsBody, "input"), (CompletionBody, "prompt")])
def test_a_long_list_ends_at_its_first_error(body: type[BaseModel], field: str, bad: object) -> None:
    """Each error takes kilobytes."""
    with pytest.raises(ValidationError) as raised:
        body.model_validate_json(json.dumps({"model": "m", field: [bad] * 10_000}))
    assert raised.value.error_count() < 10


def test_hostile_bodies_are_errors_and_nul_is_a_text(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    for raw, status, code in (
        (b"[" * 100_000, 400, "nested_too_deeply"),
        (b'{"model": "m", "input": ', 400, "invalid_json"),
        (json.dumps({"model": scripted.model, "input": "x" * 10_000_000}).encode(), 413, "request_too_large"),
        (json.dumps({"model": scripted.model, "input": ["x" * 2_500_000] * 4}).encode(), 413, "request_too_large"),
    ):
        answer = gateway.client().post("/v1/embeddings", content=raw, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert scripted.read_requests() == []
    with scripted.answer_texts(compute):
        answer = post(gateway, "/v1/embeddings", {"model": scripted.model, "input": "a\0b"})
    assert answer.json()["data"][0]["embedding"] == compute_vector("a\0b")


def test_a_model_is_asked_only_for_what_it_does(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    """Nothing of a request that it cannot answer is published."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"}, "/v2/embed": {"texts": ["a"]}, "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]}, "/v2/rerank": {"query": "a", "documents": ["b"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}, "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    }  # fmt: skip
    assert bodies.keys() == ENDPOINTS.keys()
    for task, told in (("embed", "computes vectors"), ("score", "scores texts"), ("generate", "generates text")):
        scripted.report(task=task, dimensions=None if task == "generate" else SIZE)
        wait_for(partial(has_task, gateway, scripted.model, task), "the gateway knows", every_s=0.1)
        for path, body in bodies.items():
            if ENDPOINTS[path].task != task:
                answer = post(gateway, path, {"model": scripted.model, **body})
                assert answer.status_code == 400
                assert told in answer.text
    assert scripted.read_requests() == []


def has_task(gateway: TestGateway, name: str, task: str) -> bool:
    return bool(read_model(gateway, name)["task"] == task)


def read_model(gateway: TestGateway, name: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway.client().get(f"/v1/models/{name}").json()
    return found


def test_models_tell_what_they_compute(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    told = read_model(gateway, scripted.model)
    wanted = {"task": "embed", "dimensions": SIZE, "pooling": "mean", "prompts": PROMPTS, "matryoshka": [4, 8]}
    assert {name: told[name] for name in wanted} == wanted


def test_coheres_bodies_get_vectors_in_each_form(scripted: ScriptedPipeline, gateway: TestGateway) -> None:
    texts, types = ["short", "a longer text"], ["float", "base64", "binary", "ubinary"]
    body = {"model": scripted.model, "texts": texts, "input_type": "search_document", "embedding_types": types}
    with scripted.answer_texts(compute) as answered:
        answer = post(gateway, "/v2/embed", body | {"priority": 3})
        found = answer.json()
        plain = post(gateway, "/v2/embed", {"model": scripted.model, "texts": texts, "output_dimension": 6}).json()
    vectors = [compute_vector(f"passage: {text}") for text in texts]
    bits = [[one > 0 for one in vector] + [False] * 4 for vector in vectors]
    packed = [[sum(bit << 7 - at for at, bit in enumerate(one[first : first + 8])) for first in (0, 8)] for one in bits]
    assert found["embeddings"] == {
        "float": vectors,
        "base64": [base64.b64encode(struct.pack(f"<{SIZE}f", *one)).decode() for one in vectors],
        "binary": [[byte - 128 for byte in one] for one in packed],
        "ubinary": packed,
    }
    assert found["meta"]["billed_units"] == {"input_tokens": sum(map(len, texts))}
    assert (found["response_type"], found["id"]) == ("embeddings_by_type", answer.headers["x-request-id"])
    assert answer.headers[IGNORED_HEADER] == "priority"
    assert plain["embeddings"]["float"] == [compute_vector(text, 6) for text in texts]
    assert [request.embed.truncate for request in answered if request.embed is not None] == ["end", "end"]
    refused = post(gateway, "/v2/embed", body | {"embedding_types": ["int8"]})
    assert (refused.status_code, refused.json()["param"]) == (400, "embedding_types")
    assert "calibrated" in refused.json()["message"]


@pytest.mark.parametrize("path", [*RERANKS])
def test_documents_are_ranked(scripted: ScriptedPipeline, scorer: TestGateway, path: str) -> None:
    documents = [{"text": f"document {number}", "title": f"{number}"} for number in range(130)]
    scores = [compute_score("why", one["text"]) for one in documents]
    best = sorted(range(130), key=lambda index: -scores[index])
    with scripted.answer_texts(compute) as answered:
        body = {"model": scripted.model, "query": "why", "documents": [*documents[:-1], documents[-1]["text"]]}
        found, whole = (post(scorer, path, body | more) for more in ({"top_n": 7, "return_documents": True}, {}))
    assert (found.status_code, whole.status_code) == (200, 200), found.text
    found, whole = found.json(), whole.json()
    listed = [*documents[:-1], {"text": documents[-1]["text"]}]
    wanted = [{"index": at, "relevance_score": scores[at], "document": listed[at]} for at in best]
    assert found["results"] == wanted[:7]
    assert whole["results"] == [one | {"document": None} for one in wanted]
    assert found["meta"]["billed_units"] == {"search_units": 2}
    assert found["meta"]["api_version"] == {"version": path[2]}
    assert {request.embed.truncate for request in answered if request.embed is not None} == {"end"}
    refused = post(scorer, path, body | {"documents": [{"title": "t"}]})
    assert (refused.status_code, refused.json()["param"]) == (400, "documents.0")


def test_scores_are_of_one_text_and_several_or_of_pairs(scripted: ScriptedPipeline, scorer: TestGateway) -> None:
    with scripted.answer_texts(compute):
        for given, pairs in (
            (("a", "b"), [("a", "b")]),
            (("a", ["b", "cc", "d"]), [("a", "b"), ("a", "cc"), ("a", "d")]),
            ((["a", "a", "e", "a"], ["b", "c", "d", "f"]), [("a", "b"), ("a", "c"), ("e", "d"), ("a", "f")]),
        ):
            answer = post(scorer, "/v1/score", {"model": scripted.model, "text_1": given[0], "text_2": given[1]}).json()
            wanted = [{"index": at, "object": "score", "score": compute_score(*pair)} for at, pair in enumerate(pairs)]
            assert answer["data"] == wanted
            assert answer["usage"]["prompt_tokens"] == sum(len(text) for _, text in pairs)
    refused = post(scorer, "/v1/score", {"model": scripted.model, "text_1": ["a", "b"], "text_2": ["c"]})
    assert refused.status_code == 400


def test_lines_of_a_batch_get_vectors(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    """A file has at most as many texts as lines."""
    scripted.report(task="embed")
    settings = {"store": str(tmp_path), "look_s": 0.05, "max_lines": 100}
    texts = [f"text {number}" for number in range(70)]
    with scripted.answer_texts(compute), scripted.open_gateway(batch=settings) as gateway, open_sdk(gateway) as sdk:
        made = run_batch(sdk, scripted.model, [texts, "one", [[1, 2]], []])
        assert made.output_file_id
        assert made.error_file_id
        found = {
            one["custom_id"]: one["response"]["body"] for one in read(sdk.files.content(made.output_file_id).content)
        }
        assert [one["embedding"] for one in found["0"]["data"]] == [compute_vector(text) for text in texts]
        assert [one["embedding"] for one in found["1"]["data"]] == [compute_vector("one")]
        failed = {one["custom_id"]: one["response"] for one in read(sdk.files.content(made.error_file_id).content)}
        assert {name: one["status_code"] for name, one in failed.items()} == {"2": 400, "3": 400}
        assert "check_embedding_ctx_length" in failed["2"]["body"]["error"]["message"]
        refused = run_batch(sdk, scripted.model, [texts, texts])
        assert (refused.status, refused.errors.data[0].code, refused.errors.data[0].line) == (
            "failed",
            "too_many_inputs",
            2,
        )


def test_lines_of_a_batch_may_have_token_ids(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    scripted.report(task="embed")
    settings: dict[str, Any] = {
        "batch": {"store": str(tmp_path), "look_s": 0.05},
        "gateway": {"embed_token_ids": "model"},
    }
    with scripted.answer_texts(compute), scripted.open_gateway(**settings) as gateway, open_sdk(gateway) as sdk:
        made = run_batch(sdk, scripted.model, [[[1, 2], [3]]])
        assert made.output_file_id
        (found,) = read(sdk.files.content(made.output_file_id).content)
    data = found["response"]["body"]["data"]
    assert [one["embedding"] for one in data] == [compute_vector([1, 2]), compute_vector([3])]


def run_batch(sdk: openai.OpenAI, model: str, inputs: list[Any]) -> Any:
    """Return a batch that has ended, with a line for each input."""
    rows = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": {"model": model, "input": one}}
        for at, one in enumerate(inputs)
    ]
    file = sdk.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    made = sdk.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_for(
        lambda: sdk.batches.retrieve(made.id).status in {"completed", "failed"}, "the batch has ended", every_s=0.05
    )
    return sdk.batches.retrieve(made.id)


def test_a_region_is_chosen_by_the_sum_of_all_texts() -> None:
    body = {"model": "m", "input": ["x" * 400] * 100}
    ask = _describe_request("/v1/embeddings", body, Caller())
    assert 100 * 100 <= ask.num_tokens < 101 * 101


def test_the_example_finds_what_a_text_says(
    scripted: ScriptedPipeline, gateway: TestGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its vectors say which words a text has."""
    page = (Path(__file__).parents[2] / "docs" / "api-embeddings.md").read_text()
    code = page.rpartition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 30
    text = tmp_path / "text"
    text.write_text(
        "\n\n".join(["And the dove came in to him.", "In the beginning was light.", "Noah built the ark of wood."])
    )

    def count_words(request: Request) -> EndEvent:
        found = [[0.0] * 97 for _ in request.texts or ()]
        for vector, one in zip(found, request.texts or (), strict=True):
            for word in re.findall("[a-z]+", str(one).lower()):
                vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % 97] += 1
        return end(found, 1)

    code = code.replace('api_key="none"', 'api_key="none", http_client=http_client')
    with scripted.answer_texts(count_words) as answered, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["search.py", str(text), scripted.model, "Who built the ark?"])
        exec(code, {"http_client": gateway.client()})
    assert capsys.readouterr().out.split("  ")[1].startswith("Noah built the ark of wood.")
    assert [request.embed.prompt for request in answered if request.embed is not None] == [None, "query"]


@pytest.fixture(name="cohere")
def import_cohere() -> Any:
    return pytest.importorskip("cohere")


def open_cohere(cohere: Any, gateway: TestGateway) -> Any:
    """Their client, as it comes but for the way to the gateway."""
    return cohere.ClientV2("none", base_url=gateway.url, httpx_client=httpx.Client(transport=Bridge(gateway)))


class Bridge(httpx.BaseTransport):
    """Sends what httpx was given by the client of the gateway, which is httpx2's."""

    def __init__(self, gateway: TestGateway) -> None:
        self._client = gateway.client()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._client.request(
            request.method, str(request.url), headers=[*request.headers.multi_items()], content=request.read()
        )
        return httpx.Response(answer.status_code, headers=[*answer.headers.multi_items()], content=answer.content)


@pytest.mark.clients
def test_coheres_sdk_embeds(scripted: ScriptedPipeline, gateway: TestGateway, cohere: Any) -> None:
    texts, sdk = ["short", "a longer text"], open_cohere(cohere, gateway)
    asked = {"model": scripted.model, "texts": texts}
    with scripted.answer_texts(compute) as answered:
        found = sdk.embed(
            **asked, input_type="search_document", embedding_types=["float", "base64", "binary", "ubinary"], priority=3
        )
        vectors = [compute_vector(f"passage: {text}") for text in texts]
        bits = [[one > 0 for one in vector] + [False] * 4 for vector in vectors]
        packed = [
            [sum(bit << 7 - place for place, bit in enumerate(one[at : at + 8])) for at in (0, 8)] for one in bits
        ]
        assert found.embeddings.float_ == vectors
        assert [[*struct.unpack(f"<{SIZE}f", base64.b64decode(one))] for one in found.embeddings.base64] == vectors
        assert found.embeddings.ubinary == packed
        assert found.embeddings.binary == [[byte - 128 for byte in one] for one in packed]
        assert found.meta.billed_units.input_tokens == sum(map(len, texts))
        for kind, prompt in (("search_query", "query: "), ("clustering", "clustering: "), ("classification", "")):
            plain = sdk.embed(**asked, input_type=kind, output_dimension=6, truncate="NONE")
            assert plain.embeddings.float_ == [compute_vector(prompt + text, 6) for text in texts]
    cuts = [request.embed.truncate for request in answered if request.embed is not None]
    assert cuts == ["end", None, None, None]
    for given, words in (({"embedding_types": ["int8"]}, "calibrated"), ({"model": "none"}, "does not exist")):
        with pytest.raises((cohere.BadRequestError, cohere.NotFoundError), match=words) as refused:
            sdk.embed(**asked | given, input_type="search_query")
        assert words in refused.value.body["message"]


@pytest.mark.clients
def test_coheres_sdk_ranks(scripted: ScriptedPipeline, scorer: TestGateway, cohere: Any) -> None:
    documents = [f"document {number}" for number in range(130)]
    scores = [compute_score("why", one) for one in documents]
    best = sorted(range(130), key=lambda index: -scores[index])
    with scripted.answer_texts(compute) as answered:
        found = open_cohere(cohere, scorer).rerank(model=scripted.model, query="why", documents=documents, top_n=7)
        assert [(one.index, one.relevance_score) for one in found.results] == [(at, scores[at]) for at in best[:7]]
        assert found.meta.billed_units.search_units == 2
        rich = [{"text": one, "title": f"{number}"} for number, one in enumerate(documents[:3])]
        old = cohere.Client("none", base_url=scorer.url, httpx_client=httpx.Client(transport=Bridge(scorer)))
        second = old.rerank(model=scripted.model, query="why", documents=[*rich, "plain"], return_documents=True)
        listed = [*rich, {"text": "plain"}]
        assert [one.document.model_dump(exclude_none=True) for one in second.results] == [
            listed[one.index] for one in second.results
        ]
        assert len(second.results) == 4
    assert {request.embed.truncate for request in answered if request.embed is not None} == {"end"}


@pytest.mark.clients
def test_each_parameter_of_coheres_sdk_has_an_effect_or_is_ignored_or_refused(cohere: Any) -> None:
    """If this fails the SDK has new parameters: each belongs into the list, or into the body's model."""
    for endpoint, methods in (
        (COHERE_EMBED, [cohere.ClientV2.embed]),
        (RERANKS["/v2/rerank"], [cohere.ClientV2.rerank, cohere.Client.rerank]),
    ):  # fmt: skip
        known = endpoint.body_model.model_fields.keys() | IGNORED_FIELDS[endpoint.path].keys()
        for method in methods:
            assert set(inspect.signature(method).parameters) - known == {"self", "request_options"}


@pytest.mark.clients
@pytest.mark.parametrize("name", ["haystack_embeddings", "llama_index_embeddings"])
def test_a_framework_with_its_own_packages_embeds(scripted: ScriptedPipeline, tmp_path: Path, name: str) -> None:
    from tests.ingest import clients  # only the extra `clients` brings Node

    scripted.report(task="embed")
    texts = ["one text", "another"]
    with scripted.answer_texts(compute), GatewayProcess(scripted.addresses, tmp_path) as gateway:
        script = Path(__file__).parent / "frameworks" / f"{name}.py"
        printed = clients.run_script(script, f"{gateway.url}/v1", scripted.model, *texts)
    assert json.loads(printed) == [compute_vector(text) for text in (*texts, texts[0])]


@pytest.mark.clients
def test_langchain_embeds_where_it_sends_texts(
    scripted: ScriptedPipeline, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its default it sends ids of OpenAI's tokens, here of single bytes, and is told what to do."""
    langchain, tiktoken = pytest.importorskip("langchain_openai"), pytest.importorskip("tiktoken")
    tokens = tiktoken.Encoding(
        "bytes", pat_str=".", mergeable_ranks={bytes([at]): at for at in range(256)}, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: tokens)
    options = {
        "model": scripted.model,
        "base_url": f"{gateway.url}/v1",
        "api_key": "none",
        "http_client": gateway.client(),
    }
    with scripted.answer_texts(compute):
        model = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
        assert model.embed_documents(["one", "two"]) == [compute_vector("one"), compute_vector("two")]
        assert model.embed_query("three") == compute_vector("three")
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        langchain.OpenAIEmbeddings(**options).embed_query("three")
