"""What lm-eval's model `local-completions` sends and takes from the answers, beside transformers in float32.

The bodies are those that lm-eval 0.4.13 sends, and the log likelihoods are computed from the answers as it does that.
"""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.files import DEMO_MODEL
from sim.workload import load_demo_model

CHOICES = [
    ("And the king said unto the", " people"),
    ("And the king said unto the", " Philistines, and"),
    ("In the beginning God created the heaven and the", " earth"),
    ("The LORD is my", "\nrock"),
    ("Then went he down, and dwelt in the", " élan"),
]
TEXT = "The LORD is my shepherd; I shall not want"
MAX_ERROR = 1e-5
"""Of one token's log probability: the gateway rounds to six digits, and sums have another order in other kernels."""


class PlainModel:
    """The demo model in transformers."""

    def __init__(self) -> None:
        self.module: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def score_tokens(self, prompt: Sequence[int], num_context: int) -> tuple[float, bool]:
        """Return the log likelihood of the tokens after the context, and whether each is the likeliest one."""
        with torch.inference_mode():
            logprobs = self.module(torch.tensor([prompt])).logits[0].log_softmax(-1)
        places = range(num_context, len(prompt))
        is_greedy = all(int(logprobs[place - 1].argmax()) == prompt[place] for place in places)
        return sum(float(logprobs[place - 1, prompt[place]]) for place in places), is_greedy

    def generate_tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the likeliest continuation."""
        with torch.inference_mode():
            output = self.module.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False)
        return [int(token) for token in output[0, len(prompt) :]]


@pytest.fixture(scope="module")
def plain_model() -> PlainModel:
    return PlainModel()


def ask(base_url: str, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer."""
    answer = httpx.post(f"{base_url}/v1/completions", json={"model": "demo", **body}, timeout=None).raise_for_status()
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def read_likelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Return a log likelihood, and whether the text is the greedy one, as lm-eval reads them."""
    logprobs = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    is_greedy = all(value == max(top.values()) for value, top in zip(logprobs, tops, strict=True))
    return sum(logprobs), is_greedy


def test_log_likelihoods_are_those_of_transformers(base_url: str, plain_model: PlainModel) -> None:
    tokenizer = load_demo_model().tokenizer
    prompts = [tokenizer(text + choice)["input_ids"] for text, choice in CHOICES]
    contexts = [len(tokenizer(text)["input_ids"]) for text, _ in CHOICES]
    # A rolling likelihood is that of the whole text, after the token that begins texts.
    prompts.append([tokenizer.bos_token_id, *tokenizer(TEXT)["input_ids"]])
    contexts.append(1)
    found = ask(base_url, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    for prompt, num_context, choice in zip(prompts, contexts, found, strict=True):
        likelihood, is_greedy = read_likelihood(choice, num_context)
        expected, expected_greedy = plain_model.score_tokens(prompt, num_context)
        assert likelihood == pytest.approx(expected, abs=MAX_ERROR * len(prompt))
        assert is_greedy == expected_greedy
    assert {read_likelihood(*pair)[1] for pair in zip(found, contexts, strict=True)} == {True, False}


def test_texts_until_a_stop_are_those_of_transformers(base_url: str, plain_model: PlainModel) -> None:
    tokenizer = load_demo_model().tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in dict(CHOICES)]
    found = ask(base_url, prompt=prompts, max_tokens=24, temperature=0, stop=["\n", "."], seed=1234)
    for prompt, choice in zip(prompts, found, strict=True):
        text = tokenizer.decode(plain_model.generate_tokens(prompt, 24), skip_special_tokens=True)
        assert choice["text"] == text.split("\n")[0].split(".")[0]
