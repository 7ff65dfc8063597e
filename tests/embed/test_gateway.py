"""Real worker processes behind a gateway: what OpenAI's SDK, Cohere's paths and the Python client get of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from penstock.client import Client
from penstock.local.stack import Stack
from tests.embed.checkpoints import draw_text, write_checkpoint, write_reranker
from tests.gateways import open_stack

TEXTS = [draw_text(num % 40 + 1, num) for num in range(300)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {"query": "bar fern ", "document": "dune "}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "encoder", prompts=prompts)


@pytest.fixture(scope="module")
def stack(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two embed workers and a gateway."""
    folder = tmp_path_factory.mktemp("encoders")
    with open_stack(folder, encoder, pipeline="encoders", prefill=0, decode=0, embed=2) as made:
        yield made


def test_the_sdk_gets_the_librarys_vectors_while_a_worker_dies(stack: Stack, encoder: Path) -> None:
    theirs = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS, prompt_name="document")
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none", max_retries=0, timeout=None) as sdk:
        told = sdk.models.retrieve("encoder").to_dict()
        assert (told["task"], told["dimensions"], told["prompts"]) == (
            "embed",
            48,
            {"query": "bar fern ", "document": "dune "},
        )
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(
                sdk.embeddings.create, model="encoder", input=TEXTS, extra_body={"prompt_name": "document"}
            )
            killed = stack.workers[0].child
            assert killed is not None
            killed.kill()
            found = asked.result()
        np.testing.assert_allclose([one.embedding for one in found.data], theirs, atol=1e-5)
        assert found.usage.prompt_tokens > len(TEXTS)
        for wrong, words in (
            ({"dimensions": 7}, "may not be cut"),
            ({"extra_body": {"prompt_name": "no"}}, "prompts are"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                sdk.embeddings.create(model="encoder", input=["a"] * 70, **wrong)
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            sdk.embeddings.create(model="encoder", input=[1, 2])
        with pytest.raises(openai.BadRequestError, match="computes vectors"):
            sdk.completions.create(model="encoder", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.embeddings.create(model="encoder", input="bar " * 500)
    assert refused.value.code == "context_length_exceeded"


def test_coheres_paths_and_the_client_say_the_same(stack: Stack, encoder: Path) -> None:
    theirs = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS[:3], prompt_name="query")
    body = {"model": "encoder", "texts": TEXTS[:3], "input_type": "search_query"}
    answer = httpx.post(f"{stack.gateway_url}/v2/embed", json=body, timeout=None).json()
    np.testing.assert_allclose(answer["embeddings"]["float"], theirs, atol=1e-5)
    with Client(redis=stack.addresses.stream_url, pipeline="encoders") as client:
        np.testing.assert_allclose(client.embed(TEXTS[:3], "query"), theirs, atol=1e-5)


def test_a_reranker_ranks(tmp_path: Path) -> None:
    model = write_reranker(tmp_path / "ranker")
    scores = CrossEncoder(str(model), device="cpu").predict([(TEXTS[2], text) for text in TEXTS[:90]])
    with open_stack(tmp_path, model, pipeline="rankers", prefill=0, decode=0, embed=1) as stack:
        body = {"model": "ranker", "query": TEXTS[2], "documents": TEXTS[:90]}
        found = httpx.post(f"{stack.gateway_url}/v1/rerank", json=body, timeout=None).json()["results"]
        listed = {one["index"]: one["relevance_score"] for one in found}
        np.testing.assert_allclose([listed[at] for at in range(90)], scores, atol=1e-5)
        assert [one["relevance_score"] for one in found] == sorted(listed.values(), reverse=True)
        refused = httpx.post(f"{stack.gateway_url}/v1/embeddings", json={"model": "ranker", "input": "a"}, timeout=None)
    assert refused.json()["error"]["code"] == "wrong_task"
