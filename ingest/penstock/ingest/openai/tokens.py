"""Usage and log probabilities in OpenAI's form."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from penstock.client.core import Answer
from penstock.messages import EndEvent, Logprobs, PromptToken, TokenLogprob, Usage

CHARS_PER_TOKEN = 4
"""An estimate: to tokenize takes longer than it is worth. The real usage is known at the end."""


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV was found and not computed."""


class CompletionUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def make_completion_usage(usages: Sequence[Usage], n: int = 1) -> CompletionUsage:
    """Return the sum over all choices; a prompt that `n` choices share counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    details = PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in usages[::n]))
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=details,
    )


def sum_usage(usages: Iterable[Usage]) -> Usage:
    """Return the usage of several requests together."""
    used = list(usages)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in used),
        cached_tokens=sum(usage.cached_tokens for usage in used),
        completion_tokens=sum(usage.completion_tokens for usage in used),
    )


def finish_reason(end: Answer | EndEvent) -> Literal["stop", "length"]:
    """Return why an answer ended."""
    return "length" if end.finish_reason == "length" else "stop"


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


def token_text(one: Logprobs | TokenLogprob | PromptToken, token: int) -> str:
    r"""Return a token as text; a part of a character as OpenAI writes it, `bytes:\xf0\x9f`."""
    if one.bytes is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.bytes)
    return f"token_id:{token}" if one.text is None else one.text


def _encode_logprob(one: Logprobs | TokenLogprob, token: int) -> dict[str, Any]:
    text = token_text(one, token)
    spelled = list(text.encode()) if one.bytes is None else one.bytes
    return {"token": text, "logprob": one.logprob, "bytes": spelled}


def encode_logprobs(told: Logprobs, token: int) -> dict[str, Any]:
    """Return one token's `TokenLogprobs` as JSON data."""
    return {**_encode_logprob(told, token), "top_logprobs": [_encode_logprob(one, one.token) for one in told.top]}


def encode_answer_logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Return the `TokenLogprobs` of an answer's tokens as JSON data; none if they were not asked for."""
    if not answer.logprobs:
        return []
    # An endpoint tells its tokens as text, without ids.
    ids = answer.token_ids or [0] * len(answer.logprobs)
    return [encode_logprobs(one, token) for one, token in zip(answer.logprobs, ids, strict=True)]
