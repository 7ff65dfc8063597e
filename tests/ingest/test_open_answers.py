"""Answers without a limit: what is asked of the pipeline, what is reserved for them, and where they end."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.client.core import make_request
from penstock.ingest.admission import estimate_open_output
from penstock.ingest.batch.answer import BatchJob, apply_terms
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import ENDPOINTS
from penstock.ingest.openai.endpoint import NO_TOKEN_LIMIT, SubmitArgs, cap_open_answers
from penstock.ingest.tenants import Caller
from penstock.messages import DEFAULT_MAX_TOKENS, MAX_LOGPROBS

TURNS: list[Any] = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": TURNS}
RESPONSE: dict[str, Any] = {"input": "hello"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}


def asks(name: str, **body: Any) -> list[SubmitArgs]:
    endpoint = ENDPOINTS[f"/v1/{name}"]
    return endpoint.make_requests(endpoint.parse_body({"model": "demo"} | body), "r")


@pytest.mark.parametrize(
    ("name", "body", "most", "fits"),
    [
        ("chat/completions", CHAT, NO_TOKEN_LIMIT, True),
        ("chat/completions", CHAT | {"max_tokens": None}, NO_TOKEN_LIMIT, True),
        ("chat/completions", CHAT | {"max_tokens": 9}, 9, None),
        ("chat/completions", CHAT | {"max_completion_tokens": 9}, 9, None),
        ("chat/completions", CHAT | {"logprobs": True}, MAX_LOGPROBS, True),
        ("responses", RESPONSE, NO_TOKEN_LIMIT, True), ("responses", RESPONSE | {"max_output_tokens": 9}, 9, None),
        ("responses", RESPONSE | LOGPROBS, MAX_LOGPROBS // 21, True), ("completions", {"prompt": "hello"}, 16, None),
    ],
)  # fmt: skip
def test_without_a_limit_chats_and_responses_may_fill_the_context(
    name: str, body: dict[str, Any], most: int, fits: bool | None
) -> None:
    (ask,) = asks(name, **body)
    fields = ask.copy()
    sampling = make_request(fields.pop("prompt", None), fields).sampling
    assert (sampling.max_tokens, sampling.fit_context) == (most, fits)


@pytest.mark.proof
def test_a_tenants_limit_ends_answers_that_have_none() -> None:
    def capped(most: int | None, **body: Any) -> list[int]:
        made = asks("chat/completions", **CHAT, **body)
        cap_open_answers(made, most)
        return [ask["max_tokens"] for ask in made]

    assert capped(None) == [NO_TOKEN_LIMIT]
    assert capped(50) == [50]
    assert capped(50, n=4) == [12] * 4
    assert capped(2, n=4) == [1] * 4, "too many for the limit, which admission says"
    assert capped(50, max_tokens=60) == [60], "refused by admission"

    async def no_lines() -> AsyncIterator[bytes]:
        yield b""

    batch = BatchJob(("/v1/chat/completions",), no_lines, 1.0, name="b", max_request_tokens=50)
    assert apply_terms(asks("chat/completions", **CHAT)[0], batch)["max_tokens"] == 50
    with pytest.raises(ApiError) as refused:
        apply_terms(asks("chat/completions", **CHAT, max_tokens=60)[0], batch)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("num_open", "mean", "per_min", "expected"),
    [
        (0, 40.0, None, 0), (1, None, None, DEFAULT_MAX_TOKENS), (1, 40.4, None, 40), (3, 40.4, None, 120),
        (1, 40.0, 1000, 40), (1, 40.0, 130, 30), (1, 40.0, 90, 0),
    ],
)  # fmt: skip
def test_as_much_is_reserved_as_answers_lately_took(
    num_open: int, mean: float | None, per_min: int | None, expected: int
) -> None:
    assert estimate_open_output(Caller(tokens_per_min=per_min), 100, NO_TOKEN_LIMIT, num_open, mean) == expected
    assert estimate_open_output(Caller(tokens_per_min=per_min), 100, 5, num_open, mean) == min(5, expected)
