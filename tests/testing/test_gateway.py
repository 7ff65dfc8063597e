"""A gateway in memory as users have it: SDKs, streams, who leaves, and what ends a gateway."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.client import core
from penstock.ingest.streaming import state
from penstock.testing.gateway import TestGateway
from penstock.testing.pipeline import TestPipeline
from sim.waiting import wait_for

pytestmark = pytest.mark.proof
TEXT = "The invoice is wrong."


@pytest.fixture
def pipeline() -> Iterator[TestPipeline]:
    with TestPipeline(lambda _: TEXT) as made:
        yield made


@pytest.fixture
def gateway(pipeline: TestPipeline) -> Iterator[TestGateway]:
    with pipeline.gateway() as made:
        yield made


def test_the_sdk_gets_answers_whole_and_in_pieces_after_a_kill(pipeline: TestPipeline, gateway: TestGateway) -> None:
    asked: Any = {"model": "formula", "prompt": "What is wrong?", "max_tokens": 50}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=gateway.client()) as sdk:
        assert sdk.completions.create(**asked).choices[0].text == TEXT
        pipeline.kill_worker("decode-0", after_tokens=3)
        pipeline.start_worker("decode")
        pieces = [chunk.choices[0].text for chunk in sdk.completions.create(**asked, stream=True)]
        assert ("".join(pieces), len(pieces) > 3) == (TEXT, True)
        turns: Any = [{"role": "user", "content": "?"}]
        told = sdk.chat.completions.create(model="formula", messages=turns, max_completion_tokens=50)
        assert told.choices[0].message.content == TEXT
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="other", prompt="?")


def test_who_closes_an_answer_has_left(pipeline: TestPipeline, gateway: TestGateway) -> None:
    body = {"model": "formula", "prompt": "x", "max_tokens": 50, "stream": True}
    with gateway.client(headers={"x-penstock-cancel-on-disconnect": "true"}) as http:
        pipeline.stop_worker("decode-0")
        with http.stream("POST", "/v1/completions", json=body) as answer:
            name = answer.headers["x-request-id"]
        found = pipeline.records.find
        wait_for(lambda: (rec := found(name)) is not None and rec.cancelled, "it is cancelled")


def test_a_gateway_that_stops_sends_its_readers_elsewhere(
    pipeline: TestPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SILENCE_S", "MAX_SILENCE_S"):
        monkeypatch.setattr(core, name, 86400.0)
    monkeypatch.setattr(state, "MAX_SILENCE_S", 86400.0)
    kept: Any = {"keep_alive_s": 86400.0}  # nothing but the stop wakes a stream
    pipeline.stop_worker("decode-0")
    body = {"model": "formula", "prompt": "x", "max_tokens": 50, "stream": True}
    with pipeline.gateway(gateway=kept) as gateway, gateway.client() as http:
        answer = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
    assert b"gateway_stopping" in answer.read()


def test_what_a_gateway_did_not_expect_is_raised(pipeline: TestPipeline) -> None:
    def fail() -> None:
        with pipeline.gateway() as gateway, gateway.client() as http:
            gateway.app.add_api_route("/broken", lambda: 1 // 0)
            assert http.get("/broken").status_code == 500

    with pytest.raises(ZeroDivisionError):
        fail()
