"""`echo` and `prompt_logprobs` of `/v1/completions`, as evaluation harnesses ask for them, through a whole pipeline."""

from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import PenstockError
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import CHAT, COMPLETIONS
from penstock.ingest.openai.completions import join_prompt_text
from penstock.messages import PromptToken
from sim.workload import load_demo_model

pytestmark = pytest.mark.proof
TEXT = "In the beginning God created é😀 the heaven"


def test_text_and_token_ids_are_echoed_with_their_log_probabilities(sdk: Any) -> None:
    ids = load_demo_model().tokenizer(TEXT)["input_ids"]
    asked = {"model": "demo", "temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 1}
    by_text = sdk.completions.create(prompt=TEXT, **asked).choices[0]
    by_ids, other = sdk.completions.create(prompt=[ids, ids[:5]], **asked).choices
    assert by_text.model_copy(update={"index": 0}) == by_ids.model_copy(update={"index": 0})
    lists = by_ids.logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(ids) + 1
    assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    assert by_ids.text.startswith(TEXT)
    assert by_ids.text == TEXT + lists.tokens[-1]
    # A token that is the likeliest one has its log probability.
    for token, value, top in list(zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True))[1:]:
        ((best, best_value),) = top.items()
        assert value == best_value if token == best else value <= best_value
    # Without kernels the last bits depend on what else is computed.
    assert other.logprobs.token_logprobs[1:5] == pytest.approx(lists.token_logprobs[1:5], abs=1e-4)


CHOICES = [
    ("And the king said unto the", " people"), ("And the king said unto the", " Philistines, and"),
    ("In the beginning God created the heaven and the", " earth"), ("The LORD is my", "\nrock"),
    ("Then went he down, and dwelt in the", " élan"),
]  # fmt: skip
ROLLING = "The LORD is my shepherd; I shall not want"
MAX_ERROR = 1e-5
"""Of one token's log probability: the gateway rounds to six digits, and sums have another order in other kernels."""


def read_likelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Return a log likelihood, and whether the text is the greedy one, as lm-eval reads them."""
    logprobs = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(logprobs), all(value == max(top.values()) for value, top in zip(logprobs, tops, strict=True))


def test_log_likelihoods_are_those_of_transformers(base_url: str) -> None:
    """The body is the one that `local-completions` of lm-eval 0.4.13 sends."""
    tokenizer = load_demo_model().tokenizer
    module: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    # A rolling likelihood is that of the whole text, after the token that begins texts.
    cases = [([tokenizer.bos_token_id, *tokenizer(ROLLING)["input_ids"]], 1)]
    cases += [(tokenizer(text + choice)["input_ids"], len(tokenizer(text)["input_ids"])) for text, choice in CHOICES]
    asked = {"model": "demo", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body = asked | {"prompt": [prompt for prompt, _ in cases]}
    answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=None).raise_for_status().json()
    found, is_greedy = sorted(answer["choices"], key=lambda one: one["index"]), set()
    for (prompt, num_context), choice in zip(cases, found, strict=True):
        with torch.inference_mode():
            expected = module(torch.tensor([prompt])).logits[0].log_softmax(-1)
        places = range(num_context, len(prompt))
        likelihood, greedy = read_likelihood(choice, num_context)
        wanted = sum(float(expected[place - 1, prompt[place]]) for place in places)
        assert likelihood == pytest.approx(wanted, abs=MAX_ERROR * len(prompt))
        assert greedy == all(int(expected[place - 1].argmax()) == prompt[place] for place in places)
        is_greedy.add(greedy)
    assert is_greedy == {True, False}


def test_no_token_is_returned_where_none_is_asked_for(sdk: Any) -> None:
    asked = {"model": "demo", "prompt": TEXT, "temperature": 0, "echo": True, "max_tokens": 0}
    num_tokens = len(load_demo_model().tokenizer(TEXT)["input_ids"])
    choice = sdk.completions.create(**asked, logprobs=2).choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert len(choice.logprobs.tokens) == num_tokens
    assert sdk.completions.create(**asked).choices[0].text == TEXT


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_begins_with_the_prompt(sdk: Any, max_tokens: int) -> None:
    asked = {"model": "demo", "prompt": TEXT, "temperature": 0, "echo": True, "logprobs": 1}
    whole = sdk.completions.create(**asked, max_tokens=max_tokens).choices[0]
    pieces = [piece.choices[0] for piece in sdk.completions.create(**asked, max_tokens=max_tokens, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    tokens = [token for piece in pieces if piece.logprobs is not None for token in piece.logprobs.tokens or ()]
    assert tokens == whole.logprobs.tokens


def test_prompt_logprobs_are_in_the_form_of_vllm(sdk: Any) -> None:
    asked = {"model": "demo", "prompt": TEXT, "max_tokens": 2, "temperature": 0}
    choice = sdk.completions.create(**asked, extra_body={"prompt_logprobs": 3}).choices[0]
    ids = load_demo_model().tokenizer(TEXT)["input_ids"]
    first, *others = choice.model_dump()["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token, places in zip(ids[1:], others, strict=True):
        assert str(token) in places
        assert 3 <= len(places) <= 4
        assert {1, 2, 3} <= {entry["rank"] for entry in places.values()}
        assert min(entry["logprob"] for entry in places.values()) >= -9999
    assert not choice.text.startswith(TEXT)
    assert choice.logprobs is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_tokens": 0}, None),
        ({"prompt_logprobs": 1, "stream": True}, None),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_had_is_refused(given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        COMPLETIONS.parse_body({"model": "demo", "prompt": "x", **given})
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_chat_has_none() -> None:
    with pytest.raises(PenstockError, match=r"'prompt_logprobs': .*/v1/completions"):
        CHAT.parse_body({"model": "demo", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1})


def test_characters_that_tokens_share_are_put_together() -> None:
    parts = "é".encode()
    tokens = [
        PromptToken(token=1, text="a"),
        *(PromptToken(token=2, logprob=-1.0, text="\ufffd", bytes=[part]) for part in parts),
        PromptToken(token=3, logprob=-1.0),
    ]
    assert join_prompt_text(tokens) == "aé"
